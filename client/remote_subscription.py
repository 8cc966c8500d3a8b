"""A subscription with a handler in this process, whose events come from silos.

subscription = await client.subscribe("printer", "orders/*", handler)
"""

from __future__ import annotations

import asyncio

from ..streams.arguments import check_seconds
from ..streams.errors import InvalidArgument
from ..streams.handlers import Handler
from ..streams.subscriptions import SubscriptionDefinition
from .consumer import CLOSE_S, Consumer, SubscriptionHandle
from .handler_effects import HandlerWithEffects
from .handling import RemoteHandling
from .management import ManagementClient
from .plan import ConsumerPlan


class RemoteSubscription(SubscriptionHandle):
    """A subscription that a handler in this process consumes. Made by `await client.subscribe(..., handler)`."""

    def __init__(
        self, management: ManagementClient, plan: ConsumerPlan, handler: Handler | HandlerWithEffects, concurrency: int
    ) -> None:
        super().__init__(management, plan.name)
        self.consumer = Consumer(management, plan, self._wake)
        """Its state, gaps and statistics. Do not iterate it."""
        holdings = self.consumer.holdings
        self._handling = RemoteHandling(plan.name, holdings, handler, concurrency, self._attempts)
        self._closing: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch(), name=f"headrace subscription {plan.name}")

    def __repr__(self) -> str:
        return f"RemoteSubscription({self.name!r}, {self.consumer.id!r}, {self.consumer.state.value})"

    @property
    def definition(self) -> SubscriptionDefinition | None:
        """Definition of the subscription, as it is stored."""
        return self.consumer.definition

    def _wake(self) -> None:
        self._handling.wake()

    def _attempts(self) -> int:
        return self.definition.retry.max_attempts if self.definition else 1

    async def close(self, drain_s: float = CLOSE_S) -> None:
        """Stop consuming. Running handlers have `drain_s` seconds to end. The subscription stays durable: events are
        kept for it, and other consumers continue. Idempotent.

        Raises InvalidArgument if its own handler calls it, because it would wait for this handler.
        """
        check_seconds("drain_s", drain_s)
        if self._handling.in_handler():
            raise InvalidArgument(f"subscription {self.name!r} would wait for the handler that closes it: start a task")
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_s), name=f"headrace close {self.name}")
        # If the caller is cancelled, closing goes on.
        await asyncio.shield(self._closing)

    async def caught_up(self) -> None:
        """As `Consumer.caught_up`."""
        await self.consumer.caught_up()

    async def aclose(self) -> None:
        """`close`."""
        await self.close()

    async def _close(self, drain_s: float) -> None:
        await self._handling.stop(drain_s)
        await self.consumer.aclose()
        await self._watching
        await self._handling.notify_completed(drain_s)

    async def delete(self) -> None:
        """Stop consuming, and delete the subscription with its progress. Its other consumers end."""
        await self.close()
        await self._management.delete_subscription(self.name)

    async def ended(self) -> None:
        """Return when it is closed. Raise the error if it ended with one."""
        await self.consumer.ended()

    async def _watch(self) -> None:
        """If the consumer ends with an error, stop the handlers and notify the observer."""
        try:
            await self.consumer.ended()
        except Exception as error:  # noqa: BLE001 (any error may end it)
            await self._handling.stop(0.0)
            await self._handling.notify_error(error)
