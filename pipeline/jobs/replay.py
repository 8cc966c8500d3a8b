"""The job `replay`: publish the events of an archive or a provider again.

A replay has a plan, a file in the staging directory of its destination: the events, the steps, and the progress. So the
same replay goes on after a stop, and repeats nothing. Its steps are batches of one application of the sink. At a chosen
speed they are the numbered calls of one producer (`pacing.py`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from ...store.datadir import open_data_directory
from ...streams.errors import DefinitionConflict, InvalidArgument, NotFound
from ...streams.identity import StreamId, unquote
from ...streams.private_files import make_directory
from ...streams.subscriptions import Selector
from ..options import job_options, selector_options, source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import ProviderPlace
from ..publishing import open_destination, producer_of
from ..session import own_session
from ..staging import StagingFolder, staging_directory
from .archive import Progress, by_queue, read_archive
from .failures import headrace_error
from .files import ArchiveLock, lock_for_reading, read_json, read_state, write_json
from .pacing import EventPosition, PacedProgress, ReplayChunkLimits, ReplayPace, TimedEvent, cut, publish

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EVENTS_PER_STEP = 2_000_000
"""Events of a step, if the replay is as fast as possible: a step is staged before it is published."""
EVENTS_AT_ONCE = 20_000
"""How many events are in memory at once, at a chosen speed."""

_BINS = 4_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EVENT = ("namespace", "key", "payload", "headers", "id", "timestamp")
_PLACE = ("queue", "offset", "index")
_WILDCARD = re.compile(r"([*?])")


class ReplayResult(NamedTuple):
    """The result of `replay`."""

    id: str
    events: int
    """Published by this call."""
    total: int
    """Events of the whole replay."""


class ReplayPlan(msgspec.Struct):
    """A replay and its progress."""

    definition: Mapping[str, Any]
    app: str
    ends: Sequence[Sequence[int]]
    """The ends of each step, by queue. The first ones are the start of the replay."""
    counts: Sequence[int]
    """Events of each step."""
    cut: ReplayChunkLimits
    """At a chosen speed: limits of the chunks. They stay if the replay goes on at another speed."""
    done: int = 0
    """Steps that are published. At a chosen speed: 0, and the number of steps after the last event."""
    noted: tuple[int, Sequence[int], int] | None = None
    """At a chosen speed: calls, the position of the last event, and the number of events."""
    format: int = 1


def replay(
    spark: SparkSession,
    source: str | Path | Mapping[str, object],
    *,
    streams: str = "*/*",
    since: datetime | None = None,
    until: datetime | None = None,
    to_namespace: str | None = None,
    speed: float | None = None,
    rate: float | None = None,
    name: str | None = None,
    events_per_step: int = EVENTS_PER_STEP,
    progress: Progress = lambda _done, _total: None,
    **options: object,
) -> ReplayResult:
    """Publish events again: of an archive (its directory), or of a provider (the options of its location).

    `options` are those of the sink for the destination, with `staging` if it is a silo. The replay has the streams that
    `streams` selects, with timestamps from `since` (inclusive) to `until` (exclusive). Timestamps, ids, headers and the
    order within each stream stay. Streams keep their names, or get another namespace, `to_namespace`. Events that are
    published after the replay has begun are not part of it.

    It is as fast as possible, or has `speed` times the speed of the timestamps, or `rate` events per second.

    If it is killed or raises, the same call goes on, and each event is published once. With a `name`, the same call
    does nothing after the replay is done. Without, it then begins a new replay. Raise DefinitionConflict if the name
    belongs to another replay, Busy if another process runs it.
    """
    task = _Task.of(
        source, options, streams=streams, times=(since, until), to_namespace=to_namespace, pace=ReplayPace(speed, rate)
    )
    with task.lock_source():
        return _Replay(own_session(spark), task, name, progress).run(events_per_step)


class _Task(NamedTuple):
    """The arguments of a replay, checked."""

    archived: Path | None
    source: Mapping[str, str]
    to: Mapping[str, str]
    place: ProviderPlace
    staging: Path
    selector: Selector
    since: datetime | None
    until: datetime | None
    to_namespace: str | None
    pace: ReplayPace

    @classmethod
    def of(
        cls, source: str | Path | Mapping[str, object], options: Mapping[str, object], *, streams: str,
        times: tuple[datetime | None, datetime | None], to_namespace: str | None, pace: ReplayPace,
    ) -> _Task:  # fmt: skip
        """Raise InvalidArgument for wrong arguments."""
        archived = Path(source).absolute() if isinstance(source, str | Path) else None
        given: dict[str, str] = {}
        if not isinstance(source, str | Path):
            given = job_options("a replay", source, PLACE_OPTIONS) | selector_options(streams)
        to = job_options("a replay", options, (*PLACE_OPTIONS, "staging"))
        place = ProviderPlace.of(to)
        if given:
            source_options(given)
        if to_namespace is not None:
            StreamId(to_namespace, "")
        elif given and ProviderPlace.of(given).identity() == place.identity():
            raise InvalidArgument("a replay of a provider into itself needs another namespace: give --to-namespace")
        _check_pace(pace)
        if any(time is not None and time.tzinfo is None for time in times):
            raise InvalidArgument("since and until need a zone, such as +00:00")
        return cls(archived, given, to, place, _staging(to, place), Selector(streams), *times, to_namespace, pace)

    def lock_source(self) -> AbstractContextManager[object]:
        return nullcontext() if self.archived is None else lock_for_reading(self.archived)

    @property
    def definition(self) -> dict[str, Any]:
        """Return the values that identify a replay."""
        archived, pace = self.archived, "fast" if self.pace == ReplayPace(None, None) else "paced"
        return {
            "from": ProviderPlace.of(self.source).identity() if archived is None else {"archive": str(archived)},
            "to": self.place.identity(), "streams": self.selector.pattern, "since": str(self.since),
            "until": str(self.until), "to_namespace": self.to_namespace, "pace": pace,
        }  # fmt: skip

    def bounds(self) -> tuple[list[int], list[int]]:
        """Return the first and the next offset of the source, by queue."""
        if self.archived is None:
            states = ProviderPlace.of(self.source).open().states()
            return [state.first for state in states], [state.next for state in states]
        state = read_state(self.archived)
        if state is None:
            raise NotFound(f"archive '{self.archived}': nothing was archived yet")
        return [0] * len(state.positions), list(state.positions)


def _staging(to: Mapping[str, str], place: ProviderPlace) -> Path:
    chosen = to.get("staging")
    if chosen is not None:
        return staging_directory("option 'staging':", chosen)
    if place.data is None:
        raise InvalidArgument(
            "option 'staging' is missing: name a directory that the driver and all executors share; the replay keeps "
            "its progress in it, and events wait in it until they are published"
        )
    return Path(place.data) / "staging"


def _check_pace(pace: ReplayPace) -> None:
    if pace.speed is not None and pace.rate is not None:
        raise InvalidArgument("give speed or rate, not both: a multiple of the original speed, or events per second")
    if any(number is not None and not 0 < number < float("inf") for number in pace):
        raise InvalidArgument("speed and rate are numbers above 0")


class _Replay:
    """One call of `replay`."""

    def __init__(self, spark: SparkSession, task: _Task, name: str | None, progress: Progress) -> None:
        self._spark = spark
        self._task = task
        self._name = name
        self._progress = progress
        digest = hashlib.sha256((repr(sorted(task.definition.items())) if name is None else name).encode()).hexdigest()
        kind = "replay" if name is None else "replay-named"
        self._path = task.staging / task.place.provider / f"{kind}-{digest[:32]}.json"

    def run(self, events_per_step: int) -> ReplayResult:
        if self._task.place.data is not None:
            open_data_directory(self._task.place.data)
        make_directory(self._path.parent)
        with ArchiveLock.take(self._path.with_suffix(".lock"), f"replay {self._name or 'of these events'} is run"):
            try:
                plan = self._planned(events_per_step)
                events = self._fast(plan) if self._task.pace == ReplayPace(None, None) else self._paced(plan)
            except PySparkException as error:
                raise headrace_error(error) or error from None
            if self._name is None:
                self._forget(plan)
            return ReplayResult(self._name or plan.app, events, sum(plan.counts))

    def _planned(self, events_per_step: int) -> ReplayPlan:
        plan = read_json(self._path, ReplayPlan)
        if plan is None:
            plan = self._new_plan(events_per_step)
            write_json(self._path, plan)
        if dict(plan.definition) != self._task.definition:
            raise DefinitionConflict(
                f"replay {self._name!r} is another one, with {plan.definition}: give it another id (--id, name=)"
            )
        return plan

    def _new_plan(self, events_per_step: int) -> ReplayPlan:
        starts, ends = self._task.bounds()
        width = max(1, *((end - start) // _BINS for start, end in zip(starts, ends, strict=True)))
        found = self._events(starts, ends, ("namespace", "key", "timestamp", "queue", "offset"))
        binned = found.groupBy("queue", F.expr(f"`offset` div {width}").alias("bin")).count().collect()
        bins = [OffsetBin(row["queue"], row["bin"] * width, row["count"]) for row in binned]
        steps, counts = steps_of(bins, width, starts, ends, events_per_step)
        app = f"replay:{self._name or uuid.uuid4().hex}"
        return ReplayPlan(self._task.definition, app, steps, counts, self._task.pace.chunk_limits)

    def _forget(self, plan: ReplayPlan) -> None:
        """Remove the plan and the staging folder."""
        folder = StagingFolder.of(self._task.staging, self._task.place.provider, plan.app)
        shutil.rmtree(folder.path, ignore_errors=True)
        self._path.unlink()

    def _events(self, starts: Sequence[int], ends: Sequence[int], columns: Sequence[str]) -> DataFrame:
        """Return the selected events between these offsets."""
        task = self._task
        if task.archived is None:
            reader = self._spark.read.format("headrace").options(**task.source, columns=",".join(columns))
            frame = reader.options(start=by_queue(starts), end=by_queue(ends)).load()
        else:
            frame = read_archive(self._spark, task.archived, locked=True).where(_days(task.since, task.until))
            frame = frame.where(_between(starts, ends)).where(selected(task.selector))
        if task.since is not None:
            frame = frame.where(F.unix_micros("timestamp") >= _micros(task.since))
        if task.until is not None:
            frame = frame.where(F.unix_micros("timestamp") < _micros(task.until))
        return frame.select(*columns)

    def _renamed(self, frame: DataFrame) -> DataFrame:
        """Return the events with the namespace that they get in the destination."""
        namespace = self._task.to_namespace
        return frame if namespace is None else frame.withColumn("namespace", F.lit(namespace))

    # ---- as fast as possible

    def _fast(self, plan: ReplayPlan) -> int:
        total, before = sum(plan.counts), sum(plan.counts[: plan.done])
        self._progress(before, total)
        for step in range(plan.done, len(plan.counts)):
            self._publish_step(plan, step)
            plan.done = step + 1
            write_json(self._path, plan)
            self._progress(sum(plan.counts[: plan.done]), total)
        return total - before

    def _publish_step(self, plan: ReplayPlan, step: int) -> None:
        events = self._events(plan.ends[step], plan.ends[step + 1], (*_EVENT, *_PLACE))
        rows = self._renamed(events).repartition("namespace", "key")
        rows = rows.sortWithinPartitions("namespace", "key", *_PLACE).select(*_EVENT)
        writer = rows.write.format("headrace").mode("append").options(**self._task.to)
        writer.options(staging=str(self._task.staging), txnAppId=plan.app, txnVersion=str(step)).save()

    # ---- at a chosen speed

    def _paced(self, plan: ReplayPlan) -> int:
        total = sum(plan.counts)
        if not plan.counts or plan.done == len(plan.counts):
            return 0
        noted = PacedProgress(0, None, 0)
        if plan.noted is not None:
            noted = PacedProgress(plan.noted[0], EventPosition(*plan.noted[1]), plan.noted[2])
        self._progress(noted.events, total)

        def note(reached: PacedProgress) -> None:
            plan.noted = reached.number, list(reached.after or ()), reached.events
            write_json(self._path, plan)
            self._progress(reached.events, total)

        published = asyncio.run(self._publish_paced(plan, noted, note))
        plan.done = len(plan.counts)
        write_json(self._path, plan)
        return published

    async def _publish_paced(
        self, plan: ReplayPlan, noted: PacedProgress, note: Callable[[PacedProgress], object]
    ) -> int:
        events = self._in_order(plan, noted.after)
        try:
            async with open_destination(self._task.place) as destination:
                producer, pace = producer_of(plan.app), self._task.pace
                return await publish(destination, producer, cut(events, plan.cut), noted=noted, pace=pace, note=note)
        finally:
            with suppress(ValueError):  # a thread still waits for the next one
                events.close()  # Spark's side of the iterator has to end before Spark does

    def _in_order(self, plan: ReplayPlan, after: EventPosition | None) -> Generator[TimedEvent]:
        """Yield the events of the plan by time, behind `after`. Spark sorts them, and sends a part at a time."""
        # Adaptive execution would merge small parts into large ones.
        self._spark.conf.set("spark.sql.adaptive.enabled", "false")
        parts = min(max(sum(plan.counts) // EVENTS_AT_ONCE, 1), 2_000)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(parts))
        of_stream = Window.partitionBy("namespace", "key").orderBy(*_PLACE).rowsBetween(Window.unboundedPreceding, 0)
        frame = self._events(plan.ends[0], plan.ends[-1], (*_EVENT, *_PLACE))
        frame = frame.withColumn("us", F.unix_micros("timestamp")).withColumn("due", F.max("us").over(of_stream))
        if after is not None:
            frame = frame.where(F.struct("due", *_PLACE) > F.struct(*map(F.lit, after)))
        ordered = self._renamed(frame).orderBy("due", *_PLACE)
        for row in ordered.select("due", *_PLACE, *_EVENT[:-1], "us").toLocalIterator():
            yield TimedEvent(EventPosition(*row[:4]), (row[4], row[5], bytes(row[6]), *row[7:]))


# ---- selected events -------------------------------------------------------------------------------------------------


class OffsetBin(NamedTuple):
    """Some offsets of a queue, from `start` on, and their number of selected events."""

    queue: int
    start: int
    events: int


def steps_of(
    bins: Sequence[OffsetBin], width: int, starts: Sequence[int], ends: Sequence[int], events_per_step: int
) -> tuple[list[list[int]], list[int]]:
    """Return the ends of steps of about `events_per_step` events, by queue, and the events of each step. Pure.

    All queues advance together, each in proportion to its length.
    """
    whole = [max(end - start, 1) for start, end in zip(starts, ends, strict=True)]
    in_turn = sorted(bins, key=lambda one: ((one.start - starts[one.queue]) / whole[one.queue], one.queue))
    reached = list(ends)
    for one in reversed(in_turn):  # the first one of each queue is the start of the queue
        reached[one.queue] = max(one.start, starts[one.queue])
    steps, counts, events = [list(reached)], list[int](), 0
    for at, one in enumerate(in_turn, 1):
        reached[one.queue] = min(one.start + width, ends[one.queue])
        events += one.events
        if events >= events_per_step or at == len(in_turn):
            steps.append(list(reached))
            counts.append(events)
            events = 0
    return steps, counts


def _between(starts: Sequence[int], ends: Sequence[int]) -> Column:
    """Return a condition in a form that lets Parquet skip other parts by its statistics."""
    parts = [
        (F.col("queue") == queue) & (F.col("offset") >= start) & (F.col("offset") < end)
        for queue, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]
    return functools.reduce(lambda one, other: one | other, parts, F.lit(False))


def selected(selector: Selector) -> Column:
    """Return the condition that rows are of selected streams."""
    namespace, _, key = selector.pattern.partition("/")
    return _matches("namespace", namespace) & _matches("key", key)


def _matches(column: str, glob: str) -> Column:
    if glob == "*":
        return F.lit(True)
    pieces = _WILDCARD.split(glob)
    if len(pieces) == 1:
        return F.col(column) == unquote(glob, glob)
    pieces[::2] = [re.escape(unquote(piece, glob)) for piece in pieces[::2]]
    pieces[1::2] = [".*" if wildcard == "*" else "." for wildcard in pieces[1::2]]
    return F.col(column).rlike(rf"(?s)\A(?:{''.join(pieces)})\z")


def _micros(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _days(since: datetime | None, until: datetime | None) -> Column:
    """Return a condition that leaves out whole directories of an archive."""
    days = F.lit(True)
    if since is not None:
        days = days & (F.col("date") >= F.lit(since.astimezone(UTC).date()))
    return days if until is None else days & (F.col("date") <= F.lit(until.astimezone(UTC).date()))
