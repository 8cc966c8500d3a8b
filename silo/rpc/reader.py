"""ReaderService: reading queues by ranges of offsets, for programs that keep their own positions.

Batches go from the queue to the wire as they were published, each in a frame; see `streams.frames`. What makes them
cheap to read on the other side, too, is told in front of them: where each begins and ends, and what it has.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence

from ...adapters import QueueAdapter, QueueReceiver
from ...adapters.reaching import Limits, Span, reach_by_reading
from ...proto.v1 import reader_pb2 as pb
from ...streams.errors import HeadraceError, InvalidArgument, NotSupported, OffsetsGone, Unavailable
from ...streams.events import EventBatch
from ...streams.frames import frame, head_bytes
from ...streams.identity import StreamId, varint
from ...streams.subscriptions import Selector
from ..access import Permission, Principal
from ..provider import Provider
from .guard import Call, Kind, Method, parsed
from .lookup import TO_CONSUME, Providers, provider_of

SERVICE = "headrace.v1.ReaderService"
RESPONSE_BYTES = 1 << 20
"""A response has no more, where it has more than one batch."""
PIECE_EVENTS, PIECE_BYTES = 1 << 20, 256 << 10
"""Read at a time, and framed, which holds up everybody else."""
SILENT_BYTES = 16 << 20
"""After so many of which nothing was selected, the reader is told where it is."""
REACH_BYTES = 64 << 20
"""Read at the most to answer how far a reader gets of whom not all events count."""


class ReaderService:
    def __init__(self, providers: Providers) -> None:
        self._providers = providers

    def methods(self) -> Sequence[Method]:
        return (
            Method(f"{SERVICE}/GetQueues", Kind.UNARY, self.get_queues),
            Method(f"{SERVICE}/Reach", Kind.UNARY, self.reach),
            Method(f"{SERVICE}/Read", Kind.RESPONSES, self.read),
        )

    async def get_queues(self, call: Call, encoded: bytes) -> bytes:
        request = parsed(pb.GetQueuesRequest, encoded)
        provider = self._provider(call, request.provider)
        counted = _may_read_all(call.principal)
        time_us = request.time_us if request.HasField("time_us") else None
        queues = await asyncio.gather(
            *(_queue(provider.adapter, queue, time_us, counted=counted) for queue in range(provider.queues))
        )
        return pb.GetQueuesResponse(queues=queues).SerializeToString()

    async def reach(self, call: Call, encoded: bytes) -> bytes:
        request = parsed(pb.ReachRequest, encoded)
        adapter = self._provider(call, request.provider).adapter
        span = Span(request.queue, request.start_offset, request.end_offset)
        limits = Limits(
            request.max_events if request.HasField("max_events") else None,
            request.max_bytes if request.HasField("max_bytes") else None,
        )
        if _may_read_all(call.principal):
            end = await adapter.reach(*span, *limits)
        else:

            def counted(stream: StreamId) -> bool:
                return call.principal.allows(Permission.SUBSCRIBE, stream.namespace)

            end = await reach_by_reading(adapter, span, limits, counted=counted, read_bytes=REACH_BYTES)
        return pb.ReachResponse(end_offset=end).SerializeToString()

    async def read(self, call: Call, encoded: bytes) -> None:
        request = parsed(pb.ReadRequest, encoded)
        call.principal.require_selector(Permission.SUBSCRIBE, request.selector)
        adapter = self._provider(call, request.provider).adapter
        queue, start, end = request.queue, request.start_offset, request.end_offset
        _check_range(queue, start, end, (await adapter.bounds(queue)).next)
        receiver = await adapter.open_receiver(queue, start)
        try:
            await Reading(call, request, receiver).run()
        finally:
            await receiver.aclose()

    def _provider(self, call: Call, name: str) -> Provider:
        provider = provider_of(call, self._providers, name, TO_CONSUME)
        if not provider.adapter.capabilities.rewindable:
            raise NotSupported(
                f"provider {provider.name!r} cannot be read by ranges of offsets: its adapter cannot go back; "
                "subscribe instead, or use an adapter that can, such as 'log'"
            )
        return provider


def _may_read_all(principal: Principal) -> bool:
    return principal.allows_everywhere(Permission.SUBSCRIBE)


async def _queue(adapter: QueueAdapter, queue: int, time_us: int | None, *, counted: bool) -> pb.QueueRange:
    (first, end), events, nbytes = await adapter.statistics(queue)
    found = pb.QueueRange(first_offset=first, next_offset=end)
    if counted and events is not None:
        found.events = events
    if counted and nbytes is not None:
        found.bytes = nbytes
    if time_us is not None:
        found.time_offset = await adapter.offset_at(queue, time_us)
    return found


def _check_range(queue: int, start: int, end: int, next_offset: int) -> None:
    if start > end:
        raise InvalidArgument(
            f"queue {queue} cannot be read from offset {start} to {end}: start_offset is above the end"
        )
    if end > next_offset:
        raise InvalidArgument(
            f"queue {queue} ends at offset {next_offset}: it cannot be read to {end}; ask for what there is "
            "(GetQueues), and whether the queue is still the same one"
        )


class Reading:
    """One Read call."""

    def __init__(self, call: Call, request: pb.ReadRequest, receiver: QueueReceiver) -> None:
        self._call = call
        self._queue = request.queue
        self._end = request.end_offset
        self._receiver = receiver
        self._selects = Selector(request.selector).matcher()
        self._position = request.start_offset
        """Everything below it was sent, or is in the response."""
        self._silent_bytes = 0
        self._response = Response(self._queue)

    async def run(self) -> None:
        """What is there is sent also where reading fails behind it."""
        try:
            while self._position < self._end:
                await self._read_on()
        except HeadraceError:
            await self._send()
            raise
        await self._send()

    async def _read_on(self) -> None:
        self._call.check_valid()
        if self._call.closing.is_set():
            raise Unavailable("the silo stops: read on at another one, or when it is back")
        batches, next_offset, gap = await self._receiver.receive(PIECE_EVENTS, PIECE_BYTES)
        if gap is not None and gap.low < self._end:
            raise OffsetsGone(self._queue, gap.low, gap.high)
        for batch in batches:
            if batch.offset >= self._end:
                break
            await self._take(batch)
        self._position = min(next_offset, self._end)
        if self._silent_bytes >= SILENT_BYTES:
            await self._send()

    async def _take(self, batch: EventBatch) -> None:
        if not self._selects(batch.stream):
            self._silent_bytes += batch.nbytes
            return
        if not self._response.fits(batch):
            self._position = batch.offset
            await self._send()
        self._response.add(batch)

    async def _send(self) -> None:
        response, self._response, self._silent_bytes = self._response, Response(self._queue), 0
        await self._call.write(response.encoded(self._position))


class Response:
    """Batches of one response, and what is said of them."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._frames: list[bytes] = []
        self._nbytes = 0
        self._starts, self._sizes, self._prefixes, self._counts = (array("I") for _ in range(4))
        self._offsets = array("Q")

    def fits(self, batch: EventBatch) -> bool:
        return not self._frames or self._nbytes + batch.nbytes <= RESPONSE_BYTES

    def add(self, batch: EventBatch) -> None:
        framed = frame(batch.encoded, self._queue, batch.offset)
        prefix = batch.stream.prefix
        self._frames.append(framed)
        self._starts.append(self._nbytes + head_bytes(framed))
        self._sizes.append(len(batch.encoded))
        self._prefixes.append(len(prefix) if batch.encoded.startswith(prefix) else 0)
        self._counts.append(batch.count)
        self._offsets.append(batch.offset)
        self._nbytes += len(framed)

    def encoded(self, next_offset: int) -> bytes:
        columns = (self._starts, self._sizes, self._prefixes, self._counts, self._offsets)
        head = b"".join((b"\x08", varint(next_offset), *(_packed(*column) for column in enumerate(columns, 2))))
        return b"".join((b"\x12", varint(len(head)), head, *self._frames))


def _packed(field: int, values: array[int]) -> bytes:
    """A field of ReadHead that has fixed-width numbers. The library would take each by itself."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    content = values.tobytes()
    return b"".join((varint(field << 3 | 2), varint(len(content)), content))
