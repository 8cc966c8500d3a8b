"""Tables of the control store: one SQLAlchemy Core schema for SQLite and PostgreSQL.

Conventions: a stream is stored in its text form (`StreamId.__str__`, one printable line; "" where there is none, which
is no stream's text). Positions are 64-bit integers, exclusive as everywhere. Times are microseconds since 1970 UTC.

The row in `headrace_schema` carries the version. A change of the tables adds a function to `MIGRATIONS`, which brings
data of the version before up to date; a new database is created from the tables as they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)

from .errors import DataDirectoryError

MAX_POSITION = (1 << 63) - 1
"""Highest offset, index or epoch that the tables hold."""

_NAME = String(255).with_variant(String(255, collation="C"), "postgresql")
"""Sorted by code points in every database: rows are locked in the order of names, so all must agree on it."""
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER counts up by itself there

metadata = MetaData()

schema_version = Table(
    "headrace_schema",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`epoch` counts over all subscriptions, so that one deleted and created again never meets its old epochs;
`incarnation` over all silos that ever joined."""

providers = Table(
    "providers",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("adapter", _NAME, nullable=False),
    Column("queues", Integer, nullable=False),
    Column("mapper", _NAME, nullable=False),
)

subscriptions = Table(
    "subscriptions",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("subscription", _NAME, primary_key=True),
    Column("queue", Integer, primary_key=True, autoincrement=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("watermark", BigInteger, nullable=False),
    Column("behind", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
)
"""`behind` is JSON: [[namespace, key, offset, index, paused], …]. `epoch` is the one that wrote the row."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("provider", _NAME, nullable=False),
    Column("subscription", _NAME, nullable=False),
    Column("queue", Integer, nullable=False),
    Column("token_offset", BigInteger, nullable=False),
    Column("token_index", BigInteger, nullable=False),
    Column("stream", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("attributes", Text, nullable=False),
    Column("timestamp_us", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("failed_at_us", BigInteger, nullable=False),
    Column("redrive", Boolean, nullable=False),
    UniqueConstraint("provider", "subscription", "queue", "token_offset", "token_index"),
    sqlite_autoincrement=True,  # an id is never used again
)
"""`attributes` is JSON: {"id": text or null, "headers": {name: value}}."""

gaps = Table(
    "gaps",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("provider", _NAME, nullable=False),
    Column("subscription", _NAME, nullable=False),
    Column("queue", Integer, nullable=False),
    Column("stream", Text, nullable=False),
    Column("low_offset", BigInteger, nullable=False),
    Column("low_index", BigInteger, nullable=False),
    Column("high_offset", BigInteger, nullable=False),
    Column("high_index", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    UniqueConstraint(
        "provider", "subscription", "queue", "stream", "low_offset", "low_index", "high_offset", "high_index"
    ),
    sqlite_autoincrement=True,
)

entries = Table("entries", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

tokens = Table(
    "tokens",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("hash", LargeBinary, nullable=False),
    Column("permissions", Text, nullable=False),
    Column("created_at_us", BigInteger, nullable=False),
)
"""`hash` is the SHA-256 of the token's text. `permissions` is JSON: {permission: [pattern of namespaces, …]}."""

silos = Table(
    "silos",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("incarnation", BigInteger, nullable=False),
    Column("address", Text, nullable=False),
    Column("serves", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("joined_at_us", BigInteger, nullable=False),
    Column("heartbeat_at_us", BigInteger, nullable=False),
)
"""Times here, in `leases` and in `suspicions` are by the store's clock. `serves` is JSON: [provider, …]."""

leases = Table(
    "leases",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("queue", Integer, primary_key=True, autoincrement=False),
    Column("owner", _NAME, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at_us", BigInteger, nullable=False),
    Column("home", _NAME, nullable=False),
)
"""A row stays when its lease is over, for its epoch. `owner` is "" where nobody has it. `home` is the silo that should
have it once everybody is there."""

suspicions = Table(
    "suspicions",
    metadata,
    Column("silo", _NAME, primary_key=True),
    Column("voter", _NAME, primary_key=True),
    Column("incarnation", BigInteger, nullable=False),
    Column("voter_incarnation", BigInteger, nullable=False),
    Column("expires_at_us", BigInteger, nullable=False),
)
"""`incarnation` is that of the silo. A vote counts until it expires."""

_IS_TAKEN = text("claim > 0")

parked = Table(
    "parked",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("provider", _NAME, nullable=False),
    Column("queue", Integer, nullable=False),
    Column("due_at_us", BigInteger, nullable=False),
    Column("claim", BigInteger, nullable=False),
    Column("producer", String(64), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("stream", Text, nullable=False),
    Column("events", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("batch", LargeBinary, nullable=False),
    Index("parked_due", "provider", "due_at_us", "id"),
    Index("parked_taken", "provider", "queue", "claim", sqlite_where=_IS_TAKEN, postgresql_where=_IS_TAKEN),
    sqlite_autoincrement=True,
)
"""Batches that are published into their queue later (`headrace.streams.parking`). `claim` is the number of the release
that has the row, 0 while none has; `producer` and `number` are the call that parked it, "" and 0 where it has none."""

parked_calls = Table(
    "parked_calls",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("producer", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)
"""The last call of each idempotent producer that parked something. `producer` is the SHA-256 of its name."""

releases = Table(
    "releases",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("queue", Integer, primary_key=True, autoincrement=False),
    Column("producer", String(64), nullable=False),
    Column("claim", BigInteger, nullable=False),
    Column("holder", String(64), nullable=False),
    Column("until_us", BigInteger, nullable=False),
)
"""The last release of parked batches into a queue: its number, and until when its holder has it; 0 once it is done."""

Migration = Callable[[Connection], None]


def _add_tokens(connection: Connection) -> None:
    """Version 2: access tokens."""
    # As they were in version 2: what the table above becomes later is the matter of later migrations.
    table = Table(
        "tokens",
        MetaData(),
        Column("name", _NAME, primary_key=True),
        Column("hash", LargeBinary, nullable=False),
        Column("permissions", Text, nullable=False),
        Column("created_at_us", BigInteger, nullable=False),
    )
    table.create(connection)


def _add_cluster(connection: Connection) -> None:
    """Version 3: silos, their leases of queues, their votes against one another."""
    now = MetaData()
    Table(
        "silos",
        now,
        Column("name", _NAME, primary_key=True),
        Column("incarnation", BigInteger, nullable=False),
        Column("address", Text, nullable=False),
        Column("serves", Text, nullable=False),
        Column("state", String(16), nullable=False),
        Column("joined_at_us", BigInteger, nullable=False),
        Column("heartbeat_at_us", BigInteger, nullable=False),
    )
    Table(
        "leases",
        now,
        Column("provider", _NAME, primary_key=True),
        Column("queue", Integer, primary_key=True, autoincrement=False),
        Column("owner", _NAME, nullable=False),
        Column("incarnation", BigInteger, nullable=False),
        Column("epoch", BigInteger, nullable=False),
        Column("expires_at_us", BigInteger, nullable=False),
        Column("home", _NAME, nullable=False),
    )
    Table(
        "suspicions",
        now,
        Column("silo", _NAME, primary_key=True),
        Column("voter", _NAME, primary_key=True),
        Column("incarnation", BigInteger, nullable=False),
        Column("voter_incarnation", BigInteger, nullable=False),
        Column("expires_at_us", BigInteger, nullable=False),
    )
    now.create_all(connection, checkfirst=False)
    connection.execute(insert(counters).values(name="incarnation", value=0))


def _add_parking(connection: Connection) -> None:
    """Version 4: batches that wait until they are due."""
    now = MetaData()
    taken = text("claim > 0")
    Table(
        "parked",
        now,
        Column("id", _ROW_ID, primary_key=True),
        Column("provider", _NAME, nullable=False),
        Column("queue", Integer, nullable=False),
        Column("due_at_us", BigInteger, nullable=False),
        Column("claim", BigInteger, nullable=False),
        Column("producer", String(64), nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("stream", Text, nullable=False),
        Column("events", Integer, nullable=False),
        Column("priority", Integer, nullable=False),
        Column("batch", LargeBinary, nullable=False),
        Index("parked_due", "provider", "due_at_us", "id"),
        Index("parked_taken", "provider", "queue", "claim", sqlite_where=taken, postgresql_where=taken),
        sqlite_autoincrement=True,
    )
    Table(
        "parked_calls",
        now,
        Column("provider", _NAME, primary_key=True),
        Column("producer", String(64), primary_key=True),
        Column("number", BigInteger, nullable=False),
        Column("at_us", BigInteger, nullable=False),
    )
    Table(
        "releases",
        now,
        Column("provider", _NAME, primary_key=True),
        Column("queue", Integer, primary_key=True, autoincrement=False),
        Column("producer", String(64), nullable=False),
        Column("claim", BigInteger, nullable=False),
        Column("holder", String(64), nullable=False),
        Column("until_us", BigInteger, nullable=False),
    )
    now.create_all(connection, checkfirst=False)


MIGRATIONS: Sequence[Migration] = (_add_tokens, _add_cluster, _add_parking)
"""Function i brings a database of version i + 1 to version i + 2."""

_LOCK = 0x68656164  # any number that only headrace uses


def migrate(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Create the tables, or bring them to this version, within the caller's transaction.

    Raises DataDirectoryError for a database that a newer headrace or another program made; nothing is changed then.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    newest = 1 + len(migrations)
    version = _version(connection)
    if version is None:
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(counters), [{"name": name, "value": 0} for name in ("epoch", "incarnation")])
        connection.execute(insert(schema_version).values(id=1, version=newest))
        return
    if version > newest:
        raise DataDirectoryError(
            f"made by a newer headrace: the control store has version {version}, this one knows versions up to "
            f"{newest}; upgrade headrace, or use another data directory"
        )
    for migration in migrations[version - 1 :]:
        migration(connection)
    if version < newest:
        connection.execute(update(schema_version).values(version=newest))


def _version(connection: Connection) -> int | None:
    """The version of the tables, None where there are none yet."""
    tables = inspect(connection).get_table_names()
    if schema_version.name in tables:
        version = connection.execute(select(schema_version.c.version)).scalar()
        if version is None or version < 1:
            raise DataDirectoryError("damaged: the control store has no schema version; restore it from a copy")
        return version
    foreign = tables if connection.dialect.name == "sqlite" else sorted({*tables} & {*metadata.tables})
    if foreign:
        raise DataDirectoryError(
            f"another program's database: it has the table {foreign[0]!r}, but not {schema_version.name!r}; "
            "use another data directory"
        )
    return None
