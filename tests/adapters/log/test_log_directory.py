"""Directories that are no log, or not the one that was meant: one clear line."""

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import lmdb
import pytest

from headrace import DataDirectoryError, EventBatch, InvalidArgument, NotSupported, StorageError, StreamId
from headrace.adapters import AdapterContext, open_adapter
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.inspection import LogInspection

OpenLog = Callable[..., Awaitable[LogAdapter]]


def rewrite(log: Path, database: bytes | None, change: Callable[[Any], None]) -> None:
    """Change a log behind the adapter's back."""
    with lmdb.open(str(log), max_dbs=10, map_size=1 << 30) as environment:
        opened = None if database is None else environment.open_db(database)
        with environment.begin(write=True, db=opened) as txn:
            change(txn)


async def make(open_log: OpenLog) -> None:
    adapter = await open_log()
    await adapter.enqueue([(0, EventBatch.of(StreamId("tests", "a"), [b"x" * 100_000]))])
    await adapter.aclose()


async def test_a_file_in_the_place_of_the_directory(open_log: OpenLog, tmp_path: Path):
    (tmp_path / "log").write_text("mine")
    with pytest.raises(DataDirectoryError, match=r"^'.*log' cannot be a log directory: File exists"):
        await open_log()
    assert (tmp_path / "log").read_text() == "mine"


async def test_a_directory_that_does_not_exist(open_log: OpenLog, tmp_path: Path):
    with pytest.raises(DataDirectoryError, match="No such file"):
        await open_log(directory=tmp_path / "missing")


async def test_a_directory_that_cannot_be_written(open_log: OpenLog):
    with pytest.raises(DataDirectoryError, match="/proc/self"):
        await open_log(directory=Path("/proc/self"))


@pytest.mark.parametrize("content", [b"something else" * 1000, bytes(8192), b"short"])
async def test_a_file_that_is_no_database(open_log: OpenLog, tmp_path: Path, content: bytes):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "data.mdb").write_bytes(content)
    with pytest.raises(DataDirectoryError, match="is not a log, or is damaged"):
        await open_log()
    assert (tmp_path / "log" / "data.mdb").read_bytes() == content


async def test_a_database_of_something_else(open_log: OpenLog, tmp_path: Path):
    (tmp_path / "log").mkdir()
    rewrite(tmp_path / "log", None, lambda txn: txn.put(b"their", b"data"))
    with pytest.raises(DataDirectoryError, match="an LMDB database of something else"):
        await open_log()


async def test_a_database_of_something_else_with_a_key_like_ours(open_log: OpenLog, tmp_path: Path):
    (tmp_path / "log").mkdir()
    rewrite(tmp_path / "log", None, lambda txn: txn.put(b"meta", b"data"))
    with pytest.raises(DataDirectoryError, match="an LMDB database of something else"):
        await open_log()


