"""PublisherService: check the batches of producers, and store them as the producers encoded them.

The requests of a stream begin in order, without waiting for each other, and are answered in order. The number and the
bytes of unanswered requests are bounded: at the bound the silo reads no more, and HTTP/2 slows the producer down.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ...proto.v1 import publisher_pb2 as pb
from ...server.access import Permission
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, details_of, parsed
from ...streams import frames
from ...streams.background import end
from ...streams.errors import HeadraceError, InvalidArgument, LimitExceeded, Unavailable
from ...streams.events import EventBatch
from ...streams.incoming import accepted
from ...streams.publishing import MAX_REQUEST_BATCHES, ProducerSequence, Receipt, check_producer, check_sequence
from ..provider_core import ProviderCore
from ..service_limits import ServiceLimits
from .lookup import TO_PUBLISH, Providers, provider_of

SERVICE = "headrace.v1.PublisherService"
STREAM_BYTES = 8 << 20
"""Most bytes of unanswered requests of one stream. A single request may be larger."""
REFUSED_PAUSE_S = 0.25
"""Pause before a stream is read again after a request above the client's limit, in seconds. It slows down a client that
goes on sending: else such requests would fill gRPC's buffers."""

_BATCHES = 3
"""The number of the field `batches` in both requests."""
_OTHER_FIELDS = 100
"""Most other fields of a request, including those of later versions."""
_AT_ONCE = 256
"""Batches that are checked before other tasks run."""

_R = TypeVar("_R", pb.PublishRequest, pb.PublishStreamRequest)


def methods(providers: Providers, limits: ServiceLimits) -> list[ServiceMethod]:
    publisher = PublisherService(providers, limits)
    return [
        ServiceMethod(f"{SERVICE}/Publish", MethodKind.UNARY, publisher.publish),
        ServiceMethod(f"{SERVICE}/PublishStream", MethodKind.STREAM, publisher.publish_stream),
        ServiceMethod(f"{SERVICE}/GetProducer", MethodKind.UNARY, publisher.producer),
    ]


class PublisherService:
    """The service: see the module."""

    def __init__(self, providers: Providers, limits: ServiceLimits) -> None:
        self._providers = providers
        self._limits = limits

    async def publish(self, call: ServiceCall, message: bytes) -> bytes:
        call.hold(len(message))
        request, batches = await _decoded(pb.PublishRequest, message)
        storing = self._store(call, request.provider, request, batches)
        return pb.PublishResponse(receipts=storing.receipts(await storing.answer)).SerializeToString()

    async def publish_stream(self, call: ServiceCall) -> None:
        pending = _PendingAnswers(call, self._limits.stream_requests)
        reading = asyncio.create_task(self._read(call, pending), name="headrace publish stream")
        stopping = asyncio.create_task(_cancel_when(call.closing, reading), name="headrace publish stream end")
        try:
            while (first := await pending.first_done()) is not None:
                await call.write(first.response())
                pending.pop()
        finally:
            pending.cancel()
            await end(reading, stopping)
        if call.closing.is_set():
            raise Unavailable("the silo stops: everything answered is stored; send the rest again when it is back")
        reading.result()

    async def producer(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.GetProducerRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_PUBLISH)
        number = await provider.adapter.last_sequence(_producer(call, request.producer, "producer"))
        return pb.GetProducerResponse(number=number).SerializeToString()

    async def _read(self, call: ServiceCall, pending: _PendingAnswers) -> None:
        provider: str | None = None
        try:
            while (message := await call.read()) is not None:
                provider = await self._begin(call, pending, provider, message)
                del message  # else it would stay in memory until the next one arrives
        finally:
            pending.end()

    async def _begin(
        self, call: ServiceCall, pending: _PendingAnswers, provider: str | None, message: bytes
    ) -> str | None:
        """Begin a request of a stream. Return the provider of the stream: the one of its first valid request."""
        held = len(message)
        try:
            call.hold(held)  # before it waits: requests that wait take memory, too
        except LimitExceeded as error:
            await pending.wait_for_space(0)
            pending.add(_Answer(0, error))
            await asyncio.sleep(REFUSED_PAUSE_S)
            return provider
        await pending.wait_for_space(held)
        try:
            request, batches = await _decoded(pb.PublishStreamRequest, message)
            provider = request.provider if provider is None else provider
            pending.add(_Answer(held, self._store(call, provider, request, batches)))
        except HeadraceError as error:
            pending.add(_Answer(held, error))
        return provider

    def _store(self, call: ServiceCall, provider: str, request: _R, batches: Sequence[EventBatch]) -> _Storing:
        for namespace in {batch.stream.namespace for batch in batches}:
            call.principal.require(Permission.PUBLISH, namespace)
        found = provider_of(call, self._providers, provider, TO_PUBLISH)
        sequence = _sequence(call, request.sequence) if request.HasField("sequence") else None
        return _Storing(found, batches, found.publish_encoded(batches, sequence=sequence))


