"""The measurements of delayed events, on few of them: they count the events that they claim to count. arq, which needs
an installation of its own, is left to the command."""

from functools import cache

import pytest

from benchmarks.delays import __main__ as delays
from benchmarks.delays.cases import Arrivals
from benchmarks.delays.kinds import KINDS
from benchmarks.delays.runs import delayed, due, throughput
from benchmarks.harness import Rounds
from benchmarks.results import Result

NAMES = [name for name in KINDS if name != "arq"]

TIMED = ("RedisQueue", "provider", "redis-py, recipe")


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[] if name == "provider" else [pytest.mark.slow]) for name in NAMES],
)
def test_everything_that_is_pushed_is_popped(kind: str):
    pushed, popped = throughput(kind, events=500, batch=10)
    for result in (pushed, popped):
        assert (result.events, result.size) == (500, 100)
        assert set(result.cpu_s) == {"clients", "server"}


@cache
def measured(kind: str) -> Result:
    return due(kind, rate=300, seconds=1.5, delays_s=(0.05, 0.2), batch=100)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name == "RedisQueue" else [pytest.mark.slow]) for name in TIMED]
)
def test_events_come_after_their_delays(kind: str):
    result = measured(kind)
    assert result.latency is not None
    assert 0 <= result.latency.p50_ms <= result.latency.p99_ms <= result.latency.max_ms
    assert 0 < result.events < 510
    assert set(result.cpu_s) == {"producer", "consumer", "server"}


@pytest.mark.long
def test_events_delayed_together_take_less():
    apart, together = (delayed("provider", events=2000, batch=100, apart=apart).rss_bytes for apart in (True, False))
    assert 100 * 2000 < together < apart


def test_lateness_is_that_of_the_time_while_as_much_is_pushed_as_comes_due():
    arrivals = Arrivals(400)
    for number in range(400):  # ten a second, and as many are due; the first after 1 s, the last after 40.9 s
        arrivals.handle([b"%020d" % int((1 + number / 10) * 1e9)])
    found = arrivals.lateness((1.0, 5.0))
    assert found["events"] == 310
    assert found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]


@pytest.mark.long
def test_tables_have_a_row_for_each_case():
    result = measured("RedisQueue")
    found = Rounds([dict.fromkeys(delays.due_cases(100, 1.0, NAMES), result)])
    assert _rows(delays.due_table(found)) == found.names
    loads = Rounds([{f"{kind}, 100 at a time": result for kind in NAMES}])
    assert _rows(delays.throughput_table(loads)) == loads.names
    assert "1.00 (1.00–1.00)" in delays.throughput_table(loads)
    kept = Rounds([dict.fromkeys(delays.memory_cases(1.0, NAMES), result)])
    assert _rows(delays.memory_table(kept)) == kept.names


def _rows(table: str) -> list[str]:
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    return [line.split("|")[1].strip() for line in lines[2:]]
