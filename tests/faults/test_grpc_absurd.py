"""Absurd values in requests, each with the status that names the fault."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message

from headrace.proto.v1 import cluster_pb2, publisher_pb2, reader_pb2
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1 import subscriptions_pb2 as sub
from headrace.proto.v1.events_pb2 import EventBatch, Headers
from headrace.streams.events import MAX_DELAY
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US
from tests.silo.services.calling import CLUSTER, PUBLISH, SUBSCRIPTIONS, Caller, Refused, connecting, opened
from tests.silo.services.sessions import ACKNOWLEDGE, PULL, SUBSCRIBE, Session, begin

TOP_64, TOP_32 = (1 << 64) - 1, (1 << 32) - 1
NAN, INFINITY = float("nan"), float("inf")
INVALID = "INVALID_ARGUMENT"
READER = "headrace.v1.ReaderService"
GET_PRODUCER = "headrace.v1.PublisherService/GetProducer"


@pytest_asyncio.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("s", "n/*")
        yield caller


async def status_of(caller: Caller, method: str, request: Message | bytes) -> str:
    try:
        await caller.ask(method, request, sub.ListGapsResponse)
    except Refused as refused:
        return refused.status if refused.code and refused.details else f"{refused.status}, without a word"
    return "OK"


def batch(**fields: Any) -> EventBatch:
    usual: dict[str, Any] = {"namespace": "n", "key": "k", "sizes": [1], "payload": b"x"}
    return EventBatch(**(usual | fields))


NO_BATCHES = [
    EventBatch(),
    batch(namespace="x" * 100_000),
    batch(sizes=[]),
    batch(sizes=[2]),
    batch(sizes=[0]),
    batch(sizes=[TOP_32]),
    batch(sizes=[TOP_32] * 100),
    batch(sizes=[1] * 65_537, payload=b"x" * 65_537),
    batch(sizes=[1 << 20, 1], payload=b"x" * ((1 << 20) + 2)),
    batch(sizes=[(1 << 20) + 1], payload=b"x" * ((1 << 20) + 1)),
    batch(timestamps_us=[1, 2]),
    batch(timestamps_us=[-(1 << 63)]),
    batch(timestamps_us=[(1 << 63) - 1]),
    batch(timestamps_us=[MAX_TIME_US + 1]),
    batch(timestamps_us=[0, MIN_TIME_US - 1], sizes=[1, 0]),
    batch(ids=["x" * (1 << 20)]),
    batch(ids=["é" * 513]),
    batch(headers=[Headers(values={"a": "x" * (64 << 10)})]),
    batch(headers=[Headers(values={"x" * (64 << 10): "a"})]),
    batch(headers=[Headers(values={str(number): "" for number in range(129)})]),
    batch(delay_us=MAX_DELAY // timedelta(microseconds=1) + 1),
    batch(priority=100),
    batch(ids=["a", "b"]),
    batch(headers=[Headers(), Headers()]),
    batch(offset=1),
    batch(queue=1),
    batch(attempt=2),
    batch(indexes=[0]),
    batch(redriven=True),
]


async def test_invalid_batch_is_refused(caller: Caller) -> None:
    for wrong in NO_BATCHES:
        request = publisher_pb2.PublishRequest(batches=[batch(), wrong])
        assert await status_of(caller, PUBLISH, request) == INVALID, str(wrong)[:1000]


@pytest.mark.parametrize(
    ("sequence", "status"),
    [
        ({}, INVALID),
        ({"producer": "p"}, INVALID),
        ({"producer": "x" * 129, "number": 1}, INVALID),
        ({"producer": "p", "number": TOP_64, "previous": TOP_64}, INVALID),
        ({"producer": "p", "number": TOP_64}, INVALID),
        ({"producer": "p", "number": 5, "previous": 4}, "FAILED_PRECONDITION"),
        ({"producer": "\0\n", "number": (1 << 63) - 1}, "OK"),
    ],
)
async def test_absurd_numbers_of_producers(caller: Caller, sequence: dict[str, Any], status: str) -> None:
    told = publisher_pb2.ProducerSequence(**sequence)
    assert await status_of(caller, PUBLISH, publisher_pb2.PublishRequest(sequence=told, batches=[batch()])) == status


LARGEST = [
    batch(timestamps_us=[MIN_TIME_US, MAX_TIME_US], sizes=[1, 0]),
    batch(ids=["é" * 512]),
    batch(headers=[Headers(values={"é": "é" * ((32 << 10) - 1)})]),
    batch(headers=[Headers(values={str(number): "" for number in range(128)})]),
    batch(namespace="x" * 1024, key="é" * 512),
]


async def test_event_at_its_limit_is_published(caller: Caller) -> None:
    for largest in LARGEST:
        request = publisher_pb2.PublishRequest(batches=[largest])
        assert await status_of(caller, PUBLISH, request) == "OK", str(largest)[:1000]


def definition(**fields: Any) -> sub.SubscriptionDefinition:
    usual: dict[str, Any] = {"name": "t", "selector": "n/*"}
    return sub.SubscriptionDefinition(**(usual | fields))


NO_DEFINITIONS: list[dict[str, Any]] = [
    {"name": ""},
    {"name": "a\nb"},
    {"name": "../../x"},
    {"name": "t~c"},
    {"name": "x" * 129},
    {"name": "\0"},
    {"selector": ""},
    {"selector": "n"},
    {"selector": "%zz/*"},
    {"selector": "x/" + "*a" * 100_000},
    {"filter": "module:function"},
    {"mode": -1},
    {"mode": 4},
    {"mode": (1 << 31) - 1},
    {"on_failure": 77},
    {"slow_consumer": -(1 << 31)},
    {"start": sub.Start(earliest=False)},
    {"start": sub.Start(latest=False)},
    {"start": sub.Start(token="")},
    {"start": sub.Start(token="-1")},
    {"start": sub.Start(token="1.5")},  # not of one stream
    {"selector": "n/k", "start": sub.Start(token="x" * 100_000)},
    {"selector": "n/k", "start": sub.Start(token="18446744073709551616")},
    {"selector": "n/k", "start": sub.Start(token="5")},
    {"start": sub.Start(time_us=MAX_TIME_US + 1)},
    {"start": sub.Start(time_us=MIN_TIME_US - 1)},
    {"retry": sub.RetryPolicy(max_attempts=0)},
    {"retry": sub.RetryPolicy(max_attempts=1 << 31)},
    {"retry": sub.RetryPolicy(max_elapsed_s=3.2e9)},
    {"retry": sub.RetryPolicy(initial_delay_s=1e308)},
    {"retry": sub.RetryPolicy(max_delay_s=1e308)},
    {"retry": sub.RetryPolicy(multiplier=1e308)},
    {"retry": sub.RetryPolicy(max_elapsed_s=NAN)},
    {"retry": sub.RetryPolicy(initial_delay_s=NAN)},
    {"retry": sub.RetryPolicy(initial_delay_s=-1.0)},
    {"retry": sub.RetryPolicy(max_delay_s=INFINITY)},
    {"retry": sub.RetryPolicy(multiplier=-INFINITY)},
    {"retry": sub.RetryPolicy(multiplier=NAN)},
]


async def test_invalid_definition_is_refused(caller: Caller) -> None:
    for fields in NO_DEFINITIONS:
        wrong = definition(**fields)
        create = sub.CreateSubscriptionRequest(definition=wrong)
        assert await status_of(caller, f"{SUBSCRIPTIONS}/CreateSubscription", create) == INVALID, str(wrong)[:1000]
        session = Session(caller.stream(SUBSCRIBE))
        await session.say(open=pb.Open(definition=wrong))
        refused = await session.end()
        assert refused is not None
        # A filter may be a definition, but not for consumers.
        assert refused.status in (INVALID, "FAILED_PRECONDITION"), str(wrong)[:1000]


FAR = [MIN_TIME_US, -1, 0, MAX_TIME_US]


@pytest.mark.parametrize("at", FAR)
async def test_a_definition_that_differs_in_a_time_far_away(caller: Caller, at: int) -> None:
    for start, status in ((sub.Start(time_us=at), "OK"), (sub.Start(time_us=5), "ALREADY_EXISTS")):
        request = sub.CreateSubscriptionRequest(definition=definition(start=start))
        assert await status_of(caller, f"{SUBSCRIPTIONS}/CreateSubscription", request) == status


ABSURD: list[tuple[str, Message | bytes, str]] = [
        *((f"{SUBSCRIPTIONS}/SeekSubscription", sub.SeekSubscriptionRequest(name="s", to=sub.Start(time_us=at)), "OK")
          for at in FAR),
        (f"{SUBSCRIPTIONS}/SeekSubscription", sub.SeekSubscriptionRequest(name="s", to=sub.Start(token="1")), INVALID),
        (f"{SUBSCRIPTIONS}/ListDeadLetters", sub.ListDeadLettersRequest(subscription="s", limit=TOP_32), "OK"),
        (f"{SUBSCRIPTIONS}/ListDeadLetters", sub.ListDeadLettersRequest(subscription="s", after_id=TOP_64), "OK"),
        (f"{SUBSCRIPTIONS}/RedriveDeadLetters", sub.RedriveDeadLettersRequest(subscription="s", ids=[TOP_64, 0]), "OK"),
        (f"{SUBSCRIPTIONS}/DeleteDeadLetters", sub.DeleteDeadLettersRequest(subscription="s", ids=[TOP_64]), "OK"),
        (f"{SUBSCRIPTIONS}/DeleteDeadLetters", sub.DeleteDeadLettersRequest(subscription="s"), INVALID),
        (f"{SUBSCRIPTIONS}/ListGaps", sub.ListGapsRequest(subscription="s", skip=TOP_64), "OK"),
        (f"{SUBSCRIPTIONS}/SeekSubscription",
         sub.SeekSubscriptionRequest(name="s", to=sub.Start(time_us=(1 << 63) - 1)), INVALID),
        (f"{SUBSCRIPTIONS}/ListSubscriptions", sub.ListSubscriptionsRequest(after_name="\0" * 256), "OK"),
        (f"{SUBSCRIPTIONS}/ListSubscriptions", sub.ListSubscriptionsRequest(after_name="\0" * 257), INVALID),
        (f"{SUBSCRIPTIONS}/GetSubscription", sub.GetSubscriptionRequest(name="x" * 256), "NOT_FOUND"),
        (f"{SUBSCRIPTIONS}/GetSubscription", sub.GetSubscriptionRequest(name="x" * 1_000_000), INVALID),
        (f"{SUBSCRIPTIONS}/GetSubscription", sub.GetSubscriptionRequest(provider="x" * 129), INVALID),
        (f"{SUBSCRIPTIONS}/ListGaps", sub.ListGapsRequest(subscription="x" * 257), INVALID),
        (f"{CLUSTER}/DrainSilo", cluster_pb2.DrainSiloRequest(silo="x" * 256), INVALID),
        (f"{CLUSTER}/DrainSilo", cluster_pb2.DrainSiloRequest(silo="x", drain_ms=86_400_001), INVALID),
        (f"{READER}/GetQueues", reader_pb2.GetQueuesRequest(time_us=-(1 << 63)), INVALID),
        (f"{READER}/GetQueues", reader_pb2.GetQueuesRequest(time_us=MIN_TIME_US), "OK"),
        (f"{READER}/EndWithin", reader_pb2.EndWithinRequest(end_offset=TOP_64), INVALID),
        (f"{READER}/EndWithin", reader_pb2.EndWithinRequest(start_offset=1 << 63, end_offset=1 << 63), INVALID),
        (f"{READER}/EndWithin", reader_pb2.EndWithinRequest(queue=TOP_32), INVALID),
        (f"{READER}/EndWithin", reader_pb2.EndWithinRequest(max_events=TOP_64, max_bytes=TOP_64), "OK"),
        (GET_PRODUCER, publisher_pb2.GetProducerRequest(producer="x" * 129), INVALID),
        (GET_PRODUCER, publisher_pb2.GetProducerRequest(), INVALID),
        (PULL, pb.PullRequest(subscription="s", consumer="c", wait_ms=TOP_32), INVALID),
        (PULL, pb.PullRequest(subscription="s", consumer="x" * 101), INVALID),
        (f"{SUBSCRIPTIONS}/GetSubscription", sub.GetSubscriptionRequest(name="s", provider="\n"), "NOT_FOUND"),
        (f"{SUBSCRIPTIONS}/DeleteSubscription", sub.DeleteSubscriptionRequest(name="../../control.db"), "NOT_FOUND"),
        (f"{SUBSCRIPTIONS}/ResumeStream", sub.ResumeStreamRequest(name="s", namespace="x" * 100_000), INVALID),
        (f"{SUBSCRIPTIONS}/ResumeStream", sub.ResumeStreamRequest(name="s", namespace="n", key="k"), "OK"),
        (f"{CLUSTER}/StopAgents", cluster_pb2.StopAgentsRequest(queues=[TOP_32]), INVALID),
        (f"{CLUSTER}/StartAgents", cluster_pb2.StartAgentsRequest(queues=[2]), INVALID),
        (f"{CLUSTER}/StartAgents", cluster_pb2.StartAgentsRequest(provider="none"), "NOT_FOUND"),
        (PULL, pb.PullRequest(subscription="s", consumer="c", max_events=TOP_64, max_bytes=TOP_64), "OK"),
        (PULL, pb.PullRequest(subscription="s", consumer="c", session_timeout_ms=TOP_32), INVALID),
        (PULL, pb.PullRequest(subscription="s", consumer="\0"), INVALID),
        (ACKNOWLEDGE, pb.AcknowledgeRequest(subscription="s", consumer="\0"), "OK"),
        (PUBLISH, publisher_pb2.PublishRequest(), INVALID),
        (PUBLISH, publisher_pb2.PublishRequest(provider="none", batches=[batch()]), "NOT_FOUND"),
        (PUBLISH, b"\x1a\xff\xff\xff\xff\x0f", INVALID),
        (PUBLISH, b"\x0b" * 100_000, INVALID),
        (PULL, b"\x80" * 11, INVALID),
        (PULL, b"\x0a\x02\xff\xfe", INVALID),
]  # fmt: skip


async def test_absurd_requests_end_with_the_right_status(caller: Caller) -> None:
    for method, request, status in ABSURD:
        assert await status_of(caller, method, request) == status, f"{method}: {str(request)[:1000]}"


NOTHING: dict[str, Any] = {"offset": 1}
WRONG_RESULTS: list[dict[str, Any]] = [
    {"acknowledgements": [pb.Acknowledgement(**NOTHING)] * 100_001},
    {"unconfirmed": [pb.Unconfirmed(namespace="n", key="k", offset=1)]},
    {"unconfirmed": [pb.Unconfirmed(namespace="x" * 1025, key="k", count=1)]},
    {"unconfirmed": [pb.Unconfirmed(namespace="n", key="x" * 1025, count=1)]},
    {"rejections": [pb.Rejection(**NOTHING, delay_ms=604_800_001)]},
]
USELESS_RESULTS: list[dict[str, Any]] = [
    {"acknowledgements": [pb.Acknowledgement(offset=TOP_64, index=TOP_32, count=TOP_32, up_to=True)]},
    {"rejections": [pb.Rejection(offset=TOP_64, index=TOP_32, count=TOP_32, reason="x" * 100_000)]},
    {"acknowledgements": [pb.Acknowledgement(**NOTHING)], "queue": TOP_32},
    {"acknowledgements": [pb.Acknowledgement(**NOTHING)], "epoch": TOP_64},
    {"rejections": [pb.Rejection(**NOTHING, delay_ms=TOP_64)], "generation": TOP_64},
]
IGNORED_RESULTS: list[dict[str, Any]] = [
    {},
    {"queue": TOP_32, "epoch": TOP_64, "generation": TOP_64, "number": TOP_64},
    {"number": TOP_64},
    {"number": 1},
    {"released": [pb.Released(offset=TOP_64, index=TOP_32)]},
    {"released": [pb.Released(**NOTHING)] * 10_000},
    {"unconfirmed": [pb.Unconfirmed(namespace="n", key="k", offset=TOP_64, index=TOP_32, count=TOP_32)]},
    {"unconfirmed": [pb.Unconfirmed(namespace="none", key="k", offset=1, count=1)] * 1000},
]


def report(session: Session, fields: dict[str, Any]) -> pb.QueueReport:
    """A report on queue 0, under its epoch and generation if `fields` has no other ones."""
    status = session.statuses[0]
    usual: dict[str, Any] = {"epoch": status.epoch, "generation": status.generation}
    return pb.QueueReport(**(usual | fields))


@pytest.mark.parametrize("fields", WRONG_RESULTS, ids=range(len(WRONG_RESULTS)))
async def test_results_that_no_consumer_can_have_end_the_session(caller: Caller, fields: dict[str, Any]) -> None:
    session = await begin(caller, "s")
    await session.say(reports=[report(session, fields)])
    refused = await session.end()
    assert refused is not None
    assert refused.status == INVALID


async def test_too_many_reports_end_the_session(caller: Caller) -> None:
    session = await begin(caller, "s")
    await session.say(reports=[pb.QueueReport()] * 100_001)
    refused = await session.end()
    assert refused is not None
    assert refused.status == INVALID


async def test_results_of_events_that_the_consumer_does_not_hold_are_refused(caller: Caller) -> None:
    session = await begin(caller, "s")
    for fields in USELESS_RESULTS:
        session.refused.clear()
        await session.say(reports=[report(session, fields)])
        await session.until(lambda: len(session.refused) == 1)
    for fields in IGNORED_RESULTS:
        await session.say(reports=[report(session, fields)])
    session.refused.clear()
    await session.close()
    assert not session.refused
