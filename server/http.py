"""The HTTP server of a silo: uvicorn, with limits of its own, without signal handlers.

uvicorn has no time limit for the first request of a connection, none for a client that reads nothing, and answers 503
instead of closing connections above a limit. `LimitedConnection` adds these three.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..streams.background import BackgroundTasks
from ..streams.errors import Busy, Unavailable
from .answers import HttpRoute
from .config import HttpConfig, check_usable

MAX_HEAD_BYTES = 16 << 10
"""Most bytes of a request before its body."""


class HttpLimits(NamedTuple):
    """Limits of the HTTP server. They are not configured."""

    connections: int = 256
    """Most open connections. Further ones are closed at once."""
    request_s: float = 5.0
    """Time that a client has to send a request, in seconds. Then its connection is closed."""
    idle_s: int = 5
    """An idle connection is closed after this time, in seconds."""
    read_s: float = 30.0
    """A connection is closed if its client reads nothing of an answer for this time, in seconds."""
    stop_s: int = 1
    """Time that open answers have to end when the server stops, in seconds."""


HTTP_LIMITS = HttpLimits()


def application(routes: Mapping[str, HttpRoute], more: list[BaseRoute] | None = None) -> Starlette:
    """Return an application that serves `routes`, by path, and `more`."""
    return Starlette(routes=[*(Route(path, _endpoint(route)) for path, route in routes.items()), *(more or ())])


def _endpoint(route: HttpRoute) -> Any:
    async def answer(_: Request) -> Response:
        found = await route()
        return Response(found.body, found.status, media_type=found.content_type)

    return answer


@asynccontextmanager
async def serving(app: ASGIApp, config: HttpConfig, limits: HttpLimits = HTTP_LIMITS) -> AsyncGenerator[str]:
    """Serve an ASGI application for the length of an `async with`. Yield its URL, as in http://127.0.0.1:9464.

    Raises Busy if the port is taken, OSError if the address cannot be used for another reason, InvalidArgument if the
    certificate or the key cannot be used.
    """
    if config.certificate is not None and config.key is not None:
        await asyncio.to_thread(check_usable, "http", config.certificate, config.key)
    settings = uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits),  # pyright: ignore[reportArgumentType] (it is called like the class)
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="error",  # others are about the bytes that a client sent
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.key,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=limits.stop_s,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    await asyncio.to_thread(settings.load)  # it reads files
    listening = await _listen(config.host, config.port or 0)
    server = _Server(settings)
    async with AsyncExitStack() as stack:
        for one in listening:
            stack.callback(one.close)
        background = await stack.enter_async_context(BackgroundTasks())
        run = background.hold(server.serve(listening), "headrace http")
        stack.push_async_callback(_stop, server, run)
        while not server.started:
            if run.done():
                await run
                raise Unavailable("the HTTP server ended at its start")
            await asyncio.sleep(0)
        host, port = listening[0].getsockname()[:2]
        yield f"{'https' if config.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def _stop(server: uvicorn.Server, run: asyncio.Task[None]) -> None:
    server.should_exit = True
    await run


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host, at the same port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            listening.append(socket.create_server((address[0], port), family=family))
            port = port or listening[0].getsockname()[1]
    except OSError as error:
        for one in listening:
            one.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise Busy(
            f"{host}:{port} is in use by another process, perhaps a silo: stop it, or name another port"
        ) from None
    return listening


class _Server(uvicorn.Server):
    """Leaves the signals to the silo."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class LimitedConnection(H11Protocol):
    """A connection that is closed if its client is too slow, or if there are too many."""

    def __init__(self, limits: HttpLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._requesting: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self._await_request(self._limits.request_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._requesting, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_request(self._limits.idle_s + self._limits.request_s)
        super().on_response_complete()

    def _await_request(self, seconds: float) -> None:
        if self._requesting is not None:
            self._requesting.cancel()
        self._requesting = self.loop.call_later(seconds, self._check_request)

    def _check_request(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._limits.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().resume_writing()
