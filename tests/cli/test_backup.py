"""`headrace backup` and `headrace restore`: a copy is whole or not there, and offsets are not used twice."""

import asyncio
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from headrace import Event, Provider, StreamId
from headrace.server.access import Permission, Principal
from headrace.silo import backup as backup_module
from headrace.silo.checking import copy_database
from headrace.silo.services.visible import VisibleBounds
from headrace.store.control_store import ControlStore
from headrace.store.datadir import DataDirectory
from headrace.streams.cluster import ClusterView
from headrace.streams.errors import DataDirectoryError
from headrace.streams.subscriptions import GapRecord
from tests.cli.commandline import SCRIPT, Headrace, Start, ended
from tests.cli.test_repair import lose_control
from tests.silo.talking import shares, silos, wait_until
from tests.silo.test_damage import damage

STREAMS = [StreamId("orders", str(number)) for number in range(20)]
QUEUES = 2


async def publish(provider: Provider, *payloads: bytes) -> int:
    """Publish the payloads to each stream. Return the highest offset."""
    receipts = [await provider.publish(stream, list(payloads)) for stream in STREAMS]
    return max(token.offset for token in receipts)


async def make(data: Path) -> None:
    """Events a and b of each stream, of which the subscription `bills` has done a."""
    async with Provider.open(data, queues=QUEUES) as provider:
        await publish(provider, b"a")
        bills = await provider.subscribe("bills", "orders/*", ignore, start="earliest")
        await bills.caught_up()
        await provider.withdraw("bills")
        await publish(provider, b"b")


async def ignore(_: Event) -> None:
    pass


async def read(data: Path, name: str) -> tuple[dict[StreamId, list[bytes]], list[GapRecord]]:
    """The events that a subscription gets, by stream, and its gaps."""
    got: dict[StreamId, list[bytes]] = {}

    async def handle(event: Event) -> None:
        assert event.stream is not None
        got.setdefault(event.stream, []).append(event.payload)

    async with Provider.open(data) as provider:
        subscription = await provider.subscribe(name, "orders/*", handle, start="earliest")
        await subscription.caught_up()
        await provider.withdraw(name)  # saves its gaps
        return got, list(await provider.gaps(name))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asyncio.run(make(tmp_path / "data"))
    return tmp_path / "data"


def each(*payloads: bytes) -> dict[StreamId, list[bytes]]:
    return {stream: list(payloads) for stream in STREAMS}


def test_a_restored_directory_has_the_events_and_the_progress(headrace: Headrace, data: Path, tmp_path: Path):
    done = headrace("backup", "--data", data, "backup", "--json").json
    assert done["checked"]["queues"] == QUEUES
    shutil.rmtree(data)
    assert headrace("restore", "backup", "--data", data).code == 0
    assert headrace("check", "--data", data).code == 0
    bills, _ = asyncio.run(read(data, "bills"))
    everything, _ = asyncio.run(read(data, "new"))
    assert (bills, everything) == (each(b"b"), each(b"a", b"b"))
    assert not list(tmp_path.glob("*.unfinished"))


def test_offsets_of_lost_events_are_not_used_again(headrace: Headrace, data: Path):
    headrace("backup", "--data", data, "backup")

    async def after_the_backup() -> int:
        async with Provider.open(data) as provider:
            return await publish(provider, b"lost")

    last = asyncio.run(after_the_backup())
    shutil.rmtree(data)
    headrace("restore", "backup", "--data", data)

    async def after_the_restore() -> None:
        async with Provider.open(data) as provider:
            assert (await provider.publish(STREAMS[0], b"c")).offset > last

    asyncio.run(after_the_restore())
    got, gaps = asyncio.run(read(data, "bills"))
    assert got == each(b"b") | {STREAMS[0]: [b"b", b"c"]}
    assert {gap.queue for gap in gaps} == set(range(QUEUES))
    assert {gap.reason for gap in gaps} == {
        "a backup was restored: events that were published after it, if any, are lost"
    }


def test_offsets_of_events_after_a_restore_are_not_used_again_by_another_one(headrace: Headrace, data: Path):
    """The operator restores the same backup twice, or an older backup the second time."""

    async def published() -> tuple[int, int]:
        async with Provider.open(data) as provider:
            offsets = [token.offset for token in [await provider.publish(stream, b"c") for stream in STREAMS]]
            return min(offsets), max(offsets)

    headrace("backup", "--data", data, "older")
    asyncio.run(published())
    headrace("backup", "--data", data, "backup")
    used = asyncio.run(published())
    for backup in ("backup", "backup", "older"):
        shutil.rmtree(data)
        headrace("restore", backup, "--data", data)
        new = asyncio.run(published())
        assert new[0] > used[1]
        used = new
    assert headrace("check", "--data", data).code == 0
    got, gaps = asyncio.run(read(data, "bills"))
    assert got == each(b"b") | {stream: [b"b", b"c"] for stream in STREAMS}
    assert len(gaps) == QUEUES


