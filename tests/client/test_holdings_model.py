"""The holdings of a consumer against a model of its silos, step by step: sessions are lost and queues move at any
moment."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace import StreamId
from headrace.client.holdings import ConsumerHoldings
from headrace.client.received import TAKEN, ReceivedBatch
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.streams.frames import split
from tests.random_examples import examples

from .model_cluster import ModelLink, ModelQueue, Pool, Position

STREAMS = [StreamId("orders", key) for key in "abc"]
QUEUE_OF = dict(zip(STREAMS, (0, 0, 1), strict=True))
INDEX = st.integers(0, 1000)
MAX_EVENTS, MAX_BYTES = 12, 1500
Place = tuple[int, int, int]
"""Queue, offset and index of an event."""


class Hand:
    """A batch that the user of the model has, with the events that can still be acknowledged."""

    def __init__(self, batch: ReceivedBatch) -> None:
        self.batch = batch
        events = batch.events()
        assert [event.payload for event in events] == batch.payloads()
        self.open: list[Position] = [event.token for event in events if event.token is not None]
        self.redriven = batch.redriven


class ConsumerAndSilos(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.links = [ModelLink("A"), ModelLink("B")]
        self.queues = [ModelQueue(number, self.links[number], self.pool) for number in range(2)]
        self.holdings = ConsumerHoldings(MAX_EVENTS, MAX_BYTES, self.grant)
        self.holdings.begin()
        self.hands: list[Hand] = []
        self.acked: set[Place] = set()
        self.ever_acked: set[Place] = set()
        self.taken_back: set[Place] = set()
        self.served: dict[int, ModelLink] = {}
        """The session that serves each queue, as far as the consumer knows."""
        self.generations = [0, 0]
        self.epochs = [0, 0]
        self.lost = False

    def grant(self, events: int, size: int) -> None:
        self.pool.events += events
        self.pool.bytes += size

    # ---- the silos -------------------------------------------------------------------------------------------------

    def _queue(self, stream: StreamId) -> ModelQueue:
        return self.queues[QUEUE_OF[stream]]

    def _ready(self) -> list[StreamId]:
        return [stream for queue in self.queues if queue.delivers for stream in queue.ready()]

    @rule(stream=st.sampled_from(STREAMS), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6))
    def publish(self, stream: StreamId, sizes: list[int]) -> None:
        self._queue(stream).publish(stream, sizes)

    @precondition(lambda self: self._ready())
    @rule(which=INDEX, most=st.integers(1, 15))
    def hand_out_more(self, which: int, most: int) -> None:
        ready = self._ready()
        self._hand_out(ready[which % len(ready)], most)

    def _hand_out(self, stream: StreamId, most: int) -> None:
        queue = self._queue(stream)
        if not queue.hand_out(stream, most):
            queue.owner.say(progress=pb.Progress(caught_up=False, needed_bytes=queue.needed_bytes(stream)))

    @precondition(lambda self: any(queue.resending and queue.owner.connected for queue in self.queues))
    @rule()
    def send_again(self) -> None:
        for queue in self.queues:
            if queue.resending and queue.owner.connected:
                queue.resend()

    @rule(number=st.integers(0, 1), which=INDEX)
    def redrive(self, number: int, which: int) -> None:
        if dead := sorted(self.queues[number].dead):
            self.queues[number].redrive(dead[which % len(dead)])

    @rule(number=st.integers(0, 1))
    def apply_a_request(self, number: int) -> None:
        if self.links[number].inbox:
            self._apply(self.links[number])

    def _apply(self, link: ModelLink) -> None:
        for report in link.inbox.popleft().reports:
            queue = self.queues[report.queue]
            if queue.owner is link:  # otherwise all of it is refused
                queue.apply(report)

    @rule(number=st.integers(0, 1))
    def save(self, number: int) -> None:
        self.queues[number].save()

    @rule(number=st.integers(0, 1))
    def report_progress(self, number: int) -> None:
        link = self.links[number]
        caught_up = all(queue.caught_up for queue in self.queues if queue.owner is link)
        link.say(progress=pb.Progress(caught_up=caught_up))

    @rule(number=st.integers(0, 1), which=INDEX)
    def a_retry_is_due(self, number: int, which: int) -> None:
        if waiting := sorted(self.queues[number].waiting):
            self.queues[number].waiting.discard(waiting[which % len(waiting)])

    @rule(number=st.integers(0, 1), which=INDEX)
    def another_consumer_takes(self, number: int, which: int) -> None:
        queue = self.queues[number]
        if (ready := queue.ready()) and not queue.draining:
            queue.others_take(ready[which % len(ready)])

    @rule(number=st.integers(0, 1), which=INDEX, done=st.booleans())
    def another_consumer_ends(self, number: int, which: int, done: bool) -> None:
        queue = self.queues[number]
        if theirs := sorted(stream for stream, parcel in queue.parcels.items() if not parcel.mine):
            queue.others_end(theirs[which % len(theirs)], done=done)

    @rule(number=st.integers(0, 1))
    def take_back(self, number: int) -> None:
        """The silo gives the consumer's events to others, and its session goes on."""
        parcels = self.queues[number].parcels.values()
        self.taken_back |= {(number, *position) for parcel in parcels if parcel.mine for position in parcel.held}
        self.queues[number].expire()
        self.lost = True

    @rule()
    def seek(self) -> None:
        for queue in self.queues:
            queue.seek()

    @rule(number=st.integers(0, 1))
    def drain(self, number: int) -> None:
        if not self.queues[number].draining:
            self.queues[number].drain()

    @rule(number=st.integers(0, 1), owner=st.integers(0, 1), saves=st.booleans())
    def move(self, number: int, owner: int, saves: bool) -> None:
        """A queue moves. A drained one is saved; without draining the lease was lost."""
        queue = self.queues[number]
        self.lost |= any(parcel.mine for parcel in queue.parcels.values())
        queue.move(self.links[owner], saves=saves and queue.draining)

    # ---- sessions --------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 1))
    def connect(self, number: int) -> None:
        link = self.links[number]
        if not link.connected:
            link.connected = True
            for queue in self.queues:
                if queue.owner is link:
                    queue.connected()

    @rule(number=st.integers(0, 1))
    def send(self, number: int) -> None:
        link = self.links[number]
        if link.connected and (request := self.holdings.request(link)) is not None:
            link.inbox.append(pb.SubscribeRequest.FromString(request.SerializeToString()))

    @rule(number=st.integers(0, 1))
    def receive(self, number: int) -> None:
        if self.links[number].outbox:
            self._receive(self.links[number])

    def _receive(self, link: ModelLink) -> None:
        response, frames = link.outbox.popleft()
        for refusal in response.refused:
            self.holdings.refused(link, refusal)
        for saved in response.saved:
            self.holdings.saved(link, saved)
        for status in response.queues:
            self._change(link, status)
        if response.HasField("progress"):
            self.holdings.progressed(link, response.progress.needed_bytes, caught_up=response.progress.caught_up)
        if delivered := split(frames)[0]:
            self.holdings.receive(link, delivered, len(frames))

    def _change(self, link: ModelLink, status: pb.QueueStatus) -> None:
        """As a router does it: the newest owner counts."""
        number, serving = status.queue, self.served.get(status.queue)
        if status.state == pb.QueueStatus.STATE_ENDED:
            if serving is link:
                self._end(link, number)
            return
        if serving is not None and serving is not link:
            if self.epochs[number] > status.epoch:
                return
            self._end(serving, number)
        self.served[number] = link
        if status.epoch >= self.epochs[number] and status.generation != self.generations[number]:
            self.generations[number] = status.generation
            self.acked = {place for place in self.acked if place[0] != number}
            self.hands = [hand for hand in self.hands if hand.batch.queue != number]
        self.epochs[number] = max(self.epochs[number], status.epoch)
        self.holdings.serve(link, status)

    def _end(self, link: ModelLink, number: int) -> None:
        del self.served[number]
        self.holdings.end(link, number)

    @rule(number=st.integers(0, 1), how=st.sampled_from(["connection", "connection", "expiry", "restart"]))
    def lose(self, number: int, how: str) -> None:
        """A session is lost, by itself, for too long, or because the silo is killed and starts again."""
        link = self.links[number]
        for _, frames in link.outbox:  # the router lends it to another session
            self.pool.events += sum(each.batch.count for each in split(frames)[0])
            self.pool.bytes += len(frames)
        link.connected = False
        link.inbox.clear()
        link.outbox.clear()
        for queue in self.queues:
            if queue.owner is link:
                queue.disconnected()
                if how == "restart":
                    queue.killed()
                if how == "expiry":
                    queue.expire()
        for served in [served for served, serving in self.served.items() if serving is link]:
            self._end(link, served)
        self.lost = True

    @rule(most=st.integers(1, 15), kept=st.integers(0, 2))
    def talk(self, most: int, kept: int) -> None:
        """Do all the usual steps at once; the last messages stay on their way."""
        for number, link in enumerate(self.links):
            self.connect(number)
            while self.holdings_reports(number):
                pass
            while link.inbox:
                self._apply(link)
        self.send_again()
        for stream in self._ready():
            self._hand_out(stream, most)
        for link in self.links:
            while len(link.outbox) > kept:
                self._receive(link)

    def holdings_reports(self, number: int) -> bool:
        """Send the next request. Return whether there was one."""
        before = len(self.links[number].inbox)
        self.send(number)
        return len(self.links[number].inbox) > before

    # ---- the user --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holdings.waiting)
    @rule()
    def take(self) -> None:
        batch = self.holdings.take()
        if batch is None:
            return
        hand = Hand(batch)
        held = {(each.batch.queue, *position) for each in self.hands for position in each.open}
        queue = self.queues[batch.queue]
        for position in hand.open:
            place = (queue.number, *position)
            # The acknowledgement of events that were taken back is on its way, and will be refused.
            assert place not in self.acked - self.taken_back, "handed out although it was acknowledged"
            assert place not in held, "handed out twice"
            if not hand.redriven and self.generations[queue.number] == queue.generation:  # else a seek is unheard of
                self._comes_in_order(queue, batch, position, held | {(queue.number, *each) for each in hand.open})
        self.hands.append(hand)

    def _comes_in_order(self, queue: ModelQueue, batch: ReceivedBatch, position: Position, held: set[Place]) -> None:
        queue.note_over()
        for before in queue.streams[batch.stream]:
            if before < position:
                place = (queue.number, *before)
                over = before in queue.ever_over or place in self.ever_acked
                assert over or place in held, f"{position} overtakes {before}"

    def _hand(self, which: int) -> Hand:
        return self.hands[which % len(self.hands)]

    def _done(self, hand: Hand, positions: Iterable[Position]) -> None:
        places = {(hand.batch.queue, *position) for position in positions}
        self.acked |= places
        self.ever_acked |= places
        hand.open = [position for position in hand.open if (hand.batch.queue, *position) not in places]
        if not hand.open:
            self.hands.remove(hand)

    @precondition(lambda self: self.hands)
    @rule(which=INDEX)
    def acknowledge_a_batch(self, which: int) -> None:
        self._acknowledge(self._hand(which))

    def _acknowledge(self, hand: Hand) -> None:
        self._forget_taken_back()
        if hand in self.hands:
            hand.batch.ack()
            self._done(hand, list(hand.open))

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def acknowledge_an_event(self, which: int, event: int) -> None:
        hand = self._hand(which)
        self._forget_taken_back()
        events = hand.batch.events()
        chosen = events[event % len(events)]
        assert chosen.token is not None
        hand.batch.ack(chosen)
        if hand in self.hands and chosen.token in hand.open:
            self._done(hand, [chosen.token])

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def acknowledge_until_an_event(self, which: int, event: int) -> None:
        self._forget_taken_back()
        if not self.hands:
            return
        hand = self._hand(which)
        chosen = hand.open[event % len(hand.open)]
        hand.batch.ack_until(next(e for e in hand.batch.events() if e.token == chosen))
        for each in [each for each in self.hands if each.batch.stream == hand.batch.stream]:
            if each is hand or each.batch.token < hand.batch.token:
                self._done(each, [position for position in each.open if position <= chosen])

    @precondition(lambda self: self.hands)
    @rule(which=INDEX)
    def reject_a_batch(self, which: int) -> None:
        self._forget_taken_back()
        if self.hands:
            self._hand(which).batch.nack("because")
            self._forget_taken_back()

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def reject_an_event(self, which: int, event: int) -> None:
        self._forget_taken_back()
        if self.hands:
            hand = self._hand(which)
            chosen = hand.open[event % len(hand.open)]
            hand.batch.nack("because", event=next(e for e in hand.batch.events() if e.token == chosen))
            self._forget_taken_back()

    def _forget_taken_back(self) -> None:
        """Forget the events that are not the user's any more: rejected, or taken back by the silo."""
        for hand in list(self.hands):
            batch, marks = hand.batch, hand.batch.marks
            events = zip(batch.indexes, marks or bytes(batch.count), strict=True) if batch.state == TAKEN else ()
            left = {(batch.offset, index) for index, mark in events if not mark}
            hand.open = [position for position in hand.open if position in left]
            if not hand.open:
                self.hands.remove(hand)

    # ---- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_account_is_right(self) -> None:
        state = self.holdings.statistics()
        if not self.lost:  # else events that the user holds may come again in parts, and weigh more than those
            account = self.holdings.account
            assert state.held_events + state.credit_events <= account.max_events
            assert state.held_bytes + state.credit_bytes <= account.max_bytes + 36 * state.held_events
        for queue in self.queues:
            queue.note_over()
            assert {(queue.number, *position) for position in queue.acknowledged} <= self.ever_acked
        if self.holdings.is_saved:
            for number, *position in self.acked:
                queue = self.queues[number]
                if self.generations[number] == queue.generation:  # else a seek is unheard of
                    assert tuple(position) in queue.saved_done | queue.dead
        coming = [frames for link in self.links for _, frames in link.outbox]
        assert state.credit_events == self.pool.events + sum(d.batch.count for f in coming for d in split(f)[0])
        assert state.credit_bytes == self.pool.bytes + sum(map(len, coming))

    def teardown(self) -> None:
        """Left in peace, everything is done or a dead letter, and the account is clear."""
        for number in range(2):
            self.connect(number)
        for queue in self.queues:
            if queue.draining:
                queue.move(queue.owner, saves=True)
        for _ in range(10_000):
            if self._settle():
                break
        else:
            raise AssertionError("it does not settle")
        assert all(queue.caught_up for queue in self.queues)
        assert not self.holdings.waiting
        for _ in range(2):
            for number in range(2):
                self.save(number)
            self._settle()
            for number in range(2):
                self.report_progress(number)
            self._settle()
        state = self.holdings.statistics()
        assert self.holdings.is_saved
        assert state.held_events == state.held_bytes == state.unsaved == 0
        assert state.credit_events * 4 >= MAX_EVENTS * 3 - 4

    def _settle(self) -> bool:
        """Do one round of all pending work. Return whether nothing was left to do."""
        for link in self.links:
            while link.outbox:
                self._receive(link)
        before = self.holdings.statistics()
        self._forget_taken_back()
        while self.holdings.waiting or self.hands:
            self.take()
            while self.hands:
                self._acknowledge(self.hands[0])
        self.holdings.take()
        for number, link in enumerate(self.links):
            while self.holdings_reports(number):
                pass
            while link.inbox:
                self._apply(link)
        self.send_again()
        for queue in self.queues:
            queue.waiting.clear()
            for stream in [stream for stream, parcel in queue.parcels.items() if not parcel.mine]:
                queue.others_end(stream, done=True)
        for stream in self._ready():
            self._hand_out(stream, 15)
        return not any(link.outbox for link in self.links) and self.holdings.statistics() == before


