"""Batches: they are decoded as they were encoded, by protobuf's rules, and damage is named."""

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace import Event, EventBatch, InvalidArgument, PayloadTooLarge, SequenceToken, StreamId
from headrace.proto.v1.events_pb2 import EventBatch as Message
from headrace.proto.v1.events_pb2 import Headers
from headrace.streams import publishing
from headrace.streams.events import MAX_BATCH_EVENTS, MAX_EVENT_BYTES, ScheduledBatch
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US

STREAM = StreamId("flights", "N14228")
NOW = 1_763_719_200_000_000

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TIMES = st.integers(MIN_TIME_US, MAX_TIME_US)
PAYLOADS = st.binary(max_size=300)
EVENTS = st.builds(
    Event,
    PAYLOADS,
    headers=st.dictionaries(TEXT, TEXT, max_size=3),
    id=st.none() | TEXT,
    timestamp_us=st.none() | TIMES,
)
STREAMS = st.builds(StreamId, TEXT, TEXT | st.text("k", min_size=120, max_size=200))
ITEMS = st.lists(PAYLOADS, min_size=1, max_size=5) | st.lists(PAYLOADS | EVENTS, min_size=1, max_size=5)


def as_event(item: bytes | Event) -> Event:
    return Event(item) if isinstance(item, bytes) else item


def facts(event: Event) -> tuple[Any, ...]:
    return event.payload, dict(event.headers), event.id or None, event.timestamp_us


def expected_facts(items: list[bytes | Event]) -> list[tuple[Any, ...]]:
    events = [as_event(item) for item in items]
    return [(*facts(e)[:3], NOW if e.timestamp_us is None else e.timestamp_us) for e in events]


def message(items: list[bytes | Event], stream: StreamId = STREAM) -> Message:
    """What another producer, with generated code and no tricks, makes of the same events."""
    events = [as_event(item) for item in items]
    return Message(
        namespace=stream.namespace,
        key=stream.key,
        sizes=[len(event.payload) for event in events],
        timestamps_us=[NOW if event.timestamp_us is None else event.timestamp_us for event in events],
        ids=[event.id or "" for event in events],
        headers=[Headers(values=event.headers) for event in events],
        payload=b"".join(event.payload for event in events),
    )


@given(STREAMS, ITEMS)
@example(STREAM, [b""])
@example(STREAM, [b"x" * 200])
@example(StreamId("", ""), [Event(b"", timestamp_us=0), Event(b"", timestamp_us=-1)])
def test_events_come_out_of_a_batch_as_they_went_in(stream: StreamId, items: list[bytes | Event]):
    made = EventBatch.of(stream, items, NOW)
    stored = EventBatch(stream, made.encoded, made.count, 7)
    decoded = EventBatch.decode(made.encoded, 7)
    for batch in (stored, decoded):
        assert [facts(event) for event in batch] == expected_facts(items)
        assert [(event.stream, event.token) for event in batch] == [(stream, (7, i)) for i in range(len(items))]
        assert batch.payloads() == [as_event(item).payload for item in items]
        assert list(batch.sizes()) == [len(payload) for payload in batch.payloads()]
        assert list(batch.timestamps_us()) == [event.timestamp_us for event in batch]
    assert (decoded.stream, decoded.count, decoded) == (stream, len(items), stored)


@given(STREAMS, ITEMS)
def test_generated_code_reads_our_encoding(stream: StreamId, items: list[bytes | Event]):
    read = Message.FromString(EventBatch.of(stream, items, NOW).encoded)
    wanted = message(items, stream)
    if len(read.timestamps_us) == 1:
        read.timestamps_us.extend([read.timestamps_us[0]] * (len(items) - 1))
    assert list(read.ids) in ([], list(wanted.ids))
    assert list(read.headers) in ([], list(wanted.headers))
    for each in (read, wanted):
        each.ClearField("ids")
        each.ClearField("headers")
    assert read == wanted


def fields(of: Message) -> list[bytes]:
    """Each field of a message, encoded alone."""
    alone = [Message(**{descriptor.name: value}) for descriptor, value in of.ListFields()]
    return [one.SerializeToString() for one in alone]


