"""Values that a control store and the pulling agents of a silo exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .subscriptions import Checkpoint


class Attachment(NamedTuple):
    """The right to move a subscription on, and its checkpoint per queue. It ends when another process attaches."""

    epoch: int
    checkpoints: Mapping[int, Checkpoint]


class RefusedProgress(NamedTuple):
    """The part of a call of `save_checkpoints` that was not written. False if everything was written."""

    subscriptions: Sequence[str] = ()
    """Subscriptions that were deleted, or that have another epoch by now."""
    queues: frozenset[int] = frozenset()
    """Queues whose lease was released, or granted to another silo."""

    def __bool__(self) -> bool:
        return bool(self.subscriptions or self.queues)


class ControlRequests(NamedTuple):
    """Changes that other processes with the same store ask for."""

    epochs: Mapping[str, int]
    """Epochs of subscriptions by name. A higher one than at `attach`: the subscription was moved. A missing one: it was
    deleted."""
    stopped: frozenset[int]
    """Queues that no silo may read."""
