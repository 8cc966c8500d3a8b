"""What an error means outside of Python: the exit code and the one line that the command line prints."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ..streams.errors import HeadraceError, InvalidArgument, NotSupported, PayloadTooLarge

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Failed(Exception):
    """A command found that what it checks is not so. Each of `args` says one thing that is wrong."""


class Interrupted(BaseException):
    """A signal ended this process in order: `code` is its exit code, `text` what it says."""

    def __init__(self, text: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def exit_code(error: BaseException) -> int | None:
    """The exit code that tells of `error`; None for one that no command expects: a bug, which shows its traceback."""
    match _cause(error):
        case Interrupted(code=code):
            return code
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case PayloadTooLarge() | BrokenPipeError():
            return FAILED
        case click.UsageError() | InvalidArgument() | NotSupported():
            return USAGE
        case Failed() | HeadraceError() | OSError() | click.ClickException():
            return FAILED
        case _:
            return None


def message(error: BaseException) -> str:
    """One line for people, or one for each thing that a command found wrong; empty where there is nothing to say."""
    cause = _cause(error)
    return "\n".join(" ".join(text.split()) for text in _texts(cause))


def _texts(cause: BaseException) -> Sequence[str]:
    match cause:
        case Failed():
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
