"""The data directory: directories that are accepted or refused, and the lock of a subscription."""

import asyncio
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from threading import Barrier

import pytest

from headrace import Busy, DataDirectoryError, InvalidArgument, Provider
from headrace.silo.checking import DirectoryCheck
from headrace.store.datadir import DataDirectory, is_held, lock_subscription, open_data_directory, place_of

HOLD_LOCK = """
import sys
from headrace.store.datadir import lock_subscription, open_data_directory
lock = lock_subscription(open_data_directory(sys.argv[1]), "default", "s")
print("held", flush=True)
sys.stdin.read()
"""


def make(path: Path, marker: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "headrace.json").write_text(marker)
    return path


@contextmanager
def read_only(path: Path) -> Generator[None]:
    """The effective user cannot write to `path`, also where the tests run as root."""
    path.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        for each in (path, *path.iterdir()):
            os.chown(each, 65534, -1)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(0o755)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """An empty directory that every user of the machine can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        yield Path(name)


def test_a_missing_directory_is_made_with_its_parents(tmp_path: Path):
    directory = open_data_directory(tmp_path / "a" / "b")

    assert (tmp_path / "a" / "b" / "headrace.json").read_text() == '{"format":1}'
    assert directory.control_db == tmp_path / "a" / "b" / "control.db"


def test_threads_that_make_one_directory_at_once_do_not_collide(tmp_path: Path):
    with ThreadPoolExecutor(8) as threads:
        for number in range(50):
            together = Barrier(8)

            def make_one(path: Path = tmp_path / str(number), together: Barrier = together) -> DataDirectory:
                together.wait()
                return open_data_directory(path)

            made = [threads.submit(make_one) for _ in range(8)]
            assert {each.result().path for each in made} == {tmp_path / str(number)}
            assert [entry.name for entry in (tmp_path / str(number)).iterdir()] == ["headrace.json"]


def test_processes_with_the_same_id_that_make_one_directory_at_once_do_not_collide(tmp_path: Path):
    """Containers that share a volume have PID namespaces of their own."""
    program = """
import os, sys
from headrace.store.datadir import open_data_directory
os.getpid = lambda: 7
print("ready", flush=True)
for number in sys.stdin:
    open_data_directory(sys.argv[1] + "/" + number.strip())
    print("done", flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(4)]
    for each in both:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for number in range(50):
        for each in both:
            assert each.stdin is not None
            each.stdin.write(f"{number}\n")
            each.stdin.flush()
        for each in both:
            assert each.stdout is not None
            assert each.stdout.readline() == "done\n"
    for each in both:
        each.communicate()


def test_opening_again_accepts_the_directory_of_the_first_opening(tmp_path: Path):
    first = open_data_directory(tmp_path)
    assert open_data_directory(str(tmp_path)) == first


def test_a_half_made_marker_of_a_killed_process_is_no_obstacle(tmp_path: Path):
    (tmp_path / ".headrace.json.4711").write_text('{"for')
    open_data_directory(tmp_path)
    assert (tmp_path / "headrace.json").exists()


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert open_data_directory("data").path == tmp_path / "data"


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("work of years")

    with pytest.raises(DataDirectoryError, match=r"^data directory '.*': not empty .* \(it has 'thesis.tex'"):
        open_data_directory(tmp_path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataDirectoryError, match="is a file, not a directory"):
            open_data_directory(path)


@pytest.mark.parametrize("marker", ["", "not json", "[1]", "{}", '{"format": "1"}', '{"format": true}'])
def test_a_damaged_marker_is_refused(tmp_path: Path, marker: str):
    with pytest.raises(DataDirectoryError, match=r"damaged, headrace\.json"):
        open_data_directory(make(tmp_path, marker))


@pytest.mark.parametrize("version", [0, 2, 17])
def test_another_format_is_refused(tmp_path: Path, version: int):
    with pytest.raises(DataDirectoryError, match=rf"has format {version}, this headrace reads format 1"):
        open_data_directory(make(tmp_path, f'{{"format": {version}}}'))


def test_a_marker_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    open_data_directory(tmp_path)
    (tmp_path / "headrace.json").write_bytes(b'{"f\xf2rmat":1}')
    with pytest.raises(DataDirectoryError, match="no JSON object"):
        open_data_directory(tmp_path)


def test_a_control_store_that_a_power_failure_left_half_made_is_made_anew(tmp_path: Path) -> None:
    """Its first page has grown and is not written; the journal says that there was no page before."""
    control_db = open_data_directory(tmp_path).control_db
    control_db.write_bytes(bytes(4096))
    journal = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 1, 0, 512, 4096)
    (tmp_path / "control.db-journal").write_bytes(journal.ljust(512, b"\0"))

    async def providers() -> list[str]:
        async with Provider.open(tmp_path, queues=1) as provider:
            return [record.name for record in await provider.store.providers()]

    assert asyncio.run(providers()) == ["default"]


