"""`headrace pipeline archive`: streams become Parquet files, each event once, a bit more with every run.

Spark's own streaming sink for files keeps a log of which files count, which other readers of Parquet do not know. So a
run is a plain batch here, from the positions that the archive has noted up to the present ends, and `files.py` takes
what Spark has written into the archive, together with the new positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from ...silo.commands.options import Place as CommandPlace
from ...silo.commands.options import place_options
from ...silo.commands.output import json_option, note
from ...silo.commands.progress import events_progress
from ...silo.wording import counted
from ...streams.errors import DataDirectoryError, InvalidArgument, OffsetsGone
from ..columns import DEFAULT
from ..options import source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import Place
from ..planning import estimated_events, ranges
from ..positions import shares
from .files import Archive, Gap, Partition, State, Step, check_path, lock_for_reading, read_state
from .running import options_to_read, report, selecting, spark_options, spark_session, told

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..access import QueueAccess, QueueState

EVENTS_PER_STEP = 4_000_000
"""A run is cut into changes of about so many events: what is killed loses one of them."""
EVENTS_PER_FILE = 2_000_000
SMALL_BYTES = 32 << 20
"""A smaller file is worth to be put together with others."""
SMALL_FILES = 8
"""So many small ones in a directory are compacted."""
COMPACTED_BYTES = 2 << 30
"""So much is compacted at a time."""

Progress = Callable[[int, int], object]
"""Is told how many events are done, of about how many."""

_DAY_US = 86_400_000_000
_SCHEMA = (
    "`key` STRING, `payload` BINARY, `headers` MAP<STRING, STRING>, `id` STRING, `timestamp` TIMESTAMP, `queue` INT, "
    "`offset` BIGINT, `index` INT, `namespace` STRING, `date` DATE"
)
_MOST_TRIES = 5
_HEX_BYTES = 126
"""In hexadecimal digits such a name of a namespace is still one of a directory."""


class Archived(NamedTuple):
    """What a run of `archive` did."""

    events: int
    files: int
    compacted: int
    """Small files that were put together."""
    gaps: Sequence[Gap]
    """What retention had removed before."""
    total: int
    """Events of the archive."""


def archive(
    spark: SparkSession,
    into: str | Path,
    *,
    compact: bool = True,
    fail_on_data_loss: bool = True,
    small_files: int = SMALL_FILES,
    events_per_step: int = EVENTS_PER_STEP,
    progress: Progress = lambda _done, _total: None,
    on_step: Step = lambda _step: None,
    **options: object,
) -> Archived:
    """Add to the archive `into` what was published since it was last done, up to now: each event exactly once.

    `options` are those of the source that say where (`data`, `server`, …) and which streams (`namespace`, `key`): the
    same with every run. The directory is one that the driver and all executors share. Where it is killed or raises, the
    next run goes on. Unless `compact` is false, directories with `small_files` small files or more get larger ones.

    Raises OffsetsGone where retention has passed what is to be archived; without `fail_on_data_loss` that is noted as
    a gap. Busy where another process archives into it, InvalidArgument where it has other streams or another
    provider's, DataDirectoryError where it is no archive.
    """
    source = _Source.of(options)
    path = Path(into).absolute()
    with Archive.open(path, on_step) as opened:
        access = source.place.open()
        before = _started(opened, source, access)
        run = _Run(own_session(spark), source, opened, fail_on_data_loss)
        _check_positions(before, access.states(), path)
        files = sum(run.steps(access, events_per_step, progress))
        compacted = run.compact(small_files) if compact else 0
        after = opened.state or before
        gaps = tuple(after.gaps[len(before.gaps) :])
        return Archived(after.events - before.events, files, compacted, gaps, after.events)


def read_archive(spark: SparkSession, path: str | Path, *, locked: bool = False) -> DataFrame:
    """The events of an archive, with the columns of the source and `date`: all of the changes that are complete.

    A compaction may take its files away: who reads for long holds `lock_for_reading`, and says `locked`. Raises
    NotFound where there is no archive.
    """
    where = Path(path).absolute()
    check_path(where)
    if not locked:
        lock_for_reading(where).release()
    state = read_state(where)
    if state is None or not any(where.glob("namespace=*/date=*/*.parquet")):
        return spark.createDataFrame([], _SCHEMA).select(*DEFAULT, "date")
    positions = F.array(*(F.lit(position) for position in state.positions))
    frame = spark.read.schema(_SCHEMA).parquet(f"file://{where}")
    complete = frame.where(F.col("offset") < positions[F.col("queue")])
    return complete.withColumn("namespace", F.coalesce("namespace", F.lit(""))).select(*DEFAULT, "date")


class _Source(NamedTuple):
    """Which streams of which provider."""

    place: Place
    options: Mapping[str, str]

    @classmethod
    def of(cls, options: Mapping[str, object]) -> _Source:
        """Raises InvalidArgument for an option that says anything else."""
        given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
        allowed = {name.lower() for name in (*PLACE_OPTIONS, "namespace", "key")}
        if wrong := next((name for name in given if name.lower() not in allowed), None):
            raise InvalidArgument(
                f"option {wrong!r} is not for an archive: it takes those that say where, namespace, key"
            )
        source_options(given)
        return cls(Place.of(given), given)

    def identity(self, queues: int) -> dict[str, Any]:
        """What tells this provider and these streams from all others."""
        where = (
            {"server": self.place.server} if self.place.data is None else {"data": str(Path(self.place.data).resolve())}
        )
        return where | {
            "provider": self.place.provider, "queues": queues, "streams": source_options(self.options).selector.pattern,
        }  # fmt: skip


def _started(opened: Archive, source: _Source, access: QueueAccess) -> State:
    """The archive's state, of this provider and these streams. Raises InvalidArgument for others."""
    identity = source.identity(access.queues)
    if opened.state is None:
        # From the first offset that there is: what retention removed before the archive began is no gap of it.
        opened.replace(State(identity, [state.first for state in access.states()]))
    assert opened.state is not None
    if dict(opened.state.source) != identity:
        raise InvalidArgument(
            f"archive {opened.path}: it is of {_worded(opened.state.source)}, not of {_worded(identity)}: name another "
            'directory; or, where the same provider is elsewhere now, change "source" in _headrace/state.json'
        )
    return opened.state


