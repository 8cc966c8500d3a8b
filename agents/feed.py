"""Feeds read a queue into a cache, and offer its batches to deliveries.

A `Feed` repeats a few steps: purge, check the pressure, receive, add, offer. The main feed of a queue serves every
delivery that is near the queue's end. A `CatchUp` serves one delivery: a subscription that starts further back, or
streams that left the main cache. It ends when it has caught up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator, Iterable, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from ..adapters.receiving import Gap, LostEndError, QueueReceiver, Received
from ..streams.backoff import Backoff
from ..streams.errors import Closed, CorruptRecord, StorageError
from ..streams.events import EventBatch
from .cache import QueueCache
from .catch_up_budget import CatchUpShare
from .counts import ReceivedCounts
from .cursor import StreamCursor
from .delivery.delivery import Delivery

log = logging.getLogger("headrace.agents")

RECEIVE_BYTES = 1 << 20
"""The most that one receive asks for: the loop is blocked while so many bytes are added."""
OFFER_BATCHES = 1024
"""Batches offered before other tasks of the loop get a turn."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0
WELL_S = 2.0
"""After an error, a receive that waits for so long counts as recovered, in seconds."""


class FeedOwner(Protocol):
    """The agent, as its feeds see it."""

    queue: int

    @property
    def main(self) -> Feed | None:
        """The main feed; None while the queue is not being read."""
        ...

    def missing(self, deliveries: Iterable[Delivery], gap: Gap) -> None:
        """Report that the queue no longer has the offsets of `gap`."""
        ...

    def note_lost_end(self, end: int) -> None:
        """The queue lost its end, and gives the offsets from `end` on again."""
        ...

    def relieve(self, feed: Feed) -> None:
        """The feed's cache is full: detach the cursors that would hold up the others."""
        ...

    def reopen(self) -> None:
        """End the main feed, and start it again: at the position of the deliveries if the queue can rewind."""
        ...

    @property
    def received(self) -> ReceivedCounts:
        """Counts what its feeds receive."""
        ...


