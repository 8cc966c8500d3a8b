"""Code that type checkers accept. `test_type_checkers.py` runs them over it; nothing here is executed."""

from dataclasses import dataclass
from datetime import timedelta

import msgspec
import pydantic
from sqlalchemy.ext.asyncio import create_async_engine

from headrace import (
    Client,
    Effects,
    Event,
    EventBatch,
    Mode,
    OnFailure,
    Provider,
    ReceivedBatch,
    RetryPolicy,
    Start,
    StreamId,
    StreamProvider,
    SyncClient,
    SyncStreamProvider,
    Transaction,
    subscription,
)


async def on_event(event: Event) -> None:
    print(event.payload)


async def on_batch(batch: EventBatch) -> None:
    print(batch.payloads())


async def on_received(batch: ReceivedBatch) -> None:
    await batch.ack()


class StructOrder(msgspec.Struct):
    id: int


class ModelOrder(pydantic.BaseModel):
    id: int


@dataclass
class DataOrder:
    id: int


def is_paid(event: Event) -> bool:
    return event.payload == b"paid"


class PerEvent:
    async def on_next(self, event: Event) -> None: ...


class PerBatch:
    async def on_next_batch(self, batch: EventBatch) -> None: ...


@subscription("paid", "orders/*", filter=is_paid, concurrency=10, start="earliest")
async def declared_event(event: Event) -> None: ...


@subscription("counted", StreamId("orders", "42"), batch=True, on_failure=OnFailure.SKIP)
async def declared_batch(batch: EventBatch) -> None: ...


@subscription("structs", "orders/*")
async def declared_struct(order: StructOrder) -> None: ...


@subscription("models", "orders/*", concurrency=10)
async def declared_model(order: ModelOrder, event: Event) -> None: ...


@subscription("data", "orders/*")
async def declared_dataclass(order: DataOrder) -> None: ...


@subscription("raw", "orders/*")
async def declared_bytes(payload: bytes) -> None: ...


@subscription("dicts", "orders/*")
async def declared_dict(payload: dict[str, int]) -> None: ...


subscription("observed", "orders/*")(PerEvent())
subscription("observed-batches", "orders/*")(PerBatch())


effects = Effects(create_async_engine("sqlite+aiosqlite:///user.db"))


@subscription("billing", "orders/*", effects=effects, filter=is_paid)
async def in_transaction(event: Event, tx: Transaction) -> None: ...


@subscription("billing-orders", "orders/*", effects=effects)
async def order_in_transaction(order: StructOrder, tx: Transaction) -> None:
    await tx.publish(StreamId("invoices", "42"), ModelOrder(id=order.id))


@subscription("billing-both", "orders/*", effects=effects)
async def order_and_event_in_transaction(order: ModelOrder, event: Event, tx: Transaction) -> None: ...


@subscription("billing-batches", "orders/*", batch=True, effects=effects)
async def batch_in_transaction(batch: EventBatch, tx: Transaction) -> None: ...


async def in_the_silo(provider: Provider) -> None:
    await provider.subscribe("f", "orders/*", in_transaction, effects=effects, concurrency=2)
    await provider.subscribe("g", "orders/*", batch_in_transaction, effects=effects, batch=True)
    one = await provider.subscribe("a", "orders/*", on_event, start=Start.earliest(), filter=is_paid, concurrency=1)
    await one.resume(StreamId("orders", "42"))
    await provider.subscribe("b", "orders/*", on_batch, batch=True, retry=RetryPolicy(max_attempts=1))
    await provider.subscribe("c", "orders/*", PerEvent())
    await provider.subscribe("h", "orders/*", declared_struct, concurrency=2)
    await provider.subscribe("i", "orders/*", order_in_transaction, effects=effects)
    await provider.publish(StreamId("orders", "42"), [StructOrder(1), ModelOrder(id=2), DataOrder(3), {"id": 4}, "5"])
    await provider.subscribe("d", "orders/*", PerBatch())
    async with provider.subscribe("e", "orders/*", consumer="one", max_events=10) as consumer:
        async for batch in consumer:
            await batch.ack()


async def in_a_client(client: Client) -> None:
    await client.subscribe("a", "orders/*", on_event, consumer="one", concurrency=1)
    await client.subscribe("b", "orders/*", on_batch, batch=True, mode=Mode.BOUND)
    await client.subscribe("b", "orders/*", on_received, batch=True, mode="bound")
    await client.subscribe("b", None, on_event)
    await client.subscribe("b", None, declared_model)
    await client.publish(StreamId("orders", "42"), StructOrder(1))
    async with client.subscribe("c", "orders/*", session_timeout_s=5) as consumer:
        await consumer.saved()
    async with client.subscribe("c") as consumer:
        await consumer.saved()


async def anywhere(provider: StreamProvider) -> None:
    await provider.stream("orders", "42").publish(b"paid", delay=timedelta(seconds=1))
    handled = await provider.subscribe("a", "orders/*", on_event, start="earliest", concurrency=2)
    await handled.caught_up()
    await provider.subscribe("b", "orders/*", on_batch, batch=True)
    async with provider.subscribe("c", "orders/*") as consumer:
        async for batch in consumer:
            await batch.ack()
    await provider.redrive("a", [letter.id for letter in await provider.dead_letters("a")])
    await provider.acknowledge(await provider.pull("c", "one"))
    await provider.flush()


def without_asyncio(provider: SyncStreamProvider) -> None:
    provider.stream("orders", "42").publish(b"paid")
    with provider.subscribe("c", "orders/*") as consumer:
        for batch in consumer:
            batch.ack()
    provider.acknowledge(provider.pull("c", "one"))


async def every_provider(address: str) -> None:
    async with Provider.open("data", queues=4, options={"durability": "relaxed"}) as provider:
        await anywhere(provider)
    async with Client(address, token="secret") as client:
        await anywhere(client)
    with SyncClient(address, timeout_s=5) as sync_client:
        without_asyncio(sync_client)
