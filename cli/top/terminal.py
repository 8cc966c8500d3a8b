"""The keys of a terminal, one by one, without waiting for a line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager

_NAMES = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
}
_SEQUENCE = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
"""A key with a sequence of its own, or one character."""


@contextmanager
def keys_of_terminal(pressed: asyncio.Queue[str]) -> Generator[None]:
    """Put the names of pressed keys into a queue meanwhile. The terminal shows none of them."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(descriptor, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)
            pressed.put_nowait("q")
        for key in keys_in(data):
            pressed.put_nowait(key)

    tty.setcbreak(descriptor)
    stopping = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a stopped process would leave the screen as it is
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTSTP, stopping)


def keys_in(data: bytes) -> list[str]:
    """Return the names of the keys in the bytes that a terminal sent. Unknown sequences are left out."""
    found = [match[0] for match in _SEQUENCE.finditer(data.decode(errors="ignore"))]
    return [_NAMES.get(one, one) for one in found if one in _NAMES or len(one) == 1]
