"""The queues of a provider, read over gRPC from any of its silos, if its data directory is out of reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from ..client.blocking import LoopThread
from ..client.connection import GrpcResponseCall, GrpcTransport
from ..client.transport import reconnect_backoff
from ..proto.v1 import reader_pb2 as pb
from ..streams.errors import Closed, HeadraceError, InvalidArgument, OffsetsGone, Unavailable
from ..streams.identity import read_varint
from ..streams.subscriptions import Selector
from .access import BatchChunk, QueueAccess, RetainedRange

OUTAGE_S = 60.0
"""How long a call, and reading, retries while no silo answers, in seconds."""

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_HEAD_TAG = 0x12
_COLUMNS = ("<u4", "<u4", "<u4", "<u4", "<u8")


class RemoteAccess(QueueAccess):
    """A provider of silos. It does not survive a fork: open it in the process that uses it."""

    def __init__(
        self, connection: GrpcTransport, provider: str, *, connect_s: float = OUTAGE_S, outage_s: float = OUTAGE_S
    ) -> None:
        """Open `connection`, which must not be open yet. `close` closes it.

        Raise Unavailable if no silo answers, Unauthenticated, PermissionDenied, NotFound for the provider, and
        NotSupported if its adapter cannot be read by ranges.
        """
        self._connection = connection
        self._provider = provider
        self._outage_s = outage_s
        self._closed = False
        self._thread = LoopThread.acquire()
        try:
            self._thread.call(connection.open, connect_s)
            self.queues = len(self.states())
        except BaseException:
            self.close()
            raise

    def states(self) -> Sequence[RetainedRange]:
        return [_state(each) for each in self._get_queues(pb.GetQueuesRequest(provider=self._provider))]

    def offsets_at(self, time_us: int) -> Sequence[int]:
        request = pb.GetQueuesRequest(provider=self._provider, time_us=time_us)
        return [each.time_offset for each in self._get_queues(request)]

    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        request = pb.EndWithinRequest(
            provider=self._provider,
            queue=queue,
            start_offset=start,
            end_offset=end,
            max_events=max_events,
            max_bytes=max_bytes,
        )
        return self._with_offsets(
            lambda: self._ask("EndWithin", request, pb.EndWithinResponse), queue, start
        ).end_offset

    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[BatchChunk]:
        """See QueueAccess. Only selected batches come. If a silo fails, reading goes on at the next one. The last
        error is raised only if nothing has come for `outage_s`."""
        position, outage = start, _Outage(self._outage_s)
        while position < end:
            request = pb.ReadRequest(
                provider=self._provider,
                queue=queue,
                start_offset=position,
                end_offset=end,
                selector=selector.pattern,
            )
            call = self._begin(request)
            try:
                while position < end:
                    message = self._with_offsets(lambda call=call: self._next(call), queue, position)
                    chunk, position = chunk_of(message)
                    outage.over()
                    if len(chunk.offsets):
                        yield chunk
            except HeadraceError as error:
                time.sleep(outage.pause_s(error))
            finally:
                self._end(call)

    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        ranges = self._get_queues(pb.GetQueuesRequest(provider=self._provider))[queue].skipped
        cut = [(max(one.start_offset, start), min(one.end_offset, end)) for one in ranges]
        return [(low, high) for low, high in cut if low < high]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._thread.call(self._connection.aclose)
            finally:
                self._thread.release()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _get_queues(self, request: pb.GetQueuesRequest) -> Sequence[pb.QueueRange]:
        return self._ask("GetQueues", request, pb.GetQueuesResponse).queues

    def _ask(self, method: str, request: Message, kind: type[_M]) -> _M:
        self._check_open()
        encoded, name = request.SerializeToString(), f"ReaderService/{method}"
        return kind.FromString(self._thread.call(self._connection.call, name, encoded, timeout_s=self._outage_s))

    def _begin(self, request: pb.ReadRequest) -> GrpcResponseCall:
        self._check_open()
        encoded = request.SerializeToString()

        async def begin() -> GrpcResponseCall:
            return self._connection.responses("ReaderService/Read", encoded)

        return self._thread.call(begin)

    def _next(self, call: GrpcResponseCall) -> bytes:
        self._check_open()
        message = self._thread.call(call.receive)
        if message is None:
            raise Unavailable(f"the silo at {call.address} ended the call before everything was read")
        return message

    def _end(self, call: GrpcResponseCall) -> None:
        async def end() -> None:
            call.cancel()

        if not self._closed:
            self._thread.call(end)

    def _with_offsets(self, call: Callable[[], _T], queue: int, position: int) -> _T:
        """Run the call. An OffsetsGone of a silo has only text: raise one with queue, position and first offset."""
        try:
            return call()
        except OffsetsGone:
            raise OffsetsGone(queue, position, self.states()[queue].first) from None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the access to the silos is closed")


class _Outage:
    """Counts failures since the last success, and knows when the first of them was."""

    def __init__(self, limit_s: float) -> None:
        self._backoff = reconnect_backoff()
        self._limit_s = limit_s
        self._began = 0.0

    def over(self) -> None:
        self._backoff.reset()

    def pause_s(self, error: HeadraceError) -> float:
        """Count a failure, and return the pause after it. Raise the error if it is not retryable, or if the failures
        have lasted too long."""
        now = time.monotonic()
        if not self._backoff.failures:
            self._began = now
        if not error.retryable or now - self._began > self._limit_s:
            raise error
        return self._backoff.next_s()


def _state(queue: pb.QueueRange) -> RetainedRange:
    return RetainedRange(
        queue.first_offset,
        queue.next_offset,
        queue.events if queue.HasField("events") else None,
        queue.bytes if queue.HasField("bytes") else None,
    )


def chunk_of(message: bytes) -> tuple[BatchChunk, int]:
    """Return the batches of an encoded ReadResponse, without copying them, and the next offset.

    Raise InvalidArgument if the bytes are no such message.
    """
    try:
        next_offset, columns, body = _head(message)
    except (IndexError, ValueError):
        raise _damaged(message) from None
    starts, sizes, prefixes, counts, offsets = columns
    starts += body
    ends = starts + sizes
    if len({len(column) for column in columns}) > 1 or (len(ends) and int(ends.max()) > len(message)):
        raise _damaged(message)
    return BatchChunk(message, starts, ends, prefixes, counts, offsets), next_offset


def _head(message: bytes) -> tuple[int, Sequence[npt.NDArray[np.int64]], int]:
    """Parse ReadHead, the first field of the message. Return the next offset, the columns, and the end of the field."""
    if message[0] != _HEAD_TAG:
        raise ValueError
    length, at = read_varint(message, 1)
    body = at + length
    next_offset = 0
    columns = [np.zeros(0, np.int64) for _ in _COLUMNS]
    while at < body:
        tag, at = read_varint(message, at)
        value, at = read_varint(message, at)
        if tag & 7 == 2:
            if 2 <= (field := tag >> 3) < 2 + len(_COLUMNS):
                kind = np.dtype(_COLUMNS[field - 2])
                if value % kind.itemsize or at + value > body:
                    raise ValueError
                columns[field - 2] = np.frombuffer(message, kind, value // kind.itemsize, at).astype(np.int64)
            at += value
        elif tag >> 3 == 1:
            next_offset = value
    return next_offset, columns, body


def _damaged(message: bytes) -> InvalidArgument:
    return InvalidArgument(f"damaged message: {len(message)} bytes that are no headrace.v1.ReadResponse")
