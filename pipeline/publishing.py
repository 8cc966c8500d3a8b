"""Publishing staged batches exactly once, also if several processes try it, and try it several times.

The first manifest (`StagingFolder.claim`) fixes the content of an application's batch. The batch is cut into chunks,
and each chunk is one call of an idempotent producer: `producer_of` the application. The numbers of a batch's calls
begin with `first_number`, and its last call has `last_number`. So the provider's last stored number is the exact
progress of the application. A process that commits reads this number first and goes on behind it. If two processes
commit at once, the second call of a number stores nothing. If a call's predecessor is not the last stored number, the
call is refused, and the process reads the number again.

Batches of an application are published in the order of their numbers. An unfinished batch is finished before a later
one. A batch that comes after a later one counts as published.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from ..adapters.log.blocks import StreamTable
from ..adapters.log.retention import PRODUCER_AGE_S
from ..client.management import parsed
from ..client.transport import Transport, reconnect_backoff
from ..proto.v1 import publisher_pb2 as pb
from ..streams.errors import (
    DataDirectoryError,
    HeadraceError,
    InvalidArgument,
    NotFound,
    NotSupported,
    SequenceConflict,
)
from ..streams.events import EventBatch
from ..streams.incoming import accepted
from ..streams.publishing import MAX_BATCH_BYTES, MAX_REQUEST_BATCHES, ProducerSequence
from .embedded import EmbeddedProvider, find_open_provider
from .grouping import batch_starts
from .place import ProviderPlace
from .staging import (
    BatchManifest,
    Chunk,
    PublishChunkLimits,
    SegmentSpan,
    StagedReport,
    StagingFolder,
    chunks,
    read_segments,
)

CHUNK_LIMITS = PublishChunkLimits(MAX_BATCH_BYTES + (1 << 19), MAX_REQUEST_BATCHES)
"""A chunk fits into one request to a silo."""
PATIENCE_S = 60.0
"""How long publishing retries without any progress, in seconds, if the failure is retryable."""
CONNECT_S = 10.0
MAX_BATCH_NUMBER = (1 << 42) - 1
"""Limit of the number of a batch: the numbers of its calls must fit into 63 bits."""

_CALLS_BITS = 20
_MARGIN_S = 3600
_LAST_CALL = (1 << _CALLS_BITS) - 1
_PRODUCER_BYTES = 128


def producer_of(app: str) -> str:
    """Return the id of an application's producer."""
    name = f"spark:{app}"
    return name if len(name.encode()) <= _PRODUCER_BYTES else f"spark:sha256:{hashlib.sha256(app.encode()).hexdigest()}"


def first_number(batch: int) -> int:
    """Return the number of a batch's first call, if it has several calls."""
    return batch + 1 << _CALLS_BITS


def last_number(batch: int) -> int:
    """Return the number of a batch's last call."""
    return first_number(batch) | _LAST_CALL


class PublishDestination(Protocol):
    """A provider that the sink publishes to."""

    max_pending: int
    """How many calls may be under way at a time."""

    async def last_sequence(self, producer: str) -> int: ...

    def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
        """Store a chunk, all of it or nothing. Chunks are stored in the order of the calls."""
        ...


class EmbeddedDestination:
    """A provider on a data directory, opened in this process."""

    max_pending = 2

    def __init__(self, provider: EmbeddedProvider) -> None:
        self._provider = provider
        self._streams = StreamTable()
        self.last_sequence = provider.adapter.last_sequence

    def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
        return self._provider.publish_encoded(list(self._batches(chunk)), sequence=sequence)

    def _batches(self, chunk: Chunk) -> Iterator[EventBatch]:
        for span in chunk:
            yield from self._batches_of(span)

    def _batches_of(self, span: SegmentSpan) -> Iterator[EventBatch]:
        segment, streams, part = span.segment, self._streams, slice(span.first, span.last)
        lengths, end, elements = segment.lengths[part], span.start, segment.elements
        for length, head, count, prefix in zip(
            lengths.tolist(),
            batch_starts(lengths).tolist(),
            segment.counts[part].tolist(),
            segment.prefixes[part].tolist(),
            strict=True,
        ):
            start, end = end + head, end + length  # of the batch; its element begins at the previous `end`
            encoded = elements[start:end]
            stream = streams.known.get(encoded[:prefix]) or streams.learn(encoded, prefix)
            yield accepted(encoded, 0) if segment.scheduled else EventBatch(stream, encoded, count)


