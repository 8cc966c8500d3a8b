"""The cache and its cursors, step by step: capacity, purging, pins, links, outcomes, accounting."""

import gc
import weakref
from collections.abc import Iterable
from functools import partial

import pytest

from headrace import EventBatch, SequenceToken, StreamId
from headrace.adapters.receiving import Gap
from headrace.agents.cache import BATCH_OVERHEAD_BYTES, BUCKETS, EMPTY, CacheEntry, Cursor, QueueCache

PLENTY = 1 << 40


class Weak(EventBatch):
    """A batch that can be watched going away."""

    __slots__ = ("__weakref__",)


def stream(key: str) -> StreamId:
    return StreamId("s", key)


def batch(key: str, offset: int, count: int = 1, nbytes: int = 10) -> EventBatch:
    return EventBatch(stream(key), b"x" * nbytes, count, offset)


def charge(of: EventBatch) -> int:
    return len(of.encoded) + BATCH_OVERHEAD_BYTES


def filled(keys: Iterable[str], per_bucket: int = 1, max_bytes: int = PLENTY) -> QueueCache:
    """A cache of one-event batches, one for each of `keys`, with offsets from 0 on."""
    cache = QueueCache(BUCKETS * per_bucket, max_bytes)
    cache.add([batch(key, offset) for offset, key in enumerate(keys)])
    return cache


def at(cache: QueueCache, key: str, offset: int, index: int = 0) -> Cursor:
    cursor = cache.cursor(stream(key), SequenceToken(offset, index))
    assert isinstance(cursor, Cursor)
    return cursor


def offsets(batches: Iterable[EventBatch]) -> list[int]:
    return [one.offset for one in batches]


def batches_of(entries: Iterable[CacheEntry]) -> list[EventBatch]:
    return [entry.batch for entry in entries]


def bucket_offsets(cache: QueueCache) -> list[list[int]]:
    return [offsets(batches_of(bucket.entries)) for bucket in cache.buckets]


def pins(cache: QueueCache) -> list[int]:
    return [bucket.pins for bucket in cache.statistics().buckets]


def rest(cursor: Cursor) -> list[int]:
    """Offsets of the batch the cursor stands on and of all it steps to, until it is empty."""
    assert cursor.batch is not None
    passed = [cursor.batch.offset]
    while (following := cursor.advance()) is not EMPTY:
        passed.append(following.offset)
    return passed


def counted(cache: QueueCache) -> list[list[int]]:
    """Filled with the pins of all buckets whenever the cache says that a bucket's last pin is gone."""
    calls: list[list[int]] = []
    cache.on_unpinned = lambda: calls.append(pins(cache))
    return calls


