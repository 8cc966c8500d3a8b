"""The keys of a shard in Redis, and the score that sorts its waiting events. Pure functions.

A shard of a queue has six keys and a bell, all in one hash slot, so that one script can change them together:

| key | type | |
|---|---|---|
| `waiting` | sorted set | id → score: events that are not taken, due or not |
| `body` | hash | id → the event's bytes |
| `claimed` | sorted set | id → end of its claim, in ms: events that consumers have taken |
| `held` | sorted set | id → offset: events that the queue's reader, an agent, has taken |
| `lease` | hash | id → "token attempts score" of the last take |
| `meta` | hash | counters: `counter`, `token`, `reader`, `done` |
| `bell` | list | one element after a push: waiting processes block on it |

A score is `band * 2^46 + due`: the band is 99 minus the priority, `due` is in ms since 1970. A band is therefore one
range of scores, and its due events come first. 2^46 ms are 2,200 years; 99 bands fit the 53 bits of a double exactly.
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
    """The keys, in the order of the scripts."""

    meta: str
    waiting: str
    body: str
    claimed: str
    held: str
    lease: str
    bell: str

    @classmethod
    def of(cls, prefix: str, queue: str, shard: str) -> ShardKeys:
        """Return keys that share a hash tag: the text in braces decides the slot of Redis Cluster."""
        tag = f"{{{prefix}:{queue}:{shard}}}"
        return cls(*(f"{tag}{name}" for name in cls._fields))

    def sent(self, pusher: str) -> str:
        """Return the key that remembers the last push of one pusher for a while."""
        return f"{self.meta}:sent:{pusher}"


def provider_key(prefix: str, provider: str) -> str:
    """Return the key that stores the owner and the number of the queues, on each server."""
    return f"{{{prefix}:{provider}}}provider"


def check_name(what: str, name: str) -> str:
    """Return `name` as a part of a key. Raises InvalidArgument if it would end the hash tag or a part early."""
    if not name or not name.isprintable() or set(name) & set("{}: "):
        raise InvalidArgument(
            f"{what} {name!r} is no name: write printable characters, without blanks, colons and braces"
        )
    return name


def check_queue(name: str) -> str:
    """Return the name of a `RedisQueue`. Raises InvalidArgument if its keys could be those of a provider's queue."""
    check_name("queue", name)
    if name.partition(".")[1] and name.rpartition(".")[2].isdecimal():
        raise InvalidArgument(
            f"queue {name!r} would be one of a provider: choose a name that ends in no dot and number"
        )
    return name


def check_id(id: str) -> str:  # noqa: A002 (the word of the field)
    """Raise InvalidArgument for an id that a queue may assign to an event without one."""
    if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance] (callers need not have types)
        raise InvalidArgument(f"an id is a text, not {id!r}")
    if id.startswith("@") and id[1:].isdecimal():
        raise InvalidArgument(
            f"the id {id!r} is one that a queue gives by itself: choose one that is not @ and a number"
        )
    return id


def ranked(names: Iterable[str], what: str) -> list[str]:
    """Rank the names of servers for the key `what`, which belongs to the first (rendezvous hashing). Adding or removing
    a server moves only the keys that belong to it."""
    return sorted(names, key=lambda name: hashlib.sha1(f"{name} {what}".encode(), usedforsecurity=False).digest())


def priority_of(score: float) -> int:
    return HIGHEST - int(score) // BAND


def due_of(score: float) -> int:
    """Return the due time in ms since 1970."""
    return int(score) % BAND


def check_priority(priority: int) -> int:
    """Raise InvalidArgument if this is not a priority."""
    if type(priority) is not int or not LOWEST <= priority <= HIGHEST:
        raise InvalidArgument(f"a priority is a whole number from {LOWEST} to {HIGHEST}, not {priority!r}")
    return priority


def delay_ms(seconds: float) -> int:
    """Return a delay in whole milliseconds, rounded up, so that no event is early. Raises InvalidArgument."""
    number = isinstance(seconds, (int, float))  # pyright: ignore[reportUnnecessaryIsInstance] (callers need not have types)
    if not number or not 0 <= seconds <= MAX_DELAY_MS / 1000:  # False for NaN, too
        raise InvalidArgument(f"a delay is a number of seconds, 0 to {MAX_DELAY_MS // 1000:,}, not {seconds!r}")
    return -int(-seconds * 1000 // 1)
