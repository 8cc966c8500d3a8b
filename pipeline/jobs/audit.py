"""`headrace pipeline audit`: what was published, against what each subscription was given, gave up on or skipped.

Published is what the log has, and below that what an archive has. What a subscription is done with is in its
checkpoints, dead letters and gap records, read after the ends of the queues are fixed, and in this order: so whatever a
checkpoint says is done is known to be given up on where it was. With what its consumers wrote themselves, each event is
compared; without, what a checkpoint says is done counts as delivered. Spark joins all of that by queue, offset and
index; this process sees counts by stream only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from ...silo.commands.options import Place as CommandPlace
from ...silo.commands.options import parse_start, place_options
from ...silo.commands.output import json_option, note, print_table
from ...silo.outcome import Failed
from ...silo.wording import counted
from ...streams.errors import InvalidArgument, NotFound
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import GapRecord, Selector, Start, StartKind
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import Place
from .archive import read_archive
from .files import State, read_state
from .running import options_of, report, spark_options, spark_session, told
from .standing import Standing, read_standings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..access import QueueAccess

LIMIT = 100
Progress = Callable[[str, int, int], object]
Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Offsets by queue, each range with its exclusive end."""
DELIVERED, DEAD, SKIPPED, FILTERED, PENDING = "delivered", "dead-lettered", "skipped", "filtered", "pending"
MISSING, DUPLICATE, CONTRADICTED, UNKNOWN = "missing", "duplicate", "delivered and dead-lettered", "unknown"
PUBLISHED_TWICE = "published twice"
CLASSES = (DELIVERED, DEAD, SKIPPED, FILTERED, PENDING, MISSING, DUPLICATE, CONTRADICTED)
"""Each published event is one of these; `UNKNOWN` is what was delivered and never published."""
PROBLEMS = (MISSING, DUPLICATE, CONTRADICTED, UNKNOWN, PUBLISHED_TWICE)

_NO_REASON = ""
_REMOVED = "retention removed it before it was done, and there is no gap record"
_REASONS = {
    MISSING: "the checkpoint is past it, it was not delivered, and there is neither dead letter nor gap record",
    DUPLICATE: "delivered more than once",
    CONTRADICTED: "delivered, and a dead letter all the same",
    UNKNOWN: "delivered, and not published",
}
_TOLD = (*PROBLEMS, SKIPPED, DEAD)
"""What the report has details of, in this order."""


class Finding(NamedTuple):
    """Events of one stream that are of one class, for one reason."""

    kind: str
    namespace: str | None
    """None with `key`: of whatever stream, where the events themselves are gone."""
    key: str | None
    queue: int
    first: SequenceToken
    last: SequenceToken
    events: int | None
    """Of this kind, between both tokens; None where nobody knows, since they are gone."""
    reason: str

    def document(self) -> dict[str, Any]:
        stream = None if self.namespace is None else str(StreamId(self.namespace, self.key or ""))
        tokens = {"first": str(self.first), "last": str(self.last)}
        return {"kind": self.kind, "stream": stream, "queue": self.queue, **tokens, "events": self.events} | {
            "reason": self.reason
        }


class SubscriptionAudit(NamedTuple):
    """How a subscription stands to what was published for it."""

    name: str
    published: int
    counts: Mapping[str, int]
    """Events by class: all of `CLASSES`, and `UNKNOWN`."""
    lost_offsets: int
    """Batches that retention removed before they were done, without a gap record."""
    findings: Sequence[Finding]
    """The worst first, up to the limit."""
    exact: bool
    """False where a silo does not say which streams are behind: then some count as pending that are not."""

    @property
    def ok(self) -> bool:
        return not self.lost_offsets and not any(self.counts[kind] for kind in PROBLEMS if kind in self.counts)

    def document(self) -> dict[str, Any]:
        counts = {kind.replace(" ", "_").replace("-", "_"): number for kind, number in self.counts.items()}
        findings = [finding.document() for finding in self.findings]
        numbers = {"published": self.published, **counts, "lost_offsets": self.lost_offsets}
        return {"name": self.name, "ok": self.ok, "exact": self.exact, **numbers, "findings": findings}


