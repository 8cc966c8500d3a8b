"""Who may do what: permissions on namespaces, the tokens that carry them, and the book of tokens that a silo goes by.

A token is `hr_` and 256 random bits. It is shown once, when it is made; the control store keeps its hash. Who calls
with it is a `Principal`, and a principal may do what its grants say, nothing else: patterns of namespaces for each of
`publish`, `subscribe` and `manage`. A pattern is a namespace, or the beginning of some and a `*`.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from ..streams.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from ..streams.identity import StreamId, unquote
from ..streams.store import TokenRecord
from ..streams.subscriptions import Selector, check_subscription_name

log = logging.getLogger("headrace.silo")

TOKEN_PREFIX = "hr_"  # noqa: S105 (how each begins)
TOKEN_BYTES = 32
REFRESH_S = 2.0
"""How often a silo looks for tokens that were made or revoked, in seconds."""


class Permission(enum.Enum):
    """What can be granted on a namespace. None includes another."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    """Consume, and create a subscription to do so."""
    MANAGE = "manage"
    """Delete and seek subscriptions, dead letters; on all namespaces (`*`) also the cluster."""

    @property
    def verb(self) -> str:
        return self.value if self is Permission.MANAGE else f"{self.value} to"


class Grant(NamedTuple):
    """Namespaces: those that are `exact`, and those that begin with one of `prefixes`."""

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Grant:
        """Raises InvalidArgument for what is no pattern: a namespace, or the beginning of one and a `*`.

        Written as in a selector: `%2A`, `%2F`, `%3F` and `%25` are the characters `*`, `/`, `?` and `%` themselves.
        """
        exact: set[str] = set()
        prefixes: set[str] = set()
        for pattern in patterns:
            _check_pattern(pattern)
            (prefixes if pattern.endswith("*") else exact).add(unquote(pattern.removesuffix("*"), pattern))
        return cls(frozenset(exact), tuple(sorted(prefixes)))

    def covers(self, namespace: str) -> bool:
        return namespace in self.exact or namespace.startswith(self.prefixes)

    def covers_selector(self, pattern: str) -> bool:
        """Whether every namespace that the selector can match is covered. Raises InvalidArgument for no selector.

        A selector whose namespace part has a wildcard matches namespaces that all begin with what stands before it, and
        nothing more is sure of them. So it is covered where a prefix covers that beginning; an exact grant never does.
        Of unions this says no more than it can prove: `a*` and `b*` do not cover `?x`, which might begin with a `c`.
        """
        start, wild = _certain(pattern)
        return start.startswith(self.prefixes) or (not wild and start in self.exact)

    @property
    def everything(self) -> bool:
        return "" in self.prefixes


def _check_pattern(pattern: str) -> None:
    if "/" in pattern:
        raise InvalidArgument(
            f"{pattern!r} is no pattern of namespaces: a permission holds for all keys of a namespace, so leave out the"
            " slash and what follows (a slash in a namespace is %2F)"
        )
    if "*" in pattern[:-1] or "?" in pattern:
        raise InvalidArgument(
            f"{pattern!r} is no pattern of namespaces: write a namespace, as in orders, or how some begin, as in "
            "orders*; other wildcards are not understood (%2A and %3F are the characters themselves)"
        )
    StreamId(unquote(pattern.removesuffix("*"), pattern), "")


def _certain(pattern: str) -> tuple[str, bool]:
    """How each namespace that a selector matches begins, and whether anything may follow."""
    namespace = Selector(pattern).pattern.partition("/")[0]
    at = min((at for at in (namespace.find("*"), namespace.find("?")) if at >= 0), default=len(namespace))
    return unquote(namespace[:at], pattern), at < len(namespace)


@dataclass(frozen=True, eq=False)
class Principal:
    """Who calls, and what they may do. Each is equal to itself only, so that a new token of a revoked one's name is
    somebody else."""

    name: str
    """The name of its token, or of its certificate; "" where nobody is named."""
    grants: Mapping[Permission, Grant]

    @classmethod
    def of(cls, name: str, permissions: Mapping[Permission, Iterable[str]]) -> Principal:
        """From patterns of namespaces by permission. Raises InvalidArgument for what is no pattern."""
        return cls(name, {permission: Grant.of(patterns) for permission, patterns in permissions.items()})

    def allows(self, permission: Permission, namespace: str) -> bool:
        return self._grant(permission).covers(namespace)

    def allows_selector(self, permission: Permission, selector: str) -> bool:
        """Whether every namespace that the selector can match is granted. Raises InvalidArgument for no selector."""
        return self._grant(permission).covers_selector(selector)

    def allows_everywhere(self, permission: Permission) -> bool:
        """Whether all namespaces are granted, as for what concerns the whole cluster."""
        return self._grant(permission).everything

    def allows_anything(self) -> bool:
        """Whether it has any permission at all."""
        return any(grant != _NOTHING for grant in self.grants.values())

    def require(self, permission: Permission, namespace: str) -> None:
        """Raises PermissionDenied. It says nothing of what exists: it is raised before anybody looks."""
        if not self.allows(permission, namespace):
            raise PermissionDenied(
                f"{self} may not {permission.verb} namespace {namespace!r}: "
                f"use a token made with --{permission.value} {str(StreamId(namespace, ''))[:-1]!r}"
            )

    def require_selector(self, permission: Permission, selector: str) -> None:
        """Raises PermissionDenied where a stream that the selector can match is not granted."""
        if not self.allows_selector(permission, selector):
            raise PermissionDenied(
                f"{self} may not {permission.verb} everything that {selector!r} selects: "
                f"narrow the selector, or use a token made with a wider --{permission.value}"
            )

    def require_somewhere(self, *permissions: Permission) -> None:
        """Raises PermissionDenied where none of `permissions` is granted on any namespace at all."""
        if all(self._grant(one) == _NOTHING for one in permissions):
            verbs = " or ".join(one.verb for one in permissions)
            flags = " or ".join(f"--{one.value}" for one in permissions)
            raise PermissionDenied(
                f"{self} may not {verbs} any namespace, as this needs: use a token made with {flags}"
            )

    def require_everywhere(self, permission: Permission) -> None:
        """Raises PermissionDenied where not all namespaces are granted."""
        if not self.allows_everywhere(permission):
            raise PermissionDenied(
                f"{self} may not {permission.verb} all namespaces, as this needs: "
                f"use a token made with --{permission.value} '*'"
            )

    def require_subscription(self, permissions: Sequence[Permission], name: str, selector: str | None) -> None:
        """Check for any of `permissions` on a subscription by its name; `selector` is its own, None: there is none.

        Raises NotFound where there is none and the caller may know that: one of the permissions is granted everywhere.
        Else PermissionDenied, in the same words for what does not exist and for what is not allowed.
        """
        if selector is not None and any(self.allows_selector(one, selector) for one in permissions):
            return
        verbs = " or ".join(one.verb for one in permissions)
        if any(self.allows_everywhere(one) for one in permissions):
            raise NotFound(f"there is no subscription {name!r}")
        raise PermissionDenied(
            f"{self} may {verbs} no subscription {name!r}: check its name, and what the token allows"
        )

    def __str__(self) -> str:
        return f"client {self.name!r}" if self.name else "a client without a name"

    def _grant(self, permission: Permission) -> Grant:
        return self.grants.get(permission, _NOTHING)


_NOTHING = Grant()

EVERYTHING = Principal.of("", dict.fromkeys(Permission, ("*",)))
"""Whoever calls a silo that asks for no token: its address, or its clients' certificates, say who may."""


