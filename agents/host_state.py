"""The state that the parts of a `PullingManager` share. They read its fields, and change them by its methods."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ..adapters.receiving import LOST_END, Gap
from ..adapters.seam import QueueAdapter
from ..balancer.held_leases import LeaseTerm
from ..streams.background import BackgroundTasks
from ..streams.subscriptions import CONSUMER_SEPARATOR, is_consumers_position
from .agent import PullingAgent
from .cache import CacheLimits
from .catch_up_budget import CatchUpBudget
from .counts import DeliveryCounts, ReceivedCounts
from .delivery.delivery import Delivery
from .failure_recorder import FailureRecorder
from .served import ServedSubscription

_ENDED = -1
"""Stands for a queue among the counts of a subscription: the sum over its consumers that have left."""


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
        rng: random.Random | None = None,
    ) -> None:
        self.provider = provider
        self.queues = queues
        self._leases = leases
        self.leases: Mapping[int, int] | None = leases
        """Epochs of the leases by queue. None: this process has all queues."""
        self._served: dict[str, ServedSubscription] = {}
        self.served: Mapping[str, ServedSubscription] = self._served
        self._stopped: set[int] = set()
        self.stopped: AbstractSet[int] = self._stopped
        """Queues whose agents were stopped, until they are started again."""
        self._leaving: set[int] = set()
        """Queues that are given back: their agents stop, and their leases are not over yet."""
        self._terms: dict[int, LeaseTerm] = {}
        """Terms of the leases by queue."""
        self.changing = asyncio.Lock()
        """Held while agents stop and start. A call that stops a subscription meanwhile waits for their progress."""
        self.paused: dict[str, ServedSubscription] = {}
        """Subscriptions that are stopped for a moment: by a move, or because another process moved them."""
        self.changes: set[asyncio.Future[None]] = set()
        """Calls that close a subscription or move its position now. A queue is given back after them."""
        self.background = BackgroundTasks()
        """Ended when the manager is closed, before the agents."""
        self.recorder = recorder
        self.new_agent: Callable[[int], PullingAgent] = self._new_agent
        self._adapter = adapter
        self._limits = limits
        self._detach_after_s = detach_after_s
        self._rng = rng
        self._catch_up_budget = CatchUpBudget(queues * limits.catch_up_bytes // 2)
        self._received = [ReceivedCounts() for _ in range(queues)]
        self.noted = 0
        """Number of calls of `note_change`."""
        self._sleepers: set[asyncio.Event] = set()
        self._counts: dict[str, dict[int, DeliveryCounts]] = {}
        """By subscription and queue. They outlive the deliveries."""
        self._agents = [self.new_agent(queue) for queue in range(queues)]
        self.agents: Sequence[PullingAgent] = self._agents

    def _new_agent(self, queue: int) -> PullingAgent:
        return PullingAgent(
            self._adapter,
            queue,
            self._limits,
            detach_after_s=self._detach_after_s,
            on_gap=self._record_gap,
            rng=self._rng,
            budget=self._catch_up_budget,
            received=self._received[queue],
        )

    def _record_gap(self, delivery: Delivery, gap: Gap) -> None:
        record = self.recorder.record_gap(delivery, gap)
        if gap.reason != LOST_END and (served := self.served.get(delivery.name)) is not None:
            served.service.gap(record)
        self.note_change()

    # ---- background work waits for changes -----------------------------------------------------------------------

    def note_change(self) -> None:
        """Wake the background work that waits for a change."""
        self.noted += 1
        for sleeper in self._sleepers:
            sleeper.set()

    async def wait_for_change(self, timeout_s: float | None = None, *, noted: int | None = None) -> None:
        """Return when the progress of a delivery has changed, a delivery begins, a gap is recorded, or background work
        calls `note_change`; at the latest after `timeout_s` seconds. `noted`: return at once if `self.noted` differs
        from this earlier value."""
        if noted is not None and noted != self.noted:
            return
        changed = asyncio.Event()
        self._sleepers.add(changed)
        for served in self.served.values():
            for delivery in served.deliveries.values():
                delivery.progress.call_on_change(self.note_change)
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._sleepers.discard(changed)

    def leases_now(self) -> dict[int, int] | None:
        """A copy of the leases. Progress that is read now must not be stored under newer ones."""
        return None if self.leases is None else dict(self.leases)

    def reads(self, queue: int) -> bool:
        """Whether this process reads the queue."""
        return not (queue in self.stopped or queue in self._leaving) and (self.leases is None or queue in self.leases)

    # ---- subscriptions ---------------------------------------------------------------------------------------------

    def serve(self, served: ServedSubscription) -> None:
        """Serve a subscription from its stored checkpoints on."""
        self._served[served.definition.name] = served
        for queue in served.saved:
            if self.reads(queue):
                self._attach(served, queue)

    def remove(self, name: str) -> None:
        """Serve a subscription no more. Its deliveries go on until they are detached."""
        served = self._served.pop(name)
        if is_consumers_position(served.definition):  # otherwise the counts grow with each new name of a consumer
            of = self._counts.setdefault(name.partition(CONSUMER_SEPARATOR)[0], {})
            of[_ENDED] = DeliveryCounts.sum_of([*self._counts.pop(name, {}).values(), of.get(_ENDED, DeliveryCounts())])

    def pause(self, served: ServedSubscription) -> None:
        """As `remove`, until `end_pause`: it may be served again."""
        self.remove(served.definition.name)
        self.paused[served.definition.name] = served

    def end_pause(self, name: str) -> None:
        """The subscription is served again, or it is not to be. Idempotent."""
        self.paused.pop(name, None)

    def _attach(self, served: ServedSubscription, queue: int) -> None:
        queue_epoch = served.epoch if self.leases is None else self.leases[queue]
        delivery = served.service.deliver(
            served.definition, queue, served.saved[queue], self.recorder,
            epoch=served.epoch, queue_epoch=queue_epoch, generation=served.generation, term=self._terms.get(queue),
            rewindable=self._adapter.capabilities.rewindable, gate=served.gate,
            counts=self._counts.setdefault(served.definition.name, {}).setdefault(queue, DeliveryCounts()),
        )  # fmt: skip
        served.begin(queue, delivery)
        self.agents[queue].attach(delivery)
        self.note_change()

    def ended_counts(self, name: str) -> DeliveryCounts | None:
        """Counts of a subscription's consumers that have left, with mode broadcast; None if none has."""
        return self._counts.get(name, {}).get(_ENDED)

    def counts(self, name: str) -> Sequence[DeliveryCounts]:
        """Counts of a subscription's events in each queue since the process began."""
        return list(self._counts.get(name, {}).values())

    # ---- queues ----------------------------------------------------------------------------------------------------

    def gain(self, queue: int, epoch: int, term: LeaseTerm) -> None:
        """The lease of a queue began: read it from the stored checkpoints on."""
        assert self._leases is not None
        self._leases[queue], self._terms[queue] = epoch, term
        self._leaving.discard(queue)
        self._attach_all(queue)

    def leave(self, queues: Iterable[int]) -> None:
        """Attach nothing more to queues that are given back."""
        self._leaving.update(queues)

    def lose(self, queue: int) -> None:
        """The lease of a queue ended. Deliveries that have not stopped end at once."""
        assert self._leases is not None
        self._leases.pop(queue, None)
        self._leaving.discard(queue)
        for served in self.served.values():
            if (delivery := served.end(queue)) is not None:
                delivery.halt(lost=True)
        self.ended(queue)

    def ended(self, queue: int) -> None:
        """The queue's events are not delivered here any more."""
        for served in self.served.values():
            served.service.ended(queue)

    def replace_agent(self, queue: int) -> PullingAgent:
        """Put a new agent into the place of a queue's agent. Return the former one: the caller closes it."""
        agent, self._agents[queue] = self._agents[queue], self.new_agent(queue)
        return agent

    def stop(self, queues: Sequence[int]) -> None:
        """Attach nothing to these queues until they are started."""
        self._stopped.update(queues)

    def start(self, queues: Sequence[int]) -> None:
        """Read those of the queues that were stopped from the stored checkpoints on."""
        for queue in self._stopped.intersection(queues):
            self._stopped.discard(queue)
            self._attach_all(queue)

    def _attach_all(self, queue: int) -> None:
        """Deliver a queue's events to all subscriptions that read it."""
        for name, served in self.served.items():
            if self.reads(queue) and queue in served.saved and name not in self.agents[queue].deliveries:
                self._attach(served, queue)
