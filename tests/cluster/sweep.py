"""Crashes at every `await`: a cluster is simulated once, to see where each of its silos stands before each of its
steps, and then again and again, each time with a silo killed before another step."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import headrace.agents
from tests.cluster.machines import Site, Step
from tests.cluster.simulated import Silo, SimulatedCluster, simulate

Way = tuple[Site, ...]
"""`await`s of the library that wait for one another, the innermost one last."""
KINDS = ("planned", "crashes", "pauses", "network", "answers")
RESTARTS_S = 0.5, 5.0
"""After so long a silo that was killed comes back; every third one does not."""


class Crash(NamedTuple):
    kind: str
    seed: int
    silo: int
    """The number of silos that were started before it."""
    step: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.seed}/{self.silo}/{self.step}"


def crash_of(text: str) -> Crash:
    kind, seed, silo, step = text.split("/")
    return Crash(kind, int(seed), int(silo), int(step))


def recorded(kind: str, seed: int) -> dict[Crash, Way]:
    """The steps before which a silo may be killed, with the `await`s at which it is then."""
    found: dict[Crash, Way] = {}
    steps: dict[int, int] = {}

    def looks(silo: Silo, step: Step) -> None:
        if not silo.world.settling:
            number = steps[silo.number] = steps.get(silo.number, 0) + 1
            if way := step.path():
                found[Crash(kind, seed, silo.number, number)] = way

    simulate(seed, kind=kind, eye=looks)
    return found


def crashed(crash: Crash) -> SimulatedCluster:
    """Simulate the same cluster, but kill a silo before a step. In most cases it comes back."""
    return simulate(crash.seed, kind=crash.kind, eye=_killer(crash))


def _killer(crash: Crash) -> Callable[[Silo, Step], None]:
    left = crash.step

    def looks(silo: Silo, step: Step) -> None:
        nonlocal left
        world = silo.world
        if silo.number != crash.silo or world.settling or not left:
            return
        left -= 1
        if not left and not silo.machine.gone:
            world.crashed_at.update(step.path())
            world.kill(silo)
            if crash.step % 3:
                world.later(RESTARTS_S[crash.step % 2], lambda: _again(world, silo.name))

    return looks


def _again(world: SimulatedCluster, name: str) -> None:
    if not world.settling and name not in world.silos:
        world.start(name)


def chosen(places: Mapping[Crash, Way], many: int) -> list[Crash]:
    """Choose one crash at each way, from the beginning to the end of the runs, and then further ones evenly. If there
    are not more than `many`, choose all."""
    at: dict[Way, list[Crash]] = {}
    for crash, way in places.items():
        at.setdefault(way, []).append(crash)
    first = [crashes[number * 7 % len(crashes)] for number, crashes in enumerate(at.values())]
    taken = set(first)
    others = [crash for crash in places if crash not in taken]
    return _evenly(first, many) + _evenly(others, max(0, many - len(first)))


def _evenly(crashes: Sequence[Crash], many: int) -> list[Crash]:
    many = min(many, len(crashes))
    return [crashes[number * len(crashes) // many] for number in range(many)]


# ---- the `await`s of the library -------------------------------------------------------------------------------------


class Await(NamedTuple):
    file: str
    function: str
    first: int
    last: int


@cache
def awaits(file: str) -> tuple[Await, ...]:
    """All of a file of the library, such as `agents/checkpointer.py`."""
    source = (Path(headrace.agents.__file__).parents[1] / file).read_text()
    return tuple(_awaits(file, ast.parse(source), ""))


def _awaits(file: str, node: ast.AST, where: str) -> Iterable[Await]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef) else where
        if isinstance(child, ast.Await):
            yield Await(file, inside, child.lineno, child.end_lineno or child.lineno)
        elif isinstance(child, ast.AsyncWith):
            yield Await(file, inside, child.lineno, child.body[0].lineno - 1)
        yield from _awaits(file, child, inside)


def hit(sites: Iterable[Site]) -> set[Await]:
    """The `await`s at these places; of those that are within one another the innermost."""
    found = set[Await]()
    for file, line in sites:
        with suppress(ValueError):
            found.add(min((a for a in awaits(file) if a.first <= line <= a.last), key=lambda a: a.last - a.first))
    return found
