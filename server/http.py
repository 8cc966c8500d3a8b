"""A silo's own small HTTP server: GET of a few paths, one answer per connection."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

from ..streams.background import end
from ..streams.errors import Busy

log = logging.getLogger("headrace.silo")

REQUEST_S = 5.0
"""Time that a client has to send its request, in seconds. Then its connection is closed."""


class HttpAnswer(NamedTuple):
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[], Awaitable[HttpAnswer]]


@asynccontextmanager
async def serving(host: str, port: int, routes: Mapping[str, Route]) -> AsyncGenerator[str]:
    """Serve `routes`, by path, for the length of an `async with`. Yield the address, as in http://127.0.0.1:9464.

    Raises Busy if the port is taken, OSError if the address cannot be used for another reason.
    """
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        await _converse(reader, writer, routes)

    try:
        server = await asyncio.start_server(connected, host, port, limit=8192)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Busy(f"{host}:{port} is in use by another process: name another port, or leave it out") from None
    try:
        bound = server.sockets[0].getsockname()
        yield f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
    finally:
        server.close()
        await end(*connections)


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routes: Mapping[str, Route]) -> None:
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await reader.readuntil(b"\r\n\r\n")
        answer = await _answer(request, routes)
        writer.write(_encode(answer, head_only=request.startswith(b"HEAD ")))
        await writer.drain()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # the client closed the connection, or its request is no HTTP
    finally:
        writer.close()


async def _answer(request: bytes, routes: Mapping[str, Route]) -> HttpAnswer:
    method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    if method not in ("GET", "HEAD"):
        return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
    route = routes.get(rest.partition(" ")[0].partition("?")[0])
    if route is None:
        return _plain(HTTPStatus.NOT_FOUND)
    try:
        return await route()
    except Exception:
        log.exception("cannot answer %s", request.partition(b"\r\n")[0])
        return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


def _plain(status: HTTPStatus) -> HttpAnswer:
    return HttpAnswer(f"{status.phrase}\n".encode(), status=status)


def _encode(answer: HttpAnswer, *, head_only: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else answer.body)
