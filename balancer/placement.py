"""The interface of balancers, and their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

_NOTHING: Mapping[int, str] = MappingProxyType({})


class Placement(NamedTuple):
    """The queues of one provider and the silos that can serve it, at one moment.

    Each silo is in at most one of `members`, `away` and `newcomers`.
    """

    members: Sequence[str]
    """Silos that may get any queue."""
    queues: Sequence[int]
    owners: Mapping[int, str] = _NOTHING
    """The silo that has each queue now."""
    homes: Mapping[int, str] = _NOTHING
    """The permanent silo of each queue, as `homes` returned it last. It differs from the owner while a queue is
    lent."""
    away: Sequence[str] = ()
    """Members that are expected back. They get no queues: theirs are lent to other silos until they return."""
    newcomers: Sequence[str] = ()
    """Silos that do not take over queues yet. They get only queues that the configuration assigns to them by name."""
    fixed: Sequence[str] = ()
    """All silos that the cluster should have, from the configuration; for the balancers `best-fit-*`."""
    mapping: Mapping[int, str] = _NOTHING
    """Silo of each queue, from the configuration; for `static`."""


Balancer: TypeAlias = Callable[[Placement], Mapping[int, str]]
"""Returns the silo that should have each queue: a member or a newcomer. A queue that no silo can serve is left out.

It is a pure function. Each silo of a cluster calls it by itself, and all must get the same result, so it must not
depend on the order in which the arguments name silos and queues. It may use `owners` and `homes` to move fewer queues.
"""


def homes(balancer: Balancer, placement: Placement) -> Mapping[int, str]:
    """Return the permanent silo of each queue: the one that gets it when all silos that are away have returned.

    Store the result, and pass it as `Placement.homes` the next time.
    """
    return balancer(placement._replace(members=[*placement.members, *placement.away], away=()))
