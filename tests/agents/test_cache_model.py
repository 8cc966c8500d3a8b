"""The cache and its cursors against the simplest model there is: a list of batches and a number per cursor."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import EventBatch, SequenceToken, StreamId
from headrace.adapters.receiving import Gap
from headrace.agents.cache import BATCH_OVERHEAD_BYTES, BUCKETS, EMPTY, Cursor, QueueCache
from tests.random_examples import examples

STREAMS = [StreamId("s", key) for key in "abc"]


@dataclass(frozen=True)
class Item:
    offset: int
    stream: StreamId
    count: int
    nbytes: int

    @property
    def charge(self) -> int:
        return self.nbytes + BATCH_OVERHEAD_BYTES


@dataclass
class Reader:
    """A cursor, and its state in the model. `on`: its batch; `pinned`: whether the cache must keep that."""

    cursor: Cursor
    stream: StreamId
    next: SequenceToken
    on: Item | None
    pinned: bool


Drawn = tuple[StreamId, int, int, int]

drawn_items = st.tuples(
    st.sampled_from(STREAMS),
    st.integers(1, 5),
    st.integers(0, 900),
    st.sampled_from([0, 0, 0, 1, 3]),  # offsets that have no batch, before this one
)


class Caches(RuleBasedStateMachine):
    """Cursors come, step, leave and come back while batches are added and buckets purged."""

    @initialize(
        max_events=st.sampled_from([5, 10, 40, 109, 10_000]),
        max_bytes=st.sampled_from([4_000, 12_000, 25_000, 10_000_000]),
        first=st.integers(0, 3),
        purge_at_once=st.booleans(),
        drawn=st.lists(drawn_items, min_size=6, max_size=12),
    )
    def start(self, max_events: int, max_bytes: int, first: int, purge_at_once: bool, drawn: Sequence[Drawn]) -> None:
        self.cache = QueueCache(max_events, max_bytes)
        self.cache.next_offset = self.next_offset = first
        self.cache.on_unpinned = self.on_unpinned
        self.max_events, self.max_bytes = max_events, max_bytes
        self.purge_at_once = purge_at_once
        self.history: list[Item] = []
        self.held: list[Item] = []
        self.readers: list[Reader] = []
        self.unpinned = self.expected_unpinned = 0
        self.append(drawn, None)
        for stream in STREAMS * 2:
            self.begin(stream, SequenceToken(self.first_offset()))

    def on_unpinned(self) -> None:
        self.unpinned += 1
        if self.purge_at_once:
            self.cache.purge()

    # -- the model ---------------------------------------------------------------------------------------------------

    def full(self, items: Sequence[Item]) -> bool:
        events, size = sum(item.count for item in items), sum(item.charge for item in items)
        return events >= max(1, self.max_events // 10) or size >= max(1, self.max_bytes // 10)

    def buckets(self) -> list[list[Item]]:
        """Only whole buckets are dropped, so the other batches keep their buckets."""
        buckets: list[list[Item]] = []
        for item in self.held:
            if not buckets or self.full(buckets[-1]):
                buckets.append([])
            buckets[-1].append(item)
        return buckets

    def pins(self, bucket: Sequence[Item]) -> int:
        return sum(reader.pinned and reader.on in bucket for reader in self.readers)

    def drop_unneeded(self) -> int:
        buckets = self.buckets()
        dropped = 0
        for position, bucket in enumerate(buckets):
            newest = position == len(buckets) - 1
            if self.pins(bucket) or (newest and not self.full(bucket)):
                break
            dropped += 1
        self.held = [item for bucket in buckets[dropped:] for item in bucket]
        return dropped

    def moved(self, before: Item | None) -> None:
        """A cursor that was pinned left `before`: the model's word on whether its bucket lost the last pin by that."""
        bucket = next((bucket for bucket in self.buckets() if before in bucket), None)
        if bucket is not None and not self.pins(bucket):
            self.expected_unpinned += 1
            if self.purge_at_once:
                self.drop_unneeded()

    def upcoming(self, stream: StreamId, offset: int, of: Sequence[Item]) -> list[Item]:
        return [item for item in of if item.stream == stream and item.offset >= offset]

    def first_offset(self) -> int:
        return self.held[0].offset if self.held else self.next_offset

    def pick(self, data: st.DataObject, readers: Sequence[Reader]) -> Reader:
        return readers[data.draw(st.integers(0, len(readers) - 1))]

    def on_a_batch(self) -> list[Reader]:
        return [reader for reader in self.readers if reader.on is not None]

    def parked(self) -> list[Reader]:
        return [reader for reader in self.readers if reader.on is None]

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(drawn=st.lists(drawn_items, max_size=8), further=st.one_of(st.none(), st.integers(-3, 3)))
    def add(self, drawn: Sequence[Drawn], further: int | None) -> None:
        self.append(drawn, further)

    def append(self, drawn: Sequence[Drawn], further: int | None) -> None:
        items: list[Item] = []
        for stream, count, nbytes, hole in drawn:
            items.append(Item(self.next_offset + hole, stream, count, nbytes))
            self.next_offset += hole + 1
        told = None if further is None else self.next_offset + further
        self.cache.add([EventBatch(i.stream, b"x" * i.nbytes, i.count, i.offset) for i in items], told)
        self.next_offset = max(self.next_offset, told or 0)
        self.history += items
        self.held += items

    @rule()
    def purge(self) -> None:
        assert self.cache.purge() == self.drop_unneeded()

    @rule(data=st.data(), stream=st.sampled_from(STREAMS), index=st.integers(0, 2))
    def open_cursor(self, data: st.DataObject, stream: StreamId, index: int) -> None:
        low = self.first_offset()
        offset = data.draw(st.integers(max(0, low - 1), max(low + 2, self.next_offset - 3)))
        self.begin(stream, SequenceToken(offset, index))

    def begin(self, stream: StreamId, start: SequenceToken) -> None:
        offset, index = start
        low = self.first_offset()
        found = self.cache.cursor(stream, start)
        upcoming = self.upcoming(stream, offset, self.held)
        if offset < low:
            assert isinstance(found, Gap)
            assert found[:2] == (offset, low)
        elif not upcoming:
            assert found is EMPTY
        else:
            assert isinstance(found, Cursor)
            on = upcoming[0]
            token = SequenceToken(on.offset, index if on.offset == offset else 0)
            self.readers.append(Reader(found, stream, token, on, pinned=True))

    @precondition(lambda self: self.on_a_batch())
    @rule(data=st.data(), steps=st.integers(1, 4))
    def advance(self, data: st.DataObject, steps: int) -> None:
        reader = self.pick(data, self.on_a_batch())
        while reader.on is not None and steps:
            self.step(reader)
            steps -= 1

    @rule()
    def advance_the_slowest(self) -> None:
        """Without it hardly anything would be purged."""
        buckets = self.buckets()
        for reader in self.readers:
            while reader.pinned and reader.on in buckets[0]:
                self.step(reader)

    def step(self, reader: Reader) -> None:
        before, pinned = reader.on, reader.pinned
        assert before is not None
        upcoming = self.upcoming(reader.stream, before.offset + 1, self.held) if pinned else []
        reader.on = upcoming[0] if upcoming else None
        reader.pinned = bool(upcoming)
        reader.next = SequenceToken(reader.on.offset if reader.on else before.offset + 1)
        outcome = reader.cursor.advance()
        if reader.on is None:
            assert outcome is EMPTY
        else:
            assert outcome is reader.cursor.batch
        if pinned:
            self.moved(before)

    @precondition(lambda self: self.on_a_batch())
    @rule(data=st.data())
    def do_some_of_a_batch(self, data: st.DataObject) -> None:
        reader = self.pick(data, self.on_a_batch())
        reader.cursor.index += 1
        reader.next = SequenceToken(reader.next.offset, reader.next.index + 1)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), keep_batch=st.booleans())
    def leave(self, data: st.DataObject, keep_batch: bool) -> None:
        """Release a cursor, or park it; as often as one likes."""
        reader = self.pick(data, self.readers)
        before, pinned, reader.pinned = reader.on, reader.pinned, False
        if keep_batch:
            reader.cursor.release()
        else:
            reader.on = None
            reader.cursor.park()
        if pinned:
            self.moved(before)

    @precondition(lambda self: self.parked())
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        reader = self.pick(data, self.parked())
        offset, index = reader.next
        found = self.cache.first_entry(reader.stream, offset)
        upcoming = self.upcoming(reader.stream, offset, self.held)
        assert (found and found.batch.offset) == (upcoming[0].offset if upcoming else None)
        if found is not None:
            reader.on, reader.pinned = upcoming[0], True
            reader.next = SequenceToken(found.batch.offset, index if found.batch.offset == offset else 0)
            reader.cursor.attach(found, reader.next.index)

    @precondition(lambda self: self.parked())
    @rule(data=st.data(), ahead=st.integers(0, 3), index=st.integers(0, 2))
    def skip(self, data: st.DataObject, ahead: int, index: int) -> None:
        reader = self.pick(data, self.parked())
        reader.next = SequenceToken(reader.next.offset + ahead, index)
        reader.cursor.skip_to(reader.next)

    @precondition(lambda self: len(self.readers) > 3)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reader = self.pick(data, self.readers)
        self.readers.remove(reader)
        reader.cursor.park()
        if reader.pinned:
            self.moved(reader.on)

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def what_a_pinned_cursor_still_needs_is_there_in_order(self) -> None:
        for reader in (reader for reader in self.readers if reader.pinned):
            assert reader.on is not None
            entry, linked = reader.cursor.entry, list[tuple[int, StreamId, int]]()
            while entry is not None:
                assert any(one is entry for one in entry.bucket.entries)
                assert entry.bucket in self.cache.buckets
                linked.append((entry.batch.offset, entry.batch.stream, entry.batch.count))
                entry = entry.following
            needed = self.upcoming(reader.stream, reader.on.offset, self.history)
            assert linked == [(item.offset, item.stream, item.count) for item in needed]

    @invariant()
    def cursors_know_where_they_are(self) -> None:
        for reader in self.readers:
            assert reader.cursor.token == reader.next
            assert (reader.cursor.batch and reader.cursor.batch.offset) == (reader.on and reader.on.offset)
            assert (reader.cursor.bucket is not None) == reader.pinned

    @invariant()
    def the_cache_holds_what_the_model_holds(self) -> None:
        assert [
            (b.offset, b.stream, b.count, len(b.encoded)) for b in (e.batch for e in self.cache.entries_from(0))
        ] == [(item.offset, item.stream, item.count, item.nbytes) for item in self.held]
        assert (self.cache.first_offset, self.cache.next_offset) == (self.first_offset(), self.next_offset)

    @invariant()
    def each_stream_begins_with_its_first_batch(self) -> None:
        for stream in STREAMS:
            found = self.cache.first_entry(stream, 0)
            held = self.upcoming(stream, 0, self.held)
            assert (found and found.batch.offset) == (held[0].offset if held else None)

    @invariant()
    def sums_are_exact(self) -> None:
        statistics = self.cache.statistics()
        assert [tuple(bucket) for bucket in statistics.buckets] == [
            (sum(i.count for i in b), sum(i.charge for i in b), self.pins(b), b[0].offset, b[-1].offset)
            for b in self.buckets()
        ]
        events, size = sum(item.count for item in self.held), sum(item.charge for item in self.held)
        assert (statistics.events, statistics.bytes) == (events, size)
        capacity = BUCKETS * max(1, self.max_events // BUCKETS), BUCKETS * max(1, self.max_bytes // BUCKETS)
        assert self.cache.space == (max(1, capacity[0] - events), max(1, capacity[1] - size))

    @invariant()
    def pressure_is_when_one_more_batch_does_not_fit(self) -> None:
        events, size = sum(item.count for item in self.held), sum(item.charge for item in self.held)
        capacity = BUCKETS * max(1, self.max_events // BUCKETS), BUCKETS * max(1, self.max_bytes // BUCKETS)
        newest = self.history[-1].charge if self.history else 0
        assert self.cache.pressure == (events >= capacity[0] or (size > 0 and size + newest > capacity[1]))

    @invariant()
    def every_last_pin_was_announced(self) -> None:
        assert self.unpinned == self.expected_unpinned


Caches.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestCaches = Caches.TestCase
