"""How the silos of tests serve, so that the tests of a file run both ways: by one silo and by two, or over the native
protocol and over gRPC. A file assigns `by_one_and_two_silos`, `mostly_by_one_silo` or `native_and_grpc` to
`pytest_generate_tests`, and imports the fixture `serving`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass
class Serving:
    """How silos serve that a test starts."""

    silos: int = 1
    """Number of silos that share the queues; tests call the first."""
    native: bool = True
    """Whether silos serve the native protocol; without it clients use gRPC."""


SERVING = Serving()
"""How silos of the present test serve."""


@pytest.fixture(autouse=True)
def serving(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the silos of the test serve as its parameter says."""
    wanted: Serving = request.param
    SERVING.silos, SERVING.native = wanted.silos, wanted.native
    yield
    SERVING.silos, SERVING.native = 1, True


def by_one_and_two_silos(metafunc: pytest.Metafunc, *marks: pytest.MarkDecorator) -> None:
    """Run each test with one silo and with two, except for tests with the marker `one_silo`."""
    one = pytest.param(Serving(), id="one-silo")
    two = pytest.param(Serving(silos=2), id="two-silos", marks=[pytest.mark.second_way, *marks])
    only_one = metafunc.definition.get_closest_marker("one_silo") is not None
    metafunc.parametrize("serving", [one] if only_one else [one, two], indirect=True)


def mostly_by_one_silo(metafunc: pytest.Metafunc) -> None:
    """As `by_one_and_two_silos`, but the tests with two silos are slow."""
    by_one_and_two_silos(metafunc, pytest.mark.slow)


def native_and_grpc(metafunc: pytest.Metafunc) -> None:
    """Run each test over the native protocol and over gRPC. With the marker `mostly_native`, gRPC is slow."""
    mostly_native = metafunc.definition.get_closest_marker("mostly_native") is not None
    marks = [pytest.mark.second_way, *([pytest.mark.slow] if mostly_native else [])]
    native, grpc = pytest.param(Serving(), id="native"), pytest.param(Serving(native=False), id="grpc", marks=marks)
    metafunc.parametrize("serving", [native, grpc], indirect=True)
