"""The methods that every provider has: `Provider` in this process, `Client` and `SyncClient` in another one.

Code that takes a `StreamProvider` works with a `Provider` and with a `Client`. `SyncStreamProvider` has the same
methods for code without asyncio: they block instead of being awaited, and there are no handlers.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Unpack, overload

from ..streams.codecs import P, Publishable
from ..streams.handlers import CONCURRENCY, BatchHandler, BatchObserver, EventHandler, Observer, PayloadHandler
from ..streams.identity import SequenceToken, StreamId
from ..streams.openings import ConsumerOpening
from ..streams.states import SubscriptionState
from ..streams.stream import Stream
from ..streams.subscriptions import (
    DeadLetter,
    GapRecord,
    OnFailure,
    RetryPolicy,
    SlowConsumer,
    Start,
    SubscriptionDefinition,
)
from .options import ConsumerOptions

if TYPE_CHECKING:
    from ..streams.publishing import ProducerSequence, Receipt
    from .blocking import SyncStream
    from .blocking_consumer import SyncBatch, SyncPulled
    from .consumer import Consumer
    from .pulled import Pulled


class HandledSubscription(Protocol):
    """A subscription with a handler in this process: the result of `await subscribe(..., handler)`.

    `LocalSubscription` of a provider in this process, and `RemoteSubscription` of a client, implement it.
    """

    name: str

    async def caught_up(self) -> None: ...

    async def seek(self, start: Start | str) -> int: ...

    async def resume(self, stream: StreamId) -> bool: ...

    async def redrive(self, ids: Sequence[int] | None = None) -> int: ...

    async def close(self) -> None: ...

    async def delete(self) -> None: ...


class SubscriptionAdministration(Protocol):
    """Administration of subscriptions and their dead letters: see `Client`."""

    async def create_subscription(self, definition: SubscriptionDefinition) -> bool: ...

    async def subscription(self, name: str) -> SubscriptionState: ...

    async def subscriptions(self) -> list[SubscriptionDefinition]: ...

    async def delete_subscription(self, name: str) -> None: ...

    async def seek(self, name: str, start: Start | str) -> int: ...

    async def resume(self, name: str, stream: StreamId) -> bool: ...

    async def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]: ...

    async def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int: ...

    async def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int: ...


class StreamProvider(SubscriptionAdministration, Protocol):
    """A provider, in this process or in another one. Its methods mean the same in both: see `Client`."""

    def stream(self, namespace: str | StreamId, key: str | None = None) -> Stream: ...

    async def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken: ...

    async def publish_many(
        self, items: Iterable[tuple[StreamId, Publishable]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]: ...

    async def last_sequence(self, producer: str) -> int: ...

    async def flush(self) -> None: ...

    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: EventHandler | PayloadHandler[P] | Observer | BatchObserver,
        *,
        batch: Literal[False] = False,
        start: Start | str | None = None,
        retry: RetryPolicy | None = None,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        slow_consumer: SlowConsumer | None = None,
        circuit_breaker: bool = True,
        concurrency: int = CONCURRENCY,
    ) -> Coroutine[Any, Any, HandledSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: BatchHandler | BatchObserver,
        *,
        batch: Literal[True],
        start: Start | str | None = None,
        retry: RetryPolicy | None = None,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        slow_consumer: SlowConsumer | None = None,
        circuit_breaker: bool = True,
        concurrency: int = CONCURRENCY,
    ) -> Coroutine[Any, Any, HandledSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> ConsumerOpening[Consumer]: ...

    async def pull(
        self,
        name: str,
        consumer: str,
        *,
        max_events: int = 0,
        max_bytes: int = 0,
        wait_s: float = 0.0,
        session_timeout_s: float | None = None,
        after: Pulled | None = None,
    ) -> Pulled: ...

    async def acknowledge(self, pulled: Pulled) -> int: ...

    async def caught_up(self, name: str) -> None: ...

    async def gaps(self, subscription: str) -> list[GapRecord]: ...


class BlockingConsumer(Protocol):
    """A consumer for code without asyncio: `with client.subscribe(...) as consumer: for batch in consumer`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[SyncBatch]: ...


class SyncStreamProvider(Protocol):
    """A provider for code without asyncio. Its methods are those of `StreamProvider`."""

    def stream(self, namespace: str | StreamId, key: str | None = None) -> SyncStream: ...

    def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken: ...

    def publish_many(
        self, items: Iterable[tuple[StreamId, Publishable]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]: ...

    def last_sequence(self, producer: str) -> int: ...

    def flush(self) -> None: ...

    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> BlockingConsumer: ...

    def pull(
        self,
        name: str,
        consumer: str,
        *,
        max_events: int = 0,
        max_bytes: int = 0,
        wait_s: float = 0.0,
        session_timeout_s: float | None = None,
        after: SyncPulled | None = None,
    ) -> SyncPulled: ...

    def acknowledge(self, pulled: SyncPulled) -> int: ...

    def create_subscription(self, definition: SubscriptionDefinition) -> bool: ...

    def subscription(self, name: str) -> SubscriptionState: ...

    def subscriptions(self) -> list[SubscriptionDefinition]: ...

    def delete_subscription(self, name: str) -> None: ...

    def seek(self, name: str, start: Start | str) -> int: ...

    def caught_up(self, name: str) -> None: ...

    def resume(self, name: str, stream: StreamId) -> bool: ...

    def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]: ...

    def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int: ...

    def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int: ...

    def gaps(self, subscription: str) -> list[GapRecord]: ...
