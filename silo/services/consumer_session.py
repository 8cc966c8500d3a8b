"""A consumer's session: one `Subscribe` call, for the queues that this silo has.

The session is a member of the subscription's group while the call is open. One task reads requests and applies them at
once. Another writes, whenever there is something to send. Batches go from cache to wire as they were published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from ...proto.v1 import consumer_pb2 as pb
from ...server.methods import ServiceCall
from ...store.rows import position_token
from ...streams import wire
from ...streams.errors import HeadraceError, Unavailable
from ...streams.frames import QueueState, status_frame
from ...streams.subscriptions import GapRecord
from ..consumer_groups import AttachedConsumer
from . import reports
from .consumer_target import ConsumerTarget

HEARTBEATS = 3
"""Heartbeats in a session timeout."""
MAX_REFUSED = 1000
"""If more refusals wait to be sent, nothing more is read from the consumer."""
MAX_GAPS = 100
"""Gaps that wait to be sent; the oldest are dropped."""
POSITION_BYTES_PER_S = 2 << 20
"""So many bytes of positions are sent in a second, to a client that keeps positions."""
DRAIN_CHECK_S = 0.05
"""How often a session that drains checks whether all events in flight are acknowledged, in seconds."""
STOPS = "the silo stops: connect again, to this one or to another"


class PlacementSource(Protocol):
    """The placement of queues in the cluster."""

    @property
    def silo(self) -> str:
        """The name of this silo."""
        ...

    def watch(
        self, provider: str, queues: Collection[int], on_placement: Callable[[pb.Placement], None]
    ) -> Callable[[], None]:
        """Call `on_placement` at once, and whenever the owners of these queues change, until the returned function is
        called."""
        ...


class ConsumerSession:
    """Converses with one consumer. `placements` is None if the silo is alone."""

    def __init__(
        self,
        call: ServiceCall,
        request: pb.Open,
        target: ConsumerTarget,
        place: AttachedConsumer,
        placements: PlacementSource | None,
    ) -> None:
        self._call = call
        self._target = target
        self._place = place
        self._group, self._member = place
        self._connection = self._member.connections
        self._keeps_positions = request.keeps_positions
        self._placements = placements
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        """Set with the error that ends the call, if the group ends it."""
        self._heartbeat_s = self._member.timeout_s / HEARTBEATS
        self._next_heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)
        self._output_ready = asyncio.Event()
        self._all_written = asyncio.Event()
        self._pending_taken = asyncio.Event()
        self._has_written = False
        """Something was written since the last heartbeat."""
        self._closing = False
        self._progress_due = False
        self._positions_due = False
        self._positions: dict[int, bytes] = {}
        """The positions that the client was told last, by queue."""
        self._positions_at = 0.0
        """Loop time from which on positions and confirmations are sent to the client."""
        self._pending = pb.SubscribeResponse(opened=self._opened())
        """The next response, without its batches and statuses."""
        self._pending.gaps.extend(map(wire.gap_message, target.gaps))
        self._member.on_outbox = self._output_ready.set
        self._member.on_notice = self._notice
        self._member.on_gone = self._end_with
        self._member.on_gap = self._add_gap

    def _opened(self) -> pb.Opened:
        return pb.Opened(
            consumer=self._member.id,
            session_timeout_ms=round(self._member.timeout_s * 1000),
            heartbeat_ms=round(self._heartbeat_s * 1000),
            definition=wire.definition_message(self._target.definition),
            silo="" if self._placements is None else self._placements.silo,
            origin=self._target.provider.origin,
        )

    async def run(self, first: pb.SubscribeRequest) -> None:
        """Converse until either side ends the call. If the consumer has closed in order, its events in flight go to
        others at once. Otherwise they wait until it is back, or its session timeout is over."""
        self._notice()  # the member may have waited for credit before this session was there
        stop_watching = self._watch_placement()
        tasks = [
            self._loop.create_task(work, name=f"headrace session {what}")
            for work, what in ((self._read(first), "reads"), (self._write(), "writes"), (self._drain(), "drains"))
        ]
        try:
            await asyncio.wait({*tasks, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            for each in (self._ended, *tasks):
                if each.done():
                    each.result()
        finally:
            stop_watching()
            self._next_heartbeat.cancel()
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._detach()

    def _watch_placement(self) -> Callable[[], None]:
        if self._placements is None:
            return lambda: None
        provider = self._target.provider
        queues = provider.queues_of(self._target.definition.selector)
        return self._placements.watch(provider.name, queues, self._set_placement)

    @property
    def _is_attached(self) -> bool:
        """Whether the member is still this session's. Otherwise another connection has it, or the group is over."""
        return self._member.connections == self._connection and not self._ended.done()

    def _detach(self) -> None:
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # mark it as retrieved
        if self._member.connections == self._connection:
            self._group.disconnect(self._member)
            # A silo that drains admits no consumer, so it does not wait for one that holds nothing.
            if self._closing or (self._call.closing.is_set() and not self._member.in_flight):
                self._group.leave(self._member)

    def _end_with(self, error: HeadraceError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _read(self, request: pb.SubscribeRequest) -> None:
        await self._apply(request)
        while not self._closing:
            message = await self._call.read()
            if message is None:  # perhaps the connection is lost: the consumer may come back
                return
            self._group.heard(self._member)
            if message:
                await self._apply(reports.following_request(message))
        await self._save_and_write()

    async def _apply(self, request: pb.SubscribeRequest) -> None:
        if request.reports and (refused := await reports.apply(self._place, request.reports)):
            self._pending.refused.extend(refused)
            self._output_ready.set()
        if not self._is_attached:
            return
        if request.HasField("credit"):
            self._group.grant(self._member, request.credit.events, request.credit.bytes)
        if request.reclaim:
            self._return_credit()
        self._closing = request.close
        while len(self._pending.refused) > MAX_REFUSED:
            self._pending_taken.clear()
            await self._pending_taken.wait()

    def _return_credit(self) -> None:
        events, size = self._group.reclaim(self._member)
        returned = self._pending.returned
        returned.events, returned.bytes = returned.events + events, returned.bytes + size
        returned.SetInParent()
        self._progress_due = True
        self._output_ready.set()

    # ---- responses -------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            await self._output_ready.wait()
            self._output_ready.clear()
            while self._is_attached and await self._write_next():
                pass
            if not self._output_ready.is_set():
                self._all_written.set()

    async def _write_next(self) -> bool:
        """Write the next response, if there is one. Return whether there may be another one."""
        frames = self._member.collect()
        rest = self._take_pending()  # after the frames: a queue's last confirmation comes no later than its end
        message = b"".join((*frames, rest)) if rest or len(frames) != 1 else frames[0]
        has_frames = bool(frames)
        del frames  # otherwise a second copy of the message stays until the consumer takes it
        if message:
            self._has_written = True
            self._call.check_valid()  # here, too: a consumer that sends nothing may have credit
            await self._call.write(message)
            self._positions_due |= self._keeps_positions and not self._positions
        if not self._is_attached:
            return False
        has_more = has_frames and self._group.sent(self._member)
        return has_more or self._positions_due

    def _take_pending(self) -> bytes:
        """Take the next response, encoded, without its batches and statuses. Empty if there is nothing to send."""
        self._add_saved()
        response, self._pending = self._pending, pb.SubscribeResponse()
        self._pending_taken.set()
        if self._progress_due:
            self._progress_due = False
            response.progress.CopyFrom(self._progress())
        return response.SerializeToString()

    def _add_saved(self) -> None:
        if self._keeps_positions and self._loop.time() < self._positions_at and not self._closing:
            return  # confirmations wait, because they are sent together with positions
        saved = {
            queue: pb.Saved(queue=queue, epoch=each.epoch, number=each.number, unconfirmed=each.unconfirmed)
            for queue, each in self._member.take_confirmed().items()
            if self._can_confirm(queue)
        }
        if self._positions_due or (saved and self._keeps_positions):
            self._positions_due = False
            size = 0
            for queue, checkpoint in self._group.positions().items():
                token, status = position_token(checkpoint), self._group.status(self._member, queue)
                if status is not None and self._positions.get(queue) != token:
                    self._positions[queue] = token
                    size += len(token)
                    each = saved.setdefault(queue, pb.Saved(queue=queue, epoch=status[0]))
                    each.position.CopyFrom(pb.Position(queue=queue, token=token))
            self._positions_at = self._loop.time() + size / POSITION_BYTES_PER_S
        self._pending.saved.extend(saved.values())

    def _can_confirm(self, queue: int) -> bool:
        """Whether a confirmation can have the position that a client needs if it keeps positions. It is not known of a
        queue that this silo gave back: then the client names its acknowledgements to the next owner."""
        return not self._keeps_positions or self._group.status(self._member, queue) is not None

    def _progress(self) -> pb.Progress:
        member = self._member
        return pb.Progress(
            credit_events=member.credit_events,
            credit_bytes=member.credit_bytes,
            in_flight_events=member.in_flight_events,
            in_flight_bytes=member.in_flight_bytes,
            caught_up=self._group.caught_up,
            needed_bytes=member.needed_bytes,
            needed_events=member.needed_events,
            waiting=member.waiting,
            wanted_events=member.wanted_events,
            wanted_bytes=member.wanted_bytes,
        )

    def _notice(self) -> None:
        if self._member.needed_bytes or self._member.waiting:
            self._progress_due = True
        self._output_ready.set()

    def _add_gap(self, record: GapRecord) -> None:
        self._pending.gaps.append(wire.gap_message(record))
        del self._pending.gaps[:-MAX_GAPS]
        self._output_ready.set()

    def _set_placement(self, placement: pb.Placement) -> None:
        self._pending.placement.CopyFrom(placement)
        self._output_ready.set()

    def _beat(self) -> None:
        """Send the progress if nothing else was sent."""
        if not self._has_written:
            self._progress_due = True
            self._output_ready.set()
        self._has_written = False
        self._next_heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """When the silo stops, hand nothing more out, and wait until all events in flight are acknowledged."""
        await self._call.closing.wait()
        self._member.connected = False
        self._pending.closing.reason = STOPS
        for queue in self._group.deliveries:
            if (status := self._group.status(self._member, queue)) is not None:
                epoch, generation, assigned = status
                frame = status_frame(queue, QueueState.DRAINING, epoch, generation, assigned=assigned)
                self._member.put_status(queue, QueueState.DRAINING, frame)
        self._output_ready.set()
        while self._member.in_flight:  # noqa: ASYNC110 (once in a session's life)
            await asyncio.sleep(DRAIN_CHECK_S)
        await self._save_and_write()
        raise Unavailable(STOPS)

    async def _save_and_write(self) -> None:
        """Save the acknowledgements, and send the last confirmations."""
        self._member.connected = False
        await self._target.consumers.save()
        if not self._is_attached:
            return
        self._add_saved()
        if self._closing:
            self._group.leave(self._member)
        self._all_written.clear()
        self._output_ready.set()
        with suppress(TimeoutError):  # a consumer that does not read learns less
            async with asyncio.timeout(self._member.timeout_s):
                await self._all_written.wait()