class _Storing(NamedTuple):
    """Batches that are being stored."""

    provider: ProviderCore
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
    """The present or future answer to a request of a stream. When it is sent, `held` bytes are released."""

    __slots__ = ("_outcome", "held")

    def __init__(self, held: int, outcome: _Storing | HeadraceError) -> None:
        self.held = held
        self._outcome = outcome

    @property
    def done(self) -> bool:
        return isinstance(self._outcome, HeadraceError) or self._outcome.answer.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the answer is done, which it is not yet."""
        assert isinstance(self._outcome, _Storing)
        self._outcome.answer.add_done_callback(lambda _: callback())

    def response(self) -> bytes:
        """Encode the answer, which is done. Raises CancelledError if the request was cancelled."""
        try:
            if isinstance(self._outcome, HeadraceError):
                return _error_response(self._outcome)
            receipts = self._outcome.receipts(self._outcome.answer.result())
        except HeadraceError as error:
            return _error_response(error)
        return pb.PublishStreamResponse(receipts=receipts).SerializeToString()

    def cancel(self) -> None:
        if isinstance(self._outcome, _Storing):
            self._outcome.answer.cancel()


class _PendingAnswers:
    """The answers that a stream still owes, in the order of the requests."""

    def __init__(self, call: ServiceCall, max_requests: int) -> None:
        self._call = call
        self._max_requests = max_requests
        self._answers: deque[_Answer] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Event()
        """Set when an answer is done, and when no more requests follow."""
        self._shrunk = asyncio.Event()

    async def wait_for_space(self, nbytes: int) -> None:
        """Return when another request of this size may begin."""
        while self._answers and (len(self._answers) >= self._max_requests or self._bytes + nbytes > STREAM_BYTES):
            self._shrunk.clear()
            await self._shrunk.wait()

    def add(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._bytes += answer.held
        if answer.done:
            self._changed.set()
        else:
            answer.when_done(self._changed.set)

    def end(self) -> None:
        """Note that no more requests follow."""
        self._ended = True
        self._changed.set()

    async def first_done(self) -> _Answer | None:
        """Return the oldest answer once it is done; None when all requests are answered and no more follow.

        It does not await the answer itself: else cancelling this call would cancel the oldest request alone, and later
        ones could be stored."""
        while not (self._answers[0].done if self._answers else self._ended):
            self._changed.clear()
            await self._changed.wait()
        return self._answers[0] if self._answers else None

    def pop(self) -> None:
        """Remove the oldest answer, which was sent."""
        answer = self._answers.popleft()
        self._bytes -= answer.held
        self._call.release(answer.held)
        self._shrunk.set()

    def cancel(self) -> None:
        """Cancel all requests that the store has not begun, all at the same moment."""
        for answer in self._answers:
            answer.cancel()


async def _cancel_when(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()


async def _decoded(kind: type[_R], message: bytes) -> tuple[_R, list[EventBatch]]:
    """Decode a request and its batches. Raise InvalidArgument."""
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


def _sequence(call: ServiceCall, message: pb.ProducerSequence) -> ProducerSequence:
    producer = _producer(call, message.producer, "sequence.producer")
    return check_sequence(ProducerSequence(producer, message.number, message.previous))


def _producer(call: ServiceCall, name: str, field: str) -> str:
    """Return the id of the caller's producer in the provider: the ids of two clients are never equal."""
    return call.principal.producer_of(check_producer(name, field))


def _error_response(error: HeadraceError) -> bytes:
    failure = pb.PublishError(
        status=error.status, code=error.code, message=details_of(error), retryable=error.retryable
    )
    return pb.PublishStreamResponse(error=failure).SerializeToString()
