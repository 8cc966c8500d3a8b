"""An archive's directory changes whole or not at all: killed at every step, and once more while it goes on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.pipeline.jobs.files import Archive, ArchiveState, folder_name, lock_for_reading, read_state
from headrace.streams.errors import Busy, DataDirectoryError, InvalidArgument

SOURCE = {"data": "data"}


class Killed(BaseException):
    pass


class Kill:
    """Stops the caller before the step number `at`, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, step: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed(step)


def written(archive: Archive, *names: str) -> Path:
    """A folder as Spark leaves it, with a file for each name."""
    folder = archive.new_folder()
    for name in names:
        (folder / f"n=x{name.encode().hex()}" / "date=2026-11-21").mkdir(parents=True)
        (folder / f"n=x{name.encode().hex()}" / "date=2026-11-21" / f"part-{name}.parquet").write_text(name)
    (folder / "_SUCCESS").touch()
    return folder


def contents(path: Path) -> list[str]:
    """Return the contents that a reader sees."""
    return sorted(file.read_text() for file in path.glob("namespace=*/date=*/*.parquet"))


def first_change(path: Path) -> None:
    with Archive.open(path) as archive:
        archive.change(written(archive, "old", "kept"), ArchiveState(SOURCE, [5], 1, 2))


def change(archive: Archive) -> None:
    """Two files are added, one is removed."""
    (old,) = (str(file.relative_to(archive.path)) for file in archive.path.glob("namespace=old/*/*"))
    archive.change(written(archive, "new", "newer"), ArchiveState(SOURCE, [9], 2, 4), [old])


def kills(tmp_path: Path) -> Iterator[Path]:
    """An archive for each step at which the change can be killed, as it is left."""
    for at in range(100):
        path = tmp_path / str(at)
        first_change(path)
        archive = Archive.open(path, Kill(at))
        try:
            change(archive)
        except Killed:
            archive.close()
            yield path
        else:
            archive.close()
            assert at > 7
            return


def test_a_change_that_is_killed_is_whole_or_not_there(tmp_path: Path):
    outcomes: set[int] = set()
    for path in kills(tmp_path):
        with Archive.open(path) as archive:
            state = archive.state
        assert state is not None
        assert state == read_state(path)
        expected = ["kept", "old"] if state.run == 1 else ["kept", "new", "newer"]
        assert (contents(path), list(state.positions)) == (expected, [5] if state.run == 1 else [9])
        assert not list(path.glob("_headrace/run-*"))
        assert not (path / "_headrace/intent.json").exists()
        outcomes.add(state.run)
    assert outcomes == {1, 2}


def test_going_on_may_be_killed_as_well(tmp_path: Path):
    for path in kills(tmp_path / "once"):
        for at in range(100):
            copy = tmp_path / "twice"
            shutil.copytree(path, copy)
            try:
                Archive.open(copy, Kill(at)).close()
            except Killed:
                Archive.open(copy).close()
                ended = False
            else:
                ended = True
            assert contents(copy) in (["kept", "old"], ["kept", "new", "newer"])
            shutil.rmtree(copy)
            if ended:
                break


def test_reader_finishes_a_change_that_removes_files(tmp_path: Path):
    for path in kills(tmp_path):
        with lock_for_reading(path):
            assert contents(path) in (["kept", "old"], ["kept", "new", "newer"])


def test_readers_keep_a_removal_out_and_one_another_not(tmp_path: Path):
    first_change(tmp_path / "kept")
    with Archive.open(tmp_path / "kept") as archive:
        with lock_for_reading(tmp_path / "kept"), lock_for_reading(tmp_path / "kept"):
            assert archive.readers_lock() is None
        lock = archive.readers_lock()
        assert lock is not None
        with lock, pytest.raises(Busy, match="is compacted by another process"):
            lock_for_reading(tmp_path / "kept")


def test_one_process_writes_at_a_time(tmp_path: Path):
    with Archive.open(tmp_path / "kept"), pytest.raises(Busy, match="is written by another process"):
        Archive.open(tmp_path / "kept")
    Archive.open(tmp_path / "kept").close()


def test_damage_is_told(tmp_path: Path):
    first_change(tmp_path)
    state = tmp_path / "_headrace/state.json"
    good = state.read_text()
    state.write_text(good.replace('"format": 1', '"format": 2'))
    with pytest.raises(DataDirectoryError, match="has format 2, this headrace reads format 1"):
        Archive.open(tmp_path)
    state.write_text(good[:-9])
    with pytest.raises(DataDirectoryError, match=r"state\.json' is damaged"):
        Archive.open(tmp_path)


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("flights", "namespace=flights"),
        ("a/b=c%d", "namespace=a%2Fb%3Dc%25d"),
        ("Zürich 日本", "namespace=Zürich 日本"),
        ("", "namespace=__HIVE_DEFAULT_PARTITION__"),
        ("__HIVE_DEFAULT_PARTITION__", "namespace=%5F_HIVE_DEFAULT_PARTITION__"),
        ("..", "namespace=.."),
        ("a\n\x00", "namespace=a%0A%00"),
    ],
)
def test_every_namespace_is_a_directory_of_its_own(namespace: str, name: str):
    assert folder_name(namespace) == name


def test_a_namespace_that_no_directory_can_have_is_refused():
    with pytest.raises(InvalidArgument, match="is too long for the name of a directory"):
        folder_name("/" * 90)
