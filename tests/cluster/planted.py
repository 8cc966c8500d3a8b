"""Bugs that a cluster must not have, planted on purpose: the simulation has to find each of them."""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from headrace import SequenceToken, StorageError
from headrace.agents import Delivery, Group, PullingManager
from headrace.agents.checkpointer import Checkpointer
from headrace.agents.cursor import CursorState, StreamCursor
from headrace.agents.delivery.assignment import QueueAssignment
from headrace.agents.delivery.confirmations import QueueReports, ReportMark
from headrace.agents.delivery.group_delivery import GroupDelivery
from headrace.agents.delivery.progress import DeliveryProgress
from headrace.agents.queue_host import QueueHost
from headrace.balancer.held_leases import HeldLeases
from headrace.balancer.membership import Membership
from headrace.balancer.sightings import Sightings
from headrace.client.handling import RemoteHandling
from headrace.client.holdings import ConsumerHoldings
from headrace.client.links import SiloLink
from headrace.client.received import TAKEN, ReceivedBatch
from headrace.client.routing import Router
from headrace.client.unconfirmed import UnconfirmedAcknowledgements
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.consumer_groups import AttachedConsumer, ConsumerGroups
from headrace.silo.gateway import ClusterGateways, GatewaySession
from headrace.silo.placement import LeaseOwner
from headrace.silo.services import consumer_session
from headrace.silo.services.consumer_session import ConsumerSession
from headrace.silo.services.consumer_target import ConsumerKey
from headrace.silo.services.pulling import PullingConsumer
from headrace.store.rows import position_token
from headrace.streams.cluster import ClusterView, Lease, SiloRecord
from headrace.streams.subscriptions import Checkpoint, Mode
from tests.cluster.memory_store import MemoryClusterStore


def no_fencing(stack: ExitStack) -> None:
    """A silo whose lease is over goes on, and the store accepts its writes."""
    begin = PullingManager.__init__

    def begin_unfenced(
        manager: PullingManager, provider: str, queues: int, adapter: Any, store: Any, *args: Any, **options: Any
    ) -> None:
        unfenced: Any = _Unfenced(store)
        begin(manager, provider, queues, adapter, unfenced, *args, **options)

    stack.enter_context(patch.object(PullingManager, "__init__", begin_unfenced))
    stack.enter_context(patch.object(Delivery, "over", property(lambda delivery: delivery._stopping)))
    stack.enter_context(patch.object(HeldLeases, "_on_timer", _ignore))


def _ignore(_: object) -> None: ...


class _Unfenced:
    def __init__(self, store: Any) -> None:
        self._store = store

    def save_checkpoints(self, provider: str, progress: Any, leases: object = None, *, revision: int = 0) -> Any:
        return self._store.save_checkpoints(provider, progress, revision=revision)

    def add_dead_letters(self, letters: Any, epoch: int | None, leases: object = None) -> Any:
        return self._store.add_dead_letters(letters, epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def release_before_drain(stack: ExitStack) -> None:
    """The next owner may begin while the former one still delivers."""

    lose = QueueHost.lose
    losing = set[asyncio.Task[None]]()

    async def lose_later(host: QueueHost, queue: int, drain_s: float) -> None:
        losing.add(asyncio.create_task(lose(host, queue, drain_s)))

    stack.enter_context(patch.object(QueueHost, "lose", lose_later))


def checkpoint_of_the_maximum(stack: ExitStack) -> None:
    """The checkpoint has the furthest position, and leaves out the streams that are behind."""

    def furthest(progress: DeliveryProgress) -> Checkpoint:
        return Checkpoint(progress.position)

    stack.enter_context(patch.object(DeliveryProgress, "checkpoint", furthest))


def lease_from_the_answer(stack: ExitStack) -> None:
    """A lease is counted from when its renewal is answered, not from before it was asked for."""
    renew = HeldLeases.renew

    def renew_late(leases: HeldLeases, mine: Mapping[tuple[str, int], Lease], began: float) -> None:
        renew(leases, mine, asyncio.get_running_loop().time())

    stack.enter_context(patch.object(HeldLeases, "renew", renew_late))


def lease_by_the_wall_clock(stack: ExitStack) -> None:
    """A lease is counted by a clock that can be set."""
    for timed in (Membership, HeldLeases):
        stack.enter_context(patch.object(timed, "__init__", _with_wall_clock(timed.__init__)))


def _with_wall_clock(begin: Callable[..., None]) -> Callable[..., None]:
    def begin_with_wall_clock(timed: Any, *args: Any, **options: Any) -> None:
        begin(timed, *args, **options)
        timed._loop = _WallClock(timed._loop)

    return begin_with_wall_clock


class _WallClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return time.time_ns() / 1e9 + self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, when - self.time()), callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def start_from_what_was_known(stack: ExitStack) -> None:
    """A queue that comes is served from where its checkpoints were when this process last saw them."""

    begin = PullingManager.__init__

    def begin_with_old_positions(manager: PullingManager, *args: Any, **options: Any) -> None:
        begin(manager, *args, **options)

        async def gain(queue: int, epoch: int, term: Any) -> None:
            manager.state.gain(queue, epoch, term)

        stack.enter_context(patch.object(manager.queue_host, "gain", gain))

    stack.enter_context(patch.object(PullingManager, "__init__", begin_with_old_positions))


