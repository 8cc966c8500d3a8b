"""Tables in the user's database, for PostgreSQL and SQLite. They are created only on request.

Conventions: a stream is stored as `key_of` returns it. Positions are 64-bit integers. Times are microseconds since
1970 UTC by the clock of the process that writes the row, if nothing else is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Dialect,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from ..streams.errors import InvalidArgument, NotFound, NotSupported
from ..streams.identity import StreamId
from .driver_state import begin_writing

MAX_KEY = 1000
"""Longest stream that is stored as it is, in characters. PostgreSQL's indexes take keys of up to 2,700 bytes."""
KEPT_CHARACTERS = 400
"""Characters of a longer stream that its key begins with."""

_NAME = String(255).with_variant(String(255, collation="C"), "postgresql")
_KEY = Text().with_variant(Text(collation="C"), "postgresql")

UNAPPLIED, APPLIED, UNKNOWN = "unapplied", "applied", "unknown"
"""Outcomes of an event that failed. `unknown`: a redrive was refused, because this table had no row for the event."""

metadata = MetaData()

effects_version = Table(
    "headrace_effects_version",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
)

positions = Table(
    "headrace_position",
    metadata,
    Column("origin", _NAME, primary_key=True),
    Column("subscription", _NAME, primary_key=True),
    Column("stream", _KEY, primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("queue", Integer, nullable=False),
    Column("token_offset", BigInteger, nullable=False),
    Column("token_index", BigInteger, nullable=False),
    Column("unapplied", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("written_at_us", BigInteger, nullable=False),
    Column("state", LargeBinary),
    Column("state_version", Integer),
    Column("expires_at_us", BigInteger),
)
"""One row for each stream: the last event whose effects are committed. `unapplied` counts the stream's rows in
`headrace_unapplied` that a claim must look up.
`revision` counts the writes of the row. `state` is the state of the stream; None without one."""

unapplied = Table(
    "headrace_unapplied",
    metadata,
    Column("origin", _NAME, primary_key=True),
    Column("subscription", _NAME, primary_key=True),
    Column("stream", _KEY, primary_key=True),
    Column("token_offset", BigInteger, primary_key=True, autoincrement=False),
    Column("token_index", BigInteger, primary_key=True, autoincrement=False),
    Column("timestamp_us", BigInteger, primary_key=True, autoincrement=False),
    Column("outcome", String(16), nullable=False, server_default=UNAPPLIED),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    Column("changed_at_us", BigInteger, nullable=False, server_default="0"),
)
"""One row for each event that failed, and may be a dead letter. `outcome` is `unapplied`, `applied` or `unknown`.
`generation` is that of the last change. The timestamp distinguishes events if a queue that lost its end gives offsets
again."""

_OUTBOX_ID = BigInteger().with_variant(Integer, "sqlite")


def _outbox(tables: MetaData, key: Sequence[str], *indexes: Index, **options: Any) -> Table:
    return Table(
        "headrace_outbox",
        tables,
        Column("id", _OUTBOX_ID, Identity(always=True)),
        Column("provider", _NAME, nullable=False),
        Column("lane", Integer, nullable=False),
        Column("stream", _KEY, nullable=False),
        Column("events", Integer, nullable=False),
        Column("batch", LargeBinary, nullable=False),
        Column("written_at_us", BigInteger, nullable=False),
        Column("problem", Text),
        PrimaryKeyConstraint(*key),
        *indexes,
        Index(
            "headrace_outbox_held", "provider", "lane", "stream",
            postgresql_where=text("problem IS NOT NULL"), sqlite_where=text("problem IS NOT NULL"),
        ),
        **options,
    )  # fmt: skip


_LANE_KEY = ("provider", "lane", "id")
"""In PostgreSQL, one index is the key and serves the mover: each index costs the user's INSERT."""
outbox = _outbox(metadata, _LANE_KEY)
"""Batches to publish. The streams of a provider are divided into lanes. Within a lane, batches are moved in the order
of ids, and are deleted once they are published. `problem`: the queue refused the batch; its stream waits."""
_IN_SQLITE = {
    outbox: _outbox(MetaData(), ("id",), Index("headrace_outbox_lanes", *_LANE_KEY), sqlite_autoincrement=True)
}
"""SQLite numbers rows only if `id` alone is the key."""

outbox_lanes = Table(
    "headrace_outbox_lane",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("producer", String(64), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("ids", Text, nullable=False),
    Column("holder", String(64), nullable=False),
    Column("until_us", BigInteger, nullable=False),
)
"""The last release of each lane: the batches with these `ids` (JSON) are published as call `number` of an idempotent
`producer`. `holder` moves the lane until `until_us`, by the clock of the database."""

_STORAGE = {
    positions: "fillfactor = 70",
    outbox: "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000",
    outbox_lanes: "fillfactor = 50",
}
"""Storage parameters of PostgreSQL. SQLAlchemy 2.0 has no option for those of a table."""

Migration = Callable[[Connection], None]


def _add_outcomes(connection: Connection) -> None:
    for column in (f"outcome VARCHAR(16) NOT NULL DEFAULT '{UNAPPLIED}'", *_NUMBERS_OF_OUTCOMES):
        connection.execute(text(f"ALTER TABLE headrace_unapplied ADD COLUMN {column}"))


_NUMBERS_OF_OUTCOMES = ("generation BIGINT NOT NULL DEFAULT 0", "changed_at_us BIGINT NOT NULL DEFAULT 0")


def _key_outbox_by_lane(connection: Connection) -> None:
    """Replace key and index of the outbox by one key. The table is locked meanwhile."""
    if connection.dialect.name == "postgresql":
        name = inspect(connection).get_pk_constraint(outbox.name)["name"] or ""
        old = connection.dialect.identifier_preparer.quote(name)
        key = ", ".join(_LANE_KEY)
        connection.execute(text(f"ALTER TABLE headrace_outbox DROP CONSTRAINT {old}, ADD PRIMARY KEY ({key})"))
        connection.execute(text("DROP INDEX IF EXISTS headrace_outbox_lanes"))


MIGRATIONS: Sequence[Migration] = (_add_outcomes, _key_outbox_by_lane)
"""Function i brings tables of version i + 1 to version i + 2."""
VERSION = 1 + len(MIGRATIONS)

_LOCK = 0x68656665
"""Any number that only headrace uses."""
_DIALECTS: dict[str, Callable[[], Dialect]] = {"postgresql": postgresql.dialect, "sqlite": sqlite.dialect}


@lru_cache(maxsize=4096)
def key_of(stream: StreamId) -> str:
    """Return the text by which a stream is stored: its text form, or a beginning of it and a hash if it is long."""
    text = str(stream)
    if len(text) <= MAX_KEY:
        return text
    return f"{text[:KEPT_CHARACTERS]}%~{hashlib.sha256(text.encode()).hexdigest()}"  # `%~` is in no text form


def misplaced_key_of(stream: StreamId, queue: int) -> str:
    """Return the text by which events of a stream are stored that are in another queue than the stream."""
    return f"{key_of(stream)}%@{queue}"  # `%@` is in no text form


def check_dialect(name: str) -> None:
    """Raise NotSupported if effects cannot be applied in databases of this dialect."""
    if name not in _DIALECTS:
        raise NotSupported(f"effects need PostgreSQL or SQLite, and the engine is for {name}")


def ddl(dialect: str = "postgresql") -> list[str]:
    """Return the statements that create the tables. Raises NotSupported for another dialect."""
    check_dialect(dialect)
    return [*_creations(dialect), f"INSERT INTO {effects_version.name} (id, version) VALUES (1, {VERSION})"]  # noqa: S608


def _creations(dialect: str) -> list[str]:
    chosen = _DIALECTS[dialect]()
    statements: list[str] = []
    for table in metadata.sorted_tables:
        made_as = _IN_SQLITE.get(table, table) if dialect == "sqlite" else table
        for made in (CreateTable(made_as), *map(CreateIndex, _indexes(made_as))):
            lines = str(made.compile(dialect=chosen)).strip().replace("\t", "    ").splitlines()
            statement = "\n".join(line.rstrip() for line in lines)
            has_storage = isinstance(made, CreateTable) and table in _STORAGE and dialect == "postgresql"
            statements.append(f"{statement} WITH ({_STORAGE[table]})" if has_storage else statement)
    return statements


def _indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))


def migrate(connection: Connection) -> bool:
    """Create the tables, or bring them to this version, in the caller's transaction. Return whether this changed them.

    Raises NotSupported for another dialect, InvalidArgument for tables of a newer headrace and for another encoding
    than UTF-8.
    """
    check_dialect(connection.dialect.name)
    check_encodings(connection)
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    version = _version(connection)
    if version != VERSION and connection.dialect.name == "sqlite":
        begin_writing(connection)
        version = _version(connection)
    if version is None:
        for statement in _creations(connection.dialect.name):
            connection.exec_driver_sql(statement)
        connection.execute(insert(effects_version).values(id=1, version=VERSION))
        return True
    _check_not_newer(version)
    for migration in MIGRATIONS[version - 1 :]:
        migration(connection)
    connection.execute(update(effects_version).values(version=VERSION))
    return version < VERSION


def require(connection: Connection) -> None:
    """Check that the tables have this version. Raises NotFound if not, InvalidArgument for those of a newer
    headrace."""
    version = _version(connection)
    if version is None:
        raise no_tables(connection)
    _check_not_newer(version)
    if version < VERSION:
        where, given = _names(connection)
        raise NotFound(
            f"database {where} has tables for effects of version {version}, and this headrace needs version {VERSION}: "
            f"change them with 'headrace effects migrate {given}'"
        )


def check_encodings(connection: Connection) -> None:
    """Raise InvalidArgument if the database or the connection cannot store the name of every stream. Only PostgreSQL
    has several encodings."""
    if connection.dialect.name != "postgresql":
        return
    stored, sent = connection.execute(_ENCODINGS).one()
    if stored not in {"UTF8", "SQL_ASCII"} or sent != "UTF8":
        where, _ = _names(connection)
        raise InvalidArgument(
            f"database {where}: its encoding is {stored} and that of the connection {sent}, which lack characters that "
            "names of streams may have: take a database with the encoding UTF8, and client_encoding = UTF8"
        )


_ENCODINGS = text("SELECT current_setting('server_encoding'), current_setting('client_encoding')")
GRANT = "grant this role the rights that docs/effects.md lists"
_NO_RIGHTS = text("""
    SELECT name, kind FROM unnest(ARRAY['headrace_position', 'headrace_unapplied']) AS name,
        unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS kind
    WHERE NOT has_table_privilege(to_regclass(name), kind)
""")


def check_rights(connection: Connection) -> None:
    """Raise InvalidArgument if the role has not the rights on the tables that each event needs. Only PostgreSQL has
    rights."""
    if connection.dialect.name != "postgresql":
        return
    if missing := connection.execute(_NO_RIGHTS).all():
        name, kind = missing[0]
        where, _ = _names(connection)
        raise InvalidArgument(f"database {where}: no right to {kind} on table {name}: {GRANT}")


def no_tables(connection: Connection | None = None) -> NotFound:
    """Return the error for a database without tables. None: its URL is not known."""
    if connection is None:
        return NotFound(
            "database of the connection has no tables for effects: create them with 'headrace effects migrate URL'; if "
            "the transaction sets search_path, publish before that"
        )
    where, given = _names(connection)
    return NotFound(f"database {where} has no tables for effects: create them with 'headrace effects migrate {given}'")


def _names(connection: Connection) -> tuple[str, str]:
    """Return the database's URL for a message, and for a command."""
    url = connection.engine.url
    where = url.render_as_string()
    return where, where if url.password is None else "URL"  # a masked password cannot be copied


def _check_not_newer(version: int) -> None:
    if version > VERSION:
        raise InvalidArgument(
            f"a newer headrace made the tables for effects: they have version {version}, and this one knows versions "
            f"up to {VERSION}: upgrade headrace"
        )


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(effects_version.name):
        return None
    return connection.execute(select(effects_version.c.version)).scalar()
