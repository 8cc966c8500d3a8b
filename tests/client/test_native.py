"""How a client finds the native port of a silo, and goes on over gRPC if it cannot use it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import empty_pb2
from hypothesis import given
from hypothesis import strategies as some

from headrace import Client, Closed, StreamId, Unavailable
from headrace.client.connection import GrpcTransport, Tls
from headrace.client.native import NativeTransport
from headrace.client.packets import ANNOUNCED, HEAD, PacketConnection, PacketHead, PacketKind
from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod
from tests.certificates import Authority
from tests.client.silos import SiloProcess
from tests.server.native_calls import HearingTransport, calling, native_port
from tests.silo.services.calling import offering

S = StreamId("n", "k")
EMPTY = empty_pb2.Empty()


async def peer(call: ServiceCall, request: bytes) -> bytes:
    """The connection that the call came on."""
    return call.peer.encode()


async def peers(call: ServiceCall) -> None:
    while await call.read() is not None:
        await call.write(call.peer.encode())


METHODS = (
    ServiceMethod("headrace.v1.TestService/Peer", MethodKind.UNARY, peer),
    ServiceMethod("headrace.v1.TestService/Peers", MethodKind.STREAM, peers),
)


async def is_native(transport: Any) -> bool:
    """Make a call, and return whether calls are native now."""
    assert isinstance(transport, NativeTransport)
    await transport.unary("TestService/Peer", b"", timeout_s=10)
    return transport.is_native


@contextmanager
def announcing(transport: object, text: str) -> Generator[None]:
    """Let the client hear of another port or process than the silo's."""
    assert isinstance(transport, HearingTransport)
    with transport.told(text):
        yield


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def test_a_client_learns_the_port_over_grpc_and_calls_there_from_then_on():
    async with offering(*METHODS) as server, calling(server.address) as transport:
        first = await transport.unary("TestService/Peer", b"", timeout_s=10)
        call = transport.stream("TestService/Peers")
        await call.send(b"")
        assert await call.receive() == first
        assert await transport.unary("TestService/Peer", b"", timeout_s=10) == first
        assert await is_native(transport)


async def test_a_stream_may_be_the_first_call():
    async with offering(*METHODS) as server, calling(server.address) as transport:
        call = transport.stream("TestService/Peers")
        assert call.address == server.address
        await call.send(b"")
        await call.done_sending()
        assert (await call.receive() or b"").startswith(b"ipv4:127.0.0.1:")
        assert await call.receive() is None
        await call.ended()


@pytest.mark.parametrize("end", ["cancel", "abandon"])
async def test_a_first_stream_may_be_cancelled_before_it_has_begun(end: str):
    async with offering(*METHODS) as server, calling(server.address) as transport:
        call = transport.stream("TestService/Peers")
        receiving = asyncio.create_task(call.receive())
        await asyncio.sleep(0)
        if end == "cancel":
            call.cancel()
        else:
            await call.abandon()
        with pytest.raises(Unavailable, match="was cancelled"):
            await receiving
        await call.ended()
        assert await is_native(transport)


async def test_a_first_stream_to_no_silo_says_so(free_port: int):
    async with calling(f"127.0.0.1:{free_port}") as transport:
        call = transport.stream("TestService/Peers")
        with pytest.raises(Unavailable, match="no silo answers"):
            await call.send(b"")
        with pytest.raises(Unavailable, match="no silo answers"):
            await call.receive()


async def test_a_silo_without_a_native_port_is_called_over_grpc():
    async with offering(*METHODS, native=False) as server, calling(server.address) as transport:
        assert not await is_native(transport)
        call = transport.stream("TestService/Peers")
        await call.send(b"")
        assert await call.receive() is not None


async def test_a_call_that_waits_while_its_transport_is_closed_fails_and_is_not_cancelled():
    """A silo closes its connection to another silo that is declared dead, while calls of clients wait for it."""
    began = asyncio.Event()

    async def endless(call: ServiceCall, request: bytes) -> bytes:
        began.set()
        await asyncio.Event().wait()
        return b""

    method = ServiceMethod("headrace.v1.TestService/Endless", MethodKind.UNARY, endless)
    async with offering(method, native=False, drain_s=0.05) as server, calling(server.address) as transport:
        call = asyncio.create_task(transport.unary("TestService/Endless", b"", timeout_s=10))
        await began.wait()
        await transport.aclose()
        with pytest.raises(Closed):
            await call


