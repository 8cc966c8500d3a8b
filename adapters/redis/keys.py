"""How a shard lies in Redis: its keys, and the score by which what waits is sorted. Pure.

A shard of a queue is six keys and a bell, all in one hash slot, so that one script may change them together:

| key | type | |
|---|---|---|
| `waiting` | sorted set | id → score: what can be taken, now or later |
| `body` | hash | id → the event's bytes |
| `claimed` | sorted set | id → when its claim ends, in ms: taken by a consumer |
| `held` | sorted set | id → offset: taken by the reader of the queue, which is an agent |
| `lease` | hash | id → "token attempts score" of the last time it was taken |
| `meta` | hash | counters: `counter`, `token`, `reader`, `done` |
| `bell` | list | one element where something was pushed: who waits blocks on it |

A score is `band * 2^46 + due`: the band is 99 minus the priority, `due` is in ms since 1970. So a band is one range,
and in it the due ones come first. 2^46 ms are 2,200 years, and 99 bands of it fit the 53 bits of a double exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from ...streams.errors import InvalidArgument

BAND = 1 << 46
LOWEST, HIGHEST = 0, 99
MAX_DELAY_MS = 1 << 45
"""About a thousand years."""


class ShardKeys(NamedTuple):
    """In the order in which the scripts get them."""

    meta: str
    waiting: str
    body: str
    claimed: str
    held: str
    lease: str
    bell: str

    @classmethod
    def of(cls, prefix: str, queue: str, shard: str) -> ShardKeys:
        """Keys that share a hash tag: what is in braces decides the slot of Redis Cluster."""
        tag = f"{{{prefix}:{queue}:{shard}}}"
        return cls(*(f"{tag}{name}" for name in cls._fields))

    def sent(self, pusher: str) -> str:
        """Where the last push of one pusher is remembered, for a while."""
        return f"{self.meta}:sent:{pusher}"


def provider_key(prefix: str, provider: str) -> str:
    """Where each server has whose queues are in it, and how many."""
    return f"{{{prefix}:{provider}}}provider"


def check_name(what: str, name: str) -> str:
    """A part of a key. Raises InvalidArgument for one that would end the hash tag or a part early."""
    if not name or not name.isprintable() or set(name) & set("{}: "):
        raise InvalidArgument(f"{what} {name!r} is no name: printable, not empty, without blanks, colons and braces")
    return name


def check_queue(name: str) -> str:
    """The name of a `RedisQueue`. Raises InvalidArgument for one whose keys are those of a provider's queue, too."""
    check_name("queue", name)
    if name.partition(".")[1] and name.rpartition(".")[2].isdecimal():
        raise InvalidArgument(
            f"queue {name!r} would be one of a provider: choose a name that ends in no dot and number"
        )
    return name


def check_id(id: str) -> str:  # noqa: A002 (the word of the field)
    """Raises InvalidArgument for one that an event without an id may be given."""
    if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance] (callers need not have types)
        raise InvalidArgument(f"an id is a text, not {id!r}")
    if id.startswith("@") and id[1:].isdecimal():
        raise InvalidArgument(
            f"the id {id!r} is one that a queue gives by itself: choose one that is not @ and a number"
        )
    return id


def ranked(names: Iterable[str], what: str) -> list[str]:
    """The names of servers in an order that depends on `what` alone: the first is where it belongs. A server that is
    added or taken out moves only what belongs to it."""
    return sorted(names, key=lambda name: hashlib.sha1(f"{name} {what}".encode(), usedforsecurity=False).digest())


def score_of(priority: int, due_ms: int) -> int:
    """Where an event of this priority that is due then stands. Lower goes first."""
    return (HIGHEST - priority) * BAND + due_ms


def priority_of(score: float) -> int:
    return HIGHEST - int(score) // BAND


def due_of(score: float) -> int:
    """In ms since 1970."""
    return int(score) % BAND


def check_priority(priority: int) -> int:
    """Raises InvalidArgument for what is no priority."""
    if type(priority) is not int or not LOWEST <= priority <= HIGHEST:
        raise InvalidArgument(f"a priority is a whole number from {LOWEST} to {HIGHEST}, not {priority!r}")
    return priority


def delay_ms(seconds: float) -> int:
    """A delay in whole milliseconds, rounded up: nothing comes early. Raises InvalidArgument."""
    number = isinstance(seconds, (int, float))  # pyright: ignore[reportUnnecessaryIsInstance] (callers need not have types)
    if not number or not 0 <= seconds <= MAX_DELAY_MS / 1000:  # False for NaN, too
        raise InvalidArgument(f"a delay is a number of seconds, 0 to {MAX_DELAY_MS // 1000:,}, not {seconds!r}")
    return -int(-seconds * 1000 // 1)
