"""Whole clusters in one process: silos with their memberships, managers and agents over one control store and one set
of queues, in virtual time, with a seed.

Consumers are processes with the real client, which reach the real services of the silos over a simulated network, in
sessions with the owners of the queues or through a gateway.

`Incidents` has the faults. `Model` has the rules that hold in spite of them: no event is skipped or overtakes another;
no silo serves a queue under an older lease once it was served under a newer one; no event comes again that is stored
as done; and every event that a consumer was told to be saved is stored.

In the end all events are done, and every queue has one owner. If there were only planned moves, each event came exactly
once. If the store only failed for less than a lease, no queue was lost.
"""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from headrace import (
    Event,
    EventBatch,
    HeadraceError,
    RetryPolicy,
    Selector,
    Start,
    StorageError,
    StreamId,
    SubscriptionDefinition,
    Unavailable,
)
from headrace.agents import CacheLimits, Delivery, Edge, Group, HandlerService, Member
from headrace.agents.delivery.assignment import DRAIN_S
from headrace.balancer import Balancer, average, lease_count, ring
from headrace.balancer.cluster_options import ClusterOptions
from headrace.balancer.membership import Membership
from headrace.client.transport import FIRST_PAUSE_S, MAX_PAUSE_S, StreamCall
from headrace.server.access import PEER, Principal
from headrace.server.methods import MethodKind
from headrace.silo.consumer_groups import ConsumerGroups
from headrace.silo.gateway import ClusterGateways
from headrace.silo.opening import ProviderParts
from headrace.silo.options import ProviderOptions
from headrace.silo.placement import ClusterPlacements
from headrace.silo.services.consumer import ConsumerService
from headrace.silo.services.visible import VisibleBounds
from headrace.silo.subscription_host import SubscriptionHost
from headrace.store.control_store import ControlStore
from headrace.streams.backoff import Backoff
from headrace.streams.cluster import ClusterView, SiloRecord
from headrace.streams.frames import DeliveredBatch, split
from headrace.streams.handlers import Handler
from headrace.streams.progress import RefusedProgress
from headrace.streams.subscriptions import Checkpoint, Mode
from tests.cluster.calls import ClientCall, Connection, ask, streamed
from tests.cluster.calls import Handler as CallHandler
from tests.cluster.consumers import PROVIDER, TIMEOUT_S, ConsumerProcess, consumer_of
from tests.cluster.machines import Machine, MachineLoop, Step, wall_ns
from tests.cluster.memory_store import MemoryStore
from tests.cluster.model import Did, Model
from tests.cluster.network import NetworkConditions, StoreConnection
from tests.simulation.clocks import simulated_clocks
from tests.simulation.queues import SimulatedQueues
from tests.simulation.simulation import FailedOnPurposeError, Simulation, WatchedManager

PATIENT = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.05, max_delay_s=0.5)
HASTY = RetryPolicy(max_attempts=2, max_elapsed_s=1e9, initial_delay_s=0.05, max_delay_s=0.5)
LIMITS = CacheLimits(max_events=1000, max_bytes=1 << 20)
KINDS = (
    "planned", "moves", "seeks", "drains", "clocks", "outages", "crashes", "pauses", "blocks", "network", "answers",
    "consumers", "late",
    "everything",
)  # fmt: skip
LONG = "answers", "consumers", "late"
"""Kinds with three times as many steps: their bugs show only a lease after the incident."""
REAL_STORE = 50
"""One of this many seeds runs on the real control store."""
CLOSE_S = 10.0
"""How long a silo that leaves waits for the end of its calls."""
CHECKPOINT_S = 1.0
"""Ten times the default, so that crashes find more unsaved progress."""
LONGEST_S = 10_000.0
"""Longest simulated time of a cluster. A cluster that takes longer is stuck."""
REFUSED = "release", "save_checkpoints", "leaving"
"""Calls to the store that fail each time for a while."""
PROGRESS_S = 300.0
"""Longest time without progress after a cluster is left in peace. A cluster that takes longer is stuck."""
STALL_S = 0.5 * TIMEOUT_S
"""Longest time for which the event loop of a consumer is blocked. Its silos still wait for it."""
CALL_S = 10.0
"""How long a silo waits for the answer of another one."""
CLOCKS = 0.01
"""Largest relative error of the silos' monotonic clocks."""


class SeededService(HandlerService):
    rng: random.Random

    def deliver(self, *args: Any, **options: Any) -> Delivery:
        return super().deliver(*args, rng=self.rng, **options)


class SeededGroup(Group):
    """Tells the world which reports of consumers count."""

    rng = random.Random()
    """Of the present simulation."""
    problem: Callable[[str], None]
    """Of the present simulation."""

    def deliver(self, *args: Any, **options: Any) -> Delivery:
        return super().deliver(*args, rng=self.rng, **options)

    def is_current(self, queue: int, epoch: int, generation: int) -> bool:
        delivery = self.deliveries.get(queue)
        current = super().is_current(queue, epoch, generation)
        if current and (delivery is None or (delivery.queue_epoch, delivery.generation) != (epoch, generation)):
            SeededGroup.problem(f"{self.definition.name}: a report of queue {queue}, epoch {epoch}, counts later")
        return current


