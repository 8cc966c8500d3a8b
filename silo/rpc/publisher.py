"""PublisherService: batches come in as their producers encoded them, are checked, and stored as they are.

A stream's requests are begun in order, without waiting for each other, and answered in order. What is begun and not
answered is bounded in number and bytes; then no more is read, and HTTP/2 holds the producer back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ...proto.v1 import publisher_pb2 as pb
from ...streams import frames
from ...streams.errors import HeadraceError, InvalidArgument, LimitExceeded, Unavailable
from ...streams.events import EventBatch
from ...streams.publishing import MAX_REQUEST_BATCHES, ProducerSequence, Receipt
from ..access import Permission
from ..provider import Provider
from .guard import Call, Kind, Method, details_of, parsed
from .incoming import accepted
from .lookup import TO_PUBLISH, Providers, provider_of

SERVICE = "headrace.v1.PublisherService"
MAX_PRODUCER = 128
"""Characters of a producer's id."""
STREAM_REQUESTS = 1_000
"""Requests of one stream that are begun and not answered."""
STREAM_BYTES = 8 << 20
"""The same in bytes. One request is begun though it is larger."""

_BATCHES = 3
"""The field of both requests that has the batches."""
_OTHER_FIELDS = 100
"""So many more a request may have, of this version and of later ones."""
_AT_ONCE = 256
"""Batches that are checked before others have their turn."""

_R = TypeVar("_R", pb.PublishRequest, pb.PublishStreamRequest)


def methods(providers: Providers) -> list[Method]:
    publisher = Publisher(providers)
    return [
        Method(f"{SERVICE}/Publish", Kind.UNARY, publisher.publish),
        Method(f"{SERVICE}/PublishStream", Kind.STREAM, publisher.publish_stream),
        Method(f"{SERVICE}/GetProducer", Kind.UNARY, publisher.producer),
    ]


class Publisher:
    """The service."""

    def __init__(self, providers: Providers) -> None:
        self._providers = providers

    async def publish(self, call: Call, message: bytes) -> bytes:
        call.hold(len(message))
        request, batches = await _decoded(pb.PublishRequest, message)
        storing = self._store(call, request.provider, request, batches)
        return pb.PublishResponse(receipts=storing.receipts(await storing.answer)).SerializeToString()

    async def publish_stream(self, call: Call) -> None:
        line = _Line(call)
        reading = asyncio.create_task(self._read(call, line), name="headrace publish stream")
        told = asyncio.create_task(_cancel_when(call.closing, reading), name="headrace publish stream end")
        try:
            while (first := await line.first()) is not None:
                await call.write(await first.response())
                line.pop()
        finally:
            reading.cancel()
            told.cancel()
            line.cancel()
            await asyncio.gather(reading, told, return_exceptions=True)
        if call.closing.is_set():
            raise Unavailable("the silo stops: everything answered is stored; send the rest again when it is back")
        reading.result()

    async def producer(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.GetProducerRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_PUBLISH)
        number = await provider.adapter.last_sequence(_producer(request.producer, "producer"))
        return pb.GetProducerResponse(number=number).SerializeToString()

    async def _read(self, call: Call, line: _Line) -> None:
        provider: str | None = None
        try:
            while (message := await call.read()) is not None:
                await line.room(len(message))
                try:
                    call.hold(len(message))
                except LimitExceeded as error:
                    line.add(_Answer(0, error))
                    continue
                try:
                    request, batches = await _decoded(pb.PublishStreamRequest, message)
                    provider = request.provider if provider is None else provider
                    line.add(_Answer(len(message), self._store(call, provider, request, batches)))
                except HeadraceError as error:
                    line.add(_Answer(len(message), error))
        finally:
            line.end()

    def _store(self, call: Call, provider: str, request: _R, batches: Sequence[EventBatch]) -> _Storing:
        for namespace in {batch.stream.namespace for batch in batches}:
            call.principal.require(Permission.PUBLISH, namespace)
        found = provider_of(call, self._providers, provider, TO_PUBLISH)
        sequence = _sequence(request.sequence) if request.HasField("sequence") else None
        return _Storing(found, batches, found.publish_encoded(batches, sequence=sequence))


