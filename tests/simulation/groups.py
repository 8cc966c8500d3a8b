"""A group without agents: queues that are filled by hand, and remote consumers without a network."""

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Self

from headrace import EventBatch, HeadraceError, OnFailure, RetryPolicy, Selector
from headrace.agents import Edge, EventRange, Group, Member
from headrace.agents.delivery.breaker import Gate
from headrace.agents.delivery.confirmations import Confirmed
from headrace.agents.delivery.group_delivery import GroupDelivery
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.streams.frames import DeliveredBatch, QueueState, split
from headrace.streams.subscriptions import Checkpoint, Mode, SubscriptionDefinition
from tests.simulation.deliveries import NOW, SimulatedFeed, Sink, stream

PLENTY = 1 << 40
A_WHILE_S = 0.1
"""Longer than anything takes that is not meant to wait."""


class GroupFeed(SimulatedFeed[GroupDelivery]):
    """One queue of a group."""

    def __init__(self, group: "SimulatedGroup", queue: int, checkpoint: Checkpoint, max_events: int) -> None:
        super().__init__(max_events, checkpoint.watermark)
        self.queue = queue
        self._group = group
        self.attach(checkpoint)

    def attach(self, checkpoint: Checkpoint, *, epoch: int = 1, generation: int = 0) -> None:
        """A delivery that starts at the checkpoint: at first, after a seek, or when the queue's agent starts again."""
        group = self._group
        delivery = group.group.deliver(
            group.group.definition, self.queue, checkpoint, group.sink, epoch=1, queue_epoch=epoch,
            generation=generation, rewindable=group.rewindable, gate=group.gate,
        )  # fmt: skip
        assert isinstance(delivery, GroupDelivery)
        self._start = checkpoint.watermark
        self.join(delivery)

    def all_seen(self) -> None: ...

    def read_again(self) -> None:
        """Offer everything that is in the cache, as a feed does that a delivery joins."""
        self.delivery.offer(self, self.cache.entries_from(self._start))


