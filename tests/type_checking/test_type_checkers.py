"""What type checkers say of code that uses headrace: nothing of `accepted.py`, and every mistake of `refused.py`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = ["accepted.py", "refused.py"]

pytestmark = pytest.mark.timeout(300)  # a type checker reads all that headrace imports


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project, without the configuration of this repository."""
    for case in CASES:
        shutil.copy(Path(__file__).parent / case, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    return tmp_path


def check(project: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, *CASES], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_pyright_strict_finds_the_mistakes_and_nothing_else(project: Path) -> None:
    check(project, "pyright", "--pythonpath", sys.executable)


@pytest.mark.slow
def test_mypy_strict_finds_the_mistakes_and_nothing_else(project: Path) -> None:
    check(project, "mypy", "--strict", "--cache-dir", str(Path(sys.prefix) / "mypy_cache"))
