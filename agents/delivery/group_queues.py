"""The queues that a group delivers, and the consumers' reports about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...streams.errors import HeadraceError
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Checkpoint
from .confirmations import DoneQuestion
from .group_delivery import GroupDelivery
from .group_redrives import RedriveRejected
from .member import EventRange, Member
from .retries import Failure


class GroupQueues:
    """The deliveries of a group, by queue."""

    def __init__(self) -> None:
        self.deliveries: dict[int, GroupDelivery] = {}

    def is_current(self, queue: int, epoch: int, generation: int) -> bool:
        """Whether a report about events of this epoch and generation may count."""
        delivery = self.deliveries.get(queue)
        return delivery is not None and not delivery.lost and delivery.fence == (epoch, generation)

    @property
    def caught_up(self) -> bool:
        """Whether no event is left that could be delivered now."""
        return all(delivery.idle for delivery in self.deliveries.values())

    def positions(self) -> Mapping[int, Checkpoint]:
        """Return the progress in each queue."""
        return {queue: delivery.progress.checkpoint() for queue, delivery in self.deliveries.items()}

    # ---- reports ---------------------------------------------------------------------------------------------------

    def acknowledge(self, member: Member, events: EventRange, *, up_to: bool = False) -> bool:
        """Events are done; with `up_to` also the earlier events of the stream that the member holds. Return False if
        the member does not hold the events."""
        if member.redriven and _redriven(member, events, None):
            delivery = self.deliveries.get(events.queue)
            if delivery is not None:
                delivery.reports.of(member).begin_redriven(SequenceToken(events.offset, events.index))
            return True
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        member.account.prove()
        at = parcel.find(events.offset)
        piece = parcel.pieces[at]
        if not up_to:
            return parcel.delivery.parcels.done(parcel, at, events.index, events.end(piece.stop))
        if not piece.start <= events.index < piece.stop:
            return False
        parcel.delivery.parcels.done_up_to(parcel, at, events.end(piece.stop))
        return True

    def holds_part(self, member: Member, events: EventRange) -> bool:
        """Whether the member holds the first of these events, but not all: an earlier delivery had more of them."""
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None or not events.count:
            return False
        piece = parcel.pieces[parcel.find(events.offset)]
        return events.end(piece.batch.count) > piece.stop

    def reject(
        self,
        member: Member,
        events: EventRange,
        reason: str,
        delay_s: float | None = None,
        *,
        unavailable: bool = False,
        invalid: bool = False,
    ) -> bool:
        """Events failed, or, with `unavailable`, a dependency of the consumer. These events and the later ones of the
        parcel are delivered again, but `invalid` ones are given up on. Return False if the member does not hold the
        events."""
        if member.redriven and _redriven(member, events, RedriveRejected(reason, unavailable=unavailable)):
            return True
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        member.account.prove()
        at = parcel.find(events.offset)
        failure = Failure(
            events.end(parcel.pieces[at].stop), reason, delay_s=delay_s, unavailable=unavailable, invalid=invalid
        )
        return parcel.delivery.parcels.reject(parcel, at, events.index, failure)

    def release(self, member: Member, events: EventRange) -> bool:
        """The member gives these events back unprocessed, with the later ones of the parcel. It does not count as a
        failure. Return False if the member does not hold the events."""
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        return parcel.delivery.parcels.release(parcel, parcel.find(events.offset), events.index)

    def note_unconfirmed(
        self, member: Member, queue: int, number: int, events: Sequence[tuple[StreamId, int, int, int]]
    ) -> None:
        """The member acknowledged these events in an earlier session: (stream, offset, index of the first, count).
        Those that it holds are done. It is told when all are done in the store, unless `number` is 0. Raises
        InvalidArgument if it asks for too many."""
        delivery = self.deliveries.get(queue)
        if delivery is None:
            return
        if number:
            questions = [DoneQuestion(number, stream, offset, first, first + n) for stream, offset, first, n in events]
            delivery.reports.of(member).ask(questions)
        for stream, offset, first, count in events:
            parcel = member.in_flight.get((queue, offset))
            if parcel is not None and parcel.cursor.stream == stream:
                member.account.prove()
                delivery.parcels.done(parcel, parcel.find(offset), first, first + count)

    def note_applied(self, member: Member, queue: int, number: int) -> None:
        """All reports of the member about a queue are applied, up to this number."""
        if number and (delivery := self.deliveries.get(queue)) is not None:
            delivery.reports.of(member).note_applied(number)
            delivery.progress.note_change()  # the report is to be confirmed, also if it changed no progress


def _redriven(member: Member, events: EventRange, error: HeadraceError | None) -> bool:
    """The member finished a dead letter. Return False if it holds none at this position."""
    outcome = member.redriven.get(events[:3])
    if outcome is None or outcome.done():
        return False
    outcome.set_result(error)
    return True
