"""The `headrace` command, before anything else of it is imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interrupts_kill() -> Generator[None]:
    """SIGINT ends the process at once. For imports: an exception there may be lost, since Python ignores those of a
    weak reference's callback, of which importing has many; or else it shows a traceback."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    """Run the command line and return the exit code."""
    with interrupts_kill():
        from .cli import main  # noqa: PLC0415 (that is what this is for)
    return main()
