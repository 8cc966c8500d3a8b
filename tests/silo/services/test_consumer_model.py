"""10,000 events, consumers that acknowledge, reject and disconnect at random, and a model of the expected deliveries.

The consumers know no more than the protocol, and the silo is a real one, over gRPC. MODEL_SEED repeats a run.
"""

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1 import events_pb2, subscriptions_pb2
from tests.random_examples import examples
from tests.serving import by_one_and_two_silos, serving
from tests.silo.services.calling import SUBSCRIPTIONS, Caller, Refused, batch, connecting, opened
from tests.silo.services.sessions import (
    PATIENCE_S,
    Got,
    Session,
    acknowledgement,
    begin,
    consuming,
    defined,
    rejection,
    report,
)

__all__ = ("serving",)
pytest_generate_tests = by_one_and_two_silos

SEED = int(os.environ.get("MODEL_SEED", str(random.randrange(1 << 32))))
STREAMS = 25
LONG_MS = 600_000
"""No consumer is given up in these tests."""
FOREVER = subscriptions_pb2.RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9)


class Model:
    """The events that are done, and those that may come next. Events are numbered in each stream."""

    def __init__(self) -> None:
        self.published: dict[str, int] = defaultdict(int)
        self._done: dict[str, set[int]] = defaultdict(set)
        self._maybe: dict[str, set[int]] = defaultdict(set)
        """Acknowledged over a connection that broke then: done, or to come again."""
        self._low: dict[str, int] = defaultdict(int)
        """Everything below is done."""
        self._holders: dict[tuple[str, int], str] = {}

    def comes(self, consumer: str, stream: str, number: int, in_hand: Iterable[int]) -> None:
        """An event is delivered to a consumer that has others of the stream in hand."""
        event = f"{stream} {number} to {consumer}"
        if number in self._maybe[stream]:
            self._maybe[stream].remove(number)
            self._done[stream].discard(number)
            self._low[stream] = min(self._low[stream], number)
        assert number not in self._done[stream], f"{event}: it was acknowledged"
        assert self._holders.get((stream, number), consumer) == consumer, f"{event}: another has it"
        before = {each for each in range(self._low[stream], number) if each not in self._done[stream]}
        assert before <= set(in_hand), f"{event}: it overtook {before - set(in_hand)}"
        self._holders[stream, number] = consumer

    def acknowledged(self, stream: str, numbers: Iterable[int]) -> None:
        done = self._done[stream]
        for number in numbers:
            done.add(number)
            self._holders.pop((stream, number), None)
        while self._low[stream] in done:
            self._low[stream] += 1

    def unsure(self, stream: str, numbers: Iterable[int]) -> None:
        """Whether the silo heard that they are acknowledged."""
        self._maybe[stream].update(numbers)

    def released(self, stream: str, numbers: Iterable[int]) -> None:
        """They may come to others."""
        for number in numbers:
            self._holders.pop((stream, number), None)

    def held_by(self, consumer: str) -> list[tuple[str, int]]:
        return [event for event, holder in self._holders.items() if holder == consumer]

    @property
    def left(self) -> int:
        return sum(count - len(self._done[stream]) for stream, count in self.published.items())


class _Unsaved(NamedTuple):
    """Acknowledgements that are not confirmed."""

    queue: int
    report: int
    stream: str
    numbers: list[int]


