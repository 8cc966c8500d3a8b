"""The Dockerfile, as far as it can be checked without an engine of Docker."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commandline import ENVIRONMENT, Start, ended
from tests.deploy.manifests import DOCKERFILE, container_variables, free_ports, health_check
from tests.plain_english import REPOSITORY

LINTER = Path(sys.executable).parent / "hadolint"
PORT = "9464"


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LINTER, "--no-color", file], capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing():
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_would_find_a_mistake(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN cd /x && apt-get install y\n")
    assert lint(tmp_path / "Dockerfile").returncode == 1


def test_the_build_gets_every_folder_of_the_package():
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    allowed = {line.removeprefix("!") for line in ignored.splitlines() if line.startswith("!")}
    folders = re.search(r"^PACKAGES := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert folders
    assert {*folders[1].split(), "front_door", "pyspark_headrace.py", "pyproject.toml", "setup.py"} <= allowed
    assert all((REPOSITORY / name).exists() for name in allowed)


def test_the_extras_exist():
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE.read_text(encoding="utf-8"))
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))


@pytest.mark.long
def test_the_silo_of_the_image_is_healthy_and_stops_in_order(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the variables of the image and its command, on another port and in another directory."""
    port = str(*free_ports(1))
    for name, value in container_variables().items():
        monkeypatch.setitem(ENVIRONMENT, name, value.replace("/data", str(tmp_path)).replace(PORT, port))
    command = [part.replace(PORT, port) for part in health_check()]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def is_healthy() -> bool:
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0

    assert not is_healthy()
    process = start("silo")
    while not is_healthy():
        assert process.poll() is None, ended(process)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0
