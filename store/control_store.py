"""The control store: the data that a provider keeps besides its events.

It has subscriptions with their checkpoints, dead letters, gap records, the hashes of access tokens, and the fixed
properties of providers. Progress is fenced: `attach` returns a new epoch, and writes under an older epoch are refused.
So at most one agent writes the progress of a subscription. In a cluster several silos share that epoch, and the lease
of the queue fences as well (`headrace.store.cluster_store`). Importing this module imports SQLAlchemy: import it only
to open a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, Table, delete, select, update

from ..streams.errors import DataDirectoryError, DefinitionConflict, InvalidArgument, NotFound
from ..streams.histograms import Histogram
from . import schema, store_clock
from .checksums import CHECKED_TABLES, check_row
from .cluster_store import ClusterStore
from .database import Database
from .dead_letter_store import DeadLetterStore
from .delays import DelayStore
from .schema import entries, providers, tokens
from .store_clock import BootId, Clock
from .store_part import insert_into, store_value
from .subscription_store import SubscriptionStore
from .token_record import TokenRecord

_ROWS_AT_ONCE = 100


class ProviderRecord(NamedTuple):
    """The properties of a provider that are fixed when it is created."""

    name: str
    adapter: str
    queues: int
    mapper: str
    options: Mapping[str, Any] = {}
    """The options of the adapter that say where the queues are. They may change."""


class ControlStore(SubscriptionStore, DeadLetterStore):
    """The control data of one data directory, or of a cluster. Several processes may have it open at once.

    Every method is one transaction: durable when it returns, without effect when it raises. A cancelled call is done
    as a whole or not at all. Mappings are copied before the first wait.

    Every method raises StorageError (retryable) if the database is locked or fails, StorageFull (retryable) if there
    is no space, DataDirectoryError if the database is damaged, Closed after `aclose`, and InvalidArgument for a
    position that does not fit into 64 bits. Methods that write raise DataDirectoryError if the file of the database was
    deleted or replaced.
    """

    @classmethod
    async def open(
        cls, where: str | Path, *, timeout_s: float | None = None, existing: bool = False, shown_as: str | None = None
    ) -> ControlStore:
        """Open a control store, or create it if there is none. `where` is the path of a file in an existing directory,
        a database URL, or "memory" for a private store that ends on `aclose`. With `existing` nothing is created or
        migrated: it raises DataDirectoryError if there is no control store of this version. Errors name the store by
        `shown_as`; None: by its path or URL.

        A call that waits for another process or for a server fails after `timeout_s`; the default is 30 seconds for a
        file, 5 for a server. Raises DataDirectoryError for a file that another program or a newer headrace made,
        InvalidArgument for a URL of a database that is not supported.
        """
        prepare = schema.require if existing else schema.migrate
        return cls(await Database.open(where, prepare, timeout_s=timeout_s, shown_as=shown_as))

    @property
    def private(self) -> bool:
        """Whether the store is in memory: no other process has it, and it ends on `aclose`."""
        return self._database.private

    @property
    def durations(self) -> Histogram:
        """How long transactions took, with the wait for earlier ones."""
        return self._database.durations

    @property
    def errors(self) -> Mapping[str, int]:
        """Transactions that failed because of the database, by the code of the error."""
        return self._database.errors

    async def aclose(self) -> None:
        """Finish the pending calls, then close. Idempotent."""
        await self._database.aclose()

    def cluster(
        self, clock: Clock | None = None, *, secret_hash: str = "", boot_id: BootId = store_clock.boot_id
    ) -> ClusterStore:
        """Return the store of silos and leases in the same database. It is closed with this store."""
        return ClusterStore(self._database, clock, secret_hash=secret_hash, boot_id=boot_id)

    def delay_store(self, clock: Clock | None = None) -> DelayStore:
        """Return the store of delayed batches in the same database. It is closed with this store."""
        return DelayStore(self._database, clock)

    async def register_provider(
        self, name: str, *, adapter: str, queues: int, mapper: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Store a provider the first time. Store `options` each time, unless they are None.

        Raises InvalidArgument if the provider was created with another adapter, number of queues or mapper.
        """
        record = ProviderRecord(name, adapter, queues, mapper)
        await self._database.write(_register_provider, record, None if options is None else dict(options))

    async def providers(self) -> list[ProviderRecord]:
        """Return all providers, in the order of names."""
        return await self._database.read(_providers)

    async def damaged_rows(self) -> list[DataDirectoryError]:
        """Read all rows that have a checksum. Return an error, with key and hint, for each row that does not match."""
        found: list[DataDirectoryError] = []
        for table in CHECKED_TABLES:
            found += await self._database.read(_damaged_rows, schema.metadata.tables[table])
        return found

    async def add_token(self, token: TokenRecord) -> None:
        """Store a token. Raises DefinitionConflict, and changes nothing, if there is a token of this name."""
        await self._database.write(_add_token, token)

    async def tokens(self) -> list[TokenRecord]:
        """Return all tokens, in the order of names."""
        return await self._database.read(_tokens)

    async def delete_token(self, name: str) -> None:
        """Delete a token, so that it is no longer accepted. Raises NotFound."""
        await self._database.write(_delete_token, name)

    async def value(self, key: str) -> str | None:
        """Return the small text stored under a key, or None."""
        return await self._database.read(_value, key)

    async def set_value(self, key: str, value: str | None) -> None:
        """Store a small text under a key; None deletes it."""
        await self._database.write(store_value, key, value)

    async def value_or(self, key: str, value: str) -> str:
        """Return the text stored under a key. If there is none, store `value` and return it."""
        return await self._database.write(_value_or, key, value)


