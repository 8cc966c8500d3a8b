"""Results of the events of one queue that are not reported, or not confirmed as saved. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..proto.v1 import consumer_pb2 as pb
from ..streams.identity import StreamId
from .held_account import HeldAccount
from .received import ReceivedBatch
from .unconfirmed import Acknowledged, UnconfirmedAcknowledgements, runs

_T = TypeVar("_T")

UNCONFIRMED_WEIGHT, REJECTION_WEIGHT = 6, 40
"""Weights of entries in a report, in acknowledgements: a request has to fit into the limit of a silo."""


class RejectedEvents(NamedTuple):
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
    invalid: bool = False


class DeferredRejections:
    """Rejections of events that the present session has not delivered. As a bool: whether there are any.

    A rejection waits until its events are delivered again. If later events of the stream are delivered, its own are
    done elsewhere.
    """

    def __init__(self) -> None:
        self._streams: dict[StreamId, list[RejectedEvents]] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def add(self, rejected: RejectedEvents) -> None:
        """Keep a rejection. Dead letters are delivered again as they are, without it."""
        if not rejected.redriven:
            deferred = self._streams.setdefault(rejected.stream, [])
            deferred.append(rejected)
            deferred.sort(key=lambda each: (each.offset, each.first))

    def take(self, received: ReceivedBatch) -> RejectedEvents | None:
        """Return the first rejection of events that are delivered now, limited to these events."""
        deferred = self._streams.get(received.stream, [])
        last, found = (received.offset, received.indexes[-1]), None
        for rejected in [each for each in deferred if (each.offset, each.first) <= last]:
            deferred.remove(rejected)
            hits = [index for index in received.indexes if rejected.first <= index < rejected.end]
            if rejected.offset == received.offset and hits and found is None:
                found = rejected._replace(first=hits[0], end=hits[-1] + 1)
        if not deferred:
            self._streams.pop(received.stream, None)
        return found

    def clear(self) -> None:
        self._streams.clear()


class SavedMark(NamedTuple):
    """How much was acknowledged at one moment: numbers since the beginning."""

    acks: int
    redriven_acks: int
    doubts: int
    has_unconfirmed: bool


class _Unsaved:
    """Acknowledgements of one report. Those that the silo refused are removed, and still count."""

    def __init__(self, number: int, acks: list[Acknowledged], redriven_acks: list[Acknowledged]) -> None:
        self.number = number
        self.acks = acks
        self.redriven_acks = redriven_acks
        self.ack_count = len(acks)
        self.redriven_ack_count = len(redriven_acks)

    def __len__(self) -> int:
        return len(self.acks) + len(self.redriven_acks)

    def remove(self, offset: int) -> list[Acknowledged]:
        """Remove and return the acknowledgements of streams that have one of this batch. One entry of a report may have
        been for several of a stream."""
        streams = {ack[0] for ack in (*self.acks, *self.redriven_acks) if ack[1] == offset}
        removed = [ack for ack in (*self.acks, *self.redriven_acks) if ack[0] in streams]
        self.acks = [ack for ack in self.acks if ack[0] not in streams]
        self.redriven_acks = [ack for ack in self.redriven_acks if ack[0] not in streams]
        return removed


class PendingResults:
    """Acknowledgements, rejections and releases of one queue."""

    def __init__(self, account: HeldAccount) -> None:
        self.unconfirmed = UnconfirmedAcknowledgements()
        """Acknowledgements for earlier sessions."""
        self._account = account
        self._acks: list[Acknowledged] = []
        self._redriven_acks: list[Acknowledged] = []
        """Never reported by one acknowledgement together with others."""
        self._rejections: list[RejectedEvents] = []
        self._released: list[tuple[StreamId, int, int]] = []
        """Stream, offset and index."""
        self._unsaved = deque[_Unsaved]()
        self._settled_acks = 0
        """Number of acknowledgements that are saved, or were named as unconfirmed, since the beginning."""
        self._settled_redriven_acks = 0
        self._doubts = 0
        """How often a session ended, or a silo refused acknowledgements."""
        self._again = SavedMark(0, 0, 0, has_unconfirmed=False)
        """After the last event that was acknowledged again."""

    # ---- results -----------------------------------------------------------------------------------------------------

    def acknowledge(self, ack: Acknowledged) -> None:
        self._acks.append(ack)

    def acknowledge_indexes(self, batch: ReceivedBatch, indexes: Sequence[int]) -> None:
        """Add events of a batch, by their ascending indexes."""
        acks = _acknowledged(batch, indexes)
        if batch.redriven:
            self._redriven_acks += acks
        elif self._acks and (joined := _joined(self._acks[-1], acks[0])):
            self._acks[-1:] = [joined, *acks[1:]]
        else:
            self._acks += acks

    def acknowledge_again(self, batch: ReceivedBatch, indexes: Sequence[int]) -> None:
        """Add events that were delivered again although they were acknowledged."""
        self.acknowledge_indexes(batch, indexes)
        self._again = self.mark()

    def carry(self, batch: ReceivedBatch, indexes: Sequence[int]) -> None:
        """Add acknowledgements of events that the present session has not delivered."""
        acks = _acknowledged(batch, indexes)
        self.unconfirmed.add(acks)
        self._account.note_unconfirmed(len(acks))

    def take_unconfirmed(self, offset: int, indexes: Sequence[int]) -> set[int]:
        """Of a batch that is delivered again with these `indexes`, remove and return the acknowledged indexes."""
        before = len(self.unconfirmed)
        found = self.unconfirmed.take(offset, indexes)
        self._account.note_unconfirmed(len(self.unconfirmed) - before)
        return found

    def reject(self, rejected: RejectedEvents) -> None:
        self._rejections.append(rejected)

    def release(self, stream: StreamId, offset: int, index: int) -> None:
        """Give back this event and the later ones of its parcel, unprocessed."""
        self._released.append((stream, offset, index))

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def end_session(self) -> Sequence[RejectedEvents]:
        """Name all acknowledgements as unconfirmed in the next session. Return the rejections that were not sent."""
        before = len(self.unconfirmed)
        self.unconfirmed.end_session()
        self._doubts += 1
        while self._unsaved:
            unsaved = self._settle_first()
            self.unconfirmed.add(unsaved.acks)
            self.unconfirmed.add(unsaved.redriven_acks)
        self.unconfirmed.add(self._acks)
        self.unconfirmed.add(self._redriven_acks)
        self._settle(len(self._acks), len(self._redriven_acks))
        self._account.note_unconfirmed(len(self.unconfirmed) - before)
        rejections = self._rejections
        self._acks, self._redriven_acks, self._rejections, self._released = [], [], [], []
        return rejections

    def forget(self) -> None:
        """Drop all results: after a seek they are void."""
        while self._unsaved:
            self._settle_first()
        self._settle(len(self._acks), len(self._redriven_acks))
        self._account.note_unconfirmed(-len(self.unconfirmed))
        self.unconfirmed = UnconfirmedAcknowledgements()
        self._acks, self._redriven_acks, self._rejections, self._released = [], [], [], []

    def confirm(self, number: int, unconfirmed: int) -> None:
        """Acknowledgements of reports up to this number are saved, and those named up to the other number."""
        while self._unsaved and self._unsaved[0].number <= number:
            self._settle_first()
        if self.unconfirmed:
            before = len(self.unconfirmed)
            self.unconfirmed.confirm(unconfirmed)
            self._account.note_unconfirmed(len(self.unconfirmed) - before)

    def refuse(self, number: int, offset: int) -> None:
        """The silo refused the acknowledgements of a batch in this report: they are not saved with it."""
        for unsaved in self._unsaved:
            if unsaved.number == number and (refused := unsaved.remove(offset)):
                self._doubts += 1
                self.unconfirmed.add(refused)
                self._account.note_unsaved(-len(refused))
                self._account.note_unconfirmed(len(refused))

    def _settle_first(self) -> _Unsaved:
        """The first report does not wait for its confirmation any more."""
        unsaved = self._unsaved.popleft()
        self._account.note_unsaved(-len(unsaved))
        self._settle(unsaved.ack_count, unsaved.redriven_ack_count)
        return unsaved

    def _settle(self, acks: int, redriven_acks: int) -> None:
        self._settled_acks += acks
        self._settled_redriven_acks += redriven_acks

    @property
    def is_saved(self) -> bool:
        """Whether everything acknowledged is confirmed as saved."""
        return not (self._acks or self._redriven_acks or self._unsaved or self.unconfirmed)

    def mark(self) -> SavedMark:
        """Return how much is acknowledged by now, for `is_saved_until`."""
        acks = self._settled_acks + len(self._acks) + sum(each.ack_count for each in self._unsaved)
        redriven = len(self._redriven_acks) + sum(each.redriven_ack_count for each in self._unsaved)
        redriven += self._settled_redriven_acks
        return SavedMark(acks, redriven, self._doubts, bool(self.unconfirmed))

    def is_saved_until(self, mark: SavedMark) -> bool:
        """Whether everything acknowledged before a mark is confirmed as saved.

        The acknowledgements that were unconfirmed at the mark, or have become so since, are not counted one by one: all
        have to be confirmed, also those of events that were delivered again and acknowledged again.
        """
        if not self._has_settled(mark):
            return False
        uncertain = mark.has_unconfirmed or self._doubts != mark.doubts
        return not uncertain or (not self.unconfirmed and self._has_settled(self._again))

    def _has_settled(self, mark: SavedMark) -> bool:
        return self._settled_acks >= mark.acks and self._settled_redriven_acks >= mark.redriven_acks

    @property
    def unsent(self) -> int:
        """Number of acknowledgements that are not sent yet."""
        return len(self._acks) + len(self._redriven_acks)

    # ---- reports -----------------------------------------------------------------------------------------------------

    @property
    def has_report(self) -> bool:
        """Whether there is something to report."""
        unsent = self._acks or self._redriven_acks or self._rejections or self._released
        return bool(unsent) or self.unconfirmed.can_name

    def fill(
        self, report: pb.QueueReport, number: int, limit: int, lines: Mapping[StreamId, Sequence[ReceivedBatch]]
    ) -> int:
        """Add results to a report, which then count as sent. Return their weight, which is about `limit` at most; 0 if
        there are none. `lines` are the unfinished batches of each stream."""
        weight = self._add_unconfirmed(report, number, limit // UNCONFIRMED_WEIGHT) * UNCONFIRMED_WEIGHT
        acks, self._acks = _cut(self._acks, limit - weight)
        redriven, self._redriven_acks = _cut(self._redriven_acks, limit - weight - len(acks))
        rejections, released = list[RejectedEvents](), list[tuple[StreamId, int, int]]()
        if not (self._acks or self._redriven_acks):  # rejections come after the acknowledgements made before
            left = limit - weight - len(acks) - len(redriven)
            rejections, self._rejections = _cut(self._rejections, left // REJECTION_WEIGHT)
            released, self._released = _cut(self._released, left)
        if acks or redriven:
            report.number = number
            self._unsaved.append(_Unsaved(number, acks, redriven))
            self._account.note_unsaved(len(acks) + len(redriven))
        unmerged = {stream for stream, *_ in (*rejections, *released, *self._rejections, *self._released)}
        _add_acknowledgements(report, _merged(acks, lines, unmerged))
        _add_acknowledgements(report, [(*ack[1:], False) for ack in redriven])
        for each in rejections:
            report.rejections.add(
                offset=each.offset, index=each.first, count=each.end - each.first, reason=each.reason,
                delay_ms=each.delay_ms, unavailable=each.unavailable, invalid=each.invalid,
            )  # fmt: skip
        for _, offset, first in released:
            report.released.add(offset=offset, index=first)
        return weight + len(acks) + len(redriven) + len(rejections) * REJECTION_WEIGHT + len(released)

    def _add_unconfirmed(self, report: pb.QueueReport, number: int, limit: int) -> int:
        named = self.unconfirmed.name(number, limit)
        for stream, offset, first, count in named:
            report.unconfirmed.add(namespace=stream.namespace, key=stream.key, offset=offset, index=first, count=count)
        if named:
            report.number = number
        return len(named)


_Merged = tuple[int, int, int, bool]
"""Offset, first index, count, up_to."""


def _merged(
    acks: Sequence[Acknowledged], lines: Mapping[StreamId, Sequence[ReceivedBatch]], unmerged: set[StreamId]
) -> list[_Merged]:
    """Return one acknowledgement for several of a stream in a row, if no earlier event of the stream is held."""
    merged: list[_Merged] = []
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
        _, offset, first, count = max(run, key=_end)
        line = lines.get(stream)
        if stream in unmerged or (line is not None and line[0].offset <= offset):
            merged += [(*ack[1:], False) for ack in run]
        else:
            merged.append((offset, first, count, True))
    return merged


def _add_acknowledgements(report: pb.QueueReport, acks: Sequence[_Merged]) -> None:
    acknowledge = report.acknowledgements.add
    for offset, first, count, up_to in acks:
        if first or up_to:
            acknowledge(offset=offset, index=first, count=count, up_to=up_to)
        else:
            acknowledge(offset=offset, count=count)


def _acknowledged(batch: ReceivedBatch, indexes: Sequence[int]) -> list[Acknowledged]:
    return [(batch.stream, batch.offset, first, end - first) for first, end in runs(indexes)]


def _cut(items: list[_T], limit: int) -> tuple[list[_T], list[_T]]:
    """Return the first items, and the rest."""
    limit = max(limit, 0)
    return (items, []) if len(items) <= limit else (items[:limit], items[limit:])


def _joined(before: Acknowledged, after: Acknowledged) -> Acknowledged | None:
    """Return both in one if the second continues the first."""
    follows = before[2] + before[3] == after[2] and before[:2] == after[:2]
    return (*before[:3], before[3] + after[3]) if follows else None


def _end(ack: Acknowledged) -> tuple[int, int]:
    """Offset, and index after the last event."""
    return ack[1], ack[2] + ack[3]
