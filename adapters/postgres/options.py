"""Options of a provider's queues in PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from ...streams.errors import InvalidArgument

POLL_S, POOLER_POLL_S = 1.0, 0.02
"""Default of `poll_s`, without and with `pooler`."""
_SECRET = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
_HOST = re.compile(r"(\[[^\]]*\]|[^:@\[]*)(:\d*)?")
"""A host of a URL, with its port."""
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PostgresOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `postgres`. All processes that open the provider must use the same retention."""

    url: str
    """The database, postgresql://user@host:port/database. A password may also be in PGPASSWORD or ~/.pgpass."""

    create: bool = False
    """Create the tables if they are missing, as `headrace postgres migrate URL` does."""

    pooler: bool = False
    """The URL leads to a pooler that gives each transaction another connection, such as PgBouncer. Nothing then wakes
    up readers of other processes: they ask each `poll_s`."""

    poll_s: _Seconds | None = None
    """How often readers ask for new batches even if nothing woke them up, in seconds. None: 1, with `pooler` 0.02."""

    publish_timeout_s: _Seconds = 10.0
    """How long a publish waits for a server that is away, in seconds."""

    group_bytes: Annotated[int, msgspec.Meta(gt=0)] = 4 << 20
    """A commit accepts no further calls once it has this many bytes; later calls go into the next commit."""

    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 256 << 20
    """A segment is followed by a new one when it has this many bytes. Segments are deleted as a whole."""

    retain_age_s: _Seconds | None = None
    """Delete segments whose batches are all older than this, in seconds. None: do not delete by age."""

    retain_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Delete the oldest segments while all queues together hold more bytes than this. So they keep up to one segment
    less. None: do not delete by size."""

    retain_unfinished: bool = True
    """True: never delete batches that a subscription has not finished. False: delete them too, and leave a gap
    record."""

    def poll(self) -> float:
        """Return how often readers ask for new batches, in seconds."""
        return self.poll_s or (POOLER_POLL_S if self.pooler else POLL_S)


def with_location(given: Mapping[str, Any], stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options to use: the stored ones if none are given. Given options replace all stored ones, because a
    configuration cannot say that it no longer has an option. Only the address may be left out."""
    if not given:
        return stored
    address = {} if "url" in given else {name: stored[name] for name in ("url", "pooler") if name in stored}
    return {**address, **given}


def retention_of(options: PostgresOptions) -> Mapping[str, Any]:
    """Return the options that decide how long batches are kept."""
    names = ("segment_bytes", "retain_age_s", "retain_bytes", "retain_unfinished")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def location_of(options: PostgresOptions) -> Mapping[str, Any]:
    """Return the options that say where the queues are and how long they are kept, without a password."""
    return {"url": without_password(options.url), "pooler": options.pooler, **retention_of(options)}


def without_password(url: str) -> str:
    """Return a URL without its password. The user stays. The URL is divided as libpq does it: a password may have `?`
    and `#`, and there may be no host."""
    scheme, _, rest = url.partition("://")
    user, at, place = rest.partition("@")
    if "/" in user or not at:
        user, at, place = "", "", rest
    place, _, query = place.partition("?")
    kept = "&".join(each for each in query.split("&") if unquote(each.partition("=")[0]) not in _SECRET)
    return f"{scheme}://{user.partition(':')[0]}{at}{place}{'?' if kept else ''}{kept}"


def check_url(url: str) -> str:
    """Return the URL as libpq takes it. Raises InvalidArgument, which does not show it, because it may have secrets."""
    scheme, found, rest = url.partition("://")
    if not found or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise InvalidArgument(
            "adapter 'postgres': url: expected postgresql://user@host:port/database", option="options"
        )
    user, at, place = rest.partition("@")
    if not at or "/" in user:  # as in `without_password`
        place = rest
    hosts = re.split("[/?]", place, maxsplit=1)[0].split(",")
    if "@" in place.partition("?")[0] or not all(map(_HOST.fullmatch, hosts)):
        raise InvalidArgument(  # libpq would take a part of the password for the host, and report it
            "adapter 'postgres': url: expected postgresql://user:password@host:port/database, with a number as the "
            "port; in the user, the password and the database, write %40 for @, %2F for / and %3A for :",
            option="options",
        )
    return f"postgresql://{rest}"
