"""Which events the progress calls done."""

from hypothesis import given
from hypothesis import strategies as st

from headrace import SequenceToken
from headrace.agents.delivery.progress import DeliveryProgress
from headrace.streams.subscriptions import Checkpoint, StreamBehind
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
