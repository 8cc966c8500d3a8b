"""Control requests: changes that other silos of the cluster ask for, through the control store."""

from __future__ import annotations

import asyncio

from ..streams.background import run_periodically
from .host_state import HostState
from .progress_store import ProgressStore
from .queue_host import QueueHost
from .subscription_runner import SubscriptionRunner

POLL_S = 1.0
"""How often the control store is read for requests, in seconds."""
DRAIN_S = 10.0
"""How long a queue that stops waits for its events in flight, in seconds."""


class ControlRequestApplier:
    """Applies control requests: other silos moved or deleted subscriptions, or want agents to stop or start."""

    def __init__(
        self, state: HostState, store: ProgressStore, queues: QueueHost, subscriptions: SubscriptionRunner
    ) -> None:
        self._state = state
        self._store = store
        self._queues = queues
        self._subscriptions = subscriptions
        self._applying = asyncio.Lock()

    async def run(self) -> None:
        """Apply requests periodically. Does not end."""
        await run_periodically(self.apply, POLL_S)

    async def apply(self, drain_s: float = DRAIN_S) -> None:
        """Read the requests, and apply them. Events in flight of queues that stop have `drain_s` seconds to end."""
        async with self._applying:
            await self._apply(drain_s)

    async def _apply(self, drain_s: float) -> None:
        state = self._state
        names = [name for name, served in state.served.items() if served.service.stored]
        requests = await self._store.control_requests(state.provider, names)
        for name in names:
            served = state.served.get(name)
            if served is not None and requests.epochs.get(name) != served.epoch:
                self._subscriptions.stop_fenced(name)
        if stop := sorted(requests.stopped - state.stopped):
            await self._queues.stop_agents(stop, drain_s)
        if start := sorted(state.stopped - requests.stopped):
            await self._queues.start_agents(start)
