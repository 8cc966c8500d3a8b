"""The HTTP interface of the dashboard: static files, pages as JSON and as server-sent events, logins and actions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib import metadata
from importlib.resources import files
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ...server.access import Authenticator
from ...server.methods import ServiceMethod
from ...streams.errors import HeadraceError, InvalidArgument, LimitExceeded, NotFound, PermissionDenied, Unavailable
from ..config import SiloConfig
from ..local import InProcessTransport
from .actions import ACTIONS
from .pages import PAGES, PageSource
from .protection import HEADERS, is_from_own_page, names_this_machine
from .sessions import PATH, Sessions
from .viewers import Viewer

log = logging.getLogger("headrace.silo")

FRAME_S = 1.0
"""Interval of the events of a page, in seconds."""
MAX_STREAMS = 64
"""Most pages that are open with server-sent events, over all viewers."""
MAX_RENDERING = 8
"""Pages and actions that are worked on at a time, over all viewers. Further ones wait."""
MAX_BODY = 256 << 10
"""Most bytes in the body of a request."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_Handler = Callable[[Request], Awaitable[Response]]


class _StaticFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


class _Open(NamedTuple):
    methods: Sequence[ServiceMethod]
    sessions: Sessions
    silo_name: Callable[[], str]


class SharedPage:
    """The content of a page, for all viewers with the same permissions that have it open."""

    def __init__(self, source: PageSource, fresh_s: float) -> None:
        """`fresh_s`: content of this age is sent again, in seconds."""
        self._source = source
        self._fresh_s = fresh_s
        self._rendering = asyncio.Lock()
        self._content: dict[str, Any] = {}
        self._until = -math.inf

    async def content(self) -> dict[str, Any]:
        """Return the content at the moment. Raise the errors of the services."""
        async with self._rendering:
            now = asyncio.get_running_loop().time
            if self._until < now():
                self._content = await self._source.render()
                self._until = now() + self._fresh_s
            return self._content


