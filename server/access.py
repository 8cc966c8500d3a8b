"""Access control: permissions on namespaces, tokens, and the `TokenBook` with which a silo authenticates callers.

A token is `hr_` and 256 random bits. It is shown once, when it is made; the control store keeps its hash. A caller with
a token is a `Principal`. Its grants are patterns of namespaces for each of `publish`, `subscribe` and `manage`; it has
no other permissions. A pattern is a namespace, or the beginning of namespaces and a `*`.
"""

from __future__ import annotations

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
from urllib.parse import quote

from ..store.token_record import TokenRecord
from ..streams.background import BackgroundTasks, run_periodically
from ..streams.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from ..streams.identity import StreamId, unquote
from ..streams.producer_ledger import owned_id
from ..streams.subscriptions import Selector, check_name

log = logging.getLogger("headrace.silo")

TOKEN_PREFIX = "hr_"  # noqa: S105 (a prefix, no secret)
TOKEN_BYTES = 32
_SILO_PREFIX = "hs_"
_ACCOUNT_CHARACTERS = 128
REFRESH_S = 2.0
"""Interval at which a silo reads new and revoked tokens, in seconds."""


class Permission(enum.Enum):
    """A permission on a namespace. No permission includes another."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    """Consume, and create subscriptions."""
    MANAGE = "manage"
    """Delete and seek subscriptions, and manage their dead letters; with `*`, also manage the cluster."""

    @property
    def verb(self) -> str:
        return self.value if self is Permission.MANAGE else f"{self.value} to"


class NamespaceGrant(NamedTuple):
    """A set of namespaces: those in `exact`, and those that begin with one of `prefixes`."""

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str]) -> NamespaceGrant:
        """Make a grant from patterns: each is a namespace, or the beginning of one and a `*`. Raise InvalidArgument.

        As in a selector, `%2A`, `%2F`, `%3F` and `%25` are the characters `*`, `/`, `?` and `%` themselves.
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
        """Whether every namespace that the selector can match is covered. Raise InvalidArgument for a bad selector.

        If the namespace part of the selector has a wildcard, only the text before it is certain. A prefix that covers
        this text covers the selector; an exact grant never does. `a*` and `b*` together do not cover `?x`, which also
        matches namespaces that begin with a `c`.
        """
        start, wild = _certain_part(pattern)
        return start.startswith(self.prefixes) or (not wild and start in self.exact)

    @property
    def everything(self) -> bool:
        return "" in self.prefixes


def _check_pattern(pattern: str) -> None:
    if "/" in pattern:
        raise InvalidArgument(
            f"{pattern!r} is not a pattern of namespaces: a permission holds for all keys of a namespace, so leave out "
            "the slash and the text after it (a slash in a namespace is %2F)"
        )
    if "*" in pattern[:-1] or "?" in pattern:
        raise InvalidArgument(
            f"{pattern!r} is not a pattern of namespaces: write a namespace, as in orders, or the beginning of "
            "several, as in orders*; there are no other wildcards (%2A and %3F are the characters themselves)"
        )
    StreamId(unquote(pattern.removesuffix("*"), pattern), "")


def _certain_part(pattern: str) -> tuple[str, bool]:
    """Return the text with which every namespace of a selector begins, and whether more text may follow."""
    namespace = Selector(pattern).pattern.partition("/")[0]
    at = min((at for at in (namespace.find("*"), namespace.find("?")) if at >= 0), default=len(namespace))
    return unquote(namespace[:at], pattern), at < len(namespace)


