"""How much random tests draw: a few examples and seeds in `make test`, all of them in `make slow` and in CI."""

import os

import pytest
from _pytest.mark import ParameterSet

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "quick")


def examples(thorough: int, quick: int | None = None) -> int:
    """Return the number of examples for a test that draws `thorough` of them in a thorough run, and `quick` in
    `make test`; a fifth of them, but at least five, if `quick` is not given."""
    return thorough if PROFILE != "quick" else max(5, thorough // 5) if quick is None else quick


def seeds(count: int, quick: int) -> list[ParameterSet]:
    """Return the parameters 0 to `count` - 1. Those from `quick` on are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= quick else []) for seed in range(count)]
