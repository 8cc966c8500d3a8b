"""Orders that are paid and shipped: state per stream, a failing handler, and its dead letters.

Run it as it is: `python examples/orders.py`. It keeps its events in ./orders-data; a second run continues there.
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


async def main() -> None:
    async with Provider.open("orders-data") as provider:
        following = await provider.subscribe("follow", "orders/*", follow, start="earliest")
        shipping = await provider.subscribe(
            "ship", "orders/*", ship, retry=RetryPolicy(max_attempts=2, initial_delay_s=0.01)
        )
        for number, country in enumerate(("nl", "nowhere", "jp")):
            order = provider.stream("orders", str(number))
            await order.publish([b"placed", Event(b"paid", headers={"country": country}), b"shipped"])
        await following.caught_up()
        await shipping.caught_up()
        for letter in await provider.store.dead_letters("default"):
            print(f"given up on {letter.stream} {letter.payload.decode()!r}: {letter.reason}")


if __name__ == "__main__":
    asyncio.run(main())
