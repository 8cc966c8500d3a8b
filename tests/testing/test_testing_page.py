"""docs/testing.md: its examples are tests, and pass as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing import assert_schema_compatible
from tests.plain_english import REPOSITORY

PAGE = (REPOSITORY / "docs" / "testing.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_examples_pass_and_the_recorded_schema_is_to_be_committed(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for number, example in enumerate(examples):
        (tmp_path / f"test_example{number}.py").write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 6 passed" in done.stdout, done.stdout
    assert "schemas/order.json: Order is recorded as version 1; commit this file, and run again" in done.stdout
    names: dict[str, object] = {}
    exec(examples[-1], names)
    assert_schema_compatible(names["Order"], tmp_path / "schemas" / "order.json")