class SiloDestination:
    """A provider of a silo."""

    max_pending = 1

    def __init__(self, connection: Transport, provider: str) -> None:
        self._connection = connection
        self._provider = provider

    async def last_sequence(self, producer: str) -> int:
        request = pb.GetProducerRequest(provider=self._provider, producer=producer).SerializeToString()
        answer = await self._connection.unary("PublisherService/GetProducer", request, timeout_s=PATIENCE_S)
        return parsed(pb.GetProducerResponse, answer).number

    def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
        head = pb.PublishRequest(provider=self._provider, sequence=pb.ProducerSequence(**sequence._asdict()))
        elements = [memoryview(span.segment.elements)[span.start : span.end] for span in chunk]
        request = b"".join((head.SerializeToString(), *elements))
        return self._connection.unary("PublisherService/Publish", request, timeout_s=PATIENCE_S)


@asynccontextmanager
async def open_destination(place: ProviderPlace, connect_s: float = CONNECT_S) -> AsyncGenerator[PublishDestination]:
    """Open the provider at `place`, for the length of an `async with`. Raise HeadraceError with one clear line."""
    if place.data is not None:
        open_provider = find_open_provider()
        async with open_provider(place.data, name=place.provider, delays=place.delays) as provider:
            can = provider.adapter.capabilities
            if not (can.idempotent and can.durable):
                raise NotSupported(
                    f"provider {place.provider!r}: the sink needs an adapter that is durable and knows idempotent "
                    "producers, such as 'log': otherwise a batch that Spark repeats would be stored twice"
                )
            yield EmbeddedDestination(provider)
    else:
        connection = place.connection()
        await connection.open(connect_s)
        try:
            yield SiloDestination(connection, place.provider)
        finally:
            await connection.aclose()


def commit(
    place: ProviderPlace,
    folder: StagingFolder,
    app: str,
    batch: int,
    staged: Sequence[StagedReport],
    *,
    limits: PublishChunkLimits = CHUNK_LIMITS,
    connect_s: float = CONNECT_S,
) -> None:
    """Publish staged files as a batch of an application, once, also if other processes publish the same batch.

    When it returns, the batch is stored, and its staged files are removed. If the batch was stored before, it keeps its
    former content. Raise HeadraceError. The next call, also in another process, then goes on from there.
    """
    if batch <= folder.done():
        folder.remove([each.name for each in staged])
        return

    async def run() -> None:
        async with open_destination(place, connect_s) as destination:
            await BatchPublisher(destination, folder, app, limits).commit(batch, staged)

    asyncio.run(run())
    folder.sweep()


