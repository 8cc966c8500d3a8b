"""Access of consumers to a cluster: permissions, limits and TLS of direct sessions and of gateways, at every silo."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import Client, StreamId, Tls
from headrace.server.access import Permission, new_token
from headrace.server.config import GrpcConfig
from headrace.server.limits import ClientLimits
from headrace.silo.config import ClusterConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from tests.certificates import Authority
from tests.silo.clusters import Silos, clustered
from tests.silo.services.calling import Allowed, Caller, Refused, connecting, make_tokens
from tests.silo.services.sessions import Session, begin, defined, eventually, pull

QUEUES = 8
PATIENCE_S = 30


@asynccontextmanager
async def cluster(data: Path, ca: Path | None = None, **grpc: Any) -> AsyncGenerator[Silos]:
    config = SiloConfig(
        cluster=None if ca is None else ClusterConfig(ca=str(ca)),
        data=str(data),
        drain_s=1.0,
        grpc=GrpcConfig(port=0, **grpc),
        providers={"default": ProviderConfig(queues=QUEUES)},
    )
    async with clustered(config, 2) as silos:
        yield silos


@asynccontextmanager
async def callers(silos: Silos, token: str | None = None) -> AsyncGenerator[list[Caller]]:
    """A caller of each silo."""
    async with AsyncExitStack() as stack:
        addresses = [silo.grpc_address or "" for silo in silos]
        yield [await stack.enter_async_context(connecting(address, token)) for address in addresses]


async def three_sessions(to: list[Caller]) -> list[Session]:
    """Direct sessions with both silos, and one with the first silo as gateway."""
    direct = [await begin(caller, "s", consumer="c", direct=True) for caller in to]
    return [*direct, await begin(to[0], "s", consumer="g")]


async def heartbeats(session: Session) -> None:
    """Send few: if one is written while the silo ends the call, grpc may report INTERNAL, not the silo's status."""
    while True:
        await session.say()
        await asyncio.sleep(2)


async def end_with_heartbeats(session: Session) -> tuple[str, str]:
    """Return the status and the code with which the silo ends the session."""
    beating = asyncio.create_task(heartbeats(session))
    try:
        refused = await session.end()
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    assert refused is not None
    return refused.status, str(refused.code)


async def test_consuming_needs_the_permission_at_every_silo(tmp_path: Path) -> None:
    everything = Allowed(publish=["*"], subscribe=["*"], manage=["*"])
    tokens = await make_tokens(tmp_path, all=everything, other=Allowed(subscribe=["other"]))
    async with cluster(tmp_path, auth="tokens") as silos:
        async with callers(silos, tokens["all"]) as owner:
            await owner[0].create("s", "n/*")
        async with callers(silos, tokens["other"]) as others:
            for caller in others:
                for direct in (True, False):
                    found = {await refusal(caller, name, direct=direct) for name in ("s", "missing")}
                    assert len(found) == 1, "the answer says whether a subscription exists"
                    with pytest.raises(Refused, match="PERMISSION_DENIED"):
                        await begin(caller, definition=defined("s", "n/*"), direct=direct)
        async with callers(silos) as strangers:
            for caller in strangers:
                with pytest.raises(Refused, match="UNAUTHENTICATED"):
                    await begin(caller, "s", direct=True)


async def refusal(caller: Caller, subscription: str, *, direct: bool) -> str:
    with pytest.raises(Refused, match="PERMISSION_DENIED") as refused:
        await begin(caller, subscription, consumer="c", direct=direct)
    return refused.value.details.replace(repr(subscription), "it")


@pytest.mark.parametrize("again", [None, ["other"]], ids=["revoked", "restricted"])
async def test_a_token_that_changed_ends_its_sessions_at_every_silo(tmp_path: Path, again: list[str] | None) -> None:
    everything = Allowed(publish=["*"], subscribe=["*"], manage=["*"])
    tokens = await make_tokens(tmp_path, all=everything, one=Allowed(subscribe=["*"]))
    async with cluster(tmp_path, auth="tokens") as silos:
        async with callers(silos, tokens["all"]) as [owner, _], callers(silos, tokens["one"]) as one:
            await owner.create("s", "n/*")
            sessions = await three_sessions(one)
            store = silos[0].providers["default"].store
            await store.delete_token("one")
            if again is not None:
                await store.add_token(new_token("one", {Permission.SUBSCRIBE: again}, 0).record)
            ends = await asyncio.gather(*map(end_with_heartbeats, sessions))
            assert ends == [("UNAUTHENTICATED", "unauthenticated")] * 3

            async def disconnected() -> bool:
                consumers = (await owner.get("s")).consumers
                return not any(consumer.connected for consumer in consumers)

            await eventually(disconnected)
            for caller in one:
                with pytest.raises(Refused, match="UNAUTHENTICATED"):
                    await pull(caller)


async def test_each_silo_limits_the_sessions_of_a_client_and_not_those_of_gateways(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, limits=ClientLimits(calls=3)) as silos,
        callers(silos) as [first, second],
        callers(silos) as others,  # on a connection that has as many calls, a further one waits
    ):
        await first.create("s", "n/*")
        sessions = [await begin(first, "s", consumer=f"g{number}") for number in range(3)]
        assert await calls_of_clients(silos[1]) == 0
        sessions += [await begin(second, "s", consumer=f"d{number}", direct=True) for number in range(3)]
        for caller in others:
            for direct in (True, False):
                with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
                    await begin(caller, "s", direct=direct)
        for session in sessions:
            await session.close()
        for caller in others:
            await (await begin(caller, "s", direct=True)).close()


async def calls_of_clients(silo: Silo) -> int:
    """Open calls, without those of other silos."""
    text = (await silo.metrics()).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("headrace_grpc_calls ")]
    return int(float(line.split()[1]))


@pytest.mark.parametrize("native", [True, False], ids=["native", "grpc"])
async def test_a_client_calls_the_owners_with_its_token_and_tls(tmp_path: Path, native: bool) -> None:
    ca = Authority(tmp_path)
    files = ca.issue("127.0.0.1", "localhost")
    tokens = await make_tokens(tmp_path / "data", one=Allowed(publish=["*"], subscribe=["*"], manage=["*"]))
    served = {"auth": "tokens", "certificate": str(files.certificate), "key": str(files.key), "native": native}
    async with cluster(tmp_path / "data", ca.certificate, **served) as silos:
        async with Client(silos[0].grpc_address or "", token=tokens["one"], tls=Tls(ca=ca.certificate)) as client:
            async with client.subscribe("s", "n/*", start="earliest") as consumer, asyncio.timeout(PATIENCE_S):
                for key in range(200):
                    await client.publish(StreamId("n", str(key)), b"x")
                seen = set[int]()
                while len(seen) < QUEUES:
                    taken = await anext(consumer)
                    seen.add(taken.queue)
                    await taken.ack()
                assert await calls_of_clients(silos[1]) == 1  # it publishes at the first
