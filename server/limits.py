"""Limits of one client of a silo: connections, concurrent calls, requests per second, bytes in flight. Pure.

`client_of` names the client of a call: the principal, or the address if the principal has no name. The counts of an
idle client are dropped as soon as it would be treated like a new one. Of other idle clients at most `MAX_IDLE` are
kept. This bounds the memory: calls from very many addresses take only the memory of the open calls.
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
"""Idle clients that are kept; the client that was idle longest is dropped first."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of each client: `limits = {...}` in the configuration's section `[grpc]`."""

    connections: _Count = 1_000
    """Connections with calls on them."""
    calls: _Count = 10_000
    """Concurrent calls; an open stream is one."""
    requests_per_s: _Rate = 20_000.0
    """Calls, and messages on streams, per second, over time."""
    burst: _Count = 40_000
    """Requests that may arrive at once after a pause."""
    publish_bytes: _Count = 64 << 20
    """Bytes being published: received, and not yet stored. Each open stream may have one more message in addition."""
    message_bytes: _Count = (4 << 20) + (64 << 10)
    """Size of one message to the silo."""

    def __post_init__(self) -> None:
        if self.publish_bytes < self.message_bytes:
            raise InvalidArgument(
                f"publish_bytes is {self.publish_bytes:,}, below message_bytes ({self.message_bytes:,}): a "
                "message of the largest size could never be published; raise publish_bytes or lower message_bytes"
            )


_MUCH = 1 << 50
UNLIMITED = ClientLimits(
    connections=_MUCH, calls=_MUCH, requests_per_s=_MUCH, burst=_MUCH, publish_bytes=_MUCH, message_bytes=_MUCH
)


def client_of(principal: Principal | None, peer: str) -> str:
    """Return the client whose limits apply: the principal, or the peer's IP address if the principal has no name."""
    if principal is not None and principal.name:
        return str(principal)
    return f"address {address_of(peer)}"


@lru_cache(maxsize=4096)  # a connection makes many calls
def address_of(peer: str) -> str:
    """Return the IP address in a gRPC peer such as `ipv4:10.0.0.7:50312` or `ipv6:%5B::1%5D:50312`; another peer as it
    is."""
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


class TotalUsage(NamedTuple):
    """The usage of all clients together, at one moment."""

    clients: int
    """Clients with counts, including idle ones."""
    connections: int
    calls: int
    publish_bytes: int
    refused: Mapping[str, int]
    """Refusals since the start, by limit."""


class ClientLimiter:
    """Counts the usage of every client. `clock` returns monotonic seconds."""

    def __init__(self, limits: ClientLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()
        self._refused: Counter[str] = Counter()

    def begin(self, client: str, peer: str) -> CallUsage:
        """Begin a call, which is also one request. `peer` identifies the connection. Raise LimitExceeded.

        The caller must end the call. A refused call has not begun, and uses nothing.
        """
        state = self._clients.get(client)
        if state is None:
            state = self._clients[client] = _Client(client, self.limits, self._clock, self._refused)
        try:
            state.begin(peer)
        finally:
            self._tidy(state)
        return CallUsage(state, peer, self._tidy)

    def usage(self) -> TotalUsage:
        clients = self._clients.values()
        return TotalUsage(
            clients=len(clients),
            connections=sum(len(client.peers) for client in clients),
            calls=sum(client.calls for client in clients),
            publish_bytes=sum(client.publish_bytes for client in clients),
            refused=dict(self._refused),
        )

    def _tidy(self, client: _Client) -> None:
        """Note whether a client is idle, and drop clients whose counts are not needed."""
        self._idle.pop(client.name, None)
        if not client.calls:
            self._idle[client.name] = client
        while self._idle:
            name, oldest = next(iter(self._idle.items()))
            if len(self._idle) <= MAX_IDLE and not oldest.is_like_new:
                return
            del self._idle[name], self._clients[name]


class CallUsage:
    """The usage of one call, made by `ClientLimiter.begin`. As a context manager it ends itself."""

    __slots__ = ("_client", "_held", "_on_end", "_open", "_peer")

    def __init__(self, client: _Client, peer: str, on_end: Callable[[_Client], None]) -> None:
        self._client = client
        self._peer = peer
        self._on_end = on_end
        self._held = 0
        self._open = True

    @property
    def client(self) -> str:
        """The client whose limits apply, as `client_of` names it."""
        return self._client.name

    def request(self) -> None:
        """Count another message on the call's stream. Raise LimitExceeded."""
        self._client.request()

    def hold(self, nbytes: int) -> None:
        """Count bytes that are being published. Raise LimitExceeded and count nothing if they are too many."""
        self._client.hold(nbytes)
        self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Release counted bytes that are now stored or refused."""
        self._client.publish_bytes -= nbytes
        self._held -= nbytes

    def end(self) -> None:
        """End the call and release its bytes. Idempotent."""
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
    """The present usage of one client. `requests` is a token bucket: the rest at the time `filled_at`."""

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
    def is_like_new(self) -> bool:
        """Whether its counts, apart from open calls, are those of a new client."""
        return self._filled(self._clock()) >= self._limits.burst

    def begin(self, peer: str) -> None:
        if self.calls >= self._limits.calls:
            raise self._refusal("calls", f"{self.calls:,} calls are open", "end some first")
        if peer not in self.peers and len(self.peers) >= self._limits.connections:
            problem = f"{len(self.peers):,} connections are open"
            raise self._refusal("connections", problem, "make more calls on each of them")
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
            raise self._refusal("requests_per_s", "too many requests arrived", "wait, and put more into each request")
        self.requests -= 1

    def hold(self, nbytes: int) -> None:
        if self.publish_bytes + nbytes > self._limits.publish_bytes:
            problem = f"{self.publish_bytes:,} bytes are being published, and {nbytes:,} more arrived"
            raise self._refusal("publish_bytes", problem, "wait for answers before sending more")
        self.publish_bytes += nbytes

    def _filled(self, now: float) -> float:
        return min(self.requests + (now - self.filled_at) * self._limits.requests_per_s, self._limits.burst)

    def _refusal(self, limit: str, problem: str, advice: str) -> LimitExceeded:
        self._refused[limit] += 1
        value: float = getattr(self._limits, limit)
        return LimitExceeded(
            f"{self.name}: {problem}, and the limit ({limit}) is {value:,}: {advice}, or have "
            f"grpc.limits.{limit} raised"
        )
