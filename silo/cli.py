"""The command line: `headrace COMMAND`.

What a command reports goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted. Nothing that a command needs is imported before it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

import click

from .outcome import DONE, exit_code, message
from .starting import interrupts_kill

COMMANDS = {
    "demo": ("..demo.command", "Run 336,776 flights through one silo, watch, and check the result."),
    "silo": (".silo", "Run the handlers of your modules until it is told to stop."),
    "publish": (".publish", "Publish the lines of a file or of stdin."),
    "subscribe": (".subscribe", "Print the events of a stream, or of all that a pattern selects."),
    "streams": (".streams", "List the streams that have events."),
    "subscriptions": (".subscriptions", "List, inspect, create, move and delete subscriptions."),
    "deadletters": (".deadletters", "List, inspect, redrive and delete events that were given up on."),
    "queues": (".queues", "Show how full each queue is and how far its subscriptions are."),
    "cluster": (".cluster", "Show the silos that share the queues; drain them, stop and start agents."),
    "tokens": (".tokens", "Create, list and revoke the tokens with which clients come."),
    "pipeline": (".pipeline", "Jobs on Spark: archive, replay, rollup, audit."),
    "bench": (".bench", "Measure this machine, beside other systems."),
}
"""Each command's module (it has it as `command`) and what it does."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, and not for the list of commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with interrupts_kill():
            module = import_module(COMMANDS[cmd_name][0], f"{__package__}.commands")
        command: click.Command = module.command
        command.short_help = COMMANDS[cmd_name][1]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("headrace"), prog_name="headrace")
def cli() -> None:
    """Persistent streams for Python: publish, subscribe, and look into what is stored."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code: object = cli.main(arguments, prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (what nobody expects is raised again, with its traceback)
        return _failed(error)
    return code if isinstance(code, int) else DONE


def _failed(error: BaseException) -> int:
    code = exit_code(error)
    if code is None:
        raise error
    for line in message(error).splitlines():
        click.echo(f"headrace: {line}", err=True)
    if isinstance(error, BrokenPipeError):
        sys.stdout = None  # who read it has gone, and what is still buffered would raise once more at the end
    return code
