"""A silo as a member of its cluster: it says that it lives, holds leases of queues, and moves queues where the balancer
wants them.

One loop asks the store once a period: a heartbeat, the renewal of all leases, and the view of the cluster are one
transaction. What follows from the view is decided by pure functions (`balancers`, `maturity`), by every silo alike.

A lease counts from this process's own clock as it was before the call that got or renewed it, so here it is over before
it is for anybody else, however long an answer took and however the clocks differ. A call that fails changes nothing
until then. Whoever was stopped for longer (SIGSTOP, a machine that slept) finds its leases over, and cuts its queues
off before it does anything else with them; what it had in flight is refused by epoch.

A planned move: stop receiving, drain, checkpoint (all `QueueOwner.lose`), release. Meanwhile the lease is renewed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..streams.cluster import LIVING, ClusterView, Lease, SiloRecord, Superseded
from ..streams.errors import Fenced, HeadraceError, InvalidArgument, StorageError
from .balancers import lease_count
from .maturity import standing
from .placement import Balancer, Placement, homes

log = logging.getLogger("headrace.balancer")

Queue = tuple[str, int]
"""Provider and queue."""

MARGIN = 0.1
"""This part of a lease is not used: cutting a queue off takes time, too."""
RETRY = 0.25
"""After a call to the store that failed, the next one comes after this part of a period."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Times of a cluster, in seconds: the same for all its silos."""

    period_s: float = 1.0
    """How often a silo says that it lives, and looks."""
    lease_s: float = 15.0
    """How long nobody else gets the queues of a silo that is gone."""
    dead_after_s: float = 10.0
    """A silo of which nothing was heard for so long, and that its peers cannot reach, is declared dead."""
    maturity_s: float = 30.0
    """How long a newcomer waits before it takes queues over. Longer than the restart of a silo takes."""
    drain_s: float = 10.0
    """How long what is in flight may take to end when a queue moves."""
    balancer: Balancer = lease_count
    fixed: Sequence[str] = ()
    mapping: Mapping[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        if not 0 < 3 * self.period_s <= self.lease_s:
            raise InvalidArgument(
                f"a lease of {self.lease_s:g} s with a period of {self.period_s:g} s: at least three periods, so that "
                "one call that fails loses nothing"
            )
        if self.dead_after_s < 2 * self.period_s:
            raise InvalidArgument(f"dead_after_s is {self.dead_after_s:g} s: at least two periods of {self.period_s:g}")


class LeaseStore(Protocol):
    """Of `headrace.streams.cluster_store.ClusterStore`, what a member needs."""

    async def join(self, name: str, address: str, serves: Sequence[str]) -> SiloRecord: ...

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView: ...

    async def acquire(
        self, me: SiloRecord, wanted: Sequence[Queue], lease_s: float, homes: Mapping[Queue, str]
    ) -> list[Lease]: ...

    async def settle(self, me: SiloRecord, homes: Mapping[Queue, str]) -> None: ...

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None: ...

    async def leaving(self, me: SiloRecord) -> None: ...

    async def leave(self, me: SiloRecord) -> None: ...

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, dead_after_s: float) -> bool: ...


class Term(Protocol):
    """How long a lease lasts, by this process's clock."""

    until: float
    """Loop time. It moves on as the lease is renewed."""


class QueueOwner(Protocol):
    """Who serves the queues of one provider in this process."""

    queues: int

    async def gain(self, queue: int, epoch: int, term: Term) -> None:
        """Serve a queue from where its checkpoints are now, while its term lasts. What it raises is tried again."""
        ...

    async def lose(self, queue: int, drain_s: float) -> None:
        """Receive no more, let what is in flight end within `drain_s` seconds, and save exactly what is done."""
        ...

    def cut(self, queue: int) -> None:
        """The lease is over: stop at once. Nothing that is done from now on counts."""
        ...


class Peers(Protocol):
    """The way to the other silos."""

    async def reach(self, silo: SiloRecord) -> bool:
        """Whether it answers by itself. Takes a bounded time."""
        ...


Bury = Callable[[ClusterView], Awaitable[bool]]
"""Where the system tells which silos are gone: declares those dead, and says whether there were any."""


