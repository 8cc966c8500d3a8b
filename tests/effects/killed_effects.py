"""A consumer to be killed: `killed_effects.py ADDRESS URL KILL`. It applies events by `batch.effects`. At the KILLth
batch it kills itself between the commit and the acknowledgement; with KILL 0 it ends when it has caught up."""

import asyncio
import os
import signal
import sys

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from headrace import Client, Consumer, Effects

LOG = text("INSERT INTO log (value) VALUES (:value)")
SESSION_TIMEOUT_S = 0.5


async def main(address: str, url: str, kill: int) -> None:
    effects = Effects(create_async_engine(url))
    number = 0
    async with Client(address) as client:
        async with client.subscribe("billing", session_timeout_s=SESSION_TIMEOUT_S) as consumer:
            ended = asyncio.create_task(end(consumer, kill))
            async for batch in consumer:
                async with batch.effects(effects) as tx:
                    for event in tx.events:
                        await tx.execute(LOG, {"value": event.payload.decode()})
                number += 1
                if number == kill:
                    os.kill(os.getpid(), signal.SIGKILL)  # the acknowledgement waits for the loop's next turn
            await ended


async def end(consumer: Consumer, kill: int) -> None:
    if not kill:
        await consumer.caught_up()
        await consumer.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
