"""The state that the parts of a `PullingManager` share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..adapters.receiving import Gap
from ..adapters.seam import QueueAdapter
from ..streams.background import BackgroundTasks
from ..streams.subscriptions import Checkpoint
from .agent import CacheLimits, PullingAgent
from .catch_up_budget import CatchUpBudget
from .delivery.delivery import Delivery, Term
from .failure_recorder import FailureRecorder
from .served import ServedSubscription


class HostState:
    """Agents, leases and served subscriptions of one provider in this process."""

    def __init__(
        self,
        provider: str,
        queues: int,
        adapter: QueueAdapter,
        recorder: FailureRecorder,
        limits: CacheLimits,
        *,
        leases: dict[int, int] | None,
        detach_after_s: float,
    ) -> None:
        self.provider = provider
        self.queues = queues
        self.leases = leases
        """Epochs of the leases by queue. None: this process has all queues."""
        self.terms: dict[int, Term] = {}
        """Terms of the leases by queue."""
        self.served: dict[str, ServedSubscription] = {}
        self.stopped: set[int] = set()
        """Queues whose agents were stopped, until they are started again."""
        self.changing = asyncio.Lock()
        """Held while agents stop and start. A call that stops a subscription meanwhile waits for their progress."""
        self.background = BackgroundTasks()
        """Ended when the manager is closed, before the agents."""
        self.recorder = recorder
        self.new_agent: Callable[[int], PullingAgent] = self._new_agent
        self._adapter = adapter
        self._limits = limits
        self._detach_after_s = detach_after_s
        self._catch_up_budget = CatchUpBudget(queues * limits.catch_up_bytes // 2)
        self.agents = [self.new_agent(queue) for queue in range(queues)]

    def _new_agent(self, queue: int) -> PullingAgent:
        return PullingAgent(
            self._adapter,
            queue,
            self._limits,
            detach_after_s=self._detach_after_s,
            on_gap=self._record_gap,
            budget=self._catch_up_budget,
        )

    def _record_gap(self, delivery: Delivery, gap: Gap) -> None:
        record = self.recorder.record_gap(delivery, gap)
        if (served := self.served.get(delivery.name)) is not None:
            served.service.gap(record)

    def leases_now(self) -> dict[int, int] | None:
        """A copy of the leases. Progress that is read now must not be stored under newer ones."""
        return None if self.leases is None else dict(self.leases)

    def reads(self, queue: int) -> bool:
        """Whether this process reads the queue."""
        return queue not in self.stopped and (self.leases is None or queue in self.leases)

    def attach(self, served: ServedSubscription, queue: int, checkpoint: Checkpoint) -> None:
        """Deliver a queue's events to a subscription, from the checkpoint on."""
        delivery = served.deliveries[queue] = served.service.deliver(
            served.definition, queue, checkpoint, self.recorder,
            epoch=served.epoch, term=self.terms.get(queue), rewindable=self._adapter.capabilities.rewindable,
            gate=served.gate,
        )  # fmt: skip
        self.agents[queue].attach(delivery)

    def attach_all(self, queue: int) -> None:
        """Deliver a queue's events to all subscriptions that read it, from their stored checkpoints on."""
        for name, served in self.served.items():
            if self.reads(queue) and queue in served.saved and name not in self.agents[queue].deliveries:
                self.attach(served, queue, served.saved[queue])
