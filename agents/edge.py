"""The delivery edge: whose events are handed to remote consumers next.

Every (subscription, queue) is an actor. What its consumers cost is mostly not its own turn, in which it decides who
gets what, but the sending afterwards; so two things keep it fair. Who has the next turn is decided by virtual time
(`fairness.py`), in which messages are charged as well. And only a few messages are on their way at a time: with a
hundred consumers to serve, who comes next is decided again after each few messages, not after a hundred of them. One
that a slow connection holds up does not count for long, so that slow consumers cannot close the window.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from ..streams.events import EventBatch
from ..streams.frames import Parts, frame, part
from .fairness import Actor, FairQueue
from .member import Member

WINDOW = 4
"""Messages on their way at a time."""
STALLED_S = 0.005
"""A message that takes longer waits for its consumer: it leaves the window."""
QUOTA_S = 0.001
"""How long a turn may go on. Less than QMQ's 5 ms: turns here are short, and what follows a turn is not preempted."""
LAG_S = 0.001
"""When the loop takes longer than this to come to the next turn, others wait: for what was sent before to be read and
acknowledged, and for their own. Then the edge leaves it as long again for them."""
MAX_LAG_S = 0.02
MESSAGE_S = 0.0002
"""What a message costs besides the turn: sending it, and taking its acknowledgement. Measured."""
FRAMES_BYTES = 4 << 20
FRAME_WORTH = 4096
"""Smaller frames are quicker made than found."""
PARTS_EVENTS = 65_536
"""Events of batches that go out in parts, at the most, of which is remembered how they are made up."""
PARTS_WORTH = 64
"""Batches of fewer events are quicker read again."""


class Turning(Protocol):
    """What has a turn: a delivery to the members of a group."""

    def turn(self, ends: float) -> bool:
        """Hand out at least one parcel where that is possible, and go on until `ends` (`perf_counter`). Whether it
        could go on."""
        ...


class DeliveryActor(Actor):
    __slots__ = ("delivery",)

    def __init__(self, name: str, delivery: Turning) -> None:
        super().__init__(name)
        self.delivery = delivery


class Edge:
    """One for each provider in a process. All on one loop."""

    def __init__(
        self, *, fair: FairQueue[DeliveryActor] | None = None, window: int = WINDOW, quota_s: float = QUOTA_S
    ) -> None:
        self._fair = fair or FairQueue[DeliveryActor]()
        self._window = window
        self._quota_s = quota_s
        self._loop = asyncio.get_running_loop()
        self._armed = False
        self._asked_at = 0.0
        self._lag_s = 0.0
        """How long the loop took to come to the last turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._sending: dict[Member, float] = {}
        """Since when."""
        self._begun = 0
        """Messages that were begun, also those that wait for the one before them."""
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._frames_bytes = 0
        self._parts: OrderedDict[tuple[int, int], Parts] = OrderedDict()
        self._parts_events = 0
        self.messages = 0

    # ---- turns -----------------------------------------------------------------------------------------------------

    def wake(self, actor: DeliveryActor) -> None:
        """There is something for it to do."""
        self._fair.schedule(actor)
        self._arm()

    def forget(self, actor: DeliveryActor) -> None:
        self._fair.forget(actor)

    def _arm(self) -> None:
        if self._armed or not len(self._fair):
            return
        if self.may_send():
            self._armed = True
            if self._lag_s > LAG_S:
                self._loop.call_later(min(self._lag_s, MAX_LAG_S), self._ask)
            else:
                self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(STALLED_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._arm()

    def _ask(self) -> None:
        self._asked_at = self._loop.time()
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        """One turn. The loop goes round before the next."""
        self._armed = False
        self._lag_s = self._loop.time() - self._asked_at
        actor = self._fair.next()
        if actor is None:
            return
        began, messages = perf_counter(), self._begun
        try:
            if actor.delivery.turn(began + self._quota_s):
                self._fair.schedule(actor)
        finally:
            self._fair.done(actor, perf_counter() - began + MESSAGE_S * (self._begun - messages))
            self._arm()

    # ---- messages on their way -------------------------------------------------------------------------------------

    def may_send(self) -> bool:
        """Whether one more message may be on its way."""
        sending = self._sending
        if len(sending) >= self._window:
            late = self._loop.time() - STALLED_S
            for member in [member for member, since in sending.items() if since <= late]:
                del sending[member]
        return len(sending) < self._window

    def put(self, member: Member, frame: bytes) -> None:
        """Into the member's outbox; where nothing is on its way to it, it begins to be sent."""
        if not member.outbox:
            self._begun += 1
        member.put(frame)
        if not member.busy:
            member.busy = True
            self._sending[member] = self._loop.time()
            member.on_outbox()

    def sent(self, member: Member) -> bool:
        """A message went out, or its member is gone. Whether there is more to send to it."""
        self.messages += 1
        if member.outbox:
            self._sending[member] = self._loop.time()
            return True
        member.busy = False
        self._sending.pop(member, None)
        self._arm()
        return False

    # ---- frames ----------------------------------------------------------------------------------------------------

    def frame(self, batch: EventBatch, queue: int) -> bytes:
        """The batch as it goes to everybody who gets all of it for the first time."""
        if len(batch.encoded) < FRAME_WORTH:
            return frame(batch.encoded, queue, batch.offset)
        key = queue, batch.offset
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = frame(batch.encoded, queue, batch.offset)
            self._frames_bytes += len(found)
            while self._frames_bytes > FRAMES_BYTES:
                self._frames_bytes -= len(self._frames.popitem(last=False)[1])
        return found

    def part(self, batch: EventBatch, queue: int, indexes: Sequence[int]) -> bytes:
        """Some events of a batch, encoded as one. Raises InvalidArgument where it is damaged."""
        if batch.count < PARTS_WORTH:
            return part(batch, indexes)
        key = queue, batch.offset
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = Parts(batch)
            self._parts_events += found.count
            while self._parts_events > PARTS_EVENTS and len(self._parts) > 1:
                self._parts_events -= self._parts.popitem(last=False)[1].count
        return found.encode(indexes)
