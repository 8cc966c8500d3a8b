"""A consumer of pyrallel-consumer in a process of its own, whose Python has neither headrace nor the benchmarks.

Its argument is JSON: the broker, the topic, and the keys whose handler never ends; empty to see whether it can run. It
answers each line of standard input with a number: the events handled so far for `count`, else 0 when it has waited.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

HANDLER_S = 0.1


async def main(broker: str, topic: str, stuck: list[str]) -> None:
    config: Any = import_module("pyrallel_consumer.config").KafkaConfig()
    config.BOOTSTRAP_SERVERS = [broker]
    config.CONSUMER_GROUP = "parallel"
    config.dlq_enabled = False
    began, handled, keys = asyncio.Event(), 0, set(stuck)

    async def handle(item: Any) -> None:
        nonlocal handled
        began.set()
        if item.payload.decode() in keys:
            await asyncio.Event().wait()
        await asyncio.sleep(HANDLER_S)
        handled += 1

    consumer = import_module("pyrallel_consumer.consumer").PyrallelConsumer(config, handle, topic)
    await consumer.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["wait", *_]:
                await began.wait()
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
            case _:
                print(handled, flush=True)
                continue
        print(0, flush=True)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    import_module("pyrallel_consumer.consumer")
    if order:
        asyncio.run(main(**order))
