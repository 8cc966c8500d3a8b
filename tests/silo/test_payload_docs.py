"""docs/payloads.md: its examples run as they are written."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "payloads.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], "docs/payloads.md", "exec", dont_inherit=True), {"__name__": "example"})
    if "bill" in EXAMPLES[number]:
        printed = capsys.readouterr().out.splitlines()
        assert sorted(printed) == [
            "audit orders/42 1",
            "audit orders/42 2",
            "audit orders/42 3",
            "bill 1.0 EUR",
            "bill 2.0 EUR",
            "bill 9.5 EUR",
        ]
