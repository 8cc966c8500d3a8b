"""The events of one queue that a consumer holds, and the results that it has not reported yet. Pure.

Sessions come and go: another silo may serve the queue, or the same one again. Batches that the user has stay with the
user. They are recognised by their position when they are delivered again, and are not handed out twice.

- **Acknowledgements** are kept until the silo confirms that they are saved. If the session ends before, they are named
  as unconfirmed in the next one; if the silo refuses them, in the same one. If such an event is delivered again, it is
  acknowledged again and not handed out.
- **A rejection** gives back the rejected events and all later events of their parcel. They are delivered again. If the
  present session has not delivered the rejected events, the rejection is deferred until it does: otherwise the silo
  could be delivering them already.
- **A seek** raises the generation. Then everything that was delivered before is void.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Protocol

from ..proto.v1 import consumer_pb2 as pb
from ..streams.errors import Closed, InvalidArgument
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from ..streams.transactions import EffectScope
from .held_account import HeldAccount, check_origin
from .pending_results import DeferredRejections, PendingResults, RejectedEvents
from .received import MARKED, QUEUED, TAKEN, ReceivedBatch, ReceivedPart

MAX_REASON = 1000
"""Characters that are kept of the reason of a rejection."""
MAX_DELAY = timedelta(days=7)
"""The longest delay of a rejection."""


class ReportLink(Protocol):
    """A session with a silo."""

    def wake(self) -> None:
        """Reports wait to be sent."""


class QueueHoldings:
    """One queue. `BatchHolder` of its batches."""

    def __init__(self, number: int, account: HeldAccount) -> None:
        self.number = number
        self.account = account
        self.link: ReportLink | None = None
        """The session that serves the queue; None: none does."""
        self.assigned = False
        """Mode bound: whether the queue is this consumer's."""
        self.epoch = 0
        self.generation: int | None = None
        self._scope: EffectScope | None = None
        self.lines: dict[StreamId, list[ReceivedBatch]] = {}
        """Batches with unfinished events, by stream and in order of position."""
        self.pending = False
        """Whether the link was told that there is a report."""
        self.results = PendingResults(account)
        self.deferred = DeferredRejections()
        self._given_back: dict[StreamId, tuple[int, int]] = {}
        """Streams of which a parcel was rejected as it arrived, and from which position on."""

    # ---- the session ------------------------------------------------------------------------------------------------

    def serve(self, link: ReportLink, epoch: int, generation: int, *, assigned: bool) -> None:
        """A session serves the queue, or its lease or the position of the subscription changed."""
        if epoch < self.epoch:
            return  # an earlier owner, heard of late
        if self.link is not None and (link is not self.link or epoch != self.epoch):
            self.end_session()
        if self.generation is not None and generation > self.generation:
            self._forget()
        self.link, self.epoch, self.generation, self.assigned = link, epoch, generation, assigned
        self._send()

    def release(self) -> None:
        """The queue is going to move: give back all batches that the user has not begun."""
        for line in list(self.lines.values()):
            parcel = 0
            for batch in list(line):
                begins = batch.state == QUEUED and (batch.redriven or batch.arrival != parcel)
                if begins:
                    self.results.release(batch.stream, *_position(batch))
                    parcel = parcel if batch.redriven else batch.arrival
                if begins or (batch.arrival == parcel and not batch.redriven):
                    self._end(batch)
        self._send()

    def end_session(self) -> None:
        """The session does not serve the queue any more. Batches that wait are dropped: they are delivered again."""
        self.link = None
        self.pending = self.assigned = False
        self.drop_waiting()
        for line in self.lines.values():
            for batch in line:
                if batch.current:
                    self.account.remove(batch.left, batch.size)
                batch.current, batch.plain = 0, False
        for rejected in self.results.end_session():
            self.deferred.add(rejected)

    def drop_waiting(self) -> None:
        """Drop the batches that the user has not taken."""
        for line in list(self.lines.values()):
            for batch in [batch for batch in line if batch.state == QUEUED]:
                self._end(batch)

    def _forget(self) -> None:
        """After a seek, everything that was delivered before is void, and may be delivered again on purpose."""
        for batch in [batch for line in self.lines.values() for batch in line]:
            self._end(batch)
        self.results.forget()
        self.deferred.clear()

    # ---- reports ------------------------------------------------------------------------------

    def saved(self, epoch: int, number: int, unconfirmed: int) -> None:
        """Acknowledgements of reports up to this number are saved, and those named up to the other number."""
        if epoch == self.epoch:
            self.results.confirm(number, unconfirmed)
            self._send()

    def refused(self, epoch: int, number: int, offset: int) -> None:
        """The report with this number acknowledged events of this batch, and the silo refused it: ask when they are
        done."""
        if epoch == self.epoch:
            self.results.refuse(number, offset)
            self._send()

    def report(self, request: pb.SubscribeRequest, number: int, limit: int) -> int:
        """Add the next report to a request. It then counts as sent. Return its weight, which is about `limit` at most;
        0 if there is nothing to report."""
        report = request.reports.add(queue=self.number, epoch=self.epoch, generation=self.generation or 0)
        weight = self.results.fill(report, number, limit, self.lines)
        self.pending = self.results.has_report
        if not weight:
            request.reports.pop()
        return weight

    # ---- delivery ---------------------------------------------------------------------------------------------------

    @property
    def recognises(self) -> bool:
        """Whether a batch may contain events that are acknowledged or rejected already."""
        return bool(self.results.unconfirmed or self.deferred)

    def recognise(self, received: ReceivedBatch, batch: EventBatch) -> ReceivedBatch | None:
        """Return the part of a batch that is to be handed out: events that are neither acknowledged nor rejected nor
        held already. None if there are none."""
        known = self.results.take_unconfirmed(received.offset, received.indexes)
        held = self._held_again(received)
        rejected = self._rejected_again(received)
        again: list[int] = []
        wanted: list[int] = []
        for place, index in enumerate(received.indexes):
            if index in known:
                again.append(index)
            elif index not in held and (rejected is None or index < rejected):
                wanted.append(place)
        self.account.note_recognised(received.count - len(wanted))
        if again:
            self.results.acknowledge_again(received, again)
            self._send()
        if not wanted:
            return None
        if len(wanted) < received.count:
            received = ReceivedPart.some(received, batch, wanted)
        insort(self.lines.setdefault(received.stream, []), received, key=_position)
        return received

    def _held_again(self, received: ReceivedBatch) -> set[int]:
        """Return the delivered indexes that the user has. Events before them that are not delivered again are done."""
        found: set[int] = set()
        delivered = set(received.indexes)
        for batch in [batch for batch in self.lines.get(received.stream, ()) if batch.offset == received.offset]:
            places = [place for place in _open_places(batch, 0, batch.count) if batch.indexes[place] in delivered]
            if not places or batch.redriven != received.redriven:
                continue
            found.update(batch.indexes[place] for place in places)
            was_current, batch.current = batch.current, max(batch.current, places[-1] + 1)
            if not was_current:
                self.account.hold(batch.left, batch.size)
            if gone := [place for place in _open_places(batch, was_current, places[-1]) if place not in places]:
                self._mark(batch, gone)
            batch.arrival = received.arrival
        return found

    def _rejected_again(self, received: ReceivedBatch) -> int | None:
        """Report a deferred rejection whose events are delivered now. Return the first rejected index."""
        if received.redriven or received.stream in self._given_back:
            return None
        rejected = self.deferred.take(received)
        if rejected is None:
            return None
        self._given_back[received.stream] = rejected.offset, rejected.first
        self.results.reject(rejected)
        self._send()
        return rejected.first

    def end_response(self, arrival: int) -> None:
        """All batches of a response are received: of parcels that were rejected meanwhile, drop the later batches, and
        those that earlier parcels left."""
        given_back, self._given_back = self._given_back, {}
        for stream, rejected in given_back.items():
            for batch in self.lines.get(stream, ())[:]:
                if batch.arrival <= arrival and not batch.redriven and _position(batch) > rejected:
                    self._end(batch)

    def effect_scope(self) -> EffectScope:
        """Return the scope of the effects of these events. Raises NotSupported."""
        origin, generation, known = check_origin(self.account.origin), self.generation or 0, self._scope
        if known is None or (known.origin, known.generation) != (origin.origin, generation):
            known = self._scope = origin.scope(self.number, generation)
        return known

    # ---- results (`BatchHolder`) ------------------------------------------------------------------------------------

    def acknowledge(self, batch: ReceivedBatch) -> None:
        """Acknowledge all events that are left."""
        account = self.account
        if batch.state != TAKEN or account.closed:
            self._refuse_late()
        elif batch.plain:  # as nearly all are
            self.results.acknowledge((batch.stream, batch.offset, 0, batch.count))
            if not self.pending:
                self._send()
            account.acknowledge(batch.left, batch.size)
            _unlink(self.lines, batch)
        else:
            account.note_acknowledged(batch.left)
            self._note(batch, _open_places(batch, 0, batch.count))
            self._end(batch)

    def acknowledge_some(self, batch: ReceivedBatch, first: int, last: int) -> None:
        """Acknowledge the events from place `first` up to `last`, exclusive."""
        places = _open_places(batch, first, last)
        if batch.state != TAKEN or self.account.closed or not places:
            self._refuse_late()
        elif len(places) == batch.left:
            self.acknowledge(batch)
        else:
            self.account.note_acknowledged(len(places))
            self._note(batch, places)
            self._mark(batch, places)

    def acknowledge_until(self, batch: ReceivedBatch, last: int) -> None:
        """Acknowledge the events up to place `last`, exclusive, and all earlier ones of the stream that are held."""
        if batch.state != TAKEN or self.account.closed:
            self._refuse_late()
            return
        line = takewhile(lambda one: one is not batch, self.lines[batch.stream])
        earlier = [one for one in line if one.state == TAKEN]
        for one in earlier:
            one.refuse_in_effects()
        for one in earlier:
            self.acknowledge(one)
        self.acknowledge_some(batch, 0, last)

    def reject(
        self,
        batch: ReceivedBatch,
        place: int | None,
        reason: str,
        delay: timedelta | None,
        *,
        unavailable: bool = False,
        invalid: bool = False,
    ) -> None:
        """Reject one event, or all that are left of the batch together."""
        delay_ms = None if delay is None else _milliseconds(delay)
        places = _open_places(batch, place or 0, batch.count)
        late = not places or (place is not None and places[0] != place)
        if batch.state != TAKEN or self.account.closed or late:
            self._refuse_late()
            return
        indexes, first = batch.indexes, places[0]
        last = batch.current if first < batch.current else batch.count
        end = indexes[first if place is not None else last - 1] + 1
        rejected = RejectedEvents(
            batch.stream, batch.offset, indexes[first], end, reason[:MAX_REASON], delay_ms,
            unavailable=unavailable, redriven=batch.redriven, invalid=invalid,
        )  # fmt: skip
        if first < batch.current:
            self.results.reject(rejected)
            self._send()
        else:
            self.deferred.add(rejected)
        self._give_back_after(batch)
        self.account.note_rejected(len(places))
        self._mark(batch, places)
        if not batch.left:
            self._end(batch)

    def _give_back_after(self, batch: ReceivedBatch) -> None:
        """Later events of the parcel are not the consumer's any more. Those of an earlier parcel have not been since
        the silo delivered this batch again without them."""
        if batch.redriven:
            return
        line = self.lines[batch.stream]
        at = next(place for place, each in enumerate(line) if each is batch) + 1
        for each in [each for each in line[at:] if each.arrival <= batch.arrival and not each.redriven]:
            self.account.note_rejected(each.left)
            self._end(each)

    def _refuse_late(self) -> None:
        if self.account.closed:
            raise Closed(self.account.closed)
        self.account.note_late()

    def _note(self, batch: ReceivedBatch, places: Sequence[int]) -> None:
        """Note that the events at these places are acknowledged. The present session may not have delivered all."""
        indexes, current = batch.indexes, batch.current
        if delivered := [indexes[place] for place in places if place < current]:
            self.results.acknowledge_indexes(batch, delivered)
        if carried := [indexes[place] for place in places if place >= current]:
            self.results.carry(batch, carried)
        self._send()

    def _mark(self, batch: ReceivedBatch, places: Sequence[int]) -> None:
        if batch.marks is None:
            batch.marks = bytearray(batch.count)
            batch.plain = False
        for place in places:
            batch.marks[place] = MARKED
        batch.left -= len(places)
        if batch.current:
            self.account.remove(len(places), 0)

    def _end(self, batch: ReceivedBatch) -> None:
        """Nothing of it is left to be done."""
        if batch.current:
            self.account.remove(batch.left, batch.size)
        _unlink(self.lines, batch)

    def _send(self) -> None:
        if not self.pending and self.link is not None and self.results.has_report:
            self.pending = True
            self.link.wake()


def _unlink(lines: dict[StreamId, list[ReceivedBatch]], batch: ReceivedBatch) -> None:
    batch.end()
    line = lines[batch.stream]
    if len(line) == 1:
        del lines[batch.stream]
    elif line[0] is batch:
        del line[0]
    else:
        del line[next(at for at, each in enumerate(line) if each is batch)]


def _position(batch: ReceivedBatch) -> tuple[int, int]:
    return batch.offset, batch.indexes[0]


def _open_places(batch: ReceivedBatch, first: int, last: int) -> Sequence[int]:
    marks = batch.marks
    if marks is None:
        return range(first, last)
    return [place for place in range(first, last) if not marks[place]]


def _milliseconds(delay: timedelta) -> int:
    if not timedelta(0) <= delay <= MAX_DELAY:
        raise InvalidArgument(f"the delay of a rejection is from 0 to {MAX_DELAY.days} days, not {delay}")
    return delay // timedelta(milliseconds=1)
