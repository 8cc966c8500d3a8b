"""A silo's description of itself over gRPC, and stopping and starting its agents."""

import asyncio
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from headrace import Event
from headrace.adapters import Backlog
from headrace.proto.v1 import cluster_pb2 as pb
from headrace.proto.v1 import consumer_pb2, subscriptions_pb2
from headrace.server.config import GrpcConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.peers import PeerConnections
from headrace.streams.errors import StorageError, Unavailable
from tests.silo.clusters import clustered, queues
from tests.silo.services.calling import (
    CLUSTER,
    Allowed,
    Caller,
    Refused,
    Stream,
    batch,
    connecting,
    make_tokens,
    opened,
)
from tests.silo.services.sessions import begin

SUBSCRIBE = "headrace.v1.ConsumerService/Subscribe"


async def ask(caller: Caller, method: str, request: Message) -> Any:
    return await caller.ask(f"{CLUSTER}/{method}", request, getattr(pb, f"{method}Response"))


def states(silo: pb.Silo) -> list[str]:
    return [queue.state for provider in silo.providers for queue in provider.queues]


async def test_a_silo_tells_its_providers_and_queues(tmp_path: Path):
    async with opened(tmp_path, provider={"queues": 3}) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a"))
        told = await caller.describe()
        assert (told.state, told.address, told.version) == ("running", silo.grpc_address, version("headrace"))
        assert told.name
        (provider,) = told.providers
        assert (provider.name, provider.adapter) == ("default", "log")
        assert [queue.index for queue in provider.queues] == [0, 1, 2]
        assert sum(queue.end_offset for queue in provider.queues) == 1


async def test_cached_and_read_events_are_counted(tmp_path: Path):
    read = asyncio.Event()

    async def note(event: Event) -> None:
        read.set()

    async with opened(tmp_path, provider={"queues": 1}) as silo, connecting(silo.grpc_address or "") as caller:
        await silo.providers["default"].subscribe("printer", "shop/*", note)
        await caller.publish(batch("shop/1", b"abc"))
        await read.wait()
        (queue,) = (await caller.describe()).providers[0].queues
        assert (queue.read_offset, queue.end_offset) == (1, 1)


