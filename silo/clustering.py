"""This silo in its cluster: it joins, is reached by the others and reaches them, and knows who has which queue."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ..balancer.membership import Membership, nobody
from ..streams.client.connection import StreamCall
from ..streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ..streams.errors import Busy, InvalidArgument, Unavailable
from ..streams.store import ControlStore
from .config import ClusterConfig, SiloConfig
from .datadir import SILOS, DataDirectory, DirectoryLock, is_free, lock
from .local import LocalConnection
from .peers import CALL_S, PeerConnections, tls_of
from .provider import LEASED_TIMEOUT_S, Provider
from .relay.relay import Relays

log = logging.getLogger("headrace.silo")

SECRET = "cluster/secret"  # noqa: S105 (the key under which it is kept)
LOOK_S = 0.2
"""How often the consumers that are served through this silo are looked at."""
BUSY_S = 2.0
"""How long the name of a silo that ends may stay taken."""
FORGET_S = 24 * 3600.0
"""Silos that are dead or left for so long are not known any more."""


class Clustering:
    """Made by `opened`, before gRPC is served; between `join` and `leave` a member."""

    def __init__(
        self,
        config: SiloConfig,
        cluster: ClusterConfig,
        providers: Mapping[str, Provider],
        control: ControlStore,
        secret: str,
    ) -> None:
        self.secret = secret
        self.relays = Relays(self)
        self.here: LocalConnection | None = None
        """The services of this silo, as other silos call them."""
        self.view: ClusterView | None = None
        self._config = config
        self._cluster = cluster
        self._providers = providers
        self._store = control.cluster()
        self._peers = PeerConnections(secret, tls_of(config))
        self._membership: Membership | None = None
        self._silos: Mapping[str, SiloRecord] = {}
        self._not_dead: Mapping[str, int] = {}
        self._owners: Mapping[tuple[str, int], str] = {}
        self._serving: frozenset[tuple[str, str]] = frozenset()
        """Providers and silos that have a queue of them."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: SiloConfig, providers: Mapping[str, Provider]) -> AsyncGenerator[Clustering]:
        """For the length of an `async with`, at whose end it has left. Raises StorageError."""
        assert config.cluster is not None
        assert config.data is not None
        where = config.cluster.store or _directory(config.data).control_db
        # One of its own: a lease is not renewed later because much is saved.
        control = await ControlStore.open(where, timeout_s=LEASED_TIMEOUT_S)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(control.aclose)
            secret = await control.value_or(SECRET, secrets.token_urlsafe(32))
            clustering = cls(config, config.cluster, providers, control, secret)
            stack.push_async_callback(clustering._peers.aclose)
            yield clustering

    @asynccontextmanager
    async def joined(self, grpc_address: str) -> AsyncGenerator[None]:
        """A member, for the length of an `async with`; queues come by and by, and are given back at its end.

        Raises Busy where another process of this machine has the silo's name, StorageError.
        """
        name = self._cluster.name or f"{socket.gethostname()}-{grpc_address.rpartition(':')[2]}"
        async with AsyncExitStack() as stack:
            if self._cluster.store is None:
                stack.enter_context(await self._named(name))
            membership = self._membership = Membership(
                self._store,
                name,
                address=self._cluster.address or grpc_address,
                owners={provider.name: provider.manager for provider in self._providers.values()},
                peers=self._peers,
                options=self._cluster.options(self._config.drain_s),
                bury=self._bury if self._cluster.store is None else nobody,
            )
            membership.on_view = self._saw
            # Queues that are to stay stopped are not read first.
            await asyncio.gather(*(provider.manager.obey() for provider in self._providers.values()))
            await membership.join()
            stack.push_async_callback(membership.leave)
            await self._store.forget(FORGET_S)
            self._saw(await self._store.view())
            await self._check_reachable(membership.me)
            looking = asyncio.create_task(self._look(), name="headrace relays")
            stack.push_async_callback(ended, looking)
            yield

    async def _check_reachable(self, me: SiloRecord) -> None:
        """Of itself, at the address that others are told and with the certificates that they are shown. Raises
        InvalidArgument where nobody could trust it."""
        why = await self._peers.missed(me)
        if "certificate" in why:
            raise InvalidArgument(f"other silos could not call silo {me.name} at {me.address}: {why}")
        if why:
            log.warning(
                "silo %s does not reach itself at %s, so other silos may not either, and consumers there miss what its "
                "queues have: %s", me.name, me.address, why,
            )  # fmt: skip

    async def _named(self, name: str) -> DirectoryLock:
        """The silo's name is this process's, on this machine. Who ends just now may have it for a moment."""
        until = asyncio.get_running_loop().time() + BUSY_S
        while True:
            try:
                return await asyncio.to_thread(lock, self._directory, SILOS, name, f"the name of silo {name} is used")
            except Busy:
                if asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(BUSY_S / 20)

    @property
    def _directory(self) -> DataDirectory:
        assert self._config.data is not None
        return _directory(self._config.data)

    async def _bury(self, view: ClusterView) -> bool:
        """On one machine the system knows whose process is gone, and nobody has to wait for its leases."""
        others = [silo for silo in view.silos if silo.state in LIVING and silo.name != self.name]
        free = await asyncio.to_thread(lambda: [is_free(self._directory, SILOS, silo.name) for silo in others])
        gone = [silo for silo, is_gone in zip(others, free, strict=True) if is_gone]
        for silo in gone:
            log.warning("silo %s is dead: its process is gone", silo.name)
            await self._store.bury(silo)
        return bool(gone)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(LOOK_S)
            late_s = loop.time() - began - LOOK_S
            self.relays.look(late_s if late_s > LOOK_S else 0.0)  # it was this process that did not listen

    # ---- what is known of the cluster ------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    @property
    def name(self) -> str:
        """This silo's."""
        return self.membership.name

    @property
    def silos(self) -> Mapping[str, SiloRecord]:
        """Those that live, by name."""
        return self._silos

    def _saw(self, view: ClusterView) -> None:
        before, self.view = (self._owners, self._silos.keys()), view
        self._silos = {silo.name: silo for silo in view.silos if silo.state in LIVING}
        valid = (lease for lease in view.leases if lease.owner and lease.expires_at_us > view.now_us)
        self._owners = {(lease.provider, lease.queue): lease.owner for lease in valid}
        self._serving = frozenset((provider, owner) for (provider, _), owner in self._owners.items())
        # One that left in order still ends what it had begun.
        self._not_dead = {silo.name: silo.incarnation for silo in view.silos if silo.state is not SiloState.DEAD}
        self._peers.keep(self._not_dead)
        if (self._owners, self._silos.keys()) != before:
            self.relays.changed()

    def with_queues(self, provider: str, queues: Collection[int] | None) -> Mapping[str, SiloRecord]:
        if queues is None:
            return {name: silo for name, silo in self._silos.items() if self._may_have(silo, provider)}
        names = {self.owner(provider, queue) for queue in queues}
        return {name: self._silos[name] for name in names if name in self._silos}

    def _may_have(self, silo: SiloRecord, provider: str) -> bool:
        """A silo that was drained stays, and gets no queue."""
        active = silo.state is SiloState.ACTIVE and provider in silo.serves
        return active or (provider, silo.name) in self._serving

    def owner(self, provider: str, queue: int) -> str:
        return self._owners.get((provider, queue), "")

    def lives(self, silo: str, incarnation: int) -> bool:
        return self._not_dead.get(silo) == incarnation

    def doubt(self, silo: str) -> None:
        if silo in self._silos and silo != self.name:
            self._peers.doubt(self._silos[silo])

    # ---- calls -----------------------------------------------------------------------------------------------------

    def stream(self, silo: SiloRecord, method: str) -> StreamCall:
        if silo.name == self.name:
            return self._services.stream(method)
        return self._peers.stream(silo, method)

    async def call(self, silo: str, method: str, request: bytes, *, timeout_s: float = CALL_S) -> bytes:
        if silo == self.name:
            return await self._services.unary(method, request, timeout_s=timeout_s)
        record = self._silos.get(silo)
        if record is None:
            raise Unavailable(f"silo {silo!r} is not there: see `headrace cluster`")
        return await self._peers.unary(record, method, request, timeout_s=timeout_s)

    @property
    def _services(self) -> LocalConnection:
        assert self.here is not None
        return self.here


def _directory(data: str) -> DataDirectory:
    return DataDirectory(Path(data).absolute())


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