class Dashboard:
    """The dashboard of a silo. `routes` exist from the start; they answer 503 before `open` and after `close`."""

    def __init__(self, config: SiloConfig, *, frame_s: float = FRAME_S) -> None:
        self._config = config
        self._frame_s = frame_s
        self._open: _Open | None = None
        self._closing = asyncio.Event()
        self._streams = 0
        self._working = asyncio.Semaphore(MAX_RENDERING)
        self._pages: WeakValueDictionary[tuple[object, ...], SharedPage] = WeakValueDictionary()
        """The pages that are open, by page, viewer and options."""
        self._files = _static_files()
        self._version = metadata.version("headrace")

    def open(self, methods: Sequence[ServiceMethod], tokens: Authenticator, silo_name: Callable[[], str]) -> None:
        """Serve the pages with these services."""
        sessions = Sessions(
            tokens,
            asyncio.get_running_loop().time,
            guests=not self._config.dashboard_asks_for_tokens,
            secure=self._config.http.certificate is not None,
        )
        self._open = _Open(methods, sessions, silo_name)

    def close(self) -> None:
        """End the open pages, and refuse requests from now on."""
        self._closing.set()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self._redirect),
            Route(PATH, self._redirect),
            Route(f"{PATH}/", self._guarded(self._file)),
            Route(f"{PATH}/static/{{name}}", self._guarded(self._file)),
            Route(f"{PATH}/api/session", self._guarded(self._session)),
            Route(f"{PATH}/api/page/{{page}}", self._guarded(self._page)),
            Route(f"{PATH}/api/live/{{page}}", self._guarded(self._live)),
            Route(f"{PATH}/api/login", self._guarded(self._log_in), methods=["POST"]),
            Route(f"{PATH}/api/logout", self._guarded(self._log_out), methods=["POST"]),
            Route(f"{PATH}/api/action/{{action}}", self._guarded(self._act), methods=["POST"]),
        ]

    async def _redirect(self, _: Request) -> Response:
        return RedirectResponse(f"{PATH}/", HTTPStatus.TEMPORARY_REDIRECT)

    def _guarded(self, handler: _Handler) -> _Handler:
        async def answer(request: Request) -> Response:
            try:
                self._check(request)
                response = await handler(request)
            except HeadraceError as error:
                response = _refusal(error)
            except ClientDisconnect:
                response = Response(status_code=HTTPStatus.BAD_REQUEST)
            response.headers.update(HEADERS)
            response.headers.setdefault("cache-control", "no-store")
            return response

        return answer

    def _check(self, request: Request) -> None:
        if not self._config.dashboard_asks_for_tokens and not names_this_machine(request.headers.get("host", "")):
            raise PermissionDenied(
                "the dashboard of a loopback address has the name localhost: open it under that name"
            )
        if request.method == "POST" and not is_from_own_page(request.headers):
            raise PermissionDenied(
                "the request does not come from the dashboard's own page: send X-Headrace: 1, and JSON"
            )

    @property
    def _opened(self) -> _Open:
        if self._open is None or self._closing.is_set():
            raise Unavailable("the silo starts or stops: try again later")
        return self._open

    # ---- files and sessions ----------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise NotFound("there is no such file")
        headers = {"etag": found.etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

    async def _session(self, request: Request) -> Response:
        opened = self._opened
        viewer = await opened.sessions.viewer(request)
        return _json({**_described(viewer), "silo": opened.silo_name(), "version": self._version})

    async def _log_in(self, request: Request) -> Response:
        token = (await _body(request)).get("token")
        if not isinstance(token, str):
            raise InvalidArgument("token: expected text")
        response = _json({})
        viewer = await self._opened.sessions.log_in(request, token.strip(), response)
        log.info("dashboard: %s has logged in", viewer.principal)
        return response

    async def _log_out(self, request: Request) -> Response:
        response = _json({})
        self._opened.sessions.log_out(request, response)
        return response

    # ---- pages and actions -----------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return _json(await self._render(await self._shared(request)))

    async def _live(self, request: Request) -> Response:
        shared = await self._shared(request)
        first = await self._render(shared)  # an error is a status
        if self._streams >= MAX_STREAMS:
            raise LimitExceeded(f"{MAX_STREAMS} pages are open at this silo: close one, or open another silo's page")
        return StreamingResponse(self._frames(request, shared, first), media_type="text/event-stream")

    async def _shared(self, request: Request) -> SharedPage:
        opened = self._opened
        viewer = await opened.sessions.viewer(request)
        name, options = request.path_params["page"], request.query_params
        page = PAGES.get(name)
        if page is None:
            raise NotFound(f"there is no page {name!r}")
        key = (name, viewer, frozenset(options.multi_items()))
        shared = self._pages.get(key)
        if shared is None:
            source = page(InProcessTransport(opened.methods, viewer.principal), viewer, options)
            shared = self._pages[key] = SharedPage(source, self._frame_s / 2)
        return shared

    async def _frames(self, request: Request, shared: SharedPage, first: Any) -> AsyncGenerator[bytes]:
        """The page's content, as one event each time. An event `refused` ends it."""
        self._streams += 1
        try:
            yield _event("page", first)
            while not await self._pause():
                try:
                    await self._opened.sessions.viewer(request)
                    yield _event("page", await self._render(shared))
                except HeadraceError as error:
                    yield _event("refused", {"code": error.code, "error": str(error)})
                    return
        finally:
            self._streams -= 1

    async def _render(self, shared: SharedPage) -> dict[str, Any]:
        async with self._working:
            return await shared.content()

    async def _pause(self) -> bool:
        """Wait for the next frame. Return True if the silo stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._frame_s):
                await self._closing.wait()
        return self._closing.is_set()

    async def _act(self, request: Request) -> Response:
        opened = self._opened
        viewer = await opened.sessions.viewer(request)
        name = request.path_params["action"]
        action = ACTIONS.get(name)
        if action is None:
            raise NotFound(f"there is no action {name!r}")
        if not viewer.logged_in:
            raise PermissionDenied("log in with a token that may manage: without a login, the dashboard only shows")
        options = await _body(request)
        async with self._working:
            result = await action(InProcessTransport(opened.methods, viewer.principal), options)
        log.info("dashboard: %s: %s %.300r: %s", viewer.principal, name, options, result)
        return _json(result)


def _described(viewer: Viewer) -> dict[str, Any]:
    return {"name": viewer.principal.name, "logged_in": viewer.logged_in, "may_manage": viewer.may_manage}


def _json(content: Any, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _event(name: str, content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


async def _body(request: Request) -> dict[str, Any]:
    """Read the body, a JSON object. Raise InvalidArgument."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise InvalidArgument(f"the request has more than {MAX_BODY:,} bytes")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the request is no JSON object: {error}") from None
    except RecursionError:
        raise InvalidArgument("the request is no JSON object: it is nested too deeply") from None


_STATUS = {
    "unauthenticated": HTTPStatus.UNAUTHORIZED,
    "permission_denied": HTTPStatus.FORBIDDEN,
    "not_found": HTTPStatus.NOT_FOUND,
    "invalid_argument": HTTPStatus.BAD_REQUEST,
}


def _refusal(error: HeadraceError) -> Response:
    status = _STATUS.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE)
    if type(error) is HeadraceError:
        log.error("the dashboard failed", exc_info=error)
    return _json({"code": error.code, "error": str(error)}, status)


def _static_files() -> dict[str, _StaticFile]:
    """Read all files: they are small."""
    found: dict[str, _StaticFile] = {}
    for file in files("headrace.silo.dashboard").joinpath("static").iterdir():
        content, kind = file.read_bytes(), _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = _StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found
