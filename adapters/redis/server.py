"""The connection to one Redis, Redis Cluster or Valkey, as the shards use it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ...streams.errors import Closed, InvalidArgument, StorageError, StorageFull
from .limits import REDIS_LIMITS, RedisLimits
from .login import PASSWORD, USER, with_login
from .scripts import RedisScript

log = logging.getLogger("headrace.adapters.redis")

OLDEST = (6, 2)

_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,  # no node can be reached, or they do not have all slots
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.SlotNotCoveredError,
    OSError,
)
_AWAY_CODES = frozenset({"READONLY", "NOREPLICAS", "BUSY"})
"""Errors that have no class of their own in some versions of the client, or in all."""
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]+) ")
"""Redis 6 wraps the error of a command in a script into an error of the script."""
_NO_CLUSTER = "Cluster mode is not enabled"
_DAMAGED = re.compile(r"DAMAGED <([0-9a-f]*)> <([a-z ]*)>")
_NUMBER = re.compile(r"/?[0-9]*")
_CUT_PASSWORD = re.compile(r"rediss?://[^/?#]*[/?#].*@", re.DOTALL)
"""Matches a URL whose address, by the rules of URLs, ends before the last @."""


class ServerAway(StorageError):
    """The server cannot be reached, or does not serve at present. It may have carried out the command."""


class ServerSilent(ServerAway):
    """The server did not answer in time."""


class RedisConnection:
    """One Redis, or one cluster. It never repeats a command by itself: callers know which scripts they may repeat."""

    def __init__(
        self, url: str, *, cluster: bool = False, variables: bool = False, limits: RedisLimits = REDIS_LIMITS
    ) -> None:
        """With `variables`, a url without user and password takes them from the environment."""
        self.address = address_of(url, cluster=cluster)
        """The address without user and password."""
        self._variables = variables
        if variables:
            url = with_login(url)
        self.limits = limits
        self._closed = False
        self._client = _client(url, limits.command_s, limits, cluster=cluster)
        self._blocking = _client(url, limits.block_s + limits.command_s, limits, cluster=cluster)

    async def run(self, script: RedisScript, keys: Sequence[str], *args: str | bytes | float) -> Any:
        """Carry out a script. Raises ServerAway, StorageFull, StorageError, Closed."""
        self._check_open()
        client, task = cast("Any", self._client), asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            try:
                return await client.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:  # the server does not know the script yet; nothing was done
                return await client.eval(script.text, len(keys), *keys, *args)
        except _AWAY as error:
            await self._leave_replica(error)
            raise self._away(error) from None
        except exceptions.RedisError as error:
            await self._leave_replica(error)
            raise self._refused(error, keys) from error
        finally:
            if task and task.cancelling() > cancelled:  # see `headrace.streams.background.end`
                raise asyncio.CancelledError

    async def bell(self, key: str, timeout_s: float) -> bool:
        """Take an element from the list `key`. Return False if none is there within `timeout_s`. Raises ServerAway."""
        try:
            return bool(await cast("Any", self._blocking).blpop([key], timeout=timeout_s))
        except (*_AWAY, exceptions.RedisError) as error:
            await self._leave_replica(error)
            raise self._away(error) from None

    async def check(self) -> None:
        """Raise InvalidArgument if the server, or a node of a cluster, is too old or evicts keys. Raises ServerAway."""
        try:
            info = await cast("Any", self._client).info()
        except exceptions.NoPermissionError:  # this user may not read it
            return
        except (*_AWAY, exceptions.RedisError) as error:
            raise self._away(error) from None
        for node in [info] if "redis_version" in info else info.values():
            self._check_node(node)

    def _check_node(self, info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0.0"))
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise InvalidArgument(f"Redis at {self.address} has version {version}: use 6.2 or a newer one")
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if int(info.get("maxmemory", 0)) and policy != "noeviction":
            kept = "queues" if policy.startswith("allkeys") else "the last calls of idempotent producers"
            raise InvalidArgument(
                f"Redis at {self.address} evicts {kept} when its memory is full: set maxmemory-policy noeviction, "
                f"not {policy}"
            )

    def _check_open(self) -> None:
        """Raise Closed if this is closed: the client would connect again."""
        if self._closed:
            raise Closed(f"the connection to Redis at {self.address} is closed: open its provider or queue again")

    async def aclose(self) -> None:
        self._closed = True
        await asyncio.gather(self._client.aclose(), self._blocking.aclose(), return_exceptions=True)

    async def _leave_replica(self, error: BaseException) -> None:
        """Close the connections if the server answers that it is a replica now: a former master keeps them open. The
        next connection goes to the server that has the address then. In a cluster, the client finds the master by
        itself."""
        if isinstance(error, exceptions.RedisError) and _code(error) == "READONLY":
            pools = [client.connection_pool for client in (self._client, self._blocking) if isinstance(client, Redis)]
            await asyncio.gather(*(pool.disconnect(inuse_connections=False) for pool in pools), return_exceptions=True)

    def damaged(self, keys: Sequence[str], id: bytes, what: str) -> StorageError:  # noqa: A002
        """Return the error for a damaged event of the shard with these keys."""
        name = id.decode(errors="backslashreplace")
        return StorageError(
            f"Redis at {self.address}: in {_tag(keys)} the event {name!r} {what}, and nothing behind it can be read: "
            "remove it, see docs/redis.md, Damaged events"
        )

    def _refused(self, error: exceptions.RedisError, keys: Sequence[str]) -> StorageError | InvalidArgument:
        """Return the error for an error answer of the server."""
        code = _code(error)
        if code == "OOM":
            return StorageFull(f"Redis at {self.address} has no memory left: consume events, or raise its maxmemory")
        if damaged := _DAMAGED.search(str(error)):
            return self.damaged(keys, bytes.fromhex(damaged[1]), damaged[2])
        if code == "WRONGTYPE":
            return StorageError(
                f"Redis at {self.address}: {code}, one of the keys {_tag(keys)}... is of another type than Headrace's: "
                "delete it, see docs/redis.md, Damaged events"
            )
        return self._away(error) if code in _AWAY_CODES else StorageError(f"Redis at {self.address}: {error}")

    def _away(self, error: BaseException) -> ServerAway | InvalidArgument:
        if isinstance(error, exceptions.RedisClusterException) and _NO_CLUSTER in str(error):
            return InvalidArgument(f"Redis at {self.address} is no Redis Cluster: leave `cluster = true` out")
        refused = error.__cause__ if isinstance(error, exceptions.RedisClusterException) else error
        if isinstance(refused, exceptions.AuthenticationError):
            or_in = f", or in the environment variables {USER} and {PASSWORD}" if self._variables else ""
            return ServerAway(
                f"Redis at {self.address} refuses the login ({str(refused).rstrip('.')}): give user and password in "
                f"its url{or_in}"
            )
        kind = ServerSilent if isinstance(error, (exceptions.TimeoutError, TimeoutError)) else ServerAway
        return kind(f"Redis at {self.address} does not serve: {error or type(error).__name__}")


def _tag(keys: Sequence[str]) -> str:
    """Return the beginning of all keys of a shard."""
    return keys[0].partition("}")[0] + "}"


def _code(error: exceptions.RedisError) -> str:
    """Return the first word of a server's error. The client removes it from errors that have a class."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return "OOM"
    if isinstance(error, exceptions.ReadOnlyError):
        return "READONLY"
    text = str(error)
    wrapped = _IN_SCRIPT.search(text)
    return wrapped[1] if wrapped else text.partition(" ")[0]


