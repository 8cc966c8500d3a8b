"""The transport over gRPC: addresses of silos, TLS, token, calls, and the errors of failed calls.

Importing this module loads grpc.

A call goes to one address, at first to the first one. When the silo there does not answer, or announces that it stops,
the next call goes to the next address. Open calls stay at their address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
from grpc import aio

from ..streams.arguments import check_constructor, refused
from ..streams.errors import (
    Closed,
    DefinitionConflict,
    Fenced,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    NotSupported,
    PermissionDenied,
    StorageError,
    Unauthenticated,
    Unavailable,
)
from .grpc_process import use_grpc
from .transport import StreamCall, Transport, remote_error, require_loop

CODE = "headrace-code"
"""Key of the trailing metadata with the error's code."""
KEEPALIVE_MS = 10_000
"""Interval of pings on a connection with open calls that receives nothing. A silo has to allow it."""
KEEPALIVE_TIMEOUT_MS = 5_000
"""How long to wait for the answer to a ping before the connection counts as lost."""
SETTLE_S = 0.5
"""Longest time that closing waits for grpc to end cancelled calls, in seconds."""
HEALTH = "/grpc.health.v1.Health/Check"

SERVICE = "/headrace.v1."
"""Beginning of the full name of a method."""
_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # this module retries, and grpc would buffer streams
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each client of a process has its own connections
    ("grpc.max_receive_message_length", -1),  # credits limit the responses
    ("grpc.max_send_message_length", -1),
)


# ---- addresses, TLS, token -------------------------------------------------------------------------------------------


class SiloAddress(NamedTuple):
    """Host and port where a silo serves gRPC."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_addresses(text: str) -> list[SiloAddress]:
    """`host:port`, or several of them with commas between. Raises InvalidArgument."""
    return [_address(part.strip(), text) for part in text.split(",")]


def _address(part: str, text: str) -> SiloAddress:
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@]+)):(?P<port>\d{1,5})", part, re.ASCII)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        where = "" if part == text else f" in {text!r}"
        raise InvalidArgument(
            f"{part!r}{where} is no address: write it as host:port or [ipv6]:port, several with commas between",
            option="address",
        )
    return SiloAddress(match["v6"] or match["host"], int(match["port"]))


@check_constructor
@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificates for TLS, as paths of PEM files, or their contents as bytes. Without any, the silo's certificate is
    checked against the roots that grpc ships."""

    ca: str | os.PathLike[str] | bytes | None = None
    """Roots to check the silo's certificate against."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """Certificate of the client, for a silo that requires one (mutual TLS). Give `key` with it."""
    key: str | os.PathLike[str] | bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            if not isinstance(given := getattr(self, name), str | os.PathLike | bytes | None):
                raise refused(f"tls.{name}", given, "the path of a PEM file, or its contents as bytes")
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument(
                "a client certificate and its key go together", option="tls.certificate", hint="give both, or neither"
            )

    def context(self) -> ssl.SSLContext:
        """Read the files for connections beside gRPC. Without `ca`, the roots are those of the system.

        Raises InvalidArgument for files that OpenSSL cannot use."""
        ca, certificate = _pem("ca", self.ca, "CERTIFICATE"), _pem("certificate", self.certificate, "CERTIFICATE")
        key = _pem("key", self.key, "PRIVATE KEY")
        try:
            context = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii", "replace"))
            if certificate is not None and key is not None:
                _load_pair(context, certificate, key)
        except ssl.SSLError as error:
            raise InvalidArgument(f"the files of TLS cannot be used ({error})", option="tls") from None
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidArgument with the name of a file that is unreadable or has no certificate."""
        ca, certificate = _pem("ca", self.ca, "CERTIFICATE"), _pem("certificate", self.certificate, "CERTIFICATE")
        return grpc.ssl_channel_credentials(ca, _pem("key", self.key, "PRIVATE KEY"), certificate)


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """OpenSSL takes files only: this one is readable by this user alone, and removed at once."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name, password="")


def _pem(option: str, source: str | os.PathLike[str] | bytes | None, kind: str) -> bytes | None:
    if source is None or isinstance(source, bytes):
        where, content = "the bytes given", source
    else:
        where, content = os.fspath(source), _content(option, Path(source))
    if content is not None and f"{kind}-----".encode() not in content:
        problem = f"{where}: no {kind.lower()} in PEM is there"
        raise InvalidArgument(problem, option=f"tls.{option}", hint="name the file that has it")
    return content


def _content(option: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{file}: {error.strerror}", option=f"tls.{option}", hint="name a PEM file that can be read"
        ) from None


def _check_token(token: str | None, tls: Tls | None, addresses: Iterable[SiloAddress], *, insecure: bool) -> None:
    if token is None:
        return
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument(
            "the token is empty, or has characters that no token has",
            option="token",
            hint="give it as it was issued, without spaces",
        )
    if exposed := next((str(one) for one in addresses if tls is None and not insecure and not one.loopback), None):
        raise InvalidArgument(
            f"the token would go to {exposed} unencrypted",
            option="token",
            hint="use {tls}, or {insecure} in a network you trust",
        )


# ---- failures --------------------------------------------------------------------------------------------------------


def status_error(status: int, details: str, where: str) -> HeadraceError:
    """The error for a gRPC status without a code of headrace: it came from grpc, or from a proxy on the way."""
    if status == 1:  # CANCELLED
        return Unavailable(f"the call to {where} was cancelled")
    if status == 14:  # UNAVAILABLE
        return _unreached(details, where)
    if status in (2, 13):  # UNKNOWN, INTERNAL: a connection that broke while grpc was sending
        return Unavailable(f"the connection to {where} broke ({details})")
    if status == 4:  # DEADLINE_EXCEEDED
        return Unavailable(f"the silo at {where} did not answer in time")
    if status == 12:  # UNIMPLEMENTED
        return NotSupported(
            f"the gRPC server at {where} does not know this call ({details}): check that it is a headrace silo"
        )
    return _KINDS.get(status, HeadraceError)(f"{where}: {details}")


def _unreached(details: str, where: str) -> Unavailable:
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return Unavailable(
            f"the certificate of the silo at {where} is not trusted",
            option="tls.ca",
            hint="give the certificate of its authority, or renew the certificate of the silo if it has expired",
        )
    if "Hostname Verification Check failed" in details:
        return Unavailable(
            f"the certificate of the silo at {where} is not for that name",
            option="address",
            hint="add the name to the certificate of the silo, or give a name that the certificate has as address",
        )
    if "WRONG_VERSION_NUMBER" in details:
        return Unavailable(
            f"the server at {where} does not speak TLS", hint="check the address, or connect without {tls}"
        )
    return Unavailable(
        f"no silo answers at {where} ({details})",
        hint="check the address, that a silo serves gRPC there, and whether it requires TLS ({tls}) or a client's "
        "certificate ({tls.certificate})",
    )


CERTIFICATE_OPTIONS = frozenset({"address", "tls.ca"})
"""An error with one of these as `option` says that the silo's certificate is refused."""
_KINDS: dict[int, type[HeadraceError]] = {
    3: InvalidArgument,
    5: NotFound,
    6: DefinitionConflict,
    7: PermissionDenied,
    8: LimitExceeded,
    9: NotSupported,
    10: Fenced,
    15: StorageError,
    16: Unauthenticated,
}