class SiloManager(WatchedManager):
    """Tells the cluster which events deliveries give up on, and which queues are cut off."""

    def __init__(self, silo: "Silo", *args: Any, **options: Any) -> None:
        super().__init__(silo.world.rng, *args, **options)
        self.silo = silo
        self._cut = self.queue_host.cut
        self.queue_host.cut = self.checkpointer.on_queue_refused = self._watched_cut

    def _watched_cut(self, queue: int) -> None:
        if not self.silo.machine.gone:
            self.silo.world.cuts += 1
        self._cut(queue)

    def gave_up(self, delivery: Delivery, events: Sequence[Event], *, dead: bool) -> None:
        if not self.silo.machine.gone:
            for event in events:
                assert event.token is not None
                self.silo.world.model.gives_up(delivery.name, delivery.queue, *event.token, self.silo)


class WatchedStore:
    """Tells the model which checkpoints are stored."""

    def __init__(self, store: Any, model: Model) -> None:
        self._store = store
        self._model = model
        self._sought: dict[str, int] = {}
        """Epoch of the last seek that the model knows, by subscription."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save_checkpoints(
        self,
        provider: str,
        progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
        leases: Mapping[int, int] | None = None,
        *,
        revision: int = 0,
    ) -> RefusedProgress:
        refused: RefusedProgress = await self._store.save_checkpoints(provider, progress, leases, revision=revision)
        for name, _, positions in progress:
            if name not in refused.subscriptions:
                written: Mapping[int, Checkpoint] = await self._store.checkpoints(provider, name)
                for queue in positions.keys() - refused.queues:
                    self._model.stores(name, queue, written[queue])
        return refused

    async def seek(self, provider: str, name: str, positions: Mapping[int, Checkpoint], reason: str) -> int:
        epoch: int = await self._store.seek(provider, name, positions, reason)
        generation = await self._store.generation(provider, name)
        if epoch > self._sought.get(name, 0):  # else a later seek is noted already
            self._sought[name] = epoch
            self._model.seeks(name, positions, generation)
        return epoch


class WatchedMembers:
    """Notes the last heartbeat of each silo by the simulation's clock. A silo that is declared dead too early is a
    problem."""

    def __init__(self, store: Any, world: "SimulatedCluster") -> None:
        self._store = store
        self._world = world
        self._heard_at: dict[tuple[str, int], float] = {}
        """By name and incarnation."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def join(self, *args: Any, **options: Any) -> SiloRecord:
        me: SiloRecord = await self._store.join(*args, **options)
        self._heard_at[me.name, me.incarnation] = self._world.now
        return me

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView:
        view: ClusterView = await self._store.beat(me, lease_s)
        self._heard_at[me.name, me.incarnation] = self._world.now
        return view

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, peers: Collection[str]) -> bool:
        is_dead: bool = await self._store.suspect(me, suspect, peers)
        silent_s = self._world.now - self._heard_at[suspect.name, suspect.incarnation]
        if is_dead and silent_s < (1 - CLOCKS) * self._world.options.dead_after_s:
            self._world.problem(f"{suspect.name} is declared dead {silent_s:.3f} s after a heartbeat")
        return is_dead


class SimulatedHost(SubscriptionHost):
    """The silo's provider, as its services need it."""

    origin = "simulated"

    def __init__(self, silo: "Silo", store: Any) -> None:
        world = silo.world
        options = ProviderOptions(name=PROVIDER, queues=world.queues, detach_after_s=0.25)
        super().__init__(
            ProviderParts(options, "shelf", None, store, world.shelf, world, leased=True, delays=None)  # pyright: ignore[reportArgumentType]
        )
        self.manager = self.seeded = SiloManager(
            silo, PROVIDER, world.queues, world.shelf, store, LIMITS, detach_after_s=0.25, leased=True
        )
        self.manager.subscriptions.on_fenced = self._locks.release
        self.manager.subscriptions.may_serve = self._locks.holds


class WatchedEdge(Edge):
    """Tells the model which events a silo sends."""

    def __init__(self, silo: "Silo") -> None:
        super().__init__()
        self._silo = silo

    def put(self, member: Member, frame: bytes) -> None:
        if not self._silo.machine.gone:
            for delivered in split(frame)[0]:
                self._silo.sends(member, delivered)
        super().put(member, frame)


