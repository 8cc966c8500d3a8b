"""Encoding rows of a DataFrame as batches: grouped by stream, in the order of the rows within each stream.

Whole columns are sorted by stream at once. Then a batch is a few slices of them. Rows of a stream with another delay or
priority form another batch. The format is that of `streams/layout.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..streams import layout
from ..streams.errors import InvalidArgument, PayloadTooLarge
from ..streams.events import BATCH_TARGET_BYTES, MAX_BATCH_EVENTS, MAX_DELAY, MAX_EVENT_BYTES, MAX_PRIORITY, write_rare
from ..streams.field_limits import check_times
from ..streams.identity import StreamId
from ..streams.publishing import MAX_BATCH_BYTES

ELEMENT = b"\x1a"
"""Tag of the field `batches` of a `PublishRequest`: staged bytes go into requests unchanged."""
MAX_ROW_BYTES = MAX_BATCH_BYTES - BATCH_TARGET_BYTES
"""Limit of an event with its id and headers, in bytes, so that each event fits into a batch."""

_PRIORITIES = MAX_PRIORITY + 1
_MAX_DELAY_US = MAX_DELAY // timedelta(microseconds=1)
_ROW_BYTES, _HEADER_BYTES = 16, 16
"""Upper bounds of the bytes of an event, and of each header, besides their text."""
_RADIX = 1 << 16
_KNOWN = 1 << 17

Integers = npt.NDArray[np.int64]
Array = Any
"""A pyarrow.Array."""


class EncodedBatches(NamedTuple):
    """Encoded batches. `pieces` joined are elements of the field `batches` of a `PublishRequest`."""

    pieces: list[bytes | memoryview]
    lengths: list[int]
    """Bytes of each element, with its tag and size."""
    counts: list[int]
    """Events of each batch."""
    prefixes: list[int]
    """Length of the stream's name in each batch, in bytes (`StreamId.prefix`)."""
    scheduled: bool = False
    """Some of them have a delay or a priority."""


class RowGrouping:
    """Turns rows into batches. `namespace` is for rows without that column."""

    def __init__(self, namespace: str | None = None, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._namespace = namespace
        self._clock_ns = clock_ns
        self._known: dict[tuple[str, str], bytes] = {}

    def of(self, rows: pa.RecordBatch) -> EncodedBatches:
        """Return the batches of one row or more. A row without a timestamp gets the present time.

        Raise InvalidArgument or PayloadTooLarge, which name the column and, if it is known, the row's stream.
        """
        names = _Names(rows, self._namespace)
        order, starts, ends = _sorted(names.codes)
        columns = _Columns(rows, order, names, self._clock_ns() // 1000)
        starts, ends = _cut(starts, ends, columns.weights)
        codes = names.codes[order[starts]].tolist()
        streams = [self._prefix(*names.of_code(code)) for code in codes]
        return _encoded(columns, starts, ends, streams, [names.schedule_of(code) for code in codes])

    def _prefix(self, namespace: str, key: str) -> bytes:
        known = self._known.get((namespace, key))
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            try:
                known = self._known[namespace, key] = StreamId(namespace, key).prefix
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"columns 'namespace' and 'key': {error}: shorten it, or use a hash of it"
                ) from None
        return known


def batch_starts(lengths: npt.NDArray[np.uint32]) -> Integers:
    """Return the position of each batch in its element, behind tag and size, from the lengths of the elements."""
    sizes = lengths.astype(np.int64)
    return 2 + (sizes - 2 >= 1 << 7) + (sizes - 3 >= 1 << 14) + (sizes - 4 >= 1 << 21).astype(np.int64)


class _Names:
    """The streams of the rows, and their schedules. `codes` has a number for each row; `of_code` and `schedule_of` give
    the stream and the schedule of a number."""

    def __init__(self, rows: pa.RecordBatch, namespace: str | None) -> None:
        self._keys, codes = _dictionary(rows, "key")
        if namespace is None:
            self._namespaces, of_namespace = _dictionary(rows, "namespace")
            codes = of_namespace * len(self._keys) + codes
        else:
            self._namespaces = [namespace]
        self._schedules = [b""]
        self.codes: Integers = codes
        if (schedules := _schedules(rows, self)) is not None:
            self._schedules, of_schedule = schedules
            self.codes = codes * len(self._schedules) + of_schedule

    def schedule_of(self, code: int) -> bytes:
        """Return the encoded schedule: the last fields of a batch."""
        return self._schedules[code % len(self._schedules)]

    def of_code(self, code: int) -> tuple[str, str]:
        namespace, key = divmod(code // len(self._schedules), len(self._keys))
        return self._namespaces[namespace], self._keys[key]

    def of_row(self, row: int) -> StreamId:
        return StreamId(*self.of_code(int(self.codes[row])))


def _schedules(rows: pa.RecordBatch, names: _Names) -> tuple[list[bytes], Integers] | None:
    """Return the distinct schedules, encoded, and the number of each row's schedule among them. None if no row has
    one."""
    delays, priorities = _delays_us(rows, names), _priorities(rows, names)
    if not (delays.any() or priorities.any()):
        return None
    distinct, which = np.unique(delays * _PRIORITIES + priorities, return_inverse=True)
    return [layout.write_schedule(*divmod(each, _PRIORITIES)) for each in distinct.tolist()], which


def _delays_us(rows: pa.RecordBatch, names: _Names) -> Integers:
    """Return delays in microseconds, given as seconds or as intervals. Null is no delay."""
    if "delay" not in rows.schema.names or rows.column("delay").null_count == len(rows):
        return np.zeros(len(rows), np.int64)
    column = rows.column("delay")
    if pa.types.is_duration(column.type):
        given = column.cast(pa.duration("us")).cast(pa.int64()).fill_null(0).to_numpy().astype(np.float64)
    else:
        given = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) * 1e6
    wrong = ~((given >= 0) & (given <= _MAX_DELAY_US))  # true for NaN, too
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidArgument(
            f"column 'delay': {given[row] / 1e6:,} seconds in a row of the stream {names.of_row(row)}: it is from 0 to "
            f"{MAX_DELAY.days:,} days"
        )
    return np.rint(given).astype(np.int64)


def _priorities(rows: pa.RecordBatch, names: _Names) -> Integers:
    if "priority" not in rows.schema.names:
        return np.zeros(len(rows), np.int64)
    given: Integers = rows.column("priority").cast(pa.int64()).fill_null(0).to_numpy()
    wrong = (given < 0) | (given > MAX_PRIORITY)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidArgument(
            f"column 'priority': {given[row]} in a row of the stream {names.of_row(row)}: it is from 0 to "
            f"{MAX_PRIORITY}"
        )
    return given


def _dictionary(rows: pa.RecordBatch, name: str) -> tuple[list[str], Integers]:
    """Return the distinct texts of a column, and the number of each row's text among them."""
    column = rows.column(name)
    if column.null_count:
        row = _first_true(column.is_null())
        raise InvalidArgument(
            f"column {name!r}: null in the row {_shown(rows, row)}: every event belongs to a stream, so fill it in, or "
            "filter such rows out"
        )
    coded = column.dictionary_encode()
    try:
        return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"column {name!r}: {error.object!r} is not UTF-8: encode it, in hex for example"
        ) from None