class Consumer:
    """Does anything that a consumer may do, at random."""

    def __init__(self, name: str, caller: Caller, model: Model, rng: random.Random) -> None:
        self.name = name
        self._caller = caller
        self._model = model
        self._random = rng
        self._in_hand: dict[str, dict[int, Got]] = defaultdict(dict)
        self._unsaved: list[_Unsaved] = []
        self._number = 0
        self._session: Session | None = None
        self._listening: asyncio.Task[None]
        self._news = asyncio.Event()
        self.comebacks = self.rejections = self.releases = 0

    async def run(self) -> None:
        actions = (
            (self._acknowledge, 50), (self._acknowledge_up_to, 10), (self._acknowledge_rest, 10), (self._reject, 5),
            (self._release, 5), (self._break, 2), (self._break_when_saved, 1), (self._take_over, 1), (self._leave, 1),
        )  # fmt: skip
        kinds, weights = zip(*actions, strict=True)
        while self._model.left:
            if self._session is None:
                await self._connect()
            await self._hear()
            await self._random.choices(kinds, weights)[0]()
        await self._leave()

    async def clear_up(self, until: asyncio.Future[None]) -> None:
        """Acknowledge the events that may still come."""
        await self._connect()
        while not until.done():
            await self._hear()
            await self._acknowledge()
        await self._leave()

    # ---- the connection --------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        session = await begin(self._caller, "s", consumer=self.name, session_timeout_ms=LONG_MS)
        self._session, self._listening = session, asyncio.create_task(self._listen(session))
        self._in_hand.clear()
        await session.grant(500, 1 << 20)

    async def _listen(self, session: Session) -> None:
        while await session.read() is not None:
            self._news.set()

    def _lost(self) -> None:
        for each in self._unsaved:
            self._model.unsure(each.stream, each.numbers)
        self._unsaved.clear()
        self._session = None
        self.comebacks += 1

    async def _break(self) -> None:
        self._here.cancel()
        await asyncio.wait([self._listening])
        self._lost()

    async def _break_when_saved(self) -> None:
        """Then exactly the unacknowledged events come again."""
        async with asyncio.timeout(PATIENCE_S):
            while self._forget_saved():
                await self._news.wait()
                self._news.clear()
        self._take_in()
        await self._break()

    async def _take_over(self) -> None:
        before = self._listening
        self._lost()
        await self._connect()
        with pytest.raises(Refused, match="ABORTED"):
            await before

    async def _leave(self) -> None:
        if self._session is None:
            return
        self._take_in()
        for stream, number in self._model.held_by(self.name):
            self._model.released(stream, [number])
        await self._here.say(close=True)
        await self._listening  # what still comes is not looked at
        self._unsaved.clear()
        self._session = None
        self.comebacks += 1

    @property
    def _here(self) -> Session:
        assert self._session is not None
        return self._session

    # ---- deliveries ------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Take the events that have come. If none is in hand, wait a little."""
        await asyncio.sleep(0)
        if not any(self._in_hand.values()):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await self._news.wait()
        self._news.clear()
        self._take_in()

    def _take_in(self) -> None:
        session = self._here
        assert not session.refused
        events, session.events = session.events, []
        for event in events:
            held, number = self._in_hand[event.stream], int(event.payload)
            assert number not in held, f"{event} came twice"
            self._model.comes(self.name, event.stream, number, held)
            held[number] = event
        self._forget_saved()

    def _forget_saved(self) -> bool:
        """Return whether acknowledgements are left that are not confirmed."""
        self._unsaved = [each for each in self._unsaved if not self._here.is_saved(each.report, [each.queue])]
        return bool(self._unsaved)

    # ---- its requests ----------------------------------------------------------------------------------------------

    def _some_stream(self) -> str | None:
        return self._random.choice([stream for stream, held in self._in_hand.items() if held] or [None])

    async def _acknowledge(self) -> None:
        """Some events of a stream, each by itself."""
        if (stream := self._some_stream()) is None:
            return
        held = self._in_hand[stream]
        numbers = self._random.sample(sorted(held), self._random.randint(1, len(held)))
        await self._say_done(stream, numbers, [acknowledgement(held[number], count=1) for number in numbers])

    async def _acknowledge_up_to(self) -> None:
        if (stream := self._some_stream()) is None:
            return
        held = self._in_hand[stream]
        last = self._random.choice(sorted(held))
        numbers = [number for number in held if number <= last]
        await self._say_done(stream, numbers, [acknowledgement(held[last], count=1, up_to=True)])

    async def _acknowledge_rest(self) -> None:
        """All of one batch."""
        if (stream := self._some_stream()) is None:
            return
        held = self._in_hand[stream]
        offset = self._random.choice(list(held.values())).offset
        numbers = [number for number, event in held.items() if event.offset == offset]
        first = held[min(numbers)]
        await self._say_done(stream, numbers, [acknowledgement(first)])

    async def _say_done(self, stream: str, numbers: list[int], said: list[pb.Acknowledgement]) -> None:
        self._number += 1
        event = self._in_hand[stream][numbers[0]]
        self._model.acknowledged(stream, numbers)
        self._unsaved.append(_Unsaved(event.queue, self._number, stream, numbers))
        for number in numbers:
            del self._in_hand[stream][number]
        await self._say(report(event, number=self._number, acknowledgements=said), len(numbers))

    async def _reject(self) -> None:
        if (given_back := self._give_back()) is not None:
            first, count = given_back
            self.rejections += 1
            await self._say(report(first, rejections=[rejection(first, count=1, delay_ms=0)]), count)

    async def _release(self) -> None:
        if (given_back := self._give_back()) is not None:
            first, count = given_back
            self.releases += 1
            await self._say(report(first, released=[pb.Released(offset=first.offset, index=first.index)]), count)

    def _give_back(self) -> tuple[Got, int] | None:
        """Give back some event of a stream, with those that follow it. Return it, and their number."""
        if (stream := self._some_stream()) is None:
            return None
        held = self._in_hand[stream]
        first = held[self._random.choice(sorted(held))]
        back = [number for number in held if number >= int(first.payload)]
        self._model.released(stream, back)
        for number in back:
            del held[number]
        return first, len(back)

    async def _say(self, said: pb.QueueReport, events: int) -> None:
        await self._here.say(reports=[said], credit=pb.Credit(events=events, bytes=1000 * events))


