"""`headrace pipeline rollup`: how many events, how large, how late, by windows of time, streams and namespaces.

One streaming query with one state: Spark's checkpoint says what was read and which windows are open. A window is
written once, when the watermark has passed its end. What a micro-batch writes is named by its number (a folder of
Parquet, which a repeated batch replaces, and `txnVersion` of the sink, where the first one counts); so whatever is
killed when, each window is there once.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import msgspec
from pyspark.sql import functions as F  # noqa: N812

from ...silo.commands.options import Place as CommandPlace
from ...silo.commands.options import place_options
from ...silo.commands.output import json_option, note
from ...silo.commands.progress import events_progress
from ...silo.wording import counted
from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId, unquote
from ..options import source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import Place
from ..sink import publish_batch
from .files import read_json, write_json
from .running import options_to_read, report, selecting, spark_options, spark_session

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
"""Of what is written, in Parquet and in JSON. `by` is stream or namespace; a namespace's row has no `key`."""

_CHECKPOINT = "_checkpoint"
_SETTINGS = "rollup.json"
_SOURCE_OPTIONS = ("namespace", "key", "start", "failOnDataLoss", "maxEventsPerTrigger", "maxBytesPerTrigger")
_PERCENTILES = (0.5, 0.95, 0.99)
_ACCURACY = 1000
"""A percentile is off by a rank of one in so many at the most."""
_MS = 1000.0
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (as all of these, in UTC)
_FIRST, _LAST = datetime.min - _EPOCH, datetime.max - _EPOCH  # noqa: DTZ901
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is for. Under another one Spark would go on as well, and mix up both."""

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
    """Start a query that counts events by windows of their timestamps; with `every` None it ends when what is there is
    counted, else it looks for more that often.

    Rows with `COLUMNS` are written as Parquet under the directory `to`, or as JSON events into streams of
    `to_namespace`, or both: each window once, when no event is expected in it any more. An event is, once another one
    was read whose timestamp is `watermark` or more behind the window's end; one that comes later still is left out, and
    counted by Spark (`numRowsDroppedByWatermark`).

    `options` are those of the source that say where, which streams, from where and how much at once, and the sink's
    `staging`. `checkpoint` is by default the folder `_checkpoint` of `to`; `to` and `checkpoint` are directories that
    the driver and all executors share. Raises InvalidArgument, also where a checkpoint is of other settings.
    """
    _check_spans(window, watermark)
    job = _Job.of(_Target.of(to, to_namespace, checkpoint), by, window, options)
    job.begin()
    events = spark.readStream.format("headrace").options(**job.reads, columns="namespace,key,payload,timestamp,stored")
    frame = _rolled(_others(events.load(), job.target.namespace), by, window, watermark)
    query = frame.writeStream.outputMode("append").foreachBatch(job.write)
    query = query.option("checkpointLocation", f"file://{job.target.checkpoint}")
    if every is None:
        return query.trigger(availableNow=True).start()
    return query.trigger(processingTime=f"{_milliseconds(every)} milliseconds").start()


class _Target(NamedTuple):
    """Where a rollup is written, and where it keeps how far it is."""

    path: Path | None
    namespace: str | None
    checkpoint: Path

    @classmethod
    def of(cls, to: str | Path | None, namespace: str | None, checkpoint: str | Path | None) -> _Target:
        """Raises InvalidArgument."""
        if to is None and namespace is None:
            raise InvalidArgument(
                "a rollup is written nowhere: give a directory (to), a namespace (to-namespace), or both"
            )
        if checkpoint is None and to is None:
            raise InvalidArgument(
                "the checkpoint is missing: without a directory (to), name one where the rollup keeps how far it is"
            )
        path = None if to is None else Path(to).absolute()
        where = Path(to or "", _CHECKPOINT) if checkpoint is None else Path(checkpoint)
        return cls(path, None if namespace is None else _named(namespace), where.absolute())

    def as_begun(self, wanted: Settings) -> Settings:
        """Those of the checkpoint, where there is one. Raises InvalidArgument for one that does not fit."""
        stored = read_json(self.checkpoint / _SETTINGS, Settings)
        if stored is None:
            self._check_new()
            return wanted
        for name in Settings.__struct_fields__[1:]:
            has, asked = getattr(stored, name), getattr(wanted, name)
            if has != asked:
                raise InvalidArgument(
                    f"checkpoint {self.checkpoint}: its rollup has {name} {_worded(has)}, not {_worded(asked)}: go on "
                    "with that, or name another checkpoint and another directory"
                )
        return stored

    def _check_new(self) -> None:
        if self.checkpoint.exists() and any(self.checkpoint.iterdir()):
            raise InvalidArgument(f"checkpoint {self.checkpoint}: not empty, and no rollup's: name another directory")
        if self.path is not None and any(self.path.glob("batch=*")):
            raise InvalidArgument(
                f"{self.path} has what a rollup wrote whose checkpoint is not {self.checkpoint}: name that checkpoint, "
                "or another directory"
            )


class _Job(NamedTuple):
    """Where to read and to write."""

    reads: Mapping[str, str]
    """Options of the source."""
    writes: Mapping[str, str]
    """Options of the sink, without the query's name."""
    target: _Target
    settings: Settings

    @classmethod
    def of(cls, target: _Target, by: str, window: timedelta, options: Mapping[str, object]) -> _Job:
        """Raises InvalidArgument."""
        if by not in ("stream", "namespace", "both"):
            raise InvalidArgument(f"a rollup is by stream, namespace or both, not {by!r}")
        reads, writes = _split(options, target.checkpoint)
        if target.namespace is not None:
            _check_other(target.namespace, reads)
        settings = Settings(
            id=uuid.uuid4().hex,
            source={name: reads[name] for name in _IDENTITY if name in reads},
            by=by,
            window_ms=_milliseconds(window),
            to=None if target.path is None else str(target.path),
            to_namespace=target.namespace,
        )
        return cls(reads, writes, target, target.as_begun(settings))

    def begin(self) -> None:
        """Note what the checkpoint is for, before Spark uses it."""
        checkpoint = self.target.checkpoint
        checkpoint.mkdir(parents=True, exist_ok=True)
        if not (checkpoint / _SETTINGS).exists():
            write_json(checkpoint / _SETTINGS, self.settings)

    def write(self, frame: DataFrame, batch: int) -> None:
        """Write the windows that a micro-batch has closed: in its place, where it is repeated."""
        frame = frame.persist()  # else each use would compute the windows anew
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
    """Options of the source and of the sink. Raises InvalidArgument for others."""
    known = {name.lower(): name for name in (*PLACE_OPTIONS, *_SOURCE_OPTIONS, "staging")}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() not in known:
            raise InvalidArgument(f"option {name!r} is not for a rollup: it takes {', '.join(known.values())}")
        given[known[name.lower()]] = str(value).lower() if isinstance(value, bool) else str(value)
    place = {name: given[name] for name in PLACE_OPTIONS if name in given}
    reads = place | {name: given[name] for name in _SOURCE_OPTIONS if name in given}
    source_options(reads)
    if Place.of(reads).data is not None:
        reads["data"] = place["data"] = str(Path(reads["data"]).absolute())
    staging = given.get("staging") or (None if "data" in place else str(checkpoint / "headrace-staging"))
    return reads, place if staging is None else {**place, "staging": staging}


