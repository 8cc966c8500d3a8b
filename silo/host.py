"""The silo process: its providers, the subscriptions that its modules declare, gRPC, metrics and health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ..agents import SendBudget
from ..server.access import Authenticator, ClusterMembers, NoTokens, TokenBook
from ..server.answers import HttpAnswer
from ..server.limits import UNLIMITED, ClientLimiter
from ..store.datadir import running_silos
from ..streams.background import BackgroundTasks
from ..streams.errors import Busy, InvalidArgument
from ..streams.handlers import SubscriptionDeclaration
from ..streams.histograms import Histogram
from ..streams.wording import counted
from .config import SiloConfig, check
from .lag_history import LagHistory
from .loop_delay import LoopDelay
from .metric_snapshots import Snapshot, StoreSnapshot, provider_snapshot
from .metrics import render
from .options import DEFAULT_ADAPTER
from .provider import Provider
from .service_limits import SERVICE_LIMITS, ServiceLimits
from .user_modules import declared_subscriptions

if TYPE_CHECKING:  # they load gRPC
    from starlette.types import ASGIApp

    from ..server.guard import CallGuard
    from ..server.methods import ServiceMethod
    from .clustered_silo import ClusteredSilo
    from .dashboard.application import Dashboard

log = logging.getLogger("headrace.silo")

CONSUMING = "headrace.v1.ConsumerService"


class Silo:
    """A host process. `opened` makes and ends it."""

    def __init__(self, config: SiloConfig, limits: ServiceLimits = SERVICE_LIMITS) -> None:
        self.config = config
        self.limits = limits
        self.read_budget = SendBudget(limits.unsent_bytes)
        """Bytes that all calls of `ReaderService.Read` have read and not sent yet."""
        self.providers: dict[str, Provider] = {}
        self.address: str | None = None
        """URL of /metrics and /healthz; None if they are not served."""
        self.grpc_address: str | None = None
        """HOST:PORT of gRPC; None if it is not served."""
        self.clustered_silo: ClusteredSilo | None = None
        """The silo's cluster; None without one."""
        self.lag_history = LagHistory(self.providers)
        self.stopping = False
        self._loop_delay = LoopDelay()
        self._answers = BackgroundTasks()
        self._rendering: asyncio.Task[bytes] | None = None
        """The text of /metrics that is being made."""
        self._guard: CallGuard | None = None
        self._methods: Sequence[ServiceMethod] = ()
        self._dashboard: Dashboard | None = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: SiloConfig, limits: ServiceLimits = SERVICE_LIMITS) -> AsyncGenerator[Silo]:
        """Serve the configured providers and modules for the length of an `async with`.

        gRPC answers once the providers are open. At the end, open calls have `drain_s` seconds to end. Then reading
        stops, running handlers have as long to end, and progress is saved.

        Raises InvalidArgument for a module that cannot be imported, for subscriptions of providers that are not
        configured, and if a provider needs a data directory and none is named; Busy if the port is taken or another
        process serves one of the subscriptions.
        """
        check(config)
        silo = cls(config, limits)
        silo._check_data()
        subscriptions = declared_subscriptions(config.modules, config.providers)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(silo._answers.aclose)
            if config.http.port is not None:
                silo.address = await stack.enter_async_context(silo._serving())
            stack.push_async_callback(silo._close)
            await silo._start(subscriptions)
            background = await stack.enter_async_context(BackgroundTasks())
            background.start(silo.lag_history.run(), "headrace lag history")
            background.start(silo._loop_delay.run(), "headrace loop delay")
            if config.cluster is not None:
                await silo._enter_cluster(stack)
            if config.grpc.port is not None or silo._dashboard is not None:
                await silo._serve_clients(stack)
            if silo.clustered_silo is not None and silo.grpc_address is not None:
                await stack.enter_async_context(silo.clustered_silo.joined(silo.grpc_address))
                stack.callback(silo._send_consumers_away)
            silo._log_ready(subscriptions)
            yield silo
            silo.stopping = True
            log.info("silo is stopping: calls and running handlers have %.1f s to end", config.drain_s)

    async def until_superseded(self) -> NoReturn:
        """Wait for ever, or raise SiloSuperseded once another process has this silo's name in the cluster."""
        if self.clustered_silo is not None:
            await asyncio.shield(self.clustered_silo.membership.superseded)
        await asyncio.Event().wait()
        raise AssertionError

    def _check_data(self) -> None:
        for name, provider in self.config.providers.items():
            if self.config.data is None and provider.adapter in (None, DEFAULT_ADAPTER):
                raise InvalidArgument(
                    f"provider {name!r} needs a data directory: name it with --data, with HEADRACE_DATA, or as data = "
                    "in the configuration file"
                )

    async def _start(self, subscriptions: Sequence[SubscriptionDeclaration]) -> None:
        for name, options in self.config.providers.items():
            cluster = self.config.cluster
            try:
                self.providers[name] = await Provider.start(
                    self.config.data,
                    options.named(name),
                    control=cluster.store if cluster is not None else None,
                    leased=cluster is not None,
                )
            except InvalidArgument as error:
                if error.option == "options":
                    error = InvalidArgument(error.problem, option=f"[providers.{name}.options]")
                raise error from None
        if self.config.data is not None and self.config.cluster is None:
            await self._check_alone(Path(self.config.data))
        for one in subscriptions:
            await self.providers[one.provider].attach(one)

    async def _check_alone(self, data: Path) -> None:
        """Raise Busy if a cluster serves the queues: without leases this silo would read them all as well."""
        if others := await asyncio.to_thread(running_silos, data):
            raise Busy(
                f"data directory '{data}' is used by a cluster (silo {', '.join(map(repr, others))}): add [cluster] to "
                "the configuration of this silo, or stop the cluster first"
            )

    def _log_ready(self, subscriptions: Sequence[SubscriptionDeclaration]) -> None:
        moves_outbox = any(one.outbox is not None for one in self.config.providers.values())
        if not subscriptions and self.grpc_address is None and not moves_outbox:
            log.warning("silo has no subscription to serve: name modules that declare some (--module, modules = [])")
        log.info(
            "silo is ready: %s; %s; subscriptions: %s%s%s%s",
            ", ".join({f"data in {one.data}" for one in self.providers.values() if one.data}) or "no data directory",
            ", ".join(f"provider {one.name!r} with {counted(one.queues, 'queue')}" for one in self.providers.values()),
            ", ".join(one.definition.name for one in subscriptions) or "none",
            f"; {self.address}/metrics" if self.address else "",
            f"; {self.address}/dashboard/" if self._dashboard is not None else "",
            f"; gRPC on {self.grpc_address}" if self.grpc_address else "",
        )

    async def _close(self) -> None:
        closing = (provider.aclose(self.config.drain_s) for provider in self.providers.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        if self.stopping:
            log.info("silo has stopped: its progress is saved")

    async def _enter_cluster(self, stack: AsyncExitStack) -> None:
        from .clustered_silo import ClusteredSilo  # noqa: PLC0415 (it loads gRPC)

        self.clustered_silo = await stack.enter_async_context(ClusteredSilo.opened(self.config, self.providers))

    def _send_consumers_away(self) -> None:
        """End the calls of consumers before the queues move: other silos will serve them."""
        assert self._guard is not None
        self._guard.close(CONSUMING)

    # ---- gRPC and dashboard ----------------------------------------------------------------------------------------

    async def _serve_clients(self, stack: AsyncExitStack) -> None:
        """Serve gRPC, and open the dashboard, which shows what the same services say."""
        from ..server.guard import CallGuard  # noqa: PLC0415 (gRPC is loaded only if it is needed)
        from .services import assembly  # noqa: PLC0415
        from .services.describing import name_of  # noqa: PLC0415

        store = next(iter(self.providers.values())).store  # all providers of a data directory share one
        tokens: Authenticator = NoTokens()
        if self.config.grpc.asks_for_tokens or self._dashboard is not None:
            tokens = await stack.enter_async_context(TokenBook.opened(store))
        methods = await stack.enter_async_context(assembly.opened(self))
        if self.config.grpc.port is not None:
            authenticator = tokens if self.config.grpc.asks_for_tokens else NoTokens()
            self.grpc_address = await self._serve_grpc(stack, authenticator, methods)
        else:
            guard = CallGuard(NoTokens(), ClientLimiter(UNLIMITED, asyncio.get_running_loop().time))
            self._methods = methods(guard)
            guard.open_services(self._methods)
        if self._dashboard is not None:
            self._dashboard.open(self._methods, tokens, lambda: name_of(self))
            stack.callback(self._dashboard.close)

    async def _serve_grpc(
        self,
        stack: AsyncExitStack,
        authenticator: Authenticator,
        methods: Callable[[CallGuard], Sequence[ServiceMethod]],
    ) -> str:
        from ..server import grpc_server  # noqa: PLC0415 (gRPC is loaded only where it is served)

        if self.clustered_silo is not None:
            authenticator = ClusterMembers(self.clustered_silo, authenticator)

        def served(guard: CallGuard) -> Sequence[ServiceMethod]:
            self._guard, self._methods = guard, methods(guard)
            return self._methods

        return await stack.enter_async_context(
            grpc_server.serving(self.config.grpc, authenticator, served, drain_s=self.config.drain_s)
        )

    # ---- metrics and health ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[str]:
        app = await asyncio.to_thread(self._http_application)  # it imports much, and reads files

        from ..server.http import serving  # noqa: PLC0415 (uvicorn is loaded only if it is needed)

        async with serving(app, self.config.http) as address:
            yield address

    def _http_application(self) -> ASGIApp:
        from ..server.http import application  # noqa: PLC0415

        routes = {"/metrics": self.metrics, "/healthz": self.health, "/livez": self.alive}
        if not self.config.http.serves_dashboard:
            return application(routes)
        from .dashboard.application import Dashboard  # noqa: PLC0415

        self._dashboard = Dashboard(self.config)
        return application(routes, self._dashboard.routes())

    async def metrics(self) -> HttpAnswer:
        # Readers at the same time share one answer: each takes the loop as long as the number of series needs.
        if self._rendering is None or self._rendering.done():
            reading = asyncio.to_thread(render, self._snapshot())  # it reads files of /proc
            self._rendering = self._answers.hold(reading, "headrace metrics")
        text = await asyncio.shield(self._rendering)
        return HttpAnswer(text, "text/plain; version=0.0.4; charset=utf-8")

    def _snapshot(self) -> Snapshot:
        guard = self._guard
        return Snapshot(
            [provider_snapshot(one, self.lag_history) for one in self.providers.values()],
            self._stores(),
            Histogram.sum_of([self._loop_delay.delays]),
            None if guard is None else guard.usage(),
            {} if guard is None else dict(guard.failed_calls),
            None if self.clustered_silo is None else self.clustered_silo.snapshot(),
        )

    def _stores(self) -> Sequence[StoreSnapshot]:
        """The control store that all providers share, and the cluster's connection to it."""
        progress = next((one.store for one in self.providers.values()), None)
        stores = {"progress": progress, "leases": self.clustered_silo and self.clustered_silo.control}
        return [
            StoreSnapshot(use, Histogram.sum_of([store.durations]), dict(store.errors))
            for use, store in stores.items()
            if store is not None
        ]

    async def health(self) -> HttpAnswer:
        """Return 200 while the silo serves and can read every queue, else 503. The body has the problems."""
        problems = {
            f"{one.name}/{queue.index}": queue.reason or queue.state
            for one in self.providers.values()
            for queue in one.statistics().queues
            if queue.state == "faulted"
        }
        good = bool(self.providers) and not problems and not self.stopping
        state = "ok" if good else "stopping" if self.stopping else "faulted" if problems else "starting"
        body = msgspec.json.encode({"state": state, "problems": problems}) + b"\n"
        return HttpAnswer(body, "application/json", HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE)

    async def alive(self) -> HttpAnswer:
        """Return 200 while the event loop runs, also during the start and the stop: a restart would not help then."""
        return HttpAnswer(b'{"state":"alive"}\n', "application/json")
