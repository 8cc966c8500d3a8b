"""Times after which a silo pings or closes a connection."""

from __future__ import annotations

from typing import NamedTuple


class ConnectionTimes(NamedTuple):
    """In seconds. They are not configured."""

    handshake_s: float = 10.0
    """Time for the handshake: of TLS and HTTP/2 for gRPC; of TLS, and as long again for the greeting, for the native
    protocol. Then the connection is closed."""
    idle_s: float = 600.0
    """A gRPC connection without a call is closed after this time."""
    keepalive_s: float = 20.0
    """Silence of a gRPC connection before the server pings it."""
    native_keepalive_s: float = 15.0
    """Silence of a native connection before the silo pings it, and time for the answer."""


CONNECTION_TIMES = ConnectionTimes()
FLUSH_S = 1.0
"""Time for sending finished answers when a server stops, in seconds."""
