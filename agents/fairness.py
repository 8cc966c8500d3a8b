"""Fair scheduling: who runs next at the delivery edge, so that nobody's many consumers or cold reads delay the others.

Pure: no I/O, no clock; the caller runs the turns and says what each cost. The actors are QMQ's: one per key, never run
twice at once, run for a quota, suspended when it has to wait. The order is start-time fair queueing (Goyal, Vin and
Cheng, 1996): each actor has a virtual time, the cost of its turns so far; the smallest runs next, and the queue's own
virtual time is the start of the turn that began last. Who was idle starts there, not in the past. QMQ's two orders each
lack that: by least total cost a newcomer starves everyone until it has caught up, by last start an expensive one takes
a multiple of its share.

What is promised: actors that always have work get the same service, to within one turn of each. Between the end of one
turn and the start of the next an actor waits, for every other one, at most as long as its own last turn and one turn
of the other; one that was idle waits at most a turn of each other one, and those that run already.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

QUOTA_S = 0.005
"""How long a turn may go on taking items. It takes at least one, and finishes the one it has."""
TURN_COST_S = 1e-6
"""What a turn costs at least: its scheduling. Turns too short for the clock are not free."""


class State(enum.Enum):
    IDLE = "idle"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    FORGOTTEN = "forgotten"


class Actor:
    """Something that runs in turns, one at a time. Its fields are the queue's; subclasses add what a turn needs."""

    __slots__ = ("below_share", "name", "served_s", "state", "suspensions", "turn", "virtual_s", "wanted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.IDLE
        self.virtual_s = 0.0
        """Where it stands in virtual time: what its turns cost, moved up to the present whenever it had been idle."""
        self.served_s = 0.0
        """What its turns cost in all."""
        self.turn = 0
        """The number of its last turn, counted over all actors; 0: it never ran."""
        self.suspensions = 0
        self.wanted = False
        """Whether it was scheduled since its last turn began."""
        self.below_share = False
        """Whether it had been idle for a part of its share when it was scheduled last."""

    def __repr__(self) -> str:
        return (
            f"Actor({self.name!r}, {self.state.value}, suspensions={self.suspensions}, virtual_s={self.virtual_s:.6f})"
        )


A = TypeVar("A", bound=Actor)


def by_virtual_time(actor: Actor) -> float:
    return actor.virtual_s


class FairQueue(Generic[A]):
    """Actors that wait for a turn. Scheduling and taking the next one cost O(log n); `len` is how many wait.

    `order` gives the key of an actor when it is scheduled: the least is next, of equal ones the first that came. The
    queue holds only the actors that wait: an idle one is kept alive by its owner alone.
    """

    def __init__(self, order: Callable[[A], float] = by_virtual_time) -> None:
        self.virtual_s = 0.0
        """The present in virtual time. Never goes back."""
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
        """Who is next, as far as is known without asking: None where nobody waits."""
        return self._heap[0][2] if self._heap else None

    @property
    def running(self) -> int:
        """How many actors have a turn now."""
        return self._running

    def schedule(self, actor: A) -> bool:
        """Ask for a turn that begins after this call; whether the actor was put among the waiting just now.

        One that waits already has its turn to come; one that is running or suspended gets it afterwards.
        """
        actor.wanted = True
        return self._admit(actor)

    def next(self) -> A | None:
        """Begin the next turn: its actor, to be given to `done` when it ends, or None when nobody waits."""
        while self._heap:
            actor = heappop(self._heap)[2]
            if actor.state is State.FORGOTTEN:
                self._forgotten -= 1
            elif actor.suspensions:
                actor.state = State.IDLE
            else:
                self._begin(actor)
                return actor
        return None

    def done(self, actor: A, cost_s: float) -> bool:
        """End the turn of an actor, which took `cost_s` seconds; whether it waits again, as it was wanted meanwhile."""
        if actor.state is State.FORGOTTEN:
            return False
        if actor.state is not State.RUNNING:
            raise RuntimeError(f"{actor!r} has no turn to end: `next` gives one")
        cost_s = max(cost_s, TURN_COST_S)
        actor.served_s += cost_s
        actor.virtual_s += cost_s
        actor.state = State.IDLE
        self._running -= 1
        if not self._waiting and not self._running and not actor.wanted:
            # A turn that nobody waited for, also not for what comes after it, is no debt.
            self.virtual_s = max(self.virtual_s, actor.virtual_s)
        return self._admit(actor)

    def suspend(self, actor: A) -> None:
        """Give the actor no turn until it is resumed as often as it was suspended. A turn it has goes on."""
        if actor.state is State.SCHEDULED and not actor.suspensions:
            self._waiting -= 1
        actor.suspensions += 1

    def resume(self, actor: A) -> bool:
        """Take one suspension back, if there is any; whether the actor waits again, having been wanted meanwhile."""
        if not actor.suspensions:
            return False
        actor.suspensions -= 1
        if actor.suspensions or actor.state is not State.SCHEDULED:
            return self._admit(actor)
        self._waiting += 1
        return True

    def forget(self, actor: A) -> None:
        """Never give the actor a turn again. A turn it has ends with or without `done`."""
        if actor.state is State.RUNNING:
            self._running -= 1
        if actor.state is State.SCHEDULED:
            self._waiting -= not actor.suspensions
            self._forgotten += 1
        actor.state = State.FORGOTTEN
        if 2 * self._forgotten > len(self._heap):
            self._sweep()

    def _admit(self, actor: A) -> bool:
        if not actor.wanted or actor.suspensions or actor.state is not State.IDLE:
            return False
        actor.state = State.SCHEDULED
        actor.below_share = actor.virtual_s < self.virtual_s
        actor.virtual_s = max(actor.virtual_s, self.virtual_s)
        self._arrivals += 1
        self._waiting += 1
        # The key must not change while the actor is in the heap: only `done` charges, and it has no turn meanwhile.
        heappush(self._heap, (self._order(actor), self._arrivals, actor))
        return True

    def _begin(self, actor: A) -> None:
        actor.state = State.RUNNING
        actor.wanted = False
        self._turns += 1
        actor.turn = self._turns
        self._waiting -= 1
        self._running += 1
        self.virtual_s = max(self.virtual_s, actor.virtual_s)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].state is not State.FORGOTTEN]
        heapify(self._heap)
        self._forgotten = 0
