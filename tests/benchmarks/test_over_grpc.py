"""What is measured over gRPC, on few events: it counts what it says it counts."""

from headrace.benchmarks import fairness
from headrace.benchmarks.fan_reference import fan_out
from headrace.benchmarks.harness import Rounds


def test_the_server_that_serialises_for_every_consumer_serves_them_all():
    result = fan_out(events=2_500, size=100, batch=1_000, consumers=3)
    assert (result.events, result.size) == (2_500, 100)
    assert set(result.cpu_s) == {"consumers", "server"}


def test_fairness_is_measured_alone_and_beside_a_crowd():
    setting = fairness.Setting(seconds=1.0, consumers=5, backlog=600_000)
    crowds: fairness.Crowds = {"fair": [], "first-come": []}
    found = {"alone": fairness.measure(setting, "fair", None)}
    found |= {order: fairness.measure(setting, order, crowds[order]) for order in crowds}
    assert all(result.latency and result.events == 200 for result in found.values())
    assert set(found["fair"].cpu_s) == {"single", "publisher", "crowd", "server"}
    assert all(had["messages_per_s"] > 0 for (had,) in crowds.values())
    table = fairness.report(Rounds([found]), crowds).splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["alone", "fair", "first-come"]
    assert len({line.count("|") for line in table}) == 1
