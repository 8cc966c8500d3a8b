"""A consumer for threads without asyncio: `for batch in consumer`, and acknowledgements that return when noted.

What it stands on runs in the client's thread; each call goes there and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import ParamSpec, Protocol, Self, TypeVar, overload

from ..errors import Closed
from ..events import Event
from ..identity import SequenceToken, StreamId
from ..subscriptions import GapRecord, Start, SubscriptionDefinition
from .consuming import Consumer, Pulled, SessionState, Subscribing
from .received import ReceivedBatch
from .session import SessionStatistics

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Call(Protocol):
    """Calls an async function in the client's thread, and returns what it returns."""

    def __call__(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **options: _P.kwargs) -> _T: ...


class SyncBatch:
    """Events of one stream, to be acknowledged or rejected: see `ReceivedBatch`. Any thread may do so."""

    __slots__ = ("_batch", "_call")

    def __init__(self, batch: ReceivedBatch, call: Call) -> None:
        self._batch = batch
        self._call = call

    @property
    def stream(self) -> StreamId:
        return self._batch.stream

    @property
    def token(self) -> SequenceToken:
        """The position of the first event."""
        return self._batch.token

    @property
    def queue(self) -> int:
        return self._batch.queue

    @property
    def attempt(self) -> int:
        """Which delivery of its first event this is, from 1."""
        return self._batch.attempt

    @property
    def redriven(self) -> bool:
        """A dead letter, delivered once more, out of line."""
        return self._batch.redriven

    def __len__(self) -> int:
        return self._batch.count

    def __iter__(self) -> Iterator[Event]:
        return iter(self._batch.events())

    def __repr__(self) -> str:
        return repr(self._batch)

    def events(self, start: int = 0) -> list[Event]:
        """The events from index `start` on, with `stream` and `token` set."""
        return self._batch.events(start)

    def payloads(self) -> list[bytes]:
        """The payloads alone, in order: the cheapest way to read a batch."""
        return self._batch.payloads()

    def ack(self, event: Event | SequenceToken | None = None) -> None:
        """This event is done, or all of them."""
        self._call(self._batch.ack, event)

    def ack_until(self, event: Event | SequenceToken) -> None:
        """This event is done, and all of the stream before it that the consumer holds, also of earlier batches."""
        self._call(self._batch.ack_until, event)

    def nack(
        self, reason: str = "", *, delay: timedelta | None = None, event: Event | SequenceToken | None = None
    ) -> None:
        """This event could not be processed, or all that are not acknowledged together. They come again."""
        self._call(self._batch.nack, reason, delay=delay, event=event)


class SyncPulled(Sequence[SyncBatch]):
    """What one `SyncClient.pull` returned: batches to be acknowledged or rejected. See `Pulled`."""

    def __init__(self, pulled: Pulled, call: Call) -> None:
        self.pulled = pulled
        self.gaps = pulled.gaps
        """What the subscription did not get."""
        self.refused = pulled.refused
        """How much of what was acknowledged with the call was too late."""
        self._batches = [SyncBatch(batch, call) for batch in pulled]

    def __repr__(self) -> str:
        return f"Sync{self.pulled!r}"

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> SyncBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SyncBatch]: ...
    def __getitem__(self, index: int | slice) -> SyncBatch | Sequence[SyncBatch]:
        return self._batches[index]


class SyncConsumer:
    """A consumer of a subscription, made by `SyncClient.subscribe`: enter it with `with`, and iterate. See `Consumer`.

    Several threads may take from it. Ctrl-C ends the wait for the next batch, and nothing is lost by that.
    """

    def __init__(self, subscribing: Subscribing, call: Call) -> None:
        self._subscribing = subscribing
        self._call = call
        self._consumer: Consumer | None = None

    def __enter__(self) -> Self:
        self._consumer = self._call(self._subscribing.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End in order: what was acknowledged is saved when this returns. Idempotent."""
        if self._consumer is not None:
            self._call(self._consumer.aclose)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncBatch:
        """The next batch. Ends when the consumer is closed; raises why where it ended otherwise."""
        try:
            return SyncBatch(self._call(self._opened.__anext__), self._call)
        except StopAsyncIteration:
            raise StopIteration from None

    def take(self, timeout_s: float | None = None) -> SyncBatch | None:
        """The next batch; None where none comes within `timeout_s` seconds, or the consumer is closed."""
        batch = self._call(_taken, self._opened, timeout_s)
        return None if batch is None else SyncBatch(batch, self._call)

    def saved(self) -> None:
        """Return when everything that was acknowledged before is saved."""
        self._call(self._opened.saved)

    def caught_up(self) -> None:
        """Return when everything stored before the call is done, by all consumers (paused streams apart)."""
        self._call(self._opened.caught_up)

    def seek(self, start: Start | str) -> None:
        """Go on from another position, also an earlier one. All consumers of the subscription do."""
        self._call(self._opened.seek, start)

    def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. False where it is not paused."""
        return self._call(self._opened.resume, stream)

    def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more. Returns how many were asked for."""
        return self._call(self._opened.redrive, ids)

    def delete(self) -> None:
        """Close, and delete the subscription with its progress."""
        self._call(self._opened.delete)

    @property
    def name(self) -> str:
        return self._opened.name

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._opened.id

    @property
    def definition(self) -> SubscriptionDefinition | None:
        """The subscription's, as it is stored."""
        return self._opened.definition

    @property
    def state(self) -> SessionState:
        return self._opened.state

    @property
    def assignment(self) -> frozenset[int] | None:
        """Mode bound: the queues that are this consumer's."""
        return self._opened.assignment

    @property
    def gaps(self) -> list[GapRecord]:
        """What the subscription did not get while this consumer was attached, the last ones."""
        return list(self._opened.gaps)

    @property
    def positions(self) -> Mapping[int, bytes]:
        """With `keeps_positions`: where it is, by queue."""
        return dict(self._opened.positions)

    def statistics(self) -> SessionStatistics:
        """A cheap snapshot of what is held, owed and was done."""
        return self._opened.statistics()

    @property
    def _opened(self) -> Consumer:
        if self._consumer is None:
            raise Closed("the consumer is not open: use it in a `with` block")
        return self._consumer


async def _taken(consumer: Consumer, timeout_s: float | None) -> ReceivedBatch | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(consumer)
    except (TimeoutError, StopAsyncIteration):
        return None
