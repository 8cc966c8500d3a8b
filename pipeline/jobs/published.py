"""What an audit takes for published: what the log has, and below that an archive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from ...silo.wording import counted
from ...streams.errors import InvalidArgument, NotFound
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Selector
from ..place import Place
from .archive import read_archive
from .files import State, read_state
from .findings import PUBLISHED_TWICE, Finding
from .running import told

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..access import QueueAccess

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Offsets by queue, each range with its exclusive end."""


class Published(NamedTuple):
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
    def of(cls, spark: SparkSession, options: Mapping[str, str], archive: str | Path | None) -> Published:
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
        archived = read_archive(self.spark, self.archive).where(F.col("offset") < of_queue(self.firsts))
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


def of_queue(values: Sequence[int]) -> Column:
    """The value of a row's queue, null for a queue that there is not."""
    return F.get(F.array(*(F.lit(value).cast("long") for value in values)), F.col("queue"))


class Content(NamedTuple):
    """How the events themselves are."""

    events: int
    published_twice: int
    """Events with an id that an earlier one of the same stream has."""
    holes: int
    """Offsets that the log should have and has not."""
    findings: Sequence[Finding]


def content(published: Published, selectors: Iterable[Selector], limit: int) -> Content:
    """Of the streams of some subscriptions, on a data directory of all."""
    whole = published.place.data is not None
    wanted = {"*/*"} if whole else {selector.pattern for selector in selectors}
    frames = [published.events(Selector(pattern), "id") for pattern in sorted(wanted)]
    if not frames:
        return Content(0, 0, 0, [])
    events = frames[0]
    for frame in frames[1:]:
        events = events.unionByName(frame)
    if len(frames) > 1:
        events = events.dropDuplicates(["queue", "offset", "index"])
    number, batches = _counted(events, published.firsts)
    retained = sum(end - first for first, end in zip(published.firsts, published.ends, strict=True))
    holes = max(retained - batches, 0) if whole else 0
    twice, findings = _published_twice(events, limit)
    return Content(number, twice, holes, findings)


def _counted(events: DataFrame, firsts: Sequence[int]) -> tuple[int, int]:
    """Events, and batches of the log."""
    by_batch = events.groupBy("queue", "offset").count()
    logged = F.when(F.col("offset") >= of_queue(firsts), True)
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
