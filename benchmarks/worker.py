"""Runs one benchmark case in this process, for `processes.together`: `python -m benchmarks.worker`.

It talks in lines over its own standard input and output: reads `{"case": …, "args": …}`, says `ready` at the case's
gate and waits there for a line, and closes with `{"result": …, "cpu_s": …, …}`. What the case prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from headrace.silo.tuning import tune_interpreter

from .servers import peak_rss_of


class StartingGate:
    """Lets the processes of a case wait for each other. Measures time, and CPU time of this process with that of its
    children that have ended."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders = orders
        self._answers = answers
        self._began = self._ended = _Moment()

    def wait(self) -> None:
        """Call once, when everything is set up. Blocks until all processes are ready; measuring begins on return.

        Each process, also a peer's, then has the interpreter's settings of a silo.
        """
        tune_interpreter()
        print("ready", file=self._answers, flush=True)
        if not self._orders.readline():
            sys.exit("the benchmark that started this process has gone")
        self._began = self._ended = _Moment()

    def done(self) -> None:
        """Measuring ends here: the rest only cleans up. Without it, measuring ends when the case returns."""
        self._ended = _Moment()

    def report(self) -> dict[str, float]:
        if self._ended is self._began:
            self.done()
        began, ended = self._began, self._ended
        return {"cpu_s": ended.cpu_s - began.cpu_s, "began_s": began.time_s, "ended_s": ended.time_s}


Case = Callable[..., Mapping[str, Any] | None]
"""`case(gate, **args)` returns its results, as JSON values."""


class _Moment:
    def __init__(self) -> None:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        self.cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        self.time_s = time.monotonic()


def find_case(name: str) -> Case:
    """The function `module:function`. Raises what importing it raises."""
    module, _, function = name.partition(":")
    case: Case = getattr(importlib.import_module(module), function)
    return case


def main() -> None:
    orders, answers = sys.stdin, _private_stdout()
    order = json.loads(orders.readline())
    gate = StartingGate(orders, answers)
    result = find_case(order["case"])(gate, **order["args"])
    report = {"result": dict(result or {}), **gate.report(), "peak_rss_bytes": peak_rss_of("self")}
    print(json.dumps(report), file=answers, flush=True)


def _private_stdout() -> IO[str]:
    """The real standard output for us alone; file descriptor 1 becomes stderr."""
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return private


if __name__ == "__main__":
    main()
