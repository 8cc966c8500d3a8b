"""Serve the subscriptions of a provider in this process, move their positions, and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, nullcontext

from ..agents import DeliveryService, HandlerService, PullingManager
from ..store.datadir import DirectoryLock, lock_subscription
from ..streams.arguments import check_instance, check_seconds, check_text
from ..streams.errors import Busy, NotSupported
from ..streams.identity import StreamId
from ..streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Checkpoint,
    SlowConsumer,
    Start,
    SubscriptionDefinition,
    check_definition,
    is_parent,
)
from .opening import ProviderParts
from .queue_positions import QueuePositions

DRAIN_S = 10.0
"""Default time that running handlers have to end, in seconds."""


class SubscriptionHost(QueuePositions):
    """The part of a provider that serves subscriptions."""

    def __init__(self, parts: ProviderParts) -> None:
        super().__init__(parts)
        self.leased = parts.leased
        """The provider belongs to a silo in a cluster: it serves the queues of which the silo has leases."""
        self.manager = PullingManager(
            self.name,
            self.queues,
            parts.adapter,
            parts.store,
            parts.options.cache.per_queue(self.queues),
            detach_after_s=parts.options.detach_after_s,
            leased=parts.leased,
        )
        self.manager.subscriptions.on_fenced = self._unlock
        self._directory = parts.directory
        self._locks: dict[str, DirectoryLock] = {}

    async def create_subscription(self, definition: SubscriptionDefinition) -> bool:
        """Create a durable subscription without serving it. Return False if an equal one exists.

        Its position is stored before this returns: every event published afterwards is kept for it. With mode broadcast
        this holds for each consumer from its first attachment.
        """
        check_definition(definition)
        return await self.ensure_subscription(definition)

    async def ensure_subscription(self, definition: SubscriptionDefinition) -> bool:
        """Do as `create_subscription`. Accept also the name of a consumer's subscription, which users cannot choose."""
        if definition.slow_consumer is SlowConsumer.DETACH and not self.adapter.capabilities.rewindable:
            raise NotSupported(
                f"subscription {definition.name!r}: detach needs an adapter that can rewind; use throttle"
            )
        start = await self.positions(definition.selector, definition.start)
        if is_parent(definition):
            start = {}  # its consumers have positions, it has none
        return await self.store.create_subscription(self.name, definition, start)

    async def serve(
        self,
        definition: SubscriptionDefinition,
        service: DeliveryService,
        start: Mapping[int, Checkpoint] | None = None,
    ) -> None:
        """Serve a subscription with `service`, and create the subscription if it does not exist.

        A service that stores no progress begins at `start`. Raises Busy if this or another process serves it already.
        """
        name = definition.name
        if name in self.manager.served:
            raise Busy(f"subscription {name!r} is already served by this process")
        lock = await self._lock(name)
        try:
            if service.stored:
                await self.ensure_subscription(definition)
            await self.manager.subscriptions.serve(definition, service, start)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if lock is not None:
            self._locks[name] = lock

    async def withdraw(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Stop serving a subscription in this process; it stays durable.

        Raises NotFound if this process does not serve it; InvalidArgument in its own handler, because the call waits
        for the handler's end.
        """
        check_text("name", name)
        check_seconds("drain_s", drain_s)
        self.manager.subscriptions.check_outside(name)
        try:
            served = await self.manager.subscriptions.withdraw(name, drain_s)
            await served.service.completed(drain_s)
        finally:
            self._unlock(name)

    async def seek(self, name: str, start: Start | str, reason: str = "asked for") -> None:
        """Move a subscription's position, also back, in all its queues; with mode broadcast that of every consumer.
        Its generation rises: consumers forget which events they acknowledged, because they may come again on purpose.

        `start` may be text, as in `Start.parse`. Raises NotFound, InvalidArgument.
        """
        check_text("name", name)
        start = Start.of(start)
        definition = await self.store.subscription(self.name, name)
        positions = await self.positions(definition.selector, start)
        if is_parent(definition):
            for consumer in await self._consumers_of(name):
                await self.seek(consumer, start, reason)
            return
        if name not in self.manager.served:
            async with self._unserved(name):
                await self.store.seek(self.name, name, positions, reason)
            return
        self.manager.subscriptions.check_outside(name)
        await self.manager.subscriptions.move(name, positions, reason, self._drain_s(name))

    async def resume(self, name: str, stream: StreamId) -> bool:
        """Continue a paused stream, also if no process serves the subscription now. Return False if it is not paused.

        Raises NotFound, or Busy if another live process serves the subscription.
        """
        check_text("name", name)
        check_instance("stream", stream, StreamId, "StreamId('orders', '42')")
        if (served := self.manager.served.get(name)) is not None:
            resumed = [delivery.retries.resume(stream) for delivery in served.deliveries.values()]
            return any(resumed)
        async with self._unserved(name):
            return await self.store.resume(self.name, name, stream)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its progress; its dead letters stay.

        Raises NotFound, or Busy if another live process serves it.
        """
        check_text("name", name)
        for each in [*(await self._consumers_of(name)), name]:
            if each in self.manager.served:
                await self.withdraw(each, self._drain_s(each))
            async with self._unserved(each):
                await self.store.delete_subscription(self.name, each)

    async def _consumers_of(self, name: str) -> list[str]:
        """The subscriptions of the consumers of `name`, if its mode is broadcast."""
        stored = await self.store.subscriptions(self.name)
        return [each.name for each in stored if each.name.startswith(f"{name}{CONSUMER_SEPARATOR}")]

    def _drain_s(self, name: str) -> float:
        """Only handlers get time to end: remote consumers do not run in this process."""
        return DRAIN_S if isinstance(self.manager.subscriptions.serving(name).service, HandlerService) else 0.0

    async def wait_until_caught_up(self, name: str) -> None:
        """Wait until a subscription that this process serves has finished all events stored before the call (except
        in paused streams). Raises NotFound if this process does not serve it, CorruptRecord if a queue is damaged."""
        served = self.manager.subscriptions.serving(name)
        for queue, delivery in served.deliveries.items():
            end = await self.due_end(queue)
            await delivery.waiters.wait_until(end)
            if self.adapter.capabilities.rewindable:
                await self.adapter.resume_at(queue, end)  # raises if records are stored behind the end

    # ---- locks -----------------------------------------------------------------------------------------------------

    async def _lock(self, name: str) -> DirectoryLock | None:
        if self._directory is None:
            return None
        locking = asyncio.ensure_future(
            asyncio.to_thread(lock_subscription, self._directory, self.name, name, shared=self.leased)
        )
        try:
            return await asyncio.shield(locking)
        except asyncio.CancelledError:
            await asyncio.wait([locking])  # else the thread may take the lock later and keep it
            if locking.exception() is None:
                locking.result().release()
            raise

    def _unlock(self, name: str) -> None:
        if (lock := self._locks.pop(name, None)) is not None:
            lock.release()

    def _unlock_all(self) -> None:
        for name in list(self._locks):
            self._unlock(name)

    @asynccontextmanager
    async def _unserved(self, name: str) -> AsyncGenerator[None]:
        """Keep other processes from serving the subscription meanwhile. In a cluster, silos may serve it, because they
        notice a change of the stored position. Raises Busy."""
        with await self._lock(name) or nullcontext():
            yield

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncGenerator[None]:
        """Keep all other processes from serving the subscription meanwhile, silos of a cluster too. Raises Busy.

        The provider must have a data directory.
        """
        assert self._directory is not None
        with await asyncio.to_thread(lock_subscription, self._directory, self.name, name):
            yield
