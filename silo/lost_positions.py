"""Correct stored positions that lie past the end of their queues, when a provider is opened."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from ..adapters.receiving import LOST_END
from ..streams.errors import Busy, CorruptRecord, DataDirectoryError
from ..streams.identity import SequenceToken
from ..streams.subscriptions import Checkpoint, GapRecord, Start
from .subscription_host import SubscriptionHost

log = logging.getLogger("headrace.silo")


async def forget_lost_positions(provider: SubscriptionHost) -> None:
    """Move positions that mean nothing any more.

    If the queues do not survive the process, every position goes to the beginning of the new queues. A durable queue
    may have lost its end in a crash of the machine, if durability is relaxed, or in a failover: new events get those
    offsets again, so the position goes back to where the queue ended, with a gap record.
    """
    if provider.data is None:
        return
    if provider.adapter.capabilities.durable:
        await _step_back_from_lost_ends(provider)
        return
    for definition in await provider.store.subscriptions(provider.name):
        earliest = await provider.positions(definition.selector, Start.earliest())
        with suppress(Busy):  # the process that serves it is alive, and so are its queues
            async with provider.exclusive(definition.name):
                reason = "the queues did not survive the process"
                await provider.store.seek(provider.name, definition.name, earliest, reason)


async def _step_back_from_lost_ends(provider: SubscriptionHost) -> None:
    for definition in await provider.store.subscriptions(provider.name):
        try:
            stored = await provider.store.checkpoints(provider.name, definition.name)
        except DataDirectoryError as damage:
            log.error("%s", damage)  # noqa: TRY400 (continue with others; the process that serves it gets the error)
            continue
        ends: dict[int, int] = {}
        for queue, cp in stored.items():
            try:
                ends[queue] = await provider.adapter.resume_at(queue, cp.next_offset)
            except CorruptRecord as damage:  # the other queues are served
                log.error("subscription %r stays where it is: %s", definition.name, damage)  # noqa: TRY400
        lost = {queue: stored[queue] for queue, end in ends.items() if stored[queue].next_offset > end}
        if not lost:
            continue
        reason = "the queue lost its end in a crash of the machine, or in a failover"
        recorded = await provider.store.gaps(provider.name, definition.name)
        since_us = await provider.store.generation(provider.name, definition.name)  # a time; earlier records are healed
        to = {queue: first_lost_offset(recorded, queue, ends[queue], since_us) for queue in lost}
        back: dict[int, Checkpoint] = {
            queue: Checkpoint(to[queue], {s: b for s, b in cp.behind.items() if b.token.offset < to[queue]})
            for queue, cp in lost.items()
        }
        gaps = [
            GapRecord(
                provider.name, definition.name, queue, None, SequenceToken(to[queue]),
                SequenceToken(cp.next_offset), reason, time.time_ns() // 1000,
            )
            for queue, cp in lost.items()
        ]  # fmt: skip
        log.error("subscription %r was ahead of queues %s: %s", definition.name, sorted(lost), reason)
        with suppress(Busy):
            async with provider.exclusive(definition.name):
                await provider.store.seek(provider.name, definition.name, {**stored, **back}, reason)
                await provider.store.add_gaps(gaps)


def first_lost_offset(recorded: Sequence[GapRecord], queue: int, end: int, since_us: int) -> int:
    """Return the offset to step back to: the lowest end that a reader recorded after `since_us`, or the present end."""
    ends = [
        gap.low.offset for gap in recorded if gap.queue == queue and gap.reason == LOST_END and gap.at_us > since_us
    ]
    return min([end, *ends])
