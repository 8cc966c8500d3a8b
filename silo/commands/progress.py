"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[int, int], None]
"""Tells of so many bytes and so many events more."""


@contextmanager
def progress(total_bytes: int | None) -> Generator[Advance]:
    """Show how far publishing is, for the length of a `with`. `total_bytes` is None where nobody knows the end."""
    if not sys.stderr.isatty():
        yield lambda _bytes, _events: None
        return
    from rich.console import Console  # noqa: PLC0415 (only where there is somebody to look)
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("publishing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[events]:,} events"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes, events=0)
        published = 0

        def advance(more_bytes: int, more_events: int) -> None:
            nonlocal published
            published += more_events
            bar.update(task, advance=more_bytes, events=published)

        yield advance
