"""A consumer that pulls, of a silo that is one of several: it has credit only while a call waits.

What is left of the credit is asked back before a call is answered, so all that is on its way is in the answer. What a
call returned and nobody acknowledged is given back when the session timeout has passed since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from ...proto.v1 import consumer_pb2 as pb
from ...streams.errors import HeadraceError, LimitExceeded
from ...streams.frames import split
from ..rpc.guard import Call
from .relay import Relay

log = logging.getLogger("headrace.silo")

PULL_EVENTS, PULL_BYTES = 1000, 1 << 20
SHORTEST_WAIT_S, LOOK_S = 0.005, 0.25
"""A pull waits no shorter; and looks so often whether the silo stops."""
DEADLINE_S = 0.05
"""A pull answers so long before its caller's deadline."""


class RelayPulls:
    """One consumer's, for as long as it pulls. `on_over` is called when it does no more."""

    def __init__(self, opening: AbstractAsyncContextManager[Relay], timeout_s: float) -> None:
        self._opening = opening
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._relay: asyncio.Future[Relay] = self._loop.create_future()
        self._waiting = False
        self._held: dict[tuple[int, int], float] = {}
        """Until when what was returned is the consumer's, by queue and offset."""
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

    async def _wait(self, call: Call, relay: Relay, request: pb.PullRequest) -> Sequence[bytes]:
        wait_s = request.wait_ms / 1000
        ends = self._loop.time() + max(min(wait_s, (call.remaining_s() or wait_s) - DEADLINE_S), SHORTEST_WAIT_S)
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
        frames = list(iter(relay.collect, b""))
        self._note(frames)
        return frames

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

    def _note(self, frames: Sequence[bytes]) -> None:
        until = self._loop.time() + self._timeout_s
        for message in frames:
            for each in split(message)[0]:
                self._held[each.queue, each.batch.offset] = until

    async def _keep(self) -> None:
        """Until the consumer has not been heard for its timeout."""
        try:
            async with self._opening as relay:
                self._relay.set_result(relay)
                while not relay.gone.done():
                    await asyncio.wait([relay.gone], timeout=LOOK_S)
                    self._give_back(relay)
                    if self._waiting:
                        relay.heard()
        except HeadraceError as error:
            log.info("a consumer that pulls begins anew: %s", error)
        finally:
            self.over = True
            self._relay.cancel()
            self.on_over()

    def _give_back(self, relay: Relay) -> None:
        now = self._loop.time()
        late = [position for position, until in self._held.items() if until <= now]
        for position in late:
            del self._held[position]
        relay.release(pb.Acknowledgement(queue=queue, offset=offset) for queue, offset in late)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
