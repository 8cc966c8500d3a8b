"""What is in a data directory, only its user can use."""

import asyncio
import os
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from headrace import DataDirectoryError, EventBatch, InvalidArgument
from headrace.cli.demo.ledger import DemoLedger
from headrace.pipeline.staging import StagedFile
from headrace.server.config import GrpcConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.provider import Provider
from headrace.store.datadir import open_data_directory
from tests.silo.clusters import clustered


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """The widest umask: files get the mode that their creator requests."""
    before = os.umask(0)
    yield
    os.umask(before)


def entries(path: Path) -> dict[str, int]:
    """Everything below a directory, itself included, with its permissions."""
    found = [path, *path.rglob("*")]
    return {str(each.relative_to(path)): stat.S_IMODE(each.lstat().st_mode) for each in found}


def wider(path: Path) -> dict[str, str]:
    modes = entries(path)
    return {name: f"{mode:04o}" for name, mode in modes.items() if mode & 0o077}


async def test_everything_that_a_provider_makes_is_private(tmp_path: Path):
    data = tmp_path / "above" / "data"
    async with Provider.open(data, queues=2, delays="store") as provider:

        async def handler(_batch: EventBatch) -> None: ...

        await provider.subscribe("s", "a/*", handler, batch=True)
        await provider.stream("a", "1").publish(b"x")
        await provider.stream("a", "1").publish(b"later", delay=timedelta(hours=1))
        while not any("/wake/" in name for name in entries(data)):  # noqa: ASYNC110 (a receiver makes its own when it waits)
            await asyncio.sleep(0.01)
        made = entries(data)
        assert {"control.db", "control.db-wal", "control.db-shm", "headrace.json"} <= made.keys()
        assert {name.rpartition("/")[2] for name in made} >= {"data.mdb", "lock.mdb", "s.lock"}
        assert wider(tmp_path / "above") == {}


async def test_everything_that_a_cluster_makes_is_private(tmp_path: Path):
    data = tmp_path / "data"
    config = SiloConfig(data=str(data), grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=2)})
    async with clustered(config, 2):
        assert wider(data) == {}


def test_files_of_the_demo_and_spark_are_private(tmp_path: Path):
    directory = open_data_directory(tmp_path / "data")
    DemoLedger(directory.path / "jobs.ledger").close()
    staged = StagedFile(directory.path / "staging" / "default", 0, 0)
    assert wider(directory.path) == {}
    staged.finish()


def test_an_empty_directory_becomes_private_when_it_becomes_ours(tmp_path: Path):
    (tmp_path / "data").mkdir(mode=0o777)
    open_data_directory(tmp_path / "data")
    assert wider(tmp_path / "data") == {}


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_wider_directory_is_refused_or_warned_of(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    data = open_data_directory(tmp_path / "the data").path
    data.chmod(mode)
    with pytest.raises(DataDirectoryError, match=f"its mode is {mode:04o}: run `chmod 700 '{data}'`"):
        open_data_directory(data)
    monkeypatch.setenv("HEADRACE_DATA_PERMISSIONS", "warn")
    for _ in range(2):
        open_data_directory(data)
    assert caplog.text.count("other users of this machine can use it") == 1
    monkeypatch.setenv("HEADRACE_DATA_PERMISSIONS", "off")
    with pytest.raises(InvalidArgument, match="HEADRACE_DATA_PERMISSIONS=off: expected refuse or warn"):
        open_data_directory(data)


def test_with_the_warning_alone_an_empty_directory_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_DATA_PERMISSIONS", "warn")
    (tmp_path / "data").mkdir(mode=0o750)
    open_data_directory(tmp_path / "data")
    assert wider(tmp_path / "data") == {".": "0750"}
