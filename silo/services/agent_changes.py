"""Changes of a silo's agents: stopping, starting and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.message import Message

from ...agents import SendBudget
from ...server.guard import CallGuard
from ...streams.background import BackgroundTasks
from ...streams.errors import HeadraceError, Unavailable
from ..config import SiloConfig
from ..lag_history import LagHistory
from ..provider import Provider
from ..provider_core import ProviderCore
from ..service_limits import ServiceLimits
from . import consumer

if TYPE_CHECKING:
    from ..clustered_silo import ClusteredSilo

CALL_S = 30.0
"""Time that a silo has for a change, in seconds, besides the drain time of the events in flight."""


class RunningSilo(Protocol):
    """The parts of a silo that its services use."""

    @property
    def config(self) -> SiloConfig: ...

    @property
    def providers(self) -> Mapping[str, Provider]: ...

    @property
    def grpc_address(self) -> str | None: ...

    @property
    def clustered_silo(self) -> ClusteredSilo | None: ...

    @property
    def limits(self) -> ServiceLimits: ...

    @property
    def lag_history(self) -> LagHistory: ...

    @property
    def read_budget(self) -> SendBudget: ...


class AgentChanges:
    """Made by `opened`. It finishes each change that it began, also if the caller stops waiting."""

    def __init__(self, silo: RunningSilo) -> None:
        self._silo = silo
        self._state = "running"
        self._guard: CallGuard | None = None
        self._changing = asyncio.Lock()
        self._changes = BackgroundTasks()

    @classmethod
    @asynccontextmanager
    async def opened(cls, silo: RunningSilo) -> AsyncGenerator[AgentChanges]:
        changes = cls(silo)
        try:
            yield changes
        finally:
            await changes._changes.join()

    def served_by(self, guard: CallGuard) -> None:
        """Let `guard` refuse consumers while the silo is drained."""
        self._guard = guard

    @property
    def state(self) -> str:
        """The state of this silo."""
        clustered_silo = self._silo.clustered_silo
        if clustered_silo is None or clustered_silo.view is None or not clustered_silo.membership.leaving:
            return self._state
        return "drained" if clustered_silo.membership.drained else "draining"

    # ---- this silo -------------------------------------------------------------------------------------------------

    async def stop(self, provider: ProviderCore, queues: Sequence[int], drain_s: float) -> None:
        """Stop agents of this silo. In a cluster, the store knows which ones."""
        if self._silo.clustered_silo is not None:
            await self._change(provider.manager.control_requests.apply(drain_s))
        else:
            await self._change(provider.manager.queue_host.stop_agents(queues, drain_s))

    async def start(self, provider: ProviderCore, queues: Sequence[int]) -> None:
        """Start agents of this silo. In a cluster, the store knows which ones."""
        if self._silo.clustered_silo is not None:
            await self._change(provider.manager.control_requests.apply())
        else:
            await self._change(self._start(provider, queues))

    async def drain(self, drain_s: float) -> None:
        await self._change(self._drain(drain_s))

    async def undrain(self) -> None:
        await self._change(self._undrain())

    async def _start(self, provider: ProviderCore, queues: Sequence[int]) -> None:
        await provider.manager.queue_host.start_agents(queues)
        self._open_again()

    async def _drain(self, drain_s: float) -> None:
        self._state = "draining"
        self._doors.close(consumer.SERVICE)
        if (clustered_silo := self._silo.clustered_silo) is not None:
            await clustered_silo.membership.drain(drain_s)
        else:
            providers = self._silo.providers.values()
            stopping = (one.manager.queue_host.stop_agents(range(one.queues), drain_s) for one in providers)
            await asyncio.gather(*stopping)
        self._state = "drained"

    async def _undrain(self) -> None:
        if (clustered_silo := self._silo.clustered_silo) is not None:
            await clustered_silo.membership.undrain()
        else:
            for provider in self._silo.providers.values():
                await provider.manager.queue_host.start_agents(range(provider.queues))
        self._open_again()

    def _open_again(self) -> None:
        if self._state != "running":
            self._state = "running"
            self._doors.reopen(consumer.SERVICE)

    @property
    def _doors(self) -> CallGuard:
        assert self._guard is not None
        return self._guard

    # ---- all silos -------------------------------------------------------------------------------------------------

    async def apply_everywhere(
        self, clustered_silo: ClusteredSilo, provider: ProviderCore, method: str, request: Message, drain_s: float = 0.0
    ) -> None:
        """Have each silo that serves the provider apply the change in the store. Raise Unavailable with the names of
        the silos that did not confirm it."""
        await self._finish(_by_all(clustered_silo, provider, method, request, drain_s))

    async def _change(self, work: Awaitable[None]) -> None:
        """Make one change at a time, and finish it: no agent stays half stopped."""

        async def change() -> None:
            async with self._changing:
                await work

        await self._finish(change())

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` to its end, also if the caller is cancelled."""
        await self._changes.finish(work, "headrace change of agents")


async def _by_all(
    clustered_silo: ClusteredSilo, provider: ProviderCore, method: str, request: Message, drain_s: float
) -> None:
    message = request.SerializeToString()
    silos = [silo.name for silo in clustered_silo.silos.values() if provider.name in silo.serves]
    calls = (
        clustered_silo.call(silo, f"ClusterService/{method}", message, timeout_s=drain_s + CALL_S) for silo in silos
    )
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failed = {silo: answer for silo, answer in zip(silos, answers, strict=True) if isinstance(answer, BaseException)}
    for error in failed.values():
        if not isinstance(error, HeadraceError):
            raise error
    if failed:
        silo, error = next(iter(failed.items()))
        raise Unavailable(
            f"{method} is stored, and silos apply it within seconds; not confirmed by {', '.join(failed)} ({silo}: "
            f"{error}): see `headrace queues`, or repeat the command"
        )
