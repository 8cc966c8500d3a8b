"""`headrace pipeline`: the commands of the jobs in `headrace.pipeline.jobs`. They need the extra `headrace[spark]`."""

from __future__ import annotations

from importlib import import_module

import click

from ..help import CommandGroup

JOBS = {
    "archive": "Keep streams as Parquet files, by namespace and date.",
    "replay": "Publish an archive or a log once more.",
    "rollup": "Count events by time and stream: rates, lags, latencies.",
    "audit": "Compare what was published with what was delivered.",
    "states": "Keep the states of streams as a Parquet file.",
}
"""Each job's module in this package (it has the command as `command`) and its summary."""


class JobGroup(CommandGroup):
    """Imports a job's module when it is called, and not for the list of jobs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        module = import_module(f".{cmd_name}", __package__)
        command: click.Command = module.command
        command.short_help = JOBS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Jobs"):
            formatter.write_dl(list(JOBS.items()))


@click.group("pipeline", cls=JobGroup)
def command() -> None:
    """Jobs on Spark, for data that one process cannot hold. They need Java, and the extra headrace[spark]."""
