"""Everything that a consumer holds, of all queues: batches that wait for the user, results to be reported, and credit.
Pure, without I/O and clock.

Holdings outlive sessions. A batch belongs to its queue (`client/queue_holdings.py`), whichever session serves that.
Credit is granted so that the events on their way, the events that wait here and those with the user are never more than
`max_events` and `max_bytes`. Acknowledging and rejecting events frees credit, which is granted again by quarters.

The events of a stream are handed out in order. No event is handed out while the user holds it, or after the user
acknowledged it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Protocol

from ..proto.v1 import consumer_pb2 as pb
from ..streams.frames import DeliveredBatch
from ..streams.identity import StreamId
from .held_account import MAX_BYTES, MAX_EVENTS, HeldAccount, SessionStatistics
from .pending_results import SavedMark
from .queue_holdings import QueueHoldings, ReportLink
from .received import QUEUED, TAKEN, ReceivedBatch, ReceivedPart

DRAINING = pb.QueueStatus.STATE_DRAINING
REQUEST_WEIGHT = 20_000
"""Limit of the weight of all reports of one request."""


_Served = tuple[QueueHoldings | None, dict[StreamId, list[ReceivedBatch]], bool]
"""A queue, its lines, and whether it recognises batches. Without a queue: the session does not serve it."""
_NOT_SERVED: _Served = None, {}, False


class ServedQueue(Protocol):
    """The status of a queue in a session: served, or draining."""

    @property
    def queue(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def assigned(self) -> bool: ...


class ConsumerHoldings:
    """What one consumer holds. `on_credit` is called with events and bytes to be granted to the silos."""

    def __init__(
        self,
        max_events: int = MAX_EVENTS,
        max_bytes: int = MAX_BYTES,
        on_credit: Callable[[int, int], None] = lambda _events, _bytes: None,
    ) -> None:
        self.account = HeldAccount(max_events, max_bytes)
        self._on_credit = on_credit
        self._queues: dict[int, QueueHoldings] = {}
        self._waiting = deque[ReceivedBatch]()
        self._arrivals = 0
        self._numbers = count(1)

    # ---- sessions --------------------------------------------------------------------------------------------------

    def serve(self, link: ReportLink, status: ServedQueue) -> None:
        """A session serves a queue, under this epoch and generation. If the queue is going to move, give back the
        batches that the user has not begun."""
        known = self._queues.get(status.queue)
        if known is None:
            known = self._queues[status.queue] = QueueHoldings(status.queue, self.account)
        known.serve(link, status.epoch, status.generation, assigned=status.assigned)
        if status.state == DRAINING and known.link is link:
            known.release()
        self.grant()

    def end(self, link: ReportLink, queue: int) -> None:
        """A session does not serve a queue any more. Batches that wait are dropped, those with the user stay."""
        known = self._queues.get(queue)
        if known is not None and known.link is link:
            known.end_session()
            self.grant()

    def forget_epochs(self) -> None:
        """Accept any epoch again, because all sessions are lost. The silos may be a cluster now and were not before, or
        the reverse: then epochs are numbered anew."""
        for queue in self._queues.values():
            queue.epoch = 0

    def close(self, reason: str) -> None:
        """The user can take and acknowledge nothing more. Earlier acknowledgements can still be reported."""
        self.account.close(reason)
        for queue in self._queues.values():
            queue.drop_waiting()
        self._waiting.clear()

    @property
    def closed(self) -> str:
        """The reason why the user can do nothing more; empty if the user can."""
        return self.account.closed

    @property
    def assignment(self) -> frozenset[int]:
        """The queues that are assigned to this consumer."""
        return frozenset(number for number, queue in self._queues.items() if queue.assigned)

    # ---- from silos ------------------------------------------------------------------------------------------------

    def receive(self, link: ReportLink, delivered: Iterable[DeliveredBatch], size: int) -> None:
        """Take the batches of one response, in order. Their size on the wire is `size` bytes."""
        self._arrivals = arrival = self._arrivals + 1
        received: list[ReceivedBatch] = []
        recognising: set[QueueHoldings] = set()
        served: dict[int, _Served] = {}
        events = batches = 0
        number, (queue, lines, recognises) = -1, _NOT_SERVED
        for each in delivered:
            batch = each[0]
            batches += 1
            events += batch.count
            if each[1] != number:
                number = each[1]
                if number not in served:
                    served[number] = self._served(link, number)
                queue, lines, recognises = served[number]
            if queue is None:
                continue
            one = ReceivedBatch(queue, each, arrival) if each[3] is None else ReceivedPart(queue, each, arrival)
            line = lines.get(batch.stream)
            if recognises or (line is not None and line[-1].offset >= batch.offset):
                recognising.add(queue)
                if (part := queue.recognise(one, batch)) is not None:
                    received.append(part)
                continue
            if line is None:
                lines[batch.stream] = [one]
            else:
                line.append(one)
            received.append(one)
        self.account.receive(batches, events, size)
        self._hand_out(received, recognising, arrival)

    def _served(self, link: ReportLink, number: int) -> _Served:
        queue = self._queues.get(number)
        if queue is None or queue.link is not link:
            return _NOT_SERVED
        return queue, queue.lines, queue.recognises

    def _hand_out(self, received: list[ReceivedBatch], recognising: set[QueueHoldings], arrival: int) -> None:
        if received:
            self._waiting += received
            self.account.hold(sum([one.count for one in received]), sum([one.size for one in received]))
            self.account.handed_out()
        for queue in recognising:
            queue.end_response(arrival)
        if self.closed:
            self.close(self.closed)
        self.grant()

    def saved(self, link: ReportLink, saved: pb.Saved) -> None:
        """A silo confirms that acknowledgements are saved."""
        known = self._queues.get(saved.queue)
        if known is not None and known.link is link:
            known.saved(saved.epoch, saved.number, saved.unconfirmed)
            self.grant()

    def refused(self, link: ReportLink, refusal: pb.Refusal) -> None:
        """An acknowledgement or rejection is without effect."""
        self.account.note_refused()
        known = self._queues.get(refusal.queue)
        if known is not None and known.link is link:
            known.refused(refusal.epoch, refusal.number, refusal.offset)

    def progressed(self, link: ReportLink, needed_bytes: int, *, caught_up: bool) -> None:
        """A silo reports the progress of a session: the bytes that its next event needs, and whether it has more."""
        if caught_up:
            for queue in self._queues.values():
                if queue.link is link:
                    queue.deferred.clear()
        else:
            self.account.starve()
        self.account.need(needed_bytes)
        self.grant()

    # ---- to silos --------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Grant credit, if there is enough to be worth it."""
        events, size = self.account.take_credit()
        if events or size:
            self._on_credit(events, size)

    def begin(self) -> None:
        """New sessions begin, and all earlier ones are over: grant credit anew."""
        events, size = self.account.take_first_credit()
        if events or size:
            self._on_credit(events, size)

    def request(self, link: ReportLink) -> pb.SubscribeRequest | None:
        """Return the next reports for a session, which then count as sent; None if there are none."""
        self.grant()
        pending = [queue for queue in self._queues.values() if queue.pending and queue.link is link]
        if not pending:
            return None
        request, weight = pb.SubscribeRequest(), REQUEST_WEIGHT
        for queue in pending:
            if weight * 2 > REQUEST_WEIGHT:
                weight -= queue.report(request, next(self._numbers), weight)
        return request if weight < REQUEST_WEIGHT else None

    # ---- to the user -----------------------------------------------------------------------------------------------

    def take(self) -> ReceivedBatch | None:
        """Return the next batch, which the user now has; None if none waits."""
        batch = self.next_waiting()
        if batch is not None:
            batch.state = TAKEN
        return batch

    def next_waiting(self) -> ReceivedBatch | None:
        """Return the next batch, which still waits until `begin_batch`; None if there is none."""
        waiting = self._waiting
        while waiting:
            batch = waiting.popleft()
            if batch.state == QUEUED:
                return batch
        self.account.starve_if_low()
        self.grant()
        return None

    @staticmethod
    def begin_batch(batch: ReceivedBatch) -> bool:
        """Take a batch that `next_waiting` returned. Return False if it was dropped meanwhile."""
        if batch.state != QUEUED:
            return False
        batch.state = TAKEN
        return True

    @property
    def waiting(self) -> bool:
        """Whether a batch may wait to be taken."""
        return bool(self._waiting)

    @property
    def is_saved(self) -> bool:
        """Whether everything acknowledged is confirmed as saved."""
        return all(queue.results.is_saved for queue in self._queues.values())

    def mark(self) -> Mapping[int, SavedMark]:
        """Return how much is acknowledged by now, by queue, for `is_saved_until`."""
        return {number: queue.results.mark() for number, queue in self._queues.items()}

    def is_saved_until(self, mark: Mapping[int, SavedMark]) -> bool:
        """Whether everything acknowledged before a mark is confirmed as saved."""
        return all(self._queues[number].results.is_saved_until(each) for number, each in mark.items())

    @property
    def can_close(self) -> bool:
        """Whether sessions that end in order save all acknowledgements. Otherwise some wait for another session, or for
        events that are delivered again."""
        return not any(queue.results.unconfirmed for queue in self._queues.values())

    def statistics(self) -> SessionStatistics:
        unsent = sum(queue.results.unsent for queue in self._queues.values())
        return self.account.statistics(len(self._waiting), unsent)
