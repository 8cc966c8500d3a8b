"""Addresses in options: of silos, and of the database of a control store."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

from ..streams.errors import InvalidArgument

HIGHEST_PORT = 65535
_POSTGRES = ("postgresql", "postgresql+psycopg")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. An IPv6 address is in brackets. Raise InvalidArgument for another text."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise InvalidArgument(f"{text!r} is no address: write HOST:PORT, as in 127.0.0.1:9465 or [::1]:9465")
    if int(port) > HIGHEST_PORT:
        raise InvalidArgument(f"{text!r} is no address: ports are numbers up to {HIGHEST_PORT}")
    return host, int(port)


def check_store(store: str, option: str) -> None:
    """Raise InvalidArgument if `store` is no URL of a PostgreSQL database.

    The message does not show the URL: in a malformed one, any part may be the password.
    """
    if not _is_postgres(store):
        raise InvalidArgument(
            f"{option} is no URL of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST/DATABASE; in the user "
            "and the password, write %2F for /, %40 for @, %3A for :, %3F for ?, %23 for #"
        )


def _is_postgres(store: str) -> bool:
    try:
        url = urlsplit(store)
        host = url.hostname or parse_qs(url.query).get("host")
        return (
            url.scheme in _POSTGRES and bool(host) and url.port != 0 and url.netloc.count("@") <= 1 and not url.fragment
        )
    except ValueError:  # of the port, or an address in brackets
        return False
