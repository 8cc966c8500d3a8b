"""The vocabulary of headrace: streams, events, positions, subscriptions, errors. And the client of remote ones, which
loads grpc, and so only when it is first named."""

from typing import TYPE_CHECKING, Any

from .errors import (
    Busy,
    Closed,
    CorruptRecord,
    DataDirectoryError,
    DefinitionConflict,
    Fenced,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    PermissionDenied,
    QueueFull,
    SequenceConflict,
    StorageError,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from .events import Event, EventBatch
from .handlers import BatchObserver, Observer, declared, subscription
from .identity import QueueId, SequenceToken, StreamId
from .stream import Stream
from .subscriptions import (
    Checkpoint,
    DeadLetter,
    GapRecord,
    Mode,
    OnFailure,
    RetryPolicy,
    Selector,
    SlowConsumer,
    Start,
    SubscriptionDefinition,
)

if TYPE_CHECKING:
    from .client import Client, Consumer, SyncClient, Tls

__all__ = (
    "BatchObserver",
    "Busy",
    "Checkpoint",
    "Client",
    "Closed",
    "Consumer",
    "CorruptRecord",
    "DataDirectoryError",
    "DeadLetter",
    "DefinitionConflict",
    "Event",
    "EventBatch",
    "Fenced",
    "GapRecord",
    "HeadraceError",
    "InvalidArgument",
    "LimitExceeded",
    "Mode",
    "NotFound",
    "NotSupported",
    "Observer",
    "OnFailure",
    "PayloadTooLarge",
    "PermissionDenied",
    "QueueFull",
    "QueueId",
    "RetryPolicy",
    "Selector",
    "SequenceConflict",
    "SequenceToken",
    "SlowConsumer",
    "Start",
    "StorageError",
    "StorageFull",
    "Stream",
    "StreamId",
    "SubscriptionDefinition",
    "SyncClient",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "declared",
    "subscription",
)

_OF_THE_CLIENT = ("Client", "Consumer", "SyncClient", "Tls")


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import client  # noqa: PLC0415 (it loads grpc)

    return getattr(client, name)
