"""How long the statistics of one delivery take, with 100,000 streams that are parked.

Command: `python -m benchmarks.statistics_cost`. The first call puts the cursors in order. `watermark` is the look at
all cursors that the statistics took before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.agents import HandlerDelivery
from headrace.streams.handlers import Handler
from headrace.streams.identity import SequenceToken, StreamId
from headrace.streams.subscriptions import Checkpoint, Selector, StreamBehind, SubscriptionDefinition

STREAMS = 100_000


def timed(call: Callable[[], object]) -> float:
    """Return the time that a call takes, in milliseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


async def main() -> None:
    behind = {StreamId("n", str(number)): StreamBehind(SequenceToken(number)) for number in range(STREAMS)}
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    handler = Handler(None, None, None, None)
    delivery = HandlerDelivery(definition, 0, Checkpoint(STREAMS, behind), handler, None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] (nothing fails)
    print(f"statistics, the first call: {timed(delivery.statistics):.2f} ms")
    print(f"statistics, the next call: {timed(delivery.statistics):.3f} ms")
    print(f"watermark: {timed(lambda: delivery.progress.watermark):.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