def test_the_silos_of_the_original_are_forgotten(headrace: Headrace, tmp_path: Path):
    """Else the queues would wait until the leases in the backup end."""
    with silos(tmp_path, "a") as (silo,):
        wait_until(silo.address, lambda cluster: bool(shares(cluster)["a"]))
        assert headrace("backup", "copy", "--data", tmp_path / "data").code == 0
        assert headrace("restore", "copy", "--data", "restored").code == 0

    async def of_restored() -> ClusterView:
        store = await ControlStore.open(tmp_path / "restored" / "control.db")
        try:
            return await store.cluster().view()
        finally:
            await store.aclose()

    view = asyncio.run(of_restored())
    assert view.silos == []
    assert view.leases
    assert {lease.owner for lease in view.leases} == {""}


async def test_a_client_that_sees_a_part_of_a_restored_queue_gets_its_end(
    headrace: Headrace, data: Path, tmp_path: Path
):
    """A queue leaves out billions of offsets then. They were searched window by window, and the call got no answer."""
    await asyncio.to_thread(headrace, "backup", "copy", "--data", data)
    await asyncio.to_thread(headrace, "restore", "copy", "--data", "restored")
    orders, others = (Principal.of(name, {Permission.SUBSCRIBE: [name]}) for name in ("orders", "others"))
    async with Provider.open(tmp_path / "restored") as provider:
        first, end = await provider.adapter.bounds(0)
        assert end > first + (1 << 32)
        found = await VisibleBounds().bounds(orders, provider, 0)
        assert first == found.first < found.next < 1000
        assert await VisibleBounds().bounds(others, provider, 0) == (first, first)
        stream = next(stream for stream in STREAMS if provider.queue_of(stream) == 0)
        token = await provider.publish(stream, b"c")
        assert await VisibleBounds().bounds(orders, provider, 0) == (first, token.offset + 1)


def test_only_the_owner_can_use_a_backup(headrace: Headrace, data: Path, tmp_path: Path):
    headrace("backup", "--data", data, "backup")
    made = [tmp_path / "backup", *(tmp_path / "backup").rglob("*")]
    assert [path for path in made if path.stat().st_mode & 0o077] == []


async def test_a_directory_in_use_is_backed_up(headrace: Headrace, data: Path, tmp_path: Path):
    async with Provider.open(data) as provider:
        await publish(provider, b"c")
        assert (await asyncio.to_thread(headrace, "backup", "--data", data, "backup")).code == 0
        await publish(provider, b"d")
    assert (await asyncio.to_thread(headrace, "restore", "backup", "--data", "new")).code == 0
    got, _ = await read(tmp_path / "new", "new")
    assert got == each(b"a", b"b", b"c")


def not_empty(data: Path) -> str:
    (data.parent / "backup").mkdir()
    (data.parent / "backup" / "file").touch()
    return "exists and is not empty: name a directory that is not there yet"


def a_file(data: Path) -> str:
    (data.parent / "backup").touch()
    return "exists and is not empty"


def foreign(data: Path) -> str:
    (data / "headrace.json").unlink()
    (data / "control.db").unlink()
    shutil.rmtree(data / "providers")
    return "is no data directory"


def in_a_database(data: Path) -> str:
    (data / "headrace.json").write_text(json.dumps({"format": 1, "control": "postgresql://host/db", "id": "x"}))
    return "its control data is in a database: back up the database first"


def damaged(data: Path) -> str:
    damage(data, 0)
    return "1 fault, the first: provider 'default', queue 0, offset"


def lost(data: Path) -> str:
    shutil.rmtree(data / "providers" / "default" / "log")
    return "the log was deleted or emptied"


@pytest.mark.parametrize("spoil", [not_empty, a_file, foreign, in_a_database, damaged, lost])
@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_copy_that_cannot_be_whole_is_refused(
    headrace: Headrace, data: Path, command: str, spoil: Callable[[Path], str], tmp_path: Path
):
    expected = spoil(data)
    before = (tmp_path / "backup").exists()
    called = ("backup", "--data", "data", "backup") if command == "backup" else ("restore", "data", "--data", "backup")
    ran = headrace(*called)
    assert (ran.code, ran.out) in ((1, ""), (2, ""))
    assert expected in ran.err.splitlines()[-1]
    assert (tmp_path / "backup").exists() == before
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_directory_whose_control_store_is_lost_is_not_backed_up(headrace: Headrace, data: Path, tmp_path: Path):
    """Else the copy would be an empty directory that looks whole, and would replace the good backups."""
    target = tmp_path / "target"
    lose_control(data, None)
    line = headrace("backup", "--data", data, target).refused(1)
    assert "damaged, it has queues but control.db is missing or empty: restore it" in line
    headrace("tokens", "create", "orders", "--publish", "*", "--data", tmp_path / "new")
    lose_control(data, (tmp_path / "new" / "control.db").read_bytes())
    line = headrace("backup", "--data", data, target).refused(1)
    assert "provider 'default' has a log, but control.db does not know it: nothing was copied" in line
    assert not list(tmp_path.glob("target*"))


