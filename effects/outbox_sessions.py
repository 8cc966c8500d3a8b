"""The events of a session of SQLAlchemy: they are kept until it commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sqlalchemy import Connection, Engine, NestedTransaction, Pool, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import ConnectionPoolEntry, PoolResetState

from ..streams.errors import InvalidArgument, StorageError
from .driver_state import refuse_autocommit
from .outbox_rows import OutboxRow, can_insert_with_commit, insert, insert_and_commit

_BUFFERED = "headrace outbox"
"""Key of `BufferedEvents` in `Session.info`."""
_UNSENT = "headrace outbox: unsent"
"""Key in `Connection.info`: the transaction must not be committed without the rows of its session."""


class BufferedEvents:
    """The rows that a session inserts when it commits. It is kept in `Session.info`."""

    def __init__(self) -> None:
        self.rows: list[OutboxRow] = []
        self._starts: dict[SessionTransaction, int] = {}
        """The number of rows before the first one of each open transaction or savepoint."""
        self.committing: SessionTransaction | None = None
        """Its commit has begun: rows that are published from now on are inserted at once, and those that wait with
        them."""
        self.committed: SessionTransaction | None = None
        self.released: SessionTransaction | None = None
        """The last savepoint that was released: at its end, its rows stay."""
        self.savepoints: dict[SessionTransaction, dict[Connection, NestedTransaction | None]] = {}
        """The savepoint in which each transaction of the session found or began a connection; None: in no savepoint."""
        self.is_prepared = False
        self.inserted_by: Connection | None = None
        """The connection whose commit inserts the rows that are left then."""
        self._listeners: list[tuple[Connection, str, Callable[..., None]]] = []

    def add(self, transaction: SessionTransaction, rows: Sequence[OutboxRow]) -> None:
        """Keep the rows of a transaction or savepoint."""
        for each in _with_parents(transaction):
            self._starts.setdefault(each, len(self.rows))
        self.rows += rows

    def end_savepoint(self, ended: SessionTransaction) -> None:
        """Drop the rows of a savepoint that is not released, and those of the savepoints in it."""
        self.savepoints.pop(ended, None)
        if ended is not self.released:
            del self.rows[self._starts.get(ended, len(self.rows)) :]
        self._starts = {each: start for each, start in self._starts.items() if ended not in _with_parents(each)}

    @property
    def connections(self) -> list[Connection]:
        """The connections of the session's transaction and of its open savepoints."""
        return [connection for begun in self.savepoints.values() for connection in begun]

    def insert_at_commit(self, session: Session, connection: Connection) -> None:
        """Insert the rows when the connection commits. The listener stays until the session's transaction ends."""
        if self.inserted_by is None:
            self.listen(connection, "commit", partial(_on_commit, session))
            self.inserted_by = connection
        connection.info[_UNSENT] = True

    def listen(self, connection: Connection, name: str, listener: Callable[..., None]) -> None:
        """Listen to an event of a connection until `stop_listening`."""
        event.listen(connection, name, listener)
        self._listeners.append((connection, name, listener))

    def stop_listening(self) -> None:
        while self._listeners:
            event.remove(*self._listeners.pop())

    def note_prepared(self, *_: object) -> None:
        self.is_prepared = True

    def take(self) -> list[OutboxRow]:
        """Return the rows, and forget them."""
        rows, self.rows, self._starts = self.rows, [], {}
        return rows


def publish_in_session(session: Session, rows: Sequence[OutboxRow]) -> None:
    """Keep the rows until the session commits. A savepoint that is rolled back takes its rows along."""
    transaction = session.get_nested_transaction() or session.get_transaction() or session.begin()
    root = session.get_transaction()
    buffered: BufferedEvents = session.info.setdefault(_BUFFERED, BufferedEvents())
    if buffered.committed is root:
        raise InvalidArgument("the session's transaction is committed: publish before its commit, not after it")
    if buffered.is_prepared:
        raise InvalidArgument("the session's transaction is prepared: publish before `session.prepare()`, not after it")
    _refuse_unknown_savepoint(buffered)
    buffered.add(transaction, rows)
    if buffered.committing is root:
        _insert_while_committing(session)


def _refuse_unknown_savepoint(buffered: BufferedEvents) -> None:
    """Raise InvalidArgument if a connection is in a savepoint that the session did not begin: its rollback would leave
    the rows in the buffer."""
    known = {pair for begun in buffered.savepoints.values() for pair in begun.items()}
    for connection, _ in known:
        current = connection.get_nested_transaction()
        if current is not None and (connection, current) not in known:
            raise InvalidArgument(
                "the connection of the session is in a savepoint that the session does not know: begin the savepoint "
                "with `session.begin_nested()`, or publish with `connection=session.connection()`"
            )