@given(STREAMS, ITEMS, st.randoms(use_true_random=False))
def test_our_decoder_reads_the_encoding_of_generated_code_in_any_order(
    stream: StreamId, items: list[bytes | Event], rng: random.Random
):
    parts = fields(message(items, stream))
    rng.shuffle(parts)
    batch = EventBatch.decode(b"".join(parts))
    assert batch.stream == stream
    assert [facts(event) for event in batch] == expected_facts(items)


# Offset, epoch and attempt, as they are appended on delivery: each wire type once, and a long tag.
APPENDED = [
    bytes.fromhex("8001 07"),
    bytes.fromhex("8801 ffffffffffffffff7f"),
    bytes.fromhex("9101 0102030405060708"),
    bytes.fromhex("9a01 03 616263"),
    bytes.fromhex("a501 01020304"),
    bytes.fromhex("fa7f 00"),
]


@given(ITEMS, st.lists(st.sampled_from(APPENDED), max_size=4))
def test_appended_fields_change_nothing(items: list[bytes | Event], appended: list[bytes]):
    made = EventBatch.of(STREAM, items, NOW)
    encoded = b"".join((made.encoded, *appended))
    assert Message.FromString(encoded)
    for batch in (EventBatch.decode(encoded), EventBatch(STREAM, encoded, made.count)):
        assert [facts(event) for event in batch] == expected_facts(items)
        assert batch.nbytes == len(encoded)


def test_columns_in_pieces_or_not_packed_are_read_as_protobuf_says():
    pieces = [
        Message(sizes=[1], timestamps_us=[5], payload=b"lost: the last one counts").SerializeToString(),
        bytes.fromhex("1d 02000000"),  # one more size, not packed
        bytes.fromhex("21 0600000000000000"),  # one more timestamp, not packed
        Message(sizes=[3], timestamps_us=[7], namespace="n", key="k", payload=b"abbccc").SerializeToString(),
    ]
    for encoded in (b"".join(pieces), b"".join(pieces[1:] + pieces[:1]) + pieces[-1][-8:]):
        batch = EventBatch.decode(encoded)
        assert batch.stream == StreamId("n", "k")
        assert sorted(zip(batch.sizes(), batch.timestamps_us(), strict=True)) == [(1, 5), (2, 6), (3, 7)]
        assert b"".join(batch.payloads()) == b"abbccc"
        assert EventBatch(batch.stream, encoded, 3).events() == batch.events()


def test_one_timestamp_holds_for_all_and_none_is_1970():
    assert EventBatch.decode(Message(sizes=[0, 0], timestamps_us=[9]).SerializeToString()).timestamps_us() == [9, 9]
    assert EventBatch.decode(Message(sizes=[0, 0]).SerializeToString()).timestamps_us() == [0, 0]
    assert [event.timestamp_us for event in EventBatch.decode(Message(sizes=[0]).SerializeToString())] == [0]


def agrees(encoded: bytes) -> None:
    """Our reading is the library's reading, or both refuse; only what makes no sense as a batch we refuse alone."""
    try:
        wanted = Message.FromString(encoded)
    except DecodeError:
        wanted = None
    try:
        batch = EventBatch.decode(encoded)
    except InvalidArgument:
        assert wanted is None or not sensible(wanted)
        return
    assert wanted is not None
    assert sensible(wanted)
    assert (batch.stream.namespace, batch.stream.key) == (wanted.namespace, wanted.key)
    assert b"".join(batch.payloads()) == wanted.payload
    assert [len(event.payload) for event in batch.events()] == list(wanted.sizes)
    assert [event.id or "" for event in batch] == (list(wanted.ids) or [""] * batch.count)


def sensible(wanted: Message) -> bool:
    count = len(wanted.sizes)
    return (
        count > 0
        and sum(wanted.sizes) == len(wanted.payload)
        and len(wanted.timestamps_us) in (0, 1, count)
        and len(wanted.ids) in (0, count)
        and len(wanted.headers) in (0, count)
    )


