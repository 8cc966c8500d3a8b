"""A silo as `proto/v1/consumer.proto` describes it, in a few lines: one consumer attached, others nearby.

It is as unkind as the contract allows: messages are lost with their connection, a restart forgets all that was not
saved, and a consumer that stays away loses the events it held. Everything that it sends is really encoded, and paid
with credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace import EventBatch, StreamId
from headrace.client.session import Ack, Rejected, Request
from headrace.streams.frames import frame, part

Position = tuple[int, int]
"""Offset and index."""
MAX_ATTEMPTS = 2


class Response(NamedTuple):
    frames: bytes = b""
    saved: int = 0
    refused: tuple[tuple[int, int], ...] = ()
    resumed: bool | None = None
    moves: int = 0
    caught_up: bool | None = None
    needed_bytes: int = 0


@dataclass
class Parcel:
    """The held events of one stream, in order, with their consumers."""

    mine: bool
    held: list[Position]
    failing: list[Position] = field(default_factory=list[Position])
    """They fail once the events before them are done."""
    number: int = 0


@dataclass
class ModelSilo:
    """One queue, for a stream has only one; everything is in positions."""

    streams: dict[StreamId, list[Position]] = field(default_factory=dict[StreamId, list[Position]])
    batches: list[EventBatch] = field(default_factory=list[EventBatch])
    saved_done: set[Position] = field(default_factory=set[Position])
    dead: set[Position] = field(default_factory=set[Position])
    acknowledged: set[Position] = field(default_factory=set[Position])
    """Events that the consumer said are done."""
    moves: int = 0
    # State that a restart forgets:
    done: set[Position] = field(default_factory=set[Position])
    parcels: dict[StreamId, Parcel] = field(default_factory=dict[StreamId, Parcel])
    attempts: dict[Position, int] = field(default_factory=dict[Position, int])
    waiting: set[StreamId] = field(default_factory=set[StreamId])
    redriven: set[Position] = field(default_factory=set[Position])
    connected: bool = False
    known: bool = False
    """The consumer was there before, and was not given up."""
    resending: bool = False
    strict: bool = False
    """An acknowledgement has no effect until the consumer was sent the events again that it held."""
    credit_events: int = 0
    credit_bytes: int = 0
    applied: int = 0
    told: int = 0
    """Of moves, on this connection."""
    inbox: deque[Request] = field(default_factory=deque[Request])
    outbox: deque[Response] = field(default_factory=deque[Response])
    handed_out: int = 0

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
        """Streams of which something could be handed out."""
        idle = (s for s in self.streams if s not in self.parcels and s not in self.waiting)
        return [stream for stream in idle if self.left(stream)]

    @property
    def caught_up(self) -> bool:
        return not any(self.left(stream) for stream in self.streams)

    # ---- the consumer's connection ---------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        self.connected = True
        self.told = 0
        self.outbox.append(Response(resumed=self.known, moves=self.moves))
        self.known = True
        self.resending = any(parcel.mine for parcel in self.parcels.values())
        self.inbox.append(request)

    def drop_connection(self) -> None:
        self.connected = self.resending = False
        self.credit_events = self.credit_bytes = 0
        self.inbox.clear()
        self.outbox.clear()
        self.redriven.clear()

    def restart(self) -> None:
        self.drop_connection()
        self.known = False
        self.done = set(self.saved_done)
        self.parcels.clear()
        self.attempts.clear()
        self.waiting.clear()
        self.applied = 0

    def expire(self) -> None:
        """The consumer was away for too long."""
        self.known = False
        for stream in [stream for stream, parcel in self.parcels.items() if parcel.mine]:
            del self.parcels[stream]

    def seek(self) -> None:
        """Begin again with everything but dead letters."""
        self.moves += 1
        for forgotten in (self.parcels, self.attempts, self.waiting, self.done, self.saved_done):
            forgotten.clear()
        self.resending = False
        if self.connected:
            self.told += 1
            self.outbox.append(Response(moves=self.moves))

    # ---- handing out -----------------------------------------------------------------------------------------------

    def hand_out(self, stream: StreamId, most: int) -> bool:
        """A parcel of at most so many events. False where the credit is too small."""
        if not self.connected or self.resending:
            return False
        wanted = self.left(stream)[:most]
        while wanted and not self._send(wanted):
            del wanted[len(wanted) // 2 :]
        if wanted:
            self.handed_out += 1
            self.parcels[stream] = Parcel(mine=True, held=wanted, number=self.handed_out)
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
            frames += frame(encoded, 0, offset, attempt=attempt, indexes=more, redriven=redriven)
        if len(positions) > self.credit_events or len(frames) > self.credit_bytes:
            return False
        self.credit_events -= len(positions)
        self.credit_bytes -= len(frames)
        self.outbox.append(Response(frames))
        return True

    def _resend(self) -> None:
        self.resending = False
        for stream in [stream for stream, parcel in self.parcels.items() if parcel.mine]:
            held = [p for p in self.parcels[stream].held if p not in self.done]
            assert held
            if not self._send(held):
                del self.parcels[stream]

    def redrive(self, position: Position) -> bool:
        """Deliver a dead letter once more."""
        if not self.connected or self.resending or position in self.redriven:
            return False
        sent = self._send([position], redriven=True)
        if sent:
            self.redriven.add(position)
        return sent

    def needed_bytes(self, stream: StreamId) -> int:
        """Size of the next event of a stream on the wire."""
        offset, index = self.left(stream)[0]
        return len(part(self.batches[offset], [index])) + 64

    # ---- requests --------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """The next request."""
        request = self.inbox.popleft()
        stale = request.moves_heard < self.told
        refused = [ack[:2] for ack in request.acknowledgements if not self._acknowledge(ack, stale)]
        refused += [(one.queue, one.offset) for one in request.rejections if not self._reject(one, stale)]
        if refused:
            self.outbox.append(Response(refused=tuple(refused)))
        self.applied = max(self.applied, request.number)
        self.credit_events += request.credit_events
        self.credit_bytes += request.credit_bytes
        if self.resending and request.credit_events:
            self._resend()

    def _acknowledge(self, ack: Ack, stale: bool) -> bool:
        _, offset, first, length, up_to = ack
        count = self.batches[offset].count
        last = min(first + length, count) if length else count
        positions = [(offset, index) for index in range(first, last)]
        if positions[0] in self.redriven:
            assert len(positions) == 1, "a dead letter is acknowledged by itself"
            self.redriven.discard(positions[0])
            self.dead.discard(positions[0])
            self.done.add(positions[0])
            self.acknowledged.add(positions[0])
            self.saved_done.add(positions[0])
            return True
        stream, parcel = self._held(offset)
        if parcel is None or stale:
            return False
        if up_to:
            positions += [p for p in parcel.held if p < positions[0]]
        found = [p for p in parcel.held if p in positions]
        self.done.update(found)
        self.acknowledged.update(found)
        self._look_at(stream, parcel)
        return bool(found)

    def _reject(self, rejected: Rejected, stale: bool) -> bool:
        first = (rejected.offset, rejected.first)
        if first in self.redriven:
            self.redriven.discard(first)
            return True
        stream, parcel = self._held(rejected.offset)
        if parcel is None or stale or first not in parcel.held or first in self.done:
            return False
        last = rejected.first + rejected.length if rejected.length else 1 << 60
        parcel.failing = [p for p in parcel.held if p[0] == rejected.offset and first <= p < (rejected.offset, last)]
        parcel.held = [p for p in parcel.held if p < first]
        self._look_at(stream, parcel)
        return True

    def _held(self, offset: int) -> tuple[StreamId, Parcel | None]:
        stream = self.batches[offset].stream
        parcel = self.parcels.get(stream)
        if (
            parcel is None
            or not parcel.mine
            or (self.resending and self.strict)
            or all(p[0] != offset for p in parcel.held)
        ):
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
        if self.connected and self.applied:
            self.outbox.append(Response(saved=self.applied))

    # ---- other consumers -------------------------------------------------------------------------------------------

    def others_take(self, stream: StreamId) -> None:
        self.parcels[stream] = Parcel(mine=False, held=self.left(stream)[:2])

    def others_end(self, stream: StreamId, *, done: bool) -> None:
        parcel = self.parcels.pop(stream)
        if done:
            self.done.update(parcel.held)
