"""Numbers and nouns in texts for people."""

from __future__ import annotations

MAX_REASON = 400
"""Most characters of a reason that is kept to be shown. The log and dead letters have the whole text."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 event`, `2 events`, `1,000 events`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(reason: str) -> str:
    """Return the beginning of a reason, at most `MAX_REASON` characters: the text of an exception has no limit."""
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1]}…"


def printable(text: str) -> str:
    """Return text for a terminal. Characters that could change the terminal are shown as `?`, and line ends as spaces:
    names and errors come from others."""
    return "".join(one if one.isprintable() else " " if one in "\n\r\t" else "?" for one in text)
