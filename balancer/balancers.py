"""Balancers: which silo should serve which queue of a provider. Pure functions of a `Placement`.

Requirements, for all of them: every queue that somebody can serve has exactly one silo, and never one that cannot serve
it; the same placement gives the same answer in whatever order it is written down, so that silos agree without talking;
what a silo that is away for a short time has is lent to others and returns to it, and nothing else moves. A lease moves
the queue; see docs/cluster.md for how to choose.

- `lease_count`, the default: shares within one, and the fewest moves there can be. Depends on who has what now.
- `ring`: bounded by 1.25 times the mean; a silo that comes or goes moves little but its own. Depends on names alone.
- `best_fit_live`, `best_fit_fixed`: Orleans' deployment balancer. Each silo of a configured list has a run of queues as
  its own; those of missing silos are dealt out among the others, or wait.
- `average`: EQueue's, over whoever is there. A run of queues for each; moves many when silos come or go.
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
    """An even share for each, within one. Everybody keeps what it has up to its share, so only a surplus moves."""
    queues = sorted(placement.queues)
    everybody = [*placement.members, *placement.away]
    at_home = _sticky(queues, everybody, placement.homes, placement.owners)
    return _sticky(queues, placement.members, at_home, placement.owners) if placement.away else at_home


def ring(placement: Placement) -> Mapping[int, str]:
    """The consistent ring with bounded loads (Mirrokni and others 2016), by the names of the silos.

    Nobody has more than 1.25 times the mean, or than the mean rounded up where that is more. Whoever is full is passed
    over, in the order of the queues.
    """
    everybody = [*placement.members, *placement.away]
    return _lent(_bounded_ring(sorted(placement.queues), everybody), placement.members)


def best_fit_live(placement: Placement) -> Mapping[int, str]:
    """Each silo of the `fixed` list that is there has its run; the queues of the others are dealt to who has fewest.

    Without a list it is `average`. Silos that the list does not name get nothing.
    """
    if not placement.fixed:
        return average(placement)
    members = [name for name in placement.members if name in placement.fixed]
    away = [name for name in placement.away if name in placement.fixed]
    # First who is long gone, then who is away: so a short absence does not deal the other queues anew.
    at_home = _lent(_runs(placement.queues, placement.fixed), [*members, *away], placement.newcomers)
    return _lent(at_home, members, placement.newcomers)


def best_fit_fixed(placement: Placement) -> Mapping[int, str]:
    """Each silo of the `fixed` list has its run, whoever is there. The queues of a missing silo wait for it."""
    return _present(_runs(placement.queues, placement.fixed), placement)


def average(placement: Placement) -> Mapping[int, str]:
    """Average allocation: in the order of their names the members have runs of queues, within one."""
    everybody = [*placement.members, *placement.away]
    return _lent(_runs(placement.queues, everybody), placement.members)


def static(placement: Placement) -> Mapping[int, str]:
    """As the `mapping` says. A queue that it does not name, or whose silo is missing, has nobody."""
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
    """The balancer called `name`: one of `BUILT_IN`, or one installed under the entry point group `headrace.balancers`.

    Reads files where it is not built in. Raises NotFound with the names there are. An installed one raises
    InvalidArgument when it gives out a queue that there is not, or to somebody who may not have it.
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
                    f"the balancer {name!r} gave queue {queue!r} to {silo!r}, one of which is not there"
                )
        return answer

    return checked


def _sticky(queues: Sequence[int], members: Sequence[str], *owners: Mapping[int, str]) -> dict[int, str]:
    """`sticky_allocation` of these queues, which it knows by their places."""
    by_place = [{place: said[queue] for place, queue in enumerate(queues) if queue in said} for said in owners]
    return _by_queue(queues, sticky_allocation(len(queues), members, *by_place))


def _runs(queues: Collection[int], silos: Sequence[str]) -> dict[int, str]:
    """What is each silo's own, as a run of queues. It is also the ideal share of Orleans' best fit."""
    return _by_queue(sorted(queues), average_allocation(len(queues), silos))


def _by_queue(queues: Sequence[int], places: Mapping[str, Sequence[int]]) -> dict[int, str]:
    return {queues[place]: name for name, mine in places.items() for place in mine}


def _present(homes: Mapping[int, str], placement: Placement) -> dict[int, str]:
    there = {*placement.members, *placement.newcomers}
    return {queue: name for queue, name in homes.items() if name in there}


def _lent(homes: Mapping[int, str], members: Sequence[str], newcomers: Sequence[str] = ()) -> dict[int, str]:
    """Who is there keeps its own. The queues of the others are dealt to the members, whoever has fewest first.

    That is Orleans' best fit: the missing silos in the order of their names, one queue after the other.
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
    room = dict.fromkeys(silos, _bound(len(queues), len(silos)))
    homes: dict[int, str] = {}
    for queue in queues:
        homes[queue] = next(name for name in _along(tuple(sorted(silos)), queue) if room[name])
        room[homes[queue]] -= 1
    return homes


def _bound(queues: int, silos: int) -> int:
    """1.25 times the mean, rounded down; but at least the mean rounded up, or there would not be room for all."""
    return max(-(-queues // silos), queues * 5 // (4 * silos))


def _along(silos: tuple[str, ...], queue: int) -> Iterator[str]:
    """Whom one meets on the ring from the place of the queue on."""
    positions, owners = _points(silos)
    start = bisect(positions, hash_text(f"queue {queue}"))
    return (owners[place - len(owners)] for place in range(start, start + len(owners)))


@lru_cache(maxsize=16)
def _points(silos: tuple[str, ...]) -> tuple[list[int], list[str]]:
    return ring_of(silos, _POINTS_PER_SILO)