def test_a_provider_that_is_created_meanwhile_is_not_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is seen empty, control.db is copied without it, and then it publishes."""
    data, made = tmp_path / "data", tmp_path / "backup"

    async def open_provider(name: str, *payloads: bytes) -> None:
        async with Provider.open(data, name=name, queues=1) as provider:
            for payload in payloads:
                await provider.publish(STREAMS[0], payload)

    asyncio.run(open_provider("default", b"a"))
    assert not copy_database(data / "control.db", tmp_path / "before.db")
    asyncio.run(open_provider("new"))

    def copy_control(_: DataDirectory, copied: Path) -> None:
        shutil.copyfile(tmp_path / "before.db", copied / "control.db")
        asyncio.run(open_provider("new", b"b"))

    monkeypatch.setattr(backup_module, "_copy_control", copy_control)
    asyncio.run(backup_module.back_up(data, made, lambda _: None))
    assert [each.name for each in (made / "providers").iterdir()] == ["default"]
    with pytest.raises(DataDirectoryError, match=r"provider 'new' has a log, but control.db does not know it"):
        asyncio.run(backup_module.back_up(data, tmp_path / "second", lambda _: None))


def test_a_backup_in_its_own_data_directory_is_refused(headrace: Headrace, data: Path):
    assert "is in the data directory" in headrace("backup", "--data", data, data / "backup").refused(2)


def test_the_folders_above_a_backup_are_made(headrace: Headrace, data: Path, tmp_path: Path):
    assert headrace("backup", "--data", data, "2026/11/27").code == 0
    assert (tmp_path / "2026" / "11" / "27" / "control.db").is_file()


def test_the_control_store_is_copied_before_the_logs(start: Start, data: Path, tmp_path: Path):
    """Otherwise progress could be ahead of the events. The copy of a log waits for a transaction that writes to it."""
    copy = tmp_path / "backup.unfinished" / "control.db"
    with lmdb.open(str(data / "providers" / "default" / "log"), max_dbs=10, map_size=1 << 30) as log:
        with log.begin(write=True):
            process = start("backup", "--data", "data", "backup")
            while not (copy.exists() and copy.stat().st_size):
                assert process.poll() is None, ended(process)
                time.sleep(0.001)
    assert ended(process).code == 0


@contextmanager
def written_by_another_process(directory: Path) -> Generator[None]:
    directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_a_second_backup_to_the_same_place_is_refused(headrace: Headrace, data: Path, tmp_path: Path):
    with written_by_another_process(tmp_path / "backup.unfinished"):
        assert "is written by another process" in headrace("backup", "--data", data, "backup").refused(1)
    assert headrace("backup", "--data", data, "backup").code == 0


@pytest.mark.parametrize("limit", [10_000, pytest.param(150_000, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_nothing(start: Start, data: Path, tmp_path: Path, limit: int):
    """The control store has about 140,000 bytes, the log 500,000."""

    async def more() -> None:
        async with Provider.open(data) as provider:
            await publish(provider, b"x" * 20_000)

    asyncio.run(more())
    process = start("backup", "--data", "data", "backup", program=["prlimit", f"--fsize={limit}", SCRIPT])
    _, err = process.communicate()
    (line,) = err.decode().splitlines()
    assert process.returncode == 1
    assert any(words in line for words in ("no space left", "cannot be copied")), line
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("at", ["control.db", "providers/default/log/data.mdb", "headrace.json"])
# Both commands have the steps at which they are killed.
@pytest.mark.parametrize("command", ["backup", pytest.param("restore", marks=pytest.mark.slow)])
def test_a_killed_copy_is_whole_or_not_there(
    start: Start, headrace: Headrace, data: Path, tmp_path: Path, at: str, command: str
):
    called = ("backup", "--data", data, "copy") if command == "backup" else ("restore", data, "--data", "copy")
    process = start(*called)
    while process.poll() is None and not (tmp_path / "copy.unfinished" / at).exists():
        time.sleep(0.001)
    process.kill()
    ended(process)
    if (tmp_path / "copy").exists():
        assert headrace("check", "--data", "copy").code == 0
    else:
        assert headrace(*called).code == 0
    assert (asyncio.run(read(tmp_path / "copy", "new")))[0] == each(b"a", b"b")
    assert not (tmp_path / "copy.unfinished").exists()