def _named(text: str) -> str:
    """The namespace that is meant. Raises InvalidArgument for a pattern."""
    if "*" in text or "?" in text:
        raise InvalidArgument(f"namespace {text!r} stands for several: name one to write to")
    return StreamId(unquote(text, text), "").namespace


def _check_other(namespace: str, reads: Mapping[str, str]) -> None:
    """Raise InvalidArgument where what is written is all that would be read."""
    source = reads.get("namespace", "*")
    if not set("*?") & set(source) and unquote(source, source) == namespace:
        raise InvalidArgument(f"namespace {source!r} is the one that is read: a rollup never reads what it writes")


def _quoted(namespace: str) -> str:
    """As patterns and the text of streams have it."""
    return str(StreamId(namespace, ""))[:-1]


def _check_spans(window: timedelta, watermark: timedelta) -> None:
    if _milliseconds(window) < 1:
        raise InvalidArgument(f"a window has a length, not {window}")
    if watermark < timedelta(0):
        raise InvalidArgument(f"the watermark is a time from 0 on, not {watermark}")


def _milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _worded(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())  # pyright: ignore[reportUnknownVariableType]
    return str(value)


# ---- what is computed ------------------------------------------------------------------------------------------------


def _others(events: DataFrame, target: str | None) -> DataFrame:
    """All but what the rollup itself has written."""
    return events if target is None else events.where(F.col("namespace") != target)


