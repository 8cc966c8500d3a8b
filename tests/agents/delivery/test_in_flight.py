"""How much one consumer may hold. In virtual time."""

import pytest

from headrace.agents.delivery import unsent
from tests.simulation.groups import SimulatedGroup
from tests.simulation.virtual_time import virtual_time

MAX_BATCHES = 250
FIRST, MOST = 100, 200
"""The most that one consumer alone may hold: before it has acknowledged something, and after."""


@virtual_time
async def test_the_events_of_a_consumer_are_bounded_whatever_its_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsent, "MAX_BATCHES", MAX_BATCHES)
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([(str(number), ("x",)) for number in range(2 * MOST)])
        await circle.rest()
        held = consumer.take()
        assert len(held) == FIRST
        consumer.disconnect()
        consumer.connect()
        await circle.rest()
        again = consumer.take()
        assert [each.batch.offset for each in again] == [each.batch.offset for each in held]
        for each in again:
            assert consumer.ack(each)
        await circle.rest()
        assert len(consumer.take()) == MOST


@virtual_time
async def test_a_consumer_at_the_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsent, "MAX_BATCHES", 50)
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([(str(number), ("x",)) for number in range(41)])
        await circle.rest()
        assert consumer.member.statistics().blocked.startswith("it holds 20 batches that are not acknowledged")
        assert consumer.ack(consumer.take()[0])
        await circle.rest()
        assert len(consumer.take()) == 21
        assert all(consumer.ack(each) for each in consumer.everything[1:])
        assert not consumer.member.statistics().blocked


@virtual_time
async def test_many_consumers_that_never_acknowledge_leave_batches_to_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsent, "MAX_BATCHES", 1000)
    async with SimulatedGroup() as circle:
        deaf = [circle.consumer(f"deaf-{number}") for number in range(20)]
        circle.lane.publish_all([(str(number), ("x",)) for number in range(2000)])
        await circle.rest()
        held = [len(consumer.take()) for consumer in deaf]
        assert 400 < sum(held) <= 500 + 20 * unsent.MIN_BATCHES
        assert min(held) >= unsent.MIN_BATCHES
        reads = circle.consumer("reads")
        await circle.rest()
        for each in reads.take():
            assert reads.ack(each)
        await circle.rest()
        assert len(reads.take()) > 200
