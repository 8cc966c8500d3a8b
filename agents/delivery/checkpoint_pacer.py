"""When the progress of a delivery is to be saved. Pure.

To make a checkpoint takes time and space in proportion to the cursors. So none is made while the saved one is up to
date.
"""

from __future__ import annotations

from typing import NamedTuple

from ...streams.subscriptions import Checkpoint
from .progress import DeliveryProgress

MAX_ENTRIES = 4000
"""After a checkpoint with more streams behind and ranges of done events together, the next ones are held back."""
ENTRIES_PER_S = 40_000
"""The rate at which streams and ranges are written while checkpoints are held back, per second."""
HELD_BACK_S = 10.0
"""The longest time for which checkpoints are held back, in seconds."""


class UnsavedProgress(NamedTuple):
    """A checkpoint that is to be saved, and the state from which it was made."""

    pacer: CheckpointPacer
    checkpoint: Checkpoint
    state: tuple[int, int]

    def note_saved(self) -> None:
        """The checkpoint is stored."""
        self.pacer.note_saved(self)


class CheckpointPacer:
    """Makes the checkpoints of one delivery."""

    def __init__(self, progress: DeliveryProgress) -> None:
        self._progress = progress
        self.held_back = False
        """Whether the last call of `unsaved` returned None although the saved checkpoint is out of date."""
        self._held_back_until = 0.0
        self._saved: UnsavedProgress | None = None

    @property
    def is_saved(self) -> bool:
        """Whether the saved checkpoint is up to date."""
        return self._saved is not None and self._saved.state == (self._progress.changes, self._progress.position)

    def unsaved(self, now: float) -> UnsavedProgress | None:
        """Return a checkpoint that is to be saved, or None. Call its `note_saved` once it is stored. None is returned
        if the saved checkpoint is up to date.

        After a large checkpoint the next one is held back for a while, so that the store keeps up."""
        self.held_back = False
        state = self._progress.changes, self._progress.position
        if self._saved is not None and self._saved.state == state:
            return None
        self.held_back = now < self._held_back_until
        if self.held_back:
            return None
        checkpoint = self._progress.checkpoint()
        entries = sum(1 + len(behind.done) for behind in checkpoint.behind.values())
        if entries > MAX_ENTRIES:
            self._held_back_until = now + min(entries / ENTRIES_PER_S, HELD_BACK_S)
        return UnsavedProgress(self, checkpoint, state)

    def note_saved(self, saved: UnsavedProgress) -> None:
        """This result of `unsaved` is stored."""
        self._saved = saved
