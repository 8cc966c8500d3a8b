"""Acknowledgements of receivers: noted in memory at once, stored by a commit about once a second."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from .transactions import LogChanges


class PendingAcknowledgements:
    """Acknowledgements of this process that may not be stored yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[int, int] = {}

    def note(self, queue: int, offset: int) -> None:
        """Note that every batch of the queue below `offset` is finished."""
        with self._lock:
            self._noted[queue] = max(offset, self._noted.get(queue, 0))

    def noted(self, queue: int) -> int:
        """Return the offset noted for a queue, 0 if there is none. Read it before the stored one, because `forget`
        drops an offset when it is stored."""
        return self._noted.get(queue, 0)

    def pending(self) -> Mapping[int, int]:
        """Return a copy of all noted offsets by queue, to store them."""
        with self._lock:
            return dict(self._noted)

    def forget(self, stored: Mapping[int, int]) -> None:
        """Drop offsets that `pending` returned and that are stored now. A higher offset that was noted since stays."""
        with self._lock:
            self._noted = {queue: offset for queue, offset in self._noted.items() if stored.get(queue) != offset}


def store(changes: LogChanges, pending: Mapping[int, int]) -> None:
    """Write acknowledgements. An offset never moves backwards, or beyond the end of its queue."""
    for queue, offset in pending.items():
        tail = changes.tail(queue)
        finished = min(offset, tail.next)
        if finished > tail.acknowledged:
            changes.put_tail(queue, tail._replace(acknowledged=finished))
