"""The format of stored blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Event, EventBatch, StreamId
from headrace.adapters.log.blocks import (
    Block,
    BlockEncoder,
    BlockPlace,
    DamagedBlockError,
    ReadBudget,
    StreamTable,
    check_block,
    read_header,
    skipped_reason,
    skipped_record,
    split,
)

EVERYTHING = ReadBudget(1 << 30, 1 << 30)
PLACE = BlockPlace(3, 7)
GOLDEN = (
    "48524232"  # magic
    "98e903f9"  # checksum, of the place too
    "15cd5b0700000000"  # time
    "02000000"  # batches
    "03000000"  # events
    "2000000018000000"  # encoded sizes
    "0700000006000000"  # prefix sizes
    "0200000001000000"  # event counts
    "0a016112026263"
    "1a080100000002000000"
    "22080100000000000000"
    "7a0378797a"  # first batch
    "0a0161120164"
    "1a0400000000"
    "22080200000000000000"
    "7a00"  # second
)


LARGE_GAP = (
    "48525032"  # magic
    "b5176ea0"  # checksum, of the place too
    "15cd5b0700000000"  # time
    "03000000"  # batches, the lower 32 bits
    "02000000"  # batches, the upper 32 bits
    "676f6e65"  # reason
)


def batch(key: str, *payloads: bytes) -> EventBatch:
    return EventBatch.of(StreamId("tests", key), payloads, now_us=1)


def encode(*batches: EventBatch, time_us: int = 0, place: BlockPlace = PLACE) -> bytes:
    with BlockEncoder().encode(place, batches, time_us) as record:
        return bytes(record)


def test_format_is_as_documented():
    first = EventBatch.of(StreamId("a", "bc"), [b"x", b"yz"], now_us=1)
    second = EventBatch.of(StreamId("a", "d"), [b""], now_us=2)
    record = encode(first, second, time_us=123456789)
    assert record.hex() == GOLDEN
    assert Block(bytes.fromhex(GOLDEN), PLACE).batches(0, EVERYTHING, StreamTable()) == [
        EventBatch(first.stream, first.encoded, 2, 7),
        EventBatch(second.stream, second.encoded, 1, 8),
    ]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
payloads = st.lists(st.binary(max_size=50), min_size=1, max_size=5)


@given(st.lists(st.tuples(names, names, payloads), min_size=1, max_size=20), st.integers(0, 1 << 40))
def test_batches_come_back_as_they_were(streams: list[tuple[str, str, list[bytes]]], first: int):
    batches = [EventBatch.of(StreamId(space, key), events) for space, key, events in streams]
    place = BlockPlace(0, first)
    found = Block(encode(*batches, place=place), place).batches(0, EVERYTHING, StreamTable(limit=2))
    assert [(b.stream, b.encoded, b.count) for b in found] == [(b.stream, b.encoded, b.count) for b in batches]
    assert [b.offset for b in found] == list(range(first, first + len(batches)))


@given(st.lists(payloads, min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 30), st.integers(1, 1000))
def test_reading_stops_after_the_batch_that_reaches_a_limit(
    streams: list[list[bytes]], start: int, max_events: int, max_bytes: int
):
    batches = [batch("s", *events) for events in streams]
    start %= len(batches)
    expected: list[EventBatch] = []
    for one in batches[start:]:
        expected.append(one)
        if sum(b.count for b in expected) >= max_events or sum(b.nbytes for b in expected) >= max_bytes:
            break
    found = Block(encode(*batches), PLACE).batches(start, ReadBudget(max_events, max_bytes), StreamTable())
    assert [b.encoded for b in found] == [b.encoded for b in expected]


def test_large_batches_come_back_too():
    batches = [batch("s", b"x" * 100_000), batch("t", b"y" * 200_000)]
    found = Block(encode(*batches), PLACE).batches(1, EVERYTHING, StreamTable())
    assert [b.encoded for b in found] == [batches[1].encoded]
    assert found[0].stream == StreamId("tests", "t")


def test_a_batch_whose_fields_are_in_another_order_keeps_its_stream():
    plain = EventBatch.of(StreamId("a", "b"), [b"x"])
    size = len(plain.stream.prefix)
    foreign = EventBatch.decode(plain.encoded[size:] + plain.encoded[:size])
    [found] = Block(encode(foreign), PLACE).batches(0, EVERYTHING, StreamTable())
    assert (found.stream, found.encoded) == (StreamId("a", "b"), foreign.encoded)


def test_the_table_of_streams_is_bounded():
    table = StreamTable(limit=10)
    for number in range(100):
        encoded = batch(str(number), b"x")
        assert table.learn(encoded.encoded, len(encoded.stream.prefix)) == encoded.stream
    assert len(table.known) <= 10


def test_headers_and_ids_are_kept():
    event = Event(b"x", headers={"a": "b"}, id="7")
    [found] = Block(encode(EventBatch.of(StreamId("a", "b"), [event])), PLACE).batches(0, EVERYTHING, StreamTable())
    assert found.events()[0].headers == {"a": "b"}


@given(st.integers(0), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int):
    record = bytearray(encode(batch("s", b"payload", b""), batch("t", b"x")))
    record[position % len(record)] ^= change
    with pytest.raises(DamagedBlockError):
        Block(bytes(record), PLACE)


@pytest.mark.parametrize("place", [BlockPlace(2, 7), BlockPlace(3, 8)])
def test_a_block_at_a_wrong_place_is_damaged(place: BlockPlace):
    record = encode(batch("s", b"payload"))
    assert check_block(record, PLACE).batches == 1
    with pytest.raises(DamagedBlockError, match="checksum"):
        check_block(record, place)
    skipped = skipped_record(PLACE, 1, 0, "reason")
    assert check_block(skipped, PLACE).skipped
    with pytest.raises(DamagedBlockError, match="checksum"):
        check_block(skipped, place)


def test_a_block_of_the_first_format_is_read():
    record = bytearray(bytes.fromhex(GOLDEN))
    record[:8] = bytes.fromhex("48524231cf741dfa")
    assert len(Block(bytes(record), PLACE).batches(0, EVERYTHING, StreamTable())) == 2


@pytest.mark.parametrize("size", [0, 3, 23, 24, 40, -1])
def test_a_block_cut_short_is_refused(size: int):
    record = encode(batch("s", b"payload"), batch("t", b"x"))
    with pytest.raises(DamagedBlockError):
        Block(record[:size], PLACE)


def test_sizes_are_checked_even_where_the_checksum_is_not():
    record = encode(batch("s", b"payload"))
    with pytest.raises(DamagedBlockError, match="sizes"):
        Block(record + b"more", PLACE, check=False)


def test_the_header_tells_time_and_counts():
    header = read_header(encode(batch("s", b"a", b"b"), batch("t", b"c"), time_us=99))
    assert (header.time_us, header.batches, header.events) == (99, 2, 3)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=50))
def test_blocks_are_filled_up_to_the_target(sizes: list[int]):
    batches = [EventBatch(StreamId("a", "b"), bytes(size), 1) for size in sizes]
    blocks = list(split(batches, target_bytes=500))
    assert [b for block in blocks for b in block] == batches
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        size = sum(b.nbytes for b in block)
        assert size <= 500 or len(block) == 1
        assert following is None or size + following[0].nbytes > 500


def test_one_buffer_serves_block_after_block():
    encoder = BlockEncoder()
    for payload in ([b"long"] * 1000, [b"short"], [b"x" * 1_000_000] * 3, [b"again"]):
        expected = batch("s", *payload)
        with encoder.encode(PLACE, [expected], 0) as record:
            [found] = Block(bytes(record), PLACE).batches(0, EVERYTHING, StreamTable())
        assert found.encoded == expected.encoded


@pytest.mark.parametrize("batches", [1, (1 << 32) - 1, 1 << 32, (2 << 32) + 3, 1 << 53])
def test_a_skipped_record_may_take_any_number_of_offsets(batches: int):
    record = skipped_record(PLACE, batches, 5, "gone")
    header = check_block(record, PLACE)
    assert (header.batches, header.events, header.time_us, header.skipped) == (batches, 0, 5, True)
    assert skipped_reason(record) == "gone"


def test_the_record_of_a_large_gap_is_as_documented():
    assert skipped_record(PLACE, (2 << 32) + 3, 123456789, "gone").hex() == LARGE_GAP


def test_earlier_releases_read_the_record_of_a_small_gap():
    assert skipped_record(PLACE, (1 << 32) - 1, 0, "gone")[:4] == b"HRP1"
