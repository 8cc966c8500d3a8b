"""A silo as a member of its cluster: it sends heartbeats, holds leases of queues, and moves queues to the silos that
the balancer chooses.

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
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol

from ..streams.background import BackgroundTasks
from ..streams.cluster import ClusterView, Lease, SiloRecord, Superseded
from ..streams.errors import Fenced, HeadraceError, Unavailable
from .cluster_options import ClusterOptions
from .desired_owners import OwnerDecision
from .probes import Peers, SiloProbes, VoteStore
from .sightings import Queue, Sightings

log = logging.getLogger("headrace.balancer")

MARGIN = 0.1
"""This fraction of a lease is not used, because it takes time to cut a queue off."""
RETRY = 0.25
"""A failed call to the store is repeated after this fraction of a period."""


class LeaseStore(VoteStore, Protocol):
    """The part of `headrace.store.cluster_store.ClusterStore` that a member uses."""

    async def join(
        self, name: str, address: str, serves: Sequence[str], settings: Mapping[str, str], process: str
    ) -> SiloRecord: ...

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView: ...

    async def acquire(
        self,
        me: SiloRecord,
        wanted: Sequence[Queue],
        lease_s: float,
        homes: Mapping[Queue, str],
        over: Collection[Lease],
    ) -> list[Lease]: ...

    async def settle(self, me: SiloRecord, homes: Mapping[Queue, str]) -> None: ...

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None: ...

    async def leaving(self, me: SiloRecord) -> None: ...

    async def view(self) -> ClusterView: ...

    async def leave(self, me: SiloRecord) -> None: ...


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


DeclareDead = Callable[[ClusterView], Awaitable[bool]]
"""Declares the silos dead whose processes have ended, as far as the operating system tells. Returns whether there were
any."""


async def declare_none(_: ClusterView) -> bool:
    return False


class HeldLease:
    """A lease of this silo, with the state of its queue."""

    __slots__ = ("lease", "moving", "started", "until")

    def __init__(self, lease: Lease, until: float) -> None:
        self.lease = lease
        self.until = until
        """Loop time."""
        self.started = False
        """The `QueueOwner` serves the queue."""
        self.moving: asyncio.Task[None] | None = None
        """Starts the queue, or stops and releases it."""


def _listed(queues: Iterable[Queue]) -> str:
    """Return a text such as "queues 0, 3 of default"."""
    by_provider: defaultdict[str, list[int]] = defaultdict(list)
    for provider, queue in sorted(queues):
        by_provider[provider].append(queue)
    return "; ".join(
        f"queue{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of {provider}"
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
        peers: Peers,
        options: ClusterOptions,
        declare_dead: DeclareDead = declare_none,
        settings: Mapping[str, str] = MappingProxyType({}),
        process: str = "",
        rng: random.Random | None = None,
    ) -> None:
        """`settings` and `process` become part of this silo's `SiloRecord`, which other silos read."""
        self.on_view: Callable[[ClusterView], None] = lambda _: None
        """Called with each new view of the cluster."""
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an error when another process takes the silo's name. That ends this membership."""
        self.name = name
        self.held: dict[Queue, HeldLease] = {}
        self.view: ClusterView | None = None
        """The last view of the cluster."""
        self._store = store
        self._address = address
        self._owners = owners
        self._options = options
        self._declare_dead = declare_dead
        self._settings = settings
        self._process = process
        self._sightings = Sightings()
        self._decision = OwnerDecision(options, owners, self._sightings)
        self._background = BackgroundTasks()
        """The membership loop, moves of queues, and probes."""
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
        self._timer: asyncio.TimerHandle | None = None
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
        log.info("silo %s is member %d of its cluster", self.name, self.me.incarnation)
        self._background.start(self._run(), f"headrace membership {self.name}")

    async def _join(self) -> None:
        self._joining = True
        self._me = await self._store.join(self.name, self._address, sorted(self._owners), self._settings, self._process)
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
        await asyncio.gather(*(self._give_back(held) for held in list(self.held.values())), return_exceptions=True)
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
        left = [
            lease for lease in view.leases if self._is_mine(lease) and (lease.provider, lease.queue) not in self.held
        ]
        if left:
            await self._store.release(self.me, left)

    async def undrain(self) -> None:
        """Acquire queues again. Raises StorageError if the store cannot be reached."""
        if self._leaving:
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

    async def _end(self) -> list[Queue]:
        """End all tasks. Return the queues that were not given back."""
        await self._background.aclose()
        lost = sorted(self.held)
        for held in list(self.held.values()):
            self._cut(held, "the silo stops")
        if self._timer is not None:
            self._timer.cancel()
        return lost

    async def _leave_store(self) -> None:
        try:
            await self._store.leave(self.me)
        except HeadraceError as error:
            log.warning("silo %s could not record in its cluster's store that it leaves: %s", self.name, error)

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        period = self._options.period_s
        failing = False
        while not self.superseded.done():
            began = self._loop.time()
            try:
                pause = 0.0 if await self._beat() else period
                if failing:
                    log.info("silo %s reaches its cluster's store again", self.name)
                failing = False
            except HeadraceError as error:
                level = logging.DEBUG if failing else logging.WARNING
                log.log(level, "silo %s serves as long as its leases last: its cluster's store: %s", self.name, error)
                pause, failing = RETRY * period, True
            except Exception:
                log.exception("silo %s: unexpected error in the membership, which goes on", self.name)
                pause = period
            wakes_at = began + pause * self._rng.uniform(0.9, 1.1)
            await asyncio.sleep(max(0.0, min(wakes_at, self._next_end()) - self._loop.time()))

    def _next_end(self) -> float:
        """Return when the next lease of another silo ends. This silo then acts at once, without waiting for the next
        heartbeat."""
        now = self._loop.time()
        leases = [] if self.view is None else [lease for lease in self.view.valid if not self._is_mine(lease)]
        ends = (self._sightings.ends_at(lease) for lease in leases)
        return min((end for end in ends if end > now), default=math.inf)

    async def _beat(self) -> bool:
        """Send a heartbeat, and act on the view that it returns. Return whether to do it again at once."""
        began, me = self._loop.time(), self.me
        try:
            if self._leaving:  # before the heartbeat: a silo that sends heartbeats and does not leave gets queues
                await self._tell_leaving()
            view = await self._store.beat(me, self._options.lease_s)
        except Fenced as fenced:
            if me is not self.me:
                return True  # this silo has joined again in the meantime
            log.warning("%s", fenced)
            if isinstance(fenced, Superseded) and not (self._joining or self.superseded.done()):
                self.superseded.set_exception(fenced)
            for held in list(self.held.values()):
                self._cut(held, "the silo is no longer a member")
            async with self._balancing:
                if not (self._leaving or self.superseded.done()):
                    await self._join()
            return False
        self.view = view = self._sightings.see(view, self._loop.time())
        self._probes.silos = view.silos
        self._renew(view, began)
        self.on_view(view)
        if await self._declare_dead(view):
            return True
        self._probes.start()
        if self._leaving:
            self._give_back_late()
            await self._finish_leaving(view)
            self._drained = not self.held
        else:
            async with self._balancing:
                await self._balance(view)
        return False

    def _renew(self, view: ClusterView, began: float) -> None:
        """Extend the leases that the store has renewed by a call that began at `began`.

        First cut off leases that are over by this process's clock, even if the store renewed them: their deliveries may
        have stopped already. Such a queue is acquired again.
        """
        self._cut_expired()
        mine = {(lease.provider, lease.queue): lease for lease in view.leases if self._is_mine(lease)}
        for queue, held in list(self.held.items()):
            lease = mine.get(queue)
            if lease is not None and lease.epoch == held.lease.epoch:
                held.until = began + self._usable_s
            else:
                self._cut(held, "by the store, its lease is no longer this silo's")
        self._set_timer()

    def _is_mine(self, lease: Lease) -> bool:
        return (lease.owner, lease.incarnation) == (self.me.name, self.me.incarnation)

    @property
    def _usable_s(self) -> float:
        return self._options.lease_s * (1 - MARGIN)

    # ---- leases that end -------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.held:
            self._timer = self._loop.call_at(min(held.until for held in self.held.values()), self._on_timer)

    def _on_timer(self) -> None:
        self._cut_expired()
        self._set_timer()

    def _cut_expired(self) -> None:
        now = self._loop.time()
        for held in list(self.held.values()):
            if held.until <= now:
                self._cut(held, "its lease could not be renewed in time")

    def _cut(self, held: HeldLease, why: str) -> None:
        queue = held.lease.provider, held.lease.queue
        if self.held.get(queue) is not held:
            return
        del self.held[queue]
        log.warning("silo %s loses queue %d of %s: %s", self.name, queue[1], queue[0], why)
        if held.moving is not None:
            held.moving.cancel()
        self._owners[queue[0]].cut(queue[1])

    # ---- moves of queues -------------------------------------------------------------------------------------------

    def why_unserved(self, queues: Sequence[Queue]) -> list[tuple[str, float]]:
        """Return why no silo serves each of these queues, as far as this silo knows, and for how many seconds."""
        if self.view is None or not queues:
            return [("this silo has not seen its cluster yet", 0.0) for _ in queues]
        return self._decision.why_unserved(self.view, self._loop.time(), queues)

    async def _balance(self, view: ClusterView) -> None:
        """Begin the moves that the view requires. A move in progress is completed, whatever later views say; its queue
        is considered again afterwards."""
        taken = {(lease.provider, lease.queue): lease for lease in view.valid}
        desired = self._decision.decide(view, self._loop.time())
        wanted = {queue for queue, silo in desired.now.items() if silo == self.name}
        for queue, held in list(self.held.items()):
            if held.moving is None and queue not in wanted:
                self._begin(held, self._give_up, "gives back")
            elif held.moving is None and not held.started:
                self._begin(held, self._start, "starts")
        # Leases of this silo that it does not hold: it acquired or released them by a call whose answer was lost.
        mine = {queue for queue, lease in taken.items() if self._is_mine(lease) and queue not in self.held}
        if lost := [taken[queue] for queue in sorted(mine - wanted)]:
            await self._store.release(self.me, lost)
        if free := sorted((wanted - taken.keys() - self.held.keys()) | (mine & wanted)):
            over = [lease for lease in view.leases if (lease.provider, lease.queue) in view.over]
            await self._acquire(free, desired.homes, over)
        new_homes = {
            queue: desired.homes[queue]
            for queue in self.held
            if queue in taken and desired.homes[queue] != taken[queue].home
        }
        if new_homes:
            await self._store.settle(self.me, new_homes)

    async def _acquire(self, wanted: Sequence[Queue], homes: Mapping[Queue, str], over: Collection[Lease]) -> None:
        began = self._loop.time()
        new_homes = {queue: homes[queue] for queue in wanted}
        granted = await self._store.acquire(self.me, wanted, self._options.lease_s, new_homes, over)
        until = began + self._usable_s
        if until <= self._loop.time():
            return  # the call took as long as the lease: the next view shows the leases, and they are acquired again
        for lease in granted:
            held = self.held[lease.provider, lease.queue] = HeldLease(lease, until)
            self._begin(held, self._start, "starts")
        self._set_timer()

    async def _start(self, held: HeldLease) -> None:
        lease = held.lease
        await self._owners[lease.provider].gain(lease.queue, lease.epoch, held)
        held.started = True
        log.info("silo %s serves queue %d of %s, epoch %d", self.name, lease.queue, lease.provider, lease.epoch)

    async def _give_up(self, held: HeldLease) -> None:
        lease = held.lease
        held.started = False
        await self._owners[lease.provider].lose(lease.queue, self._drain_s)
        if self.held.pop((lease.provider, lease.queue), None) is held:
            await self._store.release(self.me, [lease])
            log.info("silo %s gave back queue %d of %s", self.name, lease.queue, lease.provider)

    async def _give_back(self, held: HeldLease) -> None:
        """Give a queue back, after the move that is in progress."""
        if held.moving is not None:
            await asyncio.wait([held.moving])
        if self.held.get((held.lease.provider, held.lease.queue)) is held:
            if held.moving is None:
                self._begin(held, self._give_up, "gives back")
            if held.moving is not None:
                await asyncio.wait([held.moving])

    def _give_back_late(self) -> None:
        """Give queues back that were acquired while `drain` began, or that could not be given back before."""
        for held in list(self.held.values()):
            if held.moving is None:
                self._begin(held, self._give_up, "gives back")

    def _begin(self, held: HeldLease, work: Callable[[HeldLease], Coroutine[Any, Any, None]], verb: str) -> None:
        lease = held.lease
        name = f"headrace {self.name} {verb} {lease.provider}/{lease.queue}"
        held.moving = self._background.start(self._move(held, work), name)

    async def _move(self, held: HeldLease, work: Callable[[HeldLease], Coroutine[Any, Any, None]]) -> None:
        lease = held.lease
        try:
            await work(held)
        except HeadraceError as error:
            log.warning("queue %d of %s cannot move yet: %s", lease.queue, lease.provider, error)
        except Exception:
            log.exception("queue %d of %s cannot move yet", lease.queue, lease.provider)
        finally:
            held.moving = None
