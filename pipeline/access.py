"""Reading a provider's queues by ranges of offsets, as Spark does: from the driver to plan, in the executors to read.

All calls block. What reads is opened where it is used, and never travels from one process to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..streams.subscriptions import Selector


class QueueState(NamedTuple):
    """What a queue retains: batches from `first` (inclusive) to `next` (exclusive)."""

    first: int
    next: int
    events: int | None = None
    """None where the adapter does not know."""
    nbytes: int | None = None


class Chunk(NamedTuple):
    """Batches of one queue as they lie in one buffer, in the order of their offsets. All arrays have one value each."""

    source: bytes
    starts: npt.NDArray[np.int64]
    """Where each encoded batch begins in `source`."""
    ends: npt.NDArray[np.int64]
    prefixes: npt.NDArray[np.int64]
    """How many of its bytes name the stream (`StreamId.prefix`); 0 where that is not known."""
    counts: npt.NDArray[np.int64]
    """Events of each."""
    offsets: npt.NDArray[np.int64]
    stored_us: int | None = None
    """When all of them were stored, in microseconds since 1970 UTC; None where the adapter does not know."""


class QueueAccess(ABC):
    """The queues of one provider, 0 to `queues` - 1."""

    queues: int

    @abstractmethod
    def states(self) -> Sequence[QueueState]:
        """What each queue retains. One cheap call for all."""

    @abstractmethod
    def offsets_at(self, time_us: int) -> Sequence[int]:
        """For each queue the offset of the first batch stored at or after a time, in microseconds since 1970 UTC."""

    @abstractmethod
    def reach(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """The exclusive end of as many batches as there are from `start` on, up to `end`, within both limits.

        At least one batch, where there is any.
        """

    @abstractmethod
    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[Chunk]:
        """The batches from `start` up to `end` (exclusive) of the streams that are selected.

        Batches of others may be among them: filtering may cost more than it saves. Raises OffsetsGone, StorageError,
        CorruptRecord.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""
