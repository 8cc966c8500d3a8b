"""Configuration of a silo: a TOML file, `HEADRACE_*` variables over it, and flags over both.

    data = "data"                        # data directory; relative to this file's folder
    modules = ["shop.handlers"]          # imported; what they declare with @subscription is served
    drain_s = 10.0
    workers = 4                          # so many silos on this machine, as a cluster; left out: one by itself

    [http]                               # /metrics and /healthz
    host = "127.0.0.1"
    port = 9464

    [grpc]                               # what other programs use
    port = 9465
    certificate = "silo.pem"             # relative to this file's folder, as are key and client_ca
    key = "silo.key"
    limits = { requests_per_s = 5000 }

    [cluster]                            # several silos share the queues; without it, one has them all
    name = "silo-1"
    store = "postgresql://host/headrace" # on one machine: leave it out, and name the same data directory
    address = "10.0.0.7:9465"            # where other silos reach this one

    [providers.default]
    adapter = "log"
    queues = 8
    options = { durability = "commit" }
    cache = { max_events = 1_000_000, max_bytes = 67_108_864 }
    detach_after_s = 0.25
    delays = "store"                     # or redis://host:6379: for an adapter that cannot delay events itself

A variable names an option in capitals, with two underscores for each dot: `HEADRACE_DATA`, `HEADRACE_HTTP__PORT`,
`HEADRACE_PROVIDERS__DEFAULT__CACHE__MAX_BYTES`. An unknown option is an error, for otherwise a misspelt one would be
without effect; a variable without two underscores that is no option may be another program's, so it is only warned of.
A path that a variable or a flag names is relative to the working directory.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import parse_qs, urlsplit

import msgspec

from ..balancer import Balancer, find_balancer
from ..balancer.membership import ClusterOptions
from ..streams.errors import InvalidArgument, NotFound
from .limits import ClientLimits
from .parking import check_delays
from .provider import CacheOptions, ProviderOptions

PREFIX = "HEADRACE_"
OTHERS = {
    "provider",
    "server",
    "token",
    "ca",
    "install_servers",
    "redis_server",
    "rabbitmq_server",
    "nats_server",
    "node",
    "npm",
}
"""Variables, without the prefix, that the other commands and the benchmarks understand."""
GRPC_FILES = ("certificate", "key", "client_ca")
_SECTIONS = {"http", "grpc", "cluster", "providers"}
_POSTGRES = ("postgresql", "postgresql+psycopg")
_CACHE = CacheOptions()

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 (to refuse it)

_T = TypeVar("_T")
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what a provider caches in this process, over all its queues."""

    max_events: _Positive = _CACHE.max_events
    max_bytes: _Positive = _CACHE.max_bytes


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One provider. `adapter` and `queues` are fixed when it is first opened; left out, they are what it has."""

    adapter: str | None = None
    queues: _Positive | None = None
    options: dict[str, Any] = {}
    """The adapter's own options."""
    cache: CacheConfig = CacheConfig()
    detach_after_s: _Seconds = 0.25
    delays: str | None = None
    """Where delayed events wait that the adapter cannot delay: "store" for the control store, or the URL of a Redis.
    None: it refuses them."""

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
        )


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where /metrics and /healthz are served."""

    host: str = "127.0.0.1"
    port: _Port | None = None
    """None: nowhere. 0: at a free port, which is logged."""


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where gRPC is served, to whom, and how much of it. `check` tells what does not go together."""

    host: str = "127.0.0.1"
    port: _Port | None = None
    """None: nowhere. 0: at a free port, which is logged."""
    insecure: bool = False
    """Serve without TLS also where other machines can reach it."""
    certificate: str | None = None
    """File: the silo's certificate and those that vouch for it, PEM."""
    key: str | None = None
    """File: the certificate's key, PEM, without a passphrase."""
    client_ca: str | None = None
    """File: certificates, PEM; clients need a certificate that one of them signed."""
    auth: Literal["tokens", "none"] | None = None
    """None: "none" where clients need a certificate, on loopback, and with `insecure`; else "tokens"."""
    session_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """A consumer that is not heard for so long is gone, in seconds."""
    limits: ClientLimits = ClientLimits()

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. Of names that is so for localhost alone."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def asks_for_tokens(self) -> bool:
        if self.auth is not None:
            return self.auth == "tokens"
        return not (self.loopback or self.insecure or self.client_ca is not None)

    def at(self, port: int) -> str:
        """The address with this port, as in 127.0.0.1:9465 and [::1]:9465."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


_TIMES = ClusterOptions()


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This silo as one of several. All silos of a cluster have the same times and the same balancer."""

    name: str | None = None
    """None: the name of the machine, and the port of gRPC. It stays the same over a restart."""
    store: str | None = None
    """URL of the PostgreSQL database that has the control data. None: it is in the data directory, on one machine."""
    address: str | None = None
    """HOST:PORT where other silos reach this one. None: as gRPC is served."""
    ca: str | None = None
    """File: certificates, PEM, that vouch for those of other silos. None: `grpc.client_ca`, else the system's."""
    balancer: str = "lease-count"
    fixed: tuple[str, ...] = ()
    """The names of all silos, for the best fits."""
    mapping: dict[str, str] = {}
    """The silo of each queue, for static."""
    period_s: _Seconds = _TIMES.period_s
    lease_s: _Seconds = _TIMES.lease_s
    dead_after_s: _Seconds = _TIMES.dead_after_s
    maturity_s: _Seconds = _TIMES.maturity_s

    def options(self, drain_s: float) -> ClusterOptions:
        """Raises InvalidArgument, also for an unknown balancer."""
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
    """Data directory. None: nothing is kept, for adapters that need no directory."""
    modules: tuple[str, ...] = ()
    """Imported at the start; the subscriptions that they declare are served."""
    drain_s: _Seconds = 10.0
    """How long running handlers may take to end when the silo stops, in seconds."""
    workers: _Positive | None = None
    """So many silos, each a process of its own, which are a cluster. None: one silo, in this process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    cluster: ClusterConfig | None = None
    """None: this silo has all queues."""
    providers: dict[str, ProviderConfig] = msgspec.field(default_factory=lambda: {"default": ProviderConfig()})


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> SiloConfig:
    """Put the three sources together. `flags` is a nested table of the options that were given.

    Raises InvalidArgument naming the source, the option, and what is accepted; OSError where the file cannot be read.
    """
    table = {} if file is None else _read(file)
    if file is not None:
        read(SiloConfig, table, str(file))  # first by itself, so that the message names the file
        table = _placed(table, file)
    from_environment = _of_environment(environ)
    config = read(SiloConfig, _over(_over(table, from_environment), flags), "configuration")
    check(config)
    return config


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the host of an IPv6 address is in brackets. Raises InvalidArgument."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise InvalidArgument(f"{text!r} is no address: write HOST:PORT, as in 127.0.0.1:9465 or [::1]:9465")
    return host, int(port)


def check(config: SiloConfig) -> None:
    """Raises InvalidArgument for options that do not go together, or that would let in whoever comes."""
    grpc = config.grpc
    if (grpc.certificate is None) != (grpc.key is None):
        given, missing = ("certificate", "key") if grpc.key is None else ("key", "certificate")
        raise InvalidArgument(f"grpc.{given} is given without grpc.{missing}: TLS needs both")
    if grpc.client_ca is not None and grpc.certificate is None:
        raise InvalidArgument("grpc.client_ca is given without grpc.certificate and grpc.key: it is part of TLS")
    if grpc.port is not None:
        _check_served(grpc, config.data)
    if config.cluster is not None:
        _check_cluster(config, config.cluster)


def _check_cluster(config: SiloConfig, cluster: ClusterConfig) -> None:
    if config.grpc.port is None:
        raise InvalidArgument("[cluster] needs gRPC, by which silos reach one another: give grpc.port (--listen)")
    if cluster.name is not None and not NAME.fullmatch(cluster.name):
        raise InvalidArgument(
            f"cluster.name: {cluster.name!r} is no name of a silo: letters, digits, dot, dash and underscore, at most "
            "100, starting with a letter or digit"
        )
    if cluster.address is not None:
        parse_address(cluster.address)
    elif config.grpc.host in ANY_ADDRESS:
        raise InvalidArgument(
            f"grpc.host is {config.grpc.host}, which is every address of this machine: give cluster.address, where "
            "other silos reach it"
        )
    if config.data is None:
        raise InvalidArgument("[cluster] needs a data directory: name it with --data, with HEADRACE_DATA, or as data =")
    if cluster.store is not None:
        check_store(cluster.store, "cluster.store")
    cluster.options(config.drain_s)
    _check_balancer(cluster)
    _check_mapping(cluster, config.providers)


_READS: Mapping[str, str | None] = {
    "best-fit-fixed": "fixed",
    "best-fit-live": "fixed",
    "static": "mapping",
    **dict.fromkeys(("average", "lease-count", "ring")),
}
"""The option that a balancer needs, for those that are built in: they ignore the other one."""


def _check_balancer(cluster: ClusterConfig) -> None:
    if cluster.balancer not in _READS:
        return
    needed = _READS[cluster.balancer]
    for option, given in (("fixed", cluster.fixed), ("mapping", cluster.mapping)):
        if option == needed and not given:
            raise InvalidArgument(
                f"cluster.balancer is {cluster.balancer!r}, which goes by cluster.{option}, and that is not given"
            )
        if option != needed and given:
            raise InvalidArgument(
                f"cluster.{option} is given, and cluster.balancer is {cluster.balancer!r}, which takes no notice of "
                "it: leave it out, or name another balancer"
            )


def _check_mapping(cluster: ClusterConfig, providers: Mapping[str, ProviderConfig]) -> None:
    """A provider whose `queues` are left out may have any."""
    counts = [provider.queues or 0 for provider in providers.values()]
    queues = max(counts, default=0)
    beyond = [queue for queue in cluster.mapping if int(queue) >= queues]
    if beyond and all(counts):
        raise InvalidArgument(
            f"cluster.mapping: no provider has a queue {beyond[0]}: the most queues of one are {queues}, from 0"
        )


def check_store(store: str, option: str) -> None:
    """Raises InvalidArgument that does not show it: any part may be the password, where it is badly written."""
    if not _is_postgres(store):
        raise InvalidArgument(
            f"{option} is no URL of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST/DATABASE, and in "
            "a user or a password %2F for /, %40 for @, %3A for :, %3F for ?, %23 for #"
        )


def _is_postgres(store: str) -> bool:
    try:
        url = urlsplit(store)
        host = url.hostname or parse_qs(url.query).get("host")
        return (
            url.scheme in _POSTGRES and bool(host) and url.port != 0 and url.netloc.count("@") <= 1 and not url.fragment
        )
    except ValueError:  # of the port, or an address in brackets
        return False


def _check_served(grpc: GrpcConfig, data: str | None) -> None:
    if not (grpc.loopback or grpc.certificate or grpc.insecure):
        raise InvalidArgument(
            f"grpc.host is {grpc.host!r}, which other machines may reach, and there is no TLS: give grpc.certificate "
            "and grpc.key (--certificate, --key), serve on 127.0.0.1, or allow it with grpc.insecure (--insecure)"
        )
    if grpc.insecure and grpc.certificate:
        raise InvalidArgument("grpc.insecure means without TLS, and grpc.certificate with it: leave out one of them")
    if grpc.asks_for_tokens and data is None:
        raise InvalidArgument(
            "grpc.auth is tokens, and tokens are kept in a data directory: name it with --data, with HEADRACE_DATA, or "
            "as data = in the configuration file"
        )


class Credentials(NamedTuple):
    """What TLS needs, PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    """Clients need a certificate that one of these signed; None: they need none."""


