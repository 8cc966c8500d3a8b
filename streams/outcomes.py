"""How a command ends: exit codes, and the errors that only a process's exit can tell."""

from __future__ import annotations

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Failed(Exception):
    """A check of a command failed. Each of `args` is one line for people."""


class Interrupted(BaseException):
    """A signal ended this process in order: `code` is its exit code, `text` is for people."""

    def __init__(self, text: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
