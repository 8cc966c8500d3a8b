"""Cases that the tests of the benchmark processes run."""

import os
import time

from benchmarks.harness import StartingGate


def count(gate: StartingGate, *, events: int) -> dict[str, int]:
    print("what a case prints is not an answer")
    gate.wait()
    return {"events": events, "pid": os.getpid()}


def burn(gate: StartingGate, *, before_s: float, measured_s: float, after_s: float) -> dict[str, float]:
    """Use CPU time before, while and after it is measured."""
    _burn(before_s)
    ready_s = time.monotonic()
    gate.wait()
    _burn(measured_s)
    gate.done()
    _burn(after_s)
    return {"ready_s": ready_s}


def no_gate(_gate: StartingGate) -> None:
    """Forgets the gate."""


def fail(gate: StartingGate) -> None:
    gate.wait()
    raise LookupError("the queue has no name")


def fail_early(_gate: StartingGate) -> None:
    raise LookupError("the queue has no name")


def hang(gate: StartingGate) -> None:
    gate.wait()
    while True:
        time.sleep(1)


def _burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
