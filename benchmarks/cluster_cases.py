"""What is measured of a cluster: one function per process of a case, see `harness`; and the handler of its silos, which
load this module."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from headrace import Client, EventBatch, Start
from headrace.store.control_store import ControlStore
from headrace.streams.handlers import subscription
from headrace.streams.subscriptions import Checkpoint

from .cases import Counter
from .grpc_cases import SELECTOR, take
from .worker import StartingGate

HANDLED = "handled"
POLL_S = 0.02


@subscription(HANDLED, SELECTOR, batch=True, start=Start.earliest())
async def handle(_: EventBatch) -> None:
    """Nothing."""


def consume(gate: StartingGate, *, addresses: Sequence[str], events: int, direct: bool) -> None:
    """A consumer at each address; they share a subscription. Without `direct`, the silo at the address is its
    gateway."""
    asyncio.run(_consume(gate, addresses, events, direct=direct))


async def _consume(gate: StartingGate, addresses: Sequence[str], events: int, *, direct: bool) -> None:
    counter = Counter(events)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        clients = [await stack.enter_async_context(Client(address, direct=direct)) for address in addresses]
        members = [
            await stack.enter_async_context(client.subscribe("bench", SELECTOR, start=Start.earliest()))
            for client in clients
        ]
        gate.wait()
        tasks = [group.create_task(take(member, counter)) for member in members]
        await counter.whole()
        gate.done()
        for task in tasks:
            task.cancel()


def until_handled(gate: StartingGate, *, control: str, batches: int) -> None:
    """Until the silos' handlers have had so many batches, by their checkpoints."""
    asyncio.run(_until_handled(gate, control, batches))


async def _until_handled(gate: StartingGate, control: str, batches: int) -> None:
    store = await ControlStore.open(control)
    try:
        gate.wait()
        while True:
            if _done(await store.checkpoints("default", HANDLED)) >= batches:
                break
            await asyncio.sleep(POLL_S)
        gate.done()
    finally:
        await store.aclose()


def _done(checkpoints: Mapping[int, Checkpoint]) -> int:
    """Batches, of which none is done while its stream is behind."""
    return sum(checkpoint.watermark for checkpoint in checkpoints.values())
