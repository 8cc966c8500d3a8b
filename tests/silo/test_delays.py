"""A provider that stores delayed events: the option, the promise of a call, and a stop between any two steps."""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from headrace import Event, Provider, StreamId
from headrace.adapters import AdapterContext, ProducerSequence, QueueAdapter, Receipt, open_adapter
from headrace.silo.delays import HOLD_S, DelayingAdapter
from headrace.silo.lag_history import LagHistory
from headrace.silo.metric_snapshots import Snapshot, provider_snapshot
from headrace.silo.metrics import render
from headrace.store.control_store import ControlStore
from headrace.store.delays import DelayStore
from headrace.streams.errors import InvalidArgument, NotSupported, SequenceConflict, StorageError
from headrace.streams.events import EventBatch, ScheduledBatch
from tests.cli.commandline import Headrace
from tests.store.delay_places import Clock, add, place_of

STREAM = StreamId("orders", "42")
PATIENCE_S = 30


async def stored(adapter: QueueAdapter, queues: int = 1) -> list[str]:
    """Return the contents of the queues, in order, each queue after the other."""
    found: list[str] = []
    for queue in range(queues):
        receiver = await adapter.open_receiver(queue, 0)
        bounds = await adapter.bounds(queue)
        position = bounds.first
        while position < bounds.next:
            received = await receiver.receive(1000, 1 << 20)
            position = received.next_offset
            found += [payload.decode() for batch in received.batches for payload in batch.payloads()]
        await receiver.aclose()
    return found


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await happened():  # noqa: ASYNC110 (there is no notification)
            await asyncio.sleep(0.01)


# ---- the option ------------------------------------------------------------------------------------------------------


async def test_without_the_option_a_delay_is_refused_and_the_option_named(tmp_path: Path):
    async with Provider.open(tmp_path) as provider:
        with pytest.raises(NotSupported, match='delays = "store"'):
            await provider.stream(STREAM).publish([b"x", Event(b"y", delay=timedelta(1))])
        assert (await provider.adapter.bounds(provider.queue_of(STREAM))).next == 0


