"""Cases in interleaved rounds, so that ratios are taken between runs of the same moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .results import Result, Spread
from .servers import NotAvailable

Metric = Callable[[Result], float]


@dataclass(slots=True)
class Rounds:
    """The results of interleaved rounds, and the cases that cannot run here with the reason."""

    results: list[dict[str, Result]] = field(default_factory=list[dict[str, Result]])
    not_available: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def names(self) -> Sequence[str]:
        """The cases with a result in every round, in the order they were given."""
        return [name for name in self.results[0] if all(name in results for results in self.results)]

    def of(self, name: str) -> Sequence[Result]:
        return [results[name] for results in self.results]

    def spread(self, name: str, metric: Metric) -> Spread:
        return Spread.of([metric(result) for result in self.of(name)])

    def ratio(self, name: str, to: str, metric: Metric) -> Spread:
        """How many times `to` a case is, within each round. Raises KeyError where one of them has no result."""
        return Spread.of([metric(results[name]) / metric(results[to]) for results in self.results])


def interleaved(
    cases: Mapping[str, Callable[[], Result]], rounds: int, *, on_result: Callable[[str, Result], None] | None = None
) -> Rounds:
    """Run every case once a round, each round beginning with another case.

    A case that raises NotAvailable is left out, and noted; any other error ends the run.
    """
    found, names = Rounds(), list(cases)
    for number in range(rounds):
        results: dict[str, Result] = {}
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in found.not_available:
                continue
            try:
                results[name] = cases[name]()
            except NotAvailable as why:
                found.not_available[name] = str(why)
                continue
            if on_result:
                on_result(name, results[name])
        found.results.append({name: results[name] for name in names if name in results})
    return found
