"""How long rows stand unchanged, by the clock of the silo that looks."""

from headrace.balancer.sightings import Sightings
from headrace.streams.cluster import ClusterView, Lease, SiloRecord, SiloState

HOUR_US = 3600 * 1_000_000
LEASE = Lease("p", 0, "a", 1, 1, 1, "a", 8_000_000)
SILO = SiloRecord("a", 1, "", ("p",), SiloState.ACTIVE, HOUR_US, HOUR_US)


def over(sightings: Sightings, now: float, lease: Lease = LEASE, now_us: int = HOUR_US) -> bool:
    return bool(sightings.see(ClusterView(now_us, [SILO], [lease]), now).over)


def test_a_lease_is_over_when_it_stood_unchanged_for_its_length():
    sightings = Sightings()
    assert not over(sightings, 100)
    assert not over(sightings, 107.9)
    assert over(sightings, 108)


def test_a_renewal_or_a_grant_lets_a_lease_go_on():
    sightings = Sightings()
    assert not over(sightings, 100)
    assert not over(sightings, 108, LEASE._replace(renewals=2))
    assert not over(sightings, 116, LEASE._replace(epoch=2))
    assert over(sightings, 124, LEASE._replace(epoch=2))


def test_how_the_clock_of_the_store_is_set_changes_nothing():
    sightings = Sightings()
    assert not over(sightings, 100)
    assert not over(sightings, 101, now_us=100 * HOUR_US)
    assert over(sightings, 108, now_us=0)


def test_a_lease_without_an_owner_is_never_over():
    sightings = Sightings()
    assert not over(sightings, 100, LEASE._replace(owner=""))
    assert not over(sightings, 200, LEASE._replace(owner=""))


def timed(sightings: Sightings, now: float, now_us: int, silo: SiloRecord) -> tuple[float, float]:
    """How many seconds ago the silo joined, and was heard of last."""
    view = sightings.see(ClusterView(now_us, [silo], []), now)
    (found,) = sightings.timed(view, now)
    return (now_us - found.joined_at_us) / 1e6, (now_us - found.heartbeat_at_us) / 1e6


def test_a_silo_that_was_seen_to_beat_is_timed_by_the_own_clock():
    sightings, beaten = Sightings(), SILO._replace(heartbeats=1)
    assert timed(sightings, 100, HOUR_US + 5_000_000, SILO) == (5, 5)
    assert timed(sightings, 101, HOUR_US, beaten) == (1, 0)
    for set_us in (0, 100 * HOUR_US):
        joined_s, silent_s = timed(sightings, 104, set_us, beaten)
        assert joined_s >= 4
        assert silent_s == 3
    assert sightings.silent_s(beaten, 105) == 4


def test_of_the_time_before_it_was_seen_only_the_store_knows():
    assert timed(Sightings(), 100, 2 * HOUR_US, SILO) == (3600, 3600)


def test_a_view_read_from_the_store_keeps_expired_leases() -> None:
    renewed = LEASE._replace(queue=1)
    before = ClusterView(0, [SILO], [LEASE, renewed], frozenset({("p", 0), ("p", 1)}))
    read = ClusterView(1, [SILO], [LEASE, renewed._replace(renewals=renewed.renewals + 1)])
    assert read.keeping_expired(before).over == {("p", 0)}
