"""A real Prometheus server scrapes a silo, and the alert rules fire on a stall, and on nothing else."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace import Client, Event, StreamId
from headrace.server.config import GrpcConfig, HttpConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from tests.prometheus import MONITORING, SCALE, PrometheusServer, quickened

RULES = (MONITORING / "alerts.yml").read_text()
PATIENCE_S = 60


class Stalling:
    """A silo under load, whose second subscription stands still once `stalled` is set."""

    def __init__(self, silo: Silo, client: Client) -> None:
        self.silo = silo
        self.stalled = asyncio.Event()
        self._client = client
        self._goes_on = asyncio.Event()

    async def subscribe(self) -> None:
        provider = self.silo.providers["default"]
        await provider.subscribe("mail", "shop/*", self._handle)
        await provider.subscribe("bills", "shop/*", self._stall)

    async def _handle(self, event: Event) -> None:
        await asyncio.sleep(0.001)

    async def _stall(self, event: Event) -> None:
        if self.stalled.is_set():
            await self._goes_on.wait()

    async def load(self) -> None:
        number = 0
        while True:
            number += 1
            await self._client.publish(StreamId("shop", str(number % 50)), [b"x" * 100] * 5)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def scraped(directory: Path, rules: str) -> AsyncGenerator[tuple[Stalling, PrometheusServer]]:
    config = SiloConfig(
        data=str(directory),
        drain_s=0.1,
        http=HttpConfig(port=0, dashboard=False),
        grpc=GrpcConfig(port=0),
        providers={"default": ProviderConfig(queues=2)},
    )
    async with Silo.opened(config) as silo, Client(silo.grpc_address or "") as client:
        scene = Stalling(silo, client)
        await scene.subscribe()
        assert silo.address is not None
        server = PrometheusServer({"shop": [silo.address.removeprefix("http://")]}, rules)
        loading = asyncio.create_task(scene.load())
        try:
            await asyncio.to_thread(server.start)
            yield scene, server
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.to_thread(server.close)


async def quiet(server: PrometheusServer, seconds: float) -> None:
    """Return after so many seconds in which no alert fired."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        assert await asyncio.to_thread(server.alerts) == {}
        await asyncio.sleep(0.5)


async def fired(server: PrometheusServer, name: str, patience_s: float) -> dict[str, str]:
    """Return the labels of an alert once it fires. Only the two alerts about a late subscription may."""
    async with asyncio.timeout(patience_s):
        while name not in (alerts := await asyncio.to_thread(server.alerts)):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.5)
    assert set(alerts) <= {"HeadraceNoProgress", "HeadraceLate"}
    labels: dict[str, str] = alerts[name]
    return labels


@pytest.mark.long
async def test_a_stall_fires_and_load_does_not(tmp_path: Path) -> None:
    """With minutes turned into seconds."""
    async with scraped(tmp_path, quickened(RULES)) as (scene, server):
        delivered = 'headrace_delivered_events_total{subscription="bills"}'
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(server.query, delivered):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.2)
        await quiet(server, 15)
        busy = await asyncio.to_thread(server.query, "increase(headrace_delivered_events_total[10s]) > 0")
        assert busy.keys() == {("provider=default", f"subscription={name}") for name in ("mail", "bills")}
        scene.stalled.set()
        labels = await fired(server, "HeadraceNoProgress", PATIENCE_S)
        assert (labels["subscription"], labels["severity"]) == ("bills", "page")
        assert (await fired(server, "HeadraceLate", PATIENCE_S))["subscription"] == "bills"


@pytest.mark.slow
@pytest.mark.timeout(45 * SCALE)
async def test_a_stall_fires_after_ten_quiet_minutes_of_load(tmp_path: Path) -> None:
    """With the rules as they ship. It takes 20 minutes."""
    async with scraped(tmp_path, RULES) as (scene, server):
        await quiet(server, 10 * SCALE)
        scene.stalled.set()
        assert (await fired(server, "HeadraceNoProgress", 15 * SCALE))["subscription"] == "bills"
        assert (await fired(server, "HeadraceLate", 15 * SCALE))["subscription"] == "bills"