def read_credentials(grpc: GrpcConfig) -> Credentials | None:
    """The files that the options name, None without TLS.

    Raises InvalidArgument, one line that names the option and the file, where one cannot be read or used.
    """
    if grpc.certificate is None or grpc.key is None:
        return None
    certificate, key = _pem("certificate", grpc.certificate), _pem("key", grpc.key)
    client_ca = None if grpc.client_ca is None else _pem("client_ca", grpc.client_ca)
    _check_usable(grpc.certificate, grpc.key, grpc.client_ca)
    return Credentials(certificate, key, client_ca)


def _pem(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"grpc.{option}: {file} cannot be read: {error.strerror or error}") from None


def _check_usable(certificate: str, key: str, client_ca: str | None) -> None:
    """Ask OpenSSL, for gRPC takes any bytes and then fails at each connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        why = (
            "they do not belong together"
            if "MISMATCH" in str(error)
            else f"these are no certificate and key in PEM, the key without a passphrase ({error})"
        )
        raise InvalidArgument(f"grpc.certificate {certificate}, grpc.key {key}: {why}") from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(f"grpc.client_ca: {client_ca} has no certificate in PEM ({error})") from None


def unknown_variables(environ: Mapping[str, str]) -> Sequence[str]:
    """A line for each variable that looks like an option at the top and is none: it is without effect."""
    known = _top()
    accepted = ", ".join(f"{PREFIX}{name.upper()}" for name in known if name not in _SECTIONS)
    return [
        f"variable {variable} is no option and without effect: accepted are {accepted}, {PREFIX}HTTP__..., "
        f"{PREFIX}GRPC__..., {PREFIX}CLUSTER__... and {PREFIX}PROVIDERS__..."
        for variable in environ
        if variable.startswith(PREFIX)
        and "__" not in variable
        and variable.removeprefix(PREFIX).lower() not in {*known, *OTHERS}
    ]


def _top() -> Sequence[str]:
    return [field.name for field in msgspec.structs.fields(SiloConfig)]


def _placed(table: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The file's options, the paths in them relative to the file's folder."""
    folder = file.absolute().parent
    placed = _under(folder, table, ("data",))
    for section, files in (("grpc", GRPC_FILES), ("cluster", ("ca",))):
        if section in table:
            placed[section] = _under(folder, table[section], files)
    return placed


