"""The job `archive`: write streams to Parquet files, each event once. Each run adds the new events.

Spark's own streaming sink for files keeps a log that lists the valid files, and other readers of Parquet do not know
that log. So a run is a plain batch, from the positions in the archive's state up to the present ends. `files.py` moves
Spark's files into the archive, together with the new positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from ...streams.errors import DataDirectoryError, InvalidArgument, OffsetsGone
from ..columns import DEFAULT
from ..options import job_options, source_options
from ..place import OPTIONS as PLACE_OPTIONS
from ..place import ProviderPlace
from ..planning import estimated_events, ranges
from ..positions import shares
from ..session import own_session
from .failures import headrace_error
from .files import Archive, ArchiveGap, ArchiveState, DayDirectory, Step, check_path, lock_for_reading, read_state

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..access import QueueAccess, RetainedRange

EVENTS_PER_STEP = 4_000_000
"""A run is cut into steps of about so many events: a killed run loses the work of one step."""
EVENTS_PER_FILE = 2_000_000
SMALL_BYTES = 32 << 20
"""Smaller files are compacted."""
SMALL_FILES = 8
"""A directory with at least so many small files is compacted."""
COMPACTED_BYTES = 2 << 30
"""How many bytes are compacted at a time."""

Progress = Callable[[int, int], object]
"""Called with the number of events that are done, and the estimated number of all."""

_DAY_US = 86_400_000_000
_SCHEMA = (
    "`key` STRING, `payload` BINARY, `headers` MAP<STRING, STRING>, `id` STRING, `timestamp` TIMESTAMP, `queue` INT, "
    "`offset` BIGINT, `index` INT, `namespace` STRING, `date` DATE"
)
_MOST_TRIES = 5
_HEX_BYTES = 126
"""Limit of a namespace in bytes: its hexadecimal digits must fit into the name of a directory."""


class ArchiveResult(NamedTuple):
    """The result of `archive`."""

    events: int
    files: int
    compacted: int
    """Small files that were compacted."""
    gaps: Sequence[ArchiveGap]
    """Ranges that retention removed before they were archived."""
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
) -> ArchiveResult:
    """Add the events that were published since the last run to the archive `into`, each exactly once.

    `options` are those of the source for the location (`data`, `server`, …) and the streams (`namespace`, `key`): the
    same with every run. The driver and all executors must share the directory. If a run is killed or raises, the next
    run goes on. Unless `compact` is false, directories with `small_files` small files or more get larger ones.

    Raise OffsetsGone if retention has removed events that are not archived; without `fail_on_data_loss` they are noted
    as a gap. Raise Busy if another process archives into the directory, InvalidArgument if the archive is of other
    streams or another provider, DataDirectoryError if the directory is no archive.
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
        return ArchiveResult(after.events - before.events, files, compacted, gaps, after.events)


def read_archive(spark: SparkSession, path: str | Path, *, locked: bool = False) -> DataFrame:
    """Return the events of an archive, with the columns of the source and `date`. Incomplete steps are left out.

    A compaction may remove files during a long read: hold `lock_for_reading` against it, and pass `locked`. Raise
    NotFound if there is no archive.
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
    """The provider and the streams of an archive."""

    place: ProviderPlace
    options: Mapping[str, str]

    @classmethod
    def of(cls, options: Mapping[str, object]) -> _Source:
        """Raise InvalidArgument for other options."""
        given = job_options("an archive", options, (*PLACE_OPTIONS, "namespace", "key"))
        source_options(given)
        return cls(ProviderPlace.of(given), given)

    def identity(self, queues: int) -> dict[str, Any]:
        """Return the values that identify this provider and these streams."""
        streams = source_options(self.options).selector.pattern
        return {**self.place.identity(), "queues": queues, "streams": streams}


def _started(opened: Archive, source: _Source, access: QueueAccess) -> ArchiveState:
    """Return the archive's state. Raise InvalidArgument if it is of another provider or of other streams."""
    identity = source.identity(access.queues)
    if opened.state is None:
        # From the first retained offset: events that retention removed before the archive began are no gap.
        opened.replace_state(ArchiveState(identity, [state.first for state in access.states()]))
    assert opened.state is not None
    if dict(opened.state.source) != identity:
        raise InvalidArgument(
            f"archive '{opened.path}': it is of {_worded(opened.state.source)}, not of {_worded(identity)}: name "
            'another directory; or, if the same provider has moved, change "source" in _headrace/state.json'
        )
    return opened.state


