"""Spans of OpenTelemetry for publishing and handling. Imported only when tracing is on.

The names follow OpenTelemetry's conventions for messaging, which are still in development: no other module knows them.
The span of a handler is a child of the span that published its batch. The conventions allow a parent for a single
message; a batch of headrace has one publisher and one span, so it can have a parent, too.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import Token
from importlib.metadata import version
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    get_current_span,
    get_tracer,
    set_span_in_context,
    use_span,
)

from .events import EventBatch
from .identity import StreamId

MAX_LINKS = 32
"""Most publishers that the span of a pull is linked to."""
_SYSTEM = "headrace"
_VERSION = version("headrace")


class Spans:
    """Makes the spans of one process."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("headrace", _VERSION, tracer_provider)

    @contextmanager
    def publishing(self, provider: str, stream: StreamId | None, count: int) -> Generator[bytes]:
        """A span around a publish. Yields the trace for the field `trace` of its batches."""
        attributes = _attributes("send", provider, stream, count)
        span = self._tracer.start_span(f"send {provider}", None, SpanKind.PRODUCER, attributes)
        if (
            not span.is_recording()
        ):  # not sampled: the current span stays, because making another one current takes long
            yield encoded(span.get_span_context())
            return
        with use_span(span, end_on_exit=True):
            yield encoded(span.get_span_context())

    def handling(
        self, provider: str, subscription: str, queue: int, batch: EventBatch, *, redriven: bool = False
    ) -> HandlingSpan:
        """Begin a span around the handler of a batch, as a child of the span that published it; without one, as a root.
        If the publisher's span was not sampled, nothing is recorded, and publishes of the handler are not sampled,
        either."""
        publisher = decoded(batch.trace())
        if publisher.is_valid and not publisher.trace_flags.sampled:
            return HandlingSpan(NonRecordingSpan(publisher))
        operation = "redrive" if redriven else "process"
        attributes = _attributes(operation, provider, batch.stream, batch.count)
        attributes |= {
            "messaging.consumer.group.name": subscription,
            "messaging.destination.subscription.name": subscription,
            "messaging.destination.partition.id": str(queue),
            "headrace.offset": batch.offset,
        }
        # Never the current context: it is that of the task that subscribed.
        parent = set_span_in_context(NonRecordingSpan(publisher), Context()) if publisher.is_valid else Context()
        return HandlingSpan(self._tracer.start_span(f"{operation} {provider}", parent, SpanKind.CONSUMER, attributes))

    @contextmanager
    def pulling(self, provider: str, subscription: str) -> Generator[PullSpan]:
        """A span around a pull. It is linked to the publishers of the batches that it returns."""
        attributes = {**_attributes("receive", provider, None, None), "messaging.consumer.group.name": subscription}
        with self._tracer.start_as_current_span(
            f"receive {provider}", kind=SpanKind.CLIENT, attributes=attributes
        ) as span:
            yield PullSpan(span)


class HandlingSpan:
    """The current span, until `end`."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token: Token[Context] = contexts.attach(set_span_in_context(span))

    def failed(self, error: BaseException) -> None:
        """The handler raised. A cancellation is no failure: the queue moves, or the process stops."""
        if isinstance(error, Exception):
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))

    def end(self) -> None:
        contexts.detach(self._token)
        self._span.end()


class PullSpan:
    """The span of a pull."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def received(self, batches: Iterable[EventBatch]) -> None:
        """The pull returns these batches."""
        count = 0
        for number, batch in enumerate(batches):
            count += batch.count
            if number < MAX_LINKS and (publisher := decoded(batch.trace())).is_valid:
                self._span.add_link(publisher)
        self._span.set_attribute("messaging.batch.message_count", count)


def _attributes(operation: str, provider: str, stream: StreamId | None, count: int | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": "process" if operation == "redrive" else operation,
        "messaging.destination.name": provider,
    }
    if stream is not None:
        attributes["headrace.stream"] = str(stream)
    if count is not None and count > 1:
        attributes["messaging.batch.message_count"] = count
    return attributes


def encoded(context: SpanContext) -> bytes:
    """Return the ids and the flags of a span as 25 bytes; none if there is no span."""
    if not context.is_valid:
        return b""
    return context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") + bytes((context.trace_flags,))


def decoded(trace: bytes) -> SpanContext:
    """Return the span that `encoded` wrote; an invalid one for other bytes."""
    if len(trace) != 25:
        return INVALID_SPAN_CONTEXT
    trace_id, span_id = int.from_bytes(trace[:16], "big"), int.from_bytes(trace[16:24], "big")
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(trace[24]))


# ---- logs --------------------------------------------------------------------------------------------------------


def add_ids_to_log_records() -> None:
    """Give each log record the fields `otelTraceID` and `otelSpanID`, in hexadecimal; "" outside of spans. These names
    are those of OpenTelemetry's own instrumentation of logging. Idempotent."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _RecordFactory):
        logging.setLogRecordFactory(_RecordFactory(make))


class _RecordFactory:
    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*arguments, **options)
        context = get_current_span().get_span_context()
        record.otelTraceID = f"{context.trace_id:032x}" if context.is_valid else ""
        record.otelSpanID = f"{context.span_id:016x}" if context.is_valid else ""
        return record
