"""Benchmark cases in fresh processes, behind a barrier, with their CPU time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from .results import Latency, Result
from .servers import Server

TIMEOUT_S = 600.0


class Job(NamedTuple):
    """One process to run: `case` is `module:function`, a `worker.Case`, and `args` its arguments as JSON values."""

    role: str
    case: str
    args: Mapping[str, Any]


class Report(NamedTuple):
    """What one process found out. `began_s` and `ended_s` are CLOCK_MONOTONIC, the same for all processes."""

    result: Mapping[str, Any]
    cpu_s: float
    began_s: float
    ended_s: float
    peak_rss_bytes: int


class Outcome(NamedTuple):
    """Result of `together`: one report for each role, and the shares of the server and of other processes."""

    reports: Mapping[str, Report]
    server_cpu_s: float
    server_rss_bytes: int
    foreign_cores: float

    @property
    def seconds(self) -> float:
        """From the opening of the gate until the last process was done."""
        return max(r.ended_s for r in self.reports.values()) - min(r.began_s for r in self.reports.values())

    def to_result(self, *, events: int, size: int = 0, latency: Latency | None = None) -> Result:
        cpu_s = {role: report.cpu_s for role, report in self.reports.items()}
        rss = {role: report.peak_rss_bytes for role, report in self.reports.items()}
        if self.server_rss_bytes:
            cpu_s["server"], rss["server"] = self.server_cpu_s, self.server_rss_bytes
        return Result(
            events=events,
            seconds=self.seconds,
            size=size,
            cpu_s=cpu_s,
            peak_rss_bytes=rss,
            foreign_cores=self.foreign_cores,
            latency=latency,
        )


class WorkerFailed(Exception):
    """A process of a benchmark failed or took too long; the message has the end of its output."""


def run(case: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Run one case (`module:function`) in a fresh process; its result, with `cpu_s`, `seconds` and `peak_rss_bytes`.

    Raises WorkerFailed.
    """
    report = together([Job("case", case, args)]).reports["case"]
    measured = {
        "cpu_s": report.cpu_s,
        "seconds": report.ended_s - report.began_s,
        "peak_rss_bytes": report.peak_rss_bytes,
    }
    return {**measured, **report.result}


def together(jobs: Sequence[Job], *, server: Server | None = None, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run jobs as fresh processes that begin at the same moment, once all of them have come to their gate.

    The server's CPU time is taken from then until the last one is done. Raises WorkerFailed; no process is left behind.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(_Worker(job))) for job in jobs]
        deadline = time.monotonic() + timeout_s
        if any(line.strip() != "ready" for line in _lines_of(workers, deadline)):
            raise WorkerFailed("a case ended without passing its gate: call gate.wait() when everything is set up")
        machine = _Busy.now()
        server_cpu_s = server.cpu_s() if server else 0.0
        for worker in workers:
            worker.go()
        lines = _lines_of(workers, deadline)
        server_cpu_s = server.cpu_s() - server_cpu_s if server else 0.0
        reports = {worker.job.role: Report(**json.loads(line)) for worker, line in zip(workers, lines, strict=True)}
        ours_s = server_cpu_s + sum(report.cpu_s for report in reports.values())
        foreign_cores = max(0.0, machine.cores_since(ours_s))
        return Outcome(reports, server_cpu_s, server.peak_rss_bytes() if server else 0, foreign_cores)


class _Worker:
    """A process that runs `worker.main`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self._say(json.dumps({"case": job.case, "args": job.args}))

    @property
    def answers(self) -> IO[str]:
        assert self._process.stdout
        return self._process.stdout

    def go(self) -> None:
        self._say("go")

    def _say(self, line: str) -> None:
        assert self._process.stdin
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self.failure("ended too early") from None

    def failure(self, how: str) -> WorkerFailed:
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()
        return WorkerFailed("\n".join((f"{self.job.role} ({self.job.case}) {how}. It printed at last:", *lines[-20:])))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # unsent output is not needed
        self._printed.close()


def _lines_of(workers: Sequence[_Worker], deadline: float) -> Sequence[str]:
    """The next line of each worker. Raises WorkerFailed as soon as one ends instead, whichever it is."""
    lines = dict.fromkeys(workers, "")
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.answers, selectors.EVENT_READ, worker)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting: Sequence[_Worker] = [key.data for key in selector.get_map().values()]
                raise waiting[0].failure("took too long")
            for key, _ in ready:
                worker = key.data
                lines[worker] = worker.answers.readline()
                if not lines[worker]:
                    raise worker.failure("failed")
                selector.unregister(worker.answers)
    return list(lines.values())


class _Busy(NamedTuple):
    """How much CPU time this machine had used at a moment."""

    at_s: float
    used_s: float

    @classmethod
    def now(cls) -> _Busy:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _idle, _iowait, *interrupts = fields[:7]
        return cls(time.monotonic(), (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"))

    def cores_since(self, ours_s: float) -> float:
        """Cores used by other processes since then, if this benchmark used `ours_s` CPU seconds."""
        now = _Busy.now()
        return (now.used_s - self.used_s - ours_s) / (now.at_s - self.at_s)
