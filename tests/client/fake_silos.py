"""Silos for routers, in the test's process: each answers `Subscribe` as the test says, without delivering by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace import EventBatch, HeadraceError, StreamId, Unavailable
from headrace.client.routing import SERVED, QueueStatus, SessionCalls, SiloLink
from headrace.client.transport import StreamCall
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.proto.v1.subscriptions_pb2 import SubscriptionDefinition
from headrace.streams import wire
from headrace.streams.frames import DeliveredBatch, frame

DEFINITION = wire.definition_message(wire.definition_of(SubscriptionDefinition(name="s", selector="s/*")))
"""With all defaults."""


class FakeSession(StreamCall):
    """A session, from the silo's side."""

    def __init__(self, silo: FakeSilo) -> None:
        self.silo = silo
        self.requests: list[pb.SubscribeRequest] = []
        self.responses: asyncio.Queue[bytes | HeadraceError | None] = asyncio.Queue()
        self.is_over = False
        self.credit_events = self.credit_bytes = 0

    @property
    def address(self) -> str:
        return self.silo.address

    @property
    def opening(self) -> pb.Open:
        return self.requests[0].open

    @property
    def is_closed(self) -> bool:
        """Whether the client has closed it in order."""
        return any(request.close for request in self.requests)

    async def send(self, message: bytes) -> None:
        request = pb.SubscribeRequest.FromString(message)
        self.requests.append(request)
        self.credit_events += request.credit.events
        self.credit_bytes += request.credit.bytes
        if request.HasField("open"):
            self.silo.opened(self)
        elif not self.silo.is_silent:
            self.responses.put_nowait(b"")
        if request.reclaim:
            returned = pb.Credit(events=max(self.credit_events, 0), bytes=max(self.credit_bytes, 0))
            self.credit_events = self.credit_bytes = 0
            self.say(pb.SubscribeResponse(returned=returned, progress=pb.Progress()))
        if request.close:
            self.end(None)

    async def done_sending(self) -> None: ...

    async def receive(self) -> bytes | None:
        response = await self.responses.get()
        if isinstance(response, bytes):
            return response
        self.is_over = True
        if response is None:
            return None
        raise response

    def say(self, response: pb.SubscribeResponse, frames: bytes = b"") -> None:
        self.responses.put_nowait(response.SerializeToString() + frames)

    def deliver(self, queue: int, offset: int, events: int = 1) -> int:
        """Deliver a batch. Return its bytes."""
        batch = EventBatch.of(StreamId("s", str(queue)), [b"x"] * events)
        frames = frame(batch.encoded, queue, offset)
        self.credit_events -= events
        self.credit_bytes -= len(frames)
        self.responses.put_nowait(frames)
        return len(frames)

    def send_status(self, queue: int, state: int = SERVED, epoch: int = 1, generation: int = 0) -> None:
        """Send the status of a queue."""
        status = pb.QueueStatus(queue=queue, epoch=epoch, generation=generation, assigned=True)
        status.state = pb.QueueStatus.State.ValueType(state)
        self.say(pb.SubscribeResponse(queues=[status]))

    def end(self, error: HeadraceError | None) -> None:
        self.responses.put_nowait(error)

    def cancel(self) -> None:
        self.responses.put_nowait(Unavailable("cancelled"))

    def leave(self) -> None: ...

    async def abandon(self) -> None:
        self.cancel()

    async def ended(self) -> None: ...


