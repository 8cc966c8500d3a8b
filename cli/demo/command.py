"""`headrace demo`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from ...streams.errors import InvalidArgument
from ...streams.outcomes import CommandFailed, CommandInterrupted
from ..commands.help import SectionedCommand
from ..commands.output import json_option, note, print_json
from ..commands.running import run
from ..interrupts import interrupts_kill
from .flights import Flights, installed_flights, load_flights
from .jobs import open_jobs
from .run import DEFAULTS, DemoRun, DemoSettings, begin, opened

if TYPE_CHECKING:  # they take longer to import than a command takes to show its help
    from .stage import DemoStage, DemoVerdict


@click.command("demo", cls=SectionedCommand)
@click.option("--events", type=click.IntRange(min=1), metavar="N", help="Only the first N flights.  [default: all]")
@click.option("--data", type=click.Path(path_type=Path), help="Data directory.  [default: a temporary one]")
@click.option("--durability", type=click.Choice(["commit", "relaxed"]), help="What a publish waits for.")
@click.option("--adapter", type=click.Choice(["log", "kafka"]), help="Queue technology.  [default: log]")
@click.option("--bootstrap", metavar="HOST:PORT", help="Addresses of brokers, with --adapter kafka.")
@click.option("--policy", type=click.Choice(["throttle", "detach"]), help="How a slow consumer is treated.")
@click.option(
    "--slow",
    type=click.IntRange(min=1),
    default=14_000,
    help="Events a second of the slow consumer.",
    show_default=True,
)
@click.option("--flights", type=click.Path(path_type=Path), help="Another flights.csv or flights.csv.zip.")
@json_option
def command(*, data: Path | None, flights: Path | None, slow: int, as_json: bool, **wanted: Any) -> None:
    """The flights out of New York in 2013 through one silo.

    Every flight is published in order of departure, one stream per aircraft, and delivered to three subscriptions:
    delay statistics per carrier, an order check per aircraft, and a consumer that is slow on purpose. At the end it
    compares the deliveries with the file. The exit code is 1 if an event is missing or out of order, or was delivered
    twice in a run that was not interrupted.

    With the same --data, an interrupted run continues, and a finished run starts over.
    """
    _check_adapter(**wanted)
    with interrupts_kill():
        from .watching import report  # noqa: PLC0415 (not for --help)
    path = data or Path(mkdtemp(prefix="headrace-demo-"))
    try:
        verdict = _run(path, flights, slow, DemoSettings(**wanted))
    except CommandInterrupted:
        raise CommandInterrupted(f"interrupted: `headrace demo --data {shlex.quote(str(path))}` continues it") from None
    if as_json:
        print_json(_document(verdict))
    else:
        report(verdict)
    if not verdict.ok:
        raise CommandFailed(*verdict.problems, f"the data is in '{path}'")
    if data is None:
        shutil.rmtree(path)


def _run(path: Path, file: Path | None, slow: int, wanted: DemoSettings) -> DemoVerdict:
    with opened(path, wanted) as (directory, left):
        settings = wanted if left is None or left.state == "ended" else left.settings
        flights = _load(file or installed_flights(), settings.events)
        from .stage import check_only_the_demo  # noqa: PLC0415 (`report` has imported it)

        if left is not None and left.state == "ended":
            run(check_only_the_demo(directory, left.settings.events or 0))
        chosen = DemoSettings(
            events=len(flights),
            policy=settings.policy or DEFAULTS.policy,
            durability=settings.durability or DEFAULTS.durability,
            adapter=settings.adapter or DEFAULTS.adapter,
            bootstrap=settings.bootstrap,
            topic=f"headrace.demo.{uuid4().hex}" if settings.adapter == "kafka" else None,
        )
        this = begin(directory, left, chosen, flights.fingerprint)
        if this.resumed:
            note(f"continuing the interrupted run in '{path}'")
        return _finish(this, flights, slow)


def _check_adapter(*, adapter: str | None, bootstrap: str | None, durability: str | None, **_: object) -> None:
    """Raise InvalidArgument for options that do not fit together."""
    if adapter == "kafka" and bootstrap is None:
        raise InvalidArgument("--adapter kafka: it needs brokers: add --bootstrap HOST:PORT")
    if adapter != "kafka" and bootstrap is not None:
        raise InvalidArgument("--bootstrap: only Kafka has brokers: add --adapter kafka")
    if adapter == "kafka" and durability is not None:
        raise InvalidArgument("--durability: it is a setting of the log: Kafka's topics have their own")


def _load(path: Path, events: int | None) -> Flights:
    flights = load_flights(path, events)
    if events is not None and len(flights) < events:
        raise InvalidArgument(f"--events {events}: there are only {len(flights):,} flights in '{path}'")
    return flights


def _finish(this: DemoRun, flights: Flights, slow: int) -> DemoVerdict:
    from .stage import DemoStage  # noqa: PLC0415 (`report` has imported it)

    stage = DemoStage(this, flights, open_jobs(this.folder, flights, slow))
    try:
        run(_play(stage))
    except CommandInterrupted:
        this.save("stopped")
        raise
    verdict = stage.verdict()
    this.save("ended")
    return verdict


async def _play(stage: DemoStage) -> None:
    from ...silo.tuning import tune_interpreter  # noqa: PLC0415 (not for --help)
    from .watching import watched  # noqa: PLC0415

    tune_interpreter()
    async with stage.opened() as provider, watched(stage, provider):
        await stage.play(provider)


def _document(verdict: DemoVerdict) -> dict[str, Any]:
    return {
        "events": verdict.events,
        "streams": verdict.streams,
        "subscriptions": {name: tally._asdict() for name, tally in verdict.subscriptions.items()},
        "seconds": round(verdict.seconds, 3),
        "ok": verdict.ok,
    }
