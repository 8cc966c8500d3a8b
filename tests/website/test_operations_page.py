"""docs/operations.md: the runbook has a row for each cause that `headrace why` names, and for each alert."""

import re

from tests.plain_english import REPOSITORY

DOCS = REPOSITORY / "docs"
RUNBOOK = (DOCS / "operations.md").read_text(encoding="utf-8").partition("## Runbook")[2]


def test_the_runbook_has_every_cause():
    causes = re.findall(r"^\| `(\w+)` \|", (DOCS / "why.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(causes) > 20
    assert [cause for cause in causes if f"`{cause}`" not in RUNBOOK] == []


def test_the_runbook_has_every_alert():
    alerts = re.findall(r"alert: (\w+)", (DOCS / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))
    assert len(alerts) > 10
    assert [alert for alert in alerts if f"`{alert}`" not in RUNBOOK] == []
