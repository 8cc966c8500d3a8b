"""The data directory, or a part of it, is taken away from a running process."""

import asyncio
import shutil
from pathlib import Path

import pytest

from headrace import Provider
from headrace.adapters.log.doorbell import Doorbell
from headrace.streams.errors import DataDirectoryError

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
