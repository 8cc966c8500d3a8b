"""A replay at a chosen speed is cut the same each time, and each chunk is due when the original says."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.jobs.pacing import EventPosition, ReplayChunkLimits, ReplayPace, TimedEvent, cut
from headrace.pipeline.jobs.replay import OffsetBin, steps_of


def timed(time_us: int, number: int) -> TimedEvent:
    return TimedEvent(EventPosition(time_us, 0, number, 0), ("n", "k", b"", None, None, time_us))


@given(
    st.lists(st.integers(0, 3_000_000), max_size=60),
    st.integers(1, 7),
    st.sampled_from([0, 100_000, 1_000_000]),
    st.data(),
)
def test_from_the_start_of_any_chunk_on_the_chunks_are_the_same(
    times: list[int], most: int, tick_us: int, data: st.DataObject
):
    events = [timed(time, number) for number, time in enumerate(sorted(times))]
    by = ReplayChunkLimits(most, tick_us)
    chunks = list(cut(events, by))
    assert [event for chunk in chunks for event in chunk] == events
    assert all(0 < len(chunk) <= most for chunk in chunks)
    skipped = data.draw(st.integers(0, len(chunks)))
    assert list(cut(events[sum(map(len, chunks[:skipped])) :], by)) == chunks[skipped:]


def test_a_chunk_has_a_tenth_of_a_second():
    assert ReplayPace(None, 1_000).chunk_limits == ReplayChunkLimits(100, 0)
    assert ReplayPace(None, 3).chunk_limits == ReplayChunkLimits(1, 0)
    assert ReplayPace(2, None).chunk_limits == ReplayChunkLimits(1000, 200_000)
    by_speed = list(
        cut([timed(time, time) for time in (0, 150_000, 250_000, 900_000)], ReplayPace(2, None).chunk_limits)
    )
    assert [[event.place.due_us for event in chunk] for chunk in by_speed] == [[0, 150_000], [250_000], [900_000]]


def test_due_times_of_a_replay():
    assert ReplayPace(None, 200).due_s(100, 7_000_000) == 0.5
    assert ReplayPace(2, None).due_s(100, 7_000_000) == 3.5


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=4),
    st.integers(1, 9), st.integers(1, 40), st.data(),
)  # fmt: skip
def test_steps_take_every_event_once_and_never_go_back(
    queues: list[tuple[int, int]], width: int, per_step: int, data: st.DataObject
):
    starts, ends = [first for first, _ in queues], [first + length for first, length in queues]
    there = [(queue, first + at) for queue, (first, length) in enumerate(queues) for at in range(length)]
    chosen = set(data.draw(st.lists(st.sampled_from(there), max_size=60))) if there else set()
    bins = [
        OffsetBin(queue, first, events)
        for queue in range(len(queues))
        for first in range(0, ends[queue], width)
        if (events := sum((queue, offset) in chosen for offset in range(first, first + width)))
    ]
    steps, counts = steps_of(bins, width, starts, ends, per_step)
    assert len(steps) == len(counts) + 1
    for before, after, count in zip(steps, steps[1:], counts, strict=False):
        assert all(start <= old <= new <= end for start, old, new, end in zip(starts, before, after, ends, strict=True))
        assert count == sum(before[queue] <= offset < after[queue] for queue, offset in chosen)
        assert count < per_step + width
    assert sum(counts) == len(chosen)
