"""A consumer that knows only the protocol. It records the silo's messages in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1 import events_pb2, subscriptions_pb2
from tests.silo.services.calling import Caller, Refused, Stream

SUBSCRIBE = "headrace.v1.ConsumerService/Subscribe"
PULL = "headrace.v1.ConsumerService/Pull"
ACKNOWLEDGE = "headrace.v1.ConsumerService/Acknowledge"
PATIENCE_S = 30
LOST_STATUS = "Internal error from Core"
"""What grpc.aio reports if the silo ends a call while a message is written, instead of the silo's status."""
SERVED, DRAINING, ENDED = (
    pb.QueueStatus.STATE_SERVED,
    pb.QueueStatus.STATE_DRAINING,
    pb.QueueStatus.STATE_ENDED,
)


class Got(NamedTuple):
    """An event as it was delivered, with the epoch and the generation of its queue at that time."""

    stream: str
    payload: bytes
    queue: int
    offset: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)
    attempt: int = 1
    redriven: bool = False
    epoch: int = 0
    generation: int = 0


def events_of(
    batches: Iterable[events_pb2.EventBatch], statuses: Mapping[int, pb.QueueStatus] | None = None
) -> list[Got]:
    return [event for batch in batches for event in _events(batch, statuses or {})]


def _events(batch: events_pb2.EventBatch, statuses: Mapping[int, pb.QueueStatus]) -> Iterable[Got]:
    start = 0
    indexes = batch.indexes or range(len(batch.sizes))
    status = statuses.get(batch.queue) or pb.QueueStatus()
    for size, index in zip(batch.sizes, indexes, strict=True):
        payload = batch.payload[start : start + size]
        start += size
        stream = f"{batch.namespace}/{batch.key}"
        yield Got(
            stream, payload, batch.queue, batch.offset, index, batch.attempt or 1, batch.redriven,
            status.epoch, status.generation,
        )  # fmt: skip
    assert start == len(batch.payload)


def acknowledgement(event: Got, **fields: Any) -> pb.Acknowledgement:
    return pb.Acknowledgement(offset=event.offset, index=event.index, **fields)


def rejection(event: Got, **fields: Any) -> pb.Rejection:
    return pb.Rejection(offset=event.offset, index=event.index, **fields)


def unconfirmed(event: Got) -> pb.Unconfirmed:
    namespace, _, key = event.stream.partition("/")
    return pb.Unconfirmed(namespace=namespace, key=key, offset=event.offset, index=event.index, count=1)


def one_by_one(events: Iterable[Got]) -> list[pb.Acknowledgement]:
    return [acknowledgement(event, count=1) for event in events]


def report(event: Got, **fields: Any) -> pb.QueueReport:
    """A report about the event's queue, at its epoch and generation."""
    fields = {"epoch": event.epoch, "generation": event.generation} | fields
    return pb.QueueReport(queue=event.queue, **fields)


def reports(events: Iterable[Got], number: int = 0) -> list[pb.QueueReport]:
    """Acknowledge each event by itself. One report for each queue, epoch and generation."""
    groups = defaultdict[tuple[int, int, int], list[Got]](list)
    for event in events:
        groups[event.queue, event.epoch, event.generation].append(event)
    return [report(some[0], number=number, acknowledgements=one_by_one(some)) for some in groups.values()]


def rejecting(event: Got, **fields: Any) -> list[pb.QueueReport]:
    return [report(event, rejections=[rejection(event, **fields)])]


