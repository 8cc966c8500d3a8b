"""What one client may use of a silo: connections, concurrent calls, requests per second, bytes in flight. Pure.

A client is whoever `client_of` names: the principal, or the address where nobody is named. What is known of a client is
forgotten when it is idle and would be treated like a new one; of idle ones that would not, at most `MAX_IDLE` are
remembered. So a flood of addresses takes no more memory than its open calls.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, NamedTuple, Self
from urllib.parse import unquote

import msgspec

from ..streams.errors import InvalidArgument, LimitExceeded
from .access import Principal

MAX_IDLE = 10_000
"""Idle clients that are remembered; the one that was idle longest is forgotten first."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each client may use. `limits = {...}` of the configuration's section `[grpc]`."""

    connections: _Count = 1_000
    """Connections with calls on them."""
    calls: _Count = 10_000
    """Concurrent calls; an open stream is one."""
    requests_per_s: _Rate = 20_000.0
    """Calls, and messages on streams, per second, over time."""
    burst: _Count = 40_000
    """Requests that may come at once after a pause."""
    publish_bytes: _Count = 64 << 20
    """Bytes being published: received, and not yet stored."""
    message_bytes: _Count = (4 << 20) + (64 << 10)
    """Size of one message to the silo."""

    def __post_init__(self) -> None:
        if self.publish_bytes < self.message_bytes:
            raise InvalidArgument(
                f"publish_bytes is {self.publish_bytes:,}, below message_bytes ({self.message_bytes:,}): a "
                "message of the largest size could never be published; raise the one or lower the other"
            )


_MUCH = 1 << 50
UNLIMITED = ClientLimits(
    connections=_MUCH, calls=_MUCH, requests_per_s=_MUCH, burst=_MUCH, publish_bytes=_MUCH, message_bytes=_MUCH
)


def client_of(principal: Principal | None, peer: str) -> str:
    """Whose limits count: the principal's, or, where nobody is named, those of the peer's IP address."""
    if principal is not None and principal.name:
        return str(principal)
    return f"address {address_of(peer)}"


@lru_cache(maxsize=4096)  # a connection makes many calls
def address_of(peer: str) -> str:
    """The IP address in a gRPC peer such as `ipv4:10.0.0.7:50312` or `ipv6:%5B::1%5D:50312`; another is as it is."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    if kind not in ("ipv4", "ipv6"):
        return peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class Usage(NamedTuple):
    """A snapshot of all clients together."""

    clients: int
    """That something is remembered of, idle ones included."""
    connections: int
    calls: int
    publish_bytes: int
    refused: Mapping[str, int]
    """Refusals since the start, by limit."""


class Limits:
    """Keeps count of every client. `clock` tells seconds, monotonic."""

    def __init__(self, limits: ClientLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()
        self._refused: Counter[str] = Counter()

    def begin(self, client: str, peer: str) -> Call:
        """A call begins, which is also one request. `peer` tells connections apart. Raises LimitExceeded.

        Whoever begins a call ends it. One that is refused has not begun, and takes nothing from the others.
        """
        state = self._clients.get(client)
        if state is None:
            state = self._clients[client] = _Client(client, self.limits, self._clock, self._refused)
        try:
            state.begin(peer)
        finally:
            self._tidy(state)
        return Call(state, peer, self._tidy)

    def usage(self) -> Usage:
        clients = self._clients.values()
        return Usage(
            clients=len(clients),
            connections=sum(len(client.peers) for client in clients),
            calls=sum(client.calls for client in clients),
            publish_bytes=sum(client.publish_bytes for client in clients),
            refused=dict(self._refused),
        )

    def _tidy(self, client: _Client) -> None:
        """Note whether a client is idle, and forget those that need not be remembered any more."""
        self._idle.pop(client.name, None)
        if not client.calls:
            self._idle[client.name] = client
        while self._idle:
            name, oldest = next(iter(self._idle.items()))
            if len(self._idle) <= MAX_IDLE and not oldest.like_new:
                return
            del self._idle[name], self._clients[name]


class Call:
    """One call of a client, made by `Limits.begin`. As a context manager it ends itself."""

    __slots__ = ("_client", "_held", "_on_end", "_open", "_peer")

    def __init__(self, client: _Client, peer: str, on_end: Callable[[_Client], None]) -> None:
        self._client = client
        self._peer = peer
        self._on_end = on_end
        self._held = 0
        self._open = True

    def request(self) -> None:
        """A further message came on its stream. Raises LimitExceeded."""
        self._client.request()

    def hold(self, nbytes: int) -> None:
        """So many bytes are going to be published. Raises LimitExceeded: then they are not held."""
        self._client.hold(nbytes)
        self._held += nbytes

    def release(self, nbytes: int) -> None:
        """So many of those held are stored, or refused."""
        self._client.publish_bytes -= nbytes
        self._held -= nbytes

    def end(self) -> None:
        """The call is over; what it still held is released. Idempotent."""
        if self._open:
            self._open = False
            self.release(self._held)
            self._client.end(self._peer)
            self._on_end(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Client:
    """What one client uses at present. A token bucket: `requests` were left at `filled_at`."""

    __slots__ = ("_clock", "_limits", "_refused", "calls", "filled_at", "name", "peers", "publish_bytes", "requests")

    def __init__(self, name: str, limits: ClientLimits, clock: Callable[[], float], refused: Counter[str]) -> None:
        self.name = name
        self.peers: dict[str, int] = {}
        self.calls = 0
        self.publish_bytes = 0
        self.requests: float = limits.burst
        self.filled_at = clock()
        self._limits = limits
        self._clock = clock
        self._refused = refused

    @property
    def like_new(self) -> bool:
        """Whether nothing about it differs from a client that was never seen, but for its calls."""
        return self._filled(self._clock()) >= self._limits.burst

    def begin(self, peer: str) -> None:
        if self.calls >= self._limits.calls:
            raise self._refusal("calls", f"{self.calls:,} calls are open", "end some first")
        if peer not in self.peers and len(self.peers) >= self._limits.connections:
            there = f"{len(self.peers):,} connections are open"
            raise self._refusal("connections", there, "make more calls on each of them")
        self.request()
        self.calls += 1
        self.peers[peer] = self.peers.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        self.calls -= 1
        self.peers[peer] -= 1
        if not self.peers[peer]:
            del self.peers[peer]

    def request(self) -> None:
        now = self._clock()
        self.requests, self.filled_at = self._filled(now), now
        if self.requests < 1:
            raise self._refusal("requests_per_s", "too many requests came", "wait, and put more into each of them")
        self.requests -= 1

    def hold(self, nbytes: int) -> None:
        if self.publish_bytes + nbytes > self._limits.publish_bytes:
            there = f"{self.publish_bytes:,} bytes are being published, and {nbytes:,} more came"
            raise self._refusal("publish_bytes", there, "wait for answers before sending more")
        self.publish_bytes += nbytes

    def _filled(self, now: float) -> float:
        return min(self.requests + (now - self.filled_at) * self._limits.requests_per_s, self._limits.burst)

    def _refusal(self, limit: str, there: str, advice: str) -> LimitExceeded:
        self._refused[limit] += 1
        value: float = getattr(self._limits, limit)
        return LimitExceeded(
            f"{self.name}: {there}, and the limit ({limit}) is {value:,}: {advice}, or have grpc.limits.{limit} raised"
        )
