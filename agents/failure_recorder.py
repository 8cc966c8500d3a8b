"""Durable records of events that were not delivered: dead letters and gaps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..adapters.receiving import LOST_END, Gap
from ..streams.clock import now_us
from ..streams.errors import Fenced
from ..streams.events import Event
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import DeadLetter, GapRecord
from .delivery.delivery import Delivery
from .progress_store import ProgressStore

log = logging.getLogger("headrace.agents")


class FailureRecorder:
    """Records dead letters and gaps of one provider's deliveries: the `FailureSink` of all of them."""

    def __init__(self, provider: str, store: ProgressStore, leases: Mapping[int, int] | None) -> None:
        """`leases`: epochs of the leases by queue, None if this process has all queues."""
        self._provider = provider
        self._store = store
        self._leases = leases
        self._gaps: dict[tuple[str, int | None], list[GapRecord]] = {}
        """Gaps that are not stored yet, by subscription and its epoch."""

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None:
        letters = [_letter(self._provider, delivery, event, reason, attempts) for event in events]
        await self._store.add_dead_letters(letters, _epoch(delivery), self._leases)

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None:
        records = [
            self._gap_record(delivery, e.stream, e.token, SequenceToken(e.token.offset, e.token.index + 1), reason)
            for e in events
            if e.token is not None
        ]
        await self._store.add_gaps(records, _epoch(delivery), self._leases)

    def record_gap(self, delivery: Delivery, gap: Gap) -> GapRecord:
        """Log a gap, and keep its record until `save_gaps`. A lost end is logged as an error of the queue."""
        low = gap.low
        if gap.reason != LOST_END:
            log.error(
                "subscription %r misses offsets %d to %d of queue %d: %s",
                delivery.name, gap.low, max(gap.low, gap.high - 1), delivery.queue, gap.reason,
            )  # fmt: skip
            low = max(gap.low, delivery.progress.watermark)
        record = self._gap_record(delivery, None, SequenceToken(low), SequenceToken(gap.high), gap.reason)
        self._gaps.setdefault((delivery.name, _epoch(delivery)), []).append(record)
        return record

    @property
    def has_gaps(self) -> bool:
        """Whether gaps are not stored yet."""
        return bool(self._gaps)

    async def save_gaps(self) -> None:
        """Store gaps. Call it before checkpoints past them are stored: a crash in between would hide the gaps.

        Drop the gaps of a subscription that was moved, deleted or taken over: its checkpoints are refused, too.
        """
        for key, gaps in list(self._gaps.items()):
            number = len(gaps)
            with suppress(Fenced):
                await self._store.add_gaps(gaps[:number], key[1])
            del gaps[:number]  # another gap may have been recorded meanwhile
            if not gaps:
                self._gaps.pop(key, None)

    def _gap_record(
        self, delivery: Delivery, stream: StreamId | None, low: SequenceToken, high: SequenceToken, reason: str
    ) -> GapRecord:
        return GapRecord(self._provider, delivery.name, delivery.queue, stream, low, high, reason, now_us())


def _epoch(delivery: Delivery) -> int | None:
    """Return the epoch of a delivery's subscription, None if the subscription is not stored."""
    return delivery.epoch or None


def _letter(provider: str, delivery: Delivery, event: Event, reason: str, attempts: int) -> DeadLetter:
    assert event.stream is not None
    assert event.token is not None
    return DeadLetter(
        0, provider, delivery.name, delivery.queue, event.stream, event.token, event.payload, dict(event.headers),
        event.id, event.timestamp_us or 0, reason, attempts, now_us(),
    )  # fmt: skip
