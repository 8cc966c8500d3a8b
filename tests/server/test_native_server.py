"""Calls of Python clients: the same over the native protocol as over gRPC; and clients that break the protocol."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.client.connection import Tls
from headrace.client.native import NativeTransport
from headrace.client.packets import U32, WINDOW, PacketKind
from headrace.server.access import Authenticator, Principal
from headrace.server.connection_times import ConnectionTimes
from headrace.server.limits import ClientLimits
from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod
from headrace.streams.errors import (
    Closed,
    HeadraceError,
    LimitExceeded,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    QueueFull,
    Unauthenticated,
    Unavailable,
)
from tests.certificates import Authority
from tests.server.native_calls import GREETING, RawClient, beginning, calling, native_port, packet
from tests.silo.services.calling import offering

NAME = "headrace.v1.TestService"
BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "grpc"])


def method(name: str, kind: MethodKind, handler: object) -> ServiceMethod:
    return ServiceMethod(f"{NAME}/{name}", kind, handler)  # type: ignore[arg-type] (each test gives the handler of its kind)


async def double(call: ServiceCall, request: bytes) -> bytes:
    return request + request


async def echo(call: ServiceCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


DOUBLE = method("Double", MethodKind.UNARY, double)
ECHO = method("Echo", MethodKind.STREAM, echo)


# ---- the same as over gRPC -------------------------------------------------------------------------------------------


@BOTH
async def test_a_unary_call_has_its_answer(native: bool):
    async with offering(DOUBLE) as server, calling(server.address, native=native) as transport:
        for request in (b"", b"x", bytes(1_000_000)):
            assert await transport.unary("TestService/Double", request, timeout_s=10) == request + request
        assert isinstance(transport, NativeTransport) is native
        assert not native or (isinstance(transport, NativeTransport) and transport.is_native)


@BOTH
async def test_a_stream_has_messages_both_ways_until_it_ends_in_order(native: bool):
    async with offering(ECHO) as server, calling(server.address, native=native) as transport:
        call = transport.stream("TestService/Echo")
        for message in (b"a", b"", bytes(3_000_000)):
            await call.send(message)
            assert await call.receive() == message
        await call.done_sending()
        assert await call.receive() is None
        await call.ended()


@BOTH
@pytest.mark.parametrize("error", [NotFound("no"), QueueFull("full"), Unavailable("away"), NotFound("ü" * 3000)])
async def test_an_error_arrives_as_it_was_raised(native: bool, error: HeadraceError):
    async def fail(call: ServiceCall, request: bytes) -> bytes:
        raise error

    async with (
        offering(method("Fail", MethodKind.UNARY, fail)) as server,
        calling(server.address, native=native) as client,
    ):
        with pytest.raises(type(error)) as caught:
            await client.unary("TestService/Fail", b"", timeout_s=10)
        assert str(caught.value)[:1000] == str(error)[:1000]


@BOTH
async def test_a_bug_shows_no_more_than_that_there_is_one(native: bool, caplog: pytest.LogCaptureFixture):
    async def fail(call: ServiceCall) -> None:
        raise ValueError("the secret")

    async with (
        offering(method("Fail", MethodKind.STREAM, fail)) as server,
        calling(server.address, native=native) as client,
    ):
        call = client.stream("TestService/Fail")
        with pytest.raises(HeadraceError, match="which is a bug: its log says more"):
            await call.receive()
        assert "the secret" in caplog.text


@BOTH
async def test_an_unknown_method_is_not_supported(native: bool):
    async with offering(DOUBLE) as server, calling(server.address, native=native) as transport:
        with pytest.raises(NotSupported, match="does not know this call"):
            await transport.unary("TestService/Nothing", b"", timeout_s=10)
        assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"


@BOTH
async def test_cancelling_the_caller_cancels_the_handler(native: bool):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(call: ServiceCall, request: bytes) -> bytes:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with (
        offering(method("Endless", MethodKind.UNARY, endless)) as server,
        calling(server.address, native=native) as transport,
    ):
        waiting = asyncio.create_task(transport.unary("TestService/Endless", b"", timeout_s=None))
        await began.wait()
        waiting.cancel()
        await cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@BOTH
async def test_a_handler_knows_the_deadline_and_is_cancelled_after_it(native: bool):
    cancelled, left = asyncio.Event(), list[float | None]()

    async def endless(call: ServiceCall, request: bytes) -> bytes:
        left.append(call.remaining_s())
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with (
        offering(method("Endless", MethodKind.UNARY, endless), DOUBLE) as server,
        calling(server.address, native=native) as transport,
    ):
        await transport.unary("TestService/Double", b"", timeout_s=10)
        with pytest.raises(Unavailable, match="did not answer in time"):
            await transport.unary("TestService/Endless", b"", timeout_s=0.3)
        await cancelled.wait()
    assert left[0] is not None
    assert 0 < left[0] < 10


@BOTH
async def test_a_cancelled_stream_is_over_for_both_sides(native: bool):
    cancelled = asyncio.Event()

    async def endless(call: ServiceCall) -> None:
        try:
            await call.read()
        finally:
            cancelled.set()

    async with (
        offering(method("Endless", MethodKind.STREAM, endless)) as server,
        calling(server.address, native=native) as transport,
    ):
        call = transport.stream("TestService/Endless")
        receiving = asyncio.create_task(call.receive())
        await asyncio.sleep(0)
        call.cancel()
        call.cancel()
        with pytest.raises(Unavailable, match="was cancelled"):
            await receiving
        with pytest.raises(Unavailable, match="was cancelled"):
            await call.send(b"x")
        await call.ended()
        started = transport.stream("TestService/Endless")
        await started.send(b"")
        assert await started.receive() is None
        await cancelled.wait()


class OneToken(Authenticator):
    """Knows the token "good" until it is revoked."""

    def __init__(self) -> None:
        self.principal: Principal | None = Principal("shop", {})

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        if authorization != "Bearer good" or self.principal is None:
            raise Unauthenticated("wrong token")
        return self.principal

    def still_valid(self, principal: Principal) -> bool:
        return principal is self.principal


@BOTH
async def test_each_call_is_authenticated_by_its_token(native: bool):
    async def name(call: ServiceCall, request: bytes) -> bytes:
        return call.principal.name.encode()

    book = OneToken()
    async with offering(method("Name", MethodKind.UNARY, name), ECHO, authenticator=book) as server:
        async with calling(server.address, native=native, token="good") as transport:
            assert await transport.unary("TestService/Name", b"", timeout_s=10) == b"shop"
            stream = transport.stream("TestService/Echo")
            await stream.send(b"1")
            assert await stream.receive() == b"1"
            book.principal = None
            with pytest.raises(Unauthenticated, match="wrong token"):
                await transport.unary("TestService/Name", b"", timeout_s=10)
            await stream.send(b"2")
            with pytest.raises(Unauthenticated, match="revoked while the call was open"):
                await stream.receive()
        async with calling(server.address, native=native) as transport:
            with pytest.raises(Unauthenticated, match="requires a token"):
                await transport.unary("TestService/Name", b"", timeout_s=10)


@BOTH
async def test_limits_of_calls_and_requests_apply(native: bool):
    limits = ClientLimits(calls=2, requests_per_s=0.001, burst=6 + native)
    async with offering(ECHO, DOUBLE, limits=limits) as server, calling(server.address, native=native) as transport:
        open_calls = [transport.stream("TestService/Echo") for _ in range(2)]
        for call in open_calls:
            await call.send(b"x")
            await call.receive()
        if native:  # gRPC lets the client wait for its own calls
            with pytest.raises(LimitExceeded, match="calls are open"):
                await transport.unary("TestService/Double", b"", timeout_s=10)
        open_calls[0].cancel()
        await open_calls[0].ended()
        for _ in range(2):
            await open_calls[1].send(b"x")
            await open_calls[1].receive()
        await open_calls[1].send(b"x")
        with pytest.raises(LimitExceeded, match="requests_per_s"):
            await open_calls[1].receive()


@BOTH
async def test_a_message_that_is_too_large_is_refused_and_the_connection_stays(native: bool):
    limits = ClientLimits(message_bytes=1000)
    async with offering(ECHO, DOUBLE, limits=limits) as server, calling(server.address, native=native) as transport:
        for size in (1001, 1200):
            with pytest.raises(PayloadTooLarge):
                await transport.unary("TestService/Double", bytes(size), timeout_s=10)
            call = transport.stream("TestService/Echo")
            await call.send(bytes(1000))
            assert await call.receive() == bytes(1000)
            await call.send(bytes(size))
            with pytest.raises(PayloadTooLarge):
                await call.receive()
        assert await transport.unary("TestService/Double", bytes(1000), timeout_s=10) == bytes(2000)


@BOTH
async def test_the_name_in_the_certificate_is_the_caller(native: bool, tmp_path: Path):
    async def name(call: ServiceCall, request: bytes) -> bytes:
        return call.principal.name.encode()

    authority = Authority(tmp_path)
    files, own = authority.issue("127.0.0.1"), authority.issue("shop.example", common_name="shop")
    certificates = {"certificate": files.certificate, "key": files.key, "client_ca": authority.certificate}
    options: dict[str, Any] = {option: str(file) for option, file in certificates.items()}
    async with offering(method("Name", MethodKind.UNARY, name), **options) as server:
        for tls in (
            Tls(ca=authority.certificate, certificate=own.certificate, key=own.key),
            Tls(
                ca=authority.certificate.read_bytes(),
                certificate=own.certificate.read_bytes(),
                key=own.key.read_bytes(),
            ),
        ):
            async with calling(server.address, native=native, tls=tls) as transport:
                assert await transport.unary("TestService/Name", b"", timeout_s=10) == b"shop"
                assert not native or (isinstance(transport, NativeTransport) and transport.is_native)
        port = await native_port(
            server.address, tls=Tls(ca=authority.certificate, certificate=own.certificate, key=own.key)
        )
        async with RawClient.connected(port, GREETING) as plain:
            await plain.ended()


# ---- flow control ----------------------------------------------------------------------------------------------------


@BOTH
async def test_a_call_that_is_not_read_holds_up_itself_alone(native: bool):
    written, size = 0, 1 << 16

    async def pour(call: ServiceCall, request: bytes) -> None:
        nonlocal written
        while True:
            await call.write(bytes(size))
            written += size

    async with (
        offering(method("Pour", MethodKind.RESPONSES, pour), DOUBLE) as server,
        calling(server.address, native=native) as transport,
    ):
        assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"
        call = transport.stream("TestService/Pour")
        if not native:  # its unary request
            await call.send(b"")
        before = -1
        while before < written:
            before = written
            for _ in range(20):
                assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"
        assert not native or WINDOW <= written <= WINDOW + size
        for _ in range(100):
            assert await call.receive() == bytes(size)
        call.cancel()


async def test_a_handler_that_does_not_read_stops_the_sender_of_its_call_alone():
    go, sent, size = asyncio.Event(), 0, 1 << 16

    async def lazy(call: ServiceCall) -> None:
        await go.wait()
        await echo(call)

    async with (
        offering(method("Lazy", MethodKind.STREAM, lazy), DOUBLE) as server,
        calling(server.address) as transport,
    ):
        call = transport.stream("TestService/Lazy")

        async def send() -> None:
            nonlocal sent
            for _ in range(100):
                await call.send(bytes(size))
                sent += size
            await call.done_sending()

        sending = asyncio.create_task(send())
        before = -1
        while before < sent:
            before = sent
            for _ in range(20):
                assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"
        assert WINDOW <= sent <= WINDOW + size
        go.set()
        received = [await call.receive() for _ in range(100)]
        await sending
        assert received == [bytes(size)] * 100
        assert await call.receive() is None


async def test_bytes_that_no_call_reads_are_limited_for_a_connection():
    async def lazy(call: ServiceCall) -> None:
        await asyncio.Event().wait()

    async def late(call: ServiceCall) -> None:
        await go.wait()
        await echo(call)

    go = asyncio.Event()
    limits = ClientLimits(publish_bytes=3 * WINDOW, message_bytes=WINDOW)
    async with (
        offering(
            method("Lazy", MethodKind.STREAM, lazy), method("Late", MethodKind.STREAM, late), DOUBLE, limits=limits
        ) as server,
        calling(server.address) as transport,
    ):
        for _ in range(2):
            await transport.stream("TestService/Lazy").send(bytes(WINDOW))
        await transport.stream("TestService/Lazy").send(bytes(WINDOW // 2))
        call = transport.stream("TestService/Late")
        await call.send(bytes(WINDOW))
        go.set()
        with pytest.raises(LimitExceeded, match="wait to be read"):
            await call.receive()
        with pytest.raises(LimitExceeded, match="wait to be read"):
            await transport.unary("TestService/Double", bytes(WINDOW), timeout_s=10)
        assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"


async def test_a_client_that_reads_nothing_is_not_read_either():
    async with offering(DOUBLE) as server:
        port = await native_port(server.address)
        async with RawClient.connected(port, GREETING) as deaf:
            request, number, is_stopped = bytes(1 << 16), 0, False
            while not is_stopped:  # until the buffers of both sockets are full
                assert number < 2000
                number += 1
                deaf.writer.write(beginning(number, DOUBLE.name, request))
                try:
                    async with asyncio.timeout(1):
                        await deaf.writer.drain()
                except TimeoutError:
                    is_stopped = True
            for answered in range(1, number):
                kind, call, body = await deaf.packet_of(PacketKind.ANSWER)
                assert (kind, call, len(body)) == (PacketKind.ANSWER, answered, 2 * len(request))


# ---- clients that break the protocol ---------------------------------------------------------------------------------


BROKEN = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "noise": bytes(range(256)) * 400,
    "no greeting": packet(PacketKind.PONG) + beginning(1, DOUBLE.name),
    "a greeting of 10 KiB": packet(PacketKind.HELLO, 0, bytes(10_000)),
    "two greetings": GREETING + GREETING,
    "an unknown kind": GREETING + packet(77),
    "an unknown kind about a call": GREETING + beginning(1, ECHO.name) + packet(77, 1),
    "a call without a method": GREETING + packet(PacketKind.BEGIN, 1),
    "a method that is cut off": GREETING + packet(PacketKind.BEGIN, 1, b"\0\0\0\0\x40abc"),
    "a call that begins twice": GREETING + 2 * beginning(1, ECHO.name),
    "numbers that fall": GREETING + beginning(2, ECHO.name) + beginning(1, ECHO.name),
    "a message of no call": GREETING + packet(PacketKind.MESSAGE, 1, b"x"),
    "a cancellation of a later call": GREETING + beginning(1, ECHO.name) + packet(PacketKind.CANCEL, 2),
    "a grant without its number": GREETING + beginning(1, ECHO.name) + packet(PacketKind.GRANT, 1, b"x"),
    "an oversized cancellation": GREETING + beginning(1, ECHO.name) + b"\xff\xff\xff\xff\0\0\0\1\6",
    "messages that were not granted": GREETING
    + beginning(1, f"{NAME}/Lazy")
    + 3 * packet(PacketKind.MESSAGE, 1, bytes(WINDOW)),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_a_client_that_breaks_the_protocol_is_disconnected_and_others_are_served(
    data: bytes, caplog: pytest.LogCaptureFixture
):
    async def lazy(call: ServiceCall) -> None:
        await asyncio.Event().wait()

    async with (
        offering(DOUBLE, ECHO, method("Lazy", MethodKind.STREAM, lazy)) as server,
        calling(server.address) as other,
    ):
        port = await native_port(server.address)
        for _ in range(3):
            async with RawClient.connected(port, data) as client:
                await client.ended()
            assert await other.unary("TestService/Double", b"x", timeout_s=10) == b"xx"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "a connection of ipv4:127.0.0.1:" in warnings[0]


async def test_packets_about_calls_that_are_over_are_ignored():
    async with offering(DOUBLE, ECHO) as server:
        port = await native_port(server.address)
        async with RawClient.connected(port, GREETING, beginning(5, DOUBLE.name, b"x")) as client:
            assert await client.packet_of(PacketKind.ANSWER) == (PacketKind.ANSWER, 5, b"xx")
            for kind in (PacketKind.MESSAGE, PacketKind.END, PacketKind.GRANT, PacketKind.CANCEL):
                client.writer.write(packet(kind, 5, U32.pack(1)) + packet(kind, 3, U32.pack(1)))
            client.writer.write(packet(PacketKind.PING) + beginning(6, DOUBLE.name, b"y"))
            assert await client.packet() == (PacketKind.PONG, 0, b"")
            assert await client.packet() == (PacketKind.ANSWER, 6, b"yy")


async def test_a_flood_of_cancelled_calls_holds_nobody_up():
    async with offering(DOUBLE, ECHO, limits=ClientLimits(calls=100)) as server, calling(server.address) as other:
        port = await native_port(server.address)
        flood = b"".join(beginning(n, ECHO.name) + packet(PacketKind.CANCEL, n) for n in range(1, 20_001))
        async with RawClient.connected(port, GREETING, flood) as client:
            for _ in range(50):
                assert await other.unary("TestService/Double", b"x", timeout_s=10) == b"xx"
            client.writer.write(beginning(20_001, DOUBLE.name, b"y"))
            while (answer := await client.packet())[1] != 20_001:
                pass
            assert answer[0] in (PacketKind.ANSWER, PacketKind.ERROR)


async def test_a_client_without_a_greeting_is_disconnected():
    async with offering(DOUBLE, times=ConnectionTimes(handshake_s=0.2)) as server:
        async with RawClient.connected(await native_port(server.address)) as client:
            await client.ended()


async def test_a_silent_client_is_disconnected_and_its_calls_are_cancelled():
    cancelled = asyncio.Event()

    async def endless(call: ServiceCall) -> None:
        try:
            await call.read()
        finally:
            cancelled.set()

    methods, times = (method("Endless", MethodKind.STREAM, endless), DOUBLE), ConnectionTimes(native_keepalive_s=0.1)
    async with offering(*methods, times=times) as server, calling(server.address) as honest:
        await honest.unary("TestService/Double", b"x", timeout_s=10)
        port = await native_port(server.address)
        async with RawClient.connected(port, GREETING, beginning(1, f"{NAME}/Endless")) as client:
            assert (await client.packet_of(PacketKind.PING))[0] == PacketKind.PING
            await client.ended()
            await cancelled.wait()
        assert isinstance(honest, NativeTransport)
        assert honest.is_native


async def test_connections_of_one_address_are_limited():
    async with offering(DOUBLE, limits=ClientLimits(connections=2)) as server:
        port = await native_port(server.address)
        async with RawClient.connected(port, GREETING) as first, RawClient.connected(port, GREETING):
            await first.packet()
            async with RawClient.connected(port) as third:
                await third.ended()
        async with calling(server.address) as transport:
            assert await transport.unary("TestService/Double", b"x", timeout_s=10) == b"xx"


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_open_calls_end_in_order_when_the_server_stops():
    entered = asyncio.Event()

    async def slow(call: ServiceCall, request: bytes) -> bytes:
        entered.set()
        await call.closing.wait()
        return b"done"

    async with offering(method("Slow", MethodKind.UNARY, slow), DOUBLE) as server, calling(server.address) as transport:
        answer = asyncio.create_task(transport.unary("TestService/Slow", b"", timeout_s=10))
        await entered.wait()
        server.stop.set()
        assert await answer == b"done"
        await server.stopped.wait()
        with pytest.raises(Unavailable):
            await transport.unary("TestService/Double", b"", timeout_s=10)


async def test_calls_that_do_not_end_are_cancelled_when_the_server_stops():
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(call: ServiceCall, request: bytes) -> bytes:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with (
        offering(method("Endless", MethodKind.UNARY, endless), drain_s=0.05) as server,
        calling(server.address) as transport,
    ):
        answer = asyncio.create_task(transport.unary("TestService/Endless", b"", timeout_s=10))
        await entered.wait()
        server.stop.set()
        with pytest.raises(Unavailable):
            await answer
        await server.stopped.wait()
        assert cancelled.is_set()


async def test_closing_the_client_ends_its_calls():
    async with offering(ECHO) as server, calling(server.address) as transport:
        call = transport.stream("TestService/Echo")
        await call.send(b"x")
        await call.receive()
        receiving = asyncio.create_task(call.receive())
        await asyncio.sleep(0)
        await transport.aclose()
        with pytest.raises(Closed):
            await receiving
        with pytest.raises(Closed):
            await transport.unary("TestService/Double", b"", timeout_s=10)