class Silo:
    """A process of the cluster."""

    def __init__(self, world: "SimulatedCluster", name: str) -> None:
        self.world = world
        self.name = name
        rng = world.rng
        self.machine = Machine(name, rate=1 + rng.uniform(-CLOCKS, CLOCKS), starts_at=rng.uniform(0, 10_000))
        self.machine.on_fuse = self._burns
        if world.eye is not None:
            self.machine.watch = partial(world.eye, self)
        self.number = len(world.ever)
        self.killed_at: float | None = None
        self.cut_off = False
        self.congested = False
        self.without_store = False
        self.late_messages = False
        """Messages of consumers take long."""
        self.answers_after_s = 0.0
        self.answered_late = 0
        self.blocks_s = 0.0
        """The next handler blocks the event loop for so long."""
        self.up = False
        self.drained = False
        """The silo was told to give its queues away and to take none again."""
        self.placements = ClusterPlacements()
        self.placements.join(name)
        self.view: ClusterView | None = None
        self._methods: dict[str, CallHandler] = {}
        self._sent_at: dict[tuple[str, int, str], float] = {}
        """When a member of a bound group was sent events of a queue last."""
        self.connections: list[Connection] = []
        self.closing = asyncio.Event()
        self.leaving = asyncio.Event()
        self.wakes = asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        self.manager: SiloManager
        self.membership: Membership
        self.task = self.machine.run(self._run(), f"silo {name}")
        self.task.add_done_callback(self._ended)

    async def _run(self) -> None:
        world = self.world
        store: Any = StoreConnection(world.weather, self, world.store)
        self.host = SimulatedHost(self, store)
        self.manager = self.host.seeded
        self.membership = Membership(
            StoreConnection(world.weather, self, world.leases),  # type: ignore[arg-type]
            self.name,
            address=self.name,
            owners={PROVIDER: self.manager.queue_host},
            peers=self,
            options=world.options,
            on_view=self._take_view,
            rng=world.rng,
        )
        self.membership.superseded.add_done_callback(self._superseded)
        await self._until_done(self.membership.join)
        self.manager.start()
        serving = asyncio.create_task(self._serve(), name="serve")
        edge = WatchedEdge(self)
        async with ConsumerGroups.opened(self.host, TIMEOUT_S, edge) as consumers:  # pyright: ignore[reportArgumentType]
            providers: Any = {PROVIDER: self.host}
            gateways = ClusterGateways(self, edge.budget, world.options.drain_s)
            self.service = ConsumerService(providers, {PROVIDER: consumers}, VisibleBounds(), gateways)
            for each in self.service.methods():
                streams = each.kind is MethodKind.STREAM
                self._methods[each.name.removeprefix("headrace.v1.")] = (
                    each.handler if streams else streamed(each.handler)
                )
            self.up = True
            await self.leaving.wait()
            serving.cancel()
            self.closing.set()
            with suppress(Unavailable):  # what could not be saved comes again
                await self.membership.leave()
            self.up = False
            await self._finish_calls()
            await self.service.aclose()
        with suppress(StorageError):
            await self.manager.aclose(1.0)
        world.note(f"{self.name} has left")

    async def _finish_calls(self) -> None:
        """Wait for calls of consumers, and break those off that take too long."""
        handling = [connection.handling for connection in self.connections if connection.handling is not None]
        if handling:
            await asyncio.wait(handling, timeout=CLOSE_S)
        for connection in list(self.connections):
            connection.break_off()

    async def _serve(self) -> None:
        """All subscriptions, those that come, too."""
        served = set[str]()
        while True:
            self.wakes.clear()
            for definition in self.world.definitions:
                if definition.name not in served:
                    await self._until_done(lambda definition=definition: self._serve_one(definition))
                    served.add(definition.name)
            await self.wakes.wait()

    async def _serve_one(self, definition: SubscriptionDefinition) -> None:
        if definition.name not in self.world.grouped:
            service = SeededService(Handler.of(self._handler(definition.name), batch=False), None, 3)
            service.rng = self.world.rng
            await self.host.serve(definition, service)

    def _superseded(self, told: asyncio.Future[None]) -> None:
        if not (self.machine.gone or told.cancelled()):
            self.world.problem(f"{self.name}: {told.exception()}, and there is no other")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.machine.gone and not task.cancelled() and (error := task.exception()):
            self.world.problem(f"{self.name} failed: {error!r}")

    def _burns(self, step: Step) -> None:
        self.world.crashed_at.update(step.path())
        self.world.kill(self)

    async def _until_done(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await call()
            except (StorageError, Unavailable):
                await asyncio.sleep(0.1)

    @property
    def changing(self) -> bool:
        """Whether the silo is being drained or undrained."""
        return self._change is not None and not self._change.done()

    def change(self, how: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._change = self.machine.run(how(), f"drains {self.name}")

    async def drain(self) -> None:
        """Drain the silo. An unavailable store is no error: the silo is drained later all the same."""
        self.drained = True
        with suppress(Unavailable):
            await self.membership.drain()

    async def undrain(self) -> None:
        await self._until_done(self.membership.undrain)
        self.drained = False

    async def reach(self, silo: SiloRecord) -> bool:
        """Whether the other silo answers. Takes the place of `Peers` of a real silo."""
        await asyncio.sleep(self.world.rng.random() * 0.2)
        other = self.world.silos.get(silo.name)
        return not (other is None or other.machine.gone or other.machine.paused or other.cut_off or self.cut_off)

    # ---- events that it hands out ----------------------------------------------------------------------------------

    def epoch(self, queue: int) -> int:
        return (self.manager.leases or {}).get(queue, -1)

    def _handler(self, subscription: str) -> Callable[[Event], Coroutine[Any, Any, None]]:
        async def handle(event: Event) -> None:
            world, rng, token = self.world, self.world.rng, event.token
            assert event.stream is not None
            assert token is not None
            queue = world.queue_of(event.stream)
            if not self.machine.gone:
                world.model.sends(subscription, queue, token.offset, (token.index,), self.epoch(queue), self.name)
                world.model.hands_out(subscription, queue, token.offset, (token.index,), self)
            if self.blocks_s:
                await self._block()
            await asyncio.sleep(rng.choice((0, 0, 0.01, 0.3)) * rng.random())
            if rng.random() < 0.02:
                raise FailedOnPurposeError
            if not self.machine.gone:
                world.model.finishes(subscription, queue, token.offset, (token.index,), self)

        return handle

    async def _block(self) -> None:
        """Block the event loop: whatever happens meanwhile, this goes on first."""
        seconds, self.blocks_s = self.blocks_s, 0.0
        self.world.note(f"a handler blocks {self.name} for {seconds:.2f} s")
        self.machine.pause()
        self.world.later(seconds, self.machine.resume)
        await asyncio.sleep(0)

    def sends(self, member: Member, delivered: DeliveredBatch) -> None:
        """To a member of a group."""
        served = (
            (name, one) for name, one in self.manager.served.items()
            if isinstance(one.service, Group) and one.service.members.get(member.id) is member
        )  # fmt: skip
        name, one = next(served, ("", None))
        if one is None:
            return  # its subscription moves, and its deliveries stop
        queue, offset = delivered.queue, delivered.batch.offset
        delivery = one.deliveries.get(queue)
        if delivery is None or delivery.generation < self.world.model.generations[name]:
            return  # this silo has not heard of the seek
        if one.definition.mode is Mode.BOUND:
            self._check_bound(one.service, member, queue)
        indexes = range(delivered.batch.count) if delivered.indexes is None else delivered.indexes
        self.world.model.sends(name, queue, offset, indexes, self.epoch(queue), self.name)

    def _check_bound(self, group: object, member: Member, queue: int) -> None:
        """Only one member at a time has events of a queue, or a member keeps them for longer than it may."""
        assert isinstance(group, Group)
        now = asyncio.get_running_loop().time()
        for other in group.members.values():
            sent_at = self._sent_at.get((group.definition.name, queue, other.id), 0.0)
            if other is not member and any(key[0] == queue for key in other.in_flight) and now - sent_at < DRAIN_S:
                self.world.problem(f"{group.definition.name}: {other.id} and {member.id} have events of queue {queue}")
        self._sent_at[group.definition.name, queue, member.id] = now

    # ---- calls of consumers and of other silos ---------------------------------------------------------------------

    def connect(
        self, client: Machine, principal: Principal, method: str, *, cut_off: Callable[[], bool], wait_s: float = 0.0
    ) -> ClientCall:
        """Begin a call of this silo. `wait_s` is the caller's deadline; 0: it has none."""
        world, weather = self.world, self.world.weather

        def latency_s() -> float:
            if client is self.machine:
                return 0.0
            return weather.slow_s if self.late_messages else weather.latency_s

        connection = Connection(world, client, self.machine, lambda: cut_off() or self.cut_off, latency_s, self.name)
        if self.machine.gone or not self.up:
            connection.break_off()
        else:
            self.connections = [each for each in self.connections if not each.is_broken]
            self.connections.append(connection)
            connection.ends_at = world.now + wait_s if wait_s else None
            connection.begin(self._methods[method], principal, self.closing)
        return ClientCall(connection)

    def stream(self, silo: str, method: str) -> StreamCall:
        """Begin a call of this silo's gateways. With `call`, takes the place of `ClusteredSilo`."""
        return self._call(silo, method, 0.0)

    async def call(self, silo: str, method: str, request: bytes) -> bytes:
        return await ask(self._call(silo, method, CALL_S), request, CALL_S)

    async def read_view(self) -> None:
        view = await StoreConnection(self.world.weather, self, self.world.leases).view()
        self._take_view(view if self.view is None else view.keeping_expired(self.view))

    def _take_view(self, view: ClusterView) -> None:
        self.view = view
        self.placements.update(view)

    def _call(self, silo: str, method: str, wait_s: float) -> ClientCall:
        other = self.world.silos.get(silo)
        if other is None:
            raise Unavailable(f"there is no silo {silo!r}")
        return other.connect(
            self.machine, PEER, method, cut_off=lambda: self.cut_off and other is not self, wait_s=wait_s
        )


Eye = Callable[[Silo, Step], None]
"""Sees every step of every silo, before it is taken."""


class SimulatedCluster(Simulation):
    """A cluster of silos, and their consumers."""

    def __init__(self, rng: random.Random, kind: str, *, real: bool, eye: "Eye | None" = None) -> None:
        super().__init__(rng)
        self.eye = eye
        self.settling = False
        self.kind = kind
        self.real = real
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MachineLoop)
        self.loop: MachineLoop = loop
        self.silos: dict[str, Silo] = {}
        self.ever: list[Silo] = []
        self.consumers: list[ConsumerProcess] = []
        self.definitions: list[SubscriptionDefinition] = []
        self.grouped = set[str]()
        """Subscriptions whose events remote consumers get."""
        self.crashed_at = set[tuple[str, int]]()
        self.cuts = 0
        self.store_s = 1e6
        """How far the store's clock is off: it starts anywhere, and is set."""
        self.losses: list[float] = []
        """When silos and consumers were killed, and connections lost."""
        self.unsaved_s = 0.0
        """The longest time between an event being done and the next loss, of those that came again."""
        self.model = Model(self.problem, lambda: self.now, self._comes_again)
        SeededGroup.rng, SeededGroup.problem = rng, self.problem

    async def open(self) -> None:
        rng, kind = self.rng, self.kind
        self.queues = rng.choice((1, 3, 6))
        period = rng.choice((0.5, 1.0))
        balancer: Balancer = rng.choice((lease_count, ring, average))
        leases = (6, 15) if kind in ("outages", "moves", "answers") else (3, 6, 15)
        self.options = ClusterOptions(
            period_s=period, lease_s=rng.choice(leases) * period, dead_after_s=rng.choice((2, 5)) * period,
            maturity_s=rng.choice((0.0, 3.0, 30.0)), drain_s=5.0, balancer=balancer,
        )  # fmt: skip
        self.weather = NetworkConditions(rng, latency_s=rng.choice((0.0, 0.01, 0.2)), slow_s=1.2 * self.options.lease_s)
        if kind in ("pauses", "network", "everything"):
            self.weather.slow = rng.choice((0.0, 0.05, 0.2))
        if kind == "answers":  # taking a lease takes long: its owner may have renewed it late meanwhile
            self.weather.slow = rng.choice((0.05, 0.2))
        if kind in ("network", "everything"):
            self.weather.loss = rng.choice((0.0, 0.02, 0.2))
        if kind in ("outages", "moves"):
            self.weather.timeout_s = 0.2 * period
            self.weather.latency_s = min(self.weather.latency_s, 0.05)
        self.shelf = SimulatedQueues(self.queues, rng)
        store: Any = await ControlStore.open("memory") if self.real else MemoryStore()
        self.store = WatchedStore(store, self.model)
        self.leases = WatchedMembers(store.cluster(self._store_us), self)
        for name in ("one", "two")[: rng.choice((1, 2))]:
            await self.subscribe(name)

    async def subscribe(self, name: str) -> None:
        """From here on."""
        retry = self.rng.choice((PATIENT, PATIENT, HASTY))
        grouped = self.rng.random() < 0.5 or self.kind in ("consumers", "late")
        mode = self.rng.choice((Mode.SHARED, Mode.SHARED, Mode.BOUND, Mode.BROADCAST)) if grouped else Mode.SHARED
        mode = Mode.SHARED if self.kind == "late" else mode
        definition = SubscriptionDefinition(
            name=name, selector=Selector("s/*"), retry=retry, mode=mode, start=Start.of("earliest")
        )
        if grouped:
            self.grouped.add(name)
        start = {queue: Checkpoint((await self.shelf.bounds(queue)).next) for queue in range(self.queues)}
        if mode is Mode.BROADCAST:
            start = {}  # its consumers have positions
        await self.store.create_subscription(PROVIDER, definition, start)
        self.model.subscribed(name)
        self.definitions.append(definition)
        if name in self.grouped:
            for number in range(self.rng.choice((1, 2, 3))):
                self.consumers.append(consumer_of(self, f"{name}-{number}", definition))
        for silo in self.silos.values():
            silo.wakes.set()

    def _store_us(self, _: object) -> int:
        return round((self.now + self.store_s) * 1e6)

    @property
    def now(self) -> float:
        return self.loop.now

    def call_at(self, when: float, callback: Callable[[], Any]) -> None:
        """In no machine."""
        self.loop.outside_at(when, callback)

    def later(self, seconds: float, callback: Callable[[], Any]) -> None:
        self.loop.outside_at(self.now + seconds, callback)

    def _comes_again(self, what: str, did: Did, who: Any) -> None:
        """If processes were only killed, and connections lost, that was soon after the event was done: otherwise it was
        saved. A consumer process never gets an event again that it has acknowledged."""
        if did.who is who and getattr(who, "remembers", False):
            self.problem(f"{what} comes again to the process that acknowledged it")
        if self.kind not in ("planned", "moves", "crashes") or getattr(who, "keeps_positions", False):
            return
        gaps_s = [max(0.0, at - did.at) for at in self.losses if at >= did.sent_at]
        if not gaps_s:
            self.problem(f"{what} comes again, and {did.who.name} did it, and nothing was lost since it was sent")
            return
        gap_s = min(gaps_s)
        self.unsaved_s = max(self.unsaved_s, gap_s)
        if gap_s > self.save_within_s + getattr(did.who, "reports_within_s", 0.0):
            self.problem(f"{what} comes again, and was done {gap_s:.3f} s before anything was killed or lost")

    @property
    def save_within_s(self) -> float:
        """Seconds after which progress is saved.

        It waits for a checkpoint, which may wait for another one to be written, and is written itself.
        """
        return CHECKPOINT_S * (1 + CLOCKS) + 2 * 2 * self.weather.latency_s + 0.001

    def queue_of(self, stream: StreamId) -> int:
        return sum(stream.key.encode()) % self.queues

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        return (self.queue_of(stream),)

    async def publish(self, stream: StreamId, events: int) -> None:
        queue, first = self.queue_of(stream), self.model.published[stream]
        payloads = [str(first + number).encode() for number in range(events)]
        self.model.publishes(queue, (await self.shelf.bounds(queue)).next, stream, events)
        await self.shelf.enqueue([(queue, EventBatch.of(stream, payloads))])

    @property
    def left(self) -> int:
        """Number of events that are not done."""
        shared = [one.name for one in self.definitions if one.mode is not Mode.BROADCAST]
        own = [one.stored_as for one in self.consumers if one.stored_as != one.definition.name and not one.vanished]
        return self.model.left([*shared, *own])

    def owners(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {queue: [] for queue in range(self.queues)}
        for silo in self.silos.values():
            for queue in silo.manager.leases or {} if silo.up else ():
                found[queue].append(silo.name)
        return found

    @property
    def settled(self) -> bool:
        return not self.left and not self.unsettled()

    def unsettled(self) -> str:
        """Return the first difference from the state that a cluster has at rest, or an empty text."""
        owners = self.owners()
        if any(len(names) != 1 for names in owners.values()):
            return f"the owners are {owners}"
        held = Counter(name for names in owners.values() for name in names)
        if idle := [name for name, silo in self.silos.items() if silo.drained and held[name]]:
            return f"the drained silos {idle} have queues: {dict(held)}"
        shares = [held[name] for name, silo in self.silos.items() if not silo.drained]
        even = max(shares) - min(shares) <= 1 or self.options.balancer is ring
        return "" if even else f"the queues are spread as {dict(held)}"

    # ---- silos come and go -----------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.note(f"start {name}")
        silo = self.silos[name] = Silo(self, name)
        self.ever.append(silo)

    def kill(self, silo: Silo) -> None:
        self.note(f"kill {silo.name}")
        silo.machine.kill()
        silo.killed_at = self.now
        self.losses.append(self.now)
        if self.silos.get(silo.name) is silo:
            del self.silos[silo.name]
        for other in (silo, *self.silos.values()):
            for connection in other.connections:
                if silo.machine in (connection.silo, connection.client):
                    connection.break_off()

    async def leave(self, name: str) -> None:
        self.note(f"{name} leaves")
        silo = self.silos[name]
        silo.leaving.set()
        while not (silo.task.done() or silo.machine.gone):  # a task that is killed never ends  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if self.silos.get(name) is silo:
            del self.silos[name]

    async def clear(self) -> None:
        """Clear the killed machines away, without any effect."""
        for each in (*self.ever, *self.consumers):
            each.machine.bury()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]
        for _ in range(5):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=10.0) if tasks else None
            tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]
        await self.store.aclose()


