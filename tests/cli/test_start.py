"""Commands start fast: counted by the modules that they import, because seconds depend on the machine."""

import json
import subprocess
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from headrace.cli.commands.pipeline import JOBS
from headrace.cli.main import COMMANDS
from tests.cli.commandline import ENVIRONMENT, Headrace

SLOW = {
    "google.protobuf", "grpc", "headrace.adapters", "headrace.agents", "headrace.silo.provider", "lmdb",
    "numpy", "prometheus_client", "py4j", "pyarrow", "pyspark", "rich", "sqlalchemy", "starlette", "uvicorn",
    "watchfiles",
}  # fmt: skip
"""Modules that take long to import. Only the work of a command needs them."""


def imported(calls: Sequence[Sequence[str]], modules: AbstractSet[str] = SLOW) -> dict[str, list[str]]:
    """Run the calls one after the other in a new process. Return which of the modules each has imported."""
    program = (
        "import json, sys\n"
        "from headrace.cli.main import main\n"
        "found, before = {}, set()\n"
        f"for call in {list(map(list, calls))!r}:\n"
        "    main(call)\n"
        f"    now = {modules!r} & set(sys.modules)\n"
        "    if now - before:\n"
        "        found[' '.join(call)] = sorted(now - before)\n"
        "    before = now\n"
        "print()\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def test_help_imports_nothing_slow() -> None:
    groups = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    assert imported([*groups, *(["pipeline", name, "--help"] for name in JOBS)]) == {}


def test_a_wrong_directory_is_refused_before_anything_slow_is_imported() -> None:
    missing = ["--data", "/missing"]
    assert imported([["queues", *missing], ["subscribe", "a/*", *missing], ["tokens", "list", *missing]]) == {}


@pytest.mark.long
def test_the_work_of_a_command_imports_it() -> None:
    """Otherwise the list above would name modules that no command imports."""
    assert "sqlalchemy" in imported([["effects", "ddl"]])["effects ddl"]


@pytest.mark.long
def test_a_report_about_a_data_directory_imports_no_grpc_and_no_dialect_of_postgresql(
    headrace: Headrace, tmp_path: Path
) -> None:
    assert headrace("publish", "--data", "data", "--stream", "orders/1", stdin=b"{}").code == 0
    data = ["--data", str(tmp_path / "data")]
    calls = [["subscriptions", "list", *data], ["deadletters", "list", *data], ["queues", *data], ["streams", *data]]
    unneeded = {"grpc", "sqlalchemy.dialects.postgresql", "prometheus_client", "starlette", "uvicorn"}
    found = {name for names in imported(calls, SLOW | unneeded).values() for name in names}
    assert found & unneeded == set()
    assert "sqlalchemy" in found
