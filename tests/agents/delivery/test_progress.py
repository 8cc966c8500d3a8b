"""Which events the progress calls done."""

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st

from headrace import CorruptRecord, EventBatch, SequenceToken
from headrace.agents import QueueCache
from headrace.agents.delivery.offered_streams import LOOK_AHEAD
from headrace.agents.delivery.progress import DeliveryProgress
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.agents.delivery.test_progress_model import Reader
from tests.simulation.deliveries import stream

positions = st.integers(0, 4)
tokens = st.builds(SequenceToken, positions, st.integers(0, 3))
stored_ranges = st.lists(st.tuples(positions, st.integers(0, 3), st.integers(1, 4)), max_size=4)


@given(
    st.integers(0, 5),
    st.none() | st.builds(StreamBehind, tokens, st.just(""), stored_ranges),
    positions,
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_events_are_done_exactly_if_a_checkpoint_says_so(
    position: int, at: StreamBehind | None, offset: int, first: int, count: int
) -> None:
    key = stream("a")
    progress = DeliveryProgress(Checkpoint(position, {} if at is None else {key: at}))

    def is_done(event: tuple[int, int]) -> bool:
        if at is None:
            return event[0] < position
        return event < at.token or any(event[0] == o and low <= event[1] < high for o, low, high in at.done)

    named = [(offset, index) for index in range(first, first + count)]
    assert progress.is_done(key, offset, first, first + count) == all(map(is_done, named))
    assert progress.is_done(stream("other"), offset, first, first + count) == (offset < position)


def read(feed: Reader, *keys: str) -> list[EventBatch]:
    """`feed` reads batches of two events of these streams, from where it is."""
    first = feed.cache.next_offset
    batches = [EventBatch(stream(key), b"", 2, first + number) for number, key in enumerate(keys)]
    feed.cache.add(batches, first + len(keys))
    return batches


def offer(progress: DeliveryProgress, feed: Reader, *keys: str) -> None:
    first = feed.cache.next_offset
    read(feed, *keys)
    progress.offer(feed, feed.cache.entries_from(first))
    progress.read_on(feed)


def behind(offset: int, index: int = 0, paused: str = "", *done: tuple[int, int, int]) -> StreamBehind:
    return StreamBehind(SequenceToken(offset, index), paused, done)


def test_a_feed_that_starts_again_behind_the_position_does_not_move_it_back() -> None:
    progress, feed = DeliveryProgress(Checkpoint(5, {stream("a"): behind(1)})), Reader(1)
    progress.join(feed)
    assert progress.position == 5
    offer(progress, feed, "a", "b")
    assert progress.position == 5
    assert [cursor.stream for cursor in progress.ready] == [stream("a")], "what is below the position is done"


def test_a_stream_ahead_of_its_feed_stays_where_it_is() -> None:
    """A catch-up may have brought it further than a feed that started again."""
    at = {stream("a"): behind(4, 1), stream("b"): behind(1)}
    progress, feed = DeliveryProgress(Checkpoint(3, at)), Reader(1)
    progress.join(feed)
    cursor = progress.cursors[stream("a")]
    assert progress.needed(cursor) == (4, 1)
    assert progress.watermark == 1
    assert progress.checkpoint() == Checkpoint(3, at)
    offer(progress, feed, "b", "x", "x", "a")
    assert progress.cursors[stream("a")].token == (4, 1)
    assert not progress.cursors[stream("b")].batch or progress.cursors[stream("b")].token == (1, 0)
    progress.leave_feed()
    progress.leave_parked(feed)
    assert progress.checkpoint().behind[stream("a")].token == (4, 1)


def test_the_watermark_is_never_above_the_position() -> None:
    progress = DeliveryProgress(Checkpoint(3, {stream("a"): behind(7)}))
    assert progress.watermark == 3
    assert progress.oldest_unread == 3


def test_a_feed_for_the_delivery_begins_at_the_slowest_stream() -> None:
    assert DeliveryProgress(Checkpoint(3, {stream("a"): behind(1)})).oldest_unread == 1
    assert DeliveryProgress(Checkpoint(3, {stream("a"): behind(9)})).oldest_unread == 3


def test_paused_streams_do_not_keep_others_from_being_up_to_date() -> None:
    progress = DeliveryProgress(Checkpoint(3, {stream("a"): behind(1, 0, "poison")}))
    assert progress.reached(3)
    assert not progress.reached(4)
    assert not DeliveryProgress(Checkpoint(3, {stream("a"): behind(1)})).reached(3)
    assert DeliveryProgress(Checkpoint(3, {stream("a"): behind(3)})).reached(3)


def test_a_checkpoint_keeps_everything_about_a_stream_at_the_position() -> None:
    """It may be paused there, have events that are done out of order, or be ahead."""
    for at in (behind(3, 0, "poison"), behind(3, 0, "", (3, 1, 2)), behind(4), behind(3, 1)):
        checkpoint = Checkpoint(3, {stream("a"): at})
        assert DeliveryProgress(checkpoint).checkpoint() == checkpoint


def test_a_feed_that_has_read_on_already_brings_its_batches() -> None:
    progress, feed = DeliveryProgress(Checkpoint(2, {stream("b"): behind(0)})), Reader(0)
    read(feed, "b", "a", "a", "c")
    progress.join(feed)
    assert {cursor.stream: cursor.token for cursor in progress.ready} == {
        stream("a"): (2, 0), stream("c"): (3, 0), stream("b"): (0, 0)
    }  # fmt: skip


def test_a_stream_ahead_of_the_batches_in_the_cache_gets_no_earlier_ones_when_the_feed_joins() -> None:
    progress, feed = DeliveryProgress(Checkpoint(0, {stream("a"): behind(2)})), Reader(0)
    read(feed, "a", "a")
    progress.join(feed)
    assert not progress.ready
    offer(progress, feed, "a")
    assert [cursor.token for cursor in progress.ready] == [(2, 0)]


def test_streams_that_are_not_selected_get_no_cursor() -> None:
    progress, feed = DeliveryProgress(Checkpoint(0), lambda each: each != stream("a")), Reader(0)
    progress.join(feed)
    offer(progress, feed, "a", "b")
    assert list(progress.cursors) == [stream("b")]


def test_a_finished_stream_is_forgotten_as_soon_as_its_next_batch_would_be_new() -> None:
    """Not before: a cursor that is ahead, or within a batch, or has events done behind it, is still needed."""
    for at in (behind(5), behind(3, 1), behind(3, 0, "", (4, 0, 1)), behind(3, 0, "", (3, 1, 2))):
        progress, feed = DeliveryProgress(Checkpoint(3, {stream("a"): at})), Reader(2)
        progress.join(feed)
        offer(progress, feed, "b")
        assert progress.checkpoint() == Checkpoint(3, {stream("a"): at})
    progress, feed = DeliveryProgress(Checkpoint(3, {stream("a"): behind(3)})), Reader(1)
    progress.join(feed)
    offer(progress, feed, "b")
    assert stream("a") in progress.cursors, "the feed has not reached the position"
    offer(progress, feed, "b")
    assert stream("a") not in progress.cursors


def test_a_stream_between_two_batches_of_the_cache_goes_on_at_the_second_one() -> None:
    progress, feed = DeliveryProgress(Checkpoint(2, {stream("a"): behind(0, 2)})), Reader(0)
    read(feed, "a", "a")
    progress.join(feed)
    assert [cursor.token for cursor in progress.ready] == [(1, 0)]


def test_marks_below_the_position_of_a_stream_are_dropped_when_it_goes_on() -> None:
    progress, feed = DeliveryProgress(Checkpoint(3, {stream("a"): behind(0, 0, "", (0, 1, 2), (1, 0, 1))})), Reader(0)
    progress.join(feed)
    progress.skip(2)
    offer(progress, feed, "b", "b", "a")
    assert progress.cursors[stream("a")].token == (2, 0)
    assert progress.cursors[stream("a")].done is None


def test_a_dropped_beginning_moves_only_the_streams_behind_it() -> None:
    at = {stream("a"): behind(1, 1), stream("b"): behind(4)}
    progress = DeliveryProgress(Checkpoint(5, at))
    progress.skip(3)
    assert progress.checkpoint() == Checkpoint(5, {stream("a"): behind(3), stream("b"): behind(4)})


def test_the_progress_stays_where_it_is_when_it_ends() -> None:
    progress, feed = DeliveryProgress(Checkpoint(4, {stream("a"): behind(3, 0, "", (6, 0, 1))})), Reader(3)
    progress.join(feed)
    offer(progress, feed, "b", "b")
    before = progress.checkpoint()
    assert before.behind[stream("a")].token == (5, 0), "nothing of the stream was there"
    progress.end()
    assert progress.checkpoint() == before


def changes(progress: DeliveryProgress) -> tuple[int, int]:
    return progress.changes, progress.position


def test_each_change_of_the_checkpoint_counts() -> None:
    """Otherwise it is not saved."""
    done_ahead = behind(1, 0, "", (9, 0, 1))
    progress, feed, catch_up = DeliveryProgress(Checkpoint(5, {stream("a"): done_ahead})), Reader(1), Reader(1)
    cursor = progress.cursors[stream("a")]

    def changed(step: Callable[[], object]) -> bool:
        before, stood = progress.checkpoint(), changes(progress)
        step()
        assert progress.checkpoint() != before, "the test needs a change"
        return changes(progress) != stood

    progress.await_batch(cursor, catch_up)
    assert changed(lambda: offer(progress, catch_up, "b")), "a catch-up found nothing of the stream"
    assert changed(lambda: progress.skip(1) or catch_up.cache.add([], 3) or progress.read_on(catch_up))
    progress.leave_parked(catch_up)
    assert progress.cursors[stream("a")].token == (3, 0)
    assert changed(lambda: progress.skip(4))
    read(feed, "x", "x", "x", "x")
    assert changed(lambda: progress.join(feed)), "a feed that is behind the position brings nothing of the stream"


def test_a_damaged_record_is_met_when_everything_before_it_is_done() -> None:
    progress, feed = DeliveryProgress(Checkpoint(0)), Reader(0)
    progress.join(feed)
    offer(progress, feed, "a")
    for place in ("feed", "catch-up"):
        damage = CorruptRecord(0, 1, place)
        if place == "feed":
            feed.damage = damage
        else:
            feed.damage = None
            progress.stop_at(damage)
        cursor = progress.take()
        if cursor is not None:
            assert progress.met_damage() is None, "an event before it is not done"
            progress.finish(cursor)
        found = progress.met_damage()
        assert found is not None
        assert str(found) == str(damage)
    progress.pass_damage(1)
    assert progress.met_damage() is not None, "the record itself was not read"
    progress.pass_damage(2)
    assert progress.met_damage() is None


def with_streams(count: int) -> tuple[DeliveryProgress, Reader]:
    """Progress that was offered a batch of each stream, and its feed."""
    feed = Reader(0)
    feed.cache = QueueCache(10_000, 1 << 30)
    progress = DeliveryProgress(Checkpoint(0))
    progress.join(feed)
    publish(progress, feed, (str(number) for number in range(count)))
    return progress, feed


def publish(progress: DeliveryProgress, feed: Reader, keys: Iterable[str]) -> None:
    start = feed.cache.next_offset
    batches = [EventBatch(stream(key), b"", 1, offset) for offset, key in enumerate(keys, start)]
    progress.offer(feed, feed.cache.add(batches))
    progress.read_on(feed)


def test_a_subscription_that_takes_nothing_has_few_cursors_however_many_streams_there_are() -> None:
    progress, feed = with_streams(1000)
    publish(progress, feed, map(str, range(1000, 2000)))
    assert len(progress.cursors) == LOOK_AHEAD
    checkpoint = progress.checkpoint()
    assert (checkpoint.next_offset, len(checkpoint.behind)) == (LOOK_AHEAD, LOOK_AHEAD)
    taken: list[str] = []
    while (cursor := progress.take()) is not None:
        taken.append(cursor.stream.key)
        progress.finish(cursor)
        assert len(progress.cursors) <= 2 * LOOK_AHEAD
    assert taken == [str(number) for number in range(2000)]
    assert progress.checkpoint() == Checkpoint(2000)


def test_streams_with_ever_more_events_do_not_keep_others_waiting() -> None:
    progress, feed = with_streams(100)
    hot, seen = [str(number) for number in range(LOOK_AHEAD)], set[str]()
    for _ in range(40):
        publish(progress, feed, hot)
        for _ in range(LOOK_AHEAD):
            cursor = progress.take()
            assert cursor is not None
            seen.add(cursor.stream.key)
            progress.finish(cursor)
    assert len(seen) == 100


def test_a_subscription_that_parts_with_a_feed_reads_the_rest_again() -> None:
    progress, _ = with_streams(100)
    taken = [progress.take() for _ in range(10)]
    progress.part()
    assert len(progress.cursors) <= len(taken) + 2 * LOOK_AHEAD
    rest = Reader(progress.base)
    progress.join(rest)
    publish(progress, rest, map(str, range(progress.base, 100)))
    for cursor in taken:
        assert cursor is not None
        progress.finish(cursor)
    while (cursor := progress.take()) is not None:
        taken.append(cursor)
        progress.finish(cursor)
    assert [cursor.stream.key for cursor in taken if cursor] == [str(number) for number in range(100)]


def test_attempts_to_hand_out_the_same_stream_bring_no_cursors_for_others() -> None:
    progress, _ = with_streams(100)
    for _ in range(100):
        cursor = progress.take()
        assert cursor is not None
        progress.put_back(cursor)
    assert len(progress.cursors) == LOOK_AHEAD


def test_catch_ups_that_are_cut_short_bring_no_more_cursors_each_time() -> None:
    progress, _ = with_streams(100)
    for _ in range(10):
        feed = progress.feed
        assert isinstance(feed, Reader)
        progress.leave_feed()
        for cursor in list(progress.cursors.values()):
            progress.detach(cursor)
        again = Reader(0)
        again.cache = QueueCache(10_000, 1 << 30)
        progress.join(again)
        for cursor in progress.without_feed():
            progress.await_batch(cursor, again)
        publish(progress, again, (str(number) for number in range(100)))
        cursor = progress.take()
        assert cursor is not None
        progress.put_back(cursor)
    assert len(progress.cursors) <= 2 * LOOK_AHEAD