async def test_a_watcher_is_told_at_once_and_when_something_changes(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        watch = caller.responses(f"{CLUSTER}/WatchCluster", b"")
        first = await watch.read(pb.WatchClusterResponse)
        assert first is not None
        assert set(states(first.cluster.silos[0])) == {"idle"}
        await ask(caller, "StopAgents", pb.StopAgentsRequest())
        second = await watch.read(pb.WatchClusterResponse)
        assert second is not None
        assert set(states(second.cluster.silos[0])) == {"stopped"}


async def test_stopped_agents_deliver_nothing_until_they_are_started(tmp_path: Path):
    got: list[bytes] = []

    async def note(event: Event) -> None:
        got.append(event.payload)

    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        provider = silo.providers["default"]
        subscription = await provider.subscribe("printer", "shop/*", note)
        keys = {provider.queue_of(stream): stream for stream in (provider.stream("shop", str(n)).id for n in range(20))}
        await ask(caller, "StopAgents", pb.StopAgentsRequest(queues=[1], drain_ms=1))
        for queue in (0, 1):
            await caller.publish(batch(str(keys[queue]), b"%d" % queue))
        assert states(await caller.describe())[1] == "stopped"
        while b"0" not in got:
            await caller.describe()
        await caller.describe()
        assert got == [b"0"]
        await ask(caller, "StartAgents", pb.StartAgentsRequest())
        await subscription.caught_up()
        assert got == [b"0", b"1"]
        assert "stopped" not in states(await caller.describe())


async def test_a_wrong_request_stops_nothing(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        for kind, method in ((pb.StopAgentsRequest, "StopAgents"), (pb.StartAgentsRequest, "StartAgents")):
            with pytest.raises(Refused, match=r"INVALID_ARGUMENT .*: queues: provider 'default' has 2 queues, from 0"):
                await ask(caller, method, kind(queues=[0, 2]))
            with pytest.raises(Refused, match=r"INVALID_ARGUMENT .*: queues: .* names each once"):
                await ask(caller, method, kind(queues=[0] * 1_000_000))
            with pytest.raises(Refused, match=r"NOT_FOUND \(not_found\): this silo has no provider 'other'"):
                await ask(caller, method, kind(provider="other"))
        assert "stopped" not in states(await caller.describe())


async def test_a_drained_silo_has_no_consumers_until_it_is_started(tmp_path: Path):
    definition = subscriptions_pb2.SubscriptionDefinition(name="printer", selector="shop/*")
    opening = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(definition=definition, consumer="c"))
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        session = caller.stream(SUBSCRIBE)
        await session.write(opening)
        await session.read(consumer_pb2.SubscribeResponse)
        await ask(caller, "DrainSilo", pb.DrainSiloRequest(drain_ms=1000))
        with pytest.raises(Refused, match="UNAVAILABLE"):
            await to_the_end(session)
        told = await caller.describe()
        assert told.state == "drained"
        assert set(states(told)) == {"stopped"}
        assert await health(caller, "headrace.v1.ConsumerService") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(caller, "") == health_pb2.HealthCheckResponse.SERVING
        await caller.publish(batch("shop/1", b"a"))
        with pytest.raises(Refused, match=r"UNAVAILABLE .*: the silo stops, or is drained"):
            await begin(caller, definition=definition, consumer="c")  # it may be refused before its message is written

        await ask(caller, "StartAgents", pb.StartAgentsRequest())
        assert (await caller.describe()).state == "running"
        assert await health(caller, "headrace.v1.ConsumerService") == health_pb2.HealthCheckResponse.SERVING
        last = caller.stream(SUBSCRIBE)
        await last.write(opening)
        await last.write(consumer_pb2.SubscribeRequest(credit=consumer_pb2.Credit(events=10, bytes=1 << 20)))
        payloads: list[bytes] = []
        while not payloads:
            response = await last.read(consumer_pb2.SubscribeResponse)
            assert response is not None
            payloads += [each.payload for each in response.batches]
        assert payloads == [b"a"]
        last.cancel()


async def test_a_silo_by_itself_is_undrained_by_its_name_or_none(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        name = (await caller.describe()).name
        for named in (name, ""):
            await ask(caller, "DrainSilo", pb.DrainSiloRequest(silo=named, drain_ms=1000))
            assert set(states(await caller.describe())) == {"stopped"}
            await ask(caller, "UndrainSilo", pb.UndrainSiloRequest(silo=named))
            told = await caller.describe()
            assert (told.state, set(states(told))) == ("running", {"idle"})
        for kind, method in ((pb.DrainSiloRequest, "DrainSilo"), (pb.UndrainSiloRequest, "UndrainSilo")):
            with pytest.raises(Refused, match=f"NOT_FOUND .*: there is no living silo 'other': there is {name}"):
                await ask(caller, method, kind(silo="other"))
        assert (await caller.describe()).state == "running"


async def test_a_queue_tells_how_far_the_slowest_subscription_is_behind(tmp_path: Path):
    async with opened(tmp_path, provider={"queues": 1}) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a", b"b"))
        (queue,) = (await caller.describe()).providers[0].queues
        assert (queue.lag_batches, queue.lag_events, queue.lag_ms) == (0, 0, 0)
        await caller.create("slow", "shop/*")
        await caller.publish(batch("shop/1", b"c", b"d", b"e"))
        await caller.publish(batch("shop/2", b"f"))
        (queue,) = (await caller.describe()).providers[0].queues
        assert (queue.lag_batches, queue.lag_events, queue.lag_estimated) == (2, 4, False)
        subscription = await silo.providers["default"].subscribe("fast", "shop/*", note_nothing)
        await subscription.caught_up()
        (queue,) = (await caller.describe()).providers[0].queues
        assert (queue.lag_batches, queue.lag_events) == (2, 4)


async def test_a_queue_reports_its_delayed_events(tmp_path: Path):
    chosen = {"queues": 1, "delays": "store"}
    async with opened(tmp_path, provider=chosen) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("shop/1", b"a", b"b", delay_us=3_600_000_000))
        (queue,) = (await caller.describe()).providers[0].queues
        assert (queue.delayed_events, queue.lag_events) == (2, 0)
        assert 3_000_000 < queue.due_in_ms <= 3_600_000


async def note_nothing(event: Event) -> None: ...


async def to_the_end(session: Stream) -> None:
    while await session.read(consumer_pb2.SubscribeResponse) is not None:
        pass


async def health(caller: Caller, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await caller.ask("grpc.health.v1.Health/Check", request, health_pb2.HealthCheckResponse)).status


async def test_begun_call_is_finished_though_the_caller_does_not_wait(tmp_path: Path):
    entered, finish = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> None:
        entered.set()
        await finish.wait()

    async with AsyncExitStack() as stack:
        silo = await stack.enter_async_context(opened(tmp_path))
        caller = await stack.enter_async_context(connecting(silo.grpc_address or ""))
        await silo.providers["default"].subscribe("printer", "shop/*", slow)
        await caller.publish(batch("shop/1", b"a"))
        await entered.wait()
        with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
            await caller.ask(f"{CLUSTER}/DrainSilo", pb.DrainSiloRequest(), pb.DrainSiloResponse, timeout=0.2)
        assert (await caller.describe()).state == "draining"
        finish.set()
        while (told := await caller.describe()).state != "drained":
            pass
        assert set(states(told)) == {"stopped"}


async def test_a_failed_change_is_told_its_caller_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def fail(*_: object) -> None:
        raise StorageError("no space left")

    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        monkeypatch.setattr(silo.providers["default"].manager.queue_host, "stop_agents", fail)
        with pytest.raises(Refused, match="no space left"):
            await ask(caller, "DrainSilo", pb.DrainSiloRequest())
        monkeypatch.undo()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def note_counting(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queues whose lag is counted there from now on, in the order of counting."""
    counted: list[int] = []
    adapter = silo.providers["default"].adapter
    backlog = adapter.backlog

    async def noted(queue: int, offset: int) -> Backlog:
        counted.append(queue)
        return await backlog(queue, offset)

    monkeypatch.setattr(adapter, "backlog", noted)
    return counted


async def test_lag_is_counted_only_for_callers_that_may_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = await make_tokens(tmp_path, admin=Allowed(manage=["*"]), producer=Allowed(publish=["*"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        admin, producer = (Caller(channel.channel, tokens[name]) for name in ("admin", "producer"))
        await admin.create("printer", "shop/*")
        counted = note_counting(silo, monkeypatch)
        await producer.describe()
        await producer.responses(f"{CLUSTER}/WatchCluster", b"").read(pb.WatchClusterResponse)
        await ask(admin, "DescribeCluster", pb.DescribeClusterRequest(here=True))
        assert counted == []
        await admin.describe()
        assert sorted(counted) == [0, 1]
        watched = await admin.responses(f"{CLUSTER}/WatchCluster", b"").read(pb.WatchClusterResponse)
        assert watched is not None
        assert sorted(counted) == [0, 0, 1, 1]


async def test_silos_that_look_for_one_another_count_no_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = SiloConfig(data=str(tmp_path), grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=2)})
    async with clustered(config, 2) as (asking, asked), connecting(asking.grpc_address or "") as caller:
        await caller.create("printer", "shop/*")
        assert asking.clustered_silo is not None
        record = asking.clustered_silo.silos["silo-1"]
        counted = note_counting(asked, monkeypatch)
        peers = PeerConnections(asking.clustered_silo.secret, None)
        try:
            assert await peers.reach(record)
        finally:
            await peers.aclose()
        assert counted == []
        await ask(caller, "DescribeCluster", pb.DescribeClusterRequest())
        assert sorted(counted) == queues(asked)


async def test_a_call_to_a_silo_that_is_given_up_may_go_to_another_silo(tmp_path: Path):
    config = SiloConfig(data=str(tmp_path), grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=2)})
    async with clustered(config, 2) as (asking, _):
        assert asking.clustered_silo is not None
        peers = PeerConnections(asking.clustered_silo.secret, None)
        try:
            call = peers.stream(asking.clustered_silo.silos["silo-1"], "ConsumerService/Subscribe")
            waiting = asyncio.ensure_future(call.receive())
            await asyncio.sleep(0)
            peers.keep(())
            with pytest.raises(Unavailable, match="was given up"):
                await waiting
        finally:
            await peers.aclose()


async def test_stopping_queues_and_seeing_their_sizes_needs_permission_to_manage_everything(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path, admin=Allowed(manage=["*"]), manager=Allowed(manage=["shop"]), producer=Allowed(publish=["*"])
    )
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        callers = {name: Caller(channel.channel, token) for name, token in tokens.items()}
        await callers["producer"].publish(batch("shop/1", b"a"))
        for method in ("StopAgents", "StartAgents", "DrainSilo"):
            request = getattr(pb, f"{method}Request")()
            for name in ("manager", "producer"):
                with pytest.raises(Refused, match=r"PERMISSION_DENIED .* may not manage all namespaces"):
                    await ask(callers[name], method, request)
            with pytest.raises(Refused, match="UNAUTHENTICATED"):
                await ask(channel, method, request)
        for method in ("DescribeCluster", "WatchCluster"):
            with pytest.raises(Refused, match="UNAUTHENTICATED"):
                await channel.responses(f"{CLUSTER}/{method}", b"").read(pb.WatchClusterResponse)
        offsets = {
            name: sum(queue.end_offset for queue in (await caller.describe()).providers[0].queues)
            for name, caller in callers.items()
        }
        assert offsets == {"admin": 1, "manager": 0, "producer": 0}
        watch = callers["manager"].responses(f"{CLUSTER}/WatchCluster", b"")
        told = await watch.read(pb.WatchClusterResponse)
        assert told is not None
        assert [queue.end_offset for queue in told.cluster.silos[0].providers[0].queues] == [0, 0]
