"""Maps streams to queues by a consistent hash ring.

Requirements: the same stream gives the same queue in every process, on every machine and in every version of headrace
(stored events are looked for where the mapper says, so a change would lose them); no queue gets much more than its
share; a look-up costs next to nothing; the ring is small however many queues there are.

The algorithm is the classic ring of `hashring`, with the number of each queue as its name, at 1,024 points, or with
more than 64 queues at 65,536 divided by their number. A stream's hashed name is `StreamId.prefix`, in which both parts
carry their length, so that the boundary between namespace and key counts.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache

from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from .hashring import hash_bytes, ring

VERSION = "ring-blake2b-1"
"""Names the algorithm. It is stored with each provider; any change of `queue_of`'s answers needs another name."""
MAX_QUEUES = 1024
"""Limit of the number of queues of one provider."""
REMEMBERED = 1 << 17
"""How many streams' queues are remembered, at most."""

_POINTS_PER_QUEUE = 1024
_POINTS = 1 << 16


class StreamQueueMapper:
    """Gives each stream one of `queues` queues, 0 to `queues` - 1.

    Raises InvalidArgument for a number of queues that is not from 1 to `MAX_QUEUES`.
    """

    __slots__ = ("_at", "_positions", "_remembered", "queues")

    def __init__(self, queues: int) -> None:
        if not 1 <= queues <= MAX_QUEUES:
            raise InvalidArgument(f"a provider has 1 to {MAX_QUEUES:,} queues, not {queues}")
        self.queues = queues
        self._positions, self._at = _ring(queues)
        self._remembered: dict[StreamId, int] = {}

    def queue_of(self, stream: StreamId) -> int:
        """The stream's queue. Pure: it depends on the stream's name and the number of queues alone."""
        queue = self._remembered.get(stream)
        return self._look_up(stream) if queue is None else queue

    @property
    def remembered(self) -> int:
        """How many streams' queues are remembered now; never above `REMEMBERED`."""
        return len(self._remembered)

    def _look_up(self, stream: StreamId) -> int:
        queue = self._at[bisect(self._positions, hash_bytes(stream.prefix))]
        if len(self._remembered) >= REMEMBERED:
            self._remembered.clear()
        self._remembered[stream] = queue
        return queue


@lru_cache(4)  # who opens a provider again and again has the same one each time
def _ring(queues: int) -> tuple[Sequence[int], Sequence[int]]:
    """The points of the ring in order, and whose each is; one more closes the ring."""
    each = min(_POINTS_PER_QUEUE, _POINTS // queues)
    positions, names = ring([str(queue) for queue in range(queues)], each)
    owners = [int(name) for name in names]
    return positions, [*owners, owners[0]]
