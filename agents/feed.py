"""Feeds: what reads a queue into a cache and offers it to deliveries.

A `Feed` is a pump of a few steps: purge, look at pressure, receive, add, offer. The main feed of a queue serves every
delivery that is where the queue's end is; a `CatchUp` is a feed of one delivery's own, for a subscription that starts
further back or for streams that left the main cache, until it has caught up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator, Iterable
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from ..adapters.seam import Gap, QueueReceiver, Received
from ..streams.errors import Closed, StorageError
from ..streams.identity import SequenceToken
from .cache import QueueCache
from .cursor import State, StreamCursor
from .delivery import Delivery

log = logging.getLogger("headrace.agents")

RECEIVE_BYTES = 1 << 20
"""What one receive asks for at the most: the unit in which the loop is held up."""
OFFER_BATCHES = 1024
"""Batches that are offered before the loop turns."""
MAX_BACKOFF_S = 5.0
WELL_S = 2.0
"""Reading that failed before, and now waits for so long, is taken to be well again."""


class FeedOwner(Protocol):
    """The agent, as its feeds see it."""

    queue: int

    @property
    def main(self) -> Feed | None:
        """The feed that is shared, while the queue is being read."""
        ...

    def missing(self, deliveries: Iterable[Delivery], gap: Gap) -> None:
        """The queue no longer has what `gap` says."""
        ...

    def relieve(self, feed: Feed) -> None:
        """The feed's cache is full: detach what should not hold up the others."""
        ...


