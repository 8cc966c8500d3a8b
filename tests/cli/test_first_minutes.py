"""The commands of docs/first-minutes.md lead to the first handled event."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.commandline import ENVIRONMENT, SCRIPT
from tests.cli.projects import DevelopmentProcess
from tests.test_readme import free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-minutes.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
INSTALL, INIT, DEV, PUBLISH, _, CHANGE_DIRECTORY, TEST, DOCTOR = COMMANDS
HANDLED = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)[0]


def follow(folder: Path, environment: Mapping[str, str]) -> None:
    """Run the commands after `pip install` in a directory, on ports that are free."""
    clients = free_ports(2)
    addresses = f" --listen 127.0.0.1:{clients} --port {clients + 1}"

    def run(command: str) -> None:
        command = command.replace(":9465", f":{clients}")
        ran = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, (command, ran.stdout, ran.stderr)

    run(INIT)
    with DevelopmentProcess(["bash", "-c", f"exec {DEV}{addresses}"], folder, environment) as dev:
        dev.until("silo is ready")
        run(PUBLISH)
        dev.until(HANDLED)
        run(DOCTOR)
        assert dev.end() == 0
    run(f"{CHANGE_DIRECTORY} && {TEST}")


@pytest.mark.long
def test_three_commands_lead_to_the_first_handled_event(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    path = f"{Path(SCRIPT).parent}:{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    follow(folder, {**ENVIRONMENT, "PATH": path})
    assert not subprocess.run(["git", "init", "-q"], cwd=folder / "shop", check=True, capture_output=True).stdout
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    shown = subprocess.run(status, cwd=folder / "shop", check=True, capture_output=True, text=True).stdout
    assert ".headrace" not in shown


def test_the_readme_has_the_same_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^    \$ (.*)$", readme, re.MULTILINE)[:4] == [INSTALL, INIT, DEV, PUBLISH]


@pytest.mark.slow  # the test above, with the installed headrace
@pytest.mark.timeout(400)
def test_the_wheel_in_a_new_environment_leads_there(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    install = [binaries / "pip", "--disable-pip-version-check", "install", "-q", wheel, "pytest"]
    subprocess.run(install, check=True)
    follow(tmp_path, {**ENVIRONMENT, "PATH": f"{binaries}{os.pathsep}/usr/bin:/bin"})
