"""The store that the simulation uses against the real one: whatever is asked of both, they answer the same."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headrace import DeadLetter, GapRecord, HeadraceError, Selector, SequenceToken, StreamId, SubscriptionDefinition
from headrace.store.control_store import ControlStore
from headrace.streams.clock import replaced_clock
from headrace.streams.cluster import Lease, SiloRecord
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.cluster.memory_store import MemoryStore
from tests.random_examples import examples

STEPS = settings(max_examples=examples(15), stateful_step_count=50, deadline=None)
LEASE_S = 10
SILOS = st.sampled_from(["a", "b", "c"])
QUEUE = st.integers(0, 1)
QUEUES = st.lists(QUEUE, min_size=1, max_size=2)
HOMES = st.dictionaries(QUEUE, st.sampled_from(["", "a", "b"]), max_size=4)
OFFSETS = st.integers(0, 2)
TOKENS = st.builds(SequenceToken, OFFSETS, st.integers(0, 1))
BEHIND = st.dictionaries(
    st.sampled_from([StreamId("n", "x"), StreamId("n", "y")]),
    st.builds(StreamBehind, TOKENS, st.sampled_from(["", "b\0om"]), st.sampled_from([(), ((9, 0, 2),)])),
    max_size=2,
)
POSITIONS = st.dictionaries(QUEUE, st.builds(Checkpoint, OFFSETS, BEHIND), max_size=2)
EVENTS = st.sampled_from(
    [
        (StreamId("n", "x"), b"x", 1),
        (StreamId("n", "x"), b"x", 2),
        (StreamId("n", "x"), b"z", 1),
        (StreamId("n", "y"), b"x", 1),
    ]
)
NAMES = st.sampled_from(["one", "two"])
PROVIDERS = st.sampled_from(["p", "p", "p", "p", "q"])
REVISIONS = st.integers(0, 2)
RARELY = st.sampled_from([False, False, True])
NOTHING = Lease("p", 0, "nobody", 0, 0, 0)


class BothStores(RuleBasedStateMachine):
    """The real store, the simulated one, and a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now_s = 1000
        self.real = self.runner.run(ControlStore.open("memory"))
        self.simulated = MemoryStore()
        clusters = self.real.cluster(self.clock), self.simulated.cluster(self.clock)
        self.clusters: tuple[Any, Any] = clusters

    def clock(self, _: object) -> int:
        return self.now_s * 1_000_000

    def teardown(self) -> None:
        self.runner.run(self.real.aclose())
        self.runner.close()

    def both(self, method: str, *args: Any, **options: Any) -> Any:
        """Return the answer of the real control store. The other must give the same answer or the same error."""
        return self._compare((self.real, self.simulated), method, args, options)

    def cluster(self, method: str, *args: Any) -> Any:
        return self._compare(self.clusters, method, args, {})

    def _compare(self, stores: tuple[Any, Any], method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        real, simulated = (self._outcome(getattr(store, method), args, options) for store in stores)
        assert simulated == real
        return real[1] if real[0] is None else None

    def _outcome(self, method: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        try:
            with replaced_clock(lambda: 0):  # a seek counts, as in the simulated store
                return None, self.runner.run(method(*args, **options))
        except HeadraceError as error:
            return type(error), str(error)


class Leases(BothStores):
    members = Bundle[SiloRecord]("members")
    grants = Bundle[tuple[SiloRecord, Lease]]("grants")
    seen = Bundle[list[Lease]]("seen")

    @rule(target=members, name=SILOS, provider=PROVIDERS, period=st.sampled_from(["1", "2"]))
    def join(self, name: str, provider: str, period: str) -> SiloRecord:
        return self.cluster("join", name, f"address of {name}", [provider], {"period_s": period}, f"process of {name}")

    @rule(seconds=st.sampled_from([1, LEASE_S]))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(me=members)
    def beat(self, me: SiloRecord) -> None:
        self.cluster("beat", me, LEASE_S)

    @rule(target=seen)
    def look(self) -> list[Lease]:
        return list(self.cluster("view").leases)

    @rule(target=grants, me=members, provider=PROVIDERS, queues=QUEUES, homes=HOMES, pick=QUEUE, over=seen)
    def acquire(
        self,
        me: SiloRecord,
        provider: str,
        queues: list[int],
        homes: dict[int, str],
        pick: int,
        over: list[Lease],
    ) -> tuple[SiloRecord, Lease]:
        theirs = {(provider, queue): home for queue, home in homes.items()}
        granted = self.cluster("acquire", me, [(provider, queue) for queue in queues], LEASE_S, theirs, over)
        return me, (granted[pick % len(granted)] if granted else NOTHING)

    @rule(me=members, homes=HOMES)
    def settle(self, me: SiloRecord, homes: dict[int, str]) -> None:
        self.cluster("settle", me, {("p", queue): home for queue, home in homes.items()})

    @rule(grant=grants, other=members, its_own=st.booleans())
    def release(self, grant: tuple[SiloRecord, Lease], other: SiloRecord, its_own: bool) -> None:
        self.cluster("release", grant[0] if its_own else other, [grant[1]])

    @rule(me=members)
    def leaving(self, me: SiloRecord) -> None:
        self.cluster("leaving", me)

    @rule(me=members, how=st.sampled_from(["leave", "declare_dead", "remove"]))
    def end(self, me: SiloRecord, how: str) -> None:
        self.cluster(how, me)

    @rule(me=members, suspect=members, heartbeats=st.integers(0, 3), peers=st.lists(SILOS))
    def suspect(self, me: SiloRecord, suspect: SiloRecord, heartbeats: int, peers: list[str]) -> None:
        self.cluster("suspect", me, suspect._replace(heartbeats=heartbeats), peers)

    @rule(before_s=st.integers(0, 20))
    def forget(self, before_s: int) -> None:
        self.cluster("forget", before_s)

    @invariant()
    def they_see_the_same(self) -> None:
        self.cluster("view")


class Progress(BothStores):
    """Progress of the subscriptions "one" and "two" in the queues that the silo "a" has, or had."""

    def __init__(self) -> None:
        super().__init__()
        self.me = self.cluster("join", "a", "", ["p"])
        self.held: dict[int, Lease] = {}
        """The lease of each queue that was granted last."""

    @rule(queue=QUEUE)
    def acquire(self, queue: int) -> None:
        self.held |= {lease.queue: lease for lease in self.cluster("acquire", self.me, [("p", queue)], LEASE_S)}

    @rule(queue=QUEUE)
    def release(self, queue: int) -> None:
        self.cluster("release", self.me, [self.held[queue]] if queue in self.held else [])

    def leases(self, late: bool) -> dict[int, int]:
        return {queue: lease.epoch - late for queue, lease in self.held.items()}

    @rule(name=NAMES, selector=st.sampled_from(["n/*", "n/*", "n/x"]), start=POSITIONS)
    def create(self, name: str, selector: str, start: dict[int, Checkpoint]) -> None:
        self.both("create_subscription", "p", SubscriptionDefinition(name=name, selector=Selector(selector)), start)

    @rule(name=NAMES, selector=st.sampled_from(["n/*", "n/x"]), start=POSITIONS)
    def create_of_consumer(self, name: str, selector: str, start: dict[int, Checkpoint]) -> None:
        definition = SubscriptionDefinition(name=f"{name}~c", selector=Selector(selector))
        self.both("create_subscription", "p", definition, start)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.both("delete_subscription", "p", name)

    @rule(name=NAMES, exclusive=st.booleans())
    def attach(self, name: str, exclusive: bool) -> None:
        self.both("attach", "p", name, exclusive=exclusive)

    @rule(name=NAMES, positions=POSITIONS)
    def seek(self, name: str, positions: dict[int, Checkpoint]) -> None:
        self.both("seek", "p", name, positions, "test")

    def epoch(self, name: str, stale: bool) -> int:
        subscription = self.simulated.by_name.get(("p", name))
        return (0 if subscription is None else subscription.epoch) + stale

    @rule(names=st.lists(NAMES, unique=True), stale=RARELY, late=RARELY, at=POSITIONS, revision=REVISIONS)
    def save(self, names: list[str], stale: bool, late: bool, at: dict[int, Checkpoint], revision: int) -> None:
        progress = [(name, self.epoch(name, stale), at) for name in names]
        self.both("save_checkpoints", "p", progress, self.leases(late), revision=revision)

    @rule(name=NAMES, stale=st.booleans(), at=POSITIONS, revision=REVISIONS)
    def save_without_leases(self, name: str, stale: bool, at: dict[int, Checkpoint], revision: int) -> None:
        self.both("save_checkpoints", "p", [(name, self.epoch(name, stale), at)], revision=revision)

    # Dead letters and gaps

    @rule(name=NAMES, leased=st.booleans(), stale=RARELY, late=RARELY, token=TOKENS, queue=QUEUE, event=EVENTS)
    def give_up(
        self,
        name: str,
        leased: bool,
        stale: bool,
        late: bool,
        token: SequenceToken,
        queue: int,
        event: tuple[StreamId, bytes, int],
    ) -> None:
        (stream, payload, timestamp_us), reason = event, f"boom\0{self.now_s}"
        letter = DeadLetter(
            0, "p", name, queue, stream, token, payload, {"h": "v"}, None, timestamp_us, reason, 8, self.now_s
        )
        self.both("add_dead_letters", [letter], self.epoch(name, stale), self.leases(late) if leased else None)

    @rule(method=st.sampled_from(["stop_queues", "start_queues"]), queues=QUEUES)
    def stop_and_start(self, method: str, queues: list[int]) -> None:
        self.both(method, "p", queues)
        self.both("control_requests", "p", ["one", "two"])

    @rule(name=NAMES, ids=st.none() | st.lists(st.integers(1, 5)))
    def ask_for_redrive(self, name: str, ids: list[int] | None) -> None:
        self.both("request_redrive", "p", name, ids)
        self.both("requested_redrives", "p", name, 0, 0, 5)

    @rule(number=st.integers(1, 5), delivered=st.booleans(), reason=st.none() | st.just("again\0"))
    def redrive(self, number: int, delivered: bool, reason: str | None) -> None:
        self.both(
            "finish_redrive", number, delivered=delivered, reason=reason, attempts=number, failed_at_us=1000 * number
        )

    @rule(name=NAMES, leased=st.booleans(), stale=RARELY, late=RARELY, low=TOKENS, whole=st.booleans(), queue=QUEUE)
    def miss(
        self, name: str, leased: bool, stale: bool, late: bool, low: SequenceToken, whole: bool, queue: int
    ) -> None:
        stream = None if whole else StreamId("n", "x")
        gap = GapRecord("p", name, queue, stream, low, SequenceToken(20), "re\0ason", self.now_s)
        self.both("add_gaps", [gap], self.epoch(name, stale), self.leases(late) if leased else None)

    def teardown(self) -> None:
        self.they_hold_the_same()
        super().teardown()

    @rule()
    def they_hold_the_same(self) -> None:
        self.both("checkpoints", "p", "one")
        self.both("checkpoints_of_queue", "p", 0)
        self.both("checkpoints_of_queue", "p", 1)
        self.both("watermarks", "p", apart_from=["two"])
        self.both("dead_letters", "p")
        self.both("redrives", "p", ["one"], queues=[0])
        self.both("gaps", "p")


@pytest.mark.hypothesis
def test_the_simulated_store_grants_leases_as_the_real_one_does() -> None:
    run_state_machine_as_test(Leases, settings=STEPS)


@pytest.mark.hypothesis
def test_the_simulated_store_keeps_progress_as_the_real_one_does() -> None:
    run_state_machine_as_test(Progress, settings=STEPS)