def _rolled(events: DataFrame, by: str, window: timedelta, watermark: timedelta) -> DataFrame:
    now = F.current_timestamp()  # the same for all of a micro-batch, also when that is repeated
    measured = events.select(
        "namespace", "key", _calendar("timestamp").alias("timestamp"),
        F.octet_length("payload").cast("long").alias("size"),
        _ms_between(F.coalesce("stored", now), _calendar("timestamp")).alias("latency"),
        now.alias("processed"),
    )  # fmt: skip
    late = measured.withWatermark("timestamp", f"{_milliseconds(watermark)} milliseconds")
    named = late.select("*", F.explode(_groups(by)).alias("group")).select("*", "group.*").drop("key", "group")
    span = F.window("timestamp", f"{_milliseconds(window)} milliseconds")
    counted_ = named.groupBy(span, "by", "namespace", F.col("of").alias("key")).agg(
        F.count("*").alias("events"),
        F.sum("size").alias("bytes"),
        _ms_between(F.max("processed"), F.max("timestamp")).alias("lag_ms"),
        F.percentile_approx("latency", list(_PERCENTILES), _ACCURACY).alias("latencies"),
    )
    return counted_.select(*_columns(window.total_seconds()))


def _calendar(timestamp: str) -> Column:
    """A time outside of the years 1 to 9999 as the nearest in them: windows beyond would overflow and end the query."""
    first, last = (F.lit(time // timedelta(microseconds=1)) for time in (_FIRST, _LAST))
    return F.timestamp_micros(F.greatest(first, F.least(last, F.unix_micros(timestamp))))


def _groups(by: str) -> Column:
    """What an event counts for."""
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
    """As a fraction: the difference of far times does not fit a whole number, which would end the query."""
    return (F.unix_micros(later).cast("double") - F.unix_micros(earlier).cast("double")) / F.lit(_MS)


def _as_events(frame: DataFrame) -> DataFrame:
    """One event for each row: its stream's key is what the row is about, in the text form of streams."""
    text = F.udf(_stream_text, "string", useArrow=False)("namespace", "key")
    return frame.select(
        text.alias("key"), F.to_json(F.struct(*COLUMNS)).alias("payload"), F.col("window_end").alias("timestamp")
    )


def _stream_text(namespace: str, key: str | None) -> str:
    return _quoted(namespace) if key is None else str(StreamId(namespace, key))


# ---- the command -----------------------------------------------------------------------------------------------------


class Span(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A time such as 30s, 5m, 1h or 500ms."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(ms|[smhd])", str(value), re.ASCII)
        if found is None:
            self.fail(f"{value!r} is no time: write it as 30s, 5m, 1h or 1d", param, ctx)
        return timedelta(seconds=float(found[1]) * _UNITS_S[found[2]])


class Written(NamedTuple):
    """What a run of the query has done."""

    events: int
    """Events read."""
    late: int
    """Rows for a stream or a namespace that came after their window was closed."""


@click.command("rollup")
@place_options
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Which, as namespace/key.")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write Parquet there.")
@click.option("--to-namespace", metavar="NS", help="Write events into streams of this namespace, as JSON.")
@click.option("--by", type=click.Choice(["stream", "namespace", "both"]), default="both", show_default=True)
@click.option("--window", type=Span(), default="1m", show_default=True, help="Length of a window.")
@click.option("--watermark", type=Span(), default="1m", show_default=True, help="How late an event may come.")
@click.option("--once", is_flag=True, help="End when what is there is counted.")
@click.option("--every", type=Span(), default="10s", show_default=True, help="Else how often to look for more.")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where it keeps how far it is.  [default: _checkpoint in the directory of --to]",
)  # fmt: skip
@click.option("--start", metavar="POSITION", help="Where a new rollup starts: earliest, latest or a time.")
@click.option("--max-events", type=click.IntRange(min=1), metavar="N", help="Of a micro-batch, at most.")
@spark_options
@json_option
def command(
    *, place: CommandPlace, streams: str, once: bool, every: timedelta, start: str | None, max_events: int | None,
    master: str | None, spark_log: Path | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Count events by windows of their timestamps: rates, lags and latencies of streams and namespaces.

    A window is written once, when the watermark has passed its end: when a newer event was read. Whatever ends it, the
    same command goes on where it was.
    """
    options = selecting(streams) | options_to_read(place)
    more = {"start": start, "maxEventsPerTrigger": max_events}
    options |= {name: str(value) for name, value in more.items() if value is not None}
    with spark_session("headrace rollup", master, spark_log) as spark, events_progress("counting") as progress:
        query = rollup(spark, **how, every=None if once else every, **options)
        done = follow(query, progress)
    if done.late:
        note(f"{counted(done.late, 'row')} came too late for a window: a longer --watermark would wait for them")
    report(done._asdict(), as_json, f"counted {counted(done.events, 'event')}")


def follow(query: StreamingQuery, progress: Callable[[int, int], object]) -> Written:
    """Wait until a query has ended. Raises what it failed of."""
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
    return Written(read, sum(late for _, late in seen.values()))
