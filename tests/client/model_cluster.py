"""Silos as `docs/consuming-protocol.md` describes them, in a few lines: one consumer attached, others nearby.

They are as unkind as the contract allows. Messages are lost with their connection. A killed silo forgets everything
that was not saved. Queues move to other silos, with and without draining. A consumer that stays away loses the events
that it held. Everything that is sent is really encoded, and paid with credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import EventBatch, StreamId
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.streams.frames import frame, part

Position = tuple[int, int]
"""Offset and index."""
MAX_ATTEMPTS = 2


@dataclass
class Parcel:
    """The held events of one stream, in order."""

    mine: bool
    held: list[Position]
    failing: list[Position] = field(default_factory=list[Position])
    """They fail when the events before them are done."""


@dataclass
class Pool:
    """The credit that the consumer granted, of all sessions."""

    events: int = 0
    bytes: int = 0


class ModelLink:
    """One silo, and the consumer's session with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connected = False
        self.inbox: deque[pb.SubscribeRequest] = deque()
        self.outbox: deque[tuple[pb.SubscribeResponse, bytes]] = deque()

    def __repr__(self) -> str:
        return self.name

    def wake(self) -> None: ...

    def say(self, **fields: object) -> None:
        if self.connected:
            self.outbox.append((pb.SubscribeResponse(**fields), b""))  # type: ignore[arg-type]


