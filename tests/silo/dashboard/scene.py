"""A silo with something to see: load, a slow subscription, failures, dead letters, a paused stream and a consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace import Client, Event, RetryPolicy, Start
from headrace.server.config import GrpcConfig, HttpConfig
from headrace.silo.config import CacheConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.streams.background import BackgroundTasks
from headrace.streams.identity import StreamId
from headrace.streams.subscriptions import OnFailure
from tests.silo.services.calling import Allowed, make_tokens

PATIENCE_S = 60
DEAD = 12
EVIL = '<img src=x onerror="window.hacked=1">'
"""Text that must never become HTML: in a key, a reason and a payload."""
TOKENS = {
    "operator": Allowed(publish=["*"], subscribe=["*"], manage=["*"]),
    "tenant": Allowed(publish=["shop"], subscribe=["shop"], manage=["shop"]),
    "reader": Allowed(subscribe=["*"]),
}


class Scene(NamedTuple):
    silo: Silo
    url: str
    tokens: Mapping[str, str]
    redriven: list[bytes]
    """Payloads that the subscription `mail` has accepted."""


@asynccontextmanager
async def scene(directory: Path, **http: Any) -> AsyncGenerator[Scene]:
    """Open a silo whose subscriptions have each kind of trouble, and keep it under load."""
    tokens = await make_tokens(directory, **TOKENS)
    config = SiloConfig(
        data=str(directory),
        drain_s=0.1,
        http=HttpConfig(port=0, **http),
        grpc=GrpcConfig(port=0),
        providers={"default": ProviderConfig(queues=4, cache=CacheConfig(max_events=40_000))},
    )
    redriven: list[bytes] = []
    async with Silo.opened(config) as silo:
        assert silo.address is not None
        await _subscriptions(silo, redriven)
        async with Client(silo.grpc_address or "") as client, BackgroundTasks() as background:
            background.start(_consume(client), "consumer")
            await _trouble(client, silo)
            background.start(_load(client), "load")
            yield Scene(silo, silo.address, tokens, redriven)


async def _subscriptions(silo: Silo, redriven: list[bytes]) -> None:
    provider = silo.providers["default"]
    broken = set[bytes]()

    async def fast(_: Event) -> None: ...

    async def slow(_: Event) -> None:
        await asyncio.sleep(0.2)

    async def mail(event: Event) -> None:
        if event.payload not in broken:
            broken.add(event.payload)
            raise ValueError(f"the mail server refused {EVIL}")
        redriven.append(event.payload)

    async def bills(_: Event) -> None:
        raise ValueError("customer 7 has no address")

    once = RetryPolicy(max_attempts=1)
    later = RetryPolicy(initial_delay_s=300, max_delay_s=300)
    early = Start.earliest()
    await provider.subscribe("prices", "shop/*", fast, start=early)
    await provider.subscribe("archive", "shop/*", slow, start=early, concurrency=2)
    await provider.subscribe("mail", "mail/*", mail, start=early, retry=once, circuit_breaker=False)
    await provider.subscribe("bills", "bills/a*", bills, start=early, retry=later, circuit_breaker=False)
    await provider.subscribe(
        "taxes", "bills/b*", bills, start=early, retry=once, on_failure=OnFailure.PAUSE, circuit_breaker=False
    )


async def _trouble(client: Client, silo: Silo) -> None:
    for number in range(DEAD - 2):
        payload = json.dumps({"order": number, "to": f"customer{number}@example.org"}).encode()
        await client.publish(StreamId("mail", f"order-{number}"), Event(payload, headers={"type": "receipt"}))
    await client.publish(StreamId("mail", EVIL), Event(EVIL.encode(), headers={"note": EVIL}))
    await client.publish(StreamId("mail", "picture"), Event(bytes(range(256))))
    for key in ("a1", "a2", "b1"):
        await client.publish(StreamId("bills", key), b"{}")
    async with asyncio.timeout(PATIENCE_S):
        while not _is_in_trouble(silo):  # noqa: ASYNC110 (a view)
            await asyncio.sleep(0.05)


def _is_in_trouble(silo: Silo) -> bool:
    views = {view.name: view for view in silo.providers["default"].statistics().subscriptions}
    failed = views["mail"].dead_lettered == DEAD and views["bills"].waiting == 2 and views["taxes"].paused == 1
    return failed and "report" in views


async def _load(client: Client) -> None:
    number = 0
    while True:
        for _ in range(20):
            number += 1
            events = [Event(b"x" * 200) for _ in range(5)]
            await client.publish(StreamId("shop", f"item-{number % 500}"), events)
        await asyncio.sleep(0.1)


async def _consume(client: Client) -> None:
    async with client.subscribe("report", "shop/*", start="earliest") as consumer:
        async for batch in consumer:
            await asyncio.sleep(0.02)
            await batch.ack()
