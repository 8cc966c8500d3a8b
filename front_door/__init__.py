"""Persistent streams for Python. The public names of headrace, imported when they are first used:

    from headrace import Event, Provider, subscription

Queue adapters of your own use `headrace.adapters`; Spark jobs use `headrace.pipeline`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import (
        Client,
        Consumer,
        Pulled,
        ReceivedBatch,
        SessionState,
        StreamProvider,
        SyncBatch,
        SyncClient,
        SyncConsumer,
        SyncPulled,
        SyncStream,
        SyncStreamProvider,
        Tls,
    )
    from headrace.silo.options import CacheOptions, ProviderOptions
    from headrace.silo.provider import Provider
    from headrace.silo.views import ProviderStatistics
    from headrace.streams.errors import (
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
    from headrace.streams.events import Event, EventBatch
    from headrace.streams.handlers import BatchObserver, Observer, subscription
    from headrace.streams.identity import QueueId, SequenceToken, StreamId
    from headrace.streams.publishing import ProducerSequence, Receipt
    from headrace.streams.states import ConsumerState, SubscriptionState
    from headrace.streams.stream import Stream
    from headrace.streams.subscriptions import (
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

__all__ = (
    "BatchObserver",
    "Busy",
    "CacheOptions",
    "Client",
    "Closed",
    "Consumer",
    "ConsumerState",
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
    "ProducerSequence",
    "Provider",
    "ProviderOptions",
    "ProviderStatistics",
    "Pulled",
    "QueueFull",
    "QueueId",
    "Receipt",
    "ReceivedBatch",
    "RetryPolicy",
    "Selector",
    "SequenceConflict",
    "SequenceToken",
    "SessionState",
    "SlowConsumer",
    "Start",
    "StorageError",
    "StorageFull",
    "Stream",
    "StreamId",
    "StreamProvider",
    "SubscriptionDefinition",
    "SubscriptionState",
    "SyncBatch",
    "SyncClient",
    "SyncConsumer",
    "SyncPulled",
    "SyncStream",
    "SyncStreamProvider",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "subscription",
)

_MODULES = {
    "Busy": "headrace.streams.errors",
    "Closed": "headrace.streams.errors",
    "CorruptRecord": "headrace.streams.errors",
    "DataDirectoryError": "headrace.streams.errors",
    "DefinitionConflict": "headrace.streams.errors",
    "Fenced": "headrace.streams.errors",
    "HeadraceError": "headrace.streams.errors",
    "InvalidArgument": "headrace.streams.errors",
    "LimitExceeded": "headrace.streams.errors",
    "NotFound": "headrace.streams.errors",
    "NotSupported": "headrace.streams.errors",
    "PayloadTooLarge": "headrace.streams.errors",
    "PermissionDenied": "headrace.streams.errors",
    "QueueFull": "headrace.streams.errors",
    "SequenceConflict": "headrace.streams.errors",
    "StorageError": "headrace.streams.errors",
    "StorageFull": "headrace.streams.errors",
    "Unauthenticated": "headrace.streams.errors",
    "Unavailable": "headrace.streams.errors",
    "Event": "headrace.streams.events",
    "EventBatch": "headrace.streams.events",
    "BatchObserver": "headrace.streams.handlers",
    "Observer": "headrace.streams.handlers",
    "subscription": "headrace.streams.handlers",
    "QueueId": "headrace.streams.identity",
    "SequenceToken": "headrace.streams.identity",
    "StreamId": "headrace.streams.identity",
    "Stream": "headrace.streams.stream",
    "DeadLetter": "headrace.streams.subscriptions",
    "GapRecord": "headrace.streams.subscriptions",
    "Mode": "headrace.streams.subscriptions",
    "OnFailure": "headrace.streams.subscriptions",
    "RetryPolicy": "headrace.streams.subscriptions",
    "Selector": "headrace.streams.subscriptions",
    "SlowConsumer": "headrace.streams.subscriptions",
    "Start": "headrace.streams.subscriptions",
    "SubscriptionDefinition": "headrace.streams.subscriptions",
    "ConsumerState": "headrace.streams.states",
    "SubscriptionState": "headrace.streams.states",
    "ProducerSequence": "headrace.streams.publishing",
    "Receipt": "headrace.streams.publishing",
    "Client": "headrace.client",
    "Consumer": "headrace.client",
    "Pulled": "headrace.client",
    "ReceivedBatch": "headrace.client",
    "SessionState": "headrace.client",
    "StreamProvider": "headrace.client",
    "SyncBatch": "headrace.client",
    "SyncClient": "headrace.client",
    "SyncConsumer": "headrace.client",
    "SyncPulled": "headrace.client",
    "SyncStream": "headrace.client",
    "SyncStreamProvider": "headrace.client",
    "Tls": "headrace.client",
    "CacheOptions": "headrace.silo.options",
    "Provider": "headrace.silo.provider",
    "ProviderOptions": "headrace.silo.options",
    "ProviderStatistics": "headrace.silo.views",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
