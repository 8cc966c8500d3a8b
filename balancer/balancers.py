"""Balancers decide which silo should serve which queue of a provider. They are pure functions of a `Placement`.

Requirements for all of them:
- Every queue that a silo can serve gets exactly one silo, and only one that can serve it.
- The order in which a placement names silos and queues does not matter, so that silos agree without communication.
- The queues of a silo that is away for a short time are lent to other silos and return later; no other queue moves.

Leases carry out the moves. See docs/cluster.md for how to choose a balancer.

- `lease_count`, the default: shares differ by at most one queue, and as few queues as possible move. The result depends
  on the current owners.
- `ring`: a silo has at most 1.25 times the mean. When a silo comes or goes, few queues of other silos move. The result
  depends on names alone.
- `best_fit_live`, `best_fit_fixed`: Orleans' deployment balancer. Each silo of a configured list has a run of queues of
  its own. The queues of missing silos are lent to the others, or wait.
- `average`: EQueue's, for the present silos. Each gets a run of queues; many queues move when silos come or go.
- `static`: as configured.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from importlib.metadata import entry_points
from itertools import chain
from typing import cast

from ..streams.errors import InvalidArgument, NotFound
from .allocation import average_allocation, sticky_allocation
from .hashring import hash_text
from .hashring import ring as ring_of
from .placement import Balancer, Placement

GROUP = "headrace.balancers"
DEFAULT = "lease-count"

_POINTS_PER_SILO = 256


def lease_count(placement: Placement) -> Mapping[int, str]:
    """Equal shares, which differ by at most one queue. A silo keeps its queues up to its share; only a surplus
    moves."""
    queues = sorted(placement.queues)
    silos = [*placement.members, *placement.away]
    homes = _sticky(queues, silos, placement.homes, placement.owners)
    return _sticky(queues, placement.members, homes, placement.owners) if placement.away else homes


def ring(placement: Placement) -> Mapping[int, str]:
    """The consistent ring with bounded loads (Mirrokni and others 2016), by the names of the silos.

    No silo has more than 1.25 times the mean, or than the mean rounded up if that is more. Queues are assigned in their
    order; full silos are skipped.
    """
    silos = [*placement.members, *placement.away]
    return _lend(_bounded_ring(sorted(placement.queues), silos), placement.members)


def best_fit_live(placement: Placement) -> Mapping[int, str]:
    """Each present silo of the list `fixed` has its run. The queues of the others go to the silos with the fewest.

    Without a list, it is the same as `average`. Silos that the list does not name get no queues.
    """
    if not placement.fixed:
        return average(placement)
    members = [name for name in placement.members if name in placement.fixed]
    away = [name for name in placement.away if name in placement.fixed]
    # First lend the queues of silos that are gone, then of those that are away: a short absence then moves no others.
    homes = _lend(_runs(placement.queues, placement.fixed), [*members, *away], placement.newcomers)
    return _lend(homes, members, placement.newcomers)


def best_fit_fixed(placement: Placement) -> Mapping[int, str]:
    """Each silo of the list `fixed` has its run. The queues of a missing silo wait for it."""
    return _present(_runs(placement.queues, placement.fixed), placement)


def average(placement: Placement) -> Mapping[int, str]:
    """Average allocation: the members, in the order of their names, have runs of queues that differ by at most one."""
    silos = [*placement.members, *placement.away]
    return _lend(_runs(placement.queues, silos), placement.members)


def static(placement: Placement) -> Mapping[int, str]:
    """Each queue goes to its silo in `mapping`. It has no silo if `mapping` does not name it, or its silo is
    missing."""
    queues = set(placement.queues)
    return _present({queue: name for queue, name in placement.mapping.items() if queue in queues}, placement)


BUILT_IN: Mapping[str, Balancer] = {
    "average": average,
    "best-fit-fixed": best_fit_fixed,
    "best-fit-live": best_fit_live,
    "lease-count": lease_count,
    "ring": ring,
    "static": static,
}


def balancer_names() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def find_balancer(name: str = DEFAULT) -> Balancer:
    """Return the balancer called `name`: one of `BUILT_IN`, or one of the entry point group `headrace.balancers`.

    Reads files if it is not built in. Raises NotFound, with the names of all balancers. An installed balancer raises
    InvalidArgument if its result has an unknown queue, or a silo that is neither a member nor a newcomer.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    for entry in entry_points(group=GROUP, name=name):
        return _checked(name, cast(Balancer, entry.load()))
    raise NotFound(f"there is no balancer {name!r}; installed are: {', '.join(balancer_names())}")


