"""The delivery edge decides which subscription's events are handed to remote consumers next.

Every (subscription, queue) is an actor. Most of its cost is not its own turn, which only hands out parcels, but the
sending and the acknowledgements afterwards. So three rules keep the order fair:

- Virtual time decides which actor has the next turn (`fairness.py`). Messages are charged to their actor.
- Only a few messages are on their way at a time, so the next actor is chosen again after every few messages. A message
  that a slow connection holds up leaves this window soon, so slow consumers cannot close it.
- While an actor is served that takes less than its share, the others fill neither the window nor the loop. Its messages
  find both nearly idle. If all actors want more than their share, none is held back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Protocol

from ...streams.events import EventBatch
from ...streams.frames import BatchParts, frame, part
from .fairness import Actor, FairQueue
from .member import Member
from .unsent import SendBudget

WINDOW = 4
"""The most messages on their way at a time."""
MODEST_S = 0.25
"""How long the other actors make room after a turn of an actor below its share, in seconds. Meanwhile they have at most
one message on its way. Before each of their turns, the loop stays free for as long as the turn before took, or for as
long as that turn waited for the loop, if that was longer."""
STALLED_S = 0.005
"""A message that takes longer than this, in seconds, leaves the window: it waits for its consumer."""
QUOTA_S = 0.001
"""How long a turn may take, in seconds. Less than QMQ's 5 ms: the work after a turn is not preempted."""
MAX_PAUSE_S = 0.02
MESSAGE_S = 0.0002
"""Cost of a message in seconds, without the turn: sending it, and taking its acknowledgement. Measured."""
FRAMES_BYTES = 4 << 20
FRAME_WORTH = 4096
"""Frames of batches with fewer bytes are not kept: it is faster to make them again."""
PARTS_EVENTS = 65_536
"""The most events, over all batches that are sent in parts, whose positions in their encoded batch are remembered."""
PARTS_WORTH = 64
"""The positions in batches of fewer events are not kept: it is faster to read the batch again."""


class Schedulable(Protocol):
    """A delivery to the members of a group, as the edge sees it."""

    def turn(self, ends: float) -> bool:
        """Hand out at least one parcel if possible, and go on until `ends` (`perf_counter`). Return whether it could
        go on."""
        ...


class DeliveryActor(Actor):
    __slots__ = ("delivery", "modest_until")

    def __init__(self, name: str, delivery: Schedulable) -> None:
        super().__init__(name)
        self.delivery = delivery
        self.modest_until = 0.0
        """Loop time until which the others make room for it, because it takes less than its share."""


class Edge:
    """Gives turns to the deliveries of one provider in this process. All on one loop."""

    def __init__(
        self,
        *,
        fair: FairQueue[DeliveryActor] | None = None,
        window: int = WINDOW,
        quota_s: float = QUOTA_S,
        modest_s: float = MODEST_S,
        budget: SendBudget | None = None,
    ) -> None:
        """`budget` bounds the bytes that wait to be sent; all edges of a process share one."""
        self.budget = budget or SendBudget()
        self._fair = fair or FairQueue[DeliveryActor]()
        self._window = window
        self._quota_s = quota_s
        self._modest_s = modest_s
        self._loop = asyncio.get_running_loop()
        self._armed = False
        self._asked_at = 0.0
        self._burden_s = 0.0
        """Cost of the last turn, or the time until the loop came to it, if that is more."""
        self._pause: asyncio.TimerHandle | None = None
        """Begins the next turn after a pause for other actors. An actor below its share ends the pause."""
        self._timer: asyncio.TimerHandle | None = None
        self._modest_until = 0.0
        """The last `modest_until` of all actors."""
        self._turn: DeliveryActor | None = None
        self._sending: dict[Member, float] = {}
        """Members to which a message is on its way, with the loop time of its beginning."""
        self._begun = 0
        """Number of messages begun so far. A message that waits for the one before it counts, too."""
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._frames_bytes = 0
        self._parts: OrderedDict[tuple[int, int], BatchParts] = OrderedDict()
        self._parts_events = 0
        self.messages = 0

    # ---- turns -----------------------------------------------------------------------------------------------------

    def wake(self, actor: DeliveryActor) -> None:
        """Give the actor a turn: its delivery may hand out events."""
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
        if self._has_slot(first):
            self._armed = True
            if self._makes_room(first):
                self._pause = self._loop.call_later(min(self._burden_s, MAX_PAUSE_S), self._ask)
            else:
                self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(STALLED_S, self._look_again)

    def _makes_room(self, actor: DeliveryActor | None) -> bool:
        """Whether the actor makes room for another one that takes less than its share."""
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
        """Run one turn. Other callbacks of the loop run before the next."""
        self._armed = False
        lag_s = self._loop.time() - self._asked_at
        actor = self._turn = self._fair.next()
        if actor is None:
            return
        if actor.below_share:
            actor.modest_until = self._modest_until = self._asked_at + self._modest_s
        # Charge the time on the processor: the actor does not owe the time that the system gave to other threads.
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
        return self._has_slot(self._turn)

    def _has_slot(self, actor: DeliveryActor | None) -> bool:
        sending = self._sending
        window = 1 if self._makes_room(actor) else self._window
        if len(sending) >= window:
            late = self._loop.time() - STALLED_S
            for member in [member for member, since in sending.items() if since <= late]:
                del sending[member]
        return len(sending) < window

    def put(self, member: Member, frame: bytes) -> None:
        """Put a frame into the member's outbox. If no message is on its way to the member, sending begins."""
        if not member.outbox:
            self._begun += 1
        member.put(frame)
        if not member.busy:
            member.busy = True
            self._sending[member] = self._loop.time()
            member.on_outbox()

    def sent(self, member: Member) -> bool:
        """A message was sent, or its member is gone. Return whether there is more to send to the member."""
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
        """Return the frame of a whole batch, for all members that get it for the first time."""
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
        """Return some events of a batch, encoded as one batch. Raises InvalidArgument if the batch is damaged."""
        if batch.count < PARTS_WORTH:
            return part(batch, indexes)
        key = queue, batch.offset
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = BatchParts(batch)
            self._parts_events += found.count
            while self._parts_events > PARTS_EVENTS and len(self._parts) > 1:
                self._parts_events -= self._parts.popitem(last=False)[1].count
        return found.encode(indexes)
