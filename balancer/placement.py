"""What a balancer looks at, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

_NOTHING: Mapping[int, str] = MappingProxyType({})


class Placement(NamedTuple):
    """The queues of one provider and the silos that can serve it, at one moment.

    Nobody is named in two of `members`, `away` and `newcomers`.
    """

    members: Sequence[str]
    """Who may have any queue."""
    queues: Sequence[int]
    owners: Mapping[int, str] = _NOTHING
    """Who has each queue now."""
    homes: Mapping[int, str] = _NOTHING
    """Who has each queue for good, as `homes` last said; it differs from the owner where the queue is lent."""
    away: Sequence[str] = ()
    """Members that are expected back. They get nothing; what is theirs is lent to others, and theirs again later."""
    newcomers: Sequence[str] = ()
    """Silos that take nothing over yet. They get what a configuration keeps for them by name, and no more."""
    fixed: Sequence[str] = ()
    """All silos there should ever be, from the configuration; for the best fits."""
    mapping: Mapping[int, str] = _NOTHING
    """Silo of each queue, from the configuration; for `static`."""


Balancer: TypeAlias = Callable[[Placement], Mapping[int, str]]
"""Says who should have each queue: members and newcomers only. A queue that nobody can serve is left out.

A pure function: all silos of a cluster ask it by themselves and must come to the same, in whatever order the arguments
name silos and queues. It may take `owners` and `homes` into account, so as to move less.
"""


def homes(balancer: Balancer, placement: Placement) -> Mapping[int, str]:
    """Who should have each queue for good: who gets it when all who are away have come back.

    Keep the answer, and give it as `Placement.homes` the next time.
    """
    return balancer(placement._replace(members=[*placement.members, *placement.away], away=()))
