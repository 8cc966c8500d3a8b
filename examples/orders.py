"""Orders that are paid and shipped: state per stream, a failing handler, and its dead letters.

Run it as it is: `python examples/orders.py`. It keeps its events in ./orders-data; a second run continues there. Its
tests are in `tests/examples/test_orders.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from headrace import Event, Provider, RetryPolicy

steps: Counter[str] = Counter()


async def follow(event: Event) -> None:
    """Called in order for each order; different orders do not wait for each other."""
    assert event.stream is not None
    steps[event.stream.key] += 1
    print(f"order {event.stream.key}: {event.payload.decode()}")


async def ship(event: Event) -> None:
    if event.payload == b"paid" and event.headers.get("country") == "nowhere":
        raise ValueError("no carrier delivers there")


async def serve(provider: Provider) -> None:
    await provider.subscribe("follow", "orders/*", follow, start="earliest")
    await provider.subscribe("ship", "orders/*", ship, retry=RetryPolicy(max_attempts=2, initial_delay_s=0.01))


async def place(provider: Provider, number: int, country: str) -> None:
    order = provider.stream("orders", str(number))
    await order.publish([b"placed", Event(b"paid", headers={"country": country}), b"shipped"])


async def main() -> None:
    async with Provider.open("orders-data") as provider:
        await serve(provider)
        for number, country in enumerate(("nl", "nowhere", "jp")):
            await place(provider, number, country)
        for name in ("follow", "ship"):
            await provider.caught_up(name)
        for letter in await provider.dead_letters():
            print(f"given up on {letter.stream} {letter.payload.decode()!r}: {letter.reason}")


if __name__ == "__main__":
    asyncio.run(main())