def _shown(rows: pa.RecordBatch, row: int) -> str:
    """Return the namespace and key of a row, as far as the rows have these columns."""
    known = {name: rows.column(name)[row].as_py() for name in ("namespace", "key") if name in rows.schema.names}
    return ", ".join(f"{name}={value!r}" for name, value in known.items())


class _Columns:
    """The columns in the order of the streams. Checks their values."""

    def __init__(self, rows: pa.RecordBatch, order: Integers, names: _Names, now_us: int) -> None:
        def refuse(at: int, text: str) -> NoReturn:
            raise InvalidArgument(f"{text} in a row of the stream {names.of_row(int(order[at]))}")

        def taken(name: str) -> Array | None:
            return rows.column(name).take(pa.array(order)) if name in rows.schema.names else None

        payload = taken("payload")
        assert payload is not None
        if payload.null_count:
            row = _first_true(payload.is_null())
            refuse(row, "column 'payload': null (filter such rows out, or give an empty payload)")
        self.offsets, self.data = _text_buffers(payload)
        self.sizes = np.diff(self.offsets).astype("<u4")
        self.times = _times(taken("timestamp"), len(order), now_us)
        self.ids = _some(taken("id"))
        self.headers = _some(taken("headers"))
        self.weights = self._weights(refuse)
        """For each row in this order, and for their end: the bytes of all rows before."""
        self._check_sizes(order, names)

    def _weights(self, refuse: Any) -> Integers:
        extra = np.zeros(len(self.sizes) + 1, np.int64)
        if self.ids is not None:
            extra[1:] += _lengths(self.ids)
        if self.headers is not None:
            at, entries = self.headers.offsets.to_numpy(), self.headers.items
            if entries.null_count:
                row = int(np.searchsorted(at, _first_true(entries.is_null()), "right")) - 1
                refuse(row, "column 'headers': a null value (leave that header out)")
            each = _lengths(self.headers.keys) + _lengths(entries) + _HEADER_BYTES
            extra[1:] += np.diff(np.concatenate([[0], np.cumsum(each)])[at])
        return self.offsets if not extra.any() else self.offsets + np.cumsum(extra)

    def _check_sizes(self, order: Integers, names: _Names) -> None:
        def check(sizes: npt.NDArray[Any], limit: int, what: str) -> None:
            if int(sizes.max()) > limit:
                at = int(sizes.argmax())
                raise PayloadTooLarge(
                    f"{what} of a row of the stream {names.of_row(int(order[at]))}", int(sizes[at]), limit
                )

        check(self.sizes, MAX_EVENT_BYTES, "column 'payload': that")
        if self.weights is not self.offsets:
            check(np.diff(self.weights), MAX_ROW_BYTES, "columns 'payload', 'id' and 'headers': those")


