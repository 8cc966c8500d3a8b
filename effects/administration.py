"""Look at positions and states in the user's database, change states, and delete rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    and_,
    case,
    create_engine,
    delete,
    event,
    func,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from ..streams.clock import now_us
from ..streams.errors import InvalidArgument, NotFound, NotSupported, PayloadTooLarge, StorageError
from ..streams.identity import SequenceToken, StreamId
from .failed_events import count_again
from .schema import UNAPPLIED, UNKNOWN, check_dialect, key_of, outbox, outbox_lanes, positions, require, unapplied
from .state import MAX_STATE_BYTES

_MICROSECOND = timedelta(microseconds=1)
_MOST = (1 << 63) - 1
"""The highest LIMIT that a database accepts."""
_SYNC_DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}


_ADD_STATE = text("""
    INSERT INTO headrace_position AS p (origin, subscription, stream, generation, queue, token_offset, token_index,
    unapplied, revision, written_at_us, state, state_version, expires_at_us)
    VALUES (:origin, :subscription, :stream, -1, 0, 0, 0, 0, 1, :now_us, :state, :state_version, NULL)
    ON CONFLICT (origin, subscription, stream) DO UPDATE SET revision = p.revision + 1,
    written_at_us = excluded.written_at_us, state = excluded.state,
    expires_at_us = CASE WHEN p.expires_at_us > :now_us THEN p.expires_at_us END,
    state_version = COALESCE(CAST(:version AS INTEGER), p.state_version, excluded.state_version)
""")
"""The generation -1 comes before every generation of a subscription. A handler may have inserted the row meanwhile."""


_NEVER_MOVED = (
    "no silo has moved events of this provider: check the provider name given to `Outbox`, or start a silo whose "
    "provider of this name has the option `outbox`"
)


class EffectsSummary(NamedTuple):
    """The rows of one subscription of one provider."""

    origin: str
    subscription: str
    streams: int
    states: int
    unapplied: int
    """Events that failed, and are neither applied nor redriven."""
    unknown: int
    """Dead letters whose redrive was refused: see `unknown_events`."""
    written_at_us: int
    """The time of the last write."""


class UnknownEvent(NamedTuple):
    """A dead letter whose redrive was refused."""

    origin: str
    subscription: str
    stream: str
    token: SequenceToken
    timestamp_us: int


class OutboxSummary(NamedTuple):
    """The rows of an outbox for one provider."""

    provider: str
    batches: int
    events: int
    oldest_at_us: int
    refused: int
    """Batches that the queue refused: their streams wait."""
    problem: str | None
    """Why one of them was refused, or that no silo has moved events of this provider."""


class StoredState(NamedTuple):
    """The state of one stream."""

    origin: str
    subscription: str
    stream: str
    token: SequenceToken
    """The last event whose effects are committed."""
    value: bytes
    version: int
    expires_at_us: int | None


def engine_of(url: str, *, create: bool = False) -> Engine:
    """Return an engine for a URL of SQLAlchemy. For one with a driver for asyncio, such as asyncpg, it is an engine for
    the same database with psycopg or sqlite3. Unless `create`, the engine raises NotFound instead of creating a file of
    SQLite.

    Raises InvalidArgument for another text and for SQLite in memory, NotSupported for another database.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgres":  # libpq takes this name, too
            parsed = parsed.set(drivername="postgresql")
        backend = parsed.get_backend_name()
        check_dialect(backend)
        name = url.partition("@")[2].partition("?")[2].partition("=")[0]  # a password with @ and ? looks like a query
        if backend == "postgresql" and "@" in f"{parsed.host}{parsed.database}{name}":
            raise ValueError  # noqa: TRY301 (a part of the password would be in errors of the driver)
        _refuse_in_memory(parsed)
        if parsed.drivername == "postgresql" or parsed.get_dialect().is_async:
            parsed = parsed.set(drivername=_SYNC_DRIVERS[backend])
        # PgBouncer in transaction mode executes the next statement on another connection, which has no prepared ones.
        psycopg = parsed.drivername == "postgresql+psycopg"
        ours = {"prepare_threshold": None, "client_encoding": "utf8"}
        engine = create_engine(parsed, connect_args=ours if psycopg else {})
    except ModuleNotFoundError as missing:
        extra = ": pip install 'headrace[postgres]'" if missing.name == "psycopg" else ""
        package = missing.name or str(missing)
        raise NotSupported(f"the database needs the package {package!r}, which is not installed{extra}") from None
    except InvalidArgument:
        raise
    except (ArgumentError, ValueError, NoSuchModuleError):  # without the URL: it may have a password
        raise InvalidArgument(
            "the URL of the database is wrong: write postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:///FILE; in "
            "the user and the password, write %2F for /, %40 for @, %3A for :, %3F for ?, %23 for #"
        ) from None
    if backend == "sqlite" and not create:
        event.listen(engine, "do_connect", partial(_check_file, parsed.database))
    return engine


