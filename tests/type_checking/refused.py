"""Mistakes that type checkers find: every line with `type: ignore` has one. Nothing here is executed.

Both checkers complain of an ignore without a mistake, so `test_type_checkers.py` fails if one is not found.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from sqlalchemy.ext.asyncio import create_async_engine

from headrace import (
    Client,
    Effects,
    Event,
    EventBatch,
    Provider,
    StreamId,
    StreamProvider,
    SyncClient,
    Transaction,
    subscription,
)


async def on_event(event: Event) -> None: ...


async def on_batch(batch: EventBatch) -> None: ...


async def on_nothing() -> None: ...


def blocking(event: Event) -> None: ...


@subscription("a", "orders/*")  # type: ignore[type-var]
def declared_without_async(event: Event) -> None: ...


@subscription("a", "orders/*")  # type: ignore[type-var]
async def declared_without_batch(batch: EventBatch) -> None: ...


@subscription("a", "orders/*", batch=True)  # type: ignore[type-var]
async def declared_with_batch(event: Event) -> None: ...


@subscription("a", "orders/*", batch=True)  # type: ignore[type-var]
async def declared_text_for_batches(payload: str) -> None: ...


@subscription("a", "orders/*")  # type: ignore[type-var]
async def declared_for_numbers(payload: int) -> None: ...


effects = Effects(create_async_engine("sqlite+aiosqlite:///user.db"))


@subscription("a", "orders/*", effects=effects)  # type: ignore[arg-type]
async def declared_without_transaction(event: Event) -> None: ...


@subscription("a", "orders/*")  # type: ignore[type-var]
async def declared_without_effects(event: Event, tx: Transaction) -> None: ...


@subscription("a", "orders/*", effects=effects, batch=True)  # type: ignore[arg-type]
async def declared_for_batches(event: Event, tx: Transaction) -> None: ...


@subscription("a", "orders/*", queue=4)  # type: ignore[call-overload, untyped-decorator]
async def declared_with_unknown_option(event: Event) -> None: ...


async def in_the_silo(provider: Provider) -> None:
    await provider.subscribe("a", "orders/*", on_event, effects=effects)  # type: ignore[arg-type]
    await provider.subscribe("a", "orders/*", declared_without_effects)  # type: ignore[arg-type]
    Provider.open(queue=4)  # type: ignore[call-arg]
    Provider.open(queues="8")  # type: ignore[arg-type]
    await provider.subscribe("a", "orders/*", on_event, concurency=2)  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_event, max_events=2)  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_event, concurrency="2")  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_event, on_failure="pause")  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_event, batch=True)  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_batch)  # type: ignore[type-var]
    await provider.subscribe("a", "orders/*", on_nothing)  # type: ignore[arg-type]
    await provider.subscribe("a", "orders/*", blocking)  # type: ignore[arg-type]
    provider.subscribe("a", "orders/*", on_event)  # type: ignore[unused-coroutine]
    await provider.subscribe("a", "orders/*")  # type: ignore[misc]
    async with provider.subscribe("a", "orders/*", on_event):  # type: ignore[attr-defined]
        pass
    async with provider.subscribe("a", "orders/*", concurrency=2):  # type: ignore[call-overload]
        pass
    await provider.publish(StreamId("orders", "42"), 5)  # type: ignore[arg-type]
    await provider.seek("a", 5)  # type: ignore[arg-type]
    await provider.resume("a", "orders/1")  # type: ignore[arg-type]


async def in_a_client(client: Client) -> None:
    Client("localhost:9465", queue=4)  # type: ignore[call-arg]
    SyncClient("localhost:9465", queue=4)  # type: ignore[call-arg]
    await client.subscribe("a", "orders/*", on_event, concurency=2)  # type: ignore[call-overload]
    await client.subscribe("a", "orders/*", on_event, filter=bool)  # type: ignore[call-overload]
    await client.subscribe("a", "orders/*", on_event, batch=True)  # type: ignore[call-overload]
    await client.subscribe("a", "orders/*", on_batch)  # type: ignore[type-var]
    await client.subscribe("a", "orders/*", blocking)  # type: ignore[arg-type]
    client.subscribe("a", "orders/*", on_event)  # type: ignore[unused-coroutine]
    await client.subscribe("a", "orders/*")  # type: ignore[misc]
    async with client.subscribe("a", "orders/*", max_event=2):  # type: ignore[call-overload]
        pass
    await client.resume("a", "orders/1")  # type: ignore[arg-type]


async def anywhere(provider: StreamProvider) -> None:
    await provider.subscribe("a", "orders/*", on_event, concurency=2)  # type: ignore[call-overload]
    await provider.subscribe("a", "orders/*", on_batch)  # type: ignore[type-var]
    provider.subscribe("a", "orders/*", on_event)  # type: ignore[unused-coroutine]


def without_asyncio(client: SyncClient) -> None:
    client.subscribe("a", "orders/*", on_event)  # type: ignore[arg-type]
    client.subscribe("a", "orders/*", max_event=2)  # type: ignore[call-arg]
