"""Mode bound: the queues of a subscription are assigned to its members by average allocation (EQueue). Pure.

A queue is moved to another member only when the former one holds no events of it any more, or the drain time is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ...balancer import average_allocation

DRAIN_S = 10.0
"""How long a member may keep the events of a queue that is going to another member, in seconds."""


class QueueAssignment:
    """Assigns queues to members. The caller passes the members' ids to each call that needs them."""

    def __init__(self, queues: Sequence[int]) -> None:
        """`queues` are all queues to assign, also those of other silos. If empty, those that are delivered here."""
        self._queues = queues
        self._owners: dict[int, str] = {}
        self._draining: dict[int, float] = {}
        """Queues that go to another member, and the time until which the former one may keep their events."""

    def owner(self, queue: int) -> str:
        """Return the id of the member that may get events of a queue; "" if there is none at present."""
        return "" if queue in self._draining else self._owners.get(queue, "")

    def queues(self) -> dict[str, list[int]]:
        """Return the queues that are assigned to each member, by its id."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for queue in sorted(self._owners.keys() - self._draining.keys()):
            found[self._owners[queue]].append(queue)
        return found

    def assign(self, members: Iterable[str], here: Collection[int], held: Collection[int], now: float) -> list[int]:
        """Members or queues came or went: divide the queues that are delivered `here` among the members anew. Members
        hold events of the queues in `held`. Return the queues whose owner changed."""
        wanted, changed = self._wanted(members, here), list[int]()
        for queue in here:
            if self._owners.get(queue, "") == wanted.get(queue, ""):
                if self._draining.pop(queue, None) is not None:
                    changed.append(queue)
            elif queue in held:
                self._draining.setdefault(queue, now + DRAIN_S)
            else:
                self._give(queue, wanted.get(queue, ""))
                changed.append(queue)
        return changed

    def drained(self, queue: int, members: Iterable[str], here: Collection[int]) -> bool:
        """No member holds events of a queue any more. Return whether its owner changed."""
        if queue not in self._draining:
            return False
        self._give(queue, self._wanted(members, here).get(queue, ""))
        return True

    def overdue(self, now: float) -> list[int]:
        """Return the queues whose drain time is over."""
        return [queue for queue, until in self._draining.items() if now >= until]

    def forget(self, queue: int) -> None:
        """The queue is not delivered here any more."""
        self._owners.pop(queue, None)
        self._draining.pop(queue, None)

    def _wanted(self, members: Iterable[str], here: Collection[int]) -> dict[int, str]:
        queues = sorted(self._queues or here)
        dealt = average_allocation(len(queues), sorted(members))
        return {queues[position]: member for member, positions in dealt.items() for position in positions}

    def _give(self, queue: int, member: str) -> None:
        self._draining.pop(queue, None)
        self._owners[queue] = member
