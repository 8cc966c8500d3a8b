"""A process with streaming queries, in a session of its own: started, killed with all that belongs to it, and read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults import spark_query
from tests.faults.spark_query import RESULT, STARTED, STOP
from tests.spark.processes import JAVA_OPTIONS, session_members

PATIENCE_S = 240
"""A JVM on a machine with much else to do."""
GAVE_UP = ("Python worker failed to connect back", "Task serialization failed")
"""What ends a query of Spark's own doing: it gives a new Python worker ten seconds, which a busy machine may not keep;
and where two queries of a session begin at once, one changes a map that the tasks of the other are serialized with."""


class SparkQueries:
    """`source` and `sink` are Spark's options of where to read and to write."""

    def __init__(self, folder: Path, java: Path, source: Mapping[str, str], sink: Mapping[str, str]) -> None:
        folder.mkdir()
        self.folder = folder
        self._java = java
        self._arguments = (str(folder), json.dumps(source), json.dumps(sink))
        self._log = folder / "log"
        self._log.touch()
        self._gave_up = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.local.dir": str(self.folder / "local"),
        }
        words = " ".join(f"--conf '{name}={value}'" for name, value in settings.items())
        environment = {
            **os.environ,
            "JAVA_HOME": str(self._java),
            "PYSPARK_SUBMIT_ARGS": f"{words} pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, spark_query.__file__, *self._arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def batches(self) -> Mapping[str, int]:
        """How many micro-batches each query has committed."""
        return {
            checkpoint.name: max((int(file.name) for file in checkpoint.glob("commits/[0-9]*")), default=-1) + 1
            for checkpoint in self.folder.glob("checkpoint-*")
        }

    async def started(self) -> None:
        times = self.log.count(STARTED)
        self.start()
        await self.until(lambda: self.log.count(STARTED) > times)

    async def advanced(self, by: int) -> None:
        """Each of the queries has committed so many more."""
        before = self.batches()
        await self.until(
            lambda: (
                len(self.batches()) == 2 and all(n >= before.get(name, 0) + by for name, n in self.batches().items())
            )
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._start_again_where_spark_gave_up()
                assert self.running, f"the queries ended:\n{self.end()}"
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """kill -9 of the process and its JVM. Python workers are left to find out, as they are in the field."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def finish(self) -> Mapping[str, list[tuple[str, int]]]:
        """What has arrived, when there is nothing more to read."""
        (self.folder / STOP).touch()
        assert self._process is not None
        await asyncio.to_thread(self._process.wait, PATIENCE_S)
        while self._start_again_where_spark_gave_up():
            await asyncio.to_thread(self._process.wait, PATIENCE_S)
        assert self._process.returncode == 0, self.end()
        await asyncio.wait_for(self._gone(), PATIENCE_S)
        return {name: [(key, n) for key, n in events] for name, events in json.loads(self.result()).items()}

    def end(self) -> str:
        """What the last run says of its end: the beginning of its traceback, and how it closes."""
        last = self.log.rpartition(STARTED)[2].rpartition("RuntimeError: the query")[2]
        return f"{last[:3000]}\n...\n{last[-3000:]}"

    def _start_again_where_spark_gave_up(self) -> bool:
        """It is one more crash."""
        times = sum(map(self.log.count, GAVE_UP))
        gave_up = not self.running and times > self._gave_up
        if gave_up:
            self._gave_up = times
            self.start()
        return gave_up

    async def _gone(self) -> None:
        """The JVM ends when it finds that its Python has, and nothing is left."""
        assert self._process is not None
        while session_members(self._process.pid):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.05)

    def result(self) -> str:
        return (self.folder / RESULT).read_text()

    def clean_up(self) -> None:
        if self._process is not None:
            for pid in session_members(self._process.pid):
                os.kill(pid, signal.SIGKILL)
            self._process.wait()


def check_once(arrived: Mapping[str, list[tuple[str, int]]], published: Mapping[str, int]) -> None:
    """Of each key there are the events 0 to `published` - 1, each once, in Parquet and in the streams."""
    wanted = Counter((key, number) for key, count in published.items() for number in range(count))
    for name, events in arrived.items():
        got = Counter(events)
        assert not (wanted - got), f"{name} lacks {sum((wanted - got).values())}: {list((wanted - got).items())[:5]}"
        assert not (got - wanted), f"{name} has too many: {list((got - wanted).items())[:5]}"
