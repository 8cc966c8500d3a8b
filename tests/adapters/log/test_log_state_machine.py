"""The log adapter against a model: per queue, a list of the published batches."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeVar, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import EventBatch, SequenceConflict, SequenceToken, StreamId
from headrace.adapters import AdapterContext, Bounds, ProducerSequence, Receipt, open_adapter
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.receiver import LogReceiver
from tests.random_examples import examples

QUEUES = 2
OPTIONS = {"retain_bytes": 3000, "group_bytes": 2000, "map_bytes": 64 << 20}
ANY = 1 << 30
T = TypeVar("T")

queues = st.integers(0, QUEUES - 1)
events = st.lists(st.binary(max_size=200), min_size=1, max_size=4)
calls = st.lists(st.tuples(queues, st.sampled_from("abc"), events), min_size=1, max_size=4)


class Reading:
    """A receiver, and where the model says that it stands."""

    def __init__(self, adapter: LogAdapter, receiver: LogReceiver, queue: int, position: int) -> None:
        self.adapter = adapter
        self.receiver = receiver
        self.queue = queue
        self.position = position

    async def read_until(self, end: Callable[[], int], accepts: Sequence[bool]) -> list[EventBatch]:
        """Receive up to the offset `end`, and accept every offer for which `accepts` has True, in turn."""
        found: list[EventBatch] = []
        answers = cycle(accepts)

        def accept(batches: Sequence[EventBatch]) -> bool:
            assert batches[0].offset == self.position
            if next(answers):
                found.extend(batches)
                self.position = batches[-1].offset + 1
                return True
            return False

        async def receive() -> None:
            while True:
                received = await self.receiver.receive(ANY, ANY)
                found.extend(received.batches)
                self.position = received.next_offset

        self.receiver.offer_to(accept)
        receiving = asyncio.create_task(receive())
        async with asyncio.timeout(30):
            while self.position < end() and not receiving.done():  # noqa: ASYNC110 (both may change at any turn)
                await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        if not receiving.cancelled():
            receiving.result()
        self.receiver.offer_to(lambda _: False)
        return found


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.stored: list[list[EventBatch]] = [[] for _ in range(QUEUES)]
        self.first = [0] * QUEUES
        self.acknowledged = [0] * QUEUES
        self.last_number = 0
        self.last_receipts: list[Receipt] = []
        self.handles: list[LogAdapter] = []
        self.readings: list[Reading] = []
        self.publishing = False

    def run(self, awaited: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaited

        return self.runner.run(wait())

    async def open(self) -> LogAdapter:
        context = AdapterContext(provider="tests", queues=QUEUES, directory=self.directory)
        return cast(LogAdapter, await open_adapter("log", context, OPTIONS))

    def handle(self, number: int) -> LogAdapter:
        return self.handles[number % len(self.handles)]

    def end(self, queue: int) -> int:
        return len(self.stored[queue])

    def store(self, batches: Sequence[tuple[int, EventBatch]]) -> list[Receipt]:
        receipts: list[Receipt] = []
        for queue, batch in batches:
            receipts.append(Receipt(SequenceToken(self.end(queue))))
            self.stored[queue].append(batch)
        return receipts

    @initialize()
    def open_two_handles(self) -> None:
        self.handles = [self.run(self.open()), self.run(self.open())]
        for adapter in self.handles:
            for queue in range(QUEUES):
                self.readings.append(Reading(adapter, self.run(adapter.open_receiver(queue, 0)), queue, 0))

    @rule(number=st.integers(0, 1), published=st.lists(calls, min_size=1, max_size=3))
    def publish(self, number: int, published: list[list[tuple[int, str, list[bytes]]]]) -> None:
        """Several calls at once."""
        adapter = self.handle(number)
        made = [[(queue, EventBatch.of(StreamId("m", key), data)) for queue, key, data in call] for call in published]

        async def publish_all() -> list[Sequence[Receipt]]:
            return await asyncio.gather(*[adapter.enqueue(batches) for batches in made])

        assert self.run(publish_all()) == [self.store(batches) for batches in made]

    @rule(
        published=st.lists(st.tuples(st.integers(0, 1), calls), min_size=1, max_size=8),
        accepts=st.lists(st.booleans(), min_size=1),
    )
    def publish_by_both_handles_to_waiting_receivers(
        self, published: list[tuple[int, list[tuple[int, str, list[bytes]]]]], accepts: list[bool]
    ) -> None:
        """The commits of the handles interleave; offers are accepted or not."""
        made = [
            (number, [(queue, EventBatch.of(StreamId("m", key), data)) for queue, key, data in call])
            for number, call in published
        ]
        readings = [reading for reading in self.readings if reading.position == self.end(reading.queue)]
        starts = [reading.position for reading in readings]

        async def publish() -> None:
            calls = [asyncio.ensure_future(self.handle(number).enqueue(batches)) for number, batches in made]
            placed = [
                (receipt.token, queue, batch)
                for (_, batches), call in zip(made, calls, strict=True)
                for (queue, batch), receipt in zip(batches, await call, strict=True)
            ]
            for token, queue, batch in sorted(placed, key=lambda each: each[0] or SequenceToken(-1)):
                assert token == (self.end(queue), 0)
                self.stored[queue].append(batch)
            self.publishing = False

        async def read_and_publish() -> list[list[EventBatch]]:
            self.publishing = True
            ends = [lambda queue=reading.queue: 1 << 30 if self.publishing else self.end(queue) for reading in readings]
            reads = [
                asyncio.create_task(reading.read_until(end, accepts))
                for reading, end in zip(readings, ends, strict=True)
            ]
            await asyncio.sleep(0)
            await publish()
            return [await read for read in reads]

        for reading, start, found in zip(readings, starts, self.run(read_and_publish()), strict=True):
            expected = self.stored[reading.queue][start:]
            assert [(b.stream, b.encoded, b.count) for b in found] == [(b.stream, b.encoded, b.count) for b in expected]
            assert [b.offset for b in found] == list(range(start, reading.position))

    @rule(number=st.integers(0, 1), step=st.integers(-2, 2), hole=st.booleans(), call=calls)
    def publish_as_a_producer(
        self, number: int, step: int, hole: bool, call: list[tuple[int, str, list[bytes]]]
    ) -> None:
        batches = [(queue, EventBatch.of(StreamId("m", key), data)) for queue, key, data in call]
        value = max(self.last_number + step, 1)
        previous = value - 1 if hole else min(self.last_number, value - 1)

        async def enqueue() -> Sequence[Receipt]:
            return await self.handle(number).enqueue(batches, sequence=ProducerSequence("p", value, previous))

        if value > self.last_number and previous != self.last_number:
            try:
                self.run(enqueue())
            except SequenceConflict:
                return
            raise AssertionError("a hole was stored")
        found = list(self.run(enqueue()))
        if value > self.last_number:
            self.last_number, self.last_receipts = value, self.store(batches)
            assert found == self.last_receipts
        elif value == self.last_number and len(batches) == len(self.last_receipts):
            assert found == [Receipt(receipt.token, duplicate=True) for receipt in self.last_receipts]
        else:
            assert found == [Receipt(None, duplicate=True)] * len(batches)

    @rule(number=st.integers(0, 1), queue=queues, back=st.none() | st.integers(0))
    def open_receiver(self, number: int, queue: int, back: int | None) -> None:
        adapter = self.handle(number)
        start = None if back is None else self.end(queue) - back % (self.end(queue) + 1)
        position = self.acknowledged[queue] if start is None else start
        self.readings.append(Reading(adapter, self.run(adapter.open_receiver(queue, start)), queue, position))

    @rule(limits=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 2000)), min_size=1))
    def receive(self, limits: list[tuple[int, int]]) -> None:
        """Every receiver that is behind, with the limits in turn."""
        for number, reading in enumerate(self.readings):
            if reading.position < self.end(reading.queue):
                self.receive_once(reading, *limits[number % len(limits)])

    def receive_once(self, reading: Reading, max_events: int, max_bytes: int) -> None:
        received = self.run(reading.receiver.receive(max_events, max_bytes))
        first = self.first[reading.queue]
        if reading.position < first:
            assert received.gap is not None
            assert received[:2] == ((), first)
            assert received.gap[:2] == (reading.position, first)
        else:
            self.check_received(reading, received.batches, max_events, max_bytes)
        reading.position = received.next_offset

    def check_received(self, reading: Reading, found: Sequence[EventBatch], max_events: int, max_bytes: int) -> None:
        expected: list[EventBatch] = []
        for batch in self.stored[reading.queue][reading.position :]:
            expected.append(batch)
            if sum(b.count for b in expected) >= max_events or sum(b.nbytes for b in expected) >= max_bytes:
                break
        assert [(b.stream, b.encoded, b.count) for b in found] == [(b.stream, b.encoded, b.count) for b in expected]
        assert [b.offset for b in found] == list(range(reading.position, reading.position + len(found)))

    @precondition(lambda self: any(reading.position for reading in self.readings))
    @rule(number=st.integers(0), back=st.integers(0, 3))
    def acknowledge(self, number: int, back: int) -> None:
        begun = [reading for reading in self.readings if reading.position]
        reading = begun[number % len(begun)]
        offset = max(reading.position - back, 0)
        self.run(reading.receiver.acknowledge(offset))
        self.acknowledged[reading.queue] = max(offset, self.acknowledged[reading.queue])

    @rule(number=st.integers(0, 1), behind=st.none() | st.integers(0, 10))
    def apply_retention(self, number: int, behind: int | None) -> None:
        """Whole blocks go, oldest first; which ones, only the log knows."""
        adapter = self.handle(number)
        marks = {} if behind is None else {queue: max(self.end(queue) - behind, 0) for queue in range(QUEUES)}
        self.run(adapter.apply_retention(marks))
        for queue in range(QUEUES):
            found = self.run(adapter.statistics(queue))
            assert self.first[queue] <= found.bounds.first <= self.end(queue)
            assert found.bytes is not None
            if found.bounds.first > self.first[queue]:
                assert found.bounds.first <= max(marks.get(queue, self.end(queue)), self.first[queue])
            if not marks:
                assert found.bytes <= OPTIONS["retain_bytes"]
            self.first[queue] = found.bounds.first

    @rule(number=st.integers(0, 1))
    def reopen(self, number: int) -> None:
        """Readers begin again where they were."""
        closed = self.handles.pop(number)
        self.run(closed.aclose())
        adapter = self.run(self.open())
        self.handles.append(adapter)
        for reading in self.readings:
            if reading.adapter is closed:
                reading.adapter = adapter
                reading.receiver = self.run(adapter.open_receiver(reading.queue, reading.position))

    @invariant()
    def bounds_and_counts_agree(self) -> None:
        for adapter in self.handles[:1]:
            for queue in range(QUEUES):
                found = self.run(adapter.statistics(queue))
                assert found.bounds == Bounds(self.first[queue], self.end(queue))
                assert found.events == sum(batch.count for batch in self.stored[queue][self.first[queue] :])

    def teardown(self) -> None:
        for adapter in self.handles:
            self.run(adapter.aclose())
        self.runner.close()
        shutil.rmtree(self.directory)


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
