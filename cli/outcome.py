"""Exit codes and messages of the command line for errors."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ..streams.errors import HeadraceError, InvalidArgument, NotSupported, PayloadTooLarge
from ..streams.outcomes import FAILED, INTERRUPTED, USAGE, CommandFailed, CommandInterrupted


def exit_code(error: BaseException) -> int | None:
    """The exit code for `error`; None for an unexpected error: a bug, which is shown with its traceback."""
    match _cause(error):
        case CommandInterrupted(code=code):
            return code
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case PayloadTooLarge() | BrokenPipeError():
            return FAILED
        case click.UsageError() | InvalidArgument() | NotSupported():
            return USAGE
        case CommandFailed() | HeadraceError() | OSError() | click.ClickException():
            return FAILED
        case _:
            return None


def message(error: BaseException) -> str:
    """One line for people, or one line for each fault that a command found; empty if there is no message."""
    cause = _cause(error)
    return "\n".join(" ".join(text.split()) for text in _texts(cause))


def _texts(cause: BaseException) -> Sequence[str]:
    match cause:
        case CommandFailed():
            return cause.args
        case BrokenPipeError():
            return ()
        case KeyboardInterrupt() | click.Abort():
            return ("interrupted",)
        case click.ClickException():
            return (cause.format_message() + _hint(cause),)
        case OSError():
            return (_os_error(cause),)
        case _:
            return (str(cause),)


def _cause(error: BaseException) -> BaseException:
    """The first of the errors that a task group collected."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return error  # pyright: ignore[reportUnknownVariableType]


def _hint(error: click.ClickException) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f" (see {error.ctx.command_path} --help)"
    return ""


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason
