"""The common part of the classes that read and write the control store, and the statements that they share."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, delete, select
from sqlalchemy.dialects import sqlite

from ..streams.errors import DataDirectoryError, Fenced, NotFound
from ..streams.subscriptions import DeadLetter, GapRecord, SubscriptionDefinition
from .database import Database
from .rows import definition_of
from .schema import entries, leases, subscriptions

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_log = logging.getLogger(__name__)

IDS_AT_ONCE = 500
"""The most values in one statement. Every database allows more parameters."""

K = TypeVar("K")
V = TypeVar("V")


class ReadRows(NamedTuple, Generic[K, V]):
    """The records of the intact rows by key, and the messages about the damaged rows."""

    intact: dict[K, V]
    damaged: list[str]


def read_rows(
    rows: Iterable[Row[Any]], key: Callable[[Row[Any]], K], record: Callable[[Row[Any]], V]
) -> ReadRows[K, V]:
    """Make records of rows. `record` raises DataDirectoryError for a damaged row."""
    read = ReadRows[K, V]({}, [])
    for row in rows:
        try:
            read.intact[key(row)] = record(row)
        except DataDirectoryError as damage:
            read.damaged.append(str(damage))
    return read


class StorePart:
    """A part of the control store, with the database that all parts share."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reported = set[str]()
        """Messages about damage that are logged already."""
        self._redrive_watchers: list[Callable[[], None]] = []

    def _intact(self, read: ReadRows[K, V]) -> dict[K, V]:
        """Return the intact records. Log each damaged row once."""
        for damage in read.damaged:
            if damage not in self._reported:
                self._reported.add(damage)
                _log.error("control store: %s", damage)
        return read.intact


def insert_into(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT that supports ON CONFLICT. Both databases have the same syntax for it."""
    if connection.dialect.name != "postgresql":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # noqa: PLC0415 (it takes 40 ms of CPU to import)

    return postgresql.insert(table)


def is_subscription(provider: str, name: str) -> ColumnElement[bool]:
    return and_(subscriptions.c.provider == provider, subscriptions.c.name == name)


def of_subscription(table: Table, provider: str, name: str | None) -> ColumnElement[bool]:
    """Match the rows of one subscription, or, if `name` is None, of all subscriptions of the provider."""
    return and_(table.c.provider == provider, *([] if name is None else [table.c.subscription == name]))


def subscription_not_found(provider: str, name: str) -> NotFound:
    return NotFound(f"provider {provider!r} has no subscription {name!r}")


def stored_definition(connection: Connection, provider: str, name: str) -> SubscriptionDefinition | None:
    query = select(subscriptions.c.definition).where(is_subscription(provider, name))
    text = connection.execute(query).scalar()
    return None if text is None else definition_of(text)


def require_subscription(connection: Connection, provider: str, name: str) -> None:
    if connection.execute(select(subscriptions.c.epoch).where(is_subscription(provider, name))).scalar() is None:
        raise subscription_not_found(provider, name)


def lock_epochs(connection: Connection, provider: str, names: Sequence[str]) -> dict[str, int]:
    """Return the epochs of these subscriptions, and lock them until this transaction ends."""
    query = select(subscriptions.c.name, subscriptions.c.epoch).where(
        subscriptions.c.provider == provider, subscriptions.c.name.in_(names)
    )
    rows = connection.execute(query.order_by(subscriptions.c.name).with_for_update(read=True))
    return {row.name: row.epoch for row in rows}


def refused_queues(
    connection: Connection, provider: str, queues: Collection[int], held: Mapping[int, int] | None
) -> frozenset[int]:
    """Return the queues whose lease is no longer the one in `held`. Lock the leases of all queues until this
    transaction ends."""
    if held is None or not queues:
        return frozenset()
    query = select(leases.c.queue, leases.c.epoch).where(
        leases.c.provider == provider, leases.c.queue.in_(sorted(queues)), leases.c.owner != ""
    )
    rows = connection.execute(query.order_by(leases.c.queue).with_for_update(read=True))
    epochs = {row.queue: row.epoch for row in rows}
    return frozenset(queue for queue in queues if queue not in held or epochs.get(queue) != held[queue])


def require_leases(
    connection: Connection, records: Iterable[DeadLetter] | Iterable[GapRecord], held: Mapping[int, int] | None
) -> None:
    """Raise Fenced if the lease of a queue of the records is no longer the one in `held`."""
    queues: defaultdict[str, set[int]] = defaultdict(set)
    for record in records:
        queues[record.provider].add(record.queue)
    for provider in sorted(queues):
        if refused := refused_queues(connection, provider, queues[provider], held):
            raise Fenced(f"the lease of {provider!r} on queues {sorted(refused)} is lost: another silo may have them")


def store_value(connection: Connection, key: str, value: str | None) -> None:
    if value is None:
        connection.execute(delete(entries).where(entries.c.key == key))
        return
    statement = insert_into(connection, entries).values(key=key, value=value)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))
