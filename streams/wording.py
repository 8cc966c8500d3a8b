"""Numbers and nouns in texts for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 event`, `2 events`, `1,000 events`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Return text for a terminal. Characters that could change the terminal are shown as `?`, and line ends as spaces:
    names and errors come from others."""
    return "".join(one if one.isprintable() else " " if one in "\n\r\t" else "?" for one in text)
