"""How much one consumer may hold. In virtual time."""

import pytest

from headrace.agents.delivery import member
from tests.simulation.groups import SimulatedGroup
from tests.simulation.virtual_time import virtual_time

MOST = 100


@virtual_time
async def test_the_events_of_a_consumer_are_bounded_whatever_its_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "MAX_IN_FLIGHT", MOST)
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([(str(number), ("x",)) for number in range(2 * MOST)])
        await circle.rest()
        held = consumer.take()
        assert len(held) == MOST
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
    monkeypatch.setattr(member, "MAX_IN_FLIGHT", 3)
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([(str(number), ("x",)) for number in range(4)])
        await circle.rest()
        assert consumer.member.statistics().blocked.startswith("it holds 3 batches that are not acknowledged")
        assert consumer.ack(consumer.take()[0])
        await circle.rest()
        assert len(consumer.take()) == 1
        assert all(consumer.ack(each) for each in consumer.everything[1:])
        assert not consumer.member.statistics().blocked
