"""Fixtures: the stores and queues of clusters. A test that uses them imports them, and the fixtures of PostgreSQL."""

import os
import random
import signal
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

import pytest

from benchmarks.servers import PostgresServer, process_tree

STORES = ("sqlite", "postgres")
LONG = "CHAOS_SECONDS" in os.environ
SEED = int(os.environ.get("CHAOS_SEED", str(random.randrange(1 << 32))))


@pytest.fixture
def rng() -> random.Random:
    print(f"CHAOS_SEED={SEED}")
    return random.Random(SEED)


def over(store: str) -> pytest.MarkDecorator:
    """Over this store, in a long run over both."""
    return pytest.mark.parametrize("store", STORES if LONG else (store,), indirect=True)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str | None:
    """URL of the control store; None for that of the data directory."""
    return None if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """One that a test may stop and start: use schemas of your own."""
    server = PostgresServer()
    server.port = lasting_port()
    with server:
        yield server


def lasting_port() -> int:
    """A free port that stays free over a restart: no connection gets it for its own end meanwhile."""
    while True:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


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
