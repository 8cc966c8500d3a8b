"""Partitions that lose their end and grow past the positions of readers: seen by the leader epochs of the records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters.kafka.epochs import EpochRange, ReadEpochs
from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import QUICK, ForeignProgram, batch, new_topic, opened, received


def noted(*ranges: tuple[int, int, int]) -> ReadEpochs:
    epochs = ReadEpochs()
    for each in ranges:
        epochs.note([EpochRange(*each)])
    return epochs


def test_epoch_of_a_position_is_that_of_the_record_before_it() -> None:
    epochs = noted((1, 0, 5), (1, 5, 10), (4, 10, 12))
    found = [epochs.epoch_before(position) for position in (0, 1, 10, 11, 12, 13)]
    assert found == [None, 1, 1, 4, 4, None]
    assert epochs.take_unsaved() == [EpochRange(1, 0, 10), EpochRange(4, 10, 12)]
    assert epochs.take_unsaved() == []


def test_epochs_that_could_not_be_stored_are_stored_later() -> None:
    """Also if nothing more is read in them."""
    epochs = noted((1, 0, 5), (4, 10, 12))
    taken = epochs.take_unsaved()
    epochs.note([EpochRange(4, 12, 20)])
    epochs.put_back(taken)
    assert epochs.take_unsaved() == [EpochRange(1, 0, 5), EpochRange(4, 10, 20)]


def test_position_in_a_range_that_was_not_read_has_no_epoch() -> None:
    """Else a leader that nobody has read from would look like a lost end."""
    epochs = noted((1, 0, 5), (1, 20, 30))
    assert [epochs.epoch_before(position) for position in (3, 10, 20, 21)] == [None, None, None, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 5)), max_size=12))
def test_only_positions_that_were_read_have_an_epoch(reads: Sequence[tuple[int, int, int]]) -> None:
    """It is an epoch in which the record before the position was read."""
    epochs = noted(*((epoch, low, low + length) for epoch, low, length in reads))
    for position in range(30):
        found = epochs.epoch_before(position)
        in_epochs = {epoch for epoch, low, length in reads if low < position <= low + length}
        assert found is None or found in in_epochs


@pytest.fixture
def server() -> Iterator[KafkaServer]:
    """A broker that may be restarted."""
    with KafkaServer() as server:
        yield server


@pytest.mark.slow
async def test_end_that_was_lost_is_a_fault_also_after_the_partition_has_grown_past_it(server: KafkaServer) -> None:
    """A restart of the broker begins an epoch. A reader that was further in the epoch before has lost records."""
    topic = new_topic()
    limits = QUICK._replace(request_s=20.0)
    async with opened(server.address, topic, limits=limits) as adapter:
        for number in range(10):
            await adapter.enqueue([(0, batch(str(number)))])
        receiver = await adapter.open_receiver(0, 0)
        assert len(await received(receiver, 10)) == 10
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    foreign = ForeignProgram(server.address)
    await asyncio.to_thread(foreign.write, topic, [batch(str(number)).encoded for number in range(10, 20)])
    async with opened(server.address, topic, limits=limits) as adapter:
        # No reader was here: a start that a user has chosen is no loss.
        assert await received(await adapter.open_receiver(0, 15), 5) == [str(number) for number in range(15, 20)]
    # As a reader writes that had read further in the first epoch, before the brokers lost the end.
    await asyncio.to_thread(foreign.write, f"{topic}.producers", [b"0 15"], key=b"epoch/0/0")
    async with opened(server.address, topic, limits=limits) as adapter:
        receiver = await adapter.open_receiver(0, 15)
        with pytest.raises(StorageError, match="the brokers truncated it"):
            async with asyncio.timeout(30):
                await receiver.receive(1 << 30, 1 << 30)
        assert await received(await adapter.open_receiver(0, 10), 10) == [str(number) for number in range(10, 20)]
