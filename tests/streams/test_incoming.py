"""Batches of producers: those in order stay as they are, others are put in order, and invalid ones are refused."""

import random
import struct
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Event, EventBatch, InvalidArgument, PayloadTooLarge, StreamId
from headrace.proto.v1 import events_pb2
from headrace.streams import layout
from headrace.streams.events import MAX_EVENT_BYTES, ScheduledBatch
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US
from headrace.streams.frames import frame, split
from headrace.streams.identity import varint
from headrace.streams.incoming import accepted
from tests.silo.services.calling import batch

NOW = 1_700_000_000_000_000
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
EVENTS = st.lists(
    st.builds(
        Event,
        payload=st.binary(max_size=20),
        headers=st.dictionaries(TEXT, TEXT, max_size=2),
        id=st.none() | TEXT.filter(bool),
        timestamp_us=st.integers(MIN_TIME_US, MAX_TIME_US),
    ),
    min_size=1,
    max_size=5,
)


def contents(encoded: bytes) -> list[Event]:
    return EventBatch.decode(encoded).events()


@given(EVENTS, st.builds(StreamId, TEXT, TEXT))
def test_batch_of_the_library_is_taken_as_it_is(events: list[Event], stream: StreamId):
    bare = [Event(event.payload, timestamp_us=event.timestamp_us) for event in events]
    plain = EventBatch.of(stream, bare)
    unchanged = accepted(plain.encoded, NOW)
    assert (unchanged, unchanged.stream.prefix) == (plain, stream.prefix)
    whole = EventBatch.of(stream, events)
    taken = accepted(whole.encoded, NOW)
    assert (taken.stream, taken.count, contents(taken.encoded)) == (stream, len(events), contents(whole.encoded))


def pieces(message: events_pb2.EventBatch, rng: random.Random) -> dict[int, list[bytes]]:
    """A message's fields by number, the columns of numbers in pieces of one, each packed or not."""

    def field(number: int, content: bytes) -> bytes:
        return bytes((number << 3 | 2,)) + varint(len(content)) + content

    def number_field(number: int, wire: int, content: bytes) -> bytes:
        return rng.choice([bytes((number << 3 | wire,)) + content, field(number, content)])

    return {
        1: [field(1, message.namespace.encode())] if message.namespace else [],
        2: [field(2, message.key.encode())] if message.key else [],
        3: [number_field(3, 5, struct.pack("<I", size)) for size in message.sizes],
        4: [number_field(4, 1, struct.pack("<q", time)) for time in message.timestamps_us],
        5: [field(5, text.encode()) for text in message.ids],
        6: [field(6, each.SerializeToString()) for each in message.headers],
        15: [field(15, message.payload)] if message.payload else [],
    }


def interleaved(columns: dict[int, list[bytes]], rng: random.Random) -> bytes:
    """In any order, but of each field in its own."""
    turns = [number for number, column in columns.items() for _ in column]
    rng.shuffle(turns)
    return b"".join(columns[number].pop(0) for number in turns)


@given(EVENTS, st.builds(StreamId, TEXT, TEXT), st.randoms(use_true_random=False))
def test_fields_in_any_order_and_in_pieces_are_put_in_order(events: list[Event], stream: StreamId, rng: random.Random):
    encoded = EventBatch.of(stream, events).encoded
    taken = accepted(interleaved(pieces(events_pb2.EventBatch.FromString(encoded), rng), rng), NOW)
    assert (taken.stream, taken.count) == (stream, len(events))
    assert contents(taken.encoded) == contents(encoded)
    assert accepted(taken.encoded, NOW).encoded == taken.encoded
    ((delivered,), _) = split(frame(taken.encoded, 0, 7))
    assert (delivered.batch.stream, delivered.batch.count) == (stream, len(events))
    assert delivered.batch.payloads() == [event.payload for event in events]


def test_a_batch_without_timestamps_gets_the_silos_time_and_keeps_its_bytes():
    sent = batch("shop/1", b"a", b"bc").SerializeToString()
    taken = accepted(sent, NOW)
    assert taken.encoded.startswith(sent)
    assert [(event.payload, event.timestamp_us) for event in contents(taken.encoded)] == [(b"a", NOW), (b"bc", NOW)]


def test_fields_that_this_version_does_not_know_are_left_out():
    sent = batch("shop/1", b"a", timestamps_us=[1]).SerializeToString()
    for unknown in (b"\x42\x02hi", b"\x38\x01", b"\xaa\x06\x02hi"):
        assert accepted(sent + unknown, NOW).encoded == sent


def test_a_batch_of_millions_of_empty_fields_is_refused_by_the_library():
    with pytest.raises(InvalidArgument, match="1500000 ids or headers for 1 events"):
        accepted(batch("shop/1", b"a").SerializeToString() + b"\x2a\x00" * 1_500_000, NOW)


