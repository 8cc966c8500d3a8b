"""Publishing over gRPC: answered requests are stored once and in order; wrong ones get an error and store nothing."""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from headrace import Event, StreamId
from headrace.adapters import QueueAdapter
from headrace.proto.v1 import events_pb2
from headrace.proto.v1.publisher_pb2 import (
    ProducerSequence,
    PublishRequest,
    PublishResponse,
    PublishStreamRequest,
    PublishStreamResponse,
    Receipt,
)
from headrace.server.limits import ClientLimits
from headrace.silo.host import Silo
from headrace.silo.service_limits import ServiceLimits
from tests.silo.services.calling import (
    PUBLISH,
    PUBLISH_STREAM,
    Allowed,
    Caller,
    Refused,
    Stream,
    batch,
    connecting,
    make_tokens,
    opened,
)

MEMORY = {"adapter": "memory", "queues": 1}


async def stored(silo: Silo, queue: int | None = None) -> list[Event]:
    """All events, queue by queue."""
    provider = silo.providers["default"]
    events: list[Event] = []
    for each in range(provider.queues) if queue is None else [queue]:
        receiver = await provider.adapter.open_receiver(each, 0)
        at = 0
        while at < (await provider.adapter.bounds(each)).next:
            received = await receiver.receive(1_000_000, 1 << 30)
            events += [event for one in received.batches for event in one.events()]
            at = received.next_offset
        await receiver.aclose()
    return events


async def payloads(silo: Silo) -> list[bytes]:
    return [event.payload for event in await stored(silo)]


def sequence(number: int, previous: int | None = None) -> ProducerSequence:
    return ProducerSequence(producer="p", number=number, previous=number - 1 if previous is None else previous)


