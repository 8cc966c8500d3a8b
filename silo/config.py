"""Configuration of a silo: its options, their types, and the combinations that are refused.

As a TOML file:

    data = "data"                        # data directory; relative to this file's folder
    modules = ["shop.handlers"]          # imported at the start; their @subscription functions are served
    drain_s = 10.0
    workers = 4                          # number of silos on this machine, as a cluster; left out: one silo

    [http]                               # /metrics, /healthz and the dashboard
    host = "127.0.0.1"
    port = 9464

    [grpc]                               # for clients and other silos
    port = 9465
    certificate = "silo.pem"             # relative to this file's folder, as are key and client_ca
    key = "silo.key"
    limits = { requests_per_s = 5000 }

    [cluster]                            # several silos share the queues; left out: this silo has all queues
    name = "silo-1"
    store = "postgresql://host/headrace" # on one machine: leave it out, and name the same data directory
    address = "10.0.0.7:9465"            # where other silos reach this one

    [providers.default]
    adapter = "log"
    queues = 8
    options = { durability = "commit" }
    cache = { max_events = 1_000_000, max_bytes = 67_108_864 }
    detach_after_s = 0.25
    outbox = "postgresql://host/shop"    # publish what transactions of this database wrote into its outbox
    delays = "store"                     # or redis://host:6379: for an adapter that cannot delay events itself

`config_loader` reads it from the file, from variables and from flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ..balancer import Balancer, find_balancer
from ..balancer.cluster_options import ClusterOptions
from ..server.config import GrpcConfig, HttpConfig
from ..streams.delays import check_delays
from ..streams.errors import InvalidArgument, NotFound
from .addresses import check_store, parse_address
from .options import CacheOptions, ProviderOptions

_CACHE = CacheOptions()

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 (to refuse it)

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of a provider's cache in this process, over all its queues."""

    max_events: _Positive = _CACHE.max_events
    """Events in the cache."""
    max_bytes: _Positive = _CACHE.max_bytes
    """Encoded bytes in the cache."""


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One provider. `adapter` and `queues` are fixed when it is first opened. Left out, the stored values apply."""

    adapter: str | None = None
    """Name of the queue technology. None: the stored one, or "log" for a new provider."""
    queues: _Positive | None = None
    """Number of queues. None: the stored one, or 8 for a new provider."""
    options: dict[str, Any] = {}
    """The adapter's own options."""
    cache: CacheConfig = CacheConfig()
    detach_after_s: _Seconds = 0.25
    """Seconds without progress in a full cache, after which a cursor is detached."""
    delays: str | None = None
    """Where delayed events wait if the adapter has no delays: "store" for the control store. None: the provider refuses
    delayed events."""

    outbox: str | None = None
    """URL of a database whose outbox is moved into the queues: postgresql://USER:PASSWORD@HOST/DATABASE, or
    sqlite:///FILE. None: none is."""

    codec: str | dict[str, str] | None = None
    """How handlers decode payloads: "json", which is the default, "msgpack", or the "module:name" of a `Codec`; or a
    table of these by namespace, with "*" for other namespaces."""

    def __post_init__(self) -> None:
        check_delays(self.delays)

    def named(self, name: str) -> ProviderOptions:
        return ProviderOptions(
            name=name,
            adapter=self.adapter,
            queues=self.queues,
            options=self.options,
            cache=CacheOptions(max_events=self.cache.max_events, max_bytes=self.cache.max_bytes),
            detach_after_s=self.detach_after_s,
            delays=self.delays,
            outbox=self.outbox,
            codec=self.codec,
        )


