"""The memory adapter's partition against the simplest model there is: one list and a number."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.adapters.limits import within_limits
from headrace.adapters.memory.partition import MemoryPartition, PartitionReader
from tests.random_examples import examples

READERS = ("red", "green", "blue")


@dataclass(frozen=True)
class Item:
    number: int
    count: int
    nbytes: int


class Partitions(RuleBasedStateMachine):
    """Readers come, read and commit while items are appended, in segments small enough to be reused all the time."""

    @initialize(segment_size=st.integers(1, 4))
    def start(self, segment_size: int) -> None:
        self.segment_size = segment_size
        self.partition = MemoryPartition[Item](segment_size)
        self.model: list[Item] = []
        self.first = 0
        self.readers: dict[str, tuple[PartitionReader[Item], int]] = {}
        self.kept: list[tuple[list[Item], list[Item]]] = []

    @rule(sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=6))
    def append(self, sizes: list[tuple[int, int]]) -> None:
        for count, nbytes in sizes:
            item = Item(len(self.model), count, nbytes)
            assert self.partition.append(item) == len(self.model)
            self.model.append(item)

    @rule(name=st.sampled_from(READERS))
    def open_reader(self, name: str) -> None:
        self.readers[name] = (PartitionReader(self.partition), self.first)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), max_events=st.integers(1, 9), max_bytes=st.integers(1, 9))
    def take(self, data: st.DataObject, max_events: int, max_bytes: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader, position = self.readers[name]
        expected = list(within_limits(self.model[position:], max_events, max_bytes))
        taken = reader.take(max_events, max_bytes)
        assert taken == expected
        self.readers[name] = (reader, position + len(taken))
        self.kept.append((taken, expected))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, len(self.model)))
        before, self.first = self.first, max(self.first, offset)
        assert self.partition.commit(offset) == sum(item.count for item in self.model[before : self.first])
        self.readers = {name: (reader, max(at, self.first)) for name, (reader, at) in self.readers.items()}

    @invariant()
    def counts_agree(self) -> None:
        held = self.model[self.first :]
        assert (self.partition.first, self.partition.next) == (self.first, len(self.model))
        assert self.partition.events == sum(item.count for item in held)
        assert self.partition.bytes == sum(item.nbytes for item in held)

    @invariant()
    def segments_hold_what_is_held_and_nothing_else(self) -> None:
        segments = list(self.partition.segments())
        slots = [item for segment in segments for item in segment.slots if item is not None]
        assert slots == self.model[self.first :]
        assert len(segments) <= len(slots) // self.segment_size + 2

    @invariant()
    def positions_agree(self) -> None:
        assert all(reader.position == position for reader, position in self.readers.values())

    @invariant()
    def what_was_handed_out_stays_as_it_was(self) -> None:
        assert all(taken == expected for taken, expected in self.kept)


Partitions.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPartitions = Partitions.TestCase
