"""Consumers that grant credit and never read, as a program of its own.

    python -m tests.faults.deaf_consumers HOST:PORT CONSUMERS [--broadcast] [--one-connection]

Each consumer has a subscription of its own from the earliest event on; with --broadcast all have one subscription with
mode broadcast. Prints "ready" once all consumers have granted their credit, then waits to be killed.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

from headrace.proto.v1 import subscriptions_pb2
from tests.silo.services.calling import Caller, connecting
from tests.silo.services.sessions import begin, defined

TIMEOUT_MS = 600_000


async def _run(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(connecting(arguments.address)) if arguments.one_connection else None
        for number in range(arguments.consumers):
            caller = shared or await stack.enter_async_context(connecting(arguments.address))
            await _attach(caller, number, broadcast=arguments.broadcast)
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _attach(caller: Caller, number: int, *, broadcast: bool) -> None:
    mode = subscriptions_pb2.MODE_BROADCAST if broadcast else subscriptions_pb2.MODE_SHARED
    definition = defined("deaf" if broadcast else f"deaf-{number}", mode=mode)
    session = await begin(caller, definition=definition, consumer=f"c-{number}", session_timeout_ms=TIMEOUT_MS)
    await session.grant()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("consumers", type=int)
    parser.add_argument("--broadcast", action="store_true")
    parser.add_argument("--one-connection", action="store_true")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
