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
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from ...streams.errors import StorageError
from ...streams.identity import SequenceToken
from ...streams.producer_ledger import LastCall, ProducerLedger
from ...streams.publishing import ProducerSequence, Receipt
from ..producer_turns import ProducerTurns
from .keys import ranked
from .limits import RedisLimits
from .pusher import away_backoff
from .scripts import SCRIPTS
from .server import RedisConnection, ServerAway

KEPT_S = 7 * 24 * 3600
"""A producer is forgotten this many seconds after its last call."""

Positions = Sequence[int | None]


class RedisProducers:
    """The idempotent producers of one provider. The names of the servers decide which of them has a producer's ledger,
    so every process chooses the same one, in whatever order its servers are listed. Because servers may be added, the
    others are asked if that one does not know enough."""

    def __init__(self, servers: Mapping[str, RedisConnection], prefix: str, provider: str, limits: RedisLimits) -> None:
        self._servers = servers
        self._prefix = f"{prefix}:{provider}"
        self._turns = ProducerTurns()
        self._ledger = ProducerLedger(limits.cached_producers)
        """The servers' ledgers, as this process saw them last."""

    async def last(self, producer: str) -> int:
        async with self._turns.turn(producer):
            return (await self._read(producer, needed=1)).number

    async def once(
        self, sequence: ProducerSequence, batches: int, store: Callable[[], Awaitable[Positions]]
    ) -> Sequence[Receipt]:
        """Call `store`, unless the call was stored before. Raises SequenceConflict for a hole."""
        async with self._turns.turn(sequence.producer):
            last = self._ledger.known(sequence.producer)
            if last is None or not last.accepts(sequence):  # another process may have stored later calls
                last = await self._read(sequence.producer, needed=sequence.previous)
            if not last.accepts(sequence):
                return last.answer(sequence, batches)
            positions = await store()
            await self._write(sequence, positions)
            self._ledger.record(sequence.producer, LastCall(sequence.number, positions))
            return [Receipt(_token(position), duplicate=position is None) for position in positions]

    async def _read(self, producer: str, needed: int) -> LastCall:
        """Return the last call by the servers' ledgers. Ask all servers if the first one knows no call, or not the call
        `needed`."""
        first, *others = [self._servers[name] for name in ranked(self._servers, producer)]
        last = await self._ask(first, producer)
        if others and not (last.number and last.number >= needed):
            last = await self._ask_all(last, others, producer, needed)
        self._ledger.record(producer, last)
        return last

    async def _ask_all(self, last: LastCall, others: Sequence[RedisConnection], producer: str, needed: int) -> LastCall:
        answers = await asyncio.gather(*(self._ask(other, producer) for other in others), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        found = [answer for answer in answers if isinstance(answer, LastCall)]
        last = max([last, *found], key=lambda each: each.number)
        # A new producer does not wait for all servers. One that has published before waits, rather than being refused.
        if errors and (last.number < needed or any(not isinstance(error, ServerAway) for error in errors)):
            raise errors[0]
        return last

    async def _ask(self, server: RedisConnection, producer: str) -> LastCall:
        number, positions = await server.run(SCRIPTS.ledger, self._keys(producer), KEPT_S)
        return LastCall(int(number or 0), msgspec.json.decode(positions, type=list[int | None]) if positions else ())

    async def _write(self, sequence: ProducerSequence, positions: Positions) -> None:
        server, encoded = self._servers[ranked(self._servers, sequence.producer)[0]], msgspec.json.encode(positions)
        await server.run(SCRIPTS.record, self._keys(sequence.producer), str(sequence.number), encoded, KEPT_S)

    def _keys(self, producer: str) -> Sequence[str]:
        """Return the ledger's key in the place of a shard's keys; scripts use only the first."""
        return [f"{{{self._prefix}:producer:{hashed_name(producer)}}}"] * 7


def hashed_name(producer: str) -> str:
    """Return a hash of a producer's name as a part of a key: the name may have any characters."""
    return hashlib.sha1(producer.encode(), usedforsecurity=False).hexdigest()


async def push_with_retries(push: Callable[[], Awaitable[Positions]], *, wait: bool, timeout_s: float) -> Positions:
    """Push, and repeat it while the server is away. Raises StorageError after `timeout_s`; without `wait`, at once."""
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
