"""Reads one queue for its agent: holds what is due, under offsets that only grow, until it is acknowledged.

What an agent has is not claimed for a time: it is held for the queue's reader, and the lease of the queue says who
that is. A new reader supersedes the one before, and begins with what that one has left, under the same offsets: so a
position in the queue means the same to both.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from struct import Struct

from ...streams.errors import Closed, StorageError
from ...streams.events import EventBatch
from ..limits import within_limits
from ..seam import QueueReceiver, Received
from .bell import Bell, idle
from .server import BLOCK_S, ServerAway, end
from .shard import MAX_POP, MAX_POP_BYTES
from .watch import Watch

log = logging.getLogger("headrace.adapters.redis")

COUNT = Struct("<I")
"""What a body begins with: how many events its batch has."""
SUPERSEDED_S = 5.0
"""After so long, a receiver that was superseded ends, and its agent may open another."""
TURNS = 8
"""A shard that is passed over so often goes first once."""


class Seat:
    """A receiver's place at one shard."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.shard = watch.shard
        self.bell = Bell(watch.shard)
        self.reader: int | None = None
        """None: not opened yet, its server is away."""
        self.next = 0
        """Everything held below was received."""
        self.passed_over = 0


class RedisReceiver(QueueReceiver):
    """Opened by the adapter, with `open`. The first of the shards is read first."""

    def __init__(self, queue: int, shards: Sequence[Watch]) -> None:
        self._queue = queue
        self.seats = [Seat(watch) for watch in shards]
        self._next = 0
        """No offset from now on is below."""
        self._given = 0
        """Everything below was given to who receives."""
        self._left: AsyncGenerator[tuple[int, bytes]] | None = None
        """What earlier readers have left."""
        self._ready: deque[EventBatch] = deque()
        self._fetching: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._superseded_at: float | None = None

    async def open(self) -> None:
        """Become the queue's reader. Raises StorageError where no server answers."""
        outcomes = await asyncio.gather(*(self._sit(seat) for seat in self.seats), return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        if len(errors) == len(self.seats) or any(not isinstance(error, ServerAway) for error in errors):
            raise errors[0]
        for error in errors:
            log.warning("queue %d is read without one of its shards: %s", self._queue, error)
        self._left = self._merged(0)

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while not self._ready:
            self._check_open()
            if self._fetching is None:
                fetching = self._fetch(min(max_events, MAX_POP), min(max_bytes, MAX_POP_BYTES))
                self._fetching = asyncio.create_task(fetching, name=f"headrace redis queue {self._queue}")
            # Not cancelled with who waits for it: what it takes is held, and is for the next who asks.
            await asyncio.wait([self._fetching, self._closed], return_when=asyncio.FIRST_COMPLETED)
            self._check_open()
            if self._fetching.done():
                fetched, self._fetching = self._fetching, None
                fetched.result()
        self._check_open()
        taken = list(within_limits(self._ready, max_events, max_bytes))
        for _ in taken:
            self._ready.popleft()
        self._given = taken[-1].offset + 1
        return Received(taken, self._given)

    async def acknowledge(self, offset: int) -> None:
        """As the seam says. Raises StorageError where one of the servers is away: then call it again."""
        outcomes = await asyncio.gather(*(self._finish(seat, offset) for seat in self.seats), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error

    async def _finish(self, seat: Seat, offset: int) -> None:
        reader = seat.reader
        if reader is None:
            return
        below = min(offset, seat.next)
        if not await seat.watch.ask(lambda: seat.shard.finish(reader, below, offset)):
            self._supersede()

    async def aclose(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if self._fetching is not None:
            await end(self._fetching)
        if self._left is not None:
            await self._left.aclose()
        await asyncio.gather(*(seat.bell.aclose() for seat in self.seats))

    @property
    def closed(self) -> bool:
        return self._closed.done()

    def _check_open(self) -> None:
        if self._closed.done():
            raise Closed(f"the receiver of queue {self._queue} is closed")
        if self._superseded_at is None:
            return
        if asyncio.get_running_loop().time() - self._superseded_at > SUPERSEDED_S:
            raise Closed(f"queue {self._queue} was opened by another reader")
        raise StorageError(f"queue {self._queue} is read by another process: serve it by a cluster, or by one silo")

    def _supersede(self) -> None:
        if self._superseded_at is None:
            self._superseded_at = asyncio.get_running_loop().time()

    # ---- what was left ---------------------------------------------------------------------------------------------

    async def _sit(self, seat: Seat) -> None:
        """Become the reader of one shard, and go on above all positions that anybody was told."""
        seat.reader = await seat.watch.ask(seat.shard.open_reader)
        self._next = max(self._next, (await seat.watch.ask(seat.shard.bounds))[1])

    async def _merged(self, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        """What is held at `start` and above, in the order of the offsets."""
        sources = [self._held(seat, start) for seat in self.seats if seat.reader is not None]
        heads: list[tuple[int, bytes, int]] = []
        for index, source in enumerate(sources):
            async for offset, body in source:
                heapq.heappush(heads, (offset, body, index))
                break
        while heads:
            offset, body, index = heads[0]
            yield offset, body
            heapq.heappop(heads)
            async for following, more in sources[index]:
                heapq.heappush(heads, (following, more, index))
                break

    async def _held(self, seat: Seat, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        while (reader := seat.reader) is not None:
            ask = partial(seat.shard.held, reader, start, MAX_POP, MAX_POP_BYTES)
            try:
                held = await seat.watch.ask(ask)
            except ServerAway:
                if len(self.seats) == 1:
                    raise
                seat.reader = None  # the others go on; what is left there comes later, under new offsets
                return
            if held is None:
                self._supersede()
            if held is None or not held.events:
                return
            for offset, body in held.events:
                seat.next = start = offset + 1
                yield offset, body

    # ---- what is due -----------------------------------------------------------------------------------------------

    async def _fetch(self, max_events: int, max_bytes: int) -> None:
        """Bring what is there, waiting until there is something."""
        while not self._ready and self._superseded_at is None:
            if self._left is not None:
                await self._fetch_left(self._left, max_events, max_bytes)
                continue
            idle_s = await self._fetch_due(max_events, max_bytes)
            if idle_s and not self._ready:
                await idle([seat.bell for seat in self.seats], idle_s)

    async def _fetch_left(self, left: AsyncGenerator[tuple[int, bytes]], max_events: int, max_bytes: int) -> None:
        start = 0
        try:
            async for offset, body in left:
                batch, start = batch_of(offset, body), offset + 1
                self._ready.append(batch)
                max_events -= batch.count
                max_bytes -= batch.nbytes
                if max_events <= 0 or max_bytes <= 0:
                    return
        except StorageError:
            self._left = self._merged(max(start, self._given))
            raise
        self._left = None

    async def _fetch_due(self, max_events: int, max_bytes: int) -> float:
        """From the first shard that has something. Returns how long there will be nothing."""
        idle_s, errors = BLOCK_S, list[ServerAway]()
        for seat in self._order():
            try:
                seat_idle_s = await self._hold(seat, max_events, max_bytes)
            except ServerAway as error:
                errors.append(error)
                continue
            if self._ready or self._superseded_at is not None:
                self._pass_over(seat)
                return 0.0
            idle_s = min(idle_s, seat_idle_s)
        if len(errors) == len(self.seats):
            raise StorageError(str(errors[0]))
        return idle_s

    async def _hold(self, seat: Seat, max_events: int, max_bytes: int) -> float:
        if seat.reader is None:  # its server is back: what was left there comes under new offsets
            await self._sit(seat)
        assert seat.reader is not None
        ask = partial(seat.shard.hold, seat.reader, seat.next, self._next, max_events, max_bytes)
        held = await seat.watch.ask(ask)
        if held is None:
            self._supersede()
            return 0.0
        for offset, body in held.events:
            self._ready.append(batch_of(offset, body))
            seat.next = self._next = offset + 1
        return held.idle_s

    def _order(self) -> Iterable[Seat]:
        """The shards as they were given, but for one that was passed over too often."""
        return sorted(self.seats, key=lambda seat: seat.passed_over < TURNS)

    def _pass_over(self, chosen: Seat) -> None:
        for seat in self.seats:
            seat.passed_over = 0 if seat is chosen else seat.passed_over + 1


def body_of(batch: EventBatch) -> bytes:
    return COUNT.pack(batch.count) + batch.encoded


def batch_of(offset: int, body: bytes) -> EventBatch:
    """Raises InvalidArgument for bytes that are no batch."""
    return EventBatch.decode(body[COUNT.size :], offset)
