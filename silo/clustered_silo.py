"""This silo as a member of its cluster: it joins and leaves, calls other silos, and knows the owner of each queue."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc

from ..balancer.membership import Membership
from ..client.connection import CERTIFICATE_OPTIONS
from ..client.transport import StreamCall
from ..server.access import PEER, SiloSecrets, new_silo_secret, silo_hash
from ..server.methods import ServiceMethod
from ..store.control_store import ControlStore
from ..store.datadir import DataDirectory, place_of
from ..streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ..streams.errors import Busy, HeadraceError, InvalidArgument, NotFound, Unavailable
from .config import ClusterConfig, SiloConfig
from .in_process import InProcessTransport
from .metric_snapshots import ClusterSnapshot
from .move_history import MoveHistory
from .opening import LEASED_TIMEOUT_S
from .peers import AS_SETTINGS, CALL_S, PeerConnections, tls_of
from .placement import ClusterPlacements
from .provider_core import ProviderCore
from .shared_read import SharedRead
from .silo_processes import SiloProcesses
from .unserved_queues import UnservedQueues

log = logging.getLogger("headrace.silo")

MAX_LOOK_UPS = 100
"""Most calls that wait for the answer whether their caller is a silo that joined just now. Further calls are refused at
once."""
FORGET_S = 24 * 3600.0
"""Age at which records of silos that are dead or left are deleted, in seconds."""


class ClusteredSilo:
    """This silo's part in its cluster. Made by `opened` before gRPC is served. The silo is a member within `joined`."""

    def __init__(
        self,
        config: SiloConfig,
        cluster: ClusterConfig,
        providers: Mapping[str, ProviderCore],
        control: ControlStore,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self.secret = new_silo_secret()
        """The secret of this run of the silo. Other silos read its hash from the store."""
        self.placements = ClusterPlacements()
        self.moves = MoveHistory()
        self.unserved = UnservedQueues({name: provider.queues for name, provider in providers.items()})
        self.viewed_at: float | None = None
        """Loop time of the last view of the cluster; None before the first."""
        self.control = control
        """The cluster's store. This connection only renews leases and reads views."""
        self._services: InProcessTransport | None = None
        self.view: ClusterView | None = None
        self._config = config
        self._cluster = cluster
        self._providers = providers
        self._secrets = SecretsOfView(control.cluster(), silo_hash(self.secret))
        self._store = control.cluster(secret_hash=silo_hash(self.secret))
        self._peers = PeerConnections(self.secret, tls_of(config), credentials)
        self._membership: Membership | None = None
        self._view_read = SharedRead(self._read_newer_view)
        self._silos: Mapping[str, SiloRecord] = {}
        self._warned: set[tuple[str, int]] = set()
        """Runs of silos whose different settings are in the log already."""
        self._forgotten: set[tuple[str, int]] = set()
        """Runs of silos that `forget` has deleted. A view that is being read may still have them."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: SiloConfig, providers: Mapping[str, ProviderCore]) -> AsyncGenerator[ClusteredSilo]:
        """Open the cluster's store for the length of an `async with`. Raise StorageError, InvalidArgument."""
        assert config.cluster is not None
        tls = tls_of(config)
        credentials = None if tls is None else await asyncio.to_thread(tls.credentials)
        where = config.cluster.store or _directory(config).control_db
        # A connection of its own: saving much progress must not delay the renewal of leases.
        control = await ControlStore.open(where, timeout_s=LEASED_TIMEOUT_S)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(control.aclose)
            clustered_silo = cls(config, config.cluster, providers, control, credentials)
            stack.push_async_callback(clustered_silo._peers.aclose)
            yield clustered_silo

    @asynccontextmanager
    async def joined(self, grpc_address: str) -> AsyncGenerator[None]:
        """Be a member for the length of an `async with`. The silo gets queues over time, and returns them at the end.

        Raises Busy if another process of this machine has the silo's name, StorageError.
        """
        name = self._cluster.name or f"{socket.gethostname()}-{grpc_address.rpartition(':')[2]}"
        async with AsyncExitStack() as stack:
            processes = SiloProcesses(_directory(self._config), self._store)
            held = stack.enter_context(await processes.lock_name(name))
            place = await asyncio.to_thread(place_of, held)
            await processes.end_former(name, place)
            membership = self._membership = Membership(
                self._store,
                name,
                address=self._cluster.address or grpc_address,
                owners={provider.name: provider.manager.queue_host for provider in self._providers.values()},
                peers=self._peers,
                options=self._cluster.options(self._config.drain_s),
                declare_dead=partial(processes.declare_dead, own_name=name),
                settings=self._cluster.shared(),
                process=place,
                public_address=self._cluster.public_address or "",
                on_view=self._take_view,
            )
            # Before the first lease: a stopped queue must not be read.
            await asyncio.gather(*(provider.manager.control_requests.apply() for provider in self._providers.values()))
            await membership.join()
            self.placements.join(name)
            stack.push_async_callback(membership.leave)
            await self._store.forget(FORGET_S)
            await self.read_view()
            await self._check_reachable(membership.me)
            yield

    async def _check_reachable(self, me: SiloRecord) -> None:
        """Call this silo at its own address, as other silos do. Raise InvalidArgument if its certificate is refused;
        warn of other failures."""
        error = await self._peers.why_unreachable(me)
        if error is None:
            return
        why = error.text_for(AS_SETTINGS)
        if error.option in CERTIFICATE_OPTIONS:
            raise InvalidArgument(f"other silos could not call silo {me.name!r} at {me.address}: {why}")
        log.warning(
            "silo %r does not reach itself at %s, so other silos may fail too, and their consumers miss the "
            "events of its queues: %s", me.name, me.address, why,
        )  # fmt: skip

    # ---- the view of the cluster ----------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    @property
    def name(self) -> str:
        """The name of this silo."""
        return self.membership.name

    def is_named(self, name: str) -> bool:
        """Whether this silo has the name. It has none before it joins."""
        return self._membership is not None and self._membership.name == name

    @property
    def silos(self) -> Mapping[str, SiloRecord]:
        """The living silos, by name."""
        return self._silos

    def is_known(self, secret_hash: str) -> bool:
        return self._secrets.is_known(secret_hash)

    async def look_up(self, secret_hash: str) -> None:
        await self._secrets.look_up(secret_hash)

    async def forget(self, name: str) -> None:
        """Delete the record of a silo that is dead or left. Raise NotFound, and Busy for a silo that may be alive."""
        view = await self._store.view()
        known = {silo.name: silo for silo in view.silos}
        if name not in known:
            raise NotFound(f"there is no silo {name!r} to forget: there is {', '.join(sorted(known))}")
        if known[name].state in LIVING:
            raise Busy(
                f"silo {name!r} is a member of the cluster: stop it, or wait until the others have declared it dead"
            )
        await self._store.remove(known[name])
        self._forgotten.add((name, known[name].incarnation))
        if self.view is not None:
            self.view = self._without_forgotten(self.view)

    def _warn_of_settings(self, silos: Iterable[SiloRecord]) -> None:
        """Warn once of each run of a silo with other settings than this silo."""
        own = self._cluster.shared()
        for silo in silos:
            others = {key: value for key, value in silo.settings.items() if own.get(key) != value}
            run = silo.name, silo.incarnation
            if others and run not in self._warned:
                self._warned.add(run)
                different = ", ".join(f"{key} = {value} (here {own.get(key)})" for key, value in others.items())
                log.warning(
                    "silo %r has other settings in [cluster] than this one: %s; give all silos the same, or queues may "
                    "stay unserved", silo.name, different,
                )  # fmt: skip

    async def read_view(self) -> None:
        """Read the view of the cluster from the store, also after this silo has left it. Raise StorageError."""
        await self._view_read.read()

    async def _read_newer_view(self) -> None:
        while True:
            before = self.view
            read = await self._store.view()
            if self.view is before:  # else a heartbeat brought a view meanwhile, which may be newer
                break
        self._take_view(read if before is None else read.keeping_expired(before))

    def _take_view(self, read: ClusterView) -> None:
        view = self._without_forgotten(read)
        self._forgotten &= {(silo.name, silo.incarnation) for silo in read.silos}
        self._secrets.take(view)
        self.view = view
        self._silos = {silo.name: silo for silo in view.silos if silo.state in LIVING}
        self._warn_of_settings(self._silos.values())
        # A silo that left in order still finishes its open calls.
        self._peers.keep({silo.name for silo in view.silos if silo.state is not SiloState.DEAD})
        self.placements.update(view)
        self.moves.update(view, time.time_ns() // 1000)
        self.viewed_at = asyncio.get_running_loop().time()
        self.unserved.update(view, self.viewed_at)

    def _without_forgotten(self, view: ClusterView) -> ClusterView:
        left = [silo for silo in view.silos if (silo.name, silo.incarnation) not in self._forgotten]
        return view._replace(silos=left)

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as this silo sees it now."""
        now = asyncio.get_running_loop().time()
        return ClusterSnapshot(
            Counter(silo.state.value for silo in self.view.silos) if self.view is not None else {},
            None if self.viewed_at is None else now - self.viewed_at,
            {name: self.unserved.count(name) for name in self._providers},
            {name: self.unserved.total_s(name, now) for name in self._providers},
        )

    def owner(self, provider: str, queue: int) -> str:
        """Return the name of a queue's owner, "" if it has none."""
        return self.placements.owner(provider, queue).silo

    # ---- calls -----------------------------------------------------------------------------------------------------

    def stream(self, silo: str, method: str) -> StreamCall:
        """Begin a streaming call to a silo, which may be this one. Raise Unavailable if it is not a living member."""
        if silo == self.placements.silo:
            return self._own_services.stream(method)
        return self._peers.stream(self._living(silo), method)

    async def call(self, silo: str, method: str, request: bytes, *, timeout_s: float = CALL_S) -> bytes:
        """Call a silo, which may be this one. Raise Unavailable, and the errors that the silo raises."""
        if silo == self.placements.silo:
            return await self._own_services.unary(method, request, timeout_s=timeout_s)
        return await self._peers.unary(self._living(silo), method, request, timeout_s=timeout_s)

    def _living(self, silo: str) -> SiloRecord:
        record = self._silos.get(silo)
        if record is None:
            raise Unavailable(f"silo {silo!r} is not a living member: see `headrace cluster`")
        return record

    def serve(self, methods: Sequence[ServiceMethod]) -> None:
        """Take the services of this silo for its own calls, with the permissions of other silos."""
        self._services = InProcessTransport(methods, PEER)

    @property
    def _own_services(self) -> InProcessTransport:
        assert self._services is not None, "`serve` was not called"
        return self._services


class ViewStore(Protocol):
    """A store that returns views of the cluster."""

    async def view(self) -> ClusterView: ...


class SecretsOfView(SiloSecrets):
    """The secrets of all silos in a view of the cluster, in any state: a silo that left still finishes its calls."""

    def __init__(self, store: ViewStore, own_hash: str) -> None:
        self._store = store
        self._own = frozenset([own_hash])
        self._known = self._own
        self._look_up = SharedRead(self._look)
        self._waiting = 0

    def take(self, view: ClusterView) -> None:
        self._known = self._own | {silo.secret_hash for silo in view.silos if silo.secret_hash}

    def is_known(self, secret_hash: str) -> bool:
        return secret_hash in self._known

    async def look_up(self, secret_hash: str) -> None:
        """Look for new silos in the store, unless too many callers wait for that already."""
        if self._waiting >= MAX_LOOK_UPS:
            return
        self._waiting += 1
        try:
            await self._look_up.read()
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        try:
            self.take(await self._store.view())
        except HeadraceError as error:
            log.info("a caller that may be a silo is refused, because the cluster's store does not answer: %s", error)


def _directory(config: SiloConfig) -> DataDirectory:
    assert config.data is not None
    return DataDirectory(Path(config.data).absolute())
