"""Acknowledgements of one queue: which of them are confirmed as saved."""

from typing import Any

from headrace import EventBatch, StreamId
from headrace.client.held_account import HeldAccount
from headrace.client.pending_results import PendingResults
from headrace.client.received import ReceivedBatch
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.streams.frames import DeliveredBatch

STREAM = StreamId("orders", "42")


def batch(offset: int) -> ReceivedBatch:
    holder: Any = None
    return ReceivedBatch(
        holder, DeliveredBatch(EventBatch(STREAM, EventBatch.of(STREAM, [b"x"]).encoded, 1, offset), 0, 1, None), 1
    )


class Results(PendingResults):
    """With acknowledgements that are reported one by one."""

    def __init__(self) -> None:
        super().__init__(HeldAccount(1000, 1 << 20))
        self._number = 0

    def done(self, offset: int) -> None:
        self.acknowledge((STREAM, offset, 0, 1))

    def report(self) -> int:
        """Return the number of the report."""
        self._number += 1
        lines: Any = {}
        self.fill(pb.QueueReport(), self._number, 1000, lines)
        return self._number


def test_only_acknowledgements_before_a_mark_have_to_be_saved() -> None:
    results = Results()
    results.done(0)
    first = results.report()
    results.done(1)
    mark = results.mark()
    results.done(2)
    second = results.report()
    results.done(3)
    results.confirm(first, 0)
    assert not results.is_saved_until(mark)
    results.confirm(second, 0)
    assert results.is_saved_until(mark)
    assert not results.is_saved


def test_acknowledgements_of_a_lost_session_have_to_be_confirmed_by_the_next() -> None:
    results = Results()
    results.done(0)
    results.report()
    mark = results.mark()
    results.end_session()
    assert not results.is_saved_until(mark)
    asked = results.report()
    results.done(1)
    results.report()
    assert not results.is_saved_until(mark)
    results.confirm(0, asked)
    assert results.is_saved_until(mark)
    assert not results.is_saved


def test_events_that_are_acknowledged_again_have_to_be_saved() -> None:
    results = Results()
    results.done(0)
    results.report()
    mark = results.mark()
    results.end_session()
    assert results.take_unconfirmed(0, [0]) == {0}
    results.acknowledge_again(batch(0), [0])
    assert not results.is_saved_until(mark)
    again = results.report()
    results.done(1)
    assert not results.is_saved_until(mark)
    results.confirm(again, 0)
    assert results.is_saved_until(mark)


def test_refused_acknowledgements_are_not_saved_with_their_report() -> None:
    results = Results()
    results.done(0)
    report = results.report()
    before = results.mark()
    results.done(1)
    results.refuse(report, 0)
    asked = results.report()
    results.confirm(report, 0)
    assert not results.is_saved_until(before)
    results.confirm(asked, 0)
    assert not results.is_saved_until(before)
    results.confirm(asked, asked)
    assert results.is_saved_until(before)
    assert results.is_saved


def test_a_refusal_does_not_confirm_acknowledgements_before_it() -> None:
    results = Results()
    results.done(0)
    first = results.report()
    mark = results.mark()
    results.done(1)
    second = results.report()
    results.refuse(second, 1)
    assert results.take_unconfirmed(1, [0]) == {0}
    assert not results.is_saved_until(mark)
    results.confirm(first, 0)
    assert results.is_saved_until(mark)


def test_after_a_seek_nothing_is_left_to_be_saved() -> None:
    results = Results()
    results.done(0)
    results.report()
    results.done(1)
    mark = results.mark()
    results.forget()
    assert results.is_saved_until(mark)
