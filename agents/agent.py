"""The pulling agent reads one queue for all subscriptions that this process serves.

The main feed is shared by every delivery that is near the queue's end. A delivery that starts further back reads
through a feed of its own, and so do streams that were detached because they held up the others.

The agent follows Orleans' PersistentStreamPullingAgent, with three differences: no event waits until a cold stream is
registered, a slow consumer leaves the cache instead of stopping the queue, and nothing is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ..adapters.receiving import Gap
from ..adapters.seam import QueueAdapter
from ..streams.backoff import Backoff
from ..streams.errors import HeadraceError, InvalidArgument, StorageError
from ..streams.identity import SequenceToken
from ..streams.subscriptions import Checkpoint, SlowConsumer
from .cache import CacheStatistics, QueueCache
from .catch_up_budget import CatchUpBudget, CatchUpShare
from .cursor import State, StreamCursor
from .delivery.delivery import Delivery, DeliveryStatistics
from .feed import CatchUp, Feed

log = logging.getLogger("headrace.agents")

FIRST_TICK_S = 0.02
"""An agent starts at a random time within this many seconds of its first subscription. That spreads the load, and lets
subscriptions that are made together share the first read."""
MAX_CATCH_UPS = 4
"""Catch-ups of one queue that read at the same time."""
CATCH_UP_TURN_S = 1.0
"""A catch-up whose handlers are slow makes way for another after this time, in seconds. A catch-up of remote consumers
makes way at once, because their batches can be read again."""
PRESSURE_CHECK_S = 0.05
CATCH_UP_CHECK_S = 0.02
"""Shorter than `PRESSURE_CHECK_S`: others may wait for the slot of a catch-up whose cache stays full."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLimits:
    """Bounds of one queue's cached batches.

    Each of the at most `MAX_CATCH_UPS` catch-ups has an eighth of it, so the main feed has half. A queue that cannot
    rewind has no catch-ups: its main feed has everything."""

    max_events: int = 100_000
    max_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.max_events < 20 or self.max_bytes < 20 * 1024:
            raise InvalidArgument(
                f"a queue's cache of {self.max_events:,} events and {self.max_bytes:,} bytes is too small: at least 20 "
                "events and 20 KiB for each queue"
            )

    def main(self, *, rewindable: bool) -> QueueCache:
        share = 2 if rewindable else 1
        return QueueCache(self.max_events // share, self.max_bytes // share)

    @property
    def catch_up_bytes(self) -> int:
        """For all catch-ups of one queue."""
        return self.max_bytes // 2

    def catch_up(self) -> QueueCache:
        return QueueCache(self.max_events // 8, self.max_bytes // 8)


class AgentStatistics(NamedTuple):
    queue: int
    next_offset: int
    cache: CacheStatistics
    received_events: int
    received_bytes: int
    state: str
    reason: str
    deliveries: Sequence[tuple[DeliveryStatistics, bool]]
    """Each delivery, and whether it is catching up."""


class PullingAgent:
    """Reads queue `queue`. `attach` and `detach` deliveries; `aclose` when done. All on one loop."""

    def __init__(
        self,
        adapter: QueueAdapter,
        queue: int,
        limits: CacheLimits,
        *,
        detach_after_s: float = 0.25,
        on_gap: Callable[[Delivery, Gap], None] = lambda _d, _g: None,
        rng: random.Random | None = None,
        budget: CatchUpBudget | None = None,
    ) -> None:
        """`budget` bounds the caches of all catch-ups; the agents of a provider share one."""
        self.queue = queue
        self.deliveries: dict[str, Delivery] = {}
        self._adapter = adapter
        self._limits = limits
        self._detach_after_s = detach_after_s
        self._on_gap = on_gap
        self._rewindable = adapter.capabilities.rewindable
        self._rng = rng or random.Random()  # noqa: S311 (spreads load)
        self.main: Feed | None = None
        """The feed that is shared, while the queue is being read."""
        self._runner: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._catch_ups: dict[str, CatchUp] = {}
        self._catching: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CATCH_UPS)
        self._budget = budget or CatchUpBudget(limits.catch_up_bytes)
        self._placing = False
        self._restarting = False
        self._closed = False
        self._fault = ""
        self._queued = 0
        """Catch-ups that wait for a slot."""
        self._received_events = self._received_bytes = 0
        """Received by feeds that have ended."""

    # ---- deliveries come and go ------------------------------------------------------------------------------------

    def attach(self, delivery: Delivery) -> None:
        """Serve `delivery` from its checkpoint on."""
        self.deliveries[delivery.name] = delivery
        delivery.on_parked = self._on_parked
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name=f"headrace agent {self.queue}")
        elif self.main is not None:
            if not self._rewindable and delivery.progress.watermark < self.main.cache.first_offset:
                self._go_back()
            else:
                self._place(delivery)

    async def detach(self, name: str, drain_s: float) -> Checkpoint | None:
        """Stop serving a subscription, and return its progress; None if it is not served. Running handlers have
        `drain_s` seconds to end.

        If this call is cancelled, the subscription is not served any more either. Its handlers are cancelled, and may
        still be ending."""
        delivery = self.deliveries.pop(name, None)
        if delivery is None:
            return None
        try:
            await delivery.stop(drain_s)
        finally:
            if (task := self._catching.pop(name, None)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            checkpoint = delivery.progress.checkpoint(limit=None)
            if self.main is not None:
                self.main.leave(delivery)
            delivery.progress.end()
        return checkpoint

    async def acknowledge(self, offset: int) -> bool:
        """Tell the queue that every subscription has finished the events below `offset`. Return False if the queue is
        not being read, so that it cannot be told."""
        if self.main is None:
            return False
        await self.main.receiver.acknowledge(offset)
        return True

    async def aclose(self, drain_s: float = 0.0) -> dict[str, Checkpoint]:
        """Stop reading, detach all deliveries, and return the progress of each by name. Idempotent."""
        self._closed = True
        for feed in (self.main, *self._catch_ups.values()):
            if feed is not None:
                feed.finish()
        names = list(self.deliveries)
        done = await asyncio.gather(*(self.detach(name, drain_s) for name in names))
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        return {name: checkpoint for name, checkpoint in zip(names, done, strict=True) if checkpoint is not None}

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep the main feed running: start it again after every error."""
        await asyncio.sleep(self._rng.uniform(0, FIRST_TICK_S))
        loop, backoff = asyncio.get_running_loop(), Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while not self._closed:
            began = loop.time()
            try:
                await self._read()
                self._fault = ""
                backoff.reset()
            except Exception as error:  # noqa: BLE001 (it is logged)
                if loop.time() - began > MAX_BACKOFF_S:
                    backoff.reset()
                await self._back_off(error, backoff.next_s())

    async def _back_off(self, error: Exception, seconds: float) -> None:
        if isinstance(error, HeadraceError):
            self._fault = str(error)
            log.warning("queue %d: %s; trying again in %.1f s", self.queue, error, seconds)
        else:
            self._fault = f"{type(error).__name__}: {error}"
            log.error("queue %d: the agent failed and starts again in %.1f s", self.queue, seconds, exc_info=error)
        await asyncio.sleep(seconds)

    async def _read(self) -> None:
        """Open the main feed and run it until it ends."""
        start = self._start() if self._rewindable else None
        receiver = await self._adapter.open_receiver(self.queue, start)
        try:
            cache = self._limits.main(rewindable=self._rewindable)
            bounds = await self._adapter.bounds(self.queue)
            cache.next_offset = start if start is not None else bounds.first
            self.main = Feed(self, receiver, cache, check_s=min(PRESSURE_CHECK_S, self._detach_after_s))
            self.main.end = bounds.next
            self._restarting, self._fault = False, ""
            for delivery in list(self.deliveries.values()):
                self._place(delivery)
            for catch_up in list(self._catch_ups.values()):
                catch_up.meet(self.main)
            self._reading = asyncio.create_task(self.main.run(), name=f"headrace feed {self.queue}")
            await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self._restarting:
                raise StorageError(f"reading of queue {self.queue} was cancelled") from None
        finally:
            if self._reading is not None:
                self._reading.cancel()
            await receiver.aclose()
            self._leave_main()

    def _go_back(self) -> None:
        """Read a queue that cannot rewind once more, from the first batch that is not finished."""
        assert self.main is not None
        self._restarting = True
        self.main.finish()
        if self._reading is not None:
            self._reading.cancel()

    def _leave_main(self) -> None:
        """The main feed ended: park the cursors in its cache. Running handlers finish their batch."""
        main, self.main = self.main, None
        if main is None:
            return
        self._retire(main)
        for delivery in list(main.deliveries):
            delivery.progress.leave_feed()
            delivery.leave(main)

    def _retire(self, feed: Feed) -> None:
        self._received_events += feed.received_events
        self._received_bytes += feed.received_bytes

    def _start(self) -> int:
        """The offset at which the main feed starts. It is the furthest one possible: deliveries that are further back
        catch up without holding up the others. It is not past a delivery whose subscription throttles."""
        throttled = [d.progress.watermark for d in self.deliveries.values() if not self._detachable(d)]
        return min([max((d.progress.base for d in self.deliveries.values()), default=0), *throttled])

    def _detachable(self, delivery: Delivery) -> bool:
        return self._rewindable and delivery.definition.slow_consumer is not SlowConsumer.THROTTLE

    # ---- which feed serves a delivery ------------------------------------------------------------------------------

    def _place(self, delivery: Delivery) -> None:
        """Join the main feed if its cache reaches back far enough, otherwise catch up."""
        main = self.main
        assert main is not None
        if not self._rewindable:
            self._skip_what_is_gone(delivery, main.cache.first_offset)
        progress = delivery.progress
        if progress.feed is None and (progress.base >= main.cache.first_offset or not self._rewindable):
            main.join(delivery)
        self._catch_up(delivery)

    def _skip_what_is_gone(self, delivery: Delivery, first: int) -> None:
        """A queue that cannot rewind begins at `first`: record a gap for the events below it that a delivery still
        needs."""
        if delivery.progress.watermark < first:
            self.missing([delivery], Gap(delivery.progress.watermark, first, "the queue no longer has them"))
            for cursor in delivery.progress.cursors.values():
                if cursor.batch is None and cursor.token.offset < first:
                    delivery.progress.skip(cursor, SequenceToken(first))

    def _on_parked(self, _: StreamCursor) -> None:
        """Find a feed for the cursor, after the feeds had their turn: the main cache may have moved on by then."""
        if not self._placing and not self._closed:
            self._placing = True
            asyncio.get_running_loop().call_soon(self._place_parked)

    def _place_parked(self) -> None:
        self._placing = False
        if self.main is None or self._closed:
            return
        self.main.cache.purge()
        for delivery in self.deliveries.values():
            self._catch_up(delivery)

    def _due(self, delivery: Delivery) -> list[StreamCursor]:
        """Give the main feed the parked cursors that its cache can serve. Return the others that no feed serves."""
        main = self.main
        due = [c for c in delivery.progress.cursors.values() if c.state is State.PARKED and c.feed is None]
        if main is None or delivery.progress.feed is not main:
            return due
        left: list[StreamCursor] = []
        for cursor in due:
            # Checked for each cursor: adopting one may purge batches that the next one needs.
            if cursor.token.offset >= main.cache.first_offset:
                main.adopt(delivery, cursor)
            else:
                left.append(cursor)
        return left

    def _catch_up(self, delivery: Delivery) -> None:
        due = self._due(delivery)
        running = self._catch_ups.get(delivery.name)
        if running is not None:
            for cursor in due:
                running.take_along(cursor)
        elif not self._rewindable:
            if due:
                self._go_back()
        elif (due or delivery.progress.feed is None) and delivery.name not in self._catching:
            task = asyncio.create_task(
                self._run_catch_ups(delivery), name=f"headrace catch-up {delivery.name}/{self.queue}"
            )
            self._catching[delivery.name] = task

    async def _run_catch_ups(self, delivery: Delivery) -> None:
        """Run one catch-up after the other until the delivery needs none."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            while not self._closed and (self._due(delivery) or delivery.progress.feed is None):
                try:
                    await delivery.wait_until_accepting()
                    async with self._slot():
                        if delivery.is_accepting:
                            await self._catch_up_once(delivery)
                    backoff.reset()
                except Exception as error:
                    unforeseen = None if isinstance(error, HeadraceError) else error
                    log.warning(
                        "%s cannot catch up in queue %d: %s", delivery.name, self.queue, error, exc_info=unforeseen
                    )
                    await asyncio.sleep(backoff.next_s())
            delivery.progress.pass_damage()
        finally:
            if self._catching.get(delivery.name) is asyncio.current_task():
                del self._catching[delivery.name]

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        self._queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _catch_up_once(self, delivery: Delivery) -> None:
        positions = [c.token.offset for c in self._due(delivery)]
        if delivery.progress.feed is None:
            positions.append(delivery.progress.base)
        if not positions or self.main is None:
            await asyncio.sleep(FIRST_TICK_S)
            return
        start = min(positions)
        receiver = await self._adapter.open_receiver(self.queue, start)
        cache = self._limits.catch_up()
        cache.next_offset = start
        share = CatchUpShare(self._budget)
        check_s = min(CATCH_UP_CHECK_S, self._detach_after_s)
        feed = CatchUp(self, receiver, cache, delivery, share, check_s=check_s)
        self._catch_ups[delivery.name] = feed
        try:
            for cursor in self._due(delivery):
                feed.take_along(cursor)
            await feed.run()
        finally:
            del self._catch_ups[delivery.name]
            self._retire(feed)
            if feed.whole and not feed.finished:
                delivery.progress.leave_feed()
            delivery.leave(feed)
            share.close()
            await receiver.aclose()

    # ---- slow consumers --------------------------------------------------------------------------------------------

    def relieve(self, feed: Feed) -> None:
        """The feed's cache is full: detach cursors in its oldest bucket.

        A cursor is detached if it makes no progress, or if another subscription has nothing left to do, because the
        cursor would hold that one up. A catch-up makes way for another one, and ends while its delivery accepts
        nothing."""
        if not feed.cache.buckets:
            return
        oldest = feed.cache.buckets[0]
        hungry = {d.name for d in feed.deliveries if not any(c.bucket is not None for c in d.progress.cursors.values())}
        held, most = self._held_apart(), self._limits.max_bytes // 8
        for delivery in [d for d in self.deliveries.values() if self._detachable(d)]:
            there = (delivery.progress.cursors.get(stream) for stream in {batch.stream for batch in oldest.batches})
            for cursor in [c for c in there if c is not None and c.bucket is oldest]:
                size = delivery.held(cursor)
                fits = not held or held + size <= most  # the first batch always fits, however large it is
                if fits and (hungry or self._stuck(cursor)) and not _alone(feed, delivery):
                    held += size
                    delivery.detach(cursor)
        if isinstance(feed, CatchUp) and (self._is_idle(feed) or self._in_demand(feed)):
            feed.give_way()

    def _is_idle(self, feed: CatchUp) -> bool:
        """Whether the delivery of a catch-up accepts nothing: at this moment if other catch-ups wait for the slot,
        otherwise for `detach_after_s` seconds."""
        now = asyncio.get_running_loop().time()
        if feed.delivery.is_accepting:
            feed.idle_since = None
            return False
        if feed.idle_since is None:
            feed.idle_since = now
        return self._is_contended() or now - feed.idle_since >= self._detach_after_s

    def _is_contended(self) -> bool:
        """Whether catch-ups wait for a slot, or for bytes."""
        return bool(self._queued) or self._budget.is_contended

    def _in_demand(self, feed: CatchUp) -> bool:
        """Whether others wait for the slot of a catch-up that has had its turn, and the batches that its handlers would
        keep outside of the cache are not too large."""
        cursors = feed.delivery.progress.cursors.values()
        contended = self._is_contended()
        wanted = contended or (feed.finished and any(c.state is State.PARKED and c.feed is None for c in cursors))
        if not wanted:
            return False
        sizes = [feed.delivery.held(c) for c in cursors if c.feed is feed and c.state is State.RUNNING]
        if contended and not any(sizes):
            return True
        if asyncio.get_running_loop().time() - feed.began_at < CATCH_UP_TURN_S:
            return False
        held = self._held_apart()
        return held + sum(sizes) <= self._limits.max_bytes // 8 or (not held and len(sizes) == 1)

    def _held_apart(self) -> int:
        """Bytes of batches that handlers and consumers keep outside of all caches."""
        apart = [(d, c) for d in self.deliveries.values() for c in d.progress.cursors.values() if c.bucket is None]
        return sum(max(d.held(c), c.batch.nbytes) for d, c in apart if c.batch is not None)

    def _stuck(self, cursor: StreamCursor) -> bool:
        now, trouble = asyncio.get_running_loop().time(), cursor.troubled()
        if trouble.seen != cursor.token:
            trouble.seen, trouble.seen_at = cursor.token, now
        return now - trouble.seen_at >= self._detach_after_s

    def missing(self, deliveries: Iterable[Delivery], gap: Gap) -> None:
        for delivery in deliveries:
            if gap.high > delivery.progress.watermark:
                delivery.gaps += 1
                self._on_gap(delivery, gap)

    # ---- statistics ------------------------------------------------------------------------------------------------

    def statistics(self) -> AgentStatistics:
        main = self.main
        cache = main.cache if main is not None else self._limits.main(rewindable=self._rewindable)
        state, reason = self._state()
        feeds = [feed for feed in (main, *self._catch_ups.values()) if feed is not None]
        return AgentStatistics(
            self.queue,
            cache.next_offset,
            cache.statistics(),
            self._received_events + sum(feed.received_events for feed in feeds),
            self._received_bytes + sum(feed.received_bytes for feed in feeds),
            state,
            reason,
            [(d.statistics(), name in self._catch_ups) for name, d in self.deliveries.items()],
        )

    def _state(self) -> tuple[str, str]:
        main = self.main
        faults = [main.fault if main is not None else "", *(feed.fault for feed in self._catch_ups.values())]
        damages = [str(d.progress.damage) for d in self.deliveries.values() if d.progress.damage is not None]
        if fault := next(filter(None, (self._fault, *faults, *damages)), ""):
            return "faulted", fault
        if main is None:
            return (
                "starting" if self._runner is not None else "idle",
                "" if self._runner is not None else "nobody subscribes",
            )
        if main.throttled:
            return "throttled", "the cache is full: the slowest consumer sets the pace"
        return "running", ""


def _alone(feed: Feed, delivery: Delivery) -> bool:
    """Whether a catch-up serves one stream only, so that no other stream waits for its batches."""
    if not isinstance(feed, CatchUp) or feed.finished:
        return False
    if delivery.definition.selector.explicit or feed.whole:
        return delivery.definition.selector.explicit
    cursors = delivery.progress.cursors.values()
    due = (c for c in cursors if c.feed is feed or (c.state is State.PARKED and c.feed is None))
    return len(list(islice(due, 2))) < 2
