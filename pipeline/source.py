"""Streams as a PySpark data source: `spark.read.format("headrace")`, `spark.readStream.format("headrace")`.

Spark makes a `HeadraceSource` in the driver, asks it for a reader, and sends the pickled reader to the executors.
So a reader holds only options, and each process opens the queues itself (`ProviderPlace.open`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ..streams.errors import CorruptRecord, InvalidArgument, NotFound, OffsetsGone, PermissionDenied
from ..streams.subscriptions import Selector
from .access import QueueAccess, RetainedRange
from .columns import TYPES as COLUMN_TYPES
from .columns import ColumnReader
from .decoding import PayloadDecoder, PayloadDecoding, decoder_of, value_ddl
from .options import VALUE, DecodeOptions, SourceOptions, source_options
from .place import ProviderPlace
from .planning import QueueRange, estimated_events, plan, ranges
from .positions import Offset, QueryProgress, from_spark, resolve, shares, spark_offset

_DDL = {
    "namespace": "STRING",
    "key": "STRING",
    "payload": "BINARY",
    "headers": "MAP<STRING, STRING>",
    "id": "STRING",
    "timestamp": "TIMESTAMP",
    "queue": "INT",
    "offset": "BIGINT",
    "index": "INT",
    "stored": "TIMESTAMP",
}
_TABLE_OPTION = "option."
_COMMENT = "headrace: "
"""Spark (4.3) passes the options of a table to the source when the table is created, and not when it is read. So they
are kept in the schema, as the comment of the last column, behind this text."""
_SOUGHT_EVENTS = 1_000_000
"""The check of a namespace reads at most this many events."""


class HeadraceSource(DataSource):
    """The format `headrace`. See docs/spark.md for its options."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str | StructType:
        given = _table_options(self.options)
        if given is not None and "token" in map(str.lower, given):
            raise InvalidArgument(
                "option 'token': all users of the table could read it; give it when reading, as in "
                "SELECT * FROM orders WITH (token 'hr_...')"
            )
        options = source_options(self.options if given is None else given)
        types = _DDL if options.decode is None else {**_DDL, VALUE: value_ddl(options.decode)}
        ddl = ", ".join(f"`{name}` {types[name]}" for name in options.columns)
        return ddl if given is None else f"{ddl} COMMENT {_quoted(_COMMENT + json.dumps(given))}"

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._reading(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return StreamReader(self._reading(schema))

    def _reading(self, schema: StructType) -> _Reading:
        return _Reading({**_options_in(schema), **self.options}, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from .sink import batch_writer  # noqa: PLC0415 (a reader does not need it)

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        from .sink import stream_writer  # noqa: PLC0415

        return stream_writer(self.options, schema, overwrite)


def _table_options(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS of a CREATE TABLE. None: the options are of `spark.read` and its like.

    Spark passes each option of a table twice, the second time as `option.NAME`, among properties of its own.
    """
    options = {name.removeprefix(_TABLE_OPTION): text for name, text in given.items() if name.startswith(_TABLE_OPTION)}
    return options or None


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _options_in(schema: StructType) -> Mapping[str, str]:
    """Return the options of the table that is read, see `HeadraceSource.schema`."""
    comments = [str((field.metadata or {}).get("comment", "")) for field in schema.fields]
    return next((json.loads(text.removeprefix(_COMMENT)) for text in comments if text.startswith(_COMMENT)), {})


class RangePartition(InputPartition):
    """Ranges of queues that one task reads, one after the other."""

    def __init__(self, parts: Sequence[QueueRange]) -> None:
        self.ranges = parts


class _Reading:
    """The common part of both readers."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.place = ProviderPlace.of(options)
        self.options = source_options(options)
        arrow = to_arrow_schema(schema, timezone="UTC")
        _check_schema(arrow, self.options.columns)
        decode = self.options.decode
        self.decoding = decode and PayloadDecoding(_decoder(decode, arrow), self.options.columns, fail=decode.fail)

    def check_retained(self, queue: int, start: int, first: int) -> int:
        """Return the offset where reading starts. Raise OffsetsGone if `failOnDataLoss` is set and `start` is lost."""
        if start >= first:
            return start
        if self.options.fail_on_data_loss:
            raise _gone(OffsetsGone(queue, start, first))
        return first

    def check_length(self, queue: int, offset: int, end: int) -> None:
        """Raise InvalidArgument if `failOnDataLoss` is set and a checkpoint is beyond the end of a queue."""
        if offset > end and self.options.fail_on_data_loss:
            raise InvalidArgument(
                f"the query's checkpoint is at offset {offset} of queue {queue}, which ends at {end}: the provider was "
                "made anew, or is an older copy; use another checkpointLocation, or set the option 'failOnDataLoss' to "
                "false to go on with the stored events"
            )

    def check_same(self, progress: QueryProgress) -> None:
        """Raise InvalidArgument if `failOnDataLoss` is set and a checkpoint is of another log."""
        if not progress.is_same_log and self.options.fail_on_data_loss:
            raise InvalidArgument(
                "the query's checkpoint is of another provider, or of one that was deleted and made anew: use another "
                "checkpointLocation, or set the option 'failOnDataLoss' to false to read this one from its first batch"
            )

    def parts(
        self, starts: Sequence[int], ends: Sequence[int], states: Sequence[RetainedRange]
    ) -> list[RangePartition]:
        firsts = [state.first for state in states]
        kept = [
            self.check_retained(queue, start, first) if start < end else start
            for queue, (start, end, first) in enumerate(zip(starts, ends, firsts, strict=True))
        ]
        wanted = [(one, estimated_events(one, states[one.queue])) for one in ranges(kept, ends)]
        return [RangePartition(parts) for parts in plan(wanted, self.options.events_per_partition)]

    def batches(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(part, RangePartition):  # Spark's own partition, if there is nothing to read
            return
        access, options = self.place.open(), self.options
        decoding = self.decoding
        columns = ColumnReader(decoding.reads if decoding else options.columns, options.selector)
        for one in part.ranges:
            batches = self._batches(access, columns, one)
            yield from map(decoding.with_value, batches) if decoding else batches

    def _batches(self, access: QueueAccess, columns: ColumnReader, one: QueueRange) -> Iterator[pa.RecordBatch]:
        try:
            yield from columns.batches(one.queue, access.read(one.queue, one.start, one.end, self.options.selector))
        except OffsetsGone as gone:  # retention removed it after the query was planned
            if self.options.fail_on_data_loss:
                raise _gone(gone) from None
            first = access.states()[one.queue].first
            if one.start < first < one.end:
                yield from self._batches(access, columns, one._replace(start=first))


def _gone(error: OffsetsGone) -> OffsetsGone:
    error.args = (f"{error}; set the option 'failOnDataLoss' to false to go on without them",)
    return error


def _check_schema(given: pa.Schema, names: Sequence[str]) -> None:
    """Raise InvalidArgument if the user has given another schema."""
    wrong = [field.name for field in given if field.type != COLUMN_TYPES.get(field.name, field.type)]
    if wrong or list(given.names) != list(names):
        raise InvalidArgument(
            f"the columns are {', '.join(names)}, each of its own type: leave out schema(...), and choose some by the "
            "option 'columns'"
        )


def _decoder(decode: DecodeOptions, schema: pa.Schema) -> PayloadDecoder:
    value = schema.field(VALUE).type if VALUE in schema.names else pa.struct([])
    return decoder_of(decode, value)


class BatchReader(DataSourceReader):
    """Reads from one position to another, both fixed when the query is planned."""

    def __init__(self, reading: _Reading) -> None:
        self._reading = reading

    def partitions(self) -> Sequence[RangePartition]:
        access, options = self._reading.place.open(), self._reading.options
        states = access.states()
        ends = resolve("end", options.end, options.selector, access)
        starts = resolve("start", options.start, options.selector, access)
        with suppress(CorruptRecord, OffsetsGone):  # the read raises them, if it reaches them
            _check_namespace(access, options, ranges([state.first for state in states], ends))
        return self._reading.parts(starts, ends, states)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reading.batches(partition)


def _check_namespace(access: QueueAccess, options: SourceOptions, whole: Sequence[QueueRange]) -> None:
    """Raise NotFound for a namespace without any event: it may be mistyped.

    If there are more events than `_SOUGHT_EVENTS`, the namespace is assumed to be among the others: reading on would
    cost too much.
    """
    namespace = options.selector.pattern.partition("/")[0]
    if any(wildcard in namespace for wildcard in "*?"):
        return
    selector, left = Selector(f"{namespace}/*"), _SOUGHT_EVENTS
    columns, others = ColumnReader(("namespace",), selector), ColumnReader(("namespace",), Selector("*/*"))
    found: set[str] = set()
    for queue, start, end in whole:
        reached = access.end_within(queue, start, end, left, None)
        for _ in columns.batches(queue, access.read(queue, start, reached, selector)):
            return
        try:
            for batch in others.batches(queue, access.read(queue, start, reached, Selector("*/*"))):
                left -= batch.num_rows
                found |= set(batch.column(0).unique().to_pylist())
        except PermissionDenied:  # a token for this namespace alone must not learn of others
            return
        if left <= 0 or reached < end:
            return
    there = ", ".join(sorted(found)[:10]) or "none"
    raise NotFound(f"option 'namespace': no event was ever published to {namespace!r}; there are: {there}")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new events until the query is stopped. Spark keeps the progress in the query's checkpoint."""

    def __init__(self, reading: _Reading) -> None:
        self._reading = reading
        if self._reading.options.end != "latest":
            raise InvalidArgument(
                "options 'end', 'endingOffsets' and 'endingTimestamp' are for spark.read: a streaming query reads "
                "until it is stopped"
            )
        self._until: list[int] | None = None
        self._read_at = time.monotonic()
        """When the last micro-batch with events was planned."""

    def initialOffset(self) -> Offset:  # noqa: N802
        options = self._reading.options
        return self._offset(resolve("start", options.start, options.selector, self._access))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._reading.options
        if options.max_events is not None:
            return ReadMaxRows(options.max_events)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = [state.next for state in self._access.states()]

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> Offset:  # noqa: N802
        states = self._access.states()
        starts = self._starts(self._progress(start), states)
        ends = self._until or [state.next for state in states]
        ends = [max(end, start) for start, end in zip(starts, ends, strict=True)]
        if self._until is None and self._waits_for_more(starts, ends, states):
            return self._offset(starts)
        self._read_at = time.monotonic()
        if isinstance(limit, ReadAllAvailable):
            return self._offset(ends)
        return self._offset(self._limited(starts, ends, states))

    def _waits_for_more(self, starts: Sequence[int], ends: Sequence[int], states: Sequence[RetainedRange]) -> bool:
        """Return whether there are fewer events than `minEventsPerTrigger`, and `maxTriggerDelay` is not over."""
        options = self._reading.options
        if options.min_events is None or time.monotonic() - self._read_at >= options.max_delay_s:
            return False
        waiting = sum(estimated_events(one, states[one.queue]) for one in ranges(starts, ends))
        return waiting < options.min_events

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        return self._offset([state.next for state in self._access.states()])

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[RangePartition]:
        states = self._access.states()
        begun, until = self._progress(start), self._progress(end)
        if not until.is_same_log:  # the plan was made for another log, which is gone
            return []
        starts, ends = begun.offsets if begun.is_same_log else [state.first for state in states], until.offsets
        for queue, state in enumerate(states):
            if starts[queue] > ends[queue]:  # see `_starts`
                starts[queue] = state.first
            if ends[queue] > state.next:
                self._reading.check_length(queue, ends[queue], state.next)
                starts[queue] = ends[queue]
        return self._reading.parts(starts, ends, states)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reading.batches(partition)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Do nothing: Spark's checkpoint has the progress, and the provider decides on retention."""

    @property
    def _access(self) -> QueueAccess:
        return self._reading.place.open()

    def _offset(self, offsets: Sequence[int]) -> Offset:
        return spark_offset(offsets, self._access, self._reading.options.selector)

    def _progress(self, offset: Mapping[str, Any]) -> QueryProgress:
        progress = from_spark(offset, self._access, self._reading.options.selector)
        self._reading.check_same(progress)
        return progress

    def _starts(self, progress: QueryProgress, states: Sequence[RetainedRange]) -> list[int]:
        """Return the next offset of each queue. If the log is another one, or a queue ends before the offset, and
        that is no error, reading begins again at the first batch."""
        if not progress.is_same_log:
            return [state.first for state in states]
        starts = list(progress.offsets)
        for queue, state in enumerate(states):
            if starts[queue] > state.next:
                self._reading.check_length(queue, starts[queue], state.next)
                starts[queue] = state.first
        return starts

    def _limited(self, starts: Sequence[int], ends: Sequence[int], states: Sequence[RetainedRange]) -> list[int]:
        """Return the ends that the limits allow, each queue in proportion to its waiting events."""
        options, wanted = self._reading.options, ranges(starts, ends)
        backlogs = [estimated_events(one, states[one.queue]) for one in wanted]
        events = _dealt(backlogs, options.max_events)
        nbytes = _dealt([_estimated_bytes(one, states[one.queue]) for one in wanted], options.max_bytes)
        reached = list(starts)
        for one, most_events, most_bytes in zip(wanted, events, nbytes, strict=True):
            start = max(one.start, states[one.queue].first)
            reached[one.queue] = self._access.end_within(one.queue, start, one.end, most_events, most_bytes)
        return reached


def _dealt(backlogs: Sequence[int], limit: int | None) -> Sequence[int | None]:
    return [None] * len(backlogs) if limit is None else shares(backlogs, limit)


def _estimated_bytes(wanted: QueueRange, state: RetainedRange) -> int:
    batches = state.next - state.first
    each = state.nbytes / batches if state.nbytes is not None and batches else 1
    return max(round((wanted.end - wanted.start) * each), 1)
