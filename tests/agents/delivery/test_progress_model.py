"""The progress of a delivery against a list of events, of which each is done or not."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import CorruptRecord, EventBatch, SequenceToken, StreamId
from headrace.agents import QueueCache
from headrace.agents.cursor import PARKED, RUNNING, CursorState, StreamCursor
from headrace.agents.delivery import offered_streams, oldest_offsets, progress
from headrace.agents.delivery.progress import DeliveryProgress
from headrace.agents.delivery.retries import Failure
from headrace.streams.subscriptions import Checkpoint
from tests.random_examples import examples

STREAMS = [StreamId("s", key) for key in "abc"]
OTHER = StreamId("s", "other")


class Reader:
    """A feed without I/O."""

    caught_up = True

    def __init__(self, start: int) -> None:
        self.cache = QueueCache(30, 1 << 30)
        self.cache.next_offset = start
        self.cache.on_unpinned = self.purge
        self.damage: CorruptRecord | None = None
        self.finished = False

    def purge(self) -> None:
        self.cache.purge()

    @contextmanager
    def nothing_goes(self) -> Generator[None]:
        """As a feed does: keep all batches in the cache while they are offered."""
        self.cache.on_unpinned = lambda: None
        try:
            yield
        finally:
            self.cache.on_unpinned = self.purge
            self.purge()

    def all_seen(self) -> None: ...


class Deliveries(RuleBasedStateMachine):
    """Events are published, taken, finished in any order, put back, given up on and read again."""

    @initialize(rewindable=st.booleans(), look_ahead=st.integers(1, 3))
    def start(self, rewindable: bool, look_ahead: int) -> None:
        self.rewindable = rewindable
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(offered_streams, "LOOK_AHEAD", look_ahead)
        self.patch.setattr(progress, "LOOK_AHEAD", look_ahead)
        for module in (offered_streams, oldest_offsets):
            self.patch.setattr(module, "SCANNED", 1)
        self.log: list[EventBatch] = []
        self.done: set[tuple[StreamId, int, int]] = set()
        self.paused: set[StreamId] = set()
        self.open(Checkpoint(0))

    def open(self, checkpoint: Checkpoint) -> None:
        self.progress = DeliveryProgress(checkpoint, lambda stream: stream != OTHER, rewindable=self.rewindable)
        self.asked: list[StreamCursor] = []
        self.progress.on_parked = self.asked.append
        self.main = Reader(len(self.log) if self.rewindable else checkpoint.watermark)
        self.hands: list[StreamCursor] = []
        self.waiting: list[StreamCursor] = []
        self.seen = self.progress.changes, self.progress.position, self.progress.checkpoint()
        self.come_to_main()
        self.read()
        self.serve()

    # ---- the model -------------------------------------------------------------------------------------------------

    def undone(self, stream: StreamId) -> list[tuple[int, int]]:
        events = [(b.offset, index) for b in self.log if b.stream == stream for index in range(b.count)]
        return [event for event in events if (stream, *event) not in self.done]

    def finish_events(self, cursor: StreamCursor, offset: int, first: int, end: int) -> None:
        self.done |= {(cursor.stream, offset, index) for index in range(first, end)}

    # ---- feeds -----------------------------------------------------------------------------------------------------

    def read(self, to: int | None = None) -> None:
        """The main feed reads the queue up to this offset; None: to the end."""
        first, end = self.main.cache.next_offset, len(self.log) if to is None else to
        with self.main.nothing_goes():
            self.progress.offer(self.main, self.main.cache.add(self.log[first:end], end))
        self.progress.read_on(self.main)
        if end == len(self.log) and self.progress.unseen is None:
            for cursor in self.progress.cursors.values():
                waits = cursor.state is CursorState.PARKED and cursor.feed is self.main
                assert not waits or self.undone(cursor.stream), "nothing is left there"

    @rule(data=st.data())
    def read_some(self, data: st.DataObject) -> None:
        self.read(data.draw(st.integers(self.main.cache.next_offset, len(self.log))))

    def catch_up(self, start: int, *, whole: bool = False) -> None:
        """Another feed reads from `start` to the end, for parked cursors; if `whole`, for all streams."""
        reader = Reader(start)
        if whole:
            self.progress.join(reader)
        for cursor in self.progress.without_feed():
            if cursor.token.offset >= start:
                self.progress.await_batch(cursor, reader)
        for batch in self.log[start:]:
            with reader.nothing_goes():
                self.progress.offer(reader, reader.cache.add([batch]))
        self.progress.read_on(reader)
        reader.finished = True
        if not whole:
            self.progress.leave_parked(reader)
        if whole:
            self.progress.leave_feed()

    @rule()
    def serve(self) -> None:
        """Each parked cursor gets a feed."""
        self.asked.clear()
        main = self.main.cache
        for cursor in self.progress.without_feed():
            if cursor.token.offset >= main.first_offset:
                self.adopt(cursor)
        if behind := [cursor.token.offset for cursor in self.progress.without_feed()]:
            self.catch_up(min(behind))
        for cursor in self.progress.without_feed():
            if cursor.token.offset >= main.first_offset:
                self.adopt(cursor)

    def adopt(self, cursor: StreamCursor) -> None:
        self.progress.adopt(cursor, self.main)
        goes_on = cursor.state is not CursorState.PARKED or cursor.feed is self.main
        assert goes_on or cursor.stream not in self.progress.cursors

    @precondition(lambda self: self.rewindable)
    @rule(data=st.data())
    def start_main_feed_again(self, data: st.DataObject) -> None:
        """The main feed ends, and another one starts, also behind streams that were read further."""
        self.progress.leave_feed()
        self.leave_cache(self.main)
        self.main = Reader(data.draw(st.integers(self.progress.watermark, len(self.log))))
        self.come_to_main(read_by_another=data.draw(st.booleans()))
        self.read(data.draw(st.integers(self.main.cache.next_offset, len(self.log))))
        self.serve()

    def come_to_main(self, *, read_by_another: bool = False) -> None:
        """The delivery catches up, and joins the main feed, which starts again if the delivery has not come so far.
        `read_by_another`: another delivery has let the main feed read everything already."""
        if self.rewindable and self.progress.base < self.main.cache.first_offset:
            self.catch_up(self.progress.base, whole=True)
            if self.progress.base < self.main.cache.first_offset:
                self.leave_cache(self.main)
                self.main = Reader(self.progress.base)
        if read_by_another:
            self.main.cache.add(self.log[self.main.cache.next_offset :], len(self.log))
        with self.main.nothing_goes():
            self.progress.join(self.main)

    def leave_cache(self, feed: Reader) -> None:
        for cursor in list(self.progress.cursors.values()):
            if cursor.batch is not None and (cursor.feed is feed or cursor.is_in(feed.cache)):
                self.progress.detach(cursor)
        self.progress.leave_parked(feed)

    @rule(stream=st.sampled_from([*STREAMS, OTHER]), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def publish(self, stream: StreamId, counts: Sequence[int]) -> None:
        for count in counts:
            self.log.append(EventBatch(stream, b"", count, len(self.log)))

    @rule()
    def purge(self) -> None:
        self.main.cache.purge()

    @precondition(lambda self: self.rewindable)
    @rule(data=st.data())
    def lose_the_beginning(self, data: st.DataObject) -> None:
        """The queue drops batches that are behind in streams without a batch."""
        offset = data.draw(st.integers(0, self.progress.position))
        for cursor in self.progress.cursors.values():
            if cursor.batch is None:
                dropped = [(cursor.stream, *event) for event in self.undone(cursor.stream) if event[0] < offset]
                self.done.update(dropped)
        self.progress.skip(offset)
        self.read()  # A cursor whose events are lost stays until a feed has read past them.
        self.serve()

    @precondition(lambda self: self.rewindable)
    @rule()
    def part(self) -> None:
        """The main feed goes on without the delivery, and a catch-up reads the rest."""
        self.progress.part()
        self.come_to_main()
        self.read()
        self.serve()

    @precondition(lambda self: self.rewindable and self.progress.cursors)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        cursor = data.draw(st.sampled_from(list(self.progress.cursors.values())))
        self.progress.detach(cursor)

    # ---- events are taken ------------------------------------------------------------------------------------------

    @rule()
    def take(self) -> None:
        ready = any(c.state is CursorState.READY for c in self.progress.cursors.values())
        unseen = self.progress.unseen is not None
        cursor = self.progress.take()
        assert cursor is not None or not ready
        assert cursor is None or ready or unseen
        assert cursor is not None or self.progress.unseen is None, "looked at everything"
        if cursor is not None:
            assert cursor.stream not in {other.stream for other in self.hands}, "one at a time of each stream"
            assert cursor.token == self.undone(cursor.stream)[0], "in order, and without those that are done"
            self.hands.append(cursor)

    def pick(self, data: st.DataObject) -> StreamCursor:
        return self.hands[data.draw(st.integers(0, len(self.hands) - 1))]

    def let_go(self, data: st.DataObject) -> StreamCursor:
        return self.hands.pop(data.draw(st.integers(0, len(self.hands) - 1)))

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        self.progress.put_back(self.let_go(data))

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        cursor = self.let_go(data)
        assert cursor.batch is not None
        self.finish_events(cursor, cursor.batch.offset, cursor.index, cursor.batch.count)
        self.progress.finish(cursor)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Some of the first events are done."""
        cursor = self.pick(data)
        assert cursor.batch is not None
        if cursor.index + 1 < cursor.batch.count:
            index = data.draw(st.integers(cursor.index + 1, cursor.batch.count - 1))
            self.finish_events(cursor, cursor.batch.offset, cursor.index, index)
            self.progress.advance(cursor, index)
            if cursor.index == cursor.batch.count:
                self.hands.remove(cursor)
                self.progress.finish(cursor)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def finish_later_events(self, data: st.DataObject) -> None:
        """Events after the first one are done out of order, also those of later batches."""
        cursor = self.pick(data)
        later = [b for b in self.log if b.stream == cursor.stream and b.offset >= cursor.token.offset]
        batch = data.draw(st.sampled_from(later))
        first = data.draw(st.integers(0, batch.count - 1))
        end = data.draw(st.integers(first + 1, batch.count))
        if (batch.offset, first) > cursor.token:
            undone = sum((cursor.stream, batch.offset, index) not in self.done for index in range(first, end))
            assert self.progress.mark_done(cursor, batch.offset, first, end) == undone
            self.finish_events(cursor, batch.offset, first, end)

    # ---- failures --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        cursor = self.let_go(data)
        self.progress.wait(cursor)
        self.waiting.append(cursor)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        self.progress.resume(self.waiting.pop())

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def pass_over(self, data: st.DataObject) -> None:
        """Give up on some of the first events."""
        cursor = self.let_go(data)
        assert cursor.batch is not None
        end = data.draw(st.integers(cursor.index + 1, cursor.batch.count))
        self.finish_events(cursor, cursor.batch.offset, cursor.index, end)
        self.progress.pass_over(cursor, end)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def give_up_later(self, data: st.DataObject) -> None:
        """Its payload is gone: the event has to be read again first."""
        cursor = self.let_go(data)
        failure = Failure(cursor.index + 1, "poison")
        self.progress.detach(cursor)
        self.progress.defer(cursor, failure)
        self.serve()
        self.read()  # The main feed may have started again before the event.
        assert self.progress.take_deferred() == (cursor, failure)
        self.hands.append(cursor)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        cursor = self.let_go(data)
        self.progress.pause(cursor, "poison")
        self.paused.add(cursor.stream)

    @precondition(lambda self: self.paused)
    @rule()
    def unpause(self) -> None:
        assert self.progress.unpause(self.paused.pop())

    # ---- the process ends ------------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        checkpoint = self.progress.checkpoint()
        self.progress.end()
        assert self.progress.checkpoint() == checkpoint
        self.open(checkpoint)

    def teardown(self) -> None:
        """Everything is delivered in the end."""
        if hasattr(self, "progress"):
            try:
                self.deliver_the_rest()
            finally:
                self.patch.undo()

    def deliver_the_rest(self) -> None:
        while self.paused:
            self.unpause()
        while self.waiting:
            self.resume()
        for cursor in self.hands:
            self.progress.put_back(cursor)
        self.hands.clear()
        self.read()
        for _ in range(sum(batch.count for batch in self.log) + 1):
            self.serve()
            while (cursor := self.progress.take()) is not None:
                assert cursor.batch is not None
                assert cursor.token == self.undone(cursor.stream)[0]
                self.finish_events(cursor, cursor.batch.offset, cursor.index, cursor.batch.count)
                self.progress.finish(cursor)
        assert [stream for stream in STREAMS if self.undone(stream)] == []
        assert self.progress.reached(len(self.log))
        assert not self.progress.cursors
        assert self.progress.checkpoint() == Checkpoint(len(self.log))

    # ---- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def the_same_events_are_done(self) -> None:
        again = DeliveryProgress(self.progress.checkpoint())
        for batch in (batch for batch in self.log if batch.stream != OTHER):
            for index in range(batch.count):
                event = batch.stream, batch.offset, index
                assert self.progress.is_done(*event, index + 1) == (event in self.done)
                assert again.is_done(*event, index + 1) == (event in self.done), "the checkpoint says so, too"

    @invariant()
    def figures_for_people_are_those_of_all_cursors(self) -> None:
        progress = self.progress
        states = [cursor.state for cursor in progress.cursors.values()]
        assert progress.states.running == states.count(RUNNING)
        assert progress.states.waiting == states.count(CursorState.WAITING)
        assert progress.states.parked(len(states), len(progress.ready)) == states.count(PARKED)
        assert len(progress.states.paused) == states.count(CursorState.PAUSED)
        assert progress.shown_watermark == progress.watermark
        live = [c for c in progress.cursors.values() if c.state is not CursorState.PAUSED]
        assert progress.awaited == min([progress.position, *(progress.needed(c).offset for c in live)])

    @invariant()
    def nothing_that_is_needed_lies_below_the_watermark(self) -> None:
        needed = [self.undone(stream)[0] for stream in STREAMS if self.undone(stream)]
        assert self.progress.watermark <= min(needed, default=(len(self.log), 0))[0]
        live = [self.undone(stream)[0] for stream in STREAMS if self.undone(stream) and stream not in self.paused]
        assert self.progress.reached(len(self.log)) <= (not live)
        if self.progress.position == len(self.log) and not live and not self.something_is_read_again():
            assert self.progress.reached(len(self.log))
        for stream in STREAMS:
            cursor = self.progress.cursors.get(stream)
            if self.undone(stream) and (cursor is None or cursor.batch is None):
                assert self.progress.oldest_unread <= self.undone(stream)[0][0]

    def something_is_read_again(self) -> bool:
        for cursor in self.progress.cursors.values():
            waits = cursor.feed if cursor.state is CursorState.PARKED else None
            if cursor.batch is None and (waits is None or waits.cache.next_offset < len(self.log)):
                return True
        return False

    @invariant()
    def each_change_of_the_checkpoint_shows(self) -> None:
        """Otherwise it would not be saved."""
        seen = self.progress.changes, self.progress.position, self.progress.checkpoint()
        assert seen[:2] != self.seen[:2] or seen[2] == self.seen[2]
        self.seen = seen

    @invariant()
    def only_marks_that_count_are_kept(self) -> None:
        for cursor in self.progress.cursors.values():
            assert cursor.done is None or min(cursor.done) >= cursor.token.offset

    @invariant()
    def streams_that_are_not_selected_have_no_cursor(self) -> None:
        assert OTHER not in self.progress.cursors

    @invariant()
    def each_undone_event_has_a_cursor_that_comes_to_it(self) -> None:
        for stream in STREAMS:
            cursor = self.progress.cursors.get(stream)
            assert cursor is not None or all(offset >= self.progress.position for offset, _ in self.undone(stream))
            if cursor is not None and cursor.state is CursorState.PARKED and cursor.feed is None:
                assert cursor in self.asked, "the agent was asked for a feed"
            if cursor is not None and self.undone(stream):
                assert self.progress.needed(cursor) <= SequenceToken(*self.undone(stream)[0])


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(max_examples=examples(400, 60), stateful_step_count=40, deadline=None)
