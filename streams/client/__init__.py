"""The client: a provider in another process, over gRPC. Importing it loads grpc."""

from .. import grpc_process  # noqa: F401 # pyright: ignore[reportUnusedImport] (it is to be imported before grpc)
from ..states import ConsumerState, QueueProgress, SubscriptionState
from .blocking import SyncClient, SyncStream
from .blocking_consumer import SyncBatch, SyncConsumer, SyncPulled
from .client import UNKNOWN_PLACE, Client
from .connection import Tls
from .consuming import Consumer, Pulled, SessionState, Subscribing, Subscription
from .received import ReceivedBatch
from .session import SessionStatistics

__all__ = (
    "UNKNOWN_PLACE",
    "Client",
    "Consumer",
    "ConsumerState",
    "Pulled",
    "QueueProgress",
    "ReceivedBatch",
    "SessionState",
    "SessionStatistics",
    "Subscribing",
    "Subscription",
    "SubscriptionState",
    "SyncBatch",
    "SyncClient",
    "SyncConsumer",
    "SyncPulled",
    "SyncStream",
    "Tls",
)
