"""Maps streams to queues by a consistent hash ring.

Requirements:
- The same stream has the same queue in every process, on every machine and in every version of headrace. Stored events
  are searched only in the queue that the mapper returns, so a change would lose them.
- No queue gets much more than its share.
- A look-up is very cheap, and the ring stays small with any number of queues.

The algorithm is the ring of `hashring`, with the number of each queue as its name. A queue has 1,024 points; with more
than 64 queues it has 65,536 divided by the number of queues. The hashed name of a stream is `StreamId.prefix`. It
includes the lengths of namespace and key, so that ("ab", "c") and ("a", "bc") differ.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache

from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from .hashring import hash_bytes, ring

VERSION = "ring-blake2b-1"
"""The name of the algorithm. It is stored with each provider; any change of the results of `queue_of` needs a new
name."""
MAX_QUEUES = 1024
"""Largest number of queues of one provider."""
REMEMBERED = 1 << 17
"""Largest number of streams whose queue is remembered."""

_POINTS_PER_QUEUE = 1024
_POINTS = 1 << 16


class StreamQueueMapper:
    """Assigns each stream to one of `queues` queues, 0 to `queues` - 1.

    Raises InvalidArgument for a number of queues that is not from 1 to `MAX_QUEUES`.
    """

    __slots__ = ("_max_remembered", "_remembered", "_ring", "queues")

    def __init__(self, queues: int, *, max_remembered: int = REMEMBERED) -> None:
        if not 1 <= queues <= MAX_QUEUES:
            raise InvalidArgument(f"a provider has 1 to {MAX_QUEUES:,} queues, not {queues}")
        self.queues = queues
        self._max_remembered = max_remembered
        self._ring: tuple[Sequence[int], Sequence[int]] | None = None
        """The points, and the queue of each. Made at the first look-up: that takes 50 ms of CPU."""
        self._remembered: dict[StreamId, int] = {}

    @property
    def name(self) -> str:
        """The name of the algorithm."""
        return VERSION

    def queue_of(self, stream: StreamId) -> int:
        """Return the stream's queue. It depends only on the stream's name and the number of queues."""
        queue = self._remembered.get(stream)
        return self._look_up(stream) if queue is None else queue

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        """Return the queues that may have events of the stream: one."""
        return (self.queue_of(stream),)

    @property
    def remembered(self) -> int:
        """Number of streams whose queue is remembered now; at most `max_remembered`."""
        return len(self._remembered)

    def _look_up(self, stream: StreamId) -> int:
        if self._ring is None:
            self._ring = _ring(self.queues)
        positions, owners = self._ring
        queue = owners[bisect(positions, hash_bytes(stream.prefix))]
        if len(self._remembered) >= self._max_remembered:
            self._remembered.clear()
        self._remembered[stream] = queue
        return queue


@lru_cache(4)  # a provider that is opened again uses the same ring
def _ring(queues: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the points of the ring in order, and the queue of each. The first queue follows again at the end, for
    hashes above the last point."""
    each = min(_POINTS_PER_QUEUE, _POINTS // queues)
    positions, names = ring([str(queue) for queue in range(queues)], each)
    owners = [int(name) for name in names]
    return positions, [*owners, owners[0]]
