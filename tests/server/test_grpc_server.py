"""The server's port: access to it, its description of itself, its answers to garbage, and its end."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from headrace.proto.v1 import publisher_pb2
from headrace.server.access import NoTokens
from headrace.server.config import GrpcConfig
from headrace.server.connection_times import ConnectionTimes
from headrace.server.grpc_server import serving
from headrace.server.limits import ClientLimits
from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod
from headrace.streams.errors import Busy, InvalidArgument
from tests.certificates import Authority
from tests.silo.services.calling import PUBLISH_STREAM, Caller, Refused, batch, connecting, offering, opened

EMPTY = empty_pb2.Empty()
HEALTH = "grpc.health.v1.Health"
STATUS = health_pb2.HealthCheckResponse


async def who(call: ServiceCall, request: bytes) -> bytes:
    return empty_pb2.Empty().SerializeToString()


WHO = ServiceMethod("test.Service/Who", MethodKind.UNARY, who)


async def outcome(caller: Caller, method: str) -> str:
    try:
        await caller.ask(method, EMPTY, empty_pb2.Empty)
    except Refused as refused:
        return str(refused)
    return "OK"


async def health(caller: Caller, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await caller.ask(f"{HEALTH}/Check", request, STATUS)).status


# The port


async def test_a_port_that_another_process_has_is_busy():
    async with offering(WHO) as first:
        address = first.address
        config = GrpcConfig(port=int(address.rpartition(":")[2]))
        with pytest.raises(Busy, match=f"{address} is in use by another process, .* or name another port"):
            async with serving(config, NoTokens(), lambda _: [WHO], drain_s=1):
                pass
        await first.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


async def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"gRPC cannot be served on 192\.0\.2\.1:0"):
        async with offering(WHO, host="192.0.2.1", insecure=True):
            pass


async def test_an_address_that_the_machine_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """In a container without IPv6, `localhost` may stand for ::1, too, and before 127.0.0.1."""

    async def both(_: str, port: int, **__: Any) -> list[Any]:
        kind = (socket.SOCK_STREAM, 6, "")
        return [
            (socket.AF_INET6, *kind, ("2001:db8::1", port, 0, 0)),
            (socket.AF_INET, *kind, ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    config = GrpcConfig(host="localhost", port=0, native_port=0)
    async with serving(config, NoTokens(), lambda _: [WHO], drain_s=1):
        pass


async def test_a_name_that_is_no_address_is_refused():
    with pytest.raises(InvalidArgument, match=r"grpc\.host: 'no such host' is not an address"):
        async with offering(WHO, host="no such host", insecure=True):
            pass


async def test_the_address_of_ip_version_6_is_in_brackets():
    async with offering(WHO, host="::1") as caller:
        assert caller.address.startswith("[::1]:")
        await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


# TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, common_name: str | None = None) -> grpc.ChannelCredentials:
    root = authority.certificate.read_bytes()
    if common_name is None:
        return grpc.ssl_channel_credentials(root)
    own = authority.issue(f"{common_name}.example", common_name=common_name)
    return grpc.ssl_channel_credentials(root, own.key.read_bytes(), own.certificate.read_bytes())


async def test_with_tls_only_those_that_speak_it_are_served(authority: Authority):
    files = authority.issue("127.0.0.1")
    async with offering(WHO, certificate=str(files.certificate), key=str(files.key)) as plain:
        async with connecting(plain.address, credentials=trusting(authority)) as caller:
            await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)
        with pytest.raises(Refused, match="UNAVAILABLE"):
            await plain.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


async def test_with_client_certificates_the_caller_goes_by_its_name(authority: Authority, tmp_path: Path):
    names: list[str] = []

    async def note(call: ServiceCall, request: bytes) -> bytes:
        names.append(call.principal.name)
        return b""

    files = authority.issue("127.0.0.1")
    stranger = Authority(tmp_path, "strangers")
    own = stranger.issue("mallory.example", common_name="mallory")
    strange = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(), own.key.read_bytes(), own.certificate.read_bytes()
    )
    async with offering(
        ServiceMethod("test.Service/Note", MethodKind.UNARY, note),
        certificate=str(files.certificate),
        key=str(files.key),
        client_ca=str(authority.certificate),
    ) as plain:
        for name in ("shop", "press"):
            async with connecting(plain.address, credentials=trusting(authority, name)) as caller:
                await caller.ask("test.Service/Note", EMPTY, empty_pb2.Empty)
        for credentials in (trusting(authority), strange):
            async with connecting(plain.address, credentials=credentials) as caller:
                with pytest.raises(Refused, match="UNAVAILABLE"):
                    await caller.ask("test.Service/Note", EMPTY, empty_pb2.Empty)
    assert names == ["shop", "press"]


# Health and reflection


async def test_health_is_told_by_service_and_to_everybody(tmp_path: Path):
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as caller:
        services = ["PublisherService", "ConsumerService", "SubscriptionService", "ReaderService", "ClusterService"]
        for service in ("", HEALTH, *(f"headrace.v1.{name}" for name in services)):
            assert await health(caller, service) == STATUS.SERVING, service
        with pytest.raises(Refused, match="NOT_FOUND"):
            await health(caller, "headrace.v1.NoService")


async def test_health_watch_is_told_that_the_silo_stops():
    async with offering(WHO) as caller:
        watch = caller.responses(f"{HEALTH}/Watch", health_pb2.HealthCheckRequest())
        unknown = caller.responses(f"{HEALTH}/Watch", health_pb2.HealthCheckRequest(service="no.Service"))
        assert await watch.read(STATUS) == STATUS(status=STATUS.SERVING)
        assert await unknown.read(STATUS) == STATUS(status=STATUS.SERVICE_UNKNOWN)
        caller.stop.set()
        assert await watch.read(STATUS) == STATUS(status=STATUS.NOT_SERVING)
        assert await watch.read(STATUS) is None


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_services_and_their_messages_to_everybody(tmp_path: Path, version: str):
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as caller:
        stream = caller.stream(f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        kind = reflection_pb2.ServerReflectionResponse
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await stream.read(kind)
        assert listed is not None
        names = {service.name for service in listed.list_services_response.service}
        assert {"headrace.v1.PublisherService", "headrace.v1.ClusterService", HEALTH} <= names
        await stream.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.EventBatch"))
        described = await stream.read(kind)
        assert described is not None
        assert b"headrace/proto/v1/events.proto" in described.file_descriptor_response.file_descriptor_proto[0]
        await stream.done_writing()
        assert await stream.read(kind) is None


# Garbage


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "noise": bytes(range(256)) * 40,
    "preface, then noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 40,
    "preface, then a frame of 16 MiB": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
}


async def hung_up_on(address: str, data: bytes) -> None:
    """Say this, and wait for the end of the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_connection_that_sends_garbage_is_closed_and_the_others_are_served(garbage: bytes):
    async with offering(WHO) as caller:
        for _ in range(10):
            await hung_up_on(caller.address, garbage)
            await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


