"""Which calls of which idempotent producers are stored, and that each is stored once.

A producer's calls go one after the other. Each shard remembers the last number of every producer that it has stored
(`RedisShard.push`), and a ledger, which is one key per producer, the last call that is stored as a whole. So a call
that was stored in part, in some queues and not in others, is completed when it is sent again.

The shards remember a call as long as the ledger is kept, for it may be sent again as late. Once it is in the ledger an
hour is enough, for what a frozen server carries out late. So a producer that is gone costs one key.
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
from .pusher import FIRST_PAUSE_S, MAX_PAUSE_S
from .scripts import SCRIPTS
from .server import Server, ServerAway

KEPT_S = 7 * 24 * 3600
"""A producer that published nothing for so long is forgotten, in seconds."""
MAX_CACHED = 10_000

Positions = Sequence[int | None]


class _Entry(NamedTuple):
    """What a ledger says."""

    number: int = 0
    """Of the last call stored as a whole; 0 where there is none."""
    positions: Positions = ()


class _Line:
    """A producer's calls, one at a time, and what is known of the last one stored."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        """Calls that hold the lock or wait for it."""
        self.known: _Entry | None = None


class Producers:
    """Those of one provider. Each one's ledger is on one of the servers, by their names: the same one for every
    process, in whatever order they are given to it. Since servers may be added, the others are asked where that one
    does not know enough."""

    def __init__(self, servers: Mapping[str, Server], prefix: str, provider: str) -> None:
        self._servers = servers
        self._prefix = f"{prefix}:{provider}"
        self._lines: dict[str, _Line] = {}

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
                # another process may have stored some
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
    async def _line(self, producer: str) -> AsyncGenerator[_Line]:
        """For one call alone."""
        if len(self._lines) > MAX_CACHED:
            self._lines = {name: line for name, line in self._lines.items() if line.users}
        line = self._lines.setdefault(producer, _Line())
        line.users += 1
        try:
            async with line.lock:
                yield line
        finally:
            line.users -= 1

    async def _read(self, producer: str, needed: int) -> _Entry:
        """What is known, from all servers where the first does not know of the call `needed`, or of any."""
        first, *others = [self._servers[name] for name in ranked(self._servers, producer)]
        entry = await self._ask(first, producer)
        if not others or (entry.number and entry.number >= needed):
            return entry
        answers = await asyncio.gather(*(self._ask(other, producer) for other in others), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        entry = max(entry, *(answer for answer in answers if isinstance(answer, _Entry)), key=lambda each: each.number)
        # A new producer does not wait for all servers. One that says it is known does: better than to refuse it.
        if errors and (entry.number < needed or any(not isinstance(error, ServerAway) for error in errors)):
            raise errors[0]
        return entry

    async def _ask(self, server: Server, producer: str) -> _Entry:
        number, positions = await server.run(SCRIPTS.ledger, self._keys(producer), KEPT_S)
        return _Entry(int(number or 0), msgspec.json.decode(positions, type=list[int | None]) if positions else ())

    async def _write(self, sequence: ProducerSequence, positions: Positions) -> None:
        server, encoded = self._servers[ranked(self._servers, sequence.producer)[0]], msgspec.json.encode(positions)
        await server.run(SCRIPTS.record, self._keys(sequence.producer), str(sequence.number), encoded, KEPT_S)

    def _keys(self, producer: str) -> Sequence[str]:
        """In the place of a shard's keys; only the first is used."""
        return [f"{{{self._prefix}:producer:{short(producer)}}}"] * 7


def short(producer: str) -> str:
    """A producer's name as a part of a key, whatever is in it."""
    return hashlib.sha1(producer.encode(), usedforsecurity=False).hexdigest()


async def persistently(push: Callable[[], Awaitable[Positions]], *, wait: bool, timeout_s: float) -> Positions:
    """Push as long as the server is away. Raises StorageError when the time is up."""
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    deadline = loop.time() + (timeout_s if wait else 0)
    while True:
        try:
            return await push()
        except ServerAway as error:
            if loop.time() >= deadline:
                raise StorageError(
                    f"{error}; these events may or may not be stored, publish them again with the same sequence"
                ) from None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _token(position: int | None) -> SequenceToken | None:
    return None if position is None else SequenceToken(position)