def _worded(source: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in source.items())


def _check_positions(state: State, queues: Sequence[QueueState], path: Path) -> None:
    """Raise DataDirectoryError where the archive has more than there ever was."""
    for queue, (position, there) in enumerate(zip(state.positions, queues, strict=True)):
        if position > there.next:
            raise DataDirectoryError(
                f"archive {path}: queue {queue} is archived up to offset {position}, and ends at {there.next}: the "
                "provider was made anew, so archive it into another directory"
            )


class _Run:
    """One run of `archive`."""

    def __init__(self, spark: SparkSession, source: _Source, opened: Archive, fail_on_data_loss: bool) -> None:
        self._spark = spark
        self._source = source
        self._archive = opened
        self._fail_on_data_loss = fail_on_data_loss

    def steps(self, access: QueueAccess, events_per_step: int, progress: Progress) -> Iterator[int]:
        """Change by change. Yields how many files each has added."""
        ends = [state.next for state in access.states()]
        assert self._archive.state is not None
        begin, waiting = self._archive.state.events, _estimated(self._archive.state.positions, access.states())
        progress(0, waiting)
        while any(position < end for position, end in zip(self._archive.state.positions, ends, strict=True)):
            yield self._step(access, ends, events_per_step)
            done = self._archive.state.events - begin
            progress(done, max(done, waiting))

    def _step(self, access: QueueAccess, ends: Sequence[int], events: int) -> int:
        """Add some events. Where retention removes some meanwhile, what it left is looked at again."""
        for attempt in range(_MOST_TRIES):
            state = self._retained(access.states())
            try:
                return self._add(state, _reached(access, state.positions, ends, events))
            except (PySparkException, OffsetsGone) as error:
                cause = told(error) if isinstance(error, PySparkException) else error
                if not isinstance(cause, OffsetsGone) or attempt == _MOST_TRIES - 1:
                    raise cause or error from None
        raise AssertionError

    def _retained(self, queues: Sequence[QueueState]) -> State:
        """The state, with gaps up to what the queues have. Raises OffsetsGone unless it is to go on."""
        state = self._archive.state
        assert state is not None
        both = enumerate(zip(state.positions, queues, strict=True))
        gaps = [Gap(queue, position, there.first) for queue, (position, there) in both if position < there.first]
        if gaps and self._fail_on_data_loss:
            raise _gone(gaps[0].queue, gaps[0].start, gaps[0].end)
        positions = [max(position, there.first) for position, there in zip(state.positions, queues, strict=True)]
        return msgspec.structs.replace(state, positions=positions, gaps=[*state.gaps, *gaps])

    def _add(self, state: State, ends: Sequence[int]) -> int:
        frame = self._read(state.positions, ends)
        folder = self._archive.new_folder()
        written = self._write(frame.withColumn("date", _date()), folder, "queue")
        after = msgspec.structs.replace(state, positions=ends, run=state.run + 1, events=state.events + written)
        return self._archive.change(folder, after)

    def _read(self, starts: Sequence[int], ends: Sequence[int]) -> DataFrame:
        reader = self._spark.read.format("headrace").options(**self._source.options)
        return reader.options(start=by_queue(starts), end=by_queue(ends)).load()

    def _write(self, frame: DataFrame, folder: Path, *order: str) -> int:
        """Write events by namespace and date, and in order within each file. Returns how many."""
        rows = frame.withColumn("n", _in_hex("namespace")).drop("namespace")
        rows = rows.sortWithinPartitions("n", "date", *order, "offset", "index")
        writer = rows.write.partitionBy("n", "date").option("maxRecordsPerFile", EVENTS_PER_FILE)
        writer.option("compression", "zstd").parquet(f"file://{folder}")
        return sum(pq.read_metadata(file).num_rows for file in folder.glob("n=*/date=*/part-*.parquet"))

    def compact(self, small_files: int) -> int:
        """Put small files together. Returns how many; 0 where somebody reads the archive, who would see them twice."""
        some = [
            (each, small) for each in self._archive.partitions() if len(small := _small(each)) >= max(small_files, 2)
        ]
        return sum(self._compact(chosen) for chosen in _portions(some))

    def _compact(self, chosen: Sequence[str]) -> int:
        state = self._archive.state
        assert state is not None
        folder = self._archive.new_folder()
        base = f"file://{self._archive.path}"
        frame = (
            self._spark.read.schema(_SCHEMA).option("basePath", base).parquet(*(f"{base}/{file}" for file in chosen))
        )
        frame = frame.withColumn("namespace", F.coalesce("namespace", F.lit("")))
        expected = sum(pq.read_metadata(self._archive.path / file).num_rows for file in chosen)
        written = self._write(frame.repartition("namespace", "date"), folder, "queue")
        if written != expected:
            raise DataDirectoryError(
                f"archive {self._archive.path}: {expected} events were read as {written}: nothing was changed"
            )
        lock = self._archive.readers_lock()
        if lock is None:
            return 0
        with lock:
            self._archive.change(folder, msgspec.structs.replace(state, run=state.run + 1), chosen)
        return len(chosen)


