"""Publishing what was staged: exactly once, however often and by however many it is tried.

A batch of an application is decided by the first manifest (`StagingFolder.claim`). It is cut into chunks, and each is
one call of an idempotent producer: `producer_of` the application. The numbers of a batch's calls begin with
`first_number`, and its last call has `last_number`; so the last number that the provider has stored tells exactly how
far the application came. Whoever commits looks there first and goes on behind it; where two do so at once, the second
call of a number stores nothing, and one whose predecessor is not what it looked at is refused, and looks again.

Batches of an application are published in the order of their numbers: one that was begun and left is finished before a
later one; one that comes after a later one is taken for published.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from ..adapters.log.blocks import StreamTable
from ..adapters.log.retention import PRODUCER_AGE_S
from ..proto.v1 import publisher_pb2 as pb
from ..silo.provider import Provider, ProviderOptions
from ..silo.rpc.incoming import accepted
from ..streams.client.connection import RECONNECT, Connection
from ..streams.client.management import parsed
from ..streams.errors import (
    DataDirectoryError,
    HeadraceError,
    InvalidArgument,
    NotFound,
    NotSupported,
    SequenceConflict,
)
from ..streams.events import EventBatch
from ..streams.publishing import MAX_BATCH_BYTES, MAX_REQUEST_BATCHES, ProducerSequence
from .grouping import batch_starts
from .place import Place
from .staging import Chunk, Cutting, Manifest, Span, Staged, StagingFolder, chunks, read_segments

CUTTING = Cutting(MAX_BATCH_BYTES + (1 << 19), MAX_REQUEST_BATCHES)
"""A chunk fits into one request to a silo."""
PATIENCE_S = 60.0
"""How long publishing is tried again without any progress, in seconds, while the failure is retryable."""
CONNECT_S = 10.0
MAX_BATCH_NUMBER = (1 << 42) - 1
"""Limit of the number of a batch: the numbers of its calls have to fit 63 bits."""

_CALLS_BITS = 20
_MARGIN_S = 3600
_LAST_CALL = (1 << _CALLS_BITS) - 1
_PRODUCER_BYTES = 128


def producer_of(app: str) -> str:
    """The producer's id of an application."""
    name = f"spark:{app}"
    return name if len(name.encode()) <= _PRODUCER_BYTES else f"spark:sha256:{hashlib.sha256(app.encode()).hexdigest()}"


def first_number(batch: int) -> int:
    """Of a batch's first call, where it has several."""
    return batch + 1 << _CALLS_BITS


def last_number(batch: int) -> int:
    """Of a batch's last call."""
    return first_number(batch) | _LAST_CALL


class Destination(Protocol):
    """A provider, to publish to."""

    ahead: int
    """How many calls may be under way at a time."""

    async def last_sequence(self, producer: str) -> int: ...

    def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
        """Store a chunk, whole or not at all. Called in order means stored in order."""
        ...


class InData:
    """A provider on a data directory."""

    ahead = 2

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._streams = StreamTable()
        self.last_sequence = provider.adapter.last_sequence

    def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
        return self._provider.publish_encoded(list(self._batches(chunk)), sequence=sequence)

    def _batches(self, chunk: Chunk) -> Iterator[EventBatch]:
        for span in chunk:
            yield from self._batches_of(span)

    def _batches_of(self, span: Span) -> Iterator[EventBatch]:
        segment, streams, part = span.segment, self._streams, slice(span.first, span.last)
        lengths, end, elements = segment.lengths[part], span.start, segment.elements
        for length, head, count, prefix in zip(
            lengths.tolist(),
            batch_starts(lengths).tolist(),
            segment.counts[part].tolist(),
            segment.prefixes[part].tolist(),
            strict=True,
        ):
            start, end = end + head, end + length  # of the batch; its element begins at the old `end`
            encoded = elements[start:end]
            stream = streams.known.get(encoded[:prefix]) or streams.learn(encoded, prefix)
            yield accepted(encoded, 0) if segment.scheduled else EventBatch(stream, encoded, count)


class OnSilo:
    """A provider of a silo."""

    ahead = 1

    def __init__(self, connection: Connection, provider: str) -> None:
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
async def open_destination(place: Place) -> AsyncGenerator[Destination]:
    """What a place names, for the length of an `async with`. Raises HeadraceError with one clear line."""
    if place.data is not None:
        provider = await Provider.start(place.data, ProviderOptions(name=place.provider, delays=place.delays))
        try:
            can = provider.adapter.capabilities
            if not (can.idempotent and can.durable):
                raise NotSupported(
                    f"provider {place.provider!r}: the sink needs an adapter that is durable and knows idempotent "
                    "producers, such as 'log': else a batch that Spark repeats would be stored twice"
                )
            yield InData(provider)
        finally:
            await provider.aclose()
    else:
        connection = place.connection()
        await connection.open(CONNECT_S)
        try:
            yield OnSilo(connection, place.provider)
        finally:
            await connection.aclose()