@dataclass(frozen=True, eq=False)
class Principal:
    """A caller and its grants.

    A principal is equal only to itself: a new token with the name of a revoked one is another principal.
    """

    name: str
    """The client of its token, or the common name of its certificate; "" if it has neither."""
    grants: Mapping[Permission, NamespaceGrant]
    account: str = ""
    """The owner of the caller's producer ids: see `producer_of`. "" for callers that need no credentials."""

    @classmethod
    def of(cls, name: str, permissions: Mapping[Permission, Iterable[str]]) -> Principal:
        """Make a principal from patterns of namespaces by permission. Raise InvalidArgument for a bad pattern."""
        return cls(name, {permission: NamespaceGrant.of(patterns) for permission, patterns in permissions.items()})

    def allows(self, permission: Permission, namespace: str) -> bool:
        return self._grant(permission).covers(namespace)

    def producer_of(self, producer: str) -> str:
        """Return the id of the caller's producer in the provider. No other account can have the same id.

        Callers without an account share their ids with each other and with programs that open the data directory. All
        of these have every permission.
        """
        return owned_id(self.account, producer)

    def allows_selector(self, permission: Permission, selector: str) -> bool:
        """Whether every namespace that the selector can match is granted. Raise InvalidArgument for a bad selector."""
        return self._grant(permission).covers_selector(selector)

    def allows_everywhere(self, permission: Permission) -> bool:
        """Whether all namespaces are granted. Operations on the whole cluster need this."""
        return self._grant(permission).everything

    def allows_anything(self) -> bool:
        """Whether the caller has any permission at all."""
        return any(grant != _NOTHING for grant in self.grants.values())

    def require(self, permission: Permission, namespace: str) -> None:
        """Raise PermissionDenied if the namespace is not granted.

        Call this before any look-up: the error must not tell which names exist.
        """
        if not self.allows(permission, namespace):
            raise PermissionDenied(
                f"{self} may not {permission.verb} namespace {namespace!r}: "
                f"use a token made with --{permission.value} {str(StreamId(namespace, ''))[:-1]!r}"
            )

    def require_selector(self, permission: Permission, selector: str) -> None:
        """Raise PermissionDenied if a stream that the selector can match is not granted."""
        if not self.allows_selector(permission, selector):
            raise PermissionDenied(
                f"{self} may not {permission.verb} everything that {selector!r} selects: "
                f"narrow the selector, or use a token made with a wider --{permission.value}"
            )

    def require_somewhere(self, *permissions: Permission) -> None:
        """Raise PermissionDenied if none of `permissions` is granted on any namespace."""
        if all(self._grant(one) == _NOTHING for one in permissions):
            verbs = " or ".join(one.verb for one in permissions)
            flags = " or ".join(f"--{one.value}" for one in permissions)
            raise PermissionDenied(
                f"{self} may not {verbs} any namespace, as this needs: use a token made with {flags}"
            )

    def require_everywhere(self, permission: Permission) -> None:
        """Raise PermissionDenied unless all namespaces are granted."""
        if not self.allows_everywhere(permission):
            raise PermissionDenied(
                f"{self} may not {permission.verb} all namespaces, as this needs: "
                f"use a token made with --{permission.value} '*'"
            )

    def require_subscription(self, permissions: Sequence[Permission], name: str, selector: str | None) -> None:
        """Check that one of `permissions` is granted on a subscription. `selector` is None if there is no such
        subscription.

        Raises NotFound if the subscription does not exist and one of the permissions is granted everywhere. Otherwise
        PermissionDenied, with the same text for a missing subscription and for a missing permission.
        """
        if selector is not None and any(self.allows_selector(one, selector) for one in permissions):
            return
        verbs = " or ".join(one.verb for one in permissions)
        if any(self.allows_everywhere(one) for one in permissions):
            raise NotFound(f"there is no subscription {name!r}")
        raise PermissionDenied(
            f"{self} may {verbs} no subscription {name!r}: check its name and the permissions of the token"
        )

    def __str__(self) -> str:
        return f"client {self.name!r}" if self.name else "a client without a name"

    def _grant(self, permission: Permission) -> NamespaceGrant:
        return self.grants.get(permission, _NOTHING)


_NOTHING = NamespaceGrant()

EVERYTHING = Principal.of("", dict.fromkeys(Permission, ("*",)))
"""The caller, if the silo needs no tokens: only its address or client certificates restrict access."""


PEER = Principal.of("headrace silo", dict.fromkeys(Permission, ("*",)))
"""Another silo of the cluster. It has checked the permissions of its own callers."""