def own_session(spark: SparkSession) -> SparkSession:
    """With settings of its own: what the user has set for other queries must not change the files."""
    own = spark.newSession()
    own.conf.set("spark.sql.session.timeZone", "UTC")
    own.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return own


def _estimated(positions: Sequence[int], queues: Sequence[QueueState]) -> int:
    starts = [max(position, there.first) for position, there in zip(positions, queues, strict=True)]
    return sum(estimated_events(one, queues[one.queue]) for one in ranges(starts, [there.next for there in queues]))


def _reached(access: QueueAccess, starts: Sequence[int], ends: Sequence[int], events: int) -> list[int]:
    """Where about so many events end, of each queue in proportion to what waits in it."""
    states, wanted = access.states(), ranges(starts, ends)
    dealt = shares([estimated_events(one, states[one.queue]) for one in wanted], events)
    reached = list(starts)
    for one, most in zip(wanted, dealt, strict=True):
        reached[one.queue] = access.reach(one.queue, one.start, one.end, most, None)
    return reached


def _gone(queue: int, start: int, first: int) -> OffsetsGone:
    error = OffsetsGone(queue, start, first)
    error.args = (f"{error}: --no-fail-on-data-loss (fail_on_data_loss=False) goes on, and notes the gap",)
    return error


def by_queue(offsets: Sequence[int]) -> str:
    return json.dumps({str(queue): offset for queue, offset in enumerate(offsets)})


