"""Batches on the wire: they are read from a response as they were written, and both agree with the protobuf library."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Event, EventBatch, InvalidArgument, SequenceToken, StreamId
from headrace.proto.v1 import consumer_pb2, publisher_pb2
from headrace.streams.frames import QueueState, elements, frame, is_status, part, split, status_frame

STREAMS = st.builds(StreamId, st.text("abü/", min_size=0, max_size=200), st.text("k%0", max_size=140))
EVENTS = st.lists(
    st.builds(
        Event,
        st.binary(max_size=300),
        headers=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        id=st.one_of(st.none(), st.text(min_size=1, max_size=5)),
        timestamp_us=st.integers(0, 1 << 50),
    ),
    min_size=1,
    max_size=5,
)
BATCHES = st.builds(EventBatch.of, STREAMS, EVENTS)


@given(
    st.lists(st.tuples(BATCHES, st.integers(0, 1 << 60), st.integers(0, 1 << 20), st.integers(1, 1 << 31)), max_size=4)
)
def test_frames_are_read_back_and_are_protobuf(batches: Sequence[tuple[EventBatch, int, int, int]]):
    message = b"".join(frame(b.encoded, queue, offset, attempt=attempt) for b, offset, queue, attempt in batches)
    rest = consumer_pb2.SubscribeResponse(closing=consumer_pb2.Closing(reason="7")).SerializeToString()
    delivered, left = split(message + rest)
    assert left == rest
    parsed = consumer_pb2.SubscribeResponse.FromString(message + rest)
    assert parsed.closing.reason == "7"
    for (batch, offset, queue, attempt), got, library in zip(batches, delivered, parsed.batches, strict=True):
        assert (got.batch.stream, got.batch.encoded, got.batch.count) == (batch.stream, batch.encoded, batch.count)
        assert (got.batch.offset, got.queue, got.attempt, got.indexes) == (offset, queue, attempt, None)
        assert (library.offset, library.queue, max(library.attempt, 1)) == (offset, queue, attempt)
        assert [e.payload for e in got.batch] == [e.payload for e in batch]


@given(BATCHES, st.data())
def test_a_part_has_its_events_with_their_own_tokens(batch: EventBatch, data: st.DataObject):
    indexes = sorted(data.draw(st.sets(st.integers(0, batch.count - 1), min_size=1)))
    encoded = part(batch, indexes)
    (got,), _ = split(frame(encoded, 3, 40, indexes=indexes))
    assert got.indexes == indexes
    whole = batch.events()
    for event, index in zip(got.batch.events(), indexes, strict=True):
        wanted = whole[index]
        assert event.token == SequenceToken(40, index)
        assert (event.payload, event.id, dict(event.headers)) == (wanted.payload, wanted.id, dict(wanted.headers))
        assert event.timestamp_us == wanted.timestamp_us


def test_a_dead_letter_says_that_it_is_out_of_line():
    batch = EventBatch.of(StreamId("orders", "42"), [b"x"])
    message = frame(batch.encoded, 3, 40, indexes=[7], redriven=True)
    (got,), _ = split(message)
    assert (got.redriven, got.indexes, got.batch.token) == (True, [7], SequenceToken(40, 7))
    assert consumer_pb2.SubscribeResponse.FromString(message).batches[0].redriven
    (other,), _ = split(frame(batch.encoded, 3, 40, indexes=[7]))
    assert not other.redriven


@given(st.integers(0, (1 << 32) - 1), st.sampled_from(QueueState), st.integers(0, (1 << 63) - 1), st.booleans())
def test_the_status_of_a_queue_is_a_response(queue: int, state: QueueState, number: int, assigned: bool):
    encoded = status_frame(queue, state, number, number // 2, assigned=assigned)
    status = consumer_pb2.QueueStatus(queue=queue, epoch=number, generation=number // 2, assigned=assigned)
    status.state = consumer_pb2.QueueStatus.State.Value(f"STATE_{state.name}")
    assert encoded == consumer_pb2.SubscribeResponse(queues=[status]).SerializeToString()
    assert is_status(encoded)
    assert not is_status(frame(b"", 0, 0))


def test_the_batches_of_a_request_are_split_off():
    batches = [EventBatch.of(StreamId("a", str(i)), [b"x" * i]).encoded for i in range(1, 4)]
    request = publisher_pb2.PublishRequest(provider="p")
    request.sequence.producer, request.sequence.number = "me", 300
    for batch in batches:
        request.batches.add().MergeFromString(batch)
    found, rest = elements(request.SerializeToString(), 3)
    assert found == batches
    assert publisher_pb2.PublishRequest.FromString(rest).sequence.number == 300


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_read_but_never_fails_otherwise(garbage: bytes):
    with suppress(InvalidArgument):
        split(garbage)
    with suppress(InvalidArgument):
        elements(garbage, 3)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_message_that_is_cut_short_is_refused(cut: int):
    message = frame(EventBatch.of(StreamId("a", "b"), [b"payload"]).encoded, 0, 0)
    with pytest.raises(InvalidArgument):
        split(message[:-cut])
