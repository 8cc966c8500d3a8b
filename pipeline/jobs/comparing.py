"""Compares the published events with the deliveries of one subscription, event by event, in Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from ...streams.errors import InvalidArgument, NotFound
from ...streams.identity import SequenceToken
from ...streams.subscriptions import GapRecord, Start, StartKind
from ...streams.wording import counted
from .findings import (
    CLASSES,
    CONTRADICTED,
    DEAD,
    DELIVERED,
    DUPLICATE,
    FILTERED,
    MISSING,
    PENDING,
    PROBLEMS,
    SKIPPED,
    UNKNOWN,
    AuditFinding,
    SubscriptionAudit,
)
from .published import PublishedEvents, Ranges, of_queue
from .subscription_snapshots import SubscriptionSnapshot

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_NO_REASON = ""
_REMOVED = "retention removed it before it was done, and there is no gap record"
_REASONS = {
    MISSING: "the checkpoint is past it, it was not delivered, and there is neither dead letter nor gap record",
    DUPLICATE: "delivered more than once",
    CONTRADICTED: "delivered, and a dead letter all the same",
    UNKNOWN: "delivered, and not published",
}
_PLACE = (("queue", pa.int32()), ("offset", pa.int64()), ("index", pa.int32()))
"""The columns of an event's position."""
_REPORTED = (*PROBLEMS, SKIPPED, DEAD)
"""The kinds of events with details in the report, in this order."""


