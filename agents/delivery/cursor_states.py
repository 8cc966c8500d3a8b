"""How many cursors are in each state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...streams.identity import StreamId
from ..cursor import RUNNING, CursorState, StreamCursor


class CursorStates:
    """Counts the cursors of one delivery by state. Those that are ready are in a queue of their own, and the others are
    parked."""

    __slots__ = ("outdated", "paused", "running", "waiting")

    def __init__(self, cursors: Iterable[StreamCursor]) -> None:
        self.running: int = 0
        self.waiting: int = 0
        self.paused: dict[StreamId, StreamCursor] = {
            cursor.stream: cursor for cursor in cursors if cursor.state is CursorState.PAUSED
        }
        self.outdated: int = 0
        """Entries in the queue of ready cursors whose cursors are not ready any more, or are in it twice."""

    def leave(self, cursor: StreamCursor) -> None:
        """A cursor leaves its present state."""
        state = cursor.state
        if state is RUNNING:
            self.running -= 1
        elif state is CursorState.WAITING:
            self.waiting -= 1
        elif state is CursorState.PAUSED:
            del self.paused[cursor.stream]

    def parked(self, cursors: int, ready: int) -> int:
        """Return the number of parked cursors, of so many in all, with so many entries in the queue of ready ones."""
        return cursors - (ready - self.outdated) - self.running - self.waiting - len(self.paused)
