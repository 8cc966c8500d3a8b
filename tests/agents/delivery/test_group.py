"""Groups of remote consumers over queues that are filled by hand: order, credit, acknowledgements, rejections, members
that come and go, modes, checkpoints, stopping. All in virtual time."""

import asyncio
import logging
from collections import Counter
from unittest.mock import patch

import pytest

from headrace import Closed, Event, EventBatch, Fenced, OnFailure, RetryPolicy, SequenceToken, StorageError, Unavailable
from headrace.agents import EventRange
from headrace.agents.cursor import CursorState
from headrace.agents.delivery.assignment import DRAIN_S
from headrace.agents.delivery.checkpoint_pacer import HELD_BACK_S
from headrace.agents.delivery.confirmations import Confirmed
from headrace.agents.delivery.member import OUTBOX_BYTES
from headrace.agents.delivery.parcel_writer import PARCEL_BYTES, PARCEL_EVENTS
from headrace.agents.delivery.retries import STORE_RETRY_S
from headrace.streams.subscriptions import Checkpoint, Mode, StreamBehind
from tests.simulation.deliveries import HandlerFeed, Recorder, stream
from tests.simulation.groups import Consumer, SimulatedGroup, indexes, payloads
from tests.simulation.virtual_time import virtual_time

RESTLESS = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.0)


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