class Incidents:
    """Random events in the life of a cluster."""

    def __init__(self, world: SimulatedCluster) -> None:
        self.world = world
        self.rng = world.rng
        self._names = count()
        self._numbers = count()
        self._down: list[str] = []
        self._calm_until = 0.0
        self._under_way: list[asyncio.Task[None]] = []

    async def go_on(self, steps: int) -> None:
        world, rng = self.world, self.rng
        steps *= 3 if world.kind in LONG else 1
        for _ in range(rng.choice((2, 4) if world.kind in ("answers", "late") else (1, 2, 4))):
            world.start(f"silo-{next(self._names)}")
        if world.kind == "outages":
            await self._all_served()
        for step in range(steps):
            if world.problems:
                return
            await self._publish()
            if rng.random() < 0.3:
                await self._happen()
            if step == steps // 2 and rng.random() < 0.3:
                await world.subscribe("three")
            await asyncio.sleep(rng.choice((0.0, 0.2, 2.0)) * rng.random())

    async def _all_served(self) -> None:
        for _ in range(1000):
            await asyncio.sleep(0.1)
            if all(silo.up for silo in self.world.silos.values()) and not self.world.unsettled():
                break
        await asyncio.sleep(self.world.options.lease_s)
        self.world.cuts = 0

    async def _publish(self) -> None:
        for _ in range(self.rng.choice((1, 3))):
            stream = StreamId("s", str(self.rng.randrange(self.rng.choice((2, 12)))))
            await self.world.publish(stream, self.rng.choice((1, 1, 3, 10)))

    async def _happen(self) -> None:
        world, rng = self.world, self.rng
        name = rng.choice(list(world.silos)) if world.silos else ""
        what = rng.choice(_HAPPENINGS[world.kind])
        if what == "start" or not name:
            if len(world.silos) < 5:
                self._start()
        elif what == "leave":
            if len(world.silos) > 1 and world.silos[name].up:
                self._down.append(name)
                await world.leave(name)
        elif what == "kill":
            self._down.append(name)
            world.kill(world.silos[name])
        elif what == "drain":
            self._drain(world.silos[name])
        elif what == "fuse":
            self._down.append(name)
            world.silos[name].machine.fuse = rng.randrange(1, 1000)
        elif what == "wall clock":
            world.silos[name].machine.wall_s += rng.choice((-1, 1)) * 10 ** rng.uniform(-1, 7)
        elif what == "store clock":
            by_s = rng.choice((-1, 1)) * 10 ** rng.uniform(-1, 5)
            world.note(f"the store's clock is set by {by_s:.1f} s")
            world.store_s += by_s
        elif what == "short outage" and world.now < self._calm_until:
            pass  # two that follow one another are a long one
        elif what in ("vanish", "break", "stall"):
            self._consumers(what)
        elif what == "block":
            world.silos[name].blocks_s = self._duration(what)
        elif what == "seek":
            self._seek(world.silos[name])
        else:
            self._under_way.append(asyncio.create_task(self.pass_by(what, world.silos[name]), name=f"{what} {name}"))

    def _start(self) -> None:
        down = [name for name in self._down if name not in self.world.silos]
        name = self.rng.choice(down) if down and self.rng.random() < 0.7 else f"silo-{next(self._names)}"
        if name in self._down:
            self._down.remove(name)
        self.world.start(name)

    def _drain(self, silo: Silo) -> None:
        """Or the other way round; one silo is left to serve."""
        working = [other for other in self.world.silos.values() if other.up and not other.drained]
        if not silo.up or silo.changing or (not silo.drained and len(working) < 2):
            return
        what = "undrain" if silo.drained else "drain"
        self.world.note(f"{what} {silo.name}")
        silo.change(silo.undrain if silo.drained else silo.drain)

    def _seek(self, silo: Silo) -> None:
        """Move a subscription with remote consumers."""
        world = self.world
        found = [one.name for one in world.definitions if one.name in world.grouped and one.mode is not Mode.BROADCAST]
        if not found or not silo.up:
            return
        name, start = self.rng.choice(found), self.rng.choice(("earliest", "earliest", "latest"))

        async def seek() -> None:
            with suppress(HeadraceError):  # it may be carried out all the same
                await silo.host.seek(name, start)

        world.note(f"{silo.name} moves {name} to {start}")
        silo.machine.run(seek(), "seek")

    def _consumers(self, what: str) -> None:
        world = self.world
        present = [consumer for consumer in world.consumers if not consumer.vanished]
        if not present:
            return
        consumer = self.rng.choice(present)
        world.note(f"{what} {consumer.name}")
        if what == "vanish":
            consumer.vanish()
            name = f"{consumer.definition.name}-again-{next(self._numbers)}"
            world.consumers.append(consumer.heir(name))
        elif what == "stall":
            consumer.stall(STALL_S * self.rng.random())
        else:
            consumer.lose_connections()

    async def pass_by(self, what: str, silo: Silo) -> None:
        world = self.world
        seconds = self._duration(what)
        world.note(f"{what} {silo.name} for {seconds:.2f} s")
        self._calm_until = world.now + seconds + 3 * world.options.period_s
        if what == "late answer":
            silo.answers_after_s, what = self._late_s(), "cut off"
            await self._answered(silo)
        if what == "congestion":  # and then nothing gets through
            silo.congested = True
            await asyncio.sleep(seconds)
            silo.congested, what = False, "cut off"
        if what == "pause":
            silo.machine.pause()
        elif what == "cut off":
            silo.cut_off = True
        elif what == "late messages":
            silo.late_messages, silo.without_store = True, world.kind == "late" or self.rng.random() < 0.5
        elif what == "refused call":
            world.weather.refuses = self.rng.choice(REFUSED)
        else:
            world.weather.outage = True
        await asyncio.sleep(seconds)
        world.note(f"{what} {silo.name} is over")
        if what == "pause":
            silo.machine.resume()
        elif what == "cut off":
            silo.cut_off = False
        elif what == "late messages":
            silo.late_messages = silo.without_store = False
        elif what == "refused call":
            world.weather.refuses = ""
        else:
            world.weather.outage = False

    def _duration(self, what: str) -> float:
        options, weather = self.world.options, self.world.weather
        if what == "late answer":
            return self.rng.uniform(0.5, 1.5) * options.lease_s
        if self.world.kind == "late":
            return self.rng.uniform(1.2, 2.5) * options.lease_s
        if what != "short outage":
            return self.rng.choice((0.5, 1.2, 3.0)) * self.rng.random() * options.lease_s
        # The last renewal is a period old, the next one is tried within a quarter, and every call takes its time.
        late_s = 1.6 * options.period_s + weather.timeout_s + 4 * weather.latency_s
        return (0.88 * options.lease_s - late_s) * self.rng.random()

    async def _answered(self, silo: Silo) -> None:
        """Until a renewal was answered late, and the silo cut off, or it is gone."""
        before = silo.answered_late  # not `answers_after_s`, which the next one may have set by the time one looks
        while silo.answered_late == before and self.world.silos.get(silo.name) is silo:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _late_s(self) -> float:
        """Return a delay of an answer close to the longest after which a silo still relies on its lease."""
        options, weather = self.world.options, self.world.weather
        late_s = 0.88 * options.lease_s - 1.4 * options.period_s - 3 * weather.latency_s
        return max(0.001, late_s * self.rng.uniform(0.5, 1.0))

    @property
    def under_way(self) -> list[str]:
        """Names of the disturbances that are not over yet."""
        return [task.get_name() for task in self._under_way if not task.done()]

    async def settle(self) -> None:
        """Left in peace, everything is done, and every queue has one owner."""
        world = self.world
        world.settling = True
        if self._under_way:
            await asyncio.wait(self._under_way)
        for silo in list(world.silos.values()):
            silo.machine.fuse = 0
        world.weather.loss, world.weather.slow, world.weather.outage, world.weather.refuses = 0.0, 0.0, False, ""
        if all(silo.drained for silo in world.silos.values()):
            self._start()
        world.note("settle")
        while (left := world.left) and not world.problems:  # a pull of a few events from several silos takes seconds
            await self._wait(PROGRESS_S, lambda left=left: world.left < left)
            if world.left == left:
                break
        if world.left and not world.problems:
            world.problem(f"{world.left} events are never finished; owners {world.owners()}")
        await self._wait_for_rest(2 * world.options.maturity_s + 3 * world.options.lease_s)
        if not world.problems and (what := world.unsettled()):
            world.problem(f"at rest {what}")
        unharmed = all(silo.killed_at is None for silo in world.ever)
        if unharmed and world.kind in ("planned", "moves") and world.model.again:
            world.problem(f"{world.model.again} events came twice, and all moves were planned")
        if unharmed and world.kind in ("planned", "outages") and world.cuts:
            world.problem(f"{world.cuts} queues were lost for no reason")
        await self._look_at_dead_letters()

    async def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        for _ in range(round(2 * seconds)):
            if until() or self.world.problems:
                return
            await asyncio.sleep(0.5)

    async def _wait_for_rest(self, seconds: float) -> None:
        """Until all has been as it should for longer than a lease, but no longer than it may take."""
        quiet_s = 0.0
        for _ in range(round(2 * seconds)):
            await asyncio.sleep(0.5)
            quiet_s = quiet_s + 0.5 if self.world.settled else 0.0
            if quiet_s > 1.2 * self.world.options.lease_s or self.world.problems:
                return

    async def _look_at_dead_letters(self) -> None:
        letters = await self.world.store.dead_letters(PROVIDER, limit=1_000_000)
        kept = {(letter.subscription, letter.queue, *letter.token) for letter in letters}
        if lost := self.world.model.given_up - kept:
            self.world.problem(f"given up on, and no dead letter: {sorted(lost)}")


