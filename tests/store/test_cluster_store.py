"""Silos and leases in the control store: members, owners of queues, and writes that a lost lease refuses."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import Connection, Engine, event

from headrace import DeadLetter, Fenced, GapRecord, Selector, SequenceToken, StreamId, SubscriptionDefinition
from headrace.store.cluster_store import ClusterStore
from headrace.store.control_store import ControlStore
from headrace.streams.cluster import ClusterView, Lease, SiloRecord, SiloState
from headrace.streams.subscriptions import Checkpoint

LEASE_S = 15.0
ALL = ("a", "b", "c", "d")


class Clock:
    """The store's clock, set by hand."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self, _connection: Connection) -> int:
        return self.us

    def pass_s(self, seconds: float) -> None:
        self.us += round(seconds * 1_000_000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.second_way)])
async def control(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ControlStore]:
    where = request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "control.db"
    store = await ControlStore.open(where)
    yield store
    await store.aclose()


@pytest.fixture
def store(control: ControlStore, clock: Clock) -> ClusterStore:
    return control.cluster(clock)


async def joined(store: ClusterStore, *names: str) -> list[SiloRecord]:
    return [await store.join(name, f"{name}:1", ("flights",)) for name in names]


def queues(count: int) -> Sequence[tuple[str, int]]:
    return [("flights", queue) for queue in range(count)]


def owners(view: ClusterView) -> dict[int, str]:
    return {lease.queue: lease.owner for lease in view.valid}


def states(view: ClusterView) -> dict[str, SiloState]:
    return {silo.name: silo.state for silo in view.silos}


# Members


async def test_a_silo_that_joins_is_seen_by_all(store: ClusterStore, clock: Clock):
    b = await store.join("b", "host:2", ["orders", "flights"])
    a = await store.join("a", "host:1", [])
    assert (b.state, b.joined_at_us, b.heartbeat_at_us) == (SiloState.ACTIVE, clock.us, clock.us)
    view = await store.view()
    assert view == ClusterView(clock.us, [a, b], [])
    assert view.silos[1].serves == ("orders", "flights")


async def test_a_silo_may_have_another_address_for_clients(store: ClusterStore):
    a = await store.join("a", "host:1", [], public_address="example.com:9")
    assert (a.address, a.public_address) == ("host:1", "example.com:9")
    assert (await store.view()).silos == [a]
    a = await store.join("a", "host:1", [])
    assert (await store.view()).silos[0].public_address == ""


async def test_incarnations_grow_over_the_whole_cluster(store: ClusterStore):
    silos = await joined(store, "a", "b", "a", "c", "a")
    assert [silo.incarnation for silo in silos] == [1, 2, 3, 4, 5]
    assert [silo.incarnation for silo in (await store.view()).silos] == [5, 2, 4]


async def test_a_heartbeat_is_by_the_clock_of_the_store(store: ClusterStore, clock: Clock):
    (a,) = await joined(store, "a")
    clock.pass_s(3)
    view = await store.beat(a, LEASE_S)
    assert view.now_us == clock.us
    assert view.silos == [a._replace(heartbeat_at_us=clock.us, heartbeats=1)]


async def test_a_superseded_incarnation_is_refused_and_its_leases_run_out(store: ClusterStore):
    (old,) = await joined(store, "a")
    held = await store.acquire(old, queues(2), LEASE_S)
    (new,) = await joined(store, "a")
    for call in (store.beat(old, LEASE_S), store.acquire(old, queues(4), LEASE_S), store.leaving(old)):
        with pytest.raises(Fenced, match="'a', incarnation 1, is superseded by incarnation 2: another process uses"):
            await call
    assert await store.acquire(new, queues(2), LEASE_S) == []
    assert [lease.epoch for lease in await store.acquire(new, queues(2), LEASE_S, over=held)] == [2, 2]


async def test_an_older_incarnation_may_still_release_its_leases(store: ClusterStore):
    (old,) = await joined(store, "a")
    held = await store.acquire(old, queues(2), LEASE_S)
    (new,) = await joined(store, "a")
    await store.release(old, held[:1])
    assert [lease.queue for lease in await store.acquire(new, queues(2), LEASE_S)] == [0]
    await store.leave(old)
    assert states(await store.view()) == {"a": SiloState.ACTIVE}
    assert len(await store.acquire(new, queues(2), LEASE_S)) == 2


async def test_a_silo_that_is_leaving_keeps_its_leases_and_gets_no_new_one(store: ClusterStore):
    (a,) = await joined(store, "a")
    await store.acquire(a, queues(1), LEASE_S)
    await store.leaving(a)
    await store.leaving(a)
    assert await store.acquire(a, queues(2), LEASE_S) == []
    view = await store.beat(a, LEASE_S)
    assert (states(view), owners(view)) == ({"a": SiloState.LEAVING}, {0: "a"})


