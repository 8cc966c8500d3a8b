"""The adapter `postgres`: queues in tables of PostgreSQL, for silos on any number of machines. See docs/postgres.md."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, InvalidArgument, PayloadTooLarge
from ...streams.events import EventBatch
from ..log.acknowledgements import PendingAcknowledgements
from ..receiving import Bounds
from ..registry import read_options
from ..seam import AdapterContext, Backlog, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .committer import PostgresCommitter
from .connecting import DatabasePlace
from .group import CommittedGrowth, WaitingCall
from .limits import POSTGRES_LIMITS, PostgresLimits
from .options import PostgresOptions, location_of, retention_of, with_location
from .queries import QueryConnections, rows
from .reading import QueueReads
from .receiver import PostgresReceiver, WatchedQueue
from .retention import PostgresRetention
from .schema import ProviderRow, register
from .watch import QueueWatch

log = logging.getLogger("headrace.adapters.postgres")
MAX_BATCH_BYTES = 16 << 20


async def open_adapter(
    context: AdapterContext, options: Mapping[str, Any], limits: PostgresLimits = POSTGRES_LIMITS
) -> PostgresAdapter:
    """Open the queues of a provider in PostgreSQL. Create them if the provider is new.

    Raises InvalidArgument for wrong options, for a database without the tables, and for a server that could lose
    events; StorageError if the server does not answer; DataDirectoryError if the queues are gone.
    """
    chosen = read_options("postgres", PostgresOptions, with_location(options, context.location))
    place = DatabasePlace(chosen, limits)
    provider = await asyncio.to_thread(_open, place, context, create=chosen.create)
    _report_retention(context, chosen)
    return PostgresAdapter(context, chosen, place, provider)


def _report_retention(context: AdapterContext, chosen: PostgresOptions) -> None:
    """Log the retention in effect if it is not the stored one."""
    if not context.location:
        return
    before, now = retention_of(read_options("postgres", PostgresOptions, context.location)), retention_of(chosen)
    if now != before:
        shown = (", ".join(f"{name} = {value}" for name, value in each.items()) for each in (before, now))
        log.warning("provider %r: its retention changes from (%s) to (%s)", context.provider, *shown)


def _open(place: DatabasePlace, context: AdapterContext, *, create: bool) -> ProviderRow:
    with place.translated():
        connection = place.open()
        try:
            if not place.syncs:
                log.warning("%s has fsync = off: events are lost if its machine crashes", place.shown)
            return register(connection, context, create=create)
        finally:
            connection.close()


class PostgresAdapter(QueueAdapter):
    """Queues in tables of PostgreSQL. Belongs to the event loop that opened it."""

    capabilities = Capabilities(rewindable=True, durable=True, idempotent=True, shared_calls=True)

    def __init__(
        self, context: AdapterContext, options: PostgresOptions, place: DatabasePlace, provider: ProviderRow
    ) -> None:
        self._name = context.provider
        self._queues = context.queues
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.identity = provider.identity
        self.location = location_of(options)
        self._connections = QueryConnections(place)
        self._reads = QueueReads(self._connections, provider, place.limits)
        self._provider = provider
        self._retention = PostgresRetention(provider, options, place.limits)
        self._acknowledgements = PendingAcknowledgements()
        self._committer = PostgresCommitter(place, provider, self._acknowledgements, self._offer, options.group_bytes)
        self._receivers: dict[int, set[PostgresReceiver]] = {}
        """By queue."""
        self._watch = QueueWatch(place, provider, options.poll(), self._wake, self._committer)
        self._background = BackgroundTasks()
        self._background.start(self._watch.run(), f"headrace postgres queues of {context.provider}")
        self._closing: asyncio.Task[None] | None = None
        self._ending = BackgroundTasks()

    # ---- publishing ------------------------------------------------------------------------------------------------

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter. A call whose caller was cancelled may still be stored.

        Raises StorageError after `publish_timeout_s`: then the events may be stored if the error says so.
        """
        self._check_open()
        batches = tuple(batches)
        sizes = [len(batch.encoded) for _, batch in batches]
        if sizes and (largest := max(sizes)) > MAX_BATCH_BYTES:
            _, batch = batches[sizes.index(largest)]
            raise PayloadTooLarge(f"a batch for {batch.stream}", largest, MAX_BATCH_BYTES)
        answer: asyncio.Future[Sequence[Receipt]] = self._loop.create_future()
        deadline = time.monotonic() + self._options.publish_timeout_s
        call = WaitingCall(batches, sum(sizes), answer, sequence, deadline)
        for queue in call.queues:
            self._check_queue(queue)
        self._committer.submit(call)
        return answer

    async def last_sequence(self, producer: str) -> int:
        self._check_open()
        query = "SELECT number FROM headrace_producer WHERE provider = %s AND producer = %s"
        found = await self._connections.run(
            lambda connection: rows(connection, query, self._provider.provider, producer.encode())
        )
        return found[0][0] if found else 0

    def _offer(self, grown: CommittedGrowth) -> None:
        for queue, committed in grown.items():
            for receiver in list(self._receivers.get(queue, ())):
                receiver.offer(committed)
            self._watch.note(queue, committed.stored.end)

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def open_receiver(self, queue: int, start: int | None = None) -> PostgresReceiver:
        self._check_queue(queue)
        self._check_open()
        noted = self._acknowledgements.noted(queue)
        facts = await self._reads.facts(queue)
        first, end = facts.bounds
        position = min(max(facts.acknowledged, noted, first), end) if start is None else start
        if not 0 <= position <= end:
            raise InvalidArgument(f"queue {queue} ends at offset {end}: it cannot be read from {position}")
        self._check_open()
        self._watch.note(queue, end)
        watched = WatchedQueue(
            queue,
            partial(self._reads.fetch, queue),
            lambda: self._watch.end(queue),
            lambda: self._watch.fault,
            partial(self._acknowledgements.note, queue),
        )
        receivers = self._receivers.setdefault(queue, set())
        before_us = facts.time_us if position == end > 0 else None
        receiver = PostgresReceiver(watched, position, first, receivers.discard, before_us)
        receivers.add(receiver)
        return receiver

    def _wake(self, queue: int | None) -> None:
        queues = self._receivers if queue is None else (queue,)
        for each in queues:
            for receiver in list(self._receivers.get(each, ())):
                receiver.wake()

    async def bounds(self, queue: int) -> Bounds:
        self._check_queue(queue)
        self._check_open()
        return (await self._reads.facts(queue)).bounds

    async def statistics(self, queue: int) -> QueueStatistics:
        self._check_queue(queue)
        self._check_open()
        return await self._reads.statistics(queue)

    async def offset_at(self, queue: int, time_us: int) -> int:
        self._check_queue(queue)
        self._check_open()
        return await self._reads.offset_at(queue, time_us)

    async def backlog(self, queue: int, offset: int) -> Backlog:
        self._check_queue(queue)
        self._check_open()
        return await self._reads.backlog(queue, offset)

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        """See QueueAdapter. Deletes whole segments: the settings are kept to within a segment."""
        self._check_open()
        await self._connections.run(lambda connection: self._retention.apply(connection, watermarks))

    # ---- closing ---------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = self._ending.hold(self._close(), "headrace postgres close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for receiver in [each for receivers in self._receivers.values() for each in receivers]:
            await receiver.aclose()
        await self._committer.aclose()
        await self._background.aclose()
        await self._connections.aclose()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise Closed(f"provider {self._name!r}: the postgres adapter is closed")

    def _check_queue(self, queue: int) -> None:
        if not 0 <= queue < self._queues:
            raise InvalidArgument(f"there is no queue {queue}: this provider has queues 0 to {self._queues - 1}")
