"""A silo as a member of its cluster: it sends heartbeats, renews its leases of queues, and moves queues to the silos
that the balancer chooses.

One loop calls the store once a period: a heartbeat, the renewal of all leases, and the view of the cluster are one
transaction. Every silo then decides by itself, with the same pure functions (`balancers`, `maturity`).

A lease of this silo is measured by this process's clock, from the time before the call that got or renewed it. So here
it ends before it ends for any other silo, however long the call took and however the clocks differ. A lease of another
silo is over once this silo has seen it unchanged for its length (`sightings`). A failed call changes nothing until
then. A silo that was stopped for longer than its leases (SIGSTOP) first cuts its queues off when it runs again. The
store refuses writes of its old epochs.

A planned move of a queue has four steps: stop receiving, drain, checkpoint (all in `QueueOwner.lose`), release. The
lease is renewed until the last step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from ..streams.background import BackgroundTasks
from ..streams.cluster import ClusterView, Lease, SiloRecord, SiloSuperseded
from ..streams.errors import Fenced, HeadraceError, Unavailable
from .cluster_options import ClusterOptions
from .desired_owners import OwnerDecision
from .held_leases import HeldLease, HeldLeases, QueueOwner
from .probes import ReachableSilos, SiloProbes, VoteStore
from .queue_moves import QueueMoves, plan_moves
from .sightings import QueueKey, Sightings

log = logging.getLogger("headrace.balancer")

MARGIN = 0.1
"""This fraction of a lease is not used, because it takes time to cut a queue off."""
RETRY = 0.25
"""A failed call to the store is repeated after this fraction of a period."""


class LeaseStore(VoteStore, Protocol):
    """The part of `headrace.store.cluster_store.ClusterStore` that a member uses."""

    async def join(
        self,
        name: str,
        address: str,
        serves: Sequence[str],
        settings: Mapping[str, str],
        process: str,
        *,
        public_address: str,
    ) -> SiloRecord: ...

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView: ...

    async def acquire(
        self,
        me: SiloRecord,
        wanted: Sequence[QueueKey],
        lease_s: float,
        homes: Mapping[QueueKey, str],
        over: Collection[Lease],
    ) -> list[Lease]: ...

    async def settle(self, me: SiloRecord, homes: Mapping[QueueKey, str]) -> None: ...

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None: ...

    async def leaving(self, me: SiloRecord) -> None: ...

    async def view(self) -> ClusterView: ...

    async def leave(self, me: SiloRecord) -> None: ...


DeclareDead = Callable[[ClusterView], Awaitable[bool]]
"""Declares the silos dead whose processes have ended, as far as the operating system tells. Returns whether there were
any."""


async def declare_none(_: ClusterView) -> bool:
    return False


def _listed(leases: Iterable[HeldLease]) -> str:
    """Return a text such as "queues 0, 3 of 'default'"."""
    by_provider: defaultdict[str, list[int]] = defaultdict(list)
    for provider, queue in sorted(held.queue for held in leases):
        by_provider[provider].append(queue)
    return "; ".join(
        f"queue{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of {provider!r}"
        for provider, found in by_provider.items()
    )


class Membership:
    """The membership of this silo in its cluster, from `join` to `leave`. Belongs to one event loop."""

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        *,
        address: str,
        owners: Mapping[str, QueueOwner],
        peers: ReachableSilos,
        options: ClusterOptions,
        declare_dead: DeclareDead = declare_none,
        settings: Mapping[str, str] = MappingProxyType({}),
        process: str = "",
        public_address: str = "",
        on_view: Callable[[ClusterView], None] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        """`settings`, `process` and `public_address` become part of this silo's `SiloRecord`, for other silos.
        `on_view` is called with each new view of the cluster."""
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an error when another process takes the silo's name. That ends this membership."""
        self.name = name
        self.held = HeldLeases(name, owners, options.lease_s * (1 - MARGIN))
        self._on_view = on_view
        self._last_view: ClusterView | None = None
        self._store = store
        self._address = address
        self._serves = sorted(owners)
        self._options = options
        self._declare_dead = declare_dead
        self._settings = settings
        self._process = process
        self._public_address = public_address
        self._sightings = Sightings()
        self._decision = OwnerDecision(options, owners, self._sightings)
        self._background = BackgroundTasks()
        """The membership loop, moves of queues, and probes."""
        self._moves = QueueMoves(name, self.held, owners, self._release, self._background)
        self._probes = SiloProbes(
            store,
            peers,
            self._sightings,
            dead_after_s=options.dead_after_s,
            me=lambda: self.me,
            background=self._background,
        )
        self._rng = rng or random.Random()  # noqa: S311 (spreads load)
        self._loop = asyncio.get_running_loop()
        self._balancing = asyncio.Lock()
        """Held while this silo acquires queues. `drain` waits for it, so that it gives back all queues."""
        self._me: SiloRecord | None = None
        self._joining = False
        """A call of `join` has begun and has not returned: if this silo is superseded, it may be by that call."""
        self._leaving = False
        self._left_as = 0
        """The incarnation that is marked as leaving in the store."""
        self._drained = False
        self._drain_s = options.drain_s

    @property
    def me(self) -> SiloRecord:
        """The record of this silo in the cluster."""
        assert self._me is not None
        return self._me

    async def join(self) -> None:
        """Become a member. Queues are acquired later. Raises StorageError if the store cannot be reached."""
        await self._join()
        log.info("silo %r is member %d of its cluster", self.name, self.me.incarnation)
        self._background.start(self._run(), f"headrace membership {self.name}")

    async def _join(self) -> None:
        self._joining = True
        self._me = await self._store.join(
            self.name,
            self._address,
            self._serves,
            self._settings,
            self._process,
            public_address=self._public_address,
        )
        self._joining = False

    async def leave(self) -> None:
        """Give all queues back by planned moves, and end the membership.

        While the store fails, calls are repeated for up to `ClusterOptions.drain_s`. Raises Unavailable if queues could
        not be given back by then: their leases run out, and events that were finished since the last checkpoint are
        delivered again.
        """
        try:
            await self._drain_with_retries()
        finally:
            lost = await self._end()
        await self._leave_store()
        if lost:
            raise Unavailable(
                f"silo {self.name!r} ends without having saved all progress of {_listed(lost)}: events that were "
                "finished since the last checkpoint are delivered again"
            )

    async def _drain_with_retries(self) -> None:
        until = self._loop.time() + self._options.drain_s
        while True:
            try:
                await self.drain()
            except HeadraceError as error:
                log.warning("%s", error)
                if self._loop.time() >= until or self.superseded.done():
                    return
            else:
                return
            await asyncio.sleep(RETRY * self._options.period_s)

    async def drain(self, drain_s: float | None = None) -> None:
        """Give all queues back by planned moves, and acquire no more. The silo stays a member without queues.

        `drain_s` is how long events in flight may take to finish, in seconds; None: `ClusterOptions.drain_s`. Raises
        Unavailable if the store does not answer, or if a queue could not be given back. The membership goes on trying
        until `undrain`.
        """
        self._leaving, self._drained = True, False
        self._drain_s = self._options.drain_s if drain_s is None else drain_s
        with suppress(HeadraceError):  # repeated below: giving the queues back comes first
            await self._tell_leaving()
        async with self._balancing:
            pass  # queues that were being acquired are in `held` now
        await self._moves.give_back_all(self._drain_s)
        try:
            await self._finish_leaving(await self._store.view())
        except Fenced:
            pass  # dead or superseded: the store does not give queues to this silo
        except HeadraceError as error:
            raise Unavailable(
                f"silo {self.name!r} is not drained: its cluster's store does not answer; it goes on trying: {error}"
            ) from error
        if self.held:
            raise Unavailable(
                f"silo {self.name!r} could not give back {_listed(self.held)} yet, and goes on trying: see its log, "
                "and `headrace queues`"
            )
        self._drained = True

    async def _tell_leaving(self) -> None:
        """Mark this silo as leaving in the store, once for each incarnation."""
        me = self.me
        if self._left_as != me.incarnation:
            await self._store.leaving(me)
            self._left_as = me.incarnation

    async def _finish_leaving(self, view: ClusterView) -> None:
        """Repeat the calls that failed before: mark the silo as leaving, and release the queues that it gave back."""
        await self._tell_leaving()
        if left := [lease for queue, lease in self._mine(view).items() if queue not in self.held]:
            await self._store.release(self.me, left)

    async def undrain(self) -> None:
        """Acquire queues again, after all queues are given back: progress that is not saved yet would be lost with the
        leases. Raises StorageError if the store cannot be reached, and Unavailable if a queue could not be given back.
        """
        if self._leaving:
            await self._moves.give_back_all(self._drain_s)
            if self.held:
                raise Unavailable(
                    f"silo {self.name!r} could not give back {_listed(self.held)} yet, and goes on trying: undrain it "
                    "again later"
                )
            await self._join()
            self._leaving, self._drained, self._drain_s = False, False, self._options.drain_s

    @property
    def leaving(self) -> bool:
        """The silo acquires no more queues."""
        return self._leaving

    @property
    def drained(self) -> bool:
        """The silo gave back all queues, and the store has recorded it."""
        return self._leaving and self._drained

    async def _end(self) -> list[HeldLease]:
        """End all tasks. Return the leases of the queues that were not given back."""
        await self._background.aclose()
        lost = [*self.held]
        self.held.cut_all("the silo stops")
        return lost

    async def _leave_store(self) -> None:
        try:
            await self._store.leave(self.me)
        except HeadraceError as error:
            log.warning("silo %r could not record in its cluster's store that it leaves: %s", self.name, error)

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        period = self._options.period_s
        failing = False
        while not self.superseded.done():
            began = self._loop.time()
            try:
                pause = 0.0 if await self._beat() else period
                if failing:
                    log.info("silo %r reaches its cluster's store again", self.name)
                failing = False
            except HeadraceError as error:
                level = logging.DEBUG if failing else logging.WARNING
                log.log(level, "silo %r serves as long as its leases last: its cluster's store: %s", self.name, error)
                pause, failing = RETRY * period, True
            except Exception:
                log.exception("silo %r: unexpected error in the membership, which goes on", self.name)
                pause = period
            wakes_at = began + pause * self._rng.uniform(0.9, 1.1)
            await asyncio.sleep(max(0.0, min(wakes_at, self._next_end()) - self._loop.time()))

    def _next_end(self) -> float:
        """Return when the next lease of another silo ends. This silo then acts at once, without waiting for the next
        heartbeat."""
        now = self._loop.time()
        leases = (
            [] if self._last_view is None else [lease for lease in self._last_view.valid if not self._is_mine(lease)]
        )
        ends = (self._sightings.ends_at(lease) for lease in leases)
        return min((end for end in ends if end > now), default=math.inf)

    async def _beat(self) -> bool:
        """Send a heartbeat, and act on the view that it returns. Return whether to do it again at once."""
        began, me = self._loop.time(), self.me
        try:
            if self._leaving and not self.held:
                # A silo that sends heartbeats, and is not marked as leaving, gets queues. If it still has queues,
                # renewing their leases comes first, and `_finish_leaving` marks it afterwards.
                await self._tell_leaving()
            view = await self._store.beat(me, self._options.lease_s)
        except Fenced as fenced:
            if me is not self.me:
                return True  # this silo has joined again in the meantime
            log.warning("%s", fenced)
            if isinstance(fenced, SiloSuperseded) and not (self._joining or self.superseded.done()):
                self.superseded.set_exception(fenced)
            self.held.cut_all("the silo is no longer a member")
            async with self._balancing:
                if not (self._leaving or self.superseded.done()):
                    await self._join()
            return False
        self._last_view = view = self._sightings.see(view, self._loop.time())
        self.held.renew(self._mine(view), began)
        self._on_view(view)
        if await self._declare_dead(view):
            return True
        self._probes.start(view.silos)
        if self._leaving:
            self._moves.give_back_late(self._drain_s)
            await self._finish_leaving(view)
            self._drained = not self.held
        else:
            async with self._balancing:
                await self._balance(view)
        return False

    def _is_mine(self, lease: Lease) -> bool:
        return (lease.owner, lease.incarnation) == (self.me.name, self.me.incarnation)

    def _mine(self, view: ClusterView) -> dict[QueueKey, Lease]:
        return {(lease.provider, lease.queue): lease for lease in view.leases if self._is_mine(lease)}

    # ---- moves of queues -------------------------------------------------------------------------------------------

    def why_unserved(self, queues: Sequence[QueueKey]) -> list[tuple[str, float]]:
        """Return why no silo serves each of these queues, as far as this silo knows, and for how many seconds."""
        if self._last_view is None or not queues:
            return [("this silo has not seen its cluster yet", 0.0) for _ in queues]
        return self._decision.why_unserved(self._last_view, self._loop.time(), queues)

    async def _balance(self, view: ClusterView) -> None:
        """Begin the moves that the view requires."""
        desired = self._decision.decide(view, self._loop.time())
        plan = plan_moves(self.name, self._mine(view), self.held, view, desired)
        for held in plan.give_back:
            self._moves.give_back(held, self._drain_s)
        for held in plan.start:
            self._moves.start(held)
        if plan.release:
            await self._store.release(self.me, plan.release)
        if plan.acquire:
            await self._acquire(plan.acquire, desired.homes, view)
        if new_homes := {queue: home for queue, home in plan.homes.items() if queue in self.held}:
            await self._store.settle(self.me, new_homes)

    async def _acquire(self, wanted: Sequence[QueueKey], homes: Mapping[QueueKey, str], view: ClusterView) -> None:
        began, new_homes = self._loop.time(), {queue: homes[queue] for queue in wanted}
        over = [lease for lease in view.leases if (lease.provider, lease.queue) in view.over]
        granted = await self._store.acquire(self.me, wanted, self._options.lease_s, new_homes, over)
        for held in self.held.add(granted, began):
            self._moves.start(held)

    async def _release(self, lease: Lease) -> None:
        await self._store.release(self.me, [lease])
