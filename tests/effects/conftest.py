"""Databases in which handlers have effects."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.effects.databases import KINDS, UserDatabase, user_database
from tests.servers import PostgresServer, new_schema, postgres_server, postgres_url

__all__ = ("postgres_server", "postgres_url")

SLOW = pytest.mark.slow
SECOND = ("aiosqlite", "psycopg")


@pytest.fixture
def schema_url(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Make an empty schema of PostgreSQL. The server starts at the first call."""

    def make() -> str:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return new_schema(server)

    return make


# Tests of `async_database` and tests that name their kinds have the others: each is a second way to the same database.
@pytest.fixture(params=[pytest.param(kind, marks=SLOW if kind in SECOND else ()) for kind in KINDS])
async def database(
    request: pytest.FixtureRequest, tmp_path: Path, schema_url: Callable[[], str]
) -> AsyncIterator[UserDatabase]:
    async with user_database(request.param, str(tmp_path / "user.db"), schema_url) as made:
        yield made


@pytest.fixture(params=("aiosqlite", "psycopg-async"))
async def async_database(
    request: pytest.FixtureRequest, tmp_path: Path, schema_url: Callable[[], str]
) -> AsyncIterator[UserDatabase]:
    async with user_database(request.param, str(tmp_path / "user.db"), schema_url) as made:
        yield made
