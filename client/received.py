"""Batches that a consumer holds, with the state of each event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

from ..streams import tracing
from ..streams.arguments import refused
from ..streams.errors import InvalidArgument
from ..streams.events import Event, EventBatch, PartialBatch
from ..streams.frames import DeliveredBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.transactions import EffectScope

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from ..effects.effects import Effects
    from ..effects.transaction import Transaction
    from ..streams.spans import HandlingSpan
    from .held_account import HeldAccount

FRAME_BYTES = 32
"""Upper bound of the bytes around a batch on the wire, without the indexes of a part of a batch."""
INDEX_BYTES = 3

OPEN, MARKED = 0, 1
"""State of an event: neither acknowledged nor rejected; acknowledged, rejected or taken back."""
QUEUED, TAKEN, OVER = 0, 1, 2
"""State of a batch: waits to be taken; handed to the user; done or taken back. They are plain numbers, because they are
read several times for each batch."""


class BatchHolder(Protocol):
    """Receives the acknowledgements and rejections of a batch. `first` and `last` (exclusive) are places among its
    events."""

    @property
    def account(self) -> HeldAccount: ...

    @property
    def lines(self) -> Mapping[StreamId, Sequence[ReceivedBatch]]:
        """Batches with unfinished events, by stream and in order of position."""
        ...

    def effect_scope(self) -> EffectScope: ...

    def acknowledge(self, batch: ReceivedBatch) -> None: ...

    def acknowledge_some(self, batch: ReceivedBatch, first: int, last: int) -> None: ...

    def acknowledge_until(self, batch: ReceivedBatch, last: int) -> None: ...

    def reject(
        self,
        batch: ReceivedBatch,
        place: int | None,
        reason: str,
        delay: timedelta | None,
        *,
        unavailable: bool = False,
        invalid: bool = False,
    ) -> None: ...


class _NoWait:
    """An awaitable that is done at once."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class _LoopTurn:
    """An awaitable that lets the loop turn once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


DONE, TURN = _NoWait(), _LoopTurn()


class ReceivedBatch(EventBatch):
    """Events of one stream, delivered to this consumer. Acknowledge or reject each.

    Read it like any `EventBatch`: iterate its events, or take its `payloads()`. When the consumer ends, events that are
    not acknowledged go to another consumer. Acknowledgements are collected and sent in the background, so awaiting them
    costs almost nothing. If the event was rejected meanwhile, or another consumer has it, an acknowledgement has no
    effect. All methods raise Closed after the consumer is closed.
    """

    __slots__ = (
        "arrival",
        "attempt",
        "current",
        "holder",
        "in_effects",
        "left",
        "marks",
        "plain",
        "queue",
        "size",
        "state",
    )

    def __init__(self, holder: BatchHolder, delivered: DeliveredBatch, arrival: int) -> None:
        batch, self.queue, self.attempt, _, _ = delivered
        self.stream = batch.stream
        self.encoded = batch.encoded
        self.count = self.left = self.current = batch.count
        # current: The present session delivered the events before this place. 0: its queue was served by another one.
        self.offset = batch.offset
        self.size = len(batch.encoded) + FRAME_BYTES
        self.holder = holder
        self.arrival = arrival
        """Number of the last response that delivered it."""
        self.plain = True
        """Whether it is whole, has no marks, and is of the present session: then one short acknowledgement covers
        it."""
        self.state = QUEUED
        self.marks: bytearray | None = None
        """State of each event, if they differ: OPEN or MARKED."""
        self.in_effects = False
        """Whether an `async with` block of `effects` is open. Its end acknowledges or rejects the batch."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.stream!s}, queue={self.queue}, offset={self.offset}, count={self.count}, "
            f"attempt={self.attempt})"
        )

    def ack(self, event: Event | SequenceToken | None = None) -> Awaitable[None]:
        """Acknowledge this event, or all of them. Raises InvalidArgument for an event of another batch, and inside of
        the block of `effects`, which acknowledges the batch at its end."""
        self.refuse_in_effects()
        if event is None:
            self.holder.acknowledge(self)
        else:
            place = self._place(event)
            self.holder.acknowledge_some(self, place, place + 1)
        return TURN if self.holder.account.is_congested else DONE

    def ack_until(self, event: Event | SequenceToken) -> Awaitable[None]:
        """Acknowledge this event and all earlier ones of its stream that the consumer holds, in any batch."""
        self.refuse_in_effects()
        self.holder.acknowledge_until(self, self._place(event) + 1)
        return TURN if self.holder.account.is_congested else DONE

    def nack(
        self,
        reason: str = "",
        *,
        delay: timedelta | None = None,
        event: Event | SequenceToken | None = None,
        unavailable: bool = False,
        invalid: bool = False,
    ) -> Awaitable[None]:
        """Reject this event, or all events that are not acknowledged together. They are delivered again after `delay`;
        without it, as the subscription's retry policy says. Later events of their stream are delivered after them, also
        those that the consumer holds already.

        When the retries are exhausted, the subscription's `on_failure` applies; a dead letter keeps `reason`.

        Give `unavailable` if a dependency is down and the events are not to blame: the rejection does not count as an
        attempt, and the events are delivered again until they succeed. A dead letter that is redriven stays one then,
        and keeps the reason of its failure. Give `invalid` if the payload cannot be decoded: `on_failure` then applies
        at once.
        """
        self.refuse_in_effects()
        _check_rejection(reason, delay)
        place = None if event is None else self._place(event)
        self.holder.reject(self, place, reason, delay, unavailable=unavailable, invalid=invalid)
        return TURN if self.holder.account.is_congested else DONE

    def effects(self, database: Effects | AsyncEngine | AsyncConnection) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction of your database for the length of an `async with`. At its end the effects and the
        position of the stream are committed, and the batch is acknowledged. After an error they are rolled back, and
        the batch is rejected with the error, which is raised.

        While the consumer holds earlier events of the stream, this waits for up to 30 s until they are acknowledged or
        rejected. If the block is cancelled, the batch is rejected, too, and the rejection does not count as an attempt.

        Apply `tx.events`, not the events of the batch: they are those whose effects are not committed yet. `database`
        is an `Effects`, or an AsyncEngine or AsyncConnection of SQLAlchemy. See docs/effects.md.

        Raises NotSupported for batches of `pull`, for mode BROADCAST, and for silos of earlier versions. When entered,
        raises NotFound if the database has no tables for effects, InvalidArgument if it commits each statement, or if
        earlier events of the stream stay open,
        Unavailable if it cannot be reached, or if the transaction collides with another one.
        """
        from ..effects.batches import batch_effects  # noqa: PLC0415 (SQLAlchemy is imported only if it is used)

        return batch_effects(database, self, self.holder.effect_scope())

    def refuse_in_effects(self) -> None:
        """Raise InvalidArgument in an `async with` block of `effects`."""
        if self.in_effects:
            raise InvalidArgument(
                f"{self!r} is acknowledged at the end of its `async with batch.effects(...)` block: do not acknowledge "
                "or reject it inside; raise an error to reject it"
            )

    def begin_span(self) -> HandlingSpan | None:
        """Begin a span of OpenTelemetry around the handling of the batch. Return None if nothing is recorded."""
        if tracing.active is None:
            return None
        origin = self.holder.account.origin
        provider, subscription = ("", "") if origin is None else (origin.provider, origin.subscription)
        return tracing.active.handling(provider, subscription, self.queue, self, redriven=self.redriven)

    @contextmanager
    def tracing(self) -> Generator[None]:
        """A span of OpenTelemetry for the length of a `with`, as a child of the one that published the batch. A handler
        has such a span already. Without `enable_tracing` this does nothing."""
        if tracing.active is None:
            yield
            return
        span = self.begin_span() or tracing.active.record_nothing()
        try:
            yield
        except BaseException as error:
            span.failed(error)
            raise
        finally:
            span.end()

    @property
    def is_next(self) -> bool:
        """Whether the consumer holds no earlier events of the stream that are neither acknowledged nor rejected."""
        line = self.holder.lines.get(self.stream, ())
        return self.state != TAKEN or self.redriven or next((one for one in line if not one.redriven), self) is self

    def open_events(self) -> Sequence[Event]:
        """The events that are neither acknowledged nor rejected nor taken back."""
        events, marks = self.events() if self.state == TAKEN else [], self.marks
        return [event for place, event in enumerate(events) if marks is None or not marks[place]]

    @property
    def indexes(self) -> Sequence[int]:
        """Index of each event in the published batch."""
        return range(self.count)

    @property
    def whole(self) -> bool:
        """Whether this has all events of the published batch."""
        return True

    @property
    def redriven(self) -> bool:
        """Whether it is a dead letter that is delivered once more, outside of the order of its stream."""
        return False

    def place_of(self, index: int) -> int:
        """The place of the event that has this index in the published batch. Raises ValueError."""
        if not 0 <= index < self.count:
            raise ValueError
        return index

    def first_open(self) -> int | None:
        """The first place that is neither acknowledged nor rejected; None if the user does not have the batch."""
        if self.state != TAKEN:
            return None
        if self.marks is None:
            return 0
        place = self.marks.find(OPEN)
        return None if place < 0 else place

    def end(self) -> None:
        """Note that all its events are done or taken back. Free the bytes of a batch that the user has not taken."""
        if self.state == QUEUED:
            self.clear()
        self.state = OVER
        self.left = 0

    def clear(self) -> None:
        self.encoded = b""

    def _place(self, event: Event | SequenceToken) -> int:
        if not isinstance(cast("object", event), Event | SequenceToken):
            raise refused("event", event, "an Event of this batch, or its token")
        stream, token = (event.stream, event.token) if isinstance(event, Event) else (self.stream, event)
        try:
            if token is not None and token[0] == self.offset and stream == self.stream:
                return self.place_of(token[1])
        except ValueError:
            pass
        raise InvalidArgument(f"event {token} of {stream} is not in the batch {self!r}: use events of this batch")


def _check_rejection(reason: object, delay: object) -> None:
    """Refuse an event as the reason, which `ack` takes first, and a number of seconds, which other systems take. Raises
    InvalidArgument that shows the right call."""
    if not isinstance(reason, str):
        raise InvalidArgument(
            f"the reason of a rejection is text, not {type(reason).__name__}: batch.nack('why', event=event)"
        )
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidArgument(f"the delay of a rejection is a timedelta, not {delay!r}: timedelta(seconds=5)")


class ReceivedPart(ReceivedBatch):
    """Some events of a published batch. The others are done, are delivered later, or were handed to the user before."""

    __slots__ = ("_indexes", "_part", "_redriven")

    def __init__(self, holder: BatchHolder, delivered: DeliveredBatch, arrival: int) -> None:
        super().__init__(holder, delivered, arrival)
        self._part: EventBatch | None = delivered.batch
        self._indexes = delivered.indexes or range(delivered.batch.count)
        self._redriven = delivered.redriven
        self.plain = False
        self.size += INDEX_BYTES * self.count

    @classmethod
    def some(cls, received: ReceivedBatch, batch: EventBatch, places: Sequence[int]) -> ReceivedPart:
        """The events of a received batch at these places. `batch` contains the events."""
        events = batch.events()
        part = PartialBatch(batch, [events[place] for place in places])
        indexes = [received.indexes[place] for place in places]
        delivered = DeliveredBatch(part, received.queue, received.attempt, indexes, received.redriven)
        return cls(received.holder, delivered, received.arrival)

    @property
    def token(self) -> SequenceToken:
        return SequenceToken(self.offset, self._indexes[0])

    @property
    def indexes(self) -> Sequence[int]:
        return self._indexes

    @property
    def whole(self) -> bool:
        return False

    @property
    def redriven(self) -> bool:
        return self._redriven

    def place_of(self, index: int) -> int:
        place = bisect_left(self._indexes, index)
        if place == self.count or self._indexes[place] != index:
            raise ValueError
        return place

    def clear(self) -> None:
        super().clear()
        self._part = None

    def iter_events(self, start: int = 0) -> Iterator[Event]:
        return self._part.iter_events(start) if self._part else iter(())

    def payloads(self) -> list[bytes]:
        return self._part.payloads() if self._part else []

    def sizes(self) -> Sequence[int]:
        return self._part.sizes() if self._part else ()

    def timestamps_us(self) -> Sequence[int]:
        return self._part.timestamps_us() if self._part else ()