PEER = Principal.of("headrace silo", dict.fromkeys(Permission, ("*",)))
"""Another silo of the cluster, which speaks for callers that it has let in."""


class NewToken(NamedTuple):
    """A token that was just made: `text` is nowhere else."""

    text: str
    record: TokenRecord


def new_token(name: str, permissions: Mapping[Permission, Sequence[str]], created_at_us: int) -> NewToken:
    """Make a token. Raises InvalidArgument for a bad name, a bad pattern, or no permission at all."""
    check_token_name(name)
    granted = {permission.value: tuple(patterns) for permission, patterns in permissions.items() if patterns}
    if not granted:
        raise InvalidArgument(f"token {name!r} would allow nothing: give it --publish, --subscribe or --manage")
    for patterns in granted.values():
        Grant.of(patterns)
    text = TOKEN_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).rstrip(b"=").decode()
    return NewToken(text, TokenRecord(name, token_hash(text), granted, created_at_us))


def check_token_name(name: str) -> str:
    """Return `name`, or raise InvalidArgument."""
    try:
        return check_subscription_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("subscription name", "name of a token")) from None


def token_hash(text: str) -> bytes:
    """What is kept of a token: its SHA-256. Of 256 random bits, a slow hash would protect nothing better."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def principal_of(record: TokenRecord) -> Principal:
    """Raises InvalidArgument for a record that this version does not understand."""
    try:
        return Principal.of(record.name, {Permission(name): given for name, given in record.permissions.items()})
    except ValueError as error:
        raise InvalidArgument(f"token {record.name!r}: {error}") from None


class Authenticator(Protocol):
    """Tells who calls."""

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        """Who calls with this `authorization` metadata, None where there is none. Raises Unauthenticated."""
        ...

    def still_valid(self, principal: Principal) -> bool:
        """Whether one that was authenticated would be so now: ask it again while a stream is open."""
        ...


class NoTokens:
    """The Authenticator of a silo that asks for no token: everybody may do everything."""

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        return EVERYTHING

    def still_valid(self, principal: Principal) -> bool:
        return True


class ClusterMembers:
    """The Authenticator of a silo in a cluster: who has the cluster's secret is a silo; of others tells `others`."""

    def __init__(self, secret: str, others: Authenticator) -> None:
        self._secret = token_hash(secret)
        self._others = others

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        if authorization is not None and hmac.compare_digest(self._hash(authorization), self._secret):
            return PEER
        return self._others.authenticate(authorization)

    @staticmethod
    def _hash(authorization: str | bytes) -> bytes:
        text = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization
        return token_hash(text.partition(" ")[2])

    def still_valid(self, principal: Principal) -> bool:
        return principal is PEER or self._others.still_valid(principal)