@pytest.mark.parametrize("field", [{"offset": 1}, {"queue": 1}, {"attempt": 2}, {"indexes": [0]}, {"redriven": True}])
@pytest.mark.parametrize("stream", ["shop/1", "/"])
def test_fields_that_delivery_appends_are_refused(field: dict[str, object], stream: str):
    sent = batch(stream, b"a", **field).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="fields from 16 to 20, which the silo appends"):
        accepted(sent, NOW)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"", "it has no events"),
        (b"\xff", "its 1 bytes cannot be decoded"),
        (batch("shop/1"), "it has no events"),
        (events_pb2.EventBatch(namespace="shop", key="1", sizes=[2], payload=b"a"), "the sizes add up to 2"),
        (batch("shop/1", b"a", timestamps_us=[1, 2]), "2 timestamps for 1 events"),
        (batch("shop/1", b"a", ids=["x", "y"]), "2 ids or headers for 1 events"),
        (batch("shop/1", b"a", headers=[events_pb2.Headers()] * 2), "2 ids or headers for 1 events"),
        (batch("shop/" + "k" * 1025, b"a"), "a stream's key has 1,025 bytes"),
        (batch("shop/1", *[b""] * 65_537), "a batch has at most 65,536 events, not 65,537"),
    ],
)
def test_invalid_batch_is_refused(sent: events_pb2.EventBatch | bytes, text: str):
    encoded = sent if isinstance(sent, bytes) else sent.SerializeToString()
    with pytest.raises(InvalidArgument, match=text):
        accepted(encoded, NOW)


def test_names_that_are_no_utf_8_are_refused():
    with pytest.raises(InvalidArgument, match="cannot be decoded"):
        accepted(batch("shop/1", b"a").SerializeToString().replace(b"shop", b"sh\xffp"), NOW)


def test_payloads_and_batches_have_a_limit():
    accepted(batch("shop/1", b"x" * (1 << 20)).SerializeToString(), NOW)
    with pytest.raises(PayloadTooLarge, match="the payload of an event for shop/1 has 1,048,577 bytes"):
        accepted(batch("shop/1", b"x" * ((1 << 20) + 1)).SerializeToString(), NOW)
    with pytest.raises(PayloadTooLarge, match=r"a batch has 3,\d+,\d+ bytes, the limit is 3,145,728"):
        accepted(batch("shop/1", *[b"x" * (1 << 20)] * 3).SerializeToString(), NOW)


@given(st.binary(max_size=100))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes):
    for encoded in (noise, batch("shop/1", b"a").SerializeToString() + noise):
        try:
            taken = accepted(encoded, NOW)
        except InvalidArgument:
            continue
        assert contents(taken.encoded)
        split(frame(taken.encoded, 0, 0))


@pytest.mark.parametrize(("delay_us", "priority"), [(1, 0), (0, 1), (3_600_000_000, 99)])
def test_a_batch_with_a_schedule_keeps_it(delay_us: int, priority: int):
    sent = batch("shop/1", b"a", b"b", delay_us=delay_us, priority=priority).SerializeToString()
    stored = accepted(sent, NOW)
    assert isinstance(stored, ScheduledBatch)
    assert (stored.delay_us, stored.priority, stored.payloads()) == (delay_us, priority, [b"a", b"b"])
    assert events_pb2.EventBatch.FromString(stored.encoded).priority == priority


def test_delay_and_priority_arrive_as_the_client_sent_them():
    sent = ScheduledBatch.of_events(StreamId("shop", "1"), [b"a"], timedelta(seconds=2), 7)
    stored = accepted(sent.encoded, NOW)
    assert isinstance(stored, ScheduledBatch)
    assert (stored.delay_us, stored.priority) == (2_000_000, 7)


@pytest.mark.parametrize("schedule", [{"priority": 100}, {"delay_us": 1 << 63}])
def test_a_schedule_that_is_none_is_refused(schedule: dict[str, int]):
    with pytest.raises(InvalidArgument, match=r"from 0 to 99|a delay is 0 to 36,500 days"):
        accepted(batch("shop/1", b"a", **schedule).SerializeToString(), NOW)  # type: ignore[arg-type]


@given(
    st.builds(StreamId, TEXT, TEXT | st.just("x" * 127) | st.just("x" * 128)),
    st.binary(max_size=20),
    st.integers(MIN_TIME_US, MAX_TIME_US) | st.sampled_from([MIN_TIME_US - 1, MAX_TIME_US + 1]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=2),
)
def test_a_batch_of_one_event_is_checked_as_any_other(
    stream: StreamId, payload: bytes, time_us: int, changes: list[tuple[int, int]]
):
    """Bytes of a batch are changed at random: what is accepted is whole, and keeps its bytes unless it has to be put in
    order."""
    encoded = bytearray(layout.write_one(stream.prefix, payload, time_us))
    for at, value in changes:
        encoded[at % len(encoded)] = value
    try:
        found = accepted(bytes(encoded), NOW)
    except (InvalidArgument, PayloadTooLarge):
        assert changes or not MIN_TIME_US <= time_us <= MAX_TIME_US
        return
    decoded = EventBatch.decode(found.encoded)
    assert (decoded.stream, decoded.count) == (found.stream, found.count)
    assert found.encoded.startswith(found.stream.prefix)
    assert all(MIN_TIME_US <= each <= MAX_TIME_US for each in decoded.timestamps_us())
    if not changes:
        assert (found.stream, found.payloads(), found.encoded) == (stream, [payload], bytes(encoded))


def test_a_length_of_two_bytes_is_not_read_as_one():
    prefix = b"\x0a" + bytes([200]) + b"n" * 200 + b"\x12\x01k"
    with pytest.raises(InvalidArgument):
        accepted(layout.write_one(prefix, b"x", NOW), NOW)


def test_a_single_event_above_the_limit_is_refused():
    encoded = layout.write_one(StreamId("s", "a").prefix, bytes(MAX_EVENT_BYTES + 1), NOW)
    with pytest.raises(PayloadTooLarge):
        accepted(encoded, NOW)
