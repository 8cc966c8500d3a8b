"""Catch-ups of one queue: they begin, take turns in a few slots, and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..adapters.seam import QueueAdapter
from ..streams.backoff import Backoff
from ..streams.errors import HeadraceError
from .cache import CacheLimits
from .catch_up_budget import CatchUpBudget, CatchUpShare
from .cursor import StreamCursor
from .delivery.delivery import Delivery
from .feed import CatchUp, Feed, FeedOwner

log = logging.getLogger("headrace.agents")

MAX_CATCH_UPS = 4
"""Catch-ups of one queue that read at the same time."""
CHECK_S = 0.02
"""How long a catch-up waits for space in a full cache before it asks for relief, in seconds. Shorter than the main
feed's `PRESSURE_CHECK_S`: other catch-ups may wait for its slot."""
NOTHING_DUE_S = 0.02
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class CatchUpRunner:
    """Runs catch-ups for the deliveries that need one."""

    def __init__(
        self, owner: FeedOwner, adapter: QueueAdapter, limits: CacheLimits, budget: CatchUpBudget, *, check_s: float
    ) -> None:
        self.running: dict[str, CatchUp] = {}
        """By subscription."""
        self._owner = owner
        self._adapter = adapter
        self._limits = limits
        self._budget = budget
        self._check_s = min(CHECK_S, check_s)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CATCH_UPS)
        self._queued = 0
        """Catch-ups that wait for a slot."""
        self._closed = False

    @property
    def is_contended(self) -> bool:
        """Whether catch-ups wait for a slot, or for bytes."""
        return bool(self._queued) or self._budget.is_contended

    def serve(self, delivery: Delivery) -> None:
        """Run catch-ups until the delivery needs none."""
        due, running = self.due(delivery), self.running.get(delivery.name)
        if running is not None:
            for cursor in due:
                running.adopt(cursor)
        elif (due or delivery.progress.feed is None) and delivery.name not in self._tasks:
            name = f"headrace catch-up {delivery.name}/{self._owner.queue}"
            self._tasks[delivery.name] = asyncio.create_task(self._run(delivery), name=name)

    def due(self, delivery: Delivery) -> list[StreamCursor]:
        """Give the main feed the parked cursors that its cache can serve. Return the others that no feed serves."""
        main = self._owner.main
        due = delivery.progress.without_feed()
        if main is None or delivery.progress.feed is not main:
            return due
        left: list[StreamCursor] = []
        for cursor in due:
            # Checked for each cursor: adopting one may purge batches that the next one needs.
            if cursor.token.offset >= main.cache.first_offset:
                delivery.adopt(cursor, main)
            else:
                left.append(cursor)
        return left

    def rejoin(self, main: Feed) -> None:
        """The main feed starts: end the catch-ups that have reached its cache."""
        for catch_up in list(self.running.values()):
            catch_up.rejoin(main)

    async def stop(self, name: str) -> None:
        """Run no catch-up for a subscription any more."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def finish(self) -> None:
        """Let the catch-ups read nothing more, and begin no further ones."""
        self._closed = True
        for feed in self.running.values():
            feed.finish()

    async def _run(self, delivery: Delivery) -> None:
        """Run one catch-up after the other until the delivery needs none."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            while not self._closed and (self.due(delivery) or delivery.progress.feed is None):
                try:
                    await delivery.wait_until_accepting()
                    async with self._slot():
                        if delivery.is_accepting:
                            await self._catch_up(delivery)
                    backoff.reset()
                except Exception as error:
                    unforeseen = None if isinstance(error, HeadraceError) else error
                    queue = self._owner.queue
                    log.warning(
                        "subscription %r cannot catch up in queue %d: %s",
                        delivery.name,
                        queue,
                        error,
                        exc_info=unforeseen,
                    )
                    await asyncio.sleep(backoff.next_s())
            delivery.progress.pass_damage()
        finally:
            if self._tasks.get(delivery.name) is asyncio.current_task():
                del self._tasks[delivery.name]

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

    async def _catch_up(self, delivery: Delivery) -> None:
        positions = [c.token.offset for c in self.due(delivery)]
        if delivery.progress.feed is None:
            positions.append(delivery.progress.base)
        if not positions or self._owner.main is None:
            await asyncio.sleep(NOTHING_DUE_S)
            return
        start = min(positions)
        receiver = await self._adapter.open_receiver(self._owner.queue, start)
        cache = self._limits.catch_up()
        cache.next_offset = start
        share = CatchUpShare(self._budget)
        feed = CatchUp(self._owner, receiver, cache, delivery, share, check_s=self._check_s)
        self.running[delivery.name] = feed
        try:
            for cursor in self.due(delivery):
                feed.adopt(cursor)
            await feed.run()
        finally:
            del self.running[delivery.name]
            if feed.whole and not feed.finished:
                delivery.progress.leave_feed()
            delivery.leave(feed)
            cache.close()
            share.close()
            await receiver.aclose()
