"""The lowest offset that cursors need, compared with a look at all of them."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.agents.cursor import StreamCursor
from headrace.agents.delivery import oldest_offsets
from headrace.agents.delivery.oldest_offsets import SPARE, OldestOffsets
from headrace.streams.identity import SequenceToken, StreamId
from headrace.streams.subscriptions import StreamBehind

STEPS = st.lists(st.tuples(st.sampled_from(["come", "go", "rise", "ask"]), st.integers(0, 5), st.integers(0, 9)))


@pytest.fixture(params=[0, 3, 1000])
def scanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of cursors that are looked at one by one."""
    monkeypatch.setattr(oldest_offsets, "SCANNED", request.param)
    chosen: int = request.param
    return chosen


def cursor_at(key: int, offset: int) -> StreamCursor:
    return StreamCursor.parked(StreamId("n", str(key)), StreamBehind(SequenceToken(offset)))


def needed(cursor: StreamCursor) -> int:
    return cursor.token.offset


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_lowest_is_that_of_all_cursors(scanned: int, steps: list[Any]) -> None:
    cursors: dict[StreamId, StreamCursor] = {}
    oldest = OldestOffsets(cursors, needed)
    for step, key, offset in steps:
        stream = StreamId("n", str(key))
        cursor = cursors.get(stream)
        if step == "come" and cursor is None:
            cursors[stream] = cursor_at(key, offset)
            if len(cursors) > scanned:
                oldest.add(cursors[stream])
            else:
                oldest.complete = False
        elif step == "go":
            cursors.pop(stream, None)
        elif step == "rise" and cursor is not None:
            cursor.skip_to(SequenceToken(needed(cursor) + offset))
        else:
            assert oldest.lowest() == min(map(needed, cursors.values()), default=None)
    assert oldest.lowest() == min(map(needed, cursors.values()), default=None)


@pytest.mark.parametrize("asked", [True, False])
def test_cursors_that_are_gone_take_no_memory_behind_one_that_stays(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oldest_offsets, "SCANNED", 0)
    cursors = {StreamId("n", "0"): cursor_at(0, 0)}
    oldest = OldestOffsets(cursors, needed)
    for number in range(1, 10 * SPARE):
        cursor = cursor_at(number, number)
        cursors[cursor.stream] = cursor
        oldest.add(cursor)
        assert not asked or oldest.lowest() == 0
        del cursors[cursor.stream]
    kept = oldest._heap, oldest._new  # pyright: ignore[reportPrivateUsage] (their size shows nowhere else)
    assert sum(map(len, kept)) <= SPARE + 2
