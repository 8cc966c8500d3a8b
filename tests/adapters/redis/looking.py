"""What tests see of a shard from outside: its clock, and whether its keys agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from redis import Redis

from headrace.adapters.redis.keys import ShardKeys
from headrace.adapters.redis.scripts import RedisScripts

CLOCK = "local now_us = tonumber(redis.call('HGET', KEYS[1], 'now_us') or '0')"


@cache
def scripts_of_tests() -> RedisScripts:
    """The scripts as they are, except that they read the time from a key of the shard."""
    return RedisScripts.with_clock(CLOCK)


class Clock:
    """The time of some shards, which stands still unless it is moved."""

    def __init__(self, direct: Redis, keys: Sequence[ShardKeys], start_s: float = 1_000_000.0) -> None:
        self._direct = direct
        self._keys = keys
        self.now_s = start_s
        self.advance(0)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for keys in self._keys:
            self._direct.hset(keys.meta, "now_us", str(round(self.now_s * 1e6)))


def check_agreement(direct: Redis, keys: ShardKeys) -> dict[str, set[str]]:
    """Every event has its bytes and one place, and nothing else is left of any. Returns the ids by place."""
    before, found = None, _sets(direct, keys)
    while found != before:  # producers go on: what is equal twice was there at one moment
        before, found = found, _sets(direct, keys)
    bodies, leases = found.pop("body"), found.pop("lease")
    places = found
    anywhere = {each for ids in places.values() for each in ids}
    assert sum(map(len, places.values())) == len(anywhere), "an event in two places"
    assert anywhere == bodies
    assert places["claimed"] | places["held"] <= leases <= bodies
    return {name: {each.decode() for each in ids} for name, ids in places.items()}


def _sets(direct: Redis, keys: ShardKeys) -> dict[str, set[bytes]]:
    server = cast("Any", direct)
    sets = {name: set(server.zrange(getattr(keys, name), 0, -1)) for name in ("waiting", "claimed", "held")}
    return sets | {name: set(server.hkeys(getattr(keys, name))) for name in ("body", "lease")}
