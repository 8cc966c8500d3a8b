"""One `Subscribe` call of a consumer, from its beginning to its end.

Whatever is to be sent waits for the next turn of the loop, so everything that the user acknowledges in one turn is one
request. Both sides say something now and then. A silo of which nothing is heard is given up: its connection may be dead
without anybody having been told. That is counted in timers that ran, so a loop which stood still accuses nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..proto.v1 import consumer_pb2 as pb
from ..streams.frames import split
from .management import parsed
from .session import Request, Session
from .transport import StreamCall

log = logging.getLogger("headrace.client")

METHOD = "ConsumerService/Subscribe"
LAST_S = 1.0
"""How long the end of a call waits for what is being sent, in seconds."""
OPEN_S = 15.0
"""How long the silo may take for its first response, in seconds."""
BEATS = 2
"""How often in the time in which it has to say something the client does."""
SILENT_BEATS = 7
"""After so many without a word from the silo, which has to say something in at most four, its call is given up."""


class Conversation:
    """`on_response` is told of everything but batches, and `on_batches` that there are some in the session."""

    def __init__(
        self,
        call: StreamCall,
        session: Session,
        *,
        on_response: Callable[[pb.SubscribeResponse], None],
        on_batches: Callable[[], None],
    ) -> None:
        self._call = call
        self._session = session
        self._on_response = on_response
        self._on_batches = on_batches
        self._loop = asyncio.get_running_loop()
        self._something = asyncio.Event()
        self._closing = False
        self._beat_s = 0.0
        self._silent = 0
        self._said = False
        """Since the last beat."""
        self._due = False
        """To be said, if only that it is there."""
        self._dead = False
        self._timer = self._loop.call_later(OPEN_S, self._give_up)

    def wake(self) -> None:
        """The session has something to send."""
        self._something.set()

    def close(self) -> None:
        """Send what there is, and end in order: `run` returns once the silo has saved it."""
        self._closing = True
        self._something.set()

    def leave(self) -> None:
        """The silo is going to end it: the next one goes elsewhere, where that is possible."""
        self._call.leave()

    async def run(self, opening: pb.Open, request: Request) -> None:
        """Converse until the silo ends it in order. Raises the HeadraceError that ended it otherwise."""
        sending = self._loop.create_task(self._send(opening, request), name="headrace consumer sends")
        try:
            await self._receive()
            if self._closing:
                await asyncio.wait([sending], timeout=LAST_S)  # its last word may still be on the way
        finally:
            self._timer.cancel()
            self._call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if self._dead:
                await self._call.abandon()

    # ---- what the consumer says ------------------------------------------------------------------------------------

    async def _send(self, opening: pb.Open, first: Request) -> None:
        """Until there is nothing more to say, or the call is over: why is told to whoever receives."""
        await self._call.send(encoded(first, opening))
        while not self._closing:
            await self._something.wait()
            self._something.clear()
            await self._send_what_there_is()
        await self._send_what_there_is()
        await self._call.send(pb.SubscribeRequest(close=True).SerializeToString())
        await self._call.done_sending()

    async def _send_what_there_is(self) -> None:
        while (request := self._session.request()) is not None:
            await self._say(encoded(request))
        if self._due:
            await self._say(b"")

    async def _say(self, message: bytes) -> None:
        self._due, self._said = False, True
        await self._call.send(message)

    def _beat(self) -> None:
        self._silent += 1
        if self._silent > SILENT_BEATS:
            self._give_up()
            return
        if not self._said:
            self._due = True
            self._something.set()
        self._said = False
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _give_up(self) -> None:
        log.warning("nothing is heard of the silo at %s: the connection is given up", self._call.address)
        self._dead = True
        self._call.cancel()

    # ---- what the silo says ----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while (message := await self._call.receive()) is not None:
            self._silent = 0
            delivered, rest = split(message)
            if rest:
                self._hear(parsed(pb.SubscribeResponse, rest))
            if delivered:
                self._session.receive(delivered, len(message) - len(rest))
                self._on_batches()

    def _hear(self, response: pb.SubscribeResponse) -> None:
        session = self._session
        if response.HasField("opened"):
            self._timer.cancel()
            self._beat_s = max(response.opened.heartbeat_ms, 1) / 1000 / BEATS
            self._timer = self._loop.call_later(self._beat_s, self._beat)
            session.opened(resumed=response.opened.resumed, moves=response.opened.moves)
        if response.moves:
            session.moved(response.moves)
        if response.refused:
            session.refused((one.queue, one.offset) for one in response.refused)
        if response.saved:
            session.saved(response.saved)
        if response.HasField("progress"):
            session.progressed(response.progress.needed_bytes, caught_up=response.progress.caught_up)
        self._on_response(response)


def encoded(request: Request, opening: pb.Open | None = None) -> bytes:
    """A request as it is sent."""
    message = message_of(request)
    if opening is not None:
        message.open.CopyFrom(opening)
    return message.SerializeToString()


def message_of(request: Request) -> pb.SubscribeRequest:
    message = pb.SubscribeRequest(number=request.number, moves_heard=request.moves_heard)
    if request.credit_events or request.credit_bytes:
        message.credit.events, message.credit.bytes = request.credit_events, request.credit_bytes
    acknowledge, reject = message.acknowledgements.add, message.rejections.add
    for queue, offset, first, length, up_to in request.acknowledgements:
        if first or up_to:
            acknowledge(queue=queue, offset=offset, index=first, count=length, up_to=up_to)
        else:
            acknowledge(queue=queue, offset=offset, count=length)
    for _, queue, offset, first, length, reason, delay_ms, unavailable in request.rejections:
        reject(
            queue=queue, offset=offset, index=first, count=length, reason=reason, delay_ms=delay_ms,
            unavailable=unavailable,
        )  # fmt: skip
    return message
