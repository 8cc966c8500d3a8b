"""Publishing over one pipelined call: what concurrent callers publish travels together, and is stored once, in order.

What is sent, and sent again, is decided by `window`; here it is carried out: a sender and a receiver per connection,
a new connection after a pause when one is lost, and a limit to how long a caller waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from ...proto.v1 import publisher_pb2 as pb
from ..errors import Closed, HeadraceError, PayloadTooLarge, Unavailable, error_of
from ..events import EventBatch
from ..identity import SequenceToken, varint
from ..publishing import MAX_BATCH_BYTES, Receipt
from .connection import Connection, StreamCall, remote_error
from .window import Piece, Publication, Request, Window, WindowLimits

METHOD = "PublisherService/PublishStream"
MAX_BYTES = 32 << 20
"""Encoded bytes that are held; who wants to publish more waits."""
HANG_UP_S = 1.0
"""How long closing waits for the silo to end the call, in seconds."""

_BATCHES_TAG = b"\x1a"
_COPIED = 4096
"""Up to this size a frame is put together at once; beyond, joining the request copies it only once."""


class Waiting(Publication):
    """A publication whose caller waits for it until `deadline`, in the loop's time."""

    __slots__ = ("deadline", "done")

    def __init__(self, done: asyncio.Future[None], deadline: float) -> None:
        super().__init__()
        self.done = done
        self.deadline = deadline

    def settled(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Publishing:
    """The publishing half of a client. Belongs to an event loop; its task begins with the first publication."""

    def __init__(self, connection: Connection, provider: str, *, timeout_s: float, linger_s: float = 0.0) -> None:
        """A caller waits `timeout_s` at the most. `linger_s`: how long a request waits for company while none is under
        way; 0 takes along what is published in the same turn of the loop."""
        self._connection = connection
        self._provider = provider
        self._timeout_s = timeout_s
        self._linger_s = linger_s
        self._window = Window(_new_producer)
        self._task: asyncio.Task[None] | None = None
        self._call: StreamCall | None = None
        self._trouble: HeadraceError | None = None
        self._idle: asyncio.Future[None] | None = None
        self._rooms: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def crowded(self) -> bool:
        """So much is held that whoever wants to publish waits for `room`."""
        return self._window.size >= MAX_BYTES or bool(self._rooms)

    async def room(self) -> float:
        """Return when more may be published, first come first served: with the deadline, in the loop's time, of whoever
        came now. Raises Unavailable after it."""
        self._check_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        room: asyncio.Future[None] = loop.create_future()
        self._rooms.append(room)
        try:
            async with asyncio.timeout_at(deadline):
                await room
        except BaseException as error:
            with suppress(ValueError):
                self._rooms.remove(room)
            self._make_room()  # it may have been let in already, in the place of another
            if isinstance(error, TimeoutError):
                raise self._timed_out("nothing of it is stored") from None
            raise
        return deadline

    async def publish(self, batches: Sequence[EventBatch], deadline: float | None = None) -> list[Receipt]:
        """Store batches, in order. One receipt for each.

        Raises what the silo refuses them with, and Unavailable after the deadline (the time limit from now on): then
        they may be stored, or not. A caller that is cancelled takes back what was not sent yet.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        publication = Waiting(loop.create_future(), deadline or loop.time() + self._timeout_s)
        for piece in _pieces(publication, batches, self._window.limits):
            self._window.add(piece)
        if self._timer is None:
            self._timer = loop.call_at(publication.deadline, self._expire)
        self._wake()
        try:
            await publication.done
        except asyncio.CancelledError:
            publication.over = True
            raise
        if publication.error is not None:
            raise _copied(publication.error)
        return publication.receipts

    async def flush(self) -> None:
        """Return when everything that was published before is stored or has failed."""
        if self._rooms:
            await asyncio.wait(list(self._rooms))
            await asyncio.sleep(0)
        if waiting := [one.done for one in self._live()]:
            await asyncio.wait(waiting)

    async def aclose(self) -> None:
        """Flush, and end. Idempotent; what is published afterwards raises Closed."""
        self._closed = True
        try:
            await self.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._task is not None:
                await self._hang_up(self._task)
            self._window.disconnected()
            self._window.fail_all(Closed("the client is closed; these events may or may not be stored"))

    async def _hang_up(self, task: asyncio.Task[None]) -> None:
        """End in order, so that grpc has nothing left to tell a loop that is gone; where that takes long, by force."""
        try:
            if self._call is not None and self._window.idle:
                self._wake()
                await asyncio.wait([task], timeout=HANG_UP_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")
        self._connection.check_open()

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """There may be something to send."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="headrace publishing")
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _until_woken(self) -> None:
        self._idle = asyncio.get_running_loop().create_future()
        try:
            await self._idle
        finally:
            self._idle = None

    async def _run(self) -> None:
        failures = 0
        try:
            while True:
                while self._window.idle:
                    if self._closed:
                        return
                    await self._until_woken()
                failure = await self._converse()
                failures = 1 if self._trouble is None else failures + 1
                self._trouble = failure
                self._window.disconnected()
                if not failure.retryable:
                    self._give_up(failure)
                if not self._window.idle:
                    await asyncio.sleep(self._connection.pause_s(failures))
        except Exception as error:
            self._window.disconnected()
            self._give_up(HeadraceError(f"the client failed, which is a bug: {error!r}"))
            raise

    def _give_up(self, failure: HeadraceError) -> None:
        self._window.fail_all(failure)
        self._make_room()

    async def _converse(self) -> HeadraceError:
        """Publish over one call, until it fails."""
        try:
            self._call = call = self._connection.stream(METHOD)
        except HeadraceError as error:
            return error
        sending = asyncio.create_task(self._send(call), name="headrace publishing sender")
        try:
            await self._receive(call)
            if self._closed:
                await asyncio.wait([sending], timeout=HANG_UP_S)  # its last word may still be on the way
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
        """Send what the window says, until closed. Ends when the call has failed, of which the receiver tells."""
        try:
            await self._send_on(call)
        except HeadraceError:
            call.cancel()
        except BaseException:
            call.cancel()
            raise

    async def _send_on(self, call: StreamCall) -> None:
        window, provider, setbacks = self._window, self._provider, 0
        while True:
            if setbacks != window.setbacks:
                setbacks = window.setbacks
                await asyncio.sleep(self._connection.pause_s(setbacks) if setbacks else 0)
            if self._linger_s and not window.asked:
                await asyncio.sleep(self._linger_s)
            if (request := window.take()) is None:
                if self._closed and window.idle:
                    await call.done_sending()
                    return
                await self._until_woken()
                continue
            await call.send(self._encoded(request, provider))
            provider = ""

    async def _receive(self, call: StreamCall) -> None:
        """Take the answers, until the silo ends the call."""
        while (message := await call.receive()) is not None:
            response = self._parsed(message)
            if response.HasField("error"):
                self._window.failed(_error(response.error))
            else:
                self._window.stored(receipts_of(response))
                self._trouble = None
            if self._rooms:
                self._make_room()
            self._wake()

    def _parsed(self, message: bytes) -> pb.PublishStreamResponse:
        """An answer that fits what was asked. Raises HeadraceError."""
        try:
            response = pb.PublishStreamResponse.FromString(message)
        except DecodeError:
            raise HeadraceError("the silo answered with what is no PublishStreamResponse") from None
        expected = self._window.batches_expected
        if not expected or (len(response.receipts) != expected and not response.HasField("error")):
            raise HeadraceError(f"the silo answered {expected} batches with {len(response.receipts)} receipts")
        return response

    def _encoded(self, request: Request, provider: str) -> bytes:
        sequence = pb.ProducerSequence(producer=self._window.producer, number=request.number, previous=request.previous)
        head = pb.PublishStreamRequest(provider=provider, sequence=sequence).SerializeToString()
        return b"".join([head, *[frame for piece in request.pieces for frame in piece.frames]])

    # ---- limits ------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Let in as many as there is room for, going by those that were let in before."""
        window, rooms = self._window, self._rooms
        if window.size >= MAX_BYTES:
            return
        mean = max(1.0, window.size / max(1, window.pieces))
        free = int((MAX_BYTES - window.size) / mean)
        while rooms and free >= 0:
            free -= 1
            room = rooms.popleft()
            if not room.done():
                room.set_result(None)

    def _live(self) -> Iterator[Waiting]:
        for one in (*self._window.sent(), *self._window.waiting()):
            if isinstance(one, Waiting) and not one.over:
                yield one

    def _expire(self) -> None:
        """Tell those whose time is up. A silo that did not answer for so long is hung up on."""
        now = asyncio.get_running_loop().time()
        hung = self._expired(self._window.sent(), now, "these events may or may not be stored")
        self._expired(self._window.waiting(), now, "nothing of it is stored")
        if hung and self._call is not None:
            self._call.leave()
            self._call.cancel()
        self._wake()
        oldest = next(self._live(), None)
        loop = asyncio.get_running_loop()
        self._timer = None if oldest is None else loop.call_at(oldest.deadline, self._expire)

    def _expired(self, publications: Iterable[Publication], now: float, fate: str) -> bool:
        late = [one for one in publications if isinstance(one, Waiting) and not one.over and one.deadline <= now]
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


def _copied(error: HeadraceError) -> HeadraceError:
    """Of an error that several callers get, each raises one of its own."""
    return error_of(error.code, str(error)) or error


def _new_producer() -> str:
    return uuid.uuid4().hex


def frame(batch: EventBatch) -> tuple[bytes, ...]:
    """The pieces of an element of the field `batches` of a request. Raises PayloadTooLarge."""
    encoded = batch.encoded
    size = len(encoded)
    if size <= _COPIED:
        return (b"".join((_BATCHES_TAG, varint(size), encoded)),)
    if size > MAX_BATCH_BYTES:
        raise PayloadTooLarge(f"a batch for {batch.stream}", size, MAX_BATCH_BYTES)
    return _BATCHES_TAG + varint(size), encoded


def _pieces(publication: Publication, batches: Sequence[EventBatch], limits: WindowLimits) -> list[Piece]:
    """Cut a publication to what fits into a request each. Raises PayloadTooLarge."""
    if len(batches) == 1:
        frames = frame(batches[0])
        return [Piece(publication, frames, 1, sum(map(len, frames)))]
    pieces: list[Piece] = []
    part: list[bytes] = []
    size = count = 0
    for more in map(frame, batches):
        nbytes = sum(map(len, more))
        if count and (size + nbytes > limits.request_bytes or count >= limits.request_batches):
            pieces.append(Piece(publication, part, count, size))
            part, size, count = [], 0, 0
        part += more
        size += nbytes
        count += 1
    return [*pieces, Piece(publication, part, count, size)]


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
