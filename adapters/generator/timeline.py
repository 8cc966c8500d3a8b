"""The batches of a generated queue and when they are due, over all reconfigurations. Pure: callers pass the time."""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from typing import NamedTuple

from ...streams.events import EventBatch
from .plan import GeneratorPlan


class PlanEra(NamedTuple):
    """The batches from offset `first` up to the next era. One plan generates them."""

    first: int
    plan: GeneratorPlan
    events_before: int
    """Number of events in all earlier eras."""
    time_us: int
    """Generated time of the first batch, in microseconds since 1970 UTC."""
    opened_s: float
    """When the era began, in seconds of the loop's clock."""

    @property
    def end(self) -> float:
        """The offset after the last batch, if no other era follows; infinite if there is no end."""
        events = self.plan.options.events
        if events is None:
            return math.inf
        return self.first + max(0, math.ceil((events - self.events_before) / self.plan.options.batch))

    def count(self, offset: int) -> int:
        """Return the number of events in a batch. The last batch may be smaller."""
        full, events = self.plan.options.batch, self.plan.options.events
        return full if events is None else min(full, events - self.events_at(offset))

    def events_at(self, offset: int) -> int:
        """Return the number of events in all batches below `offset`, which is in this era or at its end."""
        before = self.events_before + (offset - self.first) * self.plan.options.batch
        events = self.plan.options.events
        return before if events is None or offset < self.end else max(self.events_before, min(before, events))

    def time_us_at(self, offset: int) -> int:
        return self.time_us + int((offset - self.first) * self.plan.options.interval_s * 1_000_000)

    def due_s(self, offset: int) -> float:
        """Return when a batch can be received, in seconds of the loop's clock."""
        if self.plan.options.rate is None:
            return self.opened_s
        return self.opened_s + (offset - self.first + 1) * self.plan.options.interval_s


class QueueTimeline:
    """One generated queue. It keeps all eras, so that every batch can be generated again."""

    def __init__(self, queue: int, plan: GeneratorPlan, now_s: float) -> None:
        self._queue = queue
        self._eras = [PlanEra(0, plan, 0, plan.options.start_us, now_s)]
        self._reached = 0

    @property
    def plan(self) -> GeneratorPlan:
        """The plan of the newest era."""
        return self._eras[-1].plan

    @property
    def end(self) -> float:
        """The offset after the last batch of the newest plan; infinite if there is no end."""
        return self._eras[-1].end

    def next(self, now_s: float) -> int:
        """Return the offset after the last batch that is due; without a rate, that was read so far."""
        last = self._eras[-1]
        if last.plan.options.rate is None:
            return self._reached
        due = last.first + int((now_s - last.opened_s) / last.plan.options.interval_s)
        return max(self._reached, int(min(due, last.end)))

    def reach(self, offset: int, now_s: float) -> None:
        """Treat all batches below `offset` as due: another process that reads the same data may have read them."""
        if offset <= self._reached:
            return
        self._reached = offset
        last = self._eras[-1]
        latest = now_s - (offset - last.first) * last.plan.options.interval_s
        self._eras[-1] = last._replace(opened_s=min(last.opened_s, latest))

    def change(self, plan: GeneratorPlan, now_s: float) -> None:
        """Use another plan from the next batch on that is not due yet."""
        first = self._reached = self.next(now_s)
        last = self._eras[-1]
        if last.first == first:
            self._eras.pop()
        self._eras.append(PlanEra(first, plan, last.events_at(first), last.time_us_at(first), now_s))

    def due_s(self, offset: int) -> float:
        """Return when the batch at `offset` can be received, in seconds of the loop's clock; infinite if never."""
        era = self._era(offset)
        return math.inf if offset >= era.end else era.due_s(offset)

    def batch(self, offset: int) -> EventBatch:
        """Generate the batch at `offset`, which is due."""
        era = self._era(offset)
        self._reached = max(self._reached, offset + 1)
        return era.plan.batch(self._queue, offset, era.count(offset), era.time_us_at(offset))

    def offset_at(self, time_us: int, now_s: float) -> int:
        """Return the first batch whose generated time is `time_us` or later, `next` if there is none."""
        return bisect_left(range(self.next(now_s)), time_us, key=lambda offset: self._era(offset).time_us_at(offset))

    def _era(self, offset: int) -> PlanEra:
        if offset >= self._eras[-1].first:
            return self._eras[-1]
        return self._eras[bisect(self._eras, offset, key=lambda era: era.first) - 1]
