"""The conformance suite in another project: no configuration, pytest-asyncio in its default mode."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
from pathlib import Path
from headrace.adapters import AdapterContext, QueueAdapter
from headrace.adapters.conformance import {classes}
from headrace.adapters.memory import MemoryAdapter

class TestTheirs({classes}):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        return MemoryAdapter(AdapterContext(provider="theirs", queues=queues, directory=directory))
"""


def run(directory: Path, classes: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_theirs.py").write_text(PROJECT.format(classes=classes))
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", str(directory)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_it_passes_without_any_configuration(tmp_path: Path):
    outcome = run(tmp_path, "ConformsToQueueAdapter, ConformsToIdempotent")
    assert outcome.returncode == 0, outcome.stdout
    assert " passed" in outcome.stdout
    assert "skipped" not in outcome.stdout


@pytest.mark.long
def test_a_forgotten_group_of_tests_fails_and_says_which(tmp_path: Path):
    outcome = run(tmp_path, "ConformsToQueueAdapter")
    assert outcome.returncode == 1
    assert "1 failed" in outcome.stdout
    assert "inherit from the classes that fit the capabilities" in outcome.stdout
    assert "'idempotent'" in outcome.stdout  # the assertion shows its values


def test_the_adapters_do_not_import_pytest():
    code = "import sys, headrace.adapters, headrace.adapters.memory; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