@given(ITEMS, st.data())
def test_damaged_bytes_are_refused_or_read_as_protobuf_says(items: list[bytes | Event], data: st.DataObject):
    encoded = bytearray(EventBatch.of(STREAM, items, NOW).encoded)
    head = st.integers(0, min(len(encoded) - 1, 120))
    for at in data.draw(st.lists(head, max_size=4)):
        encoded[at] = data.draw(st.integers(0, 255))
    agrees(bytes(encoded[: data.draw(st.none() | st.integers(0, len(encoded)))]))


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x02\x00\x1a\x04\x00\x00\x00\x00")  # field 0
@example(b"\x1a\x84\x80\x80\x80\x80\x00\x00\x00\x00\x00")  # a length of six bytes
@example(b"\x9a\x00\x04\x00\x00\x00\x00")  # tag 3 in two bytes
@example(b"\x1a\x04\x00\x00\x00\x00\x80\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x1a\x04\x00\x00\x00\x00\x0a\x01\xff")  # a namespace that is not UTF-8
@example(b"\x1a\x04\x00\x00\x00\x00\x2a\x01\xff")  # an id that is not UTF-8
@example(b"\x1a\x04\x00\x00\x00\x00\x83\x01\x84\x01")  # a group
@example(b"\x1a\x04\x00\x00\x00\x00\x1b\x1c")  # a group in place of the sizes
@example(b"\x1a\x04\x00\x00\x00\x00\x80\x80\x80\x80\x10\x01")  # a tag above 32 bits
def test_any_bytes_are_refused_or_read_as_protobuf_says(encoded: bytes):
    agrees(encoded)


@given(ITEMS, st.integers(0, 400), st.integers(1, 255))
def test_reading_a_damaged_batch_raises_nothing_else(items: list[bytes | Event], at: int, flip: int):
    made = EventBatch.of(STREAM, items, NOW)
    assume(at < made.nbytes)
    damaged = bytearray(made.encoded)
    damaged[at] ^= flip
    batch = EventBatch(STREAM, bytes(damaged), made.count)
    for read in (batch.events, batch.payloads, batch.sizes, batch.timestamps_us):
        try:
            assert len(read()) == batch.count
        except InvalidArgument:
            continue


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"", "it has no events"),
        (b"\xff\xff", "its 2 bytes cannot be decoded"),
        (Message(sizes=[4], payload=b"abc").SerializeToString(), "the sizes add up to 4, the payload has 3 bytes"),
        (
            Message(sizes=[1, 1, 1], timestamps_us=[1, 2], payload=b"abc").SerializeToString(),
            "2 timestamps for 3 events",
        ),
        (Message(sizes=[1, 2], ids=["a"], payload=b"abc").SerializeToString(), "1 ids or headers for 2 events"),
        (Message(sizes=[1, 2], headers=[Headers()] * 3, payload=b"abc").SerializeToString(), "3 ids or headers for 2"),
        (b"\x1a\x03abc", "its 5 bytes cannot be decoded"),
        (Message(sizes=[0], namespace="n" * 1025).SerializeToString(), "namespace has 1,025 bytes"),
    ],
)
def test_damage_is_named(encoded: bytes, why: str):
    with pytest.raises(InvalidArgument, match=why):
        EventBatch.decode(encoded)


def test_a_count_that_is_not_the_batch_s_is_named():
    with pytest.raises(InvalidArgument, match="damaged batch: it has 2 events, not 3"):
        EventBatch(STREAM, EventBatch.of(STREAM, [b"a", b"b"]).encoded, 3).events()
    with pytest.raises(InvalidArgument, match="damaged batch: it has 2 events, not 1"):
        EventBatch(STREAM, EventBatch.of(STREAM, [b"a", b"b"]).encoded, 1).payloads()


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("rare", [False, True])
def test_events_from_an_index_on(start: int, rare: bool):
    items = [Event(bytes([i]) * i, {"i": str(i)} if rare else {}, f"id{i}" if rare else None) for i in range(3)]
    batch = EventBatch.of(STREAM, items, NOW)
    assert batch.events(start) == batch.events()[start:]
    assert [event.token for event in batch.events(start)] == [SequenceToken(0, i) for i in range(start, 3)]


def test_events_are_made_one_by_one_when_they_are_asked_for():
    batch = EventBatch.of(STREAM, [bytes([number]) for number in range(100)])
    events = batch.iter_events(7)
    assert not isinstance(events, list)
    assert next(events).payload == b"\7"
    assert [event.payload for event in events] == batch.payloads()[8:]


