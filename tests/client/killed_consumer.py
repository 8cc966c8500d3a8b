"""A consumer to be killed: `killed_consumer.py ADDRESS`. It prints delivered events, and saved ones, line by line:
`got KEY NUMBER` and, once everything before is saved, `saved`.
"""

import asyncio
import os
import sys

from headrace import Client

SAVED_EVERY = 300


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def main(address: str) -> None:
    count = 0
    async with Client(address) as client, client.subscribe("s", session_timeout_s=0.5, max_events=200) as consumer:
        async for batch in consumer:
            for payload in batch.payloads():
                say(f"got {batch.stream.key} {int(payload)}")
                count += 1
            await batch.ack()
            if count >= SAVED_EVERY:
                count = 0
                await consumer.saved()
                say("saved")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