def _checked(name: str, balancer: Balancer) -> Balancer:
    def checked(placement: Placement) -> Mapping[int, str]:
        answer = balancer(placement)
        queues, silos = set(placement.queues), {*placement.members, *placement.newcomers}
        for queue, silo in answer.items():
            if queue not in queues or silo not in silos:
                raise InvalidArgument(
                    f"the balancer {name!r} assigned queue {queue!r} to silo {silo!r}: one of them does not exist, or "
                    "the silo cannot take queues now"
                )
        return answer

    return checked


def _sticky(queues: Sequence[int], members: Sequence[str], *owners: Mapping[int, str]) -> dict[int, str]:
    """Apply `sticky_allocation`, which numbers queues from 0, to these queues."""
    by_place = [{place: owner[queue] for place, queue in enumerate(queues) if queue in owner} for owner in owners]
    return _by_queue(queues, sticky_allocation(len(queues), members, *by_place))


def _runs(queues: Collection[int], silos: Sequence[str]) -> dict[int, str]:
    """Return each silo's own run of queues. This is also the ideal share of Orleans' best fit."""
    return _by_queue(sorted(queues), average_allocation(len(queues), silos))


def _by_queue(queues: Sequence[int], places: Mapping[str, Sequence[int]]) -> dict[int, str]:
    return {queues[place]: name for name, mine in places.items() for place in mine}


def _present(homes: Mapping[int, str], placement: Placement) -> dict[int, str]:
    present = {*placement.members, *placement.newcomers}
    return {queue: name for queue, name in homes.items() if name in present}


def _lend(homes: Mapping[int, str], members: Sequence[str], newcomers: Sequence[str] = ()) -> dict[int, str]:
    """Leave the queues of present silos with them. Lend each other queue to the member that has the fewest.

    This is Orleans' best fit: missing silos are handled in the order of their names, one queue after the other.
    """
    own: dict[str, list[int]] = {name: [] for name in sorted({*members, *newcomers, *homes.values()})}
    for queue in sorted(homes):
        own[homes[queue]].append(queue)
    have = {name: own.pop(name) for name in sorted({*members, *newcomers})}
    fewest = [(len(have[name]), name) for name in members]
    heapify(fewest)
    for queue in chain.from_iterable(own.values()) if fewest else ():
        count, name = fewest[0]
        have[name].append(queue)
        heapreplace(fewest, (count + 1, name))
    return {queue: name for name, mine in have.items() for queue in mine}


def _bounded_ring(queues: Sequence[int], silos: Sequence[str]) -> dict[int, str]:
    if not silos:
        return {}
    free = dict.fromkeys(silos, _bound(len(queues), len(silos)))
    homes: dict[int, str] = {}
    for queue in queues:
        homes[queue] = next(name for name in _along(tuple(sorted(silos)), queue) if free[name])
        free[homes[queue]] -= 1
    return homes


def _bound(queues: int, silos: int) -> int:
    """Return 1.25 times the mean, rounded down. It is at least the mean rounded up, or some queues would have no
    silo."""
    return max(-(-queues // silos), queues * 5 // (4 * silos))


def _along(silos: tuple[str, ...], queue: int) -> Iterator[str]:
    """Yield the silos in the order of their points on the ring, from the queue's hash on."""
    positions, owners = _points(silos)
    start = bisect(positions, hash_text(f"queue {queue}"))
    return (owners[place - len(owners)] for place in range(start, start + len(owners)))


@lru_cache(maxsize=16)
def _points(silos: tuple[str, ...]) -> tuple[list[int], list[str]]:
    return ring_of(silos, _POINTS_PER_SILO)