class FakeSilo:
    """One silo. `queues` are its queues with their epochs."""

    def __init__(self, silos: FakeSilos, name: str, queues: Mapping[int, int]) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.queues = dict(queues)
        self.error: HeadraceError | None = None
        """Refuses new sessions."""
        self.is_deaf = False
        """Does not answer new sessions."""
        self.is_silent = False
        """Does not answer heartbeats."""
        self.sessions: list[FakeSession] = []
        self._silos = silos

    def opened(self, session: FakeSession) -> None:
        self.sessions.append(session)
        if not self.is_deaf:
            self.answer(session)

    def answer(self, session: FakeSession) -> None:
        """Accept or refuse a session."""
        if self.error is not None:
            session.end(self.error)
            return
        response = pb.SubscribeResponse(opened=pb.Opened(consumer="c", silo=self.name, heartbeat_ms=1000))
        response.opened.definition.CopyFrom(self._silos.definition)
        if session.opening.direct:
            response.placement.CopyFrom(self._silos.placement())
        session.say(response)
        for queue, epoch in (self.queues if session.opening.direct else self._silos.queues()).items():
            session.send_status(queue, epoch=epoch)

    @property
    def session(self) -> FakeSession:
        """The present session."""
        return self.sessions[-1]

    @property
    def is_serving(self) -> bool:
        return bool(self.sessions) and not self.session.is_over


class FakeSilos(SessionCalls):
    """A cluster. The client knows the first silo."""

    def __init__(self, **silos: Mapping[int, int]) -> None:
        self.silos = {name: FakeSilo(self, name, queues) for name, queues in silos.items()}
        self.known = next(iter(silos))
        """The silo that the client knows."""
        self.is_clustered = True
        self.definition = DEFINITION

    def __getitem__(self, name: str) -> FakeSilo:
        return self.silos[name]

    @property
    def direct(self) -> bool:
        return self.is_clustered

    def first(self) -> FakeSession:
        return FakeSession(self.silos[self.known])

    def to_owner(self, silo: str, address: str) -> FakeSession:
        assert address == self.silos[silo].address
        return FakeSession(self.silos[silo])

    def queues(self) -> dict[int, int]:
        return {queue: epoch for silo in self.silos.values() for queue, epoch in silo.queues.items()}

    def placement(self) -> pb.Placement:
        placement = pb.Placement(queues=len(self.queues()))
        for silo in self.silos.values():
            for queue, epoch in silo.queues.items():
                placement.owners.add(queue=queue, silo=silo.name, address=silo.address, epoch=epoch)
        return placement

    def push(self, *names: str) -> None:
        """Push the placement to the sessions of these silos."""
        for name in names:
            self.silos[name].session.say(pb.SubscribeResponse(placement=self.placement()))

    def move(self, queue: int, source: str, target: str) -> int:
        """A queue gets another owner, which does not serve it yet. Return its epoch."""
        epoch = self.silos[source].queues.pop(queue) + 1
        self.silos[target].queues[queue] = epoch
        return epoch


class FakeUser:
    """The user of a router. It writes down everything."""

    def __init__(self) -> None:
        self.statuses: list[tuple[int, int, int]] = []
        """Queue, state and epoch, in order."""
        self.offsets: list[tuple[int, int]] = []
        """Queue and offset of each batch, in order."""
        self.heard: list[pb.SubscribeResponse] = []
        self.ended_links: list[SiloLink] = []
        self.reports: dict[str, list[pb.SubscribeRequest]] = {}
        """Reports that are to be sent, by silo."""
        self.opened_by: list[str] = []

    def open(self) -> pb.Open:
        return pb.Open(subscription="s", consumer="c", started_us=1000)

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        self.opened_by.append(opened.silo)

    def changed(self, link: SiloLink, status: QueueStatus) -> None:
        self.statuses.append((status.queue, status.state, status.epoch))

    def request(self, link: SiloLink) -> pb.SubscribeRequest | None:
        waiting = self.reports.get(link.silo)
        return waiting.pop(0) if waiting else None

    def take(self, link: SiloLink, delivered: Sequence[DeliveredBatch], frames: bytes) -> None:
        self.offsets += [(each.queue, each.batch.offset) for each in delivered]

    def handle_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        self.heard.append(response)

    def ended(self, link: SiloLink) -> None:
        assert not link.queues
        self.ended_links.append(link)