def test_events_without_rare_columns_do_not_pay_for_them():
    plain = EventBatch.of(STREAM, [Event(b"a", id=""), Event(b"b", headers={})], NOW)
    assert plain == EventBatch.of(STREAM, [b"a", b"b"], NOW)


@pytest.mark.parametrize("payload", [bytearray(b"ab"), memoryview(b"ab"), memoryview(b"aabb")[::2]])
@pytest.mark.parametrize("others", [[], [b"x"], [Event(b"x")]])
def test_other_bytes_are_copied_in(payload: Any, others: list[bytes | Event]):
    for item in (payload, Event(payload)):
        batch = EventBatch.of(STREAM, [*others, item])
        assert batch.payloads()[-1] == bytes(payload)
        assert type(batch.payloads()[-1]) is bytes


def test_a_view_of_wide_items_is_its_bytes():
    wide = memoryview(b"abcdefgh").cast("I")
    assert EventBatch.of(STREAM, [b"x", wide]).payloads() == [b"x", b"abcdefgh"]  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", ["text", None, 5, {"a": 1}, [b"x"], object()])
@pytest.mark.parametrize("others", [[], [b"x"]])
def test_invalid_event_is_refused(wrong: Any, others: list[bytes]):
    for item in (wrong, Event(wrong)):
        with pytest.raises(
            InvalidArgument, match=f"publish bytes or Event, not {type(wrong).__name__}: encode it first"
        ):
            EventBatch.of(STREAM, [*others, item])


@pytest.mark.parametrize(
    "event",
    [
        Event(b"x", id=5),  # type: ignore[arg-type]
        Event(b"x", id="\ud800"),
        Event(b"x", headers={"a": 1}),  # type: ignore[dict-item]
        Event(b"x", headers={"a": "\ud800"}),
        Event(b"x", headers=["a"]),  # type: ignore[arg-type]
        Event(b"x", headers=5),  # type: ignore[arg-type]
    ],
)
def test_ids_and_headers_that_are_no_text_are_refused(event: Event):
    with pytest.raises(InvalidArgument, match="ids and headers are text in UTF-8"):
        EventBatch.of(STREAM, [event])


@pytest.mark.parametrize("timestamp", [1 << 63, -(1 << 63) - 1, 1.5, "now"])
@pytest.mark.parametrize("others", [[], [b"x"]])
def test_a_timestamp_that_is_none_is_refused(timestamp: Any, others: list[bytes]):
    with pytest.raises(InvalidArgument, match=r"timestamp_us is (an integer|a time in the years 1 to 9999)"):
        EventBatch.of(STREAM, [*others, Event(b"x", timestamp_us=timestamp)])


def test_limits_are_exact():
    largest = b"x" * MAX_EVENT_BYTES
    for others in ([], [b"x"], [Event(b"x")]):
        assert EventBatch.of(STREAM, [*others, largest]).payloads()[-1] == largest
        for item in (largest + b"x", Event(largest + b"x")):
            with pytest.raises(
                PayloadTooLarge, match="flights/N14228 has 1,048,577 bytes, the limit is 1,048,576"
            ) as caught:
                EventBatch.of(STREAM, [*others, item])
            assert (caught.value.size, caught.value.limit) == (MAX_EVENT_BYTES + 1, MAX_EVENT_BYTES)
    assert EventBatch.of(STREAM, [b""] * MAX_BATCH_EVENTS).count == MAX_BATCH_EVENTS
    with pytest.raises(InvalidArgument, match="at most 65,536 events, not 65,537"):
        EventBatch.of(STREAM, [b""] * (MAX_BATCH_EVENTS + 1))


def test_a_batch_without_events_is_refused():
    with pytest.raises(InvalidArgument, match="at least one event"):
        EventBatch.of(STREAM, [])


def test_a_batch_of_something_that_is_no_stream_is_refused():
    of: Any = "orders/42"
    with pytest.raises(InvalidArgument, match=r"stream is 'orders/42': expected a StreamId, such as StreamId"):
        EventBatch.of(of, [b"x"])


def test_any_iterable_of_events_is_taken():
    made = EventBatch.of(STREAM, (payload for payload in (b"a", b"b")), NOW)
    assert made == EventBatch.of(STREAM, [b"a", b"b"], NOW)