def commit(place: Place, folder: StagingFolder, app: str, batch: int, staged: Sequence[Staged]) -> None:
    """Publish what was staged as a batch of an application: once, whoever else has done or does so.

    Where it returns, the batch is stored; where the batch had been stored before, with whatever it had then. Removes
    what was staged for it. Raises HeadraceError, and then it goes on where it stopped when it is called again, in
    another process as well.
    """
    if batch <= folder.done():
        folder.remove([each.name for each in staged])
        return

    async def run() -> None:
        async with open_destination(place) as destination:
            await Publishing(destination, folder, app).commit(batch, staged)

    asyncio.run(run())
    folder.sweep()


class Publishing:
    """Publishes batches of one application."""

    def __init__(self, destination: Destination, folder: StagingFolder, app: str) -> None:
        self._destination = destination
        self._folder = folder
        self._app = app
        self._producer = producer_of(app)

    async def commit(self, batch: int, staged: Sequence[Staged]) -> None:
        """See `commit`."""
        names = [each.name for each in sorted(staged, key=lambda each: each.partition) if each.name]
        await self._claim(batch, names)
        await self._publish_up_to(batch)
        self._folder.clear(self._folder.done())  # where another process was done before this one had begun
        self._folder.remove(names)  # those that another attempt's manifest does not name

    async def _claim(self, batch: int, names: Sequence[str]) -> None:
        stored = await self._last()
        begun = first_number(batch) <= stored < last_number(batch)
        if begun and self._folder.manifest(batch) is None and self._folder.done() < batch:
            raise DataDirectoryError(
                f"batch {batch} of txnAppId {self._app!r} is half published, and {self._folder.path} has no manifest "
                "of it any more: bring that directory back; or use another txnAppId, and have some events twice"
            )
        if missing := self._folder.missing(names):
            raise NotFound(
                f"{self._folder.path / missing} was staged by a task and is not to be seen here: the driver and all "
                "executors have to share the directory of option 'staging'"
            )
        self._folder.claim(Manifest(batch, names, CUTTING))

    async def _publish_up_to(self, batch: int) -> None:
        """Finish what is begun, in order. What another process does meanwhile counts."""
        patience = _Patience()
        while True:
            try:
                # First how far it came, then what is begun: a batch that has a stored call is among those, or done.
                stored = await self._last()
                begun = self._folder.pending(batch)
                if not begun:
                    return
                patience.moved_to(stored)
                self._check_known(begun[0].batch, stored)
                if stored < last_number(begun[0].batch):
                    await self._publish(begun[0], stored)
                self._folder.finish(begun[0].batch)
            except HeadraceError as error:
                await patience.after(error)
            except FileNotFoundError as error:
                if self._folder.done() < batch:  # else another process was faster, and has tidied up
                    raise NotFound(f"{error.filename}, which was staged, is gone: it cannot be published") from None

    def _check_known(self, batch: int, stored: int) -> None:
        """A provider forgets a producer that is silent for long: then nobody knows how far the batch came."""
        if not stored and self._folder.age_s(batch) > PRODUCER_AGE_S - _MARGIN_S:
            raise DataDirectoryError(
                f"batch {batch} of txnAppId {self._app!r} was left {PRODUCER_AGE_S // 86400} days ago, half published "
                f"or not at all, and nobody knows which: remove {self._folder.path}/{batch}.manifest to publish it all"
            )

    async def _last(self) -> int:
        return await self._destination.last_sequence(self._producer)

    async def _publish(self, manifest: Manifest, stored: int) -> None:
        """Store what is missing of a batch. Raises SequenceConflict where another stores at the same time."""
        calls = _calls(self._folder, manifest)
        under_way: deque[asyncio.Future[object]] = deque()
        try:
            for number, chunk in calls:
                if number <= stored:
                    continue
                if len(under_way) >= self._destination.ahead:
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
    """Decides for how long to try again."""

    def __init__(self) -> None:
        self._stored = -1
        self._failures = 0
        self._until = 0.0
        self._random = random.Random()  # noqa: S311 (spreads attempts)

    def moved_to(self, stored: int) -> None:
        """As long as more gets stored, nothing has failed."""
        if stored != self._stored:
            self._stored, self._failures = stored, 0

    async def after(self, error: HeadraceError) -> None:
        """Wait before the next attempt, or raise `error`."""
        now = asyncio.get_running_loop().time()
        self._failures += 1
        if self._failures == 1:
            self._until = now + PATIENCE_S
        if not (error.retryable or isinstance(error, SequenceConflict)) or now >= self._until:
            raise error
        await asyncio.sleep(RECONNECT.delay(self._failures, 0, self._random) or 0)


def _calls(folder: StagingFolder, manifest: Manifest) -> Iterator[tuple[int, Chunk]]:
    """The chunks of a batch with their numbers. The last one has `last_number`: an empty batch has none."""
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
