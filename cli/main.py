"""The command line: `headrace COMMAND`.

The result of a command goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted. The modules of a command are imported when it is called.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO, cast

import click

from ..streams.outcomes import DONE, USAGE
from .commands.help import CommandGroup
from .interrupts import interrupts_kill
from .outcome import exit_code, message

COMMANDS = {
    "init": (".init", "Create a project: handlers, settings, a test, and a README."),
    "dev": (".dev", "Run the handlers of a project, and again after each change of a file."),
    "demo": ("..demo.command", "Run 336,776 flights through one silo, watch, and check the result."),
    "silo": (".silo", "Run the handlers of your modules until SIGTERM or SIGINT."),
    "publish": (".publish", "Publish the lines of a file or of stdin."),
    "subscribe": (".subscribe", "Print the events of a stream, or of all streams that match a pattern."),
    "streams": (".streams", "List the streams that have events."),
    "subscriptions": (".subscriptions", "List, inspect, create, move and delete subscriptions."),
    "deadletters": (".deadletters", "List, inspect, redrive and delete events that were given up."),
    "queues": (".queues", "Show how full each queue is, and the progress of its subscriptions."),
    "top": (".top", "Watch queues and subscriptions on one screen."),
    "why": (".why", "Say why the next event of a stream is not delivered."),
    "check": (".check", "Read all of a data directory, and report damage."),
    "backup": (".backup", "Copy a data directory while silos use it."),
    "restore": (".restore", "Make a data directory from a backup."),
    "repair": (".repair", "Continue after data was damaged or lost."),
    "cluster": (".cluster", "Show the silos that share the queues; drain them, stop and start agents."),
    "tokens": (".tokens", "Create, list and revoke the tokens of clients."),
    "effects": (".effects", "Create and look at the tables of exactly-once effects in your database."),
    "postgres": (".postgres", "Create and look at the tables of queues in PostgreSQL."),
    "state": (".state", "List, show, set and delete the states that handlers keep for streams."),
    "doctor": (".doctor", "Check that headrace can run here, and say what to do."),
    "completion": (".completion", "Print the script for completion in bash, zsh or fish."),
    "pipeline": (".pipeline", "Jobs on Spark: archive, replay, rollup, audit, states."),
}
"""Module of each command, with the function `command`, and its short help."""


class LazyGroup(CommandGroup):
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
@click.version_option(package_name="headrace", prog_name="headrace")
def cli() -> None:
    """Persistent streams for Python: publish, subscribe, and inspect the stored events."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    _replace_streams()
    try:
        code: object = cli.main(arguments, prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (an unexpected error is raised again, with its traceback)
        return _failed(error)
    return code if isinstance(code, int) else DONE


class _Stdout(io.FileIO):
    """Stdout, whose errors name it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def _replace_streams() -> None:
    """Let errors of stdout name it. Python sets a stream to None if its descriptor is closed: writes to stdout fail
    then, and those to stderr are lost."""
    stdout, stderr = cast("TextIO | None", sys.stdout), cast("TextIO | None", sys.stderr)
    if stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Stdout(os.open(os.devnull, os.O_RDONLY), "wb")), "utf-8")
    elif type(_raw(stdout)) is io.FileIO:
        named = io.BufferedWriter(_Stdout(stdout.fileno(), "wb", closefd=False))
        errors = ERROR_HANDLER if stdout.errors in {"strict", "surrogateescape"} else stdout.errors
        sys.stdout = io.TextIOWrapper(named, stdout.encoding, errors, line_buffering=stdout.isatty())
    if stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


ERROR_HANDLER = "headrace.plain"
_PLAIN_CHARACTERS = {"–": "-", "…": "..."}


def _replace_unencodable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Show the dash of an absent value in any encoding. Escape other characters, as `backslashreplace` does."""
    if not isinstance(error, UnicodeEncodeError):
        return codecs.backslashreplace_errors(error)
    if error.object[error.start] in _PLAIN_CHARACTERS:
        return _PLAIN_CHARACTERS[error.object[error.start]], error.start + 1
    error.end = error.start + 1  # the error has a run of characters, in which plain ones may follow
    return codecs.backslashreplace_errors(error)


codecs.register_error(ERROR_HANDLER, _replace_unencodable)


def _raw(stream: Any) -> object:
    """Return the file of a text stream, which has no buffer between them if PYTHONUNBUFFERED is set."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _failed(error: BaseException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE
    code = exit_code(error)
    if code is None:
        raise error
    for line in message(error).splitlines():
        click.echo(f"headrace: {line}", err=True)
    if isinstance(error, OSError) and (isinstance(error, BrokenPipeError) or error.filename == "stdout"):
        sys.stdout = None  # flushing the buffer at the end would raise again
    return code
