"""ConsumerService, asked by a client that knows no more than the protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from headrace import StreamId
from headrace.proto.v1 import cluster_pb2, subscriptions_pb2
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.host import Silo
from headrace.silo.services.pulling import pull_wait_s
from headrace.streams.errors import StorageError
from headrace.streams.events import Event
from tests.serving import mostly_by_one_silo, serving
from tests.silo.services.calling import (
    CLUSTER,
    SUBSCRIPTIONS,
    Allowed,
    Caller,
    Refused,
    batch,
    connecting,
    make_tokens,
    opened,
)
from tests.silo.services.sessions import (
    DRAINING,
    PATIENCE_S,
    PULL,
    SUBSCRIBE,
    Got,
    Session,
    acknowledge,
    acknowledgement,
    begin,
    consuming,
    defined,
    eventually,
    pull,
    pull_events,
    pulled,
    rejecting,
    rejection,
    report,
    reports,
    unconfirmed,
)

__all__ = ("serving",)
# With two silos a gateway passes the session on: `tests/silo/test_gateway.py` and `test_consumer_model.py` test it.
pytest_generate_tests = mostly_by_one_silo

SHORT_MS = 500
"""The shortest time after which a silent consumer is gone."""
QUEUE = 1
"""The queue of n/k, out of two. n/y is in the other one."""
BROADCAST = subscriptions_pb2.MODE_BROADCAST
BOUND = subscriptions_pb2.MODE_BOUND


@pytest_asyncio.fixture
async def silo(tmp_path: Path) -> AsyncIterator[Silo]:
    async with opened(tmp_path / "data") as silo:
        yield silo


@pytest_asyncio.fixture
async def caller(silo: Silo) -> AsyncIterator[Caller]:
    assert silo.grpc_address is not None
    async with connecting(silo.grpc_address) as caller:
        yield caller


async def heartbeats(session: Session, period_s: float = 0.1) -> None:
    """Send them until the task is cancelled. A write is not cancelled: grpc would cancel the call."""
    while True:
        writing = asyncio.ensure_future(session.say())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise
        await asyncio.sleep(period_s)


async def refusal(session: Session) -> tuple[str, str]:
    """Status and code with which its call ends."""
    refused = await session.end()
    assert refused is not None, "the call ended in order"
    return refused.status, str(refused.code)


async def seen(caller: Caller, subscription: str, *consumers: str) -> None:
    """Return once these are the consumers of a subscription."""

    async def there() -> bool:
        return sorted(one.id for one in (await caller.get(subscription)).consumers) == sorted(consumers)

    await eventually(there)


# ---- opening ---------------------------------------------------------------------------------------------------------


async def test_a_subscription_that_does_not_exist_is_not_found(caller: Caller) -> None:
    with pytest.raises(Refused, match="NOT_FOUND"):
        await begin(caller, "nobody")


async def test_opening_with_a_definition_creates_the_subscription(caller: Caller) -> None:
    for _ in range(2):
        async with consuming(caller, definition=defined("s"), consumer="c") as session:
            assert session.opened.definition.selector == "n/*"
            assert session.opened.consumer == "c"
    with pytest.raises(Refused, match="ALREADY_EXISTS"):
        await begin(caller, definition=defined("s", "m/*"))


async def test_the_silo_names_a_consumer_that_has_no_id(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as one, consuming(caller, "s") as other:
        assert one.opened.consumer
        assert one.opened.consumer != other.opened.consumer


@pytest.mark.long
@pytest.mark.one_silo
@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"subscription": "s", "consumer": "a b"}, "INVALID_ARGUMENT", "not an id of a consumer"),
        ({"subscription": "s", "consumer": "x" * 101}, "INVALID_ARGUMENT", "the limit is 100"),
        ({"subscription": "s", "consumer": "~"}, "INVALID_ARGUMENT", "not an id of a consumer"),
        ({"subscription": "s", "session_timeout_ms": 499}, "INVALID_ARGUMENT", "500 to 600,000"),
        ({"subscription": "s", "session_timeout_ms": 600_001}, "INVALID_ARGUMENT", "500 to 600,000"),
        ({"subscription": "s", "provider": "other"}, "NOT_FOUND", "no provider"),
        ({"subscription": "s", "keeps_positions": True}, "INVALID_ARGUMENT", "only with mode broadcast"),
        ({"subscription": "s", "positions": [pb.Position()]}, "INVALID_ARGUMENT", "keeps_positions"),
        ({"subscription": "s", "pulls": True}, "INVALID_ARGUMENT", "open.direct"),
        ({"subscription": "t", "definition": defined("s")}, "INVALID_ARGUMENT", "leave one out"),
        ({"definition": defined("s~c")}, "INVALID_ARGUMENT", "subscription name"),
        ({"definition": defined("f", filter="m:f")}, "FAILED_PRECONDITION", "filter"),
        ({}, "NOT_FOUND", "''"),
    ],
)
async def test_an_invalid_open_is_refused(caller: Caller, fields: Any, status: str, says: str) -> None:
    await caller.create("s", "n/*")
    with pytest.raises(Refused) as refused:
        await begin(caller, **fields)
    assert refused.value.status == status
    assert says in refused.value.details


@pytest.mark.one_silo
@pytest.mark.parametrize(
    "fields",
    [
        {"definition": defined("new", mode=BROADCAST)},
        {"definition": defined("new"), "keeps_positions": True},
        {"definition": defined("new"), "positions": [pb.Position()]},
        {"definition": defined("new", mode=BROADCAST), "keeps_positions": True, "positions": [pb.Position(queue=9)]},
        {"definition": defined("new"), "consumer": "a b"},
        {"definition": defined("new"), "session_timeout_ms": 499},
        {"definition": defined("new", filter="m:f")},
    ],
)
async def test_a_refused_consumer_has_created_nothing(caller: Caller, fields: Any) -> None:
    with pytest.raises(Refused):
        await begin(caller, **fields)
    with pytest.raises(Refused, match="NOT_FOUND"):
        await caller.get("new")


async def test_the_first_request_opens_and_no_other_does(caller: Caller) -> None:
    await caller.create("s", "n/*")
    without = Session(caller.stream(SUBSCRIBE))
    await without.say(credit=pb.Credit(events=1, bytes=1))
    assert await refusal(without) == ("INVALID_ARGUMENT", "invalid_argument")
    twice = await begin(caller, "s")
    await twice.say(open=pb.Open(subscription="s"))
    assert await refusal(twice) == ("INVALID_ARGUMENT", "invalid_argument")


async def test_a_call_that_says_nothing_is_refused(caller: Caller) -> None:
    stream = caller.stream(SUBSCRIBE)
    await stream.done_writing()
    assert await refusal(Session(stream)) == ("INVALID_ARGUMENT", "invalid_argument")


async def test_a_subscription_with_a_handler_in_the_silo_has_no_remote_consumers(silo: Silo, caller: Caller) -> None:
    async def handle(_: Event) -> None: ...

    await silo.providers["default"].subscribe("s", "n/*", handle)
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*handler in the silo"):
        await begin(caller, "s")
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*handler in the silo"):
        await pull(caller)


# ---- events, credit, acknowledgements --------------------------------------------------------------------------------


async def test_events_come_as_they_were_published(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/a", b"1", b"", b"3"), batch("other/a", b"no"), batch("n/ü/%", b"4"))
        events = await session.take(4)
        assert session.payloads("n/a") == [b"1", b"", b"3"]
        assert session.payloads("n/ü/%") == [b"4"]
        assert {event.attempt for event in events} == {1}
        await session.acknowledge_saved(events)


@pytest.mark.one_silo
async def test_no_more_comes_than_credit_was_granted(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"), session_timeout_ms=2000)
    await caller.publish(*[batch(f"n/{key}", *[b"x" * 100] * 10) for key in range(10)])
    for granted in (1, 7, 13):
        before = len(session.events)
        await session.grant(granted, 1 << 20)
        await session.until(lambda n=before + granted: len(session.events) == n)
    await session.say()
    await session.until(lambda: session.progress is not None)  # the next heartbeat
    assert len(session.events) == 21
    assert session.progress is not None
    assert (session.progress.credit_events, session.progress.in_flight_events) == (0, 21)
    await session.close()


async def test_bytes_of_credit_bound_the_events_too(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"))
    await caller.publish(batch("n/k", *[b"x" * 1000] * 10))
    await session.grant(1000, 5000)
    await session.until(lambda: bool(session.events))
    assert 1 <= len(session.events) <= 5
    await session.close()


async def test_a_consumer_is_told_when_its_credit_is_too_small_for_the_next_event(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"))
    await caller.publish(batch("n/k", b"x" * 100_000))
    await session.grant(10, 1000)
    # More than was granted: before that, a silo that is one of several may have asked for anything at all.
    await session.until(lambda: session.progress is not None and session.progress.needed_bytes > 1000)
    assert session.progress is not None
    await session.grant(0, session.progress.needed_bytes - 1000)
    assert [event.payload for event in await session.take(1)] == [b"x" * 100_000]
    await session.close()


async def test_credit_only_adds_and_has_an_end(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"), session_timeout_ms=SHORT_MS)
    for _ in range(3):
        await session.grant((1 << 64) - 1, (1 << 64) - 1)
    await caller.publish(batch("n/k", b"1"))
    await session.take(1)
    await session.say()
    await session.until(lambda: session.progress is not None)
    await session.close()


async def test_events_that_are_not_held_cannot_be_acknowledged(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"1", b"2"))
        first, second = await session.take(2)
        wrong = [
            acknowledgement(first._replace(offset=first.offset + 1)),
            acknowledgement(first._replace(index=2)),
            acknowledgement(first._replace(offset=(1 << 64) - 1, index=(1 << 32) - 1)),
        ]
        other_queue = report(first._replace(queue=1000), acknowledgements=[acknowledgement(first)])
        rejections = [rejection(first._replace(index=7))]
        await session.say(reports=[other_queue, report(first, acknowledgements=wrong, rejections=rejections)])
        await session.until(lambda: len(session.refused) == 5)
        assert sorted((each.queue, each.offset, each.index) for each in session.refused) == [
            (first.queue, first.offset, 2),
            (first.queue, first.offset, 7),
            (first.queue, first.offset + 1, 0),
            (first.queue, (1 << 64) - 1, (1 << 32) - 1),
            (1000, first.offset, 0),
        ]
        await session.acknowledge_saved([first, second])
        await session.report(second, acknowledgements=[acknowledgement(second)])
        await session.until(lambda: len(session.refused) == 6)


async def test_an_acknowledgement_of_more_than_the_consumer_holds_is_refused_and_counts(caller: Caller) -> None:
    """An earlier delivery may have had more events of the batch.

    Credit for three events brings one to three of them here. With two silos, the owner of the queue has a part of the
    credit at first. It asks for the rest, but only until the next check of its consumers: then it sends as many as the
    part allows. The others follow when these are acknowledged: of a stream, one parcel is in flight at a time.
    """
    session = await begin(caller, definition=defined("s"), consumer="c")
    await caller.publish(batch("n/k", *[b"%d" % n for n in range(5)]))
    await session.grant(events=3)
    (event,) = await session.take(1)
    held = len(session.events)
    assert held <= 3
    await session.report(event, acknowledgements=[acknowledgement(event, count=5)])
    await session.until(lambda: bool(session.refused))
    await session.close()
    async with consuming(caller, "s", consumer="d") as rest:
        assert [each.payload for each in await rest.take(5 - held)] == [b"%d" % n for n in range(held, 5)]


async def test_events_are_acknowledged_in_any_order_and_never_come_again(silo: Silo, caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"), consumer="c")
    await session.grant()
    await caller.publish(batch("n/k", *[b"%d" % n for n in range(10)]))
    events = await session.take(10)
    await session.acknowledge_saved([events[n] for n in (9, 3, 4, 0, 7)])
    await session.close()
    async with consuming(caller, "s", consumer="d") as other:
        again = await other.take(5)
        assert [event.payload for event in again] == [b"1", b"2", b"5", b"6", b"8"]
        assert [event.index for event in again] == [1, 2, 5, 6, 8]
        await other.acknowledge_saved(again)


async def test_a_count_acknowledges_a_range_and_none_the_rest(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s"), consumer="c") as session:
        await caller.publish(batch("n/k", *[b"%d" % n for n in range(10)]))
        events = await session.take(10)
        some = [acknowledgement(events[2], count=3), acknowledgement(events[8])]
        await session.until_saved(await session.report(events[0], acknowledgements=some), [QUEUE])
    async with consuming(caller, "s", consumer="d") as other:
        assert [event.payload for event in await other.take(5)] == [b"0", b"1", b"5", b"6", b"7"]


async def test_up_to_acknowledges_earlier_events_that_are_held(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"), consumer="c")
    await caller.publish(*[batch("n/k", b"%d" % n) for n in range(5)], batch("n/other", b"other"))
    await session.grant()
    await session.take(6)
    fourth = next(event for event in session.events if event.payload == b"3")
    number = await session.report(fourth, acknowledgements=[acknowledgement(fourth, up_to=True)])
    await session.until_saved(number, [QUEUE])
    await session.close()
    async with consuming(caller, "s", consumer="d") as rest:
        await rest.take(2)
        assert sorted(rest.payloads()) == [b"4", b"other"]


async def test_a_rejected_event_comes_again_with_the_events_after_it(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", *[b"%d" % n for n in range(4)]))
        events = await session.take(4)
        await session.reject(events[2], count=1, reason="not now", delay_ms=0)
        await session.acknowledge(events[:2])
        again = await session.take(2)
        assert [(event.payload, event.attempt) for event in again] == [(b"2", 2), (b"3", 2)]
        await session.acknowledge_saved(again)


async def test_a_retry_is_not_overtaken_by_later_events(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0", b"1"))
        events = await session.take(2)
        await session.reject(events[0], delay_ms=200)
        await caller.publish(batch("n/k", b"2"))
        again = await session.take(3)
        assert [event.payload for event in again] == [b"0", b"1", b"2"]


@pytest.mark.long
@pytest.mark.one_silo
async def test_the_entries_of_a_request_are_limited(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"))
    await session.until(lambda: QUEUE in session.statuses)
    event = Got("n/k", b"", QUEUE, 0, 0, epoch=session.statuses[QUEUE].epoch)
    many = [pb.Acknowledgement()] * 100_000
    number = await session.report(event, acknowledgements=many)
    await session.until_saved(number, [QUEUE])
    assert len(session.refused) == 100_000, "one that is left out would count as saved"
    assert {(each.epoch, each.number) for each in session.refused} == {(event.epoch, number)}
    too_many = [pb.QueueReport(acknowledgements=many), pb.QueueReport(released=[pb.Released()])]
    await session.say(reports=too_many)
    assert await refusal(session) == ("INVALID_ARGUMENT", "invalid_argument")
    for wrong in (too_many, [pb.QueueReport()] * 100_001):
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            await pull(caller, reports=wrong)
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            await acknowledge(caller, [], reports=wrong)
    assert len(await acknowledge(caller, [], reports=[pb.QueueReport(rejections=[pb.Rejection()])])) == 1


@pytest.mark.parametrize(
    "entries",
    [
        {"rejections": [pb.Rejection(delay_ms=(1 << 64) - 1)]},
        {"unconfirmed": [pb.Unconfirmed(namespace="n", key="k", offset=1)]},
        {"unconfirmed": [pb.Unconfirmed(namespace="n" * 2000, key="k", offset=1, count=1)]},
    ],
)
async def test_an_invalid_entry_ends_the_session(caller: Caller, entries: dict[str, Any]) -> None:
    session = await begin(caller, definition=defined("s"))
    await session.until(lambda: QUEUE in session.statuses)
    event = Got("n/k", b"", QUEUE, 0, 0, epoch=session.statuses[QUEUE].epoch)
    await session.report(event, **entries)
    assert await refusal(session) == ("INVALID_ARGUMENT", "invalid_argument")


async def test_an_event_rejected_too_often_becomes_a_dead_letter_and_can_be_redriven(caller: Caller) -> None:
    retry = subscriptions_pb2.RetryPolicy(max_attempts=2)
    async with consuming(caller, definition=defined("s", retry=retry)) as session:
        await caller.publish(batch("n/k", b"bad", b"good"))
        for _ in range(2):
            bad, _ = await session.take(2)
            await session.reject(bad, count=1, reason="cannot", delay_ms=0)
        (good,) = await session.take(1)
        assert good.payload == b"good"
        await session.acknowledge_saved([good])
        assert await _dead_letters(caller) == [(b"bad", "cannot")]
        await caller.ask(
            f"{SUBSCRIPTIONS}/RedriveDeadLetters",
            subscriptions_pb2.RedriveDeadLettersRequest(subscription="s"),
            subscriptions_pb2.RedriveDeadLettersResponse,
        )
        (redriven,) = await session.take(1)
        assert (redriven.payload, redriven.redriven) == (b"bad", True)
        await session.acknowledge([redriven])

        async def done() -> bool:
            return not await _dead_letters(caller)

        await eventually(done)


async def _dead_letters(caller: Caller) -> list[tuple[bytes, str]]:
    request = subscriptions_pb2.ListDeadLettersRequest(subscription="s")
    kind = subscriptions_pb2.ListDeadLettersResponse
    answer = await caller.ask(f"{SUBSCRIPTIONS}/ListDeadLetters", request, kind)
    return [(one.payload, one.reason) for one in answer.dead_letters]


# ---- consumers come and go -------------------------------------------------------------------------------------------


async def test_a_consumer_with_the_same_id_takes_over_and_gets_the_events_in_flight(caller: Caller) -> None:
    await caller.create("s", "n/*")
    first = await begin(caller, "s", consumer="c")
    await first.grant()
    await caller.publish(batch("n/k", b"0", b"1", b"2"))
    events = await first.take(3)
    await first.acknowledge_saved(events[:1])
    async with consuming(caller, "s", consumer="c") as second:
        assert await refusal(first) == ("ABORTED", "fenced")
        again = await second.take(2)
        assert [(event.payload, event.attempt) for event in again] == [(b"1", 2), (b"2", 2)]
        await second.acknowledge_saved(again)


async def test_of_consumers_with_the_same_id_one_remains(caller: Caller) -> None:
    await caller.create("s", "n/*")
    for number in range(10):
        coming = [begin(caller, "s", consumer=f"c{number}") for _ in range(3)]
        told = await asyncio.gather(*coming, return_exceptions=True)
        sessions = [session for session in told if isinstance(session, Session)]
        assert all(isinstance(each, (Session, Refused)) for each in told)
        ends = [asyncio.create_task(session.end()) for session in sessions]
        for _, end in zip(ends[1:], asyncio.as_completed(ends, timeout=PATIENCE_S), strict=False):
            await end
        assert sum(end.done() for end in ends) == len(ends) - 1
        for end, session in zip(ends, sessions, strict=True):
            if not end.done():
                session.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_reports_are_numbered_for_each_session_anew(caller: Caller) -> None:
    """A restarted consumer begins at 1. The silo must not confirm the reports of the session before it."""
    await caller.create("s", "n/*")
    first = await begin(caller, "s", consumer="c")
    await first.grant()
    await caller.publish(batch("n/k", b"0"), batch("n/k", b"1"))
    events = await first.take(2)
    await first.say(reports=reports(events[:1], 500))
    await first.until_saved(500, [QUEUE])
    async with consuming(caller, "s", consumer="c") as second:
        await second.acknowledge(await second.take(1))
        await second.until_saved(1, [QUEUE])
        assert second.saved[QUEUE].number == 1


async def test_a_consumer_that_lost_its_connection_keeps_its_events_until_it_is_back(
    silo: Silo, caller: Caller
) -> None:
    await caller.create("s", "n/*")
    assert silo.grpc_address is not None
    async with connecting(silo.grpc_address) as other:
        lost = await begin(other, "s", consumer="lost")
        await lost.grant()
        await caller.publish(batch("n/k", b"0"))
        await lost.take(1)

    async def alone() -> bool:
        return not (await caller.get("s")).consumers[0].connected

    await eventually(alone)
    async with consuming(caller, "s", consumer="other") as other_member:
        await caller.publish(batch("n/l", b"1"))
        await other_member.take(1)
        assert other_member.payloads() == [b"1"]
        async with consuming(caller, "s", consumer="lost") as back:
            assert [(event.payload, event.attempt) for event in await back.take(1)] == [(b"0", 2)]


async def test_events_of_a_silent_consumer_go_to_others_in_order(caller: Caller) -> None:
    await caller.create("s", "n/*")
    silent = await begin(caller, "s", consumer="silent", session_timeout_ms=SHORT_MS)
    await silent.grant()
    await caller.publish(*[batch("n/k", b"%d" % n) for n in range(5)])
    await silent.take(5)
    async with consuming(caller, "s", consumer="other") as other:
        events = await other.take(5)
        assert [event.payload for event in events] == [b"%d" % n for n in range(5)]
        assert events[0].attempt == 2
        assert await refusal(silent) == ("UNAVAILABLE", "unavailable")
        await other.acknowledge_saved(events)


async def test_a_heartbeat_is_enough_to_stay(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"), consumer="c", session_timeout_ms=SHORT_MS)
    assert (session.opened.session_timeout_ms, session.opened.heartbeat_ms) == (SHORT_MS, round(SHORT_MS / 3))
    await session.grant()
    beating = asyncio.create_task(heartbeats(session))
    heard = 0
    while heard < 6:  # twice the timeout
        session.progress = None
        await session.until(lambda: session.progress is not None)
        heard += 1
    await caller.publish(batch("n/k", b"0"))
    await session.take(1)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await session.close()


async def test_the_events_of_a_consumer_that_closes_go_to_others_at_once(caller: Caller) -> None:
    await caller.create("s", "n/*")
    leaving = await begin(caller, "s", consumer="leaving", session_timeout_ms=600_000)
    await leaving.grant()
    await caller.publish(batch("n/k", b"0", b"1"))
    events = await leaving.take(2)
    number = await leaving.acknowledge(events[:1], close=True)
    assert await leaving.end() is None
    assert leaving.is_saved(number, [QUEUE])
    async with consuming(caller, "s", consumer="other") as other:
        assert [event.payload for event in await other.take(1)] == [b"1"]


async def test_acknowledgements_before_a_close_are_saved_and_confirmed(tmp_path: Path) -> None:
    for expected in (b"0", b"1", b"2"):
        async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
            session = await begin(caller, definition=defined("s"))
            if expected == b"0":
                await caller.publish(*[batch("n/k", b"%d" % n) for n in range(3)])
            await session.grant(1, 1000)
            (event,) = await session.take(1)
            assert event.payload == expected
            number = await session.acknowledge([event], close=True)
            assert await session.end() is None
            assert session.is_saved(number, [QUEUE])


async def test_half_closing_is_not_closing(caller: Caller) -> None:
    """It looks like a lost connection, so the silo waits for the consumer to come back."""
    await caller.create("s", "n/*")
    stream = caller.stream(SUBSCRIBE)
    session = Session(stream)
    await session.say(open=pb.Open(subscription="s", consumer="c"))
    await session.read()
    await stream.done_writing()
    assert await session.end() is None
    await seen(caller, "s", "c")


# ---- the silo stops --------------------------------------------------------------------------------------------------


@pytest.mark.one_silo
async def test_a_silo_that_stops_drains_its_sessions(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        session = await begin(caller, definition=defined("s"))
        await session.grant(2, 1000)
        await caller.publish(batch("n/k", b"0", b"1", b"2"))
        events = await session.take(2)
        stopping = asyncio.create_task(_stop(silo, session))
        await session.until(lambda: bool(session.closing))
        assert "connect again" in session.closing
        await session.until(lambda: len(session.statuses) == 2)
        assert {status.state for status in session.statuses.values()} == {DRAINING}
        await session.grant()
        number = await session.acknowledge(events)
        assert await refusal(session) == ("UNAVAILABLE", "unavailable")
        assert session.is_saved(number, [QUEUE])
        await stopping
        assert session.payloads() == [b"0", b"1"]
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        async with consuming(caller, "s") as session:
            assert [(event.payload, event.attempt) for event in await session.take(1)] == [(b"2", 1)]


async def _stop(silo: Silo, session: Session) -> None:
    """Drain the silo, as it does itself when it begins to stop."""
    assert silo.grpc_address is not None
    async with connecting(silo.grpc_address) as caller:
        await caller.ask(f"{CLUSTER}/DrainSilo", cluster_pb2.DrainSiloRequest(), cluster_pb2.DrainSiloResponse)


async def test_a_silo_that_stops_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with opened(tmp_path / "data", drain_s=0.2) as silo:
            caller = await stack.enter_async_context(connecting(silo.grpc_address or ""))
            session = await begin(caller, definition=defined("s"))
            await session.grant()
            await caller.publish(batch("n/k", b"0"))
            await session.take(1)
        refused = await session.end()
        assert session.closing
        assert refused is not None
        assert refused.status in ("UNAVAILABLE", "CANCELLED")
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        async with consuming(caller, "s") as session:
            assert [event.payload for event in await session.take(1)] == [b"0"]


@pytest.mark.one_silo
async def test_a_consumer_that_holds_nothing_is_no_member_of_a_drained_silo(tmp_path: Path) -> None:
    """Otherwise the silo would warn after its session timeout, although it is attached to another silo."""
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        session = await begin(caller, definition=defined("s"))
        await _stop(silo, session)
        assert await refusal(session) == ("UNAVAILABLE", "unavailable")
        assert not (await caller.get("s")).consumers


@pytest.mark.one_silo
async def test_a_consumer_that_is_lost_while_a_silo_stops_keeps_its_events(tmp_path: Path) -> None:
    one_queue = {"queues": 1}  # then the queue waits for the other consumer
    async with opened(tmp_path / "data", provider=one_queue) as silo, connecting(silo.grpc_address or "") as caller:
        sessions = {name: await begin(caller, definition=defined("s"), consumer=name) for name in ("lost", "stays")}
        for number, session in enumerate(sessions.values()):
            await session.grant(1, 1000)
            await caller.publish(batch(f"n/{number}", b"0"))
            await session.take(1)
        stopping = asyncio.create_task(_stop(silo, sessions["stays"]))
        await asyncio.gather(*(each.until(lambda each=each: bool(each.closing)) for each in sessions.values()))
        sessions["lost"].cancel()

        async def lost() -> Any:
            return next((each for each in (await caller.get("s")).consumers if each.id == "lost"), None)

        while (found := await lost()) is not None and found.credit_bytes:
            pass
        assert found is not None
        assert found.in_flight_events == 1
        await sessions["stays"].acknowledge(sessions["stays"].events)
        await stopping


@pytest.mark.one_silo
async def test_a_silo_that_stops_admits_no_new_consumer(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        await caller.create("s", "n/*")
        await caller.publish(batch("n/k", b"0"))
        (event,) = await pull_events(caller)
        await _drain_at_once(caller)
        with pytest.raises(Refused, match="UNAVAILABLE"):
            await pull(caller)
        with pytest.raises(Refused, match="UNAVAILABLE"):
            await begin(caller, "s")
        assert [each.offset for each in await acknowledge(caller, [event])] == [event.offset]  # it was taken back


async def _drain_at_once(caller: Caller) -> None:
    request = cluster_pb2.DrainSiloRequest(drain_ms=1)
    await caller.ask(f"{CLUSTER}/DrainSilo", request, cluster_pb2.DrainSiloResponse)


# ---- agents, seek, delete --------------------------------------------------------------------------------------------


async def test_stopping_agents_waits_for_events_in_flight_and_starting_continues_after_them(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0"))
        held = await session.take(1)
        request = cluster_pb2.StopAgentsRequest()
        stopping = asyncio.create_task(caller.ask(f"{CLUSTER}/StopAgents", request, cluster_pb2.StopAgentsResponse))
        await session.acknowledge(held)
        await stopping
        await caller.publish(batch("n/k", b"1"))
        await caller.ask(f"{CLUSTER}/StartAgents", cluster_pb2.StartAgentsRequest(), cluster_pb2.StartAgentsResponse)
        assert [(event.payload, event.attempt) for event in await session.take(1)] == [(b"1", 1)]


async def test_events_in_flight_come_again_if_agents_stop_without_waiting(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0"))
        (held,) = await session.take(1)
        stop = cluster_pb2.StopAgentsRequest(drain_ms=1)
        await caller.ask(f"{CLUSTER}/StopAgents", stop, cluster_pb2.StopAgentsResponse)
        await session.acknowledge([held])
        await session.until(lambda: bool(session.refused))
        await caller.ask(f"{CLUSTER}/StartAgents", cluster_pb2.StartAgentsRequest(), cluster_pb2.StartAgentsResponse)
        assert [event.payload for event in await session.take(1)] == [b"0"]


@pytest.mark.one_silo
async def test_a_seek_takes_back_events_in_flight_and_continues_at_its_position(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(*[batch("n/k", b"%d" % n) for n in range(3)])
        events = await session.take(3)
        await session.acknowledge_saved(events[:2])
        await _seek(caller, subscriptions_pb2.Start(earliest=True))
        again = await session.take(3)
        assert [event.payload for event in again] == [b"0", b"1", b"2"]
        await session.acknowledge_saved(again)
        await caller.publish(batch("n/k", b"3"))
        held = await session.take(1)
        await _seek(caller, subscriptions_pb2.Start(latest=True))
        await session.acknowledge(held)
        await session.until(lambda: bool(session.refused))
        await caller.publish(batch("n/k", b"4"))
        assert [event.payload for event in await session.take(1)] == [b"4"]


async def test_a_report_of_an_older_generation_is_refused(caller: Caller) -> None:
    """It is about the events delivered before the seek, and would apply to those delivered again."""
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0"), batch("n/k", b"1"))
        held = await session.take(2)
        await _seek(caller, subscriptions_pb2.Start(earliest=True))
        again = await session.take(2)
        assert [event.attempt for event in (*held, *again)] == [1, 1, 1, 1]
        assert all(event.generation == 0 for event in held)
        assert all(event.generation > 0 for event in again)
        said = {"acknowledgements": [acknowledgement(held[0])], "rejections": [rejection(held[1], delay_ms=0)]}
        released = [pb.Released(offset=again[0].offset)]
        older = await session.report(held[0], **said, released=released)
        await session.until(lambda: len(session.refused) == 2)
        newer = await session.report(again[1], acknowledgements=[acknowledgement(again[1], up_to=True)])
        await session.until_saved(newer, [QUEUE])
        assert older < session.saved[QUEUE].number
        await caller.publish(batch("n/k", b"2"))
        assert [(event.payload, event.attempt) for event in await session.take(1)] == [(b"2", 1)]
        assert len(session.refused) == 2


@pytest.mark.one_silo
async def test_a_report_of_another_epoch_is_refused(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0"))
        (event,) = await session.take(1)
        for epoch in (event.epoch - 1, event.epoch + 1):
            stale = event._replace(epoch=epoch)
            await session.say(reports=[*reports([stale], 7), *rejecting(stale, delay_ms=0)])
        await session.until(lambda: len(session.refused) == 4)
        await session.acknowledge_saved([event])
        assert session.saved[QUEUE].number == 1
        assert len(session.refused) == 4
    event = event._replace(epoch=event.epoch + 1)
    assert await acknowledge(caller, [event]), "the consumer is not known any more"


@pytest.mark.one_silo
async def test_a_pull_reports_with_the_epoch_and_generation_of_its_answer(caller: Caller) -> None:
    await caller.create("s", "n/*", start=subscriptions_pb2.Start(earliest=True))
    await caller.publish(batch("n/k", b"0"))
    (event,) = await pull_events(caller)
    await _seek(caller, subscriptions_pb2.Start(earliest=True))
    (again,) = await pull_events(caller)
    assert again.generation > event.generation == 0
    assert len(await acknowledge(caller, [event])) == 1
    assert len((await pull(caller, wait_ms=1, reports=reports([event]))).refused) == 1
    assert await acknowledge(caller, [again]) == []


@pytest.mark.one_silo
async def test_a_dead_letter_comes_again_after_a_seek(caller: Caller) -> None:
    retry = subscriptions_pb2.RetryPolicy(max_attempts=1)
    async with consuming(caller, definition=defined("s", retry=retry)) as session:
        await caller.publish(batch("n/k", b"bad"))
        (bad,) = await session.take(1)
        await session.reject(bad, count=1, reason="cannot", delay_ms=0)

        async def dead() -> bool:
            return bool(await _dead_letters(caller))

        await eventually(dead)
        request = subscriptions_pb2.RedriveDeadLettersRequest(subscription="s")
        await caller.ask(f"{SUBSCRIPTIONS}/RedriveDeadLetters", request, subscriptions_pb2.RedriveDeadLettersResponse)
        await session.take(1)
        await _seek(caller, subscriptions_pb2.Start(latest=True))
        (again,) = await session.take(1)
        assert again.redriven
        await session.acknowledge([again])

        async def done() -> bool:
            return not await _dead_letters(caller)

        await eventually(done)
        assert session.refused == []


# ---- confirmations, released events ----------------------------------------------------------------------------------


async def test_acknowledgements_are_confirmed_by_queue(caller: Caller) -> None:
    async with consuming(caller, definition=defined("s")) as session:
        await caller.publish(batch("n/k", b"0"), batch("n/y", b"1"))
        by_queue = {event.queue: event for event in await session.take(2)}
        await session.until_saved(await session.acknowledge([by_queue[QUEUE]]), [QUEUE])
        assert not session.is_saved(1, [1 - QUEUE])
        await session.until_saved(await session.acknowledge([by_queue[1 - QUEUE]]), [1 - QUEUE])
        assert (session.saved[QUEUE].number, session.saved[1 - QUEUE].number) == (1, 2)


async def test_unconfirmed_acknowledgements_are_confirmed_or_their_events_come_again(caller: Caller) -> None:
    """Of three events, the first is saved, the second is held, the third is held and not acknowledged."""
    first = await begin(caller, definition=defined("s"), consumer="c")
    await first.grant()
    await caller.publish(*(batch("n/k", b"%d" % number) for number in range(3)))
    events = await first.take(3)
    await first.acknowledge_saved(events[:1])
    first.cancel()
    second = await begin(caller, "s", consumer="c")
    await second.until(lambda: QUEUE in second.statuses)
    here = events[0]._replace(epoch=second.statuses[QUEUE].epoch)
    number = await second.report(here, unconfirmed=[unconfirmed(event) for event in events[:2]])
    await second.until(lambda: QUEUE in second.saved and second.saved[QUEUE].unconfirmed >= number)
    await second.grant()
    assert [(event.payload, event.attempt) for event in await second.take(1)] == [(b"2", 2)]
    assert not second.refused
    await second.close()


async def test_an_event_that_is_not_held_stays_unconfirmed_until_any_consumer_acknowledges_it(caller: Caller) -> None:
    await caller.create("s", "n/*", start=subscriptions_pb2.Start(earliest=True))
    await caller.publish(batch("n/k", b"0"))
    async with consuming(caller, "s", consumer="other") as other:
        (event,) = await other.take(1)
        asking = await begin(caller, "s", consumer="asking")
        await asking.until(lambda: QUEUE in asking.statuses)
        here = event._replace(epoch=asking.statuses[QUEUE].epoch)
        number = await asking.report(here, unconfirmed=[unconfirmed(event)])
        await asking.until_saved(number, [QUEUE])
        assert asking.saved[QUEUE].unconfirmed < number
        await other.acknowledge_saved([event])
        await asking.until(lambda: asking.saved[QUEUE].unconfirmed >= number)
        assert not asking.refused
        await asking.close()


async def test_released_events_come_at_once_and_count_no_attempt(caller: Caller) -> None:
    retry = subscriptions_pb2.RetryPolicy(max_attempts=1)
    first = await begin(caller, definition=defined("s", retry=retry), consumer="first")
    await caller.publish(batch("n/k", b"0", b"1", b"2"))
    await first.grant()
    events = await first.take(3)
    await first.say(reclaim=True)  # otherwise it could get them again
    await first.until(lambda: bool(first.returned))
    async with consuming(caller, "s", consumer="other") as other:
        await first.release(events[1])
        await first.acknowledge_saved(events[:1])
        released = await other.take(2)
        assert [(event.payload, event.attempt) for event in released] == [(b"1", 1), (b"2", 1)]
        await other.acknowledge_saved(released)
        await first.report(events[1], acknowledgements=[acknowledgement(events[1])])
        await first.until(lambda: bool(first.refused))
    assert not await _dead_letters(caller)
    await first.close()


@pytest.mark.one_silo
async def test_credit_that_is_left_can_be_taken_back(caller: Caller) -> None:
    session = await begin(caller, definition=defined("s"))
    await session.grant(10, 10_000)
    await session.say(reclaim=True)
    await session.until(lambda: bool(session.returned))
    assert session.returned == [pb.Credit(events=10, bytes=10_000)]
    await caller.publish(batch("n/k", b"0"))
    await session.say(reclaim=True)
    await session.until(lambda: len(session.returned) == 2)
    assert session.returned[1] == pb.Credit()
    assert not session.events
    await session.grant()
    await session.take(1)
    await session.close()


async def _seek(caller: Caller, to: subscriptions_pb2.Start) -> None:
    request = subscriptions_pb2.SeekSubscriptionRequest(name="s", to=to)
    await caller.ask(f"{SUBSCRIPTIONS}/SeekSubscription", request, subscriptions_pb2.SeekSubscriptionResponse)


@pytest.mark.parametrize("mode", [subscriptions_pb2.MODE_SHARED, BOUND, BROADCAST])
async def test_deleting_a_subscription_ends_its_sessions(caller: Caller, mode: subscriptions_pb2.Mode) -> None:
    session = await begin(caller, definition=defined("s", mode=mode), consumer="c")
    await session.grant()
    await caller.publish(batch("n/k", b"0"))
    await session.take(1)
    request = subscriptions_pb2.DeleteSubscriptionRequest(name="s")
    await caller.ask(f"{SUBSCRIPTIONS}/DeleteSubscription", request, subscriptions_pb2.DeleteSubscriptionResponse)
    assert await refusal(session) == ("ABORTED", "fenced")
    with pytest.raises(Refused, match="NOT_FOUND"):
        await begin(caller, "s")


# ---- bound -----------------------------------------------------------------------------------------------------------


async def test_bound_deals_the_queues_out_and_says_so(caller: Caller) -> None:
    first = await begin(caller, definition=defined("s", mode=BOUND), consumer="a")
    await first.grant()
    await first.until(lambda: first.assigned == [0, 1])
    second = await begin(caller, "s", consumer="b")
    await second.grant()
    await first.until(lambda: first.assigned == [0])
    await second.until(lambda: second.assigned == [1])
    await caller.publish(*[batch(f"n/{key}", b"x") for key in range(20)])
    by_queue = {first: 0, second: 1}
    for session, queue in by_queue.items():
        await session.until(lambda s=session: bool(s.events))
        assert {event.queue for event in session.events} == {queue}
    await first.close()
    await second.until(lambda: second.assigned == [0, 1])
    await second.close()


async def test_a_queue_changes_hands_only_when_nothing_of_it_is_held(caller: Caller) -> None:
    first = await begin(caller, definition=defined("s", mode=BOUND), consumer="a")
    await first.grant()
    await caller.publish(*[batch(f"n/{key}", b"1") for key in range(20)])
    held = await first.take(20)
    second = await begin(caller, "s", consumer="b")
    await second.grant()
    await first.until(lambda: first.assigned == [0])
    await caller.publish(*[batch(f"n/{key}", b"2") for key in range(20)])
    await first.acknowledge(held)
    await second.until(lambda: second.assigned == [1])
    mine = {event.stream for event in held if event.queue == 1}
    assert [event.payload for event in await second.take(len(mine))] == [b"2"] * len(mine)
    assert {event.stream for event in second.events} == mine
    await first.close()
    await second.close()


# ---- broadcast -------------------------------------------------------------------------------------------------------


async def test_broadcast_delivers_all_events_to_each_consumer_and_keeps_their_positions(caller: Caller) -> None:
    await caller.publish(batch("n/k", b"0", b"1"))
    definition = defined("s", mode=BROADCAST)
    async with consuming(caller, definition=definition, consumer="a") as a:
        async with consuming(caller, "s", consumer="b") as b:
            for session, done in ((a, 1), (b, 2)):
                events = await session.take(2)
                assert [event.payload for event in events] == [b"0", b"1"]
                await session.acknowledge_saved(events[:done])
    await caller.publish(batch("n/k", b"2"))
    for consumer, expected in (("a", [b"1", b"2"]), ("b", [b"2"]), ("new", [b"0", b"1", b"2"])):
        async with consuming(caller, "s", consumer=consumer) as session:
            assert [event.payload for event in await session.take(len(expected))] == expected


async def test_a_client_that_keeps_its_positions_goes_on_exactly_there(caller: Caller) -> None:
    await caller.publish(*[batch(f"n/{key}", b"0", b"1", b"2") for key in range(4)])
    definition = defined("s", mode=BROADCAST)
    session = await begin(caller, definition=definition, consumer="c", keeps_positions=True)
    await session.grant()
    events = await session.take(12)
    done = [event for event in events if (event.stream, event.index) not in {("n/1", 2), ("n/3", 0)}]
    await session.acknowledge_saved(done)
    await session.close()
    positions = [pb.Position(queue=queue, token=token) for queue, token in session.positions.items()]
    for consumer in ("c", "d"):
        async with consuming(caller, "s", consumer=consumer, keeps_positions=True, positions=positions) as back:
            left = await back.take(2)
            assert {(event.stream, event.index) for event in left} == {("n/1", 2), ("n/3", 0)}
    async with consuming(caller, "s", consumer="c", keeps_positions=True) as anew:
        assert len(await anew.take(12)) == 12


async def test_a_client_that_keeps_positions_misses_no_event_before_its_first_acknowledgement(caller: Caller) -> None:
    definition = defined("s", mode=BROADCAST, start=subscriptions_pb2.Start(latest=True))
    session = await begin(caller, definition=definition, consumer="c", keeps_positions=True)
    await session.until(lambda: len(session.positions) == 2)
    session.cancel()
    await caller.publish(batch("n/k", b"0"), batch("n/y", b"1"))
    positions = [pb.Position(queue=queue, token=token) for queue, token in session.positions.items()]
    async with consuming(caller, "s", consumer="c", keeps_positions=True, positions=positions) as back:
        await back.take(2)
        assert sorted(back.payloads()) == [b"0", b"1"]


async def test_a_position_past_the_end_goes_back_to_it_and_the_gap_is_told(caller: Caller) -> None:
    await caller.publish(batch("n/k", b"0"))
    position = pb.Position(queue=QUEUE, token=b'[1000,[["n","k",500,0,"",[]]]]')
    async with consuming(
        caller, definition=defined("s", mode=BROADCAST), keeps_positions=True, positions=[position]
    ) as session:
        await session.until(lambda: bool(session.gaps))
        (gap,) = session.gaps
        assert (gap.low_offset, gap.high_offset) == (1, 1000)
        await caller.publish(batch("n/k", b"1"))
        assert [event.payload for event in await session.take(1)] == [b"1"]


@pytest.mark.long
@pytest.mark.one_silo
@pytest.mark.parametrize(
    ("token", "says"),
    [
        (b"", "no position"),
        (b"[]", "no position"),
        (b"[-1,[]]", "no position"),
        (b"[1e3,[]]", "no position"),
        (b"[9223372036854775808,[]]", "no position"),
        (b'[0,[["n","k",0,0,"",[[0,0,4611686018427387904]]]]]', "no position"),
        (b'[0,[["n","k",0,0,"",[[0,5,5]]]]]', "no position"),
        (b'[0,[["n","k",0,0,"",[[-1,0,5]]]]]', "no position"),
        (b'[5,[["secret","k",0,0,"",[]]]]', "another subscription"),
        (b'[5,[["n","y",0,0,"",[]]]]', "another subscription"),
        (b"\xff" * 1000, "no position"),
        (b"[" * 100_000, "no position"),
    ],
)
async def test_a_token_that_no_silo_gave_is_refused(caller: Caller, token: bytes, says: str) -> None:
    with pytest.raises(Refused, match="INVALID_ARGUMENT") as refused:
        await begin(
            caller,
            definition=defined("s", mode=BROADCAST),
            keeps_positions=True,
            positions=[pb.Position(queue=QUEUE, token=token)],
        )
    assert says in refused.value.details


async def test_positions_are_for_queues_that_are_there_and_one_for_each(caller: Caller) -> None:
    one = pb.Position(queue=1, token=b"[0,[]]")
    for positions in ([one, one], [pb.Position(queue=2, token=b"[0,[]]")]):
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            await begin(caller, definition=defined("s", mode=BROADCAST), keeps_positions=True, positions=positions)


async def test_events_deleted_by_retention_are_reported_as_a_gap(tmp_path: Path) -> None:
    options = {"retain_bytes": 1, "retain_unfinished": False}
    async with opened(tmp_path / "data", provider={"options": options}) as silo:
        async with connecting(silo.grpc_address or "") as caller:
            await caller.create("s", "n/*")
            await caller.publish(batch("n/k", b"0"), batch("n/k", b"1"))
            await silo.providers["default"].manager.retention.apply()
            async with consuming(caller, "s", consumer="c") as session:
                await session.until(lambda: bool(session.gaps))
                (gap,) = session.gaps
                assert (gap.queue, gap.low_offset, gap.high_offset, gap.high_index) == (QUEUE, 0, 2, 0)
                await caller.publish(batch("n/k", b"2"))
                assert [event.payload for event in await session.take(1)] == [b"2"]


async def test_a_pull_tells_gaps_too(tmp_path: Path) -> None:
    options = {"retain_bytes": 1, "retain_unfinished": False}
    async with opened(tmp_path / "data", provider={"options": options}) as silo:
        async with connecting(silo.grpc_address or "") as caller:
            await caller.create("s", "n/*")
            await caller.publish(batch("n/k", b"0"))
            await silo.providers["default"].manager.retention.apply()
            await caller.publish(batch("n/k", b"1"))
            answer = await pull(caller)
            assert [event.payload for event in pulled(answer)] == [b"1"]
            assert [(gap.low_offset, gap.high_offset) for gap in answer.gaps] == [(0, 1)]


# ---- pull and acknowledge --------------------------------------------------------------------------------------------


async def test_pull_returns_the_events_and_acknowledge_ends_them(caller: Caller) -> None:
    await caller.create("s", "n/*", start=subscriptions_pb2.Start(earliest=True))
    await caller.publish(batch("n/k", b"0", b"1"))
    events = await pull_events(caller)
    assert [event.payload for event in events] == [b"0", b"1"]
    assert await acknowledge(caller, events) == []
    assert [each.index for each in await acknowledge(caller, events[:1])] == [0]
    assert not (await pull(caller, wait_ms=1)).batches


@pytest.mark.parametrize("mode", [subscriptions_pb2.MODE_SHARED, BROADCAST])
async def test_who_pulls_goes_on_while_the_control_store_is_away(
    silo: Silo, caller: Caller, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await caller.create("s", "n/*", start=subscriptions_pb2.Start(earliest=True), mode=mode)
    await caller.publish(batch("n/k", b"0"), batch("n/k", b"1"), batch("n/k", b"2"))
    (first,) = await pull_events(caller, max_events=1)

    async def away(*_: object) -> None:
        raise StorageError("the store cannot be reached")

    for provider in silo.providers.values():
        monkeypatch.setattr(provider.store, "subscription", away)
    with pytest.raises(Refused, match="cannot be reached"):
        await pull(caller, "new")
    (second,) = await pull_events(caller, max_events=1, reports=reports([first]))
    assert await acknowledge(caller, [second]) == []
    assert [event.payload for event in await pull_events(caller)] == [b"2"]


async def test_pull_acknowledges_events_of_an_earlier_pull(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"0"), batch("n/k", b"1"))
    (first,) = await pull_events(caller, max_events=1)
    answer = await pull(caller, max_events=1, reports=reports([first, first]))
    assert [event.payload for event in pulled(answer)] == [b"1"]
    assert len(answer.refused) == 1


async def test_a_pull_waits_for_events(caller: Caller) -> None:
    await caller.create("s", "n/*")
    waiting = asyncio.create_task(pull(caller))
    await seen(caller, "s", "c")
    await caller.publish(batch("n/k", b"0"))
    assert [event.payload for event in pulled(await waiting)] == [b"0"]


async def test_one_of_several_first_pulls_waits_and_the_others_are_refused(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"0"))
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(pull(caller, max_events=1) for _ in range(4)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    (answer,) = [answer for answer in answers if isinstance(answer, pb.PullResponse)]
    assert [refusal.status for refusal in refused] == ["RESOURCE_EXHAUSTED"] * 3
    assert [event.attempt for event in pulled(answer)] == [1]


@pytest.mark.one_silo
@pytest.mark.parametrize(
    ("asked_s", "remaining_s", "waits_s"),
    [(60, None, 60), (60, 40, 39), (60, 2, 1.5), (60, 0.04, 0.03), (1, 40, 1), (60, 0, 0.005), (0, 40, 0.005)],
)
def test_a_pull_keeps_time_for_the_way_back(asked_s: float, remaining_s: float | None, waits_s: float) -> None:
    assert pull_wait_s(asked_s, remaining_s) == waits_s


async def test_a_pull_answers_before_its_deadline(caller: Caller) -> None:
    await caller.create("s", "n/*")
    request = pb.PullRequest(subscription="s", consumer="c", wait_ms=60_000)
    answer = await caller.ask(PULL, request, pb.PullResponse, timeout=1)
    assert not answer.batches


async def test_one_event_is_pulled_though_it_is_larger_than_asked_for(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"x" * 500_000), batch("n/k", b"y"))
    answer = await pull(caller, max_bytes=1)
    assert [len(event.payload) for event in pulled(answer)] == [500_000]


async def test_pulled_events_that_are_not_acknowledged_come_again(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"0", b"1"))
    events = await pull_events(caller, session_timeout_ms=SHORT_MS)
    await acknowledge(caller, events[:1])
    again = await pull_events(caller)
    assert [(event.payload, event.attempt) for event in again] == [(b"1", 2)]


async def test_each_pull_has_its_own_session_timeout(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/a", b"0"))
    assert [event.payload for event in await pull_events(caller, session_timeout_ms=600_000)] == [b"0"]
    await caller.publish(batch("n/b", b"1"))
    for attempt in (1, 2):
        events = await pull_events(caller, session_timeout_ms=SHORT_MS)
        assert [(event.payload, event.attempt) for event in events] == [(b"1", attempt)]


async def test_a_consumer_that_pulls_may_leave(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/a", b"0"), batch("n/b", b"1"))
    first, second = await pull_events(caller, session_timeout_ms=SHORT_MS)
    answer = await pull(caller, reports=reports([first]), leave=True)
    assert not answer.batches
    assert not answer.refused
    again = await pull_events(caller, consumer="other", session_timeout_ms=10 * SHORT_MS)
    assert [event.payload for event in again] == [second.payload]
    await pull(caller, consumer="other", leave=True)
    assert not (await caller.get("s")).consumers
    refused = (await pull(caller, consumer="other", reports=reports([second]), leave=True)).refused
    assert len(refused) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_rejection_by_pull_holds_too(caller: Caller) -> None:
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"0"))
    (event,) = await pull_events(caller)
    again = await pull_events(caller, reports=rejecting(event, delay_ms=0))
    assert [(each.payload, each.attempt) for each in again] == [(b"0", 2)]


async def test_a_consumer_waits_in_one_pull_at_a_time(caller: Caller) -> None:
    await caller.create("s", "n/*")
    waiting = asyncio.create_task(pull(caller))
    await seen(caller, "s", "c")
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        await pull(caller)
    await caller.publish(batch("n/k", b"0"))
    assert len(pulled(await waiting)) == 1


async def test_a_session_takes_over_from_a_pull_that_waits(caller: Caller) -> None:
    await caller.create("s", "n/*")
    waiting = asyncio.create_task(pull(caller))
    await seen(caller, "s", "c")
    async with consuming(caller, "s", consumer="c") as session:
        with pytest.raises(Refused, match="ABORTED"):
            await waiting
        await caller.publish(batch("n/k", b"0"))
        await session.take(1)


async def test_a_pull_takes_over_from_a_session(caller: Caller) -> None:
    await caller.create("s", "n/*")
    session = await begin(caller, "s", consumer="c")
    await session.grant()
    await caller.publish(batch("n/k", b"0"))
    await session.take(1)
    again = await pull_events(caller)
    assert await refusal(session) == ("ABORTED", "fenced")
    assert [(event.payload, event.attempt) for event in again] == [(b"0", 2)]


async def test_a_session_keeps_the_events_of_a_pull_before_it(caller: Caller) -> None:
    """Pulled events come again after their timeout, but are not taken away from a session that began later."""
    await caller.create("s", "n/*")
    await caller.publish(batch("n/k", b"0"))
    assert (await pull(caller, session_timeout_ms=SHORT_MS)).batches
    session = await begin(caller, "s", consumer="c", session_timeout_ms=SHORT_MS)
    await session.grant()
    events = await session.take(1)
    beating = asyncio.create_task(heartbeats(session))
    for _ in range(6):  # twice the timeout
        session.progress = None
        await session.until(lambda: session.progress is not None)
    await session.acknowledge_saved(events)
    assert not session.refused
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await session.close()


async def test_a_pull_that_is_given_up_loses_nothing_and_delivers_nothing_twice(caller: Caller) -> None:
    await caller.create("s", "n/*")
    request = pb.PullRequest(
        subscription="s", consumer="c", wait_ms=10_000, session_timeout_ms=SHORT_MS
    ).SerializeToString()
    taken: list[Got] = []
    for number in range(100):
        call = caller.channel.unary_unary(f"/{PULL}")(request)
        await asyncio.sleep(0)
        await caller.publish(batch("n/k", b"%d" % number))
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            continue
        except grpc.aio.AioRpcError:
            continue
    async with asyncio.timeout(20):
        while len(taken) < 100:
            answer = await pull(caller, consumer="d")
            events = pulled(answer)
            assert await acknowledge(caller, events, consumer="d") == []
            taken += events
    assert [event.payload for event in taken] == [b"%d" % number for number in range(100)]


@pytest.mark.one_silo
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"consumer": ""}, "INVALID_ARGUMENT"),
        ({"consumer": "a/b"}, "INVALID_ARGUMENT"),
        ({"subscription": ""}, "NOT_FOUND"),
        ({"subscription": "nobody"}, "NOT_FOUND"),
        ({"provider": "other"}, "NOT_FOUND"),
        ({"session_timeout_ms": 1}, "INVALID_ARGUMENT"),
    ],
)
async def test_an_invalid_pull_is_refused(caller: Caller, fields: dict[str, Any], status: str) -> None:
    await caller.create("s", "n/*")
    with pytest.raises(Refused) as refused:
        await pull(caller, **fields)
    assert refused.value.status == status


async def test_acknowledgements_of_an_unknown_consumer_are_refused(caller: Caller) -> None:
    await caller.create("s", "n/*")
    event = Got("n/k", b"", 0, 7, 3)
    (refused,) = await acknowledge(caller, [event], consumer="nobody")
    assert (refused.queue, refused.offset, refused.index) == (0, 7, 3)


# ---- permissions -----------------------------------------------------------------------------------------------------


async def test_a_caller_without_permission_learns_nothing(tmp_path: Path) -> None:
    tokens = await make_tokens(
        tmp_path / "data", all=Allowed(publish=["*"], subscribe=["*"], manage=["*"]), other=Allowed(subscribe=["other"])
    )
    async with opened(tmp_path / "data", auth="tokens") as silo:
        address = silo.grpc_address or ""
        async with connecting(address, tokens["all"]) as everyone, connecting(address, tokens["other"]) as other:
            await everyone.create("s", "n/*")
            await everyone.publish(batch("n/k", b"0"))
            assert await _refusals(other, "s") == await _refusals(other, "nobody")
            assert {status for status, *_ in await _refusals(other, "s")} == {"PERMISSION_DENIED"}
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await begin(other, definition=defined("mine", "n/*"))
            async with consuming(other, definition=defined("mine", "other/*")):
                pass
        async with connecting(address) as nobody:
            assert {status for status, *_ in await _refusals(nobody, "s")} == {"UNAUTHENTICATED"}


@pytest.mark.long
async def test_a_consumer_that_says_nothing_gets_nothing_once_its_token_is_revoked(tmp_path: Path):
    tokens = await make_tokens(tmp_path / "data", one=Allowed(subscribe=["*"]))
    async with opened(tmp_path / "data", auth="tokens") as silo:
        async with connecting(silo.grpc_address or "", tokens["one"]) as caller:
            session = await begin(caller, definition=defined("s", "n/*"), session_timeout_ms=600_000)
            await session.grant()
            provider = silo.providers["default"]
            await provider.store.delete_token("one")

            async def take_on() -> None:
                for number in range(8_000):  # at the most until the silo has looked for tokens again
                    await provider.publish(StreamId("n", str(number)), b"0")
                    await session.take(1)

            with pytest.raises(Refused, match="UNAUTHENTICATED"):
                await take_on()


async def _refusals(caller: Caller, name: str) -> list[tuple[str, str, str]]:
    """How all ways to consume end; without the name, which the caller gave."""
    found: list[tuple[str, str, str]] = []
    for attempt in (begin(caller, name), pull(caller, name), acknowledge(caller, [], name)):
        with pytest.raises(Refused) as refused:
            await attempt
        found.append((refused.value.status, str(refused.value.code), refused.value.details.replace(repr(name), "it")))
    return found


async def test_of_two_consumers_with_the_same_id_the_one_that_was_made_later_stays(caller: Caller) -> None:
    """At every silo: otherwise each could end the other."""
    later = await begin(caller, definition=defined("s"), consumer="c", started_us=2)
    await later.grant()
    await caller.publish(batch("n/k", b"0"))
    await later.take(1)
    with pytest.raises(Refused) as refused:
        await begin(caller, "s", consumer="c", started_us=1)
    assert (refused.value.status, str(refused.value.code)) == ("ABORTED", "fenced")
    await caller.publish(batch("n/k2", b"1"))
    await later.take(1)
    async with consuming(caller, "s", consumer="c", started_us=3) as latest:
        assert await refusal(later) == ("ABORTED", "fenced")
        assert sorted(event.payload for event in await latest.take(2)) == [b"0", b"1"]
    async with consuming(caller, "s", consumer="c", started_us=1) as first:
        assert len(await first.take(2)) == 2
