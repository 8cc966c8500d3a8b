"""Publishing over one pipelined call. Events of concurrent callers share requests, and are stored once, in order.

The module `window` decides which request is sent, or sent again. This module does the I/O: a sender and a receiver for
each connection, a new connection after a pause if one is lost, and a limit for how long a caller waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from ..proto.v1 import publisher_pb2 as pb
from ..streams.background import BackgroundTasks
from ..streams.errors import Closed, HeadraceError, PayloadTooLarge, Unavailable, error_of
from ..streams.events import EventBatch
from ..streams.identity import SequenceToken, varint
from ..streams.publishing import MAX_BATCH_BYTES, Receipt
from .transport import StreamCall, Transport, reconnect_backoff, remote_error
from .window import Publication, PublicationPiece, PublishWindow, WindowedRequest, WindowLimits

METHOD = "PublisherService/PublishStream"
MAX_BYTES = 32 << 20
"""Limit of the encoded bytes of publications that are not stored yet. Above it, callers wait."""
GATHER_S = 0.01
"""Longest time that a small request waits after the last one was sent, in seconds. The limit is for silos that are far
away."""
HANG_UP_S = 1.0
"""How long closing waits for the silo to end the call, in seconds."""

_BATCHES_TAG = b"\x1a"
_SMALL_FRAME = 4096
"""Up to this size, in bytes, the pieces of a frame are joined at once. Those of a larger frame are copied once, when
its request is joined."""


class AwaitedPublication(Publication):
    """A publication whose caller waits for it until `deadline`, in the loop's time."""

    __slots__ = ("deadline", "done")

    def __init__(self, done: asyncio.Future[None], deadline: float) -> None:
        super().__init__()
        self.done = done
        self.deadline = deadline

    def settled(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class PublishPipeline:
    """The publishing half of a client. Belongs to an event loop; its task begins with the first publication."""

    def __init__(
        self,
        connection: Transport,
        provider: str,
        *,
        timeout_s: float,
        linger_s: float = 0.0,
        gather_s: float = GATHER_S,
        max_bytes: int = MAX_BYTES,
        window: PublishWindow | None = None,
    ) -> None:
        """A caller waits at most `timeout_s`. `linger_s` is how long a request waits for more events while no other
        request is in flight, and `gather_s` how long a small one waits at most for those in flight. With `linger_s` 0
        it has the events of one turn of the loop. Callers wait while `window` holds `max_bytes` or more."""
        self._connection = connection
        self._provider = provider
        self._timeout_s = timeout_s
        self._linger_s = linger_s
        self._gather_s = gather_s
        self._max_bytes = max_bytes
        self._window = PublishWindow(new_producer) if window is None else window
        self._background = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None
        self._call: StreamCall | None = None
        self._trouble: HeadraceError | None = None
        self._idle: asyncio.Future[None] | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._gathering = False
        """Whether the sender lets small events collect: `publish` need not wake it then."""
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether `max_bytes` is reached, so that a caller must wait with `wait_for_space`."""
        return self._window.held.size >= self._max_bytes or bool(self._waiters)

    async def wait_for_space(self) -> float:
        """Return when the caller may publish, in the order of the calls. Raises Unavailable after the time limit.

        Returns the caller's deadline, in the loop's time.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        space: asyncio.Future[None] = loop.create_future()
        self._waiters.append(space)
        try:
            async with asyncio.timeout_at(deadline):
                await space
        except BaseException as error:
            with suppress(ValueError):
                self._waiters.remove(space)
            self._admit()  # this caller may have been admitted already: another one takes its place
            if isinstance(error, TimeoutError):
                raise self._timed_out("none of these events is stored") from None
            raise
        return deadline

    async def publish(self, batches: Sequence[EventBatch], deadline: float | None = None) -> list[Receipt]:
        """Store batches, in order. One receipt for each.

        Raises the error with which the silo refuses them. Raises Unavailable after the deadline, which by default is
        the time limit from now on: then they may be stored or not. If the caller is cancelled, batches that are not
        sent yet are not published.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        publication = AwaitedPublication(loop.create_future(), deadline or loop.time() + self._timeout_s)
        for piece in _pieces(publication, batches, self._window.limits):
            self._window.add(piece)
        if self._timer is None:
            self._timer = loop.call_at(publication.deadline, self._expire)
        if not (self._gathering and self._window.should_gather):
            self._wake()
        try:
            await publication.done
        except asyncio.CancelledError:
            publication.over = True
            raise
        if publication.error is not None:
            raise publication.error.copy()
        return publication.receipts

    async def flush(self) -> None:
        """Return when everything that was published before is stored or has failed."""
        if self._waiters:
            await asyncio.wait(list(self._waiters))
            await asyncio.sleep(0)
        if waiting := [one.done for one in self._live()]:
            await asyncio.wait(waiting)

    async def aclose(self) -> None:
        """Flush, and end. Idempotent. Publishing afterwards raises Closed."""
        self._closed = True
        try:
            await self.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._hang_up()
            self._window.disconnected()
            self._window.fail_all(Closed("the client is closed; these events may or may not be stored"))

    async def _hang_up(self) -> None:
        """End the call in order, or by force if that takes long: grpc must not call a loop that is closed."""
        try:
            if self._call is not None and self._window.idle:
                self._wake()
                await self._background.join(HANG_UP_S)
        finally:
            await self._background.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")
        self._connection.check_open()

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake the task: there may be a request to send."""
        if self._task is None or self._task.done():
            self._task = self._background.start(self._run(), "headrace publishing")
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _until_woken(self, by: float | None = None) -> None:
        """Return when woken, at the latest at `by`, in the loop's time."""
        loop = asyncio.get_running_loop()
        self._idle = loop.create_future()
        timer = None if by is None else loop.call_at(by, self._wake)
        try:
            await self._idle
        finally:
            self._idle = None
            if timer is not None:
                timer.cancel()

    async def _run(self) -> None:
        backoff = reconnect_backoff()
        try:
            while True:
                while self._window.idle:
                    if self._closed:
                        return
                    await self._until_woken()
                failure = await self._run_call()
                if self._trouble is None:
                    backoff.reset()
                self._trouble, pause_s = failure, backoff.next_s()
                self._window.disconnected()
                if not failure.retryable:
                    self._give_up(failure)
                if not self._window.idle:
                    await asyncio.sleep(pause_s)
        except Exception as error:
            self._window.disconnected()
            self._give_up(HeadraceError(f"the client failed; this is a bug of headrace: {error!r}"))
            raise

    def _give_up(self, failure: HeadraceError) -> None:
        self._window.fail_all(failure)
        self._admit()

    async def _run_call(self) -> HeadraceError:
        """Publish over one call, until it fails."""
        try:
            self._call = call = self._connection.stream(METHOD)
        except HeadraceError as error:
            return error
        sending = asyncio.create_task(self._send(call), name="headrace publishing sender")
        try:
            await self._receive(call)
            if self._closed:
                await asyncio.wait([sending], timeout=HANG_UP_S)  # the end of the sending side may still be in transit
        except HeadraceError as error:
            return error
        finally:
            self._call = None
            sending.cancel()
            call.cancel()
            await asyncio.wait([sending])
            await call.ended()
        if not sending.cancelled() and (bug := sending.exception()):
            raise bug
        return Unavailable(f"the silo at {self._connection.address} ended the call")

    async def _send(self, call: StreamCall) -> None:
        """Send the window's requests until closed. Ends if the call fails; the receiver raises the failure."""
        try:
            await self._send_on(call)
        except HeadraceError:
            call.cancel()
        except BaseException:
            call.cancel()
            raise

    async def _send_on(self, call: StreamCall) -> None:
        window, provider, failed_rounds, backoff = self._window, self._provider, 0, reconnect_backoff()
        loop, gather_until = asyncio.get_running_loop(), 0.0
        while True:
            if failed_rounds != window.failed_rounds:
                failed_rounds = window.failed_rounds
                await asyncio.sleep(backoff.after(failed_rounds) if failed_rounds else 0)
            if self._linger_s and not window.in_flight:
                await asyncio.sleep(self._linger_s)
            self._gathering = window.should_gather and loop.time() < gather_until
            if self._gathering:
                await self._until_woken(gather_until)
                continue
            if (request := window.take()) is None:
                if self._closed and window.idle:
                    await call.done_sending()
                    return
                await self._until_woken()
                continue
            await call.send(self._encoded(request, provider))
            provider, gather_until = "", loop.time() + self._gather_s

    async def _receive(self, call: StreamCall) -> None:
        """Process the answers until the silo ends the call."""
        while (message := await call.receive()) is not None:
            response = self._parsed(message)
            if response.HasField("error"):
                self._window.failed(_error(response.error))
            else:
                self._window.stored(receipts_of(response))
                self._trouble = None
            if self._waiters:
                self._admit()
            self._wake()

    def _parsed(self, message: bytes) -> pb.PublishStreamResponse:
        """Decode an answer. Raises HeadraceError if it does not fit the request."""
        try:
            response = pb.PublishStreamResponse.FromString(message)
        except DecodeError:
            raise HeadraceError("the silo's answer is no PublishStreamResponse") from None
        expected = self._window.batches_expected
        if not expected or (len(response.receipts) != expected and not response.HasField("error")):
            raise HeadraceError(f"the silo sent {len(response.receipts)} receipts for {expected} batches")
        return response

    def _encoded(self, request: WindowedRequest, provider: str) -> bytes:
        sequence = pb.ProducerSequence(producer=self._window.producer, number=request.number, previous=request.previous)
        head = pb.PublishStreamRequest(provider=provider, sequence=sequence).SerializeToString()
        return b"".join([head, *[frame for piece in request.pieces for frame in piece.frames]])

    # ---- limits ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit as many waiting callers as there is space for, judged by the mean size of the pieces in the window."""
        window, waiters = self._window, self._waiters
        if window.held.size >= self._max_bytes:
            return
        mean = max(1.0, window.held.size / max(1, window.held.count))
        free = int((self._max_bytes - window.held.size) / mean)
        while waiters and free >= 0:
            free -= 1
            space = waiters.popleft()
            if not space.done():
                space.set_result(None)

    def _live(self) -> Iterator[AwaitedPublication]:
        for one in (*self._window.sent(), *self._window.waiting()):
            if isinstance(one, AwaitedPublication) and not one.over:
                yield one

    def _expire(self) -> None:
        """Fail the publications whose time is up. If one of them was sent, the silo did not answer: end the call."""
        now = asyncio.get_running_loop().time()
        hung = self._fail_expired(self._window.sent(), now, "these events may or may not be stored")
        self._fail_expired(self._window.waiting(), now, "none of these events is stored")
        if hung and self._call is not None:
            self._call.leave()
            self._call.cancel()
        self._wake()
        oldest = next(self._live(), None)
        loop = asyncio.get_running_loop()
        self._timer = None if oldest is None else loop.call_at(oldest.deadline, self._expire)

    def _fail_expired(self, publications: Iterable[Publication], now: float, fate: str) -> bool:
        late = [
            one for one in publications if isinstance(one, AwaitedPublication) and not one.over and one.deadline <= now
        ]
        for one in late:
            one.fail(self._timed_out(fate))
        return bool(late)

    def _timed_out(self, fate: str) -> HeadraceError:
        trouble = self._window.trouble or self._trouble
        if trouble is None or isinstance(trouble, Unavailable):
            why = f"no answer from {self._connection.address}" if trouble is None else str(trouble)
            return Unavailable(f"gave up publishing after {self._timeout_s:g} s, {fate}: {why}")
        text = f"gave up publishing after {self._timeout_s:g} s, {fate}: {trouble}"
        return error_of(trouble.code, text) or Unavailable(text)


def new_producer() -> str:
    return uuid.uuid4().hex


def frame(batch: EventBatch) -> tuple[bytes, ...]:
    """The bytes of one element of a request's field `batches`, in pieces. Raises PayloadTooLarge."""
    encoded = batch.encoded
    size = len(encoded)
    if size <= _SMALL_FRAME:
        return (b"".join((_BATCHES_TAG, varint(size), encoded)),)
    if size > MAX_BATCH_BYTES:
        raise PayloadTooLarge(f"a batch for {batch.stream}", size, MAX_BATCH_BYTES)
    return _BATCHES_TAG + varint(size), encoded


def _pieces(publication: Publication, batches: Sequence[EventBatch], limits: WindowLimits) -> list[PublicationPiece]:
    """Cut a publication into pieces that fit into one request each. Raises PayloadTooLarge."""
    if len(batches) == 1:
        frames = frame(batches[0])
        return [PublicationPiece(publication, frames, 1, sum(map(len, frames)))]
    pieces: list[PublicationPiece] = []
    part: list[bytes] = []
    size = count = 0
    for more in map(frame, batches):
        nbytes = sum(map(len, more))
        if count and (size + nbytes > limits.request_bytes or count >= limits.request_batches):
            pieces.append(PublicationPiece(publication, part, count, size))
            part, size, count = [], 0, 0
        part += more
        size += nbytes
        count += 1
    return [*pieces, PublicationPiece(publication, part, count, size)]


def receipts_of(response: pb.PublishStreamResponse | pb.PublishResponse) -> list[Receipt]:
    return [
        Receipt(SequenceToken(receipt.offset) if receipt.HasField("offset") else None, receipt.duplicate)
        for receipt in response.receipts
    ]


def _error(error: pb.PublishError) -> HeadraceError:
    known = remote_error(error.code, error.message)
    if known is not None:
        return known
    return Unavailable(error.message) if error.retryable else HeadraceError(error.message)
