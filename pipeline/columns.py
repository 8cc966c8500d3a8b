"""Stored batches as Arrow columns, without a loop over events, and with next to none over batches.

The positions of the columns are computed for all batches of a chunk at once, because a batch of the log may have one
event or thousands. This relies on the order in which `streams/layout.py` writes them: names, sizes, timestamps,
payload. The protobuf library reads batches of any other form (columns in pieces, ids, headers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..streams.errors import CorruptRecord, InvalidArgument
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from ..streams.layout import message_of
from ..streams.subscriptions import Selector
from .access import BatchChunk

Integers = npt.NDArray[np.int64]

TIMESTAMP = pa.timestamp("us", "UTC")
HEADERS = pa.map_(pa.string(), pa.string())
TYPES: dict[str, pa.DataType] = {
    "namespace": pa.string(),
    "key": pa.string(),
    "payload": pa.binary(),
    "headers": HEADERS,
    "id": pa.string(),
    "timestamp": TIMESTAMP,
    "queue": pa.int32(),
    "offset": pa.int64(),
    "index": pa.int32(),
    "stored": TIMESTAMP,
}
"""All columns. `stored` is the time when the batch was stored, null if the adapter does not know."""
DEFAULT = tuple(TYPES)[:-1]

_SIZES, _TIMESTAMPS, _PAYLOAD = 0x1A, 0x22, 0x7A
_KNOWN = 1 << 17


class ColumnReader:
    """Turns chunks into record batches of the chosen columns. Remembers the names of streams."""

    def __init__(self, names: Sequence[str], selector: Selector, *, max_known: int = _KNOWN) -> None:
        self._names = names
        self._schema = pa.schema([(name, TYPES[name]) for name in names])
        self._streams = _StreamNames(selector, max_known)

    def batches(self, queue: int, chunks: Iterator[BatchChunk]) -> Iterator[pa.RecordBatch]:
        """Yield a record batch for each chunk with selected events. Raise CorruptRecord for a damaged batch."""
        for chunk in chunks:
            try:
                found = self._record_batch(queue, chunk)
            except InvalidArgument as error:
                raise CorruptRecord(queue, _damaged_offset(chunk), str(error)) from None
            if found is not None:
                yield found

    def _record_batch(self, queue: int, chunk: BatchChunk) -> pa.RecordBatch | None:
        codes = self._streams.codes(chunk)
        if (selected := self._streams.selected(codes)) is not None:
            chunk, codes = _selected_part(chunk, selected), codes[selected]
        if not len(chunk.counts):
            return None
        rows = _Rows(queue, chunk, self._streams, codes)
        return pa.RecordBatch.from_arrays([_COLUMNS[name](rows) for name in self._names], schema=self._schema)


class _StreamNames:
    """Gives each stream a number, its code, and keeps its names as Arrow arrays. Forgets all if there are too many."""

    def __init__(self, selector: Selector, max_known: int) -> None:
        self._max_known = max_known
        self._matches = None if selector.pattern == "*/*" else selector.matcher()
        self._forget()

    def _forget(self) -> None:
        self._codes: dict[bytes, int] = {}
        self.namespaces = pa.array([], pa.string())
        self.keys = pa.array([], pa.string())
        self._selected = np.empty(0, bool)

    def codes(self, chunk: BatchChunk) -> Integers:
        """Return the code of each batch's stream. Codes of earlier chunks become invalid."""
        if len(self._codes) > self._max_known:
            self._forget()
        names = _names(chunk).dictionary_encode()
        distinct: list[bytes] = names.dictionary.to_pylist()
        if new := [name for name in distinct if name not in self._codes]:
            self._learn(new)
        return np.array([self._codes[name] for name in distinct], np.int64)[names.indices.to_numpy()]

    def selected(self, codes: Integers) -> npt.NDArray[np.bool_] | None:
        """Return which batches are of selected streams. None: all are."""
        if self._matches is None:
            return None
        selected = self._selected[codes]
        return None if selected.all() else selected

    def _learn(self, names: Sequence[bytes]) -> None:
        streams = [StreamId(message.namespace, message.key) for message in map(message_of, names)]
        self._codes.update(zip(names, range(len(self._codes), len(self._codes) + len(names)), strict=True))
        self.namespaces = pa.concat_arrays([self.namespaces, pa.array([stream.namespace for stream in streams])])
        self.keys = pa.concat_arrays([self.keys, pa.array([stream.key for stream in streams])])
        if self._matches is not None:
            self._selected = np.append(self._selected, [self._matches(stream) for stream in streams])


