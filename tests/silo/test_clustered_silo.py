"""The view of the cluster that a silo reads between its heartbeats."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace import StorageError
from headrace.silo.clustered_silo import ClusteredSilo
from headrace.silo.config import ClusterConfig, SiloConfig
from headrace.streams.cluster import ClusterView, Lease

LEASE = Lease("p", 0, "a", 1, 1, 1)


class SlowStore:
    """Each read takes until `answer` is called."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Future[ClusterView]] = []

    async def view(self) -> ClusterView:
        self.reads.append(asyncio.get_running_loop().create_future())
        return await self.reads[-1]

    def answer(self, number: int, epoch: int) -> None:
        self.reads[number].set_result(view(epoch))


def view(epoch: int) -> ClusterView:
    return ClusterView(0, [], [LEASE._replace(epoch=epoch)])


@pytest_asyncio.fixture
async def silo(tmp_path: Path) -> AsyncGenerator[ClusteredSilo]:
    config = SiloConfig(data=str(tmp_path), cluster=ClusterConfig())
    async with ClusteredSilo.opened(config, {}) as opened:
        yield opened


@pytest.fixture
def store(silo: Any) -> SlowStore:
    slow = silo._store = SlowStore()
    return slow


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_at_the_same_time_share_a_read(silo: ClusteredSilo, store: SlowStore) -> None:
    first = asyncio.create_task(silo.read_view())
    await turns()
    later = [asyncio.create_task(silo.read_view()) for _ in range(100)]
    await turns()
    store.answer(0, 1)
    async with asyncio.timeout(30):
        while len(store.reads) < 2:  # a read that had begun before may miss what the later callers know of  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    store.answer(1, 2)
    await asyncio.gather(first, *later)
    assert len(store.reads) == 2
    assert silo.placements.owner("p", 0).epoch == 2


async def test_calls_that_share_a_read_share_its_error(silo: ClusteredSilo, store: SlowStore) -> None:
    calls = [asyncio.create_task(silo.read_view()) for _ in range(100)]
    await turns()
    store.reads[0].set_exception(StorageError("the store is away"))
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {str(error) for error in errors} == {"the store is away"}
    assert len(store.reads) == 1


async def test_a_read_does_not_replace_a_view_that_came_meanwhile(silo: Any, store: SlowStore) -> None:
    reading = asyncio.create_task(silo.read_view())
    await turns()
    silo._take_view(view(2))  # as with a heartbeat
    store.answer(0, 1)
    await turns()
    assert silo.placements.owner("p", 0).epoch == 2
    store.answer(1, 3)
    await reading
    assert silo.placements.owner("p", 0).epoch == 3
