"""`headrace pipeline replay`: what was published is published once more, from an archive or a provider.

A replay has a plan, a file in the staging directory of where it goes to: which events, in which steps, and how far it
is. So the same replay goes on where it was, and repeats nothing: its steps are batches of one application of the sink;
at a chosen speed they are the numbered calls of one producer (`pacing.py`).
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

import click
import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from ...silo.commands.options import Place as CommandPlace
from ...silo.commands.options import place_options
from ...silo.commands.output import json_option
from ...silo.commands.progress import events_progress
from ...silo.datadir import open_data_directory
from ...silo.wording import counted
from ...streams.errors import DefinitionConflict, InvalidArgument, NotFound
from ...streams.identity import StreamId, unquote
from ...streams.subscriptions import Selector
from ..options import source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import Place
from ..publishing import open_destination, producer_of
from ..staging import StagingFolder, staging_directory
from .archive import Progress, by_queue, own_session, read_archive
from .files import Lock, lock_for_reading, read_json, read_state, write_json
from .pacing import Cut, Noted, Pace, Timed, cut, publish
from .pacing import Place as EventPlace
from .running import options_of, report, selecting, spark_options, spark_session, told

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EVENTS_PER_STEP = 2_000_000
"""A step of a replay as fast as possible: it waits in the staging directory before it is published."""
EVENTS_AT_ONCE = 20_000
"""About so many events of a replay at a chosen speed are in memory at once."""

_BINS = 4_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EVENT = ("namespace", "key", "payload", "headers", "id", "timestamp")
_PLACE = ("queue", "offset", "index")
_WILDCARD = re.compile(r"([*?])")


class Replayed(NamedTuple):
    """What a call of `replay` did."""

    id: str
    events: int
    """Published by this call."""
    total: int
    """Events of the whole replay."""


class Plan(msgspec.Struct):
    """A replay and how far it is."""

    definition: Mapping[str, Any]
    app: str
    ends: Sequence[Sequence[int]]
    """Where each step ends, by queue; the first one is where the replay begins."""
    counts: Sequence[int]
    """Events of each step."""
    cut: Cut
    """At a chosen speed, which may be another one when it goes on."""
    done: int = 0
    """Steps that are published; at a chosen speed there are none but the last, which is done when all is."""
    noted: tuple[int, Sequence[int], int] | None = None
    """At a chosen speed: calls, the place of the last event, and how many events."""
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
) -> Replayed:
    """Publish events once more: of an archive (its directory), or of a provider (the options that say where).

    `options` say where to, as for the sink, with `staging` where that is a silo. Chosen are the streams that `streams`
    selects, and timestamps from `since` on and before `until`. Timestamps, ids and headers stay; streams have the same
    names, or those of another namespace, `to_namespace`. Within each stream the order stays. What is published to a
    provider after its replay has begun is not part of it.

    As fast as possible, or `speed` times as fast as the timestamps say, or `rate` events per second.

    Where it is killed or raises, the same call goes on, and each event is published once. With a `name` that holds for
    ever: once it is done, the same call does nothing. Without, it then begins anew. Raises DefinitionConflict where the
    name stands for another replay, Busy where another process is at it.
    """
    task = _Task.of(
        source, options, streams=streams, times=(since, until), to_namespace=to_namespace, pace=Pace(speed, rate)
    )
    with task.lock_source():
        return _Replay(own_session(spark), task, name, progress).run(events_per_step)


class _Task(NamedTuple):
    """What is to be done, checked."""

    archived: Path | None
    source: Mapping[str, str]
    to: Mapping[str, str]
    place: Place
    staging: Path
    selector: Selector
    since: datetime | None
    until: datetime | None
    to_namespace: str | None
    pace: Pace

    @classmethod
    def of(
        cls, source: str | Path | Mapping[str, object], options: Mapping[str, object], *, streams: str,
        times: tuple[datetime | None, datetime | None], to_namespace: str | None, pace: Pace,
    ) -> _Task:  # fmt: skip
        """Raises InvalidArgument for what cannot be."""
        archived = Path(source).absolute() if isinstance(source, str | Path) else None
        given = {} if isinstance(source, str | Path) else _texts(source, PLACE_OPTIONS) | selecting(streams)
        to = _texts(options, (*PLACE_OPTIONS, "staging"))
        place = Place.of(to)
        if given:
            source_options(given)
        if to_namespace is not None:
            StreamId(to_namespace, "")
        elif given and _where(Place.of(given)) == _where(place):
            raise InvalidArgument("a replay of a provider into itself needs another namespace: give --to-namespace")
        _check_pace(pace)
        if any(time is not None and time.tzinfo is None for time in times):
            raise InvalidArgument("since and until need a zone, such as +00:00")
        return cls(archived, given, to, place, _staging(to, place), Selector(streams), *times, to_namespace, pace)

    def lock_source(self) -> AbstractContextManager[object]:
        return nullcontext() if self.archived is None else lock_for_reading(self.archived)

    @property
    def definition(self) -> dict[str, Any]:
        """What makes it the same replay."""
        pace = "fast" if self.pace == Pace(None, None) else "paced"
        return {
            "from": _where(Place.of(self.source)) if self.archived is None else {"archive": str(self.archived)},
            "to": _where(self.place), "streams": self.selector.pattern, "since": str(self.since),
            "until": str(self.until), "to_namespace": self.to_namespace, "pace": pace,
        }  # fmt: skip

    def bounds(self) -> tuple[list[int], list[int]]:
        """Where the source begins and ends now, by queue."""
        if self.archived is None:
            states = Place.of(self.source).open().states()
            return [state.first for state in states], [state.next for state in states]
        state = read_state(self.archived)
        if state is None:
            raise NotFound(f"archive {self.archived}: nothing was archived yet")
        return [0] * len(state.positions), list(state.positions)


def _texts(options: Mapping[str, object], known: Sequence[str]) -> dict[str, str]:
    allowed = {name.lower() for name in known}
    if wrong := next((name for name in options if name.lower() not in allowed), None):
        raise InvalidArgument(f"option {wrong!r} is not for a replay: there are {', '.join(known)}")
    return {name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in options.items()}


def _where(place: Place) -> dict[str, Any]:
    where = {"server": place.server} if place.data is None else {"data": str(Path(place.data).resolve())}
    return where | {"provider": place.provider}


def _staging(to: Mapping[str, str], place: Place) -> Path:
    chosen = next((text for name, text in to.items() if name.lower() == "staging"), None)
    if chosen is not None:
        return staging_directory("option 'staging':", chosen)
    if place.data is None:
        raise InvalidArgument(
            "option 'staging' is missing: name a directory that the driver and all executors share, where the replay "
            "notes how far it is, and events wait until they are published"
        )
    return Path(place.data) / "staging"


def _check_pace(pace: Pace) -> None:
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

    def run(self, events_per_step: int) -> Replayed:
        if self._task.place.data is not None:
            open_data_directory(self._task.place.data)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with Lock.take(self._path.with_suffix(".lock"), f"replay {self._name or 'of these events'} is run"):
            try:
                plan = self._planned(events_per_step)
                events = self._fast(plan) if self._task.pace == Pace(None, None) else self._paced(plan)
            except PySparkException as error:
                raise told(error) or error from None
            if self._name is None:
                self._forget(plan)
            return Replayed(self._name or plan.app, events, sum(plan.counts))

    def _planned(self, events_per_step: int) -> Plan:
        plan = read_json(self._path, Plan)
        if plan is None:
            plan = self._new_plan(events_per_step)
            write_json(self._path, plan)
        if dict(plan.definition) != self._task.definition:
            raise DefinitionConflict(
                f"replay {self._name!r} is another one, with {plan.definition}: give it another id (--id, name=)"
            )
        return plan

    def _new_plan(self, events_per_step: int) -> Plan:
        starts, ends = self._task.bounds()
        width = max(1, *((end - start) // _BINS for start, end in zip(starts, ends, strict=True)))
        found = self._events(starts, ends, ("namespace", "key", "timestamp", "queue", "offset"))
        binned = found.groupBy("queue", F.expr(f"`offset` div {width}").alias("bin")).count().collect()
        bins = [Bin(row["queue"], row["bin"] * width, row["count"]) for row in binned]
        steps, counts = steps_of(bins, width, starts, ends, events_per_step)
        return Plan(
            self._task.definition, f"replay:{self._name or uuid.uuid4().hex}", steps, counts, self._task.pace.cut
        )

    def _forget(self, plan: Plan) -> None:
        """Nobody comes back to it."""
        folder = StagingFolder.of(self._task.staging, self._task.place.provider, plan.app)
        shutil.rmtree(folder.path, ignore_errors=True)
        self._path.unlink()

    def _events(self, starts: Sequence[int], ends: Sequence[int], columns: Sequence[str]) -> DataFrame:
        """The chosen events between these offsets, as they are."""
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

    def _named(self, frame: DataFrame) -> DataFrame:
        namespace = self._task.to_namespace
        return frame if namespace is None else frame.withColumn("namespace", F.lit(namespace))

    # ---- as fast as possible

    def _fast(self, plan: Plan) -> int:
        total, before = sum(plan.counts), sum(plan.counts[: plan.done])
        self._progress(before, total)
        for step in range(plan.done, len(plan.counts)):
            self._publish_step(plan, step)
            plan.done = step + 1
            write_json(self._path, plan)
            self._progress(sum(plan.counts[: plan.done]), total)
        return total - before

    def _publish_step(self, plan: Plan, step: int) -> None:
        events = self._events(plan.ends[step], plan.ends[step + 1], (*_EVENT, *_PLACE))
        rows = self._named(events).repartition("namespace", "key")
        rows = rows.sortWithinPartitions("namespace", "key", *_PLACE).select(*_EVENT)
        writer = rows.write.format("headrace").mode("append").options(**self._task.to)
        writer.options(staging=str(self._task.staging), txnAppId=plan.app, txnVersion=str(step)).save()

    # ---- at a chosen speed

    def _paced(self, plan: Plan) -> int:
        total = sum(plan.counts)
        if not plan.counts or plan.done == len(plan.counts):
            return 0
        noted = Noted(0, None, 0)
        if plan.noted is not None:
            noted = Noted(plan.noted[0], EventPlace(*plan.noted[1]), plan.noted[2])
        self._progress(noted.events, total)

        def note(reached: Noted) -> None:
            plan.noted = reached.number, list(reached.after or ()), reached.events
            write_json(self._path, plan)
            self._progress(reached.events, total)

        published = asyncio.run(self._publish_paced(plan, noted, note))
        plan.done = len(plan.counts)
        write_json(self._path, plan)
        return published

    async def _publish_paced(self, plan: Plan, noted: Noted, note: Callable[[Noted], object]) -> int:
        events = self._in_order(plan, noted.after)
        try:
            async with open_destination(self._task.place) as destination:
                producer, pace = producer_of(plan.app), self._task.pace
                return await publish(destination, producer, cut(events, plan.cut), noted=noted, pace=pace, note=note)
        finally:
            with suppress(ValueError):  # a thread still waits for the next one
                events.close()  # Spark's end of it must go before Spark does

    def _in_order(self, plan: Plan, after: EventPlace | None) -> Generator[Timed]:
        """All events of the plan by time, from a place on. Spark sorts them, and hands them over bit by bit."""
        self._spark.conf.set("spark.sql.adaptive.enabled", "false")  # it would make large parts of small ones
        parts = min(max(sum(plan.counts) // EVENTS_AT_ONCE, 1), 2_000)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(parts))
        of_stream = Window.partitionBy("namespace", "key").orderBy(*_PLACE).rowsBetween(Window.unboundedPreceding, 0)
        frame = self._events(plan.ends[0], plan.ends[-1], (*_EVENT, *_PLACE))
        frame = frame.withColumn("us", F.unix_micros("timestamp")).withColumn("due", F.max("us").over(of_stream))
        if after is not None:
            frame = frame.where(F.struct("due", *_PLACE) > F.struct(*map(F.lit, after)))
        ordered = self._named(frame).orderBy("due", *_PLACE)
        for row in ordered.select("due", *_PLACE, *_EVENT[:-1], "us").toLocalIterator():
            yield Timed(EventPlace(*row[:4]), (row[4], row[5], bytes(row[6]), *row[7:]))


# ---- which events ----------------------------------------------------------------------------------------------------


class Bin(NamedTuple):
    """Some offsets of a queue, from `start` on, and how many chosen events they have."""

    queue: int
    start: int
    events: int


def steps_of(
    bins: Sequence[Bin], width: int, starts: Sequence[int], ends: Sequence[int], events_per_step: int
) -> tuple[list[list[int]], list[int]]:
    """Where steps of about so many events begin and end, by queue, and how many each has. Pure.

    All queues go forward together, each in proportion to its length.
    """
    whole = [max(end - start, 1) for start, end in zip(starts, ends, strict=True)]
    in_turn = sorted(bins, key=lambda one: ((one.start - starts[one.queue]) / whole[one.queue], one.queue))
    reached = list(ends)
    for one in reversed(in_turn):  # the first one of each queue is where that begins
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
    """Written so that Parquet's statistics leave out what is elsewhere."""
    parts = [
        (F.col("queue") == queue) & (F.col("offset") >= start) & (F.col("offset") < end)
        for queue, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]
    return functools.reduce(lambda one, other: one | other, parts, F.lit(False))


