"""ExternalScaler, as KEDA calls it: over gRPC, without metadata, with a token among the trigger's metadata."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace import Client, Event, OnFailure, Provider, RetryPolicy, Selector, StreamId
from headrace.proto.keda import externalscaler_pb2 as pb
from headrace.silo.host import Silo
from headrace.silo.services.visible import selected_events
from tests.serving import by_one_and_two_silos, serving
from tests.silo.services.calling import Allowed, Caller, Refused, connecting, make_tokens, opened

__all__ = ("serving",)

pytest_generate_tests = by_one_and_two_silos

SERVICE = "externalscaler.ExternalScaler"
TRIGGER = {"scalerAddress": "silo:9465", "subscription": "bills", "lagThreshold": "10"}


def ref(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="bills", namespace="shop", scalerMetadata={**TRIGGER, **metadata})


async def lag(caller: Caller, **metadata: str) -> float:
    """The lag that KEDA divides by its target."""
    request = pb.GetMetricsRequest(scaledObjectRef=ref(**metadata), metricName="headrace-lag")
    (value,) = (await caller.ask(f"{SERVICE}/GetMetrics", request, pb.GetMetricsResponse)).metricValues
    assert value.metricValue == value.metricValueFloat
    return value.metricValue


async def is_active(caller: Caller, **metadata: str) -> bool:
    return (await caller.ask(f"{SERVICE}/IsActive", ref(**metadata), pb.IsActiveResponse)).result


async def publish(silo: Silo, count: int) -> None:
    """Publish events to several queues."""
    async with Client(str(silo.grpc_address)) as client:
        for number in range(count):
            await client.stream("orders", str(number)).publish(b"x")


async def consume_all(silo: Silo) -> None:
    async def handle(_: Event) -> None:
        pass

    async with Client(str(silo.grpc_address)) as client:
        subscription = await client.subscribe("bills", "orders/*", handle)
        await subscription.caught_up()
        await subscription.close()


@pytest.mark.long
async def test_the_lag_of_a_subscription_without_a_consumer_starts_consumers_and_ends_them(tmp_path: Path):
    async with opened(tmp_path / "data") as silo, connecting(str(silo.grpc_address)) as caller:
        await caller.create("bills", "orders/*")
        assert (await lag(caller), await is_active(caller)) == (0, False)
        await publish(silo, 25)
        assert (await lag(caller), await is_active(caller)) == (25, True)
        assert not await is_active(caller, activationLagThreshold="25")
        await consume_all(silo)
        assert (await lag(caller), await is_active(caller)) == (0, False)


@pytest.mark.one_silo
async def test_the_target_is_the_threshold_of_the_trigger(tmp_path: Path):
    async with opened(tmp_path / "data") as silo, connecting(str(silo.grpc_address)) as caller:
        answer = await caller.ask(f"{SERVICE}/GetMetricSpec", ref(), pb.GetMetricSpecResponse)
        (spec,) = answer.metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("headrace-lag", 10, 10.0)


@pytest.mark.one_silo
async def test_a_stream_tells_each_change_and_ends_with_the_silo(tmp_path: Path):
    async with AsyncExitStack() as after:
        async with opened(tmp_path / "data") as silo:
            caller = await after.enter_async_context(connecting(str(silo.grpc_address)))
            await caller.create("bills", "orders/*")
            stream = caller.responses(f"{SERVICE}/StreamIsActive", ref())
            assert await stream.read(pb.IsActiveResponse) == pb.IsActiveResponse(result=False)
            await publish(silo, 1)
            assert await stream.read(pb.IsActiveResponse) == pb.IsActiveResponse(result=True)
        assert await stream.read(pb.IsActiveResponse) is None


@pytest.mark.one_silo
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"subscription": ""}, "subscription is missing in the metadata of the trigger"),
        ({"lagThreshold": "0"}, "lagThreshold is '0' in the metadata of the trigger: write a number of events"),
        ({"lagThreshold": "many"}, "lagThreshold is 'many'"),
        ({"activationLagThreshold": "-1"}, "activationLagThreshold is '-1'"),
        ({"subscription": "other"}, "there is no subscription 'other'"),
        ({"provider": "other"}, "this silo has no provider 'other'"),
    ],
)
async def test_a_wrong_trigger_is_refused(tmp_path: Path, metadata: Mapping[str, str], message: str):
    async with opened(tmp_path / "data") as silo, connecting(str(silo.grpc_address)) as caller:
        await caller.create("bills", "orders/*")
        with pytest.raises(Refused, match=message):
            await lag(caller, **metadata)


@pytest.mark.one_silo
async def test_only_a_token_for_the_streams_of_the_subscription_sees_its_lag(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path / "data", consumer=Allowed(subscribe=["orders"]), other=Allowed(subscribe=["users"])
    )
    async with opened(tmp_path / "data", auth="tokens") as silo:
        async with connecting(str(silo.grpc_address), tokens["consumer"]) as consumer:
            await consumer.create("bills", "orders/*")
        async with connecting(str(silo.grpc_address)) as keda:
            assert await lag(keda, tokenFromEnv=tokens["consumer"]) == 0
            assert await lag(keda, token=tokens["consumer"]) == 0
            for wrong, status in (({}, "UNAUTHENTICATED"), ({"token": "hr_x"}, "UNAUTHENTICATED")):
                with pytest.raises(Refused, match=status):
                    await lag(keda, **wrong)
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await is_active(keda, token=tokens["other"])


@pytest.mark.one_silo
async def test_a_token_for_some_streams_learns_nothing_of_others(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path / "data",
        consumer=Allowed(publish=["orders"], subscribe=["orders"]),
        other=Allowed(publish=["users"]),
        admin=Allowed(manage=["*"]),
    )
    async with opened(tmp_path / "data", auth="tokens") as silo, connecting(str(silo.grpc_address)) as keda:
        address = str(silo.grpc_address)
        async with connecting(address, tokens["consumer"]) as consumer:
            await consumer.create("bills", "orders/*")
        async with Client(address, token=tokens["other"]) as client:
            for number in range(37):
                await client.stream("users", str(number)).publish(b"x")
        assert not await is_active(keda, token=tokens["consumer"])
        async with Client(address, token=tokens["consumer"]) as client:
            await client.stream("orders", "1").publish([b"x", b"y"])
            await client.stream("orders", "2").publish(b"z")
        assert await lag(keda, token=tokens["consumer"]) == 3
        assert await lag(keda, token=tokens["admin"]) > 3


async def test_a_long_queue_is_not_read_to_its_end_for_one_question(tmp_path: Path):
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.publish_many([(StreamId("users", str(number)), bytes(1 << 20)) for number in range(8)])
        await provider.stream("orders", "1").publish([b"x", b"y"])
        selector = Selector("orders/*")
        assert await selected_events(provider.adapter, 0, 0, selector) == 1, "as if the next event were selected"
        assert await selected_events(provider.adapter, 0, 0, selector, search_bytes=1 << 30) == 2
        assert await selected_events(provider.adapter, 0, 0, Selector("users/*")) < 8
        assert await selected_events(provider.adapter, 0, 9, selector) == 0


@pytest.mark.one_silo
async def test_events_of_a_paused_stream_start_no_consumer(tmp_path: Path):
    """They wait for an operator: more consumers would not help."""
    async with opened(tmp_path / "data") as silo, connecting(str(silo.grpc_address)) as caller:
        provider = silo.providers["default"]

        async def fails(_: Event) -> None:
            raise ValueError

        retry = RetryPolicy(max_attempts=1)
        bills = await provider.subscribe("bills", "orders/*", fails, on_failure=OnFailure.PAUSE, retry=retry)
        await provider.stream("orders", "1").publish(b"x")
        await bills.caught_up()
        assert await lag(caller) == 0
