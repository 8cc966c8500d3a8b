"""A consumer that pulls, of a silo that is one of several: it has credit only while a call waits.

What is left of the credit is asked back before a call is answered, so all that is on its way is in the answer. What a
call returned and nobody acknowledged is taken back by the silos when the session timeout has passed since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from ...proto.v1 import consumer_pb2 as pb
from ...server.guard import Call
from ...streams.errors import HeadraceError, LimitExceeded
from .relay import Relay

log = logging.getLogger("headrace.silo")

PULL_EVENTS, PULL_BYTES = 1000, 1 << 20
SHORTEST_WAIT_S, LOOK_S = 0.005, 0.25
"""A pull waits no shorter, for what is cached is handed out in turns; and looks so often whether the silo stops."""
NO_LIMIT = 1 << 62
"""What waits to be collected is bounded by the credit of one call."""
ANSWER_SHARE, ANSWER_S = 0.25, 1.0
"""A pull keeps a quarter of its caller's deadline for the answer's way back, at most a second."""


def pull_wait_s(wait_s: float, remaining_s: float | None) -> float:
    """How long a pull waits for events if its caller asks for `wait_s` and its deadline is in `remaining_s`."""
    if remaining_s is not None:
        wait_s = min(wait_s, remaining_s - min(remaining_s * ANSWER_SHARE, ANSWER_S))
    return max(wait_s, SHORTEST_WAIT_S)


class RelayPulls:
    """One consumer's, for as long as it pulls. `on_over` is called when it does no more."""

    def __init__(self, opening: AbstractAsyncContextManager[Relay], timeout_s: float) -> None:
        self._opening = opening
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._relay: asyncio.Future[Relay] = self._loop.create_future()
        self._waiting = False
        self.over = False
        self.on_over: Callable[[], object] = lambda: None
        self._task = self._loop.create_task(self._keep(), name="headrace pulls")

    async def pull(self, call: Call, request: pb.PullRequest) -> bytes:
        """The answer, which is empty where nothing came. Raises LimitExceeded where another call waits."""
        if self._waiting:
            raise LimitExceeded(f"consumer {request.consumer!r} waits in another call already: wait for that one first")
        self._waiting = True
        try:
            relay = await asyncio.shield(self._relay)
            relay.heard()
            marks = pb.SubscribeRequest(acknowledgements=request.acknowledgements, rejections=request.rejections)
            await relay.apply(marks)
            frames = await self._wait(call, relay, request)
        finally:
            self._waiting = False
        notices = pb.PullResponse(refused=relay.refused, gaps=relay.gaps)
        relay.refused.clear()
        relay.gaps.clear()
        return b"".join((*frames, notices.SerializeToString()))

    async def leave(self, request: pb.PullRequest) -> bytes:
        """End in order: the silos save the acknowledgements, and the other events go to other consumers."""
        relay = await asyncio.shield(self._relay)
        await relay.apply(pb.SubscribeRequest(acknowledgements=request.acknowledgements, rejections=request.rejections))
        try:
            await relay.close()
        finally:
            self._task.cancel()
        return pb.PullResponse(refused=relay.refused, gaps=relay.gaps).SerializeToString()

    async def _wait(self, call: Call, relay: Relay, request: pb.PullRequest) -> Sequence[bytes]:
        ends = self._loop.time() + pull_wait_s(request.wait_ms / 1000, call.remaining_s())
        relay.grant(request.max_events or PULL_EVENTS, request.max_bytes or PULL_BYTES)
        try:
            while not relay.full and not call.closing.is_set() and (left := ends - self._loop.time()) > 0:
                relay.heard()
                call.check_valid()
                await self._something(relay, min(left, LOOK_S))
                if relay.needed_bytes:
                    relay.grant(0, relay.needed_bytes)
        finally:
            await relay.take_back()
        return list(iter(relay.collect, b""))

    @staticmethod
    async def _something(relay: Relay, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await relay.something.wait()
        except TimeoutError:
            return
        relay.something.clear()
        if relay.gone.done():
            relay.gone.result()

    async def _keep(self) -> None:
        """Until the consumer has not been heard for its timeout."""
        try:
            async with self._opening as relay:
                relay.outbox_limit = NO_LIMIT
                self._relay.set_result(relay)
                while not relay.gone.done():
                    await asyncio.wait([relay.gone], timeout=LOOK_S)
                    if self._waiting:
                        relay.heard()
                relay.gone.result()
        except HeadraceError as error:
            if not self._relay.done():
                self._relay.set_exception(error)
            log.info("a consumer that pulls begins anew: %s", error)
        finally:
            self.over = True
            if not self._relay.cancel() and not self._relay.cancelled():
                self._relay.exception()  # else asyncio says that nobody asked
            self.on_over()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
