"""The start and end of a query, and the division of a limit among queues."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Selector, StreamId
from headrace.balancer import StreamQueueMapper
from headrace.pipeline.access import BatchChunk, QueueAccess, RetainedRange
from headrace.pipeline.options import OffsetPositions, TimePosition, TokenPosition
from headrace.pipeline.positions import from_spark, lag, resolve, shares, spark_offset
from headrace.streams.errors import InvalidArgument

ALL = Selector("*/*")


class Queues(QueueAccess):
    """Queues of which only the states are known."""

    def __init__(self, *states: RetainedRange) -> None:
        self.queues = len(states)
        self._states = states

    def states(self) -> Sequence[RetainedRange]:
        return self._states

    def offsets_at(self, time_us: int) -> Sequence[int]:
        return [min(time_us, state.next) for state in self._states]

    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        raise NotImplementedError

    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[BatchChunk]:
        raise NotImplementedError

    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        raise NotImplementedError

    def close(self) -> None: ...


TWO = Queues(RetainedRange(5, 10), RetainedRange(0, 20))


def test_positions_of_each_kind():
    assert resolve("start", "earliest", ALL, TWO) == [5, 0]
    assert resolve("start", "latest", ALL, TWO) == [10, 20]
    assert resolve("start", TimePosition(7), ALL, TWO) == [7, 7]
    assert resolve("start", OffsetPositions({1: 3}), ALL, TWO) == [5, 3]
    assert resolve("end", OffsetPositions({1: 3}), ALL, TWO) == [10, 3]
    assert resolve("start", OffsetPositions({0: -1, 1: -2}), ALL, TWO) == [10, 0]


def test_a_token_is_of_the_streams_queue():
    queue = StreamQueueMapper(2).queue_of(StreamId("n", "k"))
    resolved = resolve("start", TokenPosition(7), Selector("n/k"), TWO)
    assert resolved[queue] == 7
    assert resolved[1 - queue] == [5, 0][1 - queue]


def test_positions_that_are_not_there_are_named():
    with pytest.raises(InvalidArgument, match="'startingOffsets': there is no queue 2, there are queues 0 to 1"):
        resolve("start", OffsetPositions({2: 0}), ALL, TWO)
    with pytest.raises(InvalidArgument, match="'endingOffsets': queue 1 ends at offset 20, before 21"):
        resolve("end", OffsetPositions({1: 21}), ALL, TWO)


def test_lag_counts_the_batches_of_all_sources_that_are_not_read_yet():
    ours = {"endOffset": '{"0": 5, "1": 2, "streams": "*/*"}', "latestOffset": '{"0": 9, "1": 2, "streams": "*/*"}'}
    other = {"endOffset": '{"topic": {"0": 1}}', "latestOffset": '{"topic": {"0": 7}}'}
    assert lag({"sources": [ours, other, ours]}) == 8
    with pytest.raises(InvalidArgument, match="no source of the format headrace"):
        lag({"sources": [other, {"endOffset": None, "latestOffset": None}]})


def test_progress_is_always_the_same_text():
    access = Queues(*[RetainedRange(0, 20)] * 12)
    offset = spark_offset(range(12), access, ALL)
    assert list(offset) == [*(str(queue) for queue in range(12)), "streams"]
    access.identity = 7
    offset = spark_offset(range(12), access, ALL)
    assert list(offset)[-2:] == ["log", "streams"]
    assert from_spark(dict(reversed(offset.items())), access, ALL) == (list(range(12)), True)


def test_progress_of_another_number_of_queues_is_refused():
    with pytest.raises(InvalidArgument, match="queues 0, 1, and the provider has 3"):
        from_spark({"0": 1, "1": 1}, Queues(*[RetainedRange(0, 20)] * 3), ALL)


def test_progress_of_other_streams_is_refused():
    with pytest.raises(InvalidArgument, match="is of the streams a/\\*, and 'namespace' and 'key' select b/\\*"):
        from_spark(spark_offset([1, 1], TWO, Selector("a/*")), TWO, Selector("b/*"))


def test_progress_of_another_log_is_told():
    one, other = Queues(RetainedRange(0, 20)), Queues(RetainedRange(0, 20))
    one.identity, other.identity = 1, 2
    assert from_spark(spark_offset([5], one, ALL), other, ALL) == ([5], False)
    assert from_spark({"0": 5}, one, ALL).is_same_log


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 10**6))
def test_a_limit_is_dealt_out_to_all_that_wait(backlogs: list[int], limit: int):
    dealt = shares(backlogs, limit)
    assert all(0 <= share <= backlog for share, backlog in zip(dealt, backlogs, strict=True))
    assert all(share or not backlog for share, backlog in zip(dealt, backlogs, strict=True))
    waiting = sum(1 for backlog in backlogs if backlog)
    assert sum(dealt) <= max(limit, waiting)
    assert sum(dealt) >= min(sum(backlogs), limit - len(backlogs))
