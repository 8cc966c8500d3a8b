"""The pulling manager: the agents of one provider in this process, and the durable side of what they do.

It turns subscriptions into deliveries, saves their checkpoints (one transaction for all of them), records dead
letters and gaps, and lets the queue technology delete what everybody has finished. Every write carries the
subscription's epoch, so that an owner that was superseded is refused.

In a cluster it serves the queues of which the silo has leases (`gain`, `lose`, `cut`: it is the `QueueOwner` of
`headrace.balancer`), and every write carries the epochs of those, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..adapters.seam import Gap, QueueAdapter
from ..streams.errors import Busy, Closed, Fenced, HeadraceError, InvalidArgument, NotFound, Unavailable
from ..streams.events import Event
from ..streams.handlers import EventFilter, Handler
from ..streams.identity import SequenceToken, StreamId
from ..streams.store import Attachment, ControlStore, Refused
from ..streams.subscriptions import Checkpoint, DeadLetter, GapRecord, SubscriptionDefinition
from .agent import AgentStatistics, CacheLimits, PullingAgent
from .delivery import Delivery, FailureSink, Term, described
from .handling import HandlerDelivery

log = logging.getLogger("headrace.agents")

CHECKPOINT_S = 0.1
"""So often what is done is saved, in seconds: what was done since comes again after a crash."""
RARELY_S, SHARE = 1.0, 0.05
"""Where saving takes long, it gets this share of the time; but it is done so often at least."""
REDRIVE_S = 1.0
LOOK_S = 1.0
"""In a cluster: how often to see what was asked of whoever serves a subscription or a queue, at another silo."""
RETENTION_S = 5.0
MAX_REDRIVES = 16
"""Dead letters of a subscription that are delivered once more at a time."""
STOP_S = 10.0
"""How long what is in flight of a queue may take to end that is stopped at another silo."""
ACKNOWLEDGE_S = 0.02
"""How often queues that cannot rewind are told what is finished: it frees their bounded capacity."""


class Service(Protocol):
    """Who works on a subscription's events: handlers in this process, or the members of a group."""

    @property
    def stored(self) -> bool:
        """Whether the control store keeps its progress; otherwise whoever consumes does."""
        ...

    def deliver(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        sink: FailureSink,
        *,
        epoch: int,
        term: Term | None,
        rewindable: bool,
    ) -> Delivery:
        """A delivery for one queue, from the checkpoint on."""
        ...

    def gap(self, record: GapRecord) -> None:
        """Events were gone before they were delivered."""
        ...

    def lost(self, queue: int, *, saved: bool) -> None:
        """The lease of a queue is given back, with all that was done `saved`, or it is over."""
        ...

    def moved(self, moves: int) -> None:
        """The subscription's position is moved, for the time that `moves` counts."""
        ...

    def saving(self) -> Callable[[], None]:
        """Progress was read just now and is about to be saved; what is returned is called once that is durable."""
        ...

    async def fenced(self, error: HeadraceError) -> None:
        """The subscription was taken over elsewhere; nothing of it runs here any more."""
        ...

    async def completed(self, limit_s: float) -> None:
        """The subscription was closed or deleted; nothing of it runs here any more. Returns within `limit_s`
        seconds."""
        ...


class HandlerService(NamedTuple):
    """Handlers in this process."""

    handler: Handler
    predicate: EventFilter | None
    concurrency: int
    stored: bool = True

    def deliver(
        self, definition: SubscriptionDefinition, queue: int, checkpoint: Checkpoint, sink: FailureSink, **options: Any
    ) -> Delivery:
        return HandlerDelivery(
            definition, queue, checkpoint, self.handler, sink,
            predicate=self.predicate, concurrency=self.concurrency, **options,
        )  # fmt: skip

    def gap(self, record: GapRecord) -> None: ...

    def lost(self, queue: int, *, saved: bool) -> None: ...

    def moved(self, moves: int) -> None: ...

    def saving(self) -> Callable[[], None]:
        return _nothing

    async def fenced(self, error: HeadraceError) -> None:
        if self.handler.on_error is not None:
            try:
                await self.handler.on_error(error)
            except Exception:
                log.exception("on_error raised")

    async def completed(self, limit_s: float) -> None:
        if self.handler.on_completed is None:
            return
        completing = asyncio.ensure_future(self.handler.on_completed())
        try:
            await asyncio.wait([completing], timeout=limit_s)
        finally:
            completing.cancel()
        if not completing.done():
            log.warning("on_completed did not end within %.1f s", limit_s)
        elif not completing.cancelled() and (error := completing.exception()):
            log.error("on_completed raised", exc_info=error)