@pytest.fixture(autouse=True)
def turns_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the distribution of events independent of the speed of the machine."""
    for module in ("edge", "group_delivery"):
        monkeypatch.setattr(f"headrace.agents.delivery.{module}.perf_counter", lambda: 0.0)


def numbers(stop: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, stop)]


# ---- order ---------------------------------------------------------------------------------------------------------


@virtual_time
async def test_events_of_a_stream_come_in_order_over_batches() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.publish("a", "0", "1", "2")
        circle.publish("b", "x")
        circle.publish("a", "3")
        await circle.rest()
        assert [p for p in consumer.took() if p != "x"] == numbers(4)


@virtual_time
async def test_a_delivered_event_has_queue_stream_and_token() -> None:
    async with SimulatedGroup(queues=3) as circle:
        consumer = circle.consumer("c")
        circle.lanes[2].publish("a", "0")
        circle.lanes[2].publish("a", "1", "2")
        await circle.rest()
        first, second = consumer.take()
        assert (first.queue, first.batch.offset, first.batch.stream, first.attempt) == (2, 0, stream("a"), 1)
        assert (second.queue, second.batch.offset, second.indexes, second.attempt) == (2, 1, None, 1)


@virtual_time
async def test_one_parcel_of_a_stream_is_in_flight() -> None:
    async with SimulatedGroup() as circle:
        one, other = circle.consumer("one"), circle.consumer("other")
        circle.publish("a", "0")
        await circle.rest()
        circle.publish("a", "1")
        circle.publish("a", "2")
        await circle.rest()
        (first,) = one.inbox + other.inbox
        holder = one if one.inbox else other
        assert holder.ack(first)
        await circle.rest()
        assert payloads(one.inbox + other.inbox) == ["0", "1", "2"]
        assert sorted((len(one.inbox), len(other.inbox))) in ([0, 3], [1, 2])


@virtual_time
async def test_batches_that_wait_come_together() -> None:
    async with SimulatedGroup() as circle:
        circle.lane.publish_all([("a", [str(number)]) for number in range(100)])
        consumer = circle.consumer("c")
        await circle.rest()
        assert consumer.took() == numbers(100)
        assert consumer.messages == 1
        assert len(circle.delivery.parcels) == 1


@virtual_time
async def test_a_parcel_of_several_batches_is_bounded() -> None:
    async with SimulatedGroup() as circle:
        circle.lane.publish_all([("a", numbers(10)) for _ in range(PARCEL_EVENTS)])
        circle.lane.publish_all([("b", ["x" * 50_000]) for _ in range(20)])
        consumer = circle.consumer("c")
        await circle.rest()
        many, large = sorted(circle.delivery.parcels, key=lambda parcel: -parcel.events)
        assert many.events <= PARCEL_EVENTS
        assert large.size <= PARCEL_BYTES
        assert consumer.member.in_flight_events == many.events + large.events
        while consumer.inbox:
            consumer.ack_all()
            await circle.rest()
        assert len(consumer.everything) == PARCEL_EVENTS + 20


# ---- credit --------------------------------------------------------------------------------------------------------


@virtual_time
async def test_nothing_is_sent_without_credit() -> None:
    async with SimulatedGroup() as circle:
        circle.publish("a", "0")
        consumer = circle.consumer("c", 0, 0)
        await circle.rest()
        consumer.grant(events=5)
        await circle.rest()
        assert not consumer.inbox
        consumer.grant(size=1000)
        await circle.rest()
        assert consumer.took() == ["0"]
        assert consumer.member.credit_events == 4


@virtual_time
async def test_a_batch_comes_in_parts_where_the_credit_is_small() -> None:
    async with SimulatedGroup() as circle:
        circle.publish("a", *numbers(10))
        circle.publish("a", "10", "11")
        consumer = circle.consumer("c", events=3)
        parts: list[tuple[int, list[int]]] = []
        await circle.rest()
        while consumer.inbox:
            for part in consumer.take():
                parts.append((part.batch.offset, list(indexes(part))))
                assert consumer.ack(part)
                consumer.grant(part.batch.count)
            await circle.rest()
        assert parts == [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6, 7, 8]), (0, [9]), (1, [0, 1])]
        assert payloads(consumer.everything) == numbers(12)
        assert circle.delivery.counts.delivered_events == 12


@virtual_time
async def test_parts_follow_the_credit_in_bytes() -> None:
    async with SimulatedGroup() as circle:
        circle.publish("a", *("x" * 1000 for _ in range(10)))
        consumer = circle.consumer("c", size=3500)
        await circle.rest()
        assert [len(each.batch) for each in consumer.inbox] == [3]
        consumer.ack(consumer.take()[0])
        consumer.grant(size=20_000)
        await circle.rest()
        assert [list(indexes(each)) for each in consumer.inbox] == [[3, 4, 5, 6, 7, 8, 9]]


@virtual_time
async def test_headers_and_ids_count_against_the_credit() -> None:
    """What is sent of a batch is estimated by its payloads: here they are the least of it."""
    async with SimulatedGroup() as circle:
        events = [Event(b"x", {"header": "y" * 500}, id=f"{number:0100}") for number in range(10)]
        batch = EventBatch.of(stream("a"), events)
        batch.offset = 0
        circle.delivery.offer(circle.lane, circle.lane.cache.add([batch]))
        consumer = circle.consumer("c", size=2000)
        count = 0
        for _ in range(10):
            await circle.rest()
            for each in consumer.take():
                count += len(each.batch)
                assert each.batch.events()[0].headers == {"header": "y" * 500}
                assert consumer.ack(each)
                consumer.grant(size=2000)
        assert count == 10


@virtual_time
async def test_an_event_that_needs_more_bytes_than_are_granted_says_how_many() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", size=500)
        circle.publish("a", "x" * 1000)
        await circle.rest()
        needed = consumer.member.needed_bytes
        assert 1000 < needed < 1200
        assert consumer.notices == 1
        assert not consumer.inbox
        consumer.grant(size=needed - 500)
        await circle.rest()
        assert consumer.took() == ["x" * 1000]
        assert not consumer.member.needed_bytes


@virtual_time
async def test_whose_credit_is_too_small_is_passed_over() -> None:
    async with SimulatedGroup() as circle:
        small = circle.consumer("small", size=500)
        circle.publish("a", "x" * 1000)
        await circle.rest()
        large = circle.consumer("large")
        await circle.rest()
        assert [len(large.inbox), len(small.inbox)] == [1, 0]


@virtual_time
async def test_a_batch_is_not_cut_while_more_credit_is_to_come() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", events=10)
        circle.publish("a", *numbers(6))
        circle.publish("b", *numbers(8))
        await circle.rest()
        (first,) = consumer.take()
        consumer.ack(first)
        consumer.grant(6)
        await circle.rest()
        assert [len(each.batch) for each in consumer.inbox] == [8]


@virtual_time
async def test_a_consumer_that_acknowledges_only_full_hands_gets_the_rest_of_its_credit() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", events=10)
        circle.publish("a", *numbers(6))
        circle.publish("b", *numbers(8))
        await circle.rest()
        circle.group.tick()
        await circle.rest()
        assert [len(each.batch) for each in consumer.inbox] == [6, 4]


@virtual_time
async def test_a_concurrent_consumer_gets_parcels_for_a_second_of_work() -> None:
    """Slow streams do not hold all of its credit, neither with many small batches nor with a large one."""
    async with SimulatedGroup() as circle:
        circle.lane.publish_all([("a", [str(number)]) for number in range(100)])
        circle.publish("b", *numbers(100))
        consumer = circle.consumer("c", events=1000, concurrent=True)
        held = Counter[str]()
        for _ in range(100):
            await circle.rest(0.0)
            for each in consumer.take():
                held[each.batch.stream.key] += each.batch.count
                if each.batch.stream.key == "b":
                    asyncio.get_running_loop().call_later(0.2 * each.batch.count, consumer.ack, each)
            await circle.rest(1.0)
        assert 6 <= held["a"] <= 10  # it is stuck
        assert held["b"] == 100
        parts = [each.batch.count for each in consumer.everything if each.batch.stream.key == "b"]
        assert 6 <= parts[0] <= 10
        assert max(parts[-10:]) <= 8  # the average comes near to 0.2 s for an event
        assert len(set(parts)) > 2  # parcels that were handed out together do not end together


@virtual_time
async def test_a_concurrent_consumer_that_is_soon_done_gets_larger_parcels() -> None:
    async with SimulatedGroup() as circle:
        for number in range(100):
            circle.publish(str(number % 10), *numbers(50))
        consumer = circle.consumer("c", events=200, concurrent=True)
        for _ in range(200):
            await circle.rest(0.01)
            consumer.ack_all()
        assert consumer.everything[0].batch.count <= 10
        assert consumer.everything[-1].batch.count == 50


@virtual_time
async def test_a_slow_connection_is_sent_no_more_than_its_outbox_takes() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", pace_s=1.0)
        circle.lane.publish_all([(str(number), ["x" * 10_000]) for number in range(300)])
        await circle.rest(0.5)
        assert consumer.member.outbox_bytes <= OUTBOX_BYTES + 11_000
        assert len(circle.delivery.parcels) < 100
        await circle.rest(100)
        assert len(consumer.inbox) == 300


@virtual_time
async def test_an_ocean_of_credit_is_credit() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", (1 << 64) - 1, (1 << 64) - 1)
        consumer.grant((1 << 64) - 1, (1 << 64) - 1)
        circle.publish("a", "0")
        await circle.rest()
        assert consumer.took() == ["0"]
        assert consumer.member.credit_events < 1 << 63


# ---- acknowledgements ----------------------------------------------------------------------------------------------


async def _delivered(circle: SimulatedGroup, *batches: list[str], key: str = "a") -> Consumer:
    """A consumer that holds these batches of one stream in one parcel."""
    circle.lane.publish_all([(key, batch) for batch in batches])
    consumer = circle.consumer("c")
    await circle.rest()
    assert payloads(consumer.inbox) == [payload for batch in batches for payload in batch]
    assert len(circle.delivery.parcels) == 1
    return consumer


@virtual_time
async def test_acknowledged_events_are_done() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(3), ["3"])
        first, second = consumer.take()
        assert consumer.ack(first)
        assert circle.checkpoint() == Checkpoint(2, {stream("a"): StreamBehind(SequenceToken(1))})
        assert consumer.ack(second)
        assert circle.checkpoint() == Checkpoint(2)
        assert not circle.delivery.parcels
        assert not consumer.member.in_flight
        assert (consumer.member.in_flight_events, consumer.member.in_flight_bytes) == (0, 0)
        assert not circle.delivery.progress.cursors


@virtual_time
async def test_events_are_acknowledged_in_any_order() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(6))
        (batch,) = consumer.take()
        assert consumer.ack(batch, 4, 1)
        assert consumer.ack(batch, 2, 1)
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0), "", ((0, 2, 3), (0, 4, 5)))
        assert consumer.ack(batch, 0, 2)
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0, 3), "", ((0, 4, 5),))
        assert consumer.member.in_flight_events == 2
        assert consumer.ack(batch, 3, 1)
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0, 5))
        assert consumer.ack(batch, 5)
        assert circle.checkpoint() == Checkpoint(1)
        assert circle.delivery.counts.delivered_events == 6


@virtual_time
async def test_batches_of_a_parcel_are_acknowledged_in_any_order() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2"], ["3", "4"], ["5"])
        batches = consumer.take()
        assert consumer.ack(batches[2])
        assert consumer.ack(batches[1])
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0), "", ((1, 0, 1), (2, 0, 2)))
        assert consumer.ack(batches[0])
        assert circle.checkpoint() == Checkpoint(4, {stream("a"): StreamBehind(SequenceToken(3))})
        assert consumer.ack(batches[3])
        assert circle.checkpoint() == Checkpoint(4)
        assert circle.delivery.counts.delivered_events == 6
        assert circle.delivery.counts.delivered_batches == 4


@virtual_time
async def test_acknowledging_from_an_index_means_the_rest_of_the_batch() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5))
        (batch,) = consumer.take()
        assert consumer.ack(batch, 2)
        assert circle.checkpoint().behind[stream("a")].done == ((0, 2, 5),)
        assert consumer.ack(batch, 0)
        assert circle.checkpoint() == Checkpoint(1)


@virtual_time
async def test_more_events_than_there_are_means_all_of_them() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5))
        assert consumer.ack(consumer.inbox[0], 1, 1_000_000)
        assert consumer.ack(consumer.inbox[0], 0, 1_000_000)
        assert circle.checkpoint() == Checkpoint(1)


@virtual_time
async def test_up_to_acknowledges_what_is_before_it_in_its_stream() -> None:
    async with SimulatedGroup() as circle:
        circle.publish("b", "x")
        consumer = circle.consumer("c")
        await circle.rest()
        consumer.take()
        circle.lane.publish_all([("a", ["0", "1"]), ("a", ["2"]), ("a", ["3", "4"]), ("a", ["5"])])
        await circle.rest()
        batches = consumer.take()
        assert consumer.ack(batches[2], 3 - 3, 1, up_to=True)
        behind = circle.checkpoint().behind
        assert behind[stream("a")] == StreamBehind(SequenceToken(3, 1))
        assert behind[stream("b")] == StreamBehind(SequenceToken(0))
        assert consumer.ack(batches[3], up_to=True)
        assert list(circle.checkpoint().behind) == [stream("b")]


@virtual_time
async def test_up_to_over_batches_that_are_done_already() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"], ["1"], ["2"])
        batches = consumer.take()
        assert consumer.ack(batches[1])
        assert consumer.ack(batches[2])
        assert consumer.ack(batches[2], up_to=True)
        assert circle.checkpoint() == Checkpoint(3)


@virtual_time
async def test_up_to_without_a_count_is_all_of_the_batch() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2", "3"])
        assert consumer.ack(consumer.inbox[1], 1, up_to=True)
        assert circle.checkpoint() == Checkpoint(2)


@virtual_time
async def test_acknowledgements_of_a_part_are_by_index_in_the_whole_batch() -> None:
    async with SimulatedGroup() as circle:
        circle.publish("a", *numbers(6))
        consumer = circle.consumer("c", events=2)
        await circle.rest()
        consumer.ack_all()
        await circle.rest()
        (part,) = consumer.take()
        assert list(indexes(part)) == [2, 3]
        assert consumer.ack(part, 3, 1)
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0, 2), "", ((0, 3, 4),))
        assert not consumer.ack(part, 4, 1), "it does not hold that one"
        assert consumer.ack(part, 2, 100)
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0, 4))


@virtual_time
async def test_acknowledgements_of_events_that_the_consumer_does_not_hold_are_refused() -> None:
    async with SimulatedGroup() as circle:
        other = circle.consumer("other", 0, 0)
        consumer = await _delivered(circle, numbers(3))
        (batch,) = consumer.take()
        group, member = circle.group, consumer.member
        assert not group.acknowledge(member, EventRange(0, 7))
        assert not group.acknowledge(member, EventRange(1, 0))
        assert not group.acknowledge(member, EventRange(0, 0, 3))
        assert not group.acknowledge(member, EventRange(0, 0, 9), up_to=True)
        assert not group.reject(member, EventRange(0, 0, 3), "no")
        assert not group.acknowledge(other.member, EventRange(0, 0))
        assert not group.reject(other.member, EventRange(0, 0), "no")
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0))
        assert consumer.ack(batch)
        assert not consumer.ack(batch)
        assert not consumer.reject(batch)


@virtual_time
async def test_a_second_acknowledgement_of_an_event_counts_nothing() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5))
        (batch,) = consumer.take()
        for _ in range(2):
            assert consumer.ack(batch, 3, 1)
            assert consumer.ack(batch, 0, 2)
        assert consumer.ack(batch, 1, 3)
        assert circle.delivery.counts.delivered_events == 4
        assert consumer.member.in_flight_events == 1


@virtual_time
async def test_thousands_of_batches_that_were_done_out_of_order_are_passed_at_once() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([("a", [str(number)]) for number in range(PARCEL_EVENTS)])
        await circle.rest()
        first, *others = consumer.take()
        for each in others:
            assert consumer.ack(each)
        consumer.leave()
        other = circle.consumer("other")
        circle.publish("a", "last")
        await circle.rest()
        (again,) = other.take()
        assert again.batch.offset == first.batch.offset
        assert other.ack(again)
        await circle.rest()
        assert other.took() == ["last"]


# ---- rejections ----------------------------------------------------------------------------------------------------


@virtual_time
async def test_rejected_events_come_again_with_the_later_ones_of_their_stream() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2"])
        batches = consumer.take()
        assert consumer.reject(batches[0])
        assert not consumer.ack(batches[1]), "it was taken back with the one before it"
        await circle.rest()
        again = consumer.take()
        assert payloads(again) == numbers(3)
        assert again[0].attempt == 2
        for each in again:
            assert consumer.ack(each)
        assert circle.checkpoint() == Checkpoint(2)
        assert circle.delivery.counts.retries == 1


@virtual_time
async def test_rejections_of_many_streams_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.agents")
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        for number in range(200):
            circle.publish(str(number), "x")
        await circle.rest()
        for delivered in consumer.take():
            assert consumer.reject(delivered)
        logged = [record for record in caplog.records if "failed on" in record.getMessage()]
        assert len(logged) == 5


@virtual_time
async def test_a_rejection_in_the_middle_leaves_what_is_before_it_in_flight() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(6), ["6"])
        (batch, _) = consumer.take()
        assert consumer.reject(batch, 3, 1)
        await circle.rest()
        assert not consumer.inbox, "a retry does not overtake what is before it"
        assert consumer.member.in_flight_events == 3
        assert not consumer.ack(batch, 3), "those were taken back"
        assert consumer.ack(batch, 0, 3)
        await circle.rest()
        again = consumer.take()
        assert payloads(again) == ["3", "4", "5", "6"]
        assert list(indexes(again[0])) == [3, 4, 5]
        assert again[0].attempt == 2
        for each in again:
            assert consumer.ack(each)
        assert circle.checkpoint() == Checkpoint(2)


@pytest.mark.parametrize("index", [0, 1])
@virtual_time
async def test_a_rejection_in_a_later_batch_of_a_parcel(index: int) -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2", "3"], ["4"])
        batches = consumer.take()
        assert consumer.reject(batches[1], index, 1)
        await circle.rest()
        assert not consumer.inbox
        assert not consumer.ack(batches[2])
        assert consumer.ack(batches[1], 0, 2) == (index > 0)
        assert consumer.ack(batches[0])
        await circle.rest()
        assert consumer.took() == numbers(5, 2 + index)


@virtual_time
async def test_events_acknowledged_behind_a_rejection_do_not_come_again() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5), ["5", "6"])
        first, second = consumer.take()
        assert consumer.ack(first, 3, 1)
        assert consumer.ack(second, 0, 1)
        assert consumer.reject(first, 1, 1)
        assert consumer.ack(first, 0, 1)
        await circle.rest()
        assert consumer.waiting == ["1", "2", "4"]
        assert consumer.ack(consumer.take()[0])
        await circle.rest()
        assert consumer.waiting == ["6"]
        assert consumer.ack(consumer.take()[0])
        assert circle.checkpoint() == Checkpoint(2)
        assert circle.delivery.counts.delivered_events == 7


@virtual_time
async def test_an_earlier_rejection_takes_the_place_of_a_later_one() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(6))
        (batch,) = consumer.take()
        assert consumer.reject(batch, 4, 1)
        assert consumer.reject(batch, 2, 1)
        assert not consumer.reject(batch, 3, 1)
        assert consumer.ack(batch, 0, 2)
        await circle.rest()
        assert consumer.took() == ["2", "3", "4", "5"]


@virtual_time
async def test_done_events_cannot_be_rejected() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(4))
        (batch,) = consumer.take()
        assert consumer.ack(batch, 0, 1)
        assert consumer.ack(batch, 2, 1)
        assert not consumer.reject(batch, 0, 1)
        assert not consumer.reject(batch, 2, 1)
        assert consumer.reject(batch, 1, 3)


@virtual_time
async def test_a_rejected_event_comes_again_when_its_consumer_wants_it() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"])
        circle.publish("b", "x")
        consumer.reject(consumer.take()[0], delay_s=60.0)
        await circle.rest()
        assert consumer.took() == ["x"]
        assert circle.lane.cursor("a").state is CursorState.WAITING
        await circle.rest(59.0)
        assert not consumer.inbox
        await circle.rest(1.0)
        assert consumer.took() == ["0"]


@virtual_time
async def test_without_a_delay_it_comes_as_the_retry_policy_says() -> None:
    async with SimulatedGroup(retry=RetryPolicy(initial_delay_s=100.0, max_delay_s=100.0, max_elapsed_s=1e6)) as circle:
        consumer = await _delivered(circle, ["0"])
        consumer.reject(consumer.take()[0], delay_s=None)
        await circle.rest(49.0)
        assert not consumer.inbox
        await circle.rest(51.0)
        assert consumer.took() == ["0"]


async def _reject_until_given_up(circle: SimulatedGroup, consumer: Consumer, index: int, count: int) -> None:
    for attempt in range(1, 4):
        batch = consumer.take()[0]
        assert batch.attempt == attempt
        assert consumer.reject(batch, index, count, reason=f"no {attempt}")
        await circle.rest()


@virtual_time
async def test_all_events_that_failed_together_become_dead_letters() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5), ["5"])
        await _reject_until_given_up(circle, consumer, 0, 2)
        assert circle.sink.dead == [(b"0", "no 3", 3), (b"1", "no 3", 3)]
        again = consumer.take()
        assert payloads(again) == ["2", "3", "4", "5"]
        assert [each.attempt for each in again] == [4, 4]
        for each in again:
            assert consumer.ack(each)
        assert circle.checkpoint() == Checkpoint(2)
        assert circle.delivery.counts.dead_lettered == 2


@virtual_time
async def test_a_whole_batch_is_given_up_on() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(3))
        await _reject_until_given_up(circle, consumer, 0, 0)
        assert [payload for payload, _, _ in circle.sink.dead] == [b"0", b"1", b"2"]
        assert circle.checkpoint() == Checkpoint(1)
        assert not consumer.inbox


@virtual_time
async def test_done_events_among_failed_ones_are_no_dead_letters() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5))
        assert consumer.ack(consumer.inbox[0], 1, 2)
        await _reject_until_given_up(circle, consumer, 0, 4)
        assert [payload for payload, _, _ in circle.sink.dead] == [b"0", b"3"]
        assert consumer.took() == ["4"]


@virtual_time
async def test_the_rejection_in_the_middle_is_what_is_given_up_on() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2", "3", "4"], ["5"])
        first, second, _ = consumer.take()
        assert consumer.reject(second, 1, 1)
        assert not circle.sink.dead
        assert consumer.ack(second, 0, 1)
        assert consumer.ack(first)
        await circle.rest()
        assert circle.sink.dead == [(b"3", "no", 1)]
        assert consumer.took() == ["4", "5"]


@virtual_time
async def test_skipped_events_leave_gaps() -> None:
    async with SimulatedGroup(on_failure=OnFailure.SKIP) as circle:
        consumer = await _delivered(circle, numbers(3))
        await _reject_until_given_up(circle, consumer, 0, 1)
        assert circle.sink.gaps == [(b"0", "no 3")]
        assert consumer.took() == ["1", "2"]


@virtual_time
async def test_a_stream_is_paused_until_it_is_resumed() -> None:
    async with SimulatedGroup(on_failure=OnFailure.PAUSE) as circle:
        consumer = await _delivered(circle, numbers(3))
        assert consumer.ack(consumer.inbox[0], 2, 1)
        await _reject_until_given_up(circle, consumer, 0, 1)
        circle.publish("b", "x")
        await circle.rest()
        assert consumer.took() == ["x"]
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(0), "no 3", ((0, 2, 3),))
        assert circle.delivery.retries.resume(stream("a"))
        circle.lane.unpark()
        await circle.rest()
        assert consumer.took() == ["0", "1"]


@virtual_time
async def test_events_are_not_given_up_on_until_that_is_recorded() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        circle.sink.failures += [StorageError("no"), asyncio.CancelledError()]
        consumer = await _delivered(circle, ["0"], ["1"])
        for _ in range(3):
            assert not circle.sink.dead
            assert consumer.reject(consumer.take()[0])
            await circle.rest(2 * STORE_RETRY_S)
        assert [payload for payload, _, _ in circle.sink.dead] == [b"0"]
        assert consumer.took() == ["1"]


@virtual_time
async def test_no_other_stream_waits_while_giving_up_is_recorded() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        circle.sink.gate = asyncio.Event()
        consumer = await _delivered(circle, ["0"], ["1"])
        consumer.reject(consumer.take()[0])
        circle.publish("b", "x")
        await circle.rest()
        assert consumer.took() == ["x"]
        circle.sink.gate.set()
        await circle.rest()
        assert consumer.took() == ["1"]


@virtual_time
async def test_a_batch_that_is_damaged_is_given_up_on_and_stops_nobody() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        batch = EventBatch(stream("a"), stream("a").prefix + b"\x1a\x7f", 3, 0)
        entries = circle.lane.cache.add([batch])
        consumer = circle.consumer("c", events=2)
        circle.delivery.offer(circle.lane, entries)
        circle.publish("b", "x")
        await circle.rest()
        assert consumer.took() == ["x"]
        assert circle.lane.cursor("a").state is CursorState.PAUSED


# ---- members come and go -------------------------------------------------------------------------------------------


@virtual_time
async def test_who_leaves_hands_over_what_it_holds() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, numbers(4), ["4"])
        other = circle.consumer("other")
        assert one.ack(one.inbox[0], 0, 1)
        assert one.ack(one.inbox[0], 2, 1)
        one.leave()
        await circle.rest()
        again = other.take()
        assert payloads(again) == ["1", "3"]
        assert again[0].attempt == 2
        assert list(indexes(again[0])) == [1, 3]
        assert other.ack(again[0])
        await circle.rest()
        assert other.took() == ["4"]
        assert one.gone is None
        assert not one.ack(one.inbox[1])
        assert list(circle.group.members) == ["other"]


@virtual_time
async def test_who_reconnects_gets_again_exactly_what_it_had_not_acknowledged() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, numbers(4), ["4"], ["5", "6"])
        other = circle.consumer("other")
        assert one.ack(one.inbox[0], 0, 1)
        assert one.ack(one.inbox[0], 2, 1)
        assert one.ack(one.inbox[1])
        one.disconnect()
        circle.publish("a", "7")
        await circle.rest(20.0)
        assert not other.inbox, "it is waited for"
        one.take()
        one.connect()
        await circle.rest()
        again = one.take()
        assert payloads(again) == ["1", "3", "5", "6"]
        assert [each.attempt for each in again] == [2, 2]
        for each in again:
            assert one.ack(each)
        await circle.rest()
        assert payloads(one.inbox + other.inbox) == ["7"]


@virtual_time
async def test_who_reconnects_when_the_lease_is_over_gets_nothing_again() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"], ["1"])
        one.disconnect()
        one.take()
        (delivery,) = circle.group.deliveries.values()
        delivery.halt(lost=True)
        one.connect()
        await circle.rest()
        assert not one.inbox


@virtual_time
async def test_every_delivery_after_the_first_says_so() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"], ["1"], ["2"])
        one.disconnect()
        one.take()
        one.connect()
        await circle.rest()
        assert [each.attempt for each in one.inbox] == [2, 2, 2]
        assert one.ack(one.inbox[0])
        one.leave()
        other = circle.consumer("other")
        circle.publish("a", "3")
        await circle.rest()
        assert [each.attempt for each in other.inbox] == [3, 3, 1]


@virtual_time
async def test_events_after_a_rejected_one_have_a_higher_attempt() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"], ["1"])
        circle.publish("a", "2")
        consumer.reject(consumer.take()[0])
        await circle.rest()
        assert [each.attempt for each in consumer.take()] == [2, 2, 1]


@virtual_time
async def test_who_reconnects_may_acknowledge_before_it_grants() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, numbers(3), ["3"])
        batch = one.take()[0]
        one.disconnect()
        one.connect(0, 0)
        assert one.ack(batch, 0, 2)
        one.grant(100, 10_000)
        await circle.rest()
        assert one.took() == ["2", "3"]


@virtual_time
async def test_events_beyond_the_credit_of_a_consumer_that_reconnects_go_to_any_consumer() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, numbers(4))
        other = circle.consumer("other")
        one.disconnect()
        one.take()
        one.connect(2, 10_000)
        await circle.rest()
        assert [one.took(), other.took()] == [[], numbers(4)]


@virtual_time
async def test_credit_that_comes_bit_by_bit_is_waited_for() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, numbers(4))
        other = circle.consumer("other")
        one.disconnect()
        one.take()
        one.connect(100, 0)
        await circle.rest()
        one.grant(size=10_000)
        await circle.rest()
        assert [one.took(), other.took()] == [numbers(4), []]


@virtual_time
async def test_who_is_not_heard_is_gone_and_the_next_one_gets_it_in_order() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"], ["1"])
        one.disconnect()
        other = circle.consumer("other", timeout_s=1000.0)
        circle.publish("a", "2")
        await circle.rest(29.0)
        circle.group.tick()
        await circle.rest()
        assert not other.inbox
        await circle.rest(1.0)
        circle.group.tick()
        await circle.rest()
        assert other.took() == ["0", "1", "2"]
        assert list(circle.group.members) == ["other"]


@virtual_time
async def test_a_connection_that_is_half_open_is_noticed_and_told() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"])
        for _ in range(5):
            await circle.rest(20.0)
            circle.group.heard(one.member)
            circle.group.tick()
        assert one.gone is None
        await circle.rest(31.0)
        circle.group.tick()
        assert isinstance(one.gone, Unavailable)
        assert not one.ack(one.inbox[0])
        other = circle.consumer("other")
        await circle.rest()
        assert other.took() == ["0"]


@virtual_time
async def test_who_comes_with_the_same_id_takes_over() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"], ["1"])
        assert one.ack(one.inbox[0])
        successor = Consumer(circle.group, "c")
        successor.connect()
        await circle.rest()
        assert isinstance(one.gone, Fenced)
        assert successor.took() == ["1"]
        assert list(circle.group.members) == ["c"]


@virtual_time
async def test_events_on_their_way_when_the_connection_broke_are_sent_again() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", pace_s=1.0)
        circle.lane.publish_all([(str(number), [str(number)]) for number in range(10)])
        await circle.rest(0.5)
        consumer.disconnect()
        assert not consumer.inbox
        consumer.connect()
        await circle.rest(5.0)
        assert sorted(consumer.took()) == numbers(10)


@virtual_time
async def test_who_comes_and_goes_leaves_nothing_behind() -> None:
    async with SimulatedGroup() as circle:
        for number in range(100):
            circle.consumer(f"c{number}").leave()
        one = circle.consumer("one")
        one.disconnect()
        one.connect()
        assert len(circle.group.line) == 1
        assert not circle.edge._sending  # pyright: ignore[reportPrivateUsage]


@virtual_time
async def test_a_group_that_is_dissolved_tells_everybody_why() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"])
        other = circle.consumer("other")
        await circle.group.fenced(Fenced("moved"))
        assert isinstance(one.gone, Fenced)
        assert isinstance(other.gone, Fenced)
        assert not circle.group.members
        assert not circle.delivery.parcels
        assert not one.ack(one.inbox[0])


# ---- several members, mode shared ----------------------------------------------------------------------------------


@virtual_time
async def test_streams_are_spread_over_the_members() -> None:
    async with SimulatedGroup() as circle:
        members = [circle.consumer(f"c{number}") for number in range(4)]
        circle.lane.publish_all([(str(number), [str(number)]) for number in range(100)])
        await circle.rest()
        assert [len(member.inbox) for member in members] == [25, 25, 25, 25]


@virtual_time
async def test_members_may_outnumber_queues() -> None:
    async with SimulatedGroup(queues=2) as circle:
        members = [circle.consumer(f"c{number}", events=1) for number in range(20)]
        for number in range(40):
            circle.lanes[number % 2].publish(str(number), str(number))
        await circle.rest()
        assert [len(member.inbox) for member in members] == [1] * 20


@virtual_time
async def test_a_slow_member_does_not_hold_the_others_up() -> None:
    async with SimulatedGroup() as circle:
        slow, quick = circle.consumer("slow", events=2), circle.consumer("quick", events=10)
        circle.lane.publish_all([(str(number), [str(number)]) for number in range(200)])
        for _ in range(100):
            await circle.rest()
            quick.ack_all()
        assert len(slow.inbox) == 2
        assert len(quick.everything) == 198


@virtual_time
async def test_a_member_helps_as_soon_as_it_comes() -> None:
    async with SimulatedGroup() as circle:
        circle.consumer("slow", events=2)
        circle.lane.publish_all([(str(number), [str(number)]) for number in range(50)])
        await circle.rest()
        helper = circle.consumer("helper")
        await circle.rest()
        assert len(helper.inbox) == 48


@virtual_time
async def test_a_slow_connection_does_not_hold_the_others_up() -> None:
    async with SimulatedGroup() as circle:
        slow = [circle.consumer(f"slow{number}", pace_s=1000.0) for number in range(10)]
        quick = circle.consumer("quick")
        for number in range(1000):
            circle.publish(str(number), str(number))
            await circle.rest(0.01)
            quick.ack_all()
        assert len(quick.everything) > 80
        assert not any(one.inbox for one in slow)


# ---- mode bound ----------------------------------------------------------------------------------------------------


@virtual_time
async def test_bound_queues_are_dealt_out_by_average_allocation() -> None:
    async with SimulatedGroup(queues=8, mode=Mode.BOUND) as circle:
        members = [circle.consumer(f"c{number}") for number in range(3)]
        await circle.rest()
        assert [member.member.queues for member in members] == [(0, 1, 2), (3, 4, 5), (6, 7)]
        for lane in circle.lanes:
            lane.publish("a", str(lane.queue))
        await circle.rest()
        assert [member.took() for member in members] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
        assert members[0].notices, "it had all of them first"


@virtual_time
async def test_bound_members_beyond_the_queues_get_nothing() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        members = [circle.consumer(f"c{number}") for number in range(3)]
        for lane in circle.lanes:
            lane.publish("a", "x")
        await circle.rest()
        assert [len(member.inbox) for member in members] == [1, 1, 0]


@virtual_time
async def test_bound_a_queue_changes_hands_when_what_is_in_them_is_done() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        one = circle.consumer("1")
        circle.lanes[1].publish("a", "0")
        await circle.rest()
        other = circle.consumer("2")
        circle.lanes[1].publish("a", "1")
        circle.lanes[1].publish("b", "2")
        await circle.rest()
        assert (one.member.queues, other.member.queues) == ((0,), ())
        assert [one.waiting, other.waiting] == [["0"], []]
        assert one.ack(one.take()[0])
        await circle.rest()
        assert (one.member.queues, other.member.queues) == ((0,), (1,))
        assert [one.took(), sorted(other.took())] == [[], ["1", "2"]]


@virtual_time
async def test_bound_who_drains_for_too_long_is_not_waited_for() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        one = circle.consumer("1")
        circle.lanes[1].publish("a", "0")
        circle.lanes[1].publish("b", "1")
        await circle.rest()
        other = circle.consumer("2")
        await circle.rest(DRAIN_S - 1)
        circle.group.tick()
        await circle.rest()
        assert not other.inbox
        await circle.rest(1.0)
        circle.group.tick()
        await circle.rest()
        assert sorted(other.took()) == ["0", "1"]
        assert not one.ack(one.take()[0])
        assert other.member.queues == (1,)


@virtual_time
async def test_bound_a_move_that_is_called_off_stops_nobody() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        one = circle.consumer("1")
        circle.lanes[1].publish("a", "0")
        await circle.rest()
        other = circle.consumer("2")
        circle.lanes[1].publish("b", "1")
        await circle.rest()
        assert one.took() == ["0"]
        other.leave()
        await circle.rest()
        assert one.took() == ["1"]
        assert one.member.queues == (0, 1)


@virtual_time
async def test_bound_the_queues_of_who_leaves_go_to_the_others() -> None:
    async with SimulatedGroup(queues=4, mode=Mode.BOUND) as circle:
        one, other = circle.consumer("1"), circle.consumer("2")
        circle.lanes[0].publish("a", "0", "1")
        await circle.rest()
        one.ack(one.inbox[0], 0, 1)
        one.leave()
        await circle.rest()
        assert other.took() == ["1"]
        assert other.member.queues == (0, 1, 2, 3)


@virtual_time
async def test_bound_who_reconnects_has_its_queues_still() -> None:
    async with SimulatedGroup(queues=4, mode=Mode.BOUND) as circle:
        one, other = circle.consumer("1"), circle.consumer("2")
        circle.lanes[0].publish("a", "0")
        await circle.rest()
        one.disconnect()
        circle.lanes[0].publish("b", "1")
        circle.lanes[1].publish("c", "2")
        await circle.rest()
        one.take()
        one.connect()
        await circle.rest()
        assert sorted(one.took()) == ["0", "1", "2"]
        assert not other.inbox


@virtual_time
async def test_bound_credit_that_runs_out_and_comes_again() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        consumer = circle.consumer("1", events=3)
        for number in range(20):
            circle.lanes[number % 2].publish(str(number), str(number))
        for _ in range(30):
            await circle.rest()
            consumer.ack_all()
        assert len(consumer.everything) == 20


# ---- detached cursors ----------------------------------------------------------------------------------------------


@virtual_time
async def test_a_parcel_goes_on_when_its_cursor_left_the_cache() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2"], ["3"])
        circle.publish("a", "4")
        batches = consumer.take()
        circle.delivery.detach(circle.lane.cursor("a"))
        assert not any(bucket.pins for bucket in circle.lane.cache.buckets)
        assert consumer.ack(batches[2])
        assert consumer.ack(batches[0])
        assert circle.checkpoint().behind[stream("a")] == StreamBehind(SequenceToken(1), "", ((2, 0, 1),))
        assert consumer.ack(batches[1])
        assert circle.lane.cursor("a").state is CursorState.PARKED
        circle.lane.unpark()
        await circle.rest()
        assert consumer.took() == ["4"]


@pytest.mark.parametrize("way", ["leave", "reconnect", "reject", "part"])
@virtual_time
async def test_events_that_left_the_cache_are_read_again_for_their_next_delivery(way: str) -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2"])
        batches = consumer.take()
        circle.delivery.detach(circle.lane.cursor("a"))
        assert consumer.ack(batches[0], 0, 1)
        if way == "leave":
            consumer.leave()
            consumer = circle.consumer("other")
        elif way == "reconnect":
            consumer.disconnect()
            consumer.connect()
        elif way == "reject":
            assert consumer.reject(batches[0], 1, 1)
        else:
            assert consumer.reject(batches[1])
            assert consumer.ack(batches[0])
        await circle.rest()
        assert circle.lane.cursor("a").state is CursorState.PARKED
        assert circle.lane.cursor("a").batch is None
        circle.lane.unpark()
        await circle.rest()
        assert consumer.took() == (["2"] if way == "part" else ["1", "2"])


@virtual_time
async def test_a_parcel_outside_of_the_cache_holds_no_bytes() -> None:
    async with SimulatedGroup() as circle:
        await _delivered(circle, ["x" * 1000], ["y" * 1000])
        cursor = circle.lane.cursor("a")
        circle.delivery.detach(cursor)
        assert cursor.batch is not None
        assert cursor.batch.nbytes == 0
        assert circle.delivery.held(cursor) == 0


@virtual_time
async def test_an_event_given_up_on_outside_of_the_cache_is_read_again_for_its_dead_letter() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        consumer = await _delivered(circle, ["0", "1", "2"], ["3"])
        batch = consumer.take()[0]
        circle.delivery.detach(circle.lane.cursor("a"))
        assert consumer.reject(batch, 0, 2)
        await circle.rest()
        circle.lane.unpark()
        await circle.rest()
        assert [payload for payload, _, _ in circle.sink.dead] == [b"0", b"1"]
        assert consumer.took() == ["2", "3"]


@virtual_time
async def test_a_queue_that_cannot_rewind_keeps_what_left_the_cache() -> None:
    async with SimulatedGroup(rewindable=False) as circle:
        consumer = await _delivered(circle, ["0", "1"], ["2"])
        batch = consumer.take()[0]
        circle.delivery.detach(circle.lane.cursor("a"))
        assert consumer.ack(batch, 0, 1)
        consumer.disconnect()
        consumer.connect()
        await circle.rest()
        again = consumer.take()
        assert payloads(again) == ["1", "2"]
        assert consumer.reject(again[0])
        await circle.rest()
        assert consumer.waiting == ["1"], "the rest is read again"


# ---- out of line ---------------------------------------------------------------------------------------------------


def letter(payload: str = "dead", offset: int = 77, index: int = 3) -> Event:
    return Event(payload.encode(), {"a": "b"}, stream=stream("d"), token=SequenceToken(offset, index))


@virtual_time
async def test_a_dead_letter_is_delivered_once_more() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        redriving = asyncio.create_task(circle.delivery.redrive(letter()))
        await circle.rest()
        (delivered,) = consumer.take()
        assert (delivered.batch.offset, list(indexes(delivered)), delivered.redriven) == (77, [3], True)
        (event,) = delivered.batch.events()
        assert (event.payload, event.headers, event.token) == (b"dead", {"a": "b"}, SequenceToken(77, 3))
        assert consumer.ack(delivered)
        assert await redriving is None
        assert not consumer.ack(delivered)
        assert circle.delivery.counts.delivered_events == 1


@virtual_time
async def test_a_dead_letter_may_be_rejected_again() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        redriving = asyncio.create_task(circle.delivery.redrive(letter()))
        await circle.rest()
        assert consumer.reject(consumer.take()[0], reason="still no")
        assert "still no" in str(await redriving)


@pytest.mark.parametrize("way", ["leave", "disconnect", "time out"])
@virtual_time
async def test_a_dead_letter_whose_consumer_is_gone_goes_to_another(way: str) -> None:
    async with SimulatedGroup() as circle:
        one = circle.consumer("one")
        redriving = asyncio.create_task(circle.delivery.redrive(letter()))
        await circle.rest()
        assert one.took() == ["dead"]
        other = circle.consumer("other", timeout_s=1000)
        if way == "leave":
            one.leave()
        else:
            if way == "disconnect":
                one.disconnect()
                await circle.rest()
                assert not other.inbox, "the first consumer may come back"
            await circle.rest(31.0)
            circle.group.tick()
        await circle.rest()
        assert other.ack(other.take()[0])
        assert await redriving is None


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.BOUND])
@virtual_time
async def test_a_consumer_that_comes_back_gets_the_dead_letter_again_that_it_held(mode: Mode) -> None:
    async with SimulatedGroup(mode=mode) as circle:
        one = circle.consumer("one")
        redriving = asyncio.create_task(circle.delivery.redrive(letter()))
        await circle.rest()
        assert one.took() == ["dead"]
        other = circle.consumer("other")
        one.connect(0, 0)
        await circle.rest()
        assert not other.inbox
        one.grant(10, 1000)
        await circle.rest()
        assert one.ack(one.take()[0])
        assert await redriving is None
        assert not other.inbox


@virtual_time
async def test_a_dead_letter_goes_to_the_new_owner_of_its_queue() -> None:
    async with SimulatedGroup(mode=Mode.BOUND, queues=2) as circle:
        one = circle.consumer("1")
        redriving = asyncio.create_task(circle.lanes[1].delivery.redrive(letter()))
        await circle.rest()
        assert one.took() == ["dead"]
        other = circle.consumer("2")
        one.connect()
        await circle.rest()
        assert other.ack(other.take()[0])
        assert await redriving is None


@virtual_time
async def test_a_dead_letter_waits_for_credit() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", events=10, size=500)
        redriving = asyncio.create_task(circle.delivery.redrive(letter("x" * 1000)))
        await circle.rest()
        assert not consumer.inbox
        consumer.grant(size=consumer.member.needed_bytes - 500)
        await circle.rest()
        assert consumer.ack(consumer.take()[0])
        assert await redriving is None


@virtual_time
async def test_a_dead_letter_asks_for_credit() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", events=0, size=0, divides_credit=True)
        redriving = asyncio.create_task(circle.delivery.redrive(letter()))
        await circle.rest()
        assert consumer.member.waiting
        consumer.grant(1, 1000)
        await circle.rest()
        assert not consumer.member.waiting
        other = circle.consumer("other")
        consumer.connect(0, 0)
        await circle.rest()
        assert consumer.member.waiting, "the other consumer does not get it"
        consumer.grant(1, 1000)
        await circle.rest()
        assert consumer.ack(consumer.take()[-1])
        assert await redriving is None
        assert not other.inbox


@virtual_time
async def test_a_dead_letter_waits_for_somebody() -> None:
    async with SimulatedGroup(mode=Mode.BOUND, queues=2) as circle:
        one = circle.consumer("1", events=1)
        circle.lanes[1].publish("a", "0")
        await circle.rest()
        other = circle.consumer("2")
        redriving = asyncio.create_task(circle.lanes[1].delivery.redrive(letter()))
        await circle.rest()
        assert one.ack(one.take()[0])
        await circle.rest()
        assert other.ack(other.take()[0])
        assert await redriving is None


@virtual_time
async def test_two_dead_letters_of_one_event_come_one_after_the_other() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        redriving = [asyncio.create_task(circle.delivery.redrive(letter())) for _ in range(2)]
        for _ in range(2):
            await circle.rest()
            assert consumer.ack(consumer.take()[0])
        assert await asyncio.gather(*redriving) == [None, None]


@virtual_time
async def test_a_dead_letter_is_not_confused_with_the_same_event_in_line() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5))
        (batch,) = consumer.take()
        redriving = asyncio.create_task(circle.delivery.redrive(letter(offset=0, index=0)))
        await circle.rest()
        assert consumer.ack(batch)
        assert circle.checkpoint() == Checkpoint(1)
        await circle.rest()
        (delivered,) = consumer.take()
        assert delivered.redriven
        assert consumer.ack(delivered)
        assert await redriving is None


@virtual_time
async def test_dead_letters_that_nobody_took_end_with_the_delivery() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c", events=1)
        redriving = [asyncio.create_task(circle.delivery.redrive(letter(offset=n))) for n in range(2)]
        await circle.rest()
        assert len(consumer.inbox) == 1
        await circle.stop()
        for each in redriving:
            with pytest.raises(Closed):
                await each


# ---- stopping, checkpoints -----------------------------------------------------------------------------------------


@virtual_time
async def test_a_stop_waits_for_what_is_in_flight() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"], ["1"])
        circle.publish("a", "2")
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest(5.0)
        for each in consumer.take():
            assert consumer.ack(each)
        assert await stopping == Checkpoint(3, {stream("a"): StreamBehind(SequenceToken(2))})
        await circle.rest()
        assert not consumer.inbox, "nothing is handed out any more"


@virtual_time
async def test_a_stop_does_not_wait_for_ever() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(4))
        assert consumer.ack(consumer.inbox[0], 1, 2)
        began = asyncio.get_running_loop().time()
        done = await circle.stop(5.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0)
        assert done == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0), "", ((0, 1, 3),))})
        assert not consumer.ack(consumer.inbox[0])


@virtual_time
@pytest.mark.parametrize(("drain_s", "lines"), [(0.0, 0), (5.0, 1)])
async def test_a_stop_says_what_it_waited_for_in_vain(
    drain_s: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headrace.agents")
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(4))
        await circle.stop(drain_s)
        assert not consumer.ack(consumer.inbox[0])
    assert [record.message for record in caplog.records] == [
        "1 parcels of sub, queue 0 were not acknowledged within 5.0 s and come again"
    ] * lines


@virtual_time
async def test_a_stop_does_not_wait_for_who_is_not_there() -> None:
    async with SimulatedGroup() as circle:
        one = await _delivered(circle, ["0"])
        stopping = asyncio.create_task(circle.stop(1000.0))
        await circle.rest()
        assert not stopping.done()
        one.disconnect()
        await circle.rest()
        assert stopping.done()
        assert await stopping == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0))})


@virtual_time
async def test_a_stop_waits_for_pulled_events_after_their_gateway_is_gone() -> None:
    """The consumer acknowledges through another silo."""
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"])
        consumer.member.pulls = True
        stopping = asyncio.create_task(circle.stop(60.0))
        consumer.disconnect()
        await circle.rest()
        assert not stopping.done()
        assert consumer.ack(consumer.inbox[0])
        assert await stopping == Checkpoint(1)


@virtual_time
async def test_events_rejected_during_a_stop_come_again_after_it() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(3))
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest()
        assert consumer.reject(consumer.inbox[0], 1, 1)
        assert consumer.ack(consumer.inbox[0], 0, 1)
        assert await stopping == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 1))})
        assert not circle.sink.dead


@virtual_time
async def test_a_stop_waits_until_giving_up_is_recorded() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        circle.sink.gate = asyncio.Event()
        consumer = await _delivered(circle, ["0", "1"])
        assert consumer.reject(consumer.take()[0], 0, 1)
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest()
        assert not stopping.done()
        circle.sink.gate.set()
        assert await stopping == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 1))})
        assert [payload for payload, _, _ in circle.sink.dead] == [b"0"]


@virtual_time
async def test_a_stop_that_is_cancelled_takes_everything_back() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, ["0"])
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        assert not circle.delivery.parcels
        assert not consumer.member.in_flight


@virtual_time
async def test_a_delivery_goes_on_exactly_where_a_checkpoint_says() -> None:
    done = ((0, 2, 3), (1, 0, 2), (2, 1, 2))
    start = Checkpoint(4, {stream("a"): StreamBehind(SequenceToken(0, 1), "", done)})
    async with SimulatedGroup(checkpoints={0: start}) as circle:
        consumer = circle.consumer("c")
        batches = circle.lane.publish_all([("a", ["0", "1", "2", "3"]), ("a", ["4", "5"]), ("a", ["6", "7", "8"])])
        assert [batch.offset for batch in batches] == [0, 1, 2]
        circle.publish("b", "done")
        circle.publish("b", "x")
        await circle.rest()
        got: list[str] = []
        while consumer.inbox:
            got += consumer.waiting
            consumer.ack_all()
            await circle.rest()
        assert [payload for payload in got if payload != "x"] == ["1", "3", "6", "8"]
        assert "x" in got
        assert circle.checkpoint() == Checkpoint(5)


@virtual_time
async def test_stopping_and_starting_repeats_exactly_what_was_not_acknowledged() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(5), ["5"], numbers(9, 6))
        first, second, third = consumer.take()
        assert consumer.ack(first, 3, 1)
        assert consumer.ack(second)
        assert consumer.ack(third, 2, 1)
        assert consumer.ack(first, 0, 1)
        done = await circle.stop()
        circle.lane.attach(done)
        circle.lane.read_again()
        consumer.take()
        got: list[str] = []
        for _ in range(4):
            await circle.rest()
            got += consumer.waiting
            consumer.ack_all()
        assert got == ["1", "2", "4", "6", "7"]


@pytest.mark.parametrize("batch", [False, True])
async def test_a_handler_does_not_get_what_was_done_out_of_order(batch: bool) -> None:
    done = ((0, 2, 3), (1, 0, 2), (2, 1, 2))
    start = Checkpoint(3, {stream("a"): StreamBehind(SequenceToken(0, 1), "", done)})
    recorder = Recorder()

    async def on_batch(events: EventBatch) -> None:
        for event in events:
            await recorder(event)

    async with HandlerFeed(on_batch if batch else recorder, batch=batch, checkpoint=start) as line:
        for cursor in line.delivery.progress.cursors.values():
            cursor.feed = line
        line.publish("a", b"0", b"1", b"2", b"3")
        line.publish("a", b"4", b"5")
        line.publish("a", b"6", b"7", b"8")
        await line.done()
        assert recorder.seen == ["1", "3", "6", "8"]
        assert line.delivery.progress.checkpoint() == Checkpoint(3)


async def test_a_handler_passes_thousands_of_batches_that_were_done_out_of_order() -> None:
    start = Checkpoint(
        5001, {stream("a"): StreamBehind(SequenceToken(0), "", tuple((n, 0, 1) for n in range(1, 5000)))}
    )
    recorder = Recorder()
    async with HandlerFeed(recorder, checkpoint=start) as line:
        for cursor in line.delivery.progress.cursors.values():
            cursor.feed = line
        for number in range(5001):
            line.publish("a", str(number).encode())
        await line.done()
    assert recorder.seen == ["0", "5000"]


@virtual_time
async def test_a_report_is_confirmed_only_if_the_stored_checkpoint_has_it() -> None:
    async with SimulatedGroup() as circle:
        consumer = await _delivered(circle, numbers(10))
        (batch,) = consumer.take()
        assert consumer.ack(batch, 3, 1)
        with (
            patch("headrace.agents.delivery.checkpoint_pacer.MAX_ENTRIES", 1),
            patch("headrace.agents.delivery.checkpoint_pacer.ENTRIES_PER_S", 1),
        ):
            circle.save()
            assert consumer.ack(batch, 5, 1)
            consumer.report(7)
            circle.save()
            await circle.rest()
            assert not consumer.confirmed
            await circle.rest(HELD_BACK_S)
            circle.save()
            await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 7, 7)}


@virtual_time
async def test_a_group_is_caught_up_when_nothing_is_left() -> None:
    async with SimulatedGroup(on_failure=OnFailure.PAUSE, retry=RetryPolicy(max_attempts=1)) as circle:
        consumer = await _delivered(circle, ["0"])
        circle.publish("b", "1")
        await circle.rest()
        assert not circle.group.caught_up
        first, second = consumer.take()
        assert consumer.ack(first)
        assert not circle.group.caught_up
        assert consumer.reject(second)
        await circle.rest()
        assert circle.group.caught_up, "what is paused is not waited for"