async def nobody(_: ClusterView) -> bool:
    return False


class Held:
    """A lease as this process counts it."""

    __slots__ = ("lease", "moving", "started", "until")

    def __init__(self, lease: Lease, until: float) -> None:
        self.lease = lease
        self.until = until
        """Loop time."""
        self.started = False
        """Its owner serves it."""
        self.moving: asyncio.Task[None] | None = None
        """Being started, or stopped and released."""


class Membership:
    """This silo in its cluster, between `join` and `leave`. All on one loop."""

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        *,
        address: str,
        owners: Mapping[str, QueueOwner],
        peers: Peers,
        options: ClusterOptions,
        bury: Bury = nobody,
        rng: random.Random | None = None,
    ) -> None:
        self.on_view: Callable[[ClusterView], None] = lambda _: None
        """Called with the cluster as it was just seen."""
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its error says that another process has the silo's name, which ends this one's membership."""
        self.name = name
        self.held: dict[Queue, Held] = {}
        self.view: ClusterView | None = None
        """The cluster as it was last seen."""
        self._store = store
        self._address = address
        self._owners = owners
        self._peers = peers
        self._options = options
        self._bury = bury
        self._rng = rng or random.Random()  # noqa: S311 (spreads load)
        self._loop = asyncio.get_running_loop()
        self._balancing = asyncio.Lock()
        """Held while it gets queues: who gives them all back waits for those that it asked for."""
        self._me: SiloRecord | None = None
        self._joining = False
        """It asked to join, and does not know the answer: who superseded it may be itself."""
        self._running: asyncio.Task[None] | None = None
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = False
        self._drain_s = options.drain_s

    @property
    def me(self) -> SiloRecord:
        """This run of the silo, as it is known in the cluster."""
        assert self._me is not None
        return self._me

    async def join(self) -> None:
        """Become a member; queues come by and by. Raises StorageError where the store cannot be reached."""
        await self._join()
        log.info("silo %s is member %d of its cluster", self.name, self.me.incarnation)
        self._running = self._loop.create_task(self._run(), name=f"headrace membership {self.name}")

    async def _join(self) -> None:
        self._joining = True
        self._me = await self._store.join(self.name, self._address, sorted(self._owners))
        self._joining = False

    async def leave(self) -> None:
        """Give all queues back in order, and go. What the store does not hear of runs out by itself."""
        try:
            await self.drain()
        finally:
            await self._end()
        await self._told(self._store.leave(self.me))

    async def drain(self, drain_s: float | None = None) -> None:
        """Give all queues back in order, and get no more: it stays a member that has none.

        `drain_s` is how long what is in flight may take to end, where not as long as with other moves.
        """
        self._leaving = True
        self._drain_s = self._options.drain_s if drain_s is None else drain_s
        await self._told(self._store.leaving(self.me))
        async with self._balancing:
            pass  # what was asked for before is here by now
        await asyncio.gather(*(self._give_back(held) for held in list(self.held.values())), return_exceptions=True)

    async def undrain(self) -> None:
        """Get queues again. Raises StorageError where the store cannot be reached."""
        if self._leaving:
            await self._join()
            self._leaving, self._drain_s = False, self._options.drain_s

    @property
    def leaving(self) -> bool:
        """It gets no more queues."""
        return self._leaving

    async def _end(self) -> None:
        tasks = [self._running, *self._probing.values(), *(held.moving for held in self.held.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for held in list(self.held.values()):
            self._cut(held, "the silo stops")
        if self._timer is not None:
            self._timer.cancel()

    async def _told(self, call: Awaitable[None]) -> None:
        try:
            await call
        except HeadraceError as error:
            log.warning("silo %s could not tell its cluster that it leaves: %s", self.name, error)

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
                log.exception("silo %s: the membership failed, and goes on", self.name)
                pause = period
            await asyncio.sleep(max(0.0, began + pause * self._rng.uniform(0.9, 1.1) - self._loop.time()))

    async def _beat(self) -> bool:
        """Whether to look again at once."""
        began, me = self._loop.time(), self.me
        try:
            view = await self._store.beat(me, self._options.lease_s)
        except Fenced as fenced:
            if me is not self.me:
                return True  # it has joined again meanwhile
            log.warning("%s", fenced)
            if isinstance(fenced, Superseded) and not (self._joining or self.superseded.done()):
                self.superseded.set_exception(fenced)
            for held in list(self.held.values()):
                self._cut(held, "the silo is no member any more")
            if not (self._leaving or self.superseded.done()):
                await self._join()
            return False
        self.view = view
        self._renewed(view, began)
        self.on_view(view)
        if await self._bury(view):
            return True
        self._suspect(view)
        if self._leaving:
            self._give_back_late()
        else:
            async with self._balancing:
                await self._balance(view)
        return False

    def _renewed(self, view: ClusterView, began: float) -> None:
        mine = {(lease.provider, lease.queue): lease for lease in view.leases if self._is_mine(lease, view)}
        for queue, held in list(self.held.items()):
            lease = mine.get(queue)
            if lease is not None and lease.epoch == held.lease.epoch:
                held.until = began + self._usable_s
            else:
                self._cut(held, "the store says that it is not this silo's any more")
        self._set_timer()

    def _is_mine(self, lease: Lease, view: ClusterView) -> bool:
        same = (lease.owner, lease.incarnation) == (self.me.name, self.me.incarnation)
        return same and lease.expires_at_us > view.now_us

    @property
    def _usable_s(self) -> float:
        return self._options.lease_s * (1 - MARGIN)

    # ---- leases that are over --------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.held:
            self._timer = self._loop.call_at(min(held.until for held in self.held.values()), self._look_at_time)

    def _look_at_time(self) -> None:
        now = self._loop.time()
        for held in list(self.held.values()):
            if held.until <= now:
                self._cut(held, "it could not be renewed in time")
        self._set_timer()

    def _cut(self, held: Held, why: str) -> None:
        queue = held.lease.provider, held.lease.queue
        if self.held.get(queue) is not held:
            return
        del self.held[queue]
        log.warning("silo %s loses queue %d of %s: %s", self.name, queue[1], queue[0], why)
        if held.moving is not None:
            held.moving.cancel()
        self._owners[queue[0]].cut(queue[1])

    # ---- queues move -----------------------------------------------------------------------------------------------

    async def _balance(self, view: ClusterView) -> None:
        """Begin what the view asks for. A queue that moves goes on moving, whatever later views say, and is looked at
        again afterwards."""
        valid = [lease for lease in view.leases if lease.expires_at_us > view.now_us and lease.owner]
        taken = {(lease.provider, lease.queue): lease for lease in valid}
        wanted, at_home = self._wanted(view, taken)
        for queue, held in list(self.held.items()):
            if held.moving is None and queue not in wanted:
                self._begin(held, self._moved_out, "gives back")
            elif held.moving is None and not held.started:
                self._begin(held, self._started, "starts")
        # Also what it got or gave back without having heard of it.
        mine = {queue for queue, lease in taken.items() if self._is_mine(lease, view) and queue not in self.held}
        if lost := [taken[queue] for queue in sorted(mine - wanted)]:
            await self._store.release(self.me, lost)
        if free := sorted((wanted - taken.keys() - self.held.keys()) | (mine & wanted)):
            await self._acquire(free, at_home)
        moved_home = {
            queue: at_home[queue] for queue in self.held if queue in taken and at_home[queue] != taken[queue].home
        }
        if moved_home:
            await self._store.settle(self.me, moved_home)

    def _wanted(self, view: ClusterView, taken: Mapping[Queue, Lease]) -> tuple[set[Queue], dict[Queue, str]]:
        """The queues that this silo should have; and for every queue the silo that should have it for good, "" where
        that is nobody."""
        wanted, at_home = set[Queue](), dict[Queue, str]()
        for provider, owner in self._owners.items():
            placement = self._placement(view, provider, owner.queues, taken)
            for queue, silo in self._options.balancer(placement).items():
                if silo == self.name:
                    wanted.add((provider, queue))
            found = homes(self._options.balancer, placement)
            at_home.update({(provider, queue): found.get(queue, "") for queue in range(owner.queues)})
        return wanted, at_home

    def _placement(self, view: ClusterView, provider: str, queues: int, taken: Mapping[Queue, Lease]) -> Placement:
        options = self._options
        owners = {queue: lease.owner for (of, queue), lease in taken.items() if of == provider}
        at_home = {lease.queue: lease.home for lease in view.leases if lease.provider == provider and lease.home}
        there = standing(
            view.silos, provider, view.now_us,
            known={*at_home.values()}, maturity_s=options.maturity_s, silent_s=options.lease_s,
        )  # fmt: skip
        return Placement(
            there.members, range(queues), owners, at_home, there.away, there.newcomers, options.fixed, options.mapping
        )

    async def _acquire(self, wanted: Sequence[Queue], at_home: Mapping[Queue, str]) -> None:
        began = self._loop.time()
        theirs = {queue: at_home[queue] for queue in wanted}
        for lease in await self._store.acquire(self.me, wanted, self._options.lease_s, theirs):
            held = self.held[lease.provider, lease.queue] = Held(lease, began + self._usable_s)
            self._begin(held, self._started, "starts")
        self._set_timer()

    async def _started(self, held: Held) -> None:
        lease = held.lease
        await self._owners[lease.provider].gain(lease.queue, lease.epoch, held)
        held.started = True
        log.info("silo %s serves queue %d of %s, epoch %d", self.name, lease.queue, lease.provider, lease.epoch)

    async def _moved_out(self, held: Held) -> None:
        lease = held.lease
        held.started = False
        await self._owners[lease.provider].lose(lease.queue, self._drain_s)
        if self.held.pop((lease.provider, lease.queue), None) is held:
            await self._store.release(self.me, [lease])
            log.info("silo %s gave back queue %d of %s", self.name, lease.queue, lease.provider)

    async def _give_back(self, held: Held) -> None:
        """After what goes on with it."""
        if held.moving is not None:
            await asyncio.wait([held.moving])
        if self.held.get((held.lease.provider, held.lease.queue)) is held:
            if held.moving is None:
                self._begin(held, self._moved_out, "gives back")
            if held.moving is not None:
                await asyncio.wait([held.moving])

    def _give_back_late(self) -> None:
        """What was granted while it began to leave, and what could not be given back."""
        for held in list(self.held.values()):
            if held.moving is None:
                self._begin(held, self._moved_out, "gives back")

    def _begin(self, held: Held, work: Callable[[Held], Coroutine[Any, Any, None]], what: str) -> None:
        lease = held.lease
        name = f"headrace {self.name} {what} {lease.provider}/{lease.queue}"
        held.moving = self._loop.create_task(self._moving(held, work), name=name)

    async def _moving(self, held: Held, work: Callable[[Held], Coroutine[Any, Any, None]]) -> None:
        lease = held.lease
        try:
            await work(held)
        except HeadraceError as error:
            log.warning("queue %d of %s cannot move yet: %s", lease.queue, lease.provider, error)
        except Exception:
            log.exception("queue %d of %s cannot move yet", lease.queue, lease.provider)
        finally:
            held.moving = None

    # ---- silos that are silent -------------------------------------------------------------------------------------

    def _suspect(self, view: ClusterView) -> None:
        """Look for oneself at whoever was not heard for half of the time after which it is declared dead."""
        silent_us = self._options.dead_after_s * 500_000
        for silo in view.silos:
            silent = silo.state in LIVING and view.now_us - silo.heartbeat_at_us > silent_us
            if silent and silo.name != self.name and silo.name not in self._probing:
                task = self._loop.create_task(self._probe(silo), name=f"headrace probe {silo.name}")
                self._probing[silo.name] = task
                task.add_done_callback(lambda _, name=silo.name: self._probing.pop(name, None))

    async def _probe(self, silo: SiloRecord) -> None:
        try:
            if await self._peers.reach(silo):
                return
            if await self._store.suspect(self.me, silo, self._options.dead_after_s):
                log.warning("silo %s is dead: nothing is heard of it, and its peers cannot reach it", silo.name)
        except StorageError as error:
            log.warning("silo %s cannot vote against silo %s: %s", self.name, silo.name, error)
        except HeadraceError as error:
            log.info("silo %s cannot vote against silo %s: %s", self.name, silo.name, error)
