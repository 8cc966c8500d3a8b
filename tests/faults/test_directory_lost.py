"""The data directory, or a part of it, is taken away from a running process."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from headrace import Provider, Selector, SubscriptionDefinition
from headrace.adapters.log.doorbell import Doorbell
from headrace.adapters.log.environment import acquire, release
from headrace.adapters.log.options import LogOptions
from headrace.store.control_store import ControlStore
from headrace.store.database import Database
from headrace.store.schema import migrate
from headrace.streams.errors import DataDirectoryError
from tests.cli.commandline import SCRIPT

PATIENCE_S = 20


async def test_publishing_continues_if_no_reader_can_be_woken(tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(shutil.rmtree, tmp_path / "data/providers/default/wake")
        stream = provider.stream("orders", "42")
        assert [(await stream.publish(b"paid")).offset for _ in range(3)] == [0, 1, 2]


async def test_nothing_is_acknowledged_once_the_log_is_deleted(tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        stream = provider.stream("orders", "42")
        await stream.publish(b"paid")
        await asyncio.to_thread(shutil.rmtree, tmp_path / "data")
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            await stream.publish(b"lost")


async def test_a_deleted_log_can_be_closed_and_made_anew(tmp_path: Path) -> None:
    for _ in range(2):
        async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
            assert (await provider.stream("orders", "42").publish(b"paid")).offset == 0
            await asyncio.to_thread(shutil.rmtree, tmp_path / "data")


async def test_an_opening_that_is_cancelled_leaves_no_pipe(tmp_path: Path) -> None:
    doorbell = Doorbell(tmp_path)
    listening = asyncio.create_task(doorbell.listen(0))
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await doorbell.aclose()
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_the_lock_file_has_no_holes_that_a_full_disk_could_not_fill(tmp_path: Path) -> None:
    """LMDB maps it: to touch a hole that cannot be filled kills the process (SIGBUS)."""
    async with Provider.open(tmp_path / "data", queues=1):
        found = await asyncio.to_thread((tmp_path / "data/providers/default/log/lock.mdb").stat)
        assert found.st_blocks * 512 >= found.st_size


def headrace(*arguments: object) -> None:
    subprocess.run([SCRIPT, *map(str, arguments)], check=True, capture_output=True)


def move(data: Path) -> None:
    data.rename(data.with_name("moved"))


def delete_control_store(data: Path) -> None:
    for file in data.glob("control.db*"):
        file.unlink()


def delete_write_ahead_log(data: Path) -> None:
    (data / "control.db-wal").unlink()


@pytest.mark.parametrize("lose", [shutil.rmtree, move, delete_control_store, delete_write_ahead_log])
async def test_nothing_is_confirmed_once_the_control_store_is_deleted(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    data = tmp_path / "data"
    async with Provider.open(data, queues=1, delays="store") as provider, asyncio.timeout(PATIENCE_S):
        stream = provider.stream("orders", "42")
        await stream.publish(b"stored", delay=timedelta(hours=1))
        await asyncio.to_thread(lose, data)
        with pytest.raises(DataDirectoryError, match=r"control\.db.* was deleted or replaced while it was open"):
            await stream.publish(b"lost", delay=timedelta(hours=1))
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            await provider.store.create_subscription(
                provider.name, SubscriptionDefinition(name="lost", selector=Selector("orders/*")), {}
            )


@pytest.mark.long
async def test_nothing_is_confirmed_once_a_backup_is_restored_in_the_place_of_an_open_directory(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    async with Provider.open(data, queues=1, delays="store") as provider, asyncio.timeout(PATIENCE_S):
        stream = provider.stream("orders", "42")
        await stream.publish(b"before", delay=timedelta(hours=1))
        await provider.store.set_value("before", "1")
        await asyncio.to_thread(headrace, "backup", "--data", data, backup)
        await asyncio.to_thread(move, data)
        await asyncio.to_thread(headrace, "restore", backup, "--data", data)
        with pytest.raises(DataDirectoryError, match=r"control\.db' was deleted or replaced"):
            await stream.publish(b"lost", delay=timedelta(hours=1))
        with pytest.raises(DataDirectoryError, match=r"control\.db' was deleted or replaced"):
            await provider.store.set_value("lost", "1")
    async with Provider.open(data, delays="store") as provider, asyncio.timeout(PATIENCE_S):
        assert (await provider.store.value("before"), await provider.store.value("lost")) == ("1", None)
        await provider.stream("orders", "42").publish(b"after", delay=timedelta(hours=1))


async def test_a_transaction_is_not_confirmed_if_its_file_is_deleted_while_it_runs(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "control.db", migrate)
    try:
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            await database.write(lambda _: (tmp_path / "control.db").unlink())
    finally:
        await database.aclose()


def test_a_commit_of_a_log_is_not_confirmed_if_the_log_is_deleted_while_it_runs(tmp_path: Path) -> None:
    def delete_in_a_transaction() -> None:
        with log.writing() as changes:
            changes.touch()
            shutil.rmtree(tmp_path / "log")

    log = acquire(tmp_path / "log", LogOptions(), "default", 1)
    try:
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            delete_in_a_transaction()
    finally:
        release(log)


async def test_a_control_store_with_a_relative_path_is_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = await ControlStore.open(Path("control.db"))
    try:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        await store.set_value("key", "value")
        assert await store.value("key") == "value"
    finally:
        await store.aclose()
