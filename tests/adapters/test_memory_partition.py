"""The pure core of the memory adapter: segments, groups, repeatable reads, reuse."""

import sys
from dataclasses import dataclass

import pytest

from headrace import InvalidArgument, NotFound
from headrace.adapters.memory.partition import MemoryPartition, PartitionReader


@dataclass(frozen=True)
class Item:
    value: int
    count: int = 1
    nbytes: int = 1


class Pulling:
    """Pull and commit as a consumer of a group does: a pull that is not committed comes again."""

    def __init__(self, partition: MemoryPartition[Item], group: str = "g") -> None:
        partition.join(group)
        self.partition = partition
        self.group = group
        self.reader = partition.reader(group)

    def pull(self, at_most: int) -> list[int]:
        self.reader = self.partition.reader(self.group)
        return values(self.reader, at_most)

    def commit(self) -> int:
        return self.partition.commit(self.group, self.reader.position)


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


def test_groups_have_positions_of_their_own():
    partition = partition_of(*range(8), segment_size=3)
    one, two = Pulling(partition, "one"), Pulling(partition, "two")
    assert one.pull(3) == [0, 1, 2]
    assert two.pull(2) == [0, 1]
    one.commit()
    two.commit()
    assert one.pull(3) == [3, 4, 5]
    assert two.pull(2) == [2, 3]


def test_offsets_are_unbounded_and_count_every_item():
    partition = MemoryPartition[Item](2)
    consumer = Pulling(partition)
    for number in range(9):
        assert partition.append(Item(number)) == number
        consumer.pull(1)
        consumer.commit()
    assert (partition.first, partition.next) == (9, 9)


def test_a_reader_goes_on_behind_what_it_took():
    partition = partition_of(*range(5), segment_size=2)
    partition.join("g")
    reader = partition.reader("g")
    assert [values(reader, 2), values(reader, 2), values(reader, 2)] == [[0, 1], [2, 3], [4]]
    partition.append(Item(5))
    assert values(reader, 2) == [5]


def test_taking_stops_after_the_item_that_reaches_either_limit():
    partition = MemoryPartition[Item](4)
    partition.join("g")
    for number in range(6):
        partition.append(Item(number, count=10, nbytes=100))
    reader = partition.reader("g")
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


def test_the_slowest_group_decides_what_is_reused():
    partition = partition_of(*range(9), segment_size=3)
    first, second, third = arrays(partition)
    slow, fast = Pulling(partition, "slow"), Pulling(partition, "fast")
    fast.pull(6)
    fast.commit()
    slow.pull(3)
    slow.commit()
    partition.append(Item(9))
    assert arrays(partition) == [second, third, first]


def test_a_segment_with_one_item_unfinished_is_not_reused():
    partition = partition_of(*range(9), segment_size=3)
    before = arrays(partition)
    slow, fast = Pulling(partition, "slow"), Pulling(partition, "fast")
    fast.pull(6)
    fast.commit()
    slow.pull(2)
    slow.commit()
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


def test_what_was_read_stays_the_readers_when_its_segment_is_reused():
    partition = partition_of(0, 1, segment_size=2)
    consumer = Pulling(partition)
    reader = partition.reader("g")
    taken = reader.take(2, 2)
    partition.commit("g", 2)
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


def test_a_late_group_starts_at_the_first_item_still_held():
    partition = partition_of(*range(6), segment_size=2)
    consumer = Pulling(partition)
    consumer.pull(5)
    consumer.commit()
    assert Pulling(partition, "late").pull(9) == [5]


def test_a_late_group_does_not_see_an_item_let_go_in_the_middle_of_a_segment():
    partition = partition_of(0, 1, segment_size=4)
    consumer = Pulling(partition)
    consumer.pull(1)
    consumer.commit()
    assert Pulling(partition, "late").pull(9) == [1]


def test_an_item_is_let_go_when_the_last_group_commits_it():
    partition = MemoryPartition[Item](4)
    one, two = Pulling(partition, "one"), Pulling(partition, "two")
    for number in range(3):
        partition.append(Item(number, count=5, nbytes=7))
    one.pull(10)
    assert one.commit() == 0
    two.pull(10)
    assert two.commit() == 10
    assert (partition.events, partition.bytes) == (5, 7)
    assert next(partition.segments()).slots[:2] == [None, None]


def test_without_a_group_everything_is_held():
    partition = partition_of(*range(5), segment_size=2)
    assert (partition.first, partition.events) == (0, 5)
    assert Pulling(partition).pull(9) == [0, 1, 2, 3, 4]


def test_a_group_that_leaves_holds_nothing_any_more():
    partition = partition_of(*range(5), segment_size=2)
    Pulling(partition, "idle")
    consumer = Pulling(partition)
    consumer.pull(3)
    assert consumer.commit() == 0
    assert partition.leave("idle") == 3
    assert partition.first == 3


def test_a_commit_never_moves_back():
    partition = partition_of(*range(5), segment_size=2)
    consumer = Pulling(partition)
    partition.commit("g", 3)
    partition.commit("g", 1)
    assert consumer.pull(9) == [3, 4]


def test_a_reader_overtaken_by_its_group_goes_on_at_the_groups_position():
    partition = partition_of(*range(7), segment_size=2)
    partition.join("g")
    reader = partition.reader("g")
    assert values(reader, 1) == [0]
    partition.commit("g", 5)
    partition.append(Item(7))
    assert values(reader) == [5, 6, 7]


def test_a_reader_at_the_end_of_a_segment_finds_its_way_when_that_segment_was_reused():
    partition = partition_of(0, 1, segment_size=2)
    partition.join("g")
    reader = partition.reader("g")
    assert values(reader) == [0, 1]
    partition.append(Item(2))
    partition.commit("g", 2)
    for number in range(3, 6):
        partition.append(Item(number))
    assert values(reader) == [2, 3, 4, 5]


def test_committing_what_does_not_exist_is_refused():
    partition = partition_of(0, segment_size=2)
    partition.join("g")
    with pytest.raises(InvalidArgument, match="offset 2"):
        partition.commit("g", 2)


def test_an_unknown_group_is_refused():
    partition = partition_of(0, segment_size=2)
    for act in (partition.reader, partition.position, partition.leave):
        with pytest.raises(NotFound, match="nobody"):
            act("nobody")
