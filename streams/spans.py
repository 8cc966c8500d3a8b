"""Spans of OpenTelemetry for publishing and handling. Imported only when tracing is on.

The names follow OpenTelemetry's conventions for messaging, which are still in development: no other module knows them.
The span of a handler is a child of the span that published its batch. The conventions allow a parent for a single
message; a batch of headrace has one publisher and one span, so it can have a parent, too.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import Token
from importlib.metadata import version
from math import inf
from time import monotonic
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
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
)

from .events import EventBatch
from .identity import StreamId
from .layout import NOT_RECORDED

log = logging.getLogger("headrace.tracing")

MAX_LINKS = 32
"""Most publishers that the span of a pull is linked to."""
_SYSTEM = "headrace"

_VERSION = version("headrace")
_NOT_RECORDED = NonRecordingSpan(SpanContext(1, 1, is_remote=False))
"""The current span while nothing is recorded: its children are not sampled."""


class Spans:
    """Makes the spans of one process."""

    def __init__(self, tracer_provider: TracerProvider | None, new_traces_per_s: float) -> None:
        self._tracer = get_tracer("headrace", _VERSION, tracer_provider)
        self._limit = TraceLimit(new_traces_per_s)

    def records(self) -> bool:
        """Whether to make a span here: the current span is recorded, or there is none and a new trace may begin."""
        if contexts.get_current() and (current := get_current_span()) is not INVALID_SPAN:
            return current.get_span_context().trace_flags.sampled
        return self._limit.admits(monotonic())

    @contextmanager
    def publishing(self, provider: str, stream: StreamId | None, count: int) -> Generator[bytes]:
        """A span around a publish, if `records`. Yields the trace for the field `trace` of its batches."""
        attributes = _attributes("send", provider, stream, count)
        with self._current(f"send {provider}", SpanKind.PRODUCER, attributes) as span:
            yield encoded(span.get_span_context())

    def handling(
        self, provider: str, subscription: str, queue: int, batch: EventBatch, *, redriven: bool = False
    ) -> HandlingSpan | None:
        """Begin a span around the handler of a batch, as a child of the span that published it; without one, as a root,
        if a new trace may begin. Return None if nothing is recorded."""
        publisher = batch.trace()
        if not (publisher[-1] & TraceFlags.SAMPLED if publisher else self._limit.admits(monotonic())):
            return None
        operation = "redrive" if redriven else "process"
        attributes = _attributes(operation, provider, batch.stream, batch.count)
        attributes |= {
            "messaging.consumer.group.name": subscription,
            "messaging.destination.subscription.name": subscription,
            "messaging.destination.partition.id": str(queue),
            "headrace.offset": batch.offset,
        }
        # Never the current context: it is that of the task that subscribed.
        parent = set_span_in_context(NonRecordingSpan(decoded(publisher)), Context()) if publisher else Context()
        return HandlingSpan(self._start(f"{operation} {provider}", SpanKind.CONSUMER, attributes, parent))

    def record_nothing(self) -> HandlingSpan:
        """Make a span the current one that is not recorded. Until its end, publishes and other libraries record
        nothing, either."""
        return HandlingSpan(_NOT_RECORDED)

    @contextmanager
    def pulling(self, provider: str, subscription: str) -> Generator[PullSpan]:
        """A span around a pull, if `records`. It is linked to the publishers of the batches that it returns."""
        attributes = {**_attributes("receive", provider, None, None), "messaging.consumer.group.name": subscription}
        with self._current(f"receive {provider}", SpanKind.CLIENT, attributes) as span:
            yield PullSpan(span)

    @contextmanager
    def _current(self, name: str, kind: SpanKind, attributes: Mapping[str, Any]) -> Generator[Span]:
        """Make a new span the current one, for the length of a `with`."""
        handled = HandlingSpan(self._start(name, kind, attributes))
        try:
            yield handled.span
        except BaseException as error:
            handled.failed(error)
            raise
        finally:
            handled.end()

    def _start(self, name: str, kind: SpanKind, attributes: Mapping[str, Any], parent: Context | None = None) -> Span:
        """Start a span. A sampler or processor that fails must not fail the work: then nothing is recorded."""
        try:
            return self._tracer.start_span(name, parent, kind, attributes)
        except Exception:
            log.exception("the span %r cannot be started", name)
            return _NOT_RECORDED


class TraceLimit:
    """Lets so many new traces begin in each second, and the traces of one second at once (GCRA, as in ITU-T I.371)."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s if per_s else inf
        self._unused_s = max(1.0, self._interval_s) - self._interval_s if per_s else 0.0
        """How much of the past without traces counts."""
        self._next_s = 0.0 if per_s else inf
        """When the next trace may begin."""

    def admits(self, now: float) -> bool:
        """Whether a new trace may begin now (`monotonic`). Counts it."""
        if now < self._next_s:
            return False
        self._next_s = max(self._next_s, now - self._unused_s) + self._interval_s
        return True


class HandlingSpan:
    """The current span, until `end`. None of its methods raises: work that is done must not fail for its span."""

    __slots__ = ("_token", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self._token: Token[Context] = contexts.attach(set_span_in_context(span))

    def failed(self, error: BaseException) -> None:
        """The work raised. A cancellation is no failure: the queue moves, or the process stops."""
        if isinstance(error, Exception):
            try:
                self.span.record_exception(error)
                self.span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
            except Exception:
                log.exception("an error cannot be recorded in its span")

    def end(self) -> None:
        contexts.detach(self._token)
        try:
            self.span.end()
        except Exception:
            log.exception("a span cannot be ended")


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
    """Return the ids and the flags of a recorded span as 25 bytes; `NOT_RECORDED` for any other."""
    if not (context.is_valid and context.trace_flags.sampled):
        return NOT_RECORDED
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
        span = get_current_span()
        context = INVALID_SPAN_CONTEXT if span is _NOT_RECORDED else span.get_span_context()
        record.otelTraceID = f"{context.trace_id:032x}" if context.is_valid else ""
        record.otelSpanID = f"{context.span_id:016x}" if context.is_valid else ""
        return record
