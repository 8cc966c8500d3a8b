"""The first statement of a transaction goes to PostgreSQL together with BEGIN."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from psycopg import pq
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from headrace import Event, StreamId, Transaction
from tests.effects.databases import UserDatabase, close, user_database
from tests.effects.test_transactional_handlers import event_at, in_scope, write_down

_MESSAGE = re.compile(r"^([FB])\t", re.MULTILINE)
"""The beginning of a message of the frontend, or of the backend."""
FAILED = 25
"""Offset of an event whose handler fails once, after enough claims that preparing them was worth it."""
PSYCOPG_KINDS = pytest.mark.parametrize("kind", ["psycopg", "psycopg-async"])


def sync_engine_of(database: UserDatabase) -> Engine:
    """The engine that has the events."""
    return database.engine.sync_engine if isinstance(database.engine, AsyncEngine) else database.engine


class SentMessages:
    """What psycopg sends on the connections of an engine, as libpq traces it."""

    def __init__(self, database: UserDatabase, file: Path) -> None:
        self._file = file.open("w+")
        event.listen(sync_engine_of(database), "connect", self._trace)

    def _trace(self, connection: Any, _record: object) -> None:
        pgconn = getattr(connection, "driver_connection", connection).pgconn
        pgconn.trace(self._file.fileno())
        pgconn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS | pq.Trace.REGRESS_MODE)

    def take(self) -> Sequence[str]:
        """Return the messages since the last call. Each element is what was sent before one wait for an answer."""
        self._file.seek(0)
        sides = _MESSAGE.split(self._file.read())[1:]
        self._file.truncate(0)
        self._file.seek(0)
        sent = [text for side, text in zip(sides[::2], sides[1::2], strict=True) if side == "F"]
        return "".join(sent).split("Sync")[:-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@PSYCOPG_KINDS
async def test_the_claim_is_sent_with_begin_and_prepared_once(kind: str, tmp_path: Path, schema_url: Callable[[], str]):
    async with user_database(kind, "", schema_url, pool_size=1) as database:
        with SentMessages(database, tmp_path / "trace") as sent:
            effects, _ = in_scope(database)
            for offset, texts in ((5, 1), (6, 0), (7, 0)):
                sent.take()
                await effects.call(event_at(offset))
                first = next(each for each in sent.take() if '"BEGIN"' in each)
                assert "INSERT INTO headrace_position" in first or '"headrace_' in first
                assert first.count("INSERT INTO headrace_position") == texts
            assert database.log() == ["42@5", "42@6", "42@7"]


@PSYCOPG_KINDS
async def test_the_claim_is_not_prepared_if_psycopg_prepares_nothing(
    kind: str, tmp_path: Path, schema_url: Callable[[], str]
):
    options: dict[str, Any] = {"pool_size": 1, "connect_args": {"prepare_threshold": None}}
    async with user_database(kind, "", schema_url, **options) as database:
        with SentMessages(database, tmp_path / "trace") as sent:
            effects, _ = in_scope(database)
            for offset in (5, 6):
                await effects.call(event_at(offset))
            both = "".join(sent.take())
            assert both.count("INSERT INTO headrace_position") == 2
            assert '"headrace_' not in both


@PSYCOPG_KINDS
async def test_a_pool_that_deallocates_prepared_statements_loses_no_event(
    kind: str, tmp_path: Path, schema_url: Callable[[], str]
):
    def deallocate(connection: Any, *_: object) -> None:
        connection.rollback()
        connection.cursor().execute("DEALLOCATE ALL")
        connection.commit()

    async with user_database(kind, "", schema_url, pool_size=1) as database:
        with SentMessages(database, tmp_path / "trace") as sent:
            event.listen(sync_engine_of(database), "reset", deallocate)
            effects, counts = in_scope(database)
            for offset in range(5, 9):
                sent.take()
                await effects.call(event_at(offset))
            assert '"headrace_' not in "".join(sent.take())  # it is not prepared again and again
            assert (database.log(), counts.already_applied) == ([f"42@{offset}" for offset in range(5, 9)], 0)


@PSYCOPG_KINDS
async def test_the_isolation_level_of_the_engine_holds(kind: str, tmp_path: Path, schema_url: Callable[[], str]):
    async with user_database(kind, "", schema_url, isolation_level="REPEATABLE READ") as database:
        with SentMessages(database, tmp_path / "trace") as sent:
            effects, _ = in_scope(database)
            await effects.call(event_at(5))
            assert "BEGIN ISOLATION LEVEL REPEATABLE READ" in "".join(sent.take())
            assert database.log() == ["42@5"]


@PSYCOPG_KINDS
async def test_a_listener_that_begins_the_transaction_sees_its_setting(
    kind: str, tmp_path: Path, schema_url: Callable[[], str]
):
    def set_tenant(connection: Connection) -> None:
        connection.execute(text("SET LOCAL headrace.tenant = 'north'"))

    async def note_tenant(_: Event, tx: Transaction) -> None:
        tenant = (await tx.execute(text("SELECT current_setting('headrace.tenant')"))).scalar_one()
        await tx.execute(text("INSERT INTO log (value) VALUES (:tenant)"), {"tenant": tenant})

    async with user_database(kind, "", schema_url) as database:
        event.listen(sync_engine_of(database), "begin", set_tenant)
        with SentMessages(database, tmp_path / "trace") as sent:
            effects, counts = in_scope(database, note_tenant)
            await effects.call(event_at(5))
            sent.take()
            await effects.call(event_at(5))
            assert "".join(sent.take()).count("BEGIN") == 1
        assert (database.log(), counts.already_applied) == (["north"], 1)


@PSYCOPG_KINDS
async def test_the_claim_is_prepared_again_after_a_rollback(kind: str, tmp_path: Path, schema_url: Callable[[], str]):
    """psycopg deallocates all prepared statements then, if it has prepared some of its own."""

    async def write(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        if fails:
            raise ValueError

    fails = False
    async with user_database(kind, "", schema_url, pool_size=1) as database:
        with SentMessages(database, tmp_path / "trace") as sent:
            effects, counts = in_scope(database, write)
            for offset in range(FAILED):
                await effects.call(event_at(offset))
            fails = True
            with pytest.raises(ValueError, match=r"^$"):
                await effects.call(event_at(FAILED))
            fails = False
            await effects.call(event_at(FAILED))
            assert "DEALLOCATE" in "".join(sent.take())
            for offset in (FAILED + 1, FAILED + 2):
                sent.take()
                await effects.call(event_at(offset))
            assert '"headrace_' in next(each for each in sent.take() if '"BEGIN"' in each)
        assert database.log() == [f"42@{offset}" for offset in range(FAILED + 3)]
        assert counts.already_applied == 0


@PSYCOPG_KINDS
async def test_a_connection_with_another_encoding_finds_the_position(kind: str, schema_url: Callable[[], str]):
    """The pipeline sends UTF-8. The server would take it for other characters, and so for another stream."""
    stream = StreamId("orders", "Zoë")

    async def set_encoding(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.execute(text("SET client_encoding = 'LATIN1'"))

    async with user_database(kind, "", schema_url, pool_size=1) as database:
        effects, counts = in_scope(database, set_encoding)
        for offset in (5, 6):
            await effects.call(event_at(offset, stream=stream))
        assert database.rows("SELECT stream, token_offset FROM headrace_position") == [(str(stream), 6)]
        await close(database.engine)  # the next connection has the encoding UTF8
        await effects.call(event_at(6, stream=stream))
        assert counts.already_applied == 1
