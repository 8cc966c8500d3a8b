"""Members of a group: consumers attached to a subscription, and the credit that bounds the events they hold. Pure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...streams.errors import HeadraceError
from ...streams.frames import QueueState, is_status
from ...streams.subscriptions import GapRecord
from .confirmations import Confirmed
from .parcel import Parcel
from .unsent import MAX_BATCHES, PARCEL_OVERHEAD_BYTES, SendAccount, SendBudget

OUTBOX_BYTES = 256 << 10
"""A member gets more events only while fewer bytes than this wait to be sent to it."""
MAX_CREDIT = 1 << 62


def _ignore() -> None: ...


class EventRange(NamedTuple):
    """Events of a stored batch, as a consumer names them."""

    queue: int
    offset: int
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)
    """Index of the first event."""
    count: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (nor is tuple.count)
    """Number of events; 0: all from `index` to the end of the batch."""

    def end(self, stop: int) -> int:
        """Return the index after the last event, in a batch that ends at `stop`."""
        return min(self.index + self.count, stop) if self.count else stop


class MemberStatistics(NamedTuple):
    id: str
    connected: bool
    credit_events: int
    credit_bytes: int
    in_flight_events: int
    in_flight_bytes: int
    needed_bytes: int
    queues: tuple[int, ...]
    blocked: str = ""
    """Why it gets no events although it has credit; empty if it could get some."""


class Member:
    """A consumer. The session that is connected to it grants its credit, sends its outbox, and passes its
    acknowledgements to the group."""

    def __init__(self, id: str, timeout_s: float, account: SendAccount | None = None) -> None:  # noqa: A002, PLR0915 (the word of the field; plain data)
        self.id = id
        self.account = account or SendBudget().account()
        """Counts the bytes in its outbox and in a write."""
        self.retry_at = 0.0
        """Loop time until which it waits for space, if it waits."""
        self.sending_bytes = 0
        """Bytes of the message that is in a write."""
        self._sending = 0
        """Frames in that message."""
        self.timeout_s = timeout_s
        """The member is given up if nothing was heard from it for so long."""
        self.heard_at = 0.0
        self.connected = False
        """It may get events."""
        self.attached = False
        """A consumer is there that can acknowledge."""
        self.credit_events = 0
        self.credit_bytes = 0
        self.needed_events = 0
        """The number of events that its credit must allow, so that a parcel can be sent again; 0: it is enough."""
        self.needed_bytes = 0
        """The number of bytes that its credit must allow, so that the next events can be sent; 0: it is enough."""
        self.wanted_events = self.wanted_bytes = 0
        """The credit with which the next events could be sent together; 0: it has enough."""
        self.in_flight: dict[tuple[int, int], Parcel] = {}
        """Parcels by queue and offset of each of their batches."""
        self.in_flight_events = 0
        self.in_flight_bytes = 0
        """Bytes of parcels. A parcel counts as a whole until all its events are done."""
        self.redriven: dict[tuple[int, int, int], asyncio.Future[HeadraceError | None]] = {}
        """Dead letters that it holds, by queue, offset and index, and the future for the outcome."""
        self.to_resend: deque[Parcel] = deque()
        """After a reconnection: parcels that it held, to be sent again once it has granted credit."""
        self.resend_until = 0.0
        """Loop time until which these parcels wait for enough credit, if another silo divides the credit."""
        self.outbox: deque[bytes] = deque()
        """Frames that wait to be sent."""
        self.outbox_bytes = 0
        self.busy = False
        """A message to it is on its way."""
        self.statuses: list[tuple[int, QueueState, bytes]] = []
        """Statuses of queues that follow the outbox: queue, state and frame. They are sent before the next batch."""
        self.confirmed: dict[int, Confirmed] = {}
        """Confirmations that wait to be sent, by queue."""
        self.queues: tuple[int, ...] = ()
        """Mode bound: the queues that are assigned to it."""
        self.connections = 0
        """How often it connected. Each connection numbers its reports from the start."""
        self.started_us = 0
        """When the consumer was made, by its clock, in microseconds; 0: not known."""
        self.pulls = False
        """It has credit only while a call waits. Events that it holds come again only after its session timeout."""
        self.concurrent = False
        """It works on many streams at once: a parcel has events for about a second of work, not more."""
        self.divides_credit = False
        """It has sessions with several silos, and divides its credit. It is told if credit is needed here."""
        self.waiting = False
        """Events wait because no member has credit. The member was told so, and is not told again before it grants
        some."""
        self.listed = False
        """It is in the line of its group."""
        self.patient = True
        """A batch that does not fit into its credit waits for more credit, which comes as the events that it holds are
        done. If not `patient`, the batch is cut."""
        self.was_answered = False
        """It was told how much credit a whole batch needs, and granted some afterwards: more is not to be expected."""
        self.on_outbox: Callable[[], None] = _ignore
        """Called when there is something to send. Send it later, not within this call."""
        self.on_notice: Callable[[], None] = _ignore
        """Called when there is a status, a confirmation, or a need for credit to tell."""
        self.on_gap: Callable[[GapRecord], None] = lambda _: None
        """Called when the queue deleted events before they were delivered."""
        self.on_gone: Callable[[HeadraceError], None] = lambda _: None
        """Called when it is no longer a member: its session has to end with this error."""

    @property
    def resending(self) -> bool:
        return bool(self.to_resend)

    @property
    def may_acknowledge(self) -> bool:
        """Whether the consumer can still acknowledge the events that it holds. A consumer that pulls can, through any
        silo, until its session timeout."""
        return self.attached or self.pulls

    @property
    def open(self) -> bool:
        """Whether it can get new events."""
        return len(self.in_flight) < self.account.max_batches and self.credited

    @property
    def credited(self) -> bool:
        """Whether it can be sent events, at least those that it holds."""
        has_credit = self.credit_events > 0 and self.credit_bytes > 0
        return self.connected and has_credit and self.outbox_bytes < OUTBOX_BYTES and not self.account.wanted

    @property
    def may_wait(self) -> bool:
        """Whether more credit may follow, so that a batch that does not fit into the credit need not be cut."""
        return self.patient and (bool(self.in_flight) or (self.divides_credit and not self.was_answered))

    def want(self, events: int, size: int) -> None:
        """With so much credit, the events that wait could be sent together."""
        self.wanted_events, self.wanted_bytes = events, size

    def grant(self, events: int, size: int) -> None:
        """Add to its credit, up to `MAX_CREDIT`."""
        self.credit_events = min(self.credit_events + events, MAX_CREDIT)
        self.credit_bytes = min(self.credit_bytes + size, MAX_CREDIT)
        self.was_answered |= self.wanted_events > 0
        self.needed_bytes = self.needed_events = self.wanted_bytes = self.wanted_events = 0
        if self.credit_events > 0 and self.credit_bytes > 0:
            self.waiting = False

    def take_credit(self) -> tuple[int, int]:
        """Take back the credit that is left. Return its events and bytes."""
        left = max(self.credit_events, 0), max(self.credit_bytes, 0)
        self.charge(*left)
        self.waiting = self.was_answered = False
        return left

    def charge(self, events: int, size: int) -> None:
        self.credit_events -= events
        self.credit_bytes -= size

    def put(self, frame: bytes) -> None:
        if self.statuses:
            for _, _, status in self.statuses:
                self._append(status)
            self.statuses.clear()
        self._append(frame)

    def _append(self, frame: bytes) -> None:
        self.outbox.append(frame)
        self.outbox_bytes += len(frame)
        self.account.add(len(frame) + PARCEL_OVERHEAD_BYTES)

    def put_status(self, queue: int, state: QueueState, frame: bytes) -> None:
        """Send the status of a queue, after the outbox. It replaces those that no batch follows, except ENDED: the
        consumer has to know that its events will come again."""
        ended = QueueState.ENDED
        keeps_ended = state is not ended
        self.statuses = [each for each in self.statuses if each[0] != queue or (keeps_ended and each[1] is ended)]
        self.statuses.append((queue, state, frame))

    def confirm(self, queue: int, confirmed: Confirmed) -> None:
        """Reports about a queue are saved."""
        self.confirmed[queue] = confirmed
        self.on_notice()

    def take_confirmed(self) -> dict[int, Confirmed]:
        """Take the confirmations that are to be sent, by queue."""
        confirmed, self.confirmed = self.confirmed, {}
        return confirmed

    def collect(self) -> list[bytes]:
        """Take the frames of the next message: a large one alone, small ones together. Statuses are at its beginning
        only."""
        frames: list[bytes] = []
        size = 0
        outbox = self.outbox
        has_batch = False
        while outbox and (not frames or size + len(outbox[0]) <= OUTBOX_BYTES):
            if not is_status(outbox[0]):
                has_batch = True
            elif has_batch:
                break
            frame = outbox.popleft()
            frames.append(frame)
            size += len(frame)
        self.outbox_bytes -= size
        self.sending_bytes += size
        self._sending += len(frames)
        return frames if has_batch or outbox else frames + self._take_statuses()

    def _take_statuses(self) -> list[bytes]:
        statuses, self.statuses = self.statuses, []
        return [frame for _, _, frame in statuses]

    def sent(self) -> None:
        """The frames that were collected are sent: free their bytes."""
        size = self.sending_bytes + self._sending * PARCEL_OVERHEAD_BYTES
        self.sending_bytes = self._sending = 0
        self.account.free(size)

    def disconnect(self) -> None:
        """The connection is lost. The member keeps its unacknowledged events until it is back, or given up."""
        self.connected = self.attached = self.waiting = False
        self.to_resend.clear()
        self.credit_events = self.credit_bytes = self.needed_bytes = self.wanted_events = self.wanted_bytes = 0
        self.was_answered = False
        self.outbox.clear()
        self.statuses.clear()
        self.confirmed.clear()
        self.outbox_bytes = self.sending_bytes = self._sending = 0
        self.account.close()
        self.on_outbox = self.on_notice = _ignore
        self.on_gap = lambda _: None
        self.on_gone = lambda _: None

    def parcels(self) -> list[Parcel]:
        """Return the parcels that it holds, in the order in which it got them."""
        return list(dict.fromkeys(self.in_flight.values()))

    def _blocked(self) -> str:
        if len(self.in_flight) >= self.account.max_batches:
            return (
                f"it holds {len(self.in_flight):,} batches that are not acknowledged, the most that one consumer may "
                f"hold at present (all consumers of a silo hold at most {MAX_BATCHES:,}): acknowledge some"
            )
        if self.account.wanted or self.outbox_bytes >= OUTBOX_BYTES:
            return (
                f"it does not read fast enough: {self.outbox_bytes + self.sending_bytes:,} bytes wait to be sent to it"
            )
        return ""

    def statistics(self) -> MemberStatistics:
        return MemberStatistics(
            self.id, self.connected, self.credit_events, self.credit_bytes, self.in_flight_events,
            self.in_flight_bytes, self.needed_bytes, self.queues, self._blocked(),
        )  # fmt: skip