async def test_a_port_that_cannot_be_reached_is_no_error(free_port: int, caplog: pytest.LogCaptureFixture):
    async with offering(*METHODS) as server, calling(server.address) as transport:
        with announcing(transport, f"{free_port} {bytes(16).hex()}"):
            assert not await is_native(transport)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_port_that_does_not_answer_is_given_up():
    async with offering(*METHODS) as server, calling(server.address, times={"connect_s": 0.2}) as transport:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            with announcing(transport, f"{mute.getsockname()[1]} {bytes(16).hex()}"):
                assert not await is_native(transport)


async def test_another_process_at_the_port_gets_no_token():
    async with offering(*METHODS) as server, calling(server.address, token="secret") as transport:
        port = await native_port(server.address)
        for announced in (f"{port} {bytes(16).hex()}", f"{port} no hex", "no port"):
            async with calling(server.address, token="secret") as other:
                with announcing(other, announced):
                    assert not await is_native(other)
        assert await is_native(transport)


async def test_a_client_that_does_not_trust_the_certificate_of_the_port_uses_grpc(tmp_path: Path):
    mine, other = Authority(tmp_path), Authority(tmp_path, "other")
    files, strange = mine.issue("127.0.0.1"), other.issue("127.0.0.1", common_name="strange")
    options: dict[str, Any] = {"certificate": str(files.certificate), "key": str(files.key)}
    swapped: dict[str, Any] = {"certificate": str(strange.certificate), "key": str(strange.key)}
    tls = Tls(ca=mine.certificate)
    async with offering(*METHODS, **options) as server, offering(*METHODS, **swapped) as stranger:
        port = await native_port(stranger.address, tls=Tls(ca=other.certificate))
        async with calling(server.address, tls=tls) as transport:
            with announcing(transport, f"{port} {bytes(16).hex()}"):
                assert not await is_native(transport)
        async with calling(server.address, tls=tls) as transport:
            assert await is_native(transport)


async def test_a_client_on_grpc_looks_for_the_port_again(free_port: int):
    loop, later_s = asyncio.get_running_loop(), 0.0
    times = {"clock": lambda: loop.time() + later_s}
    async with offering(*METHODS) as server, calling(server.address, times=times) as transport:
        with announcing(transport, f"{free_port} {bytes(16).hex()}"):
            assert not await is_native(transport)
        call = transport.stream("TestService/Peers")
        await call.send(b"")
        await call.receive()
        assert not await is_native(transport)
        later_s = 61.0
        while not await is_native(transport):
            pass
        await call.send(b"")  # calls that are open stay where they are
        assert await call.receive() is not None


async def test_after_the_silo_has_restarted_its_new_port_is_used(free_port: int):
    address = f"127.0.0.1:{free_port}"
    async with calling(address) as transport:
        ports: list[int] = []
        for _ in range(2):
            async with offering(*METHODS, port=free_port):
                call = None
                while call is None:
                    try:
                        assert await is_native(transport)
                        call = transport.stream("TestService/Peers")
                    except Unavailable:  # gRPC waits a little before it connects again
                        await asyncio.sleep(0.02)
                ports.append(await native_port(address))
                await call.send(b"")
                assert await call.receive() is not None
            with pytest.raises(Unavailable):
                await call.receive()
        assert ports[0] != ports[1]


async def test_an_end_of_the_connection_ends_its_calls_and_the_next_address_is_called():
    async with offering(*METHODS) as first, offering(*METHODS) as second:
        async with calling(f"{first.address},{second.address}") as transport:
            assert await is_native(transport)
            call = transport.stream("TestService/Peers")
            await call.send(b"")
            await call.receive()
            first.stop.set()
            with pytest.raises(Unavailable, match=r"the connection to .* broke|the silo stops"):
                await call.receive()
            assert transport.address == second.address
            assert await is_native(transport)


