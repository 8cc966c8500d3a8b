"""Batches as a consumer holds them: what was delivered, and what became of each of its events."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Generator, Sequence
from datetime import timedelta
from typing import Protocol

from ..errors import InvalidArgument
from ..events import Event, EventBatch, SomeEvents
from ..frames import Delivered
from ..identity import SequenceToken

FRAME_BYTES = 32
"""More than what a batch has around it on the wire; in a part, each event has its index, too."""
INDEX_BYTES = 3

OPEN, MARKED, DOOMED = 0, 1, 2
"""To be done; acknowledged or rejected; rejected once it has come again."""
QUEUED, TAKEN, OVER = 0, 1, 2
"""Waiting to be taken; in the user's hands; done or given back. Plain numbers: each batch is asked several times."""


class Holder(Protocol):
    """Who is told what the user does with a batch. `first` and `last` (exclusive) are places among its events."""

    crowded: bool
    """Much waits to be sent: let the loop turn."""

    def acknowledge(self, batch: ReceivedBatch) -> None: ...

    def acknowledge_some(self, batch: ReceivedBatch, first: int, last: int) -> None: ...

    def acknowledge_until(self, batch: ReceivedBatch, last: int) -> None: ...

    def reject(self, batch: ReceivedBatch, place: int | None, reason: str, delay: timedelta | None) -> None: ...


class Done:
    """Awaits nothing."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class Turn:
    """Lets the loop turn once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


DONE, TURN = Done(), Turn()


class ReceivedBatch(EventBatch):
    """Events of one stream, delivered to this consumer, to be acknowledged or rejected.

    Read it as any `EventBatch`: iterate its events, or take its `payloads()`. What is neither acknowledged nor rejected
    when the consumer ends goes to another one. Acknowledgements are collected and sent in the background: to await them
    costs next to nothing. One that comes too late (the event was rejected, or is somebody else's by now) is without
    effect. All of them raise Closed once the consumer is closed.
    """

    __slots__ = ("arrival", "attempt", "carried", "doom", "holder", "left", "marks", "plain", "queue", "size", "state")

    def __init__(self, holder: Holder, delivered: Delivered, arrival: int) -> None:
        batch, self.queue, self.attempt, _, _ = delivered
        self.stream = batch.stream
        self.encoded = batch.encoded
        self.count = self.left = batch.count
        self.offset = batch.offset
        self.size = len(batch.encoded) + FRAME_BYTES
        self.holder = holder
        self.arrival = arrival
        """The number of the response that brought it, the last one where several did."""
        self.plain = True
        """Whole, untouched, of the present connection: to acknowledge it is to say so."""
        self.carried = False
        """It was in the user's hands when a connection was lost."""
        self.state = QUEUED
        self.marks: bytearray | None = None
        """Of each event, where they differ: OPEN, MARKED or DOOMED."""
        self.doom: tuple[int | None, str, timedelta | None] | None = None
        """To be rejected when it comes again: an event or all, why, and when it is to come."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.stream!s}, queue={self.queue}, offset={self.offset}, count={self.count}, "
            f"attempt={self.attempt})"
        )

    def ack(self, event: Event | SequenceToken | None = None) -> Awaitable[None]:
        """This event is done, or all of them. Raises InvalidArgument for an event of another batch."""
        if event is None:
            self.holder.acknowledge(self)
        else:
            place = self._place(event)
            self.holder.acknowledge_some(self, place, place + 1)
        return TURN if self.holder.crowded else DONE

    def ack_until(self, event: Event | SequenceToken) -> Awaitable[None]:
        """This event is done, and all of the stream before it that the consumer holds, also of earlier batches."""
        self.holder.acknowledge_until(self, self._place(event) + 1)
        return TURN if self.holder.crowded else DONE

    def nack(
        self, reason: str = "", *, delay: timedelta | None = None, event: Event | SequenceToken | None = None
    ) -> Awaitable[None]:
        """This event could not be processed, or all that are not acknowledged together. They come again, as the
        subscription's retry policy says or after `delay`, and after them what follows in their stream.

        When the retries are exhausted, the subscription's failure policy holds; a dead letter keeps `reason`. What the
        consumer holds of the stream after these events counts as given back.
        """
        _check_rejection(reason, delay)
        self.holder.reject(self, None if event is None else self._place(event), reason, delay)
        return TURN if self.holder.crowded else DONE

    @property
    def indexes(self) -> Sequence[int]:
        """Index of each event in the batch as it was published."""
        return range(self.count)

    @property
    def whole(self) -> bool:
        """Whether it has all events of the batch as it was published."""
        return True

    @property
    def redriven(self) -> bool:
        """A dead letter, delivered once more, out of line."""
        return False

    def place_of(self, index: int) -> int:
        """Where the event is that had this index in the batch as it was published. Raises ValueError."""
        if not 0 <= index < self.count:
            raise ValueError
        return index

    def first_open(self) -> int | None:
        """The first place that is neither acknowledged nor rejected, while the batch is in the user's hands."""
        if self.state != TAKEN:
            return None
        if self.marks is None:
            return 0
        place = self.marks.find(OPEN)
        return None if place < 0 else place

    def end(self) -> None:
        """Nothing of it is left to be done. Where nobody has taken it, nobody is going to: its bytes go."""
        if self.state == QUEUED:
            self.clear()
        self.state = OVER
        self.left = 0

    def clear(self) -> None:
        self.encoded = b""

    def _place(self, event: Event | SequenceToken) -> int:
        stream, token = (event.stream, event.token) if isinstance(event, Event) else (self.stream, event)
        try:
            if token is not None and token[0] == self.offset and stream == self.stream:
                return self.place_of(token[1])
        except ValueError:
            pass
        raise InvalidArgument(f"event {token} of {stream} is not of this batch, which is {self!r}: use its own events")


def _check_rejection(reason: object, delay: object) -> None:
    """`ack` takes an event first, and other systems take seconds: say what to write instead. Raises InvalidArgument."""
    if not isinstance(reason, str):
        raise InvalidArgument(
            f"the reason of a rejection is text, not {type(reason).__name__}: batch.nack('why', event=event)"
        )
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidArgument(f"the delay of a rejection is a timedelta, not {delay!r}: timedelta(seconds=5)")


class ReceivedPart(ReceivedBatch):
    """Some events of a batch: the others are done, come later, or are in the user's hands already."""

    __slots__ = ("_indexes", "_part", "_redriven")

    def __init__(self, holder: Holder, delivered: Delivered, arrival: int) -> None:
        super().__init__(holder, delivered, arrival)
        self._part: EventBatch | None = delivered.batch
        self._indexes = delivered.indexes or range(delivered.batch.count)
        self._redriven = delivered.redriven
        self.plain = False
        self.size += INDEX_BYTES * self.count

    @classmethod
    def some(cls, received: ReceivedBatch, batch: EventBatch, places: Sequence[int]) -> ReceivedPart:
        """The events of a received batch at these places; `batch` has them."""
        events = batch.events()
        part = SomeEvents(batch, [events[place] for place in places])
        indexes = [received.indexes[place] for place in places]
        delivered = Delivered(part, received.queue, received.attempt, indexes, received.redriven)
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

    def events(self, start: int = 0) -> list[Event]:
        return self._part.events(start) if self._part else []

    def payloads(self) -> list[bytes]:
        return self._part.payloads() if self._part else []

    def sizes(self) -> Sequence[int]:
        return self._part.sizes() if self._part else ()

    def timestamps_us(self) -> Sequence[int]:
        return self._part.timestamps_us() if self._part else ()
