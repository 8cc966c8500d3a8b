"""Handlers of values, in a silo, in a provider and in a client; and payloads that are not what they should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from headrace import (
    Client,
    Effects,
    Event,
    InvalidArgument,
    OnFailure,
    PayloadInvalid,
    Provider,
    RetryPolicy,
    StreamId,
    SyncClient,
    Transaction,
)
from headrace.effects import schema
from headrace.silo.config_loader import load_config
from headrace.silo.host import Silo
from tests.silo.services.calling import opened

STREAM = StreamId("orders", "42")
PATIENT = RetryPolicy(max_attempts=100, initial_delay_s=3600)
"""An event that is tried again is not done before the test ends."""


class Order(msgspec.Struct):
    id: int


@pytest_asyncio.fixture
async def silo(tmp_path: Path) -> AsyncIterator[Silo]:
    async with opened(tmp_path / "data") as silo:
        yield silo


@pytest_asyncio.fixture(params=["provider", "client"])
async def either(request: pytest.FixtureRequest, silo: Silo) -> AsyncIterator[Any]:
    if request.param == "provider":
        yield silo.providers["default"]
        return
    assert silo.grpc_address is not None
    async with Client(silo.grpc_address) as client:
        yield client


async def test_handlers_are_given_the_values_that_were_published(either: Any) -> None:
    seen: list[object] = []

    async def handle(order: Order, event: Event) -> None:
        seen.append((order, event.stream, event.headers))

    handled = await either.subscribe("billing", "orders/*", handle, start="earliest")
    await either.publish(STREAM, Order(1))
    await either.publish(STREAM, [Order(2), {"id": 3}, Event(b'{"id":4}', {"h": "x"})])
    await either.publish_many([(STREAM, Order(5)), (STREAM, '{"id": 6}')])
    await handled.caught_up()
    assert seen == [(Order(n), STREAM, {"h": "x"} if n == 4 else {}) for n in range(1, 7)]


@pytest.mark.long
@pytest.mark.parametrize("circuit_breaker", [True, False])
async def test_invalid_payloads_become_dead_letters_at_once_whatever_the_retries(
    either: Any, *, circuit_breaker: bool
) -> None:
    """Twenty streams fail together, and the circuit breaker must not take that for an outage."""
    seen: list[int] = []

    async def handle(order: Order) -> None:
        seen.append(order.id)

    handled = await either.subscribe(
        "billing", "orders/*", handle, start="earliest", retry=PATIENT, circuit_breaker=circuit_breaker
    )
    for key in map(str, range(20)):
        await either.publish(StreamId("orders", key), [Order(1), {"id": "one"}, Order(2)])
    await handled.caught_up()
    assert sorted(seen) == [1] * 20 + [2] * 20
    letters = await either.dead_letters("billing")
    assert {letter.stream.key for letter in letters} == set(map(str, range(20)))
    assert {(letter.attempts, letter.token.index, letter.payload) for letter in letters} == {(1, 1, b'{"id":"one"}')}
    assert "PayloadInvalid: the payload is no Order: Expected `int`, got `str` - at `$.id`" in letters[0].reason


async def test_an_invalid_payload_does_what_on_failure_says(either: Any) -> None:
    async def handle(order: Order) -> None: ...

    handled = await either.subscribe(
        "billing", "orders/*", handle, start="earliest", retry=PATIENT, on_failure=OnFailure.SKIP
    )
    await either.publish(STREAM, [b"x", Order(1)])
    await handled.caught_up()
    assert not await either.dead_letters("billing")
    assert len(await either.gaps("billing")) == 1


async def test_an_invalid_payload_can_be_redriven_when_the_handler_was_mended(either: Any) -> None:
    async def first(order: Order) -> None: ...

    handled = await either.subscribe("billing", "orders/*", first, start="earliest", retry=PATIENT)
    await either.publish(STREAM, {"id": "one"})
    await handled.caught_up()
    await handled.close()
    seen = asyncio.Queue[Any]()

    async def second(order: dict[str, Any]) -> None:
        seen.put_nowait(order)

    await either.subscribe("billing", "orders/*", second, start="earliest", retry=PATIENT)
    assert await either.redrive("billing") == 1
    assert await seen.get() == {"id": "one"}


async def test_a_consumer_of_batches_can_say_that_a_payload_is_invalid(either: Any) -> None:
    await either.publish(STREAM, [b"x", b"y"])
    async with either.subscribe("billing", "orders/*", start="earliest", retry=PATIENT) as consumer:
        batch = await anext(consumer)
        await batch.nack("no order", event=batch.events()[0], invalid=True)
        batch = await anext(consumer)
        assert [event.payload for event in batch] == [b"y"]
        await batch.ack()
        await consumer.saved()
    [letter] = await either.dead_letters("billing")
    assert (letter.payload, letter.reason, letter.attempts) == (b"x", "no order", 1)


async def test_a_handler_of_batches_can_say_that_a_batch_is_invalid(either: Any) -> None:
    async def handle(batch: Any) -> None:
        raise PayloadInvalid("no orders")

    handled = await either.subscribe("billing", "orders/*", handle, batch=True, start="earliest", retry=PATIENT)
    await either.publish(STREAM, [b"x", b"y"])
    await handled.caught_up()
    assert [letter.payload for letter in await either.dead_letters("billing")] == [b"x", b"y"]


async def test_handlers_with_effects_are_given_values(tmp_path: Path, either: Any) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'user.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(schema.migrate)
        await connection.execute(text("CREATE TABLE log (id INTEGER)"))

    async def handle(order: Order, tx: Transaction) -> None:
        await tx.execute(text("INSERT INTO log VALUES (:id)"), {"id": order.id})

    async def with_event(order: Order, event: Event, tx: Transaction) -> None:
        assert event.token is not None
        await tx.execute(text("INSERT INTO log VALUES (:id)"), {"id": 10 * order.id + event.token.index})

    await either.publish(STREAM, [Order(1), b"x", Order(2)])
    for name, handler in (("billing", handle), ("events", with_event)):
        handled = await either.subscribe(
            name, "orders/*", handler, start="earliest", effects=Effects(engine), retry=PATIENT
        )
        await handled.caught_up()
        assert [letter.payload for letter in await either.dead_letters(name)] == [b"x"]
    async with engine.connect() as connection:
        assert (await connection.scalars(text("SELECT id FROM log ORDER BY id"))).all() == [1, 2, 10, 22]
    await engine.dispose()


async def test_a_provider_and_a_client_have_the_codec_that_they_are_given(tmp_path: Path) -> None:
    seen: list[Order] = []

    async def handle(order: Order) -> None:
        seen.append(order)

    async with Provider.open(tmp_path / "one", codec={"orders": "msgpack"}) as provider:
        handled = await provider.subscribe("billing", "*/*", handle, start="earliest")
        await provider.publish(STREAM, Order(1))
        await provider.publish(STREAM, b"\x81\xa2id\x02")
        await provider.publish(StreamId("others", "o"), b'{"id":3}')
        await handled.caught_up()
    assert sorted(order.id for order in seen) == [1, 2, 3]
    async with opened(tmp_path / "two") as silo:
        assert silo.grpc_address is not None
        async with Client(silo.grpc_address, codec="msgpack") as client:
            await client.publish(STREAM, Order(4))
            async with client.subscribe("raw", "orders/*", start="earliest") as consumer:
                assert (await anext(consumer)).payloads() == [b"\x81\xa2id\x04"]


async def test_a_client_without_asyncio_publishes_values(silo: Silo) -> None:
    address = silo.grpc_address
    assert address is not None

    def publish() -> None:
        with SyncClient(address, codec="msgpack") as client:
            client.stream(STREAM).publish(Order(1))
            client.publish_many([(STREAM, "two")])

    await asyncio.to_thread(publish)
    provider = silo.providers["default"]
    async with provider.subscribe("raw", "orders/*", start="earliest") as consumer:
        assert [payload for _ in range(2) for payload in (await anext(consumer)).payloads()] == [
            b"\x81\xa2id\x01",
            b"two",
        ]


def test_the_configuration_of_a_silo_has_codecs(tmp_path: Path) -> None:
    file = tmp_path / "silo.toml"
    table = '[providers.b.codec]\norders = "msgpack"\n"*" = "json"\n'
    file.write_text(f'data = "d"\n[providers.a]\ncodec = "msgpack"\n{table}')
    config = load_config(file, {}, {})
    assert config.providers["a"].named("a").codec == "msgpack"
    assert config.providers["b"].named("b").codec == {"orders": "msgpack", "*": "json"}


async def test_a_wrong_codec_is_refused_when_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="codec is 'yaml': expected 'json', 'msgpack'"):
        Provider.open(tmp_path / "data", codec="yaml")
    with pytest.raises(InvalidArgument, match="codec is 'yaml': expected 'json', 'msgpack'"):
        Client("localhost:1", codec="yaml")
