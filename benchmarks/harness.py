"""How benchmarks are run: each case in fresh processes behind a barrier, and all cases in interleaved rounds.

The machine may be shared, so wall-clock figures of different moments do not compare. Every round therefore runs every
case once, ratios are taken within a round, and the report has the median over the rounds with its spread. CPU
seconds per million events, over all processes concerned, depend least on what else the machine does.

A case is a function in a module, run in a process of its own:

    def publish(gate: StartingGate, *, events: int, size: int) -> dict[str, object]:
        ...              # set up
        gate.wait()      # measuring begins here, in all processes of the case at once
        ...
        gate.done()      # and ends here, or where the function returns
        return {"events": events}

    run("benchmarks.cases:publish", {"events": 1_000_000, "size": 100})

`together` runs several such functions as the processes of one case: a producer and a consumer beside a server, say.
"""

from .processes import Job, Outcome, Report, WorkerFailed, run, together
from .report import count, machine, markdown, table
from .results import Latency, Result, Spread
from .rounds import Metric, Rounds, interleaved
from .servers import NotAvailable, Server
from .worker import StartingGate

__all__ = (
    "Job",
    "Latency",
    "Metric",
    "NotAvailable",
    "Outcome",
    "Report",
    "Result",
    "Rounds",
    "Server",
    "Spread",
    "StartingGate",
    "WorkerFailed",
    "count",
    "interleaved",
    "machine",
    "markdown",
    "run",
    "table",
    "together",
)
