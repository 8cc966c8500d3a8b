"""Databases of users, with tables for effects and a table of accounts."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from headrace import Outbox, StreamId
from headrace.effects import schema

KINDS = ("sqlite", "aiosqlite", "psycopg", "psycopg-async", "asyncpg")


class UserDatabase(NamedTuple):
    """A database, with the engine of the handlers and one of the test."""

    kind: str
    url: str
    engine: Engine | AsyncEngine
    inspecting: Engine

    def rows(self, query: str, **parameters: Any) -> Sequence[tuple[Any, ...]]:
        with self.inspecting.begin() as connection:
            return [tuple(row) for row in connection.execute(text(query), parameters)]

    def execute(self, statement: str, **parameters: Any) -> None:
        with self.inspecting.begin() as connection:
            connection.execute(text(statement), parameters)

    def make_version(self, version: int) -> None:
        """Change the tables to those of an older version."""
        if version < 3 and self.inspecting.dialect.name == "postgresql":
            self.execute("ALTER TABLE headrace_outbox DROP CONSTRAINT headrace_outbox_pkey, ADD PRIMARY KEY (id)")
            self.execute("CREATE INDEX headrace_outbox_lanes ON headrace_outbox (provider, lane, id)")
        if version < 2:
            for column in ("outcome", "generation", "changed_at_us"):
                self.execute(f"ALTER TABLE headrace_unapplied DROP COLUMN {column}")
        self.execute("UPDATE headrace_effects_version SET version = :version", version=version)

    def log(self) -> list[str]:
        """The events that handlers wrote down, in order."""
        return [value for (value,) in self.rows("SELECT value FROM log ORDER BY id")]


@asynccontextmanager
async def user_database(
    kind: str, sqlite_file: str, postgres_url: Callable[[], str], *, migrated: bool = True, **options: Any
) -> AsyncGenerator[UserDatabase]:
    """A new database of this kind. `postgres_url` makes an empty schema."""
    url = f"sqlite:///{sqlite_file}" if "sqlite" in kind else postgres_url()
    inspecting = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with inspecting.begin() as connection:
        if migrated:
            schema.migrate(connection)
        _create_log(connection)
    made = engine(kind, url, **options)
    yield UserDatabase(kind, url, made, inspecting)
    await close(made)
    inspecting.dispose()


def _create_log(connection: Connection) -> None:
    number = "INTEGER PRIMARY KEY" if connection.dialect.name == "sqlite" else "BIGSERIAL PRIMARY KEY"
    connection.execute(text(f"CREATE TABLE log (id {number}, value TEXT NOT NULL UNIQUE)"))


def engine(kind: str, url: str, **options: Any) -> Engine | AsyncEngine:
    if kind == "sqlite":
        return create_engine(url, **options)
    if kind == "aiosqlite":
        return create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), **options)
    if kind == "psycopg":
        return create_engine(url.replace("postgresql:", "postgresql+psycopg:"), **options)
    if kind == "psycopg-async":
        return create_async_engine(url.replace("postgresql:", "postgresql+psycopg:"), **options)
    parsed = make_url(url)
    path = unquote(str(parsed.query["options"])).removeprefix("-csearch_path=")
    plain = parsed.set(drivername="postgresql+asyncpg", query={k: v for k, v in parsed.query.items() if k != "options"})
    return create_async_engine(plain, connect_args={"server_settings": {"search_path": path}}, **options)


async def close(engine: Engine | AsyncEngine) -> None:
    if isinstance(engine, AsyncEngine):
        await engine.dispose()
    else:
        engine.dispose()


def prepare_insert(engine: Engine) -> None:
    """Prepare the INSERT of the outbox on a connection of the pool."""
    with Session(engine) as session, session.begin():
        session.execute(text("SELECT 1"))
        Outbox().publish(StreamId("warm-up", "0"), b"x", connection=session)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM headrace_outbox"))
