"""Nothing that a cluster stores opens it, and its silos still know one another."""

import asyncio
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from headrace import StorageError
from headrace.proto.v1 import cluster_pb2 as pb
from headrace.server.access import PEER, ClusterMembers, NoTokens, new_silo_secret, silo_hash
from headrace.server.config import GrpcConfig
from headrace.silo.clustered_silo import MAX_LOOK_UPS, SecretsOfView
from headrace.silo.config import ClusterConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.peers import PeerConnections
from headrace.store.control_store import ControlStore
from headrace.streams.cluster import ClusterView
from tests.silo.clusters import clustered
from tests.silo.services.calling import CLUSTER, Refused, connecting

DESCRIBE = f"{CLUSTER}/DescribeCluster"


def config_of(data: Path) -> SiloConfig:
    grpc = GrpcConfig(port=0, auth="tokens")
    return SiloConfig(data=str(data), grpc=grpc, providers={"default": ProviderConfig(queues=2)})


def texts_of(path: Path) -> Iterable[str]:
    """Every text in a database."""
    with closing(sqlite3.connect(path)) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in connection.execute(f"SELECT * FROM {table}").fetchall():
                yield from (value for value in row if isinstance(value, str))


async def test_nothing_in_the_control_store_is_a_token(tmp_path: Path):
    async with clustered(config_of(tmp_path), 2) as silos:
        texts = {*texts_of(tmp_path / "control.db")}
        assert len(texts) > 5
        for text in texts:
            async with connecting(silos[0].grpc_address or "", text) as caller:
                with pytest.raises(Refused, match="UNAUTHENTICATED"):
                    await caller.ask(DESCRIBE, pb.DescribeClusterRequest(), pb.DescribeClusterResponse)


async def test_a_silo_that_joins_is_known_before_others_look_for_it(tmp_path: Path):
    config = config_of(tmp_path)
    times = ClusterConfig(name="early", period_s=60, lease_s=600, dead_after_s=300)
    async with (
        Silo.opened(msgspec.structs.replace(config, cluster=times)) as early,
        Silo.opened(msgspec.structs.replace(config, cluster=msgspec.structs.replace(times, name="late"))) as late,
    ):
        assert early.clustered_silo is not None
        assert late.clustered_silo is not None
        assert "late" not in early.clustered_silo.silos
        peers = PeerConnections(late.clustered_silo.secret, None)
        try:
            assert await peers.reach(late.clustered_silo.silos["early"])
        finally:
            await peers.aclose()


class Store:
    """Counts the looks."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store.cluster()
        self.looks = 0
        self.fails = False

    async def view(self) -> ClusterView:
        self.looks += 1
        if self.fails:
            raise StorageError("it is away")
        return await self._store.view()


async def test_callers_with_invented_secrets_share_few_looks():
    control = await ControlStore.open("memory")
    store, secret = Store(control), new_silo_secret()
    members = ClusterMembers(SecretsOfView(store, silo_hash(new_silo_secret())), NoTokens())
    invented = [f"Bearer {new_silo_secret()}" for _ in range(2 * MAX_LOOK_UPS)]
    await control.cluster(secret_hash=silo_hash(secret)).join("a", "x", ())
    await asyncio.gather(members.prepare(f"Bearer {secret}"), *map(members.prepare, invented))
    assert store.looks <= 2
    assert members.authenticate(f"Bearer {secret}") is PEER
    assert members.authenticate(invented[0]) is not PEER
    store.fails = True
    await members.prepare(invented[0])
    assert members.authenticate(f"Bearer {secret}") is PEER
    await control.aclose()