async def refused(caller: Caller, request: PublishRequest | bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        await caller.ask(PUBLISH, request, PublishResponse)
    return caught.value


def noted(adapter: QueueAdapter, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """Has an entry for each call of the adapter's `enqueue`."""
    begun: asyncio.Queue[None] = asyncio.Queue()
    enqueue = adapter.enqueue

    def noting(batches: Any, *, sequence: Any = None) -> Awaitable[Any]:
        begun.put_nowait(None)
        return enqueue(batches, sequence=sequence)

    monkeypatch.setattr(adapter, "enqueue", noting)
    return begun


# One request


async def test_published_batch_is_stored_as_it_came(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        headers = [events_pb2.Headers(values={"k": "v"}), events_pb2.Headers()]
        whole = batch("shop/1", b"a", b"bc", ids=["x", ""], headers=headers, timestamps_us=[7])
        receipts = await caller.publish(whole, batch("shop/2", b"d"), batch("shop/1", b"e"))
        provider = silo.providers["default"]
        queues = [provider.queue_of(StreamId("shop", key)) for key in ("1", "2", "1")]
        assert [receipt.queue for receipt in receipts] == queues
        assert all(receipt.HasField("offset") and not receipt.duplicate for receipt in receipts)

        events = await stored(silo, queues[0])
        shop = [event for event in events if event.stream == StreamId("shop", "1")]
        assert [(event.payload, event.id, dict(event.headers)) for event in shop[:2]] == [
            (b"a", "x", {"k": "v"}),
            (b"bc", None, {}),
        ]
        assert [event.timestamp_us for event in shop[:2]] == [7, 7]
        assert [event.token and event.token.offset for event in shop] == [receipts[0].offset] * 2 + [receipts[2].offset]
        assert sorted(await payloads(silo)) == [b"a", b"bc", b"d", b"e"]
        assert provider.published_events == 4


async def test_a_wrong_request_stores_nothing_and_says_which_batch_it_is(tmp_path: Path):
    good = batch("shop/1", b"a")
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        for request, text in (
            (PublishRequest(), "batches: a request has 1 to 10,000 of them, not 0"),
            (PublishRequest(batches=[good] * 10_001), "batches: a request has 1 to 10,000 of them, not 10,001"),
            (PublishRequest(batches=[good, batch("shop/1")]), "batches[1]: damaged batch: it has no events"),
            (PublishRequest(batches=[good, batch("shop/1", b"a", offset=1)]), "batches[1]: a batch has fields from 16"),
            (b"\x1a\x05\x0a", "damaged message"),
            (b"\x0a\xff", "damaged message"),
            (b"\x08\x01", "batches: a request has 1 to"),
            (b"\x9a\x00" + b"\x02\x0a\x00", "batches: their tag is not in its shortest form"),
            (
                PublishRequest(batches=[good], sequence=ProducerSequence(number=1)),
                "sequence.producer: the id of a producer",
            ),
            (
                PublishRequest(batches=[good], sequence=sequence(0, 0)),
                "sequence: number is a whole number above previous",
            ),
            (
                PublishRequest(batches=[good], sequence=sequence(3, 3)),
                "sequence: number is a whole number above previous",
            ),
        ):
            told = await refused(caller, request)
            assert (told.status, told.code) == ("INVALID_ARGUMENT", "invalid_argument")
            assert text in told.details
        too_large = PublishRequest(batches=[good, batch("shop/1", bytes((1 << 20) + 1))])
        told = await refused(caller, too_large)
        assert (told.status, told.code) == ("INVALID_ARGUMENT", "payload_too_large")
        assert told.details.startswith("batches[1]: the payload of an event for shop/1 has 1,048,577 bytes")
        assert await payloads(silo) == []


async def test_a_provider_that_is_not_there_is_not_found(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        told = await refused(caller, PublishRequest(provider="other", batches=[batch("shop/1", b"a")]))
        assert (told.status, told.code) == ("NOT_FOUND", "not_found")
        await caller.publish(batch("shop/1", b"a"), provider="default")


async def test_one_namespace_that_is_not_granted_refuses_the_whole_request(tmp_path: Path):
    tokens = await make_tokens(tmp_path, orders=Allowed(publish=["orders*"]), reader=Allowed(subscribe=["orders*"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        orders = Caller(channel.channel, tokens["orders"])
        await orders.publish(batch("orders/1", b"a"), batch("orders-eu/1", b"b"))
        both = PublishRequest(batches=[batch("orders/1", b"c"), batch("secret/1", b"d")])
        for provider in ("", "other"):
            both.provider = provider
            assert (await refused(orders, both)).status == "PERMISSION_DENIED"
        reader = Caller(channel.channel, tokens["reader"])
        assert (await refused(reader, PublishRequest(batches=[batch("orders/1", b"e")]))).status == "PERMISSION_DENIED"
        assert (await refused(channel, both)).status == "UNAUTHENTICATED"
        assert sorted(await payloads(silo)) == [b"a", b"b"]


async def test_a_full_queue_is_told_and_can_be_tried_again():
    provider = MEMORY | {"options": {"capacity": 1, "when_full": "fail"}}
    async with opened(None, provider=provider) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"))
        told = await refused(caller, PublishRequest(batches=[batch("shop/1", b"b")]))
        assert (told.status, told.code) == ("RESOURCE_EXHAUSTED", "queue_full")
        assert told.retry_after_ms is not None


async def test_pending_requests_of_a_client_are_bounded(monkeypatch: pytest.MonkeyPatch):
    limits = ClientLimits(message_bytes=1000, publish_bytes=1500)
    provider = MEMORY | {"options": {"capacity": 1}}
    async with opened(None, provider=provider, limits=limits) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"))
        begun = noted(silo.providers["default"].adapter, monkeypatch)
        first = asyncio.create_task(caller.publish(batch("shop/1", bytes(900))))
        await begun.get()  # now it waits for room
        told = await refused(caller, PublishRequest(batches=[batch("shop/1", bytes(800))]))
        assert (told.status, told.code) == ("RESOURCE_EXHAUSTED", "limit_exceeded")
        first.cancel()
        await asyncio.wait([first])
        while (await outcome(caller, batch("shop/1", bytes(800)))) != "late":
            pass


async def outcome(caller: Caller, one: events_pb2.EventBatch) -> str:
    request = PublishRequest(batches=[one])
    try:
        await caller.ask(PUBLISH, request, PublishResponse, timeout=0.1)
    except Refused as refusal:
        return "late" if refusal.status == "DEADLINE_EXCEEDED" else str(refusal)
    return "OK"


# Idempotent producers


async def test_the_same_sequence_again_stores_nothing_and_tells_where_it_is(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        first = await caller.publish(batch("shop/1", b"a"), batch("shop/2", b"b"), sequence=sequence(1))
        again = await caller.publish(batch("shop/1", b"a"), batch("shop/2", b"b"), sequence=sequence(1))
        assert [(each.queue, each.offset) for each in again] == [(each.queue, each.offset) for each in first]
        assert [each.duplicate for each in (*first, *again)] == [False, False, True, True]
        await caller.publish(batch("shop/1", b"c"), sequence=sequence(2))
        (old,) = await caller.publish(batch("shop/1", b"a"), sequence=sequence(1))
        assert old == Receipt(queue=old.queue, duplicate=True)
        assert sorted(await payloads(silo)) == [b"a", b"b", b"c"]
        assert silo.providers["default"].published_events == 3


async def test_a_sequence_whose_predecessor_is_missing_is_a_conflict(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"), sequence=sequence(1))
        told = await refused(caller, PublishRequest(batches=[batch("shop/1", b"c")], sequence=sequence(3)))
        assert (told.status, told.code) == ("FAILED_PRECONDITION", "sequence_conflict")
        assert await payloads(silo) == [b"a"]


# A stream


def numbered(*numbers: int) -> list[PublishStreamRequest]:
    return [
        PublishStreamRequest(batches=[batch("shop/1", b"%d" % number)], sequence=sequence(number)) for number in numbers
    ]


async def answers(stream: Stream, count: int) -> Sequence[PublishStreamResponse]:
    responses = [await stream.read(PublishStreamResponse) for _ in range(count)]
    return [response for response in responses if response is not None]


async def test_requests_are_answered_in_order_without_waiting_for_each_other(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        stream = caller.stream(PUBLISH_STREAM)
        for request in numbered(*range(1, 501)):
            await stream.write(request)
        await stream.done_writing()
        offsets = [response.receipts[0].offset for response in await answers(stream, 500)]
        assert offsets == sorted(offsets)
        assert await stream.read(PublishStreamResponse) is None
        assert await payloads(silo) == [b"%d" % number for number in range(1, 501)]


async def test_a_request_that_fails_is_answered_and_the_stream_goes_on(tmp_path: Path):
    tokens = await make_tokens(tmp_path, shop=Allowed(publish=["shop"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        stream = Caller(channel.channel, tokens["shop"]).stream(PUBLISH_STREAM)
        for request in (
            PublishStreamRequest(batches=[batch("shop/1", b"a")]),
            PublishStreamRequest(),
            b"\xff\xff",
            PublishStreamRequest(batches=[batch("secret/1", b"b")]),
            PublishStreamRequest(batches=[batch("shop/1", bytes((1 << 20) + 1))]),
            PublishStreamRequest(batches=[batch("shop/1", b"c")], sequence=sequence(5)),
            PublishStreamRequest(batches=[batch("shop/1", b"d")]),
        ):
            await stream.write(request)
        await stream.done_writing()
        told = [(r.error.status, r.error.code, r.error.retryable) for r in await answers(stream, 7)]
        assert told == [
            (0, "", False),
            (3, "invalid_argument", False),
            (3, "invalid_argument", False),
            (7, "permission_denied", False),
            (3, "payload_too_large", False),
            (9, "sequence_conflict", False),
            (0, "", False),
        ]
        assert await stream.read(PublishStreamResponse) is None
        assert await payloads(silo) == [b"a", b"d"]


async def test_a_streams_provider_is_that_of_its_first_request(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        for first, code in (("other", "not_found"), ("default", "")):
            stream = caller.stream(PUBLISH_STREAM)
            for provider in (first, ""):
                await stream.write(PublishStreamRequest(provider=provider, batches=[batch("shop/1", b"a")]))
            await stream.done_writing()
            assert [response.error.code for response in await answers(stream, 2)] == [code, code]


async def test_request_repeated_after_a_lost_connection_is_stored_once_and_in_order(tmp_path: Path):
    rng = random.Random(7)
    total = 300
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        answered = 0
        while answered < total:
            stream = caller.stream(PUBLISH_STREAM)
            sent = min(rng.randint(1, 60), total - answered)
            for request in numbered(*range(answered + 1, answered + sent + 1)):
                await stream.write(request)
            for response in await answers(stream, rng.randint(0, sent)):
                assert not response.HasField("error"), response
                answered += 1
            stream.cancel()
        assert await payloads(silo) == [b"%d" % number for number in range(1, total + 1)]


async def test_a_publish_stream_is_read_only_up_to_the_limit_of_pending_requests(monkeypatch: pytest.MonkeyPatch):
    provider, limits = MEMORY | {"options": {"capacity": 1}}, ServiceLimits(stream_requests=5)
    async with (
        opened(None, provider=provider, service_limits=limits) as silo,
        connecting(silo.grpc_address or "") as caller,
    ):
        adapter = silo.providers["default"].adapter
        begun = noted(adapter, monkeypatch)
        stream = caller.stream(PUBLISH_STREAM)
        for number in range(20):
            await stream.write(PublishStreamRequest(batches=[batch("shop/1", b"%d" % number)]))
        await stream.done_writing()
        receiver = await adapter.open_receiver(0)
        got: list[bytes] = []
        for answered in range(20):
            response = await stream.read(PublishStreamResponse)
            assert response is not None
            assert not response.HasField("error")
            assert begun.qsize() <= answered + 1 + 5
            received = await receiver.receive(1, 1 << 20)
            got += [event.payload for one in received.batches for event in one.events()]
            await receiver.acknowledge(received.next_offset)
        assert got == [b"%d" % number for number in range(20)]
        await receiver.aclose()


async def test_request_that_waits_for_capacity_is_withdrawn_when_its_producer_is_gone():
    provider = MEMORY | {"options": {"capacity": 1}}
    async with opened(None, provider=provider) as silo, connecting(silo.grpc_address or "") as caller:
        stream = caller.stream(PUBLISH_STREAM)
        for number in range(100):
            await stream.write(PublishStreamRequest(batches=[batch("shop/1", b"%d" % number)]))
        await answers(stream, 1)
        stream.cancel()
        while b"headrace_grpc_calls 0.0" not in (await silo.metrics()).body:  # noqa: ASYNC110 (the silo tells nobody)
            await asyncio.sleep(0.01)
        again = caller.stream(PUBLISH_STREAM)
        await again.write(PublishStreamRequest(batches=[batch("shop/1", b"again")]))
        receiver = await silo.providers["default"].adapter.open_receiver(0)
        got: list[bytes] = []
        while b"again" not in got:
            received = await receiver.receive(1, 1 << 20)
            got += [event.payload for one in received.batches for event in one.events()]
            await receiver.acknowledge(received.next_offset)
        await answers(again, 1)
        # Those stored before the silo knew of the end are in order, and the others are not stored.
        assert got[:-1] == [b"%d" % number for number in range(len(got) - 1)]
        assert len(got) < 100
        await receiver.aclose()


async def test_a_stopping_silo_answers_the_requests_that_it_has_begun(monkeypatch: pytest.MonkeyPatch):
    provider = MEMORY | {"options": {"capacity": 1}}
    async with AsyncExitStack() as clients, AsyncExitStack() as silos:
        silo = await silos.enter_async_context(opened(None, provider=provider))
        caller = await clients.enter_async_context(connecting(silo.grpc_address or ""))
        adapter = silo.providers["default"].adapter
        begun = noted(adapter, monkeypatch)
        stream = caller.stream(PUBLISH_STREAM)
        for request in numbered(1, 2, 3):
            await stream.write(request)
            await begun.get()
        receiver = await adapter.open_receiver(0)
        stopping = asyncio.create_task(silos.aclose())
        await told_to_stop(caller)
        for number in (1, 2, 3):
            received = await receiver.receive(1, 1 << 20)
            assert [event.payload for one in received.batches for event in one.events()] == [b"%d" % number]
            await receiver.acknowledge(received.next_offset)
        assert [response.HasField("error") for response in await answers(stream, 3)] == [False] * 3
        with pytest.raises(Refused, match=r"UNAVAILABLE .*: the silo stops: everything answered is stored"):
            await stream.read(PublishStreamResponse)
        await stopping


async def told_to_stop(caller: Caller) -> None:
    status = health_pb2.HealthCheckResponse
    watch = caller.responses("grpc.health.v1.Health/Watch", b"")
    while (now := await watch.read(status)) is not None:
        if now.status == status.NOT_SERVING:
            return
