"""The groups of remote consumers that a provider serves in this process.

A group is made when its first consumer joins, and locks its subscription for this process. It ends some seconds after
its last consumer left. With mode broadcast every consumer has a group of its own, with a subscription of its own that
holds its position; or without one, if the client keeps the position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ..agents import Edge, Group, Member, MemberStatistics, taken_over
from ..streams.background import BackgroundTasks, run_periodically, ticks
from ..streams.errors import (
    Busy,
    Fenced,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    NotSupported,
    Unavailable,
)
from ..streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Checkpoint,
    Mode,
    SubscriptionDefinition,
    check_consumer,
    is_consumers_position,
    is_position_of,
    of_consumer,
    parent_name,
    parent_of,
    redefined,
)
from .provider_core import ProviderCore

log = logging.getLogger("headrace.silo")

TICK_S = 0.25
KEEP_S = 5.0
"""How long a group without consumers is kept, in seconds: a returning consumer continues from the cache."""
CHECK_DELETED_S = 1.0
"""How often to look whether the subscriptions of consumers that keep their positions were deleted, in seconds."""
MAX_POSITIONS = 1000
"""Most consumers with positions of one subscription with mode broadcast, attached or not."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 600.0


class AttachedConsumer(NamedTuple):
    """A consumer and its group."""

    group: Group
    member: Member


