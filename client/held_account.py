"""How much a consumer holds, and how much more it may be sent. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ..streams.errors import InvalidArgument, NotSupported
from ..streams.transactions import ProviderOrigin

MAX_EVENTS = 10_000
"""Default for the most events that a consumer holds."""
MAX_BYTES = 8 << 20
"""The same in bytes."""
MAX_UNSAVED = 200_000
"""If more acknowledgements are not saved, the silos get no more credit."""


class SessionStatistics(NamedTuple):
    """Counts of one consumer."""

    received_events: int
    received_batches: int
    acknowledged_events: int
    rejected_events: int
    """Includes the events that were given back because they followed a rejected one."""
    recognised_events: int
    """Events that were delivered again after a session was lost, and were not handed out twice."""
    refused: int
    """Acknowledgements and rejections without effect, because the silo had taken the events back."""
    late: int
    """The same, noticed by the client."""
    held_events: int
    """Events that wait here or are with the user."""
    held_bytes: int
    waiting_batches: int
    credit_events: int
    credit_bytes: int
    unsaved: int
    """Acknowledgements that are not confirmed as saved."""


def check_origin(origin: ProviderOrigin | None) -> ProviderOrigin:
    """Return the origin of a consumer's events. Raises NotSupported if effects cannot be applied to them."""
    if origin is None or not origin.origin:
        raise NotSupported(
            "effects are for batches of `subscribe`, not of `pull`, and need a silo that tells its provider's id"
        )
    if not origin.shared:
        raise NotSupported(f"subscription {origin.subscription!r} has mode broadcast: effects are for other modes")
    return origin


class HeldAccount:
    """Events and bytes that are held, credit that is granted, and counts. All queues of a consumer share it.

    A batch is held from its arrival until it is done or taken back. A batch that stays with the user when its queue is
    not served any more is held again as soon as it is delivered again.
    """

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        if min(max_events, max_bytes) < 1:
            raise InvalidArgument(
                f"a consumer holds at least one event and one byte: max_events={max_events}, max_bytes={max_bytes}"
            )
        self.max_events = max_events
        self.max_bytes = max_bytes
        """It grows to the size of a single event that is larger."""
        self._few_events = max_events - max_events // 4
        self._few_bytes = max_bytes - max_bytes // 4
        self.closed = ""
        """The reason why the user cannot take or acknowledge any more; empty while it is possible."""
        self.origin: ProviderOrigin | None = None
        """Set when a silo has accepted the consumer."""
        self.is_congested = False
        """Whether so much credit can be granted that the loop should turn."""
        self._starved = False
        self._events = self._bytes = 0
        self._credit_events = self._credit_bytes = 0
        self._unsaved = self._unconfirmed = 0
        self._received_events = self._received_batches = self._acknowledged = self._rejected = 0
        self._recognised = self._refused = self._late = 0

    def close(self, reason: str) -> None:
        """Note why nothing can be taken or acknowledged any more. The first reason stays."""
        self.closed = self.closed or reason

    # ---- held events ----------------------------------------------------------------------------------------------

    def receive(self, batches: int, events: int, size: int) -> None:
        """Note that a silo used credit for so many batches and events, and so many bytes on the wire."""
        self._credit_events -= events
        self._credit_bytes -= size
        self._received_events += events
        self._received_batches += batches

    def hold(self, events: int, size: int) -> None:
        self._events += events
        self._bytes += size

    def remove(self, events: int, size: int) -> None:
        """Note that so much is not held any more."""
        self._events = held = self._events - events
        self._bytes = held_bytes = self._bytes - size
        self.is_congested = (
            held + self._credit_events < self._few_events or held_bytes + self._credit_bytes < self._few_bytes
        )

    def acknowledge(self, events: int, size: int) -> None:
        """Note that a batch of so many events and bytes is acknowledged, and not held any more."""
        self._acknowledged += events
        self.remove(events, size)

    # ---- credit ----------------------------------------------------------------------------------------------------

    def starve(self) -> None:
        """Note that credit is wanted even if it is less than a quarter."""
        self._starved = True

    def starve_if_low(self) -> None:
        """The user wants a batch and none waits: note it, unless the silos have a quarter of the credit."""
        if self._credit_events * 4 < self.max_events or self._credit_bytes * 4 < self.max_bytes:
            self._starved = True

    def need(self, size: int) -> None:
        """Note that a single event needs credit for so many bytes."""
        if size > self.max_bytes:
            self.max_bytes, self._few_bytes = size, size - size // 4

    def take_credit(self) -> tuple[int, int]:
        """Return events and bytes to be granted now, which then count as granted; zeros if it is not worth it."""
        self.is_congested = False
        return (0, 0) if self.closed else self._take_credit()

    def take_first_credit(self) -> tuple[int, int]:
        """As `take_credit`, for new sessions: earlier ones that had credit are over. A consumer that is closed grants
        credit only to get the events again that it acknowledged in earlier sessions."""
        self._credit_events = self._credit_bytes = 0
        self._starved = True
        return (0, 0) if self.closed and not self._unconfirmed else self._take_credit()

    def _take_credit(self) -> tuple[int, int]:
        if self._unsaved > max(MAX_UNSAVED - self._unconfirmed, MAX_EVENTS):
            return 0, 0
        events = self.max_events - self._events - self._credit_events
        size = self.max_bytes - self._bytes - self._credit_bytes
        if not (self._starved or events * 4 >= self.max_events or size * 4 >= self.max_bytes):
            return 0, 0
        events, size = max(events, 0), max(size, 0)
        if events or size:
            self._starved = False
        self._credit_events += events
        self._credit_bytes += size
        return events, size

    # ---- counts ----------------------------------------------------------------------------------------------------

    def handed_out(self) -> None:
        """Batches wait for the user."""
        self._starved = False

    def note_unsaved(self, acknowledgements: int) -> None:
        """Add to the acknowledgements that were sent in present sessions and are not saved."""
        self._unsaved += acknowledgements

    def note_unconfirmed(self, acknowledgements: int) -> None:
        """Add to the acknowledgements of earlier sessions that are not confirmed."""
        self._unconfirmed += acknowledgements

    def note_acknowledged(self, events: int) -> None:
        self._acknowledged += events

    def note_rejected(self, events: int) -> None:
        self._rejected += events

    def note_recognised(self, events: int) -> None:
        self._recognised += events

    def note_refused(self) -> None:
        self._refused += 1

    def note_late(self) -> None:
        self._late += 1

    def statistics(self, waiting: int, unsent: int) -> SessionStatistics:
        return SessionStatistics(
            self._received_events,
            self._received_batches,
            self._acknowledged,
            self._rejected,
            self._recognised,
            self._refused,
            self._late,
            self._events,
            self._bytes,
            waiting,
            self._credit_events,
            self._credit_bytes,
            self._unsaved + self._unconfirmed + unsent,
        )
