"""One silo's part in what a consumer of another silo is delivered: a `Subscribe` call on the consumer's behalf."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ...client.transport import StreamCall
from ...proto.v1 import consumer_pb2 as pb
from ...streams.errors import InvalidArgument
from ...streams.frames import Delivered, split

METHOD = "ConsumerService/Subscribe"
MERGED, REJECTED = 20_000, 400
"""Acknowledgements and rejections that are put into one request where several wait to be sent."""

WAITING = 4
"""With more requests that the silo did not take yet, the consumer is not listened to."""

Listener = Callable[["Link", bytes, Sequence[Delivered]], None]
Told = Callable[["Link", pb.SubscribeResponse], None]


class Link:
    """`on_batches` gets the frames of a response, encoded and as what they say; `on_told` everything else. Whoever
    makes it runs it."""

    def __init__(self, silo: str, incarnation: int, call: StreamCall, on_batches: Listener, on_told: Told) -> None:
        self.silo = silo
        self.incarnation = incarnation
        self.opened = False
        self.closed = False
        """It is said that it is to end."""
        self.delivered_since = 0
        """Events, since it said how things are."""
        self.answering = False
        """It is asked how things are."""
        self.progress: pb.Progress | None = None
        """As the silo said last."""
        self.queues: frozenset[int] = frozenset()
        """Mode bound: those that are the consumer's, of this silo's."""
        self.room = asyncio.Event()
        """Cleared while the consumer does not take what is there already."""
        self.room.set()
        self.heard_at = asyncio.get_running_loop().time()
        self.said_at = self.heard_at
        self.abandoned = False
        self.empty = asyncio.Event()
        """Cleared while the silo does not take what the consumer says."""
        self.empty.set()
        self._touched = False
        self._settled = False
        self._unsaved: deque[int] = deque()
        self._call = call
        self._on_batches = on_batches
        self._on_told = on_told
        self._requests: deque[pb.SubscribeRequest] = deque()
        self._something = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def owing(self) -> bool:
        """Something that came by it may be in the consumer's hands, or acknowledged and not saved."""
        return bool(self._unsaved) or (self._touched and not self._settled)

    def saved_before(self, number: int) -> int:
        """Up to which of the consumer's numbers everything sent here is saved, where `number` is the last there is."""
        return self._unsaved[0] - 1 if self._unsaved else number

    # ---- what the consumer says ------------------------------------------------------------------------------------

    def next_request(self) -> pb.SubscribeRequest:
        """To be filled at once: it is sent at the loop's next turn, or when the silo takes it."""
        waiting = self._requests[-1] if self._requests else None
        if waiting is None or len(waiting.acknowledgements) > MERGED or len(waiting.rejections) > REJECTED:
            return self._another_request()
        self._something.set()
        return waiting

    def _another_request(self) -> pb.SubscribeRequest:
        request = pb.SubscribeRequest()
        self._requests.append(request)
        self._something.set()
        if len(self._requests) > WAITING:
            self.empty.clear()
        return request

    def mark(self, mark: pb.Acknowledgement | pb.Rejection) -> None:
        """Events are done, or failed."""
        request = self.next_request()
        if isinstance(mark, pb.Rejection):
            request.rejections.append(mark)
            return
        if request.rejections:  # they were before it
            request = self._another_request()
        request.acknowledgements.append(mark)

    def number(self, request: pb.SubscribeRequest, number: int) -> None:
        """The request has acknowledgements of the consumer's request with this number."""
        if number:
            request.number = number
            self._unsaved.append(number)

    def beat(self) -> None:
        """The consumer is there."""
        if not self._requests:
            self.next_request()

    def close(self) -> None:
        """Let the silo save, and end it in order."""
        self.closed = True
        self._something.set()

    # ---- the call --------------------------------------------------------------------------------------------------

    async def run(self, opening: pb.Open) -> None:
        """Converse until the silo ends it in order. Raises the HeadraceError that ended it otherwise."""
        sending = self._loop.create_task(self._send(opening), name=f"headrace link to {self.silo} sends")
        try:
            await self._receive()
        finally:
            self._call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def abandon(self) -> None:
        """Nothing is heard of the silo, or it is not there any more. Idempotent."""
        self.abandoned = True
        self._call.cancel()
        self.room.set()

    async def _send(self, opening: pb.Open) -> None:
        first = self._requests.popleft() if self._requests else pb.SubscribeRequest()
        first.open.CopyFrom(opening)
        await self._say(first)
        while True:
            while self._requests:
                await self._say(self._requests.popleft())
            self.empty.set()
            if self.closed:
                await self._say(pb.SubscribeRequest(close=True))
                await self._call.done_sending()
                return
            self._something.clear()
            await self._something.wait()

    async def _say(self, request: pb.SubscribeRequest) -> None:
        self.said_at = self._loop.time()
        await self._call.send(request.SerializeToString())

    async def _receive(self) -> None:
        while (message := await self._call.receive()) is not None:
            self.heard_at = self._loop.time()
            delivered, rest = split(message)
            if delivered:  # what is said with them counts them
                self._touched, self._settled = True, False
                self._on_batches(self, message if not rest else _only_batches(message, rest), delivered)
            if rest:
                self._hear(pb.SubscribeResponse.FromString(rest))
            await self.room.wait()

    def _hear(self, response: pb.SubscribeResponse) -> None:
        while self._unsaved and self._unsaved[0] <= response.saved:
            self._unsaved.popleft()
        if response.HasField("progress"):
            self.progress = response.progress
            self.delivered_since = 0
        if response.closing.settled:
            self._settled = True
        self._on_told(self, response)


def _only_batches(message: bytes, rest: bytes) -> bytes:
    """A silo writes what is not batches last."""
    if not message.endswith(rest):
        raise InvalidArgument("damaged message: batches behind other fields")
    return message[: len(message) - len(rest)]
