"""The published events of an audit: those of the log, and below its first offset those of an archive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from ...streams.errors import InvalidArgument, NotFound
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Selector
from ...streams.wording import counted
from ..place import ProviderPlace
from .archive import by_queue, read_archive
from .failures import headrace_error
from .files import ArchiveState, read_state
from .findings import PUBLISHED_TWICE, AuditFinding

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..access import QueueAccess

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Offsets by queue, each range with its exclusive end."""


class PublishedEvents(NamedTuple):
    """The published events up to ends that are read once."""

    spark: SparkSession
    place: ProviderPlace
    options: Mapping[str, str]
    access: QueueAccess
    firsts: Sequence[int]
    ends: Sequence[int]
    archive: Path | None
    gone: Ranges
    """Offsets that are neither in the log nor in the archive."""

    @classmethod
    def of(cls, spark: SparkSession, options: Mapping[str, str], archive: str | Path | None) -> PublishedEvents:
        place = ProviderPlace.of(options)
        access = place.open()
        states = access.states()
        firsts, ends = [state.first for state in states], [state.next for state in states]
        path = None if archive is None else Path(archive).absolute()
        gone = {queue: [(0, first)] for queue, first in enumerate(firsts)}
        if path is not None:
            gone = _gone(spark, path, place.provider, firsts)
        return cls(spark, place, options, access, firsts, ends, path, gone)

    def events(self, selector: Selector, *columns: str) -> DataFrame:
        """Return the events of the selected streams, from the log, and below its first offset from the archive."""
        columns = ("namespace", "key", "queue", "offset", "index", *columns)
        logged = self._logged(selector, columns)
        if self.archive is None:
            return logged
        _check_streams(self.archive, selector)
        archived = read_archive(self.spark, self.archive).where(F.col("offset") < of_queue(self.firsts))
        matches = F.udf(_Matches(selector.pattern), "boolean", useArrow=False)("namespace", "key")
        return archived.where(matches).select(*columns).unionByName(logged)

    def _logged(self, selector: Selector, columns: Sequence[str]) -> DataFrame:
        namespace, _, key = selector.pattern.partition("/")
        chosen = {"namespace": namespace, "key": key, "columns": ",".join(columns)}
        ranges = {"start": by_queue(self.firsts), "end": by_queue(self.ends)}
        reader = self.spark.read.format("headrace").options(**self.options, **chosen, **ranges)
        frame = reader.load()
        if not set("*?") & set(namespace):
            try:
                frame.isEmpty()
            except PySparkException as error:
                if not isinstance(headrace_error(error), NotFound):
                    raise
                return reader.option("namespace", "*").load().limit(0)  # the namespace has no events
        return frame


def _state(archive: Path) -> ArchiveState:
    state = read_state(archive)
    if state is None:
        raise NotFound(f"archive '{archive}': it does not exist")
    return state


def _gone(spark: SparkSession, archive: Path, provider: str, firsts: Sequence[int]) -> Ranges:
    """Return the offsets that neither the log nor the archive has. Raise InvalidArgument if the archive is of another
    provider."""
    state = _state(archive)
    if len(state.positions) != len(firsts) or state.source.get("provider") != provider:
        raise InvalidArgument(
            f"archive '{archive}': it is of provider {state.source.get('provider')!r} with "
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
        raise InvalidArgument(f"archive '{archive}': its streams are {has}, not {selector.pattern}: name another")


class _Matches:
    """A selector for Spark's workers: the pickled pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __call__(self, namespace: str, key: str) -> bool:
        return Selector(self._pattern).matcher()(StreamId(namespace, key))


def of_queue(values: Sequence[int]) -> Column:
    """Return the value of a row's queue, null for a queue that does not exist."""
    return F.get(F.array(*(F.lit(value).cast("long") for value in values)), F.col("queue"))


class PublishedState(NamedTuple):
    """The state of the published events."""

    events: int
    published_twice: int
    """Events with an id that an earlier one of the same stream has."""
    holes: int
    """Offsets that are missing in the log."""
    findings: Sequence[AuditFinding]


def content(published: PublishedEvents, selectors: Iterable[Selector], limit: int) -> PublishedState:
    """Check the events of the selected streams; on a data directory, of all streams."""
    whole = published.place.data is not None
    wanted = {"*/*"} if whole else {selector.pattern for selector in selectors}
    frames = [published.events(Selector(pattern), "id") for pattern in sorted(wanted)]
    if not frames:
        return PublishedState(0, 0, 0, [])
    events = frames[0]
    for frame in frames[1:]:
        events = events.unionByName(frame)
    if len(frames) > 1:
        events = events.dropDuplicates(["queue", "offset", "index"])
    number, batches = _counted(events, published.firsts)
    retained = sum(end - first for first, end in zip(published.firsts, published.ends, strict=True))
    holes = max(retained - batches, 0) if whole and published.place.open().dense else 0
    twice, findings = _published_twice(events, limit)
    return PublishedState(number, twice, holes, findings)


def _counted(events: DataFrame, firsts: Sequence[int]) -> tuple[int, int]:
    """Count the events, and the batches of the log."""
    by_batch = events.groupBy("queue", "offset").count()
    logged = F.when(F.col("offset") >= of_queue(firsts), True)
    row = by_batch.agg(F.sum("count").alias("events"), F.count(logged).alias("batches")).first()
    assert row is not None
    return row.events or 0, row.batches


def _published_twice(events: DataFrame, limit: int) -> tuple[int, list[AuditFinding]]:
    token = F.struct("queue", "offset", "index")
    of_id = events.where("id IS NOT NULL").groupBy("namespace", "key", "id")
    twice = of_id.agg(F.count("*").alias("n"), F.min(token).alias("low"), F.max(token).alias("high")).where("n > 1")
    twice = twice.persist()
    row = twice.agg(F.sum(F.col("n") - 1).alias("more")).first()
    findings = [
        AuditFinding(
            PUBLISHED_TWICE, one.namespace, one.key, one.low.queue, SequenceToken(one.low.offset, one.low["index"]),
            SequenceToken(one.high.offset, one.high["index"]), one.n, f"{one.n} events have the id {one.id!r}",
        )
        for one in twice.orderBy("low").limit(limit).collect()
    ]  # fmt: skip
    twice.unpersist()
    assert row is not None
    return row.more or 0, findings
