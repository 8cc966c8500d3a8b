"""`headrace doctor`, and the judgements of its checks."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.diagnosis import (
    Finding,
    filesystem_of,
    judge_clock,
    judge_extras,
    judge_files,
    judge_filesystem,
    judge_packages,
    judge_permissions,
    judge_port,
    judge_python,
    judge_space,
    judge_times,
)
from tests.cli.commandline import Headrace
from tests.client.silos import SiloProcess

INSTALLED = {"click": "8.4.1", "grpcio": "1.75.0", "lmdb": "2.9", "redis": "8.0"}.get
MOUNTS = [
    "22 27 0:21 / /proc rw - proc proc rw",
    "27 1 254:0 / / rw - ext4 /dev/vda rw",
    r"30 27 0:40 / /mnt/my\040share rw - nfs4 host:/x rw",
    "31 27 0:41 / /data rw - ext4 /dev/vdb rw",
    "32 27 0:42 / /data rw - tmpfs tmpfs rw",
]


@pytest.mark.parametrize(
    ("finding", "verdict", "text"),
    [
        (judge_python("CPython", (3, 11)), "ok", "CPython 3.11"),
        (judge_python("PyPy", (3, 11)), "warn", "PyPy 3.11"),
        (judge_packages(["click>=8.4", "grpcio>=1.75"], INSTALLED), "ok", "2 packages as required"),
        (judge_packages(["lmdb>=3.0", "sqlalchemy[asyncio]>=2.0"], INSTALLED), "bad",
         "lmdb is 2.9, older than 3.0; sqlalchemy is missing"),
        (judge_packages(["redis<9,>=8.1"], INSTALLED), "bad", "redis is 8.0, older than 8.1"),
        (judge_extras({"redis": ["redis"], "kafka": ["confluent-kafka"]}, INSTALLED), "ok",
         "installed: redis; optional: pip install 'headrace[kafka]'"),
        (judge_extras({"redis": ["redis", "hiredis"]}, INSTALLED), "warn",
         "installed: none; optional: pip install 'headrace[redis]'; redis only in part"),
        (judge_files(1024), "ok", "at most 1,024"),
        (judge_files(-1), "ok", "no limit"),
        (judge_files(256), "warn", "at most 256"),
        (judge_clock(0), "ok", "synchronised"),
        (judge_clock(5), "warn", "not synchronised"),
        (judge_clock(None), "ok", "whether it is synchronised is not known on this system"),
        (judge_port("gRPC", 9465, free=True), "ok", "free, for gRPC"),
        (judge_port("dashboard", 9464, free=False), "warn", "in use, so not free for dashboard"),
        (judge_filesystem("ext4", "/data"), "ok", "/data is on ext4"),
        (judge_filesystem("nfs4", "/data"), "bad", "/data is on nfs4, which is no local disk"),
        (judge_filesystem("fuse.sshfs", "/data"), "bad", "/data is on fuse.sshfs, which is no local disk"),
        (judge_filesystem("tmpfs", "/data"), "warn", "/data is on tmpfs, in memory"),
        (judge_filesystem(None, "/data"), "warn", "the file system of /data is not known"),
        (judge_space(50 << 30, 1), "ok", "53.7 GB free"),
        (judge_space(1 << 30, None), "warn", "1.1 GB free"),
        (judge_space(1 << 20, None), "bad", "0.0 GB free"),
        (judge_space(50 << 30, 0), "bad", "53.7 GB free, but no inode"),
        (judge_permissions("/data", 0o700, 7, 7), "ok", "mode 0700, only for its owner"),
        (judge_permissions("/data", 0o750, 7, 7), "bad", "other users can use /data: its mode is 0750"),
        (judge_permissions("/data", 0o700, 7, 8), "bad", "/data is of user 7, not of 8"),
        (judge_permissions("/data", 0o700, 7, 0), "ok", "mode 0700, only for its owner"),
        (judge_times(1000.0, 990.0), "ok", "no file is from the future"),
        (judge_times(2000.0, 990.0), "warn", "the newest file is 1,010 s in the future, so the clock was set back"),
    ],
)  # fmt: skip
def test_a_judgement_says_what_to_do_unless_it_is_good(finding: Finding, verdict: str, text: str) -> None:
    assert (finding.verdict, finding.text) == (verdict, text)
    assert (finding.remedy == "") == (verdict == "ok")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/home/me", "ext4"), ("/mnt/my share/d", "nfs4"), ("/data", "tmpfs"), ("/database", "ext4")],
)
def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_unknown_mounts_have_no_file_system() -> None:
    assert filesystem_of("/data", []) is None


def verdicts(headrace: Headrace, *arguments: object) -> dict[str, str]:
    found = headrace("doctor", *arguments, "--json")
    assert found.code in {0, 1}, found
    (line,) = found.out.splitlines()
    document = json.loads(line)
    assert document["ok"] == (found.code == 0)
    return {one["check"]: one["verdict"] for one in document["checks"]}


def test_a_good_directory_is_well_and_nothing_is_written(tmp_path: Path, headrace: Headrace) -> None:
    assert verdicts(headrace, "--data", "new")["data"] == "ok"
    assert not (tmp_path / "new").exists()
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    found = verdicts(headrace, "--data", "d")
    assert {found[check] for check in ("headrace", "packages", "data", "permissions", "times")} == {"ok"}


def lose_marker(data: Path) -> None:
    (data / "headrace.json").unlink()


def open_to_others(data: Path) -> None:
    data.chmod(0o755)


@pytest.mark.long
@pytest.mark.parametrize(("make", "check"), [(lose_marker, "data"), (open_to_others, "permissions")])
def test_a_bad_directory_is_told_in_a_line(
    make: Callable[[Path], None], check: str, tmp_path: Path, headrace: Headrace
) -> None:
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    make(tmp_path / "d")
    assert verdicts(headrace, "--data", "d")[check] == "bad"
    ran = headrace("doctor", "--data", "d")
    assert (ran.code, ran.err) == (1, "headrace: 1 check failed\n")
    (at,) = [number for number, line in enumerate(ran.out.splitlines()) if line.startswith("bad ")]
    assert ran.out.splitlines()[at + 1].startswith("      do: ")


@pytest.mark.long
def test_a_clock_that_was_set_back_is_a_warning(tmp_path: Path, headrace: Headrace) -> None:
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    later = (tmp_path / "d").stat().st_mtime + 1e6
    os.utime(tmp_path / "d" / "control.db", (later, later))
    assert verdicts(headrace, "--data", "d")["times"] == "warn"


def test_silos_are_asked_for_their_state_and_version(tmp_path: Path, headrace: Headrace) -> None:
    silo = SiloProcess(tmp_path)
    address = silo.start()
    found = verdicts(headrace, "--server", address)
    assert found["server"] == "ok"
    assert not [check for check in found if check.startswith("port ")]  # the silo has them
    assert [verdict for check, verdict in found.items() if check.startswith("silo ")] == ["ok"]
    silo.stop()
    assert verdicts(headrace, "--server", address)["server"] == "bad"
