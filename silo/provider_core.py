"""The part of a provider that the services of a silo use: publishing, serving, delays and statistics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..agents import DeliveryService, HandlerService
from ..streams.arguments import check_seconds
from ..streams.background import BackgroundTasks
from ..streams.errors import InvalidArgument, NotSupported
from ..streams.handlers import SubscriptionDeclaration
from .event_publisher import EventPublisher
from .handler_services import handler_service
from .opening import ProviderParts
from .subscription_host import DRAIN_S, SubscriptionHost
from .views import ProviderStatistics, provider_statistics

if TYPE_CHECKING:
    from .outbox import OutboxService


class ProviderCore(EventPublisher, SubscriptionHost):
    """An open provider, without the ways in which code of this process subscribes."""

    def __init__(self, parts: ProviderParts) -> None:
        super().__init__(parts)
        self.delays = parts.delays
        self._parts = parts
        self.outbox: OutboxService | None = None
        """Moves events from an outbox, if the provider has the option `outbox`."""
        self.origin = parts.origin
        """Id of the provider. A provider that is made anew has another one."""
        self.closing_receivers = BackgroundTasks()
        """Tasks that close receivers which nothing waits for. The adapter closes after them."""
        self._background = BackgroundTasks()
        self._closing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the queues, and publish delayed events that are due."""
        self.manager.start()
        if self.delays is not None:
            self.delays.start()
        if self.outbox is not None:
            self.outbox.start()

    async def make_service(self, declared: SubscriptionDeclaration) -> HandlerService:
        """Return the service of a handler. Raises the errors of `HandlerEffects.check`."""
        return await handler_service(declared, self._parts, self.codecs)

    async def open_outbox(self, url: str) -> None:
        """Let `begin` move the outbox of the database at this URL. Raises InvalidArgument, NotSupported."""
        from .outbox import OutboxService  # noqa: PLC0415 (it loads drivers of databases)

        if not self.adapter.capabilities.idempotent:
            raise NotSupported(
                f"provider {self.name!r}: an outbox needs an adapter with idempotent producers", option="outbox"
            )
        try:
            self.outbox = await OutboxService.opened(url, self)
        except (InvalidArgument, NotSupported) as error:
            raise type(error)(f"provider {self.name!r}: {error}", option="outbox") from None

    async def aclose(self, drain_s: float = DRAIN_S) -> None:
        """Stop reading, give running handlers `drain_s` seconds to end, save their progress, and close. Idempotent."""
        check_seconds("drain_s", drain_s)
        if self._closing is None:
            for name in [*self.manager.served, *self.manager.subscriptions.paused]:
                self.manager.subscriptions.check_outside(name)
            self._closing = self._background.hold(self._close(drain_s), f"headrace close {self.name}")
        # A cancelled caller does not leave the provider half closed.
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        await self.stopping.join()
        served: list[DeliveryService] = [one.service for one in await self.standby.aclose()]
        served += [one.service for one in self.manager.served.values()]
        served += [one.service for one in self.manager.subscriptions.paused.values()]
        try:
            if self.outbox is not None:
                await self.outbox.aclose()
            await self.manager.aclose(drain_s)
            for service in served:
                await service.completed(drain_s)
        finally:
            self._locks.release_all()
            await self.closing_receivers.join()
            await self._parts.aclose()

    def statistics(self) -> ProviderStatistics:
        """A cheap snapshot of queues, caches, cursors and deliveries."""
        statistics = provider_statistics(
            self.manager,
            self.published_events,
            self.published_bytes,
            {name: one.reason for name, one in self.standby.waiting.items()},
        )
        if self.outbox is not None:
            statistics = statistics._replace(outbox=self.outbox.statistics())
        if self.delays is None:
            return statistics
        stored, released, failing = self.delays.delay_statistics()
        return statistics._replace(delays_stored_events=stored, released_events=released, release_failing=bool(failing))
