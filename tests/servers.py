"""Real servers for tests, as fixtures. A missing one is installed where that is allowed, else the test fails and says
what to install: see `headrace.benchmarks.servers`, whose `Server` is the base for further ones.

Import the fixtures a test uses where it is collected, in a `conftest.py` or the test module.
"""

from collections.abc import Iterator

import pytest

from headrace.benchmarks.servers import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One redis-server for the whole run: use keys of your own."""
    with RedisServer() as server:
        yield server
