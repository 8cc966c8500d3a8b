"""The guard of a silo's servers: it authenticates each caller, applies limits, and turns errors into statuses.

An exception ends the call. A HeadraceError becomes its gRPC status, with the text as details and trailing metadata
`headrace-code`, and `headrace-retry-after-ms` if a later retry can succeed. Any other exception is a bug: the caller
gets only INTERNAL, and the log has the traceback. When the caller cancels the call, the handler is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio

from ..streams.errors import HeadraceError, PayloadTooLarge, Unauthenticated, Unavailable, code_of
from .access import EVERYTHING, PEER, Authenticator, Principal, account_of_certificate
from .limits import UNLIMITED, CallUsage, ClientLimiter, TotalUsage, client_of
from .methods import MethodKind, ServiceCall, ServiceMethod, details_of

log = logging.getLogger("headrace.silo")

CODE, RETRY_AFTER_MS = "headrace-code", "headrace-retry-after-ms"
"""Trailing metadata of a call that failed."""
RETRY_MS = 200
"""The pause before a retry that clients are told, in milliseconds."""
_STATUS = {cast("tuple[int, str]", status.value)[0]: status for status in grpc.StatusCode}
_GONE = "the caller is gone"
_INTERNAL = "the silo failed on this call, which is a bug: its log says more"

Context = grpc.aio.ServicerContext[bytes, bytes]


class GuardedCall(ServiceCall):
    """A call over a network. The guard admits it before its handler gets it."""

    def __init__(self, peer: str, authorization: str | bytes | None) -> None:
        self.peer = peer
        self.authorization = authorization
        """The metadata of this name; None without any."""
        self._guard: CallGuard | None = None
        self._usage: CallUsage | None = None

    @property
    def common_name(self) -> str:
        """The name in the caller's certificate, "" without a certificate."""
        raise NotImplementedError

    def admit(self, guard: CallGuard, principal: Principal, usage: CallUsage, closing: asyncio.Event) -> None:
        """Note that the guard has admitted the call."""
        self.principal = principal
        self.client = usage.client
        self.closing = closing
        self._guard, self._usage = guard, usage

    async def before_stream(self) -> None:
        """Called after `admit`, before the handler of a method that is no `MethodKind.UNARY`."""

    def check_message(self, message: bytes) -> None:
        """Check a message that was read, as `read` says."""
        assert self._guard is not None
        assert self._usage is not None
        self.check_valid()
        self._usage.request()
        self._guard.check_size(message)

    def check_valid(self) -> None:
        assert self._guard is not None
        if self.principal is not EVERYTHING and not self._guard.authenticator.still_valid(self.principal):
            raise Unauthenticated("the token was revoked while the call was open")

    def hold(self, nbytes: int) -> None:
        assert self._usage is not None
        self._usage.hold(nbytes)

    def release(self, nbytes: int) -> None:
        assert self._usage is not None
        self._usage.release(nbytes)

    def end(self) -> None:
        """End the call's count. Only for the guard."""
        assert self._usage is not None
        self._usage.end()