def _is_call_watcher(task: asyncio.Task[Any]) -> bool:
    """Whether it is a task of grpc that waits for the end of a call."""
    return getattr(task.get_coro(), "__name__", "") == "_handle_status_once_received"


# ---- calls -----------------------------------------------------------------------------------------------------------


THIS_SILO_ONLY = b"\x08\x01"
"""`DescribeClusterRequest(here=True)`: the silo does not ask whether other silos answer."""


class GrpcResponseCall:
    """A call with many responses. Only one `receive` may run at a time.

    It raises the HeadraceError that ended the call. Cancelling it cancels the call.
    """

    def __init__(
        self, transport: GrpcTransport, index: int, call: aio.UnaryStreamCall[bytes, bytes] | _BidirectionalCall
    ) -> None:
        self._transport = transport
        self._index = index
        self._channel = transport.channel(index)
        self._call = call

    @property
    def address(self) -> str:
        """Address of the silo that it goes to."""
        return str(self._transport.addresses[self._index])

    async def receive(self) -> bytes | None:
        """Return the next message; None if the silo has ended the call in order."""
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise await self._failure(error) from None
        return None if message is aio.EOF else cast(bytes, message)

    def cancel(self) -> None:
        """End the call at once. Idempotent. A waiting `receive` or `send` raises Unavailable, or Closed."""
        self._call.cancel()
        if self._call.cancelled():  # also if grpc cancelled it, because the waiting task was cancelled
            self._transport.note_cancelled_call()

    def leave(self) -> None:
        """Send the next call to another address, if there is one, because the silo has announced that it ends this
        call."""
        self._transport.leave(self._index)

    async def abandon(self) -> None:
        """End the call of a silo that is silent: its connection may be dead. Later calls get another connection,
        possibly to another address."""
        self.cancel()
        await self._transport.renew(self._index, self._channel)

    async def ended(self) -> None:
        """Return when the call is over."""
        await self._call.code()

    async def _failure(self, error: BaseException) -> BaseException:
        """The error of a call that has ended. After `cancel`, grpc raises CancelledError in the waiting task."""
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            return error
        code = await self._call.code()
        metadata = await self._call.trailing_metadata()
        return self._transport.failed(self._index, code, await self._call.details() or "", metadata)


