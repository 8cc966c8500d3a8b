"""Frees space in the queues: events that every subscription has finished may be deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..adapters.seam import QueueAdapter
from ..streams.background import run_periodically
from .host_state import HostState
from .progress_store import ProgressStore
from .served import ServedSubscription

RETENTION_S = 5.0
ACKNOWLEDGE_S = 0.02
"""How often queues that cannot rewind are told which events are finished, in seconds: that frees their bounded
capacity."""


class Retention:
    """Lets the adapter delete the events that its retention allows. Unfinished events stay."""

    def __init__(self, provider: str, queues: int, adapter: QueueAdapter, store: ProgressStore) -> None:
        self._provider = provider
        self._queues = queues
        self._adapter = adapter
        self._store = store

    async def run(self) -> None:
        """Apply the retention periodically. Does not end, unless the queues end with the process: such queues have no
        retention."""
        if self._adapter.capabilities.durable:
            await run_periodically(self.apply, RETENTION_S)

    async def apply(self) -> None:
        """Apply the retention once. Show the progress of subscriptions to the tools of the queue technology."""
        await self._adapter.apply_retention(await self._store.watermarks(self._provider))
        if self._adapter.capabilities.shows_progress:
            await self._adapter.show_progress(await self._positions())

    async def _positions(self) -> dict[str, dict[int, int]]:
        """The lowest unfinished offset of each subscription by queue."""
        positions: dict[str, dict[int, int]] = {}
        for queue in range(self._queues):
            for name, checkpoint in (await self._store.checkpoints_of_queue(self._provider, queue)).items():
                positions.setdefault(name, {})[queue] = checkpoint.watermark
        return positions


class QueueAcknowledger:
    """Tells queues that cannot rewind which events every subscription has finished."""

    def __init__(self, state: HostState, store: ProgressStore, *, durable: bool) -> None:
        """`durable`: the queues outlive this process."""
        self._state = state
        self._store = store
        self._durable = durable
        self._acknowledged: dict[int, int] = {}
        """Offsets by queue."""

    async def run(self) -> None:
        """Acknowledge periodically, while there is something to acknowledge. Does not end."""
        await run_periodically(self.acknowledge, ACKNOWLEDGE_S, self._wait_for_change)

    async def _wait_for_change(self) -> None:
        if not self._moved():
            await self._state.wait_for_change()

    def _moved(self) -> Mapping[int, int]:
        """By queue, the offsets below which everything is finished, if they are not acknowledged yet."""
        done = {agent.queue: self._finished(agent.queue) for agent in self._state.agents}
        return {queue: at for queue, at in done.items() if at is not None and at > self._acknowledged.get(queue, 0)}

    async def acknowledge(self) -> None:
        """Acknowledge once. A subscription that is not served here keeps its events by its stored checkpoint."""
        moved = self._moved()
        if not moved:
            return
        stored = await self._store.watermarks(self._state.provider, apart_from=list(self._state.served))
        finished = {queue: min(watermark, stored.get(queue, watermark)) for queue, watermark in moved.items()}
        acknowledging = [self._acknowledge(queue, at) for queue, at in finished.items()]
        # A queue that fails must not keep the others from freeing space: raise after all were tried.
        for outcome in await asyncio.gather(*acknowledging, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _acknowledge(self, queue: int, at: int) -> None:
        if await self._state.agents[queue].acknowledge(at):
            self._acknowledged[queue] = at

    def _finished(self, queue: int) -> int | None:
        """The offset below which every subscription that is served here is done.

        A durable queue outlives this process, so it is told only about progress that a crash would not undo. A queue
        in this process frees its space at once."""
        served = self._state.served.values()
        if not self._durable:
            deliveries = [one.deliveries.get(queue) for one in served]
            return min((delivery.progress.watermark for delivery in deliveries if delivery is not None), default=None)
        return min((_safe_watermark(one, queue) for one in served if queue in one.deliveries), default=None)


def _safe_watermark(served: ServedSubscription, queue: int) -> int:
    """The watermark of a subscription that a crash would not undo: it is stored, or the consumers keep it."""
    if not served.service.stored:
        return served.deliveries[queue].progress.watermark
    return served.saved[queue].watermark if queue in served.saved else 0