# The work of each method, within its transaction


def _register_provider(connection: Connection, wanted: ProviderRecord, options: Mapping[str, Any] | None) -> None:
    if wanted.queues < 1:
        raise InvalidArgument(f"provider {wanted.name!r} needs at least 1 queue, not {wanted.queues}")
    new = wanted._asdict() | {"options": "{}"}
    connection.execute(insert_into(connection, providers).values(new).on_conflict_do_nothing())
    stored = _provider_of(connection.execute(select(providers).where(providers.c.name == wanted.name)).one())
    if stored._replace(options=wanted.options) != wanted:
        raise InvalidArgument(_other_provider(stored, wanted))
    if options is not None and options != stored.options:
        text = msgspec.json.encode(options).decode()
        connection.execute(update(providers).where(providers.c.name == wanted.name).values(options=text))


def _provider_of(row: Row[Any]) -> ProviderRecord:
    return ProviderRecord(row.name, row.adapter, row.queues, row.mapper, msgspec.json.decode(row.options))


def _other_provider(stored: ProviderRecord, wanted: ProviderRecord) -> str:
    name = f"provider {stored.name!r}"
    if stored.queues != wanted.queues:
        return (
            f"{name} has {stored.queues} queues, not {wanted.queues}: the number is fixed at creation because streams "
            f"are mapped to queues; open it with {stored.queues}, or create another provider"
        )
    if stored.adapter != wanted.adapter:
        return (
            f"{name} keeps its events with the adapter {stored.adapter!r}, not {wanted.adapter!r}: open it with "
            f"{stored.adapter!r}, or create another provider"
        )
    return (
        f"{name} maps streams with {stored.mapper!r}, not {wanted.mapper!r}: another mapper would look for streams in "
        f"other queues; open it with {stored.mapper!r}, or create another provider"
    )


def _providers(connection: Connection) -> list[ProviderRecord]:
    rows = connection.execute(select(providers).order_by(providers.c.name))
    return [_provider_of(row) for row in rows]


def _damaged_rows(connection: Connection, table: Table) -> list[DataDirectoryError]:
    found: list[DataDirectoryError] = []
    for row in connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)):
        try:
            check_row(table.name, row)
        except DataDirectoryError as damage:
            found.append(damage)
    return found


def _add_token(connection: Connection, token: TokenRecord) -> None:
    row = token._asdict() | {"permissions": msgspec.json.encode(token.permissions).decode()}
    statement = insert_into(connection, tokens).values(row).on_conflict_do_nothing(index_elements=["name"])
    if connection.execute(statement.returning(tokens.c.name)).first() is None:
        raise DefinitionConflict(f"a token named {token.name!r} exists: use another name, or revoke that one first")


def _tokens(connection: Connection) -> list[TokenRecord]:
    rows = connection.execute(select(tokens).order_by(tokens.c.name))
    return [_token_of(row) for row in rows]


def _token_of(row: Row[Any]) -> TokenRecord:
    try:
        permissions = msgspec.json.decode(row.permissions, type=dict[str, tuple[str, ...]])
    except msgspec.MsgspecError as error:
        raise DataDirectoryError(
            f"token {row.name!r} in the control store is damaged ({error}); revoke it and create it again"
        ) from None
    return TokenRecord(row.name, row.hash, permissions, row.created_at_us, row.client)


def _delete_token(connection: Connection, name: str) -> None:
    if not connection.execute(delete(tokens).where(tokens.c.name == name)).rowcount:
        raise NotFound(f"there is no token named {name!r}")


def _value(connection: Connection, key: str) -> str | None:
    return connection.execute(select(entries.c.value).where(entries.c.key == key)).scalar()


def _value_or(connection: Connection, key: str, value: str) -> str:
    connection.execute(insert_into(connection, entries).values(key=key, value=value).on_conflict_do_nothing())
    return connection.execute(select(entries.c.value).where(entries.c.key == key)).scalar_one()
