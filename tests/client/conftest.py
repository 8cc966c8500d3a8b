"""Silos as processes for the client's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import headrace, start
from tests.client.silos import SiloProcess

__all__ = ("headrace", "start")

Silos = Callable[..., SiloProcess]


@pytest.fixture
def silos(tmp_path: Path) -> Iterator[Silos]:
    """Start silos, with flags of `headrace silo`; killed at the end of the test."""
    started: list[SiloProcess] = []

    def start(*flags: str, folder: str = ".") -> SiloProcess:
        silo = SiloProcess(tmp_path / folder, *flags)
        started.append(silo)
        silo.start()
        return silo

    yield start
    for silo in started:
        silo.kill()


@pytest.fixture
def silo(silos: Silos) -> SiloProcess:
    """A silo that needs no token."""
    return silos()
