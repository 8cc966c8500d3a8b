"""The content of the screen: from silos, or from a data directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from ...client.transport import Transport
from ...proto.v1.cluster_pb2 import Cluster
from ...silo.dashboard.pages import OverviewPage, PageSource, QueuePage, SubscriptionPage
from ...silo.dashboard.summaries import problems_of
from ...silo.dashboard.viewers import OPERATOR
from ...silo.provider import Provider
from ...silo.views import age_s, lag_of
from ...streams.errors import HeadraceError, NotFound
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition, is_consumers_position
from ...streams.wording import counted

Content = Mapping[str, Any]
"""As the pages of the dashboard have it: see `silo/dashboard/pages.py`."""


class ContentSource(Protocol):
    """Where the content comes from. The methods raise HeadraceError."""

    async def overview(self) -> Content: ...

    async def queue(self, provider: str, number: int) -> Content: ...

    async def subscription(self, provider: str, name: str) -> Content: ...


class SiloSource(ContentSource):
    """Asks a silo, which answers for its cluster."""

    def __init__(self, transport: Transport, provider: str = "") -> None:
        """`provider`: show this one only; "": all."""
        self._transport = transport
        self._provider = provider
        self._overview = OverviewPage(transport, OPERATOR, {})
        self._rates = QueueRates()
        self._detail: tuple[tuple[str, ...], PageSource] | None = None

    async def overview(self) -> Content:
        content = await self._overview.render()
        if self._provider:
            if self._provider not in content["providers"]:
                raise NotFound(f"this silo has no provider {self._provider!r}: name one of its configuration")
            for kind in ("queues", "subscriptions"):
                content[kind] = [row for row in content[kind] if row["provider"] == self._provider]
            content["problems"] = [
                one for one in content["problems"] if one["options"].get("provider") in (None, self._provider)
            ]
        self._rates.add(content["queues"])
        return content

    async def queue(self, provider: str, number: int) -> Content:
        options = {"provider": provider, "queue": str(number)}
        return await self._page(QueuePage, options)

    async def subscription(self, provider: str, name: str) -> Content:
        return await self._page(SubscriptionPage, {"provider": provider, "name": name})

    async def _page(self, kind: type[PageSource], options: Mapping[str, str]) -> Content:
        """Render a page. It is kept while it is shown, because it does not read the store each time."""
        key = (kind.__name__, *options.values())
        if self._detail is None or self._detail[0] != key:
            self._detail = key, kind(self._transport, OPERATOR, options)
        return await self._detail[1].render()


class QueueRates:
    """Batches that each queue gets in a second, from two successive overviews."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], int] = {}
        self._at = 0.0

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Set `rate` in each row whose queue was known before."""
        now = time.monotonic()
        ends = {(row["provider"], row["index"]): row["end_offset"] for row in rows if row.get("end_offset") is not None}
        for row in rows:
            key = row["provider"], row["index"]
            if key in ends and key in self._before and now > self._at:
                row["rate"] = max(ends[key] - self._before[key], 0) / (now - self._at)
        self._before, self._at = ends, now


class DataSource(ContentSource):
    """Reads the queues and the control store of a data directory. It does not ask the processes that serve them, so the
    state of a subscription is that of its stored progress."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._queue_rates = QueueRates()
        self._rates: dict[str, float | None] = {}
        """Events that each subscription finished in a second, as of the last overview."""
        self._awaited: dict[tuple[str, int], int] = {}
        """The offset that each subscription waited for in each queue, as of the last overview."""
        self._at = 0.0

    async def overview(self) -> Content:
        provider = self._provider
        definitions = [
            one for one in await provider.store.subscriptions(provider.name) if not is_consumers_position(one)
        ]
        checkpoints = {one.name: await self._checkpoints(one.name) for one in definitions}
        owners = await self._owners()
        queues = [await self._queue_row(queue, checkpoints, owners) for queue in range(provider.queues)]
        self._queue_rates.add(queues)
        began, self._at = self._at, time.monotonic()
        for one in definitions:
            finished = await self._finished_since(one.name, checkpoints[one.name])
            self._rates[one.name] = finished / (self._at - began) if began else None
        subscriptions = [await self._subscription_row(one, checkpoints[one.name]) for one in definitions]
        problems = problems_of(Cluster(), queues, subscriptions)
        return {"providers": [provider.name], "silos": [], "queues": queues, "subscriptions": subscriptions,
                "problems": problems}  # fmt: skip

    async def queue(self, provider: str, number: int) -> Content:
        definitions = await self._provider.store.subscriptions(self._provider.name)
        checkpoints = {one.name: await self._checkpoints(one.name) for one in definitions}
        row = await self._queue_row(number, checkpoints, await self._owners())
        cursors = [
            {
                "subscription": name,
                "watermark": of[number].watermark,
                "bucket": None,
                "active": None,
                "parked": len(of[number].behind),
                "catching_up": False,
            }
            for name, of in checkpoints.items()
            if number in of
        ]
        return {"provider": provider, "index": number, "silo": row["silo"], "queue": row, "cache": None, "buckets": [],
                "cursors": cursors, "end_offset": row.get("end_offset")}  # fmt: skip

    async def subscription(self, provider: str, name: str) -> Content:
        state = await self._provider.subscription(name)
        checkpoints = await self._checkpoints(name)
        blocked = [
            {
                "stream": {"namespace": stream.namespace, "key": stream.key},
                "queue": queue,
                "state": "paused",
                "reason": behind.paused,
                "attempts": None,
            }
            for queue, at in sorted(checkpoints.items())
            for stream, behind in at.behind.items()
            if behind.paused
        ]
        row = await self._subscription_row(state.definition, checkpoints)
        return {**row, "consumers": [], "blocked": blocked[:50], "blocked_total": len(blocked), "silos": []}

    async def _checkpoints(self, name: str) -> Mapping[int, Checkpoint]:
        try:
            return await self._provider.store.checkpoints(self._provider.name, name)
        except HeadraceError:  # damaged: `headrace check` reports it
            return {}

    async def _owners(self) -> dict[int, tuple[str, int]]:
        view = await self._provider.store.cluster().view()
        return {
            lease.queue: (lease.owner, lease.epoch)
            for lease in view.leases
            if lease.owner and lease.provider == self._provider.name
        }

    async def _queue_row(
        self, queue: int, checkpoints: Mapping[str, Mapping[int, Checkpoint]], owners: Mapping[int, tuple[str, int]]
    ) -> dict[str, Any]:
        adapter = self._provider.adapter
        of = [each[queue] for each in checkpoints.values() if queue in each]
        silo, epoch = owners.get(queue, ("", None))
        row: dict[str, Any] = {"provider": self._provider.name, "index": queue, "silo": silo, "epoch": epoch}
        try:
            statistics = await adapter.statistics(queue)
            lag = await lag_of(adapter, queue, min((at.watermark for at in of), default=None))
        except HeadraceError as error:
            return {**row, "state": "faulted", "reason": str(error)}
        age = age_s(lag)
        return {
            **row,
            "state": "stored",
            "reason": "",
            "end_offset": statistics.bounds.next,
            "lag_batches": lag.batches,
            "lag_events": lag.events,
            "lag_ms": None if age is None else round(age * 1000),
            "delayed_events": lag.later_events,
        }

    async def _subscription_row(
        self, definition: SubscriptionDefinition, checkpoints: Mapping[int, Checkpoint]
    ) -> dict[str, Any]:
        provider, name = self._provider, definition.name
        events: int | None = 0
        ages: list[float] = []
        for queue, at in checkpoints.items():
            with suppress(HeadraceError):
                lag = await provider.adapter.backlog(queue, at.awaited)
                events = None if events is None or lag.events is None else events + lag.events
                ages += [age for age in [age_s(lag)] if age is not None]
        paused = sum(bool(behind.paused) for at in checkpoints.values() for behind in at.behind.values())
        letters, gaps = await provider.store.count_left_behind(provider.name, name, None)
        return {
            "provider": provider.name,
            "name": name,
            "selector": definition.selector.pattern,
            "mode": definition.mode.value,
            "state": "paused" if paused else "behind" if events or events is None else "caught up",
            "reason": f"{counted(paused, 'stream')} paused until resumed" if paused else "",
            "lag_events": events,
            "lag_ms": round(max(ages) * 1000) if ages else None,
            "rate": self._rates.get(name),
            "paused": paused,
            "dead_letters": letters,
            "gaps": gaps,
        }

    async def _finished_since(self, name: str, checkpoints: Mapping[int, Checkpoint]) -> int:
        """Return the number of events that a subscription has finished since the previous overview."""
        finished, adapter = 0, self._provider.adapter
        for queue, at in checkpoints.items():
            before = self._awaited.get((name, queue), at.awaited)
            self._awaited[name, queue] = at.awaited
            if before < at.awaited:
                with suppress(HeadraceError):
                    then, now = await adapter.backlog(queue, before), await adapter.backlog(queue, at.awaited)
                    finished += max((then.events or 0) - (now.events or 0), 0)
        return finished
