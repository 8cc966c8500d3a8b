"""Deals queues out to the members of a group: average allocation, and a sticky variant of it.

Requirements: every queue has exactly one member; shares differ by at most one queue; the same members give the same
allocation in whatever order they are named, so that each silo comes to the same by itself. Members beyond the number of
queues get none.

`average_allocation` is EQueue's (and RocketMQ's) AverageAllocate: the members in order of their names get consecutive
runs of queues, the first ones a queue more where it does not come out even. It depends on nothing but its arguments,
and may move many queues when a member comes or goes. `sticky_allocation` looks at who has what, and moves as few as can
be; the answer depends on how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise

from ..streams.errors import InvalidArgument


def average_allocation(queues: int, members: Sequence[str]) -> Mapping[str, range]:
    """The queues of each member; empty where there are no members.

    Raises InvalidArgument where `queues` is negative or a member is named twice.
    """
    names = _names(queues, members)
    if not names:
        return {}
    least, more = divmod(queues, len(names))
    starts = [index * least + min(index, more) for index in range(len(names) + 1)]
    return {name: range(starts[index], starts[index + 1]) for index, name in enumerate(names)}


def sticky_allocation(queues: int, members: Sequence[str], *owners: Mapping[int, str]) -> Mapping[str, tuple[int, ...]]:
    """The queues of each member, ascending, with as many as can be left to their `owners`.

    Owners who are no members lose theirs. Given its own answer as `owners` it gives the same again. With several
    `owners` the first one that names a member decides about a queue, and goes before the later ones where a member has
    to give up some. Raises InvalidArgument where `queues` is negative or a member is named twice.
    """
    names = _names(queues, members)
    if not names:
        return {}
    held = _held(queues, names, owners)
    shares = _shares(queues, held)
    kept = {name: [*chain(*held[name])][: shares[name]] for name in names}
    free = iter(sorted(set(range(queues)).difference(*kept.values())))
    # Whoever is short takes from the queues that nobody keeps: there are as many as are missing.
    return {name: (*sorted([*have, *islice(free, shares[name] - len(have))]),) for name, have in kept.items()}


def _held(queues: int, names: Sequence[str], owners: Sequence[Mapping[int, str]]) -> dict[str, list[list[int]]]:
    """What each holds, one list for each of `owners`."""
    held: dict[str, list[list[int]]] = {name: [[] for _ in owners] for name in names}
    for queue in range(queues):
        claims = ((claim, said.get(queue)) for claim, said in enumerate(owners))
        first = next(((claim, name) for claim, name in claims if name in held), None)
        if first is not None:
            held[first[1]][first[0]].append(queue)
    return held


def _shares(queues: int, held: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, int]:
    """How many queues each gets. The larger shares go to those who hold too many: each of them keeps one more by it."""
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
