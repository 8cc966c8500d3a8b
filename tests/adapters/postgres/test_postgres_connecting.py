"""Connections for queries, and errors of the server as errors of headrace."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from headrace.adapters.postgres.connecting import DatabasePlace
from headrace.adapters.postgres.options import PostgresOptions
from headrace.adapters.postgres.queries import QueryConnections
from headrace.streams.errors import StorageError, StorageFull
from tests.adapters.postgres.opening import QUICK

ONE = QUICK._replace(request_s=1.0, connections=1)


async def test_the_time_of_a_query_begins_when_it_has_a_connection(postgres_url: str) -> None:
    connections = QueryConnections(DatabasePlace(PostgresOptions(url=postgres_url), ONE))

    async def work(connection: AsyncConnection[Any]) -> bool:
        await connection.execute("SELECT pg_sleep(0.4)")
        return True

    try:
        assert all(await asyncio.gather(*(connections.run(work) for _ in range(10))))
    finally:
        await connections.aclose()


async def test_queries_that_wait_for_a_connection_fail_if_the_server_answers_none(postgres_url: str) -> None:
    connections = QueryConnections(DatabasePlace(PostgresOptions(url=postgres_url), ONE))

    async def work(_: AsyncConnection[Any]) -> None:
        await asyncio.Event().wait()

    try:
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(connections.run(work) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, StorageError) and "no answer within" in str(each) for each in found)
    finally:
        await connections.aclose()


async def test_a_query_that_waits_for_a_connection_ends_when_they_are_closed(postgres_url: str) -> None:
    connections = QueryConnections(DatabasePlace(PostgresOptions(url=postgres_url), ONE._replace(request_s=30.0)))
    begun = asyncio.Event()

    async def work(_: AsyncConnection[Any]) -> None:
        begun.set()
        await asyncio.Event().wait()

    running = [asyncio.ensure_future(connections.run(work)) for _ in range(2)]
    await begun.wait()
    await connections.aclose()
    found = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 20)
    assert [str(each).partition(": ")[2] for each in found] == [
        "the query was ended, because the adapter is closed"
    ] * 2


@pytest.mark.parametrize(("error", "is_full"), [(psycopg.errors.DiskFull, True), (psycopg.errors.OutOfMemory, False)])
def test_only_a_full_disk_is_called_full(error: type[psycopg.Error], *, is_full: bool) -> None:
    place = DatabasePlace(PostgresOptions(url="postgresql://h/db"), QUICK)
    assert isinstance(place.failure(error("no")), StorageFull) is is_full
