"""The client: a provider in another process, over gRPC.

The public names are imported when they are first used, because they load gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import grpc_process as grpc_process  # sets variables that grpc reads when it is imported

if TYPE_CHECKING:
    from ..streams.states import ConsumerState, Held, QueueProgress, SubscriptionState
    from .blocking import SyncClient, SyncStream
    from .blocking_consumer import SyncBatch, SyncConsumer, SyncPulled
    from .client import UNKNOWN_PLACE, Client
    from .connection import Tls
    from .consuming import Consumer, Pulled, RemoteSubscription
    from .options import SessionState
    from .received import ReceivedBatch
    from .session import SessionStatistics
    from .stream_provider import StreamProvider, SyncStreamProvider

_MODULES = {
    "UNKNOWN_PLACE": ".client",
    "Client": ".client",
    "Consumer": ".consuming",
    "ConsumerState": "..streams.states",
    "Held": "..streams.states",
    "Pulled": ".consuming",
    "QueueProgress": "..streams.states",
    "ReceivedBatch": ".received",
    "SessionState": ".options",
    "SessionStatistics": ".session",
    "StreamProvider": ".stream_provider",
    "RemoteSubscription": ".consuming",
    "SubscriptionState": "..streams.states",
    "SyncBatch": ".blocking_consumer",
    "SyncClient": ".blocking",
    "SyncConsumer": ".blocking_consumer",
    "SyncPulled": ".blocking_consumer",
    "SyncStream": ".blocking",
    "SyncStreamProvider": ".stream_provider",
    "Tls": ".connection",
}

__all__ = (
    "UNKNOWN_PLACE",
    "Client",
    "Consumer",
    "ConsumerState",
    "Held",
    "Pulled",
    "QueueProgress",
    "ReceivedBatch",
    "RemoteSubscription",
    "SessionState",
    "SessionStatistics",
    "StreamProvider",
    "SubscriptionState",
    "SyncBatch",
    "SyncClient",
    "SyncConsumer",
    "SyncPulled",
    "SyncStream",
    "SyncStreamProvider",
    "Tls",
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value
