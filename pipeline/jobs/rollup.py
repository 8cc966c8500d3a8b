"""The job `rollup`: number, size and lateness of events, by windows of time, streams and namespaces.

It is one streaming query with one state: Spark's checkpoint has the offsets that were read and the open windows. A
window is written once, when the watermark has passed its end. The number of a micro-batch names its output: a folder of
Parquet, which a repeated batch replaces, and a `txnVersion` of the sink, which publishes each version once. So each
window is written once, also after a kill.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from pyspark.sql import functions as F  # noqa: N812

from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId, unquote
from ..options import job_options, source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import ProviderPlace
from ..sink import DEFAULT_STAGING, publish_batch
from .files import read_json, write_json

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

By = Literal["stream", "namespace", "both"]
WINDOW = timedelta(minutes=1)
WATERMARK = timedelta(minutes=1)
EVERY = timedelta(seconds=10)
COLUMNS = (
    "window_start", "window_end", "by", "namespace", "key", "events", "bytes", "events_per_s", "bytes_per_s", "lag_ms",
    "latency_p50_ms", "latency_p95_ms", "latency_p99_ms",
)  # fmt: skip
"""Columns of the output, in Parquet and in JSON. `by` is stream or namespace; a namespace's row has no `key`."""

_CHECKPOINT = "_checkpoint"
_SETTINGS = "rollup.json"
_SOURCE_OPTIONS = ("namespace", "key", "start", "failOnDataLoss", "maxEventsPerTrigger", "maxBytesPerTrigger")
_PERCENTILES = (0.5, 0.95, 0.99)
_ACCURACY = 1000
"""The rank of a percentile is right within one in so many."""
_MS = 1000.0
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (in UTC, as all times here)
_FIRST, _LAST = datetime.min - _EPOCH, datetime.max - _EPOCH  # noqa: DTZ901


class RollupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a checkpoint. Spark itself would go on with other settings, too, and mix the results of both."""

    id: str
    """Names the query to the sink."""
    source: Mapping[str, str]
    by: str
    window_ms: int
    to: str | None
    to_namespace: str | None


def rollup(
    spark: SparkSession,
    *,
    to: str | Path | None = None,
    to_namespace: str | None = None,
    checkpoint: str | Path | None = None,
    by: By = "both",
    window: timedelta = WINDOW,
    watermark: timedelta = WATERMARK,
    every: timedelta | None = EVERY,
    **options: object,
) -> StreamingQuery:
    """Start a query that counts events by windows of their timestamps. It looks for new events every `every`; with None
    it ends when all stored events are counted.

    Rows with `COLUMNS` are written as Parquet under the directory `to`, or as JSON events into streams of
    `to_namespace`, or both. Each window is written once, after an event was read whose timestamp is `watermark` or more
    behind the window's end. An event that comes after its window was written is left out, and Spark counts it
    (`numRowsDroppedByWatermark`).

    `options` are those of the source for location, streams, start and limits, and the sink's `staging`. `checkpoint` is
    by default the folder `_checkpoint` of `to`. The driver and all executors must share the directories `to` and
    `checkpoint`. Raise InvalidArgument, also if a checkpoint has other settings.
    """
    _check_spans(window, watermark)
    job = _Job.of(_Target.of(to, to_namespace, checkpoint), by, window, options)
    job.begin()
    events = spark.readStream.format("headrace").options(**job.reads, columns="namespace,key,payload,timestamp,stored")
    frame = _rolled(_without_output(events.load(), job.target.namespace), by, window, watermark)
    query = frame.writeStream.outputMode("append").foreachBatch(job.write)
    query = query.option("checkpointLocation", f"file://{job.target.checkpoint}")
    if every is None:
        return query.trigger(availableNow=True).start()
    return query.trigger(processingTime=f"{_milliseconds(every)} milliseconds").start()


class RollupResult(NamedTuple):
    """The result of a query's run."""

    events: int
    """Events read."""
    late: int
    """Rows for a stream or a namespace that came after their window was closed."""