class _Storing(NamedTuple):
    """Batches under way to the store."""

    provider: Provider
    batches: Sequence[EventBatch]
    answer: asyncio.Future[Sequence[Receipt]]

    def receipts(self, receipts: Sequence[Receipt]) -> list[pb.Receipt]:
        return [
            pb.Receipt(
                queue=self.provider.queue_of(batch.stream),
                offset=None if receipt.token is None else receipt.token.offset,
                duplicate=receipt.duplicate,
            )
            for batch, receipt in zip(self.batches, receipts, strict=True)
        ]


class _Answer:
    """What a request of a stream is answered by, now or later. `held` bytes are freed then."""

    __slots__ = ("_outcome", "held")

    def __init__(self, held: int, outcome: _Storing | HeadraceError) -> None:
        self.held = held
        self._outcome = outcome

    async def response(self) -> bytes:
        try:
            if isinstance(self._outcome, HeadraceError):
                return _error_response(self._outcome)
            # Shielded: else who gives up this wait takes back the first alone, and those behind it might be stored.
            receipts = self._outcome.receipts(await asyncio.shield(self._outcome.answer))
        except HeadraceError as error:
            return _error_response(error)
        return pb.PublishStreamResponse(receipts=receipts).SerializeToString()

    def cancel(self) -> None:
        if isinstance(self._outcome, _Storing):
            self._outcome.answer.cancel()


class _Line:
    """The requests of a stream that are not answered yet, first come first."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._answers: deque[_Answer] = deque()
        self._bytes = 0
        self._ended = False
        self._grown = asyncio.Event()
        self._shrunk = asyncio.Event()

    async def room(self, nbytes: int) -> None:
        """Return when one more of this size may be begun."""
        while self._answers and (len(self._answers) >= STREAM_REQUESTS or self._bytes + nbytes > STREAM_BYTES):
            self._shrunk.clear()
            await self._shrunk.wait()

    def add(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._bytes += answer.held
        self._grown.set()

    def end(self) -> None:
        """Nothing more is added."""
        self._ended = True
        self._grown.set()

    async def first(self) -> _Answer | None:
        """The oldest one; None when all are answered and nothing more is added."""
        while not self._answers and not self._ended:
            self._grown.clear()
            await self._grown.wait()
        return self._answers[0] if self._answers else None

    def pop(self) -> None:
        """The oldest one is answered."""
        answer = self._answers.popleft()
        self._bytes -= answer.held
        self._call.release(answer.held)
        self._shrunk.set()

    def cancel(self) -> None:
        """Nobody waits for the answers any more. What is not begun in the store is taken back, all of it at once."""
        for answer in self._answers:
            answer.cancel()


async def _cancel_when(told: asyncio.Event, task: asyncio.Task[None]) -> None:
    await told.wait()
    task.cancel()


async def _decoded(kind: type[_R], message: bytes) -> tuple[_R, list[EventBatch]]:
    """A request and its batches. Raises InvalidArgument."""
    encoded, rest = frames.elements(message, _BATCHES, MAX_REQUEST_BATCHES + _OTHER_FIELDS)
    request = parsed(kind, rest)
    if request.batches:
        raise InvalidArgument("batches: their tag is not in its shortest form: encode it in one byte")
    if not 0 < len(encoded) <= MAX_REQUEST_BATCHES:
        raise InvalidArgument(f"batches: a request has 1 to {MAX_REQUEST_BATCHES:,} of them, not {len(encoded):,}")
    now_us = time.time_ns() // 1000
    batches: list[EventBatch] = []
    for index, each in enumerate(encoded):
        try:
            batches.append(accepted(each, now_us))
        except InvalidArgument as error:
            error.args = (f"batches[{index}]: {error}",)
            raise
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return request, batches


def _sequence(message: pb.ProducerSequence) -> ProducerSequence:
    producer = _producer(message.producer, "sequence.producer")
    if message.previous >= message.number:
        raise InvalidArgument(
            f"sequence.number is above that of the request before, which is {message.previous}: it cannot be "
            f"{message.number}"
        )
    return ProducerSequence(producer, message.number, message.previous)


def _producer(name: str, field: str) -> str:
    if not 0 < len(name) <= MAX_PRODUCER:
        raise InvalidArgument(f"{field} is the producer's id, of 1 to {MAX_PRODUCER} characters, not {len(name)}")
    return name


def _error_response(error: HeadraceError) -> bytes:
    told = pb.PublishError(status=error.status, code=error.code, message=details_of(error), retryable=error.retryable)
    return pb.PublishStreamResponse(error=told).SerializeToString()