def _date() -> Column:
    """The day of the timestamp, in UTC: rounded down, also before 1970."""
    day = F.expr(f"unix_micros(timestamp) div {_DAY_US}")  # rounded towards 0; nothing overflows, whatever the time is
    begun = (F.unix_micros("timestamp") % F.lit(_DAY_US) < 0).cast("int")
    return F.date_from_unix_date((day - begun).cast("int"))


def _in_hex(name: str) -> Column:
    """Spark's own way to make a directory's name depends on the locale that Java runs in. Not null, and never empty:
    for such names Spark would sort once more, and forget the order."""
    too_long = F.concat(
        F.lit("\nInvalidArgument: namespace '"), F.substring(name, 1, 40),
        F.lit("…' is too long for the name of a directory: leave it out, by the streams that are archived"),
    )  # fmt: skip
    hexed = F.concat(F.lit("x"), F.hex(name))
    return F.coalesce(F.when(F.octet_length(name) > _HEX_BYTES, F.raise_error(too_long)).otherwise(hexed), F.lit("x"))


def _small(partition: Partition) -> list[str]:
    return [f"{partition.path}/{name}" for name, size in partition.sizes.items() if size < SMALL_BYTES]


def _portions(directories: Sequence[tuple[Partition, Sequence[str]]]) -> Iterator[list[str]]:
    """The files of some directories, of about `COMPACTED_BYTES` together. Never some of a directory alone."""
    portion: list[str] = []
    size = 0
    for partition, small in directories:
        portion += small
        size += sum(partition.sizes[Path(name).name] for name in small)
        if size >= COMPACTED_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


# ---- the command -----------------------------------------------------------------------------------------------------


@click.command("archive")
@click.argument("into", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@place_options
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Which, as namespace/key.")
@click.option("--compact/--no-compact", default=True, help="Put small files together.  [default: do]")
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss", default=True,
    help="Fail where retention has removed what was not archived; else go on, and note the gap.  [default: fail]",
)  # fmt: skip
@spark_options
@json_option
def command(
    *, into: Path, place: CommandPlace, streams: str, compact: bool, fail_on_data_loss: bool,
    master: str | None, spark_log: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Add to the Parquet files under DIR what was published since the last time, each event exactly once.

    Whatever ends it, the same command goes on. Two at once on one DIR are refused.
    """
    options = selecting(streams) | options_to_read(place)
    with spark_session("headrace archive", master, spark_log) as spark, events_progress("archiving") as progress:
        done = archive(spark, into, compact=compact, fail_on_data_loss=fail_on_data_loss, progress=progress, **options)
    for gap in done.gaps:
        note(f"queue {gap.queue}: offsets {gap.start} to {gap.end - 1} were gone, and are not in the archive")
    document = {"archive": str(into), **done._asdict()}
    added = f"archived {counted(done.events, 'event')} in {counted(done.files, 'file')}, {done.total:,} in all"
    report(document, as_json, added + (f"; {done.compacted:,} small files put together" if done.compacted else ""))
