"""Pages that are followed from top to bottom."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy.manifests import free_ports
from tests.documents.reader import Follower, code_blocks

PORTS = ("9100", "9464", "9465")
FOLLOWED = (
    "docs/guide.md",
    "docs/metrics.md",
    "docs/tutorial.md",
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def ports() -> Mapping[str, str]:
    """Free ports in place of those in the text. The ports after them are free, too: a second worker takes them."""
    found: list[int] = []
    while len(found) < len(PORTS):
        (port,) = free_ports(1)
        with suppress(OSError), socket.socket() as after:
            after.bind(("127.0.0.1", port + 1))
            found.append(port)
    return dict(zip(PORTS, map(str, found), strict=True))


@pytest.fixture
def follower(tmp_path: Path, ports: Mapping[str, str]) -> Iterator[Follower]:
    with Follower(tmp_path, ports) as follower:
        yield follower


@pytest.mark.long
@pytest.mark.parametrize("page", FOLLOWED)
def test_each_block_runs_in_its_order(page: str, follower: Follower):
    for block in code_blocks(page):
        follower.follow(block)
