"""Assigns queues to the members of a group: average allocation, and a sticky variant of it.

Requirements: every queue has exactly one member. Shares differ by at most one queue. The order in which members are
named does not matter, so that each silo gets the same result by itself. If there are more members than queues, some
members get none.

`average_allocation` is EQueue's (and RocketMQ's) AverageAllocate. The members, in the order of their names, get
consecutive runs of queues; the first ones get one queue more if the division leaves a rest. It depends only on its
arguments, and may move many queues when a member comes or goes. `sticky_allocation` considers the current owners and
moves as few queues as possible, so its result depends on earlier results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise

from ..streams.errors import InvalidArgument


def average_allocation(queues: int, members: Sequence[str]) -> Mapping[str, range]:
    """Return the queues of each member; empty if there are no members.

    Raises InvalidArgument if `queues` is negative or a member is named twice.
    """
    names = _names(queues, members)
    if not names:
        return {}
    least, more = divmod(queues, len(names))
    starts = [index * least + min(index, more) for index in range(len(names) + 1)]
    return {name: range(starts[index], starts[index + 1]) for index, name in enumerate(names)}


def sticky_allocation(queues: int, members: Sequence[str], *owners: Mapping[int, str]) -> Mapping[str, tuple[int, ...]]:
    """Return the queues of each member, ascending. As many queues as possible stay with their `owners`.

    Owners that are not members lose their queues. With its own result as `owners` the function returns the same result
    again. With several `owners`, the first one that names a member for a queue is used. If a member must give up
    queues, it keeps those of earlier `owners` first. Raises InvalidArgument if `queues` is negative or a member is
    named twice.
    """
    names = _names(queues, members)
    if not names:
        return {}
    held = _held(queues, names, owners)
    shares = _shares(queues, held)
    kept = {name: [*chain(*held[name])][: shares[name]] for name in names}
    free = iter(sorted(set(range(queues)).difference(*kept.values())))
    # Members below their share get the queues that no member keeps: there are exactly as many as are missing.
    return {name: (*sorted([*have, *islice(free, shares[name] - len(have))]),) for name, have in kept.items()}


def _held(queues: int, names: Sequence[str], owners: Sequence[Mapping[int, str]]) -> dict[str, list[list[int]]]:
    """Return the queues that each member holds, in one list for each of `owners`."""
    held: dict[str, list[list[int]]] = {name: [[] for _ in owners] for name in names}
    for queue in range(queues):
        claims = ((claim, owner.get(queue)) for claim, owner in enumerate(owners))
        first = next(((claim, name) for claim, name in claims if name in held), None)
        if first is not None:
            held[first[1]][first[0]].append(queue)
    return held


def _shares(queues: int, held: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, int]:
    """Return the number of queues of each member. Members that hold the most get the larger shares, and so keep one
    queue more."""
    least, more = divmod(queues, len(held))

    def fits(name: str) -> list[bool]:
        return [total <= least for total in accumulate(map(len, held[name]))]

    by_holding = sorted(held, key=lambda name: (*fits(name), name))
    return {name: least + (place < more) for place, name in enumerate(by_holding)}


def _names(queues: int, members: Sequence[str]) -> list[str]:
    if queues < 0:
        raise InvalidArgument(f"there cannot be {queues} queues to allocate")
    names = sorted(members)
    for name, following in pairwise(names):
        if name == following:
            raise InvalidArgument(f"the member {name!r} is named twice: each has an id of its own")
    return names