def _under(folder: Path, table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**table, **{name: str(folder / table[name]) for name in names if table.get(name)}}


def read(kind: type[_T], table: Mapping[str, Any], source: str, path: str = "") -> _T:
    """Convert a table into the Struct `kind`. Raises InvalidArgument with the path of what is wrong."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}  # pyright: ignore[reportArgumentType]
    for name in table:
        if name not in fields:
            raise InvalidArgument(
                f"{source}: unknown option {path}{name}: accepted {'at the top' if not path else 'there'} are "
                f"{', '.join(fields)}"
            )
    values = {name: _value(fields[name].type, value, source, path + name) for name, value in table.items()}
    try:
        return kind(**values)
    except InvalidArgument as error:  # of options that do not go together
        raise InvalidArgument(f"{source}: {f'option {path[:-1]}: ' if path else ''}{error}") from None


def _plain(kind: Any) -> Any:
    """The Struct of a section that may be left out."""
    return next(filter(_is_struct, get_args(kind)), kind) if get_origin(kind) is not dict else kind


def _value(kind: Any, value: Any, source: str, path: str) -> Any:
    kind = _plain(kind)
    if _is_struct(kind):
        return read(kind, _table(value, source, path), source, f"{path}.")
    if get_origin(kind) is dict and _is_struct(element := get_args(kind)[1]):
        entries = _table(value, source, path).items()
        return {name: _value(element, entry, source, f"{path}.{name}") for name, entry in entries}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        choices = [choice for one in (kind, *get_args(kind)) if get_origin(one) is Literal for choice in get_args(one)]
        accepted = f": accepted are {', '.join(choices)}" if choices else ""
        raise InvalidArgument(f"{source}: option {path}: {str(error).replace('`', '')}{accepted}") from None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _table(value: Any, source: str, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{source}: option {path} is a table, not {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{file}: not TOML: {error}") from None


def _of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    known = _top()
    for variable, text in environ.items():
        path = variable.removeprefix(PREFIX).lower().split("__")
        if not variable.startswith(PREFIX) or (len(path) == 1 and path[0] not in known):
            continue
        kind = _kind_at(SiloConfig, path, variable)
        inner: Any = _understood(kind, text, variable)
        for name in reversed(path):
            inner = {name: inner}
        table = _over(table, inner)
    return table


def _kind_at(kind: Any, path: list[str], variable: str) -> Any:
    """The type of the option at `path`; Any within an adapter's own options."""
    for name in path:
        kind = _plain(kind)
        if _is_struct(kind):
            fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
            if name not in fields:
                raise InvalidArgument(
                    f"variable {variable}: unknown option {name}: accepted there are {', '.join(fields)}"
                )
            kind = fields[name]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            raise InvalidArgument(f"variable {variable}: there is nothing below {name}")
    return kind


def _understood(kind: Any, text: str, variable: str) -> Any:
    """A variable's text as the option's type has it."""
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is Any:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    try:
        return msgspec.to_builtins(msgspec.convert(text, kind, strict=False))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"variable {variable}: {str(error).replace('`', '')}") from None


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables put on top of each other."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
    return merged
