"""`headrace check`: a sound directory is found sound, each fault is named with what to do, and nothing is written."""

import asyncio
import os
import shutil
import sqlite3
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from headrace import CorruptRecord, Event
from headrace.silo.checking import DirectoryCheck
from headrace.silo.provider import Provider
from headrace.silo.repair import skip_damage
from headrace.store.checksums import with_checksum
from headrace.streams.subscriptions import Checkpoint
from tests.cli.commandline import Headrace
from tests.cli.test_repair import lose_control
from tests.silo.test_damage import PAYLOADS, Got, damage, from_earliest, make, remove


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asyncio.run(make(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def public_path() -> Iterator[Path]:
    """An empty directory that every user of the machine can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def log_of(data: Path) -> Path:
    return data / "providers" / "default" / "log"


def rewrite_tail(data: Path, position: int, value: int) -> None:
    """Change a number of the only queue's state: next offset, events, bytes, time, acknowledged, first offset."""
    with lmdb.open(str(log_of(data)), max_dbs=10, map_size=1 << 30) as environment:
        state = environment.open_db(b"state")
        with environment.begin(write=True, db=state) as txn:
            numbers = list(struct.unpack("<QQQQQQ", txn.get(bytes(4), b"")))
            numbers[position] = value
            txn.put(bytes(4), struct.pack("<QQQQQQ", *numbers))


def lose_everything(data: Path) -> None:
    lose_control(data, None)
    shutil.rmtree(data / "providers")


def spoil_control(data: Path) -> None:
    control = data / "control.db"
    content = bytearray(control.read_bytes())
    content[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    control.write_bytes(content)


def forget_provider(data: Path) -> None:
    with closing(sqlite3.connect(data / "control.db")) as database:
        database.execute("DELETE FROM providers")
        database.commit()


def move_ahead(data: Path) -> None:
    with closing(sqlite3.connect(data / "control.db")) as database:
        write_checkpoint(database, next_offset=9, watermark=9)
        database.commit()


def write_checkpoint(database: sqlite3.Connection, **changes: int) -> None:
    """Change the only checkpoint of `past`, and its checksum."""
    database.row_factory = sqlite3.Row
    stored = database.execute("SELECT * FROM checkpoints WHERE subscription = 'past'").fetchone()
    row = with_checksum("checkpoints", {**stored, **changes})
    assignments = ", ".join(f"{name} = :{name}" for name in row)
    database.execute(f"UPDATE checkpoints SET {assignments} WHERE subscription = 'past'", row)


def flip_checkpoint(data: Path) -> None:
    with closing(sqlite3.connect(data / "control.db")) as database:
        database.execute("UPDATE checkpoints SET next_offset = next_offset + 1 WHERE subscription = 'past'")
        database.commit()


def exchange_log(data: Path) -> None:
    asyncio.run(make(data.parent / "other"))
    shutil.rmtree(log_of(data))
    log_of(data.parent / "other").rename(log_of(data))


def cut_short(data: Path) -> None:
    os.truncate(log_of(data) / "data.mdb", 20_000)


def test_a_sound_directory_is_found_sound_and_left_as_it_is(data: Path, headrace: Headrace):
    before = contents(data)
    found = headrace("check", "--data", data, "--json")
    assert found.json["sound"]
    assert found.json["findings"] == []
    assert found.json["checked"]["queues"] == 1
    assert found.err.startswith("headrace: checked 1 provider, 1 queue, ")
    plain = headrace("check", "--data", data)
    assert (plain.code, plain.out) == (0, "")
    assert contents(data) == before


def contents(data: Path) -> dict[str, bytes]:
    """All files, without LMDB's lock file, in which readers have to register."""
    files = [file for file in data.rglob("*") if file.is_file() and file.name != "lock.mdb"]
    return {str(file.relative_to(data)): file.read_bytes() for file in files}


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged block": (
        lambda data: damage(data, 1, 2),
        (
            "damaged: provider 'default', queue 0, offsets 1 to 2: its checksum does not match: restore it from a "
            "backup, or skip it with `headrace repair queue --data DATA --provider default 0`"
        ),
    ),
    "missing block": (
        lambda data: remove(data, 2),
        (
            "missing: provider 'default', queue 0, offset 2: the block is missing: restore it from a backup, or "
            "skip it with `headrace repair queue --data DATA --provider default 0`"
        ),
    ),
    "wrong count": (
        lambda data: rewrite_tail(data, 1, 7),
        "inconsistent: provider 'default', queue 0: its number of events or bytes is wrong: it says 7 and ",
    ),
    "wrong end": (
        lambda data: rewrite_tail(data, 0, 4),
        "inconsistent: provider 'default', queue 0: it ends at offset 4, but there are records behind that: ",
    ),
    "log deleted": (
        lambda data: shutil.rmtree(log_of(data)),
        (
            "missing: provider 'default': its log was deleted or emptied: restore it from a backup, or begin an empty "
            "one with `headrace repair log --data DATA --provider default`"
        ),
    ),
    "log cut short": (cut_short, "damaged: provider 'default': "),
    "log exchanged": (exchange_log, "inconsistent: provider 'default': its log does not belong to the control store: "),
    "control deleted": (
        lambda data: lose_control(data, None),
        (
            "missing: control.db: it is missing or empty, but there are logs: restore it from a backup, or make it "
            "anew with `headrace repair control --data DATA`"
        ),
    ),
    "nothing but the marker": (
        lose_everything,
        (
            "missing: control.db: it is missing or empty, and there is no log: this directory holds no data: check the "
            "directory's name, or restore it from a backup"
        ),
    ),
    "control spoilt": (spoil_control, "damaged: control.db: "),
    "control without provider": (
        forget_provider,
        "inconsistent: provider 'default': it has a log, but control.db does not know it: ",
    ),
    "damaged checkpoint": (
        flip_checkpoint,
        (
            "damaged: control store: table checkpoints, provider 'default', subscription 'past', queue 0: the row is "
            "damaged (its checksum does not match): set its position with "
            "`headrace subscriptions seek --provider default past START`"
        ),
    ),
    "subscription ahead": (
        move_ahead,
        "inconsistent: provider 'default', subscription 'past': it is at offset 9 of queue 0, which ends at 5: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_reported_with_its_remedy(data: Path, headrace: Headrace, fault: str):
    spoil, expected = FAULTS[fault]
    spoil(data)
    before = contents(data)
    found = headrace("check", "--data", data)
    assert found.code == 1, found
    expected = expected.replace("DATA", str(data))
    assert any(line.startswith(expected) for line in found.out.splitlines()), found.out
    assert contents(data) == before


@pytest.mark.parametrize("content", [None, b"", b"\n"])
@pytest.mark.parametrize("command", [("check",), ("repair", "control"), ("subscriptions", "list"), ("tokens", "list")])
def test_a_lost_marker_is_named_with_the_command_that_writes_it(
    data: Path, headrace: Headrace, command: tuple[str, ...], content: bytes | None
):
    marker = data / "headrace.json"
    marker.unlink()
    if content is not None:
        marker.write_bytes(content)
    line = headrace(*command, "--data", data).refused(1)
    assert "headrace.json is missing or empty: restore it from a backup, or write it anew with `echo" in line
    subprocess.run(line.split("`")[1], shell=True, check=True)
    assert headrace("check", "--data", data).code == 0


@pytest.mark.parametrize("fault", ["damaged block", "missing block", "wrong count", "wrong end"])
def test_check_finds_a_repaired_directory_sound(data: Path, headrace: Headrace, fault: str):
    FAULTS[fault][0](data)
    assert headrace("check", "--data", data).code == 1
    repaired = headrace("repair", "queue", "--data", data, 0)
    assert repaired.code == 0, repaired
    assert headrace("check", "--data", data).code == 0


async def test_a_wrong_end_moves_no_subscription_before_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    await make(tmp_path)
    got: list[bytes] = []

    async def handler(event: Event) -> None:
        got.append(event.payload)

    async with Provider.open(tmp_path) as provider:
        await (await provider.subscribe("done", "orders/*", handler, start="earliest")).caught_up()
    await asyncio.to_thread(rewrite_tail, tmp_path, 0, 3)
    async with Provider.open(tmp_path) as provider:
        await provider.subscribe("done", "orders/*", handler, start="earliest")
        assert await provider.store.checkpoints("default", "done") == {0: Checkpoint(len(PAYLOADS))}
        assert "subscription 'done' stays where it is: queue 0, offset" in caplog.text
        with pytest.raises(CorruptRecord, match=r"records are stored behind that.*headrace repair queue --data"):
            await provider.stream("orders", "42").publish(b"new")
    await skip_damage(tmp_path, "default", 0)
    async with Provider.open(tmp_path) as provider:
        await provider.stream("orders", "42").publish(b"new")
        await (await provider.subscribe("done", "orders/*", handler, start="earliest")).caught_up()
        assert await provider.store.gaps("default") == []
    assert got == [*PAYLOADS, b"new"]


@pytest.mark.parametrize(
    "command",
    [("queues",), ("streams",), ("subscribe", "orders/*", "--from", "earliest", "--no-follow", "--format", "raw")],
)
def test_a_queue_that_ends_before_its_last_record_is_shown_as_damaged(
    data: Path, headrace: Headrace, command: tuple[str, ...]
):
    rewrite_tail(data, 0, 3)
    shown = headrace(*command, "--data", data)
    assert shown.code == 1
    assert "queue 0, offset 3: the stored record is damaged (the queue ends here, but records are stored" in shown.err
    assert shown.out
    assert headrace("repair", "queue", "--data", data, "0").code == 0
    again = headrace(*command, "--data", data)
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize(("end", "gone"), [(0, ()), (2, (0, 1, 2))])
async def test_a_queue_with_all_records_behind_its_end_is_repaired(tmp_path: Path, end: int, gone: Sequence[int]):
    await make(tmp_path)
    for offset in gone:
        await asyncio.to_thread(remove, tmp_path, offset)
    await asyncio.to_thread(rewrite_tail, tmp_path, 0, end)
    await asyncio.to_thread(rewrite_tail, tmp_path, 5, len(gone))  # as retention does
    async with Provider.open(tmp_path) as provider:
        with pytest.raises(CorruptRecord, match=r"headrace repair queue --data .* --provider default 0`"):
            await provider.adapter.bounds(0)
    await skip_damage(tmp_path, "default", 0)
    async with Provider.open(tmp_path) as provider:
        assert await provider.adapter.bounds(0) == (len(gone), len(PAYLOADS))
        got = Got()
        await provider.subscribe("all", "orders/*", got, start="earliest")
        await got.last.wait()
        assert got == PAYLOADS[len(gone) :]


async def test_it_runs_beside_a_provider(tmp_path: Path, headrace: Headrace):
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        await provider.create_subscription(from_earliest("s"))
        for payload in PAYLOADS:
            await provider.stream("orders", "1").publish(payload)
        found = await asyncio.to_thread(headrace, "check", "--data", tmp_path / "data")
        assert (found.code, found.out) == (0, "")
        assert (await provider.stream("orders", "1").publish(b"5")).offset == 5


def test_a_directory_that_cannot_be_written_is_checked(data: Path, public_path: Path):
    copy = public_path / "data"
    shutil.copytree(data, copy)
    damage(copy, 1)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    check = DirectoryCheck(copy, None, lambda _: None)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        asyncio.run(check.run())
    finally:
        os.seteuid(user)
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755)
    assert [(each.kind, each.where) for each in check.findings] == [
        ("damaged", "provider 'default', queue 0, offset 1")
    ]
