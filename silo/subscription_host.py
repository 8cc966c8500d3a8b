"""Serve the subscriptions of a provider in this process, move their positions, and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from ..agents import Delivery, DeliveryService, Group, HandlerService, PullingManager, ServedSubscription
from ..streams.arguments import check_instance, check_seconds, check_text
from ..streams.background import BackgroundTasks
from ..streams.errors import Busy, NotFound, NotSupported, Unavailable
from ..streams.identity import StreamId
from ..streams.subscriptions import (
    Checkpoint,
    SlowConsumer,
    Start,
    SubscriptionDefinition,
    check_definition,
    is_parent,
    is_position_of,
    parent_name,
    redefined,
)
from .opening import ProviderParts
from .queue_positions import QueuePositions
from .standby import Standby
from .subscription_locks import SubscriptionLocks

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
        self._locks = SubscriptionLocks(
            parts.directory, self.name, shared=parts.leased, one_reader=not parts.adapter.capabilities.rewindable
        )
        self._starting: set[str] = set()
        """Subscriptions that this process begins to serve, and does not serve yet."""
        self.manager.subscriptions.on_fenced = self._locks.release
        self.manager.subscriptions.may_serve = self._locks.holds
        self.standby = Standby(
            self._locks, self.manager.subscriptions.serve, lambda: self.store.subscriptions(self.name), self.name
        )
        """Subscriptions that another process serves, and that this process takes over when that process ends."""
        self.stopping = BackgroundTasks()
        """Ends of subscriptions, which go on if their caller is cancelled."""

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
        *,
        stands_by: bool = False,
        creates: bool = True,
    ) -> None:
        """Serve a subscription with `service`. Create the subscription if it does not exist, unless `creates` is False.

        A service that stores no progress begins at `start`. With `stands_by`, this process waits while another process
        serves the subscription, and takes over when that process ends; the call returns at once. It also waits so while
        a call of `withdraw` or `delete_subscription` of this process waits for the handlers of the former service.

        Raises Busy if this process serves it already. Also raises it if another process serves it or such a call waits,
        unless `stands_by` and the adapter is durable. Without `creates`, raises NotFound, and Fenced if it has another
        definition.
        """
        name = definition.name
        if self.service_of(name) is not None or name in self._starting:
            hint = "use another name, or close the other subscription first"
            raise Busy(f"subscription {parent_name(name)!r} is already served by this process", hint=hint)
        self._starting.add(name)
        try:
            await self._locks.take(name)
        except Busy as error:
            if not stands_by:
                raise
            if not self.adapter.capabilities.durable:
                if self._locks.is_taken(name):  # its former service still ends
                    raise
                hint = (
                    f"no other process can take over, because the queues of the adapter {self.adapter_name!r} are in "
                    "the memory of that process: stop it first, or choose a durable adapter"
                )
                raise Busy(error.problem, hint=hint) from None
            if creates:
                await self.ensure_subscription(definition)
            elif await self.store.subscription(self.name, name) != definition:
                raise redefined(name) from None
            self.standby.add(definition, service, error.problem)
        else:
            await self._serve_locked(definition, service, start, creates=creates)
        finally:
            self._starting.discard(name)

    async def _serve_locked(
        self,
        definition: SubscriptionDefinition,
        service: DeliveryService,
        start: Mapping[int, Checkpoint] | None,
        *,
        creates: bool,
    ) -> None:
        try:
            if creates:
                await self.ensure_subscription(definition)
            await self.manager.subscriptions.serve(definition, service, start)
        except BaseException:
            self._locks.release(definition.name)
            raise

    async def withdraw(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Stop serving a subscription in this process, or standing by for it; it stays durable.

        Raises NotFound if this process does neither; InvalidArgument in its own handler, because the call waits for the
        handler's end.
        """
        check_text("name", name)
        check_seconds("drain_s", drain_s)
        self.manager.subscriptions.check_outside(name)
        if (waiting := await self.standby.remove(name)) is not None:
            await waiting.service.completed(drain_s)
            return
        await self._stop_serving(name, drain_s, delete=False)

    async def _stop_serving(self, name: str, drain_s: float, *, delete: bool) -> None:
        """Stop serving, and perhaps delete the subscription. Its lock is kept until then, also if this call is
        cancelled: nothing else may run handlers at the same time. Raises NotFound if it is not served here and not
        to be deleted, or is not stored."""
        stopping = self.stopping.hold(self._stop_and_unlock(name, drain_s, delete=delete), f"headrace withdraw {name}")
        await asyncio.shield(stopping)

    async def _stop_and_unlock(self, name: str, drain_s: float, *, delete: bool) -> None:
        locked = True
        try:
            try:
                served = await self.manager.subscriptions.withdraw(name, drain_s)
            except NotFound:  # this process does not serve it, or not any longer
                locked = False
                self.manager.subscriptions.give_up(name)
                if not delete:
                    raise
                served = None
            else:
                await served.service.completed(drain_s)
            if delete:
                await self.store.delete_subscription(self.name, name)
                if served is not None:
                    served.log_deleted()
        finally:
            if locked:  # else another call may have the lock: one that begins to serve, or stops the former service
                self._locks.release(name)

    def service_of(self, name: str) -> DeliveryService | None:
        """The service of a subscription that this process serves or for which it stands by; None for another one."""
        found = self._served(name) or self.standby.waiting.get(name)
        return None if found is None else found.service

    def _served(self, name: str) -> ServedSubscription | None:
        """A subscription that this process serves, also if it is stopped for a moment."""
        return self.manager.served.get(name) or self.manager.subscriptions.paused.get(name)

    async def seek(self, name: str, start: Start | str, reason: str = "asked for") -> int:
        """Move a subscription's position, also back, in all its queues; with mode broadcast that of every consumer.
        Consumers that keep their positions are not moved. Return how many of them this process serves.

        The generation of the subscription rises: consumers forget which events they acknowledged, because they may come
        again on purpose. If another process serves it, that process notices the change within a second.

        `start` may be text, as in `Start.parse`. Raises NotFound, InvalidArgument.
        """
        check_text("name", name)
        start = Start.of(start)
        definition = await self.store.subscription(self.name, name)
        positions = await self.positions(definition.selector, start)
        if is_parent(definition):
            for consumer in await self._consumers_of(name):
                await self.seek(consumer, start, reason)
            here = [self.service_of(consumer) for consumer in self._consumers_here(name)]
            return sum(len(group.members) for group in here if isinstance(group, Group) and not group.stored)
        self.manager.subscriptions.check_outside(name)
        # Also if this call is cancelled: else the subscription would be served no more.
        moving = self.stopping.hold(self._move(name, positions, reason), f"headrace seek {name}")
        await asyncio.shield(moving)
        return 0

    async def _move(self, name: str, positions: Mapping[int, Checkpoint], reason: str) -> None:
        if (served := self._served(name)) is not None and served.service.stored:
            with suppress(NotFound):  # it is closed meanwhile, or attached again to the stored position
                await self.manager.subscriptions.move(name, positions, reason, self._drain_s(name))
                return
        await self.store.seek(self.name, name, positions, reason)

    async def resume(self, name: str, stream: StreamId) -> bool:
        """Continue a paused stream, also if another process or none serves the subscription. Return False if it is not
        paused, or if its pause is not stored yet. Raises NotFound; Unavailable while no silo serves its queue."""
        check_text("name", name)
        check_instance("stream", stream, StreamId, "StreamId('orders', '42')")
        if (served := self.manager.served.get(name)) is not None:
            queues = self.queues_with(stream)
            here = [served.deliveries[queue] for queue in queues if queue in served.deliveries]
            if here:
                return await self._resume_here(here, stream)
            if self.leased:
                raise _not_served(stream)
        return await self.store.resume(self.name, name, stream)

    async def _resume_here(self, deliveries: Sequence[Delivery], stream: StreamId) -> bool:
        """Resume the stream, and store that. Return False if it is not paused."""
        if any(delivery.over for delivery in deliveries):
            raise _not_served(stream)
        resumed = [delivery for delivery in deliveries if delivery.retries.resume(stream)]
        await self.manager.checkpointer.save()  # also of an earlier call, whose save failed
        if any(delivery.lost for delivery in resumed):
            raise _not_served(stream)
        return bool(resumed)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its progress; its dead letters stay. A process that serves it, or stands by, stops
        within a second. Raises NotFound."""
        check_text("name", name)
        self.manager.subscriptions.check_outside(name)
        for each in self._consumers_here(name):
            with suppress(NotFound):  # it ends at the moment
                await self._end(each, delete=False)
        await self._end(name, delete=True)
        for each in [*self._consumers_here(name), name]:  # consumers that joined meanwhile
            if (served := self.manager.served.get(each)) is not None and served.service.stored:
                self.manager.subscriptions.stop_fenced(each)

    async def _end(self, name: str, *, delete: bool) -> None:
        if (waiting := await self.standby.remove(name)) is not None:
            await waiting.service.completed(self._drain_s(name))
        await self._stop_serving(name, self._drain_s(name), delete=delete)

    def _consumers_here(self, name: str) -> list[str]:
        """The names under which this process serves the consumers of `name`, or stands by for them, if its mode is
        broadcast; also those of consumers that keep their positions."""
        here = [*self.manager.served, *self.manager.subscriptions.paused, *self.standby.waiting]
        return [each for each in here if is_position_of(each, name)]

    async def _consumers_of(self, name: str) -> list[str]:
        """The subscriptions of the consumers of `name`, if its mode is broadcast."""
        stored = await self.store.subscriptions(self.name)
        return [each.name for each in stored if is_position_of(each.name, name)]

    def _drain_s(self, name: str) -> float:
        """Only handlers get time to end: remote consumers do not run in this process."""
        served = self._served(name)
        return DRAIN_S if served is None or isinstance(served.service, HandlerService) else 0.0

    async def wait_until_caught_up(self, name: str) -> None:
        """Wait until a subscription that this process serves has finished all events stored before the call (except
        in paused streams). Raises NotFound if this process does not serve it, CorruptRecord if a queue is damaged."""
        served = await self.manager.subscriptions.settled(name)
        for queue, delivery in served.deliveries.items():
            end = await self.due_end(queue)
            await delivery.waiters.wait_until(end)
            if self.adapter.capabilities.rewindable:
                await self.adapter.resume_at(queue, end)  # raises if records are stored behind the end

    def exclusive(self, name: str) -> AbstractAsyncContextManager[None]:
        """Keep all other processes from serving the subscription meanwhile, silos of a cluster too. Raises Busy.

        The provider must have a data directory.
        """
        return self._locks.exclusive(name)


def _not_served(stream: StreamId) -> Unavailable:
    return Unavailable(f"the queue of {stream} is not served at this moment", hint="it may be moving: try again")