_HAPPENINGS: dict[str, Sequence[str]] = {
    "planned": ("start", "leave", "leave", "wall clock", "stall"),
    "moves": ("start", "drain", "drain", "drain", "short outage", "short outage", "refused call"),
    "seeks": ("start", "leave", "kill", "seek", "seek", "seek", "break"),
    "drains": ("start", "drain", "drain", "drain", "outage", "outage", "refused call"),
    "clocks": ("start", "leave", "kill", "pause", "cut off", "store clock", "store clock", "store clock"),
    "outages": ("short outage", "short outage", "wall clock"),
    "crashes": ("start", "start", "start", "leave", "kill", "fuse", "fuse", "vanish", "break"),
    "pauses": ("start", "leave", "pause", "pause", "wall clock"),
    "blocks": ("start", "leave", "block", "block", "stall"),
    "network": ("start", "leave", "cut off", "outage", "congestion", "congestion", "break"),
    "answers": ("start", "late answer", "late answer"),
    "late": ("start", "leave", "late messages", "late messages", "late messages"),
    "consumers": ("start", "leave", "vanish", "vanish", "vanish", "late messages", "late messages", "break"),
    "everything": (
        "start", "start", "start", "leave", "kill", "fuse", "pause", "cut off", "outage", "vanish", "break",
        "congestion", "late answer", "wall clock", "block", "stall", "refused call",
    ),
}  # fmt: skip


