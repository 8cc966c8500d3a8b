"""Clocks and intervals of the library that a simulation replaces, so that a seed always gives the same history."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count

import pytest

from headrace.agents.delivery import checkpoint_pacer


def standing() -> float:
    """A clock that stands still."""
    return 0.0


def ticking(step_s: float) -> Callable[[], float]:
    """Return a clock that gains `step_s` seconds each time that it is read."""
    ticks = count()
    return lambda: next(ticks) * step_s


@contextmanager
def simulated_clocks(
    *,
    checkpoint_s: float = 1.0,
    max_entries: int = checkpoint_pacer.MAX_ENTRIES,
    turn_s: float = math.inf,
    clock: Callable[[], float] = standing,
) -> Generator[pytest.MonkeyPatch]:
    """Replace the clocks of the machine by `clock`, for the length of a `with`. Virtual time has no part in them.

    Checkpoints are made every `checkpoint_s` seconds. The default is ten times that of the library, so that crashes
    find more unsaved progress. Yield the patches, for others.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.agents.checkpointer.CHECKPOINT_S", checkpoint_s)
        patch.setattr(checkpoint_pacer, "MAX_ENTRIES", max_entries)
        patch.setattr("headrace.streams.handler_workers.TURN_S", turn_s)
        patch.setattr("headrace.agents.feed.monotonic", standing)
        for name in ("edge.perf_counter", "edge.thread_time", "group_delivery.perf_counter"):
            patch.setattr(f"headrace.agents.delivery.{name}", clock)
        patch.setattr("headrace.client.consumer.monotonic", standing)
        yield patch
