"""Values that a control store and the pulling agents of a silo exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .subscriptions import Checkpoint, SubscriptionDefinition


class SubscriptionAttachment(NamedTuple):
    """The right to save a subscription's progress, and its checkpoint per queue. It ends when another process
    attaches."""

    epoch: int
    checkpoints: Mapping[int, Checkpoint]
    generation: int = 0
    """It rises with each seek, and with each creation of a subscription of this name."""
    definition: SubscriptionDefinition | None = None
    """The stored definition. None if the store does not give it."""


class RefusedProgress(NamedTuple):
    """The part of a call of `save_checkpoints` that was not written. As a bool: False if everything was written."""

    subscriptions: Sequence[str] = ()
    """Subscriptions that were deleted, or that have a newer epoch."""
    queues: frozenset[int] = frozenset()
    """Queues whose lease was released, or granted to another silo."""

    def __bool__(self) -> bool:
        return bool(self.subscriptions or self.queues)


class ControlRequests(NamedTuple):
    """Changes that other processes with the same store have requested."""

    epochs: Mapping[str, int]
    """Epochs of subscriptions by name. If the epoch is higher than at `attach`, the subscription was moved; if it is
    missing, the subscription was deleted."""
    stopped: frozenset[int]
    """Queues that no silo may read."""
