"""Protection of the dashboard against other sites in the same browser. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Sent with each response. Nothing is loaded from elsewhere, no script or style is in the page itself, and no other
site can show the page in a frame."""
MARK = "x-headrace"
"""A header that a page of another site cannot send without asking first, which is refused."""


def names_this_machine(host: str) -> bool:
    """Whether the header `Host` is a name of this machine's loopback addresses.

    A site can let its own name point to 127.0.0.1, and then read the pages there as its own. Its name is in `Host`.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_from_own_page(headers: Mapping[str, str]) -> bool:
    """Whether a POST comes from a page of this silo, or from a program that is no browser."""
    if MARK not in headers or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")