class Audited(NamedTuple):
    """What an audit has found."""

    events: int
    """That there are, of all streams that were looked at."""
    published_twice: int
    """Events with an id that an earlier one of the same stream has."""
    holes: int
    """Offsets that the log should have and has not."""
    findings: Sequence[Finding]
    """Of what was published itself."""
    subscriptions: Sequence[SubscriptionAudit]

    @property
    def ok(self) -> bool:
        return not self.published_twice and not self.holes and all(one.ok for one in self.subscriptions)

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "events": self.events,
            "published_twice": self.published_twice,
            "holes": self.holes,
            "findings": [finding.document() for finding in self.findings],
            "subscriptions": [one.document() for one in self.subscriptions],
        }


def audit(
    spark: SparkSession,
    subscriptions: Sequence[str] = (),
    *,
    delivered: str | Path | DataFrame | None = None,
    archive: str | Path | None = None,
    start: Start | None = None,
    limit: int = LIMIT,
    progress: Progress = lambda _name, _done, _total: None,
    **options: object,
) -> Audited:
    """Compare what was published with what became of it, for these subscriptions, or all.

    `delivered` is what consumers wrote themselves, for each delivery a row with `queue`, `offset` and `index`, and
    `subscription` where it is of several: a DataFrame, or a path of Parquet or (`.json`, `.jsonl`) JSON lines.
    `archive` is that of the job `archive`, for what retention has removed from the log. `start` is where to begin, for
    all: by default where each subscription was to start; where that is `latest`, at the first event in `delivered`.

    Details are limited to `limit` for each subscription, counts are not. `options` say where the provider is. Nothing
    is changed. `progress` is told of each subscription, and how many are done, before it is looked at. Raises NotFound
    for a subscription that is not there, InvalidArgument for a `delivered` without these columns.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    known = {name.lower() for name in PLACE_OPTIONS}
    if wrong := next((name for name in texts if name.lower() not in known), None):
        raise InvalidArgument(f"option {wrong!r} is not for an audit: it takes those that say where the provider is")
    published = _Published.of(spark, texts, archive)
    standings = asyncio.run(read_standings(published.place, subscriptions))
    ledger = None if delivered is None else _ledger(spark, delivered, [standing.name for standing in standings])
    found: list[SubscriptionAudit] = []
    for standing in standings:
        progress(standing.name, len(found), len(standings))
        found.append(_Audit(published, standing, start, limit).run(ledger))
    return _of_published(published, [standing.definition.selector for standing in standings], limit, found)


# ---- what was published ----------------------------------------------------------------------------------------------


class _Published(NamedTuple):
    """The events there are, up to ends that are fixed."""

    spark: SparkSession
    place: Place
    options: Mapping[str, str]
    access: QueueAccess
    firsts: Sequence[int]
    ends: Sequence[int]
    archive: Path | None
    gone: Ranges
    """What neither the log nor the archive has."""

    @classmethod
    def of(cls, spark: SparkSession, options: Mapping[str, str], archive: str | Path | None) -> _Published:
        place = Place.of(options)
        access = place.open()
        states = access.states()
        firsts, ends = [state.first for state in states], [state.next for state in states]
        path = None if archive is None else Path(archive).absolute()
        gone = {queue: [(0, first)] for queue, first in enumerate(firsts)}
        if path is not None:
            gone = _gone(spark, path, place.provider, firsts)
        return cls(spark, place, options, access, firsts, ends, path, gone)

    def events(self, selector: Selector, *columns: str) -> DataFrame:
        """What the log has of some streams, and below that the archive."""
        columns = ("namespace", "key", "queue", "offset", "index", *columns)
        logged = self._logged(selector, columns)
        if self.archive is None:
            return logged
        _check_streams(self.archive, selector)
        archived = read_archive(self.spark, self.archive).where(F.col("offset") < _of_queue(self.firsts))
        matches = F.udf(_Matches(selector.pattern), "boolean", useArrow=False)("namespace", "key")
        return archived.where(matches).select(*columns).unionByName(logged)

    def _logged(self, selector: Selector, columns: Sequence[str]) -> DataFrame:
        namespace, _, key = selector.pattern.partition("/")
        chosen = {"namespace": namespace, "key": key, "columns": ",".join(columns)}
        ranges = {"start": _by_queue(self.firsts), "end": _by_queue(self.ends)}
        reader = self.spark.read.format("headrace").options(**self.options, **chosen, **ranges)
        frame = reader.load()
        if not set("*?") & set(namespace):
            try:
                frame.isEmpty()
            except PySparkException as error:
                if not isinstance(told(error), NotFound):
                    raise
                return reader.option("namespace", "*").load().limit(0)  # nothing was ever published to it
        return frame


def _state(archive: Path) -> State:
    state = read_state(archive)
    if state is None:
        raise NotFound(f"archive {archive}: there is none")
    return state


def _gone(spark: SparkSession, archive: Path, provider: str, firsts: Sequence[int]) -> Ranges:
    """What the archive has not, of what the log has no more. Raises InvalidArgument for another provider's."""
    state = _state(archive)
    if len(state.positions) != len(firsts) or state.source.get("provider") != provider:
        raise InvalidArgument(
            f"archive {archive}: it is of provider {state.source.get('provider')!r} with "
            f"{counted(len(state.positions), 'queue')}, not of {provider!r} with {len(firsts)}: name its own"
        )
    rows = read_archive(spark, archive).groupBy("queue").agg(F.min("offset").alias("low")).collect()
    begins = {row.queue: row.low for row in rows}
    return {
        queue: [
            (0, min(begins.get(queue, position), first)),
            *((gap.start, gap.end) for gap in state.gaps if gap.queue == queue),
            (position, first),
        ]
        for queue, (position, first) in enumerate(zip(state.positions, firsts, strict=True))
    }


