"""Statements on the positions of streams. All run in a transaction of the caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, text

from ..streams.events import Event
from ..streams.identity import SequenceToken, StreamId
from ..streams.transactions import EffectScope
from .schema import key_of

_KEY = "origin = :origin AND subscription = :subscription AND stream = :stream"
_COLUMNS = (
    "origin, subscription, stream, generation, queue, token_offset, token_index, unapplied, revision, written_at_us"
)
_VALUES = ":origin, :subscription, :stream, :generation, :queue, :last_offset, :last_index, 0, 1, :now_us"
_MOVE = """generation = excluded.generation, queue = excluded.queue, token_offset = excluded.token_offset,
    token_index = excluded.token_index, revision = p.revision + 1, written_at_us = excluded.written_at_us"""

_CLAIM = text(f"""
    INSERT INTO headrace_position AS p ({_COLUMNS}) VALUES ({_VALUES})
    ON CONFLICT (origin, subscription, stream) DO UPDATE SET {_MOVE}
    WHERE (p.generation, p.token_offset, p.token_index) < (excluded.generation, :first_offset, :first_index)
    RETURNING unapplied
""")  # noqa: S608 (only names of this module)
_STORE = text(f"""
    INSERT INTO headrace_position AS p ({_COLUMNS}, state, state_version, expires_at_us)
    VALUES ({_VALUES}, :state, :state_version, :expires_at_us)
    ON CONFLICT (origin, subscription, stream) DO UPDATE SET {_MOVE},
    state = excluded.state, state_version = excluded.state_version, expires_at_us = excluded.expires_at_us
    WHERE p.revision = :known
    RETURNING unapplied
""")  # noqa: S608
_CHANGE_STATE = text(f"""
    UPDATE headrace_position SET state = :state, state_version = :state_version, expires_at_us = :expires_at_us,
    revision = revision + 1, written_at_us = :now_us WHERE {_KEY} AND revision = :known
""")  # noqa: S608
_FIND = f"""
    SELECT generation, token_offset, token_index, revision, unapplied, state, state_version, expires_at_us
    FROM headrace_position WHERE {_KEY}"""  # noqa: S608
_FIND_LOCKED = {"postgresql": text(f"{_FIND} FOR UPDATE"), "sqlite": text(_FIND)}
_FIND_NOW = text(_FIND)
_FORGET_UNAPPLIED = text(f"""
    DELETE FROM headrace_unapplied WHERE {_KEY} AND (token_offset, token_index) >= (:first_offset, :first_index)
    AND (token_offset, token_index) <= (:last_offset, :last_index)
""")  # noqa: S608
_TAKE_UNAPPLIED = text(f"""
    DELETE FROM headrace_unapplied
    WHERE {_KEY} AND token_offset = :offset AND token_index = :index AND timestamp_us = :timestamp_us
""")  # noqa: S608
_ADD_UNAPPLIED = text("""
    INSERT INTO headrace_unapplied (origin, subscription, stream, token_offset, token_index, timestamp_us)
    VALUES (:origin, :subscription, :stream, :offset, :index, :timestamp_us) ON CONFLICT DO NOTHING
""")
_COUNT_UNAPPLIED = text(f"""
    UPDATE headrace_position SET unapplied = unapplied + :change, revision = revision + 1 WHERE {_KEY}
