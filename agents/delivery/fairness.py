"""Fair scheduling at the delivery edge: many consumers or cold reads of one client do not delay the other clients.

Pure: no I/O, no clock. The caller runs the turns and reports their costs. The actors are those of QMQ: there is one for
each key. An actor never has two turns at once, and runs for a quota.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each actor has a virtual time: the cost of its turns
so far. The actor with the smallest one runs next. The queue's own virtual time is the start of the turn that began
last. An actor that was idle starts there, not in the past. Neither order of QMQ has this rule. With the order by total
cost, a new actor starves all others until it has caught up. With the order by last start, an expensive actor takes a
multiple of its share.

Guarantees: the service of two actors that always have work differs by at most one turn of each. Between two turns, an
actor waits for each other actor at most as long as its own last turn and one turn of the other. An actor that was idle
waits at most for a turn of each other actor, and for the turns that run already.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

TURN_COST_S = 1e-6
"""The least cost of a turn, in seconds: its scheduling. Turns too short for the clock are not free."""


class ActorState(enum.Enum):
    IDLE = "idle"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    FORGOTTEN = "forgotten"


class Actor:
    """Runs in turns, one at a time. Only the queue writes its fields. Subclasses add fields for their turns."""

    __slots__ = ("below_share", "name", "served_s", "state", "turn", "virtual_s", "wanted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ActorState.IDLE
        self.virtual_s = 0.0
        """Its virtual time: the cost of its turns, moved up to the present whenever it had been idle."""
        self.served_s = 0.0
        """Cost of all its turns."""
        self.turn = 0
        """The number of its last turn, counted over all actors; 0: it never ran."""
        self.wanted = False
        """Whether it was scheduled since its last turn began."""
        self.below_share = False
        """Whether it had used less than its share when it was last scheduled: its virtual time was in the past."""

    def __repr__(self) -> str:
        return f"Actor({self.name!r}, {self.state.value}, virtual_s={self.virtual_s:.6f})"


A = TypeVar("A", bound=Actor)


def by_virtual_time(actor: Actor) -> float:
    return actor.virtual_s


class FairQueue(Generic[A]):
    """Actors that wait for a turn; `len` is their number. Scheduling and taking the next one cost O(log n).

    `order` gives the key of an actor when it is scheduled. The actor with the least key is next; of equal ones, the
    first that came. The queue refers only to actors that wait: it does not keep idle ones in memory.
    """

    def __init__(self, order: Callable[[A], float] = by_virtual_time) -> None:
        self.virtual_s = 0.0
        """The present in virtual time. Never decreases."""
        self._order = order
        self._heap: list[tuple[float, int, A]] = []
        self._arrivals = 0
        self._turns = 0
        self._running = 0
        self._waiting = 0
        self._forgotten = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def first(self) -> A | None:
        """The actor that is next, unless it was forgotten since it was scheduled. None if no actor waits."""
        return self._heap[0][2] if self._heap else None

    @property
    def running(self) -> int:
        """The number of actors that have a turn now."""
        return self._running

    def schedule(self, actor: A) -> bool:
        """Request a turn that begins after this call. Return whether this call put the actor among the waiting ones.

        An actor that waits already keeps its place. A running one gets its turn afterwards.
        """
        actor.wanted = True
        return self._admit(actor)

    def next(self) -> A | None:
        """Begin the next turn. Return its actor, to be given to `done` when the turn ends; None if no actor waits."""
        while self._heap:
            actor = heappop(self._heap)[2]
            if actor.state is ActorState.FORGOTTEN:
                self._forgotten -= 1
            else:
                self._begin(actor)
                return actor
        return None

    def done(self, actor: A, cost_s: float) -> bool:
        """End the turn of an actor, which took `cost_s` seconds. Return whether the actor waits again, because it was
        scheduled meanwhile."""
        if actor.state is ActorState.FORGOTTEN:
            return False
        if actor.state is not ActorState.RUNNING:
            raise RuntimeError(f"{actor!r} has no turn to end: `next` gives one")
        cost_s = max(cost_s, TURN_COST_S)
        actor.served_s += cost_s
        actor.virtual_s += cost_s
        actor.state = ActorState.IDLE
        self._running -= 1
        if not self._waiting and not self._running and not actor.wanted:
            # No actor waited for the end of this turn: the actor need not wait for its cost later.
            self.virtual_s = max(self.virtual_s, actor.virtual_s)
        return self._admit(actor)

    def forget(self, actor: A) -> None:
        """Never give the actor a turn again. A running turn may end with or without `done`."""
        if actor.state is ActorState.RUNNING:
            self._running -= 1
        if actor.state is ActorState.SCHEDULED:
            self._waiting -= 1
            self._forgotten += 1
        actor.state = ActorState.FORGOTTEN
        if 2 * self._forgotten > len(self._heap):
            self._sweep()

    def _admit(self, actor: A) -> bool:
        if not actor.wanted or actor.state is not ActorState.IDLE:
            return False
        actor.state = ActorState.SCHEDULED
        actor.below_share = actor.virtual_s < self.virtual_s
        actor.virtual_s = max(actor.virtual_s, self.virtual_s)
        self._arrivals += 1
        self._waiting += 1
        # The key must not change while the actor is in the heap: only `done` charges, and it has no turn meanwhile.
        heappush(self._heap, (self._order(actor), self._arrivals, actor))
        return True

    def _begin(self, actor: A) -> None:
        actor.state = ActorState.RUNNING
        actor.wanted = False
        self._turns += 1
        actor.turn = self._turns
        self._waiting -= 1
        self._running += 1
        self.virtual_s = max(self.virtual_s, actor.virtual_s)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].state is not ActorState.FORGOTTEN]
        heapify(self._heap)
        self._forgotten = 0
