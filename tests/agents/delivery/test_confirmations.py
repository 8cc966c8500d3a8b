"""The fence, the statuses of queues, released events, and confirmations of a group. In virtual time."""

import asyncio

import pytest

from headrace import Event, InvalidArgument, RetryPolicy, SequenceToken
from headrace.agents.delivery import confirmations
from headrace.agents.delivery.confirmations import Confirmed
from headrace.streams.frames import QueueState
from headrace.streams.subscriptions import Checkpoint, Mode, StreamBehind
from tests.simulation.deliveries import stream
from tests.simulation.groups import Consumer, SimulatedGroup, Status
from tests.simulation.virtual_time import virtual_time

SERVED, DRAINING, ENDED = QueueState.SERVED, QueueState.DRAINING, QueueState.ENDED


def _ignore() -> None: ...


async def delivered(circle: SimulatedGroup, *batches: list[str], **options: int) -> Consumer:
    """A consumer that got these batches of stream a."""
    consumer = circle.consumer("c", **options)
    for batch in batches:
        circle.publish("a", *batch)
    await circle.rest()
    return consumer


# ---- statuses and the fence ----------------------------------------------------------------------------------------


@virtual_time
async def test_a_consumer_gets_the_status_of_each_queue_before_its_events() -> None:
    async with SimulatedGroup(queues=2) as circle:
        for lane in circle.lanes:
            lane.publish("a", "x")
        consumer = circle.consumer("c")
        assert consumer.statuses == [Status(queue, SERVED, 1, 0, True) for queue in range(2)]
        assert not consumer.inbox
        await circle.rest()
        assert len(consumer.inbox) == 2


@virtual_time
async def test_a_report_counts_only_under_the_epoch_and_generation_of_the_status() -> None:
    async with SimulatedGroup() as circle:
        current = [circle.group.is_current(0, *fence) for fence in ((1, 0), (0, 0), (2, 0), (1, 1))]
        assert current == [True, False, False, False]
        assert not circle.group.is_current(1, 1, 0)
        circle.lane.attach(Checkpoint(0), epoch=2, generation=3)
        assert circle.group.is_current(0, 2, 3)
        assert not circle.group.is_current(0, 1, 0)
        circle.delivery.halt(lost=True)
        assert not circle.group.is_current(0, 2, 3)


@virtual_time
async def test_a_seek_is_told_as_a_higher_generation() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        await circle.stop()
        circle.lane.attach(Checkpoint(0), generation=1)
        circle.lane.read_again()
        await circle.rest()
        assert consumer.statuses == [Status(0, SERVED, 1, 0, True), Status(0, SERVED, 1, 1, True)]
        assert len(consumer.inbox) == 2


@virtual_time
async def test_a_queue_that_starts_again_under_the_same_epoch_ends_before() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        await circle.stop()
        circle.lane.attach(Checkpoint(0))
        await circle.rest()
        assert [status.state for status in consumer.statuses] == [SERVED, ENDED, SERVED]


@virtual_time
async def test_statuses_keep_their_place_between_the_batches() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        held = consumer.member
        held.on_outbox = held.on_notice = _ignore
        circle.publish("a", "0")
        await circle.rest()
        await circle.stop()
        circle.lane.attach(Checkpoint(0), epoch=2)
        circle.lane.read_again()
        await circle.rest()
        consumer.statuses.clear()
        consumer.hear(held.collect())
        assert [each.batch.offset for each in consumer.inbox] == [0]
        assert not consumer.statuses
        consumer.hear(held.collect())
        assert [status.epoch for status in consumer.statuses] == [2]
        assert [each.batch.offset for each in consumer.inbox] == [0, 0]


@virtual_time
async def test_statuses_that_nobody_takes_are_bounded() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        consumer.member.on_notice = _ignore
        for epoch in range(2, 100):
            circle.group.ended(0)
            circle.lane.attach(Checkpoint(0), epoch=epoch)
        consumer.statuses.clear()
        consumer.hear(consumer.member.collect())
        assert consumer.statuses == [Status(0, ENDED, 98, 0, True), Status(0, SERVED, 99, 0, True)]


@virtual_time
async def test_a_stop_drains_before_the_queue_ends() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"], ["1"])
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest()
        assert consumer.served == {0: Status(0, DRAINING, 1, 0, True)}
        first, second = consumer.take()
        assert circle.group.is_current(0, 1, 0)
        assert consumer.release(second)
        assert consumer.ack(first)
        assert await stopping == Checkpoint(2, {stream("a"): StreamBehind(SequenceToken(1))})
        circle.group.ended(0)
        await circle.rest()
        assert not consumer.served
        assert not circle.group.is_current(0, 1, 0)
        assert not consumer.gone


