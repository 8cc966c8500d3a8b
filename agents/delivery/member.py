"""Members of a group: consumers attached to a subscription, and the credit that bounds what is in their hands. Pure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...streams.errors import HeadraceError
from ...streams.subscriptions import GapRecord
from .parcel import Parcel
from .unsent import PARCEL_OVERHEAD_BYTES, SendAccount, SendBudget

OUTBOX_BYTES = 256 << 10
"""A member is given more while less than this waits to be sent to it."""
MAX_CREDIT = 1 << 62
MAX_IN_FLIGHT = 100_000
"""Batches that a member holds at the most, whatever its credit: what is known of each takes memory."""


def _ignore() -> None: ...


class Events(NamedTuple):
    """Events of a stored batch, as a consumer names them."""

    queue: int
    offset: int
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)
    """The first of them."""
    count: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (nor is tuple.count)
    """How many; 0: all that are left of the batch."""

    def end(self, stop: int) -> int:
        """Index behind the last of them, where the batch ends at `stop`."""
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
    """Why it is given nothing although it has credit; empty if it would be."""


class Member:
    """A consumer. Whoever talks to it (a session) grants its credit, sends what is in its outbox, and says what it has
    acknowledged, through its group."""

    def __init__(self, id: str, timeout_s: float, account: SendAccount | None = None) -> None:  # noqa: A002, PLR0915 (the word of the field; plain data)
        self.id = id
        self.account = account or SendBudget().account()
        """Counts what is in its outbox or in a write."""
        self.retry_at = 0.0
        """Loop time until which it waits for space, if it does."""
        self.sending_bytes = 0
        """Of the message that is in a write."""
        self._sending = 0
        """Parcels in it."""
        self.timeout_s = timeout_s
        """It is gone when it was not heard for so long."""
        self.heard_at = 0.0
        self.connected = False
        """It may be given something."""
        self.attached = False
        """Somebody is there who can acknowledge."""
        self.credit_events = 0
        self.credit_bytes = 0
        self.needed_events = 0
        """The same in events, of what is to be sent again."""
        self.needed_bytes = 0
        """Its credit is too small for the next event, which has so many bytes on the wire; 0: it is not."""
        self.in_flight: dict[tuple[int, int], Parcel] = {}
        """By queue and offset."""
        self.in_flight_events = 0
        self.in_flight_bytes = 0
        """Of parcels, each until all of it is done."""
        self.redriven: dict[tuple[int, int, int], asyncio.Future[HeadraceError | None]] = {}
        """Events delivered out of line, by queue, offset and index."""
        self.to_resend: deque[Parcel] = deque()
        """It came back: what it held is to be sent again, once it has granted credit."""
        self.resend_until = 0.0
        """So long it is waited for enough of it, where another silo divides it."""
        self.outbox: deque[bytes] = deque()
        """Frames that wait to be sent."""
        self.outbox_bytes = 0
        self.busy = False
        """Something of its outbox is on its way."""
        self.queues: tuple[int, ...] = ()
        """Mode bound: which are dealt out to it."""
        self.resumed = False
        """It came back before it was given up."""
        self.connections = 0
        """How often it connected. Requests are numbered for each connection anew."""
        self.applied = 0
        """Number of the last request whose acknowledgements have been applied."""
        self.saved = 0
        """Up to which of those numbers all is durable."""
        self.moves = 0
        """How often the subscription was moved so far, as its session is to be told."""
        self.pulls = False
        """It has credit only while a call waits. What it holds comes again only when its time is up."""
        self.relayed = False
        """Another silo speaks for it, which divides its credit: it is told where credit is needed."""
        self.waiting = False
        """Events wait for which nobody has credit. It is told once, until it grants more."""
        self.listed = False
        """It stands in its group's line."""
        self.patient = True
        """What does not fit into its credit waits until more is granted: what it holds is going to be done."""
        self.on_outbox: Callable[[], None] = _ignore
        """There is something to send: later, not within this call."""
        self.on_notice: Callable[[], None] = _ignore
        """`saved`, `queues` or `moves` changed."""
        self.on_gap: Callable[[GapRecord], None] = lambda _: None
        """Events were gone before they were delivered."""
        self.on_gone: Callable[[HeadraceError], None] = lambda _: None
        """It is a member no more: its session has to end with this error."""

    @property
    def resending(self) -> bool:
        return bool(self.to_resend)

    @property
    def open(self) -> bool:
        """Whether it can be given something."""
        return len(self.in_flight) < MAX_IN_FLIGHT and self.credited

    @property
    def credited(self) -> bool:
        """Whether it can be sent something, if only what it holds."""
        has_credit = self.credit_events > 0 and self.credit_bytes > 0
        return self.connected and has_credit and self.outbox_bytes < OUTBOX_BYTES and not self.account.wanted

    def grant(self, events: int, size: int) -> None:
        """Credit only ever adds, up to `MAX_CREDIT`."""
        self.credit_events = min(self.credit_events + events, MAX_CREDIT)
        self.credit_bytes = min(self.credit_bytes + size, MAX_CREDIT)
        self.needed_bytes = self.needed_events = 0
        if self.credit_events > 0 and self.credit_bytes > 0:
            self.waiting = False

    def reclaim(self) -> tuple[int, int]:
        """Take back what credit is left: events and bytes."""
        left = max(self.credit_events, 0), max(self.credit_bytes, 0)
        self.charge(*left)
        self.waiting = False
        return left

    def charge(self, events: int, size: int) -> None:
        self.credit_events -= events
        self.credit_bytes -= size

    def put(self, frame: bytes) -> None:
        self.outbox.append(frame)
        self.outbox_bytes += len(frame)
        self.account.add(len(frame) + PARCEL_OVERHEAD_BYTES)

    def collect(self) -> list[bytes]:
        """Take the frames of the next message out of the outbox: a large one alone, small ones together."""
        frames: list[bytes] = []
        size = 0
        outbox = self.outbox
        while outbox and (not frames or size + len(outbox[0]) <= OUTBOX_BYTES):
            frame = outbox.popleft()
            frames.append(frame)
            size += len(frame)
        self.outbox_bytes -= size
        self.sending_bytes += size
        self._sending += len(frames)
        return frames

    def collect_all(self) -> list[bytes]:
        """Take all of them."""
        frames = list(self.outbox)
        self.outbox.clear()
        self.sending_bytes += self.outbox_bytes
        self._sending += len(frames)
        self.outbox_bytes = 0
        return frames

    def sent(self) -> None:
        """What was collected is sent."""
        size = self.sending_bytes + self._sending * PARCEL_OVERHEAD_BYTES
        self.sending_bytes = self._sending = 0
        self.account.free(size)

    def disconnect(self) -> None:
        """Its connection is gone: what it has not acknowledged stays in its hands until it is back, or given up."""
        self.connected = self.attached = self.waiting = False
        self.to_resend.clear()
        self.credit_events = self.credit_bytes = self.needed_bytes = 0
        self.outbox.clear()
        self.outbox_bytes = self.sending_bytes = self._sending = 0
        self.account.close()
        self.on_outbox = self.on_notice = _ignore
        self.on_gap = lambda _: None
        self.on_gone = lambda _: None

    def parcels(self) -> list[Parcel]:
        """What it holds, in the order in which it was given."""
        return list(dict.fromkeys(self.in_flight.values()))

    def _blocked(self) -> str:
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return (
                f"it holds {len(self.in_flight):,} batches that are not acknowledged, the most that one consumer may "
                "hold: acknowledge some, or add a consumer"
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