async def test_silent_connection_is_closed():
    async with offering(WHO, times=ConnectionTimes(handshake_s=0.2)) as caller:
        await hung_up_on(caller.address, b"")
        await hung_up_on(caller.address, b"PRI * HTTP/2.0\r\n")
        await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


async def test_an_idle_connection_is_closed():
    async with offering(WHO, times=ConnectionTimes(idle_s=0.2)) as caller:
        await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)
        while caller.channel.get_state() is grpc.ChannelConnectivity.READY:
            await caller.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await caller.ask("test.Service/Who", EMPTY, empty_pb2.Empty)


async def test_message_that_is_huge_when_unpacked_is_refused():
    async with offering(WHO) as caller:
        bomb = bytes(100 << 20)  # its gzip has 100 KB
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
            await caller.ask("test.Service/Who", bomb, empty_pb2.Empty, compression=grpc.Compression.Gzip)
        await caller.ask("test.Service/Who", bytes(1000), empty_pb2.Empty, compression=grpc.Compression.Gzip)


# The end


async def test_calls_that_are_open_end_in_order_and_new_ones_are_refused():
    entered, finish = asyncio.Event(), asyncio.Event()

    async def slow(call: ServiceCall, request: bytes) -> bytes:
        entered.set()
        await call.closing.wait()
        await finish.wait()
        return b""

    methods = (
        ServiceMethod("test.Service/Slow", MethodKind.UNARY, slow),
        ServiceMethod("test.Service/End", MethodKind.UNARY, who, while_closing=True),
        WHO,
    )
    async with offering(*methods) as caller:
        open_call = asyncio.create_task(caller.ask("test.Service/Slow", EMPTY, empty_pb2.Empty))
        await entered.wait()
        caller.stop.set()
        while (told := await outcome(caller, "test.Service/Who")) == "OK":
            pass
        assert told.startswith("UNAVAILABLE (unavailable): the silo stops")
        assert await health(caller) == STATUS.NOT_SERVING
        await caller.ask("test.Service/End", EMPTY, empty_pb2.Empty)
        finish.set()
        assert await open_call == EMPTY
        await caller.stopped.wait()


async def test_a_call_that_does_not_end_is_cut_off(caplog: pytest.LogCaptureFixture):
    entered = asyncio.Event()

    async def endless(call: ServiceCall, request: bytes) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    async with offering(ServiceMethod("test.Service/Endless", MethodKind.UNARY, endless), drain_s=0.05) as caller:
        open_call = asyncio.create_task(caller.ask("test.Service/Endless", EMPTY, empty_pb2.Empty))
        await entered.wait()
        caller.stop.set()
        with pytest.raises(Refused):
            await open_call
    assert "gRPC calls did not end within 0.1 s and are cancelled: 1" in caplog.text


async def test_a_silo_stops_while_callers_are_connected(tmp_path: Path):
    async with AsyncExitStack() as clients, AsyncExitStack() as silos:
        silo = await silos.enter_async_context(opened(tmp_path))
        caller = await clients.enter_async_context(connecting(silo.grpc_address or ""))
        await caller.publish(batch("shop/1", b"x"))
        stream = caller.stream("headrace.v1.PublisherService/PublishStream")
        watch = caller.responses("headrace.v1.ClusterService/WatchCluster", b"")
        await watch.read(empty_pb2.Empty)
        await silos.aclose()
        for end in (stream, watch):
            with pytest.raises(Refused, match=r"UNAVAILABLE \(unavailable\): the silo stops"):
                await end.read(empty_pb2.Empty)


async def test_usage_of_clients_and_refusals_are_measured(tmp_path: Path):
    limits = ClientLimits(requests_per_s=0.001, burst=2)
    async with opened(tmp_path, limits=limits) as silo, connecting(silo.grpc_address or "") as caller:
        stream = caller.stream(PUBLISH_STREAM)
        await stream.write(publisher_pb2.PublishStreamRequest(batches=[batch("n/k", b"x")]))
        await stream.read(publisher_pb2.PublishStreamResponse)
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
            await caller.publish(batch("n/k", b"x"))
        text = (await silo.metrics()).body.decode()
        for line in (
            "clients 1.0",
            "connections 1.0",
            "calls 1.0",
            "publish_bytes 0.0",
            'refused_total{limit="requests_per_s"} 1.0',
        ):
            assert f"\nheadrace_grpc_{line}\n" in text
        stream.cancel()