class ConsumerGroups:
    """The groups of one provider's consumers, by the subscription that holds their position."""

    def __init__(
        self,
        provider: ProviderCore,
        edge: Edge,
        timeout_s: float,
        max_positions: int = MAX_POSITIONS,
        *,
        stands_by: bool = False,
    ) -> None:
        self._provider = provider
        self._stands_by = stands_by
        self._max_positions = max_positions
        self._edge = edge
        self._timeout_s = timeout_s
        self._groups: dict[str, Group] = {}
        self._parent_epochs: dict[str, int] = {}
        """By group of a consumer that keeps its positions: the epoch of its subscription when it joined. A deleted or
        new subscription has another."""
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """A lock lives while a task holds it or waits for it."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        provider: ProviderCore,
        timeout_s: float,
        edge: Edge | None = None,
        max_positions: int = MAX_POSITIONS,
        *,
        stands_by: bool = False,
    ) -> AsyncGenerator[ConsumerGroups]:
        """Open the groups for the length of an `async with`. A consumer that is silent for `timeout_s` seconds is given
        up, unless it asks for another time. `max_positions` is the most consumers of one subscription with mode
        broadcast. With `stands_by`, the consumers of a subscription that another process serves wait until it ends."""
        consumers = cls(provider, edge or Edge(), timeout_s, max_positions, stands_by=stands_by)
        async with BackgroundTasks() as background:
            background.start(consumers._tick(), f"headrace consumers {provider.name}")
            deleted = run_periodically(consumers._end_deleted, CHECK_DELETED_S)
            background.start(deleted, f"headrace deleted subscriptions {provider.name}")
            try:
                yield consumers
            finally:
                for group in consumers._groups.values():
                    _take_no_reports(group)

    def check(
        self, definition: SubscriptionDefinition, consumer: str, timeout_s: float, *, keeps_positions: bool
    ) -> None:
        """Check the arguments of `join` without the store. Raise InvalidArgument, NotSupported."""
        self.timeout(timeout_s)
        check_consumer(consumer)
        if definition.filter is not None:
            raise NotSupported(
                f"subscription {definition.name!r} has a filter, which only a handler in the silo applies"
            )
        if keeps_positions and definition.mode is not Mode.BROADCAST:
            raise InvalidArgument(
                f"subscription {definition.name!r} has mode {definition.mode.value}: only with mode broadcast a "
                "consumer can keep its position itself"
            )

    async def join(
        self,
        definition: SubscriptionDefinition,
        consumer: str,
        timeout_s: float,
        positions: Mapping[int, Checkpoint] | None = None,
        *,
        pulls: bool = False,
        concurrent: bool = False,
        divides_credit: bool = False,
        client: Hashable = None,
        started_us: int = 0,
    ) -> AttachedConsumer:
        """Attach a consumer to an existing subscription. If `timeout_s` is 0, the silo's timeout applies.

        With `positions`, which needs mode broadcast, the client keeps its position: the consumer continues from
        `positions`, and in other queues from the subscription's start. `pulls`, `concurrent`, `divides_credit` and
        `client` are as in `Group.join`. `started_us` is when the consumer was made.

        Raises NotFound if the subscription was deleted; Fenced if it has another definition now, or if a consumer with
        the same id is attached that was made later; Busy if handlers or another process serve the subscription, or it
        has too many consumers; LimitExceeded if mode broadcast has `max_positions` consumers already; InvalidArgument,
        NotSupported.
        """
        self.check(definition, consumer, timeout_s, keeps_positions=positions is not None)
        own = of_consumer(definition, consumer) if definition.mode is Mode.BROADCAST else definition
        async with self._locked(own.name):
            if own is not definition:
                await self._check_position_limit(definition, own)
            self._check_newest(own.name, consumer, started_us)
            group = await self._group(own, positions)
            member = group.join(
                consumer,
                self.timeout(timeout_s),
                pulls=pulls,
                concurrent=concurrent,
                divides_credit=divides_credit,
                client=client,
                started_us=started_us,
            )
            return AttachedConsumer(group, member)

    async def prepare(
        self, definition: SubscriptionDefinition, consumer: str, positions: Mapping[int, Checkpoint] | None
    ) -> dict[int, Checkpoint] | None:
        """Prepare for joining at several silos at once. With mode broadcast, store the consumer's position; or, if the
        client keeps it, return the positions in all queues. Raises as `join` does."""
        self._check_no_handler(definition)
        if definition.mode is not Mode.BROADCAST:
            return None
        own = of_consumer(definition, consumer)
        async with self._locked(own.name):
            await self._check_position_limit(definition, own)
            if positions is not None:
                return {**await self._provider.positions(definition.selector, definition.start), **positions}
            await self._provider.ensure_subscription(own)
        return None

    async def _group(self, definition: SubscriptionDefinition, positions: Mapping[int, Checkpoint] | None) -> Group:
        group = self._groups.get(definition.name)
        service = self._provider.service_of(definition.name)
        if group is not None and service is group:
            if group.stored and group.definition != definition:  # this process has not noticed yet that it was deleted
                self._provider.manager.subscriptions.stop_fenced(definition.name)
                raise Unavailable(f"subscription {parent_name(definition.name)!r} was created anew: connect again")
            if group.stored and positions is None:
                return group
            await self._end(definition.name, group, taken_over(definition.name.partition(CONSUMER_SEPARATOR)[2]))
        elif service is not None:
            raise _handled(definition)
        queues = self._provider.queues_of(definition.selector)
        group = Group(definition, self._edge, stored=positions is None, queues=queues)
        start, epoch = None, 0
        if positions is not None:
            epoch = await self._parent_epoch(definition)
            start = {**await self._provider.positions(definition.selector, definition.start), **positions}
        elif is_consumers_position(definition):
            await self._provider.ensure_subscription(definition)  # only if the consumer's subscription exists
        # A group never creates its subscription: it may have been deleted since the consumer's call looked it up.
        stands_by = self._stands_by and group.stored
        await self._provider.serve(definition, group, start, stands_by=stands_by, creates=False)
        self._groups[definition.name], self._parent_epochs[definition.name] = group, epoch
        return group

    async def _parent_epoch(self, own: SubscriptionDefinition) -> int:
        """Return the epoch of the subscription of a consumer that keeps its positions. Raises NotFound, Fenced."""
        parent = parent_of(own)
        stored = await self._provider.store.attach(self._provider.name, parent.name, exclusive=False)
        if stored.definition != parent:
            raise redefined(parent.name)
        return stored.epoch

    def _check_newest(self, name: str, consumer: str, started_us: int) -> None:
        """Of two consumers with the same id, each could otherwise end the other at another silo."""
        group = self._groups.get(name)
        member = None if group is None else group.members.get(consumer)
        if member is not None and member.attached and 0 < started_us < member.started_us:
            raise taken_over(consumer)

    def _check_no_handler(self, definition: SubscriptionDefinition) -> None:
        service = self._provider.service_of(definition.name)
        if service is not None and not isinstance(service, Group):
            raise _handled(definition)

    async def _check_position_limit(self, definition: SubscriptionDefinition, own: SubscriptionDefinition) -> None:
        """Raise LimitExceeded for a new id above the limit: each id needs a stored position and a group."""
        if own.name in self._groups:
            return
        stored = [each.name for each in await self._provider.store.subscriptions(self._provider.name)]
        names = {name for name in (*stored, *self._groups) if is_position_of(name, definition.name)}
        if own.name not in names and len(names) >= self._max_positions:
            raise LimitExceeded(
                f"subscription {definition.name!r} has positions of {self._max_positions:,} consumers already, which "
                "is the limit with mode broadcast: let a consumer come back under the id that it had"
            )

    async def _end(self, name: str, group: Group, error: Fenced) -> None:
        """End the group of a consumer that keeps its positions, or kept them until now."""
        group.dissolve(error)
        with suppress(NotFound):  # it ends at the moment
            await self._provider.withdraw(name, 0.0)

    def find(self, definition: SubscriptionDefinition, consumer: str) -> AttachedConsumer | None:
        """Return a consumer and its group; None if it is not attached."""
        name = of_consumer(definition, consumer).name if definition.mode is Mode.BROADCAST else definition.name
        group = self._groups.get(name)
        member = None if group is None else group.members.get(consumer)
        return None if group is None or member is None else AttachedConsumer(group, member)

    def joined(self, name: str, consumer: str) -> SubscriptionDefinition | None:
        """Return the subscription called `name` if the consumer is attached to it here, else None."""
        for group in (self._groups.get(name), self._groups.get(f"{name}{CONSUMER_SEPARATOR}{consumer}")):
            if group is not None and consumer in group.members:
                return replace(group.definition, name=name)
        return None

    def members(self, definition: SubscriptionDefinition) -> Sequence[MemberStatistics]:
        """The attached consumers of a subscription."""
        own = definition.name
        names = [name for name in self._groups if name == own or is_position_of(name, own)]
        return [each for name in names for each in self._groups[name].statistics()]

    async def save(self) -> None:
        """Save the acknowledgements so far."""
        await self._provider.manager.checkpointer.save()

    def timeout(self, timeout_s: float) -> float:
        """Return the timeout of a consumer that asks for `timeout_s`. Raise InvalidArgument."""
        if not timeout_s:
            return self._timeout_s
        if not MIN_TIMEOUT_S <= timeout_s <= MAX_TIMEOUT_S:
            raise InvalidArgument(
                f"session_timeout_ms is {MIN_TIMEOUT_S * 1000:.0f} to {MAX_TIMEOUT_S * 1000:,.0f}, or 0 for the "
                f"silo's own, not {timeout_s * 1000:,.0f}"
            )
        return timeout_s

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncGenerator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    async def _tick(self) -> None:
        async for late_s in ticks(TICK_S):
            for name, group in list(self._groups.items()):
                if late_s:  # this process did not run: its consumers are not late
                    group.extend_timeouts(late_s)
                try:
                    await self._check_group(name, group)
                except Exception:
                    log.exception("the check of the consumers of subscription %r failed, and is tried again", name)

    async def _check_group(self, name: str, group: Group) -> None:
        group.tick()
        if not group.members and asyncio.get_running_loop().time() - group.empty_since > KEEP_S:
            await self._end_if_empty(name, group)

    async def _end_deleted(self) -> None:
        """End the consumers that keep their positions and whose subscription was deleted, here or elsewhere. The store
        fences only processes that save progress there."""
        kept = [(name, group, self._parent_epochs[name]) for name, group in self._groups.items() if not group.stored]
        if not kept:
            return
        parents = sorted({parent_name(name) for name, _, _ in kept})
        epochs = (await self._provider.store.control_requests(self._provider.name, parents)).epochs
        for name, group, epoch in kept:
            if epochs.get(parent_name(name)) != epoch:
                try:
                    await self._end_served(name, group, Fenced(f"subscription {parent_name(name)!r} was deleted"))
                except Exception:
                    log.exception("the consumer %r of a deleted subscription did not end, and is ended again", name)

    async def _end_served(self, name: str, group: Group, error: Fenced) -> None:
        async with self._locked(name):
            if self._provider.service_of(name) is group:
                await self._end(name, group, error)

    async def _end_if_empty(self, name: str, group: Group) -> None:
        async with self._locked(name):
            if group.members or self._groups.get(name) is not group:
                return
            del self._groups[name], self._parent_epochs[name]
            if self._provider.service_of(name) is group:
                try:
                    await self._provider.withdraw(name, 0.0)
                except HeadraceError as error:
                    log.warning(
                        "progress of subscription %r was not saved after its last consumer left: %s", name, error
                    )


def _take_no_reports(group: Group) -> None:
    """This process takes no more calls. Consumers that pulled cannot acknowledge, so no queue waits for them."""
    for member in group.members.values():
        member.pulls = False
    for delivery in group.deliveries.values():
        delivery.waiters.notify()


def _handled(definition: SubscriptionDefinition) -> Busy:
    return Busy(f"subscription {definition.name!r} is served by a handler in the silo: it has no remote consumers")
