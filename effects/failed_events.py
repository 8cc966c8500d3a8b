"""Statements on events that failed. All run in a transaction of the caller, which has locked the position of the
stream, so that two transactions never decide about the same event.

There is one row for each event that failed. Its outcome is `unapplied`, `applied` or `unknown`. Nothing is known of an
event without a row: it may have become a dead letter before the subscription had effects, or the database was restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from sqlalchemy import Connection, text

from ..streams.clock import now_us
from ..streams.events import Event
from ..streams.identity import SequenceToken
from ..streams.transactions import EffectScope
from .schema import APPLIED, UNAPPLIED, UNKNOWN

_KEY = "origin = :origin AND subscription = :subscription AND stream = :stream"
_EVENT = f"{_KEY} AND token_offset = :offset AND token_index = :index AND timestamp_us = :timestamp_us"
_CHANGE = "SET outcome = :outcome, generation = :generation, changed_at_us = :now_us"
_IN_RANGE = text(f"""
    SELECT token_offset, token_index, timestamp_us, outcome, generation FROM headrace_unapplied
    WHERE {_KEY} AND (token_offset, token_index) >= (:first_offset, :first_index)
    AND (token_offset, token_index) <= (:last_offset, :last_index)
""")  # noqa: S608 (only names of this module)
_FIND = text(f"SELECT outcome FROM headrace_unapplied WHERE {_EVENT}")  # noqa: S608
_ADD = text("""
    INSERT INTO headrace_unapplied (origin, subscription, stream, token_offset, token_index, timestamp_us, outcome,
    generation, changed_at_us)
    VALUES (:origin, :subscription, :stream, :offset, :index, :timestamp_us, :outcome, :generation, :now_us)
    ON CONFLICT DO NOTHING
""")
_SET = text(f"UPDATE headrace_unapplied {_CHANGE} WHERE {_EVENT}")
_CLAIM = text(f"UPDATE headrace_unapplied {_CHANGE} WHERE {_EVENT} AND outcome = '{UNAPPLIED}'")
_COUNT = text(f"""
    UPDATE headrace_position AS p SET unapplied = (
        SELECT COUNT(*) FROM headrace_unapplied AS u
        WHERE u.origin = p.origin AND u.subscription = p.subscription AND u.stream = p.stream
        AND (u.outcome <> '{APPLIED}'
             OR (u.generation, u.token_offset, u.token_index) > (p.generation, p.token_offset, p.token_index))
    ) WHERE {_KEY}
""")  # noqa: S608

EventIdentity = tuple[int, int, int]


class RedriveDecision(Enum):
    """Whether a redrive applies its event."""

    APPLY = "apply"
    DONE = "done"
    """The effects of the event are applied."""
    REFUSE = "refuse"
    """It is not known whether they are."""


class FailedEvents:
    """The failed events of one stream in one scope. `key` has origin, subscription and stream."""

    def __init__(self, scope: EffectScope, key: dict[str, str]) -> None:
        self._generation = scope.generation
        self._key = key

    def add(self, connection: Connection, events: Sequence[Event], unapplied: Sequence[Event]) -> None:
        """Note that these events failed. `unapplied` are those after the position. The others are applied: another
        owner has applied them since."""
        after = {_identity(event) for event in unapplied}
        known = self._rows(connection, events)
        for event in events:
            identity = _identity(event)
            outcome = UNAPPLIED if identity in after else APPLIED
            if identity not in known:
                connection.execute(_ADD, self._row(event, outcome))
            elif identity in after and not self._is_redriven(known[identity]):
                connection.execute(_SET, self._row(event, UNAPPLIED))
        self.update_count(connection)

    def add_unknown(self, connection: Connection, event: Event) -> None:
        """Note that a redrive of this event was refused."""
        connection.execute(_ADD, self._row(event, UNKNOWN))
        self.update_count(connection)

    def mark_applied(self, connection: Connection, events: Sequence[Event]) -> list[Event]:
        """Mark these events as applied, because the position has moved past them. Return those that the caller must
        still apply; redrives have applied the others."""
        known = self._rows(connection, events)
        unapplied = [event for event in events if not self._is_redriven(known.get(_identity(event)))]
        for event in unapplied:
            if _identity(event) in known:
                connection.execute(_SET, self._row(event, APPLIED))
        self.update_count(connection)
        return unapplied

    def without_redriven(self, connection: Connection, events: Sequence[Event]) -> list[Event]:
        """Return the events that no redrive has applied. Write nothing."""
        known = self._rows(connection, events)
        return [event for event in events if not self._is_redriven(known.get(_identity(event)))]

    def claim_redrive(self, connection: Connection, event: Event) -> RedriveDecision:
        """Mark a failed event as applied, so that the caller applies it in this transaction (APPLY). Change nothing if
        the decision is another one."""
        if connection.execute(_CLAIM, self._row(event, APPLIED)).rowcount:
            self.update_count(connection)
            return RedriveDecision.APPLY
        outcome = connection.execute(_FIND, self._row(event, APPLIED)).scalar()
        return RedriveDecision.DONE if outcome == APPLIED else RedriveDecision.REFUSE

    def update_count(self, connection: Connection) -> None:
        """Store in the position's row how many failed events of the stream a claim must look up."""
        connection.execute(_COUNT, self._key)

    def _is_redriven(self, row: tuple[str, int] | None) -> bool:
        """Whether a redrive has applied an event in this generation, before its turn. The event must be after the
        position."""
        return row is not None and row == (APPLIED, self._generation)

    def _rows(self, connection: Connection, events: Sequence[Event]) -> dict[EventIdentity, tuple[str, int]]:
        if not events:
            return {}
        first, last = token_of(events[0]), token_of(events[-1])
        span = {
            "first_offset": first.offset, "first_index": first.index,
            "last_offset": last.offset, "last_index": last.index,
        }  # fmt: skip
        rows = connection.execute(_IN_RANGE, {**self._key, **span})
        return {(row[0], row[1], row[2]): (row.outcome, row.generation) for row in rows}

    def _row(self, event: Event, outcome: str) -> dict[str, Any]:
        offset, index, timestamp_us = _identity(event)
        return {
            **self._key, "offset": offset, "index": index, "timestamp_us": timestamp_us,
            "outcome": outcome, "generation": self._generation, "now_us": now_us(),
        }  # fmt: skip


def count_again(connection: Connection, keys: Sequence[Mapping[str, Any]]) -> None:
    """Count the rows of streams again, after some were deleted. The positions of the streams must be locked: a count
    that waits for another transaction would not see the rows of that one."""
    if keys:
        connection.execute(_COUNT, keys)


def token_of(event: Event) -> SequenceToken:
    assert event.token is not None
    return event.token


def _identity(event: Event) -> EventIdentity:
    """A queue that lost its end gives offsets again: then only the timestamp distinguishes the events."""
    token = token_of(event)
    return token.offset, token.index, event.timestamp_us or 0
