"""Publishing through a client to a real silo, which is killed, stopped, paused and restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import (
    Closed,
    Event,
    EventBatch,
    HeadraceError,
    InvalidArgument,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    PermissionDenied,
    SequenceConflict,
    SequenceToken,
    StreamId,
    Unavailable,
)
from headrace.client.client import UNKNOWN_PLACE, Client
from headrace.client.connection import GrpcTransport
from headrace.client.native import NativeTransport
from headrace.client.publishing import PublishPipeline, new_producer
from headrace.client.window import PublishWindow, WindowedRequest
from headrace.streams.publishing import ProducerSequence, Receipt
from tests.cli.commandline import Headrace
from tests.client.consumers import until
from tests.client.silos import SiloProcess, Silos, stored
from tests.serving import native_and_grpc, serving

__all__ = ("serving",)
pytest_generate_tests = native_and_grpc

S = StreamId("n", "k")


async def failure(publish: Awaitable[object]) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        await publish
    return caught.value


@asynccontextmanager
async def pipeline(silo: SiloProcess, **options: Any) -> AsyncGenerator[PublishPipeline]:
    """The publishing half of a client of its own, with these options of `PublishPipeline`."""
    transport = NativeTransport(GrpcTransport(silo.address))
    await transport.open(10.0)
    made = PublishPipeline(transport, "default", timeout_s=60.0, **options)
    try:
        yield made
    finally:
        await made.aclose()
        await transport.aclose()


async def publish(publishing: PublishPipeline, payload: bytes) -> SequenceToken | None:
    """As `Client.publish`."""
    deadline = await publishing.wait_for_space() if publishing.full else None
    (receipt,) = await publishing.publish([EventBatch.of(S, [payload])], deadline)
    return receipt.token


def numbered(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


async def test_events_are_stored_when_publish_returns(silo: SiloProcess):
    async with Client(silo.address) as client:
        first = await client.stream("n", "k").publish(b"0")
        second = await client.publish(S, [b"1", Event(b"2", headers={"a": "b"}, id="i", timestamp_us=3)])
        assert first < second
        silo.kill()
    assert await stored(silo.data) == {S: numbered(0, 1, 2)}


async def test_concurrent_publishers_each_get_the_token_of_their_own(silo: SiloProcess):
    async with Client(silo.address) as client:
        tokens = await asyncio.gather(*(client.publish(S, b"%d" % number) for number in range(500)))
    silo.stop()
    assert tokens == sorted(set(tokens))
    assert await stored(silo.data) == {S: numbered(*range(500))}


async def test_a_long_publish_travels_in_several_requests(silo: SiloProcess):
    events = [b"%07d" % number + bytes(99_993) for number in range(60)]
    async with Client(silo.address) as client:
        await client.publish(S, events)
    silo.stop()
    assert (await stored(silo.data))[S] == events


async def test_publishing_to_several_streams_answers_for_each_batch(silo: SiloProcess):
    a, b = StreamId("n", "a"), StreamId("n", "b")
    async with Client(silo.address) as client:
        receipts = await client.publish_many([(a, b"0"), (b, b"1"), (a, b"2")])
        assert await client.publish_many([]) == []
    silo.stop()
    assert [receipt.duplicate for receipt in receipts] == [False, False]
    assert await stored(silo.data) == {a: numbered(0, 2), b: numbered(1)}


async def test_publish_with_a_sequence_is_stored_once(silo: SiloProcess):
    async with Client(silo.address) as client:
        first = await client.publish_many([(S, b"0")], sequence=ProducerSequence("me", 1, 0))
        assert (await client.last_sequence("me"), await client.last_sequence("nobody")) == (1, 0)
        again = await client.publish_many([(S, b"0")], sequence=ProducerSequence("me", 1, 0))
        assert again == [Receipt(first[0].token, duplicate=True)]
        hole = client.publish_many([(S, b"2")], sequence=ProducerSequence("me", 3, 2))
        assert isinstance(await failure(hole), SequenceConflict)
        large = [(StreamId("n", str(key)), bytes(1 << 20)) for key in range(5)]
        error = await failure(client.publish_many(large, sequence=ProducerSequence("me", 2, 1)))
        assert isinstance(error, PayloadTooLarge)
    silo.stop()
    assert await stored(silo.data) == {S: numbered(0)}


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (5, InvalidArgument),
        ([], InvalidArgument),
        ({"a": {1j}}, InvalidArgument),
        (bytes((1 << 20) + 1), PayloadTooLarge),
        (Event(b"", priority=1), NotSupported),
        (Event(b"", headers={"h": "x" * (4 << 20)}), InvalidArgument),
    ],
    ids=["number", "nothing", "dict", "large", "priority", "large headers"],
)
async def test_invalid_events_are_refused_before_they_are_sent(
    silo: SiloProcess, events: Any, kind: type[HeadraceError]
):
    async with Client(silo.address) as client:
        assert isinstance(await failure(client.publish(S, events)), kind)
        with pytest.raises(InvalidArgument, match="StreamId"):
            await client.publish("n/k", b"")  # type: ignore[arg-type]
        await client.publish(S, b"0")
    silo.stop()
    assert await stored(silo.data) == {S: numbered(0)}


async def test_every_publish_to_an_unknown_provider_fails(silo: SiloProcess):
    async with Client(silo.address, provider="other") as client:
        errors = await asyncio.gather(*(failure(client.publish(S, b"0")) for _ in range(20)))
        assert {type(error) for error in errors} == {NotFound}
        assert len({id(error) for error in errors}) == 20


# ---- refusals --------------------------------------------------------------------------------------------------------


def token(headrace: Headrace, *permissions: str) -> str:
    return headrace("tokens", "create", "t", "--data", "d", *permissions).out.strip()


async def test_a_refusal_concerns_only_its_publisher(headrace: Headrace, silos: Silos):
    mine = token(headrace, "--publish", "mine")
    silo = silos("--auth", "tokens")
    good, bad = StreamId("mine", "k"), StreamId("theirs", "k")
    async with Client(silo.address, token=mine) as client:

        async def publish(number: int) -> HeadraceError | None:
            try:
                await client.publish(bad if number % 97 == 50 else good, b"%d" % number)
            except HeadraceError as error:
                return error
            return None

        errors = await asyncio.gather(*map(publish, range(1000)))
    silo.stop()
    assert [number for number in range(1000) if errors[number]] == [*range(50, 1000, 97)]
    assert {type(errors[number]) for number in range(50, 1000, 97)} == {PermissionDenied}
    assert await stored(silo.data) == {good: numbered(*(n for n in range(1000) if n % 97 != 50))}


async def test_a_refusal_in_the_middle_of_many_requests_leaves_no_hole(headrace: Headrace, silos: Silos):
    mine = token(headrace, "--publish", "mine")
    silo = silos("--auth", "tokens")
    good, bad = StreamId("mine", "k"), StreamId("theirs", "k")
    async with Client(silo.address, token=mine) as client:

        async def worker(number: int) -> None:
            for step in range(30):
                if (number + step) % 7:
                    await client.publish(StreamId("mine", str(number)), b"%d" % step)
                else:
                    assert isinstance(await failure(client.publish(bad, b"no")), PermissionDenied)

        await asyncio.gather(*map(worker, range(20)), client.publish(good, b"0"))
    silo.stop()
    found = await stored(silo.data)
    assert bad not in found
    for number in range(20):
        assert found[StreamId("mine", str(number))] == numbered(*(s for s in range(30) if (number + s) % 7))


# ---- outages ---------------------------------------------------------------------------------------------------------


class Traffic:
    """Publishers, each with a stream of its own, that count up until they are told to stop."""

    def __init__(self, client: Client, publishers: int) -> None:
        self.counts = [0] * publishers
        self._client = client
        self._stop = asyncio.Event()
        self._grown = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(*map(self._publish, range(len(self.counts))))

    async def _publish(self, number: int) -> None:
        stream = self._client.stream("n", str(number))
        while not self._stop.is_set():
            await stream.publish(b"%d" % self.counts[number])
            self.counts[number] += 1
            self._grown.set()

    async def go_on(self, events: int) -> None:
        """Return when so many more are published."""
        goal = sum(self.counts) + events
        while sum(self.counts) < goal:
            self._grown.clear()
            await self._grown.wait()

    def stop(self) -> None:
        self._stop.set()

    def expected(self) -> dict[StreamId, list[bytes]]:
        return {StreamId("n", str(number)): numbered(*range(count)) for number, count in enumerate(self.counts)}


@pytest.mark.mostly_native
@pytest.mark.parametrize("end", [SiloProcess.kill, SiloProcess.stop], ids=["kill -9", "stop"])
async def test_restarts_of_the_silo_go_unnoticed(silo: SiloProcess, end: Any):
    async with Client(silo.address) as client, asyncio.TaskGroup() as group:
        traffic = Traffic(client, 20)
        group.create_task(traffic.run())
        for _ in range(5):
            await traffic.go_on(200)
            await asyncio.to_thread(end, silo)
            await asyncio.to_thread(silo.start)
        await traffic.go_on(200)
        traffic.stop()
    silo.stop()
    assert await stored(silo.data) == traffic.expected()


async def test_a_silo_whose_queues_do_not_survive_is_published_to_again(silos: Silos, tmp_path: Any):
    (tmp_path / "silo.toml").write_text('[providers.default]\nadapter = "memory"\n')
    silo = silos("silo.toml")
    async with Client(silo.address) as client:
        before = [await client.publish(S, b"0") for _ in range(3)]
        silo.kill()
        silo.start()
        assert await client.publish(S, b"1") == before[0]


async def test_publishing_waits_for_a_silo_that_comes_back(silo: SiloProcess):
    async with Client(silo.address) as client:
        await client.publish(S, b"0")
        silo.kill()
        waiting = [asyncio.create_task(client.publish(S, b"%d" % number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(silo.start)
        await asyncio.gather(*waiting)
    silo.stop()
    assert await stored(silo.data) == {S: numbered(0, 1, 2, 3)}


async def test_publish_that_takes_too_long_raises(silo: SiloProcess):
    async with Client(silo.address, timeout_s=0.5) as client:
        await client.publish(S, b"0")
        silo.kill()
        error = await failure(client.publish(S, b"1"))
        assert isinstance(error, Unavailable)
        assert "gave up publishing after 0.5 s" in str(error)
        assert f"no silo answers at {silo.address}" in str(error)
        await asyncio.to_thread(silo.start)
        while isinstance(await published(client, b"2"), Unavailable):
            pass  # it may take longer than the limit to find it again
    silo.stop()
    found = (await stored(silo.data))[S]
    # What was given up may be stored or not, so 2 may be there for each attempt. Order holds.
    assert (found[0], found[-1]) == (b"0", b"2")
    assert found.count(b"1") <= 1
    assert found == sorted(found)


async def published(client: Client, payload: bytes) -> HeadraceError | SequenceToken:
    try:
        return await client.publish(S, payload)
    except HeadraceError as error:
        return error


async def test_given_up_events_are_never_stored_after_later_ones(silo: SiloProcess):
    """With any outcomes, stored events are in order, none is stored twice, and those reported as stored are there."""
    told: list[int] = []
    async with Client(silo.address, timeout_s=0.3) as client:
        for round_ in range(4):
            silo.signal(signal.SIGSTOP)
            outcomes = await asyncio.gather(*(published(client, b"%d" % (round_ * 100 + n)) for n in range(50)))
            told += [round_ * 100 + n for n, one in enumerate(outcomes) if isinstance(one, SequenceToken)]
            silo.signal(signal.SIGCONT)
            while isinstance(await published(client, b"%d" % (round_ * 100 + 99)), HeadraceError):
                await client.flush()
    silo.stop()
    found = [int(payload) for payload in (await stored(silo.data))[S]]
    assert [n for n in found if n % 100 != 99] == sorted({n for n in found if n % 100 != 99})
    assert set(told) <= set(found)


async def test_the_next_address_is_tried(silos: Silos):
    silo = silos()
    async with Client(f"127.0.0.1:1,{silo.address}") as client:
        await client.publish(S, b"0")
        silo.kill()
        silo.start()
        await client.publish(S, b"1")
    silo.stop()
    assert await stored(silo.data) == {S: numbered(0, 1)}


# ---- callers ---------------------------------------------------------------------------------------------------------


async def test_a_silo_that_does_not_keep_up_holds_back_the_publishers(silo: SiloProcess):
    window = PublishWindow(new_producer)
    async with pipeline(silo, window=window, max_bytes=4 << 20) as publishing:
        await publish(publishing, b"warm")
        silo.signal(signal.SIGSTOP)
        tasks = [asyncio.create_task(publish(publishing, bytes(100_000))) for _ in range(400)]
        for _ in range(20):
            await asyncio.sleep(0)
        held = window.held.size
        assert 4 << 20 <= held <= 5 << 20
        for _ in range(50):
            await asyncio.sleep(0)
        assert window.held.size == held
        silo.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
    silo.stop()
    assert len((await stored(silo.data))[S]) == 401


async def test_a_cancelled_caller_does_not_affect_other_callers(silo: SiloProcess):
    async with Client(silo.address) as client:
        tasks = [asyncio.create_task(client.publish(S, b"%d" % number)) for number in range(300)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        after = await client.publish(S, b"300")
    silo.stop()
    cancelled = {number for number, outcome in enumerate(outcomes) if isinstance(outcome, asyncio.CancelledError)}
    assert cancelled == {*range(0, 300, 3)}
    assert all(token < after for token in outcomes if isinstance(token, SequenceToken))
    found = [int(payload) for payload in (await stored(silo.data))[S]]
    assert found == sorted(set(found))
    assert {*range(301)} - cancelled <= set(found)


async def test_publish_that_waits_for_space_may_be_cancelled_and_the_others_go_on(silo: SiloProcess):
    async with pipeline(silo, max_bytes=1000) as publishing:
        silo.signal(signal.SIGSTOP)
        tasks = [asyncio.create_task(publish(publishing, bytes(500))) for _ in range(100)]
        for _ in range(20):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        silo.signal(signal.SIGCONT)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, SequenceToken) for outcome in outcomes[1::2])


async def test_flush_waits_for_all_that_was_published_before(silo: SiloProcess):
    async with Client(silo.address) as client:
        tasks = [asyncio.create_task(client.publish(S, b"%d" % number)) for number in range(100)]
        await asyncio.sleep(0)
        await client.flush()
        await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        await client.flush()


async def test_closing_finishes_pending_publishes_and_refuses_later_ones(silo: SiloProcess):
    client = Client(silo.address)
    async with client:
        tasks = [asyncio.create_task(client.publish(S, b"%d" % number)) for number in range(100)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert isinstance(await failure(client.publish(S, b"100")), Closed)
    await client.aclose()
    silo.stop()
    assert await stored(silo.data) == {S: numbered(*range(100))}


class CountingWindow(PublishWindow):
    """Notes the number of pieces of each request."""

    def __init__(self) -> None:
        super().__init__(new_producer)
        self.requests: list[int] = []

    def take(self) -> WindowedRequest | None:
        if (request := super().take()) is not None:
            self.requests.append(len(request.pieces))
        return request


async def test_lingering_puts_more_into_a_request(silo: SiloProcess):
    window = CountingWindow()
    async with pipeline(silo, window=window, linger_s=0.02) as publishing:
        tasks: list[asyncio.Task[SequenceToken | None]] = []
        for _ in range(5):
            tasks.append(asyncio.create_task(publish(publishing, b"x")))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert window.requests == [5]


async def one_in_each_turn(publishing: PublishPipeline, payloads: Iterable[bytes]) -> list[asyncio.Task[Any]]:
    tasks: list[asyncio.Task[Any]] = []
    for payload in payloads:  # in the first turn the task publishes, in the next one the sender sends
        tasks.append(asyncio.create_task(publish(publishing, payload)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_small_events_gather_while_a_request_is_in_flight(silo: SiloProcess):
    window = CountingWindow()
    async with pipeline(silo, window=window, gather_s=60.0) as publishing:
        await publish(publishing, b"0")  # connects
        silo.signal(signal.SIGSTOP)
        tasks = await one_in_each_turn(publishing, numbered(*range(1, 11)))
        silo.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert window.requests == [1, 1, 9]
    silo.stop()
    assert (await stored(silo.data))[S] == numbered(*range(11))


async def test_small_events_wait_until_a_request_is_no_longer_small(silo: SiloProcess):
    window = CountingWindow()
    async with pipeline(silo, window=window, gather_s=60.0) as publishing:
        await publish(publishing, b"0")
        silo.signal(signal.SIGSTOP)
        tasks = await one_in_each_turn(publishing, [b"1", b"2", bytes(window.limits.small_bytes)])
        await until(lambda: window.in_flight == 2)
        silo.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert window.requests == [1, 1, 2]


async def test_small_events_do_not_wait_long_for_a_silo_that_is_far_away(silo: SiloProcess):
    window = CountingWindow()
    async with pipeline(silo, window=window, gather_s=0.5) as publishing:
        await publish(publishing, b"0")
        silo.signal(signal.SIGSTOP)
        tasks = await one_in_each_turn(publishing, numbered(1, 2, 3))
        await until(lambda: window.in_flight == 2)
        silo.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert window.requests == [1, 1, 2]


def test_an_unknown_place_is_before_all_others():
    assert EventBatch.of(S, [b""]).token > UNKNOWN_PLACE
