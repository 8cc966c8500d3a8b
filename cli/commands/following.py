"""`headrace subscribe --server`: prints the events that a silo delivers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...streams.background import first_of
from ...streams.errors import HeadraceError
from ...streams.events import Event
from ...streams.options import EventFilter
from ...streams.subscriptions import EPHEMERAL, SubscriptionDefinition
from .output import note
from .rendering import Render
from .writing import ThreadedWriter

if TYPE_CHECKING:
    from ...client.client import Client
    from ...client.consumer import Consumer
    from ...client.options import SessionState
    from ...client.received import ReceivedBatch

FORGET_S = 2.0
"""How long the deletion of a temporary subscription may take, in seconds."""


async def print_from(
    client: Client,
    definition: SubscriptionDefinition,
    render: Render,
    passes: EventFilter | None,
    limit: int | None,
    *,
    follow: bool,
) -> None:
    """Print up to `limit` events. Without `follow`, stop after the events that were stored at the start. An event is
    acknowledged once its line is written."""
    async with _consumer(client, definition) as consumer:
        ends = [] if follow else [consumer.caught_up()]
        await first_of(_print(consumer, render, passes, limit), *ends, name="headrace subscribe")


async def _print(consumer: Consumer, render: Render, passes: EventFilter | None, limit: int | None) -> None:
    writer, left = ThreadedWriter(sys.stdout.fileno()), limit
    async for batch in consumer:
        taken, count = _within(batch.events(), passes, left)
        await writer.write(b"".join(render(event, batch.queue) for event in taken))
        await _acknowledge(batch, count)
        if left is not None:
            left -= len(taken)
            if not left:
                return


def _within(events: Sequence[Event], passes: EventFilter | None, limit: int | None) -> tuple[list[Event], int]:
    """The first events that pass the filter, at most `limit`, and how many of all `events` these cover."""
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
    except Exception:  # noqa: BLE001 (an event that the filter fails on is printed, not lost)
        return True


async def _acknowledge(batch: ReceivedBatch, count: int) -> None:
    if count == len(batch):
        await batch.ack()
        return
    for event in batch.events()[:count]:
        await batch.ack(event)


@asynccontextmanager
async def _consumer(client: Client, definition: SubscriptionDefinition) -> AsyncGenerator[Consumer]:
    """Open a consumer of the subscription, which is created if it does not exist.

    A temporary subscription is deleted at the end. Those of killed processes are deleted too.
    """
    # this module raises the errors, and notes the outages
    logging.getLogger("headrace.client").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"start": definition.start, "on_state": _noted_outages()}
    selector = definition.selector.pattern
    if not definition.name.startswith(EPHEMERAL):
        async with client.subscribe(definition.name, selector, None, **options) as consumer:
            yield consumer
        return
    await _forget_left_behind(client)
    made = False
    try:
        async with client.subscribe(definition.name, selector, None, **options) as consumer:
            made = True
            yield consumer
    finally:
        if made:
            await _forget(client, definition.name)


def _noted_outages() -> Callable[[SessionState], None]:
    """Print a note about each outage."""
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
    """Delete the subscriptions of killed processes. They would prevent the deletion of events."""
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
        note(f"subscription {name!r} could not be deleted ({error or 'no answer'}); the next subscribe deletes it")
