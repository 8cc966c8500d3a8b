"""What receivers have acknowledged: noted at once, stored with a commit about each second."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from .transactions import Changes


class Acknowledgements:
    """The acknowledgements of a process that may not be stored yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[int, int] = {}

    def note(self, queue: int, offset: int) -> None:
        """Everything below `offset` is finished."""
        with self._lock:
            self._noted[queue] = max(offset, self._noted.get(queue, 0))

    def noted(self, queue: int) -> int:
        """What was noted and may not be stored yet, 0 where nothing was. Look here first, then at what is stored."""
        return self._noted.get(queue, 0)

    def pending(self) -> Mapping[int, int]:
        with self._lock:
            return dict(self._noted)

    def forget(self, stored: Mapping[int, int]) -> None:
        """Drop what was `pending` and is stored now, unless more was noted since."""
        with self._lock:
            self._noted = {queue: offset for queue, offset in self._noted.items() if stored.get(queue) != offset}


def store(changes: Changes, pending: Mapping[int, int]) -> None:
    """Write acknowledgements; none moves backwards, or beyond what is there."""
    for queue, offset in pending.items():
        tail = changes.tail(queue)
        finished = min(offset, tail.next)
        if finished > tail.acknowledged:
            changes.put_tail(queue, tail._replace(acknowledged=finished))
