"""Persistent streams for Python. The public names of headrace, imported when they are first used:

    from headrace import Event, Provider, subscription

Queue adapters of your own use `headrace.adapters`; Spark jobs use `headrace.pipeline`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.blocking import SyncClient as SyncClient
    from headrace.client.blocking import SyncStream as SyncStream
    from headrace.client.blocking_consumer import SyncBatch as SyncBatch
    from headrace.client.blocking_consumer import SyncConsumer as SyncConsumer
    from headrace.client.blocking_consumer import SyncPulled as SyncPulled
    from headrace.client.client import Client as Client
    from headrace.client.connection import Tls as Tls
    from headrace.client.consumer import Consumer as Consumer
    from headrace.client.options import SessionState as SessionState
    from headrace.client.pulled import Pulled as Pulled
    from headrace.client.received import ReceivedBatch as ReceivedBatch
    from headrace.client.stream_provider import StreamProvider as StreamProvider
    from headrace.client.stream_provider import SyncStreamProvider as SyncStreamProvider
    from headrace.effects.effects import Effects as Effects
    from headrace.effects.outbox import Outbox as Outbox
    from headrace.effects.state import StreamState as StreamState
    from headrace.effects.transaction import Transaction as Transaction
    from headrace.silo.options import CacheOptions as CacheOptions
    from headrace.silo.options import ProviderOptions as ProviderOptions
    from headrace.silo.provider import Provider as Provider
    from headrace.silo.views import ProviderStatistics as ProviderStatistics
    from headrace.streams.codecs import Codec as Codec
    from headrace.streams.codecs import JsonCodec as JsonCodec
    from headrace.streams.codecs import MsgpackCodec as MsgpackCodec
    from headrace.streams.errors import Busy as Busy
    from headrace.streams.errors import Closed as Closed
    from headrace.streams.errors import CorruptRecord as CorruptRecord
    from headrace.streams.errors import DataDirectoryError as DataDirectoryError
    from headrace.streams.errors import DefinitionConflict as DefinitionConflict
    from headrace.streams.errors import Fenced as Fenced
    from headrace.streams.errors import HeadraceError as HeadraceError
    from headrace.streams.errors import InvalidArgument as InvalidArgument
    from headrace.streams.errors import LimitExceeded as LimitExceeded
    from headrace.streams.errors import NotFound as NotFound
    from headrace.streams.errors import NotSupported as NotSupported
    from headrace.streams.errors import PayloadInvalid as PayloadInvalid
    from headrace.streams.errors import PayloadTooLarge as PayloadTooLarge
    from headrace.streams.errors import PermissionDenied as PermissionDenied
    from headrace.streams.errors import QueueFull as QueueFull
    from headrace.streams.errors import SequenceConflict as SequenceConflict
    from headrace.streams.errors import StorageError as StorageError
    from headrace.streams.errors import StorageFull as StorageFull
    from headrace.streams.errors import Unauthenticated as Unauthenticated
    from headrace.streams.errors import Unavailable as Unavailable
    from headrace.streams.events import Event as Event
    from headrace.streams.events import EventBatch as EventBatch
    from headrace.streams.handlers import BatchObserver as BatchObserver
    from headrace.streams.handlers import Observer as Observer
    from headrace.streams.handlers import subscription as subscription
    from headrace.streams.identity import QueueId as QueueId
    from headrace.streams.identity import SequenceToken as SequenceToken
    from headrace.streams.identity import StreamId as StreamId
    from headrace.streams.publishing import ProducerSequence as ProducerSequence
    from headrace.streams.publishing import Receipt as Receipt
    from headrace.streams.states import ConsumerState as ConsumerState
    from headrace.streams.states import SubscriptionState as SubscriptionState
    from headrace.streams.stream import Stream as Stream
    from headrace.streams.subscriptions import DeadLetter as DeadLetter
    from headrace.streams.subscriptions import GapRecord as GapRecord
    from headrace.streams.subscriptions import Mode as Mode
    from headrace.streams.subscriptions import OnFailure as OnFailure
    from headrace.streams.subscriptions import RetryPolicy as RetryPolicy
    from headrace.streams.subscriptions import Selector as Selector
    from headrace.streams.subscriptions import SlowConsumer as SlowConsumer
    from headrace.streams.subscriptions import Start as Start
    from headrace.streams.subscriptions import SubscriptionDefinition as SubscriptionDefinition
    from headrace.streams.tracing import disable_tracing as disable_tracing
    from headrace.streams.tracing import enable_tracing as enable_tracing

    __version__: str

_NAMES = {
    "headrace.client.blocking": ("SyncClient", "SyncStream"),
    "headrace.client.blocking_consumer": ("SyncBatch", "SyncConsumer", "SyncPulled"),
    "headrace.client.client": ("Client",),
    "headrace.client.connection": ("Tls",),
    "headrace.client.consumer": ("Consumer",),
    "headrace.client.pulled": ("Pulled",),
    "headrace.client.options": ("SessionState",),
    "headrace.client.received": ("ReceivedBatch",),
    "headrace.client.stream_provider": ("StreamProvider", "SyncStreamProvider"),
    "headrace.effects.effects": ("Effects",),
    "headrace.effects.outbox": ("Outbox",),
    "headrace.effects.state": ("StreamState",),
    "headrace.effects.transaction": ("Transaction",),
    "headrace.silo.options": ("CacheOptions", "ProviderOptions"),
    "headrace.silo.provider": ("Provider",),
    "headrace.silo.views": ("ProviderStatistics",),
    "headrace.streams.codecs": ("Codec", "JsonCodec", "MsgpackCodec"),
    "headrace.streams.errors": (
        "Busy", "Closed", "CorruptRecord", "DataDirectoryError", "DefinitionConflict", "Fenced",
        "HeadraceError", "InvalidArgument", "LimitExceeded", "NotFound", "NotSupported", "PayloadInvalid",
        "PayloadTooLarge", "PermissionDenied", "QueueFull", "SequenceConflict", "StorageError", "StorageFull",
        "Unauthenticated", "Unavailable",
    ),
    "headrace.streams.events": ("Event", "EventBatch"),
    "headrace.streams.handlers": ("BatchObserver", "Observer", "subscription"),
    "headrace.streams.identity": ("QueueId", "SequenceToken", "StreamId"),
    "headrace.streams.publishing": ("ProducerSequence", "Receipt"),
    "headrace.streams.states": ("ConsumerState", "SubscriptionState"),
    "headrace.streams.stream": ("Stream",),
    "headrace.streams.tracing": ("disable_tracing", "enable_tracing"),
    "headrace.streams.subscriptions": (
        "DeadLetter", "GapRecord", "Mode", "OnFailure", "RetryPolicy", "Selector", "SlowConsumer", "Start",
        "SubscriptionDefinition",
    ),
}  # fmt: skip
"""The public names, by module. Type checkers read the imports above."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = tuple(sorted(_MODULES))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
