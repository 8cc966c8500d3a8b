"""What clusters are tested over, as fixtures. Import them, and those of PostgreSQL, where a test uses them."""

import os
import random
import signal
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from headrace.benchmarks.servers import PostgresServer, process_tree

SEED = int(os.environ.get("CHAOS_SEED", str(random.randrange(1 << 32))))


@pytest.fixture
def rng() -> random.Random:
    print(f"CHAOS_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> str | None:
    """URL of the control store; None for that of the data directory."""
    return None if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@contextmanager
def frozen(server: PostgresServer) -> Generator[None]:
    tree = process_tree(server.pid)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in tree:
            os.kill(pid, signal.SIGCONT)