def _names(chunk: BatchChunk) -> pa.BinaryArray:
    """Return the encoded stream name of each batch."""
    if chunk.prefixes.all():
        return _slices(chunk.source, chunk.starts, chunk.starts + chunk.prefixes)
    return pa.array([EventBatch.decode(encoded).stream.prefix for encoded in _encoded(chunk)], pa.binary())


def _slices(source: bytes, starts: Integers, ends: Integers) -> pa.BinaryArray:
    """Return pieces of a buffer as values: every second value of an array over all of it, which Arrow then copies."""
    bounds = np.empty(2 * len(starts), np.int32)
    bounds[::2], bounds[1::2] = starts, ends
    whole = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(source)])
    return whole.take(pa.array(np.arange(0, len(bounds), 2, dtype=np.int32)))


def _joined(source: bytes, starts: Integers, ends: Integers) -> pa.Buffer:
    """Concatenate pieces of a buffer."""
    return _slices(source, starts, ends).buffers()[2] or pa.py_buffer(b"")


def _selected_part(chunk: BatchChunk, selected: npt.NDArray[np.bool_]) -> BatchChunk:
    source, starts, ends, prefixes, counts, offsets, stored_us = chunk
    kept = (values[selected] for values in (starts, ends, prefixes, counts, offsets))
    return BatchChunk(source, *kept, stored_us=None if stored_us is None else stored_us[selected])


def _encoded(chunk: BatchChunk) -> Iterator[bytes]:
    for start, end in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True):
        yield chunk.source[start:end]


def _damaged_offset(chunk: BatchChunk) -> int:
    """Return the offset of the first batch that cannot be read."""
    for offset, count, encoded in zip(chunk.offsets.tolist(), chunk.counts.tolist(), _encoded(chunk), strict=True):
        try:
            if EventBatch.decode(encoded).count != count:
                return offset
        except InvalidArgument:
            return offset
    return int(chunk.offsets[0])


class _Places(NamedTuple):
    """Positions of the columns of each batch in the source."""

    sizes: Integers
    times: Integers
    times_bytes: Integers
    payloads: Integers
    irregular: npt.NDArray[np.bool_]
    """The protobuf library must read the batch; its positions are meaningless."""
    widths: Integers
    """Payload size of each event, of all batches."""


