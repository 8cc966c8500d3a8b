"""Consumers of a cluster, with direct sessions to the owners of queues, or through a gateway."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest

from headrace import Client, Event, Mode, OnFailure, RetryPolicy, StreamId
from headrace.client.connection import GrpcTransport
from headrace.client.consumer import Consumer
from headrace.client.native import NativeTransport
from headrace.proto.v1 import cluster_pb2 as cluster_pb
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.server.config import GrpcConfig
from headrace.silo.config import ClusterConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.streams.background import end, ticks
from headrace.streams.errors import Fenced, HeadraceError
from tests.silo.clusters import Silos, clustered, queues
from tests.silo.services.calling import Refused, batch, connecting
from tests.silo.services.sessions import acknowledge, begin, defined, pull, pull_events, report

QUEUES, STREAMS = 8, 40
PATIENCE_S = 30

both_ways = pytest.mark.parametrize(
    "direct", [pytest.param(True, marks=pytest.mark.second_way), False], ids=["direct", "gateway"], indirect=True
)
# The gateway has the same router as a direct consumer, which `tests/client/test_routing.py` tests by itself.
mostly_gateway = pytest.mark.parametrize(
    "direct", [pytest.param(True, marks=pytest.mark.slow), False], ids=["direct", "gateway"], indirect=True
)


@pytest.fixture(autouse=True)
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether clients call the owners of queues. Without `both_ways` they do not."""
    is_direct: bool = getattr(request, "param", False)
    for transport in (GrpcTransport, NativeTransport):
        monkeypatch.setattr(transport, "is_remote", is_direct)
    return is_direct


@asynccontextmanager
async def cluster(
    tmp_path: Path, count: int = 2, public_address: str | None = None, *, drain_s: float = 5.0
) -> AsyncGenerator[Silos]:
    config = SiloConfig(
        data=str(tmp_path / "data"),
        drain_s=drain_s,
        grpc=GrpcConfig(port=0),
        providers={"default": ProviderConfig(queues=QUEUES)},
        cluster=ClusterConfig(public_address=public_address),
    )
    async with clustered(config, count) as silos:
        yield silos


@pytest.fixture
async def silos(tmp_path: Path) -> AsyncGenerator[Silos]:
    async with cluster(tmp_path) as silos:
        yield silos


@asynccontextmanager
async def client_of(*silos: Silo) -> AsyncGenerator[Client]:
    async with Client(",".join(silo.grpc_address or "" for silo in silos)) as client:
        yield client


def streams(count: int = STREAMS) -> list[StreamId]:
    return [StreamId("n", str(number)) for number in range(count)]


