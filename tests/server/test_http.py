"""The HTTP server: its answers, its limits, TLS, and its end."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.server.answers import HttpAnswer
from headrace.server.config import HttpConfig
from headrace.server.http import HTTP_LIMITS, MAX_HEAD_BYTES, HttpLimits, application, serving
from headrace.streams.errors import Busy, InvalidArgument
from tests.certificates import Authority

PATIENCE_S = 30
GET = b"GET /probe HTTP/1.1\r\nHost: x\r\n\r\n"


async def probe() -> HttpAnswer:
    return HttpAnswer(b"alive\n")


async def fail() -> HttpAnswer:
    raise RuntimeError("broken")


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def endless(_: Request) -> Response:
    async def parts() -> AsyncGenerator[bytes]:
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0)

    return StreamingResponse(parts())


@asynccontextmanager
async def served(limits: HttpLimits = HTTP_LIMITS, **config: Any) -> AsyncGenerator[str]:
    app = application(
        {"/probe": probe, "/fail": fail}, [Route("/echo", echo, methods=["POST"]), Route("/endless", endless)]
    )
    async with serving(app, HttpConfig(port=0, **config), limits) as url:
        yield url


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.partition("//")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    received = b""
    try:
        while data := await reader.read(65536):
            received += data
    except ConnectionError:
        pass
    return received


async def test_a_route_answers_get_and_head():
    async with served() as url, httpx.AsyncClient(base_url=url) as client:
        got = await client.get("/probe?x=1")
        assert (got.status_code, got.text, got.headers["content-type"]) == (200, "alive\n", "text/plain; charset=utf-8")
        assert "server" not in got.headers
        head = await client.head("/probe")
        assert (head.status_code, head.text, head.headers["content-length"]) == (200, "", "6")
        assert (await client.post("/probe")).status_code == 405
        assert (await client.get("/other")).status_code == 404


async def test_a_route_that_fails_is_a_500_and_in_the_log(caplog: pytest.LogCaptureFixture):
    async with served() as url, httpx.AsyncClient(base_url=url) as client:
        got = await client.get("/fail")
        assert (got.status_code, got.text) == (500, "Internal Server Error")
        assert (await client.get("/probe")).status_code == 200
    assert "RuntimeError: broken" in caplog.text


async def test_a_port_that_another_process_has_is_busy():
    async with served() as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(Busy, match=f"127.0.0.1:{port} is in use by another process, .* or name another port"):
            async with serving(application({}), HttpConfig(port=port)):
                pass


async def test_localhost_is_served_at_each_of_its_addresses():
    async with served(host="localhost") as url, httpx.AsyncClient() as client:
        port = url.rpartition(":")[2]
        assert (await client.get(f"http://127.0.0.1:{port}/probe")).status_code == 200
        assert (await client.get(f"http://localhost:{port}/probe")).status_code == 200


async def test_tls(tmp_path: Path):
    authority = Authority(tmp_path)
    files = authority.issue("127.0.0.1")
    trusted = ssl.create_default_context(cafile=authority.certificate)
    async with served(certificate=str(files.certificate), key=str(files.key)) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(verify=trusted) as client:
            assert (await client.get(f"{url}/probe")).text == "alive\n"
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                await client.get(f"http{url.removeprefix('https')}/probe")


async def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path):
    files = Authority(tmp_path).issue("127.0.0.1")
    with pytest.raises(InvalidArgument, match=r"http\.certificate: \S+missing cannot be read"):
        async with served(certificate=str(tmp_path / "missing"), key=str(files.key)):
            pass
    with pytest.raises(
        InvalidArgument, match=r"http\.certificate \S+, http\.key \S+: these are no certificate and key"
    ):
        async with served(certificate=str(files.key), key=str(files.key)):
            pass


@pytest.mark.parametrize(
    "sent", [b"", b"GET /probe HT", b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"]
)
async def test_a_client_that_does_not_send_its_request_is_hung_up_on(sent: bytes):
    async with served(HttpLimits(request_s=0.1)) as url, connected(url) as (reader, writer):
        writer.write(sent)
        assert await until_closed(reader) == b""


async def test_the_next_request_of_a_connection_has_a_time_limit_too():
    async with served(HttpLimits(request_s=0.1, idle_s=1)) as url, connected(url) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"alive\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"GET /probe HT")
        assert await until_closed(reader) == b""


async def test_an_idle_connection_is_closed():
    async with served(HttpLimits(idle_s=0)) as url, connected(url) as (reader, writer):
        writer.write(GET)
        assert (await until_closed(reader)).endswith(b"alive\n")


async def test_a_client_that_reads_nothing_is_hung_up_on():
    async with served(HttpLimits(read_s=0.1)) as url, connected(url) as (_, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        transport = writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        with pytest.raises(ConnectionError):
            await write_for_ever(writer)


async def write_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_connections_above_the_limit_are_closed():
    async with served(HttpLimits(connections=1)) as url, connected(url) as (first, writer):
        writer.write(GET)
        await first.readuntil(b"alive\n")
        async with connected(url) as (second, _):
            assert await until_closed(second) == b""
        writer.write(GET)
        assert await first.readuntil(b"alive\n")


async def test_a_head_that_is_too_long_is_refused():
    async with served() as url, connected(url) as (reader, writer):
        writer.write(b"GET /probe HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES))
        await until_closed(reader)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/probe")).status_code == 200


async def test_it_stops_while_an_answer_does_not_end():
    async with served(HttpLimits(stop_s=0)) as url, connected(url) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(1000)
