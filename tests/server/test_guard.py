"""The errors that callers of any method get, and the calls that are admitted at all."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import empty_pb2, struct_pb2, wrappers_pb2

from headrace.proto.v1 import events_pb2
from headrace.server.access import NoTokens, Permission, Principal, new_token, principal_of
from headrace.server.guard import CallGuard
from headrace.server.limits import UNLIMITED, ClientLimiter, ClientLimits
from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from headrace.streams.errors import (
    HeadraceError,
    InvalidArgument,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    QueueFull,
    StorageError,
    Unauthenticated,
    Unavailable,
    error_of,
)
from tests.silo.services.calling import Caller, Refused, connecting, offering

EMPTY = empty_pb2.Empty()


def raising(error: Exception) -> ServiceMethod:
    async def handler(call: ServiceCall, request: bytes) -> bytes:
        raise error

    return ServiceMethod("test.Service/Call", MethodKind.UNARY, handler)


async def told(caller: Caller) -> Refused:
    with pytest.raises(Refused) as caught:
        await caller.ask("test.Service/Call", EMPTY, empty_pb2.Empty)
    return caught.value


@pytest.mark.parametrize(
    ("error", "status", "retry_after_ms"),
    [
        (InvalidArgument("no"), "INVALID_ARGUMENT", None),
        (PayloadTooLarge("it", 2, 1), "INVALID_ARGUMENT", None),
        (NotFound("no"), "NOT_FOUND", None),
        (PermissionDenied("no"), "PERMISSION_DENIED", None),
        (Unauthenticated("no"), "UNAUTHENTICATED", None),
        (QueueFull("no"), "RESOURCE_EXHAUSTED", "200"),
        (StorageError("no"), "UNAVAILABLE", "200"),
        (Unavailable("no"), "UNAVAILABLE", "200"),
    ],
)
async def test_an_error_becomes_its_status_and_its_code(error: HeadraceError, status: str, retry_after_ms: str | None):
    async with offering(raising(error)) as caller:
        refused = await told(caller)
    assert (refused.status, refused.code, refused.details) == (status, error.code, str(error))
    assert refused.retry_after_ms == retry_after_ms
    assert type(error_of(error.code, refused.details)) is type(error)


async def test_a_bug_is_told_as_such_and_no_more(caplog: pytest.LogCaptureFixture):
    async with offering(raising(ZeroDivisionError("at /secret/place"))) as caller:
        refused = await told(caller)
    assert (refused.status, refused.code) == ("INTERNAL", "internal")
    assert "secret" not in refused.details
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == "test.Service/Call failed"
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


async def test_of_a_text_that_quotes_the_caller_at_length_the_beginning_is_sent():
    async with offering(raising(InvalidArgument("no: é\n" + "x" * 1_000_000))) as caller:
        refused = await told(caller)
    assert refused.status == "INVALID_ARGUMENT"
    assert refused.details.startswith("no: é\nxxx")
    assert refused.details.endswith("x...")
    assert len(refused.details) < 1100


async def test_text_that_is_no_utf_8_is_sent_as_escapes():
    async with offering(raising(InvalidArgument("no: \udcff"))) as caller:
        assert (await told(caller)).details == "no: \\udcff"


async def test_bytes_that_are_no_message_are_the_callers_fault():
    async def handler(call: ServiceCall, request: bytes) -> bytes:
        return parsed(events_pb2.EventBatch, request).SerializeToString()

    async with offering(ServiceMethod("test.Service/Call", MethodKind.UNARY, handler)) as caller:
        with pytest.raises(Refused) as caught:
            await caller.ask("test.Service/Call", b"\xff\xff\xff", empty_pb2.Empty)
    assert (caught.value.status, caught.value.code) == ("INVALID_ARGUMENT", "invalid_argument")
    assert caught.value.details.startswith("the request is no headrace.v1.EventBatch: its 3 bytes cannot be decoded")


async def test_a_method_that_is_not_there_is_unimplemented():
    async with offering(raising(InvalidArgument("no"))) as caller:
        with pytest.raises(Refused) as caught:
            await caller.ask("test.Service/Other", EMPTY, empty_pb2.Empty)
    assert caught.value.status == "UNIMPLEMENTED"


# Streams


async def echo(call: ServiceCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


ECHO = ServiceMethod("test.Service/Echo", MethodKind.STREAM, echo)


async def test_a_stream_goes_both_ways_and_ends_with_its_handler():
    async with offering(ECHO) as caller:
        stream = caller.stream("test.Service/Echo")
        for number in range(3):
            await stream.write(wrappers_pb2.Int64Value(value=number))
            assert await stream.read(wrappers_pb2.Int64Value) == wrappers_pb2.Int64Value(value=number)
        await stream.done_writing()
        assert await stream.read(wrappers_pb2.Int64Value) is None


async def test_messages_of_a_stream_arrive_before_its_error():
    async def handler(call: ServiceCall, request: bytes) -> None:
        await call.write(b"")
        raise NotFound("no more")

    async with offering(ServiceMethod("test.Service/Some", MethodKind.RESPONSES, handler)) as caller:
        stream = caller.responses("test.Service/Some", EMPTY)
        assert await stream.read(empty_pb2.Empty) == EMPTY
        with pytest.raises(Refused, match=r"NOT_FOUND \(not_found\): no more"):
            await stream.read(empty_pb2.Empty)


async def test_an_error_arrives_although_a_first_message_is_under_way():
    async def handler(call: ServiceCall) -> None:
        writing = asyncio.create_task(call.write(struct_pb2.Value(string_value="x" * 4_000_000).SerializeToString()))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        raise NotFound("no more")

    async with offering(ServiceMethod("test.Service/Some", MethodKind.STREAM, handler)) as caller:
        stream = caller.stream("test.Service/Some")
        assert await stream.read(struct_pb2.Value) is not None
        with pytest.raises(Refused, match="no more"):
            await stream.read(struct_pb2.Value)


async def test_a_handler_is_cancelled_when_its_caller_hangs_up():
    ended = asyncio.Event()

    async def handler(call: ServiceCall) -> None:
        try:
            await call.write(b"")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise

    async with offering(ServiceMethod("test.Service/Wait", MethodKind.STREAM, handler)) as caller:
        stream = caller.stream("test.Service/Wait")
        await stream.read(empty_pb2.Empty)
        stream.cancel()
        await ended.wait()


async def test_a_caller_that_hangs_up_during_a_write_is_no_failure(caplog: pytest.LogCaptureFixture):
    begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def handler(call: ServiceCall, _: bytes) -> None:
        begun.release()
        try:
            while True:
                await call.write(bytes(1 << 20))
        finally:
            ended.release()

    async with offering(ServiceMethod("test.Service/Write", MethodKind.RESPONSES, handler)) as caller:
        streams = [caller.responses("test.Service/Write", EMPTY) for _ in range(20)]
        for _ in streams:
            await begun.acquire()
        for stream in streams:
            stream.cancel()
        for _ in streams:
            await ended.acquire()
    assert not caplog.records


@asynccontextmanager
async def watched_server(method: ServiceMethod, outcomes: asyncio.Queue[BaseException | None]) -> AsyncGenerator[str]:
    """A gRPC server with the guard's handler of a stream. `outcomes` gets the errors that the handler raises to gRPC.

    gRPC ignores some of these errors if it already knows that the caller is gone, which is the usual order.
    """
    guard = CallGuard(NoTokens(), ClientLimiter(UNLIMITED, asyncio.get_running_loop().time))
    guard.open_services([method])
    service, _, name = method.name.partition("/")
    handler: Any = guard.handlers([method])[service][name]

    async def converse(request: object, context: object) -> None:
        try:
            await handler.stream_stream(request, context)
        except BaseException as error:
            outcomes.put_nowait(error)
            raise
        outcomes.put_nowait(None)

    server = grpc.aio.server()
    server.add_registered_method_handlers(service, {name: grpc.stream_stream_rpc_method_handler(converse)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(10)


@pytest.mark.parametrize("cancel", [False, True])
async def test_callers_that_hang_up_before_their_error_are_no_failure(cancel: bool, caplog: pytest.LogCaptureFixture):
    begun = asyncio.Semaphore(0)

    async def handler(call: ServiceCall) -> None:
        begun.release()
        assert await call.read() is None
        raise NotFound("no")

    outcomes = asyncio.Queue[BaseException | None]()
    async with watched_server(ServiceMethod("test.Service/Call", MethodKind.STREAM, handler), outcomes) as address:
        for _ in range(3):
            async with connecting(address) as caller:
                streams = [caller.stream("test.Service/Call") for _ in range(30)]
                for _ in streams:
                    await begun.acquire()
                for stream in streams if cancel else ():
                    stream.cancel()
            found = [await outcomes.get() for _ in streams]
            assert {type(error) for error in found} <= {type(None), grpc.aio.AbortError, asyncio.CancelledError}
    assert not caplog.records


# Admitted callers, and the size of their messages


async def test_a_message_above_the_limit_is_refused_with_what_to_do():
    limits = ClientLimits(message_bytes=1000)

    async def handler(call: ServiceCall, request: bytes) -> bytes:
        return b""

    methods = (ServiceMethod("test.Service/Call", MethodKind.UNARY, handler), ECHO)
    async with offering(*methods, limits=limits) as caller:
        await caller.ask("test.Service/Call", b"x" * 1000, empty_pb2.Empty)
        with pytest.raises(Refused) as caught:
            await caller.ask("test.Service/Call", b"x" * 1001, empty_pb2.Empty)
        assert (caught.value.status, caught.value.code) == ("INVALID_ARGUMENT", "payload_too_large")
        assert caught.value.details.startswith("the message has 1,001 bytes, the limit is 1,000: split it")

        stream = caller.stream("test.Service/Echo")
        await stream.write(b"x" * 1001)
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            await stream.read(empty_pb2.Empty)

        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):  # gRPC does not even take it
            await caller.ask("test.Service/Call", b"x" * 3000, empty_pb2.Empty)


async def test_calls_and_messages_that_come_too_fast_are_told_to_wait():
    async with offering(ECHO, limits=ClientLimits(requests_per_s=0.001, burst=3)) as caller:
        stream = caller.stream("test.Service/Echo")
        for _ in range(2):
            await stream.write(EMPTY)
            assert await stream.read(empty_pb2.Empty) is not None
        await stream.write(EMPTY)
        with pytest.raises(Refused) as on_stream:
            await stream.read(empty_pb2.Empty)
        with pytest.raises(Refused) as on_call:
            await caller.stream("test.Service/Echo").read(empty_pb2.Empty)
    for refused in (on_stream.value, on_call.value):
        assert (refused.status, refused.code) == ("RESOURCE_EXHAUSTED", "limit_exceeded")
        assert refused.retry_after_ms is not None


class OneToken:
    """Knows one token, until it is revoked."""

    def __init__(self) -> None:
        made = new_token("orders", {Permission.PUBLISH: ["orders"]}, 0)
        self.text = made.text
        self.principal = principal_of(made.record)
        self.revoked = False

    async def prepare(self, authorization: str | bytes | None) -> None: ...

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        if authorization != f"Bearer {self.text}":
            raise Unauthenticated("no token")
        return self.principal

    def still_valid(self, principal: Principal) -> bool:
        return not self.revoked


async def test_a_caller_without_a_token_gets_nowhere_except_for_probes():
    reached: list[str] = []

    async def handler(call: ServiceCall, request: bytes) -> bytes:
        reached.append(str(call.principal))
        return b""

    token = OneToken()
    methods = (
        ServiceMethod("test.Service/Call", MethodKind.UNARY, handler),
        ServiceMethod("test.Service/Probe", MethodKind.UNARY, handler, probe=True),
        ECHO,
    )
    async with offering(*methods, authenticator=token) as caller:
        await caller.ask("test.Service/Probe", EMPTY, empty_pb2.Empty)
        with pytest.raises(Refused, match="UNAUTHENTICATED"):
            await caller.ask("test.Service/Call", EMPTY, empty_pb2.Empty)
        with pytest.raises(Refused, match="UNAUTHENTICATED"):
            await caller.stream("test.Service/Echo").read(empty_pb2.Empty)
        await Caller(caller.channel, token.text).ask("test.Service/Call", EMPTY, empty_pb2.Empty)
    assert reached == ["a client without a name", "client 'orders'"]


async def test_a_stream_ends_when_its_token_is_revoked():
    token = OneToken()
    async with offering(ECHO, authenticator=token) as caller:
        stream = Caller(caller.channel, token.text).stream("test.Service/Echo")
        await stream.write(EMPTY)
        assert await stream.read(empty_pb2.Empty) == EMPTY
        token.revoked = True
        await stream.write(EMPTY)
        with pytest.raises(Refused, match=r"UNAUTHENTICATED .*: the token was revoked while the call was open"):
            await stream.read(empty_pb2.Empty)
