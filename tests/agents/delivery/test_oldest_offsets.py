"""The lowest offset that cursors need, compared with a look at all of them."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.agents.cursor import StreamCursor
from headrace.agents.delivery.oldest_offsets import SPARE, OldestOffsets
from headrace.streams.identity import SequenceToken, StreamId
from headrace.streams.subscriptions import StreamBehind

STEPS = st.lists(st.tuples(st.sampled_from(["come", "go", "rise", "ask"]), st.integers(0, 5), st.integers(0, 9)))


def cursor_at(key: int, offset: int) -> StreamCursor:
    return StreamCursor.parked(StreamId("n", str(key)), StreamBehind(SequenceToken(offset)))


def needed(cursor: StreamCursor) -> int:
    return cursor.token.offset


@given(STEPS)
def test_the_lowest_is_that_of_all_cursors(steps: list[Any]) -> None:
    cursors: dict[StreamId, StreamCursor] = {}
    oldest = OldestOffsets(cursors, needed)
    for step, key, offset in steps:
        stream = StreamId("n", str(key))
        cursor = cursors.get(stream)
        if step == "come" and cursor is None:
            cursors[stream] = cursor_at(key, offset)
            oldest.new.append(cursors[stream])
        elif step == "go":
            cursors.pop(stream, None)
        elif step == "rise" and cursor is not None:
            cursor.skip_to(SequenceToken(needed(cursor) + offset))
        else:
            assert oldest.lowest() == min(map(needed, cursors.values()), default=None)
    assert oldest.lowest() == min(map(needed, cursors.values()), default=None)


def test_cursors_that_are_gone_take_no_memory_behind_one_that_stays() -> None:
    cursors = {StreamId("n", "0"): cursor_at(0, 0)}
    oldest = OldestOffsets(cursors, needed)
    for number in range(1, 10 * SPARE):
        cursor = cursor_at(number, number)
        cursors[cursor.stream] = cursor
        oldest.new.append(cursor)
        assert oldest.lowest() == 0
        del cursors[cursor.stream]
    assert len(oldest._heap) <= SPARE + 2  # pyright: ignore[reportPrivateUsage] (its size shows nowhere else)
