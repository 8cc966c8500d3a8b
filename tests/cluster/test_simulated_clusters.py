"""Clusters in virtual time: whatever happens to silos, network and store, nothing is lost, skipped or served by two.

A failure says its kind and seed: `simulate(seed, kind=kind)` repeats it exactly. `make sim` runs many more.
"""

import logging

import pytest

from tests.cluster.planted import planted
from tests.cluster.simulated import KINDS, simulate


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_skipped_and_each_queue_has_one_owner(kind: str, seed: int) -> None:
    world = simulate(seed, kind=kind)
    assert not world.problems, "\n".join(world.history)


def test_a_seed_always_gives_the_same_history() -> None:
    assert simulate(7).history == simulate(7).history


@pytest.mark.parametrize(
    ("bug", "kind"),
    [("no fencing", "pauses"), ("release before drain", "planned"), ("checkpoint of the maximum", "crashes")],
)
def test_a_planted_bug_is_found(bug: str, kind: str) -> None:
    with planted(bug):
        assert any(simulate(seed, kind=kind).problems for seed in range(100))
