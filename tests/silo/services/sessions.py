"""A consumer that knows only the protocol. It records the silo's messages in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1 import events_pb2, subscriptions_pb2
from tests.silo.services.calling import Caller, Refused, Stream

SUBSCRIBE = "headrace.v1.ConsumerService/Subscribe"
PULL = "headrace.v1.ConsumerService/Pull"
ACKNOWLEDGE = "headrace.v1.ConsumerService/Acknowledge"
PATIENCE_S = 30


class Got(NamedTuple):
    """An event as it was delivered."""

    stream: str
    payload: bytes
    queue: int
    offset: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)
    attempt: int = 1
    redriven: bool = False


def events_of(batches: Iterable[events_pb2.EventBatch]) -> list[Got]:
    return [event for batch in batches for event in _events(batch)]


def _events(batch: events_pb2.EventBatch) -> Iterable[Got]:
    start = 0
    indexes = batch.indexes or range(len(batch.sizes))
    for size, index in zip(batch.sizes, indexes, strict=True):
        payload = batch.payload[start : start + size]
        start += size
        stream = f"{batch.namespace}/{batch.key}"
        yield Got(stream, payload, batch.queue, batch.offset, index, batch.attempt or 1, batch.redriven)
    assert start == len(batch.payload)


def acknowledgement(event: Got, **fields: Any) -> pb.Acknowledgement:
    return pb.Acknowledgement(queue=event.queue, offset=event.offset, index=event.index, **fields)


def rejection(event: Got, **fields: Any) -> pb.Rejection:
    return pb.Rejection(queue=event.queue, offset=event.offset, index=event.index, **fields)


def one_by_one(events: Iterable[Got]) -> list[pb.Acknowledgement]:
    return [acknowledgement(event, count=1) for event in events]


class Session:
    """One Subscribe call. Its attributes have the content of the responses so far."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = 0
        self.opened = pb.Opened()
        self.events: list[Got] = []
        self.sizes: list[int] = []
        """The number of events in each response with batches."""
        self.refused: list[pb.Refusal] = []
        self.saved = 0
        self.queues: Sequence[int] | None = None
        self.assignments: list[Sequence[int]] = []
        self.progress: pb.Progress | None = None
        self.gaps: list[subscriptions_pb2.Gap] = []
        self.positions: dict[int, bytes] = {}
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

    async def acknowledge(self, events: Iterable[Got], **fields: Any) -> int:
        """Each by itself. The number of the request."""
        self._number += 1
        await self.say(acknowledgements=one_by_one(events), number=self._number, **fields)
        return self._number

    async def acknowledge_saved(self, events: Iterable[Got]) -> None:
        number = await self.acknowledge(events)
        await self.until(lambda: self.saved >= number)

    async def reject(self, event: Got, **fields: Any) -> None:
        await self.say(rejections=[rejection(event, **fields)])

    async def close(self) -> None:
        """End in order, and see that the silo does, too."""
        await self.say(close=True)
        assert await self.end() is None

    def cancel(self) -> None:
        self._stream.cancel()

    # ---- the responses ---------------------------------------------------------------------------------------------

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
        if response.batches:
            events = events_of(response.batches)
            self.events += events
            self.sizes.append(len(events))
        self.refused += response.refused
        self.saved = max(self.saved, response.saved)
        if response.HasField("assignment"):
            self.queues = tuple(response.assignment.queues)
            self.assignments.append(self.queues)
        if response.HasField("progress"):
            self.progress = response.progress
        self.gaps += response.gaps
        self.positions.update((position.queue, position.token) for position in response.positions)
        if response.HasField("closing"):
            self.closing = response.closing.reason

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until it holds. Raises Refused where the call fails before."""
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
    """Open a session; fields of `Open`."""
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


async def acknowledge(
    caller: Caller, events: Iterable[Got], subscription: str = "s", consumer: str = "c", **fields: Any
) -> Sequence[pb.Refusal]:
    request = pb.AcknowledgeRequest(
        subscription=subscription, consumer=consumer, acknowledgements=one_by_one(events), **fields
    )
    return (await caller.ask(ACKNOWLEDGE, request, pb.AcknowledgeResponse)).refused
