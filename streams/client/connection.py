"""A connection to silos: addresses, TLS, token, calls with raw bytes, and what their failures mean.

Nothing here knows any message: requests and responses are encoded. Importing this module loads grpc.

A call goes to one address, the first at the beginning. When a silo does not answer there, or says that it stops, the
next call goes to the next address. Calls that are open stay where they are.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
from grpc import aio

from ..errors import (
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
    error_of,
)
from ..grpc_process import use_grpc
from ..subscriptions import RetryPolicy

CODE = "headrace-code"
"""Key of the trailing metadata that has the code of the error."""
KEEPALIVE_MS = 10_000
"""How often a connection with open calls is tried while nothing is heard. A silo has to allow it."""
KEEPALIVE_TIMEOUT_MS = 5_000
"""How long to wait for the answer to that, before the connection counts as lost."""
RECONNECT = RetryPolicy(max_attempts=1 << 30, max_elapsed_s=1e9, initial_delay_s=0.05, max_delay_s=1.0)
"""Pauses between attempts to reach a silo. It never gives up: whoever calls says for how long."""

SETTLE_S = 0.5
"""How long closing waits at the most, in seconds, for grpc to be done with calls that were cut off."""

_SERVICE = "/headrace.v1."
_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # this is how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # what is retried is decided here, and without it a stream is not buffered
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # clients of one process have connections of their own
    ("grpc.max_receive_message_length", -1),  # credits bound what comes
    ("grpc.max_send_message_length", -1),
)


# ---- where, and as whom ----------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """Where a silo serves gRPC."""

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


def parse_addresses(text: str) -> list[Address]:
    """`host:port`, or several of them with commas between. Raises InvalidArgument."""
    return [_address(part.strip(), text) for part in text.split(",")]


def _address(part: str, text: str) -> Address:
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]@]+)):(?P<port>\d{1,5})", part, re.ASCII)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        where = "" if part == text else f" in {text!r}"
        raise InvalidArgument(
            f"{part!r}{where} is no address: write it as host:port or [ipv6]:port, several with commas between"
        )
    return Address(match["v6"] or match["host"], int(match["port"]))


@dataclass(frozen=True, kw_only=True)
class Tls:
    """How to speak TLS. Paths of PEM files, or their contents as bytes. Without anything: the silo's certificate is
    checked against the roots that grpc ships."""

    ca: str | os.PathLike[str] | bytes | None = None
    """Roots to check the silo's certificate against."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """The client's own, for a silo that wants one (mutual TLS), and its key."""
    key: str | os.PathLike[str] | bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("a client certificate and its key go together: give both, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidArgument with the name of one that cannot be read, or has something else."""
        ca, certificate = _pem("ca", self.ca, "CERTIFICATE"), _pem("certificate", self.certificate, "CERTIFICATE")
        return grpc.ssl_channel_credentials(ca, _pem("key", self.key, "PRIVATE KEY"), certificate)


def _pem(option: str, source: str | os.PathLike[str] | bytes | None, kind: str) -> bytes | None:
    if source is None or isinstance(source, bytes):
        where, content = "the bytes given", source
    else:
        where, content = os.fspath(source), _content(option, Path(source))
    if content is not None and f"{kind}-----".encode() not in content:
        raise InvalidArgument(f"tls.{option}: {where}: no {kind.lower()} in PEM is there: name the file that has it")
    return content