_TIMES = ClusterOptions()


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This silo as a member of a cluster. All silos of a cluster have the same times and the same balancer."""

    name: str | None = None
    """None: the machine's name and the gRPC port. The name must stay the same over a restart."""
    store: str | None = None
    """URL of the PostgreSQL database for the control data. None: it is in the data directory, on one machine."""
    address: str | None = None
    """HOST:PORT at which other silos reach this one. None: the address of gRPC."""
    public_address: str | None = None
    """HOST:PORT at which clients reach this silo. None: `address`."""
    ca: str | None = None
    """File: CA certificates, PEM, for the certificates of other silos. None: `grpc.client_ca`, else the system's."""
    balancer: str = "lease-count"
    """Decides which silo has which queue."""
    fixed: tuple[str, ...] = ()
    """The names of all silos, for the balancers `best-fit-fixed` and `best-fit-live`."""
    mapping: dict[str, str] = {}
    """The silo of each queue, for the balancer `static`."""
    period_s: _Seconds = _TIMES.period_s
    """Time between two heartbeats, in seconds."""
    lease_s: _Seconds = _TIMES.lease_s
    """Length of a lease, in seconds."""
    dead_after_s: _Seconds = _TIMES.dead_after_s
    """Silence after which a silo is declared dead, in seconds."""
    maturity_s: _Seconds = _TIMES.maturity_s
    """How long the queues of a missing silo wait for it, in seconds."""

    def shared(self) -> dict[str, str]:
        """Return the settings that all silos of a cluster should share, as text by name."""
        return {
            "balancer": self.balancer,
            "fixed": ", ".join(sorted(self.fixed)),
            "mapping": ", ".join(f"{queue}: {silo}" for queue, silo in sorted(self.mapping.items())),
            "period_s": f"{self.period_s:g}",
            "lease_s": f"{self.lease_s:g}",
            "dead_after_s": f"{self.dead_after_s:g}",
            "maturity_s": f"{self.maturity_s:g}",
        }

    def options(self, drain_s: float) -> ClusterOptions:
        """Return the options of the membership. Raise InvalidArgument for wrong ones and for an unknown balancer."""
        return ClusterOptions(
            period_s=self.period_s,
            lease_s=self.lease_s,
            dead_after_s=self.dead_after_s,
            maturity_s=self.maturity_s,
            drain_s=drain_s,
            balancer=_balancer(self.balancer),
            fixed=self.fixed,
            mapping={_queue(queue): silo for queue, silo in self.mapping.items()},
        )


def _balancer(name: str) -> Balancer:
    try:
        return find_balancer(name)
    except NotFound as error:
        raise InvalidArgument(f"cluster.balancer: {error}") from None