ConsumerAndSilos.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
TestConsumerAndSilos = ConsumerAndSilos.TestCase


def test_a_rejection_gives_back_what_an_earlier_parcel_left() -> None:
    """The silo takes two events back and hands out only the first again, which the user rejects: the second comes after
    it."""
    model, stream = ConsumerAndSilos(), STREAMS[0]
    model.publish(sizes=[0], stream=stream)
    model.publish(sizes=[0], stream=stream)
    model.talk(kept=2, most=2)
    model.take_back(number=0)
    model.talk(kept=0, most=1)
    model.take()
    model.reject_a_batch(which=0)
    model.the_account_is_right()
    assert model.holdings.take() is None
    model.teardown()


def test_an_acknowledgement_covers_events_that_are_acknowledged_again_with_later_ones() -> None:
    """The silo takes the first of two events back while the user has it, and delivers both. The user acknowledges the
    first, and then both, before anything is sent."""
    model = ConsumerAndSilos()
    model.publish(sizes=[0, 0], stream=STREAMS[0])
    model.talk(kept=0, most=1)
    model.take()
    model.take_back(number=0)
    model.hand_out_more(which=0, most=2)
    model.acknowledge_a_batch(which=0)
    model.receive(number=0)
    model.take()
    model.acknowledge_a_batch(which=0)
    model.the_account_is_right()
    model.teardown()
