"""The pages for users of other systems: the same small program prints the same in both."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.peers.kafka import TansuServer
from benchmarks.peers.nats_jetstream import NatsServer
from benchmarks.servers import Server
from tests.deploy.manifests import free_ports
from tests.documents.reader import Follower, code_blocks, wait_for
from tests.servers import ValkeyServer

PRINTED = "42 placed\n42 paid\n"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "server", "address"),
    [
        pytest.param("docs/from-kafka.md", TansuServer, "localhost:9092", marks=pytest.mark.slow),
        ("docs/from-redis-streams.md", ValkeyServer, "localhost:6379"),
        pytest.param("docs/from-nats.md", NatsServer, "localhost:4222", marks=pytest.mark.slow),
        ("docs/from-orleans.md", None, ""),
    ],
)
def test_the_program_prints_the_same_in_both(
    page: str, server: type[Server] | None, address: str, tmp_path: Path, servers: ExitStack
):
    replaced: dict[str, str] = {}
    if server is not None:
        replaced[address] = servers.enter_context(server()).address
    with Follower(tmp_path, replaced) as follower:
        printed = [follower.follow(block) for block in code_blocks(page) if block.language == "python"]
    assert printed == [PRINTED] * len(printed)
    assert len(printed) == (2 if server else 1)


@pytest.mark.slow  # the worker of Celery takes seconds to start; the other pages are quicker
def test_a_task_of_celery_and_an_event_do_the_same(tmp_path: Path, servers: ExitStack):
    replaced = {"localhost:6379": servers.enter_context(ValkeyServer()).address, "9465": str(*free_ports(1))}
    with Follower(tmp_path, replaced) as follower:
        for block in code_blocks("docs/from-celery.md"):
            follower.follow(block)
        for system in ("celery", "headrace"):
            file = tmp_path / f"receipts-{system}.txt"
            wait_for(lambda file=file: file.exists() and file.read_text() == "receipt for order 42\n")
