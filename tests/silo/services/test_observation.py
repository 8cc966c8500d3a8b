"""What the observation service says of queues and subscriptions, alone and in a cluster."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import Event, Provider, RetryPolicy, Start, StreamId
from headrace.proto.v1 import observation_pb2 as pb
from headrace.server.config import GrpcConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.streams.subscriptions import OnFailure, Selector, SubscriptionDefinition
from headrace.streams.wording import MAX_REASON
from tests.silo.clusters import PATIENCE_S, clustered, queues
from tests.silo.services.calling import Allowed, Caller, Refused, batch, connecting, make_tokens, opened

OBSERVATION = "headrace.v1.ObservationService"
LATER = RetryPolicy(initial_delay_s=100, max_delay_s=1000, max_attempts=3)


async def describe_queue(caller: Caller, queue: int = 0) -> pb.DescribeQueueResponse:
    request = pb.DescribeQueueRequest(queue=queue)
    return await caller.ask(f"{OBSERVATION}/DescribeQueue", request, pb.DescribeQueueResponse)


async def describe(caller: Caller, **fields: object) -> list[pb.SubscriptionPart]:
    request = pb.DescribeSubscriptionsRequest(**fields)  # pyright: ignore[reportArgumentType]
    answer = await caller.ask(f"{OBSERVATION}/DescribeSubscriptions", request, pb.DescribeSubscriptionsResponse)
    return list(answer.parts)


async def moves(caller: Caller) -> list[pb.QueueMove]:
    return list((await caller.ask(f"{OBSERVATION}/ListMoves", pb.ListMovesRequest(), pb.ListMovesResponse)).moves)


async def until(caller: Caller, holds: Callable[[pb.SubscriptionPart], bool], **fields: object) -> pb.SubscriptionPart:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for part in await describe(caller, **fields):
                if holds(part):
                    return part
            await asyncio.sleep(0.05)


async def test_a_queue_is_described_with_its_buckets_and_cursors(tmp_path: Path):
    async def never(event: Event) -> None:
        await asyncio.Event().wait()

    provider = {"queues": 1}
    async with opened(tmp_path, provider=provider, drain_s=0) as silo, connecting(silo.grpc_address or "") as caller:
        await silo.providers["default"].subscribe("stuck", "shop/*", never)
        await caller.publish(batch("shop/1", b"a", b"b"), batch("shop/2", b"c"))
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await describe_queue(caller)).cursors or found.queue.cached_events < 3:  # noqa: ASYNC110 (a call)
                await asyncio.sleep(0.01)
        assert found.silo
        assert [(bucket.events, bucket.low, bucket.high) for bucket in found.buckets] == [(3, 0, 1)]
        (cursor,) = found.cursors
        assert (cursor.subscription, cursor.watermark, cursor.bucket, cursor.active) == ("stuck", 0, 0, 2)
        assert (found.received_events, found.pressure) == (3, False)
        with pytest.raises(Refused, match=r"INVALID_ARGUMENT .*: queue: provider 'default' has 1 queues, from 0"):
            await describe_queue(caller, 1)


async def test_a_stream_that_waits_for_its_next_attempt_has_the_reason(tmp_path: Path):
    async def fail(event: Event) -> None:
        raise ValueError("no such customer" + 20_000 * "!")

    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await silo.providers["default"].subscribe("bills", "shop/*", fail, retry=LATER)
        await caller.publish(batch("shop/1", b"a"))
        part = await until(caller, lambda part: part.waiting == 1, name="bills", blocked=5)
        (blocked,) = part.blocked
        assert (blocked.stream.namespace, blocked.stream.key, blocked.state) == ("shop", "1", "waiting")
        assert "no such customer" in blocked.reason
        assert len(blocked.reason) == MAX_REASON
        assert (blocked.offset, blocked.attempts) == (0, 1)
        assert 0 < blocked.next_in_ms <= 200_000
        assert (part.state, part.queues) == ("retrying", 2)
        assert not (await describe(caller, name="bills"))[0].blocked
        assert await describe(caller, name="other") == []


async def test_a_paused_stream_has_the_reason(tmp_path: Path):
    async def fail(event: Event) -> None:
        raise ValueError("broken" + 20_000 * "!")

    once = RetryPolicy(max_attempts=1)
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        provider = silo.providers["default"]
        await provider.subscribe("bills", "shop/*", fail, retry=once, on_failure=OnFailure.PAUSE, circuit_breaker=False)
        await caller.publish(batch("shop/1", b"a"))
        part = await until(caller, lambda part: part.paused == 1, blocked=5)
        (blocked,) = part.blocked
        assert (blocked.state, "broken" in blocked.reason, len(blocked.reason)) == ("paused", True, MAX_REASON)


async def test_the_lag_of_a_subscription_is_sampled(tmp_path: Path):
    async def never(event: Event) -> None:
        await asyncio.Event().wait()

    async with opened(tmp_path, drain_s=0) as silo, connecting(silo.grpc_address or "") as caller:
        await silo.providers["default"].subscribe("stuck", "shop/*", never)
        await caller.publish(batch("shop/1", b"a", b"b"))

        def lags(part: pb.SubscriptionPart) -> bool:
            return len(part.lags) > 1 and part.lags[-1].batches == 1

        part = await until(caller, lags, history_ms=60_000)
        assert part.lags[-1].events == 2
        assert part.lags[-1].age_ms > 0
        assert [lag.at_us for lag in part.lags] == sorted(lag.at_us for lag in part.lags)
        (last,) = (await describe(caller))[0].lags
        assert last.batches == 1


async def test_a_subscription_that_no_silo_serves_has_its_lag(tmp_path: Path):
    async with Provider.open(tmp_path, queues=2) as provider:
        for name, selector in (("mine", "shop/*"), ("theirs", "bank/*")):
            await provider.create_subscription(
                SubscriptionDefinition(name=name, selector=Selector(selector), start=Start.earliest())
            )
        await provider.publish(StreamId("shop", "1"), [b"a", b"b"])
    tokens = await make_tokens(tmp_path, all=Allowed(manage=["*"]), shop=Allowed(manage=["shop"]))

    async def unserved(caller: Caller, names: set[str]) -> list[pb.UnservedLag]:
        request = pb.DescribeSubscriptionsRequest()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await caller.ask(
                    f"{OBSERVATION}/DescribeSubscriptions", request, pb.DescribeSubscriptionsResponse
                )
                assert not answer.parts
                if names <= {one.name for one in answer.unserved}:
                    return [one for one in answer.unserved if one.name in names]
                await asyncio.sleep(0.05)

    async with opened(tmp_path, auth="tokens") as silo:
        async with connecting(silo.grpc_address or "", tokens["all"]) as caller:
            mine = next(one for one in await unserved(caller, {"mine"}) if one.lag.batches)
            assert (mine.name, mine.lag.events, mine.lag.batches) == ("mine", 2, 1)
            assert mine.lag.age_ms > 0
        async with connecting(silo.grpc_address or "", tokens["shop"]) as caller:
            (hidden,) = await unserved(caller, {"mine"})
            assert (hidden.name, hidden.lag.batches, hidden.lag.HasField("events")) == ("mine", 0, False)
            assert not hidden.lag.HasField("age_ms")


async def test_a_tenant_sees_its_own_subscriptions_and_no_amounts_of_others(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path,
        all=Allowed(publish=["*"], subscribe=["*"], manage=["*"]),
        shop=Allowed(subscribe=["shop"], manage=["shop"]),
        nothing=Allowed(publish=["shop"]),
    )
    async with opened(tmp_path, auth="tokens") as silo:
        address = silo.grpc_address or ""
        provider = silo.providers["default"]

        async def note(event: Event) -> None: ...

        await provider.subscribe("mine", "shop/*", note, start=Start.earliest())
        await provider.subscribe("theirs", "bank/*", note, start=Start.earliest())
        async with connecting(address, tokens["all"]) as caller:
            await caller.publish(batch("bank/1", b"a"), batch("shop/1", b"a"))
            assert [part.name for part in await describe(caller)] == ["mine", "theirs"]
        async with connecting(address, tokens["shop"]) as caller:
            part = await until(caller, lambda part: bool(part.lags))
            assert [part.name for part in await describe(caller)] == ["mine"]
            assert not part.lags[-1].HasField("age_ms")
            assert not part.lags[-1].HasField("events")
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await describe_queue(caller)
        async with connecting(address, tokens["nothing"]) as caller:
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await describe(caller)
            assert await moves(caller) == []
        async with connecting(address) as caller:
            with pytest.raises(Refused, match="UNAUTHENTICATED"):
                await moves(caller)


async def test_any_silo_answers_for_the_whole_cluster(tmp_path: Path):
    async def note(event: Event) -> None: ...

    config = SiloConfig(
        data=str(tmp_path), drain_s=1, grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=4)}
    )
    async with clustered(config, 2) as silos, connecting(silos[0].grpc_address or "") as caller:
        for silo in silos:
            await silo.providers["default"].subscribe("printer", "shop/*", note)
        for silo in silos:
            for queue in queues(silo):
                found = await describe_queue(caller, queue)
                assert found.silo == silo.clustered_silo.name if silo.clustered_silo else ""
        parts = await describe(caller)
        assert [(part.silo, part.queues) for part in parts] == [("silo-0", 2), ("silo-1", 2)]
        moved = queues(silos[1])
        await silos.stop(1)
        await silos.shared([0])
        seen = [move for move in await moves(caller) if move.to_silo == "silo-0" and move.from_silo == "silo-1"]
        assert sorted(move.queue for move in seen) == moved
        assert abs(seen[0].at_us / 1e6 - time.time()) < 60
        await silos.start(1)
