"""What a consumer and its silo owe each other: credit, acknowledgements, and what comes again. Pure, no I/O, no clock.

A `Session` outlives its connections. It is told what comes (`receive`, `saved`, `lost` ...) and what the user does with
it, hands out batches (`take`), and says what to send (`open`, `request`).

- **Credit** is granted such that what is on the way, waits here and is in the user's hands is never more than
  `max_events` and `max_bytes`. What is acknowledged or rejected makes room; it is granted again a quarter at a time.
  A new connection begins with all of it: what the user holds from before counts from when it comes again.
- **Acknowledgements** are remembered until the silo says that they are saved. When the silo delivers such an event
  again, because it or the connection failed before, it is acknowledged again and not handed out.
- **What the user holds** when a connection is lost stays in his hands. When it is delivered again, it is recognised by
  its position, and not handed out twice. What waited here is dropped: the silo delivers it again.
- **A rejection** gives back what the user holds of that parcel after the rejected events. It comes again.

So, of each stream, events are handed out in order, and none while the user holds it, or after he acknowledged it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import NamedTuple, TypeVar

from ..streams.errors import Closed, InvalidArgument
from ..streams.events import EventBatch
from ..streams.frames import Delivered
from ..streams.identity import StreamId
from .received import DEFERRED, MARKED, OPEN, OVER, QUEUED, TAKEN, ReceivedBatch, ReceivedPart
from .unconfirmed import Acknowledged, UnconfirmedAcknowledgements, runs

_T = TypeVar("_T")

MAX_EVENTS = 10_000
"""Events that a consumer holds at the most, unless it says otherwise."""
MAX_BYTES = 8 << 20
"""The same in bytes."""
MAX_UNSAVED = 200_000
"""With so many acknowledgements that the silo has not saved, it gets no more credit."""
RESENT = 10_000
"""Of the acknowledgements that may have been lost with a connection, so many of the last ones are sent again at once:
the others arrived."""
NOTICES = 5
"""So often a silo says how things are, about every second, until what it has not delivered again is taken for saved."""
MAX_ACKNOWLEDGEMENTS, MAX_REJECTIONS = 20_000, 500
"""In one request: it has to fit into what a silo takes."""
MAX_REASON = 1000
"""Characters that are kept of why events were rejected."""
MAX_DELAY = timedelta(days=7)
"""A rejection's events come again at the latest after this."""


class Rejected(NamedTuple):
    """As it goes to the silo. `length` 0 is to the end of the batch."""

    stream: StreamId
    queue: int
    offset: int
    first: int
    length: int
    reason: str
    delay_ms: int | None
    unavailable: bool


Ack = tuple[int, int, int, int, bool]
"""As it goes to the silo: queue, offset, first, length, up_to."""


class Request(NamedTuple):
    """What to send. `number` is 0 where nothing is to be saved."""

    number: int
    acknowledgements: Sequence[Ack]
    rejections: Sequence[Rejected]
    credit_events: int
    credit_bytes: int
    moves_heard: int = 0
    """On the present connection. What was delivered before a move that was not heard of is not meant any more."""


class SessionStatistics(NamedTuple):
    received_events: int
    received_batches: int
    acknowledged_events: int
    rejected_events: int
    """Together with those given back because they followed a rejected one."""
    recognised_events: int
    """Came again after a connection was lost, and were not handed out twice."""
    refused: int
    """Acknowledgements and rejections that the silo found without effect."""
    late: int
    """The same, found here."""
    held_events: int
    """Waiting here or in the user's hands."""
    held_bytes: int
    waiting_batches: int
    credit_events: int
    credit_bytes: int
    unsaved: int
    """Acknowledgements that the silo has not saved yet."""


