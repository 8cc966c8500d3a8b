"""Traces: the field of a batch, and the spans of publishers and handlers in one process."""

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from headrace import (
    Client,
    Event,
    EventBatch,
    InvalidArgument,
    Provider,
    RetryPolicy,
    StreamId,
    disable_tracing,
    enable_tracing,
)
from headrace.proto.v1 import events_pb2
from headrace.streams import frames, layout, tracing
from headrace.streams.incoming import accepted
from headrace.streams.layout import NOT_RECORDED
from headrace.streams.spans import MAX_LINKS, TraceLimit, decoded, encoded
from headrace.streams.tracing import Instrumentor
from tests.client.consumers import until
from tests.silo.services.calling import opened

STREAM = StreamId("orders", "42")
TRACE = bytes(range(1, 25)) + b"\x01"


class Traced:
    """The spans of this process."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.provider = provider
        self._exporter = exporter

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


@pytest.fixture
def traced() -> Iterator[Traced]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable_tracing(provider)
    yield Traced(provider, exporter)
    disable_tracing()


# ---- the field -------------------------------------------------------------------------------------------------------

PAYLOADS = st.lists(st.binary(max_size=20), min_size=1, max_size=5)


@given(PAYLOADS, st.booleans(), st.sampled_from([TRACE, NOT_RECORDED]))
def test_a_batch_keeps_its_trace_through_storage_and_the_wire(
    payloads: list[bytes], headers: bool, trace: bytes
) -> None:
    events: list[bytes | Event] = [Event(one, headers={"a": "b"}) if headers else one for one in payloads]
    batch = EventBatch.of(STREAM, events, trace=trace)
    assert batch.trace() == trace
    assert batch.payloads() == payloads
    assert events_pb2.EventBatch.FromString(batch.encoded).trace == trace
    stored = accepted(batch.encoded, 0)
    assert (stored.payloads(), stored.trace()) == (payloads, trace)
    (delivered,), _ = frames.split(frames.frame(stored.encoded, 3, 70))
    assert (delivered.batch.trace(), delivered.batch.payloads()) == (trace, payloads)
    last = frames.part(batch, [len(payloads) - 1])
    assert EventBatch.decode(last).trace() == trace
    assert EventBatch.decode(last).payloads() == payloads[-1:]


@given(PAYLOADS)
def test_a_batch_without_a_trace_has_none(payloads: list[bytes]) -> None:
    batch = EventBatch.of(STREAM, payloads)
    assert batch.trace() == b""
    assert len(EventBatch.of(STREAM, payloads, trace=TRACE).encoded) == len(batch.encoded) + 2 + layout.TRACE_BYTES


def test_a_trace_of_another_length_is_refused() -> None:
    message = events_pb2.EventBatch.FromString(EventBatch.of(STREAM, [b"x", b"y"]).encoded)
    for wrong in (b"short", b"\1"):
        message.trace = wrong
        with pytest.raises(InvalidArgument, match=f"25 bytes, or is one zero byte; not {len(wrong)} bytes"):
            accepted(message.SerializeToString(), 0)


def test_a_batch_whose_fields_are_in_another_order_keeps_its_trace() -> None:
    message = events_pb2.EventBatch.FromString(EventBatch.of(STREAM, [b"x", b"y"]).encoded)
    turned = b"".join([events_pb2.EventBatch(trace=TRACE).SerializeToString(), message.SerializeToString()])
    assert accepted(turned, 0).trace() == TRACE


def test_the_ids_of_a_span_are_written_and_read() -> None:
    context = decoded(TRACE)
    assert (context.is_remote, context.trace_flags.sampled) == (True, True)
    assert encoded(context) == TRACE
    assert encoded(decoded(TRACE[:24] + b"\0")) == NOT_RECORDED
    assert not decoded(b"damaged").is_valid


# ---- spans -----------------------------------------------------------------------------------------------------------


async def test_a_handler_is_part_of_the_trace_of_its_publisher(tmp_path: Path, traced: Traced) -> None:
    async def handle(event: Event) -> None: ...

    tracer = traced.provider.get_tracer("test")
    async with Provider.open(tmp_path) as provider:
        subscription = await provider.subscribe("billing", "orders/*", handle)
        with tracer.start_as_current_span("request") as request:
            await provider.publish(STREAM, [b"1", b"2"])
        await subscription.caught_up()
    (send,), (process,) = traced.spans("send default"), traced.spans("process default")
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None
    assert process.parent.span_id == id_of(send)
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(process.attributes or {}) == {
        "messaging.system": "headrace",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "headrace.stream": "orders/42",
        "messaging.batch.message_count": 2,
        "messaging.consumer.group.name": "billing",
        "messaging.destination.subscription.name": "billing",
        "messaging.destination.partition.id": str(provider.queue_of(STREAM)),
        "headrace.offset": 0,
    }


async def test_a_failure_is_in_the_span_and_its_log_line_has_the_ids(
    tmp_path: Path, traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [ValueError("no address")]

    async def handle(event: Event) -> None:
        if failures:
            raise failures.pop()

    async with Provider.open(tmp_path) as provider:
        retry = RetryPolicy(initial_delay_s=0.01)
        subscription = await provider.subscribe("s", "orders/*", handle, retry=retry)
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()
    failed, succeeded = traced.spans("process default")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "ValueError: no address"
    assert succeeded.status.status_code is StatusCode.UNSET
    record = next(one for one in caplog.records if "no address" in one.getMessage())
    context = failed.get_span_context()
    assert context is not None
    assert vars(record)["otelTraceID"] == f"{context.trace_id:032x}"
    logging.getLogger("test").warning("outside")
    assert vars(caplog.records[-1])["otelTraceID"] == ""


async def test_a_redrive_has_a_span_of_its_own(tmp_path: Path, traced: Traced) -> None:
    failures = [ValueError("no")]

    async def handle(event: Event) -> None:
        if failures:
            raise failures.pop()

    async with Provider.open(tmp_path) as provider:
        subscription = await provider.subscribe("s", "orders/*", handle, retry=RetryPolicy(max_attempts=1))
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()
        assert await subscription.redrive() == 1
        await until(lambda: bool(traced.spans("redrive default")))


async def test_consumers_over_grpc_and_pulls_have_spans(tmp_path: Path, traced: Traced) -> None:
    handled = asyncio.Event()

    async def handle(event: Event) -> None:
        handled.set()

    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        await client.subscribe("handler", "orders/*", handle)
        await client.publish(STREAM, b"x")
        await handled.wait()
        await until(lambda: bool(traced.spans("process default")))
        (send,), (process,) = traced.spans("send default"), traced.spans("process default")
        assert process.parent is not None
        assert process.parent.span_id == id_of(send)
        async with client.subscribe("iterated", "orders/*", start="earliest") as consumer:
            batch = await anext(aiter(consumer))
            with batch.tracing():
                await batch.ack()
        assert len(traced.spans("process default")) == 2
        iterated = (await client.subscription("iterated")).definition
        await client.create_subscription(replace(iterated, name="pulled"))
        pulled = await client.pull("pulled", "c", wait_s=5)
        (receive,) = traced.spans("receive default")
        assert [link.context.span_id for link in receive.links] == [id_of(send)]
        with pulled[0].tracing():
            await pulled[0].ack()
        await client.acknowledge(pulled)
        assert len(traced.spans("process default")) == 3


async def test_delayed_and_grouped_publishes_carry_the_trace(tmp_path: Path, traced: Traced) -> None:
    async def handle(event: Event) -> None: ...

    async with Provider.open(tmp_path, delays="store") as provider:
        subscription = await provider.subscribe("s", "orders/*", handle)
        await provider.publish(STREAM, b"later", delay=timedelta(milliseconds=10))
        await provider.publish_many([(StreamId("orders", "1"), b"a"), (StreamId("orders", "2"), b"b")])
        await until(lambda: len(traced.spans("process default")) == 3)
        await subscription.caught_up()
    sends = {id_of(span) for span in traced.spans("send default")}
    assert len(sends) == 2
    assert {span.parent.span_id for span in traced.spans("process default") if span.parent} == sends


async def test_an_unsampled_publish_makes_no_span_of_the_handler(tmp_path: Path) -> None:
    exporter, sampled = InMemorySpanExporter(), TracerProvider()
    sampled.add_span_processor(SimpleSpanProcessor(exporter))
    traces = asyncio.Queue[bytes]()

    async def handle(batch: EventBatch) -> None:
        traces.put_nowait(batch.trace())

    tracer = TracerProvider(sampler=ParentBased(ALWAYS_OFF)).get_tracer("test")
    async with Provider.open(tmp_path) as provider:
        await provider.subscribe("s", "orders/*", handle, batch=True)
        try:
            enable_tracing(sampled)
            with tracer.start_as_current_span("request"):
                await provider.publish(STREAM, b"one")
                await provider.publish(STREAM, [b"several", b"events"])
                await provider.publish_many([(STREAM, b"many")])
            assert {await traces.get() for _ in range(3)} == {NOT_RECORDED}
            enable_tracing(TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
            await provider.publish(STREAM, b"its own sampler")
            assert await traces.get() == NOT_RECORDED
        finally:
            disable_tracing()
    assert exporter.get_finished_spans() == ()


def test_a_limit_admits_the_traces_of_a_second_at_once_and_then_at_its_rate() -> None:
    now = 100.0
    limit = TraceLimit(4)
    assert [limit.admits(now) for _ in range(6)] == [True] * 4 + [False] * 2
    now += 0.25
    assert [limit.admits(now) for _ in range(2)] == [True, False]
    now += 3600
    assert sum(limit.admits(now) for _ in range(10)) == 4
    seldom = TraceLimit(0.1)
    assert [seldom.admits(now), seldom.admits(now)] == [True, False]
    now += 10
    assert seldom.admits(now)
    assert not any(TraceLimit(0).admits(now) for _ in range(3))
    assert all(TraceLimit(inf).admits(now) for _ in range(1000))


async def test_beyond_the_limit_only_traces_of_the_user_are_recorded(tmp_path: Path, traced: Traced) -> None:
    enable_tracing(traced.provider, new_traces_per_s=0)
    traces = dict[bytes, bytes]()

    async def handle(batch: EventBatch) -> None:
        traces[batch.payloads()[0]] = batch.trace()

    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        provider = silo.providers["default"]
        await provider.subscribe("s", "orders/*", handle, batch=True)
        await provider.publish_encoded([EventBatch.of(STREAM, [b"other program"])])
        for publisher in (provider, client):
            await publisher.publish(STREAM, b"one")
            await publisher.publish(STREAM, [b"several", b"events"])
            await publisher.publish_many([(STREAM, b"many")])
        with traced.provider.get_tracer("test").start_as_current_span("request") as request:
            await client.publish(STREAM, b"traced")
        await until(lambda: b"traced" in traces)
    assert {key: trace for key, trace in traces.items() if key != b"traced"} == {
        b"other program": b"",
        b"one": NOT_RECORDED,
        b"several": NOT_RECORDED,
        b"many": NOT_RECORDED,
    }
    (send,), (process,) = traced.spans("send default"), traced.spans("process default")
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None
    assert process.parent.span_id == id_of(send)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "50", True, None])
def test_a_wrong_limit_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"new_traces_per_s is .*: expected a number of at least 0"):
        enable_tracing(new_traces_per_s=wrong)
    with pytest.raises(InvalidArgument, match="tracer_provider is 5: expected a TracerProvider"):
        enable_tracing(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert tracing.active is None


async def test_the_span_of_a_pull_has_at_most_32_links(traced: Traced) -> None:
    active = tracing.active
    assert active is not None
    with active.pulling("default", "s") as span:
        span.received(EventBatch.of(STREAM, [b"x", b"y"], trace=TRACE) for _ in range(MAX_LINKS + 5))
        span.received([])
    (receive,) = traced.spans("receive default")
    assert len(receive.links) == MAX_LINKS == 32


async def test_a_batch_without_a_publisher_begins_a_trace_of_its_own(tmp_path: Path, traced: Traced) -> None:
    async def handle(event: Event) -> None: ...

    async with Provider.open(tmp_path) as provider:
        await provider.publish_encoded([EventBatch.of(STREAM, [b"x"])])
        with traced.provider.get_tracer("test").start_as_current_span("starting"):
            subscription = await provider.subscribe("s", "orders/*", handle, start="earliest")
        await subscription.caught_up()
    (process,) = traced.spans("process default")
    assert process.parent is None


async def test_publishes_of_a_handler_are_not_sampled_if_its_publisher_was_not(tmp_path: Path, traced: Traced) -> None:
    published, inner = asyncio.Event(), list[tuple[bool, str]]()
    tracer = traced.provider.get_tracer("another library")

    async with Provider.open(tmp_path) as provider:

        async def forward(event: Event) -> None:
            record = logging.getLogRecordFactory()("a", 1, "", 1, "", (), None)
            with tracer.start_as_current_span("query") as query:
                inner.append((query.is_recording(), vars(record)["otelTraceID"]))
                await provider.publish(StreamId("invoices", "1"), event.payload)
            published.set()

        with tracer.start_as_current_span("starting"):
            await provider.subscribe("s", "orders/*", forward)
        await provider.publish_encoded([EventBatch.of(STREAM, [b"x"], trace=TRACE[:24] + b"\x00")])
        await published.wait()
    assert traced.spans("send default") == []
    assert traced.spans("process default") == []
    assert inner == [(False, "")]


async def test_a_record_may_have_fields_of_its_own(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").warning("mine", extra={"trace_id": "7", "span_id": "8"})
    assert vars(caplog.records[-1])["trace_id"] == "7"


class Broken(SpanProcessor):
    def __init__(self, method: str) -> None:
        self._method = method

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._run("on_start")

    def on_end(self, span: Any) -> None:
        self._run("on_end")

    def _run(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError("a broken processor")


@pytest.mark.parametrize("method", ["on_start", "on_end"])
async def test_a_processor_that_raises_fails_no_publish_and_no_handler(
    tmp_path: Path, traced: Traced, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    handled = list[bytes]()

    async def handle(event: Event) -> None:
        handled.append(event.payload)

    traced.provider.add_span_processor(Broken(method))
    async with Provider.open(tmp_path) as provider:
        subscription = await provider.subscribe("s", "orders/*", handle, retry=RetryPolicy(max_attempts=1))
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()
        assert handled == [b"x"]
        assert await provider.dead_letters("s") == []
    assert "a broken processor" in caplog.text


async def test_without_tracing_a_batch_has_no_trace_and_tracing_does_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as silo, Client(silo.grpc_address or "") as client:
        await client.publish(STREAM, b"x")
        async with client.subscribe("s", "orders/*", start="earliest") as consumer:
            batch = await anext(aiter(consumer))
            assert batch.trace() == b""
            with batch.tracing():
                await batch.ack()


def test_the_instrumentor_of_opentelemetry_switches_it_on_and_off() -> None:
    instrumentor = Instrumentor()
    instrumentor.instrument(tracer_provider=TracerProvider(), skip_dep_check=True)
    assert tracing.active is not None
    instrumentor.uninstrument()
    assert tracing.active is None