def _insert_while_committing(session: Session) -> None:
    try:
        connection = session.connection()
    except InvalidRequestError:
        return  # in `after_begin`, SQLAlchemy 2.1 allows no statement yet: the end of the flush inserts the rows
    _insert_buffered(session, connection)


def _insert_buffered(session: Session, connection: Connection) -> None:
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is not None and buffered.rows:
        refuse_autocommit(connection)
        insert(connection, buffered.take())


def waiting_rows(session: Session) -> Sequence[OutboxRow]:
    """Return the rows that the session has not inserted yet."""
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    return [] if buffered is None else buffered.rows


# Listeners for all sessions of the process: a listener that a session gets during its commit may not be called.


@event.listens_for(Session, "after_begin", insert=True)  # before the user's listeners, which may publish
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    buffered: BufferedEvents = session.info.setdefault(_BUFFERED, BufferedEvents())
    if buffered.rows and buffered.committing is not None and buffered.inserted_by is not None:
        # A listener of the user uses another database: its commit may come first.
        insert(buffered.inserted_by, buffered.take())
    buffered.savepoints.setdefault(transaction, {})[connection] = connection.get_nested_transaction()
    if session.twophase and transaction.parent is None:
        buffered.listen(connection, "prepare_twophase", buffered.note_prepared)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    buffered: BufferedEvents = session.info.setdefault(_BUFFERED, BufferedEvents())
    if session.get_nested_transaction() is not None:
        # Either a savepoint is released, or the transaction is committed above an open savepoint. In the second case,
        # SQLAlchemy calls no further listener of the session, so a listener of its connection inserts the rows.
        if buffered.rows:
            buffered.insert_at_commit(session, session.connection())
        return
    if buffered.rows:
        session.flush()  # as the commit does next anyway; the flush decides in which order rows are locked
        connection = session.connection()
        refuse_autocommit(connection)
        # Another connection could be committed before an INSERT that fails.
        if buffered.connections == [connection] and _begins(session) and can_insert_with_commit(connection):
            buffered.insert_at_commit(session, connection)
        else:
            insert(connection, buffered.take())
    buffered.committing = session.get_transaction()


def _begins(session: Session) -> bool:
    """Return whether the session begins and commits its transaction. With `bind=connection`, the user may do so."""
    return isinstance(session.get_bind(), Engine)


def _on_commit(session: Session, connection: Connection) -> None:
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is not None and buffered.rows:
        try:
            insert_and_commit(connection, buffered.take())
        except BaseException:
            try:
                connection.connection.rollback()  # after a failed commit, `Session.close` leaves the transaction open
            except Exception:  # noqa: BLE001 (whatever it is, the connection cannot be used)
                connection.invalidate()
            raise
        connection.info.pop(_UNSENT, None)


@event.listens_for(Session, "after_flush")
def _after_flush(session: Session, _: object) -> None:
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is not None and buffered.rows and buffered.committing is session.get_transaction():
        _insert_buffered(session, session.connection())


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    """Refuse events that come too late. Rows that came too late to be inserted are an error: they must not be lost
    silently."""
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is None:
        return
    if (savepoint := session.get_nested_transaction()) is not None:
        buffered.released = savepoint
        return
    buffered.committed = session.get_transaction()
    if buffered.rows:
        raise StorageError(
            f"the session has committed without {len(buffered.take())} batches of events, which were published while "
            "it committed: publish them before, and release savepoints before the commit"
        )


@event.listens_for(Session, "after_transaction_end")
def _after_end(session: Session, ended: SessionTransaction) -> None:
    """Forget the rows of a transaction or savepoint that ends without a commit. `close` and `reset` call no listener of
    a rollback."""
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is None:
        return
    if ended.parent is None:
        del session.info[_BUFFERED]
        buffered.stop_listening()
    elif ended.nested:
        buffered.end_savepoint(ended)


@event.listens_for(Pool, "reset")
def _on_reset(driver: DBAPIConnection, record: ConnectionPoolEntry, state: PoolResetState) -> None:
    """Roll back a transaction whose rows were not sent: an exception came between the beginning of the commit and
    `_on_commit`, for example a KeyboardInterrupt. SQLAlchemy leaves the transaction open, and the next user of the
    connection would commit it."""
    if record.info.pop(_UNSENT, False) and state.asyncio_safe and not state.terminate_only:
        driver.rollback()


def _with_parents(transaction: SessionTransaction) -> Iterator[SessionTransaction]:
    inner: SessionTransaction | None = transaction
    while inner is not None:
        yield inner
        inner = inner.parent
