"""The base of all simulations: a history, the problems in it, and a manager that tells what its agents do."""

import asyncio
import random
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace import Event, EventBatch, SequenceToken, StreamId
from headrace.adapters import QueueAdapter
from headrace.agents import CacheLimits, Delivery, PullingAgent, PullingManager
from headrace.store.control_store import ControlStore
from tests.simulation.virtual_time import STARTS_AT_S, SimulatedLoop

PROVIDER = "simulated"


class FailedOnPurposeError(Exception):
    """A handler fails because the simulation wants it to."""


class Simulation:
    """What happened, and what should not have happened."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: list[str] = []
        self.problems: list[str] = []

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def note(self, text: str) -> None:
        self.history.append(f"{self.now - STARTS_AT_S:9.4f} {text}")

    def problem(self, text: str) -> None:
        self.note(f"PROBLEM {text}")
        self.problems.append(text)


class WatchedManager(PullingManager):
    """Tells which events deliveries give up on."""

    def __init__(self, rng: random.Random, *args: Any, **options: Any) -> None:
        super().__init__(*args, rng=rng, **options)
        self._dead_letter, self._skipped = self.recorder.dead_letter, self.recorder.skipped
        self.recorder.dead_letter = self._watched_dead_letter  # pyright: ignore[reportAttributeAccessIssue]
        self.recorder.skipped = self._watched_skipped  # pyright: ignore[reportAttributeAccessIssue]

    def gave_up(self, delivery: Delivery, events: Sequence[Event], *, dead: bool) -> None:
        """These events were given up on, and that is durable. `dead`: as dead letters."""

    async def _watched_dead_letter(
        self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int
    ) -> None:
        await self._dead_letter(delivery, events, reason, attempts)
        self.gave_up(delivery, events, dead=True)

    async def _watched_skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None:
        await self._skipped(delivery, events, reason)
        self.gave_up(delivery, events, dead=False)


class OneProcess(Simulation):
    """Queues, a control store, and the agents of one process. The base of models of all subscriptions."""

    def __init__(
        self,
        rng: random.Random,
        adapter: QueueAdapter,
        store: ControlStore,
        *,
        queues: int,
        limits: CacheLimits,
        detach_after_s: float = 0.25,
    ) -> None:
        super().__init__(rng)
        self.adapter = adapter
        self.store = store
        self.queues = queues
        self.limits = limits
        self.detach_after_s = detach_after_s
        self.tokens: dict[StreamId, list[SequenceToken]] = {}
        """Of all published events."""
        self.payloads: dict[StreamId, list[bytes]] = {}
        self.dropped = [0] * queues
        """Below these offsets a queue has nothing any more."""
        self._outside = asyncio.all_tasks()

    def queue_of(self, stream: StreamId) -> int:
        return sum(stream.key.encode()) % self.queues

    def number_of(self, event: Event) -> int:
        """The number of an event in its stream, from 0."""
        assert event.stream is not None
        assert event.token is not None
        return bisect_left(self.tokens[event.stream], event.token)

    async def publish(self, parts: Sequence[tuple[StreamId, Sequence[bytes]]]) -> None:
        batches = [(self.queue_of(stream), EventBatch.of(stream, payloads)) for stream, payloads in parts]
        receipts = self.adapter.enqueue(batches)
        for (stream, payloads), receipt in zip(parts, await receipts, strict=True):
            assert receipt.token is not None
            self.tokens.setdefault(stream, []).extend(receipt.token._replace(index=i) for i in range(len(payloads)))
            self.payloads.setdefault(stream, []).extend(payloads)

    def start_manager(self) -> None:
        self.manager = _ProcessManager(self)
        self.manager.start()

    def gave_up(self, name: str, events: Sequence[Event], *, dead: bool) -> None:
        """A subscription gave up on these events."""
        raise NotImplementedError

    def acknowledges(self, queue: int, offset: int) -> None:
        """The process declares everything below the offset finished."""
        raise NotImplementedError

    async def end_tasks(self) -> None:
        """End all tasks of the process, as a crash does. Deliveries hand out nothing more."""
        for one in self.manager.served.values():
            for delivery in one.deliveries.values():
                delivery.halt()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        mine = [task for task in loop.tasks() if task not in self._outside and task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        self.check_no_task_is_left()
        if not self.adapter.capabilities.rewindable:  # acknowledged batches are gone
            self.dropped = [(await self.adapter.bounds(queue)).first for queue in range(self.queues)]

    def check_no_task_is_left(self) -> None:
        tasks = asyncio.all_tasks() - self._outside - {asyncio.current_task()}  # type: ignore[operator]
        if left := [task.get_name() for task in tasks if not task.cancelling()]:
            self.problem(f"tasks left: {left}")


class _ProcessManager(WatchedManager):
    """Tells a simulation about its agents."""

    def __init__(self, simulation: OneProcess) -> None:
        self._simulation = simulation
        super().__init__(
            simulation.rng,
            PROVIDER,
            simulation.queues,
            simulation.adapter,
            simulation.store,
            simulation.limits,
            detach_after_s=simulation.detach_after_s,
        )
        self._new_agent = self.state.new_agent
        self.state.new_agent = self._watched_agent
        for agent in self.agents:
            self._watch(agent)

    def gave_up(self, delivery: Delivery, events: Sequence[Event], *, dead: bool) -> None:
        self._simulation.gave_up(delivery.name, events, dead=dead)

    def _watched_agent(self, queue: int) -> PullingAgent:
        agent = self._new_agent(queue)
        self._watch(agent)
        return agent

    def _watch(self, agent: PullingAgent) -> None:
        agent.acknowledge = self._acknowledging(agent)  # pyright: ignore[reportAttributeAccessIssue]

    def _acknowledging(self, agent: PullingAgent) -> Callable[[int], Awaitable[None]]:
        acknowledge = agent.acknowledge

        async def checked(offset: int) -> None:
            self._simulation.acknowledges(agent.queue, offset)
            await acknowledge(offset)

        return checked