class _Target(NamedTuple):
    """The destination of a rollup, and the directory of its progress."""

    path: Path | None
    namespace: str | None
    checkpoint: Path

    @classmethod
    def of(cls, to: str | Path | None, namespace: str | None, checkpoint: str | Path | None) -> _Target:
        """Raises InvalidArgument."""
        if to is None and namespace is None:
            raise InvalidArgument(
                "the rollup has no destination: give a directory (to), a namespace (to-namespace), or both"
            )
        if checkpoint is None and to is None:
            raise InvalidArgument(
                "the checkpoint is missing: without a directory (to), name one for the rollup's progress"
            )
        path = None if to is None else Path(to).absolute()
        where = Path(to or "", _CHECKPOINT) if checkpoint is None else Path(checkpoint)
        return cls(path, None if namespace is None else _namespace_of(namespace), where.absolute())

    def settings_to_use(self, wanted: RollupSettings) -> RollupSettings:
        """Return the settings of the checkpoint, or `wanted` for a new one. Raise InvalidArgument if they differ."""
        stored = read_json(self.checkpoint / _SETTINGS, RollupSettings)
        if stored is None:
            self._check_new()
            return wanted
        for name in RollupSettings.__struct_fields__[1:]:
            has, asked = getattr(stored, name), getattr(wanted, name)
            if has != asked:
                raise InvalidArgument(
                    f"checkpoint '{self.checkpoint}': its rollup has {name} {_worded(has)}, not {_worded(asked)}: go "
                    "on with that, or name another checkpoint and another directory"
                )
        return stored

    def _check_new(self) -> None:
        if self.checkpoint.exists() and any(self.checkpoint.iterdir()):
            raise InvalidArgument(f"checkpoint '{self.checkpoint}': not empty, and no rollup's: name another directory")
        if self.path is not None and any(self.path.glob("batch=*")):
            raise InvalidArgument(
                f"'{self.path}' has the output of a rollup with another checkpoint than '{self.checkpoint}': name "
                "that, or another directory"
            )


class _Job(NamedTuple):
    """The source and the destination of a rollup."""

    reads: Mapping[str, str]
    """Options of the source."""
    writes: Mapping[str, str]
    """Options of the sink, without the query's name."""
    target: _Target
    settings: RollupSettings

    @classmethod
    def of(cls, target: _Target, by: str, window: timedelta, options: Mapping[str, object]) -> _Job:
        """Raises InvalidArgument."""
        if by not in ("stream", "namespace", "both"):
            raise InvalidArgument(f"a rollup is by stream, namespace or both, not {by!r}")
        reads, writes = _split(options, target.checkpoint)
        if target.namespace is not None:
            _check_other(target.namespace, reads)
        settings = RollupSettings(
            id=uuid.uuid4().hex,
            source={name: reads[name] for name in _IDENTITY if name in reads},
            by=by,
            window_ms=_milliseconds(window),
            to=None if target.path is None else str(target.path),
            to_namespace=target.namespace,
        )
        return cls(reads, writes, target, target.settings_to_use(settings))

    def begin(self) -> None:
        """Store the settings of the checkpoint, before Spark uses it."""
        checkpoint = self.target.checkpoint
        checkpoint.mkdir(parents=True, exist_ok=True)
        if not (checkpoint / _SETTINGS).exists():
            write_json(checkpoint / _SETTINGS, self.settings)

    def write(self, frame: DataFrame, batch: int) -> None:
        """Write the windows that a micro-batch has closed. If it is repeated, its output is replaced."""
        frame = frame.persist()  # not cached, each use would compute the windows again
        try:
            if not frame.isEmpty():
                self._write(frame, batch)
        finally:
            frame.unpersist()

    def _write(self, frame: DataFrame, batch: int) -> None:
        path, namespace, _ = self.target
        if path is not None:
            # One file, so that a batch is seen whole or not at all.
            ordered = frame.repartition(1).sortWithinPartitions("window_start", "by", "namespace", "key")
            ordered.write.mode("overwrite").parquet(f"file://{path}/batch={batch}")
        if namespace is not None:
            app = f"rollup-{self.settings.id}"
            publish_batch(_as_events(frame), batch, **self.writes, namespace=_quoted(namespace), txnAppId=app)


_IDENTITY = ("data", "server", "provider", "namespace", "key")


