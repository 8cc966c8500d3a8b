"""The events of one queue that a consumer holds, and the results that it has not reported yet. Pure.

Sessions come and go: another silo may serve the queue, or the same one again. Batches that the user has stay with the
user. They are recognised by their position when they are delivered again, and are not handed out twice.

- **Acknowledgements** are kept until the silo confirms that they are saved. If the session ends before, they are named
  as unconfirmed in the next one. If such an event is delivered again, it is acknowledged again and not handed out.
- **A rejection** gives back the rejected events and all later events of their parcel. They are delivered again. If the
  present session has not delivered the rejected events, the rejection is deferred until it does: otherwise the silo
  could be delivering them already.
- **A seek** raises the generation. Then everything that was delivered before is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from ..proto.v1 import consumer_pb2 as pb
from ..streams.errors import Closed, InvalidArgument
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from .held_account import HeldAccount
from .received import MARKED, QUEUED, TAKEN, ReceivedBatch, ReceivedPart
from .unconfirmed import Acknowledged, UnconfirmedAcknowledgements, runs

_T = TypeVar("_T")

UNCONFIRMED_WEIGHT, REJECTION_WEIGHT = 6, 40
"""Weights of entries in a report, in acknowledgements: a request has to fit into the limit of a silo."""
MAX_REASON = 1000
"""Characters that are kept of the reason of a rejection."""
MAX_DELAY = timedelta(days=7)
"""The longest delay of a rejection."""


class ReportLink(Protocol):
    """A session with a silo."""

    def wake(self) -> None:
        """Reports wait to be sent."""


class Rejected(NamedTuple):
    """Events of one batch that the user rejected."""

    stream: StreamId
    offset: int
    first: int
    end: int
    """Index after the last event that fails with the first."""
    reason: str
    delay_ms: int | None
    unavailable: bool
    redriven: bool


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
        self.lines: dict[StreamId, list[ReceivedBatch]] = {}
        """Batches with unfinished events, by stream and in order of position."""
        self.pending = False
        """Whether the link was told that there is a report."""
        self._acks: list[Acknowledged] = []
        self._redriven_acks: list[Acknowledged] = []
        """Never reported by one acknowledgement together with others."""
        self._rejections: list[Rejected] = []
        self._released: list[tuple[StreamId, int, int]] = []
        self._unsaved = deque[tuple[int, list[Acknowledged]]]()
        """Numbers of reports, and their acknowledgements."""
        self._unconfirmed = UnconfirmedAcknowledgements()
        self._deferred: dict[StreamId, list[Rejected]] = {}
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
        if self._unconfirmed:
            self._send()

    def release(self) -> None:
        """The queue is going to move: give back all batches that the user has not begun."""
        for line in list(self.lines.values()):
            parcel = 0
            for batch in list(line):
                begins = batch.state == QUEUED and (batch.redriven or batch.arrival != parcel)
                if begins:
                    self._released.append((batch.stream, *_position(batch)))
                    parcel = parcel if batch.redriven else batch.arrival
                if begins or (batch.arrival == parcel and not batch.redriven):
                    self._end(batch)
        if self._released:
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
        self._unconfirmed.end_session()
        before = len(self._unconfirmed)
        for _, acks in self._unsaved:
            self.account.note_unsaved(-len(acks))
            self._unconfirmed.add(acks)
        self._unconfirmed.add(self._acks)
        self._unconfirmed.add(self._redriven_acks)
        self.account.note_unconfirmed(len(self._unconfirmed) - before)
        for rejected in self._rejections:
            self._defer(rejected)
        self._unsaved.clear()
        self._acks, self._redriven_acks, self._rejections, self._released = [], [], [], []

    def drop_waiting(self) -> None:
        """Drop the batches that the user has not taken."""
        for line in list(self.lines.values()):
            for batch in [batch for batch in line if batch.state == QUEUED]:
                self._end(batch)

    def _forget(self) -> None:
        """After a seek, everything that was delivered before is void, and may be delivered again on purpose."""
        for batch in [batch for line in self.lines.values() for batch in line]:
            self._end(batch)
        self.account.note_unsaved(-sum(len(acks) for _, acks in self._unsaved))
        self.account.note_unconfirmed(-len(self._unconfirmed))
        self._unsaved.clear()
        self._unconfirmed = UnconfirmedAcknowledgements()
        self._acks, self._redriven_acks, self._rejections, self._released = [], [], [], []
        self._deferred.clear()

    # ---- the state of acknowledgements ------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether everything acknowledged is confirmed as saved."""
        return not (self._acks or self._redriven_acks or self._unsaved or self._unconfirmed)

    @property
    def awaits_session(self) -> bool:
        """Whether closing the present session would not save all acknowledgements."""
        return bool(self._unconfirmed)

    @property
    def unsent(self) -> int:
        """Acknowledgements that are not sent yet."""
        return len(self._acks) + len(self._redriven_acks)

    def saved(self, epoch: int, number: int, unconfirmed: int) -> None:
        """Acknowledgements of reports up to this number are saved, and those named up to the other number."""
        if epoch != self.epoch:
            return
        unsaved = self._unsaved
        while unsaved and unsaved[0][0] <= number:
            self.account.note_unsaved(-len(unsaved.popleft()[1]))
        if self._unconfirmed:
            before = len(self._unconfirmed)
            self._unconfirmed.confirm(unconfirmed)
            self.account.note_unconfirmed(len(self._unconfirmed) - before)
            if self._unconfirmed.can_name:
                self._send()

    def caught_up(self) -> None:
        """Nothing is left to be delivered: deferred rejections have no events."""
        self._deferred.clear()

    # ---- delivery ---------------------------------------------------------------------------------------------------

    @property
    def recognises(self) -> bool:
        """Whether a batch may contain events that are acknowledged or rejected already."""
        return bool(self._unconfirmed or self._deferred)

    def recognise(self, received: ReceivedBatch, batch: EventBatch) -> ReceivedBatch | None:
        """Return the part of a batch that is to be handed out: events that are neither acknowledged nor rejected nor
        held already. None if there are none."""
        before = len(self._unconfirmed)
        known = self._unconfirmed.take(received.offset, received.indexes)
        self.account.note_unconfirmed(len(self._unconfirmed) - before)
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
            self._done(received, again)
        if not wanted:
            return None
        if len(wanted) < received.count:
            received = ReceivedPart.some(received, batch, wanted)
        self._insert(received)
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
        deferred = self._deferred.get(received.stream)
        if deferred is None or received.redriven or received.stream in self._given_back:
            return None
        indexes = received.indexes
        last = received.offset, indexes[-1]
        for rejected in [each for each in deferred if (each.offset, each.first) <= last]:
            deferred.remove(rejected)  # it is reported now, or its events are done elsewhere
            hits = [index for index in indexes if rejected.first <= index < rejected.end]
            if rejected.offset == received.offset and hits and received.stream not in self._given_back:
                self._given_back[received.stream] = received.offset, hits[0]
                self._rejections.append(rejected._replace(first=hits[0], end=hits[-1] + 1))
                self._send()
        if not deferred:
            del self._deferred[received.stream]
        return self._given_back.get(received.stream, (0, None))[1]

    def end_response(self, arrival: int) -> None:
        """All batches of a response are received: of parcels that were rejected meanwhile, drop the later batches."""
        given_back, self._given_back = self._given_back, {}
        for stream, rejected in given_back.items():
            for batch in self.lines.get(stream, ())[:]:
                if batch.arrival == arrival and not batch.redriven and _position(batch) > rejected:
                    self._end(batch)

    def _insert(self, received: ReceivedBatch) -> None:
        line = self.lines.setdefault(received.stream, [])
        position = _position(received)
        at = len(line)
        while at and _position(line[at - 1]) > position:
            at -= 1
        line.insert(at, received)

    # ---- results (`BatchHolder`) ------------------------------------------------------------------------------------

    def acknowledge(self, batch: ReceivedBatch) -> None:
        """Acknowledge all events that are left."""
        account = self.account
        if batch.state != TAKEN or account.closed:
            self._refuse_late()
        elif batch.plain:  # as nearly all are
            self._acks.append((batch.stream, batch.offset, 0, batch.count))
            if not self.pending:
                self._send()
            account.acknowledge(batch.left, batch.size)
            self._unlink(batch)
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
        for earlier in list(self.lines[batch.stream]):
            if earlier is batch:
                break
            if earlier.state == TAKEN:
                self.acknowledge(earlier)
        self.acknowledge_some(batch, 0, last)

    def reject(
        self, batch: ReceivedBatch, place: int | None, reason: str, delay: timedelta | None, unavailable: bool = False
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
        rejected = Rejected(
            batch.stream, batch.offset, indexes[first], end, reason[:MAX_REASON], delay_ms, unavailable, batch.redriven
        )
        if first < batch.current:
            self._rejections.append(rejected)
            self._send()
        else:
            self._defer(rejected)
        self._give_back_after(batch)
        self.account.note_rejected(len(places))
        self._mark(batch, places)
        if not batch.left:
            self._end(batch)

    def _defer(self, rejected: Rejected) -> None:
        """Report the rejection when its events are delivered again. A dead letter is delivered again as it is."""
        if not rejected.redriven:
            deferred = self._deferred.setdefault(rejected.stream, [])
            deferred.append(rejected)
            deferred.sort(key=_rejected_position)

    def _give_back_after(self, batch: ReceivedBatch) -> None:
        """Later events of the parcel are not the consumer's any more."""
        if batch.redriven:
            return
        line = self.lines[batch.stream]
        at = next(place for place, each in enumerate(line) if each is batch) + 1
        for each in [each for each in line[at:] if each.arrival == batch.arrival and not each.redriven]:
            self.account.note_rejected(each.left)
            self._end(each)

    def _refuse_late(self) -> None:
        if self.account.closed:
            raise Closed(self.account.closed)
        self.account.note_late()

    def _note(self, batch: ReceivedBatch, places: Sequence[int]) -> None:
        """Note that the events at these places are acknowledged. The present session may not have delivered all."""
        indexes, current = batch.indexes, batch.current
        self._done(batch, [indexes[place] for place in places if place < current])
        if carried := [indexes[place] for place in places if place >= current]:
            acks = [(batch.stream, batch.offset, first, end - first) for first, end in runs(carried)]
            self._unconfirmed.add(acks)
            self.account.note_unconfirmed(len(acks))
            self._send()

    def _done(self, batch: ReceivedBatch, indexes: Sequence[int]) -> None:
        """Note that these events, which the present session delivered, are acknowledged."""
        if not indexes:
            return
        acks = [(batch.stream, batch.offset, first, end - first) for first, end in runs(indexes)]
        if batch.redriven:
            self._redriven_acks += acks
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
        if batch.current:
            self.account.remove(len(places), 0)

    def _end(self, batch: ReceivedBatch) -> None:
        """Nothing of it is left to be done."""
        if batch.current:
            self.account.remove(batch.left, batch.size)
        self._unlink(batch)

    def _unlink(self, batch: ReceivedBatch) -> None:
        batch.end()
        line = self.lines[batch.stream]
        if len(line) == 1:
            del self.lines[batch.stream]
        elif line[0] is batch:
            del line[0]
        else:
            del line[next(at for at, each in enumerate(line) if each is batch)]

    def _send(self) -> None:
        if not self.pending and self.link is not None:
            self.pending = True
            self.link.wake()

    # ---- reports ----------------------------------------------------------------------------------------------------

    @property
    def _has_report(self) -> bool:
        return bool(
            self._acks or self._redriven_acks or self._rejections or self._released or self._unconfirmed.can_name
        )

    def report(self, number: int, limit: int) -> tuple[pb.QueueReport, int] | None:
        """Return the next report, of at most about this weight, and its weight. It counts as sent. None if there is
        nothing to report."""
        named = self._unconfirmed.name(number, limit // UNCONFIRMED_WEIGHT)
        weight = len(named) * UNCONFIRMED_WEIGHT
        acks, self._acks = _cut(self._acks, limit - weight)
        redriven, self._redriven_acks = _cut(self._redriven_acks, limit - weight - len(acks))
        weight += len(acks) + len(redriven)
        rejections, released = list[Rejected](), list[tuple[StreamId, int, int]]()
        if not (self._acks or self._redriven_acks):  # rejections come after the acknowledgements made before
            rejections, self._rejections = _cut(self._rejections, (limit - weight) // REJECTION_WEIGHT)
            weight += len(rejections) * REJECTION_WEIGHT
            released, self._released = _cut(self._released, limit - weight)
        self.pending = self._has_report
        if not (named or acks or redriven or rejections or released):
            return None
        if acks or redriven:
            self._unsaved.append((number, acks + redriven if redriven else acks))
            self.account.note_unsaved(len(acks) + len(redriven))
        report = pb.QueueReport(queue=self.number, epoch=self.epoch, generation=self.generation or 0)
        if acks or redriven or named:
            report.number = number
        for stream, offset, first, count in named:
            report.unconfirmed.add(namespace=stream.namespace, key=stream.key, offset=offset, index=first, count=count)
        acknowledge = report.acknowledgements.add
        for _, offset, first, count in redriven:
            acknowledge(offset=offset, index=first, count=count)
        unmerged = {stream for stream, *_ in (*rejections, *released, *self._rejections, *self._released)}
        for offset, first, count, up_to in self._merged(acks, unmerged):
            if first or up_to:
                acknowledge(offset=offset, index=first, count=count, up_to=up_to)
            else:
                acknowledge(offset=offset, count=count)
        for each in rejections:
            report.rejections.add(
                offset=each.offset, index=each.first, count=each.end - each.first, reason=each.reason,
                delay_ms=each.delay_ms, unavailable=each.unavailable,
            )  # fmt: skip
        for _, offset, first in released:
            report.released.add(offset=offset, index=first)
        return report, weight + len(released)

    def _merged(self, acks: list[Acknowledged], unmerged: set[StreamId]) -> list[tuple[int, int, int, bool]]:
        """Return offset, first index, count, up_to: one for several of a stream in a row, if no earlier event of the
        stream is held."""
        merged: list[tuple[int, int, int, bool]] = []
        at, end = 0, len(acks)
        while at < end:
            stream, offset, first, count = acks[at]
            at += 1
            if at == end or acks[at][0] is not stream:
                merged.append((offset, first, count, False))
                continue
            start = at - 1
            while at < end and acks[at][0] is stream:
                at += 1
            run = acks[start:at]
            _, offset, first, count = max(run, key=_acknowledged_position)
            line = self.lines.get(stream)
            if stream in unmerged or (line is not None and line[0].offset <= offset):
                merged += [(*ack[1:], False) for ack in run]
            else:
                merged.append((offset, first, count, True))
        return merged


def _cut(items: list[_T], limit: int) -> tuple[list[_T], list[_T]]:
    """Return the first items, and the rest."""
    limit = max(limit, 0)
    return (items, []) if len(items) <= limit else (items[:limit], items[limit:])


def _joined(before: Acknowledged, after: Acknowledged) -> Acknowledged | None:
    """Return both in one if the second continues the first."""
    follows = before[2] + before[3] == after[2] and before[:2] == after[:2]
    return (*before[:3], before[3] + after[3]) if follows else None


def _position(batch: ReceivedBatch) -> tuple[int, int]:
    return batch.offset, batch.indexes[0]


def _acknowledged_position(ack: Acknowledged) -> tuple[int, int]:
    return ack[1], ack[2]


def _rejected_position(rejected: Rejected) -> tuple[int, int]:
    return rejected.offset, rejected.first


def _open_places(batch: ReceivedBatch, first: int, last: int) -> Sequence[int]:
    marks = batch.marks
    if marks is None:
        return range(first, last)
    return [place for place in range(first, last) if not marks[place]]


def _milliseconds(delay: timedelta) -> int:
    if not timedelta(0) <= delay <= MAX_DELAY:
        raise InvalidArgument(f"the delay of a rejection is from 0 to {MAX_DELAY.days} days, not {delay}")
    return delay // timedelta(milliseconds=1)
