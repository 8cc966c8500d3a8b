"""Reads one queue for its agent: holds due events, under increasing offsets, until they are acknowledged.

The agent's events are not claimed for a time: they are held for the queue's reader, which is the owner of the queue's
lease. A new reader supersedes the former one. It begins with the events that the former one has left, under the same
offsets, so a position in the queue means the same to both.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from struct import Struct

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, InvalidArgument, StorageError
from ...streams.events import EventBatch
from ..limits import within_limits
from ..receiving import QueueReceiver, Received
from .bell import ShardBell, wait_for_bell
from .limits import RedisLimits
from .server import ServerAway
from .shard import MAX_POP, MAX_POP_BYTES
from .watch import ShardWatch

log = logging.getLogger("headrace.adapters.redis")

COUNT = Struct("<I")
"""The beginning of a body: the number of events of its batch."""
TURNS = 8
"""After a shard was passed over this many times, it is read first once."""


class ShardReader:
    """The state of a receiver at one shard."""

    def __init__(self, watch: ShardWatch) -> None:
        self.watch = watch
        self.shard = watch.shard
        self.bell = ShardBell(watch.shard)
        self.reader: int | None = None
        """The number of this reader. None: it is not opened yet, because its server is away."""
        self.next = 0
        """All events held below this offset were received."""
        self.passed_over = 0


class RedisReceiver(QueueReceiver):
    """Receives the batches of one queue. The adapter calls `open` first. Shards are read in their order."""

    def __init__(self, queue: int, shards: Sequence[ShardWatch], limits: RedisLimits) -> None:
        self._limits = limits
        self._queue = queue
        self.readers = [ShardReader(watch) for watch in shards]
        self._next = 0
        """No later offset is below this one."""
        self._given = 0
        """Batches below this offset were returned by `receive`."""
        self._left: AsyncGenerator[tuple[int, bytes]] | None = None
        """Events that earlier readers took and did not finish."""
        self._ready: deque[EventBatch] = deque()
        self._background = BackgroundTasks()
        self._fetching: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._superseded_at: float | None = None

    async def open(self) -> None:
        """Become the queue's reader. Raises StorageError if no server answers."""
        outcomes = await asyncio.gather(
            *(self._become_reader(shard_reader) for shard_reader in self.readers), return_exceptions=True
        )
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        if len(errors) == len(self.readers) or any(not isinstance(error, ServerAway) for error in errors):
            raise errors[0]
        for error in errors:
            log.warning("queue %d is read without one of its shards: %s", self._queue, error)
        self._left = self._merged(0)

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while not self._ready:
            self._check_open()
            if self._fetching is None:
                fetching = self._fetch(min(max_events, MAX_POP), min(max_bytes, MAX_POP_BYTES))
                self._fetching = self._background.hold(fetching, f"headrace redis queue {self._queue}")
            # Not cancelled with the caller: the events that it takes are for the next call.
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
        """See QueueReceiver. Raises StorageError if one of the servers is away: then call it again."""
        outcomes = await asyncio.gather(
            *(self._finish(shard_reader, offset) for shard_reader in self.readers), return_exceptions=True
        )
        for error in outcomes:
            if error is not None:
                raise error

    async def _finish(self, shard_reader: ShardReader, offset: int) -> None:
        reader = shard_reader.reader
        if reader is None:
            return
        below = min(offset, shard_reader.next)
        if not await shard_reader.watch.ask(lambda: shard_reader.shard.finish(reader, below, offset)):
            self._supersede()

    async def aclose(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        await self._background.aclose()
        if self._left is not None:
            await self._left.aclose()
        await asyncio.gather(*(shard_reader.bell.aclose() for shard_reader in self.readers))

    @property
    def closed(self) -> bool:
        return self._closed.done()

    def _check_open(self) -> None:
        if self._closed.done():
            raise Closed(f"the receiver of queue {self._queue} is closed")
        if self._superseded_at is None:
            return
        if asyncio.get_running_loop().time() - self._superseded_at > self._limits.superseded_s:
            raise Closed(f"queue {self._queue} was opened by another reader")
        raise StorageError(f"queue {self._queue} is read by another process: serve it by a cluster, or by one silo")

    def _supersede(self) -> None:
        if self._superseded_at is None:
            self._superseded_at = asyncio.get_running_loop().time()

    # ---- events left by earlier readers ----------------------------------------------------------------------------

    async def _become_reader(self, shard_reader: ShardReader) -> None:
        """Become the reader of one shard. Later offsets are above all positions that were assigned."""
        shard_reader.reader = await shard_reader.watch.ask(shard_reader.shard.open_reader)
        self._next = max(self._next, (await shard_reader.watch.ask(shard_reader.shard.bounds))[1])

    async def _merged(self, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield the events held at `start` and above, in the order of their offsets."""
        sources = [self._held(shard_reader, start) for shard_reader in self.readers if shard_reader.reader is not None]
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

    async def _held(self, shard_reader: ShardReader, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        while (reader := shard_reader.reader) is not None:
            ask = partial(shard_reader.shard.held, reader, start, MAX_POP, MAX_POP_BYTES)
            try:
                held = await shard_reader.watch.ask(ask)
            except ServerAway:
                if len(self.readers) == 1:
                    raise
                shard_reader.reader = None  # the others go on; its events come later, under new offsets
                return
            if held is None:
                self._supersede()
            if held is None or not held.events:
                return
            for offset, body in held.events:
                shard_reader.next = start = offset + 1
                yield offset, body

    # ---- due events ------------------------------------------------------------------------------------------------

    async def _fetch(self, max_events: int, max_bytes: int) -> None:
        """Fetch batches into `_ready`. Wait until there is one."""
        while not self._ready and self._superseded_at is None:
            if self._left is not None:
                await self._fetch_left(self._left, max_events, max_bytes)
                continue
            idle_s = await self._fetch_due(max_events, max_bytes)
            if idle_s and not self._ready:
                await wait_for_bell([shard_reader.bell for shard_reader in self.readers], idle_s)

    async def _fetch_left(self, left: AsyncGenerator[tuple[int, bytes]], max_events: int, max_bytes: int) -> None:
        start = 0
        try:
            async for offset, body in left:
                batch, start = await self._batch(offset, body), offset + 1
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
        """Take due events of the first shard that has some. Return for how many seconds there will be none."""
        idle_s, errors = self._limits.block_s, list[ServerAway]()
        for shard_reader in self._order():
            try:
                shard_idle_s = await self._hold(shard_reader, max_events, max_bytes)
            except ServerAway as error:
                errors.append(error)
                continue
            if self._ready or self._superseded_at is not None:
                self._pass_over(shard_reader)
                return 0.0
            idle_s = min(idle_s, shard_idle_s)
        if len(errors) == len(self.readers):
            raise StorageError(str(errors[0]))
        return idle_s

    async def _hold(self, shard_reader: ShardReader, max_events: int, max_bytes: int) -> float:
        if shard_reader.reader is None:  # its server is back: its events get new offsets
            await self._become_reader(shard_reader)
        assert shard_reader.reader is not None
        ask = partial(
            shard_reader.shard.hold, shard_reader.reader, shard_reader.next, self._next, max_events, max_bytes
        )
        held = await shard_reader.watch.ask(ask)
        if held is None:
            self._supersede()
            return 0.0
        for offset, body in held.events:
            self._ready.append(await self._batch(offset, body))
            shard_reader.next = self._next = offset + 1
        return held.idle_s

    async def _batch(self, offset: int, body: bytes) -> EventBatch:
        """Decode a batch. Raises StorageError, with the event's id, if the bytes are not a batch."""
        try:
            return batch_of(offset, body)
        except InvalidArgument:
            for shard_reader in self.readers:
                if (id := await shard_reader.watch.ask(partial(shard_reader.shard.held_at, offset))) is not None:  # noqa: A001
                    raise shard_reader.shard.server.damaged(
                        shard_reader.shard.keys, id, "is no batch of events"
                    ) from None
            raise

    def _order(self) -> Iterable[ShardReader]:
        """Return the shards in their order, but first those that were passed over too often."""
        return sorted(self.readers, key=lambda shard_reader: shard_reader.passed_over < TURNS)

    def _pass_over(self, chosen: ShardReader) -> None:
        for shard_reader in self.readers:
            shard_reader.passed_over = 0 if shard_reader is chosen else shard_reader.passed_over + 1


def body_of(batch: EventBatch) -> bytes:
    return COUNT.pack(batch.count) + batch.encoded


def batch_of(offset: int, body: bytes) -> EventBatch:
    """Decode a batch. Raises InvalidArgument if the bytes are not a batch."""
    return EventBatch.decode(body[COUNT.size :], offset)