class Feed:
    """Reads one queue into one cache, for some deliveries."""

    def __init__(self, owner: FeedOwner, receiver: QueueReceiver, cache: QueueCache, *, check_s: float) -> None:
        self.owner = owner
        self.receiver = receiver
        self.cache = cache
        self.deliveries: list[Delivery] = []
        self.received_events = 0
        self.received_bytes = 0
        self.end: float = 0
        """Where the queue ended when this feed began."""
        self.finished = False
        self.fault = ""
        """Why reading does not go on at present."""
        self.throttled = False
        self._holes: list[Gap] = []
        """Gaps between what the cache holds: who joins behind one misses it, too."""
        self._check_s = check_s
        self._pause_s = 0.0
        """Looking for whom to detach takes longer with more streams: it gets a twentieth of the time at the most."""
        self._relief = asyncio.Event()
        cache.on_unpinned = self._unpinned

    async def run(self) -> None:
        """Pump until `finish` or the receiver is closed. Reading errors are retried with backoff, for ever."""
        backoff = 0.05
        while not self.finished:
            self.cache.purge()
            if self.cache.pressure:
                await self._under_pressure()
                continue
            try:
                max_events, max_bytes = self.cache.room
                receiving = self.receiver.receive(max_events, min(max_bytes, RECEIVE_BYTES))
                received = await (self._recovering(receiving) if self.fault else receiving)
            except Closed:
                return
            except StorageError as error:
                await self._back_off(error, backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            backoff, self.fault = 0.05, ""
            await self._take(received)

    def finish(self) -> None:
        self.finished = True

    async def _recovering(self, receiving: Awaitable[Received]) -> Received:
        """Receive after an error. One that waits for so long has nothing to wait for but news."""
        well = asyncio.get_running_loop().call_later(WELL_S, self._is_well)
        try:
            return await receiving
        finally:
            well.cancel()

    def _is_well(self) -> None:
        self.fault = ""

    async def _back_off(self, error: StorageError, seconds: float) -> None:
        self.fault = str(error)
        log.warning("queue %d cannot be read, trying again in %.2f s: %s", self.owner.queue, seconds, error)
        await asyncio.sleep(seconds)

    async def _take(self, received: Received) -> None:
        if received.gap is not None:
            self.owner.missing(self.deliveries, received.gap)
            self._holes = [*(hole for hole in self._holes if hole.high > self.cache.first_offset), received.gap]
        batches = received.batches
        for start in range(0, len(batches), OFFER_BATCHES):
            part = batches[start : start + OFFER_BATCHES]
            self.cache.add(part)
            self.received_events += sum(batch.count for batch in part)
            self.received_bytes += sum(len(batch.encoded) for batch in part)
            with self._nothing_goes():
                for delivery in self.deliveries:
                    delivery.offer(self, part, self.base(delivery))
            await asyncio.sleep(0)
        self.cache.next_offset = max(self.cache.next_offset, received.next_offset)
        self._moved()

    @property
    def caught_up(self) -> bool:
        """Whether it has come to where the queue ended when it began."""
        return self.cache.next_offset >= self.end

    def base(self, delivery: Delivery) -> float:
        """Below this offset only streams with a cursor of this feed need anything."""
        return delivery.base

    def _moved(self) -> None:
        for delivery in self.deliveries:
            settle(delivery, self)
            delivery.progressed()

    def drained(self, delivery: Delivery, cursor: StreamCursor) -> None:
        if self.has_passed(delivery, cursor):
            delivery.forget(cursor)

    async def _under_pressure(self) -> None:
        self.throttled = True
        self._relief.clear()
        try:
            async with asyncio.timeout(max(self._check_s, self._pause_s)):
                await self._relief.wait()
        except TimeoutError:
            before = monotonic()
            self.owner.relieve(self)
            self._pause_s = 20 * (monotonic() - before)
        self.throttled = False

    @contextmanager
    def _nothing_goes(self) -> Generator[None]:
        """Nothing leaves the cache meanwhile. What is offered first may turn out to be done, and unpin a bucket while
        the rest is still to be offered."""
        bucket = self.cache.buckets[0] if self.cache.buckets else None
        if bucket is not None:
            bucket.pins += 1
        try:
            yield
        finally:
            if bucket is not None:
                bucket.unpin()

    def _unpinned(self) -> None:
        self.cache.purge()
        if not self.cache.pressure:
            self._relief.set()

    def adopt(self, delivery: Delivery, cursor: StreamCursor) -> None:
        """A parked cursor whose next event is at or after the start of this feed's cache goes on here."""
        offset, index = cursor.token
        batch = self.cache.first_batch(cursor.stream, offset)
        if batch is not None and batch.offset == offset and index >= batch.count:
            batch = batch.following
        if batch is not None:
            delivery.follow(cursor, self, batch)
        elif self.has_passed(delivery, cursor):
            delivery.forget(cursor)
        else:
            cursor.feed = self

    def has_passed(self, delivery: Delivery, cursor: StreamCursor) -> bool:
        """Whether the next batch of a cursor's stream, once it comes, is new to `delivery` anyway. It may not be where
        a catch-up brought the cursor further than a main feed that had to start again, nor where some of it is done."""
        position = self.cache.next_offset
        ahead = cursor.done is not None and max(cursor.done) >= position
        return position >= delivery.base and cursor.token <= (position, 0) and not ahead

    def join(self, delivery: Delivery) -> None:
        """From now on `delivery` gets its new batches from this feed, whose cache reaches back to its position."""
        wants = min([delivery.base, *(c.token.offset for c in delivery.cursors.values() if c.batch is None)])
        for hole in self._holes:
            if wants < hole.high:
                self.owner.missing([delivery], hole)
        delivery.feed = self
        self.deliveries.append(delivery)
        # In this order: a stream that is ahead, and so has nothing here, must not be taken for a new one.
        parked = [c for c in delivery.cursors.values() if c.state is State.PARKED and c.feed is None]
        with self._nothing_goes():
            delivery.offer(self, self.cache.batches_from(delivery.base), delivery.base)
            for cursor in parked:
                if cursor.token.offset >= self.cache.first_offset:
                    self.adopt(delivery, cursor)
        delivery.progressed()

    def leave(self, delivery: Delivery) -> None:
        if delivery in self.deliveries:
            self.deliveries.remove(delivery)


def settle(delivery: Delivery, feed: Feed) -> None:
    """Once a feed has passed a delivery's base, streams that were behind and had nothing are behind no longer."""
    if delivery.feed is feed and feed.cache.next_offset >= delivery.base:
        for cursor in [c for c in delivery.cursors.values() if c.state is State.PARKED and c.feed is feed]:
            if feed.has_passed(delivery, cursor):
                delivery.forget(cursor)


class CatchUp(Feed):
    """A delivery's own way through the queue.

    Serves all its streams where the delivery has not joined the main feed yet, else only the streams that are parked
    when it starts (or come to be, ahead of it). Ends where the main feed's cache begins.
    """

    def __init__(
        self, owner: FeedOwner, receiver: QueueReceiver, cache: QueueCache, delivery: Delivery, *, check_s: float
    ) -> None:
        super().__init__(owner, receiver, cache, check_s=check_s)
        self.delivery = delivery
        self.deliveries = [delivery]
        self.end = float("inf")  # what it serves has caught up when it is the main feed's
        self.began_at = asyncio.get_running_loop().time()
        self._reading: asyncio.Task[None] | None = None
        self._gave_way = False
        self.whole = delivery.feed is None
        if self.whole:
            delivery.feed = self

    def base(self, delivery: Delivery) -> float:
        return delivery.base if self.whole else float("inf")

    def take_along(self, cursor: StreamCursor) -> None:
        """Serve a parked cursor too, where it is not behind what has been read here."""
        if not self.finished and cursor.token.offset >= self.cache.next_offset:
            cursor.feed = self

    async def run(self) -> None:
        """Read until the main feed is reached, then stay for those who are busy with what is in this cache."""
        self._moved()
        if not self.finished:
            await self._read()
        while self.finished and not self._gave_way and any(bucket.pins for bucket in self.cache.buckets):
            self.cache.purge()
            await self._under_pressure()

    async def _read(self) -> None:
        self._reading = asyncio.create_task(super().run(), name=f"headrace feed {self.owner.queue} catching up")
        try:
            await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not (self.finished or self._gave_way) or (task is not None and task.cancelling()):
                raise

    def give_way(self) -> None:
        """End now: another needs the place. What is left goes on later, in another catch-up."""
        self._gave_way = True
        if self._reading is not None:
            self._reading.cancel()

    def drained(self, delivery: Delivery, cursor: StreamCursor) -> None:
        if self.finished:
            cursor.feed = None
            cursor.skip_to(max(cursor.token, SequenceToken(self.cache.next_offset, 0)))
            delivery.on_parked(cursor)
        elif self.whole:
            super().drained(delivery, cursor)
        # else it stays, parked: only this feed brings the stream's next batch

    def _moved(self) -> None:
        super()._moved()
        main = self.owner.main
        if main is not None and self._meets(main):
            self._join(main)

    def meet(self, main: Feed) -> None:
        """The main feed starts: it may be needed no more, but wait at the queue's end."""
        if not self.finished and self._meets(main):
            self._join(main)
            if self._reading is not None:
                self._reading.cancel()

    def _meets(self, main: Feed) -> bool:
        return self.cache.next_offset >= main.cache.first_offset or self._idle()

    def _idle(self) -> bool:
        return not self.whole and not any(c.feed is self for c in self.delivery.cursors.values())

    def _join(self, main: Feed) -> None:
        """Caught up. Streams still busy with what is in this cache go on to the main feed when they are done."""
        self.finish()
        position = SequenceToken(self.cache.next_offset, 0)
        parked = [c for c in self.delivery.cursors.values() if c.state is State.PARKED and c.feed is self]
        for cursor in parked:
            cursor.feed = None
            cursor.skip_to(max(cursor.token, position))
        if self.whole:
            self.delivery.base = max(self.delivery.base, position.offset)
            main.join(self.delivery)
        for cursor in parked:
            if cursor.state is State.PARKED and cursor.feed is None and cursor.stream in self.delivery.cursors:
                self.delivery.on_parked(cursor)