def _is_cancelled() -> bool:
    """Whether the current task is being cancelled. If not, grpc raised CancelledError because the channel is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class GrpcStreamCall(GrpcResponseCall, StreamCall):
    """A bidirectional call."""

    _call: _BidirectionalCall

    def __init__(self, transport: GrpcTransport, index: int, call: _BidirectionalCall) -> None:
        super().__init__(transport, index, call)

    async def send(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except _ENDED as error:
            raise await self._failure(error) from None

    async def done_sending(self) -> None:
        try:
            await self._call.done_writing()
        except _ENDED as error:
            raise await self._failure(error) from None


_BidirectionalCall: TypeAlias = "aio.StreamStreamCall[bytes, bytes]"
_ENDED = (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError)


class GrpcTransport(Transport):
    """Calls to one silo of several, with the same token and TLS. Belongs to the event loop that opened it."""

    is_remote = True
    closed_error: Callable[[], HeadraceError] = partial(Closed, "the client is closed")
    """Makes the error of calls after `aclose`."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
    ) -> None:
        """Does not connect yet. Raises InvalidArgument, also if a token would leave this machine unencrypted and not
        `insecure`."""
        self.addresses = parse_addresses(address)
        self._has_cancelled_calls = False
        """Whether a call was cancelled before its silo had ended it."""
        self._tls = (Tls() if tls else None) if isinstance(tls, bool) else tls
        _check_token(token, self._tls, self.addresses, insecure=insecure)
        self._token, self._insecure = token, insecure
        self._others: dict[str, GrpcTransport] = {}
        """Transports to other addresses, by `at`."""
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._credentials: grpc.ChannelCredentials | None = None
        self._channels: dict[int, aio.Channel] = {}
        self._given_up: aio.Channel | None = None
        self._methods: dict[tuple[int, str], Any] = {}
        self._current = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that opened it."""
        self._closed = False

    @property
    def address(self) -> str:
        return str(self.addresses[self._current])

    def at(self, address: str) -> GrpcTransport:
        self.check_open()
        if [address] == [str(each) for each in self.addresses]:
            return self
        known = self._others.get(address)
        if known is None:
            known = GrpcTransport(address, token=self._token, tls=self._tls, insecure=self._insecure)
            known.begin(self._credentials)
            self._others[address] = known
        return known

    @property
    def index(self) -> int:
        """Number of the address of the next call in `addresses`."""
        return self._current

    @property
    def authorization(self) -> str:
        """Value of the metadata `authorization`; "" without a token."""
        return self._metadata[0][1] if self._metadata else ""

    async def open(self, timeout_s: float) -> None:
        """Check that a silo answers and accepts the token.

        Raises Unavailable if no silo answers within `timeout_s`, Unauthenticated, and InvalidArgument for unusable
        files.
        """
        await self.prepare()
        await self.ready(timeout_s)

    async def prepare(self) -> ssl.SSLContext | None:
        """Read the files of TLS, and bind the connection to the running loop, without calling a silo. Return the
        context for connections beside gRPC; None without TLS. Raises InvalidArgument for unusable files."""
        if self._tls is None:
            self.begin(None)
            return None
        self.begin(await asyncio.to_thread(self._tls.credentials))
        return await asyncio.to_thread(self._tls.context)

    def begin(self, credentials: grpc.ChannelCredentials | None) -> None:
        """Bind the connection to the running loop, without calling a silo. Raises NotSupported as `use_grpc`."""
        use_grpc()
        self._credentials = credentials
        self._loop = asyncio.get_running_loop()

    async def ready(self, timeout_s: float) -> None:
        await self.call("ClusterService/DescribeCluster", THIS_SILO_ONLY, timeout_s=timeout_s)

    def check_loop(self) -> None:
        if self._loop is not None and not self._closed:
            require_loop(self._loop)

    def check_open(self) -> None:
        if self._closed:
            raise self.closed_error()
        if self._loop is None:
            raise Closed("the client is not open: use it in an `async with` block")
        self.check_loop()

    async def aclose(self) -> None:
        self._closed = True
        for other in self._others.values():
            await other.aclose()
        # The channels stay referenced: when the last one is freed, grpc blocks until its thread ends.
        for channel in self._channels.values():
            await channel.close()
        if self._has_cancelled_calls:
            await self._settle()

    def note_cancelled_call(self) -> None:
        """Let `aclose` wait until grpc has reported the end of a cancelled call."""
        self._has_cancelled_calls = True

    async def _settle(self) -> None:
        """Give grpc time to report the ends of calls to this loop. If the loop was closed before, grpc would write a
        traceback. This waits for the calls of all connections, because grpc's tasks do not show to which one they
        belong."""
        self._has_cancelled_calls = False
        if watching := list(filter(_is_call_watcher, asyncio.all_tasks())):
            await asyncio.wait(watching, timeout=SETTLE_S)

    async def renew(self, index: int, channel: aio.Channel) -> None:
        """Give up a connection to address `index`, with all its calls. Does nothing if that was done already."""
        self.leave(index)
        if self._channels.get(index) is channel:
            await self.disconnect(index)

    async def disconnect(self, index: int) -> None:
        """Close the connection to address `index`, if it is open. The next call there makes a new one."""
        channel = self._channels.pop(index, None)
        if channel is None:
            return
        self._methods = {key: method for key, method in self._methods.items() if key[0] != index}
        self._given_up = channel  # see `aclose`
        await channel.close()

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        index = self._current
        call = self._method(index, "unary_unary", method)(request, timeout=timeout_s, metadata=self._metadata)
        try:
            return await call
        except aio.AioRpcError as error:
            failure = self.failed(index, error.code(), error.details() or "", error.trailing_metadata())
        except asyncio.CancelledError:
            self._has_cancelled_calls = True
            if _is_cancelled():
                raise
            failure = self.closed_error()
        raise failure

    async def health_metadata(self, index: int, timeout_s: float) -> Mapping[str, str | bytes]:
        """Check the health of the silo at address `index`, and return the trailing metadata; nothing from another
        server, or a proxy. Raises Unavailable."""
        self.check_open()
        call = cast("aio.UnaryUnaryCall[bytes, bytes]", self.channel(index).unary_unary(HEALTH)(b"", timeout=timeout_s))
        try:
            await call
            return dict(await call.trailing_metadata() or ())
        except aio.AioRpcError as error:
            failure = self.failed(index, error.code(), error.details() or "", error.trailing_metadata())
        except asyncio.CancelledError:
            self._has_cancelled_calls = True
            if _is_cancelled():
                raise
            failure = self.closed_error()
        if isinstance(failure, Unavailable | Closed):
            raise failure
        return {}

    def responses(self, method: str, request: bytes) -> GrpcResponseCall:
        """Begin a call of `Service/Method` with many responses. The first `receive` raises if it fails."""
        index = self._current
        call = self._method(index, "unary_stream", method)
        return GrpcResponseCall(self, index, call(request, metadata=self._metadata))

    def stream(self, method: str) -> GrpcStreamCall:
        index = self._current
        return GrpcStreamCall(self, index, self._method(index, "stream_stream", method)(metadata=self._metadata))

    def failed(
        self, index: int, code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]] | None
    ) -> HeadraceError:
        """The error for a failed call to address `index`. After Unavailable, the next call goes to the next address."""
        named = dict(metadata or ()).get(CODE)
        status = cast("tuple[int, str]", code.value)[0]
        return self.failure(index, status, named if isinstance(named, str) else None, details)

    def failure(self, index: int, status: int, named: str | None, details: str) -> HeadraceError:
        """As `failed`, from the number of the status and the code of the error, if it has one."""
        if self._closed:
            return self.closed_error()
        error = None if named is None else remote_error(named, details)
        where = str(self.addresses[index])
        error = error or status_error(status, details, where)
        if isinstance(error, Unauthenticated) and not self._metadata:
            return Unauthenticated(
                f"the silo at {where} requires a token", option="token", hint="create one with `headrace tokens create`"
            )
        if isinstance(error, Unavailable) and status != 1:
            self.leave(index)
        return error

    def leave(self, index: int) -> None:
        """Call the silo at address `index` no more: the next call goes to another address, if there is one."""
        if index == self._current:
            self._current = (index + 1) % len(self.addresses)

    def _method(self, index: int, kind: str, method: str) -> Callable[..., Any]:
        self.check_open()
        known = self._methods.get((index, method))
        if known is None:
            known = self._methods[index, method] = getattr(self.channel(index), kind)(SERVICE + method)
        return known

    def channel(self, index: int) -> aio.Channel:
        """The present connection to address `index`."""
        channel = self._channels.get(index)
        if channel is None:
            target = str(self.addresses[index])
            channel = self._channels[index] = (
                aio.insecure_channel(target, options=_OPTIONS)
                if self._credentials is None
                else aio.secure_channel(target, self._credentials, options=_OPTIONS)
            )
        return channel


async def open_once(transport: GrpcTransport, timeout_s: float) -> None:
    """Open a transport with one attempt at each address. Raise Unavailable at once if all refuse the connection;
    an address that is silent takes `timeout_s`. Raise the other errors of `GrpcTransport.open`, too."""
    await transport.prepare()
    for left in reversed(range(len(transport.addresses))):
        try:
            await transport.unary("ClusterService/DescribeCluster", THIS_SILO_ONLY, timeout_s=timeout_s)
            return
        except Unavailable:  # the next call goes to the next address
            if not left:
                raise
