"""One `Subscribe` call, from its beginning to its end, as a client and a gateway make it.

Requests wait for the next turn of the loop, so everything that the user acknowledges in one turn is one request. Both
sides send something now and then. A silo that is silent is given up, because its connection may be dead. Silence is
counted in timers that ran, so a loop that stood still does not accuse the silo.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ..proto.v1 import consumer_pb2 as pb
from ..streams.errors import HeadraceError
from ..streams.frames import BATCH_TAG, BATCHES, DeliveredBatch, element_frame, elements, split
from .management import parsed
from .transport import StreamCall

log = logging.getLogger("headrace.client")

METHOD = "ConsumerService/Subscribe"
LAST_S = 1.0
"""How long the end of a call waits for the request that is being sent, in seconds."""
OPEN_S = 15.0
"""Time that the silo has for its first response, in seconds."""
BEATS = 2
"""Requests that the client sends in each heartbeat interval of the silo, if there is nothing else to send."""
SILENT_BEATS = 7
"""The silo sends something at least every four beats. After so many beats without a response the call is given up."""


class SubscribeCallUser(Protocol):
    """The consumer of a call: it makes the requests, and takes the responses."""

    def next_request(self) -> pb.SubscribeRequest | None:
        """Return the next request; None if there is nothing to send."""
        ...

    def receive(
        self, response: pb.SubscribeResponse | None, delivered: Sequence[DeliveredBatch], frames: bytes
    ) -> None:
        """Take one response: everything but batches (None if there is nothing else), the batches, and these encoded."""


class SubscribeCall:
    """One call. `space` is cleared while the user does not want to receive."""

    def __init__(self, call: StreamCall, user: SubscribeCallUser, space: asyncio.Event) -> None:
        self._call = call
        self._user = user
        self._space = space
        self._loop = asyncio.get_running_loop()
        self._output_ready = asyncio.Event()
        self._closing = False
        self._beat_s = 0.0
        self._silent_beats = 0
        self._has_sent = False
        """Whether something was sent since the last beat."""
        self._heartbeat_due = False
        self._silent = False
        self._bug: BaseException | None = None
        """A bug of the user ended the sending."""
        self._timer = self._loop.call_later(OPEN_S, self._give_up)

    def wake(self) -> None:
        """The user has something to send."""
        self._output_ready.set()

    def close(self) -> None:
        """Send everything, and end in order: `run` returns when the silo has saved it. Idempotent."""
        self._closing = True
        self._output_ready.set()

    def leave(self) -> None:
        """The silo is going to end the call: the next one goes to another silo, if possible."""
        self._call.leave()

    async def run(self, first: pb.SubscribeRequest) -> None:
        """Converse until the silo ends the call in order. Raise the HeadraceError that ended it otherwise."""
        sending = self._loop.create_task(self._send(first), name="headrace consumer sends")
        sending.add_done_callback(self._end_sending)
        try:
            await self._receive()
            if self._closing:
                await asyncio.wait([sending], timeout=LAST_S)  # its last request may be on the way
        finally:
            self._timer.cancel()
            self._call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if self._silent:
                await self._call.abandon()
            if self._bug is not None:
                raise self._bug

    # ---- sending ---------------------------------------------------------------------------------------------------

    async def _send(self, first: pb.SubscribeRequest) -> None:
        """Send until the end. If the call fails, `receive` raises the reason."""
        await self._call.send(first.SerializeToString())
        while not self._closing:
            await self._output_ready.wait()
            self._output_ready.clear()
            await self._send_waiting()
        await self._send_waiting()
        await self._call.send(pb.SubscribeRequest(close=True).SerializeToString())
        await self._call.done_sending()

    def _end_sending(self, sending: asyncio.Task[None]) -> None:
        error = None if sending.cancelled() else sending.exception()
        if error is not None and not isinstance(error, HeadraceError):
            self._bug = error
            self._call.cancel()

    async def _send_waiting(self) -> None:
        while (request := self._user.next_request()) is not None:
            await self._send_message(request.SerializeToString())
        if self._heartbeat_due:
            await self._send_message(b"")

    async def _send_message(self, message: bytes) -> None:
        self._heartbeat_due, self._has_sent = False, True
        await self._call.send(message)

    def _beat(self) -> None:
        self._silent_beats = self._silent_beats + 1 if self._space.is_set() else 0
        if self._silent_beats > SILENT_BEATS:
            self._give_up()
            return
        if not self._has_sent:
            self._heartbeat_due = True
            self._output_ready.set()
        self._has_sent = False
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _give_up(self) -> None:
        log.warning("the silo at %s is silent: the connection is given up", self._call.address)
        self._silent = True
        self._call.cancel()

    # ---- receiving -------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while (message := await self._call.receive()) is not None:
            self._silent_beats = 0
            delivered, rest = split(message)
            response = parsed(pb.SubscribeResponse, rest) if rest else None
            if response is not None and response.HasField("opened"):
                self._timer.cancel()
                self._beat_s = max(response.opened.heartbeat_ms, 1) / 1000 / BEATS
                self._timer = self._loop.call_later(self._beat_s, self._beat)
            self._user.receive(response, delivered, _frames(message, rest))
            await self._space.wait()


def _frames(message: bytes, rest: bytes) -> bytes:
    """The encoded batches of a message. A silo writes statuses before them, and other fields after them."""
    if not rest:
        return message
    if message.startswith(rest):
        return message[len(rest) :]
    if message.startswith(BATCH_TAG) and message.endswith(rest):
        return message[: len(message) - len(rest)]
    return b"".join(map(element_frame, elements(message, BATCHES)[0]))
