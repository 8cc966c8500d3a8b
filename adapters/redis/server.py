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
_AWAY_CODES = frozenset({"READONLY", "NOREPLICAS", "BUSY"})
"""Without a class of their own, or not in every version."""
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]+) ")
"""Redis 6 wraps the error of a command in a script into one of the script."""


class ServerAway(StorageError):
    """It cannot be reached, or does not serve at present. Whether it has carried out the command is not known."""


class ServerSilent(ServerAway):
    """It kept somebody waiting until the time was up."""


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
        client, task = cast("Any", self._client), asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            try:
                return await client.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:  # it is new here; nothing was done
                return await client.eval(script.text, len(keys), *keys, *args)
        except _AWAY as error:
            raise self._away(error) from None
        except exceptions.RedisError as error:
            raise self._refused(error) from error
        finally:
            if task and task.cancelling() > cancelled:  # see `end`
                raise asyncio.CancelledError

    async def bell(self, key: str, timeout_s: float) -> bool:
        """Whether there is an element in the list `key` within `timeout_s`; it is taken out. Raises ServerAway."""
        try:
            return bool(await cast("Any", self._blocking).blpop([key], timeout=timeout_s))
        except (*_AWAY, exceptions.RedisError) as error:
            raise self._away(error) from None

    async def check(self) -> None:
        """Raises ServerAway, or InvalidArgument where it, or a node of it, is too old or would throw things away."""
        try:
            info = await cast("Any", self._client).info()
        except exceptions.NoPermissionError:  # it is not for this user to know
            return
        except (*_AWAY, exceptions.RedisError) as error:
            raise self._away(error) from None
        for node in [info] if "redis_version" in info else info.values():
            self._check_node(node)

    def _check_node(self, info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0.0"))
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise InvalidArgument(f"Redis at {self.address} is version {version}: 6.2 is the oldest that will do")
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if int(info.get("maxmemory", 0)) and policy != "noeviction":
            kept = "queues" if policy.startswith("allkeys") else "what is known of idempotent producers"
            raise InvalidArgument(
                f"Redis at {self.address} throws away {kept} when its memory is full: set maxmemory-policy noeviction, "
                f"not {policy}"
            )

    async def aclose(self) -> None:
        await asyncio.gather(self._client.aclose(), self._blocking.aclose(), return_exceptions=True)

    def _refused(self, error: exceptions.RedisError) -> StorageError:
        """What an answer means that is an error."""
        code = _code(error)
        if code == "OOM":
            return StorageFull(
                f"Redis at {self.address} has no memory left: consume what is there, or raise its maxmemory"
            )
        return self._away(error) if code in _AWAY_CODES else StorageError(f"Redis at {self.address}: {error}")

    def _away(self, error: BaseException) -> ServerAway:
        kind = ServerSilent if isinstance(error, (exceptions.TimeoutError, TimeoutError)) else ServerAway
        return kind(f"Redis at {self.address} does not serve: {error or type(error).__name__}")


def _code(error: exceptions.RedisError) -> str:
    """The word that an error of the server begins with, which the client takes away where it knows it."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return "OOM"
    text = str(error)
    wrapped = _IN_SCRIPT.search(text)
    return wrapped[1] if wrapped else text.partition(" ")[0]


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task that runs commands, and wait for it. One cancellation may not do: before Python 3.12 the client's
    `wait_for` keeps it to itself where what it waited for is done at the same moment."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
    if not task.cancelled():
        task.exception()


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