@virtual_time
async def test_a_consumer_that_comes_while_a_queue_drains_hears_so() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        stopping = asyncio.create_task(circle.stop(60.0))
        await circle.rest()
        consumer.connect()
        assert consumer.statuses == [Status(0, DRAINING, 1, 0, True)]
        assert consumer.ack(consumer.take()[0])
        assert await stopping == Checkpoint(1)


@virtual_time
async def test_bound_a_change_of_the_assignment_is_told() -> None:
    async with SimulatedGroup(queues=2, mode=Mode.BOUND) as circle:
        one = circle.consumer("1")
        await circle.rest()
        assert [status.assigned for status in one.served.values()] == [True, True]
        other = circle.consumer("2")
        await circle.rest()
        assert [status.assigned for status in one.served.values()] == [True, False]
        assert [status.assigned for status in other.served.values()] == [False, True]
        assert circle.group.status(other.member, 1) == (1, 0, True)
        assert circle.group.status(other.member, 2) is None


# ---- released events -----------------------------------------------------------------------------------------------


@virtual_time
async def test_released_events_come_again_as_if_they_had_not_been_sent() -> None:
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        consumer = await delivered(circle, ["0", "1", "2"], ["3"])
        first, _ = consumer.take()
        assert consumer.release(first, 1)
        assert circle.delivery.parcels, "the consumer still has event 0"
        assert not consumer.ack(first, 1, 1)
        assert consumer.ack(first, 0, 1)
        await circle.rest()
        assert [(list(each.indexes or ()), each.attempt) for each in consumer.inbox] == [([1, 2], 1), ([], 1)]
        assert consumer.took() == ["1", "2", "3"]
        assert not circle.sink.dead


@virtual_time
async def test_a_whole_parcel_may_be_released() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"], ["1"])
        first, second = consumer.take()
        assert consumer.release(first)
        assert not consumer.ack(second), "later events of the parcel go with it"
        await circle.rest()
        assert consumer.took() == ["0", "1"]
        assert consumer.member.in_flight_events == 2


@virtual_time
async def test_from_a_whole_batch_on_events_may_be_released() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"], ["1"], ["2"])
        first, second, _ = consumer.take()
        assert consumer.release(second)
        assert consumer.ack(first)
        await circle.rest()
        assert consumer.took() == ["1", "2"]


@virtual_time
async def test_events_that_the_consumer_does_not_hold_cannot_be_released() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0", "1"])
        (batch,) = consumer.take()
        assert consumer.ack(batch, 0, 1)
        assert not consumer.release(batch, 0)
        assert consumer.release(batch, 1)
        assert not consumer.release(batch, 1)


@virtual_time
async def test_events_released_after_a_rejection_take_its_place() -> None:
    """The rejected event comes after them, and must not fail in their stead."""
    async with SimulatedGroup(retry=RetryPolicy(max_attempts=1)) as circle:
        consumer = await delivered(circle, ["0", "1", "2"])
        (batch,) = consumer.take()
        assert consumer.reject(batch, 2, 1)
        assert consumer.release(batch, 1)
        assert consumer.ack(batch, 0, 1)
        await circle.rest()
        assert consumer.took() == ["1", "2"]
        assert not circle.sink.dead


# ---- confirmations -------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_report_is_confirmed_when_a_checkpoint_that_has_it_is_stored() -> None:
    async with SimulatedGroup(queues=2) as circle:
        consumer = await delivered(circle, ["0"])
        assert consumer.ack(consumer.take()[0])
        consumer.report(3)
        for how in ({"fails": True}, {"refused": {0}}):
            circle.save(**how)  # pyright: ignore[reportArgumentType]
            await circle.rest()
            assert not consumer.confirmed
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 3)}
        consumer.report(4)
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 4, 4)}, "also if nothing changed"


@virtual_time
async def test_a_report_that_came_after_the_checkpoint_was_read_waits_for_the_next() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"], ["1"])
        consumer.report(1)
        marks = circle.delivery.marks()
        consumer.report(2)
        for mark in marks:
            mark.confirm({})
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 1, 1)}


