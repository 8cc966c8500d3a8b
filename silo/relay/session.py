"""A `Subscribe` call of a consumer that is served by all silos, through its relay."""

from __future__ import annotations

import asyncio

from ...proto.v1 import consumer_pb2 as pb
from ...server.guard import Call, parsed
from ...streams.errors import InvalidArgument, Unavailable
from .relay import Relay

SETTLE_S = 0.05
"""How often a consumer that is to go elsewhere is looked at: whether everything in flight is acknowledged."""
STOPS = "the silo stops: connect again, to this one or to another"


class RelaySession:
    """One call, for the length of `run`. `opened` is what it is told first."""

    def __init__(self, call: Call, relay: Relay, opened: pb.Opened, *, bound: bool) -> None:
        self._call = call
        self._relay = relay
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._heartbeat_s = opened.heartbeat_ms / 1000
        self._heart = self._loop.call_later(self._heartbeat_s, self._beat)
        self._wrote = False
        self._closing = False
        self._told = pb.SubscribeResponse(opened=opened)
        self._saved = 0
        self._moves = relay.moves = opened.moves
        self._assignment: frozenset[int] | None = None

    async def run(self, first: pb.SubscribeRequest) -> None:
        """Converse until either side ends it."""
        self._relay.something.set()
        tasks = [
            self._loop.create_task(work, name=f"headrace relay {what}")
            for work, what in ((self._read(first), "reads"), (self._write(), "writes"), (self._settle(), "settles"))
        ]
        try:
            await asyncio.wait({*tasks, self._relay.gone}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._relay.gone, *tasks):
                if ended.done():
                    ended.result()
        finally:
            self._heart.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._closing:
            await self._relay.close()

    # ---- what the consumer says ------------------------------------------------------------------------------------

    async def _read(self, request: pb.SubscribeRequest) -> None:
        await self._apply(request)
        while not request.close:
            message = await self._call.read()
            if message is None:  # also where the connection is lost: only who says so is not waited for
                return
            self._relay.heard()
            if message:
                request = parsed(pb.SubscribeRequest, message)
                if request.HasField("open"):
                    raise InvalidArgument(
                        "only the first request of Subscribe has the field open: leave it out, or call again"
                    )
                await self._apply(request)
        self._closing = True

    async def _apply(self, request: pb.SubscribeRequest) -> None:
        await self._relay.apply(request)
        await self._relay.taken()
        if request.reclaim:
            left = await self._relay.take_back()
            self._told.returned.CopyFrom(pb.Credit(events=left.events, bytes=left.bytes))
            self._relay.something.set()

    # ---- what it is told -------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        relay = self._relay
        while True:
            await relay.something.wait()
            relay.something.clear()
            while True:
                frames, notices = relay.collect(), self._notices()
                if not (frames or notices):
                    break
                self._wrote = True
                self._call.check_valid()
                await self._call.write(frames + notices if notices else frames)

    def _notices(self) -> bytes:
        """Everything but batches that is to be told, encoded; empty where there is nothing."""
        relay = self._relay
        response, self._told = self._told, pb.SubscribeResponse()
        if (saved := relay.saved) > self._saved:
            response.saved = self._saved = saved
        if self._bound and relay.assignment != self._assignment:
            self._assignment = relay.assignment
            response.assignment.queues.extend(sorted(self._assignment))
            response.assignment.SetInParent()
        if relay.moves > self._moves:
            response.moves = self._moves = relay.moves
        response.refused.extend(relay.refused)
        relay.refused.clear()
        response.gaps.extend(relay.gaps)
        relay.gaps.clear()
        for queue, token in relay.positions.items():
            response.positions.add(queue=queue, token=token)
        relay.positions.clear()
        if relay.told_to_progress:
            relay.told_to_progress = False
            response.progress.CopyFrom(relay.progress())
        return response.SerializeToString()

    def _beat(self) -> None:
        """Say how things are where nothing else was said."""
        if not self._wrote:
            self._relay.told_to_progress = True
            self._relay.something.set()
        self._wrote = False
        self._heart = self._loop.call_later(self._heartbeat_s, self._beat)

    async def _settle(self) -> None:
        """This silo stops: tell the consumer, let nothing more come, and wait for what it holds."""
        await self._call.closing.wait()
        self._told.closing.reason = STOPS
        self._relay.something.set()
        while not self._relay.settled:
            self._relay.reclaim()
            await asyncio.sleep(SETTLE_S)
        raise Unavailable(STOPS)
