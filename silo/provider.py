"""A provider in this process: adapter, mapper, control store and pulling agents put together.

async with Provider.open("data") as provider:
    await provider.subscribe("printer", "orders/*", handler)
    await provider.stream("orders", "42").publish(b"paid")
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters import AdapterContext, Bounds, ProducerSequence, QueueAdapter, Receipt, open_adapter
from ..agents import CacheLimits, HandlerService, PullingManager, Service
from ..balancer import StreamQueueMapper
from ..balancer.mapper import VERSION as MAPPER_VERSION
from ..streams.errors import Busy, DataDirectoryError, InvalidArgument, NotSupported
from ..streams.events import Event, EventBatch
from ..streams.handlers import AnyHandler, Declared, EventFilter, Handler, filter_name
from ..streams.identity import SequenceToken, StreamId
from ..streams.parking import Waiting
from ..streams.publishing import check_schedules, check_stream, encoded, grouped, listed, scheduled
from ..streams.store import ControlStore
from ..streams.stream import Stream
from ..streams.subscriptions import (
    Behind,
    Checkpoint,
    GapRecord,
    Mode,
    OnFailure,
    RetryPolicy,
    Selector,
    SlowConsumer,
    Start,
    StartKind,
    SubscriptionDefinition,
    check_subscription_name,
    is_parent,
)
from .datadir import DataDirectory, DirectoryLock, lock_subscription, open_data_directory
from .parking import STORE, Parking, check_delays, check_parkable, open_lot
from .views import ProviderStatistics, provider_statistics

if TYPE_CHECKING:
    from ..streams.client.consuming import Consumer, Consuming
    from .consumers import Consumers
    from .relay.relay import Relays

log = logging.getLogger("headrace.silo")

DEFAULT_ADAPTER = "log"
DEFAULT_QUEUES = 8
DRAIN_S = 10.0
UNREAD_S = 0.05
"""How often to see whether anything is still to be read from a queue that keeps no order, in seconds."""
LEASED_TIMEOUT_S = 5.0
"""How long a call of the control store may take where leases depend on it, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """Bounds of what a provider caches in this process, divided equally over its queues."""

    max_events: int = 1_000_000
    max_bytes: int = 64 << 20

    def per_queue(self, queues: int) -> CacheLimits:
        return CacheLimits(max_events=self.max_events // queues, max_bytes=self.max_bytes // queues)


@dataclass(frozen=True, kw_only=True)
class ProviderOptions:
    """How to open a provider. `adapter` and `queues` are fixed when it is first opened; None takes what it has."""

    name: str = "default"
    adapter: str | None = None
    queues: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The adapter's own options."""
    cache: CacheOptions = field(default_factory=CacheOptions)
    detach_after_s: float = 0.25
    """How long a cursor may stand still in the oldest bucket of a full cache before it is detached, in seconds."""
    delays: str | None = None
    """Where delayed events wait that the adapter itself cannot delay: "store" for the control store, or the URL of a
    Redis. None: nowhere."""


class Provider:
    """One named configuration, opened in this process. Not for sharing between event loops."""

    def __init__(
        self,
        options: ProviderOptions,
        directory: DataDirectory | None,
        store: ControlStore,
        adapter: QueueAdapter,
        mapper: StreamQueueMapper,
        *,
        leased: bool = False,
        parking: Parking | None = None,
        former: Parking | None = None,
    ) -> None:
        self.name = options.name
        self.queues = mapper.queues
        self.data = directory.path if directory else None
        self.adapter = adapter
        self.store = store
        self.published_events = 0
        self.published_bytes = 0
        self.manager = PullingManager(
            options.name,
            mapper.queues,
            adapter,
            store,
            options.cache.per_queue(mapper.queues),
            detach_after_s=options.detach_after_s,
            leased=leased,
        )
        self.leased = leased
        """It is one silo's of several: queues are served while they have a lease here (`headrace.balancer`)."""
        self.manager.moves = self.moves
        self.queue_of = mapper.queue_of
        self.parking = parking
        """What publishes delayed events when they are due, where the adapter does not."""
        self.former_parking = former
        """The same for those that are still parked where they were parked before."""
        self._delays = adapter.capabilities.delay or options.delays is not None
        self._directory = directory
        self._locks: dict[str, DirectoryLock] = {}
        self._closing: asyncio.Task[None] | None = None
        self.manager.on_fenced = self._release
        self.consumers: Consumers | None = None
        """Groups of consumers that take batches, here and elsewhere, while there may be any."""
        self.relays: Relays | None = None
        """Where this silo is one of several: consumers are served by all of them."""
        self._taking: Consuming | None = None
        self._stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def open(cls, data: str | os.PathLike[str] | None = None, **options: Any) -> AsyncGenerator[Provider]:
        """Open a provider for the length of an `async with`. `options` are those of `ProviderOptions`.

        `data` is the data directory; without one, progress is kept in memory and the adapter must not need a directory.

        Raises DataDirectoryError, NotFound for an unknown adapter, InvalidArgument for options that do not fit what the
        provider was created with.
        """
        provider = await cls.start(data, ProviderOptions(**options))
        try:
            yield provider
        finally:
            await provider.aclose()

    @classmethod
    async def start(
        cls,
        data: str | os.PathLike[str] | None,
        options: ProviderOptions,
        *,
        control: str | None = None,
        leased: bool = False,
    ) -> Provider:
        """Open a provider; the caller closes it with `aclose`.

        `control` is the URL of the database that has the control data; None: it is in the data directory. With
        `leased`, it is one silo's of several, and serves the queues of which the silo has leases.
        """
        timeout_s = LEASED_TIMEOUT_S if leased else None
        async with AsyncExitStack() as stack:
            store = directory = None
            if control is not None:  # before a directory is claimed for it: its URL may be mistyped
                store = await ControlStore.open(control, timeout_s=timeout_s)
                stack.push_async_callback(store.aclose)
            if data is not None:
                directory = await asyncio.to_thread(open_data_directory, data, control)
            if store is None:
                store = await ControlStore.open(directory.control_db if directory else "memory", timeout_s=timeout_s)
                stack.push_async_callback(store.aclose)
            provider = await cls._start(directory, store, options, leased=leased)
            stack.pop_all()
            return provider

    @classmethod
    async def _start(
        cls, directory: DataDirectory | None, store: ControlStore, options: ProviderOptions, *, leased: bool
    ) -> Provider:
        known = {record.name: record for record in await store.providers()}.get(options.name)
        adapter_name = options.adapter or (known.adapter if known else DEFAULT_ADAPTER)
        default = known.queues if known else DEFAULT_QUEUES
        mapper = StreamQueueMapper(default if options.queues is None else options.queues)
        check_delays(options.delays)
        options.cache.per_queue(mapper.queues)

        async def register() -> None:
            await store.register_provider(
                options.name, adapter=adapter_name, queues=mapper.queues, mapper=MAPPER_VERSION
            )

        if known:
            await register()  # refuses what does not fit
        own = await asyncio.to_thread(directory.provider_dir, options.name) if directory else None
        owner = "" if store.private else await store.value_or(f"owner/{options.name}", uuid.uuid4().hex)
        context = AdapterContext(
            provider=options.name, queues=mapper.queues, directory=own, queue_of=mapper.queue_of, owner=owner
        )
        adapter = await open_adapter(adapter_name, context, options.options)
        parking = former = None
        try:
            if leased:
                _check_shareable(options.name, adapter_name, adapter)
            if options.delays is not None:
                private = store.private and options.delays == STORE
                check_parkable(options.name, adapter_name, adapter, private=private)
            if directory is not None and directory.id and own is not None:
                await _check_same_queues(store, options.name, directory, own)
            if not known:
                await register()  # only now: what cannot be opened is not what the provider is made with
            parking, former = await _parkings(options, adapter, store, owner)
            provider = cls(options, directory, store, adapter, mapper, leased=leased, parking=parking, former=former)
            await provider._forget_lost_positions()
        except BaseException:
            if parking is not None:
                await parking.lot.aclose()
            await adapter.aclose()
            raise
        provider.manager.start()
        for each in provider.parkings:
            each.start()
        return provider

    @property
    def parkings(self) -> Sequence[Parking]:
        return [each for each in (self.parking, self.former_parking) if each is not None]

    async def aclose(self, drain_s: float = DRAIN_S) -> None:
        """Stop reading, let running handlers end within `drain_s` seconds, save what is done, close. Idempotent."""
        if self._closing is None:
            for name in self.manager.served:
                self.manager.check_outside(name)
            self._closing = asyncio.create_task(self._close(drain_s), name=f"headrace close {self.name}")
        # Whoever is cancelled while waiting does not leave the rest half closed.
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        await self._stack.aclose()
        served = list(self.manager.served.values())
        try:
            await self.manager.aclose(drain_s)
            for one in served:
                await one.service.completed(drain_s)
        finally:
            for lock in self._locks.values():
                lock.release()
            for each in self.parkings:
                await each.aclose(drain_s)
                await each.lot.aclose()
            await self.adapter.aclose()
            await self.store.aclose()

    def _release(self, name: str) -> None:
        if (lock := self._locks.pop(name, None)) is not None:
            lock.release()

    async def _forget_lost_positions(self) -> None:
        """Queues that do not survive the process begin anew: positions in their former life mean nothing."""
        if self._directory is None:
            return
        if self.adapter.capabilities.durable:
            await self._step_back_from_lost_ends()
            return
        for definition in await self.store.subscriptions(self.name):
            earliest = await self.positions(definition.selector, Start.earliest())
            with suppress(Busy):  # the process that serves it is alive, and so are its queues
                async with self._alone(definition.name):
                    await self.store.seek(
                        self.name, definition.name, earliest, "the queues did not survive the process"
                    )

    async def _step_back_from_lost_ends(self) -> None:
        """A checkpoint past the end of its queue: a crash of the machine took the end, where durability is relaxed.
        What is published next gets those offsets again, so the position goes back to the end, and a gap says it."""
        for definition in await self.store.subscriptions(self.name):
            stored = await self.store.checkpoints(self.name, definition.name)
            ends = {queue: await self.adapter.resume_at(queue, cp.next_offset) for queue, cp in stored.items()}
            lost = {queue: cp for queue, cp in stored.items() if cp.next_offset > ends[queue]}
            if not lost:
                continue
            reason = "the queue lost its end in a crash of the machine"
            back: dict[int, Checkpoint] = {
                queue: Checkpoint(ends[queue], {s: b for s, b in cp.behind.items() if b.token.offset < ends[queue]})
                for queue, cp in lost.items()
            }
            gaps = [
                GapRecord(
                    self.name, definition.name, queue, None, SequenceToken(ends[queue]),
                    SequenceToken(cp.next_offset), reason, time.time_ns() // 1000,
                )
                for queue, cp in lost.items()
            ]  # fmt: skip
            log.error("subscription %s was ahead of queues %s: %s", definition.name, sorted(lost), reason)
            with suppress(Busy):
                async with self._alone(definition.name):
                    await self.store.seek(self.name, definition.name, {**stored, **back}, reason)
                    await self.store.add_gaps(gaps)

    # ---- publishing ------------------------------------------------------------------------------------------------

    def stream(self, namespace: str | StreamId, key: str | None = None) -> Stream:
        """A handle on a stream, by namespace and key or by id."""
        if isinstance(namespace, StreamId):
            return Stream(namespace, self)
        if key is None:
            raise InvalidArgument("a stream has a namespace and a key: provider.stream('orders', '42')")
        return Stream(StreamId(namespace, key), self)

    async def publish(
        self,
        stream: StreamId,
        events: bytes | Event | Iterable[bytes | Event],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        """Publish to one stream: see `Stream.publish`."""
        check_stream(stream)
        if type(events) is bytes and delay is None and priority is None:  # the shortest way for what is published most
            batch = EventBatch.of(stream, [events])
            receipts = await self.adapter.enqueue(((self.queue_of(stream), batch),))
            self.published_events += 1
            self.published_bytes += len(batch.encoded)
        else:
            queue = self.queue_of(stream)
            batches = [(queue, batch) for batch in self._encode(stream, scheduled(listed(events), delay, priority))]
            receipts = await self._enqueue(batches)
            self._count(batches)
        token = receipts[0].token
        assert token is not None  # only duplicates of an idempotent producer have none
        return token

    async def publish_many(
        self, items: Iterable[tuple[StreamId, bytes | Event]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        """Publish to several streams at once, in order within each. One receipt per stored batch.

        With `sequence`, a retry stores nothing twice; one call is then all or nothing.
        """
        by_stream = grouped(items)
        batches = [
            (self.queue_of(stream), batch)
            for stream, events in by_stream.items()
            for batch in self._encode(stream, events)
        ]
        receipts = await self._enqueue(batches, sequence=sequence)
        if not (receipts and receipts[0].duplicate):
            self._count(batches)
        return receipts

    def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> asyncio.Future[Sequence[Receipt]]:
        """Store batches that somebody else encoded, as they are. Who calls has checked them.

        Called in order means stored in order, also without awaiting in between; else as `publish_many`.
        """
        self._check_schedules(batches)
        placed = [(self.queue_of(batch.stream), batch) for batch in batches]
        answer = asyncio.ensure_future(self._enqueue(placed, sequence=sequence))
        answer.add_done_callback(partial(self._note_stored, placed))
        return answer

    def _note_stored(self, placed: Sequence[tuple[int, EventBatch]], answer: asyncio.Future[Sequence[Receipt]]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        if not any(receipt.duplicate for receipt in answer.result()):
            self._count(placed)

    def _enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        place = self.parking if self._delays and self.parking is not None else self.adapter
        return place.enqueue(batches, sequence=sequence)

    def _encode(self, stream: StreamId, events: list[bytes | Event]) -> list[EventBatch]:
        batches = encoded(stream, events)
        self._check_schedules(batches)
        return batches

    def _check_schedules(self, batches: Sequence[EventBatch]) -> None:
        priorities = self.adapter.capabilities.priority
        if not (self._delays and priorities):
            check_schedules(batches, self.name, delay=self._delays, priority=priorities)

    def _count(self, batches: Sequence[tuple[int, EventBatch]]) -> None:
        for _, batch in batches:
            self.published_events += batch.count
            self.published_bytes += len(batch.encoded)

    # ---- subscribing -----------------------------------------------------------------------------------------------

    def subscribe(
        self,
        name: str,
        selector: str | StreamId,
        handler: AnyHandler | None = None,
        *,
        batch: bool = False,
        start: Start | str | None = None,
        filter: EventFilter | None = None,  # noqa: A002 (the word of the field)
        retry: RetryPolicy | None = None,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        slow_consumer: SlowConsumer | None = None,
        concurrency: int = 100,
        **consumer: Any,
    ) -> Subscribing:
        """Consume the durable subscription `name`, which is created where it does not exist.

        With `handler` it is awaited, and delivers to the handler from there on: `await provider.subscribe(...,
        handler)`. Without, it is entered, and gives batches: `async with provider.subscribe(...) as consumer: async for
        batch in consumer`. Every event published after either is delivered.

        `handler` is an async function of an Event, with `batch=True` of an EventBatch, or an observer object (see
        `headrace.streams.handlers`). `selector` is `namespace/key`, with `*` for any text. `start` may be text, as in
        `Start.parse`. `concurrency` bounds the handlers that run at a time, per queue. `filter`, `batch` and
        `concurrency` are for a handler; `consumer` are further options for taking batches: those of `Client.subscribe`.

        Raises, when awaited or entered, DefinitionConflict where `name` exists with another definition, Busy where
        another live process serves it, NotSupported for what the adapter cannot do.
        """
        definition = SubscriptionDefinition(
            name=name,
            selector=Selector(str(selector)),
            start=_start(start),
            retry=RetryPolicy() if retry is None else retry,
            on_failure=on_failure,
            slow_consumer=slow_consumer,
            filter=None if filter is None else filter_name(filter),
        )
        if handler is None:
            if filter is not None:
                raise NotSupported(f"subscription {name!r}: a filter is for a handler, and there is none")
            taken = definition, {**consumer, "retry": retry}
            return Subscribing(self, None, taken)
        if consumer:
            raise InvalidArgument(f"subscription {name!r}: {', '.join(consumer)} is for a consumer without a handler")
        return Subscribing(self, Declared(self.name, definition, handler, batch, filter, concurrency), None)

    async def taking(self) -> Consuming:
        """What takes batches in this process. Made when it is first asked for."""
        if self._taking is None:
            from .local import consuming  # noqa: PLC0415 (it loads gRPC's client and services)

            self._taking = await self._stack.enter_async_context(consuming(self))
        return self._taking

    async def attach(self, declared: Declared) -> Subscription:
        """`subscribe` with everything in one value, as the `@subscription` decorator makes it."""
        if type(declared.concurrency) is not int or declared.concurrency < 1:
            raise InvalidArgument(f"concurrency is a whole number of at least 1, not {declared.concurrency!r}")
        handler = Handler.of(declared.handler, batch=declared.batch)
        if declared.definition.mode is not Mode.SHARED:
            raise NotSupported(
                f"subscription {declared.definition.name!r}: a handler in the silo is all of its group, so its mode is "
                f"shared, not {declared.definition.mode.value}; consume it through a client instead"
            )
        await self.serve(declared.definition, HandlerService(handler, declared.filter, declared.concurrency))
        return Subscription(self, declared)

    async def serve(
        self, definition: SubscriptionDefinition, service: Service, start: Mapping[int, Checkpoint] | None = None
    ) -> None:
        """Create a subscription where it does not exist, and let `service` work on it here; or, where the service
        stores no progress, from `start` on. Raises Busy where it is served already, here or by another process."""
        name = definition.name
        if name in self.manager.served:
            raise Busy(f"subscription {name!r} is already served by this process")
        lock = await self._lock(name)
        try:
            if service.stored:
                await self.ensure_subscription(definition)
            await self.manager.serve(definition, service, start)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if lock is not None:
            self._locks[name] = lock

    async def create_subscription(self, definition: SubscriptionDefinition) -> bool:
        """Create a durable subscription without serving it. False where it exists, equal.

        Its position is pinned before this returns: every event published afterwards is kept for it. With mode broadcast
        that is so for each consumer, from when it first attached.
        """
        check_subscription_name(definition.name)
        return await self.ensure_subscription(definition)

    async def ensure_subscription(self, definition: SubscriptionDefinition) -> bool:
        """`create_subscription`, also for a consumer's own, whose name nobody may choose."""
        if definition.slow_consumer is SlowConsumer.DETACH and not self.adapter.capabilities.rewindable:
            raise NotSupported(
                f"subscription {definition.name!r}: detach needs an adapter that can rewind; use throttle"
            )
        start = await self.positions(definition.selector, definition.start)
        if is_parent(definition):
            start = {}  # its consumers have positions, it has none
        return await self.store.create_subscription(self.name, definition, start)

    def queues_of(self, selector: Selector) -> Sequence[int]:
        """The queues that have what a selector matches."""
        return [self.queue_of(StreamId.parse(selector.pattern))] if selector.explicit else range(self.queues)

    async def positions(self, selector: Selector, start: Start) -> dict[int, Checkpoint]:
        """The checkpoints that `start` means. A subscription to one stream concerns one queue only."""
        stream = StreamId.parse(selector.pattern) if selector.explicit else None
        queues = self.queues_of(selector)
        if start.kind is StartKind.OFFSETS:
            if stream is None:
                raise InvalidArgument(
                    f"a token is a position in one queue, so only a subscription to one stream can go to it, not "
                    f"{selector.pattern!r}; use a time instead"
                )
            assert start.token is not None
            return {queues[0]: await self._at_token(stream, queues[0], SequenceToken.parse(start.token))}
        return {queue: Checkpoint(await self._offset(queue, start)) for queue in queues}

    async def _offset(self, queue: int, start: Start) -> int:
        if start.kind is StartKind.TIME:
            assert start.time_us is not None
            return await self.adapter.offset_at(queue, start.time_us)
        bounds = await self.adapter.bounds(queue)
        return bounds.first if start.kind is StartKind.EARLIEST else bounds.next

    async def _at_token(self, stream: StreamId, queue: int, token: SequenceToken) -> Checkpoint:
        if not self.adapter.capabilities.rewindable:
            raise NotSupported("a token is a start only where the adapter can rewind")
        bounds: Bounds = await self.adapter.bounds(queue)
        if token > (bounds.next, 0):
            raise InvalidArgument(f"token {token} is past the end of queue {queue}, whose next offset is {bounds.next}")
        if not token.index:
            return Checkpoint(token.offset)
        return Checkpoint(token.offset + 1, {stream: Behind(token)})

    async def withdraw(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Stop serving a subscription here; it stays durable. Raises NotFound where it is not served here, and
        InvalidArgument in its own handler, for whose end it would wait."""
        self.manager.check_outside(name)
        try:
            served = await self.manager.withdraw(name, drain_s)
            await served.service.completed(drain_s)
        finally:
            if (lock := self._locks.pop(name, None)) is not None:
                lock.release()

    async def seek(self, name: str, start: Start, reason: str = "asked for") -> None:
        """Move a subscription's position, also back, in all its queues; with mode broadcast that of every consumer."""
        definition = await self.store.subscription(self.name, name)
        positions = await self.positions(definition.selector, start)
        if is_parent(definition):
            for consumer in await self._consumers_of(name):
                await self.seek(consumer, start, reason)
            return
        # Before it is moved: who is told too early only forgets something.
        await self.store.set_value(self._moves_key(name), str(await self.moves(name) + 1))
        if name not in self.manager.served:
            async with self._unserved(name):
                await self.store.seek(self.name, name, positions, reason)
            return
        self.manager.check_outside(name)
        await self.manager.move(name, positions, reason, DRAIN_S if self._has_handler(name) else 0.0)

    async def moves(self, name: str) -> int:
        """How often a subscription was moved by `seek`. A consumer that remembers what it acknowledged forgets it when
        this changes: it may be meant to come again."""
        return int(await self.store.value(self._moves_key(name)) or 0)

    def _moves_key(self, name: str) -> str:
        return f"moves/{self.name}/{name}"

    async def resume(self, name: str, stream: StreamId) -> bool:
        """Go on with a paused stream, also where nobody serves the subscription now. False where it is not paused.

        Raises NotFound, or Busy where another live process serves the subscription.
        """
        if (served := self.manager.served.get(name)) is not None:
            return any(delivery.resume(stream) for delivery in served.deliveries.values())
        async with self._unserved(name):
            stored = await self.store.checkpoints(self.name, name)
            paused = {queue: at for queue, at in stored.items() if stream in at.behind and at.behind[stream].paused}
            positions = {
                queue: at._replace(behind={**at.behind, stream: Behind(at.behind[stream].token)})
                for queue, at in paused.items()
            }
            if positions:
                await self.store.seek(self.name, name, positions, f"{stream} is resumed")
            return bool(positions)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its progress; its dead letters stay. Raises NotFound, or Busy where another live
        process serves it."""
        for each in [*(await self._consumers_of(name)), name]:
            if each in self.manager.served:
                await self.withdraw(each, DRAIN_S if self._has_handler(each) else 0.0)
            async with self._unserved(each):
                await self.store.delete_subscription(self.name, each)

    async def _consumers_of(self, name: str) -> list[str]:
        """Mode broadcast: the subscriptions of its consumers."""
        stored = await self.store.subscriptions(self.name)
        return [definition.name for definition in stored if definition.name.startswith(f"{name}~")]

    def _has_handler(self, name: str) -> bool:
        return isinstance(self.manager.serving(name).service, HandlerService)

    async def _lock(self, name: str) -> DirectoryLock | None:
        if self._directory is None:
            return None
        taking = asyncio.ensure_future(
            asyncio.to_thread(lock_subscription, self._directory, self.name, name, shared=self.leased)
        )
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])  # else whoever comes next may find it taken
            if taking.exception() is None:
                taking.result().release()
            raise

    @asynccontextmanager
    async def _unserved(self, name: str) -> AsyncGenerator[None]:
        """Makes sure that no other process serves the subscription meanwhile; in a cluster, none that would not notice
        what is done to it. Raises Busy."""
        with await self._lock(name) or nullcontext():
            yield

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncGenerator[None]:
        """Makes sure that no other process serves the subscription meanwhile, in a cluster neither. Raises Busy."""
        assert self._directory is not None
        with await asyncio.to_thread(lock_subscription, self._directory, self.name, name):
            yield

    async def ends(self, queue: int, positions: Iterable[int]) -> Mapping[int, int]:
        """Where a queue ends, seen from each of some positions: what is in between are batches that are due, in number.

        For an adapter that keeps no order that is not its end, for its offsets do not count."""
        if self.adapter.capabilities.ordered:
            return dict.fromkeys(positions, (await self.adapter.bounds(queue)).next)
        return {position: position + (await self.adapter.backlog(queue, position)).batches for position in positions}

    async def caught_up(self, name: str) -> None:
        """Return when everything stored before the call is done for subscription `name` (paused streams apart).

        Where the adapter keeps no order: when nothing is left that is due.
        """
        served = self.manager.serving(name)
        for queue, delivery in served.deliveries.items():
            await delivery.wait_until(await self.due_end(queue))

    async def due_end(self, queue: int) -> int:
        """The offset below which everything of a queue is that is due. Where the adapter keeps no order, it returns
        once all that is read, whoever reads it: before that, nothing tells it."""
        while (end := await self.adapter.due_end(queue)) is None:  # noqa: ASYNC110 (maybe by another process)
            await asyncio.sleep(UNREAD_S)
        return end

    async def waiting(self) -> Mapping[int, Waiting]:
        """The delayed events that are parked, by queue, wherever they are."""
        found: dict[int, Waiting] = {}
        for each in self.parkings:
            for queue, waiting in (await each.lot.waiting(self.name)).items():
                found[queue] = waiting.plus(found[queue]) if queue in found else waiting
        return found

    def statistics(self) -> ProviderStatistics:
        """A cheap snapshot of queues, caches, cursors and deliveries."""
        statistics = provider_statistics(self.manager, self.published_events, self.published_bytes)
        for each in self.parkings:
            parked, released, failing = each.statistics()
            statistics = statistics._replace(
                parked_events=statistics.parked_events + parked,
                released_events=statistics.released_events + released,
                release_failing=statistics.release_failing or bool(failing),
            )
        return statistics


class Subscribing:
    """What `provider.subscribe` returns. Await it, with a handler; or enter it, without one. Until then nothing
    happens."""

    def __init__(
        self,
        provider: Provider,
        declared: Declared | None,
        taken: tuple[SubscriptionDefinition, Mapping[str, Any]] | None,
    ) -> None:
        self._provider = provider
        self._declared = declared
        self._taken = taken
        self._stack = AsyncExitStack()

    def __await__(self) -> Generator[Any, None, Subscription]:
        return self._subscribe().__await__()

    async def _subscribe(self) -> Subscription:
        if self._declared is None:
            raise InvalidArgument(
                "there is no handler to deliver to: give one, or take batches with `async with provider.subscribe(...) "
                "as consumer`"
            )
        return await self._provider.attach(self._declared)

    async def __aenter__(self) -> Consumer:
        if self._taken is None:
            raise InvalidArgument("there is a handler: write `subscription = await provider.subscribe(...)`")
        definition, options = self._taken
        local = await self._provider.taking()
        return await self._stack.enter_async_context(
            local.subscribe(
                definition.name, definition.selector.pattern, start=definition.start, on_failure=definition.on_failure,
                slow_consumer=definition.slow_consumer, **options,
            )
        )  # fmt: skip

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class Subscription:
    """A subscription that this process serves."""

    def __init__(self, provider: Provider, declared: Declared) -> None:
        self.name = declared.definition.name
        self.definition = declared.definition
        self._provider = provider

    async def caught_up(self) -> None:
        """Return when everything stored before the call is done (paused streams apart)."""
        await self._provider.caught_up(self.name)

    async def seek(self, start: Start) -> None:
        """Go on from another position, also an earlier one."""
        await self._provider.seek(self.name, start)

    async def close(self) -> None:
        """Stop serving it here. It stays durable: events are kept for it, and it resumes where it stopped."""
        await self._provider.withdraw(self.name)

    async def delete(self) -> None:
        """Stop serving it and forget its progress."""
        await self._provider.delete_subscription(self.name)

    def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. False where it is not paused."""
        served = self._provider.manager.serving(self.name)
        return any(delivery.resume(stream) for delivery in served.deliveries.values())

    async def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, out of line. Returns how many were asked for;
        what fails again stays a dead letter with its new reason."""
        return await self._provider.store.request_redrive(self._provider.name, self.name, ids)


def _start(start: Start | str | None) -> Start:
    if start is None:
        return Start.latest()
    return Start.parse(start) if isinstance(start, str) else start


async def _parkings(
    options: ProviderOptions, adapter: QueueAdapter, store: ControlStore, owner: str
) -> tuple[Parking | None, Parking | None]:
    """Where delayed events are parked, and the control store where it is another place and has some from before. They
    are published all the same."""
    former = None
    if options.delays != STORE and adapter.capabilities.idempotent:
        former = await _left_in_store(options, adapter, store)
    if options.delays is None:
        return former, None
    return Parking(options.name, adapter, await open_lot(options.name, options.delays, store, owner)), former


async def _left_in_store(options: ProviderOptions, adapter: QueueAdapter, store: ControlStore) -> Parking | None:
    if await store.parking().due_in_s(options.name, "") is None:
        return None
    log.info("provider %s: delayed events are parked from when it had delays: they are published", options.name)
    return Parking(options.name, adapter, store.parking())


def _check_shareable(provider: str, name: str, adapter: QueueAdapter) -> None:
    if not adapter.capabilities.durable:
        raise NotSupported(
            f"provider {provider!r}: the queues of the adapter {name!r} are one process's own, so a cluster cannot "
            "share them: choose another adapter, or leave out [cluster]"
        )


async def _check_same_queues(store: ControlStore, provider: str, directory: DataDirectory, own: Path) -> None:
    """Queues that are kept in the data directory are this machine's. Others under the same store would be taken for
    them, and positions in the ones for positions in the others."""
    if not await asyncio.to_thread(lambda: any(own.iterdir())):
        return
    known = await store.value_or(f"directory/{provider}", directory.id)
    if known != directory.id:
        raise DataDirectoryError(
            f"provider {provider!r}: its queues are in the data directory of another machine, not in {directory.path}, "
            "and its control data belongs to those: silos on several machines need an adapter whose queues all of them "
            "reach"
        )
