"""Which checkpoints have to be saved: one that still holds is not made again."""

from hypothesis import given
from hypothesis import strategies as st

from headrace import CorruptRecord, EventBatch, SequenceToken
from headrace.agents import Delivery, QueueCache
from headrace.agents.cursor import StreamCursor
from headrace.agents.delivery.progress import ENTRIES_PER_S, HELD_BACK_S, MAX_ENTRIES, DeliveryProgress, UnsavedProgress
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.agents.circle import Circle
from tests.agents.line import stream
from tests.simulation.virtual_time import virtual_time


class Source:
    caught_up = True

    def __init__(self, next_offset: int = 0) -> None:
        self.cache = QueueCache(1_000_000, 1 << 30)
        self.cache.next_offset = next_offset
        self.damage: CorruptRecord | None = None

    def drained(self, delivery: Delivery, cursor: StreamCursor) -> None: ...


def behind(count: int) -> Checkpoint:
    """So many streams wait at the beginning of a queue that was read up to their number."""
    return Checkpoint(count, {stream(str(number)): StreamBehind(SequenceToken(number)) for number in range(count)})


def opened(checkpoint: Checkpoint) -> tuple[DeliveryProgress, Source]:
    progress, feed = DeliveryProgress(checkpoint), Source(checkpoint.next_offset)
    progress.join(feed)
    return progress, feed


def save(progress: DeliveryProgress, now: float = 0.0) -> UnsavedProgress:
    unsaved = progress.unsaved(now)
    assert unsaved is not None
    unsaved.note_saved()
    return unsaved


def publish(progress: DeliveryProgress, feed: Source, key: str) -> None:
    """An event that nobody takes."""
    batch = EventBatch.of(stream(key), [b""])
    batch.offset = feed.cache.next_offset
    (entry,) = feed.cache.add([batch])
    progress.cursors[batch.stream] = StreamCursor(batch.stream, feed, entry)
    progress.read_on(feed)


def test_progress_is_unsaved_until_it_is_said_to_be_stored() -> None:
    progress, _ = opened(behind(3))
    assert progress.unsaved(0.0) == progress.unsaved(0.0)
    save(progress)
    assert progress.unsaved(0.2) is None


def test_what_changes_while_it_is_stored_is_unsaved() -> None:
    progress, _ = opened(behind(3))
    unsaved = progress.unsaved(0.0)
    assert unsaved is not None
    progress.skip(progress.cursors[stream("1")], SequenceToken(2))
    unsaved.note_saved()
    assert save(progress).checkpoint.behind[stream("1")] == StreamBehind(SequenceToken(2))


def test_a_position_that_moves_is_unsaved() -> None:
    progress, feed = opened(behind(3))
    save(progress)
    publish(progress, feed, "new")
    assert save(progress).checkpoint == Checkpoint(
        4, {**behind(3).behind, stream("new"): StreamBehind(SequenceToken(3))}
    )


def test_after_a_large_checkpoint_the_next_one_is_held_back() -> None:
    large = behind(MAX_ENTRIES + 10)
    progress, feed = opened(large)
    assert save(progress).checkpoint == large
    publish(progress, feed, "new")
    assert progress.unsaved(0.1) is None
    assert progress.held_back
    assert stream("new") in save(progress, 0.11).checkpoint.behind
    assert progress.unsaved(0.2) is None
    assert not progress.held_back, "the saved one holds"


def test_a_checkpoint_is_held_back_for_a_bounded_time() -> None:
    progress, feed = opened(behind(20 * MAX_ENTRIES))
    progress.cursors[stream("0")].done = {0: set(range(0, 2 * ENTRIES_PER_S * int(HELD_BACK_S), 2))}
    save(progress)
    publish(progress, feed, "new")
    assert progress.unsaved(HELD_BACK_S - 0.1) is None
    save(progress, HELD_BACK_S)


def test_no_checkpoint_lacks_an_event_that_an_earlier_one_has() -> None:
    """Consumers know that it is saved."""
    progress, feed = opened(behind(1))
    progress.cursors[stream("0")].done = {0: set(range(1, 4 * MAX_ENTRIES, 2))}
    (ranges,) = [each.done for each in save(progress).checkpoint.behind.values()]
    publish(progress, feed, "new")
    assert save(progress, HELD_BACK_S).checkpoint.behind[stream("0")].done == ranges


@virtual_time
async def test_a_consumer_that_takes_nothing_does_not_change_the_checkpoint() -> None:
    async with Circle() as circle:
        circle.consumer("deaf", events=1)
        for number in range(100):
            circle.publish(str(number), "0")
        await circle.rest()
        save(circle.delivery.progress)
        await circle.rest()
        assert circle.delivery.unsaved() is None


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