async def test_an_abandoned_call_gives_its_connection_up():
    async with offering(*METHODS) as server, calling(server.address) as transport:
        assert await is_native(transport)
        first = await transport.unary("TestService/Peer", b"", timeout_s=10)
        call = transport.stream("TestService/Peers")
        await call.send(b"")
        call.leave()
        await call.abandon()
        with pytest.raises(Unavailable):
            await call.receive()
        while not await is_native(transport):
            pass
        assert await transport.unary("TestService/Peer", b"", timeout_s=10) != first


async def test_a_silent_silo_is_noticed():
    async with offering(*METHODS) as server, forwarded(await native_port(server.address)) as (port, hush):
        process = await process_of(server.address)
        async with calling(server.address, times={"keepalive_s": 0.1}) as transport:
            with announcing(transport, f"{port} {process}"):
                assert await is_native(transport)
            call = transport.stream("TestService/Peers")
            await call.send(b"")
            assert await call.receive() is not None
            hush.set()
            with pytest.raises(Unavailable, match="silent"):
                await call.receive()


async def process_of(address: str) -> str:
    grpc = GrpcTransport(address)
    grpc.begin(None)
    try:
        return str((await grpc.health_metadata(0, 10))[ANNOUNCED]).split()[1]
    finally:
        await grpc.aclose()


@asynccontextmanager
async def forwarded(port: int) -> AsyncGenerator[tuple[int, asyncio.Event]]:
    """A port that forwards to `port`, until the event is set: then bytes are lost."""
    hush = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not hush.is_set():
                writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        tasks.extend([asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))])
        await asyncio.wait(tasks)
        writer.close()
        back.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], hush
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_client_is_native_if_its_silo_is(silo: SiloProcess):
    async with Client(silo.address) as client:
        await client.publish(S, b"x")
        found = {each for each in vars(client).values() if isinstance(each, NativeTransport)}
        assert [each.is_native for each in found] == [True]


# ---- packets ---------------------------------------------------------------------------------------------------------


class Received(PacketConnection):
    """Notes the packets."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.packets: list[tuple[int, int, bytes]] = []
        self.oversized: list[PacketHead] = []

    def on_packet(self, kind: int, call: int, body: bytes) -> None:
        self.packets.append((kind, call, body))

    def on_oversize(self, head: PacketHead) -> None:
        self.oversized.append(head)

    def on_lost(self, reason: Exception | None) -> None: ...


async def test_packets_are_sent_at_once_also_on_accepted_sockets():
    """Otherwise a message may wait 40 ms for the acknowledgement of the one before."""
    nodelay: list[int] = []
    connected = asyncio.Event()

    class Noted(Received):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            nodelay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            if len(nodelay) == 2:
                connected.set()

    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    server = await loop.create_server(Noted, sock=listening)
    transport, _ = await loop.create_connection(Noted, *listening.getsockname())
    await connected.wait()
    assert all(nodelay)
    transport.abort()
    server.close()


PACKETS = some.lists(
    some.tuples(
        some.sampled_from([PacketKind.MESSAGE, PacketKind.GRANT]), some.integers(0, 1 << 31), some.binary(max_size=1100)
    )
)


@given(packets=PACKETS, cuts=some.lists(some.integers(0, 5000)))
def test_packets_arrive_whole_in_any_pieces(packets: Sequence[tuple[int, int, bytes]], cuts: Sequence[int]):
    async def run() -> None:
        data = b"".join(HEAD.pack(len(body), call, kind) + body for kind, call, body in packets)
        received, at = Received(), 0
        for cut in [*sorted(cuts), len(data)]:
            received.data_received(data[at:cut])
            at = max(at, cut)
        assert received.packets == [each for each in packets if len(each[2]) <= 1000]
        large = [PacketHead(len(body), call, kind) for kind, call, body in packets if len(body) > 1000]
        assert received.oversized == large

    asyncio.run(run())


async def test_many_packets_in_one_piece_leave_turns_to_others():
    received = Received()
    received.data_received(b"".join(HEAD.pack(0, call, PacketKind.MESSAGE) for call in range(5000)))
    assert 0 < len(received.packets) < 5000
    received.data_received(HEAD.pack(0, 5000, PacketKind.MESSAGE))
    seen = {len(received.packets)}
    while len(received.packets) < 5001:
        await asyncio.sleep(0)
        seen.add(len(received.packets))
    assert len(seen) > 5
    assert [call for _, call, _ in received.packets] == [*range(5001)]
