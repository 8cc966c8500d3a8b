"""Tables of the control store: one SQLAlchemy Core schema for SQLite and PostgreSQL.

Conventions: a stream is stored in its text form (`StreamId.__str__`, one printable line; "" stands for no
stream). Positions are 64-bit integers and exclusive. Times are microseconds since 1970 UTC; those of silos
are by the store's clock (`headrace.store.store_clock`).

The row in `headrace_version` has the version. A change of the tables adds a function to `MIGRATIONS` that migrates data
of the version before. A new database is created from the tables as they are now.
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
    delete,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)

from ..streams.cluster import LIVING
from ..streams.errors import DataDirectoryError
from .store_clock import now_us

MAX_POSITION = (1 << 63) - 1
"""Highest offset, index or epoch that the tables hold."""

_NAME = String(255).with_variant(String(255, collation="C"), "postgresql")
"""Sorted by code points in every database: rows are locked in the order of names, so all processes need one order."""
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite generates ids only for INTEGER


class _RawBinary(LargeBinary):
    """Bytes as the driver returns them: a damaged row may have a value of another type. The checksum finds it."""

    def result_processor(self, dialect: object, coltype: object) -> None:
        return None


def _checksum_column() -> Column[int]:
    """See `headrace.store.checksums`."""
    return Column("checksum", BigInteger, nullable=False, server_default=text("0"))


metadata = MetaData()

schema_version = Table(
    "headrace_version",
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
"""`epoch` counts over all subscriptions, so that a subscription that is deleted and created again gets no old epoch.
`incarnation` counts over all silos that ever joined."""

providers = Table(
    "providers",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("adapter", _NAME, nullable=False),
    Column("queues", Integer, nullable=False),
    Column("mapper", _NAME, nullable=False),
    Column("options", Text, nullable=False, server_default=text("'{}'")),
)
"""`options` is JSON: the options of the adapter that say where the queues are, without secrets."""

subscriptions = Table(
    "subscriptions",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False, server_default=text("0")),
)
"""`generation` rises with each seek, to the microseconds since 1970 at least: so it is higher than all generations that
a restored store has lost, if the clock is right. It begins above those of all deleted subscriptions, and at the time of
the last deletion at least."""

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
    _checksum_column(),
    Column("lease_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("revision", BigInteger, nullable=False, server_default=text("0")),
)
"""`behind` is JSON: [[namespace, key, offset, index, paused, [[offset, first index, end index], …]], …]. The inner
ranges are events done out of order, and may be missing. The row was written under `epoch` of the subscription and
`lease_epoch` of the queue (0 without leases). `revision` is the writer's number of the write."""

LETTER_IDENTITY = ("provider", "subscription", "queue", "token_offset", "token_index", "timestamp_us", "checksum")
"""The columns that tell dead letters apart. The position alone does not: a queue that lost its end in a crash, or that
does not outlive its process, gives positions again, to other events. The checksum is of the event's content."""

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
    Column("payload", _RawBinary, nullable=False),
    Column("attributes", Text, nullable=False),
    Column("timestamp_us", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("failed_at_us", BigInteger, nullable=False),
    Column("redrive", Boolean, nullable=False),
    _checksum_column(),
    UniqueConstraint(*LETTER_IDENTITY),
    sqlite_autoincrement=True,  # ids are never reused
)
"""`attributes` is JSON: {"id": text or null, "headers": {name: value}}."""

