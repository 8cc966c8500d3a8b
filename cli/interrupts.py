"""SIGINT while modules are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interrupts_kill() -> Generator[None]:
    """SIGINT ends the process at once, for the length of a `with` around imports.

    Otherwise SIGINT raises KeyboardInterrupt. During an import it would be lost (Python ignores exceptions in the
    callback of a weak reference, and an import runs many of them), or it would show a traceback.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
