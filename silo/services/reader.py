"""ReaderService: read ranges of offsets of a queue, for programs that keep their own positions.

Batches are sent as they were published, each in a frame; see `streams.frames`. The head of a response has the start,
the size and the counts of each batch, so that the reader need not search for them.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress

from ...adapters import QueueAdapter, QueueReceiver
from ...adapters.range_ends import OffsetRange, RangeLimits, end_by_reading
from ...agents import SendBudget
from ...proto.v1 import reader_pb2 as pb
from ...server.access import Permission, Principal
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import HeadraceError, InvalidArgument, NotSupported, OffsetsGone, Unavailable
from ...streams.events import EventBatch
from ...streams.field_limits import check_times
from ...streams.frames import frame, head_bytes
from ...streams.identity import StreamId, varint
from ...streams.subscriptions import Selector
from ..provider_core import ProviderCore
from ..service_limits import ServiceLimits
from .lookup import TO_CONSUME, Providers, provider_of
from .visible import VisibleBounds

SERVICE = "headrace.v1.ReaderService"
RESPONSE_BYTES = 1 << 20
"""Most bytes of a response with more than one batch."""
PIECE_EVENTS, PIECE_BYTES = 1 << 20, 256 << 10
"""Most events and bytes of one read. Framing them blocks the event loop."""
POLL_S = 1.0
"""How often a call that waits for space checks whether it has to end."""


class ReaderService:
    """The service: see the module."""

    def __init__(self, providers: Providers, visible: VisibleBounds, budget: SendBudget, limits: ServiceLimits) -> None:
        """`budget` bounds the bytes that all calls of Read have read and not sent yet."""
        self._providers = providers
        self._visible = visible
        self._budget = budget
        self._limits = limits

    def methods(self) -> Sequence[ServiceMethod]:
        return (
            ServiceMethod(f"{SERVICE}/GetQueues", MethodKind.UNARY, self.get_queues),
            ServiceMethod(f"{SERVICE}/EndWithin", MethodKind.UNARY, self.end_within),
            ServiceMethod(f"{SERVICE}/Read", MethodKind.RESPONSES, self.read),
        )

    async def get_queues(self, call: ServiceCall, encoded: bytes) -> bytes:
        request = parsed(pb.GetQueuesRequest, encoded)
        provider = self._provider(call, request.provider)
        time_us = request.time_us if request.HasField("time_us") else None
        if time_us is not None:
            check_times((time_us,), "time_us")
        queues = await asyncio.gather(
            *(self._queue(call.principal, provider, queue, time_us) for queue in range(provider.queues))
        )
        return pb.GetQueuesResponse(queues=queues).SerializeToString()

    async def end_within(self, call: ServiceCall, encoded: bytes) -> bytes:
        request = parsed(pb.EndWithinRequest, encoded)
        provider = self._provider(call, request.provider)
        adapter = provider.adapter
        span = OffsetRange(request.queue, request.start_offset, request.end_offset)
        limits = RangeLimits(
            request.max_events if request.HasField("max_events") else None,
            request.max_bytes if request.HasField("max_bytes") else None,
        )
        if _may_read_all(call.principal):
            end = await adapter.end_within(*span, *limits)
        else:

            def counted(stream: StreamId) -> bool:
                return call.principal.allows(Permission.SUBSCRIBE, stream.namespace)

            last = (await self._visible.bounds(call.principal, provider, request.queue)).next
            span = span._replace(end=min(span.end, last))
            most = self._limits.end_within_bytes
            end = await end_by_reading(adapter, span, limits, counted=counted, read_bytes=most)
        return pb.EndWithinResponse(end_offset=end).SerializeToString()

    async def read(self, call: ServiceCall, encoded: bytes) -> None:
        request = parsed(pb.ReadRequest, encoded)
        call.principal.require_selector(Permission.SUBSCRIBE, request.selector)
        provider = self._provider(call, request.provider)
        queue, start, end = request.queue, request.start_offset, request.end_offset
        _check_range(queue, start, end, (await self._visible.bounds(call.principal, provider, queue)).next)
        await ReadCall(call, request, provider.adapter, self._budget, self._limits.silent_bytes).run()

    async def _queue(
        self, principal: Principal, provider: ProviderCore, queue: int, time_us: int | None
    ) -> pb.QueueRange:
        first, end = await self._visible.bounds(principal, provider, queue)
        skipped = [
            pb.SkippedRange(start_offset=low, end_offset=high)
            for low, high in await provider.adapter.skipped(queue, first, end)
        ]
        found = pb.QueueRange(first_offset=first, next_offset=end, skipped=skipped)
        if _may_read_all(principal):
            _, events, nbytes = await provider.adapter.statistics(queue)
            if events is not None:
                found.events = events
            if nbytes is not None:
                found.bytes = nbytes
        if time_us is not None:
            found.time_offset = await self._visible.offset_at(principal, provider, queue, time_us)
        return found

    def _provider(self, call: ServiceCall, name: str) -> ProviderCore:
        provider = provider_of(call, self._providers, name, TO_CONSUME)
        if not provider.adapter.capabilities.rewindable:
            raise NotSupported(
                f"provider {provider.name!r} cannot be read by ranges of offsets: its adapter cannot go back; "
                "subscribe instead, or use an adapter that can, such as 'log'"
            )
        return provider


def _may_read_all(principal: Principal) -> bool:
    return principal.allows_everywhere(Permission.SUBSCRIBE)


def _check_range(queue: int, start: int, end: int, next_offset: int) -> None:
    if start > end:
        raise InvalidArgument(
            f"queue {queue} cannot be read from offset {start} to {end}: start_offset is above the end"
        )
    if end > next_offset:
        raise InvalidArgument(
            f"queue {queue} ends at offset {next_offset}: it cannot be read to {end}; ask with GetQueues for "
            "the offsets that it has, and check that it is still the same queue"
        )


class ReadCall:
    """One call of Read. It reserves bytes before it reads them, so calls that wait for space hold nothing."""

    def __init__(
        self,
        call: ServiceCall,
        request: pb.ReadRequest,
        adapter: QueueAdapter,
        budget: SendBudget,
        max_silent_bytes: int,
    ) -> None:
        self._call = call
        self._max_silent_bytes = max_silent_bytes
        self._queue = request.queue
        self._end = request.end_offset
        self._adapter = adapter
        self._receiver: QueueReceiver | None = None
        self._selects = Selector(request.selector).matcher()
        self._position = request.start_offset
        """All selected batches below it were sent, or are in the response."""
        self._silent_bytes = 0
        self._response = EncodedResponse(self._queue)
        self._account = budget.account(call.client)
        self._next_bytes = PIECE_BYTES
        """Bytes to reserve for the next piece."""

    async def run(self) -> None:
        """Send the whole range. If reading fails, send the batches before the failure, and raise the error."""
        self._account.prove()  # the half for new consumers has no use here: nothing is acknowledged
        try:
            while self._position < self._end:
                await self._read_piece()
        except HeadraceError:
            await self._send()
            raise
        else:
            await self._send()
        finally:
            self._account.close()
            await self._close_receiver()

    async def _read_piece(self) -> None:
        await self._reserve(self._next_bytes)
        if self._receiver is None:
            self._receiver = await self._adapter.open_receiver(self._queue, self._position)
        batches, next_offset, gap = await self._receiver.receive(PIECE_EVENTS, PIECE_BYTES)
        if gap is not None and not gap.skipped and gap.low < self._end:
            raise OffsetsGone(self._queue, gap.low, gap.high)
        if not self._hold(sum(batch.nbytes for batch in batches)):
            await self._close_receiver()  # drop the batches, and read them again when there is space
            return
        for batch in batches:
            if batch.offset >= self._end:
                break
            await self._take(batch)
        self._position = min(next_offset, self._end)
        if self._silent_bytes >= self._max_silent_bytes:
            await self._send()

    async def _reserve(self, size: int) -> None:
        """Wait for space for `size` bytes. Send the response before waiting."""
        self._check_open()
        if not self._account.fits(size) and self._account.held:
            await self._send()
        reserved = asyncio.Event()

        def reserve() -> None:
            self._account.add(size)
            reserved.set()

        self._account.wait(size, reserve)
        self._account.wake()
        while not reserved.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await reserved.wait()
            self._check_open()

    def _hold(self, size: int) -> bool:
        """Replace the reservation by the `size` bytes that were read. False if they do not fit: nothing is held."""
        missing = size - self._next_bytes
        if missing > 0 and not self._account.fits(missing):
            self._account.free(self._next_bytes)
            self._next_bytes = size
            return False
        if missing > 0:
            self._account.add(missing)
        else:
            self._account.free(-missing)
        self._next_bytes = PIECE_BYTES
        return True

    def _check_open(self) -> None:
        self._call.check_valid()
        if self._call.closing.is_set():
            raise Unavailable("the silo stops: read on at another silo, or when it is back")

    async def _take(self, batch: EventBatch) -> None:
        if not self._selects(batch.stream):
            self._silent_bytes += batch.nbytes
            self._account.free(batch.nbytes)
            return
        if not self._response.fits(batch):
            self._position = batch.offset
            await self._send()
        self._response.add(batch)

    async def _send(self) -> None:
        message, size = self._response.encoded(self._position), self._response.batch_bytes
        self._response, self._silent_bytes = EncodedResponse(self._queue), 0
        await self._call.write(message)
        self._account.free(size)

    async def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await receiver.aclose()


class EncodedResponse:
    """The batches of one response, and its head."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._frames: list[bytes] = []
        self._nbytes = 0
        self.batch_bytes = 0
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
        self.batch_bytes += batch.nbytes

    def encoded(self, next_offset: int) -> bytes:
        columns = (self._starts, self._sizes, self._prefixes, self._counts, self._offsets)
        head = b"".join((b"\x08", varint(next_offset), *(_packed(*column) for column in enumerate(columns, 2))))
        return b"".join((b"\x12", varint(len(head)), head, *self._frames))


def _packed(field: int, values: array[int]) -> bytes:
    """Encode a field of ReadHead with fixed-width numbers. Protobuf would convert each number by itself."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    content = values.tobytes()
    return b"".join((varint(field << 3 | 2), varint(len(content)), content))