def _split(options: Mapping[str, object], checkpoint: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of the source and of the sink. Raise InvalidArgument for others."""
    given = job_options("a rollup", options, (*PLACE_OPTIONS, *_SOURCE_OPTIONS, "staging"))
    place = {name: given[name] for name in PLACE_OPTIONS if name in given}
    reads = place | {name: given[name] for name in _SOURCE_OPTIONS if name in given}
    source_options(reads)
    if ProviderPlace.of(reads).data is not None:
        reads["data"] = place["data"] = str(Path(reads["data"]).absolute())
    staging = given.get("staging") or (None if "data" in place else str(checkpoint / DEFAULT_STAGING))
    return reads, place if staging is None else {**place, "staging": staging}


def _namespace_of(text: str) -> str:
    """Return the decoded name of a namespace. Raise InvalidArgument for a pattern."""
    if "*" in text or "?" in text:
        raise InvalidArgument(f"namespace {text!r} stands for several: name one to write to")
    return StreamId(unquote(text, text), "").namespace


def _check_other(namespace: str, reads: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the rollup would read only its own output."""
    source = reads.get("namespace", "*")
    if not set("*?") & set(source) and unquote(source, source) == namespace:
        raise InvalidArgument(f"namespace {source!r} is the one that is read: a rollup never reads its own output")


def _quoted(namespace: str) -> str:
    """Return the encoded name of a namespace, as in patterns and in the text of streams."""
    return str(StreamId(namespace, ""))[:-1]


def _check_spans(window: timedelta, watermark: timedelta) -> None:
    if _milliseconds(window) < 1:
        raise InvalidArgument(f"the window is {window}: give 1 millisecond or more")
    if watermark < timedelta(0):
        raise InvalidArgument(f"the watermark is {watermark}: give 0 or more")


def _milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _worded(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())  # pyright: ignore[reportUnknownVariableType]
    return str(value)


def follow(query: StreamingQuery, progress: Callable[[int, int], object]) -> RollupResult:
    """Wait until a query has ended. Raise its error if it has failed."""
    seen: dict[int, tuple[int, int]] = {}
    ended = False
    read = 0
    while not ended:
        ended = bool(query.awaitTermination(1))
        for one in query.recentProgress:
            late = sum(state.numRowsDroppedByWatermark for state in one.stateOperators)
            events, dropped = seen.get(one.batchId, (0, 0))
            seen[one.batchId] = max(events, one.numInputRows), max(dropped, late)
        read = sum(events for events, _ in seen.values())
        progress(read, read)
    return RollupResult(read, sum(late for _, late in seen.values()))


# ---- the computation -------------------------------------------------------------------------------------------------


def _without_output(events: DataFrame, target: str | None) -> DataFrame:
    """Leave out the rollup's own output."""
    return events if target is None else events.where(F.col("namespace") != target)


def _rolled(events: DataFrame, by: str, window: timedelta, watermark: timedelta) -> DataFrame:
    now = F.current_timestamp()  # the same for a whole micro-batch, also if it is repeated
    measured = events.select(
        "namespace", "key", _calendar("timestamp").alias("timestamp"),
        F.octet_length("payload").cast("long").alias("size"),
        _ms_between(F.coalesce("stored", now), _calendar("timestamp")).alias("latency"),
        now.alias("processed"),
    )  # fmt: skip
    late = measured.withWatermark("timestamp", f"{_milliseconds(watermark)} milliseconds")
    named = late.select("*", F.explode(_groups(by)).alias("group")).select("*", "group.*").drop("key", "group")
    span = F.window("timestamp", f"{_milliseconds(window)} milliseconds")
    by_window = named.groupBy(span, "by", "namespace", F.col("of").alias("key")).agg(
        F.count("*").alias("events"),
        F.sum("size").alias("bytes"),
        _ms_between(F.max("processed"), F.max("timestamp")).alias("lag_ms"),
        F.percentile_approx("latency", list(_PERCENTILES), _ACCURACY).alias("latencies"),
    )
    return by_window.select(*_columns(window.total_seconds()))


def _calendar(timestamp: str) -> Column:
    """Move a time outside of the years 1 to 9999 to the nearest one inside: its window would overflow and fail."""
    first, last = (F.lit(time // timedelta(microseconds=1)) for time in (_FIRST, _LAST))
    return F.timestamp_micros(F.greatest(first, F.least(last, F.unix_micros(timestamp))))


def _groups(by: str) -> Column:
    """Return the rows that an event counts for."""
    stream = F.struct(F.lit("stream").alias("by"), F.col("key").alias("of"))
    namespace = F.struct(F.lit("namespace").alias("by"), F.lit(None).cast("string").alias("of"))
    return F.array(*{"stream": [stream], "namespace": [namespace], "both": [stream, namespace]}[by])


def _columns(seconds: float) -> list[Column]:
    latencies = [F.col("latencies")[n].alias(f"latency_p{round(p * 100)}_ms") for n, p in enumerate(_PERCENTILES)]
    return [
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        *(F.col(name) for name in ("by", "namespace", "key", "events", "bytes")),
        (F.col("events") / F.lit(seconds)).alias("events_per_s"),
        (F.col("bytes") / F.lit(seconds)).alias("bytes_per_s"),
        F.col("lag_ms"),
        *latencies,
    ]


def _ms_between(later: Column, earlier: Column) -> Column:
    """Return a fraction: the difference of distant times does not fit into an integer, which would fail the query."""
    return (F.unix_micros(later).cast("double") - F.unix_micros(earlier).cast("double")) / F.lit(_MS)


def _as_events(frame: DataFrame) -> DataFrame:
    """Make one event of each row. The key of its stream is the text of the row's stream or namespace."""
    text = F.udf(_stream_text, "string", useArrow=False)("namespace", "key")
    return frame.select(
        text.alias("key"), F.to_json(F.struct(*COLUMNS)).alias("payload"), F.col("window_end").alias("timestamp")
    )


def _stream_text(namespace: str, key: str | None) -> str:
    return _quoted(namespace) if key is None else str(StreamId(namespace, key))
