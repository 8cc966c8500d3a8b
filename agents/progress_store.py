"""The store that pulling agents need: a part of the control store (`headrace.store`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..streams.progress import ControlRequests, RefusedProgress, SubscriptionAttachment
from ..streams.subscriptions import Checkpoint, DeadLetter, GapRecord


class ProgressStore(Protocol):
    """Progress, dead letters and gaps of subscriptions. Every method is one transaction: durable when it returns,
    without effect when it raises a HeadraceError."""

    @property
    def private(self) -> bool:
        """Whether no other process can change the store."""
        ...

    def watch_redrives(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each request of a redrive that is made through this object."""
        ...

    async def attach(self, provider: str, name: str, *, exclusive: bool = True) -> SubscriptionAttachment:
        """Take over a subscription under a new epoch. If it is not `exclusive`, share the epoch in effect.

        Raises NotFound."""
        ...

    async def save_checkpoints(
        self,
        provider: str,
        progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
        leases: Mapping[int, int] | None = None,
        *,
        revision: int = 0,
    ) -> RefusedProgress:
        """Store progress, given as (subscription, epoch, checkpoint by queue). `leases` has the lease's epoch by queue.
        `revision` is the number of the call: one that is carried out after a call with a higher number has no effect.

        Returns the subscriptions and queues with another owner by now: their progress is not stored."""
        ...

    async def seek(self, provider: str, name: str, positions: Mapping[int, Checkpoint], reason: str) -> int:
        """Move a subscription. Returns its new epoch. Raises NotFound."""
        ...

    async def checkpoints_of_queue(self, provider: str, queue: int) -> Mapping[str, Checkpoint]:
        """Checkpoints in a queue by subscription."""
        ...

    async def watermarks(self, provider: str, *, apart_from: Sequence[str] = ()) -> Mapping[int, int]:
        """The lowest offset still needed by any subscription that is not in `apart_from`, by queue."""
        ...

    async def control_requests(self, provider: str, names: Sequence[str]) -> ControlRequests:
        """Changes of these subscriptions, and stopped queues."""
        ...

    async def add_gaps(
        self, records: Sequence[GapRecord], epoch: int | None = None, leases: Mapping[int, int] | None = None
    ) -> None:
        """Store gap records. Raises Fenced if the subscription or a queue has another owner by now."""
        ...

    async def add_dead_letters(
        self, letters: Sequence[DeadLetter], epoch: int | None, leases: Mapping[int, int] | None = None
    ) -> object:
        """Store events that a subscription gave up on. Raises Fenced as `add_gaps` does."""
        ...

    async def redrives(
        self, provider: str, names: Sequence[str], *, queues: Collection[int] | None = None
    ) -> Sequence[DeadLetter]:
        """The first dead letters of these subscriptions and queues that are to be delivered once more."""
        ...

    async def requested_redrives(
        self, provider: str, name: str, queue: int, first: int, last: int
    ) -> Mapping[int, Sequence[int]]:
        """The positions of a queue, from offset `first` to offset `last`, inclusive, of dead letters whose redrive was
        requested: indexes by offset."""
        ...

    async def finish_redrive(
        self, letter_id: int, *, delivered: bool, reason: str | None, attempts: int, failed_at_us: int
    ) -> None:
        """Delete a dead letter that was delivered, or store its new failure."""
        ...