class GrpcCall(GuardedCall):
    """A call over gRPC."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.peer(), _authorization(context))
        self._context = context

    @property
    def common_name(self) -> str:
        names = cast("Mapping[str, Sequence[bytes]]", self._context.auth_context()).get("x509_common_name", ())
        return names[0].decode("utf-8", "replace") if names else ""

    async def before_stream(self) -> None:
        # Send them first: while a first message is being sent, gRPC cannot send an error.
        await self._context.send_initial_metadata(())

    async def read(self) -> bytes | None:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        self.check_message(message)
        return message

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.InternalError as error:  # gRPC has ended the call; the cancellation of the handler follows
            raise Unavailable(_GONE) from error

    def remaining_s(self) -> float | None:
        return self._context.time_remaining()


class CallGuard:
    """Admits or refuses calls, and reports their errors."""

    def __init__(self, authenticator: Authenticator, limits: ClientLimiter, *, certificates: bool = False) -> None:
        """With `certificates`, a caller that needs no token has the name in its certificate."""
        self.authenticator = authenticator
        self._closing: dict[str, asyncio.Event] = {}
        self.change = asyncio.Event()
        """Set when a service is closed or reopened; each change has a new event."""
        self._announced: tuple[tuple[str, str], ...] = ()
        self._limits = limits
        self._unlimited = ClientLimiter(UNLIMITED, asyncio.get_running_loop().time)
        """For other silos: they limit their own clients."""
        self._certificates = certificates
        self.failed_calls = Counter[str]()
        """Calls over a network that ended with an error, by its code. Refused ones count, too."""
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def open_services(self, methods: Iterable[ServiceMethod]) -> None:
        """Open the services of these methods. Call this before `handlers` and `run`."""
        for method in methods:
            self._closing.setdefault(method.service, asyncio.Event())

    def handlers(
        self, methods: Iterable[ServiceMethod]
    ) -> Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]]:
        """Return gRPC's handlers by service and method."""
        handlers: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
        for method in methods:
            handlers.setdefault(method.service, {})[method.name.partition("/")[2]] = self._handler(method)
        return handlers

    @property
    def services(self) -> Mapping[str, bool]:
        """Whether each service is open, by name."""
        return {name: not closing.is_set() for name, closing in self._closing.items()}

    def announce(self, name: str, value: str) -> None:
        """Send this metadata with the answers to probes from now on."""
        self._announced = (*self._announced, (name, value))

    def close(self, service: str) -> None:
        """Refuse new calls, and tell the open ones to end."""
        self._closing[service].set()
        self._notify()

    def reopen(self, service: str) -> None:
        """Admit calls again. Calls that were told to end still end."""
        self._closing[service] = asyncio.Event()
        self._notify()

    def _notify(self) -> None:
        self.change.set()
        self.change = asyncio.Event()

    async def wait_until_idle(self) -> None:
        """Return when no call is open. Probes do not count."""
        await self._none_open.wait()

    def usage(self) -> TotalUsage:
        """Return the present usage of all clients together."""
        return self._limits.usage()

    @property
    def open_calls(self) -> int:
        return self._open

    def check_size(self, message: bytes) -> None:
        limit = self._limits.limits.message_bytes
        if len(message) > limit:
            raise PayloadTooLarge("the message", len(message), limit)

    def _handler(self, method: ServiceMethod) -> grpc.RpcMethodHandler[bytes, bytes]:
        if method.kind is MethodKind.UNARY:
            return grpc.unary_unary_rpc_method_handler(self._answering(method))
        if method.kind is MethodKind.RESPONSES:
            return grpc.unary_stream_rpc_method_handler(self._answering(method))
        return grpc.stream_stream_rpc_method_handler(self._conversing(method))

    def _answering(self, method: ServiceMethod) -> Any:
        async def answer(request: bytes, context: Context) -> Any:
            return await self._serve(method, context, request)

        return answer

    def _conversing(self, method: ServiceMethod) -> Any:
        async def converse(_: object, context: Context) -> None:
            await self._serve(method, context)

        return converse

    async def _serve(self, method: ServiceMethod, context: Context, *requests: bytes) -> Any:
        if method.probe and self._announced:
            context.set_trailing_metadata(self._announced)
        try:
            return await self.run(method, GrpcCall(context), *requests)
        except Exception as error:  # noqa: BLE001 (the caller gets a status, and the log the bugs)
            failure = self.note_failure(method, error)
            await _abort(context, failure)

    async def run(self, method: ServiceMethod, call: GuardedCall, *requests: bytes) -> Any:
        """Admit a call, and run its handler. Raise the handler's errors; HeadraceError if the call is refused."""
        if not method.probe:
            await self.authenticator.prepare(call.authorization)
        self._admit(method, call)
        try:
            for request in requests:
                self.check_size(request)
            if method.kind is not MethodKind.UNARY:
                await call.before_stream()
            return await method.handler(call, *requests)
        finally:
            self._leave(method, call)

    def note_failure(self, method: ServiceMethod, error: Exception) -> CallFailure:
        """Count the error of a call, and return it as the caller gets it. Log an error that is a bug."""
        self.failed_calls[code_of(error)] += 1
        if isinstance(error, HeadraceError):
            if type(error) is HeadraceError:
                log.error("%s failed", method.name, exc_info=error)
            return failure_of(error)
        log.error("%s failed", method.name, exc_info=error)
        return CallFailure(grpc.StatusCode.INTERNAL, _INTERNAL, [(CODE, HeadraceError.code)])

    def _admit(self, method: ServiceMethod, call: GuardedCall) -> None:
        closing = self._closing[method.service]
        if closing.is_set() and not (method.while_closing or method.probe):
            raise Unavailable("the silo stops, or is drained: try again later, or call another silo")
        principal = EVERYTHING if method.probe else self._principal(call)
        limits = self._unlimited if principal is PEER else self._limits
        call.admit(self, principal, limits.begin(client_of(principal, call.peer), call.peer), closing)
        if not method.probe:
            self._open += 1
            self._none_open.clear()

    def _leave(self, method: ServiceMethod, call: GuardedCall) -> None:
        call.end()
        if not method.probe:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    def _principal(self, call: GuardedCall) -> Principal:
        principal = self.authenticator.authenticate(call.authorization)
        if self._certificates and principal is EVERYTHING:
            name = call.common_name
            return Principal(name, EVERYTHING.grants, account_of_certificate(name))
        return principal


class CallFailure(NamedTuple):
    """An error as the caller gets it."""

    status: grpc.StatusCode
    details: str
    trailers: Sequence[tuple[str, str]]


def failure_of(error: HeadraceError) -> CallFailure:
    trailers = [(CODE, error.code)]
    if error.retryable:
        trailers.append((RETRY_AFTER_MS, str(RETRY_MS)))
    return CallFailure(_STATUS[error.status], details_of(error), trailers)


async def _abort(context: Context, failure: CallFailure) -> None:
    """Answer the call with this failure. If the caller is gone, return: gRPC then ends the call as aborted."""
    try:
        await context.abort(failure.status, failure.details, tuple(failure.trailers))
    except grpc.aio.InternalError:
        # The caller is gone. gRPC would log a traceback if it has not noticed that the connection is closed.
        log.debug("%s: no answer is sent: %s", _GONE, failure.details)


def _authorization(context: Context) -> str | bytes | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value
    return None
