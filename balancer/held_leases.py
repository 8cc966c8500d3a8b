"""The leases that this silo holds. Each ends by the clock of this process, which then cuts its queue off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ..streams.cluster import Lease
from .sightings import QueueKey

log = logging.getLogger("headrace.balancer")


class LeaseTerm(Protocol):
    """The end of a lease, by this process's clock."""

    until: float
    """Loop time. It rises when the lease is renewed."""


class QueueOwner(Protocol):
    """Serves the queues of one provider in this process."""

    queues: int

    async def gain(self, queue: int, epoch: int, term: LeaseTerm) -> None:
        """Serve a queue from its current checkpoints on, until the term ends. Called again if it raises."""
        ...

    async def lose(self, queue: int, drain_s: float) -> None:
        """Stop receiving, wait up to `drain_s` seconds for events in flight, and save exactly the finished ones."""
        ...

    def cut(self, queue: int) -> None:
        """Stop at once, because the lease is over. Nothing that is done from now on may be saved."""
        ...


class HeldLease:
    """A lease of this silo, with the state of its queue."""

    __slots__ = ("lease", "moving", "queue", "started", "until")

    def __init__(self, lease: Lease, until: float) -> None:
        self.lease = lease
        self.queue: QueueKey = (lease.provider, lease.queue)
        self.until = until
        """Loop time."""
        self.started = False
        """The `QueueOwner` serves the queue."""
        self.moving: asyncio.Task[None] | None = None
        """Starts the queue, or stops and releases it."""

    def begin_move(self, moving: asyncio.Task[None]) -> None:
        self.moving = moving

    def end_move(self) -> None:
        self.moving = None

    def mark_started(self) -> None:
        self.started = True

    def mark_stopped(self) -> None:
        self.started = False

    def renew(self, until: float) -> None:
        """Use the lease until this loop time."""
        self.until = until


class HeldLeases:
    """All leases of one silo. Iterating is safe while leases come and go. Belongs to one event loop."""

    def __init__(self, silo: str, owners: Mapping[str, QueueOwner], usable_s: float) -> None:
        """A lease is used for `usable_s` seconds from the time before the call that granted or renewed it."""
        self._silo = silo
        self._owners = owners
        self._usable_s = usable_s
        self._loop = asyncio.get_running_loop()
        self._held: dict[QueueKey, HeldLease] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[HeldLease]:
        return iter([*self._held.values()])

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, queue: QueueKey) -> bool:
        return queue in self._held

    def holds(self, held: HeldLease) -> bool:
        """Whether the lease was neither cut nor forgotten."""
        return self._held.get(held.queue) is held

    def add(self, granted: Iterable[Lease], began: float) -> list[HeldLease]:
        """Hold the leases that a call granted. The call began at `began`. If it took as long as a lease is used, hold
        none: the next view shows the leases, and they are acquired again."""
        until = began + self._usable_s
        if until <= self._loop.time():
            return []
        added = [HeldLease(lease, until) for lease in granted]
        self._held.update((held.queue, held) for held in added)
        self._set_timer()
        return added

    def renew(self, mine: Mapping[QueueKey, Lease], began: float) -> None:
        """Extend the leases that a call to the store has renewed. The call began at `began`; `mine` are the leases of
        this silo in its answer.

        First cut off leases that are over by this process's clock, even if the store renewed them: their deliveries may
        have stopped already. Such a queue is acquired again.
        """
        self._cut_expired()
        for held in self:
            lease = mine.get(held.queue)
            if lease is not None and lease.epoch == held.lease.epoch:
                held.renew(began + self._usable_s)
            else:
                self._cut(held, "by the store, its lease is no longer this silo's")
        self._set_timer()

    def forget(self, held: HeldLease) -> None:
        """The queue was given back."""
        del self._held[held.queue]

    def cut_all(self, why: str) -> None:
        """Stop all queues at once, and hold no lease."""
        for held in self:
            self._cut(held, why)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._timer = self._loop.call_at(min(held.until for held in self), self._on_timer)

    def _on_timer(self) -> None:
        self._cut_expired()
        self._set_timer()

    def _cut_expired(self) -> None:
        now = self._loop.time()
        for held in self:
            if held.until <= now:
                self._cut(held, "its lease could not be renewed in time")

    def _cut(self, held: HeldLease, why: str) -> None:
        del self._held[held.queue]
        provider, queue = held.queue
        log.warning("silo %r loses queue %d of %r: %s", self._silo, queue, provider, why)
        if held.moving is not None:
            held.moving.cancel()
        self._owners[provider].cut(queue)
