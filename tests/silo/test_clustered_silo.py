"""A silo's part in its cluster: the view that it reads between its heartbeats, and the check of its address."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace import InvalidArgument, StorageError
from headrace.server.config import GrpcConfig
from headrace.silo.clustered_silo import ClusteredSilo
from headrace.silo.config import ClusterConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.streams.cluster import ClusterView, Lease
from tests.certificates import Authority, Files

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


# ---- the check of its address ----------------------------------------------------------------------------------------


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def with_tls(own: Files, trusted: Authority, address: str | None = None) -> SiloConfig:
    cluster = ClusterConfig(name="a", ca=str(trusted.certificate), address=address)
    grpc = GrpcConfig(port=0, certificate=str(own.certificate), key=str(own.key))
    providers = {"default": ProviderConfig(queues=1)}
    return SiloConfig(data=str(own.key.parent / "data"), cluster=cluster, grpc=grpc, providers=providers)


async def test_a_silo_that_others_would_not_trust_is_refused(tmp_path: Path, ca: Authority) -> None:
    config = with_tls(ca.issue("127.0.0.1"), Authority(tmp_path, "stranger"))
    with pytest.raises(InvalidArgument, match=r"could not call silo 'a' at \S+: cluster\.ca: .* is not trusted: give"):
        async with Silo.opened(config):
            pass


async def test_a_silo_whose_certificate_lacks_its_name_is_refused(ca: Authority) -> None:
    with pytest.raises(InvalidArgument, match=r"cluster\.address: .* is not for that name: add the name to the cert"):
        async with Silo.opened(with_tls(ca.issue("silo.example"), ca)):
            pass


async def test_a_silo_that_does_not_reach_itself_starts_with_a_warning(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind address translation a silo may not reach its own address, although others do."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        async with Silo.opened(with_tls(ca.issue("127.0.0.1"), ca, address)):
            pass
    [warning] = [record.getMessage() for record in caplog.records if "does not reach itself" in record.getMessage()]
    assert warning.endswith("requires TLS (grpc.certificate) or a client's certificate (grpc.certificate)")
