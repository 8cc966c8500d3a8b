"""A world to simulate: queues, a control store, and subscriptions whose handlers check every event they are given.

The model is exact: for each subscription and stream, it has the number of the next event. An event comes when all
before it are done and it is not. After a crash the numbers are those of the stored checkpoints, which must never be
ahead of the events done. After a clean stop both must be equal.
"""

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import (
    Event,
    EventBatch,
    OnFailure,
    RetryPolicy,
    Selector,
    SequenceToken,
    SlowConsumer,
    StreamId,
    SubscriptionDefinition,
)
from headrace.agents import HandlerService, PullingManager
from headrace.streams.handlers import Handler
from headrace.streams.subscriptions import Checkpoint
from tests.simulation.queues import SimulatedQueues
from tests.simulation.simulation import PROVIDER, FailedOnPurposeError, OneProcess

POISON, UNWANTED = b"poison", b"unwanted"

RETRY = RetryPolicy(max_attempts=3, initial_delay_s=0.02, max_delay_s=0.5)


@dataclass
class Consumer:
    """A subscription, and its state in the model."""

    definition: SubscriptionDefinition
    batches: bool
    filtered: bool
    concurrency: int
    done: dict[StreamId, int] = field(default_factory=dict[StreamId, int])
    """How many of a stream's events need nothing any more."""
    start: dict[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])
    running: set[StreamId] = field(default_factory=set[StreamId])
    delivered: int = 0
    moving: bool = False

    @property
    def name(self) -> str:
        return self.definition.name


def check_saved(manager: PullingManager, problem: Callable[[str], None]) -> None:
    """A delivery that has nothing unsaved is where its stored checkpoint says."""
    for name, served in manager.served.items():
        for queue, delivery in served.deliveries.items():
            if delivery.unsaved() is None and not delivery.pacer.held_back:
                now = delivery.progress.checkpoint()
                if served.saved[queue] != now:
                    problem(f"{name} does not say that it is at {now}, not at {served.saved[queue]}")


