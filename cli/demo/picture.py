"""The live picture of the demo: progress of each job, buckets of each queue, and the subscriptions' positions in them.

    queue   cache, oldest bucket first                             full       lag   state
      3   ◂ ████ ████ ████ ████ ██·· ···· ···· ···· ···· ···· ▸     45%     2,104   running
          s                     o                             d

The initial of a subscription is under the bucket that has its watermark. At ◂ it has left the cache and reads alone; at
▸ it has finished everything that was read. Lag: batches from the lowest watermark to the queue's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from ...silo.views import CursorView, ProviderStatistics, QueueView
from ...streams.wording import counted
from .flights import CarrierDelays

BUCKETS = 10
COLOURS = ("cyan", "green", "magenta", "yellow", "red", "blue")
_BUCKET_WIDTH = 4
_EIGHTHS = "·▏▎▍▌▋▊▉█"
_WINDOW_S = 2.0


class JobView(NamedTuple):
    """A subscription's job."""

    name: str
    done: int
    """Events delivered, without repeated ones."""
    duplicates: int


class PictureFrame(NamedTuple):
    """The values that one picture shows."""

    title: str
    seconds: float
    events: int
    published: int
    statistics: ProviderStatistics
    tails: Sequence[int]
    """Next offset of each queue."""
    jobs: Sequence[JobView]
    delays: Mapping[str, CarrierDelays]


class DemoRates:
    """Events per second of each counter, over the last two seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Sequence[int]]] = deque()

    def add(self, seconds: float, counters: Sequence[int]) -> list[float]:
        self._seen.append((seconds, counters))
        while len(self._seen) > 2 and self._seen[1][0] < seconds - _WINDOW_S:
            self._seen.popleft()
        since, then = self._seen[0]
        return [(now - before) / max(seconds - since, 0.001) for now, before in zip(counters, then, strict=True)]


class DemoPicture:
    """Draws frames, and keeps the earlier counts for the rates."""

    def __init__(self) -> None:
        self._rates = DemoRates()

    def draw(self, frame: PictureFrame) -> RenderableType:
        rates = self._rates.add(frame.seconds, [frame.published, *(job.done for job in frame.jobs)])
        colours = dict(zip((job.name for job in frame.jobs), COLOURS, strict=False))
        return Group(
            _title(frame),
            Text(),
            _progress("published", "bold", frame.published, frame.events).append(_rate(rates[0])),
            *(
                _progress(job.name, colours[job.name], job.done, frame.events).append(
                    _rate(rate) + _standing(frame, job)
                )
                for job, rate in zip(frame.jobs, rates[1:], strict=True)
            ),
            Text(),
            _heading(),
            _legend(colours),
            *(
                line
                for queue, tail in zip(frame.statistics.queues, frame.tails, strict=True)
                for line in _queue(queue, tail, colours)
            ),
            Text(),
            _carriers(frame.delays),
        )


def line(frame: PictureFrame) -> str:
    """One line of text, if stderr is no terminal."""
    jobs = ", ".join(f"{job.name} {job.done:,}" for job in frame.jobs)
    pressed = sum(queue.pressure for queue in frame.statistics.queues)
    pressure = f", {pressed} queues under pressure" if pressed else ""
    return f"{frame.seconds:4.0f} s: published {frame.published:,} of {frame.events:,}; {jobs}{pressure}"


def _title(frame: PictureFrame) -> Text:
    text = Text(" headrace demo  ", style="bold")
    text.append(frame.title, style="dim")
    return text.append(f"{frame.seconds:.0f} s".rjust(max(98 - len(text), 6)), style="bold")


def _progress(name: str, style: str, done: int, total: int) -> Text:
    text = Text.assemble((f" {name:<10}", style), _bar(done / total if total else 1.0, 32, style))
    return text.append(f" {done:>9,}")


def _rate(rate: float) -> str:
    return f" {rate:>9,.0f}/s   "


def _standing(frame: PictureFrame, job: JobView) -> str:
    view = next((s for s in frame.statistics.subscriptions if s.name == job.name), None)
    behind = frame.published - job.done
    state = view.state if view else ""
    parts = [
        f"{counted(behind, 'event')} to go" if behind else "",
        "finished everything that was read" if behind and state == "caught up" else state,
        f"{job.duplicates:,} came again" if job.duplicates else "",
    ]
    return ", ".join(part for part in parts if part)


def _heading() -> Text:
    names = "cache, oldest bucket first".ljust(BUCKETS * (_BUCKET_WIDTH + 1) + 3)
    return Text(f" queue   {names}  full       lag   state", style="dim")


def _legend(colours: Mapping[str, str]) -> Text:
    """The meaning of the letters under the buckets."""
    text = Text(" " * 9)
    for name, colour in colours.items():
        text.append(name[0], style=f"bold {colour}").append(f" = {name}  ", style="dim")
    return text.append("  ◂ left the cache, reads alone  ▸ finished all events", style="dim")


def _queue(queue: QueueView, tail: int, colours: Mapping[str, str]) -> Iterable[Text]:
    full = max(queue.cache_events / queue.max_events, queue.cache_bytes / queue.max_bytes)
    behind = tail - min((cursor.watermark for cursor in queue.cursors), default=tail)
    first = Text(f"   {queue.index:<3} ◂ ")
    for index in range(BUCKETS):
        first.append_text(_bucket(queue, index)).append(" ")
    first.append("▸ ")
    first.append(f"{min(full, 1):>6.0%}", style="bold red" if queue.pressure else "")
    first.append(f" {behind:>9,}   ")
    yield first.append(queue.state, style="red" if queue.pressure else "dim")
    yield _cursors(queue.cursors, colours)


def _bucket(queue: QueueView, index: int) -> Text:
    if index >= len(queue.buckets):
        return Text("·" * _BUCKET_WIDTH, style="bright_black")
    bucket = queue.buckets[index]
    fill = max(bucket.events * BUCKETS / queue.max_events, bucket.bytes * BUCKETS / queue.max_bytes)
    return _bar(fill, _BUCKET_WIDTH, "yellow" if bucket.pins else "blue")


def _cursors(cursors: Sequence[CursorView], colours: Mapping[str, str]) -> Text:
    """Return the line under the buckets, in which each place has a column for each subscription."""
    width = _BUCKET_WIDTH + 1
    cells: list[tuple[str, str]] = [(" ", "")] * (width * (BUCKETS + 2) + 3)
    order = list(colours)
    for cursor in cursors:
        column = order.index(cursor.subscription) if cursor.subscription in colours else 0
        if cursor.bucket is not None:
            place = 9 + width * cursor.bucket + column
        else:
            place = 4 + column if cursor.catching_up else 9 + width * BUCKETS + column
        cells[place] = (cursor.subscription[0], f"bold {colours.get(cursor.subscription, '')}")
    return Text.assemble(*cells)


def _bar(share: float, width: int, style: str) -> Text:
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, part = divmod(eighths, 8)
    text = Text("█" * whole + (_EIGHTHS[part] if part else ""), style=style)
    return text.append("·" * (width - len(text)), style="bright_black")


def _carriers(delays: Mapping[str, CarrierDelays]) -> Text:
    """Mean departure delays so far, those of the busiest carriers first."""
    text = Text(" minutes late on average: ", style="dim")
    for carrier, of in sorted(delays.items(), key=lambda item: -item[1].flights)[:8]:
        text.append(f"{carrier} ", style="cyan").append(f"{of.mean:.1f}  ")
    return text