class NewToken(NamedTuple):
    """A new token. `text` is stored nowhere."""

    text: str
    record: TokenRecord


def account_of_client(client: str) -> str:
    """Return the account of a client that has tokens."""
    return f"token:{client}"


def account_of_certificate(common_name: str) -> str:
    """Return the account of a client with a certificate. The name may have any characters and any length."""
    plain = quote(common_name, safe="")
    short = plain if len(plain) <= _ACCOUNT_CHARACTERS else sha256(common_name.encode()).hexdigest()
    return f"certificate:{short}"


def new_token(
    name: str, permissions: Mapping[Permission, Sequence[str]], created_at_us: int, client: str | None = None
) -> NewToken:
    """Make a token for `client`; None: the client has the name of the token.

    Raises InvalidArgument for a bad name, a bad pattern, or no permission at all.
    """
    check_token_name(name)
    check_token_name(name if client is None else client)
    granted = {permission.value: tuple(patterns) for permission, patterns in permissions.items() if patterns}
    if not granted:
        raise InvalidArgument(f"token {name!r} would have no permission: give it --publish, --subscribe or --manage")
    for patterns in granted.values():
        NamespaceGrant.of(patterns)
    text = TOKEN_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).rstrip(b"=").decode()
    record = TokenRecord(name, token_hash(text), granted, created_at_us, name if client is None else client)
    return NewToken(text, record)


def check_token_name(name: str) -> str:
    """Return `name`, or raise InvalidArgument."""
    return check_name("token name", name)


def token_hash(text: str) -> bytes:
    """Return the SHA-256 of a token, which is stored. For 256 random bits, a slower hash gives no more protection."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def principal_of(record: TokenRecord) -> Principal:
    """Return the caller of a token. Raise InvalidArgument for a record that this version cannot read."""
    try:
        grants = {Permission(name): NamespaceGrant.of(given) for name, given in record.permissions.items()}
        return Principal(record.client, grants, account_of_client(record.client))
    except ValueError as error:
        raise InvalidArgument(f"token {record.name!r}: {error}") from None


class Authenticator(Protocol):
    """Finds the principal of a call."""

    async def prepare(self, authorization: str | bytes | None) -> None:
        """Look up an unknown caller in a store. Awaited before `authenticate`. Raises nothing."""

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        """Return the caller with this `authorization` metadata, None without any. Raise Unauthenticated."""
        ...

    def still_valid(self, principal: Principal) -> bool:
        """Whether an authenticated caller is still valid. Check this while a stream is open."""
        ...


class NoTokens(Authenticator):
    """The Authenticator of a silo that needs no tokens: each caller has all permissions."""

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        return EVERYTHING

    def still_valid(self, principal: Principal) -> bool:
        return True


class SiloSecrets(Protocol):
    """The hashes of the secrets with which the silos of a cluster call each other."""

    def is_known(self, secret_hash: str) -> bool:
        """Whether a silo that this process knows has this secret."""
        ...

    async def look_up(self, secret_hash: str) -> None:
        """Read the cluster's store, because the silo may have joined just now. Takes a bounded time. Raises nothing."""
        ...


def new_silo_secret() -> str:
    """Make the secret of one silo. It stays in the silo's memory; the store has its hash."""
    return _SILO_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def silo_hash(secret: str) -> str:
    return token_hash(secret).hex()


class ClusterMembers(Authenticator):
    """The Authenticator of a silo in a cluster: a caller with a silo's secret is a silo. `others` authenticates all
    other callers."""

    def __init__(self, silos: SiloSecrets, others: Authenticator) -> None:
        self._silos = silos
        self._others = others

    async def prepare(self, authorization: str | bytes | None) -> None:
        hashed = self._hash(authorization)
        if hashed is None:
            await self._others.prepare(authorization)
        elif not self._silos.is_known(hashed):
            await self._silos.look_up(hashed)

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        # The time of the look-up depends on hashes only, which callers cannot choose.
        hashed = self._hash(authorization)
        return PEER if hashed is not None and self._silos.is_known(hashed) else self._others.authenticate(authorization)

    @staticmethod
    def _hash(authorization: str | bytes | None) -> str | None:
        """Return the hash of a silo's secret; None for other metadata, such as a token."""
        if authorization is None:
            return None
        text = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization
        secret = text.partition(" ")[2]
        return silo_hash(secret) if secret.startswith(_SILO_PREFIX) else None

    def still_valid(self, principal: Principal) -> bool:
        return principal is PEER or self._others.still_valid(principal)