class SimulatedGroup:
    """A group, its queues and its consumers. Stopped at the end of `async with`."""

    def __init__(
        self,
        *,
        queues: int = 1,
        mode: Mode = Mode.SHARED,
        selector: str = "s/*",
        retry: RetryPolicy = NOW,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        checkpoints: Mapping[int, Checkpoint] | None = None,
        rewindable: bool = True,
        max_events: int = 100_000,
        edge: Edge | None = None,
    ) -> None:
        definition = SubscriptionDefinition(
            name="sub", selector=Selector(selector), retry=retry, on_failure=on_failure, mode=mode
        )
        self.gate = Gate("sub")
        self.edge = edge or Edge()
        self.group = Group(definition, self.edge)
        self.sink = Sink()
        self.rewindable = rewindable
        starts = {queue: Checkpoint(0) for queue in range(queues)} | dict(checkpoints or {})
        self.lanes = [GroupFeed(self, queue, starts[queue], max_events) for queue in range(queues)]
        self.consumers: dict[str, Consumer] = {}

    @property
    def lane(self) -> GroupFeed:
        return self.lanes[0]

    @property
    def delivery(self) -> GroupDelivery:
        return self.lanes[0].delivery

    def publish(self, key: str, *payloads: str) -> EventBatch:
        return self.lanes[0].publish(key, *payloads)

    def consumer(self, name: str, events: int = PLENTY, size: int = PLENTY, **options: Any) -> "Consumer":
        """One that is connected, and grants so much at once."""
        consumer = self.consumers[name] = Consumer(self.group, name, **options)
        consumer.connect(events, size)
        return consumer

    def checkpoint(self, queue: int = 0) -> Checkpoint:
        return self.lanes[queue].delivery.progress.checkpoint()

    async def rest(self, seconds: float = A_WHILE_S) -> None:
        """Until nothing goes on, in virtual time."""
        await asyncio.sleep(seconds)

    def save(self, *, refused: AbstractSet[int] = frozenset(), fails: bool = False) -> None:
        """Store checkpoints of all queues as the checkpointer does, and confirm what they have."""
        for lane in self.lanes:
            unsaved = lane.delivery.unsaved()
            marks = () if lane.delivery.pacer.held_back else lane.delivery.marks()
            if not fails and lane.queue not in refused:
                if unsaved is not None:
                    unsaved.note_saved()
                for mark in marks:
                    mark.confirm({})

    async def stop(self, drain_s: float = 0.0) -> Checkpoint:
        """Stop, and return the exact progress in the first queue."""
        await asyncio.gather(*(lane.delivery.stop(drain_s) for lane in self.lanes))
        return self.lane.delivery.progress.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Consumer:
    """A client. It counts its credit and the events it was sent."""

    def __init__(
        self,
        group: Group,
        name: str,
        *,
        timeout_s: float = 30.0,
        pace_s: float = 0.0,
        concurrent: bool = False,
        divides_credit: bool = False,
    ) -> None:
        self.group = group
        self.name = name
        self.timeout_s = timeout_s
        self.pace_s = pace_s
        """How long a message takes."""
        self.concurrent = concurrent
        self.divides_credit = divides_credit
        self.inbox: list[DeliveredBatch] = []
        self.everything: list[DeliveredBatch] = []
        self.messages = 0
        self.notices = 0
        self.statuses: list[Status] = []
        """The statuses of queues since `connect`."""
        self.confirmed: dict[int, Confirmed] = {}
        """The last confirmation of each queue since `connect`."""
        self.gone: HeadraceError | None = None
        self.connection: int = 0
        self.member: Member
        self.granted = self.sent = (0, 0)

    def connect(self, events: int = PLENTY, size: int = PLENTY) -> None:
        self.connection += 1
        self.granted = self.sent = (0, 0)
        self.member = self.group.join(
            self.name, self.timeout_s, concurrent=self.concurrent, divides_credit=self.divides_credit
        )
        self.statuses, self.confirmed = [], {}
        self.gone = None  # only now: a former connection, if there is one, has just been told to end
        self.member.on_outbox = self._send
        self.member.on_notice = self._notice
        self.member.on_gone = self._end
        self._hear(self.connection)
        if events or size:
            self.grant(events, size)

    def grant(self, events: int = 0, size: int = 0) -> None:
        self.granted = self.granted[0] + events, self.granted[1] + size
        self.group.grant(self.member, events, size)

    def disconnect(self) -> None:
        self.connection += 1
        self.group.disconnect(self.member)

    def leave(self) -> None:
        self.connection += 1
        self.group.leave(self.member)

    def _notice(self) -> None:
        self.notices += 1
        asyncio.get_running_loop().call_soon(self._hear, self.connection)

    def _hear(self, connection: int) -> None:
        """Take confirmations, and statuses that no batch follows."""
        if connection == self.connection:
            self.confirmed |= self.member.take_confirmed()
            if not (self.member.busy or self.member.outbox):
                self.hear(self.member.collect())

    def hear(self, frames: Sequence[bytes]) -> None:
        """Take a message."""
        batches, rest = split(b"".join(frames))
        self.statuses += statuses(rest)
        self.inbox += batches

    @property
    def served(self) -> "dict[int, Status]":
        """The last status of each queue that has not ended."""
        last = {each.queue: each for each in self.statuses}
        return {queue: each for queue, each in last.items() if each.state is not QueueState.ENDED}

    def _end(self, error: HeadraceError) -> None:
        self.connection += 1
        self.gone = error

    def _send(self) -> None:
        loop, frames = asyncio.get_running_loop(), list[bytes]()

        def begin(connection: int) -> None:
            if connection == self.connection:
                frames[:] = self.member.collect()
                loop.call_later(self.pace_s, end, connection) if self.pace_s else end(connection)

        def end(connection: int) -> None:
            if connection == self.connection:
                self._receive(b"".join(frames))
                if self.group.sent(self.member):
                    loop.call_soon(begin, connection)

        loop.call_soon(begin, self.connection)

    def _receive(self, message: bytes) -> None:
        delivered, rest = split(message)
        assert message.startswith(rest), "statuses are at the beginning"
        self.statuses += statuses(rest)
        self.messages += 1
        self.inbox += delivered
        self.everything += delivered
        self.sent = self.sent[0] + sum(each.batch.count for each in delivered), self.sent[1] + len(message) - len(rest)
        assert self.sent[0] <= self.granted[0], f"{self.sent[0]} events were sent, {self.granted[0]} granted"
        assert self.sent[1] <= self.granted[1], f"{self.sent[1]} bytes were sent, {self.granted[1]} granted"

    # ---- requests --------------------------------------------------------------------------------------------------

    def ack(self, of: DeliveredBatch, index: int | None = None, count: int = 0, *, up_to: bool = False) -> bool:
        """Acknowledge `count` events from `index` on: all of the batch where neither is said."""
        events = EventRange(of.queue, of.batch.offset, indexes(of)[0] if index is None else index, count)
        return self.group.acknowledge(self.member, events, up_to=up_to)

    def reject(
        self, of: DeliveredBatch, index: int | None = None, count: int = 0, *, reason: str = "no",
        delay_s: float | None = 0, unavailable: bool = False,
    ) -> bool:  # fmt: skip
        events = EventRange(of.queue, of.batch.offset, indexes(of)[0] if index is None else index, count)
        return self.group.reject(self.member, events, reason, delay_s, unavailable=unavailable)

    def release(self, of: DeliveredBatch, index: int | None = None) -> bool:
        """Give back the events from `index` on."""
        events = EventRange(of.queue, of.batch.offset, indexes(of)[0] if index is None else index)
        return self.group.release(self.member, events)

    def report(self, number: int, queue: int = 0) -> None:
        """The report with this number is applied."""
        self.group.note_applied(self.member, queue, number)

    def unconfirmed(self, number: int, *events: tuple[str, int, int, int], queue: int = 0) -> None:
        """Name events as unconfirmed: (key, offset, first, count)."""
        named = [(stream(key), offset, first, count) for key, offset, first, count in events]
        self.group.note_unconfirmed(self.member, queue, number, named)
        self.report(number, queue)

    def ack_all(self) -> None:
        """Acknowledge the events that came since the last call, and grant as much again."""
        for each in self.take():
            assert self.ack(each)
            self.grant(each.batch.count)

    def take(self) -> list[DeliveredBatch]:
        """What came since this was last called."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def took(self) -> list[str]:
        """The payloads of `take`."""
        return payloads(self.take())

    @property
    def waiting(self) -> list[str]:
        return payloads(self.inbox)


class Status(NamedTuple):
    """The status of a queue."""

    queue: int
    state: QueueState
    epoch: int
    generation: int
    assigned: bool


def statuses(encoded: bytes) -> list[Status]:
    """The statuses in a response that has nothing else."""
    response = pb.SubscribeResponse.FromString(encoded)
    assert {field.name for field, _ in response.ListFields()} <= {"queues"}
    return [Status(q.queue, QueueState(q.state), q.epoch, q.generation, q.assigned) for q in response.queues]


def parsed(message: bytes) -> list[DeliveredBatch]:
    """The batches of a message that has nothing else."""
    delivered, rest = split(message)
    assert not rest
    return delivered


def payloads(delivered: Sequence[DeliveredBatch]) -> list[str]:
    return [payload.decode() for each in delivered for payload in each.batch.payloads()]


def indexes(delivered: DeliveredBatch) -> Sequence[int]:
    return range(delivered.batch.count) if delivered.indexes is None else delivered.indexes