def test_a_control_store_that_is_no_database_is_refused(tmp_path: Path):
    open_data_directory(tmp_path).control_db.write_bytes(b"\0" * 4096)

    async def run() -> None:
        async with Provider.open(tmp_path):
            pass

    with pytest.raises(DataDirectoryError, match=r"control\.db: no control store of headrace, or a damaged one"):
        asyncio.run(run())


def test_a_control_store_whose_table_has_a_damaged_text_is_refused_and_checked(tmp_path: Path) -> None:
    """SQLite quotes the text in its message, which Python cannot decode."""

    async def run() -> None:
        async with Provider.open(tmp_path):
            pass

    asyncio.run(run())
    control_db = tmp_path / "control.db"
    content = bytearray(control_db.read_bytes())
    content[content.index(b"CREATE TABLE ") + 3] ^= 0x80
    control_db.write_bytes(content)
    with pytest.raises(DataDirectoryError, match=r"control\.db: no control store of headrace, or a damaged one"):
        asyncio.run(run())
    check = DirectoryCheck(tmp_path, None, lambda _: None)
    asyncio.run(check.run())
    assert "damaged: control.db: the text of a table is no UTF-8" in str(check.findings[0])


def test_another_process_keeps_the_write_ahead_log_of_an_open_control_store(tmp_path: Path):
    """SQLite's locks are those of the process: they end if the process closes the file by another way."""
    read_once = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM providers').fetchall()"

    async def run() -> bool:
        async with Provider.open(tmp_path, queues=1) as provider:
            open_data_directory(tmp_path)
            control_db = DataDirectory(tmp_path).control_db
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", read_once, control_db], check=True)
            await provider.store.providers()
            return await asyncio.to_thread(Path(f"{control_db}-wal").exists)

    assert asyncio.run(run())


def test_queues_without_their_control_store_are_refused(tmp_path: Path):
    own = open_data_directory(tmp_path).provider_dir("default")
    with pytest.raises(DataDirectoryError, match=r"damaged, control.db is missing or empty, and there is no log"):
        open_data_directory(tmp_path)
    (own / "log").mkdir()
    (own / "log" / "data.mdb").write_bytes(b"x")
    with pytest.raises(DataDirectoryError, match=r"damaged, it has queues but control.db is missing or empty: restore"):
        open_data_directory(tmp_path)


def test_a_read_only_directory_is_refused(public_path: Path):
    with read_only(public_path), pytest.raises(DataDirectoryError, match="Permission denied"):
        open_data_directory(public_path)


def test_a_read_only_data_directory_is_refused(public_path: Path):
    open_data_directory(public_path)
    with read_only(public_path), pytest.raises(DataDirectoryError, match="not writable by this user"):
        open_data_directory(public_path)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".", "..", "-x", "n" * 129])
def test_a_provider_name_cannot_leave_its_directory(tmp_path: Path, name: str):
    with pytest.raises(InvalidArgument, match="is not a provider name"):
        open_data_directory(tmp_path).provider_dir(name)


def test_provider_directories_exist_and_differ(tmp_path: Path):
    directory = open_data_directory(tmp_path)
    assert directory.provider_dir("a").is_dir()
    assert directory.provider_dir("a") != directory.provider_dir("b")


def test_many_processes_may_make_the_same_directory_at_once(tmp_path: Path):
    program = "import sys; from headrace.store.datadir import open_data_directory; open_data_directory(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(6)]

    assert [process.communicate()[1] for process in processes] == [b""] * 6
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["headrace.json"]


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    return open_data_directory(tmp_path / "data")


def test_a_subscription_is_served_by_one_holder_at_a_time(directory: DataDirectory):
    with lock_subscription(directory, "default", "s") as lock:
        with pytest.raises(Busy, match=rf"subscription 's' of provider 'default' is served by process {os.getpid()}"):
            lock_subscription(directory, "default", "s")
        assert lock.path.read_text() == str(os.getpid())
    with lock_subscription(directory, "default", "s"):
        pass


def test_locks_of_other_names_are_independent(directory: DataDirectory):
    with (
        lock_subscription(directory, "a", "s"),
        lock_subscription(directory, "a", "s2"),
        lock_subscription(directory, "a--b", "c"),
        lock_subscription(directory, "a", "b--c"),
    ):
        pass


def test_busy_names_the_other_process_and_its_death_frees_the_lock(directory: DataDirectory):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(directory.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Busy, match=f"served by process {holder.pid}"):
            lock_subscription(directory, "default", "s")
        holder.kill()
    with lock_subscription(directory, "default", "s") as lock:
        assert lock.path.read_text() == str(os.getpid())


def test_whether_a_lock_is_held_is_only_told_of_the_same_file_on_the_same_machine(directory: DataDirectory):
    held = lock_subscription(directory, "default", "s")
    place = place_of(held)
    boot, device, number, path = place.split(":", 3)
    assert is_held(place) is True
    held.release()
    assert is_held(place) is False
    assert is_held(f"another:{device}:{number}:{path}") is None
    assert is_held(f"{boot}:{device}:{int(number) + 1}:{path}") is None
    assert is_held(f"{boot}:{device}:{number}:{path}.gone") is None
    assert is_held("") is None
