"""Everything that a silo offers to programs of others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from ..access import PEER
from ..consumers import Consumers
from ..local import LocalConnection
from . import publisher
from .cluster import ClusterService
from .consumer import ConsumerService
from .guard import Guard, Method
from .reader import ReaderService
from .subscriptions import SubscriptionService

if TYPE_CHECKING:
    from ..host import Silo


@asynccontextmanager
async def opened(silo: Silo) -> AsyncGenerator[Callable[[Guard], Sequence[Method]]]:
    """The services' methods, for the length of an `async with`."""
    timeout_s = silo.config.grpc.session_timeout_s
    async with AsyncExitStack() as stack:
        consumers = {
            name: await stack.enter_async_context(Consumers.opened(provider, timeout_s))
            for name, provider in silo.providers.items()
        }
        cluster = await stack.enter_async_context(ClusterService.opened(silo))
        clustering = silo.clustering
        consuming = ConsumerService(silo.providers, consumers, clustering.relays if clustering is not None else None)
        stack.push_async_callback(consuming.aclose)

        def methods(guard: Guard) -> Sequence[Method]:
            every = [
                *publisher.methods(silo.providers),
                *consuming.methods(),
                *SubscriptionService(silo.providers, consumers, clustering).methods(),
                *ReaderService(silo.providers).methods(),
                *cluster.methods(guard),
            ]
            if clustering is not None:
                clustering.here = LocalConnection(every, PEER)
            return every

        yield methods