def _refuse_in_memory(url: URL) -> None:
    """Raise InvalidArgument for SQLite in memory: the tables would vanish with the connection."""
    name = url.database or ":memory:"
    in_memory = name.removeprefix("file:") == ":memory:" or url.query.get("mode") == "memory"
    if url.get_backend_name() == "sqlite" and in_memory:
        raise InvalidArgument(
            "effects in SQLite need a file: a database in memory ends with its connection; write sqlite:///FILE"
        )


@contextmanager
def opened(url: str, *, migrated: bool = True) -> Generator[Connection]:
    """Open a transaction in the database at a URL of SQLAlchemy, for the length of a `with`.

    Raises InvalidArgument for another URL, NotSupported for another database, StorageError if it cannot be reached;
    with `migrated`, NotFound if its file is missing, or it has no tables for effects.
    """
    engine = engine_of(url, create=not migrated)
    try:
        with engine.begin() as connection:
            if migrated:
                require(connection)
            yield connection
    except DBAPIError as error:
        raise StorageError(f"{engine.url.render_as_string()}: {error.orig}") from None
    finally:
        engine.dispose()


def _check_file(
    shown: str | None, _dialect: object, _record: object, arguments: Sequence[str], options: Mapping[str, Any]
) -> None:
    """SQLite would create the file. Raise NotFound if it is missing. `shown` is its name for the user."""
    path = unquote(urlsplit(arguments[0]).path) if options.get("uri") else arguments[0]
    if not Path(path).exists():
        raise NotFound(f"there is no file {shown!r}: check its name, or create it with 'headrace effects migrate'")


def summaries(connection: Connection) -> list[EffectsSummary]:
    """Return summaries of the rows in the database, by origin and subscription."""
    row = positions.c
    key = row.origin, row.subscription
    query = select(*key, func.count(), func.count(row.state), func.max(row.written_at_us)).group_by(*key).order_by(*key)
    outcome = unapplied.c.origin, unapplied.c.subscription, unapplied.c.outcome
    failed = {
        tuple(each[:3]): each[3] for each in connection.execute(select(*outcome, func.count()).group_by(*outcome))
    }
    return [
        EffectsSummary(
            origin, subscription, streams, states,
            failed.get((origin, subscription, UNAPPLIED), 0), failed.get((origin, subscription, UNKNOWN), 0),
            written_at_us,
        )
        for origin, subscription, streams, states, written_at_us in connection.execute(query)
    ]  # fmt: skip


def unknown_events(
    connection: Connection, subscription: str | None = None, origin: str | None = None
) -> list[UnknownEvent]:
    """Return the dead letters whose redrive was refused, because it is not known whether their effects are applied."""
    event = unapplied.c
    columns = event.origin, event.subscription, event.stream, event.token_offset, event.token_index
    query = select(*columns, event.timestamp_us).where(*_unknown(subscription, origin)).order_by(*unapplied.primary_key)
    return [UnknownEvent(*each[:3], SequenceToken(each[3], each[4]), each[5]) for each in connection.execute(query)]


def apply_unknown(connection: Connection, subscription: str | None = None, origin: str | None = None) -> int:
    """Mark the unknown events as unapplied, so that a redrive applies them. Return their number."""
    changed = {"outcome": UNAPPLIED, "changed_at_us": now_us()}
    return connection.execute(update(unapplied).where(*_unknown(subscription, origin)).values(changed)).rowcount


def _unknown(subscription: str | None, origin: str | None) -> list[ColumnElement[bool]]:
    return [unapplied.c.outcome == UNKNOWN, *_matching(unapplied, subscription, origin)]


def outboxes(connection: Connection) -> list[OutboxSummary]:
    """Return the events that are committed and not published yet, by provider."""
    row = outbox.c
    counts = func.count(), func.sum(row.events), func.min(row.written_at_us), func.count(row.problem)
    query = select(row.provider, *counts, func.min(row.problem)).group_by(row.provider).order_by(row.provider)
    # A silo stores a lane before it moves the first event of a provider.
    moved = connection.execute(select(outbox_lanes.c.provider).distinct()).scalars().all()
    return [
        OutboxSummary(
            provider, batches, int(events), oldest, refused, problem or (None if provider in moved else _NEVER_MOVED)
        )
        for provider, batches, events, oldest, refused, problem in connection.execute(query)
    ]


def retry_refused(connection: Connection) -> int:
    """Clear the refusals of batches, so that the mover tries them again. Return the number of these batches."""
    return connection.execute(update(outbox).where(outbox.c.problem.is_not(None)).values(problem=None)).rowcount


def states(
    connection: Connection, subscription: str | None = None, origin: str | None = None, *, limit: int = 100
) -> list[StoredState]:
    """Return the states that are stored, in the order of their streams."""
    return [_state(row) for row in connection.execute(_select_states(subscription, origin).limit(min(limit, _MOST)))]


def pages_of_states(
    connection: Connection, subscription: str | None = None, origin: str | None = None, *, rows: int
) -> Iterator[Sequence[StoredState]]:
    """Return all states of one snapshot, in pages of `rows`."""
    query = _select_states(subscription, origin)
    for page in connection.execution_options(yield_per=rows).execute(query).partitions():
        yield [_state(row) for row in page]


