"""The keys of a terminal, one by one, without waiting for a line."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager

_NAMES = {
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b": "escape",
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
}


@contextmanager
def keys_of_terminal(pressed: asyncio.Queue[str]) -> Generator[None]:
    """Put the names of pressed keys into a queue meanwhile. The terminal shows none of them."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in keys_in(os.read(descriptor, 1024)):
            pressed.put_nowait(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_in(data: bytes) -> list[str]:
    """Return the names of the keys in the bytes that a terminal sent. Unknown sequences are left out."""
    if (name := _NAMES.get(data)) is not None:
        return [name]
    if data.startswith(b"\x1b"):
        return []
    return [_NAMES.get(character.encode(), character) for character in data.decode(errors="ignore")]
