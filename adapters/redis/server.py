"""The connection to one Redis, Redis Cluster or Valkey, as the shards use it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ...streams.errors import InvalidArgument, StorageError, StorageFull
from .scripts import Script

log = logging.getLogger("headrace.adapters.redis")

COMMAND_S = 5.0
"""A command that is not answered for so long has failed, in seconds."""
BLOCK_S = 5.0
"""How long one wait for a bell blocks at the most, in seconds: what a lost wake-up costs."""
OLDEST = (6, 2)

_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.SlotNotCoveredError,
    OSError,
)


class ServerAway(StorageError):
    """It cannot be reached, or does not serve at present. Whether it has carried out the command is not known."""


class Server:
    """One Redis, or one cluster. Nothing is sent twice by itself: the scripts know what may be repeated."""

    def __init__(self, url: str, *, cluster: bool = False) -> None:
        parts = urlsplit(url)
        self.address = parts.netloc.rpartition("@")[2] or parts.path
        """Without user and password."""
        self._client = _client(url, COMMAND_S, cluster=cluster)
        self._blocking = _client(url, BLOCK_S + COMMAND_S, cluster=cluster)

    async def run(self, script: Script, keys: Sequence[str], *args: str | bytes | float) -> Any:
        """Carry out a script. Raises ServerAway, StorageFull, StorageError."""
        client = cast("Any", self._client)
        try:
            try:
                return await client.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:  # it is new here; nothing was done
                return await client.eval(script.text, len(keys), *keys, *args)
        except exceptions.OutOfMemoryError:
            raise StorageFull(
                f"Redis at {self.address} has no memory left: consume what is there, or raise its maxmemory"
            ) from None
        except _AWAY as error:
            raise self._away(error) from None
        except exceptions.RedisError as error:
            raise StorageError(f"Redis at {self.address}: {error}") from error

    async def bell(self, key: str, timeout_s: float) -> bool:
        """Whether there is an element in the list `key` within `timeout_s`; it is taken out. Raises ServerAway."""
        try:
            return bool(await cast("Any", self._blocking).blpop([key], timeout=timeout_s))
        except (*_AWAY, exceptions.RedisError) as error:
            raise self._away(error) from None

    async def check(self) -> None:
        """Raises ServerAway, or InvalidArgument where it is too old or would throw queues away."""
        try:
            info = _one(await cast("Any", self._client).info())
        except exceptions.NoPermissionError:  # it is not for this user to know
            return
        except (*_AWAY, exceptions.RedisError) as error:
            raise self._away(error) from None
        version = str(info.get("redis_version", "0.0"))
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise InvalidArgument(f"Redis at {self.address} is version {version}: 6.2 is the oldest that will do")
        policy = str(info.get("maxmemory_policy", ""))
        if int(info.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise InvalidArgument(
                f"Redis at {self.address} evicts queues when its memory is full: set maxmemory-policy noeviction, not "
                f"{policy}"
            )

    async def aclose(self) -> None:
        await asyncio.gather(self._client.aclose(), self._blocking.aclose(), return_exceptions=True)

    def _away(self, error: BaseException) -> ServerAway:
        return ServerAway(f"Redis at {self.address} does not serve: {error or type(error).__name__}")


def _client(url: str, timeout_s: float, *, cluster: bool) -> Redis | RedisCluster:
    kind = RedisCluster if cluster else Redis
    try:
        return cast("Any", kind).from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=COMMAND_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # else each connection looks up the client's own version, in files
        )
    except ValueError as error:
        raise InvalidArgument(f"the url of a Redis is redis://[user:password@]host[:port][/number]: {error}") from None


def _one(info: dict[str, Any]) -> dict[str, Any]:
    """Of a cluster, that of one node."""
    return info if "redis_version" in info else next(iter(info.values()))
