"""Settings and encodings of a database: what is stored does not depend on them, or the database is refused."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from headrace import Effects, Event, InvalidArgument, Outbox, Provider, RetryPolicy, StreamId, Transaction
from headrace.adapters import ProducerSequence
from headrace.effects import administration, schema
from headrace.silo.options import ProviderOptions
from tests.servers import PostgresServer

STREAM = StreamId("orders", "k→")
UTF8, LATIN1, SQL_ASCII = "UTF8", "LATIN1", "SQL_ASCII"

_numbers = count()


def database(server: PostgresServer, encoding: str, *settings: str) -> str:
    """Make a database, and return its URL."""
    name = f"settings{next(_numbers)}"
    create = f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(create.encode())
        for setting in settings:
            connection.execute(f"ALTER DATABASE {name} SET {setting}".encode())
    return re.sub(r"/\w+$", f"/{name}", server.url)


@asynccontextmanager
async def opened(data: Path, options: ProviderOptions, control: str | None = None) -> AsyncGenerator[Provider]:
    provider = await Provider.start(data, options, control=control)
    try:
        yield provider
    finally:
        await provider.aclose()


@pytest.mark.parametrize(
    ("encoding", "setting"),
    [
        (UTF8, "standard_conforming_strings = off"),
        (UTF8, "client_encoding = LATIN1"),
        (LATIN1, "bytea_output = escape"),
        (SQL_ASCII, "DateStyle = German"),
    ],
)
async def test_events_are_stored_whatever_the_database_is_set_to(
    postgres_server: PostgresServer, tmp_path: Path, encoding: str, setting: str
) -> None:
    options = ProviderOptions(
        adapter="postgres", queues=1, options={"url": database(postgres_server, encoding, setting), "create": True}
    )
    payloads = [bytes([number]) * 10 for number in (0, 39, 92, 255)]
    async with opened(tmp_path, options) as provider:
        for number, payload in enumerate(payloads, 1):
            await provider.publish_many([(STREAM, payload)], sequence=ProducerSequence("ö", number, number - 1))
    received: list[bytes] = []

    async def handle(event: Event) -> None:
        received.append(event.payload)

    async with opened(tmp_path, options) as provider:
        assert await provider.last_sequence("ö") == len(payloads)
        subscription = await provider.subscribe("s", "orders/*", handle, start="earliest")
        await subscription.caught_up()
    assert received == payloads


@pytest.mark.parametrize(
    ("encoding", "setting"), [(UTF8, "client_encoding = LATIN1"), (SQL_ASCII, "DateStyle = German")]
)
async def test_a_control_store_takes_every_name_whatever_the_client_encoding_is(
    postgres_server: PostgresServer, tmp_path: Path, encoding: str, setting: str
) -> None:
    url = database(postgres_server, encoding, setting)

    async def fail(_: Event) -> None:
        raise ValueError("bad → 😀")

    async with opened(tmp_path, ProviderOptions(queues=1), url) as provider:
        subscription = await provider.subscribe(
            "s", "orders/*", fail, start="earliest", retry=RetryPolicy(max_attempts=1)
        )
        await provider.publish(STREAM, b"x")
        await subscription.caught_up()
        letters = await provider.dead_letters("s")
    assert [(letter.stream, letter.reason) for letter in letters] == [(STREAM, "ValueError: bad → 😀")]


async def test_a_control_store_in_a_database_that_lacks_characters_is_refused(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="encoding of the database is LATIN1"):
        await Provider.start(tmp_path, ProviderOptions(), control=database(postgres_server, LATIN1))


async def test_effects_with_an_encoding_that_lacks_characters_are_refused(postgres_server: PostgresServer) -> None:
    url = database(postgres_server, UTF8, "client_encoding = LATIN1")
    with administration.opened(url, migrated=False) as connection:
        schema.migrate(connection)

    async def handle(_event: Event, _transaction: Transaction) -> None: ...

    engine = create_async_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    async with Provider.open(adapter="memory") as provider:
        with pytest.raises(InvalidArgument, match="that of the connection LATIN1, which lack characters"):
            await provider.subscribe("s", "orders/*", handle, effects=Effects(engine))
    await engine.dispose()


def test_tables_for_effects_are_not_made_in_a_database_that_lacks_characters(postgres_server: PostgresServer) -> None:
    with (
        administration.opened(database(postgres_server, LATIN1), migrated=False) as connection,
        pytest.raises(InvalidArgument, match="its encoding is LATIN1"),
    ):
        schema.migrate(connection)


def test_an_event_of_a_stream_whose_name_the_connection_cannot_send_is_refused_by_name(
    postgres_server: PostgresServer,
) -> None:
    url = database(postgres_server, UTF8)
    with administration.opened(url, migrated=False) as connection:
        schema.migrate(connection)
    with (
        psycopg.connect(url, client_encoding="latin1") as connection,
        pytest.raises(InvalidArgument, match="lacks a character of the stream's name"),
    ):
        Outbox().publish(STREAM, b"x", connection=connection)
