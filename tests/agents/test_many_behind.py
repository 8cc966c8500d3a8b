"""More streams behind than checkpoints list that are not held back. In virtual time."""

import pytest

from headrace import EventBatch
from headrace.agents.delivery.checkpoint_pacer import MAX_ENTRIES
from tests.agents.delivery.test_group_manager import connected, house, rest
from tests.simulation.deliveries import stream
from tests.simulation.virtual_time import virtual_time


@pytest.mark.long
@virtual_time
async def test_acknowledgements_are_confirmed_however_many_streams_stay_behind() -> None:
    """A consumer remembers the events that are not saved, and stops if they are too many."""
    async with house() as built:
        group = await built.group("g")
        consumer = connected(group)
        keys = [str(number) for number in range(MAX_ENTRIES + 10)]
        await built.adapter.enqueue([(0, EventBatch.of(stream(key), [b"held"])) for key in keys])
        await built.publish("done", "0")
        await rest(2)
        assert consumer.ack(next(each for each in consumer.take() if each.batch.stream == stream("done")))
        consumer.report(5)
        await rest(2)
        assert consumer.confirmed[0].number == 5
        assert len((await built.stored("g"))[0].behind) == len(keys)
