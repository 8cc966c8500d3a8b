"""The alert rules and the dashboard that ship in docs/monitoring."""

import re
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from headrace.silo.metric_definitions import SECTIONS
from tests.prometheus import MONITORING, promtool, quickened

DOCS = MONITORING.parent
EXPORTED = set(
    chain.from_iterable(
        [one.shown_name]
        if one.kind != "histogram"
        else [f"{one.shown_name}_{part}" for part in ("bucket", "sum", "count")]
        for section in SECTIONS
        for one in section.definitions
    )
)


def expressions() -> list[str]:
    """The expressions of the dashboard, with values for Grafana's variables."""
    dashboard = msgspec.json.decode((MONITORING / "dashboard.json").read_bytes())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(job|provider|subscription)", ".+", one).replace("$__rate_interval", "1m") for one in found]


@pytest.mark.long
def test_the_rules_are_valid_and_fire_as_their_tests_say():
    promtool("check", "rules", MONITORING / "alerts.yml")
    promtool("test", "rules", MONITORING / "alerts_test.yml")


def test_the_expressions_of_the_dashboard_are_valid(tmp_path: Path):
    assert len(expressions()) > 25
    rules = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions())]
    (tmp_path / "rules.yml").write_bytes(msgspec.json.encode({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.parametrize("source", ["alerts.yml", "dashboard.json", "alerts_test.yml"])
def test_every_metric_that_is_named_exists(source: str):
    named = set(re.findall(r"headrace_\w+", (MONITORING / source).read_text()))
    assert named
    assert named - EXPORTED == set()


def test_every_alert_has_a_remedy_in_the_docs():
    alerts = re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text())
    table = re.findall(r"^\| `(Headrace\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert table == alerts


def test_quick_rules_have_no_long_time_left():
    rules = quickened((MONITORING / "alerts.yml").read_text())
    assert re.findall(r"\d+m\b|> (?:30|60|300)\b", rules) == []