def done_when_handed_out(stack: ExitStack) -> None:
    """Events that were handed out count as done."""
    needed = DeliveryProgress.needed

    def needed_behind_it(progress: DeliveryProgress, cursor: StreamCursor) -> SequenceToken:
        token = needed(progress, cursor)
        return SequenceToken(token.offset + 1) if cursor.state is CursorState.RUNNING else token

    stack.enter_context(patch.object(DeliveryProgress, "needed", needed_behind_it))


def leaving_is_told_once(stack: ExitStack) -> None:
    """A drain whose calls fail is not repeated, and leases that the store still has are not released."""
    begin = Membership.__init__

    def begin_telling_once(membership: Membership, store: Any, *args: Any, **options: Any) -> None:
        telling_once: Any = _TellsOnce(store)
        begin(membership, telling_once, *args, **options)

    stack.enter_context(patch.object(Membership, "__init__", begin_telling_once))


class _TellsOnce:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._released = set[tuple[str, int, int]]()

    async def leaving(self, me: SiloRecord) -> None:
        with suppress(StorageError):
            await self._store.leaving(me)

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None:
        first = [lease for lease in held if (lease.provider, lease.queue, lease.epoch) not in self._released]
        self._released.update((lease.provider, lease.queue, lease.epoch) for lease in first)
        if first:
            await self._store.release(me, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def lease_by_the_clock_of_the_store(stack: ExitStack) -> None:
    """A lease is over when the store's clock says so, as it was before silos timed the leases of others."""
    keep, look, grant, see = (
        MemoryClusterStore.keep,
        MemoryClusterStore.look,
        MemoryClusterStore.grant,
        Sightings.see,
    )
    kept_us: dict[tuple[str, int], int] = {}

    def is_over(store: MemoryClusterStore, lease: Lease) -> bool:
        return kept_us[lease.provider, lease.queue] + lease.length_us <= store.now(None)

    def keep_timed(store: MemoryClusterStore, lease: Lease) -> None:
        kept_us[lease.provider, lease.queue] = store.now(None)
        keep(store, lease)

    def look_timed(store: MemoryClusterStore, now: int) -> ClusterView:
        view = look(store, now)
        over = frozenset((lease.provider, lease.queue) for lease in view.leases if is_over(store, lease))
        return view._replace(over=over)

    def grant_timed(store: MemoryClusterStore, me: SiloRecord, queue: Any, _: Any, home: str) -> Any:
        lease = store.leases.get(queue)
        ended = (lease.epoch, lease.renewals) if lease is not None and is_over(store, lease) else None
        return grant(store, me, queue, ended, home)

    def see_timed(sightings: Sightings, view: ClusterView, now: float) -> ClusterView:
        return see(sightings, view, now)._replace(over=view.over)

    stack.enter_context(patch.object(MemoryClusterStore, "keep", keep_timed))
    stack.enter_context(patch.object(MemoryClusterStore, "look", look_timed))
    stack.enter_context(patch.object(MemoryClusterStore, "grant", grant_timed))
    stack.enter_context(patch.object(Sightings, "see", see_timed))


def taken_unseen(stack: ExitStack) -> None:
    """A lease is taken although its owner renewed it after this silo looked."""
    grant = MemoryClusterStore.grant

    def grant_always(store: MemoryClusterStore, me: SiloRecord, queue: Any, ended: Any, home: str) -> Any:
        lease = store.leases.get(queue)
        return grant(store, me, queue, (lease.epoch, lease.renewals) if ended and lease else ended, home)

    stack.enter_context(patch.object(MemoryClusterStore, "grant", grant_always))


def death_by_the_clock_of_the_store(stack: ExitStack) -> None:
    """How long a silo was not heard of is counted by the clock of the store."""
    now_us: dict[int, int] = {}
    see = Sightings.see

    def see_timed(sightings: Sightings, view: ClusterView, now: float) -> ClusterView:
        now_us[id(sightings)] = view.now_us
        return see(sightings, view, now)

    def silent_by_store(sightings: Sightings, silo: SiloRecord, _: float) -> float:
        return (now_us[id(sightings)] - silo.heartbeat_at_us) / 1e6

    def timed_by_store(_: Sightings, view: ClusterView, now: float) -> list[SiloRecord]:
        return [*view.silos]

    stack.enter_context(patch.object(Sightings, "see", see_timed))
    stack.enter_context(patch.object(Sightings, "silent_s", silent_by_store))
    stack.enter_context(patch.object(Sightings, "timed", timed_by_store))


def moves_that_do_not_wait(stack: ExitStack) -> None:
    """A planned move does not wait for consumers' acknowledgements."""
    stop = GroupDelivery.stop

    async def stop_at_once(delivery: GroupDelivery, drain_s: float) -> None:
        await stop(delivery, 0.0)

    stack.enter_context(patch.object(GroupDelivery, "stop", stop_at_once))


def release_after_a_failed_save(stack: ExitStack) -> None:
    """A queue is given back although its last progress could not be stored."""
    save = Checkpointer.save_stopped

    async def save_or_not(checkpointer: Checkpointer, done: Any) -> None:
        with suppress(StorageError):
            await save(checkpointer, done)

    stack.enter_context(patch.object(Checkpointer, "save_stopped", save_or_not))


def reports_of_an_older_generation_count(stack: ExitStack) -> None:
    """The generation before the present one is accepted in reports."""
    is_current = Group.is_current

    def is_nearly_current(group: Group, queue: int, epoch: int, generation: int) -> bool:
        return any(is_current(group, queue, epoch, each) for each in (generation, generation + 1))

    stack.enter_context(patch.object(Group, "is_current", is_nearly_current))


def saved_before_the_store_has_it(stack: ExitStack) -> None:
    """Reports are confirmed when the progress is read, before it is stored."""
    mark = QueueReports.mark

    def mark_and_confirm(reports: QueueReports, progress: DeliveryProgress) -> list[ReportMark]:
        marks = mark(reports, progress)
        for each in marks:
            each.confirm({})
        return marks

    stack.enter_context(patch.object(QueueReports, "mark", mark_and_confirm))


def progress_is_saved_rarely(stack: ExitStack) -> None:
    """More events come again after a crash than a checkpoint a second allows."""
    save = Checkpointer.save

    async def save_rarely(checkpointer: Checkpointer) -> None:
        await asyncio.sleep(3)
        await save(checkpointer)

    stack.enter_context(patch.object(Checkpointer, "save", save_rarely))


def reports_of_an_older_epoch_count(stack: ExitStack) -> None:
    """The epoch before the present one is accepted in reports."""
    is_current = Group.is_current

    def is_nearly_current(group: Group, queue: int, epoch: int, generation: int) -> bool:
        return any(is_current(group, queue, each, generation) for each in (epoch, epoch + 1))

    stack.enter_context(patch.object(Group, "is_current", is_nearly_current))


def acknowledgements_end_with_the_session(stack: ExitStack) -> None:
    """A consumer forgets its unconfirmed acknowledgements when their session ends."""
    stack.enter_context(patch.object(UnconfirmedAcknowledgements, "add", _add_nothing))


def _add_nothing(_: UnconfirmedAcknowledgements, __: object) -> None: ...


def owners_are_learned_once(stack: ExitStack) -> None:
    """A consumer does not follow the placement after it has heard of it once."""
    router_class: Any = Router
    place = router_class._place

    def place_once(router: Any) -> None:
        if not router._owners.is_known:
            place(router)

    stack.enter_context(patch.object(Router, "_place", place_once))


def former_owners_are_believed(stack: ExitStack) -> None:
    """What a former owner of a queue still delivers is handed out, too."""

    def served(holdings: Any, _: object, number: int) -> Any:
        queue = holdings._queues.get(number)
        return (None, {}, False) if queue is None else (queue, queue.lines, queue.recognises)

    stack.enter_context(patch.object(ConsumerHoldings, "_served", served))
    stack.enter_context(patch.object(SiloLink, "void", _void_nothing))


def _void_nothing(_: SiloLink, __: int) -> None: ...


def gateways_confirm_what_they_sent(stack: ExitStack) -> None:
    """A gateway confirms reports when it has passed them on."""
    request = GatewaySession.request

    def request_and_confirm(session: Any, link: SiloLink) -> pb.SubscribeRequest | None:
        passed = request(session, link)
        for report in passed.reports if passed is not None else ():
            saved = pb.Saved(queue=report.queue, epoch=report.epoch, number=report.number)
            session._add(pb.SubscribeResponse(saved=[saved]))
        return passed

    stack.enter_context(patch.object(GatewaySession, "request", request_and_confirm))


def gateways_report_to_the_owner_they_know(stack: ExitStack) -> None:
    """A gateway passes reports of consumers that pull to the owner of its last view, also if that is older."""

    def owner_of_the_view(gateways: ClusterGateways, key: ConsumerKey, queue: int) -> LeaseOwner:
        owner = gateways.placements.owner(key.provider, queue)
        return owner._replace(epoch=1 << 62)  # as if no report could be newer

    stack.enter_context(patch.object(ClusterGateways, "_owner", owner_of_the_view))


def bound_queues_go_at_once(stack: ExitStack) -> None:
    """With mode bound, a queue goes to another member although the former one holds events of it."""
    assign = QueueAssignment.assign

    def assign_at_once(assignment: QueueAssignment, members: Any, here: Any, _: Any, now: float) -> list[int]:
        return assign(assignment, members, here, (), now)

    stack.enter_context(patch.object(QueueAssignment, "assign", assign_at_once))


def broadcast_is_shared(stack: ExitStack) -> None:
    """With mode broadcast, the consumers at a silo are one group."""
    join = ConsumerGroups.join

    async def join_shared(consumers: Any, definition: Any, consumer: str, *args: Any, **options: Any) -> Any:
        names = [name for name in consumers._groups if name.startswith(f"{definition.name}~")]
        if definition.mode is not Mode.BROADCAST or not names or args[1] is not None:
            return await join(consumers, definition, consumer, *args, **options)
        group = consumers._groups[names[0]]
        options = {key: value for key, value in options.items() if value}
        return AttachedConsumer(group, group.join(consumer, consumers.timeout(args[0]), **options))

    stack.enter_context(patch.object(ConsumerGroups, "join", join_shared))


def releases_are_tried_once(stack: ExitStack) -> None:
    """A lease whose release failed is not released again, and is renewed for ever."""
    begin = Membership.__init__

    def begin_releasing_once(membership: Membership, store: Any, *args: Any, **options: Any) -> None:
        releasing_once: Any = _ReleasesOnce(store)
        begin(membership, releasing_once, *args, **options)

    stack.enter_context(patch.object(Membership, "__init__", begin_releasing_once))


class _ReleasesOnce:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._released = set[tuple[str, int, int]]()

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None:
        first = [lease for lease in held if (lease.provider, lease.queue, lease.epoch) not in self._released]
        self._released.update((lease.provider, lease.queue, lease.epoch) for lease in first)
        if first:
            await self._store.release(me, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def the_time_of_leases_is_not_checked(stack: ExitStack) -> None:
    """Only a timer ends a delivery whose lease is over. After a blocked event loop the timer is late."""
    stack.enter_context(patch.object(Delivery, "lost", property(lambda delivery: delivery._lost)))


def pulled_events_are_kept_for_ever(stack: ExitStack) -> None:
    """Events that were pulled and not acknowledged stay in flight, and a consumer that does not call any more stays."""
    begin = PullingConsumer.__init__

    def begin_without_timeout(pulling: Any, *args: Any) -> None:
        begin(pulling, *args)
        pulling._timeout_s = 1e9

    stack.enter_context(patch.object(PullingConsumer, "__init__", begin_without_timeout))


def handled_before_the_handler_ends(stack: ExitStack) -> None:
    """A client acknowledges a batch when its handler begins."""
    handling_class: Any = RemoteHandling
    step = handling_class._step

    async def acknowledge_and_step(handling: RemoteHandling, batch: ReceivedBatch) -> None:
        batch.holder.acknowledge(batch)
        batch.state = TAKEN
        await step(handling, batch)

    stack.enter_context(patch.object(RemoteHandling, "_step", acknowledge_and_step))


def confirmations_without_positions(stack: ExitStack) -> None:
    """A client that keeps positions is told that its acknowledgements are saved, but not the position after them."""
    stack.enter_context(patch.object(ConsumerSession, "_can_confirm", _confirm_always))


def _confirm_always(_: ConsumerSession, __: int) -> bool:
    return True


def positions_leave_streams_out(stack: ExitStack) -> None:
    """The position that a client keeps leaves out the streams that are behind."""

    def furthest(checkpoint: Checkpoint) -> bytes:
        return position_token(Checkpoint(checkpoint.next_offset))

    stack.enter_context(patch.object(consumer_session, "position_token", furthest))


BUGS: Mapping[str, Callable[[ExitStack], None]] = {
    "no fencing": no_fencing,
    "release before drain": release_before_drain,
    "checkpoint of the maximum": checkpoint_of_the_maximum,
    "lease from the answer": lease_from_the_answer,
    "lease by the wall clock": lease_by_the_wall_clock,
    "start from what was known": start_from_what_was_known,
    "done when handed out": done_when_handed_out,
    "leaving is told once": leaving_is_told_once,
    "lease by the clock of the store": lease_by_the_clock_of_the_store,
    "taken unseen": taken_unseen,
    "death by the clock of the store": death_by_the_clock_of_the_store,
    "moves that do not wait": moves_that_do_not_wait,
    "release after a failed save": release_after_a_failed_save,
    "reports of an older generation count": reports_of_an_older_generation_count,
    "saved before the store has it": saved_before_the_store_has_it,
    "progress is saved rarely": progress_is_saved_rarely,
    "reports of an older epoch count": reports_of_an_older_epoch_count,
    "acknowledgements end with the session": acknowledgements_end_with_the_session,
    "owners are learned once": owners_are_learned_once,
    "former owners are believed": former_owners_are_believed,
    "gateways confirm what they sent": gateways_confirm_what_they_sent,
    "gateways report to the owner they know": gateways_report_to_the_owner_they_know,
    "bound queues go at once": bound_queues_go_at_once,
    "broadcast is shared": broadcast_is_shared,
    "releases are tried once": releases_are_tried_once,
    "the time of leases is not checked": the_time_of_leases_is_not_checked,
    "pulled events are kept for ever": pulled_events_are_kept_for_ever,
    "handled before the handler ends": handled_before_the_handler_ends,
    "confirmations without positions": confirmations_without_positions,
    "positions leave streams out": positions_leave_streams_out,
}


@contextmanager
def planted(bug: str) -> Generator[None]:
    with ExitStack() as stack:
        BUGS[bug](stack)
        yield
