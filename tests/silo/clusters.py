"""Several silos of one cluster in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from headrace.silo.config import ClusterConfig, SiloConfig
from headrace.silo.host import Silo

PATIENCE_S = 30


class Silos(list[Silo]):
    """The running silos, by number."""

    def __init__(self, config: SiloConfig) -> None:
        super().__init__()
        self._config = config
        self._stacks: list[AsyncExitStack] = []

    async def start(self, number: int) -> None:
        """Start the next silo, or a stopped one again."""
        stack = AsyncExitStack()
        silo = await stack.enter_async_context(Silo.opened(_numbered(self._config, number)))
        if number < len(self):
            self[number], self._stacks[number] = silo, stack
        else:
            self.append(silo)
            self._stacks.append(stack)

    async def stop(self, number: int) -> None:
        """In order."""
        await self._stacks[number].aclose()

    async def shared(self, among: Collection[int] | None = None) -> None:
        """Return when these silos, or all, share all queues evenly, and each of them knows it."""
        silos = [silo for number, silo in enumerate(self) if among is None or number in among]
        async with asyncio.timeout(PATIENCE_S):
            while not _even(silos):  # noqa: ASYNC110 (silos do not notify)
                await asyncio.sleep(0.02)


def _even(silos: Sequence[Silo]) -> bool:
    providers = silos[0].providers.values()
    wanted = [(provider.name, queue) for provider in providers for queue in range(provider.queues)]
    has = [sum(len(queues(silo, name)) for name in silo.providers) for silo in silos]
    known = [
        silo.clustered_silo is not None and all(silo.clustered_silo.owner(*queue) for queue in wanted) for silo in silos
    ]
    return sum(has) == len(wanted) and max(has) - min(has) <= 1 and all(known)


def queues(silo: Silo, provider: str = "default") -> list[int]:
    """Return the queues that a silo has leases of."""
    return sorted(silo.providers[provider].manager.leases or ())


@asynccontextmanager
async def clustered(config: SiloConfig, count: int) -> AsyncGenerator[Silos]:
    """Run `count` silos, which share the queues evenly. The first stops first."""
    silos = Silos(config)
    try:
        for number in range(count):
            await silos.start(number)
        await silos.shared()
        yield silos
    finally:
        for number in range(len(silos)):
            await silos.stop(number)


def _numbered(config: SiloConfig, number: int) -> SiloConfig:
    times = ClusterConfig(
        name=f"silo-{number}",
        ca=None if config.cluster is None else config.cluster.ca,
        period_s=0.1,
        lease_s=5,
        dead_after_s=2,
        maturity_s=0.2,
        public_address=None if config.cluster is None else config.cluster.public_address,
    )
    grpc = config.grpc if not number else msgspec.structs.replace(config.grpc, port=0)
    return msgspec.structs.replace(config, cluster=times, grpc=grpc)
