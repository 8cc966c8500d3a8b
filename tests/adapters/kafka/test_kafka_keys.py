"""Keys of raw records, and the partitions that the producers of Kafka choose for them."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.kafka.client import KafkaRecord
from headrace.adapters.kafka.keys import record_key, stream_key
from headrace.adapters.kafka.partitioners import PartitionMapper, crc32_partition, murmur2, murmur2_partition
from headrace.adapters.kafka.raw import CHECK_EACH, CHECKED_KEYS, RawFormat
from headrace.streams.errors import InvalidArgument
from headrace.streams.events import Event, EventBatch
from headrace.streams.identity import StreamId


@pytest.mark.parametrize(
    ("key", "expected"),  # of Kafka's own test, UtilsTest.testMurmur2
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hash_is_that_of_the_java_client(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % (1 << 32)
    assert murmur2_partition(key, 7) == (expected & 0x7FFFFFFF) % 7


def test_crc32_is_the_usual_one() -> None:
    assert crc32_partition(b"123456789", 1 << 32) == 0xCBF43926


@given(st.one_of(st.none(), st.binary(max_size=1500), st.text().map(str.encode)), st.integers(0, 9))
def test_each_key_has_a_stream_and_the_stream_has_the_key(key: bytes | None, partition: int) -> None:
    text = stream_key(key, partition)
    StreamId("topic", text)
    found = record_key(text)
    assert found.is_hashed or found.key == key
    assert found.partition == (partition if key is None or found.is_hashed else None)


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_two_keys_have_two_streams(one: bytes, two: bytes) -> None:
    assert (stream_key(one, 0) == stream_key(two, 0)) == (one == two)


def test_keys_that_are_no_names() -> None:
    assert stream_key(b"", 3) == ""
    assert stream_key(None, 3) == "kafka:null:3"
    assert stream_key(b"\xff", 3) == "kafka:base64:_w=="
    assert stream_key(b"kafka:null:3", 3).startswith("kafka:base64:")
    assert stream_key(b"x" * 1025, 3).startswith("kafka:blake2b:3:")
    assert record_key(stream_key(b"x" * 1025, 3)).is_hashed


@pytest.mark.parametrize(
    "key", ["kafka:", "kafka:null:x", "kafka:null:01", "kafka:base64:YWJj", "kafka:base64:%", "kafka:blake2b:1"]
)
def test_other_names_with_the_prefix_are_refused(key: str) -> None:
    """The fourth one is a text in base64: the text itself is its name."""
    with pytest.raises(InvalidArgument, match="name of no record's key"):
        record_key(key)


def test_mapper_knows_where_the_records_of_a_stream_may_be() -> None:
    def places(partitioner: str, key: str) -> list[int]:
        mapper = PartitionMapper(partitioner, 7, lambda stream: 5)
        assert mapper.queue_of(StreamId("t", key)) in mapper.queues_with(StreamId("t", key))
        return list(mapper.queues_with(StreamId("t", key)))

    assert places("murmur2", "foobar") == [(-790332482 & 0x7FFFFFFF) % 7]
    assert places("crc32", "123456789") == [0xCBF43926 % 7]
    assert places("ring", "foobar") == [5]
    assert places("any", "foobar") == places("crc32", "") == list(range(7))
    for partitioner in ("any", "murmur2", "crc32", "ring"):
        assert places(partitioner, "kafka:null:3") == [3]
    with pytest.raises(InvalidArgument, match="partition that the topic does not have"):
        PartitionMapper("any", 7).queue_of(StreamId("t", "kafka:null:7"))


class RecordWithKey:
    """A record without headers, of 1 January 1970."""

    def __init__(self, key: bytes, partition: int) -> None:
        self.key = lambda: key
        self.partition = lambda: partition
        self.value = lambda: b"x"
        self.offset = lambda: 0
        self.timestamp = lambda: (1, 0)


def test_records_in_unexpected_partitions_are_reported_also_after_many_keys(caplog: pytest.LogCaptureFixture) -> None:
    mapper = PartitionMapper("murmur2", 2)
    raw = RawFormat("orders", mapper, 1 << 20)

    def read(keys: range, shift: int) -> None:
        for number in keys:
            key = str(number).encode()
            partition = (murmur2_partition(key, 2) + shift) % 2
            raw.batch(cast(KafkaRecord, RecordWithKey(key, partition)), ())

    read(range(CHECKED_KEYS + 100), 0)
    assert not caplog.records
    read(range(CHECKED_KEYS + 100, CHECKED_KEYS + 100 + CHECK_EACH), 1)
    assert ["partitions in another way" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.long
@given(st.text(max_size=20), st.text(max_size=300))
def test_stream_of_a_record_is_encoded_as_every_stream_of_its_name(namespace: str, key: str) -> None:
    raw = RawFormat(namespace, PartitionMapper("any", 1), 1 << 20)
    found = raw.batch(cast(KafkaRecord, RecordWithKey(key.encode(), 0)), ())
    assert isinstance(found, EventBatch)
    assert found.encoded == EventBatch.of(StreamId(*found.stream), [Event(b"x", timestamp_us=0)]).encoded
