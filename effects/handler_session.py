"""The ORM session that a handler gets."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session


class HandlerSession(Session):
    """The session that a handler gets. The transaction of its connection is headrace's: `commit` only flushes, and a
    handler that calls another method that ends the session's transaction has ended that of the connection, too.
    SQLAlchemy does the latter only if the session has executed a statement."""

    def rollback(self) -> None:
        super().rollback()
        self._end_transaction()

    def close(self) -> None:
        super().close()
        self._end_transaction()

    def reset(self) -> None:
        super().reset()
        self._end_transaction()

    def invalidate(self) -> None:
        super().invalidate()
        self._end_transaction()

    def _end_transaction(self) -> None:
        """Not an error at once: it would hide the one after which a handler calls `rollback`."""
        root = self.bind.get_transaction() if isinstance(self.bind, Connection) else None
        if root is not None:
            root.rollback()


SESSION_OPTIONS: Any = {"expire_on_commit": False, "join_transaction_mode": "rollback_only"}
"""Such a session never commits the transaction of its connection."""


def flush_and_close(session: Session) -> None:
    """Write the changes of a HandlerSession, and leave the connection's transaction open."""
    Session.commit(session)
    Session.close(session)
