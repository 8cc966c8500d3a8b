"""Leases against a model: silos that come, go, die and are paused, and a clock that is set by hand."""

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test
from sqlalchemy import Connection

from benchmarks.servers import PostgresServer
from headrace import Fenced, Selector, SubscriptionDefinition
from headrace.store.control_store import ControlStore
from headrace.streams.cluster import Lease, SiloRecord, SiloState
from headrace.streams.subscriptions import Checkpoint
from tests.random_examples import examples
from tests.servers import new_schema

T = TypeVar("T")

STEPS = settings(max_examples=examples(15), stateful_step_count=30, deadline=None)
LEASE_S = 10
PEERS = ("a", "b", "c", "d")
DEFINITION = SubscriptionDefinition(name="stats", selector=Selector("n/*"))
WHO = st.integers(0, 1)
NAMES = st.sampled_from(["a", "b", "c", "d"])
QUEUES = st.lists(st.integers(0, 4), max_size=5)


class Held(NamedTuple):
    silo: SiloRecord
    renewals: int
    epoch: int


class Cluster(RuleBasedStateMachine):
    """After any steps of silos over two stores, the database and the dictionaries have the same content."""

    members = Bundle[SiloRecord]("members")
    grants = Bundle[tuple[SiloRecord, Lease]]("grants")
    seen = Bundle[list[Lease]]("seen")

    def __init__(self, where: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now_s = 1000
        self.controls = [self.run(ControlStore.open(where)) for _ in range(2)]
        self.stores = [control.cluster(self.clock) for control in self.controls]
        self.run(self.controls[0].create_subscription("p", DEFINITION, {}))
        self.members_now: dict[str, SiloRecord] = {}
        """The latest incarnation of each name, with its state."""
        self.heartbeats: dict[str, int] = {}
        self.beaten: dict[str, int] = {}
        """How often each silo was heard of, of those that live."""
        self.renewals: dict[int, int] = {}
        self.held: dict[int, Held] = {}
        self.epochs: dict[int, int] = {}
        self.votes: dict[tuple[str, str], tuple[int, int, int]] = {}
        """By silo and voter: both incarnations and the heartbeat of the silo."""
        self.offsets: dict[int, int] = {}

    def clock(self, _connection: Connection) -> int:
        return self.now_s * 1_000_000

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        for control in self.controls:
            self.run(control.aclose())
        self.runner.close()

    def lives(self, silo: SiloRecord) -> bool:
        now = self.members_now.get(silo.name)
        return (
            now is not None
            and now.incarnation == silo.incarnation
            and now.state in (SiloState.ACTIVE, SiloState.LEAVING)
        )

    def owns(self, silo: SiloRecord, queue: int) -> bool:
        held = self.held.get(queue)
        return held is not None and held.silo.incarnation == silo.incarnation

    def set_state(self, silo: SiloRecord, state: SiloState) -> None:
        self.members_now[silo.name] = self.members_now[silo.name]._replace(state=state)

    @rule(target=members, who=WHO, name=NAMES)
    def join(self, who: int, name: str) -> SiloRecord:
        me = self.run(self.stores[who].join(name, "x", ["p"]))
        assert all(me.incarnation > other.incarnation for other in self.members_now.values())
        self.members_now[name] = me
        self.heartbeats[name], self.beaten[name] = self.now_s, 0
        self.votes = {key: vote for key, vote in self.votes.items() if key[0] != name}
        return me

    @rule(seconds=st.integers(1, 12))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(who=WHO, me=members)
    def beat(self, who: int, me: SiloRecord) -> None:
        if not self.lives(me):
            with pytest.raises(Fenced):
                self.run(self.stores[who].beat(me, LEASE_S))
            return
        self.heartbeats[me.name] = self.now_s
        self.beaten[me.name] += 1
        for queue, held in self.held.items():
            if self.owns(me, queue):
                self.renewals[queue] += 1
                self.held[queue] = held._replace(renewals=self.renewals[queue])
        self.run(self.stores[who].beat(me, LEASE_S))

    @rule(target=seen, who=WHO)
    def look(self, who: int) -> list[Lease]:
        return list(self.run(self.stores[who].view()).leases)

    @rule(target=grants, who=WHO, me=members, queues=QUEUES, pick=st.integers(0, 4), over=seen)
    def acquire(
        self, who: int, me: SiloRecord, queues: list[int], pick: int, over: list[Lease]
    ) -> tuple[SiloRecord, Lease]:
        wanted = [("p", queue) for queue in queues]
        nothing = me, Lease("p", pick, me.name, me.incarnation, 0, 0)
        if not self.lives(me):
            with pytest.raises(Fenced):
                self.run(self.stores[who].acquire(me, wanted, LEASE_S))
            return nothing
        granted = self.run(self.stores[who].acquire(me, wanted, LEASE_S, over=over))
        leaving = self.members_now[me.name].state is SiloState.LEAVING
        ended = {lease.queue: (lease.epoch, lease.renewals) for lease in over}
        free = [] if leaving else sorted(queue for queue in set(queues) if self.may_have(me, queue, ended.get(queue)))
        for queue in free:
            self.epochs[queue] = self.epochs.get(queue, 0) + 1
            self.renewals[queue] = self.renewals.get(queue, 0) + 1
            self.held[queue] = Held(me, self.renewals[queue], self.epochs[queue])
        assert [tuple(lease) for lease in granted] == [
            ("p", queue, *me[:2], self.epochs[queue], self.renewals[queue], "", LEASE_S * 1_000_000) for queue in free
        ]
        return (me, granted[pick % len(granted)]) if granted else nothing

    def may_have(self, me: SiloRecord, queue: int, ended: tuple[int, int] | None) -> bool:
        held = self.held.get(queue)
        return held is None or (held.epoch, held.renewals) == ended or self.owns(me, queue)

    @rule(who=WHO, grant=grants)
    def release(self, who: int, grant: tuple[SiloRecord, Lease]) -> None:
        me, lease = grant
        self.run(self.stores[who].release(me, [lease]))
        if self.owns(me, lease.queue) and self.held[lease.queue].epoch == lease.epoch:
            del self.held[lease.queue]

    @rule(who=WHO, grant=grants)
    def save(self, who: int, grant: tuple[SiloRecord, Lease]) -> None:
        _me, lease = grant
        offset = self.offsets.get(lease.queue, 0) + 1
        progress = [("stats", 0, {lease.queue: Checkpoint(offset)})]
        refused = self.run(self.controls[who].save_checkpoints("p", progress, {lease.queue: lease.epoch}))
        held = self.held.get(lease.queue)
        assert refused.queues == (frozenset() if held and held.epoch == lease.epoch else {lease.queue})
        if not refused:
            self.offsets[lease.queue] = offset

    @rule(who=WHO, me=members)
    def leaving(self, who: int, me: SiloRecord) -> None:
        if self.lives(me):
            self.run(self.stores[who].leaving(me))
            self.set_state(me, SiloState.LEAVING)
        else:
            with pytest.raises(Fenced):
                self.run(self.stores[who].leaving(me))

    @rule(who=WHO, me=consumes(members), dead=st.booleans())
    def end(self, who: int, me: SiloRecord, dead: bool) -> None:
        store = self.stores[who]
        self.run(store.declare_dead(me) if dead else store.leave(me))
        self.held = {queue: held for queue, held in self.held.items() if held.silo.incarnation != me.incarnation}
        if self.lives(me):
            self.set_state(me, SiloState.DEAD if dead else SiloState.LEFT)

    @rule(who=WHO, me=members, suspect=members, late=st.booleans(), peers=st.sets(st.sampled_from(PEERS)))
    def suspect(self, who: int, me: SiloRecord, suspect: SiloRecord, late: bool, peers: set[str]) -> None:
        heartbeats = max(self.beaten[suspect.name] - late, 0)
        suspect = suspect._replace(heartbeats=heartbeats)
        call = self.stores[who].suspect(me, suspect, peers)
        if not self.lives(me):
            with pytest.raises(Fenced):
                self.run(call)
            return
        declared = self.run(call)
        if not self.lives(suspect) or me.name == suspect.name or heartbeats != self.beaten[suspect.name]:
            assert not declared
            return
        self.votes[suspect.name, me.name] = me.incarnation, suspect.incarnation, heartbeats
        assert declared == self.should_die(me, suspect, peers)
        if declared:
            self.set_state(suspect, SiloState.DEAD)

    def should_die(self, me: SiloRecord, suspect: SiloRecord, others: set[str]) -> bool:
        peers = [
            silo
            for name, silo in self.members_now.items()
            if name != suspect.name and self.lives(silo) and (name == me.name or name in others)
        ]
        votes = [(self.votes.get((suspect.name, peer.name)), peer) for peer in peers]
        against = [
            1 for vote, peer in votes if vote and vote == (peer.incarnation, suspect.incarnation, suspect.heartbeats)
        ]
        return len(against) >= min(2, len(peers))

    @invariant()
    def both_stores_say_what_the_model_says(self) -> None:
        for store in self.stores:
            view = self.run(store.view())
            assert {silo.name: (silo.incarnation, silo.state) for silo in view.silos} == {
                name: (silo.incarnation, silo.state) for name, silo in self.members_now.items()
            }
            owned = {lease.queue: (lease.incarnation, lease.epoch) for lease in view.leases if lease.owner}
            assert owned == {queue: (held.silo.incarnation, held.epoch) for queue, held in self.held.items()}
            assert {lease.queue: lease.epoch for lease in view.leases} == self.epochs


@pytest.mark.hypothesis
def test_leases_on_a_file_are_those_of_the_model(tmp_path: Path):
    numbers = itertools.count()

    class OnAFile(Cluster):
        def __init__(self) -> None:
            super().__init__(str(tmp_path / f"{next(numbers)}.db"))

    run_state_machine_as_test(OnAFile, settings=STEPS)


@pytest.mark.long
@pytest.mark.hypothesis
def test_leases_on_a_server_are_those_of_the_model(postgres_server: PostgresServer):
    class OnAServer(Cluster):
        def __init__(self) -> None:
            super().__init__(new_schema(postgres_server))

    run_state_machine_as_test(OnAServer, settings=STEPS)
