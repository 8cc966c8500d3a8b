"""A real Prometheus server for tests, and promtool."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import msgspec

from benchmarks.servers import LOOPBACK, Server, find_program

MONITORING = Path(__file__).parent.parent / "docs" / "monitoring"
SCALE = 60
"""`quickened` turns minutes into seconds."""
AGE_SCALE = 6
"""`quickened` divides limits of ages by this: a busy disk may take a second to save progress, also in a test."""


def promtool(*arguments: str | Path) -> str:
    """Run promtool, and return its output. It fails the test if promtool refuses its input."""
    ran = subprocess.run(
        (find_program("promtool", debian_package="prometheus"), *map(str, arguments)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def quickened(rules: str) -> str:
    """Return alert rules with shorter times: ranges, `for` and limits in seconds by `SCALE`, ages by `AGE_SCALE`."""
    rules = re.sub(r"(?<=\[)(\d+)m(?=\])", r"\1s", rules)
    rules = re.sub(r"(?<=offset )(\d+)m", r"\1s", rules)
    rules = re.sub(r"(?<=for: )(\d+)m", r"\1s", rules)
    rules = re.sub(r"(_age_seconds > )(\d+)", lambda limit: f"{limit[1]}{int(limit[2]) / AGE_SCALE:g}", rules)
    return re.sub(r"(_seconds\) > )(\d+)", lambda limit: f"{limit[1]}{int(limit[2]) / SCALE:g}", rules)


class PrometheusServer(Server):
    """Scrapes `targets`, by job, each second, and evaluates `rules` each second."""

    name = "prometheus"

    def __init__(self, targets: dict[str, Sequence[str]], rules: str) -> None:
        super().__init__(None)
        self._targets = targets
        self._rules = rules

    def prepare(self) -> None:
        (self.directory / "rules.yml").write_text(self._rules)
        jobs = [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in self._targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
        }
        (self.directory / "prometheus.yml").write_bytes(msgspec.json.encode(config))  # JSON is YAML, too

    def command(self) -> Sequence[str]:
        return (
            find_program("prometheus", debian_package="prometheus"),
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address={LOOPBACK}:{self.port}",
        )

    def ping(self) -> bool:
        try:
            self._get("-/ready")
        except (OSError, URLError):
            return False
        return True

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """Return the values of an expression now, by their labels without `__name__`, `job` and `instance`."""
        answer = msgspec.json.decode(self._get(f"api/v1/query?query={quote(expression)}"))
        return {
            tuple(
                f"{k}={v}" for k, v in sorted(one["metric"].items()) if k not in ("__name__", "job", "instance")
            ): float(one["value"][1])
            for one in answer["data"]["result"]
        }

    def alerts(self) -> dict[str, Any]:
        """Return the labels of the firing alerts, by name."""
        found = msgspec.json.decode(self._get("api/v1/alerts"))["data"]["alerts"]
        return {one["labels"]["alertname"]: one["labels"] for one in found if one["state"] == "firing"}

    def _get(self, path: str) -> bytes:
        with urlopen(f"http://{self.address}/{path}", timeout=10) as answer:
            content: bytes = answer.read()
            return content
