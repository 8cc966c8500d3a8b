"""The transaction of a handler, as its driver and SQLAlchemy's events show it.

The handler must not end it: statements that follow would be in another one, without the position of the stream. It
must not set `search_path` or the role of the session: the next transaction on the connection would find another
position.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from traceback import clear_frames
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import SQLAlchemyError

from ..streams.errors import InvalidArgument, Unavailable
from .driver_state import CANCEL_AGAIN_S, CANCEL_S, IDLE, IN_ERROR, is_in_transaction, libpq_of
from .outages import first_line, note_error_of_effects, tells_lock, tells_outage, unavailable_because

_GAP = r"(?:\s|;|/\*(?:[^*]|\*(?!/))*\*/|--[^\n]*(?:\n|\Z))"
"""A space or a comment of SQL. A text matches in one way only: with `.*?`, many comments take exponential time."""
_END = re.compile(
    rf"{_GAP}*(COMMIT|END|ABORT|PREPARE{_GAP}+TRANSACTION|ROLLBACK(?!{_GAP}+((WORK|TRANSACTION){_GAP}+)?TO\b))\b",
    re.IGNORECASE,
)
_SET_FOR_SESSION = re.compile(
    rf"{_GAP}*(?:(?:SET{_GAP}*(?:SESSION{_GAP}+)?|RESET{_GAP}*)"
    rf'(?:"?(?:search_path|role|session_authorization)"?(?![\w$.])|SESSION{_GAP}+AUTHORIZATION\b|SCHEMA\b|ALL\b)'
    rf"|DISCARD{_GAP}+ALL\b)",
    re.IGNORECASE,
)
"""Statements of PostgreSQL. `SET SCHEMA` sets `search_path`."""
_SAVEPOINT = re.compile(rf"{_GAP}*SAVEPOINT\b", re.IGNORECASE)
ENDED = "the handler ended its transaction, which belongs to headrace: return to commit, raise to roll back"
SET_FOR_SESSION = (
    "the handler sets search_path or the role for longer than its transaction, and headrace's own statements would use "
    "other tables or rights: write SET LOCAL"
)


class ObservedTransaction:
    """The transaction that is open on a connection. Call `stop` at its end."""

    def __init__(self, connection: Connection, begin_nested: str) -> None:
        self._connection = ref(connection)
        self._begin_nested = begin_nested
        self._root = connection.get_transaction()
        self._libpq = libpq_of(connection)
        self._is_sqlite = connection.dialect.name == "sqlite"
        self._is_open = False
        """SQLAlchemy and the drivers begin late: in SQLite, only with the first statement that writes."""
        self._was_ended = False
        self._status: int | None = None
        """The transaction state that libpq reported last; it stays after the connection is lost. None before the first
        report, and for drivers without libpq."""
        self._lost = ""
        """Why the connection or the transaction was lost. Errors that follow do not name the reason."""

    @classmethod
    def begun_on(cls, connection: Connection, begin_nested: str) -> ObservedTransaction:
        """Observe the transaction that has begun on a connection. `begin_nested` tells the user how to begin a
        savepoint."""
        made = _observed[connection] = cls(connection, begin_nested)
        return made

    def stop(self) -> None:
        """Observe the connection no more. Nothing is done the second time."""
        if (connection := self._connection()) is not None and _observed.get(connection) is self:
            del _observed[connection]

    def after_statement(self) -> None:
        """Note whether the driver has begun a transaction. Once it has, `check_statement` and `check` ask it."""
        if not self._is_open:
            self._observe()

    def _observe(self) -> None:
        connection = self._connection()
        if connection is None or connection.closed or connection.invalidated:
            return
        self._status = status = None if self._libpq is None else int(self._libpq.transaction_status)
        is_open = is_in_transaction(connection) if status is None else status != IDLE
        self._was_ended |= self._is_open and is_open is False
        self._is_open |= is_open is True

    def refuse_ended(self) -> None:
        """Raise InvalidArgument if the handler has ended the transaction. Some drivers commit each statement then."""
        if self._root is None or not self._root.is_active or self._was_ended:
            raise InvalidArgument(ENDED)

    def check_statement(self, statement: str) -> None:
        """Raise InvalidArgument for a statement that ends the transaction, or after its end, and for one with which the
        next transaction of the connection would find other tables. The driver does not show the end by ROLLBACK AND
        CHAIN: the next transaction is open at once."""
        self._observe()
        self.refuse_ended()
        if _END.match(statement):
            raise InvalidArgument(ENDED)
        if _SET_FOR_SESSION.match(statement):
            raise InvalidArgument(SET_FOR_SESSION)

    def note_error(self, error: SQLAlchemyError, *, is_disconnect: bool) -> None:
        """Note that an error has ended the transaction: with the connection, or because SQLite's disk is full."""
        if self._is_open and not is_disconnect and tells_outage(error):
            self._observe()
        if is_disconnect or (self._was_ended and tells_outage(error)):
            self._lost = self._lost or first_line(error)

    def raise_if_lost(self, error: Exception) -> None:
        """Raise Unavailable if the transaction was lost, whatever error the handler has made of that."""
        if self._lost and not isinstance(error, Unavailable):
            raise unavailable_because(self._lost) from error

    def check(self) -> None:
        """Raise InvalidArgument if the handler has ended the transaction. Raise it, too, if PostgreSQL has aborted the
        transaction and the driver reports this: a COMMIT would roll back, and drivers do not report that."""
        self._observe()
        self.refuse_ended()
        if self._status == IN_ERROR:
            raise InvalidArgument(self.aborted)

    @property
    def aborted(self) -> str:
        """The text of the error for a transaction that PostgreSQL has aborted."""
        return (
            "the handler caught the error of a statement, and PostgreSQL has aborted the transaction: use "
            f"{self._begin_nested} around such a statement"
        )

    @property
    def is_abort_visible(self) -> bool:
        """Whether `check` raises for an aborted transaction. True for SQLite, which aborts none."""
        return self._status is not None or self._is_sqlite


