"""What the silos of a cluster know of one another: members, leases of queues, and the view of both. Plain data.

All times are microseconds by the store's own clock (`headrace.streams.store_clock`): compare them with `now_us` of the
same view, never with a clock of this process.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from .errors import Fenced


class Superseded(Fenced):
    """Another process joined under the silo's name."""


class SiloState(enum.Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    """Gets no new queue, and gives away those it has."""
    DEAD = "dead"
    """Declared by its peers, or known to be gone: nothing it still wants from the store is granted."""
    LEFT = "left"


LIVING = (SiloState.ACTIVE, SiloState.LEAVING)


class SiloRecord(NamedTuple):
    """One run of a silo: the same name with a higher incarnation is a later one, and there is at most one per name."""

    name: str
    incarnation: int
    """Grows over the whole cluster: of two silos, the one that joined later has the higher one."""
    address: str
    serves: Sequence[str]
    """The providers that it can serve, by name."""
    state: SiloState
    joined_at_us: int
    heartbeat_at_us: int
    suspected_by: Sequence[str]
    """Silos whose vote against it counts at this moment, by name."""


class Lease(NamedTuple):
    """The right to serve a queue. `epoch` grows by one with each grant and never comes back."""

    provider: str
    queue: int
    owner: str
    """Name of the silo; "" where nobody has it."""
    incarnation: int
    epoch: int
    expires_at_us: int
    home: str = ""
    """Who should have the queue once everybody is there, by name, as its last owner found; it may be lent."""


class ClusterView(NamedTuple):
    """The cluster at one moment of the store: silos by name, leases by provider and queue.

    A lease whose time is over still names its last owner; a queue that nobody ever had is missing.
    """

    now_us: int
    silos: Sequence[SiloRecord]
    leases: Sequence[Lease]
