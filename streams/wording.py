"""Numbers and nouns in texts for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 event`, `2 events`, `1,000 events`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