@pytest.mark.parametrize("late", [False, True])
@virtual_time
async def test_a_confirmation_is_for_the_connection_that_reported(late: bool) -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        consumer.report(9)
        marks = circle.delivery.marks()
        consumer.disconnect()
        if late:
            consumer.connect()
        for mark in marks:
            mark.confirm({})
        if not late:
            consumer.connect()
        circle.save()
        await circle.rest()
        assert not consumer.confirmed


@virtual_time
async def test_unconfirmed_events_that_the_consumer_holds_are_done() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0", "1", "2"])
        consumer.connect(0, 0)
        consumer.unconfirmed(1, ("a", 0, 0, 2))
        consumer.grant(100, 10_000)
        await circle.rest()
        assert consumer.took()[-1:] == ["2"]
        assert circle.checkpoint() == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 2))})
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 1, 1)}


@virtual_time
async def test_unconfirmed_events_of_another_stream_are_not_done() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        consumer.unconfirmed(1, ("other", 0, 0, 1))
        assert circle.checkpoint() == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0))})


@virtual_time
async def test_a_question_is_answered_when_its_events_are_done_by_any_consumer() -> None:
    async with SimulatedGroup() as circle:
        other = await delivered(circle, ["0", "1"], ["2"])
        consumer = circle.consumer("asks")
        consumer.unconfirmed(1, ("a", 0, 0, 1))
        consumer.unconfirmed(2, ("a", 0, 1, 1), ("a", 1, 0, 1))
        consumer.report(3)
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 0)}
        first, second = other.take()
        assert other.ack(first, 0, 1)
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 1)}
        assert other.ack(second)
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 1)}, "event 1 is not done"
        assert other.ack(first, 1, 1)
        circle.save(fails=True)
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 1)}
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 3)}


@virtual_time
async def test_events_beyond_the_end_of_the_queue_are_not_done() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("asks")
        consumer.unconfirmed(1, ("a", 0, 0, 1))
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 1, 0)}


@virtual_time
async def test_an_acknowledged_dead_letter_is_confirmed_when_the_store_has_it() -> None:
    async with SimulatedGroup() as circle:
        letter = Event(b"dead", {}, stream=stream("d"), token=SequenceToken(77, 3))
        consumer = await delivered(circle, ["0"])
        redriving = asyncio.create_task(circle.delivery.redrive(letter))
        await circle.rest()
        before, dead = consumer.take()
        assert consumer.ack(before)
        consumer.report(1)
        assert consumer.ack(dead)
        consumer.report(2)
        assert await redriving is None
        consumer.report(3)
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 1, 3)}
        circle.delivery.reports.end_redriven(SequenceToken(77, 3))
        circle.save()
        await circle.rest()
        assert consumer.confirmed == {0: Confirmed(1, 3, 3)}


@virtual_time
async def test_a_question_about_a_dead_letter_is_open_until_its_redrive_is_over() -> None:
    async with SimulatedGroup(checkpoints={0: Checkpoint(5)}) as circle:
        consumer = circle.consumer("asks")
        for number, first in ((1, 0), (2, 1), (3, 4)):
            consumer.unconfirmed(number, ("a", 2, first, 2))
        for redrives, confirmed in (({2: [0, 2]}, 0), ({2: [2], 3: [0]}, 1), ({2: [3]}, 3), ({}, 3)):
            for mark in circle.delivery.marks():
                assert set(mark.offsets) <= {2}
                mark.confirm(redrives)
            await circle.rest()
            assert consumer.confirmed == {0: Confirmed(1, 3, confirmed)}
        assert not circle.delivery.marks()


@virtual_time
async def test_a_report_without_a_number_is_not_confirmed() -> None:
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        consumer.unconfirmed(0, ("a", 0, 0, 1))
        circle.save()
        await circle.rest()
        assert not consumer.confirmed
        assert circle.checkpoint() == Checkpoint(1)


@virtual_time
async def test_the_open_questions_of_a_consumer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmations, "MAX_QUESTIONS", 3)
    async with SimulatedGroup() as circle:
        consumer = await delivered(circle, ["0"])
        other = circle.consumer("other")
        other.unconfirmed(1, *[("a", 5, index, 1) for index in range(3)])
        consumer.unconfirmed(1, ("a", 5, 0, 1))
        with pytest.raises(InvalidArgument, match="more than 3 events"):
            other.unconfirmed(2, ("a", 5, 3, 1))
        other.connect()
        other.unconfirmed(1, ("a", 5, 3, 1))
