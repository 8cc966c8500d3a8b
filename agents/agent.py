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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ..adapters.receiving import LOST_END, Gap
from ..adapters.seam import QueueAdapter
from ..streams.backoff import Backoff
from ..streams.errors import HeadraceError, StorageError
from ..streams.subscriptions import Checkpoint
from ..streams.wording import shortened
from .cache import CacheLimits, CacheStatistics
from .catch_up_budget import CatchUpBudget
from .catch_up_runner import FIRST_BACKOFF_S, MAX_BACKOFF_S, CatchUpRunner
from .counts import ReceivedCounts
from .cursor import StreamCursor
from .delivery.delivery import Delivery, DeliveryStatistics
from .feed import Feed, MainFeed
from .relief import PATIENCE, CacheRelief

log = logging.getLogger("headrace.agents")

FIRST_TICK_S = 0.02
"""An agent starts at a random time within this many seconds of its first subscription. That spreads the load, and lets
subscriptions that are made together share the first read."""
PRESSURE_CHECK_S = 0.05


class AgentStatistics(NamedTuple):
    queue: int
    next_offset: int
    cache: CacheStatistics
    received: ReceivedCounts
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
        received: ReceivedCounts | None = None,
    ) -> None:
        """`budget` bounds the caches of all catch-ups; the agents of a provider share one."""
        self.queue = queue
        self.received = received or ReceivedCounts()
        """Continues those of the queue's former agent."""
        self.deliveries: dict[str, Delivery] = {}
        self._adapter = adapter
        self._limits = limits
        self._detach_after_s = detach_after_s
        self._on_gap = on_gap
        self._rewindable = adapter.capabilities.rewindable
        self._rng = rng or random.Random()  # noqa: S311 (spreads load)
        self.main: MainFeed | None = None
        """The main feed; None while the queue is not being read."""
        self._runner: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        budget = budget or CatchUpBudget(limits.catch_up_bytes)
        self.catch_ups = CatchUpRunner(self, adapter, limits, budget, check_s=detach_after_s)
        self._relief = CacheRelief(
            self.deliveries, self.catch_ups,
            rewindable=self._rewindable, detach_after_s=detach_after_s, max_bytes=limits.max_bytes // 8,
        )  # fmt: skip
        self._placing = False
        self._restarting = False
        self._is_first_start = True
        """The first main feed may start below the position; after a failure or a stall there, the next ones do not."""
        self._closed = False
        self._fault = ""
        self._lost_from = inf

    # ---- deliveries come and go ------------------------------------------------------------------------------------

    def attach(self, delivery: Delivery) -> None:
        """Serve `delivery` from its checkpoint on."""
        self.deliveries[delivery.name] = delivery
        delivery.progress.on_parked = self._on_parked
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name=f"headrace agent {self.queue}")
        elif self.main is not None:
            if not self._rewindable and delivery.progress.watermark < self.main.cache.first_offset:
                self.reopen()
            else:
                self._place(delivery)

    async def detach(self, name: str, drain_s: float) -> Checkpoint | None:
        """Stop serving a subscription, and return its progress; None if it is not served. Running handlers have
        `drain_s` seconds to end.

        If this call is cancelled, the subscription is not served any more either; its handlers were cancelled, but may
        not have ended yet."""
        delivery = self.deliveries.pop(name, None)
        if delivery is None:
            return None
        try:
            await delivery.stop(drain_s)
        finally:
            await self.catch_ups.stop(name)
            checkpoint = delivery.progress.checkpoint()
            if self.main is not None:
                self.main.leave(delivery)
            delivery.progress.end()
        return checkpoint

    async def acknowledge(self, offset: int) -> bool:
        """Tell the queue that the events below `offset` are finished. Return False if no receiver is open for that."""
        if self.main is None:
            return False
        await self.main.receiver.acknowledge(offset)
        return True

    async def aclose(self, drain_s: float = 0.0) -> dict[str, Checkpoint]:
        """Stop reading, detach all deliveries, and return the progress of each by name. Idempotent."""
        self._closed = True
        if self.main is not None:
            self.main.finish()
        self.catch_ups.finish()
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
        position, start = 0, None
        if self._rewindable:
            bounds = await self._adapter.bounds(self.queue)
            position, start = self._start(0), self._start(self._limits.max_events if self._is_first_start else 0)
            start = max(start, min(position, bounds.first))  # what is gone before is missing in the catch-ups alone
        receiver = await self._adapter.open_receiver(self.queue, start)
        try:
            cache = self._limits.main(rewindable=self._rewindable)
            bounds = await self._adapter.bounds(self.queue)
            cache.next_offset = start if start is not None else bounds.first
            self.main = MainFeed(
                self, receiver, cache,
                check_s=min(PRESSURE_CHECK_S, self._detach_after_s),
                position=position, most_again=self._limits.max_bytes, patience_s=PATIENCE * self._detach_after_s,
            )  # fmt: skip
            self.main.end = bounds.next
            receiver.offer_to(self.main.accept)
            self._is_first_start, self._restarting, self._fault = False, False, ""
            for delivery in list(self.deliveries.values()):
                self._place(delivery)
            self.catch_ups.rejoin(self.main)
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

    def reopen(self) -> None:
        """End the main feed, and start it again: at its position, or at its first unfinished batch if the queue cannot
        rewind."""
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
        for delivery in main.deliveries:
            delivery.progress.leave_feed()
        for delivery in list(self.deliveries.values()):
            delivery.leave(main)
        main.cache.close()

    def _start(self, within: int) -> int:
        """Return the offset at which the main feed starts: that of the furthest delivery, because the others catch up
        without holding it up. It is never past the watermark of a delivery whose cursors may not leave the cache.

        Streams up to `within` offsets behind the position of their delivery go on in the main feed: after a restart
        inside a backlog, that is most of them, and a main feed at the position would run away from them."""
        throttled = [d.progress.watermark for d in self.deliveries.values() if not self._relief.is_detachable(d)]
        return min([max((d.progress.resumes_at(within) for d in self.deliveries.values()), default=0), *throttled])

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
        """A queue that cannot rewind begins at `first`: record a gap for the events below it."""
        if delivery.progress.watermark < first:
            self.missing([delivery], Gap(delivery.progress.watermark, first, "the queue no longer has them"))
            delivery.progress.skip(first)

    def _on_parked(self, _: StreamCursor) -> None:
        """Find a feed for the cursor, but only after the feeds had their turn: they may have moved the main cache."""
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

    def _catch_up(self, delivery: Delivery) -> None:
        if self._rewindable:
            self.catch_ups.serve(delivery)
        elif self.catch_ups.due(delivery):
            self.reopen()

    def relieve(self, feed: Feed) -> None:
        """The feed's cache is full: detach the cursors that would hold up the others."""
        self._relief.relieve(feed)

    def missing(self, deliveries: Iterable[Delivery], gap: Gap) -> None:
        for delivery in deliveries:
            if gap.high > delivery.progress.watermark:
                delivery.counts.gaps += 1
                self._on_gap(delivery, gap)

    def note_lost_end(self, end: int) -> None:
        """Record the first lost offset. Subscriptions step back to it when the provider is opened again."""
        past = [delivery for delivery in self.deliveries.values() if delivery.progress.position > end]
        for delivery in past if end < self._lost_from else ():
            self._lost_from = end
            self._on_gap(delivery, Gap(end, delivery.progress.position, LOST_END))

    # ---- statistics ------------------------------------------------------------------------------------------------

    def statistics(self) -> AgentStatistics:
        main = self.main
        cache = main.cache if main is not None else self._limits.main(rewindable=self._rewindable)
        state, reason = self._state()
        return AgentStatistics(
            self.queue,
            cache.next_offset,
            cache.statistics(),
            replace(self.received),
            state,
            reason,
            [(d.statistics(), name in self.catch_ups.running) for name, d in self.deliveries.items()],
        )

    def is_catching_up(self, name: str) -> bool:
        """Whether the main feed does not bring a subscription's next events, because it is further behind."""
        delivery = self.deliveries.get(name)
        return self.main is not None and delivery is not None and delivery.progress.feed is not self.main

    def _pacemaker(self, main: Feed) -> str:
        """Return the reason why a full cache is not emptied: the delivery that holds its oldest batches."""
        progress = min((each.progress for each in main.deliveries), key=lambda one: one.shown_watermark, default=None)
        if progress is None:
            return "it is being emptied"
        name = next(name for name, each in self.deliveries.items() if each.progress is progress)
        return f"subscription {name!r} sets the pace, from offset {progress.shown_watermark} on"

    def fault_of(self, name: str) -> str:
        """Return the error that stops reading for a subscription at present; "" without one. A subscription that this
        process does not serve has the errors of the main feed."""
        main, delivery, catch_up = self.main, self.deliveries.get(name), self.catch_ups.running.get(name)
        faults = [self._fault, "" if catch_up is None else catch_up.fault]
        if main is not None and (delivery is None or delivery.progress.feed is main):
            faults.append(main.fault)
        if delivery is not None and delivery.progress.damage is not None:
            faults.append(str(delivery.progress.damage))
        return next(filter(None, faults), "")

    def _state(self) -> tuple[str, str]:
        main = self.main
        faults = [main.fault if main is not None else "", *(feed.fault for feed in self.catch_ups.running.values())]
        damages = [str(d.progress.damage) for d in self.deliveries.values() if d.progress.damage is not None]
        if fault := next(filter(None, (self._fault, *faults, *damages)), ""):
            return "faulted", shortened(fault)
        if main is None:
            return (
                "starting" if self._runner is not None else "idle",
                "" if self._runner is not None else "nobody subscribes",
            )
        if main.throttled:
            return "throttled", f"the cache is full: {self._pacemaker(main)}"
        return "running", ""