class Session:
    """One consumer's side of a subscription, over any number of connections.

    `on_pending` is called when there is something to send: then call `request`.
    """

    def __init__(  # noqa: PLR0915 (plain data)
        self,
        max_events: int = MAX_EVENTS,
        max_bytes: int = MAX_BYTES,
        on_pending: Callable[[], None] = lambda: None,
    ) -> None:
        if min(max_events, max_bytes) < 1:
            raise InvalidArgument(
                f"a consumer holds at least one event and one byte: max_events={max_events}, max_bytes={max_bytes}"
            )
        self.max_events = max_events
        self.max_bytes = max_bytes
        """It grows to the size of one event that is larger."""
        self._few_events = max_events - max_events // 4
        self._few_bytes = max_bytes - max_bytes // 4
        self.on_pending = on_pending
        self.closed = ""
        """Why the user cannot do anything any more; empty while he can."""
        self._connected = False
        self._pending = False
        self._starving = False
        self._waiting = deque[ReceivedBatch]()
        self._lines: dict[StreamId, list[ReceivedBatch]] = {}
        """What is not over, by stream and in order of position."""
        self._arrivals = 0
        self._first_arrival = 0
        """Of the present connection."""
        self._acks: list[Acknowledged] = []
        self._again: list[Acknowledged] = []
        """Those never to be sent as one for several: of what came on earlier connections, and of dead letters."""
        self._rejections: list[Rejected] = []
        self._deferred: list[ReceivedBatch] = []
        """What is rejected once it comes again."""
        self._passed: list[Acknowledged] = []
        """What the silo knows to be done, without having said that it is saved."""
        self._unsaved = deque[tuple[int, list[Acknowledged]]]()
        self._unsaved_count = 0
        self._remembered = UnconfirmedAcknowledgements()
        """What was acknowledged on earlier connections and may come again."""
        self._forgets = False
        """The next request is the one with which all that is remembered is applied;"""
        self._forgets_with = 0
        """this one is."""
        self._doubtful = False
        """Something that is remembered may be unknown to a silo that knows the consumer."""
        self._moves: int | None = None
        """How often the subscription was moved, as far as is known."""
        self._moves_heard = 0
        """News of that on the present connection."""
        self._notices = 0
        """How often the silo said how things are on the present connection."""
        self._numbers = count(1)
        self._credit_events = self._credit_bytes = 0
        """What the silo may still send."""
        self._held_events = self._held_bytes = 0
        self.is_congested = False
        """There is credit to grant: the loop should turn."""
        self._received_events = self._received_batches = self._acknowledged = self._rejected = 0
        self._recognised = self._refused = self._late = 0

    # ---- the connection --------------------------------------------------------------------------------------------

    def open(self) -> Request:
        """A connection begins: what to send first."""
        self._connected = True
        self._notices = self._moves_heard = 0
        self._credit_events, self._credit_bytes = self.max_events, self.max_bytes
        request = self.request() or Request(0, (), (), 0, 0)
        return request._replace(credit_events=self._credit_events, credit_bytes=self._credit_bytes)

    def opened(self, *, resumed: bool, moves: int) -> None:
        """The silo answers, and still knows the consumer, or not. If so, with the next request it has applied all that
        was acknowledged before: once that one is saved, nothing of it can come again."""
        if self._moves is None:
            self._moves = moves
        elif self._moves != moves:
            self._forget(moves)
        if not resumed and self._remembered:
            self._doubtful = True
        if not self._remembered:
            self._doubtful = False
        if resumed and not self._doubtful:
            self._forgets = True
            self._send()

    def lost(self) -> None:
        """The connection ended, or never came about."""
        self._connected = self._forgets = False
        self._forgets_with = 0
        self._credit_events = self._credit_bytes = 0
        self._drop_waiting()
        self._first_arrival = self._arrivals + 1
        self._held_events = self._held_bytes = 0
        sent = [ack for _, acks in self._unsaved for ack in acks]
        self._remembered.add(self._passed)
        self._remembered.add(sent)
        self._remembered.add(self._acks)
        self._again = sent[-RESENT:] + self._again + self._acks
        self._unsaved.clear()
        self._unsaved_count = 0
        self._acks, self._passed = [], []

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        for line in list(self._lines.values()):
            for batch in [batch for batch in line if batch.state == QUEUED]:
                self._over(batch)
            for batch in line:
                batch.carried, batch.plain = True, False

    def moved(self, moves: int) -> None:
        """The subscription was moved, by now so often, and all that was in flight taken back, dead letters apart. What
        was acknowledged may be meant to come again."""
        self._moves_heard += 1
        self._forget(moves)

    def _forget(self, moves: int) -> None:
        self._moves = moves
        self._waiting = deque(batch for batch in self._waiting if batch.redriven)
        for batch in [batch for line in self._lines.values() for batch in line if not batch.redriven]:
            self._over(batch)
        self._remembered = UnconfirmedAcknowledgements()
        self._acks, self._again, self._rejections, self._passed, self._deferred = [], [], [], [], []
        self._unsaved.clear()
        self._unsaved_count = 0
        self._look_at_credit()

    def close(self, why: str) -> None:
        """Nothing more can be taken or acknowledged. What was acknowledged can still be sent."""
        self.closed = self.closed or why
        self._drop_waiting()

    @property
    def saved_all(self) -> bool:
        """Whether everything acknowledged is saved, on whatever connection it was. A silo that was started again
        delivers at first what it did not save; what has not come some time later is not expected any more."""
        return self.settled and (not self._remembered or self._notices >= NOTICES)

    @property
    def settled(self) -> bool:
        """Whether everything acknowledged is saved, as far as the present connection is concerned."""
        return not (self._acks or self._again or self._rejections or self._unsaved)

    # ---- from the silo ---------------------------------------------------------------------------------------------

    def receive(self, delivered: Iterable[Delivered], size: int) -> None:
        """The batches of one response, in order, and their size on the wire in bytes."""
        self._arrivals = arrival = self._arrivals + 1
        lines, remembered = self._lines, self._remembered
        received: list[ReceivedBatch] = []
        events = batches = 0
        for each in delivered:
            batch = each[0]
            batches += 1
            events += batch.count
            one = ReceivedBatch(self, each, arrival) if each[3] is None else ReceivedPart(self, each, arrival)
            line = lines.get(batch.stream)
            if remembered or (line is not None and line[-1].offset >= batch.offset):
                received += self._recognise(one, batch)
                continue
            if line is None:
                lines[batch.stream] = [one]
            else:
                line.append(one)
            received.append(one)
        self._credit_events -= events
        self._credit_bytes -= size
        self._received_events += events
        self._received_batches += batches
        self._hand_out(received)

    def _hand_out(self, received: list[ReceivedBatch]) -> None:
        if received:
            self._waiting += received
            self._held_events += sum([one.count for one in received])
            self._held_bytes += sum([one.size for one in received])
            self._starving = False
        if self._deferred:
            self._reject_deferred()
        if self.closed:
            self._drop_waiting()
        self._look_at_credit()

    def _recognise(self, received: ReceivedBatch, batch: EventBatch) -> list[ReceivedBatch]:
        """What of a batch is to be handed out, if anything: neither acknowledged nor held already."""
        self._passed += self._remembered.passed(batch.stream, batch.offset)
        known = self._remembered.take(batch.stream, batch.offset, received.indexes)
        held = [one for one in self._lines.get(batch.stream, ()) if one.offset == batch.offset]
        for one in held:
            if one.deferred is not None and one.arrival < self._first_arrival:
                self._spare(one, received.indexes)
        held = [one for one in held if one.state != OVER]
        again: list[int] = []
        wanted: list[int] = []
        for place, index in enumerate(received.indexes):
            if index in known:
                again.append(place)
            elif not any(self._holds(one, index) for one in held):
                wanted.append(place)
        self._recognised += received.count - len(wanted)
        self._note(received, again)
        if not wanted:
            return []
        if len(wanted) < received.count:
            received = ReceivedPart.some(received, batch, wanted)
        self._insert(received)
        return [received]

    def _holds(self, batch: ReceivedBatch, index: int) -> bool:
        """Whether an event that came now is one of `batch`, unfinished: then that counts as having come now."""
        try:
            place = batch.place_of(index)
        except ValueError:
            return False
        if batch.state == OVER or (batch.marks is not None and batch.marks[place] == MARKED):
            return False
        if batch.arrival < self._first_arrival:
            self._held_events += batch.left
            self._held_bytes += batch.size
        batch.arrival = self._arrivals
        return True

    def _insert(self, received: ReceivedBatch) -> None:
        line = self._lines.setdefault(received.stream, [])
        position = _position(received)
        at = len(line)
        while at and _position(line[at - 1]) > position:
            at -= 1
        line.insert(at, received)

    def saved(self, number: int) -> None:
        """Everything acknowledged in requests up to this number is saved."""
        unsaved = self._unsaved
        while unsaved and unsaved[0][0] <= number:
            self._unsaved_count -= len(unsaved.popleft()[1])
        if 0 < self._forgets_with <= number:
            self._forgets_with = 0
            self._remembered = UnconfirmedAcknowledgements()
        self._notices += 1
        self._look_at_credit()

    def refused(self, positions: Iterable[tuple[int, int]]) -> None:
        """What was sent of these batches, by queue and offset, is without effect."""
        self._refused += sum(not self._remembered.knows(*position) for position in positions)

    def progressed(self, needed_bytes: int, *, caught_up: bool) -> None:
        """The silo tells how it stands: an event that waits for credit needs so many bytes; nothing is left to be
        delivered."""
        if caught_up and self._remembered:
            self._passed += self._remembered.all_passed()
            for batch in self._deferred:
                self._over(batch)
            self._deferred.clear()
        if needed_bytes > self.max_bytes:
            self.max_bytes, self._few_bytes = needed_bytes, needed_bytes - needed_bytes // 4
        self._starving = self._starving or not caught_up
        self._notices += 1
        self._look_at_credit()

    # ---- credit ----------------------------------------------------------------------------------------------------

    def _room(self) -> tuple[int, int]:
        """Events and bytes that could be granted now, and are worth it."""
        if not self._connected or self.closed or self._unsaved_count > MAX_UNSAVED:
            return 0, 0
        events = self.max_events - self._held_events - self._credit_events
        size = self.max_bytes - self._held_bytes - self._credit_bytes
        if self._starving or events * 4 >= self.max_events or size * 4 >= self.max_bytes:
            return max(events, 0), max(size, 0)
        return 0, 0

    def _look_at_credit(self) -> None:
        if not self._pending and any(self._room()):
            self._send()

    def _send(self) -> None:
        if not self._pending:
            self._pending = True
            self.on_pending()

    # ---- to the user -----------------------------------------------------------------------------------------------

    def take(self) -> ReceivedBatch | None:
        """The next batch, now in the user's hands; None where none waits."""
        if self._waiting and self._waiting[0].state == QUEUED:
            batch = self._waiting.popleft()
            batch.state = TAKEN
            return batch
        batch = self.next_waiting()
        if batch is not None:
            batch.state = TAKEN
        return batch

    def next_waiting(self) -> ReceivedBatch | None:
        """The next batch, which still waits: `begin` takes it."""
        waiting = self._waiting
        while waiting:
            batch = waiting.popleft()
            if batch.state == QUEUED:
                return batch
        if self._credit_events * 4 < self.max_events or self._credit_bytes * 4 < self.max_bytes:
            self._starving = True
            self._look_at_credit()
        return None

    @staticmethod
    def begin(batch: ReceivedBatch) -> bool:
        """Take what `next_waiting` gave. False where it has to be left: it was dropped meanwhile."""
        if batch.state != QUEUED:
            return False
        batch.state = TAKEN
        return True

    @property
    def waiting(self) -> bool:
        """Whether something may be there to be taken."""
        return bool(self._waiting)

    # ---- from the user (`BatchHolder`) -------------------------------------------------------------------------------

    def acknowledge(self, batch: ReceivedBatch) -> None:
        """All of it that is left."""
        if not self._in_hands(batch):
            return
        if batch.plain:  # as nearly all are
            self._acks.append((batch.stream, batch.queue, batch.offset, 0, batch.count))
            if not self._pending:
                self._send()
        elif batch.marks is None and batch.whole:
            self._done(batch, [(batch.stream, batch.queue, batch.offset, 0, batch.count)])
        elif batch.deferred is not None:
            self.acknowledge_some(batch, 0, batch.count)
            return
        else:
            self._note(batch, _open_places(batch, 0, batch.count))
        self._acknowledged += batch.left
        self._over(batch)

    def acknowledge_some(self, batch: ReceivedBatch, first: int, last: int) -> None:
        """The events from place `first` up to `last`, exclusive."""
        if not self._in_hands(batch):
            return
        places = _open_places(batch, first, last)
        if not places:
            self._late += 1
        elif len(places) == batch.left:
            self.acknowledge(batch)
        else:
            self._note(batch, places)
            self._acknowledged += len(places)
            self._mark(batch, places)

    def acknowledge_until(self, batch: ReceivedBatch, last: int) -> None:
        """The events up to place `last`, exclusive, and all that is held of the stream before."""
        if not self._in_hands(batch):
            return
        for earlier in list(self._lines[batch.stream]):
            if earlier is batch:
                break
            if earlier.state == TAKEN:
                self.acknowledge(earlier)
        self.acknowledge_some(batch, 0, last)

    def reject(
        self, batch: ReceivedBatch, place: int | None, reason: str, delay: timedelta | None, unavailable: bool = False
    ) -> None:
        """One event, or all that are left of the batch together."""
        delay_ms = None if delay is None else _milliseconds(delay)
        if not self._in_hands(batch):
            return
        open_places = _open_places(batch, place or 0, batch.count)
        if not open_places or (place is not None and open_places[0] != place):
            self._late += 1
            return
        if self._connected and batch.arrival < self._first_arrival:
            self._defer_rejection(batch, open_places, (place, reason, delay, unavailable))
        else:
            self._reject(batch, open_places, place, reason, delay_ms, unavailable=unavailable)

    def _defer_rejection(
        self, batch: ReceivedBatch, places: Sequence[int], rejection: tuple[int | None, str, timedelta | None, bool]
    ) -> None:
        """The silo may be sending the batch again just now, and what of that is rejected must not be handed out: it is
        rejected when it has come."""
        self._give_back_after(batch)
        batch.deferred, batch.plain = rejection, False
        batch.marks = batch.marks or bytearray(batch.count)
        for place in places:
            batch.marks[place] = DEFERRED
        self._deferred.append(batch)

    def _spare(self, batch: ReceivedBatch, indexes: Sequence[int]) -> None:
        """Of a deferred batch these events came, and not the first that is to be rejected: another consumer is done
        with it. Where it was to be rejected by itself, what was given back with it is handed out anew."""
        assert batch.deferred is not None
        assert batch.marks is not None
        deferred = [place for place, mark in enumerate(batch.marks) if mark == DEFERRED]
        first = next((place for place in deferred if batch.indexes[place] in indexes), deferred[0])
        if first == deferred[0]:
            return
        alone = batch.deferred[0] is not None
        self._mark(batch, [place for place in deferred if alone or place < first])
        if alone:
            batch.deferred = None
            self._deferred = [each for each in self._deferred if each is not batch]
        if not batch.left:
            self._over(batch)

    def _reject_deferred(self) -> None:
        """What came again of that is rejected now."""
        deferred, self._deferred = self._deferred, []
        for batch in deferred:
            if batch.arrival < self._first_arrival:
                self._deferred.append(batch)
            elif batch.state == TAKEN and batch.deferred is not None and batch.marks is not None:
                rejection, batch.deferred = batch.deferred, None
                batch.marks = batch.marks.replace(bytes((DEFERRED,)), bytes((OPEN,)))
                self.reject(batch, *rejection)

    def _reject(
        self,
        batch: ReceivedBatch,
        places: Sequence[int],
        place: int | None,
        reason: str,
        delay_ms: int | None,
        *,
        unavailable: bool,
    ) -> None:
        index, last = batch.indexes[places[0]], batch.indexes[-1]
        length = 1 if place is not None else 0 if batch.whole else last - index + 1
        self._rejections.append(
            Rejected(batch.stream, batch.queue, batch.offset, index, length, reason[:MAX_REASON], delay_ms, unavailable)
        )
        self._give_back_after(batch)
        self._rejected += len(places)
        if len(places) == batch.left:
            self._over(batch)
        else:
            self._mark(batch, places)
        self._send()

    def _in_hands(self, batch: ReceivedBatch) -> bool:
        if self.closed:
            raise Closed(self.closed)
        if batch.state == TAKEN:
            return True
        self._late += 1
        return False

    def _give_back_after(self, batch: ReceivedBatch) -> None:
        """What follows in the parcel is not the consumer's any more."""
        if batch.redriven:
            return
        line = self._lines[batch.stream]
        at = next(place for place, each in enumerate(line) if each is batch) + 1
        for each in [each for each in line[at:] if each.arrival == batch.arrival and not each.redriven]:
            self._rejected += each.left
            self._over(each)

    def _note(self, batch: ReceivedBatch, places: Sequence[int]) -> None:
        """The events at these places are done."""
        if places:
            indexes = batch.indexes
            head = batch.stream, batch.queue, batch.offset
            self._done(batch, [(*head, first, end - first) for first, end in runs([indexes[at] for at in places])])

    def _done(self, batch: ReceivedBatch, acks: list[Acknowledged]) -> None:
        """To be sent, and remembered."""
        if batch.carried:  # also where it came again: perhaps only a part of it did
            self._remembered.add(acks)
        if batch.arrival < self._first_arrival or batch.redriven:
            self._again += acks
        elif self._acks and (joined := _joined(self._acks[-1], acks[0])):
            self._acks[-1:] = [joined, *acks[1:]]
        else:
            self._acks += acks
        self._send()

    def _mark(self, batch: ReceivedBatch, places: Sequence[int]) -> None:
        if batch.marks is None:
            batch.marks = bytearray(batch.count)
            batch.plain = False
        for place in places:
            batch.marks[place] = MARKED
        batch.left -= len(places)
        if batch.arrival >= self._first_arrival:
            self._held_events -= len(places)

    def _over(self, batch: ReceivedBatch) -> None:
        """Nothing of it is left to be done."""
        if batch.arrival >= self._first_arrival:
            self._held_events -= batch.left
            self._held_bytes -= batch.size
            self.is_congested = (
                self._held_events + self._credit_events < self._few_events
                or self._held_bytes + self._credit_bytes < self._few_bytes
            )
        batch.end()
        line = self._lines[batch.stream]
        if len(line) == 1:
            del self._lines[batch.stream]
        elif line[0] is batch:
            del line[0]
        else:
            del line[next(at for at, each in enumerate(line) if each is batch)]

    # ---- to the silo -----------------------------------------------------------------------------------------------

    def request(self) -> Request | None:
        """What there is to be sent now, which then counts as sent; None where there is nothing. Call it until then."""
        self._pending = self.is_congested = False
        events, size = self._room()
        if events or size:
            self._starving = False
            self._credit_events += events
            self._credit_bytes += size
        elif not (self._acks or self._again or self._rejections or self._passed or self._forgets):
            return None
        again, self._again = _cut(self._again, MAX_ACKNOWLEDGEMENTS)
        acks, self._acks = _cut(self._acks, MAX_ACKNOWLEDGEMENTS)
        if self._again or self._acks:  # what is rejected comes after what was acknowledged before
            rejections: list[Rejected] = []
        else:
            rejections, self._rejections = _cut(self._rejections, MAX_REJECTIONS)
        number = self._remember_until_saved(again + self._passed + acks if again or self._passed else acks)
        self._passed = []
        merged = self._merged(acks, rejections)
        said = [(*ack[1:], False) for ack in again] + merged
        return Request(number, said, rejections, events, size, self._moves_heard)

    def _remember_until_saved(self, acks: list[Acknowledged]) -> int:
        """The number of the request that has them."""
        if not (acks or self._forgets):
            return 0
        number = next(self._numbers)
        if self._forgets:
            self._forgets, self._forgets_with = False, number
        self._unsaved.append((number, acks))
        self._unsaved_count += len(acks)
        return number

    def _merged(self, acks: list[Acknowledged], rejections: list[Rejected]) -> list[Ack]:
        """One for several of a stream in a row, where nothing before them is left that is not acknowledged."""
        merged: list[Ack] = []
        rejected = {rejection.stream for rejection in (*rejections, *self._rejections)}
        at, end = 0, len(acks)
        while at < end:
            stream, queue, offset, index, length = acks[at]
            at += 1
            if at == end or acks[at][0] is not stream:
                merged.append((queue, offset, index, length, False))
                continue
            start = at - 1
            while at < end and acks[at][0] is stream:
                at += 1
            run = acks[start:at]
            last = max(run, key=_acknowledged_position)
            line = self._lines.get(stream)
            if stream in rejected or (line is not None and line[0].offset <= last[2]):
                merged += [(*ack[1:], False) for ack in run]
            else:
                merged.append((*last[1:], True))
        return merged

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(
            self._received_events,
            self._received_batches,
            self._acknowledged,
            self._rejected,
            self._recognised,
            self._refused,
            self._late,
            self._held_events,
            self._held_bytes,
            len(self._waiting),
            self._credit_events,
            self._credit_bytes,
            self._unsaved_count + len(self._acks) + len(self._again),
        )


def _cut(items: list[_T], most: int) -> tuple[list[_T], list[_T]]:
    """The first so many, and the rest."""
    return (items, []) if len(items) <= most else (items[:most], items[most:])


def _joined(before: Acknowledged, after: Acknowledged) -> Acknowledged | None:
    """Two in one, where the second goes on where the first ends."""
    follows = before[3] + before[4] == after[3] and before[:3] == after[:3]
    return (*before[:4], before[4] + after[4]) if follows else None


def _position(batch: ReceivedBatch) -> tuple[int, int]:
    return batch.offset, batch.indexes[0]


def _acknowledged_position(ack: Acknowledged) -> tuple[int, int]:
    return ack[2], ack[3]


def _open_places(batch: ReceivedBatch, first: int, last: int) -> Sequence[int]:
    marks = batch.marks
    if marks is None:
        return range(first, last)
    return [place for place in range(first, last) if not marks[place]]


def _milliseconds(delay: timedelta) -> int:
    if not timedelta(0) <= delay <= MAX_DELAY:
        raise InvalidArgument(f"the delay of a rejection is from 0 to {MAX_DELAY.days} days, not {delay}")
    return delay // timedelta(milliseconds=1)
