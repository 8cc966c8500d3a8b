"""Rows of a DataFrame as encoded batches: whatever the rows are, the batches have them, in order within each stream."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace import Event, StreamId
from headrace.pipeline.grouping import ELEMENT, MAX_ROW_BYTES, EncodedBatches, RowGrouping, batch_starts
from headrace.streams.errors import InvalidArgument, PayloadTooLarge
from headrace.streams.events import BATCH_TARGET_BYTES, MAX_BATCH_EVENTS, MAX_EVENT_BYTES, EventBatch, ScheduledBatch
from headrace.streams.identity import varint
from headrace.streams.incoming import accepted

TYPES = {
    "namespace": pa.string(),
    "key": pa.string(),
    "payload": pa.binary(),
    "headers": pa.map_(pa.string(), pa.string()),
    "id": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
}
NAMES = st.one_of(st.text("ab/é*", max_size=3), st.just("x" * 200))
ROW = st.fixed_dictionaries(
    {
        "namespace": NAMES,
        "key": NAMES,
        "payload": st.binary(max_size=200),
        "headers": st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
        "id": st.one_of(st.none(), st.text(max_size=3)),
        "timestamp": st.one_of(st.none(), st.just(5), st.integers(-(1 << 55), 1 << 57)),
    }
)
Row = Mapping[str, Any]


def table(rows: Sequence[Row], names: Sequence[str] = tuple(TYPES), **types: pa.DataType) -> pa.RecordBatch:
    def value(row: Row, name: str) -> Any:
        found = row.get(name)
        return list(found.items()) if isinstance(found, Mapping) else found

    columns = [pa.array([value(row, name) for row in rows], types.get(name) or TYPES[name]) for name in names]
    return pa.RecordBatch.from_arrays(columns, names)


def batches(grouped: EncodedBatches) -> list[EventBatch]:
    """Split the pieces as the format says, and check each batch as a silo does."""
    data, at, found = b"".join(grouped.pieces), 0, list[EventBatch]()
    heads = batch_starts(np.array(grouped.lengths, np.uint32)).tolist()
    for length, head, count, prefix in zip(grouped.lengths, heads, grouped.counts, grouped.prefixes, strict=True):
        encoded = data[at + head : at + length]
        assert data[at : at + head] == ELEMENT + varint(len(encoded))
        batch = EventBatch.decode(encoded)
        assert (batch.count, len(batch.stream.prefix)) == (count, prefix)
        assert encoded.startswith(batch.stream.prefix)
        assert accepted(encoded, 0).events() == batch.events()
        found.append(batch)
        at += length
    assert at == len(data)
    return found


def by_stream(found: Sequence[EventBatch]) -> dict[StreamId, list[Event]]:
    events: defaultdict[StreamId, list[Event]] = defaultdict(list)
    for batch in found:
        for event in batch.events():
            event.stream = event.token = None
            events[batch.stream].append(event)
    return dict(events)


def expected(rows: Sequence[Row], now: int) -> dict[StreamId, list[Event]]:
    events: defaultdict[StreamId, list[Event]] = defaultdict(list)
    for row in rows:
        time = now if row["timestamp"] is None else row["timestamp"]
        event = Event(row["payload"], row["headers"] or {}, row["id"] or None, time)
        events[StreamId(row["namespace"], row["key"])].append(event)
    return dict(events)


@given(st.lists(ROW, min_size=1, max_size=60), st.integers(0, 5))
@example([{"namespace": "", "key": "", "payload": b"", "headers": None, "id": None, "timestamp": None}], 0)
def test_batches_have_the_rows_of_their_streams_in_order(rows: list[Row], cut: int) -> None:
    grouping = RowGrouping(clock_ns=lambda: 77_000)
    # A slice, as Spark may give one: its columns begin inside their buffers.
    whole = table([rows[0]] * cut + rows)
    assert by_stream(batches(grouping.of(whole.slice(cut)))) == expected(rows, 77)


@given(st.lists(ROW, min_size=1, max_size=20))
def test_columns_may_be_missing_and_payloads_text(rows: list[Row]) -> None:
    plain = [{**row, "payload": row["key"].encode(), "headers": None, "id": None, "timestamp": 3} for row in rows]
    given_rows = table(
        [{**row, "payload": row["key"]} for row in plain], ("timestamp", "key", "payload"), payload=pa.string()
    )
    same = [{**row, "namespace": "all"} for row in plain]
    assert by_stream(batches(RowGrouping("all").of(given_rows))) == expected(same, 0)


def test_wide_columns_are_read_too() -> None:
    rows = [{"namespace": "n", "key": key, "payload": b"1", "timestamp": 1} for key in "aba"]
    wide = table(rows, payload=pa.large_binary(), key=pa.large_string())
    assert [batch.count for batch in batches(RowGrouping().of(wide))] == [2, 1]


def test_many_rows_of_one_stream_are_cut_into_batches() -> None:
    rows = [{"key": "k", "payload": b"x" * 300_000, "timestamp": 1}] * 10
    found = batches(RowGrouping("n").of(table(rows, ("key", "payload"))))
    assert [batch.count for batch in found] == [3, 3, 3, 1]
    assert all(batch.nbytes < BATCH_TARGET_BYTES for batch in found)


def test_many_small_events_of_one_stream_are_cut_too() -> None:
    keys = pa.array(["k"] * (MAX_BATCH_EVENTS + 1))
    rows = pa.RecordBatch.from_arrays([keys, pa.array([b""] * len(keys), pa.binary())], ["key", "payload"])
    assert [batch.count for batch in batches(RowGrouping("n").of(rows))] == [MAX_BATCH_EVENTS, 1]


def test_headers_count_for_the_size_of_a_batch() -> None:
    rows = [{"key": "k", "payload": b"", "headers": {"h": "x" * 60_000}}] * 40
    found = batches(RowGrouping("n").of(table(rows, ("key", "payload", "headers"))))
    assert len(found) == 3
    assert sum(batch.count for batch in found) == 40


def test_as_many_streams_as_sixteen_bits_cannot_number() -> None:
    keys = [str(number) for number in range(70_000)]
    rows = pa.RecordBatch.from_arrays([pa.array(keys + keys), pa.array(keys + keys)], ["key", "payload"])
    found = RowGrouping("n").of(rows)
    assert found.counts == [2] * 70_000
    assert sum(found.lengths) == sum(map(len, found.pieces))


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    [
        ({"key": None}, InvalidArgument, "column 'key': null in the row namespace='n', key=None: "),
        ({"namespace": None}, InvalidArgument, "column 'namespace': null in the row namespace=None, key='k': "),
        ({"payload": None}, InvalidArgument, "column 'payload': null .filter .* in a row of the stream n/k"),
        ({"headers": {"h": None}}, InvalidArgument, "column 'headers': a null value .* in a row of the stream n/k"),
        ({"key": "x" * 1025}, InvalidArgument, "columns 'namespace' and 'key': a stream's key has 1,025 bytes"),
        ({"payload": b"x" * (MAX_EVENT_BYTES + 1)}, PayloadTooLarge, "'payload': that of a row of the stream n/k has"),
        ({"headers": {"h": "x" * MAX_ROW_BYTES}}, PayloadTooLarge, "columns 'payload', 'id' and 'headers': .* n/k has"),
    ],
)
def test_invalid_rows_are_refused_with_column_and_stream(row: Row, kind: type[Exception], told: str) -> None:
    good = {"namespace": "n", "key": "a", "payload": b"1"}
    with pytest.raises(kind, match=told) as refused:
        RowGrouping().of(table([good, good, {**good, "key": "k", **row}, good]))
    assert "\n" not in str(refused.value)


def test_a_name_that_is_no_text_is_refused() -> None:
    key = pa.array([b"\xff"]).view(pa.string())
    rows = pa.RecordBatch.from_arrays([key, pa.array([b"1"])], ["key", "payload"])
    with pytest.raises(InvalidArgument, match=r"column 'key': b'\\xff' is not UTF-8"):
        RowGrouping("n").of(rows)


def test_an_id_that_is_no_text_is_refused() -> None:
    columns = {"key": pa.array(["k"]), "payload": pa.array([b"1"]), "id": pa.array([b"\xff"]).view(pa.string())}
    with pytest.raises(InvalidArgument, match=r"columns 'id' and 'headers': b'\\xff' is not UTF-8"):
        RowGrouping("n").of(pa.RecordBatch.from_pydict(columns))


SCHEDULED = st.fixed_dictionaries(
    {
        "key": st.text("ab", max_size=1),
        "payload": st.binary(max_size=20),
        "delay": st.sampled_from([None, 0.0, 0.5, 3600.0]),
        "priority": st.sampled_from([None, 0, 99]),
    }
)


@given(st.lists(SCHEDULED, min_size=1, max_size=30))
def test_rows_with_another_delay_or_priority_are_another_batch(rows: list[Row]) -> None:
    given_rows = table(rows, ("key", "payload", "delay", "priority"), delay=pa.float64(), priority=pa.int32())
    grouped = RowGrouping("n").of(given_rows)
    found: defaultdict[tuple[str, int, int], list[bytes]] = defaultdict(list)
    for batch in batches(grouped):
        told = accepted(batch.encoded, 0)
        schedule = (told.delay_us, told.priority) if isinstance(told, ScheduledBatch) else (0, 0)
        found[batch.stream.key, *schedule] += batch.payloads()
    wanted: defaultdict[tuple[str, int, int], list[bytes]] = defaultdict(list)
    for row in rows:
        wanted[row["key"], round((row["delay"] or 0) * 1e6), row["priority"] or 0].append(row["payload"])
    assert found == wanted
    assert grouped.scheduled == any(row["delay"] or row["priority"] for row in rows)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.float64(), 1.5), (pa.float32(), 1.5), (pa.int64(), 2), (pa.duration("us"), timedelta(seconds=1.5))],
)
def test_a_delay_is_seconds_or_an_interval(kind: pa.DataType, value: Any) -> None:
    rows = [{"key": "k", "payload": b"", "delay": value}, {"key": "l", "payload": b"", "delay": None}]
    found = batches(RowGrouping("n").of(table(rows, ("key", "payload", "delay"), delay=kind)))
    later, now = (accepted(batch.encoded, 0) for batch in found)
    assert isinstance(later, ScheduledBatch)
    assert timedelta(microseconds=later.delay_us) == (
        value if isinstance(value, timedelta) else timedelta(seconds=value)
    )
    assert type(now) is EventBatch


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("delay", pa.float64(), -0.1),
        ("delay", pa.float64(), float("nan")),
        ("delay", pa.float64(), 1e300),
        ("delay", pa.duration("us"), timedelta(-1)),
        ("priority", pa.int32(), 100),
        ("priority", pa.int32(), -1),
    ],
)
def test_a_delay_or_priority_that_is_none_is_refused(column: str, kind: pa.DataType, value: Any) -> None:
    rows = [{"key": "k", "payload": b"", column: None}, {"key": "l", "payload": b"", column: value}]
    with pytest.raises(InvalidArgument, match=f"column '{column}': .* in a row of the stream n/l: it is from 0 to"):
        RowGrouping("n").of(table(rows, ("key", "payload", column), **{column: kind}))
