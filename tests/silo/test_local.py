"""Taking batches from a provider in this process looks and behaves as it does through a client."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import Busy, Event, EventBatch, InvalidArgument, Mode, NotSupported, Provider, Start, StreamId
from headrace.client.consuming_client import ConsumingClient
from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod
from headrace.silo.consumer_groups import ConsumerGroups
from headrace.silo.in_process import InProcessStreamCall, InProcessTransport
from headrace.silo.options import ProviderOptions
from headrace.silo.services.consumer import ConsumerService
from headrace.silo.services.subscriptions import SubscriptionService
from headrace.silo.services.visible import VisibleBounds
from headrace.streams.errors import Unavailable

STREAM = StreamId("orders", "42")


async def test_acknowledged_events_do_not_come_again(tmp_path: Path):
    async with Provider.open(tmp_path / "data") as provider:
        async with provider.subscribe("billing", "orders/*") as consumer:
            await provider.publish(STREAM, [b"a", b"b", b"c"])
            async for batch in consumer:
                assert (batch.stream, batch.payloads()) == (STREAM, [b"a", b"b", b"c"])
                await batch.ack(batch.events()[0])
                break
        async with provider.subscribe("billing", "orders/*") as consumer:
            async for batch in consumer:
                assert batch.payloads() == [b"b", b"c"]
                await batch.ack()
                break
    async with Provider.open(tmp_path / "data") as provider:
        await provider.publish(STREAM, b"d")
        async with provider.subscribe("billing", "orders/*") as consumer:
            async for batch in consumer:
                assert batch.payloads() == [b"d"]
                break


async def test_a_rejection_with_arguments_in_a_wrong_place_says_what_to_write(tmp_path: Path):
    async with Provider.open(tmp_path / "data") as provider:
        async with provider.subscribe("billing", "orders/*") as consumer:
            await provider.publish(STREAM, b"a")
            batch = await anext(consumer)
            with pytest.raises(InvalidArgument, match=r"not Event: batch.nack\('why', event=event\)"):
                batch.nack(batch.events()[0])  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match=r"is a timedelta, not 5: timedelta\(seconds=5\)"):
                batch.nack("later", delay=5)  # type: ignore[arg-type]
            await batch.ack()


async def test_several_consumers_share_a_subscription(tmp_path: Path):
    async with Provider.open(tmp_path / "data") as provider:
        async with (
            provider.subscribe("billing", "orders/*", mode=Mode.BOUND) as one,
            provider.subscribe("billing", "orders/*", mode=Mode.BOUND) as other,
        ):
            assert one.id != other.id
            await one.opened()
            state = await (await provider.local_consumer()).subscription("billing")
            assert sorted(each.id for each in state.consumers) == sorted((one.id, other.id))
            assert [len(each.queues) for each in state.consumers] == [4, 4]


async def test_a_handler_and_a_consumer_exclude_each_other(tmp_path: Path):
    async def handler(_: Event) -> None: ...

    async with Provider.open(tmp_path / "data") as provider:
        await provider.subscribe("billing", "orders/*", handler)
        with pytest.raises(Busy, match="served by a handler in the silo"):
            async with provider.subscribe("billing", "orders/*"):
                pass
        async with provider.subscribe("shipping", "orders/*"):
            with pytest.raises(Busy, match="already served by this process"):
                await provider.subscribe("shipping", "orders/*", handler)


async def test_options_that_would_be_without_effect_are_refused(tmp_path: Path):
    async def handler(_: EventBatch) -> None: ...

    async with Provider.open(tmp_path / "data") as provider:
        with pytest.raises(InvalidArgument, match="max_events is for a consumer without a handler"):
            provider.subscribe("billing", "orders/*", handler, max_events=3)  # type: ignore[call-overload]
        with pytest.raises(NotSupported, match="a filter is for a handler"):
            provider.subscribe("billing", "orders/*", filter=bool)  # type: ignore[call-overload]
        with pytest.raises(InvalidArgument, match="has no handler"):
            await provider.subscribe("billing", "orders/*")  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match="has a handler"):
            async with provider.subscribe("billing", "orders/*", handler, batch=True):  # type: ignore[attr-defined]
                pass


async def test_a_provider_that_closes_ends_its_consumers(tmp_path: Path):
    provider = await Provider.start(tmp_path / "data", ProviderOptions())
    consumer = await provider.subscribe("billing", "orders/*").__aenter__()
    await provider.aclose()
    assert [batch async for batch in consumer] == []


class BreakableTransport(InProcessTransport):
    """Breaks its connections when it is told to."""

    def __init__(self, methods: Sequence[ServiceMethod]) -> None:
        super().__init__(methods)
        self._calls: list[InProcessStreamCall] = []

    def stream(self, method: str) -> InProcessStreamCall:
        self._calls.append(super().stream(method))
        return self._calls[-1]

    def break_connections(self) -> None:
        for call in self._calls:
            call.cancel()


async def test_events_after_a_seek_come_again_though_acknowledged_over_a_lost_connection(tmp_path: Path):
    async with Provider.open(tmp_path / "data") as provider, ConsumerGroups.opened(provider, 10.0) as consumers:
        providers, groups, visible = {provider.name: provider}, {provider.name: consumers}, VisibleBounds()
        services = ConsumerService(providers, groups, visible), SubscriptionService(providers, groups, visible)
        transport = BreakableTransport([method for service in services for method in service.methods()])
        client = ConsumingClient(transport, provider.name, 30.0)
        async with client.subscribe("billing", "orders/*") as consumer:
            await provider.publish(STREAM, b"a")
            batch = await anext(consumer)
            await batch.ack()
            transport.break_connections()  # before anything is saved
            await provider.seek("billing", Start.earliest())
            assert (await anext(consumer)).payloads() == [b"a"]
        await transport.aclose()


async def test_a_long_call_within_the_process_is_repeated_after_an_outage():
    failures = [Unavailable("the store does not answer")]

    async def wait(_: ServiceCall, request: bytes) -> bytes:
        if failures:
            raise failures.pop()
        return request

    transport = InProcessTransport([ServiceMethod("headrace.v1.TestService/Wait", MethodKind.UNARY, wait)])
    assert await transport.long_call("TestService/Wait", b"request", outage_s=1.0) == b"request"