class _Rows:
    """The events of a chunk, by columns."""

    def __init__(self, queue: int, chunk: BatchChunk, streams: _StreamNames, codes: Integers) -> None:
        self.queue = queue
        self.chunk = chunk
        self.streams = streams
        self.codes = codes
        self.count = int(chunk.counts.sum())
        self.firsts = np.cumsum(chunk.counts) - chunk.counts

    def each(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat the value of each batch for each of its events."""
        return values if self.count == len(values) else np.repeat(values, self.chunk.counts)

    @cached_property
    def places(self) -> _Places:
        return _places(self.chunk, self.firsts)

    @cached_property
    def index(self) -> Integers:
        """Index of each event in its batch."""
        return np.arange(self.count) - self.each(self.firsts)

    @cached_property
    def irregular(self) -> Mapping[int, EventBatch]:
        """The batches that the protobuf library has read, by their position in the chunk."""
        chunk, found = self.chunk, dict[int, EventBatch]()
        for at in np.flatnonzero(self.places.irregular).tolist():
            encoded = chunk.source[int(chunk.starts[at]) : int(chunk.ends[at])]
            batch = found[at] = EventBatch.decode(encoded, int(chunk.offsets[at]))
            if batch.count != chunk.counts[at]:
                raise InvalidArgument(f"damaged batch: it has {batch.count} events, not {chunk.counts[at]}")
        return found

    def events_of(self, at: int) -> slice:
        """Return the events of the batch at a position in the chunk."""
        first = int(self.firsts[at])
        return slice(first, first + int(self.chunk.counts[at]))

    def payloads(self) -> pa.Array:
        places, chunk, widths = self.places, self.chunk, self.places.widths
        if self.irregular:
            return self._irregular_payloads()
        offsets = np.zeros(self.count + 1, np.int32)
        np.cumsum(widths, out=offsets[1:])
        joined = _joined(chunk.source, places.payloads, chunk.ends)
        return pa.Array.from_buffers(pa.binary(), self.count, [None, pa.py_buffer(offsets), joined])

    def _irregular_payloads(self) -> pa.Array:
        places, chunk, pieces = self.places, self.chunk, list[bytes]()
        for at in range(len(chunk.counts)):
            if at in self.irregular:
                pieces += self.irregular[at].payloads()
            else:
                widths = places.widths[self.events_of(at)]
                ends = places.payloads[at] + np.cumsum(widths)
                pieces += [chunk.source[end - width : end] for end, width in zip(ends, widths, strict=True)]
        return pa.array(pieces, pa.binary())

    def timestamps(self) -> pa.Array:
        places = self.places
        joined = _joined(self.chunk.source, places.times, places.times + places.times_bytes)
        times = np.frombuffer(joined, "<i8")
        if len(times) == len(self.chunk.counts):
            times = self.each(times)
        elif len(times) != self.count:  # some batches have one for each event, others one for all
            given = places.times_bytes // 8
            at = self.each(np.cumsum(given) - given)
            times = times[at + np.where(self.each(given) > 1, self.index, 0)]
        if self.irregular:
            times = times.copy()
            for batch_at, batch in self.irregular.items():
                times[self.events_of(batch_at)] = batch.timestamps_us()
        return _timestamps(times)

    def rare(self, kind: pa.DataType, of_batch: Callable[[EventBatch], Sequence[Any]]) -> pa.Array:
        """Return a column that only irregular batches have."""
        if not self.irregular:
            return pa.nulls(self.count, kind)
        values: list[Any] = [None] * self.count
        for at, batch in self.irregular.items():
            values[self.events_of(at)] = of_batch(batch)
        return pa.array(values, kind)


def _places(chunk: BatchChunk, firsts: Integers) -> _Places:
    """Compute the positions of all columns in all batches at once. A batch of another form is irregular."""
    source, counts = np.frombuffer(chunk.source, np.uint8), chunk.counts
    sizes_tag = chunk.starts + chunk.prefixes
    sizes = sizes_tag + 1 + _varint_bytes(4 * counts)
    times_tag = sizes + 4 * counts
    regular = (chunk.prefixes > 0) & (times_tag + 10 < chunk.ends)
    sizes, times_tag = np.where(regular, sizes, 0), np.where(regular, times_tag, 0)
    regular &= (source[np.where(regular, sizes_tag, 0)] == _SIZES) & (source[times_tag] == _TIMESTAMPS)
    widths = np.frombuffer(_joined(chunk.source, sizes, sizes + 4 * counts), "<u4").astype(np.int64)
    totals = np.add.reduceat(widths, firsts)
    times_bytes = np.where(source[times_tag + 1] == 8, 8, 8 * counts)
    times = times_tag + 1 + _varint_bytes(times_bytes)
    # Between the timestamps and the payload are only the tag and the size of the payload.
    payload_tag = times + times_bytes
    payloads = chunk.ends - totals
    regular &= payloads == payload_tag + 1 + _varint_bytes(totals)
    regular &= source[np.where(regular, payload_tag, 0)] == _PAYLOAD
    return _Places(sizes, times, times_bytes, payloads, ~regular, widths)


def _varint_bytes(values: Integers) -> Integers:
    return 1 + (values >= 1 << 7).astype(np.int64) + (values >= 1 << 14) + (values >= 1 << 21) + (values >= 1 << 28)


def _timestamps(times: npt.NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(TIMESTAMP, len(times), [None, pa.py_buffer(np.ascontiguousarray(times, np.int64))])


def _stored(rows: _Rows) -> pa.Array:
    if rows.chunk.stored_us is None:
        return pa.nulls(rows.count, TIMESTAMP)
    return _timestamps(rows.each(rows.chunk.stored_us))


_COLUMNS: dict[str, Callable[[_Rows], pa.Array]] = {
    "namespace": lambda rows: rows.streams.namespaces.take(pa.array(rows.each(rows.codes))),
    "key": lambda rows: rows.streams.keys.take(pa.array(rows.each(rows.codes))),
    "payload": _Rows.payloads,
    "headers": lambda rows: rows.rare(HEADERS, lambda batch: [event.headers or None for event in batch.events()]),
    "id": lambda rows: rows.rare(pa.string(), lambda batch: [event.id for event in batch.events()]),
    "timestamp": _Rows.timestamps,
    "queue": lambda rows: pa.array(np.full(rows.count, rows.queue, np.int32)),
    "offset": lambda rows: pa.array(rows.each(rows.chunk.offsets)),
    "index": lambda rows: pa.array(rows.index.astype(np.int32)),
    "stored": _stored,
}
