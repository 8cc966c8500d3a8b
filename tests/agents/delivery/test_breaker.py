"""The circuit breaker's decisions, alone: against a model that remembers everything."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace import StreamId
from headrace.agents.delivery.breaker import (
    FIRST_PROBE_S,
    FIRST_STEP,
    MAX_PROBE_S,
    SETTLE_S,
    STEP_S,
    STREAMS,
    Admission,
    BreakerState,
    CircuitBreaker,
)
from headrace.streams.wording import MAX_REASON

KEYS = st.integers(0, 30)


def stream(number: int) -> StreamId:
    return StreamId("s", str(number))


class Breakers(RuleBasedStateMachine):
    """Two breakers: one is told every success, the other, as a delivery does, only those it watches for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.told, self.breaker = CircuitBreaker(), CircuitBreaker()
        self.failed_since_hold: set[int] = set()
        self.run: dict[int, float] = {}
        """Streams that failed since the last success, and when."""
        self.failures_since_success: float | None = None
        self.probes: list[float] = []
        self.resumed_at = 0.0
        self.resumed: list[float] = []
        """When deliveries began since it resumes."""

    @property
    def state(self) -> BreakerState:
        return self.breaker.state

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 11.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        was = self.state
        self.now += seconds
        self.told.tick(self.now)
        self.breaker.tick(self.now)
        self._may_have_closed(was)

    def _may_have_closed(self, was: BreakerState) -> None:
        if was is BreakerState.RESUMING and self.state is BreakerState.CLOSED:
            self.run.clear()

    @rule(key=KEYS)
    def succeed(self, key: int) -> None:
        was = self.state
        self.told.succeeded(self.now, stream(key))
        if self.breaker.watching:
            self.breaker.succeeded(self.now, stream(key))
        self.run.clear()
        self.failures_since_success = None
        if was is BreakerState.HELD:
            assert self.state is BreakerState.RESUMING
            self.resumed_at, self.resumed = self.now, []
            self.failed_since_hold.clear()
        else:
            assert self.state is was

    @rule(key=KEYS, phases_ago=st.none() | st.integers(0, 3), exhausted=st.booleans(), unavailable=st.booleans())
    def fail(self, key: int, phases_ago: int | None, exhausted: bool, unavailable: bool) -> None:
        earlier = None if phases_ago is None else max(self.breaker.phase - phases_ago, 0)
        self._fail(key, earlier=earlier, exhausted=exhausted, unavailable=unavailable)

    @rule(keys=st.lists(KEYS, min_size=STREAMS, max_size=STREAMS + 3, unique=True))
    def fail_all(self, keys: list[int]) -> None:
        for key in keys:
            self._fail(key, earlier=None, exhausted=False, unavailable=False)

    def _fail(self, key: int, *, earlier: int | None, exhausted: bool, unavailable: bool) -> None:
        was, phase = self.state, self.breaker.phase
        for one in (self.told, self.breaker):
            counts = one.failed(
                self.now, stream(key), "no", earlier=earlier, exhausted=exhausted, unavailable=unavailable
            )
        if earlier != phase and was is not BreakerState.HELD:
            self.failed_since_hold.add(key)
            if earlier is None:
                self.run.setdefault(key, self.now)
        if self.failures_since_success is None:
            self.failures_since_success = self.now
        if self.breaker.phase > phase:
            assert was is not BreakerState.HELD
            assert len(self.failed_since_hold) >= (1 if unavailable else STREAMS)
            assert not counts
            self.probes = [self.now]
            self.failed_since_hold.clear()
            self.run.clear()
        elif was is BreakerState.CLOSED:
            settled = self.now - self.failures_since_success >= SETTLE_S or (exhausted and not unavailable)
            assert not (len(self.run) >= STREAMS and settled)
            assert counts is not unavailable
        else:
            assert counts == (was is BreakerState.RESUMING and not exhausted and not unavailable)

    @rule()
    def begin(self) -> None:
        was = self.state
        admissions = [one.admission(self.now) for one in (self.told, self.breaker)]
        admission = admissions[1]
        self._may_have_closed(was)
        assert admissions[0] is admission
        assert admission is not Admission.PROBE or self.state is BreakerState.HELD
        if admission is Admission.NONE:
            return
        for one in (self.told, self.breaker):
            if one.limiting:
                one.begin(self.now)
        if self.state is BreakerState.HELD:
            assert self.now - self.probes[-1] >= FIRST_PROBE_S
            self.probes.append(self.now)
        elif self.state is BreakerState.RESUMING:
            self.resumed.append(self.now)
            steps = int((self.now - self.resumed_at) / STEP_S) + 1
            assert len(self.resumed) <= FIRST_STEP * (2**steps - 1)

    @precondition(lambda self: self.state is BreakerState.RESUMING)
    @rule()
    def begin_many(self) -> None:
        for _ in range(3 * FIRST_STEP):
            self.begin()

    @precondition(lambda self: self.state is BreakerState.HELD)
    @rule()
    def wait_for_a_probe(self) -> None:
        self.pass_time(MAX_PROBE_S)
        assert self.breaker.admission(self.now) is Admission.PROBE

    @invariant()
    def both_agree(self) -> None:
        assert (self.told.state, self.told.phase) == (self.breaker.state, self.breaker.phase)
        assert self.breaker.limiting == (self.state is not BreakerState.CLOSED)
        assert self.breaker.watching or not self.breaker.limiting


