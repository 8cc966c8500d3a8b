"""The last changes of the owners of queues, as this silo saw them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..streams.cluster import LIVING, ClusterView, SiloState

KEPT_MOVES = 1000

_REASONS = {SiloState.DEAD: "the silo {} was declared dead", SiloState.LEFT: "the silo {} left the cluster"}


class QueueMove(NamedTuple):
    """A queue has another owner."""

    at_us: int
    provider: str
    queue: int
    epoch: int
    from_silo: str
    """The former owner; "" if there was none."""
    to_silo: str
    """The new owner; "" if there is none."""
    reason: str


class MoveHistory:
    """Compares each view of the cluster with the one before."""

    def __init__(self) -> None:
        self._moves: deque[QueueMove] = deque(maxlen=KEPT_MOVES)
        self._owners: dict[tuple[str, int], str] | None = None
        """The last owner of each queue, also if its lease is over. None before the first view."""
        self._unserved: set[tuple[str, int]] = set()

    @property
    def moves(self) -> Sequence[QueueMove]:
        """The latest first."""
        return list(reversed(self._moves))

    def update(self, view: ClusterView, at_us: int) -> None:
        """Take a new view of the cluster, seen at `at_us`. The times in the view are those of the store's own clock."""
        valid = {(lease.provider, lease.queue): lease.owner for lease in view.valid}
        states = {silo.name: silo.state for silo in view.silos}
        first, owners = self._owners is None, self._owners or {}
        for lease in view.leases:
            queue = lease.provider, lease.queue
            before, now = owners.get(queue, ""), valid.get(queue, "")
            if now:
                self._unserved.discard(queue)
            elif before and states.get(before) is SiloState.DEAD and queue not in self._unserved:
                self._unserved.add(queue)
                self._moves.append(QueueMove(at_us, *queue, lease.epoch, before, "", _reason(states, before)))
            if now and now != before:
                owners[queue] = now
                if not first:
                    reason = _reason(states, before)
                    self._moves.append(QueueMove(at_us, *queue, lease.epoch, before, now, reason))
        self._owners = owners


def _reason(states: dict[str, SiloState], before: str) -> str:
    """Why a queue has left its owner."""
    if not before:
        return "no silo had it"
    state = states.get(before)
    if state in LIVING:
        return "balanced between the silos"
    return _REASONS.get(state, "the silo {} is gone").format(before) if state else f"the silo {before} is gone"
