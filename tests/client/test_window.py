"""The window of an idempotent producer against a model of the silo, which refuses, fails, and loses connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace import (
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    SequenceConflict,
    SequenceToken,
    StorageError,
    Unauthenticated,
    Unavailable,
)
from headrace.client.window import Publication, PublicationPiece, PublishWindow, WindowedRequest, WindowLimits
from headrace.streams.publishing import Receipt
from tests.random_examples import examples

SMALL = WindowLimits(request_bytes=30, request_batches=4, requests=3, bytes=60)


class Sent(NamedTuple):
    """A request as it is on the wire."""

    producer: str
    number: int
    previous: int
    batches: tuple[bytes, ...]


def on_the_wire(window: PublishWindow, request: WindowedRequest) -> Sent:
    frames = tuple(frame for piece in request.pieces for frame in piece.frames)
    return Sent(window.producer, request.number, request.previous, frames)


class ModelSilo:
    """Stores by the rule of the log adapter; batches with an x are refused, and those with a p while `revoked`."""

    def __init__(self) -> None:
        self.revoked = False
        self.last: dict[str, int] = {}
        self.log: list[bytes] = []

    def store(self, sent: Sent) -> list[Receipt] | HeadraceError:
        if any(b"x" in batch for batch in sent.batches):
            return InvalidArgument("an x")
        if self.revoked and any(b"p" in batch for batch in sent.batches):
            return PermissionDenied("a p")
        last = self.last.get(sent.producer, 0)
        if sent.number <= last:
            return [Receipt(None, duplicate=True)] * len(sent.batches)
        if sent.previous != last:
            return SequenceConflict(f"{sent.previous} is not {last}")
        self.last[sent.producer] = sent.number
        self.log += sent.batches
        return [Receipt(SequenceToken(len(self.log) - left)) for left in range(len(sent.batches), 0, -1)]


class Line:
    """A client, a silo, and the connection between them."""

    def __init__(self, limits: WindowLimits = SMALL) -> None:
        producers = count(1)
        self.window = PublishWindow(lambda: f"producer-{next(producers)}", limits)
        self.silo = ModelSilo()
        self.requests: deque[Sent] = deque()
        self.answers: deque[list[Receipt] | HeadraceError] = deque()
        self.numbers = count()

    def publish(self, *texts: str) -> Publication:
        """Each text is a piece."""
        publication = Publication()
        for text in texts:
            batch = b"%03d%s" % (next(self.numbers), text.encode())
            self.window.add(PublicationPiece(publication, [batch], 1, len(batch)))
        return publication

    def send(self) -> bool:
        request = self.window.take()
        if request is not None:
            self.requests.append(on_the_wire(self.window, request))
        return request is not None

    def process(self, failing: Callable[[Sent], list[Receipt] | HeadraceError] | None = None) -> None:
        self.answers.append((failing or self.silo.store)(self.requests.popleft()))

    def receive(self) -> None:
        answer = self.answers.popleft()
        if isinstance(answer, HeadraceError):
            self.window.failed(answer)
        else:
            self.window.stored(answer)

    def disconnect(self) -> list[Sent]:
        """Return the requests in flight, which may still reach the silo."""
        left = list(self.requests)
        self.requests.clear()
        self.answers.clear()
        self.window.disconnected()
        return left

    def settle(self) -> None:
        """Let everything run to its end, with a silo that works."""
        while self.send() or self.requests or self.answers:
            while self.send():
                pass
            while self.requests:
                self.process()
            while self.answers:
                self.receive()


def test_waiting_events_travel_together_up_to_the_limits():
    line = Line()
    publications = [line.publish("a") for _ in range(6)]
    assert line.send()
    assert line.send()
    assert not line.send()
    assert [len(sent.batches) for sent in line.requests] == [4, 2]
    assert [(sent.number, sent.previous) for sent in line.requests] == [(1, 0), (2, 1)]
    line.settle()
    assert [one.receipts for one in publications] == [[Receipt(SequenceToken(at))] for at in range(6)]


def test_no_more_is_under_way_than_the_limits_say():
    line = Line()
    for _ in range(40):
        line.publish("abcdefgh")
    sent = 0
    while line.send():
        sent += 1
    assert sent == SMALL.requests
    assert line.window.in_flight == SMALL.requests


def test_only_a_small_request_waits_for_those_in_flight():
    line = Line(SMALL._replace(small_bytes=8))
    line.publish("a")
    assert not line.window.should_gather  # nothing is in flight
    line.send()
    assert not line.window.should_gather  # nothing waits
    line.publish("b")
    assert line.window.should_gather
    line.publish("c")
    assert not line.window.should_gather
    line.send()
    line.publish("d")
    line.process()
    line.receive()
    assert line.window.should_gather
    line.process()
    line.receive()
    assert not line.window.should_gather


def test_requests_that_are_sent_again_do_not_wait_for_each_other():
    line = Line(SMALL._replace(small_bytes=8))
    for text in ("a", "b", "c"):
        line.publish(text)
        line.send()
    line.disconnect()
    assert line.send()
    assert not line.window.should_gather
    assert line.send()
    assert line.send()
    line.publish("d")
    assert line.window.should_gather


def test_a_batch_above_the_limit_of_a_request_travels_alone():
    line = Line(WindowLimits(request_bytes=10))
    line.publish("a")
    line.publish("b" * 100)
    line.publish("c")
    while line.send():
        pass
    assert [len(sent.batches) for sent in line.requests] == [1, 1, 1]


def test_a_refusal_fails_only_the_refused_publish():
    line = Line()
    before, bad, after, later = line.publish("a"), line.publish("x"), line.publish("b"), line.publish("c")
    line.settle()
    assert isinstance(bad.error, InvalidArgument)
    assert [one.error for one in (before, after, later)] == [None] * 3
    assert line.silo.log == [b"000a", b"002b", b"003c"]


def test_a_full_queue_is_told_at_once():
    line = Line()
    full, other = line.publish("a"), line.publish("b")

    def store(sent: Sent) -> list[Receipt] | HeadraceError:
        return QueueFull("full") if any(batch.endswith(b"a") for batch in sent.batches) else line.silo.store(sent)

    while not full.over or not other.over:
        line.send()
        line.process(store)
        line.receive()
    assert isinstance(full.error, QueueFull)
    assert line.silo.log == [b"001b"]


@pytest.mark.parametrize("kind", [Unauthenticated, NotFound])
def test_refusal_of_all_publications_fails_all_at_once(kind: type[HeadraceError]):
    line = Line()
    publications = [line.publish("a") for _ in range(4)]
    line.send()
    line.process(lambda sent: kind("no"))
    line.receive()
    assert [type(one.error) for one in publications] == [kind] * 4


def test_a_publication_in_pieces_fails_once_and_its_rest_is_not_sent():
    line = Line()
    long, next_one = line.publish("a", "x", "b", "c", "d", "e"), line.publish("f")
    line.settle()
    assert isinstance(long.error, InvalidArgument)
    assert next_one.error is None
    assert line.silo.log in ([b"000a", b"006f"], [b"006f"])


def test_unanswered_request_is_sent_again_and_stored_once():
    line = Line()
    publications = [line.publish("a") for _ in range(10)]
    while line.send():
        pass
    line.process()  # stored, but the answer is lost
    line.disconnect()
    line.settle()
    assert line.silo.log == [b"%03da" % number for number in range(10)]
    assert all(one.error is None for one in publications)


def test_a_failure_that_may_pass_is_waited_for():
    line = Line()
    line.publish("a")
    line.send()
    line.process(lambda sent: StorageError("the disk hangs"))
    line.receive()
    assert (line.window.failed_rounds, str(line.window.trouble)) == (1, "the disk hangs")
    line.settle()
    assert (line.window.failed_rounds, line.window.trouble) == (0, None)
    assert line.silo.log == [b"000a"]


@pytest.mark.parametrize("stored", [0, 1, 2, 3])
def test_after_giving_up_the_next_publish_is_stored_and_late_ones_are_not(stored: int):
    line = Line()
    first = [line.publish("a" * 26) for _ in range(3)]
    while line.send():
        pass
    for _ in range(stored):
        line.process()
    late = line.disconnect()
    for one in first:
        one.over = True
    after = line.publish("after")
    line.settle()
    assert after.error is None
    for sent in late:  # nothing that comes late is stored any more
        line.silo.store(sent)
    assert [int(batch[:3]) for batch in line.silo.log] == [*range(stored), 3]


def test_a_silo_that_has_forgotten_everything_is_begun_with_anew():
    line = Line()
    line.publish("a")
    line.settle()
    line.disconnect()
    line.silo = ModelSilo()
    again = line.publish("b")
    line.settle()
    assert again.error is None
    assert line.silo.log == [b"001b"]


def test_a_sequence_conflict_fails_the_publishes_that_it_concerns():
    line = Line()
    line.publish("a")
    line.settle()
    line.silo.last[line.window.producer] = 1000  # as if another client published under this id
    lost = line.publish("b")
    line.silo.last[line.window.producer] = -5
    line.settle()
    assert isinstance(lost.error, SequenceConflict)
    after = line.publish("c")
    line.settle()
    assert after.error is None
    assert line.silo.log == [b"000a", b"002c"]


def test_everything_is_given_up_at_once():
    line = Line()
    publications = [line.publish("a") for _ in range(20)]
    line.send()
    line.disconnect()
    line.window.fail_all(Unavailable("gone"))
    assert all(isinstance(one.error, Unavailable) for one in publications)
    assert line.window.idle
    assert (line.window.held.size, line.window.held.count) == (0, 0)


def test_a_publication_that_is_refused_with_all_its_pieces_leaves_no_bytes_behind():
    line = Line()
    refused = line.publish("a", "b")
    line.send()
    line.process(lambda _: NotFound("no such provider"))
    line.receive()
    assert isinstance(refused.error, NotFound)
    assert line.window.idle
    assert (line.window.held.size, line.window.held.count) == (0, 0)


class Published(NamedTuple):
    publication: Publication
    batches: list[bytes]
    bad: bool
    abandoned: list[None]

    def check(self, log: set[bytes], *, at_odds: bool) -> None:
        """The publisher was told the truth."""
        error = self.publication.error
        if not self.publication.over or self.abandoned:
            return
        if error is None:
            assert not self.bad
            assert log.issuperset(self.batches)
            assert len(self.publication.receipts) == len(self.batches)
        elif isinstance(error, InvalidArgument):
            assert self.bad
        elif isinstance(error, PermissionDenied):
            assert any(b"p" in batch for batch in self.batches)
        else:
            assert isinstance(error, SequenceConflict)
            assert at_odds


class WindowMachine(RuleBasedStateMachine):
    """With any failures, each piece is stored at most once and in order, and the client reports the truth.

    Only refused pieces fail. The client cannot know the truth in one case: a request was stored, its answer was lost,
    and the next attempt is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.published: list[Published] = []
        self.late: deque[Sent] = deque()
        self.has_changed = False

    @rule(texts=st.lists(st.sampled_from(["", "ab", "p", "cdefghijkl"]), min_size=1, max_size=3), bad=st.integers(0, 9))
    def publish(self, texts: list[str], bad: int) -> None:
        if bad < len(texts):
            texts = [*texts[:bad], "x", *texts[bad + 1 :]]
        start = sum(len(one.batches) for one in self.published)
        batches = [b"%03d%s" % (start + at, text.encode()) for at, text in enumerate(texts)]
        self.published.append(Published(self.line.publish(*texts), batches, bad < len(texts), []))

    @rule()
    def send(self) -> None:
        self.line.send()

    @precondition(lambda self: self.line.requests)
    @rule(data=st.data())
    def process(self, data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(["well", "well", "well", "not", "stored but failed"]))
        if how == "well":
            self.line.process()
        elif how == "not":
            self.line.process(lambda sent: StorageError("not stored"))
        else:
            self.line.process(lambda sent: _told_otherwise(self.line.silo.store(sent)))

    @precondition(lambda self: self.line.answers)
    @rule()
    def receive(self) -> None:
        self.line.receive()

    @rule(arriving=st.booleans())
    def disconnect(self, arriving: bool) -> None:
        left = self.line.disconnect()
        self.late += left if arriving else ()

    @precondition(lambda self: self.late)
    @rule()
    def a_late_request_arrives(self) -> None:
        sent = self.late.popleft()
        if sent.producer == self.line.window.producer:
            self.line.silo.store(sent)

    @rule()
    def the_permission_changes(self) -> None:
        self.line.silo.revoked = not self.line.silo.revoked
        self.has_changed = True

    @precondition(lambda self: any(not one.publication.over for one in self.published))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.published if not one.publication.over]))
        one.publication.over = True
        one.abandoned.append(None)

    @rule()
    def settle(self) -> None:
        self.line.settle()
        assert self.line.window.idle
        assert (self.line.window.held.size, self.line.window.held.count) == (0, 0)
        assert all(one.publication.over for one in self.published)

    @invariant()
    def each_is_stored_at_most_once_and_in_order(self) -> None:
        numbers = [int(batch[:3]) for batch in self.line.silo.log]
        assert numbers == sorted(set(numbers))

    @invariant()
    def what_is_told_is_true(self) -> None:
        log = set(self.line.silo.log)
        for one in self.published:
            one.check(log, at_odds=self.has_changed)

    def teardown(self) -> None:
        self.settle()


def _told_otherwise(answer: list[Receipt] | HeadraceError) -> HeadraceError:
    refused = isinstance(answer, InvalidArgument | PermissionDenied | SequenceConflict)
    return answer if refused else StorageError("stored all the same")


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=examples(300), stateful_step_count=60, deadline=None)
