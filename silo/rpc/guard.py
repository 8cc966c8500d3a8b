"""The one door of the gRPC server: every method is called through here, with its caller known and within limits.

A service is a list of methods. Each has a handler, which gets a `Call` and encoded messages and gives encoded messages:

    async def get(call: Call, request: bytes) -> bytes:                 # Kind.UNARY
        wanted = parsed(pb.GetSubscriptionRequest, request)
        call.principal.require_selector(Permission.MANAGE, ...)
        return pb.GetSubscriptionResponse(...).SerializeToString()

    async def watch(call: Call, request: bytes) -> None:                # Kind.RESPONSES: one request, many responses
        await call.write(...)

    async def subscribe(call: Call) -> None:                            # Kind.STREAM: both ways
        while (message := await call.read()) is not None:
            await call.write(...)

    METHODS = [Method("headrace.v1.SubscriptionService/GetSubscription", Kind.UNARY, get), ...]

What a handler raises ends the call. A HeadraceError becomes its gRPC status, with the text as details and trailing
metadata `headrace-code`, and `headrace-retry-after-ms` where trying again later makes sense. Anything else is a bug:
the caller is told INTERNAL and no more, the log has the rest. When the caller hangs up, the handler is cancelled.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from ...streams.errors import HeadraceError, InvalidArgument, PayloadTooLarge, Unauthenticated, Unavailable
from ..access import EVERYTHING, PEER, Authenticator, Principal
from ..limits import UNLIMITED, Limits, client_of
from ..limits import Call as Usage
from ..limits import Usage as AllUsage

log = logging.getLogger("headrace.silo")

CODE, RETRY_AFTER_MS = "headrace-code", "headrace-retry-after-ms"
"""Trailing metadata of a call that failed."""
RETRY_MS = 200
"""What a client that may try again is told to wait, in milliseconds."""
MAX_DETAILS = 1000
"""Characters of an error's text that are sent: it quotes what the caller sent, and headers of HTTP/2 are small."""

_STATUS = {cast("tuple[int, str]", status.value)[0]: status for status in grpc.StatusCode}
_INTERNAL = "the silo failed on this call, which is a bug: its log says more"
_M = TypeVar("_M", bound=Message)

Context = grpc.aio.ServicerContext[bytes, bytes]


class Kind(enum.Enum):
    """Which sides of a call are streams."""

    UNARY = "unary"
    """`async def handler(call, request: bytes) -> bytes`"""
    RESPONSES = "responses"
    """One request, many responses: `async def handler(call, request: bytes) -> None`"""
    STREAM = "stream"
    """Both: `async def handler(call) -> None`"""


class Method(NamedTuple):
    """One method of a service."""

    name: str
    """Service and method, as in "headrace.v1.PublisherService/Publish"."""
    kind: Kind
    handler: Callable[..., Awaitable[Any]]
    while_closing: bool = False
    """It may be called while the silo stops: it ends what others have begun."""
    probe: bool = False
    """It needs no token, may be called while the silo stops, and nobody waits for its end."""

    @property
    def service(self) -> str:
        return self.name.partition("/")[0]


class Call:
    """A call, as its handler sees it.

    Attributes:
        principal: who calls, and what they may: `call.principal.require(Permission.PUBLISH, namespace)` and the like,
            before anything is looked up.
        peer: the caller's address, as gRPC has it.
        closing: is set when the silo stops, or wants the service's callers elsewhere: end the call soon, in order.
    """

    __slots__ = ("_context", "_guard", "_usage", "closing", "peer", "principal")

    def __init__(
        self, guard: Guard, context: Context, principal: Principal, usage: Usage, closing: asyncio.Event
    ) -> None:
        self.principal = principal
        self.peer = context.peer()
        self.closing = closing
        self._guard = guard
        self._context = context
        self._usage = usage

    async def read(self) -> bytes | None:
        """The next message of a stream, None at its end. One at a time.

        Raises Unauthenticated where the token was revoked meanwhile, LimitExceeded where messages come too fast, and
        PayloadTooLarge.
        """
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        self.check_valid()
        self._usage.request()
        self._guard.check_size(message)
        return message

    async def write(self, message: bytes) -> None:
        """Send a message on a stream; waits while the caller does not take what was sent before.

        One at a time: two at once end the call.
        """
        await self._context.write(message)

    def check_valid(self) -> None:
        """Raise Unauthenticated where the token was revoked since the call began. `read` does so itself."""
        named = self.principal is not EVERYTHING
        if named and not self._guard.authenticator.still_valid(self.principal):
            raise Unauthenticated("the token was revoked while the call was open")

    def remaining_s(self) -> float | None:
        """Seconds until the caller's deadline, None where there is none."""
        return self._context.time_remaining()

    def hold(self, nbytes: int) -> None:
        """So many bytes are going to be published. What is held, the call's end releases. Raises LimitExceeded."""
        self._usage.hold(nbytes)

    def release(self, nbytes: int) -> None:
        """So many of them are stored, or refused."""
        self._usage.release(nbytes)

    def end(self) -> None:
        """The guard's to call."""
        self._usage.end()


