"""Ranges of queues become partitions: nothing is lost, nothing twice, and small ones share one."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.access import RetainedRange
from headrace.pipeline.planning import QueueRange, estimated_events, plan, ranges

WANTED = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 5000), st.integers(1, 10**7)), max_size=20).map(
    lambda found: [(QueueRange(q, start, start + n), events) for q, (start, n, events) in enumerate(found)]
)


@given(WANTED, st.one_of(st.none(), st.integers(1, 10**6)))
def test_every_batch_is_in_one_partition_in_order(wanted: list[tuple[QueueRange, int]], per_partition: int | None):
    planned = plan(wanted, per_partition)
    for whole, _ in wanted:
        pieces = [piece for parts in planned for piece in parts if piece.queue == whole.queue]
        assert [piece.start for piece in pieces] == [whole.start, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == whole.end
        assert all(piece.start < piece.end for piece in pieces)
    assert sum(map(len, planned)) == len({(p.queue, p.start) for parts in planned for p in parts})


@given(WANTED, st.integers(1, 10**6))
def test_no_partition_has_more_than_it_should_unless_a_batch_is_that_large(
    wanted: list[tuple[QueueRange, int]], per_partition: int
):
    each = {whole.queue: events / (whole.end - whole.start) for whole, events in wanted}
    for parts in plan(wanted, per_partition):
        events = sum((part.end - part.start) * each[part.queue] for part in parts)
        assert events <= per_partition + max(each[part.queue] for part in parts) + 1e-6


def test_small_queues_share_a_partition_and_large_ones_have_several():
    small = [(QueueRange(queue, 0, 3), 3) for queue in range(8)]
    assert len(plan(small)) == 1
    assert len(plan([(QueueRange(0, 0, 1000), 1_000_000)])) == 4
    assert len(plan([(QueueRange(0, 0, 1000), 1_000_000)], 100_000)) == 10
    assert plan([]) == []


def test_ranges_are_of_queues_that_have_something():
    assert ranges([0, 5, 7], [0, 9, 6]) == [QueueRange(1, 5, 9)]


def test_events_of_a_range_are_estimated_by_its_queue():
    assert estimated_events(QueueRange(0, 10, 20), RetainedRange(0, 100, events=500)) == 50
    assert estimated_events(QueueRange(0, 10, 20), RetainedRange(0, 100)) == 10
    assert estimated_events(QueueRange(0, 10, 20), RetainedRange(20, 20, events=0)) == 10
