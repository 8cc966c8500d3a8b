"""The pure core of the memory adapter: segments, repeatable reads, reuse."""

import sys
from dataclasses import dataclass

import pytest

from headrace import InvalidArgument
from headrace.adapters.memory.partition import MemoryPartition, PartitionReader


@dataclass(frozen=True)
class Item:
    value: int
    count: int = 1
    nbytes: int = 1


class Pulling:
    """Pull and commit as a consumer does: a pull that is not committed comes again."""

    def __init__(self, partition: MemoryPartition[Item]) -> None:
        self.partition = partition
        self.reader = PartitionReader(partition)

    def pull(self, at_most: int) -> list[int]:
        self.reader = PartitionReader(self.partition)
        return values(self.reader, at_most)

    def commit(self) -> int:
        return self.partition.commit(self.reader.position)


def values(reader: PartitionReader[Item], at_most: int = sys.maxsize) -> list[int]:
    return [item.value for item in reader.take(at_most, sys.maxsize)]


def partition_of(*numbers: int, segment_size: int) -> MemoryPartition[Item]:
    partition = MemoryPartition[Item](segment_size)
    for number in numbers:
        partition.append(Item(number))
    return partition


def arrays(partition: MemoryPartition[Item]) -> list[int]:
    """The identity of each segment's slot array, from head to tail."""
    return [id(segment.slots) for segment in partition.segments()]


def test_pulls_and_commits_go_through_segments_in_order():
    partition = partition_of(*range(12), segment_size=2)
    consumer = Pulling(partition)
    for at_most, expected in ((4, [0, 1, 2, 3]), (3, [4, 5, 6]), (2, [7, 8]), (4, [9, 10, 11])):
        assert consumer.pull(at_most) == expected
        consumer.commit()
    assert consumer.pull(4) == []
    partition.append(Item(12))
    assert consumer.pull(3) == [12]


def test_a_pull_repeats_until_it_is_committed():
    consumer = Pulling(partition_of(*range(11), segment_size=4))
    assert consumer.pull(4) == [0, 1, 2, 3]
    assert consumer.pull(3) == [0, 1, 2]
    consumer.commit()
    assert consumer.pull(3) == [3, 4, 5]
    assert consumer.pull(5) == [3, 4, 5, 6, 7]
    consumer.commit()
    assert consumer.pull(6) == [8, 9, 10]
    assert consumer.pull(3) == [8, 9, 10]
    consumer.commit()
    assert consumer.pull(1) == []


def test_committing_twice_skips_nothing():
    consumer = Pulling(partition_of(*range(6), segment_size=2))
    consumer.pull(2)
    consumer.commit()
    consumer.commit()
    assert consumer.pull(2) == [2, 3]


def test_offsets_are_unbounded_and_count_every_item():
    partition = MemoryPartition[Item](2)
    consumer = Pulling(partition)
    for number in range(9):
        assert partition.append(Item(number)) == number
        consumer.pull(1)
        consumer.commit()
    assert (partition.first, partition.next) == (9, 9)


def test_a_reader_continues_after_the_batches_that_it_took():
    partition = partition_of(*range(5), segment_size=2)
    reader = PartitionReader(partition)
    assert [values(reader, 2), values(reader, 2), values(reader, 2)] == [[0, 1], [2, 3], [4]]
    partition.append(Item(5))
    assert values(reader, 2) == [5]


def test_taking_stops_after_the_item_that_reaches_either_limit():
    partition = MemoryPartition[Item](4)
    for number in range(6):
        partition.append(Item(number, count=10, nbytes=100))
    reader = PartitionReader(partition)
    assert [item.value for item in reader.take(11, 1000)] == [0, 1]
    assert [item.value for item in reader.take(1000, 1)] == [2]
    assert [item.value for item in reader.take(1000, 200)] == [3, 4]
    assert [item.value for item in reader.take(1, 1)] == [5]


def test_one_segment_is_made_at_the_start_and_another_only_when_it_is_full():
    assert len(arrays(MemoryPartition[Item](4))) == 1
    assert len(arrays(partition_of(0, 1, segment_size=2))) == 1
    assert len(arrays(partition_of(0, 1, 2, segment_size=2))) == 2


def test_the_last_finished_segment_becomes_the_new_tail():
    partition = partition_of(*range(9), segment_size=3)
    _, second, third = arrays(partition)
    consumer = Pulling(partition)
    consumer.pull(6)
    consumer.commit()
    partition.append(Item(9))
    assert arrays(partition) == [third, second]
    assert consumer.pull(10) == [6, 7, 8, 9]


