"""The client: a provider in another process, over gRPC. Importing it loads grpc."""

from .blocking import SyncClient, SyncStream
from .client import UNKNOWN_PLACE, Client
from .connection import Tls
from .management import ConsumerState, QueueProgress, SubscriptionState

__all__ = (
    "UNKNOWN_PLACE",
    "Client",
    "ConsumerState",
    "QueueProgress",
    "SubscriptionState",
    "SyncClient",
    "SyncStream",
    "Tls",
)
