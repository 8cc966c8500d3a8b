"""Options of a provider, as `Provider.open` and the configuration of a silo give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ..agents import CacheLimits
from ..balancer.mapper import MAX_QUEUES
from ..streams.arguments import check_constructor, check_instance, check_integer, check_seconds, check_text, refused
from ..streams.codecs import CodecOption, Codecs
from ..streams.delays import check_delays
from ..streams.subscriptions import check_provider_name

DEFAULT_ADAPTER = "log"
DEFAULT_QUEUES = 8


@check_constructor
@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """Bounds of a provider's cache in this process, divided equally over its queues."""

    max_events: int = 1_000_000
    max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_integer("cache.max_events", self.max_events, 1)
        check_integer("cache.max_bytes", self.max_bytes, 1)

    def per_queue(self, queues: int) -> CacheLimits:
        return CacheLimits(max_events=self.max_events // queues, max_bytes=self.max_bytes // queues)


@check_constructor
@dataclass(frozen=True, kw_only=True)
class ProviderOptions:
    """How to open a provider. `adapter` and `queues` are fixed at the first opening; None: the stored values apply."""

    name: str = "default"
    adapter: str | None = None
    queues: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The adapter's own options."""
    cache: CacheOptions = field(default_factory=CacheOptions)
    detach_after_s: float = 0.25
    """How long a cursor may stand still in the oldest bucket of a full cache before it is detached, in seconds."""
    delays: str | None = None
    """Where delayed events wait if the adapter has no delays: "store" for the control store. None: the provider refuses
    delayed events."""

    outbox: str | None = None
    """URL of a database whose outbox is moved into the queues. None: none is."""

    codec: CodecOption | None = None
    """Encodes published values, and decodes them for handlers: "json", which is the default, "msgpack", the
    "module:name" of a `Codec`, or a `Codec`; or a mapping from namespaces to these, with "*" for other namespaces."""

    def __post_init__(self) -> None:
        check_provider_name(self.name)
        if self.adapter is not None:
            check_text("adapter", self.adapter)
        if self.queues is not None:
            check_integer("queues", self.queues, 1, MAX_QUEUES)
        if not isinstance(self.options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] (users may err)
            raise refused("options", self.options, "a mapping of the adapter's options, such as {'url': '...'}")
        check_instance("cache", self.cache, CacheOptions, "CacheOptions(max_bytes=64 << 20)")
        check_seconds("detach_after_s", self.detach_after_s)
        if self.delays is not None:
            check_text("delays", self.delays)
        check_delays(self.delays)
        if self.outbox is not None:
            check_text("outbox", self.outbox)
        Codecs(self.codec)


class ProviderKeywords(TypedDict, total=False):
    """The fields of `ProviderOptions`, as keywords of `Provider.open`."""

    name: str
    adapter: str | None
    queues: int | None
    options: Mapping[str, Any]
    cache: CacheOptions
    detach_after_s: float
    delays: str | None
    outbox: str | None
    codec: CodecOption | None
