"""Stored batches as Arrow columns: whatever the batches are, the rows are their events."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Event, Selector, StreamId
from headrace.pipeline.access import BatchChunk
from headrace.pipeline.columns import TYPES, ColumnReader
from headrace.proto.v1 import events_pb2
from headrace.streams.errors import CorruptRecord
from headrace.streams.events import EventBatch

ALL = tuple(TYPES)
NAMES = st.text("ab/é*", min_size=1, max_size=5)
STREAMS = st.builds(StreamId, NAMES, NAMES)
TIMES = st.integers(-(1 << 55), 1 << 57)
EVENTS = st.builds(
    Event,
    payload=st.binary(max_size=300),
    headers=st.one_of(st.just({}), st.just({}), st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
    id=st.one_of(st.none(), st.none(), st.text(min_size=1, max_size=3)),
    timestamp_us=st.one_of(st.just(1_000_000), TIMES),
)
PLAIN = st.builds(Event, payload=st.binary(max_size=300), timestamp_us=TIMES)
SAME_TIME = st.binary(max_size=20_000)
BATCHES = st.builds(
    lambda stream, events: EventBatch.of(stream, events, now_us=7),
    STREAMS,
    st.one_of(*(st.lists(kind, min_size=1, max_size=40) for kind in (EVENTS, PLAIN, SAME_TIME))),
)


def chunk_of(
    batches: Sequence[EventBatch], *, first: int = 0, known: bool = True, gap: bytes = b"\x1a\x22"
) -> BatchChunk:
    """Return the batches as they may lie in a buffer, with other bytes between them."""
    source, starts = b"", list[int]()
    for batch in batches:
        source += gap
        starts.append(len(source))
        source += batch.encoded
    sizes = np.array([len(batch.encoded) for batch in batches])
    begins = np.array(starts)
    prefixes = [len(batch.stream.prefix) if known else 0 for batch in batches]
    counts = [batch.count for batch in batches]
    offsets = np.arange(first, first + len(batches))
    stored = np.arange(5, 5 + len(batches))
    return BatchChunk(source, begins, begins + sizes, np.array(prefixes), np.array(counts), offsets, stored)


def rows(
    chunks: Iterable[BatchChunk], names: Sequence[str] = ALL, selector: str = "*/*", **limits: int
) -> list[dict[str, Any]]:
    reader = ColumnReader(names, Selector(selector), **limits)
    return [row for batch in reader.batches(3, iter(chunks)) for row in plain(batch)]


def plain(batch: Any) -> list[dict[str, Any]]:
    """Rows, with times as microseconds: Python's own end with the year 9999."""
    columns = {
        name: (column.cast("int64") if name in ("timestamp", "stored") else column).to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def expected(batches: Sequence[EventBatch], first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "namespace": batch.stream.namespace,
            "key": batch.stream.key,
            "payload": event.payload,
            "headers": sorted(event.headers.items()) if event.headers else None,
            "id": event.id,
            "timestamp": event.timestamp_us,
            "queue": 3,
            "offset": first + at,
            "index": index,
            "stored": 5 + at,
        }
        for at, batch in enumerate(batches)
        for index, event in enumerate(batch.events())
    ]


def sorted_headers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"headers": sorted(row["headers"]) if row["headers"] else None} for row in found]


@given(st.lists(BATCHES, min_size=1, max_size=12), st.booleans(), st.binary(max_size=3))
def test_rows_are_the_events(batches: list[EventBatch], known: bool, gap: bytes):
    chunks = [chunk_of(batches, known=known, gap=gap), chunk_of(batches[::-1], first=1000, gap=gap)]
    assert sorted_headers(rows(chunks)) == expected(batches) + expected(batches[::-1], 1000)


@given(st.lists(BATCHES, min_size=1, max_size=12), st.permutations(ALL), st.integers(1, len(ALL)))
def test_columns_are_those_that_are_chosen(batches: list[EventBatch], names: list[str], count: int):
    chosen = names[:count]
    every = rows([chunk_of(batches)])
    assert rows([chunk_of(batches)], chosen) == [{name: row[name] for name in chosen} for row in every]


@given(st.lists(BATCHES, min_size=1, max_size=12), st.sampled_from(["a/*", "*/b*", "?/?", "a/a"]))
def test_only_selected_streams_are_read(batches: list[EventBatch], selector: str):
    matches = Selector(selector).matcher()
    wanted = [row for row in expected(batches) if matches(StreamId(row["namespace"], row["key"]))]
    assert sorted_headers(rows([chunk_of(batches)], selector=selector)) == wanted


def test_a_batch_that_another_encoder_wrote_is_read_as_well():
    theirs = events_pb2.EventBatch(
        namespace="a", key="b", sizes=[1, 2], timestamps_us=[7], payload=b"xyz"
    ).SerializeToString()
    pieces = events_pb2.EventBatch(sizes=[1], payload=b"q").SerializeToString()
    twice = theirs + events_pb2.EventBatch(sizes=[1], timestamps_us=[8, 9]).SerializeToString()
    stream = StreamId("a", "b")
    assert pieces
    batches = [EventBatch(stream, theirs, 2), EventBatch.of(stream, [b"n"], now_us=1)]
    assert [row["payload"] for row in rows([chunk_of(batches)])] == [b"x", b"yz", b"n"]
    with pytest.raises(CorruptRecord, match="offset 4"):
        rows([chunk_of([EventBatch.of(stream, [b"n"]), EventBatch(stream, twice, 3)], first=3)])


def test_a_batch_with_another_number_of_events_than_is_noted_is_damaged():
    stream = StreamId("a", "b")
    wrong = EventBatch(stream, EventBatch.of(stream, [b"1", b"2"]).encoded, 3)
    with pytest.raises(CorruptRecord, match="queue 3, offset 1:"):
        rows([chunk_of([EventBatch.of(stream, [b"n"]), wrong])])


def test_many_streams_are_forgotten_and_met_again():
    batches = [EventBatch.of(StreamId("n", str(key)), [b"x"], now_us=1) for key in range(5)]
    found = rows([chunk_of(batches), chunk_of(batches[::-1]), chunk_of(batches)], ("key",), max_known=3)
    assert [row["key"] for row in found] == [*"01234", *"43210", *"01234"]
