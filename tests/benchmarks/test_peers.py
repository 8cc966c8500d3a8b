"""Each peer's measurements, on few events: their counts are right."""

import pytest

from benchmarks.harness import NotAvailable
from benchmarks.peers import PEERS

# RabbitMQ is left to `make bench`: it takes long to install and to start.
NAMES = [
    "redis",
    pytest.param("redis-asyncio", marks=pytest.mark.slow),
    pytest.param("redis-always", marks=pytest.mark.slow),
    "nats",
    "kafka",
]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_publishing_is_measured_in_the_producer_and_the_server(name: str):
    result = PEERS[name].publish(events=2_500, size=100, batch=1_000)
    assert (result.events, result.size) == (2_500, 100)
    assert set(result.cpu_s) == set(result.peak_rss_bytes) == {"producer", "server"}
    assert result.seconds > 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_everything_that_is_published_is_consumed(name: str):
    result = PEERS[name].end_to_end(events=2_500, size=100, batch=1_000)
    assert set(result.cpu_s) == {"producer", "consumer", "server"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_latency_is_that_of_a_steady_rate(name: str):
    result = PEERS[name].latency(rate=1_000, seconds=0.5, size=64)
    assert result.latency is not None
    assert 0 < result.latency.p50_ms <= result.latency.p99_ms
    assert result.events == 500


def test_a_peer_without_its_client_is_not_available(monkeypatch: pytest.MonkeyPatch):
    peer = PEERS["redis"]
    monkeypatch.setattr(peer, "requires", ["no_such_module"])
    with pytest.raises(NotAvailable, match=r"no_such_module.*headrace\[bench\]"):
        peer.publish(events=1, size=1, batch=1)
