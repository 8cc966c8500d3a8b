"""What a provider's table of options may say about its Redis."""

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
    """Part of its keys: it stays the same for as long as there is anything in the shard."""
    url: str
    zone: str = ""
    """Where it stands, by any name."""
    cluster: bool = False
    """It is a Redis Cluster."""


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `redis`."""

    url: str | None = None
    """The server, redis://[user:password@]host[:port][/number], with rediss:// over TLS. Or `shards`."""

    cluster: bool = False
    """What is at `url` is a node of a Redis Cluster, or leads to one: its queues spread over the nodes."""

    shards: tuple[ShardOptions, ...] = ()
    """Several servers: what is published goes to each of them in turn, and a queue is read from all of them."""

    zone: str = ""
    """Where this process is: it reads the shards of its zone first."""

    prefix: str = "headrace"
    """What all keys begin with, after a brace."""

    when_unavailable: Literal["wait", "fail"] = "wait"
    """While a server is away, `wait`: a publish waits, for `publish_timeout_s`. `fail`: it raises at once."""

    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long a publish waits for a server that is away, in seconds."""

    def servers(self) -> tuple[ShardOptions, ...]:
        """Raises InvalidArgument where there is none, or two have a name or a url."""
        check_name("prefix", self.prefix)
        if (self.url is None) == (not self.shards):
            raise InvalidArgument("options of adapter 'redis': give either url, as redis://localhost:6379, or shards")
        if self.url is not None:
            return (ShardOptions(name="0", url=self.url, cluster=self.cluster),)
        if self.cluster:
            raise InvalidArgument(
                "options of adapter 'redis': cluster is about url; with shards it is each shard's own"
            )
        names = [check_name("the name of a shard,", shard.name) for shard in self.shards]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"options of adapter 'redis': two shards have one name: {', '.join(names)}")
        if len({shard.url for shard in self.shards}) < len(names):
            raise InvalidArgument(f"options of adapter 'redis': two of the shards {', '.join(names)} have one url")
        if self.zone and all(shard.zone != self.zone for shard in self.shards):
            log.warning("no shard is in zone %r, where this process is: it reads them in the order given", self.zone)
        return self.shards