TestBreakers = Breakers.TestCase


# ---- examples ------------------------------------------------------------------------------------------------------


def held() -> CircuitBreaker:
    """One that was held at time 1."""
    breaker = CircuitBreaker()
    for number in range(STREAMS):
        assert breaker.failed(0.0, stream(number), "no", earlier=None, exhausted=False)
    assert not breaker.failed(1.0, stream(0), "no", earlier=0, exhausted=False)
    assert breaker.state is BreakerState.HELD
    return breaker


def resuming() -> CircuitBreaker:
    """One that resumes since time 2."""
    breaker = held()
    breaker.begin(2.0)
    breaker.succeeded(2.0, stream(0))
    assert breaker.state is BreakerState.RESUMING
    return breaker


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_poison_among_many_streams_holds_nothing(share: float) -> None:
    breaker = CircuitBreaker()
    every = round(1 / share)
    for number in range(100_000):
        now = number / 10_000
        if number % every == 0:
            assert breaker.failed(now, stream(number), "no", earlier=None, exhausted=False)
        elif breaker.watching:
            breaker.succeeded(now, stream(number))
    assert breaker.state is BreakerState.CLOSED


def test_the_kept_reason_is_bounded() -> None:
    breaker = CircuitBreaker()
    for number in range(STREAMS):
        breaker.failed(number / 1000, stream(number), 20_000 * "!", earlier=None, exhausted=True)
    assert breaker.state is BreakerState.HELD
    assert len(breaker.reason) == MAX_REASON


def test_probes_come_less_and_less_often() -> None:
    breaker, now, probes = held(), 1.0, list[float]()
    while now < 100:
        if breaker.admission(now) is Admission.PROBE:
            breaker.begin(now)
            probes.append(now)
        now += 0.5
    assert probes[:5] == [2.0, 4.0, 8.0, 16.0, 26.0]


def test_it_closes_after_a_step_that_does_not_use_its_limit() -> None:
    breaker = resuming()
    for _ in range(FIRST_STEP):
        assert breaker.admission(2.0) is Admission.ANY
        breaker.begin(2.0)
        breaker.succeeded(2.0, stream(1))
    assert breaker.admission(2.0) is Admission.NONE
    breaker.tick(3.0)
    assert breaker.state is BreakerState.RESUMING
    breaker.tick(4.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_step_lasts_while_most_of_its_deliveries_run() -> None:
    breaker = resuming()
    for _ in range(FIRST_STEP):
        breaker.begin(2.0)
    assert breaker.admission(20.0) is Admission.NONE
    for number in range(FIRST_STEP // 2):
        breaker.succeeded(20.0, stream(number))
    assert breaker.admission(21.0) is Admission.ANY


def test_it_is_held_again_when_streams_fail_while_it_resumes() -> None:
    breaker = resuming()
    verdicts = [breaker.failed(2.1, stream(n), "no", earlier=None, exhausted=False) for n in range(STREAMS)]
    assert verdicts == [True] * (STREAMS - 1) + [False]
    assert breaker.state is BreakerState.HELD
