"""A world of groups to simulate: queues, a control store, subscriptions, and remote consumers that act at random.

For each subscription, the model knows which events are done, and which consumer holds which event. It checks each event
that is handed out: the event is not done, no other consumer holds it, and each earlier event of its stream is done or
with the same consumer. After a clean stop the stored checkpoint is exactly the events done. After a crash it is never
ahead of them, and the model goes on from it.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from headrace import Event, SequenceToken, StreamId
from headrace.agents import (
    Edge,
    EventRange,
    Group,
    HandlerService,
    Member,
)
from headrace.streams.frames import DeliveredBatch
from headrace.streams.handlers import Handler
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition
from tests.simulation.groups import Consumer, indexes, parsed
from tests.simulation.simulation import PROVIDER, OneProcess

TICK_S = 0.25


class Known:
    """What the model knows of a subscription. Events of a stream have the numbers 0, 1, …"""

    def __init__(self, definition: SubscriptionDefinition) -> None:
        self.definition = definition
        self.group: Group | None = None
        self.done: dict[StreamId, set[int]] = {}
        self.held: dict[StreamId, dict[int, Client]] = {}
        """Who holds an event that is not done."""
        self.dead: set[tuple[StreamId, SequenceToken]] = set()
        self.clients: list[Client] = []
        self.start: dict[int, Checkpoint] = {}
        self.low: dict[StreamId, int] = {}
        """Everything below is done."""
        self.handed = self.acknowledged = self.rejected = 0

    @property
    def name(self) -> str:
        return self.definition.name

    def selects(self) -> Callable[[StreamId], bool]:
        return self.definition.selector.matcher()

    def forget(
        self, client: "Client | None" = None, queue: int | None = None, world: "GroupSimulation | None" = None
    ) -> None:
        """Take back the events of a client, or all events of a queue."""
        for stream, held in self.held.items():
            if queue is None or (world is not None and world.queue_of(stream) == queue):
                for number in [n for n, holder in held.items() if client in (None, holder)]:
                    del held[number]


class Client(Consumer):
    """A consumer of the world."""

    def __init__(self, known: Known, name: str, **options: Any) -> None:
        assert known.group is not None
        super().__init__(known.group, name, **options)
        self.known = known
        self.here = False
        self.connections: dict[tuple[StreamId, int], int] = {}
        """The connection in which it got the events that it holds."""

    def connect(self, events: int = 0, size: int = 0) -> None:
        assert self.known.group is not None
        self.group = self.known.group
        self.here = True
        super().connect(events, size)

    def away(self) -> None:
        self.here = False
        self.connection += 1


class WatchedEdge(Edge):
    """Tells the world which events are handed out."""

    world: "GroupSimulation"

    def put(self, member: Member, frame: bytes) -> None:
        self.world.handed_out(member, parsed(frame))
        super().put(member, frame)


class GroupSimulation(OneProcess):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.subscriptions: dict[str, Known] = {}
        self.members: dict[Member, Client] = {}
        self.resettling: set[str] = set()
        self.draining = False
        """A subscription or queue is being stopped: its events may be taken back at any moment."""
        self._ticking: asyncio.Task[None] | None = None
        self._open()

    # ---- what happens in it ----------------------------------------------------------------------------------------

    async def subscribe(self, definition: SubscriptionDefinition) -> Known:
        known = self.subscriptions[definition.name] = Known(definition)
        known.start = {queue: Checkpoint((await self.adapter.bounds(queue)).first) for queue in range(self.queues)}
        if not self.adapter.capabilities.rewindable:
            known.start = {queue: Checkpoint((await self.adapter.bounds(queue)).next) for queue in range(self.queues)}
        await self.store.create_subscription(PROVIDER, definition, known.start)
        self._become(known, known.start)
        await self.serve(known)
        return known

    async def serve(self, known: Known, *, handler: bool = False) -> None:
        self.note(f"serve {known.name}{' by a handler' * handler}")
        known.group = None
        if handler:
            await self.manager.subscriptions.serve(known.definition, HandlerService(self._handler(known), None, 3))
        else:
            group = known.group = Group(known.definition, self.edge)
            await self.manager.subscriptions.serve(known.definition, group)
        for delivery in self.manager.served[known.name].deliveries.values():
            delivery.retries._rng = self.rng  # pyright: ignore[reportPrivateUsage]

    async def withdraw(self, known: Known, drain_s: float) -> None:
        self.note(f"withdraw {known.name}, {drain_s} s")
        await self.manager.subscriptions.withdraw(known.name, drain_s)
        self._ended(known)
        await self._compare(known, exact=True)

    async def move(self, known: Known, positions: Mapping[int, Checkpoint], drain_s: float) -> None:
        self.note(f"move {known.name} to {positions}")
        self.resettling.add(known.name)
        await self.manager.subscriptions.move(known.name, positions, "test", drain_s)
        self.resettling.discard(known.name)
        known.forget()
        self._become(known, positions)

    async def stop_agents(self, queue: int, drain_s: float) -> None:
        self.note(f"stop agent {queue}, {drain_s} s")
        await self.manager.queue_host.stop_agents([queue], drain_s)
        for known in list(self.subscriptions.values()):
            known.forget(queue=queue, world=self)
            await self._compare(known, exact=True, only=queue)

    async def start_agents(self) -> None:
        self.note("start agents")
        await self.manager.queue_host.start_agents(range(self.queues))

    async def restart(self, drain_s: float) -> None:
        self.note(f"restart, {drain_s} s")
        served = [self.subscriptions[name] for name in self.manager.served]
        await self._close(drain_s)
        self._open()
        for known in served:
            await self.serve(known, handler=self.rng.random() < 0.2)

    async def _close(self, drain_s: float) -> None:
        await self.manager.aclose(drain_s)
        await self._stop_ticking()
        for known in self.subscriptions.values():
            self._ended(known)
            await self._compare(known, exact=True)
        self.check_no_task_is_left()

    async def close(self) -> None:
        await self._close(0.0)

    async def crash(self) -> None:
        """Lose all state of the process. Stored data stays."""
        self.note("crash")
        served = [self.subscriptions[name] for name in self.manager.served]
        for one in self.manager.served.values():
            for delivery in one.deliveries.values():
                delivery.progress.on_parked = lambda _: None
        for agent in self.manager.agents:
            agent._closed = True  # pyright: ignore[reportPrivateUsage]
        await self._stop_ticking()
        await self.end_tasks()
        for known in self.subscriptions.values():
            self._ended(known)
            await self._compare(known, exact=False)
        self._open()
        for known in served:
            await self.serve(known, handler=self.rng.random() < 0.2)

    def _ended(self, known: Known) -> None:
        """It is served no more."""
        known.forget()
        known.group = None
        for client in known.clients:
            client.away()
            client.take()

    def _open(self) -> None:
        self.edge = WatchedEdge()
        self.edge.world = self
        self.start_manager()
        self._ticking = asyncio.create_task(self._tick(), name="ticks")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for known in self.subscriptions.values():
                if known.group is not None:
                    known.group.tick()
                    self.look(known)

    async def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    def acknowledges(self, queue: int, offset: int) -> None:
        for known in [known for known in self.subscriptions.values() if known.name not in self.resettling]:
            for stream in self.streams(known):
                if self.queue_of(stream) == queue:
                    needed = [self.tokens[stream][n].offset for n in islice(self.undone(known, stream), 1)]
                    if needed and self.dropped[queue] <= needed[0] < offset:
                        self.problem(f"{offset} is acknowledged, but {known.name} needs {stream} {needed[0]}")

    # ---- clients ---------------------------------------------------------------------------------------------------

    def connect(self, client: Client, events: int, size: int) -> None:
        """Connect. A client that is connected already supersedes itself."""
        client.connect()
        self.members[client.member] = client
        client.take()
        if events or size:
            self.grant(client, events, size)

    def grant(self, client: Client, events: int, size: int) -> None:
        client.grant(events, size)
        self.look(client.known)

    def disconnect(self, client: Client) -> None:
        client.here = False
        client.disconnect()

    def leave(self, client: Client) -> None:
        client.here = False
        client.leave()
        client.known.forget(client)

    def acknowledge(self, client: Client, of: DeliveredBatch, index: int, count: int, *, up_to: bool = False) -> None:
        known, stream = client.known, of.batch.stream
        if of.redriven:
            client.ack(of)
            return
        numbers, held = self._numbers(of, index, count), known.held[stream]
        if self.draining:
            self.look(known)
        events = EventRange(of.queue, of.batch.offset, index, count)
        mine = [n for n in numbers if held.get(n) is client]
        must = bool(mine) and (not up_to or mine[0] == numbers[0])
        if up_to:
            mine = [n for n, by in held.items() if by is client and n <= numbers[-1]]
        answer = client.group.acknowledge(client.member, events, up_to=up_to)
        if must and not answer:
            self.problem(f"{known.name}: {client.name} acknowledges {stream} {mine}, and is refused")
        if answer:
            known.acknowledged += len(mine)
            for number in mine:
                del held[number]
                known.done[stream].add(number)

    def reject(self, client: Client, of: DeliveredBatch, index: int, count: int, delay_s: float | None) -> None:
        known, stream = client.known, of.batch.stream
        events = EventRange(of.queue, of.batch.offset, index, count)
        if of.redriven:
            client.group.reject(client.member, events, "no")
            return
        if self.draining:
            self.look(known)
        first = self._number(of, index)
        expected = known.held[stream].get(first) is client
        answer = client.group.reject(client.member, events, "no", delay_s)
        if answer != expected:
            self.problem(f"{known.name}: {client.name} rejects {stream} {first}: {answer}, not {expected}")
        if answer:
            known.rejected += 1
            for number in [n for n, by in known.held[stream].items() if by is client and n >= first]:
                del known.held[stream][number]

    def look(self, known: Known) -> None:
        """Note the events that were taken back: a consumer was silent, drained for too long, or came back with less
        credit."""
        for stream, held in known.held.items():
            for number, client in list(held.items()):
                if (self.queue_of(stream), self.tokens[stream][number].offset) not in client.member.in_flight:
                    del held[number]

    def handed_out(self, member: Member, batches: Sequence[DeliveredBatch]) -> None:
        client = self.members[member]
        for batch in batches:
            if batch.redriven:
                event = batch.batch.events()[0]
                assert event.token is not None
                if (batch.batch.stream, event.token) not in client.known.dead:
                    self.problem(f"{client.known.name}: {event.token} comes as a dead letter")
            else:
                self._handed_out(client, batch)

    def _handed_out(self, client: Client, batch: DeliveredBatch) -> None:
        known, stream = client.known, batch.batch.stream
        done, held = known.done[stream], known.held[stream]
        looked_at = self._low(known, stream)
        for index, payload in zip(indexes(batch), batch.batch.payloads(), strict=True):
            number = self._number(batch, index)
            where = f"{known.name}: {client.name} gets {stream} {number}"
            if self.payloads[stream][number] != payload:
                self.problem(f"{where}, which is not what was published")
            if number in done:
                self.problem(f"{where}, which is done")
            if number in held and not (
                held[number] is client and client.connections[stream, number] != client.connection
            ):
                self.problem(f"{where}, which {held[number].name} holds")
            before = [n for n in range(looked_at, number) if n not in done and held.get(n) is not client]
            if before and self.tokens[stream][before[-1]].offset >= self.dropped[batch.queue]:
                self.problem(f"{where} before {before}")
            looked_at = number + 1
            held[number] = client
            client.connections[stream, number] = client.connection
            known.handed += 1

    def gave_up(self, name: str, events: Sequence[Event], *, dead: bool) -> None:
        known = self.subscriptions[name]
        for event in events:
            assert event.stream is not None
            assert event.token is not None
            number = self.number_of(event)
            if number in known.held[event.stream]:
                self.problem(f"{name}: {event.stream} {number} is given up on, though it is in hands")
            known.done[event.stream].add(number)
            if dead:
                known.dead.add((event.stream, event.token))

    # ---- handlers --------------------------------------------------------------------------------------------------

    def _handler(self, known: Known) -> Handler:
        async def on_event(event: Event) -> None:
            assert event.stream is not None
            number = self.number_of(event)
            expected = next(self.undone(known, event.stream), None)
            if expected != number:
                self.problem(f"{known.name}: a handler gets {event.stream} {number}, not {expected}")
            await asyncio.sleep(self.rng.random() * 0.01)
            known.done[event.stream].add(number)

        return Handler.of(on_event, batch=False)

    # ---- expectations of the model ---------------------------------------------------------------------------------

    def streams(self, known: Known) -> list[StreamId]:
        selects = known.selects()
        return [stream for stream in self.tokens if selects(stream)]

    def undone(self, known: Known, stream: StreamId) -> Iterator[int]:
        done = known.done[stream]
        return (n for n in range(self._low(known, stream), len(self.tokens[stream])) if n not in done)

    def _low(self, known: Known, stream: StreamId) -> int:
        """Everything below is done."""
        done, low = known.done[stream], known.low.get(stream, 0)
        while low in done:
            low += 1
        known.low[stream] = low
        return low

    def _number(self, of: DeliveredBatch, index: int) -> int:
        return bisect_left(self.tokens[of.batch.stream], SequenceToken(of.batch.offset, index))

    def _numbers(self, of: DeliveredBatch, index: int, count: int) -> list[int]:
        tokens, first = self.tokens[of.batch.stream], self._number(of, index)
        end = index + count if count else 1 << 32
        numbers: list[int] = []
        while first < len(tokens) and tokens[first] < (of.batch.offset, end):
            numbers.append(first)
            first += 1
        return numbers

    def _become(self, known: Known, checkpoints: Mapping[int, Checkpoint]) -> None:
        """The model is what checkpoints say."""
        known.low.clear()
        for stream in self.tokens:
            known.done[stream] = self._done_in(checkpoints, stream) | self._dropped(stream)
            known.held.setdefault(stream, {})

    def _dropped(self, stream: StreamId) -> set[int]:
        gone = self.dropped[self.queue_of(stream)]
        return {n for n, token in enumerate(self.tokens[stream]) if token.offset < gone}

    def new_stream(self, stream: StreamId) -> None:
        for known in self.subscriptions.values():
            known.done.setdefault(stream, set())
            known.held.setdefault(stream, {})
        self.tokens.setdefault(stream, [])
        self.payloads.setdefault(stream, [])

    def _done_in(self, checkpoints: Mapping[int, Checkpoint], stream: StreamId) -> set[int]:
        if (checkpoint := checkpoints.get(self.queue_of(stream))) is None:
            return set()
        behind = checkpoint.behind.get(stream)
        token = behind.token if behind is not None else SequenceToken(checkpoint.next_offset)
        ranges = behind.done if behind is not None else ()
        return {
            number
            for number, (offset, index) in enumerate(self.tokens[stream])
            if (offset, index) < token or any(o == offset and first <= index < last for o, first, last in ranges)
        }

    async def _compare(self, known: Known, *, exact: bool, only: int | None = None) -> None:
        """Check that stored positions are not ahead of the events done and, if `exact`, not behind. Make them the
        model."""
        stored = dict(await self.store.checkpoints(PROVIDER, known.name))
        known.low.clear()
        for stream in self.streams(known):
            if only is not None and self.queue_of(stream) != only:
                continue
            done, saved = known.done[stream], self._done_in(stored, stream) | self._dropped(stream)
            if saved - done - self._dropped(stream):
                self.problem(f"{known.name}: {stream} {sorted(saved - done)} is stored as done, and is not")
            if exact and done - saved:
                self.problem(f"{known.name}: {stream} {sorted(done - saved)} is done, and not stored: {stored}")
            known.done[stream] = saved
        self.note(f"stored {known.name}: {stored}")
