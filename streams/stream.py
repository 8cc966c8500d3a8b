"""The handle on a stream that users get."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from datetime import timedelta
from typing import Protocol

from .arguments import check_call
from .codecs import Publishable
from .identity import SequenceToken, StreamId


class StreamPublisher(Protocol):
    """The object that a stream handle publishes through: a provider in this process, or a client."""

    async def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken: ...


class Stream:
    """A handle on one virtual stream. Creating it costs nothing; the stream exists as soon as it is named."""

    __slots__ = ("_publisher", "id")

    def __init__(self, id: StreamId, publisher: StreamPublisher) -> None:  # noqa: A002 (the word of the field)
        self.id = id
        self._publisher = publisher

    @check_call
    def publish(
        self,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> Awaitable[SequenceToken]:
        """Publish one event or several, in order. When the call returns, they are as durable as the adapter promises.

        Nothing happens until the result is awaited. Several events are stored as one batch, or as several batches if
        they exceed 1 MiB together, or differ in delay or priority. Returns the token of the first event.

        `delay` is the least time between storing and delivery. `priority` is from 0 to 99: of the events that are due,
        the highest priority is delivered first. Both apply to events that have none themselves. With them, an event may
        be delivered before an earlier event of its stream.

        Raises InvalidArgument and PayloadTooLarge before anything is stored, and NotSupported if the provider's adapter
        cannot delay or has no priorities. Raises QueueFull and StorageError if nothing was stored; with several batches
        the first ones may be stored.
        """
        if delay is None and priority is None:
            return self._publisher.publish(self.id, events)
        return self._publisher.publish(self.id, events, delay=delay, priority=priority)

    def __repr__(self) -> str:
        return f"Stream({self.id!s})"
