"""Answers to HTTP requests. This module does not import the HTTP server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple


class HttpAnswer(NamedTuple):
    """The answer to a GET request."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


HttpRoute = Callable[[], Awaitable[HttpAnswer]]
"""Answers GET and HEAD requests of one path."""
