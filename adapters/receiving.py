"""Reading one queue: a part of the adapter seam (`headrace.adapters.seam`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..streams.errors import StorageError
from ..streams.events import EventBatch

RETENTION = "removed by retention"
"""The reason of a gap whose batches were deleted because of the provider's retention."""
LOST_END = "the queue lost its end"
"""The reason of a gap from the new end of a queue to the position of a reader that was ahead of it."""


class LostEndError(StorageError):
    """The position of a reader is past the end of its queue: the servers lost the last batches."""

    def __init__(self, problem: str, *, end: int) -> None:
        """`end`: the first lost offset. New batches get offsets from there on."""
        super().__init__(problem)
        self.end = end


class Gap(NamedTuple):
    """Offsets `low` (inclusive) to `high` (exclusive) of a queue cannot be read, because of `reason`."""

    low: int
    high: int
    reason: str
    skipped: bool = False
    """Whether the gap is damage that an operator skipped with `headrace repair queue`: all readers skip it."""


class Received(NamedTuple):
    """The result of one `receive`: batches in the order of their offsets. If there is a `gap`, they come after it.

    This receiver has returned every retained batch below `next_offset`, in this result or an earlier one. A result
    without a batch and a gap has a higher `next_offset` than the one before: the offsets in between have no batch.
    """

    batches: Sequence[EventBatch]
    next_offset: int
    gap: Gap | None = None


class Bounds(NamedTuple):
    """Retained offsets of a queue: `first` (inclusive) to `next` (exclusive, the offset of the next batch stored)."""

    first: int
    next: int


Accept = Callable[[Sequence[EventBatch]], bool]
"""Takes the next batches of a queue, with their offsets, or returns False. The batches belong to it. Does not raise."""


class QueueReceiver(ABC):
    """Reads one queue. Two `receive` calls must not run at once; open a second receiver instead."""

    @abstractmethod
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        """Return at least one batch, a gap, or a higher `next_offset`. Wait only if the queue has no batch; do not wait
        for more of them.

        If batches were accepted while the call waited (see `offer_to`), it may return neither of them.

        Stop after the batch that reaches or exceeds either limit, so a batch above the limit is returned alone. A
        cancelled call loses nothing: the next call returns the same batches.

        Raises StorageError if reading failed (the position is unchanged: call again), Closed after `aclose`.
        """

    def offer_to(self, accept: Accept) -> None:
        """Offer new batches to `accept` while `receive` waits. Optional: by default this does nothing.

        An adapter may call `accept` on the event loop with batches that this process has just stored, so that they need
        not be read back. They are as durable as `enqueue` promises, and follow the position of the waiting call.
        Accepted batches count as received. If they are not accepted, `receive` returns them.
        """

    @abstractmethod
    async def acknowledge(self, offset: int) -> None:
        """Declare every batch below `offset` finished for all subscriptions: it may be deleted. Never moves backwards.

        The next receiver that is opened with `start=None` returns all batches that are not acknowledged again.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Stop receiving. A waiting `receive` raises Closed. Idempotent."""