def _check_streams(archive: Path, selector: Selector) -> None:
    has = _state(archive).source.get("streams")
    if has not in ("*/*", selector.pattern):
        raise InvalidArgument(f"archive {archive}: it has the streams {has}, and {selector.pattern} are looked for")


class _Matches:
    """A selector, in Spark's workers."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __call__(self, namespace: str, key: str) -> bool:
        return Selector(self._pattern).matcher()(StreamId(namespace, key))


def _by_queue(offsets: Sequence[int]) -> str:
    return json.dumps({str(queue): offset for queue, offset in enumerate(offsets)})


def _of_queue(values: Sequence[int]) -> Column:
    """The value of a row's queue, null for a queue that there is not."""
    return F.get(F.array(*(F.lit(value).cast("long") for value in values)), F.col("queue"))


def _of_published(
    published: _Published, selectors: Iterable[Selector], limit: int, found: Sequence[SubscriptionAudit]
) -> Audited:
    """What is wrong with the events themselves: those of the subscriptions, on a data directory all."""
    whole = published.place.data is not None
    wanted = {"*/*"} if whole else {selector.pattern for selector in selectors}
    frames = [published.events(Selector(pattern), "id") for pattern in sorted(wanted)]
    if not frames:
        return Audited(0, 0, 0, [], found)
    events = frames[0]
    for frame in frames[1:]:
        events = events.unionByName(frame)
    if len(frames) > 1:
        events = events.dropDuplicates(["queue", "offset", "index"])
    number, batches = _counted(events, published.firsts)
    retained = sum(end - first for first, end in zip(published.firsts, published.ends, strict=True))
    holes = max(retained - batches, 0) if whole else 0
    twice, findings = _published_twice(events, limit)
    return Audited(number, twice, holes, findings, found)


def _counted(events: DataFrame, firsts: Sequence[int]) -> tuple[int, int]:
    """Events, and batches of the log."""
    by_batch = events.groupBy("queue", "offset").count()
    logged = F.when(F.col("offset") >= _of_queue(firsts), True)
    row = by_batch.agg(F.sum("count").alias("events"), F.count(logged).alias("batches")).first()
    assert row is not None
    return row.events or 0, row.batches


