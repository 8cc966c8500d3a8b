"""The content of the dashboard's pages, as plain data for JSON."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ...client.transport import Transport
from ...proto.v1 import cluster_pb2, observation_pb2, subscriptions_pb2
from ...streams import wire
from ...streams.errors import PermissionDenied
from ...streams.identity import StreamId
from ..why_causes import Cause
from .calls import ServiceCalls, number_of, optional
from .letters import LetterFilter, page_of, shown
from .summaries import lag_series, merged_parts, problems_of
from .viewers import Viewer

OVERVIEW_MS = 2 * 60_000
HISTORY_MS = 10 * 60_000
MAX_BLOCKED = 50
SLOW_FRAMES = 5
"""Content that needs the store, such as counts and stored positions, is read for every fifth frame only."""


class PageSource(ABC):
    """One open page. `render` returns its content at the moment."""

    def __init__(self, transport: Transport, viewer: Viewer, options: Mapping[str, str]) -> None:
        self.calls = ServiceCalls(transport)
        self.viewer = viewer
        self.options = options

    @property
    def provider(self) -> str:
        return self.options.get("provider") or "default"

    @abstractmethod
    async def render(self) -> dict[str, Any]:
        """Return the content. Raise the errors of the services."""


class OverviewPage(PageSource):
    """All queues and subscriptions, and whatever needs a look."""

    def __init__(self, transport: Transport, viewer: Viewer, options: Mapping[str, str]) -> None:
        super().__init__(transport, viewer, options)
        self._frames = 0
        self._left: dict[tuple[str, str], dict[str, int]] = {}
        """Dead letters and gaps as of the last count, by provider and subscription."""

    async def render(self) -> dict[str, Any]:
        cluster = await self.calls.cluster()
        names = sorted({provider.name for silo in cluster.silos for provider in silo.providers})
        found = await asyncio.gather(*map(self._subscriptions, names))
        self._frames += 1
        subscriptions = [row for rows in found for row in rows]
        queues = queue_rows(cluster)
        return {
            "providers": names,
            "silos": [silo_row(silo) for silo in cluster.silos],
            "queues": queues,
            "subscriptions": subscriptions,
            "problems": problems_of(cluster, queues, subscriptions),
        }

    async def _subscriptions(self, provider: str) -> list[dict[str, Any]]:
        counted = self._frames % SLOW_FRAMES == 0
        try:
            definitions = await self.calls.subscriptions(provider)
            found = await self.calls.parts(provider, history_ms=OVERVIEW_MS, counted=counted)
        except PermissionDenied:  # the viewer may see no subscriptions: the cluster is shown alone
            return []
        for one in found.left_behind:
            self._left[provider, one.name] = {"dead_letters": one.dead_letters, "gaps": one.gaps}
        return [
            {
                "provider": provider,
                "name": one.name,
                "selector": one.selector,
                "mode": mode_of(one),
                **merged_parts(
                    [part for part in found.parts if part.name == one.name],
                    [unserved.lag for unserved in found.unserved if unserved.name == one.name],
                ),
                **self._left.get((provider, one.name), {}),
            }
            for one in definitions
        ]


class QueuePage(PageSource):
    """One queue: the buckets of its cache, and the positions of subscriptions."""

    async def render(self) -> dict[str, Any]:
        number = number_of(self.options.get("queue", "0"), "queue")
        found = await self.calls.queue(self.provider, number)
        row = queue_row(self.provider, found.silo, found.queue)
        if not found.silo:
            rows = queue_rows(await self.calls.cluster())
            row = next((one for one in rows if (one["provider"], one["index"]) == (self.provider, number)), row)
        return {
            "provider": self.provider,
            "index": number,
            "count": found.queue_count,
            "silo": found.silo,
            "queue": row,
            "cache": {
                "events": found.queue.cached_events,
                "bytes": found.queue.cached_bytes,
                "max_events": found.cache_limit_events,
                "max_bytes": found.queue.cache_limit_bytes,
                "pressure": found.pressure,
            },
            "received_events": found.received_events,
            "received_bytes": found.received_bytes,
            "read_offset": found.queue.read_offset,
            "end_offset": found.queue.end_offset,
            "buckets": [
                {"events": one.events, "bytes": one.bytes, "pins": one.pins, "low": one.low, "high": one.high}
                for one in found.buckets
            ],
            "cursors": [
                {
                    "subscription": one.subscription,
                    "watermark": one.watermark,
                    "bucket": optional(one, "bucket"),
                    "active": one.active,
                    "parked": one.parked,
                    "catching_up": one.catching_up,
                }
                for one in found.cursors
            ],
        }


class SubscriptionPage(PageSource):
    """One subscription: its lag over time, its consumers, and the streams that are blocked."""

    def __init__(self, transport: Transport, viewer: Viewer, options: Mapping[str, str]) -> None:
        super().__init__(transport, viewer, options)
        self._frames = 0
        self._found = subscriptions_pb2.Subscription()
        """The subscription with its positions, of the last frame that read the store."""

    async def render(self) -> dict[str, Any]:
        name = self.options.get("name", "")
        if self._frames % SLOW_FRAMES == 0:
            self._found = await self.calls.subscription(self.provider, name)
        self._frames += 1
        found = self._found
        answer = await self.calls.parts(self.provider, name, blocked=MAX_BLOCKED, history_ms=HISTORY_MS)
        parts = answer.parts
        definition = found.definition
        blocked = [blocked_row(one) for part in parts for one in part.blocked]
        if not parts:
            blocked = [paused_row(one, progress.queue) for progress in found.progress for one in progress.paused]
        return {
            "provider": self.provider,
            "name": name,
            "selector": definition.selector,
            "mode": mode_of(definition),
            "on_failure": wire.definition_of(definition).on_failure.value.replace("-", " "),
            **merged_parts(parts, [unserved.lag for unserved in answer.unserved]),
            "dead_letters": found.dead_letters,
            "gaps": found.gaps,
            "series": lag_series(parts),
            "silos": [{"silo": part.silo, "state": part.state, "queues": part.queues} for part in parts],
            "consumers": [consumer_row(part.silo, one) for part in parts for one in part.consumers],
            "blocked": blocked[:MAX_BLOCKED],
            "blocked_total": sum(part.waiting + part.paused for part in parts) if parts else len(blocked),
            "progress": [
                {
                    "queue": one.queue,
                    "watermark": one.watermark,
                    "end_offset": one.end_offset,
                    "behind": one.streams_behind,
                    "paused": one.streams_paused,
                    "fault": one.fault,
                }
                for one in sorted(found.progress, key=lambda one: one.queue)
            ],
        }


class StreamPage(PageSource):
    """Why the next event of a stream is not delivered. Without a stream, the form alone."""

    async def render(self) -> dict[str, Any]:
        cluster = await self.calls.cluster()
        found: list[dict[str, Any]] = []
        if text := self.options.get("stream", ""):
            name = self.options.get("subscription", "")
            explanations = await self.calls.explanations(self.provider, StreamId.parse(text), name)
            found = [explanation_row(one) for one in explanations]
        return {
            "provider": self.provider,
            "providers": sorted({provider.name for silo in cluster.silos for provider in silo.providers}),
            "explanations": found,
        }


class LettersPage(PageSource):
    """Dead letters of one subscription, or of all."""

    async def render(self) -> dict[str, Any]:
        wanted = LetterFilter(self.provider, self.options.get("subscription", ""), self.options.get("text", "")[:200])
        after_id = number_of(self.options.get("after", "0"), "after")
        if not self.viewer.may_manage:
            # The filter finds text in payloads, which such a viewer does not see.
            wanted = wanted._replace(text="")
        letters, next_id = await page_of(self.calls, wanted, after_id)
        cluster = await self.calls.cluster()
        return {
            "provider": self.provider,
            "providers": sorted({provider.name for silo in cluster.silos for provider in silo.providers}),
            "letters": [shown(letter, payload=self.viewer.may_manage) for letter in letters],
            "next": next_id,
        }


class ClusterPage(PageSource):
    """The silos, the owners of all queues, and the history of moves."""

    async def render(self) -> dict[str, Any]:
        cluster = await self.calls.cluster()
        moves = await self.calls.moves()
        return {
            "silos": [silo_row(silo) for silo in cluster.silos],
            "queues": queue_rows(cluster),
            "moves": [
                {
                    "at_us": move.at_us,
                    "provider": move.provider,
                    "queue": move.queue,
                    "epoch": move.epoch,
                    "from": move.from_silo,
                    "to": move.to_silo,
                    "reason": move.reason,
                }
                for move in moves[:200]
            ],
        }


PAGES: Mapping[str, Callable[[Transport, Viewer, Mapping[str, str]], PageSource]] = {
    "overview": OverviewPage,
    "queue": QueuePage,
    "subscription": SubscriptionPage,
    "stream": StreamPage,
    "deadletters": LettersPage,
    "cluster": ClusterPage,
}
"""By the name in the address."""


def mode_of(definition: subscriptions_pb2.SubscriptionDefinition) -> str:
    return wire.definition_of(definition).mode.value


def silo_row(silo: cluster_pb2.Silo) -> dict[str, Any]:
    return {
        "name": silo.name,
        "address": silo.address,
        "state": silo.state,
        "version": silo.version,
        "silent_ms": silo.silent_ms,
        "queues": sum(len(provider.queues) for provider in silo.providers),
    }


def queue_row(provider: str, silo: str, queue: cluster_pb2.Queue) -> dict[str, Any]:
    """Return a queue. None: not known, or not for a viewer of some namespaces."""
    has_cache = queue.cache_limit_bytes > 0  # a silo that describes its cache never has 0 here
    is_counted = queue.HasField("lag_batches")
    return {
        "provider": provider,
        "index": queue.index,
        "silo": silo,
        "state": queue.state or "unknown",
        "reason": queue.reason,
        "epoch": queue.epoch or None,
        "read_offset": queue.read_offset if has_cache else None,
        "end_offset": queue.end_offset if is_counted else None,
        "cached_bytes": queue.cached_bytes if has_cache else None,
        "cache_limit_bytes": queue.cache_limit_bytes if has_cache else None,
        "cached_events": queue.cached_events if has_cache else None,
        "lag_batches": optional(queue, "lag_batches"),
        "lag_events": optional(queue, "lag_events"),
        "lag_ms": optional(queue, "lag_ms"),
        "delayed_events": queue.delayed_events if is_counted else None,
    }


def queue_rows(cluster: cluster_pb2.Cluster) -> list[dict[str, Any]]:
    """Return all queues, served or not, by provider and number."""
    rows = [
        queue_row(provider.name, silo.name, queue)
        for silo in cluster.silos
        for provider in silo.providers
        for queue in provider.queues
    ]
    rows += [
        {
            "provider": one.provider,
            "index": one.index,
            "silo": "",
            "state": "unserved",
            "reason": one.reason,
            "since_ms": one.since_ms,
        }
        for one in cluster.unserved
    ]
    return sorted(rows, key=lambda row: (row["provider"], row["index"]))


def explanation_row(one: observation_pb2.StreamExplanation) -> dict[str, Any]:
    causes = [Cause(cause.code, cause.evidence) for cause in one.causes]
    return {
        "subscription": one.subscription,
        "causes": [
            {"code": each.code, "meaning": each.meaning, "evidence": each.evidence, "remedy": each.remedy}
            for each in causes
        ],
    }


def blocked_row(one: observation_pb2.BlockedStream) -> dict[str, Any]:
    return {
        "stream": {"namespace": one.stream.namespace, "key": one.stream.key},
        "queue": one.queue,
        "offset": one.offset,
        "index": one.index,
        "state": one.state,
        "reason": one.reason,
        "attempts": one.attempts,
        "next_in_ms": optional(one, "next_in_ms"),
    }


def paused_row(one: subscriptions_pb2.PausedStream, queue: int) -> dict[str, Any]:
    """A paused stream of a subscription that no silo serves."""
    stream = {"namespace": one.stream.namespace, "key": one.stream.key}
    return {"stream": stream, "queue": queue, "state": "paused", "reason": one.reason, "attempts": None}


def consumer_row(silo: str, one: subscriptions_pb2.Consumer) -> dict[str, Any]:
    return {
        "id": one.id,
        "silo": silo,
        "connected": one.connected,
        "credit_events": one.credit_events,
        "credit_bytes": one.credit_bytes,
        "in_flight_events": one.in_flight_events,
        "queues": list(one.queues),
        "blocked": one.blocked,
    }
