"""One run of a case: a Redis server that it starts, a producing process and a consuming one."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ..harness import Job, Latency, Outcome, Result, together
from ..servers import RedisServer
from .kinds import Place, kind_of

CASES = f"{__package__}.cases"
SIZE = 100
OURS = ("RedisQueue", "provider")
JOBS = ("taskiq", "arq")


class DelayRun(NamedTuple):
    """A Redis server for the runs of a case."""

    server: RedisServer
    kind: str
    place: Place

    def job(self, role: str, case: str, **args: Any) -> Job:
        return Job(role, f"{CASES}:{case}", {"kind": self.kind, "place": list(self.place), **args})

    def together(self, *jobs: Job) -> Outcome:
        return together(jobs, server=self.server)

    def used_bytes(self) -> int:
        from redis import Redis  # noqa: PLC0415 (not every run needs it)

        client: Any = Redis
        with client.from_url(self.place.url) as redis:
            return redis.info("memory")["used_memory"]


@contextmanager
def started(kind: str) -> Generator[DelayRun]:
    """Raises NotAvailable."""
    packages = kind_of(kind).packages()
    with tempfile.TemporaryDirectory() as data, RedisServer() as server:
        yield DelayRun(server, kind, Place(server.address, data, packages))


def due(kind: str, *, rate: int, seconds: float, delays_s: Sequence[float], batch: int) -> Result:
    """Measure lateness at a steady rate. Count the events due while as much was pushed as came due: about `seconds`."""
    events = int(rate * (seconds + max(delays_s))) // 8 * 8
    with started(kind) as run:
        produce = {"rate": rate, "events": events, "size": SIZE, "delays_s": delays_s}
        consume = {"events": events, "batch": batch, "delays_s": delays_s}
        outcome = run.together(
            run.job("consumer", "handle_due", **consume), run.job("producer", "push_paced", **produce)
        )
    found = dict(outcome.reports["consumer"].result)
    if found.pop("earliest_ms") < 0 and kind in OURS:
        raise RuntimeError(f"{kind}: an event was handled before it was due")
    counted, span_s = int(found.pop("events")), found.pop("seconds")
    whole = outcome.to_result(events=events, size=SIZE, latency=Latency(**found))
    cpu_s = {role: used * counted / events for role, used in whole.cpu_s.items()}
    return replace(whole, events=counted, seconds=span_s, cpu_s=cpu_s)


def throughput(kind: str, *, events: int, batch: int) -> tuple[Result, Result]:
    """Measure pushing alone, then taking, handling and acknowledging all events alone."""
    with started(kind) as run:
        pushed = run.together(run.job("clients", "push", events=events, size=SIZE, batch=batch))
        drained = run.together(run.job("clients", "drain", events=events, batch=batch))
    return pushed.to_result(events=events, size=SIZE), drained.to_result(events=events, size=SIZE)


def delayed(kind: str, *, events: int, batch: int, apart: bool) -> Result:
    """Measure Redis's memory for events due in an hour, each at its own time (`apart`) or a batch at the same time."""
    with started(kind) as run:
        empty = run.used_bytes()
        job = run.job("clients", "push", events=events, size=SIZE, batch=batch, delay_s=3600.0, apart=apart)
        outcome = run.together(job)
        used = run.used_bytes() - empty
    return replace(outcome.to_result(events=events, size=SIZE), peak_rss_bytes={"redis": used})
