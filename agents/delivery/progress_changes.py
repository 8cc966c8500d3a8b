"""The changes of one delivery's progress: how many there were, and a call at the next one. Pure."""

from __future__ import annotations

from collections.abc import Callable


class ProgressChanges:
    """Counts changes, and tells of the next one."""

    def __init__(self) -> None:
        self.changes: int = 0
        """Rises with each change that the position does not show."""
        self.on_change: Callable[[], None] | None = None
        """Called at the next change, once."""

    def touch(self) -> None:
        """A position changed: the saved checkpoint is out of date."""
        self.changes += 1
        if self.on_change is not None:
            self.note_change()

    def call_on_change(self, notify: Callable[[], None]) -> None:
        """Call `notify` at the next change of what `checkpoint` returns, once. It replaces an earlier `notify`."""
        self.on_change = notify

    def note_change(self) -> None:
        """Wake the background work that waits for a change."""
        on_change, self.on_change = self.on_change, None
        if on_change is not None:
            on_change()
