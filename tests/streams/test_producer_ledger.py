"""The ledger of idempotent producers: each call is accepted once, in order, whatever is sent again."""

import random

import pytest

from headrace import SequenceConflict, SequenceToken
from headrace.adapters import ProducerSequence, Receipt
from headrace.streams.producer_ledger import LastCall, ProducerLedger, owned_id


def call(number: int, previous: int) -> ProducerSequence:
    return ProducerSequence("p", number, previous)


@pytest.mark.parametrize(
    ("last", "number", "previous", "accepted", "stored"),
    [
        (0, 1, 0, True, False),
        (0, 7, 0, True, False),
        (0, 2, 1, False, False),
        (5, 5, 4, False, True),
        (5, 3, 2, False, True),
        (5, 6, 5, True, False),
        (5, 9, 5, True, False),
        (5, 7, 6, False, False),
        (5, 6, 4, False, False),
    ],
)
def test_a_call_is_new_or_stored_or_leaves_a_hole(last: int, number: int, previous: int, accepted: bool, stored: bool):
    assert LastCall(last).accepts(call(number, previous)) is accepted
    assert LastCall(last).has(call(number, previous)) is stored
    if not accepted and not stored:
        with pytest.raises(
            SequenceConflict, match=f"call {number} follows call {previous}, but the last one stored is"
        ):
            LastCall(last).answer(call(number, previous), 1)


def test_only_a_repeat_of_the_last_call_gets_its_tokens():
    last = LastCall(5, [10, None, 12])
    tokens = [SequenceToken(10), None, SequenceToken(12)]
    assert last.answer(call(5, 4), 3) == [Receipt(token, duplicate=True) for token in tokens]
    assert last.answer(call(4, 3), 2) == [Receipt(None, duplicate=True)] * 2
    assert last.answer(call(5, 4), 2) == [Receipt(None, duplicate=True)] * 2, "it has another number of batches"


@pytest.mark.parametrize("seed", range(20))
def test_each_call_is_accepted_once_and_in_order_however_often_it_is_sent(seed: int):
    rng = random.Random(seed)
    ledger, stored = ProducerLedger(10), list[int]()
    numbers = sorted(rng.sample(range(1, 100), 20))
    while stored != numbers:
        at = rng.randrange(min(len(stored) + 2, len(numbers)))
        sequence = call(numbers[at], numbers[at - 1] if at else 0)
        if ledger.last("p").accepts(sequence):
            ledger.record("p", LastCall(sequence.number))
            stored.append(sequence.number)
        assert stored == numbers[: len(stored)]


def test_a_full_ledger_forgets_the_producer_that_stored_nothing_for_the_longest_time():
    ledger = ProducerLedger(2)
    for producer in ("a", "b", "a", "c"):
        ledger.record(producer, LastCall(1))
    assert [ledger.known(producer) for producer in "abc"] == [LastCall(1), None, LastCall(1)]
    assert ledger.last("b") == LastCall()


def test_an_account_owns_its_ids():
    assert len({owned_id(owner, producer) for owner in ("", "a", "b") for producer in ("p", "q")}) == 6