class Feed:
    """Reads one queue into one cache, for some deliveries."""

    def __init__(self, owner: FeedOwner, receiver: QueueReceiver, cache: QueueCache, *, check_s: float) -> None:
        self.owner = owner
        self.receiver = receiver
        self.cache = cache
        self.deliveries: list[Delivery] = []
        self.end: float = 0
        """The queue's end when this feed began."""
        self.finished = False
        self.fault = ""
        """The error that stops reading at present; empty if there is none."""
        self.damage: CorruptRecord | None = None
        """The damaged record that stops reading at present."""
        self.throttled = False
        self._holes: list[Gap] = []
        """Gaps between the batches of the cache. A delivery that joins before one of them misses these events, too."""
        self._check_s = check_s
        self._receive_bytes = RECEIVE_BYTES
        self._pause_s = 0.0
        """Wait between two calls of `relieve`, in seconds. A call takes longer with more streams; this keeps it to a
        twentieth of the time."""
        self._relief = asyncio.Event()
        self._failure: Exception | None = None
        """Raised by `accept`."""
        cache.on_unpinned = self._unpinned

    async def run(self) -> None:
        """Read until `finish` is called or the receiver is closed. Retry errors with backoff, without a limit."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while not self.finished:
            self.cache.purge()
            if self._is_full():
                await self._under_pressure()
                continue
            try:
                received: Received | None = await self._receive()
            except Closed:
                return
            except StorageError as error:
                if isinstance(error, LostEndError):
                    self.owner.note_lost_end(error.end)
                await self._back_off(error, backoff.next_s())
                continue
            if self._failure is not None:
                raise self._failure
            backoff.reset()
            self.fault, self.damage = "", None
            await self._take(received)
            received = None  # otherwise its batches stay in memory until the next ones come

    def finish(self) -> None:
        self.finished = True

    def accept(self, batches: Sequence[EventBatch]) -> bool:
        """Take batches that were just stored, without a read: see `QueueReceiver.offer_to`.

        Return False if they must be read instead: they do not follow the cache, they do not fit, or reading has an
        error."""
        if self.finished or self.fault or batches[0].offset != self.cache.next_offset:
            return False
        self.cache.purge()
        max_events, max_bytes = self.cache.space
        if (
            self._is_full()
            or len(batches) > OFFER_BATCHES
            or sum(batch.count for batch in batches) > max_events
            or sum(len(batch.encoded) for batch in batches) > min(max_bytes, self._receive_bytes)
        ):
            return False
        try:
            self._add(batches)
            self._moved()
        except Exception as error:  # noqa: BLE001 (`run` raises it)
            self._failure = error
            return False
        return True

    def _is_full(self) -> bool:
        """Whether reading waits until the cache has space."""
        return self.cache.pressure

    async def _receive(self) -> Received:
        max_events, max_bytes = self.cache.space
        receiving = self.receiver.receive(max_events, min(max_bytes, self._receive_bytes))
        return await (self._recovering(receiving) if self.fault else receiving)

    async def _recovering(self, receiving: Awaitable[Received]) -> Received:
        """Receive after an error. A receive that waits for `WELL_S` seconds waits for new events only: the error is
        over."""
        well = asyncio.get_running_loop().call_later(WELL_S, self._is_well)
        try:
            return await receiving
        finally:
            well.cancel()

    def _is_well(self) -> None:
        self.fault = ""

    async def _back_off(self, error: StorageError, seconds: float) -> None:
        self.owner.received.errors += 1
        if self.fault != str(error):
            log.warning("queue %d cannot be read, trying again in %.2f s: %s", self.owner.queue, seconds, error)
        self.fault = str(error)
        self.damage = error if isinstance(error, CorruptRecord) else None
        if self.damage is not None:
            for delivery in self.deliveries:
                self.meet_damage(delivery, self.damage)
        await asyncio.sleep(seconds)

    def meet_damage(self, delivery: Delivery, damage: CorruptRecord) -> None:
        """A delivery cannot pass the damaged record: wake the tasks that wait for its progress."""
        delivery.waiters.notify()

    async def _take(self, received: Received) -> None:
        if received.gap is not None:
            self.owner.missing(self.deliveries, received.gap)
            self._holes = [*(hole for hole in self._holes if hole.high > self.cache.first_offset), received.gap]
        batches = received.batches
        for start in range(0, len(batches), OFFER_BATCHES):
            self._add(batches[start : start + OFFER_BATCHES])
            await asyncio.sleep(0)
        self.cache.next_offset = max(self.cache.next_offset, received.next_offset)
        self._moved()

    def _add(self, batches: Sequence[EventBatch]) -> None:
        """Add batches to the cache, and offer them to the deliveries."""
        before = self.cache.next_offset
        entries = self.cache.add(batches)
        try:
            with self._keep_batches():
                for delivery in self.deliveries:
                    delivery.offer(self, entries)
        except Exception:
            # Else deliveries that were not offered the batches would count them as done.
            self.cache.next_offset = before
            raise
        received = self.owner.received
        received.events += sum(batch.count for batch in batches)
        received.bytes += sum(len(batch.encoded) for batch in batches)

    @property
    def caught_up(self) -> bool:
        """Whether it has reached the offset at which the queue ended when the feed began."""
        return self.cache.next_offset >= self.end

    def _moved(self) -> None:
        for delivery in self.deliveries:
            delivery.read_on(self)

    async def _under_pressure(self) -> None:
        self.throttled, began = True, monotonic()
        self._relief.clear()
        try:
            async with asyncio.timeout(max(self._check_s, self._pause_s)):
                await self._relief.wait()
        except TimeoutError:
            before = monotonic()
            self.owner.relieve(self)
            self._pause_s = 20 * (monotonic() - before)
        self.throttled = False
        if self is self.owner.main:
            self.owner.received.pressure_s += monotonic() - began

    @contextmanager
    def _keep_batches(self) -> Generator[None]:
        """Keep all batches in the cache for the duration of the block. Otherwise the first ones may be done, and their
        bucket dropped, before the others were offered."""
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
        if not self._is_full():
            self._relief.set()

    def join(self, delivery: Delivery) -> None:
        """Serve `delivery` from now on. This feed's cache must reach back to the delivery's position."""
        wants = delivery.progress.oldest_unread
        for hole in self._holes:
            if wants < hole.high:
                self.owner.missing([delivery], hole)
        self.deliveries.append(delivery)
        with self._keep_batches():
            delivery.join(self)

    def leave(self, delivery: Delivery) -> None:
        if delivery in self.deliveries:
            self.deliveries.remove(delivery)

    def part_with(self, delivery: Delivery) -> None:
        """Serve `delivery` no more. A catch-up reads the batches again that the delivery has not looked at."""
        self.deliveries.remove(delivery)
        delivery.progress.part()

    def all_seen(self) -> None:
        """A delivery has looked at all batches in the cache."""


class MainFeed(Feed):
    """The feed that all deliveries of a queue share.

    It may start below the position of its deliveries, to read again what their streams need. If that is too much, or
    does not go on, its owner starts it at the position.
    """

    def __init__(
        self,
        owner: FeedOwner,
        receiver: QueueReceiver,
        cache: QueueCache,
        *,
        check_s: float,
        position: int,
        most_again: int,
        patience_s: float,
    ) -> None:
        """`most_again` bytes may be read below `position`. There, the oldest bucket of a full cache may stay for
        `patience_s` seconds."""
        super().__init__(owner, receiver, cache, check_s=check_s)
        self._position = position
        self._left_bytes = most_again
        self._patience_s = patience_s
        self._oldest = -1, 0.0
        """The first offset of the full cache, and the loop time since which it is the same."""

    @property
    def is_behind(self) -> bool:
        """Whether it has not reached the position yet."""
        return self.cache.next_offset < self._position

    async def _take(self, received: Received) -> None:
        if received.next_offset <= self._position:
            self._left_bytes -= sum(len(batch.encoded) for batch in received.batches)
        await super()._take(received)
        if self._left_bytes < 0 and self.is_behind:
            self.owner.reopen()

    async def _back_off(self, error: StorageError, seconds: float) -> None:
        if self.is_behind:
            self.owner.reopen()  # catch-ups meet the error, too, and hold up nothing else
        else:
            await super()._back_off(error, seconds)

    async def _under_pressure(self) -> None:
        await super()._under_pressure()
        now, (offset, since) = asyncio.get_running_loop().time(), self._oldest
        if offset != self.cache.first_offset:
            self._oldest = self.cache.first_offset, now
        elif self.is_behind and now - since >= self._patience_s:
            self.owner.reopen()


class CatchUp(Feed):
    """A feed of one delivery that is behind the main feed.

    If the delivery has not joined the main feed yet, this feed serves all its streams. Otherwise it serves the streams
    that are parked when it starts, and those parked later at a position ahead of it. It ends at the start of the main
    feed's cache.
    """

    def __init__(
        self,
        owner: FeedOwner,
        receiver: QueueReceiver,
        cache: QueueCache,
        delivery: Delivery,
        share: CatchUpShare,
        *,
        check_s: float,
    ) -> None:
        """`share` counts the bytes of `cache`, and of reads."""
        super().__init__(owner, receiver, cache, check_s=check_s)
        self.delivery = delivery
        self._share = share
        self._receive_bytes = min(RECEIVE_BYTES, share.receive_bytes)
        self.deliveries = [delivery]
        self.end = float("inf")  # its streams have caught up once the main feed serves them
        self.began_at = asyncio.get_running_loop().time()
        self.idle_since: float | None = None
        """Loop time since which its delivery accepts nothing. Only `CacheRelief` sets it."""
        self._reading: asyncio.Task[None] | None = None
        self._gave_way = False
        self.whole = delivery.progress.feed is None
        if self.whole:
            delivery.join(self)

    def adopt(self, cursor: StreamCursor) -> None:
        """Serve a parked cursor, too, unless this feed has already read past its position."""
        if not self.finished and cursor.token.offset >= self.cache.next_offset:
            self.delivery.progress.await_batch(cursor, self)

    def meet_damage(self, delivery: Delivery, damage: CorruptRecord) -> None:
        delivery.progress.stop_at(damage)
        super().meet_damage(delivery, damage)

    async def _back_off(self, error: StorageError, seconds: float) -> None:
        """Wait, then read again. At a damaged record, end once every event before it is done: other catch-ups need the
        slot. Raises CorruptRecord then."""
        await super()._back_off(error, seconds)
        self.cache.purge()
        if isinstance(error, CorruptRecord) and not self._is_pinned():
            raise error

    def _is_full(self) -> bool:
        """Whether reading waits. It also waits while all catch-ups together hold too much. A catch-up
        that holds nothing waits in `reserve` instead."""
        return super()._is_full() or (self._is_pinned() and not self._share.fits)

    def _is_pinned(self) -> bool:
        return any(bucket.pins for bucket in self.cache.buckets)

    async def _receive(self) -> Received:
        self._share.hold(self.cache.bytes)
        await self._share.reserve()
        try:
            return await super()._receive()
        except BaseException:
            self._share.hold(reserved=0)
            raise

    async def _take(self, received: Received) -> None:
        self.delivery.progress.pass_damage(received.next_offset)
        await super()._take(received)
        self._share.hold(self.cache.bytes, 0)

    def _unpinned(self) -> None:
        super()._unpinned()
        self._share.hold(self.cache.bytes)

    async def run(self) -> None:
        """Read up to the main feed, then stay until no cursor uses this cache any more."""
        self._moved()
        if not self.finished:
            await self._read()
        while self.finished and not self._gave_way and self._is_pinned():
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
        """End now, because another catch-up needs the slot. The rest is read later by a new catch-up."""
        self._gave_way = True
        if self._reading is not None:
            self._reading.cancel()

    def _moved(self) -> None:
        super()._moved()
        main = self.owner.main
        if main is not None and self._overlaps(main):
            self._join(main)

    def rejoin(self, main: Feed) -> None:
        """The main feed starts. End now if it can take over: this feed may wait for new events at the queue's end."""
        if not self.finished and self._overlaps(main):
            self._join(main)
            if self._reading is not None:
                self._reading.cancel()

    def all_seen(self) -> None:
        """The delivery may join the main feed, in the next turn of the loop: this is called while it takes a cursor."""
        asyncio.get_running_loop().call_soon(self._rejoin_main)

    def _rejoin_main(self) -> None:
        if (main := self.owner.main) is not None:
            self.rejoin(main)

    def _overlaps(self, main: Feed) -> bool:
        position = self.delivery.progress.position if self.whole else self.cache.next_offset
        return position >= main.cache.first_offset or self._idle()

    def _idle(self) -> bool:
        return not self.whole and not any(c.feed is self for c in self.delivery.progress.cursors.values())

    def _join(self, main: Feed) -> None:
        """End: this feed has caught up. Streams that still use its cache move to the main feed when they are done with
        it."""
        self.finish()
        progress = self.delivery.progress
        progress.leave_parked(self)
        if self.whole:
            progress.leave_feed()
            main.join(self.delivery)
        for cursor in progress.without_feed():
            progress.on_parked(cursor)
