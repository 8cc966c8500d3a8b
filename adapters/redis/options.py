"""Options of a provider's queues in Redis."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec

from ...streams.errors import InvalidArgument
from .keys import check_name

log = logging.getLogger("headrace.adapters.redis")


class ShardOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several servers that share every queue."""

    name: str
    """Part of the shard's keys. It must not change while the shard has events."""
    url: str
    zone: str = ""
    """The zone of the server, as any name."""
    cluster: bool = False
    """It is a Redis Cluster."""


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `redis`."""

    url: str | None = None
    """The server, redis://[user:password@]host[:port][/number], with rediss:// over TLS. Or `shards`."""

    cluster: bool = False
    """The server at `url` is a node of a Redis Cluster, or a proxy of one: the queues are spread over the nodes."""

    shards: tuple[ShardOptions, ...] = ()
    """Several servers: events are published to each of them in turn, and a queue is read from all of them."""

    zone: str = ""
    """The zone of this process: it reads the shards of its zone first."""

    prefix: str = "headrace"
    """The beginning of all keys, after a brace."""

    when_unavailable: Literal["wait", "fail"] = "wait"
    """While a server is away, `wait`: a publish waits, for `publish_timeout_s`. `fail`: it raises at once."""

    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long a publish waits for a server that is away, in seconds."""

    def servers(self) -> tuple[ShardOptions, ...]:
        """Return the servers. Raises InvalidArgument if there is none, or if two have the same name or url."""
        check_name("prefix", self.prefix)
        if (self.url is None) == (not self.shards):
            raise _refused("give either url, as redis://localhost:6379, or shards")
        if self.url is not None:
            return (ShardOptions(name="0", url=self.url, cluster=self.cluster),)
        if self.cluster:
            raise _refused("cluster is about url; with shards it is each shard's own")
        names = [check_name("shard", shard.name) for shard in self.shards]
        if len(set(names)) < len(names):
            raise _refused(f"two shards have one name: {', '.join(names)}")
        if len({shard.url for shard in self.shards}) < len(names):
            raise _refused(f"two of the shards {', '.join(names)} have one url")
        if self.zone and all(shard.zone != self.zone for shard in self.shards):
            log.warning("no shard is in zone %r, where this process is: it reads them in the order given", self.zone)
        return self.shards


def _refused(problem: str) -> InvalidArgument:
    return InvalidArgument(f"adapter 'redis': {problem}", option="options")