def _published_twice(events: DataFrame, limit: int) -> tuple[int, list[Finding]]:
    token = F.struct("queue", "offset", "index")
    of_id = events.where("id IS NOT NULL").groupBy("namespace", "key", "id")
    twice = of_id.agg(F.count("*").alias("n"), F.min(token).alias("low"), F.max(token).alias("high")).where("n > 1")
    twice = twice.persist()
    row = twice.agg(F.sum(F.col("n") - 1).alias("more")).first()
    findings = [
        Finding(
            PUBLISHED_TWICE, one.namespace, one.key, one.low.queue, SequenceToken(one.low.offset, one.low["index"]),
            SequenceToken(one.high.offset, one.high["index"]), one.n, f"{one.n} events have the id {one.id!r}",
        )
        for one in twice.orderBy("low").limit(limit).collect()
    ]  # fmt: skip
    twice.unpersist()
    assert row is not None
    return row.more or 0, findings


# ---- what was delivered ----------------------------------------------------------------------------------------------


def _ledger(spark: SparkSession, delivered: str | Path | DataFrame, names: Sequence[str]) -> DataFrame:
    """Deliveries by subscription. Raises InvalidArgument for what has not the columns."""
    where = "what was delivered" if not isinstance(delivered, str | Path) else str(delivered)
    frame = _read(spark, delivered) if isinstance(delivered, str | Path) else delivered
    for name in ("queue", "offset", "index"):
        if name not in frame.columns:
            raise InvalidArgument(f"{where}: column {name!r} is missing: each delivery has queue, offset and index")
    if "subscription" not in frame.columns:
        frame = frame.withColumn("subscription", F.lit(None).cast("string"))
    types = {"subscription": "string", "queue": "int", "offset": "long", "index": "int"}
    frame = frame.select(*(F.col(name).cast(kind) for name, kind in types.items()))
    incomplete = frame.where("queue IS NULL OR offset IS NULL OR index IS NULL").count()
    if incomplete:
        raise InvalidArgument(f"{where}: {counted(incomplete, 'row')} without queue, offset or index")
    if len(names) != 1 and not frame.where("subscription IS NULL").isEmpty():
        raise InvalidArgument(
            f"{where}: it does not say whose deliveries these are: name one subscription, or add a column "
            "'subscription'"
        )
    return frame


def _read(spark: SparkSession, path: str | Path) -> DataFrame:
    where = Path(path).absolute()
    if not where.exists():
        raise NotFound(f"{path} is not there")
    files = [where] if where.is_file() else [file for file in where.rglob("*") if file.name[0] not in "._"]
    if any(file.suffix in (".json", ".jsonl", ".ndjson") for file in files):
        schema = "subscription STRING, queue INT, offset BIGINT, index INT"
        return spark.read.schema(schema).option("recursiveFileLookup", "true").json(f"file://{where}", mode="FAILFAST")
    return spark.read.parquet(f"file://{where}")


# ---- one subscription ------------------------------------------------------------------------------------------------