async def _simulate(rng: random.Random, kind: str, steps: int, real: bool, eye: Eye | None) -> SimulatedCluster:
    world = SimulatedCluster(rng, kind, real=real, eye=eye)
    await world.open()
    life = Incidents(world)
    try:
        async with asyncio.timeout(LONGEST_S):
            await life.go_on(steps)
            await life.settle()
    except TimeoutError:
        world.problem(f"stuck; what has not passed: {life.under_way or 'nothing'}")
    finally:
        await world.clear()
    return world


def simulate(
    seed: int, *, kind: str = "everything", steps: int = 30, real: bool | None = None, eye: Eye | None = None
) -> SimulatedCluster:
    rng = random.Random(f"{kind}/{seed}")
    real = seed % REAL_STORE == 0 if real is None else real
    with simulated_clocks(checkpoint_s=CHECKPOINT_S) as patch:
        for name in ("redriver.REDRIVE_S", "control_requests.POLL_S", "subscription_runner.RETRY_S"):
            patch.setattr(f"headrace.agents.{name}", 5.0)  # no requests come here
        for name in ("routing", "owners", "transport"):
            backoff = partial(Backoff, FIRST_PAUSE_S, MAX_PAUSE_S, rng=rng)
            patch.setattr(f"headrace.client.{name}.reconnect_backoff", backoff)
        patch.setattr("headrace.silo.consumer_groups.Group", SeededGroup)
        patch.setattr("headrace.client.handling.monotonic", lambda: asyncio.get_running_loop().time())
        patch.setattr("time.time_ns", wall_ns)
        return _run(rng, kind, steps, real, eye)


def _run(rng: random.Random, kind: str, steps: int, real: bool, eye: Eye | None) -> SimulatedCluster:
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=MachineLoop) as runner:
            return runner.run(_simulate(rng, kind, steps, real, eye))
    finally:
        if collects:
            gc.enable()