class ModelQueue:
    """A queue with its streams, the stored progress, and the memory of its owner."""

    def __init__(self, number: int, owner: ModelLink, pool: Pool) -> None:
        self.number = number
        self.owner = owner
        self.pool = pool
        self.epoch = 1
        self.streams: dict[StreamId, list[Position]] = {}
        self.batches: list[EventBatch] = []
        # Stored:
        self.generation = 0
        self.saved_done: set[Position] = set()
        self.dead: set[Position] = set()
        self.ever_over: set[Position] = set()
        """Events that were ever done or dead letters."""
        self.acknowledged: set[Position] = set()
        """Events that the consumer reported as done."""
        self._own(owner)

    def _own(self, owner: ModelLink) -> None:
        """A silo begins to serve the queue, from its stored progress."""
        self.owner = owner
        self.done = set(self.saved_done)
        self.parcels: dict[StreamId, Parcel] = {}
        self.attempts: dict[Position, int] = {}
        self.waiting: set[StreamId] = set()
        self.redriven: set[Position] = set()
        self.taken_back: set[Position] = set()
        """Events that the consumer held when it expired: a release of them may be on its way."""
        self.draining = False
        self._begin_session()

    def _begin_session(self) -> None:
        self.applied = self.confirmed = 0
        self.questions: list[tuple[int, set[Position]]] = []
        self.resending = any(parcel.mine for parcel in self.parcels.values())
        self._say_status()

    def _say_status(self, state: int = pb.QueueStatus.STATE_SERVED) -> None:
        status = pb.QueueStatus(
            queue=self.number,
            state=state,  # type: ignore[arg-type]
            epoch=self.epoch,
            generation=self.generation,
            assigned=True,
        )
        self.owner.say(queues=[status])

    # ---- streams ---------------------------------------------------------------------------------------------------

    def publish(self, stream: StreamId, sizes: Sequence[int]) -> None:
        offset = len(self.batches)
        batch = EventBatch.of(stream, [bytes(size) for size in sizes])
        batch.offset = offset
        self.batches.append(batch)
        self.streams.setdefault(stream, []).extend((offset, index) for index in range(len(sizes)))

    def left(self, stream: StreamId) -> list[Position]:
        return [p for p in self.streams[stream] if p not in self.done and p not in self.dead]

    def ready(self) -> list[StreamId]:
        """Streams of which events could be handed out."""
        idle = (s for s in self.streams if s not in self.parcels and s not in self.waiting)
        return [stream for stream in idle if self.left(stream)]

    def note_over(self) -> None:
        self.ever_over |= self.done | self.dead

    @property
    def caught_up(self) -> bool:
        return not any(self.left(stream) for stream in self.streams)

    # ---- sessions, moves, seeks --------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The consumer has a session with the owner."""
        self._begin_session()

    def disconnected(self) -> None:
        self.resending = False
        self.redriven.clear()

    def expire(self) -> None:
        """The consumer was away, or held the events, for too long."""
        for stream in [stream for stream, parcel in self.parcels.items() if parcel.mine]:
            self.taken_back.update(self.parcels.pop(stream).held)
        self.resending = False

    def drain(self) -> None:
        self.draining, self.resending = True, False
        self._say_status(pb.QueueStatus.STATE_DRAINING)

    def move(self, owner: ModelLink, *, saves: bool) -> None:
        """Another silo gets the queue, or the same one again. Without `saves` the lease was lost."""
        if saves:
            self.save()
        self._say_status(pb.QueueStatus.STATE_ENDED)
        self.epoch += 1
        self._own(owner)

    def killed(self) -> None:
        """The owner was killed. It gets the queue again when it has started."""
        self.epoch += 1
        self._own(self.owner)

    def seek(self) -> None:
        """Begin again with everything but dead letters."""
        self.generation += 1
        self.saved_done.clear()
        applied, draining = self.applied, self.draining
        self._own(self.owner)
        self.applied = applied
        if draining:
            self.drain()

    # ---- handing out -----------------------------------------------------------------------------------------------

    @property
    def delivers(self) -> bool:
        return self.owner.connected and not self.resending and not self.draining

    def hand_out(self, stream: StreamId, limit: int) -> bool:
        """A parcel of at most so many events. False if the credit is too small."""
        if not self.delivers:
            return False
        wanted = self.left(stream)[:limit]
        while wanted and not self._send(wanted):
            del wanted[len(wanted) // 2 :]
        if wanted:
            self.parcels[stream] = Parcel(mine=True, held=wanted)
        return bool(wanted)

    def _send(self, positions: list[Position], *, redriven: bool = False) -> bool:
        frames = b""
        for offset in sorted({offset for offset, _ in positions}):
            batch = self.batches[offset]
            indexes = [index for at, index in positions if at == offset]
            whole = len(indexes) == batch.count and not redriven
            attempt = 1 + self.attempts.get((offset, indexes[0]), 0)
            encoded = batch.encoded if whole else part(batch, indexes)
            more = () if whole else indexes
            frames += frame(encoded, self.number, offset, attempt=attempt, indexes=more, redriven=redriven)
        if len(positions) > self.pool.events or len(frames) > self.pool.bytes:
            return False
        self.pool.events -= len(positions)
        self.pool.bytes -= len(frames)
        self.owner.outbox.append((pb.SubscribeResponse(), frames))
        return True

    def resend(self) -> None:
        """Send again what the consumer held when its session was lost."""
        self.resending = False
        for stream in [stream for stream, parcel in self.parcels.items() if parcel.mine]:
            held = [p for p in self.parcels[stream].held if p not in self.done]
            if not held or not self._send(held):
                del self.parcels[stream]

    def redrive(self, position: Position) -> None:
        """Deliver a dead letter once more."""
        if self.delivers and position not in self.redriven and self._send([position], redriven=True):
            self.redriven.add(position)

    def needed_bytes(self, stream: StreamId) -> int:
        """Size of the next event of a stream on the wire."""
        offset, index = self.left(stream)[0]
        return len(part(self.batches[offset], [index])) + 64

    # ---- reports -----------------------------------------------------------------------------------------------------

    def apply(self, report: pb.QueueReport) -> None:
        results = [*report.acknowledgements, *report.rejections]
        refused = results
        if (report.epoch, report.generation) == (self.epoch, self.generation):
            refused = [ack for ack in report.acknowledgements if not self._acknowledge(ack)]
            refused += [one for one in report.rejections if not self._reject(one)]  # type: ignore[misc]
            self._note_unconfirmed(report)
            for released in report.released:
                self._release((released.offset, released.index))
            self.applied = max(self.applied, report.number)
        if refused:
            self.owner.say(refused=[self._refusal(report, each) for each in refused])

    def _refusal(self, report: pb.QueueReport, each: pb.Acknowledgement | pb.Rejection) -> pb.Refusal:
        return pb.Refusal(
            queue=self.number, offset=each.offset, index=each.index, epoch=report.epoch, number=report.number
        )

    def _acknowledge(self, ack: pb.Acknowledgement) -> bool:
        count = self.batches[ack.offset].count
        last = min(ack.index + ack.count, count) if ack.count else count
        positions = [(ack.offset, index) for index in range(ack.index, last)]
        if positions[0] in self.redriven:
            assert (len(positions), ack.up_to) == (1, False), "a dead letter is acknowledged by itself"
            self._done_redriven(positions[0])
            return True
        return self._done(positions, up_to=ack.up_to)

    def _done_redriven(self, position: Position) -> None:
        self.redriven.discard(position)
        self.dead.discard(position)
        for kept in (self.done, self.acknowledged, self.saved_done):
            kept.add(position)

    def _done(self, positions: list[Position], *, up_to: bool = False) -> bool:
        stream, parcel = self._held(positions[0][0])
        if parcel is None:
            return False
        has_all = parcel.held[-1] >= positions[-1]
        if up_to:
            positions = positions + [p for p in parcel.held if p < positions[0]]
        found = [p for p in parcel.held if p in positions]
        self.done.update(found)
        self.acknowledged.update(found)
        self._look_at(stream, parcel)
        return bool(found) and has_all

    def _note_unconfirmed(self, report: pb.QueueReport) -> None:
        for each in report.unconfirmed:
            positions = {(each.offset, index) for index in range(each.index, each.index + each.count)}
            assert self.batches[each.offset].stream == StreamId(each.namespace, each.key)
            for position in sorted(positions & self.redriven):
                self._done_redriven(position)
            self._done(sorted(positions))
            self.questions.append((report.number, positions))

    def _reject(self, rejected: pb.Rejection) -> bool:
        first = (rejected.offset, rejected.index)
        if first in self.redriven:
            self.redriven.discard(first)
            return True
        stream, parcel = self._held(rejected.offset)
        if parcel is None or first not in parcel.held or first in self.done:
            return False
        last = rejected.index + rejected.count if rejected.count else 1 << 60
        parcel.failing = [p for p in parcel.held if p[0] == rejected.offset and first <= p < (rejected.offset, last)]
        parcel.held = [p for p in parcel.held if p < first]
        self._look_at(stream, parcel)
        return True

    def _release(self, first: Position) -> None:
        if first in self.redriven:
            self.redriven.discard(first)
            return
        stream, parcel = self._held(first[0])
        if parcel is None:
            assert first in self.taken_back, "released events that it never held"
            return
        parcel.held = [p for p in parcel.held if p < first]
        self._look_at(stream, parcel)

    def _held(self, offset: int) -> tuple[StreamId, Parcel | None]:
        stream = self.batches[offset].stream
        parcel = self.parcels.get(stream)
        if parcel is None or not parcel.mine or all(p[0] != offset for p in parcel.held):
            return stream, None
        return stream, parcel

    def _look_at(self, stream: StreamId, parcel: Parcel) -> None:
        if any(p not in self.done for p in parcel.held):
            return
        del self.parcels[stream]
        failing = [p for p in parcel.failing if p not in self.done]
        for position in failing:
            self.attempts[position] = self.attempts.get(position, 0) + 1
        if failing and self.attempts[failing[0]] >= MAX_ATTEMPTS:
            self.dead.update(failing)
        elif failing:
            self.waiting.add(stream)

    def save(self) -> None:
        self.saved_done |= self.done
        over = self.saved_done | self.dead
        while self.questions and self.questions[0][1] <= over:
            self.questions.pop(0)
        answered = self.questions[0][0] - 1 if self.questions else self.applied
        if self.applied:
            saved = pb.Saved(queue=self.number, epoch=self.epoch, number=self.applied, unconfirmed=answered)
            self.owner.say(saved=[saved])

    # ---- other consumers -------------------------------------------------------------------------------------------

    def others_take(self, stream: StreamId) -> None:
        self.parcels[stream] = Parcel(mine=False, held=self.left(stream)[:2])

    def others_end(self, stream: StreamId, *, done: bool) -> None:
        parcel = self.parcels.pop(stream)
        if done:
            self.done.update(parcel.held)
