"""Data directories whose control data is in a database server."""

import asyncio
import json
from pathlib import Path

import psycopg
import pytest

from benchmarks.servers import PostgresServer
from headrace.silo.checking import DirectoryCheck
from headrace.silo.options import ProviderOptions
from headrace.silo.provider import Provider
from headrace.store.datadir import open_data_directory
from headrace.store.schema import MIGRATIONS
from headrace.streams.errors import DataDirectoryError, NotSupported, StorageError
from tests.cli.commandline import Headrace
from tests.servers import new_schema


async def opened(data: Path, url: str | None, **options: str) -> None:
    provider = await Provider.start(data, ProviderOptions(**options), control=url, leased=True)  # pyright: ignore[reportArgumentType]
    await provider.aclose()


def tables(url: str) -> list[str]:
    """Return the tables of the only schema that the users of the store see."""
    with psycopg.connect(url) as connection:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
        return [row[0] for row in connection.execute(query)]


async def test_the_directory_says_where_its_control_data_is(tmp_path: Path, postgres_url: str):
    await opened(tmp_path / "data", postgres_url)
    await opened(tmp_path / "data", postgres_url)
    with pytest.raises(
        DataDirectoryError, match=r"its control data is in postgresql://\S+, so it is not to be opened by itself"
    ):
        await asyncio.to_thread(open_data_directory, tmp_path / "data")
    assert not (tmp_path / "data" / "control.db").exists()


async def test_a_directory_with_its_own_control_data_is_not_used_with_another(tmp_path: Path, postgres_url: str):
    async with Provider.open(tmp_path / "data"):
        pass
    with pytest.raises(DataDirectoryError, match=r"in its own control\.db, not in postgresql"):
        await opened(tmp_path / "data", postgres_url)


async def test_a_directory_is_not_claimed_for_a_database_that_is_not_there(tmp_path: Path, postgres_url: str):
    mistyped = postgres_url.replace("/postgres?", "/postgers?")
    with pytest.raises(StorageError, match=r"postgers"):
        await opened(tmp_path / "data", mistyped)
    await opened(tmp_path / "data", postgres_url)


@pytest.mark.long
async def test_a_directory_goes_with_its_database_to_another_host(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str, headrace: Headrace
):
    data = tmp_path / "the data"
    await opened(data, postgres_url)
    marker = data / "headrace.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"control": "postgresql://old.internal/postgres"}))
    with pytest.raises(
        DataDirectoryError,
        match=r"its control data is in postgresql://old\.internal/postgres, not in (\S+): name that database as "
        rf"cluster\.store; if it was moved, run `headrace cluster move-store --data '{data}' --store URL`",
    ):
        await opened(data, postgres_url)
    move = "cluster", "move-store", "--data", data, "--store"
    assert "--store is no URL of a PostgreSQL database" in headrace(*move, tmp_path / "new.db").refused(2)
    assert not (tmp_path / "new.db").exists()
    empty, other = new_schema(postgres_server), new_schema(postgres_server)
    refused = await asyncio.to_thread(headrace, *move, empty)
    assert "it has no control store: name the database that the silos use" in refused.refused(1)
    assert not tables(empty)
    await opened(tmp_path / "other", other, name="other")
    refused = await asyncio.to_thread(headrace, *move, other)
    assert "the database there has other control data, which does not know default" in refused.refused(1)
    assert (await asyncio.to_thread(headrace, *move, postgres_url)).code == 0
    assert json.loads(marker.read_text()) == content
    await opened(data, postgres_url)


def test_checking_with_another_database_finds_a_fault_and_changes_nothing(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
):
    asyncio.run(opened(tmp_path / "data", postgres_url))
    assert faults(tmp_path / "data", postgres_url) == []
    empty, other = new_schema(postgres_server), new_schema(postgres_server)
    assert faults(tmp_path / "data", empty) == ["damaged: control store"]
    assert not tables(empty)
    asyncio.run(opened(tmp_path / "other", other, name="other"))
    assert "inconsistent: provider 'default'" in faults(tmp_path / "data", other)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE headrace_version SET version = version + 1")
        assert faults(tmp_path / "data", postgres_url) == ["damaged: control store"]
        assert connection.execute("SELECT version FROM headrace_version").fetchone() == (len(MIGRATIONS) + 2,)


def faults(data: Path, url: str) -> list[str]:
    check = DirectoryCheck(data, url, lambda _: None)
    asyncio.run(check.run())
    return [f"{found.kind}: {found.where}" for found in check.findings]


def test_checking_refuses_a_database_that_the_directory_does_not_name(tmp_path: Path, postgres_url: str):
    asyncio.run(opened(tmp_path / "data", None))
    with pytest.raises(DataDirectoryError, match=r"in its own control\.db, not in postgresql"):
        faults(tmp_path / "data", postgres_url)


def test_a_directory_with_its_own_control_data_has_no_store_to_move(tmp_path: Path, headrace: Headrace):
    open_data_directory(tmp_path / "data")
    ran = headrace("cluster", "move-store", "--data", tmp_path / "data", "--store", "postgresql://new.internal/h")
    assert "its control data is in its own control.db" in ran.refused(1)


def test_the_password_is_not_written_down(tmp_path: Path):
    directory = open_data_directory(tmp_path / "data", "postgresql://me:secret@db.internal:5433/h?sslmode=require")
    marker = (directory.path / "headrace.json").read_text()
    assert "postgresql://db.internal:5433/h" in marker
    assert "secret" not in marker


async def test_logs_of_two_machines_are_not_taken_for_one(tmp_path: Path, postgres_url: str):
    await opened(tmp_path / "one", postgres_url)
    with pytest.raises(DataDirectoryError, match="its queues are in the data directory of another machine"):
        await opened(tmp_path / "two", postgres_url)


async def test_queues_of_a_process_are_not_shared(tmp_path: Path):
    with pytest.raises(NotSupported, match="one process's own"):
        await opened(tmp_path / "data", None, adapter="memory")
