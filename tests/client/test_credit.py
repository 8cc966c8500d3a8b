"""The credit of a consumer, divided among its sessions."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.client.credit import MAX_CREDIT, CreditAmount, CreditDecision, CreditLedger
from tests.random_examples import examples


def lent(decision: CreditDecision) -> dict[int, tuple[int, int]]:
    return {loan.session: (loan.events, loan.bytes) for loan in decision.loans}


def ledger(*sessions: int) -> CreditLedger:
    made = CreditLedger()
    for session in sessions:
        made.join(session)
    return made


def test_sessions_share_equally_at_first():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    assert lent(credit.decide()) == {1: (50, 500), 2: (50, 500)}


def test_without_sessions_nothing_is_lent():
    credit = CreditLedger()
    credit.grant(1, 1)
    assert credit.decide() == ([], ())


def test_granted_credit_goes_to_the_session_that_used_it():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.use(1, 30, 300)
    credit.grant(30, 300)
    assert lent(credit.decide()) == {1: (30, 300)}


def test_the_smallest_credit_gets_to_the_session_that_has_an_event():
    credit = ledger(1, 2, 3)
    credit.grant(1, 1000)
    assert lent(credit.decide())[3][0] == 0
    credit.starve(3)
    assert lent(credit.decide())[3][0] == 1


def test_a_starved_session_gets_the_credit_of_idle_sessions():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.use(1, 50, 500)
    credit.starve(1)
    decision = credit.decide()
    assert decision.loans == []
    assert decision.reclaim == [2]
    credit.give_back(2, 50, 500)
    assert lent(credit.decide()) == {1: (40, 400), 2: (10, 100)}


def test_busy_sessions_keep_their_share():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.use(1, 50, 500)
    credit.use(2, 45, 450)
    credit.starve(1)
    assert not credit.decide().reclaim
    assert credit.decide(patient=False).reclaim == [2]


def test_no_session_is_asked_twice_before_it_answers():
    credit = ledger(1, 2)
    credit.grant(2, 1000)
    credit.decide()
    credit.use(1, 1, 10)
    credit.starve(1)
    assert credit.decide(patient=False).reclaim == [2]
    assert credit.decide(patient=False).reclaim == []


def test_a_large_event_gets_the_bytes_of_all_sessions():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.starve(1, CreditAmount(bytes=900))
    assert credit.decide().reclaim == [2]
    credit.give_back(2, 50, 500)
    assert lent(credit.decide())[1][1] == 400


def test_an_event_above_all_credit_is_reported():
    credit = ledger(1)
    credit.grant(100, 1000)
    credit.starve(1, CreditAmount(bytes=1001))
    assert credit.needed_bytes == 1001
    credit.grant(0, 1)
    assert credit.needed_bytes == 0


def test_events_that_come_again_together_get_credit_for_all_of_them():
    credit = ledger(1, 2)
    credit.grant(10, 1000)
    credit.decide()
    credit.starve(1, CreditAmount(9, 100))
    assert credit.decide().reclaim == [2]
    credit.give_back(2, 5, 500)
    assert lent(credit.decide())[1][0] == 4


def test_a_session_waits_for_credit_for_a_whole_batch():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.use(1, 50, 500)
    credit.use(2, 20, 200)
    credit.starve(1, wanted=CreditAmount(25, 100))
    credit.grant(15, 300)
    assert not credit.decide().loans
    credit.grant(10, 100)
    assert lent(credit.decide())[1][0] >= 25


def test_a_session_waits_for_a_whole_batch_for_a_while_only():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.use(1, 50, 500)
    credit.starve(1, wanted=CreditAmount(25, 100))
    credit.grant(15, 300)
    assert not credit.decide().loans
    assert lent(credit.decide(patient=False))[1][0] == 15


def test_a_batch_larger_than_all_credit_is_not_waited_for():
    credit = ledger(1, 2)
    credit.grant(10, 1000)
    credit.decide()
    credit.starve(1, wanted=CreditAmount(50, 100))
    assert credit.decide().reclaim == [2]
    credit.give_back(2, 5, 500)
    assert lent(credit.decide())[1][0] == 5


def test_the_credit_of_a_session_that_ends_is_free():
    credit = ledger(1, 2)
    credit.grant(100, 1000)
    credit.decide()
    credit.starve(2)
    credit.leave(2)
    credit.leave(2)
    assert not credit.is_starved
    assert lent(credit.decide()) == {1: (50, 500)}


def test_a_session_that_lacks_bytes_gets_them_although_another_one_lacks_events():
    credit = ledger(1, 2)
    credit.grant(1, 50)
    credit.decide()
    credit.starve(2)
    credit.decide()  # the only event goes to 2
    credit.starve(1)
    credit.decide()
    credit.starve(2, CreditAmount(bytes=90))
    credit.grant(0, 100)
    assert lent(credit.decide())[2][1] > 0


def test_credit_is_bounded():
    credit = ledger(1)
    for _ in range(3):
        credit.grant((1 << 64) - 1, (1 << 64) - 1)
    assert credit.total == (MAX_CREDIT, MAX_CREDIT)


def test_a_session_that_starves_while_it_gives_credit_back_gets_credit_afterwards():
    """The credit that the session seems to have is on its way back."""
    credit = ledger(1, 2)
    credit.grant(2, 1000)
    credit.decide()
    credit.use(1, 1, 10)
    credit.starve(1)
    assert credit.decide(patient=False).reclaim == [2]
    credit.starve(2)
    credit.decide()
    credit.give_back(2, 1, 500)
    assert lent(credit.decide())[1][0] == 1
    assert credit.is_starved
    credit.grant(1, 10)
    assert lent(credit.decide())[2][0] == 1


class Lending(RuleBasedStateMachine):
    """Sessions that use their credit, report that they are starved, and answer at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CreditLedger()
        self.granted = 0
        self.used: Counter[str] = Counter()
        self.has: dict[int, list[int]] = {}
        """Events and bytes that each session may send, as its silo knows."""
        self.asked: set[int] = set()
        self.starved: set[int] = set()

    def act(self, *, patient: bool = True) -> None:
        decision = self.ledger.decide(patient=patient)
        for session, events, size in decision.loans:
            assert events >= 0
            assert size >= 0
            self.has[session][0] += events
            self.has[session][1] += size
            if self.has[session][0] and self.has[session][1]:
                self.starved.discard(session)
        for session in decision.reclaim:
            assert session not in self.asked
            self.asked.add(session)

    @rule(session=st.integers(1, 4))
    def join(self, session: int) -> None:
        if session not in self.has:
            self.has[session] = [0, 0]
            self.ledger.join(session)
            self.act()

    @rule(session=st.integers(1, 4))
    def leave(self, session: int) -> None:
        if self.has.pop(session, None) is not None:
            self.ledger.leave(session)
            self.asked.discard(session)
            self.starved.discard(session)
            self.act()

    @rule(events=st.integers(0, 20), size=st.integers(0, 500))
    def grant(self, events: int, size: int) -> None:
        self.ledger.grant(events, size)
        self.granted += events
        self.act()

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.has)))
        events, size = (data.draw(st.integers(0, most)) for most in self.has[session])
        self.has[session][0] -= events
        self.has[session][1] -= size
        self.used["events"] += events
        self.ledger.use(session, events, size)
        if not (self.has[session][0] and self.has[session][1]):
            self.starved.add(session)
            self.ledger.starve(session, wanted=CreditAmount(data.draw(st.integers(0, 30)), 0))
        self.act()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(session)
        events, size = self.has[session]
        self.has[session] = [0, 0]
        self.ledger.give_back(session, events, size)
        self.act()

    @rule()
    def time_goes_by(self) -> None:
        """All sessions answer, and each starved one gets credit if the total is enough for all."""
        for _ in range(8):
            self.act(patient=False)
            for session in sorted(self.asked):
                self.asked.discard(session)
                events, size = self.has[session]
                self.has[session] = [0, 0]
                self.ledger.give_back(session, events, size)
                self.act()
        total = self.ledger.total
        if self.starved and len(self.has) <= min(total.events, total.bytes):
            assert all(self.has[session][0] and self.has[session][1] for session in self.starved)

    @invariant()
    def sessions_send_no_more_than_was_granted(self) -> None:
        assert sum(events for events, _ in self.has.values()) + self.used["events"] <= self.granted
        assert self.ledger.total.events + self.used["events"] == self.granted


Lending.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestLending = pytest.mark.timeout(120)(Lending.TestCase)
