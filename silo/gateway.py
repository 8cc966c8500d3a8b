"""A gateway: it serves a consumer that opened one session for all silos of the cluster.

The gateway runs the client's code for routes and credit, with direct sessions to the owners of queues. It passes
batches, statuses, reports and confirmations on as they are. It keeps no progress, and reads nothing more from silos
while `OUTBOX_BYTES` wait for the consumer.

This silo checks the permissions of the consumer. The sessions with owners are calls of a silo.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..agents import SendAccount, SendBudget, taken_over
from ..client.routing import ATTACH_S, DRAINING, SERVED, LinkUser, QueueStatus, Router, SessionCalls, SiloLink
from ..client.subscribe_call import METHOD
from ..client.transport import StreamCall
from ..proto.v1 import consumer_pb2 as pb
from ..server.methods import ServiceCall
from ..streams import wire
from ..streams.errors import HeadraceError, StorageError, Unavailable
from ..streams.frames import DeliveredBatch
from .placement import ClusterPlacements, LeaseOwner
from .services.consumer_session import DRAIN_CHECK_S, HEARTBEATS, STOPS
from .services.consumer_target import ConsumerKey, ConsumerTarget, session_open
from .services.pulling import PullingConsumers, check_definition
from .services.reports import check_count, following_request, refuse_all

log = logging.getLogger("headrace.silo")

OUTBOX_BYTES = 1 << 20
"""Nothing more is read from silos while so many bytes wait for the consumer."""
MAX_WAITING = 4
"""Nothing more is read from the consumer while so many of its requests wait for one silo."""
RETURN_S = 1.0
"""Time that silos have to give credit back, in seconds."""
CLOSE_S = 1.0
"""Time that silos have to hear that a silent consumer has left, in seconds."""
ACKNOWLEDGE = "ConsumerService/Acknowledge"


class GatewaySilos(Protocol):
    """The cluster, as gateways need it."""

    @property
    def placements(self) -> ClusterPlacements: ...

    def stream(self, silo: str, method: str) -> StreamCall:
        """Begin a call of a silo, which may be this one. Raise Unavailable if it is not a living member."""
        ...

    async def call(self, silo: str, method: str, request: bytes) -> bytes:
        """Call a silo, which may be this one. Raise Unavailable, and the errors that the silo raises."""
        ...

    async def read_view(self) -> None:
        """Read the view of the cluster from the store, and update `placements`. Raise StorageError."""
        ...


class _SiloCalls(SessionCalls):
    """The sessions of gateways: the first one with this silo, because it knows the placement."""

    def __init__(self, silos: GatewaySilos) -> None:
        self._silos = silos

    @property
    def direct(self) -> bool:
        return True

    def first(self) -> StreamCall:
        return self._silos.stream(self._silos.placements.silo, METHOD)

    def to_owner(self, silo: str, address: str) -> StreamCall:
        return self._silos.stream(silo, METHOD)


class ClusterGateways:
    """All consumers for which this silo is the gateway. Their waiting bytes count in `budget`."""

    def __init__(self, silos: GatewaySilos, budget: SendBudget, drain_s: float) -> None:
        """A session waits for at most `drain_s` seconds for events in flight when this silo drains."""
        self._silos = silos
        self._budget = budget
        self._drain_s = drain_s
        self._calls = _SiloCalls(silos)
        self._sessions: dict[ConsumerKey, GatewaySession] = {}
        """The last session of each consumer."""
        self.pulls = PullingConsumers(lambda _: self._calls)

    @property
    def placements(self) -> ClusterPlacements:
        return self._silos.placements

    async def serve(self, call: ServiceCall, request: pb.SubscribeRequest, target: ConsumerTarget) -> None:
        """Converse with a consumer until its call ends. `request` is the first one."""
        positions = await target.consumers.prepare(target.definition, target.consumer, target.positions)
        account = self._budget.account(call.peer)
        opening = session_open(
            target, positions, concurrent=request.open.concurrent, started_us=request.open.started_us
        )
        session = GatewaySession(call, target, opening, self._calls, account, drain_s=self._drain_s)
        key = target.key
        former = self._sessions.get(key)
        if former is not None and 0 < opening.started_us < former.started_us:
            account.close()
            raise taken_over(target.consumer)
        self._sessions[key] = session
        try:
            # Otherwise each could take over the consumer at another silo, and both would end.
            if former is not None:
                await former.supersede()
            await session.run(request)
        finally:
            session.is_over.set()
            if self._sessions.get(key) is session:
                del self._sessions[key]
            account.close()

    async def report(self, target: ConsumerTarget, reports: Sequence[pb.QueueReport]) -> Sequence[pb.Refusal]:
        """Pass reports of a consumer that pulls to the owners of their queues. Return the refusals.

        If a report is newer than every owner that is known, read the view of the cluster first. If the store cannot be
        read, pass on the other reports, and raise StorageError: the consumer sends all of them again."""
        known = [report for report in reports if report.epoch <= self._owner(target.key, report.queue).epoch]
        if len(known) < len(reports):
            try:
                await self._silos.read_view()
            except StorageError:
                await self._pass_on(target, known)
                raise
        return await self._pass_on(target, reports)

    async def _pass_on(self, target: ConsumerTarget, reports: Sequence[pb.QueueReport]) -> Sequence[pb.Refusal]:
        by_owner: dict[str, list[pb.QueueReport]] = {}
        for report in reports:
            by_owner.setdefault(self._owner(target.key, report.queue).silo, []).append(report)
        answers = await asyncio.gather(*(self._report_to(owner, target, each) for owner, each in by_owner.items()))
        return [refusal for answer in answers for refusal in answer]

    def _owner(self, key: ConsumerKey, queue: int) -> LeaseOwner:
        """Return the newest owner of a queue that this silo, or the consumer's sessions, know."""
        owner = self.placements.owner(key.provider, queue)
        return max(owner, self.pulls.owner(key, queue) or owner)  # by epoch

    async def _report_to(
        self, owner: str, target: ConsumerTarget, reports: Sequence[pb.QueueReport]
    ) -> Sequence[pb.Refusal]:
        request = pb.AcknowledgeRequest(
            provider=target.provider.name,
            subscription=target.definition.name,
            consumer=target.consumer,
            reports=reports,
        )
        try:
            if owner:
                answer = await self._silos.call(owner, ACKNOWLEDGE, request.SerializeToString())
                return pb.AcknowledgeResponse.FromString(answer).refused
        except HeadraceError as error:
            if not error.retryable:
                raise
            log.info("silo %s did not take acknowledgements of consumer %r: %s", owner, target.consumer, error)
        return refuse_all(reports)