def test_the_time_of_publishing_is_now_where_none_is_given():
    before = time.time_ns() // 1000
    (event,) = EventBatch.of(STREAM, [b"x"]).events()
    assert event.timestamp_us is not None
    assert before <= event.timestamp_us <= time.time_ns() // 1000


def test_an_event_s_time():
    assert Event(b"", timestamp_us=1_500_000).time == datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)
    assert Event(b"").time is None
    with pytest.raises(InvalidArgument, match="outside of the years 1 to 9999"):
        _ = Event(b"", timestamp_us=1 << 62).time


# What is on disk and on the wire. A change here is a change of the format.
GOLDEN = {
    "one": ([b"hello"], "0a001200 1a0405000000 2208 004866e017440600 7a0568656c6c6f"),
    "two": ([b"a", b"bc"], "0a001200 1a080100000002000000 2208004866e017440600 7a03616263"),
    "rare": (
        [Event(b"", {"h": "v"}, "i", 1)],
        "0a0012001a0400000000 22080100000000000000 2a0169 32080a060a0168120176 7a00",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_encoding_never_changes(name: str):
    items, encoded = GOLDEN[name]
    assert EventBatch.of(StreamId("", ""), items, NOW).encoded.hex(" ") == bytes.fromhex(encoded).hex(" ")
    assert [facts(event) for event in EventBatch.decode(bytes.fromhex(encoded))] == expected_facts(list(items))


def test_events_are_cut_where_their_schedule_changes():
    second = timedelta(seconds=1)
    events = [b"a", Event(b"b"), Event(b"c", delay=second), Event(b"d", delay=second), Event(b"e", priority=0), b"f"]
    batches = publishing.encoded(StreamId("n", "k"), events)
    assert [batch.payloads() for batch in batches] == [[b"a", b"b"], [b"c", b"d"], [b"e"], [b"f"]]
    schedules = [(b.delay_us, b.priority) if isinstance(b, ScheduledBatch) else None for b in batches]
    assert schedules == [None, (1_000_000, 0), (0, 0), None]
    assert [batch.events()[0].payload for batch in batches] == [b"a", b"c", b"e", b"f"]


def test_a_schedule_of_a_call_is_for_events_that_have_none():
    own = Event(b"x", priority=3)
    first, second = publishing.scheduled([b"a", own], timedelta(seconds=1), 5)
    assert isinstance(first, Event)
    assert isinstance(second, Event)
    assert (first.delay, first.priority) == (timedelta(seconds=1), 5)
    assert (second.delay, second.priority) == (timedelta(seconds=1), 3)
    assert own.delay is None


@pytest.mark.parametrize(
    "event",
    [
        Event(b"x", delay=timedelta(seconds=-1)),
        Event(b"x", delay=timedelta(days=36_501)),
        Event(b"x", delay=5),  # pyright: ignore[reportArgumentType]
        Event(b"x", priority=100),
        Event(b"x", priority=-1),
        Event(b"x", priority=True),
    ],
)
def test_a_schedule_that_is_none_is_refused(event: Event):
    with pytest.raises(InvalidArgument, match=r"a delay is|a priority is"):
        publishing.encoded(StreamId("n", "k"), [event])


@pytest.mark.parametrize("wrong", [5, None, 5.0, Event(None)])  # pyright: ignore[reportArgumentType]
def test_a_wrong_type_among_several_events_is_refused(wrong: Any):
    for events in ([b"a", wrong], [wrong, b"a"]):
        with pytest.raises(InvalidArgument, match=r"publish bytes or Event, not (int|NoneType|float): encode it first"):
            publishing.encoded(STREAM, events)


def test_headers_that_are_no_mapping_are_refused():
    pairs: Any = [("a", "b")]
    with pytest.raises(InvalidArgument, match=r"headers is \[\('a', 'b'\)\]: expected a Mapping, such as"):
        publishing.encoded(STREAM, [Event(b"x", headers=pairs)])


def test_a_wrong_name_of_an_event_is_refused_with_the_known_ones():
    make: Any = Event
    with pytest.raises(InvalidArgument, match=r"unknown option 'timestamp': .*; did you mean 'timestamp_us'\?"):
        make(b"x", timestamp=5)
    with pytest.raises(InvalidArgument, match="Event: 'payload' is missing"):
        make()