def test_a_segment_with_one_item_unfinished_is_not_reused():
    partition = partition_of(*range(9), segment_size=3)
    before = arrays(partition)
    consumer = Pulling(partition)
    consumer.pull(2)
    consumer.commit()
    partition.append(Item(9))
    assert arrays(partition)[:3] == before
    assert len(arrays(partition)) == 4


def test_pulled_and_not_committed_is_not_reused():
    partition = partition_of(*range(4), segment_size=2)
    before = arrays(partition)
    consumer = Pulling(partition)
    consumer.pull(4)
    partition.append(Item(4))
    assert arrays(partition)[:2] == before
    assert consumer.pull(9) == [0, 1, 2, 3, 4]


def test_reuse_keeps_the_order():
    partition = partition_of(*range(6), segment_size=2)
    consumer = Pulling(partition)
    consumer.pull(4)
    consumer.commit()
    partition.append(Item(6))
    partition.append(Item(7))
    assert consumer.pull(10) == [4, 5, 6, 7]


def test_a_steady_flow_needs_two_segments():
    partition = MemoryPartition[Item](2)
    consumer = Pulling(partition)
    seen: set[int] = set()
    for number in range(100):
        partition.append(Item(number))
        seen.update(arrays(partition))
        assert consumer.pull(1) == [number]
        consumer.commit()
    assert len(seen) == 2


def test_batches_already_read_do_not_change_when_their_segment_is_reused():
    partition = partition_of(0, 1, segment_size=2)
    consumer = Pulling(partition)
    reader = PartitionReader(partition)
    taken = reader.take(2, 2)
    partition.commit(2)
    for number in range(2, 8):
        partition.append(Item(number))
        consumer.pull(1)
        consumer.commit()
    assert [item.value for item in taken] == [0, 1]


def test_unwritten_slots_are_never_read():
    partition = partition_of(0, segment_size=4)
    consumer = Pulling(partition)
    assert consumer.pull(4) == [0]
    consumer.commit()
    assert consumer.pull(4) == []


def test_a_reused_segment_shows_nothing_of_its_former_life():
    partition = partition_of(0, 1, 2, segment_size=2)
    consumer = Pulling(partition)
    consumer.pull(3)
    consumer.commit()
    partition.append(Item(3))
    partition.append(Item(4))
    assert consumer.pull(9) == [3, 4]
    reused = list(partition.segments())[-1]
    assert reused.slots == [Item(4), None]


@pytest.mark.parametrize("segment_size", [2, 4, 8])
def test_a_new_reader_starts_at_the_first_item_still_held(segment_size: int):
    partition = partition_of(*range(6), segment_size=segment_size)
    consumer = Pulling(partition)
    consumer.pull(5)
    consumer.commit()
    assert values(PartitionReader(partition)) == [5]


def test_an_item_is_let_go_when_it_is_committed():
    partition = MemoryPartition[Item](4)
    consumer = Pulling(partition)
    for number in range(3):
        partition.append(Item(number, count=5, nbytes=7))
    assert consumer.pull(10) == [0, 1]
    assert consumer.commit() == 10
    assert consumer.commit() == 0
    assert (partition.events, partition.bytes) == (5, 7)
    assert next(partition.segments()).slots[:2] == [None, None]


def test_without_a_commit_everything_is_held():
    partition = partition_of(*range(5), segment_size=2)
    assert (partition.first, partition.events) == (0, 5)
    assert Pulling(partition).pull(9) == [0, 1, 2, 3, 4]


def test_a_commit_never_moves_back():
    partition = partition_of(*range(5), segment_size=2)
    consumer = Pulling(partition)
    partition.commit(3)
    partition.commit(1)
    assert consumer.pull(9) == [3, 4]


def test_a_reader_overtaken_by_a_commit_goes_on_at_the_first_item():
    partition = partition_of(*range(7), segment_size=2)
    reader = PartitionReader(partition)
    assert values(reader, 1) == [0]
    partition.commit(5)
    partition.append(Item(7))
    assert values(reader) == [5, 6, 7]


def test_a_reader_at_the_end_of_a_segment_finds_its_way_when_that_segment_was_reused():
    partition = partition_of(0, 1, segment_size=2)
    reader = PartitionReader(partition)
    assert values(reader) == [0, 1]
    partition.append(Item(2))
    partition.commit(2)
    for number in range(3, 6):
        partition.append(Item(number))
    assert values(reader) == [2, 3, 4, 5]


def test_committing_unknown_offsets_is_refused():
    partition = partition_of(0, segment_size=2)
    with pytest.raises(InvalidArgument, match="offset 2"):
        partition.commit(2)
