"""The unit of the nightly backup: its commands run as systemd runs them, in other directories."""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.commandline import ENVIRONMENT, SCRIPT, Headrace
from tests.deploy.manifests import DEPLOY

OLD_S = 15.1 * 86_400
"""The age of a backup that is older than two weeks."""


@pytest.fixture
def folder(tmp_path: Path, headrace: Headrace) -> Path:
    """The directory of the backups, beside a data directory with one event."""
    assert headrace("publish", "--data", "data", "--stream", "orders/1", stdin=b'{"state": "paid"}').code == 0
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups"


def run_unit(folder: Path) -> bool:
    """Run the commands in order, until one fails. Return whether the unit succeeded."""
    text = (DEPLOY / "systemd" / "headrace-backup.service").read_text(encoding="utf-8")
    program = folder.parent / "program"  # the unit does not quote the path, and that of the tests may have a space
    program.unlink(missing_ok=True)
    program.symlink_to(SCRIPT)
    for line in re.findall(r"^ExecStart(?:Pre)?=(.*)$", text, re.MULTILINE):
        command = line.replace("%%", "%").replace("/opt/headrace/bin/headrace", str(program))
        command = command.replace("/var/lib/headrace-backup", str(folder))
        command = command.replace("/var/lib/headrace/data", str(folder.parent / "data"))
        if subprocess.run(shlex.split(command), env=ENVIRONMENT, check=False).returncode != 0:
            return False
    return True


def old(path: Path) -> Path:
    path.mkdir()
    (path / "control.db").touch()
    made_at = time.time() - OLD_S
    os.utime(path, (made_at, made_at))
    return path


@pytest.mark.long
def test_old_backups_are_deleted_after_a_new_one_was_made_and_checked(folder: Path, headrace: Headrace) -> None:
    old(folder / "2020-01-02-0300")
    others = old(folder / "before the move"), old(folder / "2020-01-02")
    assert run_unit(folder)
    (made,) = [path for path in folder.iterdir() if path not in others]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}", made.name)
    assert headrace("check", "--data", made).code == 0


@pytest.mark.long
def test_a_backup_that_is_not_old_stays(folder: Path) -> None:
    (folder / "2020-01-02-0300").mkdir()
    assert run_unit(folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.long
def test_a_failed_backup_deletes_no_other_and_leaves_no_directory(folder: Path) -> None:
    kept = old(folder / "2020-01-02-0300")
    shutil.rmtree(folder.parent / "data" / "providers")
    assert not run_unit(folder)
    assert list(folder.iterdir()) == [kept]


@pytest.mark.long
def test_the_next_backup_deletes_what_a_killed_one_left(folder: Path) -> None:
    (folder / "2020-01-02-0300.unfinished").mkdir()
    assert run_unit(folder)
    assert not list(folder.glob("*.unfinished"))
