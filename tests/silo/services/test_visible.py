"""A client does not learn from offsets how much others publish."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from headrace import StreamId
from headrace.adapters import Bounds
from headrace.proto.v1 import reader_pb2 as pb
from headrace.proto.v1 import subscriptions_pb2 as sub
from headrace.server.access import Permission, Principal
from headrace.silo.provider import Provider
from headrace.silo.services.visible import VisibleBounds
from headrace.streams.field_limits import MAX_OFFSET
from tests.silo.services.calling import SUBSCRIPTIONS, Allowed, Caller, Refused, batch, connecting, make_tokens, opened

READER = "headrace.v1.ReaderService"
TENANT = Principal.of("shop", {Permission.SUBSCRIBE: ["shop"]})


class Tenants(NamedTuple):
    shop: Caller
    bank: Caller
    admin: Caller


@pytest_asyncio.fixture(params=["log", "memory"])
async def tenants(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tenants]:
    tokens = await make_tokens(
        tmp_path,
        shop=Allowed(["shop"], ["shop"], ["shop"]),
        bank=Allowed(["bank"]),
        admin=Allowed(["*"], ["*"], ["*"]),
    )
    chosen = {"adapter": request.param, "queues": 1}
    async with opened(tmp_path, provider=chosen, auth="tokens") as silo:
        address = silo.grpc_address or ""
        async with (
            connecting(address, tokens["shop"]) as shop,
            connecting(address, tokens["bank"]) as bank,
            connecting(address, tokens["admin"]) as admin,
        ):
            yield Tenants(shop, bank, admin)


async def told(caller: Caller) -> list[str]:
    """Everything that a client can ask about offsets, as it is answered."""
    answers = [str((await caller.get("s")).progress)]
    requests = [
        ("GetQueues", pb.GetQueuesRequest(), pb.GetQueuesResponse),
        ("GetQueues", pb.GetQueuesRequest(time_us=1), pb.GetQueuesResponse),
        ("GetQueues", pb.GetQueuesRequest(time_us=250_000_000_000_000_000), pb.GetQueuesResponse),
        ("EndWithin", pb.EndWithinRequest(end_offset=MAX_OFFSET), pb.EndWithinResponse),
        ("EndWithin", pb.EndWithinRequest(end_offset=MAX_OFFSET, max_events=1 << 40), pb.EndWithinResponse),
    ]
    for method, request, kind in requests:
        try:
            answers.append(str(await caller.ask(f"{READER}/{method}", request, kind)))
        except Refused as refused:
            answers.append(refused.details)
    for number in range(40):  # up to where tokens are accepted
        definition = sub.SubscriptionDefinition(name="t", selector="shop/a", start=sub.Start(token=str(number)))
        request = sub.CreateSubscriptionRequest(definition=definition)
        try:
            await caller.ask(f"{SUBSCRIPTIONS}/CreateSubscription", request, sub.CreateSubscriptionResponse)
            await caller.ask(
                f"{SUBSCRIPTIONS}/DeleteSubscription",
                sub.DeleteSubscriptionRequest(name="t"),
                sub.DeleteSubscriptionResponse,
            )
        except Refused as refused:
            answers.append(refused.details)
    stream = caller.responses(f"{READER}/Read", pb.ReadRequest(end_offset=MAX_OFFSET, selector="shop/*"))
    with pytest.raises(Refused) as caught:
        await stream.read(pb.ReadResponse)
    return [*answers, caught.value.details]


async def test_bounds_shown_to_a_client_do_not_change_when_others_publish(tenants: Tenants):
    shop, bank, admin = tenants
    await admin.create("s", "shop/*", start=sub.Start(earliest=True))
    await bank.publish(*(batch("bank/a", b"x") for _ in range(3)))
    await shop.publish(batch("shop/a", b"1"), batch("shop/a", b"2"))
    before = await told(shop), await told(admin)
    await bank.publish(*(batch("bank/a", b"x") for _ in range(17)))
    after = await told(shop), await told(admin)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert "22" in "".join(after[1])


async def test_a_subscription_that_has_all_of_its_own_shows_no_lag(tmp_path: Path):
    tokens = await make_tokens(tmp_path, shop=Allowed(["shop"], ["shop"]), bank=Allowed(["bank"]))
    async with opened(tmp_path, provider={"queues": 1}, auth="tokens") as silo:
        address = silo.grpc_address or ""
        async with connecting(address, tokens["shop"]) as shop, connecting(address, tokens["bank"]) as bank:
            await shop.create("s", "shop/*")
            await shop.publish(batch("shop/a", b"1"))
            (behind,) = (await shop.get("s")).progress
            assert (behind.watermark, behind.end_offset) == (0, 1)
            await bank.publish(*(batch("bank/a", b"x") for _ in range(5)))
            await shop.publish(batch("shop/a", b"2"))
            (behind,) = (await shop.get("s")).progress
            assert (behind.watermark, behind.end_offset) == (0, 7)
            request = pb.ReadRequest(end_offset=7, selector="shop/*")
            response = await shop.responses(f"{READER}/Read", request).read(pb.ReadResponse)
            assert response is not None
            assert [each.payload for each in response.batches] == [b"1", b"2"]
            assert await shop.ask(
                f"{SUBSCRIPTIONS}/GetSubscription", sub.GetSubscriptionRequest(name="s"), sub.GetSubscriptionResponse
            )


@pytest.mark.parametrize("seed", range(5))
async def test_bounds_are_those_of_the_batches_that_may_be_seen(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    async with Provider.open(tmp_path, queues=1) as provider:
        known, mine, end = VisibleBounds(window=4), list[int](), 0
        for _ in range(30):
            namespace = rng.choice(("shop", "bank", "bank", "mail"))
            for _ in range(rng.randrange(6)):
                await provider.publish(StreamId(namespace, "a"), b"x")
                mine += [end] if namespace == "shop" else []
                end += 1
            expected = Bounds(mine[0], mine[-1] + 1) if mine else Bounds(0, 0)
            fresh = VisibleBounds(window=4)
            for each in (known, known, fresh):
                assert await each.bounds(TENANT, provider, 0) == expected


async def test_after_enough_of_others_the_end_is_told_later_but_never_earlier(tmp_path: Path):
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.publish(StreamId("shop", "a"), b"x")
        told = [0]
        known = VisibleBounds(window=4, search_bytes=1000)
        for _ in range(40):
            await provider.publish(StreamId("bank", "a"), bytes(100))
            assert (await known.bounds(TENANT, provider, 0)).next == 1
            told.append((await VisibleBounds(window=4, search_bytes=1000).bounds(TENANT, provider, 0)).next)
        assert told == sorted(told)
        assert 1 < told[-1] < 40
        await provider.publish(StreamId("shop", "a"), b"x")
        assert await known.bounds(TENANT, provider, 0) == Bounds(0, 42)
