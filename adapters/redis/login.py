"""User and password of a Redis: in its url, or in environment variables."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

USER = "HEADRACE_REDIS_USER"
PASSWORD = "HEADRACE_REDIS_PASSWORD"  # noqa: S105 (the name of a variable)

_PUBLIC = frozenset({"db", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile"})
"""Names in the query of a url that say how to reach the server. Others may have secrets."""


def with_login(url: str) -> str:
    """Return the url with user and password of the environment, if it has none of its own. `address_of` accepts it."""
    user, password = os.environ.get(USER, ""), os.environ.get(PASSWORD, "")
    parts = urlsplit(url)
    own = "@" in parts.netloc or any(name in ("username", "password") for name, _ in parse_qsl(parts.query))
    if own or not password:
        return url
    return parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc}").geturl()


def without_login(url: str) -> str:
    """Return the url without user, password and other secrets. `address_of` accepts it."""
    parts = urlsplit(url)
    query = urlencode([(name, value) for name, value in parse_qsl(parts.query) if name in _PUBLIC])
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{'?' if query else ''}{query}"
