"""Put the gRPC services of a silo together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from ...agents import Edge, SendBudget
from ...server.guard import CallGuard
from ...server.methods import ServiceMethod
from ..consumer_groups import ConsumerGroups
from ..gateway import ClusterGateways
from ..provider import Provider
from . import publisher
from .agent_changes import RunningSilo
from .autoscaling import ExternalScaler
from .cluster import ClusterService
from .consumer import ConsumerService, Gateways
from .observation import ObservationService
from .reader import ReaderService
from .subscriptions import SubscriptionService
from .visible import VisibleBounds


@asynccontextmanager
async def opened(silo: RunningSilo) -> AsyncGenerator[Callable[[CallGuard], Sequence[ServiceMethod]]]:
    """Open the services for the length of an `async with`. The result returns their methods."""
    timeout_s = silo.config.grpc.session_timeout_s
    budget = SendBudget()
    async with AsyncExitStack() as stack:
        clustered_silo = silo.clustered_silo
        gateways = None if clustered_silo is None else ClusterGateways(clustered_silo, budget, silo.config.drain_s)
        consumers = {
            name: await stack.enter_async_context(_consumers(provider, timeout_s, Edge(budget=budget), gateways))
            for name, provider in silo.providers.items()
        }
        cluster = await stack.enter_async_context(ClusterService.opened(silo))
        visible = VisibleBounds()
        consuming = ConsumerService(silo.providers, consumers, visible, gateways)
        stack.push_async_callback(consuming.aclose)

        def methods(guard: CallGuard) -> Sequence[ServiceMethod]:
            every = [
                *publisher.methods(silo.providers, silo.limits),
                *consuming.methods(),
                *SubscriptionService(silo.providers, consumers, visible, clustered_silo, silo.limits).methods(),
                *ReaderService(silo.providers, visible, silo.read_budget, silo.limits).methods(),
                *cluster.methods(guard),
                *ObservationService(silo, consumers, silo.lag_history).methods(),
            ]
            if clustered_silo is not None:
                clustered_silo.serve(every)
            return [*every, *ExternalScaler(silo.providers, guard).methods()]

        yield methods


@asynccontextmanager
async def _consumers(
    provider: Provider, timeout_s: float, edge: Edge, gateways: Gateways | None
) -> AsyncGenerator[ConsumerGroups]:
    """Open the groups of remote consumers. Consumers of this process join them meanwhile."""
    async with ConsumerGroups.opened(provider, timeout_s, edge) as consumers:
        with provider.serving_consumers(consumers, gateways):
            yield consumers
