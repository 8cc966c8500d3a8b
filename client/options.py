"""Options of clients and of consumers, as type checkers see them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

from ..streams.codecs import CodecOption
from ..streams.options import DefinitionOptions, HandlerOptions
from ..streams.subscriptions import GapRecord, Mode

if TYPE_CHECKING:
    from .connection import Tls


class SessionState(enum.Enum):
    """State of a consumer's connection to its silo."""

    CONNECTING = "connecting"
    OPEN = "open"
    CAUGHT_UP = "caught up"
    """Open, and the silo has no more events for the subscription."""
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


class ClientOptions(TypedDict, total=False):
    """Options of `Client` and `SyncClient`; `Client` documents them."""

    provider: str
    token: str | None
    tls: Tls | bool | None
    insecure: bool
    direct: bool
    connect_timeout_s: float
    timeout_s: float
    linger_s: float
    codec: CodecOption | None


class ConsumerOptions(DefinitionOptions, total=False):
    """Options of a consumer that takes batches."""

    mode: Mode | str
    consumer: str
    """The consumer's id in its group. Empty: the silo chooses one."""
    max_events: int
    """Most events that the consumer holds without acknowledgement: those that wait, and those handed to the user."""
    max_bytes: int
    """The same limit in bytes."""
    session_timeout_s: float | None
    """Silence after which the silo gives the consumer's events to others, in seconds. None: the silo's default."""
    timeout_s: float | None
    """How long the consumer tries to reconnect, in seconds. None: without a limit."""
    keeps_positions: bool
    """Mode broadcast: the client stores its positions itself."""
    positions: Mapping[int, bytes] | None
    """With `keeps_positions`: the position to continue from, by queue."""
    on_state: Callable[[SessionState], None] | None
    """Called with each new state of the connection. It must not block."""
    on_gap: Callable[[GapRecord], None] | None
    """Called with each gap. It must not block."""


class RemoteHandlerOptions(ConsumerOptions, HandlerOptions, total=False):
    """Options of a handler in a client."""
