"""Statements on the positions of streams. All run in a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from sqlalchemy import Connection, text

from ..streams.clock import now_us
from ..streams.events import Event
from ..streams.identity import SequenceToken, StreamId
from ..streams.transactions import EffectScope, MisplacedEvent
from .driver_statement import DriverStatement
from .failed_events import FailedEvents, RedriveDecision, token_of
from .schema import key_of, misplaced_key_of

_KEY = "origin = :origin AND subscription = :subscription AND stream = :stream"
_COLUMNS = (
    "origin, subscription, stream, generation, queue, token_offset, token_index, unapplied, revision, written_at_us"
)
_VALUES = ":origin, :subscription, :stream, :generation, :queue, :last_offset, :last_index, 0, 1, :now_us"
_MOVE = """generation = excluded.generation, queue = excluded.queue, token_offset = excluded.token_offset,
    token_index = excluded.token_index, revision = p.revision + 1, written_at_us = excluded.written_at_us"""

_CLAIM_SQL = f"""
    INSERT INTO headrace_position AS p ({_COLUMNS}) VALUES ({_VALUES})
    ON CONFLICT (origin, subscription, stream) DO UPDATE SET {_MOVE}
    WHERE (p.generation, p.token_offset, p.token_index) < (excluded.generation, :first_offset, :first_index)
    AND (p.queue = excluded.queue OR p.generation < excluded.generation)
"""  # noqa: S608 (only names of this module)
_CLAIM = text(f"{_CLAIM_SQL} RETURNING unapplied")
_CLAIM_WITHOUT_FAILED = DriverStatement(f"{_CLAIM_SQL} AND p.unapplied = 0")
"""Moves a position that has no failed events. A statement without a result is cheaper."""
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
    SELECT generation, queue, token_offset, token_index, revision, unapplied, state, state_version, expires_at_us
    FROM headrace_position WHERE {_KEY}"""  # noqa: S608
_FIND_LOCKED = {"postgresql": text(f"{_FIND} FOR UPDATE"), "sqlite": text(_FIND)}
_FIND_NOW = text(_FIND)
_LOCK = text(f"UPDATE headrace_position SET revision = revision + 1 WHERE {_KEY}")  # noqa: S608
_ADD = text(f"""
    INSERT INTO headrace_position ({_COLUMNS})
    VALUES (:origin, :subscription, :stream, -1, :queue, 0, 0, 0, 1, :now_us) ON CONFLICT DO NOTHING
""")  # noqa: S608


_MISPLACED_HINT = (
    "its producer partitions in another way, so effects do not apply the event in its turn; let all producers of the "
    "topic use one `partitioner`, or make the provider anew with theirs; a redrive applies the event, without order"
)


class AppliedPosition(NamedTuple):
    """The row of a stream."""

    generation: int
    queue: int
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


NO_STATE = EncodedState(None, None, None)


