"""Logins: a browser exchanges a token for a cookie.

A browser cannot send a header with server-sent events, so it needs a cookie. The cookie is a random number, which only
this process knows; scripts cannot read it, and other sites cannot make a browser send it. The token is not kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ...server.access import Authenticator, Principal
from ...streams.errors import Unauthenticated
from .viewers import GUEST, Viewer

SESSION_S = 12 * 3600.0
"""A login ends after this time, in seconds."""
MAX_SESSIONS = 1000
"""Most logins at a time; the oldest one ends first."""
PATH = "/dashboard"


class _Login(NamedTuple):
    principal: Principal
    until: float


class Sessions:
    """The logins at this silo."""

    def __init__(self, tokens: Authenticator, clock: Callable[[], float], *, guests: bool, secure: bool) -> None:
        """`guests`: callers without a login may read. `secure`: cookies are sent with TLS only."""
        self.guests = guests
        self._tokens = tokens
        self._clock = clock
        self._secure = secure
        self._logins: dict[str, _Login] = {}

    async def viewer(self, request: Request) -> Viewer:
        """Return the viewer of a request. Raise Unauthenticated without a login, if guests may not read, and for a
        wrong token in the header `Authorization`."""
        if (authorization := request.headers.get("authorization")) is not None:
            return await self._authenticated(authorization)
        login = self._logins.get(request.cookies.get(_cookie(request), ""))
        if login is not None and login.until > self._clock() and self._tokens.still_valid(login.principal):
            return Viewer(login.principal, logged_in=True)
        if self.guests:
            return GUEST
        raise Unauthenticated("log in with a token of `headrace tokens create`")

    async def log_in(self, request: Request, token: str, response: Response) -> Viewer:
        """Exchange a token for a cookie. Raise Unauthenticated."""
        viewer = await self._authenticated(f"Bearer {token}")
        now = self._clock()
        self._logins = {key: login for key, login in self._logins.items() if login.until > now}
        while len(self._logins) >= MAX_SESSIONS:
            del self._logins[next(iter(self._logins))]
        key = secrets.token_urlsafe(32)
        self._logins[key] = _Login(viewer.principal, now + SESSION_S)
        response.set_cookie(_cookie(request), key, path=PATH, httponly=True, samesite="strict", secure=self._secure)
        return viewer

    def log_out(self, request: Request, response: Response) -> None:
        self._logins.pop(request.cookies.get(_cookie(request), ""), None)
        response.delete_cookie(_cookie(request), path=PATH, httponly=True, samesite="strict", secure=self._secure)

    async def _authenticated(self, authorization: str) -> Viewer:
        await self._tokens.prepare(authorization)
        return Viewer(self._tokens.authenticate(authorization), logged_in=True)


def _cookie(request: Request) -> str:
    """The cookie's name. A browser sends the cookies of one host to all its ports, so each port has another name."""
    return f"headrace_{request.scope['server'][1]}"
