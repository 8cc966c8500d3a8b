"""Consume batches from a provider in this process, as a client does from a silo: with credit and acknowledgements.

The client's code calls the same services that a silo offers over gRPC, over a connection within the process. So both
behave the same, and a consumer in this process is a member of its group like remote ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from ..client.consuming_client import ConsumingClient
from .consumer_groups import ConsumerGroups
from .in_process import InProcessTransport
from .provider_core import ProviderCore
from .services.consumer import ConsumerService, Gateways
from .services.subscriptions import SubscriptionService
from .services.visible import VisibleBounds

TIMEOUT_S = 30.0
SESSION_TIMEOUT_S = 10.0


@asynccontextmanager
async def consuming(
    provider: ProviderCore, consumers: ConsumerGroups | None, gateways: Gateways | None
) -> AsyncGenerator[ConsumingClient]:
    """Connect the client's side of consuming to a provider, for the length of an `async with`.

    At its end, open consumers are closed. `consumers` are the groups that a silo serves already; None: make groups.
    """
    async with AsyncExitStack() as stack:
        if consumers is None:
            opening = ConsumerGroups.opened(provider, SESSION_TIMEOUT_S, stands_by=True)
            consumers = await stack.enter_async_context(opening)
        yield await stack.enter_async_context(_connected(provider, consumers, gateways))


@asynccontextmanager
async def _connected(
    provider: ProviderCore, consumers: ConsumerGroups, gateways: Gateways | None
) -> AsyncGenerator[ConsumingClient]:
    providers, all_consumers = {provider.name: provider}, {provider.name: consumers}
    visible = VisibleBounds()
    consuming = ConsumerService(providers, all_consumers, visible, gateways)
    services = (consuming, SubscriptionService(providers, all_consumers, visible))
    transport = InProcessTransport([method for service in services for method in service.methods()])
    local = ConsumingClient(transport, provider.name, TIMEOUT_S)
    try:
        yield local
    finally:
        await local.close_consumers()
        if gateways is None:
            await consuming.aclose()
        await transport.aclose()