async def test_a_priority_is_refused_as_ever(tmp_path: Path):
    async with Provider.open(tmp_path, delays="store") as provider:
        with pytest.raises(NotSupported, match="priorities"):
            await provider.stream(STREAM).publish(b"x", delay=timedelta(1), priority=1)
        assert await provider.store.delay_store().backlogs("default") == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"delays": "somewhere"}, InvalidArgument, "delays is \"store\", or left out, not 'somewhere'"),
        ({"delays": "redis://me:secret@host"}, InvalidArgument, "or left out, not 'host'"),
        ({"delays": "store", "adapter": "generator"}, NotSupported, "idempotent producers"),
        ({"delays": "store", "adapter": "memory"}, NotSupported, "one process's own"),
    ],
)
async def test_impossible_options_are_refused_when_the_provider_is_opened(
    tmp_path: Path, options: Mapping[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        async with Provider.open(tmp_path, **options):
            pass


# ---- delays of a provider --------------------------------------------------------------------------------------------


async def test_a_delayed_call_after_one_that_is_still_on_its_way_is_stored_or_refused(tmp_path: Path):
    """The caller of the first call is cancelled, and the queue may store that call later. The second call must not
    count before: it would be confirmed and lost."""
    payloads = [b"%d" % number for number in range(20)]
    confirmed: list[bytes] = []
    received: list[bytes] = []

    async def handle(event: Event) -> None:
        received.append(event.payload)

    async with Provider.open(tmp_path, queues=1, delays="store") as provider:
        await provider.subscribe("s", "orders/*", handle, start="earliest")
        for number, payload in enumerate(payloads):
            first, second = (ProducerSequence(f"producer {number}", each, each - 1) for each in (1, 2))
            cancelled = asyncio.create_task(provider.publish_many([(STREAM, b"first")], sequence=first))
            await asyncio.sleep(0)
            cancelled.cancel()
            later = Event(payload, delay=timedelta(milliseconds=1))
            with suppress(SequenceConflict):
                await provider.publish_many([(STREAM, later)], sequence=second)
                confirmed.append(payload)
            if payload not in confirmed:  # as a client does when it has connected again
                await provider.publish_many([(STREAM, b"first")], sequence=first)
                await provider.publish_many([(STREAM, later)], sequence=second)
                confirmed.append(payload)
        await until(lambda: all_received(received, confirmed))
    assert sorted(received) == sorted([*payloads, *[b"first"] * len(payloads)])


async def all_received(received: Sequence[bytes], confirmed: Sequence[bytes]) -> bool:
    return set(confirmed) <= set(received)


async def test_events_come_when_they_are_due(tmp_path: Path):
    async with Provider.open(tmp_path, delays="store") as provider:
        got: list[bytes] = []

        async def handler(event: Event) -> None:
            got.append(event.payload)

        await provider.subscribe("all", "orders/*", handler)
        delays = [timedelta(seconds=seconds) for seconds in (0.3, 0.1, 0)]
        await provider.stream(STREAM).publish(
            [Event(text, delay=delay) for text, delay in zip((b"c", b"b", b"a"), delays, strict=True)]
        )

        async def all_came() -> bool:
            return len(got) == 3 and provider.delays is not None and provider.delays.delay_statistics() == (2, 2, "")

        await until(all_came)
        assert got == [b"a", b"b", b"c"]


async def test_a_provider_without_a_directory_delays_as_long_as_it_lives():
    async with Provider.open(adapter="memory", queues=1, delays="store") as provider:
        await provider.stream(STREAM).publish(b"x", delay=timedelta(milliseconds=10))

        async def came() -> bool:
            return (await provider.adapter.bounds(0)).next == 1

        await until(came)


async def test_delayed_events_outlast_the_provider_and_the_option(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with Provider.open(tmp_path, queues=1, delays="store") as provider:
        await provider.stream(STREAM).publish(b"x", delay=timedelta(seconds=0.2))
    caplog.set_level(logging.INFO)
    async with Provider.open(tmp_path) as provider:
        assert "publishes events that were delayed before its option `delays` was removed" in caplog.text

        async def came() -> bool:
            return await stored(provider.adapter) == ["x"]

        await until(came)
        with pytest.raises(NotSupported):
            await provider.stream(STREAM).publish(b"x", delay=timedelta(1))


async def test_two_processes_publish_each_event_once(tmp_path: Path):
    async with (
        Provider.open(tmp_path, queues=2, delays="store") as one,
        Provider.open(tmp_path, delays="store") as other,
    ):
        for number in range(40):
            provider = (one, other)[number % 2]
            await provider.stream("n", str(number)).publish(
                str(number).encode(), delay=timedelta(milliseconds=5 * number)
            )

        async def all_came() -> bool:
            return not await one.store.delay_store().backlogs("default")

        await until(all_came)
        assert sorted(map(int, await stored(one.adapter, 2))) == list(range(40))


async def test_earlier_event_of_another_process_does_not_wait_for_the_next_known_one(tmp_path: Path):
    async with Provider.open(tmp_path, queues=1, delays="store") as provider:
        await provider.stream(STREAM).publish(b"later", delay=timedelta(hours=1))
        await provider.stream(STREAM).publish(b"sooner", delay=timedelta(milliseconds=20))

        async def came() -> bool:
            return await stored(provider.adapter) == ["sooner"]

        await until(came)


def test_delayed_events_are_in_the_list_of_queues(tmp_path: Path, headrace: Headrace):
    (tmp_path / "a.txt").write_text("x\n")
    publish = ("publish", "--data", "d", "--stream", "orders/42", "--format", "raw", "a.txt")
    assert headrace(*publish, "--delays", "store", "--delay", "3600").code == 0
    queues = json.loads(headrace("queues", "--data", "d", "--json").out)
    (waiting,) = [queue for queue in queues if queue["delayed_events"]]
    assert (waiting["delayed_events"], waiting["next"]) == (1, 0)
    assert 3000 < waiting["due_in_s"] <= 3600
    assert "due in s" in headrace("queues", "--data", "d").out
    refused = headrace(*publish, "--delay", "3600")
    assert refused.code == 2
    assert 'delays = "store"' in refused.err


async def test_stored_delayed_events_are_in_the_metrics(tmp_path: Path):
    async with Provider.open(tmp_path, delays="store") as provider:
        await provider.stream(STREAM).publish(b"y", delay=timedelta(hours=1))
        history = LagHistory({"default": provider})
        await history.sample(provider)
        text = await asyncio.to_thread(render, Snapshot([provider_snapshot(provider, history)]))
        assert b'headrace_delays_stored_events_total{provider="default"} 1.0' in text
        queue = provider.queue_of(STREAM)
        assert b'headrace_queue_delayed_events{provider="default",queue="%d"} 1.0' % queue in text
        assert text.count(b"headrace_queue_delayed_events{") == provider.queues


# ---- stopped between any two steps -----------------------------------------------------------------------------------


class Killed(StorageError):
    """The process ends at this step."""


class Killer:
    """Lets so many steps happen."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self) -> None:
        if not self.left:
            raise Killed("killed")
        self.left -= 1

    def around(self, target: object, names: Sequence[str]) -> Any:
        return _Mortal(self, target, names)


class _Mortal:
    """Another object, that may end before or after each of these calls."""

    def __init__(self, killer: Killer, target: object, names: Sequence[str]) -> None:
        self._killer, self._target, self._names = killer, target, names

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if name not in self._names:
            return method

        async def mortal(*args: Any, **kwargs: Any) -> Any:
            self._killer.step()
            answer = await method(*args, **kwargs)
            self._killer.step()
            return answer

        return mortal


class Stage:
    """A queue of the log, and its delayed events. Every `DelayingAdapter` made here is another process's."""

    def __init__(self, adapter: QueueAdapter, store: DelayStore, clock: Clock) -> None:
        self.adapter, self.store, self.clock = adapter, store, clock

    def process(self, steps: int) -> tuple[DelayingAdapter, Killer]:
        killer = Killer(steps)
        adapter = killer.around(self.adapter, ("enqueue", "last_sequence", "bounds"))
        store = killer.around(self.store, ("add_all", "due_in_s", "claim", "released"))
        return DelayingAdapter(adapter, store, "p"), killer

    async def publish_all(self) -> None:
        """Publish all delayed events, as a process does that lives on."""
        delaying, _ = self.process(-1)
        self.clock.now_s += 3600
        while await delaying.look() == 0:
            pass
        assert await self.store.backlogs("p") == {}


@pytest_asyncio.fixture(params=["file", "postgres"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    (tmp_path / "log").mkdir()
    context = AdapterContext(provider="p", queues=2, directory=tmp_path / "log")
    clock = Clock()
    async with (
        place_of(request, tmp_path, clock).opened() as delays,
        aclosing(await open_adapter("log", context, {})) as adapter,
    ):
        yield Stage(adapter, delays, clock)


def later(letter: str, delay_s: float = 1) -> ScheduledBatch:
    return ScheduledBatch.of_events(STREAM, [letter.encode()], timedelta(seconds=delay_s), 0)


def now(letter: str) -> EventBatch:
    return EventBatch.of(STREAM, [letter.encode()])


async def test_publisher_may_end_before_or_after_any_step(stage: Stage):
    steps = 0
    for steps in range(100):
        await add(stage.store, "p", [(0, later(f"{steps}a")), (1, later(f"{steps}b")), (0, later(f"{steps}c", 2))])
        stage.clock.now_s += 3
        delaying, killer = stage.process(steps)
        try:
            while await delaying.look() == 0:
                pass
        except Killed:
            pass
        await stage.publish_all()
        if killer.left:
            break
    assert steps > 8, "no step was seen"
    of = range(steps + 1)
    wanted = [text for step in of for text in (f"{step}a", f"{step}c")] + [f"{step}b" for step in of]
    assert await stored(stage.adapter, 2) == wanted


@pytest.mark.parametrize("shorter", [False, True])
async def test_storing_call_may_end_before_or_after_any_step_and_is_repeated(stage: Stage, *, shorter: bool):
    """Also if the delayed events are published meanwhile, and if their delay is nearly over, as in an outbox."""
    steps = 0
    for steps in range(100):
        sequence = ProducerSequence("client", steps + 1, steps)
        batches = [(0, later(f"{steps}a")), (1, now(f"{steps}b")), (0, later(f"{steps}c"))]
        delaying, killer = stage.process(steps)
        try:
            await delaying.enqueue(batches, sequence=sequence)
        except Killed:
            if steps % 2:
                await stage.publish_all()
        if shorter:
            batches = [
                (queue, each.with_delay(1) if isinstance(each, ScheduledBatch) else each) for queue, each in batches
            ]
        again = await stage.process(-1)[0].enqueue(batches, sequence=sequence)
        assert len(again) == 3
        await stage.publish_all()
        again = await stage.process(-1)[0].enqueue(batches, sequence=sequence)
        assert [receipt.duplicate for receipt in again] == [True] * 3
        await stage.publish_all()
        if killer.left:
            break
    assert steps > 6, "no step was seen"
    of = range(steps + 1)
    wanted = [text for step in of for text in (f"{step}a", f"{step}c")] + [f"{step}b" for step in of]
    assert await stored(stage.adapter, 2) == wanted


async def test_a_process_that_releases_after_its_claim_ended_stores_nothing_twice(stage: Stage):
    await add(stage.store, "p", [(0, later("a"))])
    stage.clock.now_s += 1
    (claimed,) = await stage.store.claim("p", "slow", HOLD_S)
    stage.clock.now_s += HOLD_S
    await stage.publish_all()
    await add(stage.store, "p", [(0, later("b"))])
    sequence = ProducerSequence(claimed.producer, claimed.number, claimed.number - 1)
    answer = await stage.adapter.enqueue([(0, batch) for batch in claimed.batches], sequence=sequence)
    assert [receipt.duplicate for receipt in answer] == [True]
    await stage.store.released("p", {0: claimed.number})
    await stage.publish_all()
    assert await stored(stage.adapter) == ["a", "b"]


async def test_a_queue_that_forgot_the_producer_goes_on(stage: Stage):
    await add(stage.store, "p", [(0, later("a"))])
    stage.clock.now_s += 1
    (claimed,) = await stage.store.claim("p", "dead", HOLD_S)
    await stage.store.released("p", {0: claimed.number})  # and the queue knows nothing of it
    await add(stage.store, "p", [(0, later("b"))])
    await stage.publish_all()
    assert await stored(stage.adapter) == ["b"]


# ---- a producer's calls ----------------------------------------------------------------------------------------------


async def test_calls_of_a_producer_follow_each_other_without_awaiting(stage: Stage):
    delaying, _ = stage.process(-1)
    calls: list[Awaitable[Sequence[Receipt]]] = []
    for number in range(1, 31):
        batches = [(0, now(f"{number}"))] if number % 3 else [(0, later(f"{number}")), (0, now(f"{number}"))]
        calls.append(delaying.enqueue(batches, sequence=ProducerSequence("client", number, number - 1)))
    for receipts in await asyncio.gather(*calls):
        assert not any(receipt.duplicate for receipt in receipts)
    assert await stored(stage.adapter) == [str(number) for number in range(1, 31)]
    await stage.publish_all()
    assert await stored(stage.adapter) == [*map(str, range(1, 31)), *map(str, range(3, 31, 3))]
    await delaying.aclose()


async def test_a_call_that_leaves_a_hole_stores_nothing(stage: Stage):
    delaying, _ = stage.process(-1)
    with pytest.raises(SequenceConflict):
        await delaying.enqueue([(0, later("a"))], sequence=ProducerSequence("client", 5, 4))
    assert await stage.store.backlogs("p") == {}


async def test_the_token_of_a_delayed_event_s_receipt_is_below_its_token_on_delivery(stage: Stage):
    delaying, _ = stage.process(-1)
    receipts = await delaying.enqueue([(0, now("a")), (0, later("b")), (0, now("c"))])
    tokens = [receipt.token for receipt in receipts]
    assert [token.offset for token in tokens if token] == [0, tokens[1] and tokens[1].offset, 1]
    assert tokens[1] is not None
    assert tokens[1].offset <= 2


async def test_event_without_delay_stays_before_later_events(stage: Stage):
    delaying, _ = stage.process(-1)
    first = delaying.enqueue([(0, later("z")), (0, now("a"))])
    second = delaying.enqueue([(0, now("b"))])
    await asyncio.gather(first, second)
    assert await stored(stage.adapter) == ["a", "b"]


async def test_calls_at_one_time_share_transactions(stage: Stage):
    delaying, killer = stage.process(1_000)
    await asyncio.gather(*(delaying.enqueue([(0, later(f"{number:02}"))]) for number in range(20)))
    assert 1_000 - killer.left <= 2 * 4, "more than two looks at the queue and two transactions"
    await stage.publish_all()
    assert await stored(stage.adapter) == [f"{number:02}" for number in range(20)]
    await delaying.aclose()


async def test_an_error_of_the_store_fails_the_call(stage: Stage):
    delaying, _ = stage.process(1)
    with pytest.raises(Killed):
        await delaying.enqueue([(0, later("a")), (0, now("b"))])
    await delaying.aclose()


async def test_while_the_queue_cannot_store_it_is_tried_again_and_said(stage: Stage, caplog: pytest.LogCaptureFixture):
    await add(stage.store, "p", [(0, later("a"))])
    stage.clock.now_s += 1
    delaying, killer = stage.process(2 + 2 + 2)  # the due events are claimed, and cannot be published

    delaying.start()

    async def failing() -> bool:
        return delaying.delay_statistics().failing == "killed"

    await until(failing)
    assert caplog.text.count("what is due in queue 0 cannot be published yet: killed") == 1
    killer.left = -1
    stage.clock.now_s += HOLD_S

    async def came() -> bool:
        return await stored(stage.adapter) == ["a"] and not delaying.delay_statistics().failing

    await until(came)
    await delaying.aclose()


class Refusing:
    """A queue that stores nothing while it is `broken`."""

    def __init__(self, adapter: QueueAdapter, broken: int) -> None:
        self._adapter, self.broken = adapter, broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    async def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        if any(queue == self.broken for queue, _ in batches):
            raise StorageError("broken")
        return await self._adapter.enqueue(batches, sequence=sequence)


async def test_a_queue_that_cannot_store_holds_up_no_other(stage: Stage):
    adapter = Refusing(stage.adapter, broken=1)
    delaying = DelayingAdapter(cast("QueueAdapter", adapter), stage.store, "p")
    await add(stage.store, "p", [(1, later("x"))])
    stage.clock.now_s += 1
    assert await delaying.look() == 0  # it was claimed, and failed
    for letter in "abc":
        await add(stage.store, "p", [(0, later(letter))])
        stage.clock.now_s += 1
        assert await delaying.look() == 0
        assert 0 < await delaying.look() <= HOLD_S  # x is left alone until its time is over
    assert delaying.delay_statistics().failing == "broken"
    adapter.broken = -1
    await stage.publish_all()
    assert await stored(stage.adapter, queues=2) == ["a", "b", "c", "x"]


async def test_releases_continue_above_the_queue_s_sequence_after_the_store_is_restored(tmp_path: Path):
    """Otherwise the queue would mistake other events for those that it has under the same number."""
    clock, copy = Clock(), tmp_path / "copy.db"
    context = AdapterContext(provider="p", queues=1, directory=tmp_path)
    async with aclosing(await open_adapter("log", context, {})) as adapter:
        async with aclosing(await ControlStore.open(tmp_path / "control.db")) as control:
            stage = Stage(adapter, control.delay_store(clock), clock)
            await add(stage.store, "p", [(0, later("a"))])
            await stage.publish_all()
            await add(stage.store, "p", [(0, later("kept", 2 * 3600))])
            with (
                closing(sqlite3.connect(tmp_path / "control.db")) as now_there,
                closing(sqlite3.connect(copy)) as kept,
            ):
                now_there.backup(kept)
            for letter in "bcd":
                await add(stage.store, "p", [(0, later(letter))])
                stage.clock.now_s += 1
                assert await stage.process(-1)[0].look() == 0
        clock.now_s += 3600
        async with aclosing(await ControlStore.open(copy)) as control:
            await Stage(adapter, control.delay_store(clock), clock).publish_all()
        assert await stored(adapter) == ["a", "b", "c", "d", "kept"]