class _Audit:
    """Of one subscription."""

    def __init__(self, published: _Published, standing: Standing, start: Start | None, limit: int) -> None:
        self._published = published
        self._standing = standing
        self._start = start or standing.definition.start
        self._limit = limit

    def run(self, ledger: DataFrame | None) -> SubscriptionAudit:
        standing = self._standing
        own = None if ledger is None else _own(ledger, standing.name)
        starts = self._starts(own)
        events = self._published.events(standing.definition.selector).where(_from(starts))
        classified = self._classified(events, None if own is None else self._within(own, starts))
        by_stream = classified.groupBy("kind", "namespace", "key", "queue", "reason").agg(
            F.count("*").alias("events"),
            F.min(F.struct("offset", "index")).alias("low"),
            F.max(F.struct("offset", "index")).alias("high"),
        )
        by_stream = by_stream.persist()
        lost = lost_ranges(standing, [start.offset for start in starts], self._published.gone)
        counts = self._counts(by_stream)
        findings = [*lost, *self._findings(by_stream)][: self._limit]
        by_stream.unpersist()
        published = sum(counts[kind] for kind in CLASSES)
        lost_offsets = sum(one.last.offset - one.first.offset + 1 for one in lost)
        return SubscriptionAudit(standing.name, published, counts, lost_offsets, findings, standing.exact)

    def _starts(self, ledger: DataFrame | None) -> list[SequenceToken]:
        """Where to begin, by queue."""
        queues, start = range(len(self._published.ends)), self._start
        if start.kind is StartKind.TIME:
            assert start.time_us is not None
            return [SequenceToken(offset) for offset in self._published.access.offsets_at(start.time_us)]
        if start.kind is StartKind.OFFSETS:
            assert start.token is not None
            return [SequenceToken.parse(start.token) for _ in queues]  # there are events of one stream only
        if start.kind is StartKind.LATEST and ledger is not None:
            rows = ledger.groupBy("queue").agg(F.min(F.struct("offset", "index")).alias("low")).collect()
            lowest = {row.queue: SequenceToken(row.low.offset, row.low["index"]) for row in rows}
            return [lowest.get(queue, self._standing.done_to(queue)) for queue in queues]
        return [SequenceToken(0) for _ in queues]

    def _within(self, ledger: DataFrame, starts: Sequence[SequenceToken]) -> DataFrame:
        """Deliveries, counted, of what is looked at: neither what is gone nor what was published meanwhile."""
        ends = _of_queue(self._published.ends)
        there = (F.col("offset") < ends) & _from(starts)
        for queue, ranges in self._published.gone.items():
            for low, high in ranges:
                there &= ~((F.col("queue") == queue) & (F.col("offset") >= low) & (F.col("offset") < high))
        within = ledger.where(ends.isNull() | there)  # no such queue: never published
        return within.groupBy("queue", "offset", "index").agg(F.count("*").alias("times"))

    def _classified(self, events: DataFrame, ledger: DataFrame | None) -> DataFrame:
        """Each event with its `kind` and `reason`."""
        place = ["queue", "offset", "index"]
        given = events.withColumn("there", F.lit(True))
        if ledger is None:
            given = given.withColumn("times", F.lit(None).cast("long"))
        else:
            given = given.join(ledger, place, "full_outer")
        given = given.join(self._letters(), place, "left").join(self._skipped(), place, "left")
        given = given.join(F.broadcast(self._behind()), ["queue", "namespace", "key"], "left")
        given = given.join(F.broadcast(self._gaps()), "queue", "left")
        kind, filtered = F.col("kind"), self._standing.definition.filter is not None
        named = given.withColumn("gap", _gap()).withColumn("done", self._done())
        named = named.withColumn("kind", _kind(compared=ledger is not None, filtered=filtered))
        of_kind = F.when(kind == DEAD, F.col("letter")).when(kind == SKIPPED, F.coalesce("skip", "gap"))
        for name, text in _REASONS.items():
            of_kind = of_kind.when(kind == name, F.lit(text))
        return named.withColumn("reason", F.coalesce(of_kind, F.lit(_NO_REASON)))

    def _done(self) -> Column:
        """Whether the checkpoint says so."""
        offset, index = F.col("offset"), F.col("index")
        out_of_order = F.exists(
            "done_ranges", lambda one: (one["offset"] == offset) & (one["first"] <= index) & (index < one["last"])
        )
        token = F.struct(F.col("behind_offset"), F.col("behind_index"))
        behind = (F.struct(offset.alias("behind_offset"), index.alias("behind_index")) < token) | out_of_order
        up_to = [self._standing.done_to(queue).offset for queue in range(len(self._published.ends))]
        return F.when(F.col("behind_offset").isNull(), offset < F.coalesce(_of_queue(up_to), F.lit(0))).otherwise(
            behind
        )

    def _behind(self) -> DataFrame:
        schema = pa.schema([
            ("queue", pa.int32()), ("namespace", pa.string()), ("key", pa.string()),
            ("behind_offset", pa.int64()), ("behind_index", pa.int32()),
            ("done_ranges", pa.list_(pa.struct([("offset", pa.int64()), ("first", pa.int32()), ("last", pa.int32())]))),
        ])  # fmt: skip
        rows = [
            (
                queue,
                *stream,
                *one.token,
                [dict(zip(("offset", "first", "last"), each, strict=True)) for each in one.done],
            )
            for queue, at in self._standing.checkpoints.items()
            for stream, one in at.behind.items()
        ]
        return self._frame(schema, rows)

    def _letters(self) -> DataFrame:
        return self._frame(_placed("letter"), self._standing.letters)

    def _skipped(self) -> DataFrame:
        """Gap records of single events: a policy of skipping may make many."""
        rows = [(gap.queue, *gap.low, gap.reason) for gap in self._standing.gaps if _of_one(gap)]
        return self._frame(_placed("skip"), rows).dropDuplicates(["queue", "offset", "index"])

    def _gaps(self) -> DataFrame:
        """The others, for each queue."""
        fields = [("namespace", pa.string()), ("key", pa.string()), ("reason", pa.string())]
        ends = [(name, pa.int64()) for name in ("low_offset", "low_index", "high_offset", "high_index")]
        schema = pa.schema([("queue", pa.int32()), ("gaps", pa.list_(pa.struct([*fields, *ends])))])
        by_queue: dict[int, list[dict[str, object]]] = {}
        for gap in self._standing.gaps:
            if not _of_one(gap):
                stream = (None, None) if gap.stream is None else gap.stream
                values = (*stream, gap.reason, *gap.low, *gap.high)
                by_queue.setdefault(gap.queue, []).append(
                    dict(zip([name for name, _ in [*fields, *ends]], values, strict=True))
                )
        return self._frame(schema, list(by_queue.items()))

    def _frame(self, schema: pa.Schema, rows: Sequence[Sequence[object]]) -> DataFrame:
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
        return self._published.spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema))

    def _counts(self, by_stream: DataFrame) -> Mapping[str, int]:
        found = {row.kind: row.n for row in by_stream.groupBy("kind").agg(F.sum("events").alias("n")).collect()}
        return {kind: found.get(kind, 0) for kind in (*CLASSES, UNKNOWN)}

    def _findings(self, by_stream: DataFrame) -> list[Finding]:
        worst = F.array_position(F.array(*map(F.lit, _TOLD)), F.col("kind"))
        rows = by_stream.where(F.col("kind").isin(*_TOLD)).orderBy(worst, "queue", "low", "key").limit(self._limit)
        return [
            Finding(
                row.kind, row.namespace, row.key, row.queue, SequenceToken(row.low.offset, row.low["index"]),
                SequenceToken(row.high.offset, row.high["index"]), row.events, row.reason,
            )
            for row in rows.collect()
        ]  # fmt: skip