def _queue(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidArgument(f"cluster.mapping: {text!r} is no queue: queues are numbers, from 0")
    return int(text)


class SiloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A silo."""

    data: str | None = None
    """Data directory. None: nothing is kept; only for adapters that need no directory."""
    modules: tuple[str, ...] = ()
    """Modules to import at the start. The silo serves the subscriptions that they declare."""
    drain_s: _Seconds = 10.0
    """Time that running handlers have to end when the silo stops, in seconds."""
    workers: _Positive | None = None
    """Number of silos, each a process of its own; they form a cluster. None: one silo, in this process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of log lines on stderr."""
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    cluster: ClusterConfig | None = None
    """None: the silo is not in a cluster and serves all queues."""
    providers: dict[str, ProviderConfig] = msgspec.field(default_factory=lambda: {"default": ProviderConfig()})

    @property
    def dashboard_asks_for_tokens(self) -> bool:
        """Whether the dashboard shows nothing without a token."""
        if self.http.auth is not None:
            return self.http.auth == "tokens"
        closed = self.grpc.port is not None and (self.grpc.asks_for_tokens or self.grpc.client_ca is not None)
        return closed or not self.http.loopback


def check(config: SiloConfig) -> None:
    """Raise InvalidArgument for options that contradict each other, or that would let any client in."""
    grpc = config.grpc
    for section, server in (("grpc", grpc), ("http", config.http)):
        if (server.certificate is None) != (server.key is None):
            given, missing = ("certificate", "key") if server.key is None else ("key", "certificate")
            raise InvalidArgument(f"{section}.{given} is given without {section}.{missing}: TLS needs both")
    if grpc.client_ca is not None and grpc.certificate is None:
        raise InvalidArgument("grpc.client_ca is given without grpc.certificate and grpc.key: it is part of TLS")
    if grpc.port is not None:
        _check_served(grpc, config.data)
    if config.http.serves_dashboard:
        _check_dashboard(config.http, config)
    if grpc.native_port and not grpc.native:
        raise InvalidArgument("grpc.native_port is given and grpc.native is false: leave out one of them")
    if grpc.native_port and grpc.native_port in (grpc.port, config.http.port):
        raise InvalidArgument(f"grpc.native_port is {grpc.native_port}, which another server of the silo has, too")
    if config.cluster is not None:
        _check_cluster(config, config.cluster)


def _check_cluster(config: SiloConfig, cluster: ClusterConfig) -> None:
    if config.grpc.port is None:
        raise InvalidArgument("[cluster] needs gRPC, because silos call each other: give grpc.port (--listen)")
    if cluster.name is not None and not NAME.fullmatch(cluster.name):
        raise InvalidArgument(
            f"cluster.name: {cluster.name!r} is no name of a silo: letters, digits, dot, dash and underscore, at most "
            "100, starting with a letter or digit"
        )
    if cluster.public_address is not None:
        parse_address(cluster.public_address)
    if cluster.address is not None:
        parse_address(cluster.address)
    elif config.grpc.host in ANY_ADDRESS:
        tls_hint = "; HOST is a name in the certificate, and cluster.ca the file of its authority"
        raise InvalidArgument(
            f"grpc.host is {config.grpc.host}, every address of this machine: give cluster.address, HOST:PORT at which "
            f"other silos and consumers reach this one{tls_hint if config.grpc.certificate else ''}"
        )
    if config.data is None:
        raise InvalidArgument("[cluster] needs a data directory: name it with --data, with HEADRACE_DATA, or as data =")
    if cluster.store is not None:
        check_store(cluster.store, "cluster.store")
    cluster.options(config.drain_s)
    _check_balancer(cluster)
    _check_mapping(cluster, config.providers)


_BALANCER_OPTIONS: Mapping[str, str | None] = {
    "best-fit-fixed": "fixed",
    "best-fit-live": "fixed",
    "static": "mapping",
    **dict.fromkeys(("average", "lease-count", "ring")),
}
"""The option that each built-in balancer needs. It ignores the other one."""


def _check_balancer(cluster: ClusterConfig) -> None:
    if cluster.balancer not in _BALANCER_OPTIONS:
        return
    needed = _BALANCER_OPTIONS[cluster.balancer]
    for option, given in (("fixed", cluster.fixed), ("mapping", cluster.mapping)):
        if option == needed and not given:
            raise InvalidArgument(f"cluster.balancer is {cluster.balancer!r}, which needs cluster.{option}: give it")
        if option != needed and given:
            raise InvalidArgument(
                f"cluster.{option} is given, and the balancer {cluster.balancer!r} ignores it: leave it out, or name "
                "another balancer"
            )


def _check_mapping(cluster: ClusterConfig, providers: Mapping[str, ProviderConfig]) -> None:
    """A provider without `queues` may have any number of them."""
    counts = [provider.queues or 0 for provider in providers.values()]
    queues = max(counts, default=0)
    beyond = [queue for queue in cluster.mapping if int(queue) >= queues]
    if beyond and all(counts):
        raise InvalidArgument(
            f"cluster.mapping: no provider has a queue {beyond[0]}: the highest queue is {queues - 1}"
        )


def _check_dashboard(http: HttpConfig, config: SiloConfig) -> None:
    if not (http.loopback or http.certificate or http.insecure):
        raise InvalidArgument(
            f"http.dashboard is true, http.host is {http.host!r}, which other machines may reach, and there is no TLS: "
            "give http.certificate and http.key, serve on 127.0.0.1, or allow it with http.insecure"
        )
    if http.auth == "none" and not http.loopback:
        raise InvalidArgument(
            f"http.auth is none, and other machines may reach http.host {http.host!r}: leave it out, so that the "
            "dashboard asks for tokens, or serve on 127.0.0.1"
        )
    if config.dashboard_asks_for_tokens and config.data is None:
        raise InvalidArgument(
            "the dashboard asks for tokens, which are kept in a data directory: name it with --data, or turn the "
            "dashboard off with http.dashboard = false"
        )


def _check_served(grpc: GrpcConfig, data: str | None) -> None:
    if not (grpc.loopback or grpc.certificate or grpc.insecure):
        raise InvalidArgument(
            f"grpc.host is {grpc.host!r}, which other machines may reach, and there is no TLS: give grpc.certificate "
            "and grpc.key (--certificate, --key), serve on 127.0.0.1, or allow it with grpc.insecure (--insecure)"
        )
    if grpc.insecure and grpc.certificate:
        raise InvalidArgument("grpc.insecure turns TLS off, and grpc.certificate turns it on: leave out one of them")
    if grpc.asks_for_tokens and data is None:
        raise InvalidArgument(
            "grpc.auth is tokens, and tokens are kept in a data directory: name it with --data, with HEADRACE_DATA, or "
            "as data = in the configuration file"
        )