class Session:
    """One Subscribe call. Its attributes have the content of the responses so far."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = 0
        self.opened = pb.Opened()
        self.events: list[Got] = []
        self.sizes: list[int] = []
        """The number of events in each response with batches."""
        self.statuses: dict[int, pb.QueueStatus] = {}
        """The last status of each queue."""
        self.states: list[tuple[int, int]] = []
        """All queues and states, in the order of their arrival."""
        self.saved: dict[int, pb.Saved] = {}
        """The last confirmation of each queue."""
        self.refused: list[pb.Refusal] = []
        self.progress: pb.Progress | None = None
        self.gaps: list[subscriptions_pb2.Gap] = []
        self.positions: dict[int, bytes] = {}
        self.returned: list[pb.Credit] = []
        self.placement: pb.Placement | None = None
        self.closing = ""
        self.ended = False
        self._taken = 0

    # ---- its requests ----------------------------------------------------------------------------------------------

    async def say(self, **fields: Any) -> None:
        await self._stream.write(pb.SubscribeRequest(**fields))

    async def say_bytes(self, message: bytes) -> None:
        await self._stream.write(message)

    async def grant(self, events: int = 1_000_000, size: int = 1 << 30) -> None:
        await self.say(credit=pb.Credit(events=events, bytes=size))

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def report(self, event: Got, **fields: Any) -> int:
        """Send one report about the event's queue. Return its number."""
        fields = {"number": self.next_number()} | fields
        await self.say(reports=[report(event, **fields)])
        return fields["number"]

    async def acknowledge(self, events: Iterable[Got], **fields: Any) -> int:
        """Acknowledge each event by itself. Return the number of the reports."""
        number = self.next_number()
        await self.say(reports=reports(events, number), **fields)
        return number

    async def acknowledge_saved(self, events: Iterable[Got]) -> None:
        events = list(events)
        await self.until_saved(await self.acknowledge(events), {event.queue for event in events})

    async def until_saved(self, number: int, queues: Iterable[int]) -> None:
        queues = list(queues)
        await self.until(lambda: self.is_saved(number, queues))

    async def reject(self, event: Got, **fields: Any) -> None:
        await self.say(reports=rejecting(event, **fields))

    async def release(self, event: Got) -> None:
        await self.say(reports=[report(event, released=[pb.Released(offset=event.offset, index=event.index)])])

    async def close(self) -> None:
        """End in order, and see that the silo does, too."""
        await self.say(close=True)
        assert await self.end() is None

    def cancel(self) -> None:
        self._stream.cancel()

    # ---- the responses ---------------------------------------------------------------------------------------------

    def is_saved(self, number: int, queues: Iterable[int]) -> bool:
        """Whether reports up to this number are confirmed for each of the queues."""
        return all(queue in self.saved and self.saved[queue].number >= number for queue in queues)

    @property
    def assigned(self) -> list[int]:
        """The queues that are served and assigned to the consumer."""
        return sorted(queue for queue, each in self.statuses.items() if each.state == SERVED and each.assigned)

    async def read(self) -> pb.SubscribeResponse | None:
        """Return the next message, or None at the end. Raise Refused if the silo refused the call."""
        response = await self._stream.read(pb.SubscribeResponse)
        if response is None:
            self.ended = True
        else:
            self._hear(response)
        return response

    def _hear(self, response: pb.SubscribeResponse) -> None:
        if response.HasField("opened"):
            self.opened = response.opened
        for saved in response.saved:
            self._hear_saved(saved)
        for status in response.queues:
            self.statuses[status.queue] = status
            self.states.append((status.queue, status.state))
        self.refused += response.refused
        if response.HasField("progress"):
            self.progress = response.progress
        self.gaps += response.gaps
        if response.HasField("returned"):
            self.returned.append(response.returned)
        if response.HasField("placement"):
            self.placement = response.placement
        if response.HasField("closing"):
            self.closing = response.closing.reason
        if response.batches:
            self._check_batches(response.batches)
            events = events_of(response.batches, self.statuses)
            self.events += events
            self.sizes.append(len(events))

    def _hear_saved(self, saved: pb.Saved) -> None:
        status = self.statuses.get(saved.queue)
        if status is None or status.epoch != saved.epoch:
            return  # void
        before = self.saved.get(saved.queue)
        if before is not None and before.epoch == saved.epoch:
            assert not saved.number or before.number <= saved.number
            saved.number = max(before.number, saved.number)
            saved.unconfirmed = max(before.unconfirmed, saved.unconfirmed)
        self.saved[saved.queue] = saved
        if saved.HasField("position"):
            self.positions[saved.queue] = saved.position.token

    def _check_batches(self, batches: Iterable[events_pb2.EventBatch]) -> None:
        for batch in batches:
            status = self.statuses.get(batch.queue)
            assert status is not None, f"a batch of queue {batch.queue} came before its status"
            # A consumer that comes back during a drain gets the events again that it held.
            is_again = status.state == DRAINING and batch.attempt > 1
            assert status.state == SERVED or is_again, f"a batch of queue {batch.queue} came in state {status.state}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until it holds. Raises Refused if the call fails before."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert await self.read() is not None, "the call ended in order"

    async def take(self, count: int) -> list[Got]:
        """The next events: so many, in one response or in several."""
        first, self._taken = self._taken, self._taken + count
        await self.until(lambda: len(self.events) >= self._taken)
        return self.events[first : self._taken]

    async def end(self) -> Refused | None:
        """Read to the end. Return None if the call ended in order."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await self.read() is not None:
                    pass
        except Refused as refused:
            return refused
        return None

    def payloads(self, stream: str | None = None) -> list[bytes]:
        return [event.payload for event in self.events if stream in (None, event.stream)]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


async def begin(caller: Caller, subscription: str = "", **fields: Any) -> Session:
    """Open a session; fields of `Open`. If grpc loses the status with which the silo refuses it, ask once more."""
    try:
        return await _begin(caller, subscription, **fields)
    except Refused as refused:
        if refused.details != LOST_STATUS:
            raise
    return await _begin(caller, subscription, **fields)


async def _begin(caller: Caller, subscription: str, **fields: Any) -> Session:
    session = Session(caller.stream(SUBSCRIBE))
    await session.say(open=pb.Open(subscription=subscription, **fields))
    assert await session.read() is not None
    return session


@asynccontextmanager
async def consuming(caller: Caller, subscription: str = "", **fields: Any) -> AsyncGenerator[Session]:
    """A session with plenty of credit, ended in order unless it has ended."""
    session = await begin(caller, subscription, **fields)
    await session.grant()
    try:
        yield session
    except BaseException:
        session.cancel()
        raise
    if not session.ended:
        await session.close()


def defined(name: str, selector: str = "n/*", **fields: Any) -> subscriptions_pb2.SubscriptionDefinition:
    fields = {"start": subscriptions_pb2.Start(earliest=True)} | fields
    return subscriptions_pb2.SubscriptionDefinition(name=name, selector=selector, **fields)


async def pull(caller: Caller, subscription: str = "s", consumer: str = "c", **fields: Any) -> pb.PullResponse:
    options: dict[str, Any] = {"wait_ms": 10_000} | fields
    request = pb.PullRequest(subscription=subscription, consumer=consumer, **options)
    return await caller.ask(PULL, request, pb.PullResponse)


def pulled(answer: pb.PullResponse) -> list[Got]:
    """The events of an answer, which has the status of each of their queues."""
    statuses = {status.queue: status for status in answer.queues}
    assert {batch.queue for batch in answer.batches} <= statuses.keys()
    return events_of(answer.batches, statuses)


async def pull_events(caller: Caller, subscription: str = "s", consumer: str = "c", **fields: Any) -> list[Got]:
    return pulled(await pull(caller, subscription, consumer, **fields))


async def acknowledge(
    caller: Caller, events: Iterable[Got], subscription: str = "s", consumer: str = "c", **fields: Any
) -> Sequence[pb.Refusal]:
    fields = {"reports": reports(events)} | fields
    request = pb.AcknowledgeRequest(subscription=subscription, consumer=consumer, **fields)
    return (await caller.ask(ACKNOWLEDGE, request, pb.AcknowledgeResponse)).refused
