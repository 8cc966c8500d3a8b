"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[int, int], None]
"""Adds a number of bytes and a number of events."""


@contextmanager
def progress(total_bytes: int | None) -> Generator[Advance]:
    """Show the progress of publishing during a `with` block. `total_bytes` is None if the size is not known."""
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


@contextmanager
def events_progress(doing: str) -> Generator[Callable[[int, int], None]]:
    """Show the number of events done, and about how many there are, during a `with` block. Both may grow."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 (only where there is somebody to look)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    counts = TextColumn("{task.completed:,.0f} of about {task.fields[events]:,} events")
    with Progress(
        TextColumn(doing), BarColumn(), counts, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=None, events=0)
        yield lambda done, total: bar.update(task, completed=done, total=total, events=total)