class TokenStore(Protocol):
    """The part of the control store that a book needs."""

    async def tokens(self) -> list[TokenRecord]: ...


class TokenBook:
    """The Authenticator that goes by the control store's tokens, as they were at the last refresh.

    Made by `opened`, which keeps it fresh. A token that was made or revoked counts at the next refresh. While the store
    cannot be read, the book stays as it is.
    """

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._by_name: dict[str, tuple[TokenRecord, Principal]] = {}
        self._by_hash: dict[bytes, list[tuple[bytes, Principal]]] = {}
        self._failing = False

    @classmethod
    @asynccontextmanager
    async def opened(cls, store: TokenStore, refresh_s: float = REFRESH_S) -> AsyncGenerator[TokenBook]:
        """A book that is read once before this returns, and again every `refresh_s` seconds until its end.

        Raises StorageError where it cannot be read the first time.
        """
        book = cls(store)
        book.load(await store.tokens())
        refreshing = asyncio.create_task(book._keep_fresh(refresh_s), name="headrace-token-book")
        try:
            yield book
        finally:
            refreshing.cancel()
            await asyncio.wait([refreshing])

    async def _keep_fresh(self, refresh_s: float) -> None:
        while True:
            await asyncio.sleep(refresh_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the store again. Where it fails, the book stays as it is, and the log says so once."""
        try:
            records = await self._store.tokens()
        except HeadraceError as error:
            if not self._failing:
                log.warning("tokens cannot be read, those known stay valid: %s", error)
            self._failing = True
            return
        if self._failing:
            log.info("tokens can be read again")
        self._failing = False
        self.load(records)

    def load(self, records: Sequence[TokenRecord]) -> None:
        """Go by these records from now on. One that cannot be understood allows nothing, and the log says so."""
        before, self._by_name = self._by_name, {}
        for record in records:
            known = before.get(record.name)
            self._by_name[record.name] = known if known and known[0] == record else (record, _understood(record))
        self._by_hash = {}
        for record, principal in self._by_name.values():
            self._by_hash.setdefault(record.hash[:8], []).append((record.hash, principal))

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        """Who calls with this `authorization` metadata, None where there is none. Raises Unauthenticated.

        The token is looked up by the beginning of its hash, and the rest is compared in constant time: what the time it
        takes can tell is about hashes, which nobody can choose.
        """
        hashed = token_hash(_bearer(authorization))
        for expected, principal in self._by_hash.get(hashed[:8], ()):
            if hmac.compare_digest(expected, hashed):
                return principal
        raise Unauthenticated("the token is unknown or was revoked: make one with `headrace tokens create`")

    def still_valid(self, principal: Principal) -> bool:
        """Whether this principal's token is still in the book. Another of its name does not count."""
        known = self._by_name.get(principal.name)
        return known is not None and known[1] is principal


def _understood(record: TokenRecord) -> Principal:
    try:
        return principal_of(record)
    except InvalidArgument as error:
        log.warning("a token allows nothing, revoke it and make it again: %s", error)
        return Principal(record.name, {})


def _bearer(authorization: str | bytes | None) -> str:
    """The token in `Bearer TOKEN`. Never part of a message: it may be a password that was sent by mistake."""
    if authorization is None:
        raise Unauthenticated(
            "no token: send the metadata `authorization: Bearer hr_...`, with a token of `headrace tokens create`"
        )
    text = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the metadata `authorization` is no bearer token: write it as `Bearer hr_...`")
    return token.strip()
