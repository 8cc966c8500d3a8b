"""Power cuts, a sample: `make chaos` tries thousands. See tests/storage/power_loss.py."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.disk import SECTOR, Disk, Kept
from tests.storage.recording import Step, record, steps_of

IMAGES = int(os.environ.get("CHAOS_IMAGES", "0"))
"""How many, of each kind of recording. 0: a sample."""
SAMPLE = ("--images", "12", "--calls", "15", "--recordings", "2")
ALL = ("--images", str(IMAGES), "--calls", "100", "--rounds", "3")
"""Three short recordings differ more than one that is three times as long, and their images are read faster."""


@pytest.mark.timeout(120 + 6 * IMAGES)
def test_a_power_cut_loses_nothing_that_was_promised() -> None:
    """In processes of their own: each image is opened in a fork, and this process has threads."""
    command = (sys.executable, "-m", "tests.storage.power_loss", *(ALL if IMAGES else SAMPLE))
    # Its output is not collected here: what it has printed is shown also if the time limit ends it.
    assert subprocess.run(command, check=False).returncode == 0


_PROGRAM = """
import os, sys
folder = sys.argv[1]
journal = os.open(folder + "/../journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.mkdir(folder + "/sub")
file = os.open(folder + "/sub/file", os.O_RDWR | os.O_CREAT)
os.write(file, b"a" * 1000)
os.pwrite(file, b"b" * 3000, 500)
os.fsync(file)
os.write(journal, b"synced\\n")
os.pwritev(file, [b"c" * 600, b"d" * 600], 2000)
os.ftruncate(file, 3000)
os.rename(folder + "/sub/file", folder + "/sub/renamed")
through = os.open(folder + "/sub/renamed", os.O_WRONLY | os.O_DSYNC)
os.pwrite(through, b"e" * 10, 0)
os.mkfifo(folder + "/fifo")
os.link(folder + "/sub/renamed", folder + "/link")
os.unlink(folder + "/sub/renamed")
"""


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    root = tmp_path / "root"
    root.mkdir()
    assert record([sys.executable, "-c", _PROGRAM, str(root)], tmp_path / "trace") == 0
    return steps_of([tmp_path / "trace"], root, tmp_path / "journal")


def at_the_end(steps: list[Step]) -> Disk:
    disk = Disk()
    for step in steps:
        disk.apply(step)
    return disk


def image(disk: Disk, target: Path, kept: Kept, seed: int = 0) -> dict[str, bytes]:
    disk.build(target, random.Random(seed), kept, {})
    return {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}


def test_a_recording_repeats_the_writes_of_a_process(steps: list[Step], tmp_path: Path) -> None:
    written = {"link": (tmp_path / "root/link").read_bytes()}
    disk = at_the_end(steps)
    assert disk.files() == written
    assert image(disk, tmp_path / "image", Kept(1, 0)) == written
    assert [step.data for step in steps if step.kind == "note"] == [b"synced\n"]


def test_a_write_that_a_kill_cut_short_is_recorded(tmp_path: Path) -> None:
    """Without it, an image had two meta pages of LMDB that do not follow each other."""
    name = "".join(f"\\x{byte:02x}" for byte in bytes(tmp_path / "root" / "file"))
    opened = f'7 openat(AT_FDCWD, "{name}", O_RDWR) = 3<{name}>'
    (tmp_path / "trace").write_text(f'{opened}\n7 pwrite64(3<{name}>, "\\x61\\x62", 2, 4) = ?\n')
    (step,) = steps_of([tmp_path / "trace"], tmp_path / "root", tmp_path / "journal")
    assert (step.kind, step.path, step.data, step.offset) == ("write", "file", b"ab", 4)


def test_without_a_sync_of_its_directory_a_file_may_be_gone(steps: list[Step], tmp_path: Path) -> None:
    assert image(at_the_end(steps), tmp_path / "image", Kept(0, 0)) == {}


def test_synced_bytes_stay_and_later_writes_are_torn_by_sectors(tmp_path: Path) -> None:
    calls = (("create", ""), ("sync", "."), ("write", "a"), ("sync", ""), ("write", "b"))
    disk = at_the_end(
        [
            Step(number, True, True, kind, "" if data == "." else "file", data.encode() * 2 * SECTOR)
            for number, (kind, data) in enumerate(calls)
        ]
    )
    assert image(disk, tmp_path / "none", Kept(0, 0)) == {"file": b"a" * 2 * SECTOR}
    seen = {image(disk, tmp_path / str(seed), Kept(0.5, SECTOR), seed)["file"][::SECTOR] for seed in range(50)}
    assert seen == {b"aa", b"ab", b"ba", b"bb"}


def test_a_durable_write_is_there_when_it_returned_and_may_be_torn_before(tmp_path: Path) -> None:
    made = [Step(0, True, True, "create", "file"), Step(1, True, True, "sync", "")]
    write = Step(2, True, True, "write", "file", b"a" * 2 * SECTOR, durable=True)
    assert image(at_the_end([*made, write]), tmp_path / "after", Kept(0, 0)) == {"file": b"a" * 2 * SECTOR}
    assert image(at_the_end([*made, write._replace(ends=False)]), tmp_path / "before", Kept(0, 0)) == {"file": b""}


def test_a_sync_covers_only_writes_that_ended_before_it_began(tmp_path: Path) -> None:
    disk = Disk()
    for step in (
        Step(0, True, True, "create", "file"),
        Step(1, True, True, "sync", ""),
        Step(2, True, False, "write", "file", b"early"),
        Step(3, True, False, "sync", "file"),
        Step(2, False, True, "write", "file", b"early"),
        Step(3, False, True, "sync", "file"),
    ):
        disk.apply(step)
    assert image(disk, tmp_path / "image", Kept(0, 0)) == {"file": b""}