def _text_buffers(column: Array) -> tuple[Integers, memoryview]:
    """Return the start of each value of a column of text or bytes, and the bytes of all values. The first one starts at
    0."""
    width = np.int64 if pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type) else np.int32
    _, offsets, data = column.buffers()
    where = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    body = memoryview(b"") if data is None else memoryview(data)
    return where - where[0], body[int(where[0]) :]


def _times(column: Array | None, count: int, now_us: int) -> npt.NDArray[np.int64]:
    """Return times in microseconds since 1970 UTC: one for each row, or one for all."""
    if column is None or column.null_count == count:
        return np.array([now_us], "<i8")
    times = column.cast(pa.int64()).fill_null(now_us).to_numpy().astype("<i8", copy=False)
    check_times((int(times.min()), int(times.max())), "column 'timestamp'")
    return times


def _some(column: Array | None) -> Array | None:
    """Return the column, or None if it has only nulls."""
    return None if column is None or column.null_count == len(column) else column


def _lengths(column: Array) -> Integers:
    """Return the bytes of each text."""
    return pc.call_function("binary_length", [column]).fill_null(0).to_numpy().astype(np.int64)


def _first_true(mask: Array) -> int:
    """Return the position of the first True."""
    return mask.index(True).as_py()


def _sorted(codes: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the numbers of the rows stream by stream, in the order within each stream, and the start and end of each
    stream among them."""
    small = int(codes.max()) < _RADIX
    order = np.argsort(codes.astype(np.uint16) if small else codes, kind="stable")
    inner = np.flatnonzero(np.diff(codes[order])) + 1
    return order, np.concatenate([[0], inner]), np.concatenate([inner, [len(codes)]])


def _cut(starts: Integers, ends: Integers, weights: Integers) -> tuple[Integers, Integers]:
    """Divide the rows of a stream into several batches if they are too large for one."""
    large = (weights[ends] - weights[starts] > BATCH_TARGET_BYTES) | (ends - starts > MAX_BATCH_EVENTS)
    if not large.any():
        return starts, ends
    cuts = [at for which in np.flatnonzero(large).tolist() for at in _inside(starts[which], ends[which], weights)]
    return np.sort(np.concatenate([starts, cuts])), np.sort(np.concatenate([ends, cuts]))


def _inside(start: int, end: int, weights: Integers) -> Iterator[int]:
    """Yield the rows before which to cut, between `start` and `end`. Every part has at least one row."""
    while True:
        fits = int(np.searchsorted(weights, weights[start] + BATCH_TARGET_BYTES, "right")) - 1
        start = min(max(fits, start + 1), start + MAX_BATCH_EVENTS)
        if start >= end:
            return
        yield start


class _Batches(NamedTuple):
    """The parts of batches. Each array has one value for each batch."""

    starts: Integers
    """The first row."""
    counts: Integers
    prefixes: Integers
    """Bytes of the stream's name."""
    rare: Integers
    """Bytes of ids and headers."""
    bodies: Integers
    """Bytes of payloads."""
    tails: Integers
    """Bytes of delay and priority."""


class _Heads(NamedTuple):
    """Batches without their ids, headers, payloads, delays and priorities. Each array has one value for each batch."""

    buffer: memoryview
    starts: Integers
    middles: Integers
    """The positions at which ids and headers are inserted."""
    ends: Integers
    lengths: Integers
    """Bytes of the complete batch, with the tag and size of the element."""


def _encoded(
    columns: _Columns, starts: Integers, ends: Integers, streams: Sequence[bytes], schedules: Sequence[bytes]
) -> EncodedBatches:
    begins, stops, counts = columns.offsets[starts], columns.offsets[ends], ends - starts
    rare = _rare(columns, starts, counts)
    batches = _Batches(starts, counts, _sizes(streams), _sizes(rare), stops - begins, _sizes(schedules))
    heads = _heads(columns, batches, b"".join(streams))
    buffer, payload = heads.buffer, columns.data
    pieces: list[bytes | memoryview] = []
    for start, middle, end, more, begin, stop, schedule in zip(
        heads.starts.tolist(), heads.middles.tolist(), heads.ends.tolist(), rare, begins.tolist(), stops.tolist(),
        schedules, strict=True,
    ):  # fmt: skip
        if more:
            pieces += (buffer[start:middle], more, buffer[middle:end], payload[begin:stop])
        else:
            pieces += (buffer[start:end], payload[begin:stop])
        if schedule:
            pieces.append(schedule)
    scheduled = bool(batches.tails.any())
    return EncodedBatches(pieces, heads.lengths.tolist(), counts.tolist(), batches.prefixes.tolist(), scheduled)


def _sizes(texts: Sequence[bytes]) -> Integers:
    return np.fromiter(map(len, texts), np.int64, len(texts))


def _heads(columns: _Columns, batches: _Batches, streams: bytes) -> _Heads:
    starts, counts, prefixes, rare, bodies, tails = batches
    times, many = _times_of(columns.times, starts, counts)
    widths, instants = 4 * counts, np.where(many, 8 * counts, 8)
    sizes = prefixes + _field_bytes(widths) + widths + _field_bytes(instants) + instants
    sizes += rare + _field_bytes(bodies) + bodies + tails
    lengths = _field_bytes(sizes) + sizes
    ends = np.cumsum(lengths - rare - bodies - tails)
    begins = np.concatenate([[0], ends[:-1]])
    buffer = np.empty(int(ends[-1]), np.uint8)
    at = _put_head(buffer, begins, ELEMENT, sizes)
    buffer[_runs(at, prefixes)] = np.frombuffer(streams, np.uint8)
    at = _put_head(buffer, at + prefixes, b"\x1a", widths)
    _at_any_byte(buffer, "<u4")[np.repeat(at, counts) + 4 * _indexes(counts)] = columns.sizes
    at = _put_head(buffer, at + widths, b"\x22", instants)
    each = instants // 8
    _at_any_byte(buffer, "<i8")[np.repeat(at, each) + 8 * _indexes(each)] = times
    middles = at + instants
    _put_head(buffer, middles, b"\x7a", bodies)
    return _Heads(memoryview(buffer.data), begins, middles, ends, lengths)


def _times_of(times: Integers, starts: Integers, counts: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the times to write, and for each batch whether it has one for each event, or one for all."""
    if len(times) == 1:
        return np.broadcast_to(times, len(starts)), np.zeros(len(starts), np.bool_)
    many = np.minimum.reduceat(times, starts) != np.maximum.reduceat(times, starts)
    written = np.repeat(many, counts)
    written[starts] = True
    return times[written], many


def _rare(columns: _Columns, starts: Integers, counts: Integers) -> list[bytes]:
    """Return the columns of ids and headers of each batch, empty if none of its events has any."""
    ids, headers = columns.ids, columns.headers
    if ids is None and headers is None:
        return [b""] * len(starts)
    try:
        texts = [""] * len(columns.sizes) if ids is None else [text or "" for text in ids.to_pylist()]
        maps = [{}] * len(texts) if headers is None else [dict(each or ()) for each in headers.to_pylist()]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"columns 'id' and 'headers': {error.object!r} is not UTF-8: encode it, in hex for example"
        ) from None
    return [
        write_rare(texts[start : start + count], maps[start : start + count])
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]


# ---- writing at many places at once ----------------------------------------------------------------------------------


def _indexes(counts: Integers) -> Integers:
    """Return 0, 1, … for each of the counts, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)


def _runs(starts: Integers, lengths: Integers) -> Integers:
    """Return the position of every byte of these runs."""
    return np.repeat(starts, lengths) + _indexes(lengths)


def _at_any_byte(buffer: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[Any]:
    """Return a view with the number of this kind that begins at each byte."""
    width = np.dtype(kind).itemsize
    return np.ndarray((len(buffer) - width + 1,), kind, buffer, strides=(1,))


def _field_bytes(sizes: Integers) -> Integers:
    """Return the bytes of each field's tag and size."""
    return 2 + (sizes >= 1 << 7) + (sizes >= 1 << 14) + (sizes >= 1 << 21)


def _put_head(buffer: npt.NDArray[np.uint8], at: Integers, tag: bytes, sizes: Integers) -> Integers:
    """Write a field's tag and size at each place. Returns where its content goes. No size has more than 28 bits."""
    buffer[at] = tag[0]
    at = at + 1
    left = sizes
    places = at
    while True:
        buffer[places] = left & 0x7F | (left >= 0x80) << 7
        more = left >= 0x80
        if not more.any():
            return at + _field_bytes(sizes) - 1
        places, left = places[more] + 1, left[more] >> 7
