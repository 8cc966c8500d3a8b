"""How many cursors are in each state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...streams.identity import StreamId
from ..cursor import PARKED, READY, RUNNING, CursorState, StreamCursor


class CursorStates:
    """Counts the cursors of one delivery by state. Those that are ready are in a queue of their own."""

    __slots__ = ("parked", "paused", "running", "waiting")

    def __init__(self, cursors: Iterable[StreamCursor]) -> None:
        self.running: int = 0
        self.waiting: int = 0
        self.parked: int = 0
        self.paused: dict[StreamId, StreamCursor] = {}
        for cursor in cursors:
            self.enter(cursor, cursor.state)

    def enter(self, cursor: StreamCursor, state: CursorState) -> None:
        """A cursor gets this state."""
        if state is RUNNING:
            self.running += 1
        elif state is PARKED:
            self.parked += 1
        elif state is CursorState.WAITING:
            self.waiting += 1
        elif state is CursorState.PAUSED:
            self.paused[cursor.stream] = cursor

    def leave(self, cursor: StreamCursor) -> None:
        """A cursor leaves its present state, or goes."""
        state = cursor.state
        if state is READY:
            return
        if state is RUNNING:
            self.running -= 1
        elif state is PARKED:
            self.parked -= 1
        elif state is CursorState.WAITING:
            self.waiting -= 1
        else:
            del self.paused[cursor.stream]
