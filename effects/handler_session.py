"""The ORM session that a handler gets."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction


class HandlerSession(Session):
    """The session that a handler gets. `commit` only flushes. `rollback`, `close`, `reset` and `invalidate`, and any
    end of its outermost transaction without a commit, also roll back the transaction of the connection; SQLAlchemy does
    that only if the session has executed a statement, and not at `get_transaction().close()`."""

    _is_committed = False
    """Whether the transaction that ends next is committed."""

    def note_commit(self) -> None:
        self._is_committed = True

    def take_committed(self) -> bool:
        is_committed, self._is_committed = self._is_committed, False
        return is_committed

    def rollback(self) -> None:
        super().rollback()
        self.end_transaction()

    def close(self) -> None:
        super().close()
        self.end_transaction()

    def reset(self) -> None:
        super().reset()
        self.end_transaction()

    def invalidate(self) -> None:
        super().invalidate()
        self.end_transaction()

    def end_transaction(self) -> None:
        """Roll back the connection's transaction. `ObservedTransaction.check` raises later: an error here would hide
        the one because of which the handler calls `rollback`."""
        root = self.bind.get_transaction() if isinstance(self.bind, Connection) else None
        if root is not None:
            root.rollback()


@event.listens_for(HandlerSession, "after_commit")
def _committed(session: HandlerSession) -> None:
    session.note_commit()


@event.listens_for(HandlerSession, "after_transaction_end")
def _ended(session: HandlerSession, transaction: SessionTransaction) -> None:
    """A savepoint has a parent, and `after_commit` is called for it, too."""
    is_committed = session.take_committed()
    if transaction.parent is None and not is_committed:
        session.end_transaction()


SESSION_OPTIONS: dict[str, Any] = {"expire_on_commit": False, "join_transaction_mode": "rollback_only"}
"""Options of a HandlerSession: it never commits the transaction of its connection."""


def flush_and_close(session: Session) -> None:
    """Write the changes of a HandlerSession, and leave the connection's transaction open. Its own `close` would roll
    that back."""
    Session.commit(session)
    Session.close(session)