""")  # noqa: S608


class AppliedPosition(NamedTuple):
    """The row of a stream."""

    generation: int
    token: SequenceToken
    revision: int
    unapplied: int
    state: bytes | None
    state_version: int | None
    expires_at_us: int | None


class EncodedState(NamedTuple):
    """A state as it is stored."""

    value: bytes | None
    version: int | None
    expires_at_us: int | None


def now_us() -> int:
    """Microseconds since 1970 UTC."""
    return time.time_ns() // 1000


def token_of(event: Event) -> SequenceToken:
    assert event.token is not None
    return event.token


class StreamPosition:
    """The position of one stream in one scope. Its methods execute statements."""

    def __init__(self, scope: EffectScope, stream: StreamId) -> None:
        self.scope = scope
        self._key = {"origin": scope.origin, "subscription": scope.subscription, "stream": key_of(stream)}

    def _row(self, first: SequenceToken, last: SequenceToken) -> dict[str, Any]:
        return {
            **self._key, "generation": self.scope.generation, "queue": self.scope.queue, "now_us": now_us(),
            "first_offset": first.offset, "first_index": first.index,
            "last_offset": last.offset, "last_index": last.index,
        }  # fmt: skip

    def claim(self, connection: Connection, events: Sequence[Event]) -> Sequence[Event]:
        """Move the position past these events, and return those whose effects are not committed yet.

        The row stays locked until the transaction ends.
        """
        if self._move(connection, token_of(events[0]), token_of(events[-1])):
            return events
        left = self.after(self.find(connection, lock=True), events)
        if left:
            self._move(connection, token_of(left[0]), token_of(left[-1]))
        return left

    def after(self, known: AppliedPosition | None, events: Sequence[Event]) -> list[Event]:
        """Return the events that are after the position."""
        if known is None or known.generation < self.scope.generation:
            return list(events)
        return [] if known.generation > self.scope.generation else [e for e in events if token_of(e) > known.token]

    def _move(self, connection: Connection, first: SequenceToken, last: SequenceToken) -> bool:
        row = self._row(first, last)
        moved = connection.execute(_CLAIM, row).first()
        if moved is None:
            return False
        if moved.unapplied:
            self._forget_unapplied(connection, row)
        return True

    def find(self, connection: Connection, *, lock: bool = False) -> AppliedPosition | None:
        """Return the stream's row, None if it has none. With `lock`, lock it until the transaction ends."""
        statement = _FIND_LOCKED[connection.dialect.name] if lock else _FIND_NOW
        row = connection.execute(statement, self._key).first()
        if row is None:
            return None
        token = SequenceToken(row.token_offset, row.token_index)
        state = None if row.state is None else bytes(row.state)
        return AppliedPosition(
            row.generation, token, row.revision, row.unapplied, state, row.state_version, row.expires_at_us
        )

    def store(self, connection: Connection, events: Sequence[Event], state: EncodedState, known: int) -> bool:
        """Write position and state. Return False if the row has another revision than `known`; 0: there is no row."""
        row = self._row(token_of(events[0]), token_of(events[-1]))
        row |= _state_values(state, known)
        stored = connection.execute(_STORE, row).first()
        if stored is not None and stored.unapplied:
            self._forget_unapplied(connection, row)
        return stored is not None

    def change_state(self, connection: Connection, state: EncodedState, known: int) -> bool:
        """Write the state, and leave the position. Return False if the row has another revision than `known`."""
        row = {**self._key, **_state_values(state, known), "now_us": now_us()}
        return bool(connection.execute(_CHANGE_STATE, row).rowcount)

    # ---- events that were given up on ------------------------------------------------------------------------------

    def give_up(self, connection: Connection, events: Sequence[Event], *, redrivable: bool) -> None:
        """Move the position past these events without their effects. Events whose effects are committed stay so."""
        left = self.claim(connection, events)
        if left and redrivable:
            rows = [self._unapplied(event) for event in left]
            for row in rows:
                connection.execute(_ADD_UNAPPLIED, row)
            connection.execute(_COUNT_UNAPPLIED, {**self._key, "change": len(rows)})

    def take_unapplied(self, connection: Connection, event: Event) -> bool:
        """Return whether the event was given up on, and forget that: the caller applies it now. This locks the row of
        the stream until the transaction ends."""
        taken = bool(connection.execute(_TAKE_UNAPPLIED, self._unapplied(event)).rowcount)
        if taken:
            connection.execute(_COUNT_UNAPPLIED, {**self._key, "change": -1})
        return taken

    def _unapplied(self, event: Event) -> dict[str, Any]:
        token = token_of(event)
        return {**self._key, "offset": token.offset, "index": token.index, "timestamp_us": event.timestamp_us or 0}

    def _forget_unapplied(self, connection: Connection, row: dict[str, Any]) -> None:
        """The events are now applied in another generation, so a redrive must not apply them."""
        forgotten = connection.execute(_FORGET_UNAPPLIED, row).rowcount
        if forgotten:
            connection.execute(_COUNT_UNAPPLIED, {**self._key, "change": -forgotten})


def _state_values(state: EncodedState, known: int) -> dict[str, Any]:
    return {
        "state": state.value,
        "state_version": state.version,
        "expires_at_us": state.expires_at_us,
        "known": known,
    }