def address_of(url: str, *, cluster: bool = False) -> str:
    """Return host and port. Raises InvalidArgument, whose text shows no part of the url: any part may be a password."""
    if _CUT_PASSWORD.match(url):
        raise _no_url("in a password, / # ? @ and % are written %2F %23 %3F %40 and %25")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _no_url("its host or its port cannot be read") from None
    if parts.scheme == "unix":
        return parts.path
    if parts.scheme not in {"redis", "rediss"}:
        raise _no_url("it begins with redis://, or rediss:// for TLS")
    if parts.fragment or not _NUMBER.fullmatch(parts.path):
        raise _no_url("write only the number of a database behind the host")
    if cluster and parts.path.strip("/0"):
        raise _no_url("a cluster has no database but 0")
    return parts.netloc.rpartition("@")[2]


def _no_url(why: str) -> InvalidArgument:
    return InvalidArgument(f"the url of a Redis is redis://[user:password@]host[:port][/number]: {why}")


def _client(url: str, timeout_s: float, limits: RedisLimits, *, cluster: bool) -> Redis | RedisCluster:
    kind = RedisCluster if cluster else Redis
    try:
        return cast("Any", kind).from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=limits.command_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # else each connection looks up the client's own version, in files
        )
    except ValueError:
        raise _no_url("the part after the ? cannot be read") from None
