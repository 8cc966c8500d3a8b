"""Streams as Spark's source and sink, beside Spark's own: files of JSON and of Parquet, and `rate-micro-batch`.

    python -m benchmarks.spark --help

All in one Spark session of this process, in interleaved rounds. CPU time is that of this process, the JVM, and Spark's
Python workers.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from headrace.pipeline.access import LogAccess
from headrace.pipeline.columns import DEFAULT, ColumnReader
from headrace.pipeline.session import session
from headrace.silo.provider import Provider
from headrace.streams.identity import StreamId
from headrace.streams.subscriptions import Selector

from .harness import Metric, Result, Rounds, Spread, interleaved, machine, markdown, table
from .section import cpu
from .servers import cpu_of, process_tree

STREAMS, SIZE = 1000, 100
MICRO_BATCHES, WARM = 60, 20
_IDLE_FIELD = 3

Cases = Mapping[str, Callable[[], Result]]
_numbers = itertools.count()


def fill(data: Path, events: int, batch: int, queues: int) -> None:
    """Publish events of 100 bytes, `batch` to a stream at once, over 1,000 streams."""

    async def run() -> None:
        streams = [StreamId("bench", f"stream-{number}") for number in range(STREAMS)]
        async with Provider.open(data, queues=queues, options={"durability": "relaxed"}) as provider:
            for first in range(0, events, 50_000):
                batches = [range(at, at + batch) for at in range(first, min(first + 50_000, events), batch)]
                calls = (
                    provider.publish(streams[numbers[0] // batch % STREAMS], [_payload(number) for number in numbers])
                    for numbers in batches
                )
                await asyncio.gather(*calls)

    asyncio.run(run())


def _payload(number: int) -> bytes:
    return b'{"id": %09d, "carrier": "UA", "origin": "EWR", "dest": "IAH", "delay": %03d, "distance": %04d}  ' % (
        number, number % 97, number % 5000,
    )  # fmt: skip


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(events: int, work: Callable[[], object]) -> Result:
    """Run it, and note its time, its CPU time, and how many cores others had."""
    busy, own, start = _busy_s(), _own_cpu_s(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    spent = _own_cpu_s() - own
    foreign = max(_busy_s() - busy - spent, 0.0) / seconds
    return Result(events=events, seconds=seconds, size=SIZE, cpu_s={"spark": spent}, foreign_cores=foreign)


def _own_cpu_s() -> float:
    return sum(map(cpu_of, process_tree(os.getpid())))


def _busy_s() -> float:
    """CPU seconds of the whole machine since it started."""
    fields = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(fields) - fields[_IDLE_FIELD] - fields[_IDLE_FIELD + 1]) / os.sysconf("SC_CLK_TCK")


def rows_per_s(result: Result) -> float:
    return result.events_per_s


# ---- the source ------------------------------------------------------------------------------------------------------


class Source:
    """The same events as a log, as Parquet files and as JSON files."""

    def __init__(self, spark: Any, folder: Path, events: int, batch: int) -> None:
        self.spark = spark
        self.events = events
        self.data = folder / f"data-{batch}"
        fill(self.data, events, batch, queues=2)
        self.files = folder / f"files-{batch}"
        frame = self.headrace()
        frame.write.parquet(str(self.files / "parquet"))
        as_text = frame.selectExpr(*(f"{_as_json(name)} AS `{name}`" for name in DEFAULT))
        self._as_text = as_text.schema
        as_text.write.json(str(self.files / "json"))

    def headrace(self, **options: Any) -> Any:
        return self.spark.read.format("headrace").options(data=str(self.data), **options).load()

    def parquet(self) -> Any:
        return self.spark.read.parquet(str(self.files / "parquet"))

    def json(self) -> Any:
        return self.spark.read.schema(self._as_text).json(str(self.files / "json"))

    def scan(self) -> None:
        """In this process, without Spark."""
        access, selector = LogAccess(self.data, "default"), Selector("*/*")
        reader: Any = ColumnReader(DEFAULT, selector)
        for queue, state in enumerate(access.states()):
            collections.deque(reader.batches(queue, access.read(queue, state.first, state.next, selector)), 0)
        access.close()


def _as_json(name: str) -> str:
    return "CAST(payload AS STRING)" if name == "payload" else f"`{name}`"


def to_noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def source_cases(source: Source) -> Cases:
    def case(frame: Callable[[], Any]) -> Callable[[], Result]:
        return lambda: measured(source.events, lambda: to_noop(frame()))

    half = str(-(-source.events // 2))
    return {
        "headrace": case(source.headrace),
        "headrace, 1 partition": case(partial(source.headrace, eventsPerPartition=str(2 * source.events))),
        "headrace, 2 partitions": case(partial(source.headrace, eventsPerPartition=half)),
        "headrace, payload and timestamp only": case(partial(source.headrace, columns="payload,timestamp")),
        "Parquet files": case(source.parquet),
        "JSON files": case(source.json),
        "the log, scanned in Python": lambda: measured(source.events, source.scan),
    }


def streaming_cases(source: Source) -> Cases:
    """Rows a second of steady micro-batches into a noop sink."""
    each = source.events // 4

    def headrace() -> Any:
        options = {"data": str(source.data), "maxEventsPerTrigger": str(each)}
        return source.spark.readStream.format("headrace").options(**options).load()

    def rate() -> Any:
        return source.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", each).load()

    return {
        "headrace": lambda: _steady(headrace(), each),
        "rate-micro-batch (2 columns)": lambda: _steady(rate(), each),
    }


def _steady(frame: Any, each: int) -> Result:
    """Without the first micro-batch, which starts everything."""
    with tempfile.TemporaryDirectory() as folder:
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        try:
            _until(query, 1)
            found = measured(3 * each, lambda: _until(query, 4))
        finally:
            query.stop()
    return found


def _until(query: Any, batches: int) -> None:
    while query.lastProgress is None or query.lastProgress["batchId"] < batches - 1 or not _rows(query):
        if error := query.exception():
            raise error
        time.sleep(0.01)


def _rows(query: Any) -> int:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def micro_batch_ms(spark: Any, data: Path, queues: int) -> list[float]:
    """How long each micro-batch of one event per queue takes."""
    with tempfile.TemporaryDirectory() as folder:
        frame = (
            spark.readStream.format("headrace")
            .options(data=str(data), maxEventsPerTrigger=str(queues))
            .load()
        )  # fmt: skip
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        try:
            _until(query, MICRO_BATCHES)
            progress = [each for each in query.recentProgress if each["numInputRows"]]
        finally:
            query.stop()
    return [each["durationMs"]["triggerExecution"] for each in progress[WARM:]]


def micro_batches(spark: Any, folder: Path, rounds: int) -> str:
    counts = (2, 8)
    for queues in counts:
        fill(folder / f"micro-{queues}", 40 * STREAMS // 10, 1, queues)
    found: dict[int, list[float]] = {queues: [] for queues in counts}
    for _ in range(rounds):
        for queues in counts:
            found[queues] += micro_batch_ms(spark, folder / f"micro-{queues}", queues)
            click.echo(f"  {queues} queues: {statistics.median(found[queues]):.0f} ms", err=True)
    rows = [[f"{queues} queues", f"{statistics.median(each):.0f}", f"{min(each):.0f}", f"{max(each):.0f}"]
            for queues, each in found.items()]  # fmt: skip
    return markdown(["one event of each queue", "median ms", "lowest", "highest"], rows)


# ---- the sink --------------------------------------------------------------------------------------------------------


def sink_cases(spark: Any, folder: Path, events: int) -> Cases:
    """100 bytes to 1,000 streams, generated as they are written."""
    frame = spark.range(0, events, 1, 2).selectExpr(
        "'bench' AS namespace",
        f"CONCAT('stream-', id % {STREAMS}) AS key",
        "CAST(LPAD(CAST(id AS STRING), 100, 'event-') AS BINARY) AS payload",
    )

    def headrace() -> None:
        frame.write.format("headrace").mode("append").options(data=str(folder / "sink")).save()

    def parquet() -> None:
        path = folder / f"sink-{next(_numbers)}"
        frame.write.parquet(str(path))
        shutil.rmtree(path)

    fill(folder / "sink", STREAMS, 1, queues=2)
    return {
        "headrace": lambda: measured(events, headrace),
        "Parquet": lambda: measured(events, parquet),
        "noop": lambda: measured(events, lambda: to_noop(frame)),
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def _compared(title: str, cases: Cases, rounds: int, ratios: Sequence[tuple[str, str]]) -> str:
    for case in cases.values():  # once for warming up: the JVM compiles, and Python's workers start
        case()
    found = interleaved(cases, rounds, on_result=_progress)
    lines = [
        f"- {name} to {to}: {_times(found, name, to, rows_per_s)} of the rows/s, {_times(found, name, to, cpu)} of the "
        "CPU time"
        for name, to in ratios
    ]
    return "\n".join([f"## {title}", "", table(found), "", "Within a round:", "", *lines, ""])


def _times(found: Rounds, name: str, to: str, metric: Metric) -> str:
    ratio: Spread = found.ratio(name, to, metric)
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def _progress(name: str, result: Result) -> None:
    click.echo(f"  {name}: {result.events_per_s:,.0f} rows/s, {cpu(result):.2f} CPU s per million", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=3, show_default=True)
@click.option("--events", default=2_000_000, show_default=True)
@click.option("--only", type=click.Choice(["source", "streaming", "micro-batch", "sink"]))
def command(rounds: int, events: int, only: str | None) -> None:
    """Spark's source and sink on this machine; Markdown on stdout, progress on stderr."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-spark-"))
    spark = session(f"headrace benchmark {uuid.uuid4().hex[:8]}", "local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    click.echo(f"{machine(['pyspark', 'pyarrow', 'numpy', 'lmdb'])}\n")
    try:
        for batch in (1000, 1):
            if only in (None, "source", "streaming"):
                source = Source(spark, folder, events, batch)
                _source(source, batch, rounds, only)
        if only in (None, "micro-batch"):
            click.echo(f"## A micro-batch\n\n{micro_batches(spark, folder, rounds)}\n")
        if only in (None, "sink"):
            ratios = [("headrace", "Parquet")]
            click.echo(_compared("Sink", sink_cases(spark, folder, events // 2), rounds, ratios))
    finally:
        spark.stop()
        shutil.rmtree(folder)


def _source(source: Source, batch: int, rounds: int, only: str | None) -> None:
    each = f"{batch:,} event{'s' if batch > 1 else ''} a stored batch"
    if only != "streaming":
        ratios = [
            *(("headrace", to) for to in ("JSON files", "Parquet files", "the log, scanned in Python")),
            ("headrace, 2 partitions", "headrace, 1 partition"),
        ]
        click.echo(_compared(f"Source into noop, {each}", source_cases(source), rounds, ratios))
    if only != "source" and batch > 1:
        ratios = [("headrace", "rate-micro-batch (2 columns)")]
        click.echo(_compared(f"Micro-batches into noop, {each}", streaming_cases(source), rounds, ratios))


if __name__ == "__main__":
    command()
