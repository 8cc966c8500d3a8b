"""Stores each call of an idempotent producer once.

A producer's calls are stored one after the other. Each shard remembers the last stored number of every producer
(`RedisShard.push`). A ledger, one key per producer, remembers the last call that is stored as a whole. So a call that
was stored in some queues and not in others is completed when it is sent again.

Until a call is in the ledger, the shards remember it as long as a ledger is kept, because it may be sent again that
late. After that they remember it for an hour, because a frozen server may carry out a command late. So a producer that
has ended costs one key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from ...streams.errors import SequenceConflict, StorageError
from ...streams.identity import SequenceToken
from ...streams.publishing import ProducerSequence, Receipt
from .keys import ranked
from .pusher import away_backoff
from .scripts import SCRIPTS
from .server import RedisConnection, ServerAway

KEPT_S = 7 * 24 * 3600
"""A producer is forgotten this many seconds after its last call."""
MAX_CACHED = 10_000

Positions = Sequence[int | None]


class _Entry(NamedTuple):
    """The content of a ledger."""

    number: int = 0
    """The last call that is stored as a whole; 0 if there is none."""
    positions: Positions = ()


class _ProducerCalls:
    """A producer's calls, one at a time, and the last known entry of its ledger."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        """Calls that hold the lock or wait for it."""
        self.known: _Entry | None = None


class Producers:
    """The idempotent producers of one provider. The names of the servers decide which of them has a producer's ledger,
    so every process chooses the same one, in whatever order its servers are listed. Because servers may be added, the
    others are asked if that one does not know enough."""

    def __init__(self, servers: Mapping[str, RedisConnection], prefix: str, provider: str) -> None:
        self._servers = servers
        self._prefix = f"{prefix}:{provider}"
        self._lines: dict[str, _ProducerCalls] = {}

    async def last(self, producer: str) -> int:
        async with self._line(producer) as line:
            line.known = await self._read(producer, needed=1)
            return line.known.number

    async def once(
        self, sequence: ProducerSequence, batches: int, store: Callable[[], Awaitable[Positions]]
    ) -> Sequence[Receipt]:
        """Call `store`, unless the call was stored before. Raises SequenceConflict for a hole."""
        async with self._line(sequence.producer) as line:
            if line.known is None or line.known.number != sequence.previous or sequence.number <= sequence.previous:
                # another process may have stored later calls
                line.known = await self._read(sequence.producer, needed=sequence.previous)
            last = line.known.number
            if sequence.number <= last:
                known = line.known.positions if sequence.number == last else [None] * batches
                return [Receipt(_token(position), duplicate=True) for position in known]
            if sequence.previous != last:
                raise SequenceConflict(
                    f"producer {sequence.producer!r}: call {sequence.number} follows {sequence.previous}, but the last "
                    f"one stored is {last}: send those in between first"
                )
            positions = await store()
            await self._write(sequence, positions)
            line.known = _Entry(sequence.number, positions)
            return [Receipt(_token(position), duplicate=position is None) for position in positions]

    @asynccontextmanager
    async def _line(self, producer: str) -> AsyncGenerator[_ProducerCalls]:
        """Let one call of the producer run at a time."""
        if len(self._lines) > MAX_CACHED:
            self._lines = {name: line for name, line in self._lines.items() if line.users}
        line = self._lines.setdefault(producer, _ProducerCalls())
        line.users += 1
        try:
            async with line.lock:
                yield line
        finally:
            line.users -= 1

    async def _read(self, producer: str, needed: int) -> _Entry:
        """Return the ledger's entry. If the first server knows no call, or not the call `needed`, ask all servers."""
        first, *others = [self._servers[name] for name in ranked(self._servers, producer)]
        entry = await self._ask(first, producer)
        if not others or (entry.number and entry.number >= needed):
            return entry
        answers = await asyncio.gather(*(self._ask(other, producer) for other in others), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        entry = max(entry, *(answer for answer in answers if isinstance(answer, _Entry)), key=lambda each: each.number)
        # A new producer does not wait for all servers. One that has published before waits, rather than being refused.
        if errors and (entry.number < needed or any(not isinstance(error, ServerAway) for error in errors)):
            raise errors[0]
        return entry

    async def _ask(self, server: RedisConnection, producer: str) -> _Entry:
        number, positions = await server.run(SCRIPTS.ledger, self._keys(producer), KEPT_S)
        return _Entry(int(number or 0), msgspec.json.decode(positions, type=list[int | None]) if positions else ())

    async def _write(self, sequence: ProducerSequence, positions: Positions) -> None:
        server, encoded = self._servers[ranked(self._servers, sequence.producer)[0]], msgspec.json.encode(positions)
        await server.run(SCRIPTS.record, self._keys(sequence.producer), str(sequence.number), encoded, KEPT_S)

    def _keys(self, producer: str) -> Sequence[str]:
        """Return the ledger's key in the place of a shard's keys; scripts use only the first."""
        return [f"{{{self._prefix}:producer:{short(producer)}}}"] * 7


def short(producer: str) -> str:
    """Return a producer's name, with any characters in it, as a part of a key."""
    return hashlib.sha1(producer.encode(), usedforsecurity=False).hexdigest()


async def persistently(push: Callable[[], Awaitable[Positions]], *, wait: bool, timeout_s: float) -> Positions:
    """Push, and repeat it while the server is away. Raises StorageError after `timeout_s`."""
    loop, backoff = asyncio.get_running_loop(), away_backoff()
    deadline = loop.time() + (timeout_s if wait else 0)
    while True:
        try:
            return await push()
        except ServerAway as error:
            if loop.time() >= deadline:
                raise StorageError(
                    f"{error}; these events may or may not be stored, publish them again with the same sequence"
                ) from None
        await asyncio.sleep(backoff.next_s())


def _token(position: int | None) -> SequenceToken | None:
    return None if position is None else SequenceToken(position)
