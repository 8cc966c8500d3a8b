"""`headrace subscribe --server`: printing what a silo delivers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...streams import Event, HeadraceError, SubscriptionDefinition
from ...streams.handlers import EventFilter
from ...streams.subscriptions import EPHEMERAL
from .output import note
from .writing import Writer

if TYPE_CHECKING:
    from ...streams.client import Client, Consumer, ReceivedBatch, SessionState

FORGET_S = 2.0
"""How long deleting what is not to be kept may take."""


async def print_from(
    client: Client,
    definition: SubscriptionDefinition,
    render: Callable[[Event], bytes],
    passes: EventFilter | None,
    limit: int | None,
    *,
    follow: bool,
) -> None:
    """Print events until there were `limit`, or without `follow` until all that was there is printed. An event is
    acknowledged once its line is written."""
    async with _consumer(client, definition) as consumer:
        printing = asyncio.create_task(_print(consumer, render, passes, limit), name="headrace subscribe")
        waiting = {printing}
        if not follow:
            waiting.add(asyncio.create_task(consumer.caught_up(), name="headrace subscribe caught up"))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _print(
    consumer: Consumer, render: Callable[[Event], bytes], passes: EventFilter | None, limit: int | None
) -> None:
    writer, left = Writer(sys.stdout.fileno()), limit
    async for batch in consumer:
        taken, count = _within(batch.events(), passes, left)
        await writer.write(b"".join(map(render, taken)))
        await _acknowledge(batch, count)
        if left is not None:
            left -= len(taken)
            if not left:
                return


def _within(events: Sequence[Event], passes: EventFilter | None, limit: int | None) -> tuple[list[Event], int]:
    """The first events that pass, at most `limit`; and how many of all these make."""
    taken: list[Event] = []
    for count, event in enumerate(events, 1):
        if passes is None or _lets_through(passes, event):
            taken.append(event)
        if len(taken) == limit:
            return taken, count
    return taken, len(events)


def _lets_through(passes: EventFilter, event: Event) -> bool:
    try:
        return passes(event)
    except Exception:  # noqa: BLE001 (to lose it would be worse)
        return True


async def _acknowledge(batch: ReceivedBatch, count: int) -> None:
    if count == len(batch):
        await batch.ack()
        return
    for event in batch.events()[:count]:
        await batch.ack(event)


@asynccontextmanager
async def _consumer(client: Client, definition: SubscriptionDefinition) -> AsyncGenerator[Consumer]:
    """A consumer of the subscription, which is made where it does not exist. One that is not to be kept is deleted at
    the end, and so are those that killed processes left behind."""
    logging.getLogger("headrace.client").setLevel(logging.CRITICAL)  # errors are raised, and outages noted, here
    options: dict[str, Any] = {"start": definition.start, "on_state": _noted_outages()}
    subscribing = client.subscribe(definition.name, definition.selector.pattern, **options)
    if not definition.name.startswith(EPHEMERAL):
        async with subscribing as consumer:
            yield consumer
        return
    await _forget_left_behind(client)
    made = False
    try:
        async with subscribing as consumer:
            made = True
            yield consumer
    finally:
        if made:
            await _forget(client, definition.name)


def _noted_outages() -> Callable[[SessionState], None]:
    """Tells people of outages while they look at the events."""
    lost = False

    def heed(state: SessionState) -> None:
        nonlocal lost
        if state.value == "reconnecting":
            note("lost the silo, reconnecting")
        elif lost and state.value == "open":
            note("connected again")
        lost = state.value == "reconnecting" or (lost and state.value == "connecting")

    return heed


async def _forget_left_behind(client: Client) -> None:
    """Nobody will ever finish them, and they would keep events from being deleted."""
    for definition in await client.subscriptions():
        if definition.name.startswith(EPHEMERAL):
            with suppress(HeadraceError):
                if not (await client.subscription(definition.name)).consumers:
                    await client.delete_subscription(definition.name)


async def _forget(client: Client, name: str) -> None:
    try:
        async with asyncio.timeout(FORGET_S):
            await client.delete_subscription(name)
    except (HeadraceError, TimeoutError) as error:
        note(f"subscription {name} is left behind ({error or 'no answer'}); the next subscribe forgets it")
