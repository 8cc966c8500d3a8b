"""The credit of a consumer, divided among silos."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.silo.relay.credit import MOST, Decision, Ledger
from tests.random_examples import examples


def lent(decision: Decision) -> dict[str, tuple[int, int]]:
    return {loan.silo: (loan.events, loan.bytes) for loan in decision.loans}


def ledger(*silos: str) -> Ledger:
    made = Ledger()
    for silo in silos:
        made.joined(silo)
    return made


def test_silos_share_equally_at_first():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    assert lent(credit.decide()) == {"a": (50, 500), "b": (50, 500)}


def test_without_silos_nothing_is_lent():
    credit = Ledger()
    credit.granted(1, 1)
    assert credit.decide() == ([], ())


def test_what_is_granted_goes_to_who_used_it():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    credit.decide()
    credit.used("a", 30, 300)
    credit.granted(30, 300)
    assert lent(credit.decide()) == {"a": (30, 300)}


def test_the_least_credit_gets_to_where_an_event_waits():
    credit = ledger("a", "b", "c")
    credit.granted(1, 1000)
    assert lent(credit.decide())["c"][0] == 0
    credit.hungry("c")
    assert lent(credit.decide())["c"][0] == 1


def test_who_is_hungry_gets_what_idle_silos_have():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    credit.decide()
    credit.used("a", 50, 500)
    credit.hungry("a")
    decision = credit.decide()
    assert decision.loans == []
    assert decision.reclaim == ["b"]
    credit.returned("b", 50, 500)
    assert lent(credit.decide()) == {"a": (40, 400), "b": (10, 100)}


def test_silos_that_are_busy_keep_their_share():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    credit.decide()
    credit.used("a", 50, 500)
    credit.used("b", 45, 450)
    credit.hungry("a")
    assert not credit.decide().reclaim
    assert credit.decide(patient=False).reclaim == ["b"]


def test_nobody_is_asked_twice_before_an_answer():
    credit = ledger("a", "b")
    credit.granted(2, 1000)
    credit.decide()
    credit.used("a", 1, 10)
    credit.hungry("a")
    assert credit.decide(patient=False).reclaim == ["b"]
    assert credit.decide(patient=False).reclaim == []


def test_a_large_event_gets_the_bytes_of_all():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    credit.decide()
    credit.hungry("a", 900)
    assert credit.decide().reclaim == ["b"]
    credit.returned("b", 50, 500)
    assert lent(credit.decide())["a"][1] == 400


def test_what_no_credit_is_enough_for_is_told():
    credit = ledger("a")
    credit.granted(100, 1000)
    credit.hungry("a", 1001)
    assert credit.needed == 1001
    credit.granted(0, 1)
    assert credit.needed == 0


def test_what_comes_again_as_one_gets_events_for_all_of_it():
    credit = ledger("a", "b")
    credit.granted(10, 1000)
    credit.decide()
    credit.hungry("a", 100, 9)
    assert credit.decide().reclaim == ["b"]
    credit.returned("b", 5, 500)
    assert lent(credit.decide())["a"][0] == 4


def test_a_silo_that_leaves_takes_nothing_with_it():
    credit = ledger("a", "b")
    credit.granted(100, 1000)
    credit.decide()
    credit.hungry("b")
    credit.left("b")
    credit.left("b")
    assert not credit.is_hungry
    assert lent(credit.decide()) == {"a": (50, 500)}


def test_credit_has_an_end():
    credit = ledger("a")
    for _ in range(3):
        credit.granted((1 << 64) - 1, (1 << 64) - 1)
    assert credit.total == (MOST, MOST)


def test_who_is_hungry_while_it_gives_back_is_fed_afterwards():
    """The credit that the silo seems to have is on its way back: the silo said that it has none."""
    credit = ledger("a", "b")
    credit.granted(2, 1000)
    credit.decide()
    credit.used("a", 1, 10)
    credit.hungry("a")
    assert credit.decide(patient=False).reclaim == ["b"]
    credit.hungry("b")
    credit.decide()
    credit.returned("b", 1, 500)
    assert lent(credit.decide())["a"][0] == 1
    assert credit.is_hungry
    credit.granted(1, 10)
    assert lent(credit.decide())["b"][0] == 1


class Lending(RuleBasedStateMachine):
    """Silos that use their credit, report that they are starved, and answer at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.granted = 0
        self.used: Counter[str] = Counter()
        self.has: dict[str, list[int]] = {}
        """Events and bytes that each silo may send, as it knows."""
        self.asked: set[str] = set()
        self.hungry: set[str] = set()

    def act(self, *, patient: bool = True) -> None:
        decision = self.ledger.decide(patient=patient)
        for silo, events, size in decision.loans:
            assert events >= 0
            assert size >= 0
            self.has[silo][0] += events
            self.has[silo][1] += size
            if self.has[silo][0] and self.has[silo][1]:
                self.hungry.discard(silo)
        for silo in decision.reclaim:
            assert silo not in self.asked
            self.asked.add(silo)

    @rule(silo=st.sampled_from("abcd"))
    def join(self, silo: str) -> None:
        if silo not in self.has:
            self.has[silo] = [0, 0]
            self.ledger.joined(silo)
            self.act()

    @rule(silo=st.sampled_from("abcd"))
    def leave(self, silo: str) -> None:
        if self.has.pop(silo, None) is not None:
            self.ledger.left(silo)
            self.asked.discard(silo)
            self.hungry.discard(silo)
            self.act()

    @rule(events=st.integers(0, 20), size=st.integers(0, 500))
    def grant(self, events: int, size: int) -> None:
        self.ledger.granted(events, size)
        self.granted += events
        self.act()

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        silo = data.draw(st.sampled_from(sorted(self.has)))
        events, size = (data.draw(st.integers(0, most)) for most in self.has[silo])
        self.has[silo][0] -= events
        self.has[silo][1] -= size
        self.used["events"] += events
        self.ledger.used(silo, events, size)
        if not (self.has[silo][0] and self.has[silo][1]):
            self.hungry.add(silo)
            self.ledger.hungry(silo)
        self.act()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        silo = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(silo)
        events, size = self.has[silo]
        self.has[silo] = [0, 0]
        self.ledger.returned(silo, events, size)
        self.act()

    @rule()
    def time_goes_by(self) -> None:
        """All silos answer, and each starved silo gets credit if the total is enough for all silos."""
        for _ in range(8):
            self.act(patient=False)
            for silo in sorted(self.asked):
                self.asked.discard(silo)
                events, size = self.has[silo]
                self.has[silo] = [0, 0]
                self.ledger.returned(silo, events, size)
            self.act()
        total = self.ledger.total
        if self.hungry and len(self.has) <= min(total.events, total.bytes):
            assert all(self.has[silo][0] and self.has[silo][1] for silo in self.hungry)

    @invariant()
    def nobody_may_send_more_than_was_granted(self) -> None:
        assert sum(events for events, _ in self.has.values()) + self.used["events"] <= self.granted
        assert self.ledger.total.events + self.used["events"] == self.granted


Lending.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestLending = pytest.mark.timeout(120)(Lending.TestCase)