GAP_IDENTITY = (
    "provider", "subscription", "queue", "stream", "low_offset", "low_index", "high_offset", "high_index",
)  # fmt: skip
"""The columns that tell gap records apart."""

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
    UniqueConstraint(*GAP_IDENTITY),
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
    Column("client", _NAME, nullable=False, server_default=""),
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
    Column("secret_hash", String(64), nullable=False, server_default=""),
    Column("heartbeats", BigInteger, nullable=False, server_default=text("0")),
    Column("settings", Text, nullable=False, server_default=text("'{}'")),
    Column("process", Text, nullable=False, server_default=text("''")),
    Column("public_address", Text, nullable=False, server_default=text("''")),
)
"""Times are by the store's clock; they are for people and order new silos. `heartbeats` counts up. `serves` is
JSON: [provider, …]. `settings` is JSON: {name: value}. `process` says where the lock of the silo's process is.
`public_address` is where clients reach the silo; "" if that is `address`."""

leases = Table(
    "leases",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("queue", Integer, primary_key=True, autoincrement=False),
    Column("owner", _NAME, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    Column("home", _NAME, nullable=False),
    Column("length_us", BigInteger, nullable=False, server_default=text("15000000")),
)
"""`renewals` counts up. A lease has expired when `renewals` did not change for `length_us`, by the clock of the silo
that looks at it. The row of an expired lease stays, for its epoch. `owner` is "" if no silo has the queue. `home` is
the silo that should have the queue when all silos are there."""

suspicions = Table(
    "suspicions",
    metadata,
    Column("silo", _NAME, primary_key=True),
    Column("voter", _NAME, primary_key=True),
    Column("incarnation", BigInteger, nullable=False),
    Column("voter_incarnation", BigInteger, nullable=False),
    Column("heartbeats", BigInteger, nullable=False),
)
"""`incarnation` and `heartbeats` are of the suspected silo. A vote counts until that silo's next heartbeat."""

_IS_TAKEN = text("claim > 0")

delayed_batches = Table(
    "delayed_batches",
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
    Column("batch", _RawBinary, nullable=False),
    _checksum_column(),
    Index("delayed_batches_due", "provider", "due_at_us", "id"),
    Index("delayed_batches_taken", "provider", "queue", "claim", sqlite_where=_IS_TAKEN),  # see `_create_tables`
    sqlite_autoincrement=True,
)
"""Batches that are published into their queue later (`headrace.store.delays`). `claim` is the number of the release
that has the row, 0 before that, and -1 if the row is damaged. `producer` and `number` are of the call that stored it;
"" and 0 if the call has no producer."""

delayed_calls = Table(
    "delayed_calls",
    metadata,
    Column("provider", _NAME, primary_key=True),
    Column("producer", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)
"""The last call of each idempotent producer that stored something. `producer` is the SHA-256 of its name."""

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
"""The last release of delayed batches into a queue: its number, and the end of its holder's time; 0 if it is done."""

Migration = Callable[[Connection], None]


def _add_generation_and_public_address(connection: Connection) -> None:
    """Version 2. Version 1 counted the seeks of a subscription in an entry, if there were any."""
    connection.execute(text("ALTER TABLE subscriptions ADD COLUMN generation BIGINT DEFAULT 0 NOT NULL"))
    connection.execute(text("ALTER TABLE checkpoints ADD COLUMN lease_epoch BIGINT DEFAULT 0 NOT NULL"))
    connection.execute(text("ALTER TABLE checkpoints ADD COLUMN revision BIGINT DEFAULT 0 NOT NULL"))
    connection.execute(text("ALTER TABLE silos ADD COLUMN public_address TEXT DEFAULT '' NOT NULL"))
    is_count = entries.c.key.startswith("moves/", autoescape=True)
    counts = {row.key: row.value for row in connection.execute(select(entries).where(is_count))}
    for provider, name in connection.execute(select(subscriptions.c.provider, subscriptions.c.name)).all():
        if count := counts.get(f"moves/{provider}/{name}"):
            this = subscriptions.c.provider == provider, subscriptions.c.name == name
            connection.execute(update(subscriptions).where(*this).values(generation=int(count)))
    connection.execute(delete(entries).where(is_count))


MIGRATIONS: Sequence[Migration] = (_add_generation_and_public_address,)
"""Function i brings a database of version i + 1 to version i + 2."""

SILENT_S = 60.0
"""A silo without a heartbeat for this time, in seconds, does not run."""
_UNRELEASED = "headrace_schema"
"""The table with the version in stores from before the first release. Their versions, 1 to 5, mean other tables."""
_LOCK = 0x68656164  # any number that only headrace uses


def migrate(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Create the tables, or migrate them to this version, within the caller's transaction.

    Raises DataDirectoryError for a database that a newer headrace or another program made, and for one of an older
    version if silos run on it; nothing is changed then.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    newest = 1 + len(migrations)
    version = _version(connection)
    if version is None:
        _create_tables(connection)
        connection.execute(insert(counters), [{"name": name, "value": 0} for name in ("epoch", "incarnation")])
        connection.execute(insert(schema_version).values(id=1, version=newest))
        return
    if version > newest:
        raise DataDirectoryError(
            f"made by a newer headrace: the control store has version {version}, this one knows versions up to "
            f"{newest}; upgrade headrace, or use another data directory"
        )
    if version < newest:
        _check_no_silo_runs(connection, version, newest)
    for migration in migrations[version - 1 :]:
        migration(connection)
    if version < newest:
        connection.execute(update(schema_version).values(version=newest))


def _create_tables(connection: Connection) -> None:
    """An option for PostgreSQL in a definition above would import its dialect in each process: 40 ms of CPU."""
    if connection.dialect.name == "postgresql":
        for index in delayed_batches.indexes:
            if index.name == "delayed_batches_taken":
                index.dialect_options["postgresql"]["where"] = _IS_TAKEN
    metadata.create_all(connection, checkfirst=False)


def _check_no_silo_runs(connection: Connection, version: int, newest: int) -> None:
    """Raise DataDirectoryError if a member has a recent heartbeat: a running silo uses the old tables."""
    living = [state.value for state in LIVING]
    query = select(silos.c.name, silos.c.heartbeat_at_us).where(silos.c.state.in_(living)).order_by(silos.c.name)
    now = now_us(connection)
    ages = {name: (now - heard_at_us) / 1e6 for name, heard_at_us in connection.execute(query)}
    running = {name: age for name, age in ages.items() if 0 <= age < SILENT_S}
    if running:
        raise DataDirectoryError(
            f"the control store has version {version} and has to get version {newest}, but silos of an older headrace "
            f"run on it: {', '.join(map(repr, running))}: stop all of them first; a silo that was killed counts as "
            f"running for {SILENT_S - min(running.values()):.0f} s more"
        )


def require(connection: Connection) -> None:
    """Check that the tables have this version, and change nothing. Raises DataDirectoryError if not."""
    newest = 1 + len(MIGRATIONS)
    version = _version(connection)
    if version is None:
        raise DataDirectoryError("it has no control store: name the database that the silos use")
    if version != newest:
        raise DataDirectoryError(
            f"the control store has version {version}, this headrace uses version {newest}: run the headrace version "
            "that the silos run"
        )


def _version(connection: Connection) -> int | None:
    """Return the version of the tables, or None if there are no tables yet."""
    tables = inspect(connection).get_table_names()
    if schema_version.name in tables:
        version = connection.execute(select(schema_version.c.version)).scalar()
        if version is None or version < 1:
            raise DataDirectoryError("damaged: the control store has no schema version; restore it from a copy")
        return version
    if _UNRELEASED in tables:
        raise DataDirectoryError(
            "made by an unreleased version of headrace, which this one cannot read: move the file away, or name an "
            "empty database, then run `headrace repair control`; the events stay, create subscriptions and tokens again"
        )
    foreign = tables if connection.dialect.name == "sqlite" else sorted({*tables} & {*metadata.tables})
    if foreign:
        raise DataDirectoryError(
            f"another program's database: it has the table {foreign[0]!r}, but not {schema_version.name!r}; "
            "use another data directory"
        )
    return None
