"""The delivery edge: whose events are handed to remote consumers next.

Every (subscription, queue) is an actor. What its consumers cost is mostly not its own turn, in which it decides who
gets what, but the sending afterwards, and what it answers; so three things keep it fair. Who has the next turn is
decided by virtual time (`fairness.py`), in which messages are charged as well. Only a few messages are on their way at
a time: with a hundred consumers to serve, who comes next is decided again after each few messages, not after a hundred
of them. One that a slow connection holds up does not count for long, so that slow consumers cannot close the window.
And while somebody is served who takes less than its share, the others fill neither the window nor the loop: what it has
to say finds both nearly idle. Where all want more than there is, nothing is held back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Protocol

from ...streams.events import EventBatch
from ...streams.frames import Parts, frame, part
from .fairness import Actor, FairQueue
from .member import Member
from .unsent import SendBudget

WINDOW = 4
"""Messages on their way at a time."""
MODEST_S = 0.25
"""So long after a turn of somebody who takes less than its share, the others make room for it: one message of theirs is
on its way at a time, and after each the loop is left to itself for as long as that took, or was waited for."""
STALLED_S = 0.005
"""A message that takes longer waits for its consumer: it leaves the window."""
QUOTA_S = 0.001
"""How long a turn may go on. Less than QMQ's 5 ms: turns here are short, and what follows a turn is not preempted."""
MAX_PAUSE_S = 0.02
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
    __slots__ = ("delivery", "modest_until")

    def __init__(self, name: str, delivery: Turning) -> None:
        super().__init__(name)
        self.delivery = delivery
        self.modest_until = 0.0
        """It takes less than its share: others make room for it until then."""


class Edge:
    """One for each provider in a process. All on one loop."""

    def __init__(
        self,
        *,
        fair: FairQueue[DeliveryActor] | None = None,
        window: int = WINDOW,
        quota_s: float = QUOTA_S,
        modest_s: float = MODEST_S,
        budget: SendBudget | None = None,
    ) -> None:
        """`budget` bounds what waits to be sent; all edges of a process share one."""
        self.budget = budget or SendBudget()
        self._fair = fair or FairQueue[DeliveryActor]()
        self._window = window
        self._quota_s = quota_s
        self._modest_s = modest_s
        self._loop = asyncio.get_running_loop()
        self._armed = False
        self._asked_at = 0.0
        self._burden_s = 0.0
        """What the last turn cost, or how long the loop took to come to it, where that is more."""
        self._pause: asyncio.TimerHandle | None = None
        """The next turn is left to others for so long. Whoever was idle, and so is first, does not wait for that."""
        self._timer: asyncio.TimerHandle | None = None
        self._modest_until = 0.0
        """The last of theirs."""
        self._turn: DeliveryActor | None = None
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
        if self._pause is not None and actor.below_share and self._fair.first is actor:
            self._pause.cancel()
            self._ask()
        self._arm()

    def forget(self, actor: DeliveryActor) -> None:
        self._fair.forget(actor)

    def _arm(self) -> None:
        if self._armed or not len(self._fair):
            return
        first = self._fair.first
        if self._room(first):
            self._armed = True
            if self._makes_room(first):
                self._pause = self._loop.call_later(min(self._burden_s, MAX_PAUSE_S), self._ask)
            else:
                self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(STALLED_S, self._look_again)

    def _makes_room(self, actor: DeliveryActor | None) -> bool:
        """Whether it is to leave room for somebody more modest."""
        now = self._asked_at
        return now < self._modest_until and actor is not None and not (actor.below_share or now < actor.modest_until)

    def _look_again(self) -> None:
        self._timer = None
        self._arm()

    def _ask(self) -> None:
        self._pause = None
        self._asked_at = self._loop.time()
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        """One turn. The loop goes round before the next."""
        self._armed = False
        lag_s = self._loop.time() - self._asked_at
        actor = self._turn = self._fair.next()
        if actor is None:
            return
        if actor.below_share:
            actor.modest_until = self._modest_until = self._asked_at + self._modest_s
        # Charged is what it took of the processor: that the system gave that to others is no debt.
        began, charged, messages = perf_counter(), thread_time(), self._begun
        try:
            if actor.delivery.turn(began + self._quota_s):
                self._fair.schedule(actor)
        finally:
            cost_s = thread_time() - charged + MESSAGE_S * (self._begun - messages)
            self._burden_s = max(cost_s, lag_s)
            self._fair.done(actor, cost_s)
            self._arm()

    # ---- messages on their way -------------------------------------------------------------------------------------

    def may_send(self) -> bool:
        """Whether one more message of the actor that has the turn may be on its way."""
        return self._room(self._turn)

    def _room(self, actor: DeliveryActor | None) -> bool:
        sending = self._sending
        window = 1 if self._makes_room(actor) else self._window
        if len(sending) >= window:
            late = self._loop.time() - STALLED_S
            for member in [member for member, since in sending.items() if since <= late]:
                del sending[member]
        return len(sending) < window

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
        member.sent()
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