def _select_states(subscription: str | None, origin: str | None) -> Select[Any]:
    row = positions.c
    query = select(positions).where(row.state.is_not(None), *_matching(positions, subscription, origin))
    return query.order_by(row.origin, row.subscription, row.stream)


def state(connection: Connection, subscription: str, stream: StreamId, origin: str | None = None) -> StoredState:
    """Return the state of a stream. Raises NotFound; InvalidArgument if several providers have one."""
    row = _find(connection, subscription, stream, origin)
    if row is None or row.state is None:
        raise NotFound(f"subscription {subscription!r} has no state of stream {stream}")
    return _state(row)


def set_state(
    connection: Connection,
    subscription: str,
    stream: StreamId,
    value: bytes | None,
    *,
    version: int | None = None,
    origin: str | None = None,
    max_bytes: int = MAX_STATE_BYTES,
) -> bool:
    """Set the state of a stream, or delete it. A new state keeps the expiry time of the state that it replaces; it has
    none if that one had none, or has expired. Without `version`, it has that of the former one, or else 1. A handler
    that runs meanwhile runs again. Return whether an event of the stream was applied before.

    Raises NotFound if there is no state to delete, or no row and no `origin`; InvalidArgument if several providers have
    such a row and none is named; PayloadTooLarge.
    """
    if value is not None and len(value) > max_bytes:
        raise PayloadTooLarge(
            "the state", len(value), max_bytes, "give --max-bytes if StreamState(max_bytes=...) is higher"
        )
    row = _find(connection, subscription, stream, origin)
    if value is None and (row is None or row.state is None):
        raise NotFound(f"subscription {subscription!r} has no state of stream {stream}")
    number = None if value is None else version or (row.state_version if row is not None else None) or 1
    values: dict[str, Any] = {"state": value, "state_version": number}
    now, known = now_us(), positions.c
    if row is not None:
        this = and_(*_matching(positions, subscription, row.origin), known.stream == row.stream)
        kept = None if value is None else case((known.expires_at_us > now, known.expires_at_us))
        values |= {"expires_at_us": kept, "revision": known.revision + 1, "written_at_us": now}
        connection.execute(update(positions).where(this).values(values))
        return row.generation >= 0
    key = {"origin": origin or _only_origin(connection, subscription), "subscription": subscription}
    connection.execute(_ADD_STATE, {**key, "stream": key_of(stream), **values, "version": version, "now_us": now})
    return False


def prune(connection: Connection, older_than: timedelta, origin: str | None = None) -> tuple[int, int]:
    """Delete states whose time to live is over, and positions that were not written for `older_than` and have neither a
    state nor an event to redrive. Return the numbers of both.

    This also forgets events that were redriven, or whose redrive was refused, before that time.
    """
    row, now = positions.c, now_us()
    mine = _matching(positions, None, origin)
    expired = and_(row.expires_at_us <= now, *mine)
    nothing = {"state": None, "state_version": None, "expires_at_us": None, "revision": row.revision + 1}
    ended = connection.execute(update(positions).where(expired).values(nothing)).rowcount
    before = now - older_than // _MICROSECOND
    key = row.origin, row.subscription, row.stream
    counting = connection.execute(select(*key).where(row.unapplied > 0, *mine).with_for_update()).mappings().all()
    event = unapplied.c
    decided = and_(event.changed_at_us < before, event.outcome != UNAPPLIED, *_matching(unapplied, None, origin))
    connection.execute(delete(unapplied).where(decided))
    count_again(connection, [dict(each) for each in counting])
    idle = and_(row.written_at_us < before, row.state.is_(None), row.unapplied == 0, *mine)
    return ended, connection.execute(delete(positions).where(idle)).rowcount


def _matching(table: Table, subscription: str | None, origin: str | None) -> list[ColumnElement[bool]]:
    given = ((table.c.subscription, subscription), (table.c.origin, origin))
    return [column == value for column, value in given if value is not None]


def _find(connection: Connection, subscription: str, stream: StreamId, origin: str | None) -> Any:
    this = (*_matching(positions, subscription, origin), positions.c.stream == key_of(stream))
    rows = connection.execute(select(positions).where(*this)).all()
    if len(rows) > 1:
        raise InvalidArgument(
            f"several providers have a subscription {subscription!r} with stream {stream}: give --origin, one of "
            f"{', '.join(row.origin for row in rows)}"
        )
    return rows[0] if rows else None


def _only_origin(connection: Connection, subscription: str) -> str:
    query = select(positions.c.origin).where(*_matching(positions, subscription, None)).distinct()
    origins = connection.execute(query).scalars().all()
    if not origins:
        raise NotFound(f"subscription {subscription!r} has no rows in this database: check its name, or give --origin")
    if len(origins) > 1:
        raise NotFound(
            f"several providers have a subscription {subscription!r}: give --origin, one of {', '.join(origins)}"
        )
    return origins[0]


def _state(row: Any) -> StoredState:
    token = SequenceToken(row.token_offset, row.token_index)
    value = bytes(row.state)
    return StoredState(
        row.origin, row.subscription, row.stream, token, value, row.state_version or 1, row.expires_at_us
    )
