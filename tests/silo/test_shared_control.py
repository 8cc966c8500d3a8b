"""Data directories whose control data is in a database server."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace.silo.datadir import open_data_directory
from headrace.silo.provider import Provider, ProviderOptions
from headrace.streams.errors import DataDirectoryError, NotSupported, StorageError


async def opened(data: Path, url: str | None, **options: str) -> None:
    provider = await Provider.start(data, ProviderOptions(**options), control=url, leased=True)  # pyright: ignore[reportArgumentType]
    await provider.aclose()


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


async def test_a_directory_goes_with_its_database_to_another_host(tmp_path: Path, postgres_url: str):
    await opened(tmp_path / "data", postgres_url)
    marker = tmp_path / "data" / "headrace.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"control": "postgresql://old.internal/postgres"}))
    with pytest.raises(
        DataDirectoryError,
        match=r"its control data is in postgresql://old\.internal/postgres, not in (\S+): name that database as "
        rf'cluster\.store, or, where it moved, change "control" in {marker} to the new one',
    ):
        await opened(tmp_path / "data", postgres_url)
    marker.write_text(json.dumps(content))
    await opened(tmp_path / "data", postgres_url)


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
