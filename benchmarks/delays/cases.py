"""What is measured: one function per process of a case, see `harness`.

A payload begins with twenty digits: when the event is due, in ns since 1970, or its number.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from ..results import Latency
from ..worker import StartingGate
from .kinds import DelayKind, Place, Push, kind_of

DIGITS = 20
LANES = 8
"""Pushes that are under way at a time, and consumers that empty a queue."""
PACED_CONSUMERS = 2
TICK_S = 0.01
MAX_BURST = 1000


def push(
    gate: StartingGate, *, kind: str, place: Sequence[str], events: int, size: int, batch: int, delay_s: float = 0.0,
    apart: bool = False,
) -> None:  # fmt: skip
    """Push as fast as possible. Each batch has a slightly longer delay than the last; with `apart`, each event."""
    asyncio.run(_push(gate, kind, Place(*place), _numbered(events, size, batch, delay_s, apart)))


def drain(gate: StartingGate, *, kind: str, place: Sequence[str], events: int, batch: int) -> None:
    """Take, handle and acknowledge the jobs that were pushed before, as fast as possible."""
    asyncio.run(_drain(gate, kind_of(kind), Place(*place), Arrivals(events), batch=batch, consumers=LANES))


def push_paced(
    gate: StartingGate, *, kind: str, place: Sequence[str], rate: int, events: int, size: int, delays_s: Sequence[float]
) -> None:
    """Push at a steady rate, with delays spread over a range."""
    asyncio.run(_push_paced(gate, kind, Place(*place), rate=rate, events=events, size=size, delays_s=delays_s))


def handle_due(
    gate: StartingGate, *, kind: str, place: Sequence[str], events: int, batch: int, delays_s: Sequence[float]
) -> dict[str, float]:
    """Return how late events are handled. Count only those that were due while as many were pushed as came due."""
    arrivals = Arrivals(events)
    asyncio.run(_drain(gate, kind_of(kind), Place(*place), arrivals, batch=batch, consumers=PACED_CONSUMERS))
    return arrivals.lateness(delays_s)


class Arrivals:
    """Counts the arrivals, and notes the first of each batch with its time."""

    def __init__(self, expected: int) -> None:
        self.complete = asyncio.Event()
        self._expected = expected
        self._came: list[tuple[int, Sequence[bytes]]] = []
        self._count = 0

    def handle(self, payloads: Sequence[bytes]) -> None:
        self._came.append((time.time_ns(), payloads))
        self._count += len(payloads)
        if self._count >= self._expected:
            self.complete.set()

    def lateness(self, delays_s: Sequence[float]) -> dict[str, float]:
        samples = [(int(payload[:DIGITS]), at) for at, payloads in self._came for payload in payloads]
        low, high = (int(s * 1e9) for s in delays_s)
        steady = min(due for due, _ in samples) - low + high
        until = max(due for due, _ in samples) - high
        chosen = [(due, at) for due, at in samples if steady <= due <= until]
        late_ms = [(at - due) / 1e6 for due, at in chosen]
        seconds = (max(at for _, at in chosen) - min(at for _, at in chosen)) / 1e9
        return {**Latency.of(late_ms)._asdict(), "earliest_ms": min(late_ms), "events": len(chosen), "seconds": seconds}


async def _drain(
    gate: StartingGate, kind: DelayKind, place: Place, arrivals: Arrivals, *, batch: int, consumers: int
) -> None:
    gate.wait()
    async with AsyncExitStack() as stack:
        for _ in range(min(consumers, kind.connections)):
            await stack.enter_async_context(kind.consumer(place, batch, arrivals.handle))
        await arrivals.complete.wait()
        gate.done()


async def _push(
    gate: StartingGate, kind_name: str, place: Place, batches: Iterator[tuple[list[bytes], list[float]]]
) -> None:
    async with AsyncExitStack() as stack:
        pushes = await _producers(stack, kind_name, place)

        async def lane(push: Push) -> None:
            for payloads, delays_s in batches:
                await push(payloads, delays_s)

        gate.wait()
        await asyncio.gather(*(lane(pushes[number % len(pushes)]) for number in range(LANES)))
        gate.done()


async def _producers(stack: AsyncExitStack, kind_name: str, place: Place) -> list[Push]:
    kind = kind_of(kind_name)
    return [await stack.enter_async_context(kind.producer(place)) for _ in range(kind.connections)]


def _numbered(
    events: int, size: int, batch: int, delay_s: float, apart: bool
) -> Iterator[tuple[list[bytes], list[float]]]:
    filling = b"x" * (size - DIGITS)
    for first in range(0, events, batch):
        numbers = range(first, min(first + batch, events))
        delays_s = [delay_s + (number if apart else first) / 1000 for number in numbers] if delay_s else []
        yield [b"%020d" % number + filling for number in numbers], delays_s


async def _push_paced(
    gate: StartingGate, kind_name: str, place: Place, *, rate: int, events: int, size: int, delays_s: Sequence[float]
) -> None:
    async with AsyncExitStack() as stack:
        pushes = await _producers(stack, kind_name, place)
        gate.wait()
        lanes = (pushes[number % len(pushes)] for number in range(LANES))
        await asyncio.gather(*(_pace(push, rate / LANES, events // LANES, size, delays_s) for push in lanes))
        gate.done()


async def _pace(push: Push, rate: float, events: int, size: int, delays_s: Sequence[float]) -> None:
    """Push the jobs that are to be pushed by now, every hundredth of a second."""
    filling = b"x" * (size - DIGITS)
    began_s, sent = time.monotonic(), 0
    while sent < events:
        await asyncio.sleep(TICK_S)
        count = min(int((time.monotonic() - began_s) * rate), events, sent + MAX_BURST) - sent
        delays = [random.uniform(*delays_s) for _ in range(count)]
        now_ns = time.time_ns()
        payloads = [b"%020d" % (now_ns + int(delay_s * 1e9)) + filling for delay_s in delays]
        if payloads:
            await push(payloads, delays)
        sent += count
