"""Consumers that pull: a member of the group that has credit only while a call waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ...agents import Parcel
from ...proto.v1 import consumer_pb2 as pb
from ...server.guard import ServiceCall
from ...streams import wire
from ...streams.errors import HeadraceError, LimitExceeded, Unavailable
from ...streams.frames import QueueState, is_status
from ...streams.subscriptions import GapRecord
from ..consumer_groups import AttachedConsumer
from . import reports
from .consumer_session import MAX_GAPS

PULL_EVENTS, PULL_BYTES = 1000, 1 << 20
"""Default limits of the events and bytes that a pull returns."""
MIN_WAIT_S = 0.005
"""A pull waits at least so long, in seconds: cached events are handed out in turns."""
CHECK_S = 0.25
"""How often a pull that waits checks whether the silo stops, or the token was revoked, in seconds."""
ANSWER_SHARE, ANSWER_S = 0.25, 1.0
"""A pull ends before its caller's deadline, so that its answer arrives in time: by a quarter of the time, at most 1 s.
"""


def pull_wait_s(wait_s: float, remaining_s: float | None) -> float:
    """Return how long a pull waits for events. The caller asks for `wait_s`, and its deadline is in `remaining_s`."""
    if remaining_s is not None:
        wait_s = min(wait_s, remaining_s - min(remaining_s * ANSWER_SHARE, ANSWER_S))
    return max(wait_s, MIN_WAIT_S)


def waits_already(consumer: str) -> LimitExceeded:
    return LimitExceeded(f"consumer {consumer!r} waits in another call already: wait for that one first")


class PullingConsumer:
    """A consumer that pulls, until it leaves, is given up, or a session takes it over. Then `on_end` is called.

    Events that a call returned are delivered again if they are not acknowledged within the session timeout.
    """

    def __init__(self, place: AttachedConsumer, on_end: Callable[[], object]) -> None:
        self._place = place
        self._group, self._member = place
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._error: HeadraceError | None = None
        """The reason of its end."""
        self._gaps: deque[GapRecord] = deque(maxlen=MAX_GAPS)
        self._output_ready = asyncio.Event()
        self._member.connected = self._member.attached = False
        self._member.pulls = True
        self._member.on_gone = self._end
        self._member.on_gap = self._gaps.append

    def _end(self, error: HeadraceError) -> None:
        self._error = error
        self._on_end()
        self._output_ready.set()

    def leave(self) -> None:
        """Give its events to other consumers."""
        self._end(Unavailable("the consumer left: pull again to come back"))
        self._group.leave(self._member)

    async def apply(self, queue_reports: Sequence[pb.QueueReport]) -> list[pb.Refusal]:
        """Apply reports. Return the refusals. Raises InvalidArgument."""
        self._group.heard(self._member)
        return await reports.apply(self._place, queue_reports)

    async def pull(self, call: ServiceCall, request: pb.PullRequest, timeout_s: float) -> bytes:
        """Apply the reports of a request, and return the encoded answer: the events that are there, at once or after a
        wait. Raises LimitExceeded if another call waits; the reason of its end."""
        self._member.timeout_s = timeout_s
        answer = pb.PullResponse(refused=await self.apply(request.reports))
        self._check_attached()
        if self._is_waiting:
            raise waits_already(self._member.id)
        self._is_waiting = True
        try:
            frames = await self._take_events(call, request, answer)
        finally:
            self._is_waiting = False
        answer.gaps.extend(map(wire.gap_message, self._gaps))
        self._gaps.clear()
        return b"".join((*frames, answer.SerializeToString()))

    async def _take_events(
        self, call: ServiceCall, request: pb.PullRequest, answer: pb.PullResponse
    ) -> Sequence[bytes]:
        """Return the frames of batches, and put the statuses of their queues into the answer."""
        member = self._member
        before = set[Parcel]() if member.resending else set(member.in_flight.values())
        frames: Sequence[bytes] = ()
        try:
            self._open(request)
            await self._wait(call, request.wait_ms / 1000)
            frames = [frame for frame in member.collect_all() if not is_status(frame)]
        finally:
            if self._error is None:  # otherwise the member is not this one's any more
                self._close()
                new = [parcel for parcel in member.parcels() if parcel not in before]
                self._loop.call_later(member.timeout_s if frames else 0, self._take_back, new)
        if frames:
            self._add_statuses(answer)
        return frames

    def _open(self, request: pb.PullRequest) -> None:
        member = self._member
        member.connected = True
        member.on_outbox = member.on_notice = self._output_ready.set
        self._output_ready.clear()
        self._group.heard(member)
        self._group.grant(member, request.max_events or PULL_EVENTS, request.max_bytes or PULL_BYTES)

    async def _wait(self, call: ServiceCall, wait_s: float) -> None:
        """Return when there is an event, or the time is over. Meanwhile the consumer counts as heard."""
        member = self._member
        ends = self._loop.time() + pull_wait_s(wait_s, call.remaining_s())
        while not member.outbox and not call.closing.is_set() and (left := ends - self._loop.time()) > 0:
            self._group.heard(member)
            call.check_valid()
            try:
                async with asyncio.timeout(min(left, CHECK_S)):
                    await self._output_ready.wait()
            except TimeoutError:
                continue
            self._output_ready.clear()
            self._check_attached()
            if member.needed_bytes and not member.outbox:
                self._group.grant(member, 0, member.needed_bytes)
        await asyncio.sleep(0)  # other queues may have events as well
        self._check_attached()

    def _check_attached(self) -> None:
        if self._error is not None:
            raise self._error

    def _close(self) -> None:
        member = self._member
        member.connected = False
        member.charge(member.credit_events, member.credit_bytes)
        member.collect_all()  # has frames only if the call was cancelled: then they are taken back
        self._group.sent(member)

    def _add_statuses(self, answer: pb.PullResponse) -> None:
        """Add the status of each queue of which the consumer holds events."""
        member = self._member
        for queue in sorted({key[0] for key in (*member.in_flight, *member.redriven)}):
            if (status := self._group.status(member, queue)) is not None:
                epoch, generation, assigned = status
                answer.queues.add(
                    queue=queue, state=QueueState.SERVED, epoch=epoch, generation=generation, assigned=assigned
                )

    def _take_back(self, parcels: Sequence[Parcel]) -> None:
        if self._error is not None:
            return
        for parcel in parcels:
            if parcel in parcel.delivery.parcels:
                parcel.delivery.parcels.take_back(parcel)
