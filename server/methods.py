"""The methods of services, and the calls that their handlers get. Nothing here needs gRPC.

A service is a list of methods. Each has a handler, which takes a `ServiceCall` and encoded messages. It returns encoded
messages:

    async def get(call: ServiceCall, request: bytes) -> bytes:          # MethodKind.UNARY
        wanted = parsed(pb.GetSubscriptionRequest, request)
        call.principal.require_selector(Permission.MANAGE, ...)
        return pb.GetSubscriptionResponse(...).SerializeToString()

    async def watch(call: ServiceCall, request: bytes) -> None:         # MethodKind.RESPONSES
        await call.write(...)

    async def subscribe(call: ServiceCall) -> None:                     # MethodKind.STREAM: both ways
        while (message := await call.read()) is not None:
            await call.write(...)

    METHODS = [ServiceMethod("headrace.v1.SubscriptionService/GetSubscription", MethodKind.UNARY, get), ...]
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from ..streams.errors import HeadraceError, InvalidArgument
from ..streams.field_limits import MAX_OFFSET
from .access import Principal

MAX_DETAILS = 1000
"""Longest text of an error that is sent, in characters: it may quote a long request, and HTTP/2 headers are small."""
NAME_LIMITS = {"provider": 128, "subscription": 256, "name": 256, "after_name": 256, "consumer": 100, "silo": 255}
"""Most characters of the fields that name an existing thing. New names have lower limits."""
NUMBER_LIMITS = {
    "start_offset": MAX_OFFSET,
    "end_offset": MAX_OFFSET,
    "wait_ms": 24 * 3600 * 1000,
    "drain_ms": 24 * 3600 * 1000,
}
"""Highest values of number fields."""

_M = TypeVar("_M", bound=Message)


class MethodKind(enum.Enum):
    """The sides of a call that are streams."""

    UNARY = "unary"
    """`async def handler(call, request: bytes) -> bytes`"""
    RESPONSES = "responses"
    """One request, many responses: `async def handler(call, request: bytes) -> None`"""
    STREAM = "stream"
    """Both: `async def handler(call) -> None`"""


class ServiceMethod(NamedTuple):
    """One method of a service."""

    name: str
    """Service and method, as in "headrace.v1.PublisherService/Publish"."""
    kind: MethodKind
    handler: Callable[..., Awaitable[Any]]
    while_closing: bool = False
    """May be called while the silo stops: it finishes earlier calls."""
    probe: bool = False
    """Needs no token, and may be called while the silo stops, which does not wait for its end."""

    @property
    def service(self) -> str:
        return self.name.partition("/")[0]


class ServiceCall(Protocol):
    """A call, for its handler.

    Attributes:
        principal: the caller with its permissions. Call `call.principal.require(Permission.PUBLISH, namespace)` or
            another check before any look-up.
        peer: the caller's address in gRPC's form.
        client: the client whose limits apply, as `client_of` names it.
        closing: set when the silo stops, or sends callers of the service to other silos: end the call soon, in order.
    """

    principal: Principal
    peer: str
    client: str
    closing: asyncio.Event

    async def read(self) -> bytes | None:
        """Return the next message of a stream, None at its end. Only one `read` at a time.

        Raises Unauthenticated if the token was revoked meanwhile, LimitExceeded if messages arrive too fast, and
        PayloadTooLarge.
        """
        ...

    async def write(self, message: bytes) -> None:
        """Send a message on a stream. Wait while the caller does not read earlier messages.

        Only one `write` at a time: two at once end the call. Raises Unavailable if the caller is gone.
        """

    def check_valid(self) -> None:
        """Raise Unauthenticated if the token was revoked since the call began. `read` checks this itself."""

    def remaining_s(self) -> float | None:
        """Return the seconds until the caller's deadline, None without a deadline."""
        ...

    def hold(self, nbytes: int) -> None:
        """Count bytes that are being published. The end of the call releases them. Raise LimitExceeded."""

    def release(self, nbytes: int) -> None:
        """Release counted bytes that are now stored or refused."""


def parsed(kind: type[_M], encoded: bytes) -> _M:
    """Decode a request. Raise InvalidArgument for other bytes."""
    try:
        message = kind.FromString(encoded)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidArgument(
            f"the request is no {name}: its {len(encoded):,} bytes cannot be decoded; encode it as proto/v1 says"
        ) from None
    check_fields(message)
    return message


def check_fields(message: Message) -> None:
    """Raise InvalidArgument if a field of the message itself is above `NAME_LIMITS` or `NUMBER_LIMITS`."""
    for field, limit, size_of in _limited_fields(type(message)):
        if (size := size_of(getattr(message, field))) > limit:
            found = f"has {size:,} characters" if size_of is len else f"is {size:,}"
            raise InvalidArgument(f"{field} {found}, the limit is {limit:,}")


@cache
def _limited_fields(kind: type[Message]) -> Sequence[tuple[str, int, Callable[[Any], int]]]:
    """Return the limited fields of a request: name, limit, and the function that measures the value."""
    names = [(name, limit, len) for name, limit in NAME_LIMITS.items() if name in kind.DESCRIPTOR.fields_by_name]
    numbers = [(name, limit, int) for name, limit in NUMBER_LIMITS.items() if name in kind.DESCRIPTOR.fields_by_name]
    return names + numbers


def details_of(error: HeadraceError) -> str:
    """Return the error's text, shortened for sending."""
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}..."