async def test_a_log_cut_short_is_refused_and_does_not_kill_the_process(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    os.truncate(tmp_path / "log" / "data.mdb", 20_000)
    with pytest.raises(DataDirectoryError, match=r"cut short: 20,000 bytes of \d+"):
        await open_log()


TRANSACTION, LAST_PAGE, NAMES_ROOT = 16 + 128, 16 + 120, 16 + 112
"""Offsets of these numbers in a meta page of LMDB."""


def meta_number(log: Path, field: int, page: int) -> int:
    return struct.unpack_from("<Q", (log / "data.mdb").read_bytes(), page * 4096 + field)[0]


def newer_page(log: Path) -> int:
    return max((0, 1), key=lambda page: meta_number(log, TRANSACTION, page))


def flip(log: Path, field: int, bit: int, *, newer: bool) -> None:
    page = newer_page(log) if newer else 1 - newer_page(log)
    number = meta_number(log, field, page) ^ (1 << bit)
    with (log / "data.mdb").open("r+b") as file:
        file.seek(page * 4096 + field)
        file.write(number.to_bytes(8, "little"))


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("bit", [0, 2, 3, 17, 63])
async def test_meta_pages_that_do_not_follow_each_other_are_refused(
    open_log: OpenLog, tmp_path: Path, bit: int, newer: bool
):
    await make(open_log)
    flip(tmp_path / "log", TRANSACTION, bit, newer=newer)
    message = r"data\.mdb' is damaged: its meta pages are of transactions \d+ and \d+,"
    with pytest.raises(DataDirectoryError, match=message):
        await open_log()
    with pytest.raises(DataDirectoryError, match=message):
        await asyncio.to_thread(LogInspection, tmp_path / "log")


@pytest.mark.parametrize(
    ("field", "bit", "message"),
    [(NAMES_ROOT, 40, "points to page"), (LAST_PAGE, 4, "cut short|last page")],
)
async def test_a_meta_page_with_a_wrong_page_number_is_refused(
    open_log: OpenLog, tmp_path: Path, field: int, bit: int, message: str
):
    await make(open_log)
    flip(tmp_path / "log", field, bit, newer=True)
    with pytest.raises(DataDirectoryError, match=message):
        await open_log()


async def test_a_log_that_was_relaxed_once_may_have_meta_pages_of_any_transactions(open_log: OpenLog, tmp_path: Path):
    """A power failure may have left the older page as it was long ago, also if durability is `commit` by now."""
    adapter = await open_log(durability="relaxed")
    for number in range(5):
        await adapter.enqueue([(0, EventBatch.of(StreamId("tests", "a"), [b"%d" % number]))])
    await adapter.aclose()
    old = meta_number(tmp_path / "log", TRANSACTION, 1 - newer_page(tmp_path / "log"))
    flip(tmp_path / "log", TRANSACTION, old.bit_length() - 1, newer=False)
    again = await open_log()
    assert (await again.bounds(0)).next == 5
    await again.aclose()


async def test_a_log_of_a_later_format(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    later = b'{"format": 2, "queues": 2, "provider": "tests", "created_us": 0}'
    rewrite(tmp_path / "log", b"meta", lambda txn: txn.put(b"log", later))
    with pytest.raises(DataDirectoryError, match="has format 2, this version reads format 1"):
        await open_log()


async def test_another_number_of_queues(open_log: OpenLog):
    await make(open_log)
    with pytest.raises(InvalidArgument, match="was made with 2 queues, not 3"):
        await open_log(queues=3)
    adapter = await open_log()
    with pytest.raises(InvalidArgument, match="is open in this process with 2 queues"):
        await open_log(queues=3)
    assert (await adapter.bounds(0)).next == 1


async def test_handles_of_one_process_agree_on_durability(open_log: OpenLog):
    await open_log()
    with pytest.raises(InvalidArgument, match="another durability"):
        await open_log(durability="relaxed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durabillity": "commit"}, "durabillity"),
        ({"durability": "perhaps"}, "durability"),
        ({"retain_bytes": 0}, "retain_bytes"),
        ({"retain_age_s": -1.0}, "retain_age_s"),
        ({"map_bytes": 1}, "map_bytes = 1: expected an integer >= 1048576 and <= 4611686018427387904"),
        ({"map_bytes": 10**25}, "map_bytes = 1(0){25}: expected an integer >= 1048576"),
        ({"map_bytes": 10**5000}, "map_bytes: expected an integer >= 1048576"),
    ],
)
async def test_options_that_are_wrong_are_named(open_log: OpenLog, options: dict[str, Any], message: str):
    with pytest.raises(InvalidArgument, match=message):
        await open_log(**options)


async def test_a_provider_without_a_directory():
    with pytest.raises(InvalidArgument, match="needs a directory"):
        await open_adapter("log", AdapterContext(provider="tests", queues=1), {})


@pytest.mark.parametrize("queues", [0, 5000])
async def test_a_number_of_queues_beyond_the_limits(open_log: OpenLog, queues: int):
    with pytest.raises(InvalidArgument, match="a log has 1 to 4,096 queues"):
        await open_log(queues=queues)


async def test_more_address_space_than_the_system_has(open_log: OpenLog):
    with pytest.raises(StorageError, match="lower the option map_bytes"):
        await open_log(map_bytes=1 << 62)


async def test_a_failed_opening_leaves_the_directory_free_for_the_next(open_log: OpenLog):
    await make(open_log)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            await open_log(queues=3)
    assert (await (await open_log()).bounds(0)).next == 1


async def test_another_database_in_the_same_process_is_left_alone(open_log: OpenLog, tmp_path: Path):
    (tmp_path / "log").mkdir()
    with lmdb.open(str(tmp_path / "log")):
        with pytest.raises(DataDirectoryError, match="already open in this process"):
            await open_log()


FORKING = """
import asyncio, os, sys
from pathlib import Path
from headrace.adapters import AdapterContext, open_adapter
from headrace import EventBatch, NotSupported, StreamId

context = AdapterContext(provider="tests", queues=2, directory=Path(sys.argv[1]))
batch = EventBatch.of(StreamId("tests", "fork"), [b"x"])

async def main():
    adapter = await open_adapter("log", context, {})
    await adapter.enqueue([(0, batch)])
    child = os.fork()
    if not child:
        try:
            adapter.enqueue([(0, batch)])
        except NotSupported as error:
            print("used:", error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    child = os.fork()
    if not child:
        asyncio._set_running_loop(None)
        try:
            asyncio.run(open_adapter("log", context, {}))
        except NotSupported as error:
            print("opened:", error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    await adapter.enqueue([(0, batch)])
    print("parent:", (await adapter.bounds(0)).next)
    await adapter.aclose()

asyncio.run(main())
"""


async def test_a_forked_child_is_told_to_open_its_own(run_script: Callable[..., Popen[str]]):
    output, _ = await asyncio.to_thread(run_script(FORKING).communicate)
    used, opened, parent = output.splitlines()
    assert "spawn" in used
    assert "spawn" in opened
    assert parent == "parent: 2"
    assert NotSupported.code == "not_supported"