class BatchPublisher:
    """Publishes batches of one application."""

    def __init__(
        self,
        destination: PublishDestination,
        folder: StagingFolder,
        app: str,
        limits: PublishChunkLimits = CHUNK_LIMITS,
    ) -> None:
        self._limits = limits
        self._destination = destination
        self._folder = folder
        self._app = app
        self._producer = producer_of(app)

    async def commit(self, batch: int, staged: Sequence[StagedReport]) -> None:
        """See `commit`."""
        names = [each.name for each in sorted(staged, key=lambda each: each.partition) if each.name]
        await self._claim(batch, names)
        await self._publish_up_to(batch)
        self._folder.clear(self._folder.done())  # its files are left if another process had finished the batch before
        self._folder.remove(names)  # they are left if the manifest of another attempt counts

    async def _claim(self, batch: int, names: Sequence[str]) -> None:
        stored = await self._last()
        begun = first_number(batch) <= stored < last_number(batch)
        if begun and self._folder.manifest(batch) is None and self._folder.done() < batch:
            raise DataDirectoryError(
                f"batch {batch} of txnAppId {self._app!r} is half published, and {self._folder.path} has no manifest "
                "of it any more: restore that directory; or use another txnAppId, which publishes some events twice"
            )
        if missing := self._folder.missing(names):
            raise NotFound(
                f"'{self._folder.path / missing}' was staged by a task, and the driver does not see it: the driver and "
                "all executors must share the directory of option 'staging'"
            )
        self._folder.claim(BatchManifest(batch, names, self._limits))

    async def _publish_up_to(self, batch: int) -> None:
        """Publish all unfinished batches up to `batch`, in order. Other processes may publish some of them."""
        patience = _Patience()
        while True:
            try:
                # Read the number first, then the manifests: a batch with a stored call then has a manifest, or is done.
                stored = await self._last()
                begun = self._folder.pending(batch)
                if not begun:
                    return
                patience.note_stored(stored)
                self._check_known(begun[0].batch, stored)
                if stored < last_number(begun[0].batch):
                    await self._publish(begun[0], stored)
                self._folder.finish(begun[0].batch)
            except HeadraceError as error:
                await patience.pause_or_raise(error)
            except FileNotFoundError as error:
                if self._folder.done() < batch:  # otherwise another process published it and removed the file
                    raise NotFound(f"'{error.filename}', which was staged, is gone: it cannot be published") from None

    def _check_known(self, batch: int, stored: int) -> None:
        """Raise DataDirectoryError if the provider may have forgotten the producer and so the batch's progress."""
        if not stored and self._folder.age_s(batch) > PRODUCER_AGE_S - _MARGIN_S:
            raise DataDirectoryError(
                f"batch {batch} of txnAppId {self._app!r} was left {PRODUCER_AGE_S // 86400} days ago, half published "
                f"or not at all, and the provider has forgotten which: remove {self._folder.path}/{batch}.manifest to "
                "publish it all"
            )

    async def _last(self) -> int:
        return await self._destination.last_sequence(self._producer)

    async def _publish(self, manifest: BatchManifest, stored: int) -> None:
        """Store the missing calls of a batch. Raise SequenceConflict if another process stores at the same time."""
        calls = _calls(self._folder, manifest)
        under_way: deque[asyncio.Future[object]] = deque()
        try:
            for number, chunk in calls:
                if number <= stored:
                    continue
                if len(under_way) >= self._destination.max_pending:
                    await under_way.popleft()
                sequence = ProducerSequence(self._producer, number, stored)
                under_way.append(asyncio.ensure_future(self._destination.store(chunk, sequence)))
                stored = number
            while under_way:
                await under_way.popleft()
        finally:
            if under_way:
                await asyncio.gather(*under_way, return_exceptions=True)


class _Patience:
    """Decides how long to retry."""

    def __init__(self) -> None:
        self._stored = -1
        self._backoff = reconnect_backoff()
        self._until = 0.0

    def note_stored(self, stored: int) -> None:
        """Note the last stored number. Progress resets the failures."""
        if stored != self._stored:
            self._stored = stored
            self._backoff.reset()

    async def pause_or_raise(self, error: HeadraceError) -> None:
        """Wait before the next attempt, or raise `error`."""
        now = asyncio.get_running_loop().time()
        pause_s = self._backoff.next_s()
        if self._backoff.failures == 1:
            self._until = now + PATIENCE_S
        if not (error.retryable or isinstance(error, SequenceConflict)) or now >= self._until:
            raise error
        await asyncio.sleep(pause_s)


def _calls(folder: StagingFolder, manifest: BatchManifest) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks of a batch with their numbers. The last one has `last_number`. An empty batch has no chunk."""
    number, before = first_number(manifest.batch), None
    segments = (segment for name in manifest.files for segment in read_segments(folder.path / name))
    for chunk in chunks(segments, manifest.cutting):
        if before is not None:
            if number == last_number(manifest.batch):
                raise InvalidArgument(
                    f"batch {manifest.batch} has more than {_LAST_CALL:,} chunks: write less at a time"
                )
            yield number, before
            number += 1
        before = chunk
    if before is not None:
        yield last_number(manifest.batch), before