class TokenStore(Protocol):
    """A store of tokens."""

    async def tokens(self) -> list[TokenRecord]: ...


class TokenBook(Authenticator):
    """The Authenticator with the tokens of the control store, as of the last refresh.

    Made by `opened`, which refreshes it. A new or revoked token takes effect at the next refresh. While the store
    cannot be read, the book does not change.
    """

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._by_name: dict[str, tuple[TokenRecord, Principal]] = {}
        self._by_hash: dict[bytes, list[tuple[bytes, Principal]]] = {}
        self._valid: frozenset[Principal] = frozenset()
        self._failing = False

    @classmethod
    @asynccontextmanager
    async def opened(cls, store: TokenStore, refresh_s: float = REFRESH_S) -> AsyncGenerator[TokenBook]:
        """Read the tokens now, and again every `refresh_s` seconds until the end of the `async with`.

        Raises StorageError if the first read fails.
        """
        book = cls(store)
        book.load(await store.tokens())
        async with BackgroundTasks() as background:
            background.start(run_periodically(book.refresh, refresh_s), "headrace token book")
            yield book

    async def refresh(self) -> None:
        """Read the store again. If this fails, the book does not change, and the log has one warning."""
        try:
            records = await self._store.tokens()
        except HeadraceError as error:
            if not self._failing:
                log.warning("tokens cannot be read, known tokens stay valid: %s", error)
            self._failing = True
            return
        if self._failing:
            log.info("tokens can be read again")
        self._failing = False
        self.load(records)

    def load(self, records: Sequence[TokenRecord]) -> None:
        """Replace all records. A record that cannot be read grants nothing, and the log has a warning."""
        before, self._by_name = self._by_name, {}
        for record in records:
            known = before.get(record.name)
            self._by_name[record.name] = (
                known if known and known[0] == record else (record, _readable_principal(record))
            )
        self._by_hash = {}
        self._valid = frozenset(principal for _, principal in self._by_name.values())
        for record, principal in self._by_name.values():
            self._by_hash.setdefault(record.hash[:8], []).append((record.hash, principal))

    def authenticate(self, authorization: str | bytes | None) -> Principal:
        """Return the caller with this `authorization` metadata, None without any. Raise Unauthenticated.

        The beginning of the token's hash finds the records, which are then compared in constant time. The time of the
        look-up depends on hashes only, which callers cannot choose.
        """
        hashed = token_hash(_bearer(authorization))
        for expected, principal in self._by_hash.get(hashed[:8], ()):
            if hmac.compare_digest(expected, hashed):
                return principal
        raise Unauthenticated("the token is unknown or was revoked: make one with `headrace tokens create`")

    def still_valid(self, principal: Principal) -> bool:
        """Whether this principal's token is still in the book. Another token of that name does not count."""
        return principal in self._valid


def _readable_principal(record: TokenRecord) -> Principal:
    try:
        return principal_of(record)
    except InvalidArgument as error:
        log.warning("a token grants nothing, revoke it and make it again: %s", error)
        return Principal(record.client, {}, account_of_client(record.client))


def _bearer(authorization: str | bytes | None) -> str:
    """Return the token in `Bearer TOKEN`. Messages never show it: it may be a password that was sent by mistake."""
    if authorization is None:
        raise Unauthenticated(
            "no token: send the metadata `authorization: Bearer hr_...`, with a token of `headrace tokens create`"
        )
    text = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the metadata `authorization` is not a bearer token: write it as `Bearer hr_...`")
    return token.strip()