# ---- events of an engine ---------------------------------------------------------------------------------------------


_BEFORE, _AFTER = "before_cursor_execute", "after_cursor_execute"
_observed = WeakKeyDictionary[Connection, ObservedTransaction]()
"""The transactions of effects that are open. The listeners ignore other connections of the user's engine."""


def observe_errors_and_statements(engine: Engine) -> None:
    """Let `ObservedTransaction` see what happens on connections of an engine."""
    _listen(engine, "handle_error", _note_error)
    _listen(engine, _BEFORE, _before_statement)
    _listen(engine, _AFTER, _after_statement)
    if engine.dialect.name == "sqlite":
        _listen(engine, "handle_error", _end_cancelled_statement)


def is_watched(connection: Connection) -> bool:
    """Return whether the user listens to the statements of a connection."""
    dispatch, dialect = connection.dispatch, connection.dialect.dispatch
    if dispatch.before_execute or dispatch.after_execute or dialect.do_execute or dialect.do_executemany:
        return True
    engine = connection.engine
    before = len(list(dispatch.before_cursor_execute)) - event.contains(engine, _BEFORE, _before_statement)
    after = len(list(dispatch.after_cursor_execute)) - event.contains(engine, _AFTER, _after_statement)
    return before > 0 or after > 0


def _listen(engine: Engine, name: str, listener: Callable[..., None]) -> None:
    """Add a listener, if the engine has not got it from another subscription."""
    if not event.contains(engine, name, listener):
        event.listen(engine, name, listener)


def _before_statement(
    connection: Connection, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
) -> None:
    if (observed := _observed.get(connection)) is not None:
        observed.check_statement(statement)
        if connection.dialect.name == "sqlite" and _SAVEPOINT.match(statement):
            _begin(connection)


def _after_statement(
    connection: Connection, _cursor: object, _statement: str, _parameters: object, _context: object, _many: bool
) -> None:
    if (observed := _observed.get(connection)) is not None:
        observed.after_statement()


def _note_error(context: ExceptionContext) -> None:
    """Note an error of the engine. A connection that the handler has opened may wait for a lock of the handler's own
    transaction: such an error is not noted."""
    error, connection = context.sqlalchemy_exception, context.connection
    if error is None:
        return
    observed = None if connection is None else _observed.get(connection)
    if observed is not None:
        observed.note_error(error, is_disconnect=context.is_disconnect)
    if connection is None or observed is not None or not tells_lock(error):
        note_error_of_effects(error)


def _begin(connection: Connection) -> None:
    """Begin the transaction before a savepoint. The drivers of SQLite begin it only with a statement that writes: a
    savepoint before that would be the transaction, and its end would commit."""
    if is_in_transaction(connection) is False:
        connection.exec_driver_sql("BEGIN")


def _end_cancelled_statement(context: ExceptionContext) -> None:
    """End a statement of aiosqlite that was cancelled, and its transaction, before SQLAlchemy closes the connection.

    SQLite keeps a closed connection and its locks while a cursor is open. The traceback of the cancellation and
    SQLAlchemy's cursor both hold the driver's cursor."""
    error, connection = context.original_exception, context.connection
    if isinstance(error, Exception) or connection is None:
        return
    cursor = getattr(getattr(context.execution_context, "cursor", None), "_cursor", None)

    async def end(driver: Any) -> None:
        steps = [] if cursor is None else [cursor.close()]
        ending = asyncio.gather(*steps, driver.rollback(), return_exceptions=True)
        ends_at = asyncio.get_running_loop().time() + CANCEL_S
        while not ending.done() and asyncio.get_running_loop().time() < ends_at:
            await driver.interrupt()
            await asyncio.wait([ending], timeout=CANCEL_AGAIN_S)

    def shielded(driver: Any) -> asyncio.Future[None]:
        return asyncio.shield(end(driver))

    with suppress(Exception, asyncio.CancelledError):  # SQLAlchemy closes the connection, and raises the first error
        adapted = cast("Any", connection.connection.dbapi_connection)
        if hasattr(adapted, "run_async"):  # connections of an Engine have none
            clear_frames(error.__traceback__)
            adapted.run_async(shielded)
