"""Exit codes of commands, and the errors that only set an exit code."""

from __future__ import annotations

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandFailed(Exception):
    """A check by a command failed. Each of `args` is one line for the user."""


class CommandInterrupted(BaseException):
    """A signal ended this process cleanly: `code` is its exit code, `text` is for the user."""

    def __init__(self, text: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