def _own(ledger: DataFrame, name: str) -> DataFrame:
    """What says nothing of a subscription is of the only one."""
    return ledger.where(F.coalesce(F.col("subscription"), F.lit(name)) == name)


def _from(starts: Sequence[SequenceToken]) -> Column:
    offset, first = F.col("offset"), _of_queue([start.offset for start in starts])
    index = _of_queue([start.index for start in starts])
    return (offset > first) | ((offset == first) & (F.col("index") >= index))


def _placed(text: str) -> pa.Schema:
    return pa.schema([
        ("queue", pa.int32()), ("offset", pa.int64()), ("index", pa.int32()), (text, pa.string()),
    ])  # fmt: skip


def _of_one(gap: GapRecord) -> bool:
    """Whether it is of one event."""
    return gap.stream is not None and gap.high == SequenceToken(gap.low.offset, gap.low.index + 1)


def _gap() -> Column:
    """The reason of the gap record that a row is in."""
    at = F.struct(F.col("offset"), F.col("index").cast("long").alias("index"))
    namespace, key = F.col("namespace"), F.col("key")

    def within(gap: Column) -> Column:
        low = F.struct(gap["low_offset"].alias("offset"), gap["low_index"].alias("index"))
        high = F.struct(gap["high_offset"].alias("offset"), gap["high_index"].alias("index"))
        stream = gap["namespace"].isNull() | ((gap["namespace"] == namespace) & (gap["key"] == key))
        return (low <= at) & (at < high) & stream

    return F.get(F.filter("gaps", within), F.lit(0))["reason"]


def _kind(*, compared: bool, filtered: bool) -> Column:
    dead = F.col("letter").isNotNull()
    skipped = F.col("skip").isNotNull() | F.col("gap").isNotNull()
    kind = F.when(F.col("there").isNull(), UNKNOWN)
    if compared:
        kind = kind.when(F.col("times") > 1, DUPLICATE).when((F.col("times") == 1) & dead, CONTRADICTED)
        kind = kind.when(F.col("times") == 1, DELIVERED)
    kind = kind.when(dead, DEAD).when(skipped, SKIPPED)
    undelivered = (FILTERED if filtered else MISSING) if compared else DELIVERED
    return kind.when(F.col("done"), undelivered).otherwise(PENDING)


