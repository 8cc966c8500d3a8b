"""The id of an idempotent producer belongs to the client that uses it: others have another producer of that id."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.proto.v1 import publisher_pb2 as pb
from headrace.server.access import Permission, Principal, account_of_certificate, account_of_client, new_token
from headrace.silo.host import Silo
from headrace.store.control_store import ControlStore
from headrace.store.datadir import open_data_directory
from tests.servers import RedisServer, redis_server
from tests.silo.services.calling import PUBLISH, Caller, batch, connecting, opened

__all__ = ("redis_server",)

GET = "headrace.v1.PublisherService/GetProducer"
HUGE = 1 << 62
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "memory": {"adapter": "memory"},
    "log": {"adapter": "log"},
    "log with delays": {"adapter": "log", "delays": "store"},
    "redis": {"adapter": "redis"},
}


@pytest.fixture(params=ADAPTERS)
def provider(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen = ADAPTERS[request.param]
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        chosen = {**chosen, "options": {"url": f"redis://{server.address}", "prefix": request.node.name}}
    return {**chosen, "queues": 1}


async def make(data: Path, name: str, namespace: str, client: str | None = None) -> str:
    directory = await asyncio.to_thread(open_data_directory, data)
    store = await ControlStore.open(directory.control_db)
    token = new_token(name, {Permission.PUBLISH: [namespace]}, 0, client)
    await store.add_token(token.record)
    await store.aclose()
    return token.text


async def publish(caller: Caller, stream: str, number: int, previous: int, **fields: Any) -> pb.Receipt:
    request = pb.PublishRequest(
        batches=[batch(stream, b"x", **fields)],
        sequence=pb.ProducerSequence(producer="importer", number=number, previous=previous),
    )
    return (await caller.ask(PUBLISH, request, pb.PublishResponse)).receipts[0]


async def number_of(caller: Caller) -> int:
    return (await caller.ask(GET, pb.GetProducerRequest(producer="importer"), pb.GetProducerResponse)).number


async def callers(stack: AsyncExitStack, silo: Silo, *tokens: str) -> list[Caller]:
    address = silo.grpc_address or ""
    return [await stack.enter_async_context(connecting(address, token)) for token in tokens]


async def test_a_producer_of_another_client_does_not_hide_events(tmp_path: Path, provider: dict[str, Any]):
    tokens = [await make(tmp_path, name, name) for name in ("a", "b")]
    delays = {"delay_us": 3_600_000_000} if provider.get("delays") else {}
    async with AsyncExitStack() as stack:
        silo = await stack.enter_async_context(opened(tmp_path, provider=provider, auth="tokens"))
        a, b = await callers(stack, silo, *tokens)
        assert not (await publish(a, "a/1", 1, 0)).duplicate
        assert await number_of(b) == 0
        assert not (await publish(b, "b/1", HUGE, 0, **delays)).duplicate
        assert await number_of(a) == 1
        assert not (await publish(a, "a/1", 2, 1, **delays)).duplicate
        assert not (await publish(a, "a/1", 3, 2)).duplicate
        assert (await publish(a, "a/1", 3, 2)).duplicate
        assert (await number_of(a), await number_of(b)) == (3, HUGE)


async def test_a_producer_survives_the_rotation_of_its_token_and_a_restart(tmp_path: Path):
    old = await make(tmp_path, "importer-1", "a", "importer")
    new = await make(tmp_path, "importer-2", "a", "importer")
    async with AsyncExitStack() as stack:
        silo = await stack.enter_async_context(opened(tmp_path, auth="tokens"))
        (caller,) = await callers(stack, silo, old)
        await publish(caller, "a/1", 7, 0)
    async with AsyncExitStack() as stack:
        silo = await stack.enter_async_context(opened(tmp_path, auth="tokens"))
        (caller,) = await callers(stack, silo, new)
        assert await number_of(caller) == 7
        assert (await publish(caller, "a/1", 7, 0)).duplicate


async def test_callers_without_credentials_share_ids_with_programs_that_open_the_directory(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await publish(caller, "a/1", 7, 0)
        assert await silo.providers["default"].adapter.last_sequence("importer") == 7


def test_accounts_of_different_kinds_and_names_never_share_an_id():
    names = ("a", "a:b", "b", "token:a", "é/:", "x" * 1000)
    principals = [Principal(name, {}, account_of_certificate(name)) for name in names]
    principals += [Principal(name, {}, account_of_client(name)) for name in ("a", "b")]
    ids = {principal.producer_of(producer) for principal in principals for producer in ("p", "b:p", "a:b:p")}
    assert len(ids) == 3 * len(principals)
    assert max(map(len, ids)) < 300
