"""Subscriptions that another process serves, and for which this process stands by: it takes over when that process
ends. It stands by also while its own former service of a subscription ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ..agents import DeliveryService
from ..streams.background import BackgroundTasks, run_periodically
from ..streams.errors import Fenced, HeadraceError, NotFound
from ..streams.subscriptions import SubscriptionDefinition, redefined
from .subscription_locks import SubscriptionLocks

log = logging.getLogger("headrace.silo")

POLL_S = 0.1
"""How often a process that stands by looks whether the serving process has ended, in seconds."""
CHECK_DELETED_S = 1.0
"""How often it looks whether a subscription was deleted, in seconds."""


@dataclass(eq=False)
class StandbySubscription:
    """A subscription for which this process stands by."""

    definition: SubscriptionDefinition
    service: DeliveryService
    reason: str
    """Which process serves it, or that it still ends in this one, as of the last look."""


class Standby:
    """The subscriptions of one provider for which this process stands by."""

    def __init__(
        self,
        locks: SubscriptionLocks,
        serve: Callable[[SubscriptionDefinition, DeliveryService], Awaitable[None]],
        stored: Callable[[], Awaitable[Iterable[SubscriptionDefinition]]],
        provider: str,
    ) -> None:
        """`serve` begins to serve a subscription whose lock this process has. `stored` returns the subscriptions of the
        control store."""
        self._locks = locks
        self._serve = serve
        self._stored = stored
        self._provider = provider
        self._waiting: dict[str, StandbySubscription] = {}
        self.waiting: Mapping[str, StandbySubscription] = self._waiting
        """By name."""
        self._taking_over = asyncio.Lock()
        self._check_at = 0.0
        """Loop time from which on to look for subscriptions that were deleted."""
        self._looking = BackgroundTasks()
        self._ending = BackgroundTasks()

    def add(self, definition: SubscriptionDefinition, service: DeliveryService, reason: str) -> None:
        """Stand by for a stored subscription, until `remove`."""
        self._waiting[definition.name] = StandbySubscription(definition, service, reason)
        log.info("%s: this process stands by, and takes over when that ends", reason)
        if not self._looking:
            self._looking.start(self._run(), f"headrace standby {self._provider}")

    async def remove(self, name: str) -> StandbySubscription | None:
        """Stand by for a subscription no longer. Return None if this process does not stand by for it, maybe because it
        has just taken over."""
        async with self._taking_over:
            return self._waiting.pop(name, None)

    async def aclose(self) -> list[StandbySubscription]:
        """Stand by for nothing any longer. Return the subscriptions that this process has not taken over."""
        await self._looking.aclose()
        await self._ending.join()
        left = list(self._waiting.values())
        self._waiting.clear()
        return left

    async def _run(self) -> None:
        await run_periodically(self._take_over_free, POLL_S)

    async def _take_over_free(self) -> None:
        """Take over all subscriptions that no other process serves now."""
        async with self._taking_over:
            if not self._waiting:
                return
            looked_at = list(self._waiting)
            refused = await self._locks.take_free(looked_at)
            for name, reason in refused.items():
                self._waiting[name].reason = reason
            free = [name for name in looked_at if name not in refused]
            failures: list[Exception] = []
            try:
                while free:
                    try:
                        await self._take_over(free[-1])
                    except Exception as error:  # noqa: BLE001 (the others do not wait for it)
                        self._locks.release(free[-1])
                        failures.append(error)
                    free.pop()
            finally:  # if this call is cancelled
                for name in free:
                    self._locks.release(name)
            if failures:
                raise failures[0]
            await self._end_deleted(refused)

    async def _end_deleted(self, names: Collection[str]) -> None:
        """Once a second, stand by no longer for those of the subscriptions that were deleted, or made anew with another
        definition. Another process may serve the new one."""
        now = asyncio.get_running_loop().time()
        if now < self._check_at or not names:
            return
        self._check_at = now + CHECK_DELETED_S
        stored = {one.name: one for one in await self._stored()}
        for name in names:
            if stored.get(name) != self._waiting[name].definition:
                self._end(name, redefined(name))

    def _end(self, name: str, error: HeadraceError) -> None:
        log.info("subscription %r: this process does not stand by any longer: %s", name, error)
        self._ending.start(self._waiting.pop(name).service.fenced(_as_fenced(error)), f"headrace standby {name}")

    async def _take_over(self, name: str) -> None:
        one = self._waiting[name]
        try:
            await self._serve(one.definition, one.service)
        except (NotFound, Fenced) as error:  # it was deleted
            self._locks.release(name)
            self._end(name, error)
        else:
            log.info("subscription %r: no other process serves it any longer, so this one takes over", name)
            del self._waiting[name]


def _as_fenced(error: HeadraceError) -> Fenced:
    return error if isinstance(error, Fenced) else Fenced(str(error))
