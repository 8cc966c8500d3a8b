"""Cases in fresh processes behind a barrier."""

import os
from pathlib import Path

import pytest

from benchmarks.harness import Job, WorkerFailed, run, together


@pytest.fixture(autouse=True)
def cases_can_be_imported(monkeypatch: pytest.MonkeyPatch):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)


def test_a_case_runs_in_a_process_of_its_own():
    found = run("cases:count", {"events": 5})
    assert found["events"] == 5
    assert found["pid"] != os.getpid()
    assert found["peak_rss_bytes"] > 1_000_000


@pytest.mark.long
def test_only_the_time_between_gate_and_done_is_measured():
    found = run("cases:burn", {"before_s": 0.5, "measured_s": 0.1, "after_s": 0.5})
    assert 0.1 <= found["cpu_s"] < 0.5


@pytest.mark.long
def test_no_process_of_a_case_begins_before_the_last_one_is_ready():
    slow = Job("slow", "cases:burn", {"before_s": 0.3, "measured_s": 0.0, "after_s": 0.0})
    quick = Job("quick", "cases:burn", {"before_s": 0.0, "measured_s": 0.0, "after_s": 0.0})
    reports = together([quick, slow]).reports.values()
    assert max(report.result["ready_s"] for report in reports) <= min(report.began_s for report in reports)


def test_a_result_adds_up_the_processes():
    burn = {"before_s": 0.0, "measured_s": 0.1, "after_s": 0.0}
    result = together([Job("a", "cases:burn", burn), Job("b", "cases:burn", burn)]).to_result(events=1_000_000, size=1)
    assert set(result.cpu_s) == set(result.peak_rss_bytes) == {"a", "b"}
    assert result.cpu_s_per_million == sum(result.cpu_s.values()) >= 0.2


@pytest.mark.parametrize("case", ["fail", "fail_early"])
def test_a_failing_case_ends_the_others_and_says_why(case: str):
    with pytest.raises(WorkerFailed, match="the queue has no name") as caught:
        together([Job("stuck", "cases:hang", {}), Job("broken", f"cases:{case}", {})])
    assert "broken" in str(caught.value)


def test_a_case_that_takes_too_long_is_ended():
    with pytest.raises(WorkerFailed, match="took too long"):
        together([Job("stuck", "cases:hang", {})], timeout_s=1.0)


def test_a_case_that_forgets_its_gate_is_refused():
    with pytest.raises(WorkerFailed, match=r"gate\.wait\(\)"):
        run("cases:no_gate", {})


def test_no_worker_outlives_its_case():
    before = _children()
    with pytest.raises(WorkerFailed):
        together([Job("stuck", "cases:hang", {})], timeout_s=0.5)
    assert _children() == before


def _children() -> set[str]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}