class HandlerSimulation(OneProcess):
    """`moody` handlers suspend, fail and hang at random; afterwards they only fail on poison."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.consumers: dict[str, Consumer] = {}
        self.gates: list[asyncio.Event] = []
        self.moody = True
        self.missed: list[tuple[str, StreamId, SequenceToken]] = []
        self.generation = 0
        self.start_manager()

    async def subscribe(self, consumer: Consumer, start: Callable[[int, int], Checkpoint]) -> None:
        """`start` makes a checkpoint of a queue's bounds."""
        selector = consumer.definition.selector
        explicit = [self.queue_of(StreamId.parse(selector.pattern))] if selector.explicit else range(self.queues)
        bounds = {queue: await self.adapter.bounds(queue) for queue in explicit}
        consumer.start = {queue: start(*bounds[queue]) for queue in explicit}
        assert await self.store.create_subscription(PROVIDER, consumer.definition, consumer.start)
        await self._settle_in(consumer)

    async def serve(self, consumer: Consumer) -> None:
        self.note(f"serve {consumer.name} from {consumer.done}")
        await self.manager.subscriptions.serve(
            consumer.definition,
            HandlerService(self._handler(consumer), passes if consumer.filtered else None, consumer.concurrency),
        )
        for delivery in self.manager.served[consumer.name].deliveries.values():
            delivery.retries._rng = self.rng  # pyright: ignore[reportPrivateUsage]

    async def withdraw(self, consumer: Consumer, drain_s: float) -> None:
        self.note(f"withdraw {consumer.name}, {drain_s} s")
        await self.manager.subscriptions.withdraw(consumer.name, drain_s)
        await self._compare(consumer, exact=True)

    async def seek(self, consumer: Consumer, start: Callable[[int, int], Checkpoint]) -> None:
        await self.withdraw(consumer, 0.0)
        bounds = {queue: await self.adapter.bounds(queue) for queue in consumer.start}
        positions = {queue: start(*bounds[queue]) for queue in consumer.start}
        self.note(f"seek {consumer.name} to {positions}")
        consumer.moving = True
        await self.store.seek(PROVIDER, consumer.name, positions, "test")
        await self._settle_in(consumer)

    async def _settle_in(self, consumer: Consumer) -> None:
        """Begin where the store says. A queue that cannot rewind may have let go of some of that meanwhile."""
        consumer.moving = True
        self.consumers[consumer.name] = consumer
        await self._compare(consumer, exact=False, new=True)
        if not self.adapter.capabilities.rewindable:
            await asyncio.sleep(1.0)
            self.dropped = [(await self.adapter.bounds(queue)).first for queue in range(self.queues)]
        consumer.moving = False
        await self.serve(consumer)

    async def take_over(self, consumer: Consumer, start: Callable[[int, int], Checkpoint]) -> None:
        """Another process moves a subscription that is served here, and gives it back."""
        bounds = {queue: await self.adapter.bounds(queue) for queue in consumer.start}
        positions = {queue: start(*bounds[queue]) for queue in consumer.start}
        self.note(f"take over {consumer.name} to {positions}")
        await self.store.seek(PROVIDER, consumer.name, positions, "test")
        while consumer.name in self.manager.served:
            self.release()  # a handler of a throttling subscription that hangs would stop the queue, and this loop
            # Whatever is done meanwhile counts for nothing, but only a change of the position is noticed.
            await self.publish([(StreamId("s", str(key)), [b"for all"]) for key in range(self.queues)])
            await asyncio.sleep(0.5)
        while any(consumer.name in agent.deliveries for agent in self.manager.agents) or consumer.running:  # noqa: ASYNC110 (virtual time: it costs nothing)
            await asyncio.sleep(0.1)
        # The old process may have passed a gap without a record of it: the subscription was taken from it.
        skipped = {stream: positions.get(self.queue_of(stream), Checkpoint(0)).next_offset for stream in self.tokens}
        self.missed = [m for m in self.missed if m[0] != consumer.name or m[2].offset >= skipped[m[1]]]
        await self._compare(consumer, exact=False, new=True)
        await self.serve(consumer)

    def retain(self, queue: int, below: int) -> None:
        """Retention deletes all events below, finished or not."""
        assert isinstance(self.adapter, SimulatedQueues)
        self.note(f"retention of queue {queue} to {below}")
        self.adapter.drop(queue, below)
        self.dropped[queue] = max(below, self.dropped[queue])

    async def restart(self, *, drain_s: float) -> None:
        self.note(f"restart, {drain_s} s")
        served = [self.consumers[name] for name in self.manager.served]
        await self.manager.aclose(drain_s)
        self.check_no_task_is_left()
        for consumer in self.consumers.values():
            await self._compare(consumer, exact=True)
        self.start_manager()
        for consumer in served:
            await self.serve(consumer)

    async def crash(self) -> None:
        """Lose all state of the process. Stored data stays."""
        self.note("crash")
        served = [self.consumers[name] for name in self.manager.served]
        self.generation += 1
        for one in self.manager.served.values():
            for delivery in one.deliveries.values():
                delivery.progress.on_parked = lambda _: None
        for agent in self.manager.agents:
            agent._closed = True  # pyright: ignore[reportPrivateUsage]
        await self.end_tasks()
        for consumer in self.consumers.values():
            consumer.running.clear()
            await self._compare(consumer, exact=False)
        self.start_manager()
        for consumer in served:
            await self.serve(consumer)

    async def close(self) -> None:
        await self.manager.aclose(1.0)
        self.check_no_task_is_left()
        for consumer in self.consumers.values():
            await self._compare(consumer, exact=True)

    def release(self) -> None:
        for gate in self.gates:
            gate.set()
        self.gates.clear()

    def resume(self) -> None:
        for served in self.manager.served.values():
            for delivery in served.deliveries.values():
                for stream in list(delivery.progress.cursors):
                    delivery.retries.resume(stream)

    async def settle(self) -> None:
        """Everybody gets everything."""
        self.moody = False
        self.note("settle")
        self.release()
        for consumer in self.consumers.values():
            if consumer.name not in self.manager.served:
                await self.serve(consumer)
        while True:
            self.resume()
            for served in self.manager.served.values():
                for queue, delivery in served.deliveries.items():
                    await delivery.waiters.wait_until((await self.adapter.bounds(queue)).next)
            if not any(one.statistics().paused for s in self.manager.served.values() for one in s.deliveries.values()):
                break
        for consumer in self.consumers.values():
            self._got_everything(consumer)

    def acknowledges(self, queue: int, offset: int) -> None:
        for consumer in [consumer for consumer in self.consumers.values() if not consumer.moving]:
            for stream in self._streams(consumer):
                done = self._next(consumer, stream, self._done(consumer, stream))
                wanted = self._wanted(consumer, stream, done, len(self.tokens[stream]))
                left = [t for t in (self.tokens[stream][i] for i in wanted) if t.offset >= self.dropped[queue]]
                if self.queue_of(stream) == queue and left and left[0].offset < offset:
                    self.problem(f"{offset} is acknowledged, but {consumer.name} needs {stream} {left[0]}")

    # What the model expects

    def _handler(self, consumer: Consumer) -> Handler:
        generation = self.generation

        async def on_event(event: Event) -> None:
            assert generation == self.generation, "a handler of before the crash is called"
            await self._handle(consumer, [event])

        async def on_batch(batch: EventBatch) -> None:
            assert generation == self.generation, "a handler of before the crash is called"
            events = batch.events()
            if len(events) != batch.count:
                self.problem(f"{consumer.name}: a batch of {batch.count} has {len(events)} events")
            await self._handle(consumer, events)

        return Handler.of(on_batch if consumer.batches else on_event, batch=consumer.batches)

    async def _handle(self, consumer: Consumer, events: list[Event]) -> None:
        stream = events[0].stream
        assert stream is not None
        if stream in consumer.running:
            self.problem(f"{consumer.name}: two at a time of {stream}")
        consumer.running.add(stream)
        try:
            done = self._expect(consumer, stream, events)
            await self._behave(events)
            consumer.done[stream] = done
            consumer.delivered += len(events)
        finally:
            consumer.running.discard(stream)

    def _expect(self, consumer: Consumer, stream: StreamId, events: list[Event]) -> int:
        """Check that these come next. Returns how many are done after them."""
        tokens, payloads = self.tokens[stream], self.payloads[stream]
        index = self._done(consumer, stream)
        for event in events:
            assert event.token is not None
            index = self._next(consumer, stream, index)
            further = bisect_left(tokens, event.token)
            if self._only_dropped(consumer, stream, index, further):
                self._miss(consumer, stream, index, further)
                index = max(index, further)
            if index >= len(tokens) or event.token != tokens[index] or event.payload != payloads[index]:
                expected = tokens[index] if index < len(tokens) else "nothing"
                self.problem(f"{consumer.name}: {stream} {event.token} came, expected was {expected}")
                raise FailedOnPurposeError
            index += 1
        return index

    async def _behave(self, events: list[Event]) -> None:
        mood = self.rng.random() if self.moody else 0.0
        if any(event.payload == POISON for event in events) and (self.moody or self.rng.random() < 0.5):
            raise FailedOnPurposeError("poison")
        if mood < 0.6:
            return
        if mood < 0.7:
            await asyncio.sleep(0)
        elif mood < 0.8:
            await asyncio.sleep(self.rng.random() * 0.1)
        elif mood < 0.84:
            await asyncio.sleep(self.rng.random() * 3)
        elif mood < 0.87:
            gate = asyncio.Event()
            self.gates.append(gate)
            await gate.wait()
        else:
            raise FailedOnPurposeError("bad mood")

    def _done(self, consumer: Consumer, stream: StreamId) -> int:
        return consumer.done.setdefault(stream, self._index(consumer.start, stream))

    def _next(self, consumer: Consumer, stream: StreamId, index: int) -> int:
        """Index of the next event that the consumer wants."""
        payloads = self.payloads[stream]
        while consumer.filtered and index < len(payloads) and payloads[index] == UNWANTED:
            index += 1
        return index

    def _index(self, checkpoints: dict[int, Checkpoint], stream: StreamId) -> int:
        """How many events of the stream are done, as the checkpoint of its queue says."""
        checkpoint = checkpoints[self.queue_of(stream)]
        behind = checkpoint.behind.get(stream)
        return bisect_left(
            self.tokens.get(stream, []), behind.token if behind else SequenceToken(checkpoint.next_offset)
        )

    def gave_up(self, name: str, events: Sequence[Event], *, dead: bool) -> None:
        for event in events:
            assert event.stream is not None
            self.consumers[name].done[event.stream] = self.number_of(event) + 1

    def _streams(self, consumer: Consumer) -> list[StreamId]:
        matches = consumer.definition.selector.matcher()
        return [stream for stream in self.tokens if matches(stream)]

    async def _compare(self, consumer: Consumer, *, exact: bool, new: bool = False) -> None:
        """Check that stored positions are not ahead of the events done and, if `exact`, not behind. Make them the
        model."""
        stored = dict(await self.store.checkpoints(PROVIDER, consumer.name))
        for stream in self._streams(consumer):
            done = self._next(consumer, stream, self._done(consumer, stream))
            saved = self._next(consumer, stream, self._index(stored, stream))
            if (
                not new
                and done != saved
                and (exact or saved > done)
                and not self._only_dropped(consumer, stream, done, saved)
            ):
                self.problem(
                    f"{consumer.name}: {stream} is done to {done}, the checkpoint says {saved} "
                    f"({stored[self.queue_of(stream)]})"
                )
            if not new:
                self._miss(consumer, stream, done, saved)
            consumer.done[stream] = saved
        consumer.start = stored
        self.note(f"stored {consumer.name}: {stored}")

    def _only_dropped(self, consumer: Consumer, stream: StreamId, low: int, high: int) -> bool:
        gone = self.dropped[self.queue_of(stream)]
        return all(self.tokens[stream][i].offset < gone for i in self._wanted(consumer, stream, *sorted((low, high))))

    def _wanted(self, consumer: Consumer, stream: StreamId, low: int, high: int) -> list[int]:
        return [i for i in range(low, high) if not (consumer.filtered and self.payloads[stream][i] == UNWANTED)]

    def _got_everything(self, consumer: Consumer) -> None:
        for stream in self._streams(consumer):
            done, end = self._next(consumer, stream, self._done(consumer, stream)), len(self.tokens[stream])
            if done < end and not self._only_dropped(consumer, stream, done, end):
                self.problem(f"{consumer.name}: {stream} ended at {done} of {end}")
            self._miss(consumer, stream, done, end)

    def _miss(self, consumer: Consumer, stream: StreamId, low: int, high: int) -> None:
        wanted = self._wanted(consumer, stream, low, high)
        self.missed += [(consumer.name, stream, self.tokens[stream][index]) for index in wanted]


def passes(event: Event) -> bool:
    if event.payload == POISON:
        raise ValueError("a filter that cannot take it lets it through")
    return event.payload != UNWANTED


def consumer_of(rng: random.Random, name: str, patterns: Sequence[str], *, rewindable: bool) -> Consumer:
    policies = [None, SlowConsumer.THROTTLE] + [SlowConsumer.DETACH] * 2 * rewindable
    definition = SubscriptionDefinition(
        name=name,
        selector=Selector(rng.choice(patterns)),
        retry=RETRY,
        on_failure=rng.choice(list(OnFailure)),
        slow_consumer=rng.choice(policies),
    )
    return Consumer(definition, rng.random() < 0.3, rng.random() < 0.3, rng.choice((1, 2, 5, 100)))
