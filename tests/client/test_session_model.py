"""A consumer's account against a model of the silo, step by step, with connections lost at any moment."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import StreamId
from headrace.client.received import ReceivedBatch
from headrace.client.session import NOTICES, Session
from headrace.streams.frames import split
from tests.random_examples import examples

from .model_silo import ModelSilo, Position, Response

STREAMS = [StreamId("orders", key) for key in "abc"]
INDEX = st.integers(0, 1000)
MAX_EVENTS, MAX_BYTES = 12, 1500


class Hand:
    """A batch that the user of the model holds, with the events that can still be acknowledged."""

    def __init__(self, batch: ReceivedBatch) -> None:
        self.batch = batch
        events = batch.events()
        assert [event.payload for event in events] == batch.payloads()
        self.open: list[Position] = [event.token for event in events if event.token is not None]
        self.redriven = batch.redriven
        self.arrival = batch.arrival


class ConsumerAndSilo(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.silo = ModelSilo()
        self.session = Session(MAX_EVENTS, MAX_BYTES)
        self.hands: list[Hand] = []
        self.acked: set[Position] = set()
        self.ever_acked: set[Position] = set()
        self.moves = 0
        self.lost = False
        self.notices = 0

    @initialize(strict=st.booleans())
    def begin(self, strict: bool) -> None:
        self.silo.strict = strict

    # ---- the silo --------------------------------------------------------------------------------------------------

    @rule(stream=st.sampled_from(STREAMS), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6))
    def publish(self, stream: StreamId, sizes: list[int]) -> None:
        self.silo.publish(stream, sizes)

    @precondition(lambda self: self.silo.connected and self.silo.ready())
    @rule(which=INDEX, most=st.integers(1, 15))
    def hand_out_more(self, which: int, most: int) -> None:
        ready = self.silo.ready()
        stream = ready[which % len(ready)]
        if not self.silo.hand_out(stream, most):
            self.silo.outbox.append(Response(caught_up=False, needed_bytes=self.silo.needed_bytes(stream)))

    @precondition(lambda self: self.silo.connected and self.silo.dead)
    @rule(which=INDEX)
    def redrive(self, which: int) -> None:
        dead = sorted(self.silo.dead)
        self.silo.redrive(dead[which % len(dead)])

    @precondition(lambda self: self.silo.inbox)
    @rule()
    def apply_a_request(self) -> None:
        self.silo.apply()

    @rule()
    def save(self) -> None:
        self.silo.save()

    @precondition(lambda self: self.silo.connected)
    @rule()
    def tell_progress(self) -> None:
        self.silo.outbox.append(Response(caught_up=self.silo.caught_up))

    @precondition(lambda self: self.silo.waiting)
    @rule(which=INDEX)
    def a_retry_is_due(self, which: int) -> None:
        waiting = sorted(self.silo.waiting)
        self.silo.waiting.discard(waiting[which % len(waiting)])

    @precondition(lambda self: self.silo.ready())
    @rule(which=INDEX)
    def another_consumer_takes(self, which: int) -> None:
        ready = self.silo.ready()
        self.silo.others_take(ready[which % len(ready)])

    @precondition(lambda self: not all(parcel.mine for parcel in self.silo.parcels.values()))
    @rule(which=INDEX, done=st.booleans())
    def another_consumer_ends(self, which: int, done: bool) -> None:
        theirs = sorted(stream for stream, parcel in self.silo.parcels.items() if not parcel.mine)
        self.silo.others_end(theirs[which % len(theirs)], done=done)

    @rule()
    def seek(self) -> None:
        self.silo.seek()

    # ---- the connection --------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.silo.connected)
    @rule()
    def connect(self) -> None:
        self.silo.open(self.session.open())
        self.notices = 0

    @precondition(lambda self: self.silo.connected)
    @rule()
    def send(self) -> None:
        request = self.session.request()
        if request is not None:
            self.silo.inbox.append(request)

    @precondition(lambda self: self.silo.outbox)
    @rule()
    def receive(self) -> None:
        response = self.silo.outbox.popleft()
        delivered, rest = split(response.frames)
        assert not rest
        if delivered:
            self.session.receive(delivered, len(response.frames))
        if response.resumed is not None:
            self.session.opened(resumed=response.resumed, moves=response.moves)
        elif response.moves:
            self.session.moved(response.moves)
        if response.moves != self.moves and (response.moves or response.resumed is not None):
            self.moves = response.moves
            self.acked.clear()
            self.hands = [hand for hand in self.hands if hand.redriven]
        self.session.refused(response.refused)
        self.session.saved(response.saved)
        self.notices += 1
        if response.caught_up is not None:
            self.session.progressed(response.needed_bytes, caught_up=response.caught_up)

    @rule(most=st.integers(1, 15), kept=st.integers(0, 2))
    def talk(self, most: int, kept: int) -> None:
        """Do all the usual steps at once; the last messages stay in flight."""
        if not self.silo.connected:
            self.connect()
        self.send()
        while self.silo.inbox:
            self.silo.apply()
        for stream in self.silo.ready():
            self.silo.hand_out(stream, most)
        while len(self.silo.outbox) > kept:
            self.receive()

    @rule(how=st.sampled_from(["connection", "connection", "expiry", "restart"]))
    def lose(self, how: str) -> None:
        """The connection is lost, by itself, for too long, or because the silo is killed and starts again."""
        if how == "restart":
            self.silo.restart()
        else:
            self.silo.drop_connection()
        self.session.lost()
        self.lost = True
        if how == "expiry":
            self.silo.expire()

    # ---- the user --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.session.waiting)
    @rule()
    def take(self) -> None:
        batch = self.session.take()
        if batch is None:
            return
        hand = Hand(batch)
        held = {position for each in self.hands for position in each.open}
        for position in hand.open:
            assert position not in self.acked, "handed out although it was acknowledged"
            assert position not in held, "handed out twice"
            if not hand.redriven and self.moves == self.silo.moves:  # else the news of a move is on its way
                self._comes_in_order(batch.stream, position, held | set(hand.open))
        self.hands.append(hand)

    def _comes_in_order(self, stream: StreamId, position: Position, held: set[Position]) -> None:
        silo = self.silo
        for before in silo.streams[stream]:
            if before < position:
                over = before in silo.done or before in silo.dead or before in self.acked
                assert over or before in held, f"{position} overtakes {before}"

    def _hand(self, which: int) -> Hand:
        return self.hands[which % len(self.hands)]

    def _done(self, hand: Hand, positions: Iterable[Position]) -> None:
        self.acked.update(positions)
        self.ever_acked.update(positions)
        hand.open = [position for position in hand.open if position not in self.acked]
        if not hand.open:
            self.hands.remove(hand)

    @precondition(lambda self: self.hands)
    @rule(which=INDEX)
    def acknowledge_a_batch(self, which: int) -> None:
        hand = self._hand(which)
        hand.batch.ack()
        self._done(hand, list(hand.open))

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def acknowledge_an_event(self, which: int, event: int) -> None:
        hand = self._hand(which)
        events = hand.batch.events()
        chosen = events[event % len(events)]
        assert chosen.token is not None
        hand.batch.ack(chosen)
        if chosen.token in hand.open:
            self._done(hand, [chosen.token])

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def acknowledge_until_an_event(self, which: int, event: int) -> None:
        hand = self._hand(which)
        chosen = hand.open[event % len(hand.open)]
        hand.batch.ack_until(next(e for e in hand.batch.events() if e.token == chosen))
        for each in [each for each in self.hands if each.batch.stream == hand.batch.stream]:
            if each is hand or each.batch.token < hand.batch.token:
                self._done(each, [position for position in each.open if position <= chosen])

    @precondition(lambda self: self.hands)
    @rule(which=INDEX)
    def reject_a_batch(self, which: int) -> None:
        hand = self._hand(which)
        hand.batch.nack("because")
        self._given_back(hand, hand.open[0])

    @precondition(lambda self: self.hands)
    @rule(which=INDEX, event=INDEX)
    def reject_an_event(self, which: int, event: int) -> None:
        hand = self._hand(which)
        chosen = hand.open[event % len(hand.open)]
        hand.batch.nack("because", event=next(e for e in hand.batch.events() if e.token == chosen))
        self._given_back(hand, chosen)

    def _given_back(self, hand: Hand, first: Position) -> None:
        """The batch from `first` on, and the later batches of its stream that came with it."""
        arrival, stream = hand.batch.arrival, hand.batch.stream
        for each in list(self.hands):
            together = each.batch.stream == stream and each.batch.arrival == arrival
            if each is hand or (together and not hand.redriven and not each.redriven):
                each.open = [position for position in each.open if position < first]
                if not each.open:
                    self.hands.remove(each)

    # ---- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_account_is_right(self) -> None:
        state = self.session.statistics()
        if not self.lost:  # else events that the user holds may come again in parts, and weigh more than those
            assert state.held_events + state.credit_events <= self.session.max_events
            assert state.held_bytes + state.credit_bytes <= self.session.max_bytes + 36 * state.held_events
        assert self.silo.acknowledged <= self.ever_acked
        if self.session.saved_all and self.notices < NOTICES:
            theirs = {p for parcel in self.silo.parcels.values() if not parcel.mine for p in parcel.held}
            if self.moves == self.silo.moves:  # else the news of a move is on its way
                assert self.acked <= self.silo.saved_done | self.silo.dead | theirs
        if self.silo.connected:
            granted = self.silo.credit_events + sum(request.credit_events for request in self.silo.inbox)
            coming = sum(d.batch.count for response in self.silo.outbox for d in split(response.frames)[0])
            assert state.credit_events == granted + coming
            size = self.silo.credit_bytes + sum(request.credit_bytes for request in self.silo.inbox)
            assert state.credit_bytes == size + sum(len(response.frames) for response in self.silo.outbox)

    def teardown(self) -> None:
        """Left in peace, everything is done or a dead letter, and the account is clear."""
        if not self.silo.connected:
            self.connect()
        for _ in range(10_000):
            if self._settle():
                break
        silo, state = self.silo, self.session.statistics()
        assert silo.caught_up, {stream: silo.left(stream) for stream in silo.streams}
        assert not self.session.waiting
        self.save()
        self._settle()
        self.tell_progress()
        self._settle()
        self.save()
        self._settle()
        assert self.session.saved_all
        assert state.held_events == 0
        assert state.credit_events * 4 >= MAX_EVENTS * 3 - 4

    def _settle(self) -> bool:
        """Do one round of all pending work. Return whether nothing was left to do."""
        silo = self.silo
        while silo.outbox:
            self.receive()
        before = self.session.statistics()
        while self.session.waiting or self.hands:
            self.take()
            while self.hands:
                self.acknowledge_a_batch(0)
        self.session.take()
        self.send()
        while silo.inbox:
            silo.apply()
        silo.waiting.clear()
        for stream in [stream for stream, parcel in silo.parcels.items() if not parcel.mine]:
            silo.others_end(stream, done=True)
        for stream in silo.ready():
            if not silo.hand_out(stream, 15):
                silo.outbox.append(Response(caught_up=False, needed_bytes=silo.needed_bytes(stream)))
        return not silo.outbox and self.session.statistics() == before


ConsumerAndSilo.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
TestConsumerAndSilo = ConsumerAndSilo.TestCase
