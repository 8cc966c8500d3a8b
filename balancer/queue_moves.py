"""The moves of queues to and from this silo: which ones a view of the cluster requires, and their execution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..streams.background import BackgroundTasks
from ..streams.cluster import ClusterView, Lease
from ..streams.errors import HeadraceError
from .desired_owners import DesiredOwners
from .held_leases import HeldLease, HeldLeases, QueueOwner
from .sightings import QueueKey

log = logging.getLogger("headrace.balancer")

Work = Callable[[], Coroutine[Any, Any, None]]


class MovePlan(NamedTuple):
    """The next steps of one silo towards the desired owners."""

    start: Sequence[HeldLease]
    """Serve these queues: an earlier attempt failed."""
    give_back: Sequence[HeldLease]
    release: Sequence[Lease]
    """Leases of this silo that it does not hold: it acquired or released them by a call whose answer was lost."""
    acquire: Sequence[QueueKey]
    homes: Mapping[QueueKey, str]
    """New homes of queues that this silo holds."""


def plan_moves(
    silo: str, mine: Mapping[QueueKey, Lease], held: Iterable[HeldLease], view: ClusterView, desired: DesiredOwners
) -> MovePlan:
    """Plan the steps of a silo with the leases `mine`. A queue whose move is in progress is considered again
    afterwards."""
    own = {one.queue: one for one in held}
    taken = {(lease.provider, lease.queue): lease for lease in view.valid}
    wanted = {queue for queue, name in desired.now.items() if name == silo}
    resting = [one for one in own.values() if one.moving is None]
    lost = mine.keys() & taken.keys() - own.keys()
    return MovePlan(
        start=[one for one in resting if one.queue in wanted and not one.started],
        give_back=[one for one in resting if one.queue not in wanted],
        release=[taken[queue] for queue in sorted(lost - wanted)],
        acquire=sorted((wanted - taken.keys() - own.keys()) | (lost & wanted)),
        homes={
            queue: desired.homes[queue]
            for queue in own.keys() & taken.keys()
            if desired.homes[queue] != taken[queue].home
        },
    )


class QueueMoves:
    """Moves queues, each in a task of its own. A move in progress is completed, whatever later views say."""

    def __init__(
        self,
        silo: str,
        held: HeldLeases,
        owners: Mapping[str, QueueOwner],
        release: Callable[[Lease], Awaitable[None]],
        background: BackgroundTasks,
    ) -> None:
        """`release` releases the lease of a queue in the store."""
        self._silo = silo
        self._held = held
        self._owners = owners
        self._release = release
        self._background = background

    def start(self, held: HeldLease) -> None:
        """Begin to serve a queue."""
        self._begin(held, partial(self._start, held), "starts")

    def give_back(self, held: HeldLease, drain_s: float) -> None:
        """Begin to give a queue back. `drain_s` is how long events in flight may take to finish, in seconds."""
        self._begin(held, partial(self._give_back, held, drain_s), "gives back")

    def give_back_late(self, drain_s: float) -> None:
        """Give queues back that were acquired while a drain began, or that could not be given back before."""
        for held in self._held:
            if held.moving is None:
                self.give_back(held, drain_s)

    async def give_back_all(self, drain_s: float) -> None:
        """Give all queues back, each after the move that is in progress. Return when these attempts have ended."""
        await asyncio.gather(*(self._give_back_next(held, drain_s) for held in self._held), return_exceptions=True)

    async def _give_back_next(self, held: HeldLease, drain_s: float) -> None:
        if held.moving is not None:
            await asyncio.wait([held.moving])
        if self._held.holds(held):
            if held.moving is None:
                self.give_back(held, drain_s)
            if held.moving is not None:
                await asyncio.wait([held.moving])

    def _begin(self, held: HeldLease, work: Work, verb: str) -> None:
        provider, queue = held.queue
        name = f"headrace {self._silo} {verb} {provider}/{queue}"
        held.begin_move(self._background.start(self._move(held, work), name))

    async def _move(self, held: HeldLease, work: Work) -> None:
        provider, queue = held.queue
        try:
            await work()
        except HeadraceError as error:
            log.warning("queue %d of %r cannot move yet: %s", queue, provider, error)
        except Exception:
            log.exception("queue %d of %r cannot move yet", queue, provider)
        finally:
            held.end_move()

    async def _start(self, held: HeldLease) -> None:
        lease = held.lease
        await self._owners[lease.provider].gain(lease.queue, lease.epoch, held)
        held.mark_started()
        log.info("silo %r serves queue %d of %r, epoch %d", self._silo, lease.queue, lease.provider, lease.epoch)

    async def _give_back(self, held: HeldLease, drain_s: float) -> None:
        lease = held.lease
        held.mark_stopped()
        await self._owners[lease.provider].lose(lease.queue, drain_s)
        if self._held.holds(held):
            self._held.forget(held)
            await self._release(lease)
            log.info("silo %r gave back queue %d of %r", self._silo, lease.queue, lease.provider)