def read_deliveries(spark: SparkSession, delivered: str | Path | DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the deliveries by subscription. Raise InvalidArgument if a column is missing."""
    where = "delivered" if not isinstance(delivered, str | Path) else str(delivered)
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
            f"{where}: it has deliveries without a subscription: name one subscription, or add a column 'subscription'"
        )
    return frame


def _read(spark: SparkSession, path: str | Path) -> DataFrame:
    where = Path(path).absolute()
    if not where.exists():
        raise NotFound(f"'{path}' does not exist")
    files = [where] if where.is_file() else [file for file in where.rglob("*") if file.name[0] not in "._"]
    if any(file.suffix in (".json", ".jsonl", ".ndjson") for file in files):
        schema = "subscription STRING, queue INT, offset BIGINT, index INT"
        return spark.read.schema(schema).option("recursiveFileLookup", "true").json(f"file://{where}", mode="FAILFAST")
    return spark.read.parquet(f"file://{where}")


class SubscriptionComparison:
    """Compares the events of one subscription."""

    def __init__(
        self, published: PublishedEvents, snapshot: SubscriptionSnapshot, start: Start | None, limit: int
    ) -> None:
        self._published = published
        self._snapshot = snapshot
        self._start = start or snapshot.definition.start
        self._limit = limit

    def run(self, ledger: DataFrame | None) -> SubscriptionAudit:
        snapshot = self._snapshot
        own = None if ledger is None else _of_subscription(ledger, snapshot.name)
        starts = self._starts(own)
        columns = ("timestamp", "payload") if snapshot.letters else ()
        events = self._published.events(snapshot.definition.selector, *columns).where(_from_starts(starts))
        if snapshot.letters:
            events = _with_letters(events, self._letters())
        else:
            events = events.withColumn("letter", F.lit(None).cast("string"))
        classified = self._classified(events, None if own is None else self._within(own, starts))
        by_stream = classified.groupBy("kind", "namespace", "key", "queue", "reason").agg(
            F.count("*").alias("events"),
            F.min(F.struct("offset", "index")).alias("low"),
            F.max(F.struct("offset", "index")).alias("high"),
        )
        by_stream = by_stream.persist()
        lost = lost_ranges(snapshot, [start.offset for start in starts], self._published.gone)
        counts = self._counts(by_stream)
        findings = [*lost, *self._findings(by_stream)][: self._limit]
        by_stream.unpersist()
        published = sum(counts[kind] for kind in CLASSES)
        lost_offsets = sum(one.last.offset - one.first.offset + 1 for one in lost)
        return SubscriptionAudit(snapshot.name, published, counts, lost_offsets, findings, snapshot.exact)

    def _starts(self, ledger: DataFrame | None) -> list[SequenceToken]:
        """Return the first token of each queue."""
        queues, start = range(len(self._published.ends)), self._start
        if start.kind is StartKind.TIME:
            assert start.time_us is not None
            return [SequenceToken(offset) for offset in self._published.access.offsets_at(start.time_us)]
        if start.kind is StartKind.OFFSETS:
            assert start.token is not None
            # A token is allowed only if the events of one stream are compared.
            return [SequenceToken.parse(start.token) for _ in queues]
        if start.kind is StartKind.LATEST and ledger is not None:
            rows = ledger.groupBy("queue").agg(F.min(F.struct("offset", "index")).alias("low")).collect()
            lowest = {row.queue: SequenceToken(row.low.offset, row.low["index"]) for row in rows}
            return [lowest.get(queue, self._snapshot.done_to(queue)) for queue in queues]
        return [SequenceToken(0) for _ in queues]

    def _within(self, ledger: DataFrame, starts: Sequence[SequenceToken]) -> DataFrame:
        """Count the deliveries of each event that is compared.

        Left out are events that retention removed, and events published since the ends of the queues were read.
        """
        ends = of_queue(self._published.ends)
        there = ((F.col("offset") < ends) & _from_starts(starts)) | self._never_published(ledger)
        for queue, ranges in self._published.gone.items():
            for low, high in ranges:
                there &= ~((F.col("queue") == queue) & (F.col("offset") >= low) & (F.col("offset") < high))
        within = ledger.where(ends.isNull() | there)  # of a queue that does not exist: never published
        return within.groupBy("queue", "offset", "index").agg(F.count("*").alias("times"))

    def _never_published(self, ledger: DataFrame) -> Column:
        """Return whether a delivery is beyond the end of its queue. The ends are read again, after the deliveries."""
        beyond = ledger.where(F.col("offset") >= of_queue(self._published.ends))
        highest = {row.queue: row.high for row in beyond.groupBy("queue").agg(F.max("offset").alias("high")).collect()}
        found = F.lit(False)
        if highest:
            ends = [state.next for state in self._published.access.states()]
            for queue, high in highest.items():
                found |= (F.col("queue") == queue) & F.col("offset").between(ends[queue], high)
        return found

    def _classified(self, events: DataFrame, ledger: DataFrame | None) -> DataFrame:
        """Return each event with its `kind` and `reason`."""
        place = ["queue", "offset", "index"]
        given = events.withColumn("there", F.lit(True))
        if ledger is None:
            given = given.withColumn("times", F.lit(None).cast("long"))
        else:
            given = given.join(ledger, place, "full_outer")
        given = given.join(self._skipped(), place, "left")
        given = given.join(F.broadcast(self._behind()), ["queue", "namespace", "key"], "left")
        given = given.join(F.broadcast(self._gaps()), "queue", "left")
        kind, filtered = F.col("kind"), self._snapshot.definition.filter is not None
        named = given.withColumn("gap", _gap_reason()).withColumn("done", self._done())
        named = named.withColumn("kind", _kind(compared=ledger is not None, filtered=filtered))
        of_kind = F.when(kind == DEAD, F.col("letter")).when(kind == SKIPPED, F.coalesce("skip", "gap"))
        for name, text in _REASONS.items():
            of_kind = of_kind.when(kind == name, F.lit(text))
        return named.withColumn("reason", F.coalesce(of_kind, F.lit(_NO_REASON)))

    def _done(self) -> Column:
        """Return whether an event is done by the checkpoint."""
        offset, index = F.col("offset"), F.col("index")
        out_of_order = F.exists(
            "done_ranges", lambda one: (one["offset"] == offset) & (one["first"] <= index) & (index < one["last"])
        )
        token = F.struct(F.col("behind_offset"), F.col("behind_index"))
        behind = (F.struct(offset.alias("behind_offset"), index.alias("behind_index")) < token) | out_of_order
        up_to = [self._snapshot.done_to(queue).offset for queue in range(len(self._published.ends))]
        return F.when(F.col("behind_offset").isNull(), offset < F.coalesce(of_queue(up_to), F.lit(0))).otherwise(behind)

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
            for queue, at in self._snapshot.checkpoints.items()
            for stream, one in at.behind.items()
        ]
        return self._frame(schema, rows)

    def _letters(self) -> DataFrame:
        schema = pa.schema([*_PLACE, ("timestamp_us", pa.int64()), ("checksum", pa.int64()), ("letter", pa.string())])
        rows = [
            (one.queue, *one.token, one.timestamp_us, one.checksum, reason)
            for one, reason in self._snapshot.letters.items()
        ]
        return self._frame(schema, rows)

    def _skipped(self) -> DataFrame:
        """Return the gap records of single events: a subscription that skips failed events may have many."""
        rows = [(gap.queue, *gap.low, gap.reason) for gap in self._snapshot.gaps if _has_one_event(gap)]
        return self._frame(pa.schema([*_PLACE, ("skip", pa.string())]), rows).dropDuplicates(
            ["queue", "offset", "index"]
        )

    def _gaps(self) -> DataFrame:
        """Return the other gap records, by queue."""
        fields = [("namespace", pa.string()), ("key", pa.string()), ("reason", pa.string())]
        ends = [(name, pa.int64()) for name in ("low_offset", "low_index", "high_offset", "high_index")]
        schema = pa.schema([("queue", pa.int32()), ("gaps", pa.list_(pa.struct([*fields, *ends])))])
        by_queue: dict[int, list[dict[str, object]]] = {}
        for gap in self._snapshot.gaps:
            if not _has_one_event(gap):
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

    def _findings(self, by_stream: DataFrame) -> list[AuditFinding]:
        worst = F.array_position(F.array(*map(F.lit, _REPORTED)), F.col("kind"))
        rows = by_stream.where(F.col("kind").isin(*_REPORTED)).orderBy(worst, "queue", "low", "key").limit(self._limit)
        return [
            AuditFinding(
                row.kind, row.namespace, row.key, row.queue, SequenceToken(row.low.offset, row.low["index"]),
                SequenceToken(row.high.offset, row.high["index"]), row.events, row.reason,
            )
            for row in rows.collect()
        ]  # fmt: skip


def _of_subscription(ledger: DataFrame, name: str) -> DataFrame:
    """Return the deliveries of a subscription. Rows without one are of the only subscription."""
    return ledger.where(F.coalesce(F.col("subscription"), F.lit(name)) == name)


def _from_starts(starts: Sequence[SequenceToken]) -> Column:
    offset, first = F.col("offset"), of_queue([start.offset for start in starts])
    index = of_queue([start.index for start in starts])
    return (offset > first) | ((offset == first) & (F.col("index") >= index))


def _with_letters(events: DataFrame, letters: DataFrame) -> DataFrame:
    """Return the events with the reason of their dead letter, null if there is none."""
    identified = events.withColumn("timestamp_us", F.coalesce(F.unix_micros("timestamp"), F.lit(0)))
    identified = identified.withColumn("checksum", F.crc32("payload")).drop("timestamp", "payload")
    identity = [*(name for name, _ in _PLACE), "timestamp_us", "checksum"]
    return identified.join(letters, identity, "left").drop("timestamp_us", "checksum")


def _has_one_event(gap: GapRecord) -> bool:
    """Return whether a gap record is of one event."""
    return gap.stream is not None and gap.high == SequenceToken(gap.low.offset, gap.low.index + 1)


def _gap_reason() -> Column:
    """Return the reason of the gap record that has the row's event."""
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


def lost_ranges(snapshot: SubscriptionSnapshot, starts: Sequence[int], gone: Ranges) -> list[AuditFinding]:
    """Return the offsets that are gone, were not done, and are in no gap record."""
    found: list[AuditFinding] = []
    for queue, at in sorted(snapshot.checkpoints.items()):
        recorded = [(gap.low.offset, gap.high.offset) for gap in snapshot.gaps if gap.queue == queue and not gap.stream]
        undone = max(starts[queue], at.watermark)
        for low, high in gone.get(queue, ()):
            for begin, end in without((max(low, undone), high), recorded):
                first, last = SequenceToken(begin), SequenceToken(end - 1)
                found.append(AuditFinding(MISSING, None, None, queue, first, last, None, _REMOVED))
    return found


def without(whole: tuple[int, int], parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a range that are in no other range, in order."""
    low, high = whole
    left: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if low < min(begin, high):
            left.append((low, min(begin, high)))
        low = max(low, end)
    return [*left, (low, high)] if low < high else left
