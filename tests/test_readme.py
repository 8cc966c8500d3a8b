"""The README's own examples, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[number]


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_first_program_prints_what_was_published(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", block("python")], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "orders/42 b'paid'\n"


def test_the_commands_work_on_the_directory_of_the_first_program(tmp_path: Path) -> None:
    run([sys.executable, "-c", block("python")], tmp_path)
    commands = [line.removeprefix("$ ") for line in block("console", 1).splitlines()]
    outputs: list[str] = []
    for command in commands:
        done = run(["bash", "-c", command], tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        outputs.append(done.stdout)
    assert "paid" in outputs[1]
    assert "billing" in outputs[3]


def test_the_silo_runs_the_module_of_the_example(tmp_path: Path) -> None:
    package = tmp_path / "myapp"
    package.mkdir()
    (package / "handlers.py").write_text(block("python", 1))
    (tmp_path / "silo.toml").write_text(block("toml"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [Path(sys.executable).parent / "headrace", "silo", "silo.toml"],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    ) as silo:  # fmt: skip
        assert silo.stderr is not None
        told = [silo.stderr.readline()]
        while "billing" not in told[-1]:
            assert told[-1], told
            told.append(silo.stderr.readline())
        silo.terminate()
        assert silo.wait(30) == 0