def _content(option: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls.{option}: {file}: {error.strerror}: name a PEM file that can be read") from None


def _check_token(token: str | None, tls: Tls | None, addresses: Iterable[Address], *, insecure: bool) -> None:
    if token is None:
        return
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("the token has characters that no token has: give it as it was issued, without spaces")
    if exposed := next((str(one) for one in addresses if tls is None and not insecure and not one.loopback), None):
        raise InvalidArgument(
            f"the token would go to {exposed} unencrypted: give tls=Tls(...), or insecure=True in a network you trust"
        )


# ---- failures --------------------------------------------------------------------------------------------------------


def remote_error(code: str, message: str) -> HeadraceError | None:
    """The error that a silo raised; None for a code that this version does not know. `Closed` is the silo's own
    affair: to a client that silo is unavailable."""
    error = error_of(code, message)
    return Unavailable(message) if isinstance(error, Closed) else error


def status_error(status: int, details: str, where: str) -> HeadraceError:
    """The error for a gRPC status without a code of headrace: it came from grpc, or from something on the way."""
    if status == 1:  # CANCELLED
        return Unavailable(f"the call to {where} was cancelled")
    if status == 14:  # UNAVAILABLE
        return Unavailable(_unreached(details, where))
    if status in (2, 13):  # UNKNOWN, INTERNAL: what grpc says of a connection that breaks while it sends
        return Unavailable(f"the connection to {where} broke ({details})")
    if status == 4:  # DEADLINE_EXCEEDED
        return Unavailable(f"the silo at {where} did not answer in time")
    if status == 12:  # UNIMPLEMENTED
        return NotSupported(f"what serves gRPC at {where} does not know this call ({details}): is it a headrace silo?")
    return _KINDS.get(status, HeadraceError)(f"{where}: {details}")


def _unreached(details: str, where: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of the silo at {where} is not trusted: give its authority's as tls.ca"
    if "WRONG_VERSION_NUMBER" in details:
        return f"what answers at {where} does not speak TLS: leave tls out, or check the address"
    return (
        f"no silo answers at {where} ({details}): check the address, that a silo serves gRPC there, and whether it "
        "wants TLS, or with TLS a client's certificate"
    )


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


def _watches_a_call(task: asyncio.Task[Any]) -> bool:
    """Whether it is grpc's own, which waits for a call's end."""
    return getattr(task.get_coro(), "__name__", "") == "_handle_status_once_received"


# ---- calls -----------------------------------------------------------------------------------------------------------


_HERE = b"\x08\x01"
"""`DescribeClusterRequest(here=True)`: whether other silos answer is not asked."""


class ResponseCall:
    """A call with many responses. Not more than one `receive` at a time.

    It raises the HeadraceError that ended the call. Whoever is cancelled in it has cancelled the call.
    """

    def __init__(self, connection: Connection, index: int, call: aio.UnaryStreamCall[bytes, bytes] | _BothWays) -> None:
        self._connection = connection
        self._index = index
        self._channel = connection.channel(index)
        self._call = call

    @property
    def address(self) -> str:
        """Where it goes."""
        return str(self._connection.addresses[self._index])

    async def receive(self) -> bytes | None:
        """The next message; None where the other side has ended the call in order."""
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise await self._failure(error) from None
        return None if message is aio.EOF else cast(bytes, message)

    def cancel(self) -> None:
        """End the call at once. Idempotent; who waits for it gets Unavailable, or Closed."""
        self._call.cancel()
        self._connection.cut_off |= self._call.cancelled()  # also where grpc did so, because who waited was cancelled

    def leave(self) -> None:
        """The silo has said that it is going to end the call: make the next one elsewhere, if there is another."""
        self._connection.leave(self._index)

    async def abandon(self) -> None:
        """Nothing is heard of the silo, so its connection may be dead: end the call. Those that follow get another
        connection, also elsewhere."""
        self.cancel()
        await self._connection.renew(self._index, self._channel)

    async def ended(self) -> None:
        """Return when the call is over."""
        await self._call.code()

    async def _failure(self, error: BaseException) -> BaseException:
        """Why the call ended, which it has. Of `cancel`, grpc tells whoever waits as if they were cancelled."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return error
        code = await self._call.code()
        metadata = await self._call.trailing_metadata()
        return self._connection.failed(self._index, code, await self._call.details() or "", metadata)


class StreamCall(ResponseCall):
    """A bidirectional call. Not more than one `send` and one `receive` at a time, which both raise the HeadraceError
    that ended the call. Whoever is cancelled in one of them has cancelled the call.
    """

    _call: _BothWays

    def __init__(self, connection: Connection, index: int, call: _BothWays) -> None:
        super().__init__(connection, index, call)

    async def send(self, message: bytes) -> None:
        """Return when grpc has taken it, which it does while the other side reads on."""
        try:
            await self._call.write(message)
        except _ENDED as error:
            raise await self._failure(error) from None

    async def done_sending(self) -> None:
        """Tell the other side that nothing more comes."""
        try:
            await self._call.done_writing()
        except _ENDED as error:
            raise await self._failure(error) from None


_BothWays: TypeAlias = "aio.StreamStreamCall[bytes, bytes]"
_ENDED = (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError)


class Connection:
    """Calls to one silo of several, with the same token and TLS. Belongs to the event loop that opened it."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
    ) -> None:
        """Connects to nothing yet. Raises InvalidArgument; a token goes unencrypted to this machine only, unless
        `insecure`."""
        self.addresses = parse_addresses(address)
        self.cut_off = False
        """A call was ended here before its silo had ended it."""
        self._tls = (Tls() if tls else None) if isinstance(tls, bool) else tls
        _check_token(token, self._tls, self.addresses, insecure=insecure)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._credentials: grpc.ChannelCredentials | None = None
        self._channels: dict[int, aio.Channel] = {}
        self._given_up: aio.Channel | None = None
        self._methods: dict[tuple[int, str], Any] = {}
        self._current = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """Who opened it."""
        self._closed = False
        self._random = random.Random()  # noqa: S311 (spreads reconnections)

    @property
    def address(self) -> str:
        """Where the next call goes."""
        return str(self.addresses[self._current])

    @property
    def closed(self) -> bool:
        return self._closed

    async def open(self, timeout_s: float) -> None:
        """Make sure that a silo answers, and takes the token.

        Raises Unavailable where none does within `timeout_s`, Unauthenticated, InvalidArgument for files that cannot be
        used.
        """
        credentials = None if self._tls is None else await asyncio.to_thread(self._tls.credentials)
        self.begin(credentials)
        await self.ready(timeout_s)

    def begin(self, credentials: grpc.ChannelCredentials | None) -> None:
        """Belong to the running loop, whether a silo answers or not. Raises NotSupported as `use_grpc`."""
        use_grpc()
        self._credentials = credentials
        self._loop = asyncio.get_running_loop()

    async def ready(self, timeout_s: float) -> None:
        """Return when a silo answers and takes the token. Raises as `open`."""
        await self.call("ClusterService/DescribeCluster", _HERE, timeout_s=timeout_s)

    def check_loop(self) -> None:
        """What grpc has for one event loop works in no other. Raises InvalidArgument in another than that of `open`."""
        if self._loop is None or self._closed or asyncio.get_running_loop() is self._loop:
            return
        raise InvalidArgument(
            "a client belongs to the event loop that opened it: open another one in this loop, or use SyncClient, "
            "which may be called from anywhere"
        )

    def check_open(self) -> None:
        """Raises Closed before `open` and after `aclose`, and as `check_loop`."""
        if self._closed:
            raise Closed("the client is closed")
        if self._loop is None:
            raise Closed("the client is not open: use it in an `async with` block")
        self.check_loop()

    async def aclose(self) -> None:
        """End all calls. Idempotent; afterwards every call raises Closed."""
        self._closed = True
        # They stay referenced: when its last channel is freed, grpc waits for a thread of its own to end.
        for channel in self._channels.values():
            await channel.close()
        if self.cut_off:
            await self._settle()

    async def _settle(self) -> None:
        """Give grpc time to tell this loop of the ends of calls. Of one that it would tell later, when the loop is
        closed, it writes a traceback into the next one. Whose call it is does not show, so this asks for all."""
        self.cut_off = False
        if watching := list(filter(_watches_a_call, asyncio.all_tasks())):
            await asyncio.wait(watching, timeout=SETTLE_S)

    async def renew(self, index: int, channel: aio.Channel) -> None:
        """Give up a connection to address `index`, with all calls on it. Nothing where that was done already."""
        self.leave(index)
        if self._channels.get(index) is not channel:
            return
        del self._channels[index]
        self._methods = {key: method for key, method in self._methods.items() if key[0] != index}
        self._given_up = channel  # see `aclose`
        await channel.close()

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        """Call `Service/Method` once. Raises a HeadraceError; Unavailable where no answer came within `timeout_s`."""
        index = self._current
        call = self._method(index, "unary_unary", method)(request, timeout=timeout_s, metadata=self._metadata)
        try:
            return await call
        except aio.AioRpcError as error:
            failure = self.failed(index, error.code(), error.details() or "", error.trailing_metadata())
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        raise failure

    async def call(
        self, method: str, request: bytes, *, timeout_s: float, done: type[HeadraceError] | None = None
    ) -> bytes:
        """Call `Service/Method`, again and again while the failure is retryable and `timeout_s` lasts.

        For what may be done twice. An attempt that failed may have been carried out all the same: `done` is the error
        that a later one then ends with, which is taken for success, with an empty response.
        """
        began = self._now()
        for attempt in range(1, 1 << 30):
            try:
                return await self.unary(method, request, timeout_s=max(0.001, began + timeout_s - self._now()))
            except HeadraceError as error:
                if attempt > 1 and done is not None and isinstance(error, done):
                    return b""
                pause = self.pause_s(attempt)
                if not error.retryable or self._now() + pause >= began + timeout_s:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError

    async def long_call(self, method: str, request: bytes, *, outage_s: float) -> bytes:
        """Call `Service/Method`, which may take its time, again after each outage. Raises Unavailable where one lasts
        longer than `outage_s`."""
        for attempt in range(1, 1 << 30):
            try:
                return await self.unary(method, request, timeout_s=None)
            except HeadraceError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(self.pause_s(attempt))
            await self.ready(outage_s)
        raise AssertionError

    def responses(self, method: str, request: bytes) -> ResponseCall:
        """Begin a call of `Service/Method` with many responses. It fails, where it does, at the first `receive`."""
        index = self._current
        call = self._method(index, "unary_stream", method)
        return ResponseCall(self, index, call(request, metadata=self._metadata))

    def stream(self, method: str) -> StreamCall:
        """Begin a bidirectional call of `Service/Method`. It fails, where it does, at the first `receive`."""
        index = self._current
        return StreamCall(self, index, self._method(index, "stream_stream", method)(metadata=self._metadata))

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row, in seconds: it grows, with jitter."""
        return RECONNECT.delay(failures, 0, self._random) or 0.0

    def failed(
        self, index: int, code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]] | None
    ) -> HeadraceError:
        """What the failure of a call to address `index` means. The next call goes elsewhere where it is unavailable."""
        if self._closed:
            return Closed("the client is closed")
        status = cast("tuple[int, str]", code.value)[0]
        named = dict(metadata or ()).get(CODE)
        error = remote_error(named, details) if isinstance(named, str) else None
        error = error or status_error(status, details, str(self.addresses[index]))
        if isinstance(error, Unavailable) and status != 1:
            self.leave(index)
        return error

    def leave(self, index: int) -> None:
        """The silo at address `index` is not to be called any more: the next call goes to another, if there is one."""
        if index == self._current:
            self._current = (index + 1) % len(self.addresses)

    def _method(self, index: int, kind: str, method: str) -> Callable[..., Any]:
        self.check_open()
        known = self._methods.get((index, method))
        if known is None:
            known = self._methods[index, method] = getattr(self.channel(index), kind)(_SERVICE + method)
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

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
