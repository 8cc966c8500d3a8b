"""The options that say where a provider's queues are: the control store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...streams.errors import InvalidArgument
from .login import without_login
from .options import RedisOptions


def location_of(options: RedisOptions) -> Mapping[str, Any]:
    """Return `url` and `cluster`, or `shards`, and `prefix`. Urls are without user and password."""
    if options.url is not None:
        return {"url": without_login(options.url), "cluster": options.cluster, "prefix": options.prefix}
    shards = [msgspec.structs.replace(shard, url=without_login(shard.url)) for shard in options.shards]
    return {"shards": msgspec.to_builtins(shards), "prefix": options.prefix}


def with_location(provider: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the given options, and the stored location for those that are not given.

    Servers may move: another `url` is accepted. Raises InvalidArgument for another `prefix`, because other keys are
    other queues.
    """
    if "prefix" in given and given["prefix"] != stored.get("prefix", given["prefix"]):
        raise InvalidArgument(
            f"provider {provider!r} has its queues in Redis under the prefix {stored['prefix']!r}, not "
            f"{given['prefix']!r}: open it with {stored['prefix']!r}, or create another provider"
        )
    if {"url", "shards"} & given.keys():
        stored = {name: value for name, value in stored.items() if name == "prefix"}
    return {**stored, **given}
