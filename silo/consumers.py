"""The groups of remote consumers that a provider serves here.

A group is made when its first consumer comes, with the right to serve its subscription in this process, and given up
some seconds after the last one went. With mode broadcast every consumer has a group to itself, over a subscription of
its own that holds its position, or over none where the client keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

from ..agents import Edge, Group, Member, MemberStatistics
from ..streams.errors import Busy, Fenced, HeadraceError, InvalidArgument, LimitExceeded, NotSupported
from ..streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Checkpoint,
    Mode,
    SubscriptionDefinition,
    check_consumer,
    of_consumer,
)
from .provider import Provider

log = logging.getLogger("headrace.silo")

TICK_S = 0.25
KEEP_S = 5.0
"""How long a group without consumers is kept: one that comes back goes on from what is in the cache."""
MAX_POSITIONS = 1000
"""Consumers with a position of their own that a subscription with mode broadcast has, attached or not."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 600.0


class Place(NamedTuple):
    """A consumer in its group."""

    group: Group
    member: Member


class Consumers:
    """Consumers of one provider, by the subscription that holds their position."""

    def __init__(self, provider: Provider, edge: Edge, timeout_s: float) -> None:
        self._provider = provider
        self._edge = edge
        self._timeout_s = timeout_s
        self._groups: dict[str, Group] = {}
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """Each for as long as somebody holds it or waits for it."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, provider: Provider, timeout_s: float, edge: Edge | None = None) -> AsyncGenerator[Consumers]:
        """For the length of an `async with`. A consumer that is not heard for `timeout_s` seconds is gone, where it
        does not ask for another time."""
        consumers = cls(provider, edge or Edge(), timeout_s)
        ticking = asyncio.create_task(consumers._tick(), name=f"headrace consumers {provider.name}")
        provider.consumers = consumers
        try:
            yield consumers
        finally:
            provider.consumers = None
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def check(
        self, definition: SubscriptionDefinition, consumer: str, timeout_s: float, *, keeps_positions: bool
    ) -> None:
        """What `join` refuses whatever is stored. Raises InvalidArgument, NotSupported."""
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
    ) -> Place:
        """A consumer attaches to a subscription that exists. `timeout_s` 0 is the silo's own. With `positions`, which
        needs mode broadcast, the client keeps its position: it goes on from those, or from the subscription's start.
        `pulls` is as in `Group.join`.

        Raises Busy where handlers or another process serve the subscription, or it has too many consumers;
        LimitExceeded where a consumer with mode broadcast would be one too many; InvalidArgument, NotSupported.
        """
        self.check(definition, consumer, timeout_s, keeps_positions=positions is not None)
        own = of_consumer(definition, consumer) if definition.mode is Mode.BROADCAST else definition
        async with self._locked(own.name):
            if own is not definition:
                await self._check_room(definition, own)
            group = await self._group(own, positions)
            return Place(group, group.join(consumer, self.timeout(timeout_s), pulls=pulls))

    async def prepare(
        self, definition: SubscriptionDefinition, consumer: str, positions: Mapping[int, Checkpoint] | None
    ) -> dict[int, Checkpoint] | None:
        """What has to be there before several silos may each let a consumer join. With mode broadcast its position is
        pinned; where the client keeps it, that of all queues is returned. Raises as `join` does."""
        self._check_no_handler(definition)
        if definition.mode is not Mode.BROADCAST:
            return None
        own = of_consumer(definition, consumer)
        async with self._locked(own.name):
            await self._check_room(definition, own)
            if positions is not None:
                return {**await self._provider.positions(definition.selector, definition.start), **positions}
            await self._provider.ensure_subscription(own)
        return None

    async def moves(self, definition: SubscriptionDefinition, consumer: str) -> int:
        """How often the position that a consumer goes by was moved so far."""
        own = of_consumer(definition, consumer) if definition.mode is Mode.BROADCAST else definition
        return await self._provider.moves(own.name)

    async def _group(self, definition: SubscriptionDefinition, positions: Mapping[int, Checkpoint] | None) -> Group:
        group = self._groups.get(definition.name)
        served = self._provider.manager.served.get(definition.name)
        if group is not None and served is not None and served.service is group:
            if group.stored and positions is None:
                return group
            await self._end(definition.name, group)
        elif served is not None:
            raise _handled(definition)
        queues = self._provider.queues_of(definition.selector)
        group = Group(definition, self._edge, stored=positions is None, queues=queues)
        start = None
        if positions is not None:
            start = {**await self._provider.positions(definition.selector, definition.start), **positions}
        await self._provider.serve(definition, group, start)
        self._groups[definition.name] = group
        return group

    def _check_no_handler(self, definition: SubscriptionDefinition) -> None:
        served = self._provider.manager.served.get(definition.name)
        if served is not None and not isinstance(served.service, Group):
            raise _handled(definition)

    async def _check_room(self, definition: SubscriptionDefinition, own: SubscriptionDefinition) -> None:
        """Every new id is another position to keep, and a group to serve: a client that makes up ids is stopped."""
        if own.name in self._groups:
            return
        stored = [each.name for each in await self._provider.store.subscriptions(self._provider.name)]
        prefix = f"{definition.name}{CONSUMER_SEPARATOR}"
        names = {name for name in (*stored, *self._groups) if name.startswith(prefix)}
        if own.name not in names and len(names) >= MAX_POSITIONS:
            raise LimitExceeded(
                f"subscription {definition.name!r} has positions of {MAX_POSITIONS:,} consumers already, which is the "
                "limit with mode broadcast: let a consumer come back under the id that it had"
            )

    async def _end(self, name: str, group: Group) -> None:
        """A consumer that keeps its position, or kept it until now, begins anew, from where it says."""
        consumer = name.partition(CONSUMER_SEPARATOR)[2]
        group.dissolve(Fenced(f"another connection took over consumer {consumer!r}: give each an id of its own"))
        await self._provider.withdraw(name, 0.0)

    def find(self, definition: SubscriptionDefinition, consumer: str) -> Place | None:
        """A consumer that is attached, if it is."""
        name = of_consumer(definition, consumer).name if definition.mode is Mode.BROADCAST else definition.name
        group = self._groups.get(name)
        member = None if group is None else group.members.get(consumer)
        return None if group is None or member is None else Place(group, member)

    def members(self, definition: SubscriptionDefinition) -> Sequence[MemberStatistics]:
        """The consumers that are attached to a subscription."""
        own = f"{definition.name}{CONSUMER_SEPARATOR}"
        names = [name for name in self._groups if name == definition.name or name.startswith(own)]
        return [each for name in names for each in self._groups[name].statistics()]

    async def save(self) -> None:
        """Make durable what was acknowledged so far."""
        await self._provider.manager.save()

    def timeout(self, timeout_s: float) -> float:
        """How long a consumer that asks for `timeout_s` is waited for. Raises InvalidArgument."""
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
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(TICK_S)
            late_s = loop.time() - began - TICK_S
            for name, group in list(self._groups.items()):
                if late_s > TICK_S:  # it was this process that did not listen
                    group.excuse(late_s)
                try:
                    await self._look_at(name, group)
                except Exception:
                    log.exception("looking at the consumers of %s failed, and is tried again", name)

    async def _look_at(self, name: str, group: Group) -> None:
        group.tick()
        if not group.members and self._idle_s(group) > KEEP_S:
            await self._give_up(name, group)

    def _idle_s(self, group: Group) -> float:
        return asyncio.get_running_loop().time() - group.empty_since

    async def _give_up(self, name: str, group: Group) -> None:
        async with self._locked(name):
            if group.members or self._groups.get(name) is not group:
                return
            del self._groups[name]
            served = self._provider.manager.served.get(name)
            if served is not None and served.service is group:
                try:
                    await self._provider.withdraw(name, 0.0)
                except HeadraceError as error:
                    log.warning("progress of %s was not saved when its last consumer had gone: %s", name, error)


def _handled(definition: SubscriptionDefinition) -> Busy:
    return Busy(f"subscription {definition.name!r} is served by a handler in the silo: it has no remote consumers")
