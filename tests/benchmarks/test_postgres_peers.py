"""The measurements of queues in PostgreSQL, on few events: their counts are right."""

import pytest

from benchmarks.peers.peer import Peer
from benchmarks.peers.postgres import COPY_ROWS, OURS, PGMQ

SLOW = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize("peer", [OURS, pytest.param(COPY_ROWS, marks=SLOW), pytest.param(PGMQ, marks=SLOW)])
def test_everything_that_is_published_is_consumed(peer: Peer):
    result = peer.end_to_end(events=2_500, size=100, batch=1_000)
    assert result.events == 2_500
    assert set(result.cpu_s) == {"producer", "consumer", "server"}


@pytest.mark.slow
@pytest.mark.parametrize("peer", [OURS, COPY_ROWS, PGMQ])
def test_latency_is_that_of_a_steady_rate(peer: Peer):
    result = peer.latency(rate=500, seconds=0.5, size=64)
    assert result.latency is not None
    assert 0 < result.latency.p50_ms <= result.latency.p99_ms