class LaterGenerationError(Exception):
    """The position of a stream has a later generation than the scope: the scope is out of date, or the control store
    has lost a seek."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"the position of the stream has generation {generation}")
        self.generation = generation


class StreamPosition:
    """The position of one stream in one scope. Its methods execute statements. Those for delivered events raise
    LaterGenerationError.

    All events of a stream must be in one queue, because offsets of two queues have no order. A delivery does not apply
    an event of another queue; a redrive does. With `misplaced`, this is the row of the scope's queue for such events.
    """

    def __init__(self, scope: EffectScope, stream: StreamId, *, misplaced: bool = False) -> None:
        self.scope = scope
        self._stream = stream
        key = misplaced_key_of(stream, scope.queue) if misplaced else key_of(stream)
        self._key = {"origin": scope.origin, "subscription": scope.subscription, "stream": key}

    @cached_property
    def _failed(self) -> FailedEvents:
        """Made when it is needed: most deliveries have no failed events."""
        return FailedEvents(self.scope, self._key)

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
        unapplied = self._move(connection, events)
        if unapplied is not None:
            return unapplied
        after = self.after(self.find(connection, lock=True), events)
        return (self._move(connection, after) or []) if after else []

    def check_queue(self) -> None:
        """Raise MisplacedEvent if producers must write the stream into another queue than that of the scope."""
        scope, stream = self.scope, self._stream
        if scope.queues is not None and scope.queue not in scope.queues.queues_with(stream):
            raise MisplacedEvent(
                f"this event of stream {stream} is in queue {scope.queue}, and the option `partitioner` of provider "
                f"{scope.provider!r} ({scope.queues.name}) expects it in queue {scope.queues.queue_of(stream)}: "
                f"{_MISPLACED_HINT}"
            )

    def _is_misplaced(self, known: AppliedPosition | None) -> bool:
        """Whether the applied events of the stream are of another queue than that of the scope."""
        scope = self.scope
        return known is not None and known.generation == scope.generation and known.queue != scope.queue

    def of_failures(self, connection: Connection) -> StreamPosition:
        """Return the position for statements on failed events: this one, or that of misplaced events if the stream
        belongs to another queue than that of the scope."""
        scope, stream = self.scope, self._stream
        declared = scope.queues is None or scope.queue in scope.queues.queues_with(stream)
        if declared and not self._is_misplaced(self.find(connection)):
            return self
        return StreamPosition(scope, stream, misplaced=True)

    def after(self, known: AppliedPosition | None, events: Sequence[Event]) -> list[Event]:
        """Return the events that are after the position. Raises MisplacedEvent, LaterGenerationError."""
        if known is None or known.generation < self.scope.generation:
            return list(events)
        if self._is_misplaced(known):
            raise MisplacedEvent(
                f"this event of stream {self._stream} is in queue {self.scope.queue}, and others that are applied are "
                f"in queue {known.queue}: {_MISPLACED_HINT}"
            )
        if known.generation > self.scope.generation:
            raise LaterGenerationError(known.generation)
        return [event for event in events if token_of(event) > known.token]

    def check_generation(self, connection: Connection) -> None:
        """Raise LaterGenerationError if the position has a later generation than the scope."""
        known = self.find(connection)
        if known is not None and known.generation > self.scope.generation:
            raise LaterGenerationError(known.generation)

    def uncommitted_events(
        self, connection: Connection, known: AppliedPosition | None, events: Sequence[Event]
    ) -> list[Event]:
        """Return the events whose effects are not committed yet. Write nothing."""
        after = self.after(known, events)
        if known is None or not known.unapplied or not after:
            return after
        return self._failed.without_redriven(connection, after)

    def _move(self, connection: Connection, events: Sequence[Event]) -> Sequence[Event] | None:
        """Move the position past these events, and return those that no redrive has applied. Return None if the
        position is already past one of them; then nothing is written."""
        row = self._row(token_of(events[0]), token_of(events[-1]))
        if _CLAIM_WITHOUT_FAILED.execute(connection, row) == 1:
            return events
        moved = connection.execute(_CLAIM, row).first()
        if moved is None:
            return None
        return self._failed.mark_applied(connection, events) if moved.unapplied else events

    def find(self, connection: Connection, *, lock: bool = False) -> AppliedPosition | None:
        """Return the stream's row, None if it has none. With `lock`, lock it until the transaction ends."""
        statement = _FIND_LOCKED[connection.dialect.name] if lock else _FIND_NOW
        row = connection.execute(statement, self._key).first()
        if row is None:
            return None
        token = SequenceToken(row.token_offset, row.token_index)
        state = None if row.state is None else bytes(row.state)
        return AppliedPosition(
            row.generation, row.queue, token, row.revision, row.unapplied, state, row.state_version, row.expires_at_us
        )

    def store(self, connection: Connection, events: Sequence[Event], state: EncodedState, known: int) -> bool:
        """Write position and state. Return False if the row has another revision than `known`; 0: there is no row."""
        row = self._row(token_of(events[0]), token_of(events[-1]))
        row |= _state_values(state, known)
        stored = connection.execute(_STORE, row).first()
        if stored is not None and stored.unapplied:
            self._failed.mark_applied(connection, events)
        return stored is not None

    def change_state(self, connection: Connection, state: EncodedState, known: int) -> bool:
        """Write the state, and leave the position. Return False if the row has another revision than `known`."""
        row = {**self._key, **_state_values(state, known), "now_us": now_us()}
        return bool(connection.execute(_CHANGE_STATE, row).rowcount)

    # ---- events that failed ----------------------------------------------------------------------------------------

    def note_failed(self, connection: Connection, events: Sequence[Event]) -> None:
        """Note that these events failed, and leave the position: they may be delivered again, or become dead letters.
        Later claims and redrives learn from this whether their effects are applied."""
        self._failed.add(connection, events, self.after(self.lock(connection), events))

    def give_up(self, connection: Connection, events: Sequence[Event]) -> None:
        """Move the position past these events without their effects. Events whose effects are committed stay so."""
        after = self.after(self.lock(connection), events)
        if after:
            connection.execute(_CLAIM, self._row(token_of(after[0]), token_of(after[-1])))
            self._failed.update_count(connection)

    def claim_redrive(self, connection: Connection, event: Event) -> RedriveDecision:
        """Mark a failed event as applied, so that the caller applies it in this transaction. Refuse an event without a
        row."""
        if not connection.execute(_LOCK, self._key).rowcount:
            return RedriveDecision.REFUSE
        return self._failed.claim_redrive(connection, event)

    def note_unknown(self, connection: Connection, event: Event) -> None:
        """Note that a redrive was refused, so that the operator can decide about the event."""
        self.lock(connection)
        self._failed.add_unknown(connection, event)

    def lock(self, connection: Connection) -> AppliedPosition:
        """Return the stream's row, and lock it until the transaction ends. Create the row if it is missing, with a
        position before every generation."""
        key = {**self._key, "queue": self.scope.queue, "now_us": now_us()}
        connection.execute(_ADD, key)
        connection.execute(_LOCK, self._key)
        known = self.find(connection)
        assert known is not None
        return known


def _state_values(state: EncodedState, known: int) -> dict[str, Any]:
    return {
        "state": state.value,
        "state_version": state.version,
        "expires_at_us": state.expires_at_us,
        "known": known,
    }