class Taker:
    """The events that a consumer got, by stream."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.got: defaultdict[StreamId, list[bytes]] = defaultdict(list)
        self.queues: Counter[int] = Counter()
        self._something = asyncio.Event()

    @property
    def count(self) -> int:
        return sum(map(len, self.got.values()))

    async def run(self) -> None:
        async for taken in self.consumer:
            for event in taken:
                self.got[taken.stream].append(event.payload)
            self.queues[taken.queue] += taken.count
            await taken.ack()
            self._something.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count < count:
                self._something.clear()
                await self._something.wait()


@asynccontextmanager
async def taking(*consumers: Consumer) -> AsyncGenerator[list[Taker]]:
    takers = [Taker(consumer) for consumer in consumers]
    tasks = [asyncio.create_task(taker.run()) for taker in takers]
    try:
        yield takers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Return once it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.02)


async def publish(client: Client, numbers: Iterable[int], to: Iterable[StreamId] | None = None) -> None:
    for number in numbers:
        for stream in streams() if to is None else to:
            await client.publish(stream, b"%d" % number)


async def there_are(count: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await count() == wanted


def counted(numbers: Iterable[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


@both_ways
async def test_a_consumer_gets_the_events_of_all_silos_in_order(silos: Silos):
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
        await publish(client, range(5))
        await taker.has(5 * STREAMS)
        assert dict(taker.got) == dict.fromkeys(streams(), counted(range(5)))
        assert set(taker.queues) >= {queues(silos[0])[0], queues(silos[1])[0]}
        await consumer.saved()
    async with client_of(silos[1]) as client, client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
        await publish(client, [5])
        await taker.has(STREAMS)
        assert dict(taker.got) == dict.fromkeys(streams(), counted([5]))


@pytest.mark.long
@pytest.mark.parametrize("direct", [True], indirect=True)
async def test_owners_that_clients_cannot_reach_are_served_through_a_gateway(tmp_path: Path):
    async with cluster(tmp_path, 2, public_address="127.0.0.1:1") as silos, client_of(silos[0]) as client:
        async with client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
            publishing = asyncio.create_task(publish(client, range(5)))
            await taker.has(5 * STREAMS)
            await publishing
            assert dict(taker.got) == dict.fromkeys(streams(), counted(range(5)))
            assert set(taker.queues) >= {queues(silos[0])[0], queues(silos[1])[0]}
            await consumer.saved()


@pytest.mark.long
@pytest.mark.parametrize("direct", [True], indirect=True)
async def test_events_in_hand_stay_with_their_consumer_when_it_changes_to_a_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    taken = Counter[StreamId]()

    async def take(consumer: Consumer) -> None:
        async for each in consumer:
            taken[each.stream] += 1
            await each.ack()

    async with cluster(tmp_path, 2, public_address="127.0.0.1:1") as silos, client_of(silos[0]) as client:
        other_client = Client(silos[1].grpc_address or "", direct=False)
        async with client.subscribe("s", "n/*") as consumer, other_client, other_client.subscribe("s", "n/*") as other:
            await client.publish_many((StreamId("n", str(key)), b"x") for key in range(STREAMS))
            held = await anext(consumer)
            tasks = [asyncio.create_task(take(each)) for each in (consumer, other)]
            async with asyncio.timeout(PATIENCE_S):
                while "serves as gateway" not in caplog.text or taken.total() < STREAMS - 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert consumer.reconnections == 0
                await held.ack()
                await consumer.saved()
            await end(*tasks)
    assert taken[held.stream] == 0
    assert {*taken.values()} == {1}


@asynccontextmanager
async def load_balancer(silos: Silos) -> AsyncGenerator[str]:
    """Yield one address for all silos: each connection goes to the next one."""
    targets = cycle([silo.grpc_address or "" for silo in silos])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = next(targets).rpartition(":")
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@mostly_gateway
async def test_a_client_that_knows_only_a_load_balancer_gets_the_events_of_all_silos(silos: Silos):
    async with load_balancer(silos) as address, Client(address) as client, Client(address) as other:
        for each in (client, other):
            async with each.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
                await publish(client, range(3))
                await taker.has(3 * STREAMS)
                assert dict(taker.got) == dict.fromkeys(streams(), counted(range(3)))


@both_ways
async def test_a_queue_that_moves_in_order_is_not_noticed(tmp_path: Path):
    async with cluster(tmp_path, 3) as silos, client_of(silos[1]) as client:
        async with client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
            await publish(client, range(3))
            publishing = asyncio.create_task(publish(client, range(3, 10)))
            await silos.stop(2)
            await publishing
            await silos.shared([0, 1])
            await publish(client, range(10, 12))
            await taker.has(12 * STREAMS)
            assert dict(taker.got) == dict.fromkeys(streams(), counted(range(12)))
            assert consumer.reconnections == 0
        await silos.start(2)


@pytest.mark.long
@mostly_gateway
async def test_a_consumer_of_a_silo_that_stops_goes_on_at_another(tmp_path: Path):
    async with cluster(tmp_path, 2) as silos, client_of(silos[1], silos[0]) as client:
        async with client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
            await publish(client, range(3))
            publishing = asyncio.create_task(publish(client, range(3, 10)))
            await silos.stop(1)
            await publishing
            await taker.has(10 * STREAMS)
            assert dict(taker.got) == dict.fromkeys(streams(), counted(range(10)))
        await silos.start(1)


@pytest.mark.long
@mostly_gateway
async def test_the_smallest_credit_gets_everything(silos: Silos):
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*", max_events=1) as consumer:
        async with taking(consumer) as (taker,):
            await publish(client, range(3))
            await taker.has(3 * STREAMS)
            assert dict(taker.got) == dict.fromkeys(streams(), counted(range(3)))


@mostly_gateway
async def test_an_event_larger_than_a_share_of_the_credit_comes(silos: Silos):
    large = bytes(700_000)
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*", max_bytes=1_000_000) as consumer:
        async with taking(consumer) as (taker,):
            for stream in streams(6):
                await client.publish(stream, large)
            await taker.has(6)
            assert set(taker.got) == set(streams(6))


@mostly_gateway
async def test_an_event_larger_than_all_credit_comes(silos: Silos):
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*", max_bytes=1000) as consumer:
        async with taking(consumer) as (taker,):
            await publish(client, [1])
            await client.publish(StreamId("n", "large"), bytes(5000))
            await taker.has(STREAMS + 1)


@pytest.mark.long
async def test_a_small_batch_arrives_although_another_silo_could_use_all_credit(silos: Silos):
    """Credit goes to the silo where something waits, though another could use all of it."""
    here = [stream for stream in streams() if silos[0].providers["default"].queue_of(stream) in queues(silos[0])]
    there = [stream for stream in streams() if stream not in here]
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*", max_events=10) as consumer:
        await publish(client, range(9), here[:1])
        held = await anext(consumer)
        await publish(client, [1], there[:1])
        async with asyncio.timeout(PATIENCE_S):
            while (await anext(consumer)).stream != there[0]:
                pass
        await held.ack()


@pytest.mark.long
async def test_members_of_all_silos_share(silos: Silos):
    async with client_of(silos[0]) as one, client_of(silos[1]) as two:
        async with one.subscribe("s", "n/*") as first, two.subscribe("s", "n/*") as second:
            async with taking(first, second) as takers:
                await publish(one, range(10))
                await eventually(lambda: sum(taker.count for taker in takers) == 10 * STREAMS)
                assert all(taker.count for taker in takers)
                for stream in streams():
                    each = [taker.got[stream] for taker in takers]
                    assert sorted(payload for some in each for payload in some) == counted(range(10))
                    assert all(sorted(some) == some for some in each)


@pytest.mark.long
@mostly_gateway
async def test_bound_queues_are_divided_over_the_members_of_all_silos(silos: Silos):
    async with client_of(silos[0]) as one, client_of(silos[1]) as two:
        async with (
            one.subscribe("s", "n/*", mode=Mode.BOUND, consumer="a") as first,
            two.subscribe("s", "n/*", mode=Mode.BOUND, consumer="b") as second,
            taking(first, second) as (a, b),
        ):
            await eventually(lambda: (first.assignment, second.assignment) == ({0, 1, 2, 3}, {4, 5, 6, 7}))
            await publish(one, range(3))
            await eventually(lambda: a.count + b.count == 3 * STREAMS)
            assert set(a.queues) <= {0, 1, 2, 3}
            assert set(b.queues) <= {4, 5, 6, 7}


@pytest.mark.long
@mostly_gateway
async def test_broadcast_gives_everybody_everything_and_keeps_positions(silos: Silos):
    async with client_of(silos[0]) as one, client_of(silos[1]) as two:
        async with (
            one.subscribe("s", "n/*", mode=Mode.BROADCAST, consumer="a") as first,
            two.subscribe("s", "n/*", mode=Mode.BROADCAST, consumer="b") as second,
            taking(first, second) as takers,
        ):
            await publish(one, range(3))
            for taker in takers:
                await taker.has(3 * STREAMS)
                assert dict(taker.got) == dict.fromkeys(streams(), counted(range(3)))
                await taker.consumer.saved()
        await publish(one, [3])
        async with two.subscribe("s", "n/*", mode=Mode.BROADCAST, consumer="a") as again, taking(again) as (taker,):
            await taker.has(STREAMS)
            assert dict(taker.got) == dict.fromkeys(streams(), counted([3]))


@pytest.mark.long
@mostly_gateway
async def test_a_consumer_that_keeps_its_positions_continues_from_them_after_queues_moved(tmp_path: Path):
    async with cluster(tmp_path, 3) as silos, client_of(silos[0]) as client:
        async with client.subscribe("s", "n/*", mode=Mode.BROADCAST, keeps_positions=True) as consumer:
            async with taking(consumer) as (taker,):
                await publish(client, range(3))
                await taker.has(3 * STREAMS)
                await consumer.saved()
                await silos.stop(2)
                await publish(client, range(3, 5))
                await taker.has(5 * STREAMS)
                assert dict(taker.got) == dict.fromkeys(streams(), counted(range(5)))
        await silos.start(2)


@pytest.mark.long
@mostly_gateway
async def test_a_subscription_that_is_moved_at_one_silo_goes_on_there_at_all(silos: Silos):
    async with client_of(silos[0]) as client, client_of(silos[1]) as other:
        async with client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
            await publish(client, range(2))
            await taker.has(2 * STREAMS)
            await other.seek("s", "earliest")
            await taker.has(4 * STREAMS)
            assert dict(taker.got) == dict.fromkeys(streams(), counted(range(2)) * 2)


@mostly_gateway
async def test_a_subscription_that_is_deleted_at_one_silo_ends_at_all(silos: Silos):
    async with client_of(silos[0]) as client, client_of(silos[1]) as other:
        async with client.subscribe("s", "n/*") as consumer:
            await other.delete_subscription("s")
            with pytest.raises(HeadraceError, match="deleted"):
                async with asyncio.timeout(PATIENCE_S):
                    await anext(consumer)


@pytest.mark.long
@mostly_gateway
async def test_a_session_at_another_silo_takes_over_the_consumer_and_ends_the_first_session(silos: Silos):
    async with client_of(silos[0]) as client, client_of(silos[1]) as other:
        async with client.subscribe("s", "n/*", consumer="c") as consumer:
            async with other.subscribe("s", "n/*", consumer="c") as second, taking(second) as (taker,):
                with pytest.raises(Fenced, match="another connection took over"):
                    async with asyncio.timeout(PATIENCE_S):
                        await anext(consumer)
                await publish(client, [1])
                await taker.has(STREAMS)


@pytest.mark.long
async def test_a_paused_stream_is_resumed_through_any_silo(silos: Silos):
    failing = True

    async def handle(_: Event) -> None:
        if failing:
            raise ValueError("not yet")

    async with client_of(silos[0]) as client, client_of(silos[1]) as other:
        subscription = await client.subscribe(
            "s", "n/*", handle, on_failure=OnFailure.PAUSE, retry=RetryPolicy(max_attempts=1)
        )
        await publish(client, [1], streams(8))

        async def all_are_paused() -> bool:
            return sum(len(queue.paused) for queue in (await client.subscription("s")).progress) == 8

        await eventually(all_are_paused)
        failing = False
        assert all(
            [await each.resume("s", stream) for each, stream in zip([client, other] * 4, streams(8), strict=True)]
        )
        await subscription.caught_up()


@pytest.mark.long
async def test_dead_letters_are_redriven_by_the_owner_of_their_queue(silos: Silos):
    failing, got = True, list[StreamId]()

    async def handle(event: Event) -> None:
        if failing:
            raise ValueError("not yet")
        assert event.stream is not None
        got.append(event.stream)

    async with client_of(silos[0]) as client:
        await client.subscribe("s", "n/*", handle, retry=RetryPolicy(max_attempts=1))
        await publish(client, [1], streams(8))

        async def letters() -> int:
            return len(await client.dead_letters("s"))

        await eventually(lambda: there_are(letters, 8))
        failing = False
        assert await client.redrive("s") == 8
        await eventually(lambda: there_are(letters, 0))
        assert sorted(got) == sorted(streams(8))


@pytest.mark.long
async def test_caught_up_waits_for_all_silos(silos: Silos):
    async with client_of(silos[0]) as client, client.subscribe("s", "n/*") as consumer:
        await publish(client, [1])
        waiting = asyncio.create_task(client.caught_up("s"))
        async with taking(consumer) as (taker,):
            await waiting
            assert taker.count == STREAMS


async def test_a_silo_takes_no_consumers_before_it_joins_its_cluster(silos: Silos):
    """Its sessions would have no name: a consumer would open another one with it, which takes over the first."""
    clustered_silo = silos[0].clustered_silo
    assert clustered_silo is not None
    async with connecting(silos[0].grpc_address or "") as caller:
        await caller.create("s", "n/*")
        name = clustered_silo.placements.silo
        clustered_silo.placements.join("")
        for attempt in (begin(caller, "s"), begin(caller, "s", direct=True), pull(caller)):
            with pytest.raises(Refused, match=r"UNAVAILABLE.*not joined its cluster yet"):
                await attempt
        clustered_silo.placements.join(name)
        await (await begin(caller, "s")).close()


async def test_a_pull_returns_events_of_any_silo(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller, connecting(silos[1].grpc_address or "") as other:
        await caller.create("s", "n/*")
        for stream in streams(8):
            await caller.publish(batch(str(stream), b"0", b"1"))
        got: list[tuple[int, int, int]] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < 16:
                events = await pull_events(caller, consumer="p", max_events=3, wait_ms=2000)
                assert len(events) <= 3
                got += [(each.queue, each.offset, each.index) for each in events]
                assert not await acknowledge(other if len(got) % 2 else caller, events, consumer="p")
        assert sorted(got) == sorted(set(got))

        async def everything_is_done() -> bool:
            progress = (await caller.get("s")).progress
            return all(one.next_offset == one.end_offset and not one.streams_behind for one in progress)

        await eventually(everything_is_done)


@pytest.mark.long
async def test_pulled_events_that_are_not_acknowledged_come_again(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller:
        await caller.create("s", "n/*")
        for stream in streams(4):
            await caller.publish(batch(str(stream), b"0"))

        async def pulled() -> list[tuple[int, int]]:
            events = await pull_events(caller, consumer="p", wait_ms=100, session_timeout_ms=1000)
            return [(one.queue, one.offset) for one in events]

        first, again = list[tuple[int, int]](), list[tuple[int, int]]()
        async with asyncio.timeout(PATIENCE_S):
            while len(first) < 4:
                first += await pulled()
            while len(again) < 4:
                again += await pulled()
        assert sorted(again) == sorted(first)


async def test_a_consumer_that_is_silent_is_given_up_at_all_silos(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller, client_of(silos[1]) as client:
        silent = await begin(caller, definition=defined("s"), session_timeout_ms=1000)
        await silent.grant(100, 1 << 20)
        for stream in streams(8):
            await caller.publish(batch(str(stream), b"0"))
        await silent.take(8)
        async with client.subscribe("s") as consumer, taking(consumer) as (taker,):
            await taker.has(8)
        assert (await silent.end()) is not None


async def test_credit_is_taken_back_from_all_silos(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller:
        session = await begin(caller, definition=defined("s"))
        await session.grant(100, 10_000)
        await caller.publish(batch("n/1", b"0"))
        await session.take(1)
        await session.say(reclaim=True)
        while not (response := await session.read()) or not response.HasField("returned"):
            pass
        assert response.returned.events == 99
        await caller.publish(batch("n/2", b"0"))
        await session.grant(1, 1000)
        await session.take(1)


async def test_pulls_of_a_subscription_that_a_handler_serves_are_refused(silos: Silos):
    async def handle(_: Event) -> None: ...

    await silos[1].providers["default"].subscribe("s", "n/*", handle)
    async with connecting(silos[0].grpc_address or "") as caller:
        with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*handler in the silo"):
            async with asyncio.timeout(PATIENCE_S):
                await pull(caller, wait_ms=1000)


async def test_one_of_several_first_pulls_waits_and_the_others_are_told(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller:
        await caller.create("s", "n/*")
        pulls = [pull(caller, wait_ms=500) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*pulls, return_exceptions=True)
        refused = [str(answer) for answer in answers if isinstance(answer, Refused)]
        assert len(refused) == 3
        assert all("waits in another call" in text for text in refused)


async def test_too_many_acknowledgements_are_refused_at_once(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller:
        session = await begin(caller, definition=defined("s"))
        await session.say(reports=[pb.QueueReport(acknowledgements=[pb.Acknowledgement()] * 100_001)])
        refused = await session.end()
        assert refused is not None
        assert "at most 100,000" in refused.details


@pytest.mark.long
async def test_many_acknowledgements_in_many_requests_are_passed_on(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller:
        session = await begin(caller, definition=defined("s"))
        await session.grant(10, 10_000)
        await caller.publish(batch("n/1", b"0"))
        events = await session.take(1)
        for _ in range(2):
            await session.say(
                reports=[report(events[0], acknowledgements=[pb.Acknowledgement(offset=1 << 40)] * 40_000)]
            )
        await session.acknowledge_saved(events)


@pytest.mark.long
async def test_a_consumer_that_does_not_read_disturbs_no_other(silos: Silos):
    async with connecting(silos[0].grpc_address or "") as caller, client_of(silos[0]) as client:
        idle = await begin(caller, definition=defined("idle"), session_timeout_ms=500)
        await idle.grant(1 << 20, 1 << 40)

        async def stay() -> None:
            async for _ in ticks(0.1):
                await idle.say()

        staying = asyncio.create_task(stay())
        async with client.subscribe("s", "n/*") as consumer, taking(consumer) as (taker,):
            for _ in range(3):
                for stream in streams(8):
                    await client.publish(stream, bytes(800_000))
            await taker.has(24)
            assert consumer.reconnections == 0
        await end(staying)


async def test_a_drained_gateway_sends_its_consumers_elsewhere_while_events_wait(tmp_path: Path):
    async with (
        cluster(tmp_path, drain_s=2.0 * PATIENCE_S) as silos,
        client_of(*silos) as client,
        client.subscribe("s", "n/*", max_events=10) as consumer,
        taking(consumer) as (taker,),
        connecting(silos[0].grpc_address or "") as caller,
        client_of(silos[1]) as producer,
    ):
        publishing = asyncio.create_task(publish(producer, range(20)))
        await taker.has(STREAMS)
        request = cluster_pb.DrainSiloRequest()
        await caller.ask("headrace.v1.ClusterService/DrainSilo", request, cluster_pb.DrainSiloResponse)
        await publishing
        await taker.has(20 * STREAMS)
        assert dict(taker.got) == dict.fromkeys(streams(), counted(range(20)))


async def test_queues_whose_consumers_keep_their_events_drain_together(tmp_path: Path):
    """A stop takes as long as one of them may, not as long as all."""
    async with cluster(tmp_path, 1) as silos, client_of(silos[0]) as client:
        started, go_on = Counter[StreamId](), asyncio.Event()

        async def hold(event: Event) -> None:
            assert event.stream is not None
            started[event.stream] += 1
            await go_on.wait()

        provider, clustered_silo = silos[0].providers["default"], silos[0].clustered_silo
        assert clustered_silo is not None
        await provider.subscribe("slow", "n/*", hold)
        await publish(client, [1])
        await eventually(lambda: len(started) == STREAMS)
        reading = list(provider.manager.agents)
        draining = asyncio.create_task(clustered_silo.membership.drain(PATIENCE_S))
        await eventually(lambda: not set(reading) & set(provider.manager.agents))
        go_on.set()
        await draining
        assert queues(silos[0]) == []


@pytest.mark.long
@pytest.mark.parametrize("direct", [True], indirect=True)
async def test_a_client_that_is_not_direct_calls_no_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with cluster(tmp_path, public_address="127.0.0.1:1") as silos:
        async with (
            Client(silos[0].grpc_address or "", direct=False) as client,
            client.subscribe("s", "n/*") as consumer,
        ):
            await client.publish_many((StreamId("n", str(key)), b"x") for key in range(STREAMS))
            for _ in range(STREAMS):
                batch = await anext(consumer)
                await batch.ack()
            await consumer.saved()
    assert "serves as gateway" not in caplog.text