def _worded(source: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in source.items())


def _check_positions(state: ArchiveState, queues: Sequence[RetainedRange], path: Path) -> None:
    """Raise DataDirectoryError if the archive has offsets beyond the end of a queue."""
    for queue, (position, there) in enumerate(zip(state.positions, queues, strict=True)):
        if position > there.next:
            raise DataDirectoryError(
                f"archive '{path}': queue {queue} is archived up to offset {position}, and ends at {there.next}: the "
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
        """Archive in steps. Yield the number of new files of each step."""
        ends = [state.next for state in access.states()]
        assert self._archive.state is not None
        begin, waiting = self._archive.state.events, _estimated(self._archive.state.positions, access.states())
        progress(0, waiting)
        while any(position < end for position, end in zip(self._archive.state.positions, ends, strict=True)):
            yield self._step(access, ends, events_per_step)
            done = self._archive.state.events - begin
            progress(done, max(done, waiting))

    def _step(self, access: QueueAccess, ends: Sequence[int], events: int) -> int:
        """Archive one step. If retention removes some of its events meanwhile, plan the step again."""
        for attempt in range(_MOST_TRIES):
            state = self._retained(access.states())
            try:
                reached = _reached(access, state.positions, ends, events)
                return self._add(_with_skipped(access, state, reached), reached)
            except (PySparkException, OffsetsGone) as error:
                cause = headrace_error(error) if isinstance(error, PySparkException) else error
                if not isinstance(cause, OffsetsGone) or attempt == _MOST_TRIES - 1:
                    raise cause or error from None
        raise AssertionError

    def _retained(self, queues: Sequence[RetainedRange]) -> ArchiveState:
        """Return the state with gaps up to the retained offsets. Raise OffsetsGone if `fail_on_data_loss` is set."""
        state = self._archive.state
        assert state is not None
        both = enumerate(zip(state.positions, queues, strict=True))
        gaps = [ArchiveGap(queue, position, there.first) for queue, (position, there) in both if position < there.first]
        if gaps and self._fail_on_data_loss:
            raise _gone(gaps[0].queue, gaps[0].start, gaps[0].end)
        positions = [max(position, there.first) for position, there in zip(state.positions, queues, strict=True)]
        return msgspec.structs.replace(state, positions=positions, gaps=[*state.gaps, *gaps])

    def _add(self, state: ArchiveState, ends: Sequence[int]) -> int:
        frame = self._read(state.positions, ends)
        folder = self._archive.new_folder()
        written = self._write(frame.withColumn("date", _date()), folder, "queue")
        after = msgspec.structs.replace(state, positions=ends, run=state.run + 1, events=state.events + written)
        return self._archive.change(folder, after)

    def _read(self, starts: Sequence[int], ends: Sequence[int]) -> DataFrame:
        reader = self._spark.read.format("headrace").options(**self._source.options)
        return reader.options(start=by_queue(starts), end=by_queue(ends)).load()

    def _write(self, frame: DataFrame, folder: Path, *order: str) -> int:
        """Write events by namespace and date, and in order within each file. Return the number of events."""
        rows = frame.withColumn("n", _in_hex("namespace")).drop("namespace")
        rows = rows.sortWithinPartitions("n", "date", *order, "offset", "index")
        writer = rows.write.partitionBy("n", "date").option("maxRecordsPerFile", EVENTS_PER_FILE)
        writer.option("compression", "zstd").parquet(f"file://{folder}")
        return sum(pq.read_metadata(file).num_rows for file in folder.glob("n=*/date=*/part-*.parquet"))

    def compact(self, small_files: int) -> int:
        """Compact small files. Return their number; 0 while another process reads, which would see events twice."""
        some = [
            (each, small)
            for each in self._archive.day_directories()
            if len(small := _small(each)) >= max(small_files, 2)
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
                f"archive '{self._archive.path}': {expected} events were read as {written}: nothing was changed"
            )
        lock = self._archive.readers_lock()
        if lock is None:
            return 0
        with lock:
            self._archive.change(folder, msgspec.structs.replace(state, run=state.run + 1), chosen)
        return len(chosen)


def _estimated(positions: Sequence[int], queues: Sequence[RetainedRange]) -> int:
    starts = [max(position, there.first) for position, there in zip(positions, queues, strict=True)]
    return sum(estimated_events(one, queues[one.queue]) for one in ranges(starts, [there.next for there in queues]))


def _with_skipped(access: QueueAccess, state: ArchiveState, ends: Sequence[int]) -> ArchiveState:
    """Return the state with gaps for the damaged ranges up to `ends` that an operator has skipped."""
    gaps = [
        ArchiveGap(one.queue, low, high)
        for one in ranges(state.positions, ends)
        for low, high in access.skipped(one.queue, one.start, one.end)
    ]
    return msgspec.structs.replace(state, gaps=[*state.gaps, *gaps])


def _reached(access: QueueAccess, starts: Sequence[int], ends: Sequence[int], events: int) -> list[int]:
    """Return the ends of about `events` events, of each queue in proportion to its waiting events."""
    states, wanted = access.states(), ranges(starts, ends)
    dealt = shares([estimated_events(one, states[one.queue]) for one in wanted], events)
    reached = list(starts)
    for one, most in zip(wanted, dealt, strict=True):
        reached[one.queue] = access.end_within(one.queue, one.start, one.end, most, None)
    return reached


def _gone(queue: int, start: int, first: int) -> OffsetsGone:
    error = OffsetsGone(queue, start, first)
    error.args = (f"{error}: --no-fail-on-data-loss (fail_on_data_loss=False) goes on, and notes the gap",)
    return error


def by_queue(offsets: Sequence[int]) -> str:
    """Return offsets as the option `start` or `end` of the source."""
    return json.dumps({str(queue): offset for queue, offset in enumerate(offsets)})


def _date() -> Column:
    """Return the day of the timestamp, in UTC: rounded down, also before 1970."""
    day = F.expr(f"unix_micros(timestamp) div {_DAY_US}")  # rounded towards 0; no time overflows
    begun = (F.unix_micros("timestamp") % F.lit(_DAY_US) < 0).cast("int")
    return F.date_from_unix_date((day - begun).cast("int"))


def _in_hex(name: str) -> Column:
    """Return the namespace in hexadecimal digits: Spark's own names of directories depend on Java's locale.

    The result is not null and never empty: for such names Spark would sort again, and lose the order.
    """
    too_long = F.concat(
        F.lit("\nInvalidArgument: namespace '"), F.substring(name, 1, 40),
        F.lit("…' is too long for the name of a directory: leave it out, by the streams that are archived"),
    )  # fmt: skip
    hexed = F.concat(F.lit("x"), F.hex(name))
    return F.coalesce(F.when(F.octet_length(name) > _HEX_BYTES, F.raise_error(too_long)).otherwise(hexed), F.lit("x"))


def _small(partition: DayDirectory) -> list[str]:
    return [f"{partition.path}/{name}" for name, size in partition.sizes.items() if size < SMALL_BYTES]


def _portions(directories: Sequence[tuple[DayDirectory, Sequence[str]]]) -> Iterator[list[str]]:
    """Yield the files of some directories, about `COMPACTED_BYTES` together. All files of a directory come at once."""
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