def lost_ranges(standing: Standing, starts: Sequence[int], gone: Ranges) -> list[Finding]:
    """Offsets that are gone, and were not done: what no gap record tells of."""
    found: list[Finding] = []
    for queue, at in sorted(standing.checkpoints.items()):
        told_of = [(gap.low.offset, gap.high.offset) for gap in standing.gaps if gap.queue == queue and not gap.stream]
        undone = max(starts[queue], at.watermark)
        for low, high in gone.get(queue, ()):
            for begin, end in without((max(low, undone), high), told_of):
                first, last = SequenceToken(begin), SequenceToken(end - 1)
                found.append(Finding(MISSING, None, None, queue, first, last, None, _REMOVED))
    return found


def without(whole: tuple[int, int], parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of a range without some others, in order."""
    low, high = whole
    left: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if low < min(begin, high):
            left.append((low, min(begin, high)))
        low = max(low, end)
    return [*left, (low, high)] if low < high else left


# ---- the command -----------------------------------------------------------------------------------------------------


@click.command("audit")
@click.argument("subscriptions", nargs=-1, metavar="[SUBSCRIPTION]...")
@place_options
@click.option(
    "--delivered", type=click.Path(path_type=Path, exists=True), metavar="PATH",
    help="What consumers wrote themselves: Parquet or JSON lines with queue, offset, index (and subscription).",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Where headrace pipeline archive keeps what retention has removed.",
)  # fmt: skip
@click.option("--start", metavar="POSITION", help="Where to begin: earliest, or a time.  [default: as subscribed]")
@click.option(
    "--limit", type=click.IntRange(min=0), default=LIMIT, show_default=True, help="Details of a subscription at most."
)
@spark_options
@json_option
def command(
    *, subscriptions: Sequence[str], place: CommandPlace, start: str | None, master: str | None, spark_log: Path | None,
    as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Compare what was published with what each SUBSCRIPTION (default: all) was given, gave up on or skipped.

    Exit code 1 where an event is missing, or there twice. Nothing is changed.
    """
    begin = None if start is None else parse_start(start)

    def progress(name: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            note(f"subscription {name}, {done + 1} of {total}")

    with spark_session("headrace audit", master, spark_log) as spark:
        found = audit(spark, subscriptions, start=begin, progress=progress, **how, **options_of(place))
    if as_json:
        report(found.document(), as_json, "")
    else:
        _print(found)
    if not found.ok:
        raise Failed(*_problems(found))


def _print(found: Audited) -> None:
    shown = [kind for kind in (*CLASSES, UNKNOWN) if any(one.counts[kind] for one in found.subscriptions)]
    rows = [[one.name, one.published, *(one.counts[kind] for kind in shown)] for one in found.subscriptions]
    print_table(["subscription", "published", *shown], rows)
    details = [(one.name, finding) for one in found.subscriptions for finding in one.findings]
    details += [("", finding) for finding in found.findings]
    if details:
        columns = ["subscription", "what", "stream", "queue", "first", "last", "events", "reason"]
        print_table(columns, [_row(name, finding.document()) for name, finding in details])


def _row(name: str, finding: Mapping[str, Any]) -> list[object]:
    values = [finding[column] for column in ("kind", "stream", "queue", "first", "last", "events", "reason")]
    return [name, *("?" if value is None else value for value in values)]


def _problems(found: Audited) -> list[str]:
    lines = [
        f"subscription {one.name}: {counted(one.counts[kind], 'event')} {kind}"
        for one in found.subscriptions
        for kind in PROBLEMS
        if one.counts.get(kind)
    ]
    lines += [
        f"subscription {one.name}: {counted(one.lost_offsets, 'batch')} removed before they were done"
        for one in found.subscriptions
        if one.lost_offsets
    ]
    if found.published_twice:
        lines.append(f"{counted(found.published_twice, 'event')} published twice, by their ids")
    if found.holes:
        lines.append(f"the log has no batch at {counted(found.holes, 'offset')}")
    return lines