async def test_a_silo_that_has_left_has_nothing_and_is_refused(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    await store.acquire(a, queues(2), LEASE_S)
    await store.leave(a)
    await store.leave(a)
    view = await store.beat(b, LEASE_S)
    assert states(view) == {"a": SiloState.LEFT, "b": SiloState.ACTIVE}
    assert [(lease.owner, lease.epoch) for lease in view.leases] == [("", 1), ("", 1)]
    with pytest.raises(Fenced, match="'a', incarnation 1, has left the cluster: join again"):
        await store.beat(a, LEASE_S)


async def test_silos_that_are_gone_are_forgotten_after_a_while(store: ClusterStore, clock: Clock):
    a, b, c = await joined(store, "a", "b", "c")
    await store.leave(a)
    await store.declare_dead(b)
    assert await store.forget(60) == 0
    clock.pass_s(60)
    assert await store.forget(60) == 2
    assert states(await store.view()) == {"c": SiloState.ACTIVE}
    with pytest.raises(Fenced, match="'a', incarnation 1, is no member of the cluster any more: join again"):
        await store.beat(a, LEASE_S)
    assert (await joined(store, "a"))[0].incarnation == c.incarnation + 1


# Suspicion


async def test_one_slow_peer_does_not_end_a_silo_but_two_do(store: ClusterStore):
    a, b, c, d = await joined(store, *ALL)
    assert not await store.suspect(a, d, ALL)
    assert not await store.suspect(a, d, ALL)
    assert await store.suspect(b, d, ALL)
    assert states(await store.view())["d"] is SiloState.DEAD
    assert not await store.suspect(c, d, ALL)
    with pytest.raises(Fenced, match="'d', incarnation 4, was declared dead by its peers: join again"):
        await store.beat(d, LEASE_S)


async def test_a_heartbeat_ends_the_votes_against_a_silo(store: ClusterStore):
    a, b, c, _d = await joined(store, *ALL)
    assert not await store.suspect(a, c, ALL)
    seen = (await store.beat(c, LEASE_S)).silos[2]
    assert seen.heartbeats == 1
    assert not await store.suspect(b, c, ALL)  # this silo has not seen the heartbeat
    assert not await store.suspect(b, seen, ALL)
    assert await store.suspect(a, seen, ALL)


async def test_the_only_other_silo_that_was_heard_of_is_enough(store: ClusterStore):
    a, b, _c = await joined(store, "a", "b", "c")
    assert await store.suspect(a, b, ["a"])


async def test_votes_of_another_incarnation_do_not_count(store: ClusterStore):
    a, b, c, d = await joined(store, *ALL)
    assert not await store.suspect(b, d, ALL)
    (b,) = await joined(store, "b")
    assert not await store.suspect(c, d, ALL)
    assert await store.suspect(a, d, ALL)


async def test_a_silo_that_joins_again_starts_without_votes(store: ClusterStore):
    a, b, c, _d = await joined(store, *ALL)
    await store.suspect(a, c, ALL)
    (again,) = await joined(store, "c")
    assert (await store.view()).silos[2] == again
    assert not await store.suspect(b, c, ALL)
    assert (await store.view()).silos[2] == again


async def test_a_silo_votes_neither_against_itself_nor_after_its_end(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    assert not await store.suspect(a, a, ALL)
    await store.leave(a)
    with pytest.raises(Fenced, match="has left"):
        await store.suspect(a, b, ALL)
    assert states(await store.view())["b"] is SiloState.ACTIVE


async def test_leases_of_a_dead_silo_run_out_before_others_get_them(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    held = await store.acquire(a, queues(2), LEASE_S)
    assert await store.suspect(b, a, ALL)
    assert await store.acquire(b, queues(2), LEASE_S) == []
    assert len(await store.acquire(b, queues(2), LEASE_S, over=held)) == 2


async def test_leases_of_a_silo_that_is_known_to_be_gone_are_free_at_once(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    await store.acquire(a, queues(2), LEASE_S)
    await store.declare_dead(a)
    assert states(await store.view())["a"] is SiloState.DEAD
    assert [lease.epoch for lease in await store.acquire(b, queues(2), LEASE_S)] == [2, 2]


# Leases


async def test_a_free_queue_is_granted_once(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    granted = await store.acquire(a, [("p", 1), ("flights", 0), ("p", 1)], LEASE_S)
    length_us = 15_000_000
    assert granted == [Lease("flights", 0, "a", 1, 1, 1, "", length_us), Lease("p", 1, "a", 1, 1, 1, "", length_us)]
    assert await store.acquire(b, [("p", 1), ("p", 2)], LEASE_S) == [Lease("p", 2, "b", 2, 1, 1, "", length_us)]
    assert await store.acquire(b, [], LEASE_S) == []
    assert [lease.owner for lease in (await store.view()).leases] == ["a", "a", "b"]


async def test_a_thousand_queues_are_granted_renewed_and_released(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    held = await store.acquire(a, queues(1200), LEASE_S)
    assert [lease.queue for lease in held] == list(range(1200))
    view = await store.beat(a, LEASE_S)
    assert {lease.renewals for lease in view.leases} == {2}
    await store.release(a, held)
    assert {lease.epoch for lease in await store.acquire(b, queues(1200), LEASE_S)} == {2}


async def test_a_lease_that_was_renewed_since_it_was_seen_stays_and_keeps_its_epoch(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    (lease,) = await store.acquire(a, queues(1), LEASE_S)
    for renewals in (2, 3, 4):
        view = await store.beat(a, LEASE_S + renewals)
        assert await store.acquire(b, queues(1), LEASE_S, over=[lease]) == []
        lease = lease._replace(renewals=renewals, length_us=15_000_000 + renewals * 1_000_000)
        assert view.leases == [lease]
    assert [each.epoch for each in await store.acquire(b, queues(1), LEASE_S, over=[lease])] == [2]


async def test_no_lease_depends_on_the_clock_of_the_store(store: ClusterStore, clock: Clock):
    a, b = await joined(store, "a", "b")
    await store.acquire(a, queues(1), LEASE_S)
    for seconds in (3600, -7200):
        clock.pass_s(seconds)
        assert await store.acquire(b, queues(1), LEASE_S) == []
        assert owners(await store.beat(a, LEASE_S)) == {0: "a"}


async def test_queues_of_a_silo_are_granted_anew_because_an_answer_may_be_lost(store: ClusterStore):
    (a,) = await joined(store, "a")
    epochs = [(await store.acquire(a, queues(1), LEASE_S))[0].epoch for _ in range(3)]
    assert epochs == [1, 2, 3]


async def test_a_release_that_comes_late_changes_nothing(store: ClusterStore):
    a, b = await joined(store, "a", "b")
    (old,) = await store.acquire(a, queues(1), LEASE_S)
    await store.release(b, [old])
    assert owners(await store.view()) == {0: "a"}
    (lease,) = await store.acquire(a, queues(1), LEASE_S)
    await store.release(a, [old])
    assert (await store.view()).leases == [lease]
    await store.release(a, [lease])
    assert (await store.view()).leases == [Lease("flights", 0, "", 0, 2, 2, "", 15_000_000)]


async def test_a_heartbeat_is_a_few_statements_for_any_number_of_queues(store: ClusterStore, clock: Clock):
    silos = await joined(store, *(f"s{number}" for number in range(16)))
    for number, silo in enumerate(silos):
        await store.acquire(silo, queues(64)[number * 4 : number * 4 + 4], LEASE_S)
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(statement.split(maxsplit=1)[0])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await store.beat(silos[0], LEASE_S)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert [word for word in sorted(statements) if word != "BEGIN"] == ["SELECT", "SELECT", "UPDATE", "UPDATE"]


# What a lost lease refuses


STREAM = StreamId("flights", "N14228")


def letter(queue: int) -> DeadLetter:
    return DeadLetter(0, "flights", "stats", queue, STREAM, SequenceToken(1), b"", {}, None, 1, "boom", 8, 2)


def gap(queue: int) -> GapRecord:
    return GapRecord("flights", "stats", queue, None, SequenceToken(1), SequenceToken(2), "old", 1)


async def subscribed(control: ControlStore) -> int:
    definition = SubscriptionDefinition(name="stats", selector=Selector("flights/*"))
    await control.create_subscription("flights", definition, {queue: Checkpoint(1) for queue in range(3)})
    return (await control.attach("flights", "stats")).epoch


async def test_silos_share_the_epoch_of_a_subscription_that_they_attach_to_together(control: ControlStore):
    epoch = await subscribed(control)
    for _ in range(2):
        shared = await control.attach("flights", "stats", exclusive=False)
        assert (shared.epoch, len(shared.checkpoints)) == (epoch, 3)
    assert not await control.save_checkpoints("flights", [("stats", epoch, {0: Checkpoint(2)})])
    assert (await control.attach("flights", "stats")).epoch == epoch + 1


async def test_checkpoints_of_queues_whose_lease_is_lost_are_refused_and_the_others_kept(
    control: ControlStore, store: ClusterStore
):
    epoch = await subscribed(control)
    a, b = await joined(store, "a", "b")
    leases = await store.acquire(a, queues(2), LEASE_S)
    held = {lease.queue: lease.epoch for lease in leases}
    progress = [("stats", epoch, {queue: Checkpoint(5) for queue in range(3)})]
    refused = await control.save_checkpoints("flights", progress, held)
    assert (refused.subscriptions, refused.queues) == ([], {2})
    await store.acquire(b, queues(1), LEASE_S, over=leases)
    refused = await control.save_checkpoints("flights", [("stats", epoch, {0: Checkpoint(9), 1: Checkpoint(9)})], held)
    assert refused.queues == {0}
    assert refused
    kept = await control.checkpoints("flights", "stats")
    assert [kept[queue].next_offset for queue in range(3)] == [5, 9, 1]


async def test_a_released_lease_writes_nothing_more(control: ControlStore, store: ClusterStore):
    epoch = await subscribed(control)
    (a,) = await joined(store, "a")
    held = await store.acquire(a, queues(1), LEASE_S)
    await store.release(a, held)
    refused = await control.save_checkpoints("flights", [("stats", epoch, {0: Checkpoint(5)})], {0: held[0].epoch})
    assert refused.queues == {0}
    assert (await control.checkpoints("flights", "stats"))[0] == Checkpoint(1)


async def test_a_subscription_and_a_lease_are_refused_each_for_itself(control: ControlStore, store: ClusterStore):
    epoch = await subscribed(control)
    (a,) = await joined(store, "a")
    await store.acquire(a, queues(1), LEASE_S)
    progress = [("stats", epoch + 1, {0: Checkpoint(5)}), ("gone", 1, {1: Checkpoint(5)})]
    refused = await control.save_checkpoints("flights", progress, {0: 1, 1: 7})
    assert (refused.subscriptions, refused.queues) == (["stats", "gone"], {1})


async def test_dead_letters_and_gaps_of_a_lost_lease_are_refused_together(control: ControlStore, store: ClusterStore):
    epoch = await subscribed(control)
    (a,) = await joined(store, "a")
    held = {lease.queue: lease.epoch for lease in await store.acquire(a, queues(2), LEASE_S)}
    await control.add_dead_letters([letter(0), letter(1)], epoch, held)
    await control.add_gaps([gap(0)], epoch, held)
    await store.acquire(a, queues(1), LEASE_S)
    with pytest.raises(Fenced, match=r"the lease of 'flights' on queues \[0\] is lost: another silo may have them"):
        await control.add_dead_letters([letter(1)._replace(token=SequenceToken(2)), letter(0)], epoch, held)
    with pytest.raises(Fenced, match=r"on queues \[0, 2\] is lost"):
        await control.add_gaps([gap(1), gap(0), gap(2)], epoch, held)
    assert len(await control.dead_letters("flights")) == 2
    assert await control.gaps("flights") == [gap(0)]


# The store's own clock


async def test_the_clock_of_the_store_goes_on(control: ControlStore):
    cluster = control.cluster()
    (a,) = await joined(cluster, "a")
    views = [await cluster.view(), await cluster.beat(a, LEASE_S), await cluster.view()]
    times = [view.now_us for view in views]
    assert a.joined_at_us <= times[0] <= times[1] <= times[2]
    assert views[2].silos[0].heartbeat_at_us == times[1]


async def test_leases_of_an_earlier_start_of_the_machine_are_over(control: ControlStore):
    a, b = await joined(control.cluster(), "a", "b")
    await control.cluster().acquire(a, queues(1), 1e9)
    await control.cluster().suspect(a, b, ALL)

    def another(_connection: Connection) -> str:
        return "another"

    for cluster in (control.cluster(boot_id=another), control.cluster(boot_id=another)):
        view = await cluster.view()
        assert states(view) == {"a": SiloState.DEAD, "b": SiloState.DEAD}
        assert [(lease.owner, lease.epoch) for lease in view.leases] == [("", 1)]
    (c,) = await joined(control.cluster(boot_id=another), "c")
    assert c.incarnation == b.incarnation + 1
    assert [lease.epoch for lease in await control.cluster(boot_id=another).acquire(c, queues(1), LEASE_S)] == [2]


async def test_the_wall_clock_decides_nothing(control: ControlStore, monkeypatch: pytest.MonkeyPatch):
    cluster = control.cluster()
    a, b = await joined(cluster, "a", "b")
    await cluster.acquire(a, queues(1), LEASE_S)
    monkeypatch.setattr("time.time", lambda: 1e10)
    assert await cluster.acquire(b, queues(1), LEASE_S) == []