def selected(selector: Selector) -> Column:
    """The condition that rows are of selected streams."""
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
    """Leaves out whole directories of an archive."""
    days = F.lit(True)
    if since is not None:
        days = days & (F.col("date") >= F.lit(since.astimezone(UTC).date()))
    return days if until is None else days & (F.col("date") <= F.lit(until.astimezone(UTC).date()))


# ---- the command -----------------------------------------------------------------------------------------------------


def _from_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--archive`, `--from-data` or `--from-server`, with what belongs to it, handed to the command as `source`."""
    file = click.Path(path_type=Path, dir_okay=False)
    directory = click.Path(path_type=Path, file_okay=False)

    @click.option("--archive", "archived", type=directory, metavar="DIR", help="Replay an archive.")
    @click.option("--from-data", type=directory, metavar="DIR", help="Replay a data directory.")
    @click.option("--from-server", metavar="HOST:PORT", help="Replay what silos have.")
    @click.option("--from-provider", default="default", show_default=True, metavar="NAME", help="Provider there.")
    @click.option("--from-token", envvar="HEADRACE_FROM_TOKEN", show_envvar=True, metavar="TOKEN", help="For the silo.")
    @click.option("--from-ca", type=file, metavar="FILE", help="Use TLS, and trust these certificates (PEM).")
    @click.option("--from-certificate", type=file, metavar="FILE", help="This client's own, with --from-key.")
    @click.option("--from-key", type=file, metavar="FILE", help="Its key.")
    @click.option("--from-tls", is_flag=True, help="Use TLS, and trust well-known authorities.")
    @click.option("--from-insecure", is_flag=True, help="Send the token without TLS to another machine.")
    @functools.wraps(command)
    def with_source(*args: Any, archived: Path | None, **given: Any) -> Any:
        said = {name: given.pop(name) for name in list(given) if name.startswith("from_")}
        return command(*args, source=_source(archived, {name[5:]: each for name, each in said.items()}), **given)

    return with_source


def _source(archived: Path | None, said: dict[str, Any]) -> Path | dict[str, object]:
    if sum(each is not None for each in (archived, said["data"], said["server"])) != 1:
        raise click.UsageError("give one of --archive, --from-data and --from-server: what is replayed")
    if archived is not None:
        return archived
    names = {"ca": "tlsCa", "certificate": "tlsCertificate", "key": "tlsKey"}
    return {names.get(name, name): each for name, each in said.items() if each}


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time such as 2026-11-21T10:00", param, ctx)
        return when if when.tzinfo else when.replace(tzinfo=UTC)


@click.command("replay")
@_from_options
@place_options
@click.option("--staging", type=click.Path(path_type=Path), metavar="DIR", help="Needed with --server: for notes.")
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Which, as namespace/key.")
@click.option("--since", type=_Time(), metavar="TIME", help="Events with this timestamp or a later one (UTC).")
@click.option("--until", type=_Time(), metavar="TIME", help="Events with an earlier timestamp than this (UTC).")
@click.option("--to-namespace", metavar="NAME", help="Publish to it.  [default: the same]")
@click.option("--speed", type=float, metavar="X", help="X times as fast as the timestamps say.")
@click.option("--rate", type=float, metavar="N", help="N events per second.  [default: as fast as possible]")
@click.option("--id", "name", metavar="NAME", help="Do it once for ever: with the same one nothing comes again.")
@spark_options
@json_option
def command(
    *, source: Path | dict[str, object], place: CommandPlace, staging: Path | None,
    master: str | None, spark_log: Path | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Publish what was published once more, to --data or --server.

    Streams, their order, timestamps, ids and headers stay. Whatever ends it, the same command goes on, and each event
    is published once.
    """
    how |= options_of(place) | ({} if staging is None else {"staging": str(staging)})
    with spark_session("headrace replay", master, spark_log) as spark, events_progress("replaying") as progress:
        done = replay(spark, source, progress=progress, **how)
    text = f"replayed {counted(done.events, 'event')}"
    report(done._asdict(), as_json, text if done.events == done.total else f"{text}, {done.total:,} in all")