class GatewaySession(LinkUser):
    """One `Subscribe` call of a consumer. `opening` is how the sessions with owners begin."""

    def __init__(
        self,
        call: ServiceCall,
        target: ConsumerTarget,
        opening: pb.Open,
        calls: SessionCalls,
        account: SendAccount,
        *,
        drain_s: float,
    ) -> None:
        self.started_us = opening.started_us
        self._call = call
        self._target = target
        self._opening = opening
        self._positions = {position.queue: position.token for position in opening.positions}
        """The positions of a client that keeps them, by queue."""
        self._account = account
        self._drain_s = drain_s
        self._router = Router(self, calls, stays_direct=True)
        self._loop = asyncio.get_running_loop()
        self._is_opened = False
        self._outbox: deque[pb.SubscribeResponse | bytes] = deque()
        """Responses, and encoded batches, in the order in which they came."""
        self._outbox_bytes = 0
        self._output_ready = asyncio.Event()
        self._all_written = asyncio.Event()
        self._has_written = False
        """Something was written since the last heartbeat."""
        self._was_caught_up = False
        self._requests: dict[SiloLink, deque[pb.SubscribeRequest]] = {}
        """Reports that wait for each silo."""
        self._go_on_reading = asyncio.Event()
        self._closing = False
        self._stopping = False
        self._silent_beats = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        """Set with the error that ends the call: the consumer is silent, or has another session."""
        self.is_over = asyncio.Event()
        """Set when the call has ended."""
        self._heartbeat_s = opening.session_timeout_ms / 1000 / HEARTBEATS

    async def run(self, first: pb.SubscribeRequest) -> None:
        """Converse until either side ends the call. If the consumer has closed in order, all silos have saved its
        acknowledgements. If the call is lost, they wait for the consumer until its session timeout is over."""
        if self._ended.done():
            self._ended.result()
        self._next_heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)
        if self._target.gaps:
            self._add(pb.SubscribeResponse(gaps=map(wire.gap_message, self._target.gaps)))
        routing = self._loop.create_task(self._route(), name="headrace gateway routes")
        tasks = [routing] + [
            self._loop.create_task(work, name=f"headrace gateway {what}")
            for work, what in (
                (self._write(), "writes"),
                (self._read(first, routing), "reads"),
                (self._drain(routing), "drains"),
            )
        ]
        try:
            await asyncio.wait({*tasks, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._silent_beats > HEARTBEATS:
                self._router.close()  # its events go to others at once
                await asyncio.wait([routing], timeout=CLOSE_S)
            for each in (*tasks, self._ended):
                if each.done():
                    each.result()
            if self._stopping and not self._closing:
                raise Unavailable(STOPS)
        finally:
            self._next_heartbeat.cancel()
            if not self._ended.cancel() and not self._ended.cancelled():
                self._ended.exception()  # mark it as retrieved
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def supersede(self) -> None:
        """Another session takes over the consumer. Return when this one is over."""
        if not self._ended.done():
            self._ended.set_exception(taken_over(self._opening.consumer))
            self._ended.exception()  # mark it as retrieved: its call may be cancelled already
        await self.is_over.wait()

    async def _route(self) -> None:
        await self._router.run()
        self._all_written.clear()
        self._output_ready.set()
        await self._all_written.wait()

    # ---- the consumer's requests -------------------------------------------------------------------------------------

    async def _read(self, request: pb.SubscribeRequest, routing: asyncio.Task[None]) -> None:
        await self._apply(request)
        while not self._closing:
            message = await self._call.read()
            if message is None:  # perhaps the connection is lost: the consumer may come back
                return
            self._silent_beats = 0
            if message:
                await self._apply(following_request(message))
        self._router.close()
        await asyncio.wait([routing])

    async def _apply(self, request: pb.SubscribeRequest) -> None:
        check_count(request.reports)
        refused: list[pb.Refusal] = []
        by_link: dict[SiloLink, pb.SubscribeRequest] = {}
        for report in request.reports:
            link = self._router.link_of(report.queue)
            if link is None:
                refused += refuse_all([report])
            else:
                by_link.setdefault(link, pb.SubscribeRequest()).reports.append(report)
        for link, part in by_link.items():
            self._requests.setdefault(link, deque()).append(part)
            link.wake()
        if by_link:
            self._account.prove()
        if refused:
            self._add(pb.SubscribeResponse(refused=refused))
        if not self._stopping:
            self._router.grant(request.credit.events, request.credit.bytes)
        if request.reclaim:
            left = await self._router.take_back(RETURN_S)
            returned = pb.Credit(events=left.events, bytes=left.bytes)
            self._add(pb.SubscribeResponse(returned=returned, progress=self._router.progress()))
        self._closing = request.close
        while self._outbox_bytes > OUTBOX_BYTES or any(len(each) > MAX_WAITING for each in self._requests.values()):
            self._go_on_reading.clear()
            await self._go_on_reading.wait()

    # ---- sessions with owners ----------------------------------------------------------------------------------------

    def open(self) -> pb.Open:
        opening = pb.Open()
        opening.CopyFrom(self._opening)
        del opening.positions[:]
        for queue, token in self._positions.items():
            opening.positions.add(queue=queue, token=token)
        return opening

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        check_definition(opened, self._target.definition)
        if not self._is_opened:
            self._is_opened = True
            self._outbox.appendleft(pb.SubscribeResponse(opened=opened))
            self._output_ready.set()

    def changed(self, link: SiloLink, status: QueueStatus) -> None:
        self._add(pb.SubscribeResponse(queues=[pb.QueueStatus(**status._asdict())]))

    def request(self, link: SiloLink) -> pb.SubscribeRequest | None:
        waiting = self._requests.get(link)
        if not waiting:
            return None
        self._go_on_reading.set()
        return waiting.popleft()

    def take(self, link: SiloLink, delivered: Sequence[DeliveredBatch], frames: bytes) -> None:
        self._was_caught_up = False
        self._account.add(len(frames))
        self._put(frames, len(frames))

    def handle_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        for saved in response.saved:
            if saved.HasField("position"):
                self._positions[saved.queue] = saved.position.token
        if response.saved or response.refused or response.gaps:
            self._add(pb.SubscribeResponse(saved=response.saved, refused=response.refused, gaps=response.gaps))
        # While this silo stops, owners answer each `take_back` with their progress. The consumer does not need it, and
        # `_drain` waits until nothing is left to write.
        if response.HasField("progress") and not self._stopping:
            progress = self._router.progress()
            if progress.needed_bytes or progress.caught_up != self._was_caught_up:
                self._was_caught_up = progress.caught_up
                self._add(pb.SubscribeResponse(progress=progress))

    def ended(self, link: SiloLink) -> None:
        self._requests.pop(link, None)  # its queues have ended: the reports are void
        self._go_on_reading.set()

    # ---- responses ---------------------------------------------------------------------------------------------------

    def _add(self, response: pb.SubscribeResponse) -> None:
        """Send everything but batches. Of one response, refusals and confirmations apply before statuses."""
        last = self._outbox[-1] if self._outbox else None
        if isinstance(last, pb.SubscribeResponse) and not (last.queues and (response.saved or response.refused)):
            last.MergeFrom(response)
            self._outbox_bytes += response.ByteSize()
            self._limit()
        else:
            self._put(response, response.ByteSize())

    def _put(self, response: pb.SubscribeResponse | bytes, size: int) -> None:
        self._outbox.append(response)
        self._outbox_bytes += size
        self._limit()

    def _limit(self) -> None:
        """Receive nothing more while much waits for the consumer."""
        if self._outbox_bytes > OUTBOX_BYTES or (self._outbox and self._account.space <= 0):
            self._router.pause()
        else:
            self._router.resume()
        self._output_ready.set()
        self._go_on_reading.set()

    async def _write(self) -> None:
        await self._router.attached(ATTACH_S)
        while True:
            await self._output_ready.wait()
            self._output_ready.clear()
            while self._outbox and self._is_opened:
                await self._write_next()
            self._all_written.set()

    async def _write_next(self) -> None:
        """Write the next response, with the batches that follow it."""
        first, batch_bytes = self._outbox.popleft(), 0
        message = first if isinstance(first, bytes) else first.SerializeToString()
        if isinstance(first, bytes):
            batch_bytes = len(first)
        elif self._outbox and isinstance(frames := self._outbox[0], bytes):
            self._outbox.popleft()
            message, batch_bytes = message + frames, len(frames)
        size = len(message)
        self._has_written = True
        self._call.check_valid()  # here, too: a consumer that sends nothing may have credit
        await self._call.write(message)
        self._account.free(batch_bytes)
        self._outbox_bytes = self._outbox_bytes - size if self._outbox else 0
        self._limit()

    def _beat(self) -> None:
        """Send the progress if nothing else was sent. Give up a silent consumer."""
        self._silent_beats += 1
        if self._silent_beats > HEARTBEATS and not self._ended.done():
            timeout_s = self._opening.session_timeout_ms / 1000
            text = f"consumer {self._opening.consumer!r} was silent for {timeout_s:g} s"
            self._ended.set_exception(Unavailable(text))
            return
        if not self._has_written and self._is_opened:
            self._add(pb.SubscribeResponse(progress=self._router.progress()))
        self._has_written = False
        self._next_heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)

    async def _drain(self, routing: asyncio.Task[None]) -> None:
        """When this silo stops, deliver nothing more, wait for the events in flight, and end all sessions in order.

        If that takes too long, end the call, as if it were lost: the silos wait for the consumer until its session
        timeout is over."""
        await self._call.closing.wait()
        self._stopping = True
        until = self._loop.time() + self._drain_s
        self._add(pb.SubscribeResponse(closing=pb.Closing(reason=STOPS)))
        drained: set[tuple[int, int]] = set()
        """Queues with their epochs that the consumer knows to be draining."""
        while True:
            await self._router.take_back(RETURN_S)
            for link in self._router.links:
                if not link.is_reclaiming:  # otherwise batches may be on the way
                    self._drain_queues(link, drained)
            in_flight = self._router.progress().in_flight_events
            if not (self._outbox or in_flight):
                break
            if self._loop.time() >= until:
                text = (
                    "consumer %r has %d events in flight after %g s: its call ends, so that it connects to another silo"
                )
                log.warning(text, self._opening.consumer, in_flight, self._drain_s)
                return
            await asyncio.sleep(DRAIN_CHECK_S)
        self._router.close()
        await asyncio.wait([routing])

    def _drain_queues(self, link: SiloLink, drained: set[tuple[int, int]]) -> None:
        for status in link.queues.values():
            if status.state == SERVED and (status.queue, status.epoch) not in drained:
                drained.add((status.queue, status.epoch))
                self.changed(link, status._replace(state=DRAINING))