# ---- capacity and pressure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_events", "under_pressure_at"), [(10, 10), (20, 20), (100, 100), (1000, 1000), (4096, 4090)]
)
def test_pressure_begins_with_the_event_that_fills_the_tenth_bucket(max_events: int, under_pressure_at: int) -> None:
    cache = QueueCache(max_events, PLENTY)
    for offset in range(under_pressure_at):
        assert not cache.pressure, f"pressure at {offset} events"
        cache.add([batch("a", offset)])
    assert cache.pressure
    assert [len(bucket.entries) for bucket in cache.buckets] == [under_pressure_at // 10] * 10


def test_pressure_begins_with_the_byte_that_fills_the_tenth_bucket() -> None:
    size = BATCH_OVERHEAD_BYTES + 100
    cache = QueueCache(1_000_000, 10 * 2 * size)  # two batches a bucket
    for offset in range(20):
        assert not cache.pressure, f"pressure at {offset} batches"
        cache.add([batch("a", offset, nbytes=100)])
    assert cache.pressure
    assert [len(bucket.entries) for bucket in cache.buckets] == [2] * 10


def test_large_batches_do_not_exceed_the_bytes() -> None:
    cache = QueueCache(1_000_000, 10_000)
    cache.add([batch("a", 0, nbytes=4000)])
    assert not cache.pressure
    cache.add([batch("a", 1, nbytes=4000)])
    assert cache.pressure


def test_a_bucket_that_lacks_one_byte_takes_one_more_batch() -> None:
    cache = QueueCache(1_000_000, 10 * (BATCH_OVERHEAD_BYTES + 100))
    cache.add([batch("a", 0, nbytes=99), batch("a", 1), batch("a", 2)])
    assert bucket_offsets(cache) == [[0, 1], [2]]


def test_small_events_count_with_what_is_around_them() -> None:
    cache = QueueCache(1_000_000, 10 * BATCH_OVERHEAD_BYTES)
    cache.add([batch("a", offset, nbytes=0) for offset in range(10)])
    assert cache.pressure
    assert cache.bytes == 10 * BATCH_OVERHEAD_BYTES


def test_a_batch_is_never_split_and_exceeds_its_bucket() -> None:
    cache = QueueCache(20, PLENTY)
    cache.add([batch("a", 0), batch("a", 1, count=50), batch("a", 2)])
    assert bucket_offsets(cache) == [[0, 1], [2]]
    assert [bucket.events for bucket in cache.buckets] == [51, 1]


def test_pressure_ends_when_the_oldest_bucket_goes() -> None:
    cache = filled("ab" * 5)
    pin = at(cache, "b", 1)
    assert cache.pressure
    assert cache.purge() == 1
    assert not cache.pressure
    assert pin.batch is not None


@pytest.mark.parametrize("max_events", [0, 1, 9])
def test_a_bucket_holds_at_least_one_event(max_events: int) -> None:
    cache = QueueCache(max_events, PLENTY)
    cache.add([batch("a", offset) for offset in range(10)])
    assert cache.pressure
    assert bucket_offsets(cache) == [[offset] for offset in range(10)]


def test_room_is_what_is_left_of_both_limits() -> None:
    cache = QueueCache(100, 100_000)
    assert cache.space == (100, 100_000)
    cache.add([batch("a", 0, count=30, nbytes=200), batch("b", 1, count=5, nbytes=50)])
    assert cache.space == (65, 100_000 - 250 - 2 * BATCH_OVERHEAD_BYTES)


def test_room_is_at_least_one_event_and_one_byte() -> None:
    cache = QueueCache(10, 1000)
    cache.add([batch("a", 0, count=500, nbytes=5000)])
    assert cache.pressure
    assert cache.space == (1, 1)


def test_large_batches_exceed_the_capacity_by_one_batch_in_all() -> None:
    cache, large = QueueCache(1_000_000, 100_000), 60_000
    offset = 0
    while not cache.pressure:
        cache.add([batch("a", offset, nbytes=large)])
        offset += 1
    assert cache.bytes < 100_000 + large + BATCH_OVERHEAD_BYTES


def test_room_comes_back_with_a_purge() -> None:
    cache = filled("aaaaaaaaaa", max_bytes=100_000)
    cache.purge()
    assert cache.space == (10, 100_000)


# ---- purging and pins ----------------------------------------------------------------------------------------------


def test_all_full_buckets_go_when_nobody_needs_them() -> None:
    cache = filled("aaaaaa", per_bucket=2)
    assert cache.purge() == 3
    assert not cache.buckets


def test_the_newest_bucket_stays_while_it_fills() -> None:
    cache = filled("aaaaa", per_bucket=2)
    assert cache.purge() == 2
    assert bucket_offsets(cache) == [[4]]
    assert cache.purge() == 0
    cache.add([batch("a", 5)])
    assert cache.purge() == 1
    assert cache.purge() == 0


def test_nothing_newer_than_a_pinned_bucket_goes() -> None:
    cache = filled("abcdefgh", per_bucket=2)
    at(cache, "d", 3)
    assert cache.purge() == 1
    assert bucket_offsets(cache) == [[2, 3], [4, 5], [6, 7]]
    assert cache.purge() == 0


def test_a_slow_cursor_pins_its_own_bucket_and_no_other() -> None:
    cache = filled("abcdefgh", per_bucket=2)
    slow = at(cache, "d", 3)
    assert pins(cache) == [0, 1, 0, 0]
    slow.park()
    assert pins(cache) == [0, 0, 0, 0]
    assert cache.purge() == 4


def test_each_cursor_counts_in_the_bucket_it_stands_in() -> None:
    cache = filled("abaabb", per_bucket=2)
    first, second, third = at(cache, "a", 0), at(cache, "b", 1), at(cache, "b", 4)
    assert pins(cache) == [2, 0, 1]
    first.advance()
    assert pins(cache) == [1, 1, 1]
    second.advance()
    assert pins(cache) == [0, 1, 2]
    third.advance()
    assert pins(cache) == [0, 1, 2]
    assert cache.purge() == 1


def test_steps_within_a_bucket_leave_its_pin() -> None:
    cache = filled("aaab", per_bucket=2)
    calls = counted(cache)
    cursor = at(cache, "a", 0)
    cursor.advance()
    assert pins(cache) == [1, 0]
    assert not calls


def test_the_last_pin_of_a_bucket_is_announced_and_no_other() -> None:
    cache = filled("aabb", per_bucket=2)
    calls = counted(cache)
    one, two = at(cache, "a", 0), at(cache, "a", 1)
    one.park()
    assert calls == []
    two.release()
    assert calls == [[0, 0]]
    two.park()
    assert calls == [[0, 0]], "a released cursor has no pin to give back"


def test_a_step_to_another_bucket_announces_the_one_it_left_with_the_new_one_pinned() -> None:
    cache = filled("aa")
    calls = counted(cache)
    at(cache, "a", 0).advance()
    assert calls == [[0, 1]]


def test_the_step_past_the_end_announces_the_last_bucket() -> None:
    cache = filled("ab", per_bucket=2)
    calls = counted(cache)
    assert at(cache, "a", 0).advance() is EMPTY
    assert calls == [[0]]


def test_a_purge_on_the_last_pin_leaves_what_the_cursor_steps_to() -> None:
    cache = filled("aba")

    def purge() -> None:
        cache.purge()

    cache.on_unpinned = purge
    cursor = at(cache, "a", 0)
    following = cursor.advance()
    assert following is cursor.batch
    assert bucket_offsets(cache) == [[2]]
    assert cursor.advance() is EMPTY
    assert not cache.buckets


# ---- cursors -------------------------------------------------------------------------------------------------------


def test_a_cursor_steps_over_the_batches_of_other_streams() -> None:
    cache = filled("abcabbcca", per_bucket=2)
    assert {key: rest(at(cache, key, 0)) for key in "abc"} == {"a": [0, 3, 8], "b": [1, 4, 5], "c": [2, 6, 7]}


def test_streams_differ_where_the_slash_does() -> None:
    cache = QueueCache(100, PLENTY)
    one, other = StreamId("a", "b/c"), StreamId("a/b", "c")
    cache.add([EventBatch(one, b"", 1, 0), EventBatch(other, b"", 1, 1)])
    found = cache.cursor(other, SequenceToken(0))
    assert isinstance(found, Cursor)
    assert rest(found) == [1]


def test_a_cursor_sees_what_is_added_while_it_stands() -> None:
    cache = filled("a")
    cursor = at(cache, "a", 0)
    cache.add([batch("b", 1), batch("a", 2)])
    cache.add([batch("a", 3)])
    assert rest(cursor) == [0, 2, 3]


def test_a_cursor_that_ran_empty_does_not_see_what_comes_later() -> None:
    cache = filled("a")
    cursor = at(cache, "a", 0)
    assert cursor.advance() is EMPTY
    cache.add([batch("a", 1)])
    assert cursor.batch is None
    assert pins(cache) == [0, 0]


def test_a_cursor_starts_at_the_first_batch_at_or_after_its_token() -> None:
    cache = filled("abba")
    assert rest(at(cache, "a", 0)) == [0, 3]
    assert rest(at(cache, "a", 1)) == [3]


def test_a_start_within_a_batch_keeps_its_index() -> None:
    cache = QueueCache(100, PLENTY)
    cache.add([batch("a", 0, count=5), batch("a", 1, count=5)])
    cursor = at(cache, "a", 0, index=3)
    assert cursor.token == (0, 3)
    cursor.advance()
    assert cursor.token == (1, 0)


def test_the_index_of_another_streams_batch_means_nothing() -> None:
    cache = filled("ba")
    assert at(cache, "a", 0, index=3).token == (1, 0)


def test_empty_where_the_stream_has_nothing_yet() -> None:
    cache = filled("ab")
    assert cache.cursor(stream("c"), SequenceToken(0)) is EMPTY
    assert cache.cursor(stream("a"), SequenceToken(1)) is EMPTY
    assert cache.cursor(stream("a"), SequenceToken(2)) is EMPTY
    assert pins(cache) == [0, 0]


def test_gap_where_the_cache_no_longer_reaches_back() -> None:
    cache = filled("abab")
    at(cache, "a", 2)
    cache.purge()
    assert cache.cursor(stream("a"), SequenceToken(1)) == Gap(1, 2, "no longer in the cache")
    assert cache.cursor(stream("unknown"), SequenceToken(0)) == Gap(0, 2, "no longer in the cache")
    assert rest(at(cache, "a", 2)) == [2]


def test_gap_below_the_start_of_a_cache_that_is_empty() -> None:
    cache = filled("aa")
    cache.purge()
    assert isinstance(cache.cursor(stream("a"), SequenceToken(1)), Gap)
    assert cache.cursor(stream("a"), SequenceToken(2)) is EMPTY


def test_the_token_at_each_stage() -> None:
    cache = QueueCache(100, PLENTY)
    cache.add([batch("a", 4, count=5), batch("b", 5), batch("a", 7, count=2)])
    cursor = at(cache, "a", 4, index=1)
    assert cursor.token == SequenceToken(4, 1)
    cursor.index = 3
    assert cursor.token == SequenceToken(4, 3)
    cursor.advance()
    assert cursor.token == SequenceToken(7, 0)
    cursor.index = 1
    cursor.release()
    assert cursor.token == SequenceToken(7, 1)
    cursor.park()
    assert cursor.token == SequenceToken(7, 1)
    cursor.skip_to(SequenceToken(9, 2))
    assert cursor.token == SequenceToken(9, 2)


def test_the_token_after_the_last_batch_is_the_next_offset() -> None:
    cache = QueueCache(100, PLENTY)
    cache.add([batch("a", 4, count=5)])
    cursor = at(cache, "a", 4, index=4)
    cursor.advance()
    assert cursor.token == SequenceToken(5, 0)


def test_a_released_cursor_keeps_its_batch_while_the_cache_moves_on() -> None:
    cache = filled("aab")
    cursor = at(cache, "a", 0)
    held = cursor.batch
    cursor.release()
    assert cache.purge() == 3
    assert cursor.batch is held
    assert cursor.token == (0, 0)


def test_a_released_cursor_does_not_step_into_the_cache() -> None:
    cache = filled("aa")
    calls = counted(cache)
    cursor = at(cache, "a", 0)
    cursor.release()
    calls.clear()
    assert cursor.advance() is EMPTY
    assert (cursor.batch, cursor.token) == (None, (1, 0))
    assert pins(cache) == [0, 0]
    assert not calls


def test_a_parked_cursor_goes_on_where_it_left() -> None:
    cache = filled("abaa")
    cursor = at(cache, "a", 0)
    cursor.advance()
    cursor.park()
    assert cursor.batch is None
    found = cache.first_entry(stream("a"), cursor.token.offset)
    assert found is not None
    cursor.attach(found)
    assert pins(cache) == [0, 0, 1, 0]
    assert rest(cursor) == [2, 3]


def test_a_cursor_attaches_within_a_batch() -> None:
    cache = QueueCache(100, PLENTY)
    cache.add([batch("a", 0, count=5)])
    cursor = at(cache, "a", 0)
    cursor.park()
    cursor.attach(cache.entries_from(0)[0], 2)
    assert cursor.token == (0, 2)


def test_parking_twice_gives_back_one_pin() -> None:
    cache = filled("a")
    at(cache, "a", 0)
    cursor = at(cache, "a", 0)
    cursor.park()
    cursor.park()
    assert pins(cache) == [1]


# ---- contents ------------------------------------------------------------------------------------------------------


def test_the_first_batch_at_or_after_an_offset() -> None:
    cache = filled("abaab")
    found = [cache.first_entry(stream("a"), offset) for offset in range(5)]
    assert [entry and entry.batch.offset for entry in found] == [0, 2, 2, 3, None]
    assert cache.first_entry(stream("c"), 0) is None


def test_the_first_batch_after_a_purge_is_one_that_is_there() -> None:
    cache = filled("aabab")
    at(cache, "b", 2)
    cache.purge()
    found = cache.first_entry(stream("a"), 0)
    assert found is not None
    assert found.batch.offset == 3


def test_a_stream_that_was_purged_begins_anew() -> None:
    cache = filled("aab")
    at(cache, "b", 2)
    cache.purge()
    assert cache.first_entry(stream("a"), 0) is None
    cache.add([batch("a", 3), batch("a", 4)])
    assert rest(at(cache, "a", 2)) == [3, 4]


def test_a_stream_that_was_purged_leaves_nothing_behind() -> None:
    cache = QueueCache(BUCKETS, PLENTY)
    watched = [weakref.ref(entry.batch) for entry in cache.add([Weak(stream(str(n)), b"", 1, n) for n in range(1000)])]
    assert cache.purge() == 1000
    gc.collect()
    assert not any(ref() for ref in watched)


def test_all_batches_from_an_offset_on() -> None:
    cache = filled("abcab", per_bucket=2)
    assert offsets(batches_of(cache.entries_from(0))) == [0, 1, 2, 3, 4]
    assert offsets(batches_of(cache.entries_from(3))) == [3, 4]
    assert offsets(batches_of(cache.entries_from(5))) == []
    cache.purge()
    assert offsets(batches_of(cache.entries_from(0))) == [4]


def test_the_first_offset_is_the_oldest_batch_or_else_the_next_offset() -> None:
    cache = QueueCache(10, PLENTY)
    assert (cache.first_offset, cache.next_offset) == (0, 0)
    cache.next_offset = 5
    assert cache.first_offset == 5
    cache.add([batch("a", 7), batch("a", 9)])
    assert (cache.first_offset, cache.next_offset) == (7, 10)
    cache.purge()
    assert (cache.first_offset, cache.next_offset) == (10, 10)


def test_the_queue_may_have_been_read_further_than_the_last_batch() -> None:
    cache = QueueCache(10, PLENTY)
    cache.add([batch("a", 7)], next_offset=12)
    assert cache.next_offset == 12
    cache.add([], next_offset=15)
    assert cache.next_offset == 15
    cache.add([], next_offset=3)
    assert cache.next_offset == 15
    cache.add([batch("a", 20)], next_offset=4)
    assert cache.next_offset == 21


def test_nothing_added_is_nothing_changed() -> None:
    cache = QueueCache(10, PLENTY)
    cache.add([])
    assert (cache.events, cache.bytes, cache.next_offset, len(cache.buckets)) == (0, 0, 0, 0)


# ---- accounting and memory -----------------------------------------------------------------------------------------


def test_events_and_bytes_are_exact_after_adding_and_purging() -> None:
    cache = QueueCache(50, PLENTY)  # five events a bucket
    batches = [batch("ab"[n % 2], n, count=n % 4 + 1, nbytes=n * 7) for n in range(20)]
    cache.add(batches[:12])
    cache.add(batches[12:])
    assert cache.events == sum(one.count for one in batches)
    assert cache.bytes == sum(map(charge, batches))
    at(cache, "a", 10)
    cache.purge()
    left = batches_of(cache.entries_from(0))
    assert 0 < len(left) < len(batches)
    assert cache.events == sum(one.count for one in left)
    assert cache.bytes == sum(map(charge, left))


def test_the_statistics_say_what_is_in_each_bucket() -> None:
    cache = QueueCache(40, 80_000)
    batches = [batch("a", 3, count=2), batch("b", 4, count=3, nbytes=77), batch("a", 9, nbytes=0)]
    cache.add(batches)
    at(cache, "a", 3)
    at(cache, "b", 3)
    first, second = charge(batches[0]) + charge(batches[1]), charge(batches[2])
    statistics = cache.statistics()
    assert [tuple(bucket) for bucket in statistics.buckets] == [(5, first, 2, 3, 4), (1, second, 0, 9, 9)]
    assert statistics[1:] == (6, first + second, 40, 80_000, False)


def test_the_statistics_tell_of_pressure() -> None:
    assert filled("a" * 10).statistics().pressure
    assert not filled("a" * 9).statistics().pressure


def test_a_purged_batch_does_not_keep_the_later_ones_alive() -> None:
    cache = QueueCache(10, PLENTY)
    held, *others = batches_of(cache.add([Weak(stream("a"), b"", 1, offset) for offset in range(5)]))
    watched = [weakref.ref(one) for one in others]
    del others
    gc.disable()  # to be freed at once, not when a collection comes by
    try:
        assert cache.purge() == 5
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()
    assert held.offset == 0


def test_a_purged_batch_does_not_keep_the_others_of_its_bucket_alive() -> None:
    cache = QueueCache(30, PLENTY)
    held, *others = batches_of(cache.add([Weak(stream(key), b"", 1, offset) for offset, key in enumerate("abc")]))
    watched = [weakref.ref(one) for one in others]
    del others
    gc.disable()
    try:
        assert cache.purge() == 1
        assert [ref() for ref in watched] == [None] * 2
    finally:
        gc.enable()
    assert held.offset == 0


def test_a_reader_that_keeps_to_the_room_is_stopped_at_the_limit() -> None:
    cache = QueueCache(4096, PLENTY)
    cache.add([batch("a", offset) for offset in range(cache.space[0])])
    assert cache.pressure
    assert cache.events == BUCKETS * (4096 // BUCKETS)


def test_there_is_pressure_also_when_one_receive_went_past_the_tenth_bucket() -> None:
    cache = QueueCache(100, PLENTY)
    cache.add([batch("a", offset) for offset in range(101)])
    assert cache.pressure


@pytest.mark.long
def test_a_long_stream_is_freed_without_recursion() -> None:
    cache = QueueCache(200_000, PLENTY)
    watched = weakref.ref(cache.add([Weak(stream("a"), b"", 1, offset) for offset in range(100_000)])[-1].batch)
    del cache
    gc.collect()
    assert watched() is None


def test_a_batch_does_not_know_where_it_is_cached() -> None:
    (one,) = made = [batch("a", 0)]
    first, second = QueueCache(10, PLENTY), QueueCache(10, PLENTY)
    mine, other = first.add(made), second.add(made)
    second.purge()
    second.add([batch("a", 1)])
    assert [entry.batch is one for entry in (*mine, *other)] == [True, True]
    assert rest(at(first, "a", 0)) == [0]


def test_a_closed_cache_is_freed_without_garbage_collection() -> None:
    cache = QueueCache(100, 1 << 20)
    cache.on_unpinned = partial(print, cache)  # as with a feed: the cache refers to itself
    cache.add([EventBatch(StreamId("s", "a"), b"", 1, offset) for offset in range(30)])
    freed = weakref.ref(cache)
    gc.disable()
    try:
        cache.close()
        del cache
        assert freed() is None
    finally:
        gc.enable()
