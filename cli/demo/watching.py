"""Shows the running demo on stderr: a live picture on a terminal; else a line from time to time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...silo.provider import Provider
from ...streams.background import BackgroundTasks
from .check import DeliveryTally
from .jobs import FlightDelays
from .picture import DemoPicture, JobView, PictureFrame, line
from .stage import DemoStage, DemoVerdict

FRAME_S = 0.2
LINE_S = 2.0


@asynccontextmanager
async def watched(stage: DemoStage, provider: Provider) -> AsyncGenerator[None]:
    """Show `stage` during an `async with` block, and its state at the end."""
    console = Console(stderr=True)
    if console.is_terminal:
        picture = DemoPicture()
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            async with _repeated(
                stage, provider, FRAME_S, lambda frame: live.update(picture.draw(frame), refresh=True)
            ):
                yield
    else:
        async with _repeated(stage, provider, LINE_S, lambda frame: click.echo(line(frame), err=True)):
            yield


@asynccontextmanager
async def _repeated(
    stage: DemoStage, provider: Provider, period_s: float, show: Callable[[PictureFrame], None]
) -> AsyncGenerator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(period_s)
            show(await _frame(stage, provider))

    async with BackgroundTasks() as background:
        background.start(repeat(), "headrace demo picture")
        yield
        show(await _frame(stage, provider))


def report(verdict: DemoVerdict) -> None:
    """Print the result of the run on stdout."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("subscription")
    for name in DeliveryTally._fields:
        table.add_column(name.replace("_", " "), justify="right")
    for name, tally in verdict.subscriptions.items():
        table.add_row(name, *(f"{count:,}" for count in tally))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{verdict.events:,} events in {verdict.streams:,} streams, {verdict.seconds:.1f} s, checked against the file:"
    )
    console.print("ok" if verdict.ok else "not ok", style="bold green" if verdict.ok else "bold red")


def _queues_of(stage: DemoStage) -> str:
    if stage.run.record.settings.adapter == "kafka":
        return "Apache Kafka"
    return f"embedded log, durability {stage.durability}"


async def _frame(stage: DemoStage, provider: Provider) -> PictureFrame:
    tails = [(await provider.adapter.bounds(queue)).next for queue in range(provider.queues)]
    delays = [job.delays for job in stage.jobs if isinstance(job, FlightDelays)]
    return PictureFrame(
        title=f"{provider.queues} queues, {_queues_of(stage)}, policy {stage.policy.value}",
        seconds=time.monotonic() - stage.began,
        events=len(stage.flights),
        published=stage.published,
        statistics=provider.statistics(),
        tails=tails,
        jobs=[JobView(job.name, job.delivered - job.duplicates, job.duplicates) for job in stage.jobs],
        delays=delays[0],
    )