class Guard:
    """Lets calls in, or not, and answers for what goes wrong."""

    def __init__(self, authenticator: Authenticator, limits: Limits, *, certificates: bool = False) -> None:
        """With `certificates`, a caller that needs no token goes by the name in its certificate."""
        self.authenticator = authenticator
        self._closing: dict[str, asyncio.Event] = {}
        self.change = asyncio.Event()
        """Set when a service is closed or reopened next."""
        self._limits = limits
        self._unlimited = Limits(UNLIMITED, asyncio.get_running_loop().time)
        """Of other silos: their own clients are limited by them."""
        self._certificates = certificates
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def handlers(self, methods: Iterable[Method]) -> Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]]:
        """What grpc serves: by service, by method."""
        handlers: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
        for method in methods:
            self._closing.setdefault(method.service, asyncio.Event())
            handlers.setdefault(method.service, {})[method.name.partition("/")[2]] = self._handler(method)
        return handlers

    @property
    def services(self) -> Mapping[str, bool]:
        """All services by name, and whether each is open."""
        return {name: not closing.is_set() for name, closing in self._closing.items()}

    def close(self, service: str) -> None:
        """Let no new calls in, and tell those that are open to end."""
        self._closing[service].set()
        self._tell()

    def reopen(self, service: str) -> None:
        """Let calls in again. Those that were told to end still are."""
        self._closing[service] = asyncio.Event()
        self._tell()

    def _tell(self) -> None:
        self.change.set()
        self.change = asyncio.Event()

    async def ended(self) -> None:
        """Return when no call is open, probes apart."""
        await self._none_open.wait()

    def usage(self) -> AllUsage:
        """What all clients use of it at present."""
        return self._limits.usage()

    @property
    def open_calls(self) -> int:
        return self._open

    def check_size(self, message: bytes) -> None:
        limit = self._limits.limits.message_bytes
        if len(message) > limit:
            raise PayloadTooLarge("the message", len(message), limit)

    def _handler(self, method: Method) -> grpc.RpcMethodHandler[bytes, bytes]:
        if method.kind is Kind.UNARY:
            return grpc.unary_unary_rpc_method_handler(self._answering(method))
        if method.kind is Kind.RESPONSES:
            return grpc.unary_stream_rpc_method_handler(self._answering(method))
        return grpc.stream_stream_rpc_method_handler(self._conversing(method))

    def _answering(self, method: Method) -> Any:
        async def answer(request: bytes, context: Context) -> Any:
            return await self._serve(method, context, request)

        return answer

    def _conversing(self, method: Method) -> Any:
        async def converse(_: object, context: Context) -> None:
            await self._serve(method, context)

        return converse

    async def _serve(self, method: Method, context: Context, *requests: bytes) -> Any:
        try:
            call = self._admit(method, context)
            try:
                for request in requests:
                    self.check_size(request)
                if method.kind is not Kind.UNARY:
                    # Now, since a first message that is under way would keep an error from being sent.
                    await context.send_initial_metadata(())
                return await method.handler(call, *requests)
            finally:
                self._leave(method, call)
        except Exception as error:  # noqa: BLE001 (it is answered, and logged where it is a bug)
            await _fail(method, context, error)

    def _admit(self, method: Method, context: Context) -> Call:
        closing = self._closing[method.service]
        if closing.is_set() and not (method.while_closing or method.probe):
            raise Unavailable("the silo stops, or is drained: try again later, or go to another one")
        principal = EVERYTHING if method.probe else self._principal(context)
        peer = context.peer()
        limits = self._unlimited if principal is PEER else self._limits
        usage = limits.begin(client_of(principal, peer), peer)
        if not method.probe:
            self._open += 1
            self._none_open.clear()
        return Call(self, context, principal, usage, closing)

    def _leave(self, method: Method, call: Call) -> None:
        call.end()
        if not method.probe:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    def _principal(self, context: Context) -> Principal:
        principal = self.authenticator.authenticate(_authorization(context))
        if self._certificates and principal is EVERYTHING:
            return Principal(_common_name(context), EVERYTHING.grants)
        return principal


def parsed(kind: type[_M], encoded: bytes) -> _M:
    """A request, decoded. Raises InvalidArgument where the bytes are none."""
    try:
        return kind.FromString(encoded)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidArgument(
            f"the request is no {name}: its {len(encoded):,} bytes cannot be decoded; encode it as proto/v1 says"
        ) from None


class Failure(NamedTuple):
    """What a caller is told of an error."""

    status: grpc.StatusCode
    details: str
    trailers: Sequence[tuple[str, str]]


def failure_of(error: HeadraceError) -> Failure:
    trailers = [(CODE, error.code)]
    if error.retryable:
        trailers.append((RETRY_AFTER_MS, str(RETRY_MS)))
    return Failure(_STATUS[error.status], details_of(error), trailers)


def details_of(error: HeadraceError) -> str:
    """The error's text, as far as it is sent."""
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}..."


async def _fail(method: Method, context: Context, error: Exception) -> NoReturn:
    if isinstance(error, HeadraceError):
        failure = failure_of(error)
        if type(error) is HeadraceError:
            log.error("%s failed", method.name, exc_info=error)
    else:
        log.error("%s failed", method.name, exc_info=error)
        failure = Failure(grpc.StatusCode.INTERNAL, _INTERNAL, [(CODE, HeadraceError.code)])
    await context.abort(failure.status, failure.details, tuple(failure.trailers))


def _authorization(context: Context) -> str | bytes | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value
    return None


def _common_name(context: Context) -> str:
    """The name in the caller's certificate, "" where it has none."""
    names = cast("Mapping[str, Sequence[bytes]]", context.auth_context()).get("x509_common_name", ())
    return names[0].decode("utf-8", "replace") if names else ""