async def publish(caller: Caller, model: Model, rng: random.Random, count: int) -> None:
    left = count
    while left:
        batches = list[events_pb2.EventBatch]()
        for _ in range(min(rng.randint(1, 20), left)):
            stream = f"n/{rng.randrange(STREAMS)}"
            size = min(rng.choice((1, 1, 2, 5, 20)), left)
            first = model.published[stream]
            batches.append(batch(stream, *(b"%d" % number for number in range(first, first + size))))
            model.published[stream] += size
            left -= size
            if not left:
                break
        await caller.publish(*batches)


async def caught_up_with(caller: Caller) -> None:
    request = subscriptions_pb2.AwaitCaughtUpRequest(name="s")
    kind = subscriptions_pb2.AwaitCaughtUpResponse
    await caller.ask(f"{SUBSCRIPTIONS}/AwaitCaughtUp", request, kind, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("mode", "count"), [("MODE_SHARED", examples(10_000, quick=3_000)), ("MODE_BOUND", examples(3_000, quick=1_500))]
)
async def test_exactly_the_unacknowledged_events_come_again(tmp_path: Path, mode: str, count: int) -> None:
    print(f"MODEL_SEED={SEED}")
    rng = random.Random(SEED)
    model = Model()
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        definition = defined("s", mode=subscriptions_pb2.Mode.Value(mode), retry=FOREVER)
        async with consuming(caller, definition=definition, consumer="first"):
            pass
        consumers = [Consumer(name, caller, model, random.Random(rng.random())) for name in "abc"]
        await publish(caller, model, rng, count // 2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish(caller, model, rng, count // 2))
            for consumer in consumers:
                tasks.create_task(consumer.run())
        assert sum(model.published.values()) == count
        assert sum(consumer.comebacks for consumer in consumers) > 2 * len(consumers)  # and not only at the end
        assert sum(consumer.rejections for consumer in consumers) > 0
        assert sum(consumer.releases for consumer in consumers) > 0
        caught_up = asyncio.ensure_future(caught_up_with(caller))
        await Consumer("last", caller, model, rng).clear_up(caught_up)
        await caught_up
        assert not model.left
    async with opened(tmp_path / "data") as silo, connecting(silo.grpc_address or "") as caller:
        async with consuming(caller, "s") as session:
            await caller.publish(batch("n/0", b"new"))
            assert [event.payload for event in await session.take(1)] == [b"new"]