def _nothing() -> None: ...


class Served(NamedTuple):
    """A subscription that is served here."""

    definition: SubscriptionDefinition
    epoch: int
    service: Service
    deliveries: dict[int, Delivery]
    """By queue, of those whose agents are not stopped."""
    saved: dict[int, Checkpoint]
    """What is stored of each queue, so that only changes are written."""


class PullingManager:
    """Agents for the queues 0 to N-1 of a provider. All on one loop; `start` before use, `aclose` after."""

    def __init__(
        self,
        provider: str,
        queues: int,
        adapter: QueueAdapter,
        store: ControlStore,
        limits: CacheLimits,
        *,
        detach_after_s: float,
        leased: bool = False,
    ) -> None:
        """With `leased`, a queue is read while it has a lease: from `gain` to `lose` or `cut`."""
        self.provider = provider
        self.queues = queues
        self.leases: dict[int, int] | None = {} if leased else None
        """Epoch by queue; None where all queues are this process's."""
        self.served: dict[str, Served] = {}
        self._adapter = adapter
        self._store = store
        self._rewindable = adapter.capabilities.rewindable
        self._durable = adapter.capabilities.durable
        self._limits = limits
        self._detach_after_s = detach_after_s
        self.agents = [self._agent(queue) for queue in range(queues)]
        self.stopped: set[int] = set()
        """Queues whose agents were stopped, until they are started again."""
        self._gaps: list[GapRecord] = []
        self._saving = asyncio.Lock()
        self._changing = asyncio.Lock()
        """Held while agents stop and start: who stops a subscription meanwhile waits for what they have done."""
        self._obeying = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._redriving: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._cutting: set[asyncio.Task[Any]] = set()
        self._giving: set[asyncio.Task[None]] = set()
        self._losing: dict[int, tuple[float, asyncio.Future[None]]] = {}
        """Queues that are to be given back, how long they may drain, and who waits for that."""
        self._unsaved: dict[int, dict[tuple[str, int], Checkpoint]] = {}
        """What was done of queues that are not read any more, by subscription and epoch, until it is saved."""
        self._terms: dict[int, Term] = {}
        """Of the leases, by queue."""
        self._acknowledged: dict[int, int] = {}
        self.on_fenced: Callable[[str], None] = lambda _: None
        """Called with the name of a subscription that was taken over elsewhere, once nothing of it runs here."""
        self.moves: Callable[[str], Awaitable[int]] = _never
        """How often a subscription, by its name, was moved so far."""

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(_supervise(self.save, CHECKPOINT_S), name=f"headrace checkpoints {self.provider}"),
            asyncio.create_task(_supervise(self._redrive, REDRIVE_S), name=f"headrace redrives {self.provider}"),
            asyncio.create_task(_supervise(self.retain, RETENTION_S), name=f"headrace retention {self.provider}"),
        ]
        if self.leases is not None:
            work = _supervise(self.obey, LOOK_S)
            self._tasks.append(asyncio.create_task(work, name=f"headrace orders {self.provider}"))
        if not self._rewindable:
            work = _supervise(self.acknowledge, ACKNOWLEDGE_S)
            self._tasks.append(asyncio.create_task(work, name=f"headrace acknowledgements {self.provider}"))

    async def aclose(self, drain_s: float) -> None:
        """Stop reading, let running handlers end within `drain_s` seconds, save exactly what is done."""
        for task in self._tasks:
            task.cancel()
        others = [*(task for _, task in self._redriving.values()), *self._telling]
        for task in others:
            task.cancel()
        await asyncio.gather(*self._tasks, *others, return_exceptions=True)
        # One that cannot be saved must not keep the others from stopping in order.
        ends = [self.withdraw(name, drain_s) for name in list(self.served)]
        failures = [
            end for end in await asyncio.gather(*ends, return_exceptions=True) if isinstance(end, BaseException)
        ]
        await asyncio.gather(*(agent.aclose() for agent in self.agents), *self._cutting, *self._giving)
        await self._save_gaps()
        if failures:
            raise failures[0]

    # ---- subscriptions ---------------------------------------------------------------------------------------------

    async def serve(
        self, definition: SubscriptionDefinition, service: Service, start: Mapping[int, Checkpoint] | None = None
    ) -> None:
        """Deliver a subscription that exists in the store from its checkpoints on, or from `start` one that is not
        stored. Raises Busy where it is served here already, NotFound where it does not exist."""
        self._check_unserved(definition.name)
        async with self._changing:  # where a queue comes meanwhile, its checkpoints are read when it is here
            if service.stored:
                attachment = await self._attachment(definition.name)
            else:
                attachment = Attachment(0, start or {})
            self._check_unserved(definition.name)
            self._deliver(definition, service, attachment)

    async def _attachment(self, name: str) -> Attachment:
        return await self._store.attach(self.provider, name, exclusive=self.leases is None)

    def _check_unserved(self, name: str) -> None:
        if name in self.served:
            raise Busy(f"subscription {name!r} is already served by this process")

    def _deliver(self, definition: SubscriptionDefinition, service: Service, attachment: Attachment) -> None:
        served = Served(definition, attachment.epoch, service, {}, dict(attachment.checkpoints))
        self.served[definition.name] = served
        for queue, checkpoint in attachment.checkpoints.items():
            if self._reads(queue):
                self._attach(served, queue, checkpoint)

    def _reads(self, queue: int) -> bool:
        return queue not in self.stopped and (self.leases is None or queue in self.leases)

    def _attach(self, served: Served, queue: int, checkpoint: Checkpoint) -> None:
        delivery = served.deliveries[queue] = served.service.deliver(
            served.definition, queue, checkpoint, self,
            epoch=served.epoch, term=self._terms.get(queue), rewindable=self._rewindable,
        )  # fmt: skip
        self.agents[queue].attach(delivery)

    async def move(self, name: str, positions: Mapping[int, Checkpoint], reason: str, drain_s: float) -> None:
        """Go on from other positions. Where that cannot be stored, it raises, and goes on where it was."""
        await self._agents_settled()
        served = self.serving(name)
        del self.served[name]
        here = await self._detach(served, drain_s)
        attachment = Attachment(served.epoch, {**served.saved, **here})
        try:
            served.service.moved(await self.moves(name))  # nothing is in flight now: what comes is delivered anew
            if served.service.stored:
                async with self._saving:
                    await self._store.seek(self.provider, name, positions, reason)
                    attachment = await self._attachment(name)
            else:
                attachment = Attachment(served.epoch, {**attachment.checkpoints, **positions})
        finally:
            self._deliver(served.definition, served.service, attachment)

    async def _detach(self, served: Served, drain_s: float) -> dict[int, Checkpoint]:
        """Stop all its deliveries. Returns exactly what is done."""
        name, queues = served.definition.name, list(served.deliveries)
        done = await asyncio.gather(*(self.agents[queue].detach(name, drain_s) for queue in queues))
        return {queue: cp for queue, cp in zip(queues, done, strict=True) if cp is not None}

    def serving(self, name: str) -> Served:
        """Raises NotFound where it is not served here."""
        if name not in self.served:
            raise NotFound(f"subscription {name!r} is not served by this process")
        return self.served[name]

    def check_outside(self, name: str) -> None:
        """Raise InvalidArgument where a handler of the subscription calls: what stops it waits for that handler."""
        served = self.served.get(name)
        if served is not None and any(delivery.runs_here() for delivery in served.deliveries.values()):
            raise InvalidArgument(
                f"a handler of subscription {name!r} cannot wait until the subscription is closed, moved or deleted: "
                "that waits for the handler; do it in a task of its own"
            )

    async def withdraw(self, name: str, drain_s: float) -> Served:
        """Stop serving: running handlers end within `drain_s` seconds, and exactly what is done is saved."""
        await self._agents_settled()
        served = self.served.pop(name, None)
        if served is None:
            raise NotFound(f"subscription {name!r} is not served by this process")
        leases = self._leases_now()
        final = await self._detach(served, drain_s)
        saved = served.service.saving()
        async with self._saving:
            await self._save_gaps()
            if served.service.stored and not await self._save_last(served, final, leases):
                return served
        saved()
        return served

    async def _save_last(
        self, served: Served, final: Mapping[int, Checkpoint], leases: Mapping[int, int] | None
    ) -> bool:
        name = served.definition.name
        refused = await self._store.save_checkpoints(self.provider, [(name, served.epoch, final)], leases)
        if refused.queues:
            log.warning("subscription %s: queues %s have another owner by now", name, sorted(refused.queues))
        if refused.subscriptions:
            log.warning("subscription %s was taken over: its last checkpoint is not saved", name)
            return False
        served.saved.update(final)
        return True

    # ---- agents stop and start -------------------------------------------------------------------------------------

    async def stop_agents(self, queues: Sequence[int], drain_s: float) -> None:
        """Read these queues no more: what is in flight ends within `drain_s` seconds, and exactly what is done is
        saved. Those that are stopped already stay so."""
        async with self._changing:
            self.stopped.update(queues)
            stopping = [self._stop_agent(queue, drain_s) for queue in queues]
            done = dict(zip(queues, await asyncio.gather(*stopping), strict=True))
            await self._save_stopped(done)

    async def _stop_agent(self, queue: int, drain_s: float) -> dict[str, Checkpoint]:
        agent, self.agents[queue] = self.agents[queue], self._agent(queue)
        return await agent.aclose(drain_s)

    async def _save_stopped(self, done: Mapping[int, Mapping[str, Checkpoint]]) -> None:
        """What subscriptions that are still served have done of queues that are not read any more."""
        finals = [(served, self._finals(served, done)) for served in self.served.values()]
        async with self._saving:
            await self._save_gaps()
            for served, final in finals:
                if not served.service.stored:
                    served.saved.update(final)
                elif final and not await self._save_last(served, final, self.leases):
                    self._tell_fenced(served.definition.name)
        for queue in done:
            self._unsaved.pop(queue, None)

    def _finals(self, served: Served, done: Mapping[int, Mapping[str, Checkpoint]]) -> dict[int, Checkpoint]:
        """What a subscription has done of these queues, now, or before where that could not be saved. It is kept until
        it is."""
        key, finals = (served.definition.name, served.epoch), dict[int, Checkpoint]()
        for queue, checkpoints in done.items():
            unsaved = self._unsaved.setdefault(queue, {})
            if served.definition.name in checkpoints:
                served.deliveries.pop(queue, None)
                unsaved[key] = checkpoints[served.definition.name]
            if key in unsaved:
                finals[queue] = unsaved[key]
        return finals

    async def _save_unsaved(self, queues: Iterable[int]) -> None:
        """Before they are read on from what is stored."""
        if unsaved := [queue for queue in queues if queue in self._unsaved]:
            await self._save_stopped({queue: {} for queue in unsaved})

    async def start_agents(self, queues: Sequence[int]) -> None:
        """Read these queues again, from where they were stopped."""
        async with self._changing:
            await self._save_unsaved(queues)
            for queue in self.stopped.intersection(queues):
                self.stopped.discard(queue)
                self._attach_all(queue)

    def _attach_all(self, queue: int) -> None:
        for name, served in self.served.items():
            if self._reads(queue) and queue in served.saved and name not in self.agents[queue].deliveries:
                self._attach(served, queue, served.saved[queue])

    async def _agents_settled(self) -> None:
        async with self._changing:
            pass

    # ---- leases come and go (`QueueOwner`) -------------------------------------------------------------------------

    async def gain(self, queue: int, epoch: int, term: Term) -> None:
        """The lease of a queue is here: serve it from where its checkpoints are now, as long as its term lasts."""
        assert self.leases is not None
        async with self._changing:
            await asyncio.gather(*self._cutting, return_exceptions=True)
            if self.leases.get(queue) == epoch:  # it was not given back after all
                await self._save_unsaved([queue])
            self._unsaved.pop(queue, None)
            here = [served for served in self.served.values() if served.service.stored]
            stored = await self._store.checkpoints_of_queue(self.provider, queue) if here else {}
            for served in here:
                _stands(served, queue, stored.get(served.definition.name))
            self.leases[queue], self._terms[queue] = epoch, term
            self._attach_all(queue)

    async def lose(self, queue: int, drain_s: float) -> None:
        """The lease is to be given back: what is in flight ends within `drain_s` seconds, and exactly what is done is
        saved. Where that fails it raises, and may be called again. Those that are to be given back at one time drain
        together."""
        if not self._losing:
            task = asyncio.create_task(self._lose_all(), name=f"headrace gives back queues of {self.provider}")
            self._giving.add(task)
            task.add_done_callback(self._giving.discard)
        _, lost = self._losing.setdefault(queue, (drain_s, asyncio.get_running_loop().create_future()))
        await asyncio.shield(lost)

    async def _lose_all(self) -> None:
        async with self._changing:
            losing, self._losing = self._losing, {}
            try:
                await self._lose_some({queue: drain_s for queue, (drain_s, _) in losing.items()})
            except Exception as error:  # noqa: BLE001 (it is whoever waits for them that is told)
                for _, lost in losing.values():
                    lost.set_exception(error)
                    lost.exception()  # also where nobody waits any more
            else:
                for _, lost in losing.values():
                    lost.set_result(None)

    async def _lose_some(self, losing: Mapping[int, float]) -> None:
        assert self.leases is not None
        stopping = [self._stop_agent(queue, drain_s) for queue, drain_s in losing.items()]
        done = dict(zip(losing, await asyncio.gather(*stopping), strict=True))
        await self._save_stopped(done)
        for queue in losing:
            self.leases.pop(queue, None)
            self._tell_lost(queue, saved=True)

    def _tell_lost(self, queue: int, *, saved: bool) -> None:
        for served in self.served.values():
            served.service.lost(queue, saved=saved)

    def cut(self, queue: int) -> None:
        """The lease is over: stop at once, and save nothing."""
        assert self.leases is not None
        self.leases.pop(queue, None)
        self._unsaved.pop(queue, None)
        for served in self.served.values():
            if (delivery := served.deliveries.pop(queue, None)) is not None:
                delivery.cut()
        self._tell_lost(queue, saved=False)
        closing = asyncio.create_task(self._stop_agent(queue, 0.0), name=f"headrace cut {self.provider}/{queue}")
        self._cutting.add(closing)
        closing.add_done_callback(self._cutting.discard)

    def _agent(self, queue: int) -> PullingAgent:
        return PullingAgent(
            self._adapter, queue, self._limits, detach_after_s=self._detach_after_s, on_gap=self._record_gap
        )

    # ---- what is durable -------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Save the checkpoints that changed, in one transaction, which also says who was taken over."""
        async with self._saving:
            leases = self._leases_now()
            progress = [(served, _changed(served)) for served in self.served.values() if served.service.stored]
            saved = [(name, served.service.saving()) for name, served in self.served.items()]
            await self._save_gaps()  # after progress was read: who crashes in between would never know of them
            rows = [(served.definition.name, served.epoch, changed) for served, changed in progress]
            refused = await self._store.save_checkpoints(self.provider, rows, leases) if rows else Refused()
            stale = refused.subscriptions
            for served, changed in progress:
                if served.definition.name not in stale:
                    served.saved.update({q: at for q, at in changed.items() if q not in refused.queues})
        for queue in self._no_longer_held(refused.queues, leases):
            log.warning("queue %d of %s has another owner by now: it is not served here any more", queue, self.provider)
            self.cut(queue)
        for name, confirm in saved:
            if name not in stale and not refused.queues:
                confirm()
        for name in stale:
            self._tell_fenced(name)

    def _leases_now(self) -> dict[int, int] | None:
        """Those under which progress is read: what is saved later must not be saved under newer ones."""
        return None if self.leases is None else dict(self.leases)

    def _no_longer_held(self, refused: Iterable[int], leases: Mapping[int, int] | None) -> list[int]:
        """Refused queues that are still served under the lease that was refused, not under one that came meanwhile."""
        now = self.leases or {}
        return [queue for queue in refused if queue in now and now[queue] == (leases or {}).get(queue)]

    def _tell_fenced(self, name: str) -> None:
        """In a task of its own: the checkpoints of the others do not wait for it."""
        task = asyncio.create_task(self._fenced(name), name=f"headrace fenced {name}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _fenced(self, name: str) -> None:
        """Somebody else moved or took the subscription: stop, whatever is still done here is refused anyway."""
        served = self.served.pop(name, None)
        if served is None:
            return
        await self._detach(served, 0.0)
        if self.leases is None:
            log.error("subscription %s was moved, deleted or taken over elsewhere: this process stops serving it", name)
        elif await self._attached_again(served):
            return
        else:
            log.info("subscription %s was deleted: it is not served any more", name)
        self.on_fenced(name)
        await served.service.fenced(Fenced(f"subscription {name!r} was moved, deleted or taken over elsewhere"))

    async def obey(self, drain_s: float = STOP_S) -> None:
        """See what others asked for: subscriptions that were moved or deleted, agents that are to stop or start."""
        async with self._obeying:
            await self._obey(drain_s)

    async def _obey(self, drain_s: float) -> None:
        names = [name for name, served in self.served.items() if served.service.stored]
        orders = await self._store.orders(self.provider, names)
        for name in names:
            served = self.served.get(name)
            if served is not None and orders.epochs.get(name) != served.epoch:
                self._tell_fenced(name)
        if new := sorted(orders.stopped - self.stopped):
            await self.stop_agents(new, drain_s)
        if over := sorted(self.stopped - orders.stopped):
            await self.start_agents(over)

    async def _attached_again(self, served: Served) -> bool:
        """In a cluster, another silo may have moved it: go on from there. False where it was deleted. While the store
        cannot say, it is asked again."""
        name = served.definition.name
        while True:
            try:
                return await self._attach_again(served)
            except HeadraceError as error:
                log.warning("subscription %s was moved, and waits for the control store: %s", name, error)
            await asyncio.sleep(LOOK_S)

    async def _attach_again(self, served: Served) -> bool:
        name = served.definition.name
        async with self._changing:
            if name in self.served:  # by who came meanwhile
                await served.service.fenced(Unavailable(f"subscription {name!r} was moved: connect again"))
                return True
            try:
                attachment = await self._attachment(name)
            except NotFound:
                return False
            served.service.moved(await self.moves(name))  # before: who is told too early only forgets something
            log.info("subscription %s was moved: going on from where it is now", name)
            self._deliver(served.definition, served.service, attachment)
        return True

    async def acknowledge(self) -> None:
        """Tell queues that cannot rewind what nobody needs any more. What is not served here holds its events by its
        stored checkpoint."""
        done = {agent.queue: self._done(agent.queue) for agent in self.agents}
        moved = {queue: at for queue, at in done.items() if at is not None and at > self._acknowledged.get(queue, 0)}
        if not moved:
            return
        stored = await self._store.watermarks(self.provider, apart_from=list(self.served))
        finished = {queue: min(watermark, stored.get(queue, watermark)) for queue, watermark in moved.items()}
        telling = [self._tell_finished(queue, at) for queue, at in finished.items()]
        # One that cannot be told must not keep the others from getting their room back.
        for outcome in await asyncio.gather(*telling, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _tell_finished(self, queue: int, at: int) -> None:
        if await self.agents[queue].acknowledge(at):
            self._acknowledged[queue] = at

    def _done(self, queue: int) -> int | None:
        """How far what is served here is done. A durable queue survives this process, so it is told of nothing that a
        crash would let this process forget; one that is this process's own gets its room back at once."""
        if not self._durable:
            live = [served.deliveries.get(queue) for served in self.served.values()]
            return min((d.watermark for d in live if d is not None), default=None)
        here = [served for served in self.served.values() if queue in served.deliveries]
        return min((_watermark(served, queue) for served in here), default=None)

    async def retain(self) -> None:
        """Let the adapter delete what its retention allows; unfinished events stay."""
        await self._adapter.apply_retention(await self._store.watermarks(self.provider))

    def _record_gap(self, delivery: Delivery, gap: Gap) -> None:
        log.error(
            "subscription %s misses offsets %d to %d of queue %d: %s",
            delivery.name, gap.low, gap.high, delivery.queue, gap.reason,
        )  # fmt: skip
        low, high = SequenceToken(max(gap.low, delivery.watermark)), SequenceToken(gap.high)
        record = self._gap_record(delivery, None, low, high, gap.reason)
        self._gaps.append(record)
        if (served := self.served.get(delivery.name)) is not None:
            served.service.gap(record)

    def _gap_record(
        self, delivery: Delivery, stream: StreamId | None, low: SequenceToken, high: SequenceToken, reason: str
    ) -> GapRecord:
        return GapRecord(self.provider, delivery.name, delivery.queue, stream, low, high, reason, _now_us())

    async def _save_gaps(self) -> None:
        """Before checkpoints that are past them: who crashes in between would never know of them."""
        if self._gaps:
            gaps = list(self._gaps)
            await self._store.add_gaps(gaps)
            del self._gaps[: len(gaps)]

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None:
        letters = [_letter(self.provider, delivery, event, reason, attempts) for event in events]
        await self._store.add_dead_letters(letters, delivery.epoch or None, self.leases)

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None:
        records = [
            self._gap_record(delivery, e.stream, e.token, SequenceToken(e.token.offset, e.token.index + 1), reason)
            for e in events
            if e.token is not None
        ]
        await self._store.add_gaps(records, self.leases)

    # ---- dead letters once more ------------------------------------------------------------------------------------

    async def _redrive(self) -> None:
        busy = Counter(name for name, _ in self._redriving.values())
        names = [name for name in self.served if busy[name] < MAX_REDRIVES]
        queues = [queue for queue in range(self.queues) if self._reads(queue)]
        letters = await self._store.redrives(self.provider, names, queues=queues) if names and queues else []
        for letter in letters:
            if letter.id not in self._redriving and busy[letter.subscription] < MAX_REDRIVES:
                busy[letter.subscription] += 1
                task = asyncio.create_task(self._redrive_one(letter), name=f"headrace redrive {letter.id}")
                self._redriving[letter.id] = letter.subscription, task
                task.add_done_callback(lambda _, number=letter.id: self._redriving.pop(number))

    async def _redrive_one(self, letter: DeadLetter) -> None:
        served = self.served.get(letter.subscription)
        delivery = served.deliveries.get(letter.queue) if served else None
        if delivery is None:
            return
        try:
            error = await delivery.redrive(_event(letter))
        except Closed:
            return  # it comes when its queue is served again
        reason = None if error is None else described(error)
        if error is not None:
            log.warning("%s failed again on dead letter %d", letter.subscription, letter.id, exc_info=error)
        try:
            await self._store.finish_redrive(
                letter.id, delivered=error is None, reason=reason, attempts=letter.attempts + 1
            )
        except HeadraceError as failure:
            log.warning("cannot record that dead letter %d was redriven, so it comes again: %s", letter.id, failure)

    def statistics(self) -> list[AgentStatistics]:
        return [agent.statistics() for agent in self.agents]


def _stands(served: Served, queue: int, stored: Checkpoint | None) -> None:
    """What the store says of a queue; None where the subscription does not read it, or was deleted."""
    if stored is None:
        served.saved.pop(queue, None)
    else:
        served.saved[queue] = stored


def _changed(served: Served) -> dict[int, Checkpoint]:
    now = {queue: delivery.periodic_checkpoint() for queue, delivery in served.deliveries.items()}
    return {queue: checkpoint for queue, checkpoint in now.items() if served.saved.get(queue) != checkpoint}


def _watermark(served: Served, queue: int) -> int:
    """How far a subscription's progress is safe: stored, or with whoever consumes."""
    if not served.service.stored:
        return served.deliveries[queue].watermark
    return served.saved[queue].watermark if queue in served.saved else 0


def _letter(provider: str, delivery: Delivery, event: Event, reason: str, attempts: int) -> DeadLetter:
    assert event.stream is not None
    assert event.token is not None
    return DeadLetter(
        0, provider, delivery.name, delivery.queue, event.stream, event.token, event.payload, dict(event.headers),
        event.id, event.timestamp_us or 0, reason, attempts, _now_us(),
    )  # fmt: skip


def _event(letter: DeadLetter) -> Event:
    return Event(
        letter.payload, letter.headers, letter.event_id, letter.timestamp_us, stream=letter.stream, token=letter.token
    )


async def _never(_: str) -> int:
    return 0


def _now_us() -> int:
    return time.time_ns() // 1000


async def _supervise(work: Callable[[], Awaitable[None]], period_s: float) -> None:
    """Run `work` every `period_s` seconds, or less often where it takes long or fails; what it raises is logged, and it
    is run again."""
    loop, pause_s = asyncio.get_running_loop(), period_s
    while True:
        await asyncio.sleep(pause_s)
        began = loop.time()
        least_s = period_s
        try:
            await work()
        except HeadraceError as error:
            log.warning("background work failed and is tried again: %s", error)
            least_s = max(period_s, min(2 * pause_s, RARELY_S))
        except Exception:
            log.exception("background work failed and is tried again")
            least_s = max(period_s, min(2 * pause_s, RARELY_S))
        pause_s = max(least_s, min((loop.time() - began) / SHARE, RARELY_S))
