"""A process that serves a subscription on queues in Redis until it is killed.

    python -m tests.adapters.redis.serving DATA URL FILE

Each event is noted in FILE: `got PAYLOAD` when its handler begins, `done PAYLOAD` when it ends.
"""

from __future__ import annotations

import asyncio
import os
import sys

from headrace import Event, Provider


async def main(data: str, url: str, file: str) -> None:
    notes = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    async def handle(event: Event) -> None:
        os.write(notes, b"got " + event.payload + b"\n")
        await asyncio.sleep(0.002)
        os.write(notes, b"done " + event.payload + b"\n")

    async with Provider.open(data, adapter="redis", queues=2, options={"url": url}) as provider:
        await provider.subscribe("s", "orders/*", handle)
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
