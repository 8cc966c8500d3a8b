"""The measurements over gRPC, on few events: their counts are right."""

import pytest

from benchmarks import fairness, fan_reference, grpc_sections
from benchmarks.harness import Rounds
from benchmarks.peers import PEERS
from benchmarks.suite import sections


@pytest.mark.long
@pytest.mark.parametrize(
    ("consumers", "remote_publisher"),
    [pytest.param(1, False, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow), (1, True)],
)
def test_everything_that_is_published_is_consumed_over_grpc(consumers: int, remote_publisher: bool):
    result = grpc_sections.end_to_end(
        events=20_000, size=100, batch=1_000, consumers=consumers, remote_publisher=remote_publisher
    )
    assert (result.events, result.size) == (20_000, 100)
    assert set(result.cpu_s) == set(result.peak_rss_bytes) == {"consumer", "producer", "server"}


@pytest.mark.long
def test_publishing_over_grpc_is_measured_in_the_producer_and_the_silo():
    assert set(grpc_sections.publish_remotely(events=5_000, size=100, batch=1_000).cpu_s) == {"producer", "server"}


# slow: one more case of the same processes
@pytest.mark.slow
@pytest.mark.parametrize("remote_publisher", [False, True])
def test_latency_over_grpc_is_that_of_a_steady_rate(remote_publisher: bool):
    result = grpc_sections.latency(events=500, size=64, rate=1_000, remote_publisher=remote_publisher)
    assert result.latency is not None
    assert 0 < result.latency.p50_ms <= result.latency.p99_ms


@pytest.mark.long
def test_every_subscription_gets_the_whole_backlog():
    result = grpc_sections.fan_out(events=5_000, size=100, batch=1_000, subscriptions=3)
    assert set(result.cpu_s) == {"consumers", "server"}


def test_every_section_compares_cases_that_it_has():
    for section in sections(1.0, list(PEERS)):
        named = {name for target in section.targets for name in (target.case, target.to) if name}
        assert named | set(section.deliveries_each) <= set(section.cases), section.name


def test_the_server_that_serialises_for_every_consumer_serves_them_all():
    result = fan_reference.fan_out(events=2_500, size=100, batch=1_000, consumers=3)
    assert (result.events, result.size) == (2_500, 100)
    assert set(result.cpu_s) == {"consumers", "server"}


@pytest.mark.slow
def test_fairness_is_measured_alone_and_beside_a_crowd():
    setting = fairness.Setting(seconds=0.6, consumers=3, backlog=400_000)
    crowds: fairness.Crowds = {"fair": [], "first-come": []}
    found = {"alone": fairness.measure(setting, "fair", None)}
    found |= {order: fairness.measure(setting, order, crowds[order]) for order in crowds}
    assert all(result.latency and result.events == 120 for result in found.values())
    assert set(found["fair"].cpu_s) == {"single", "publisher", "crowd", "server"}
    assert all(had["messages_per_s"] > 0 for (had,) in crowds.values())
    table = fairness.report(Rounds([found]), crowds).splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["alone", "fair", "first-come"]
    assert len({line.count("|") for line in table}) == 1
