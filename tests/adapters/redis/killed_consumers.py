"""Eight processes that compete for the events of a queue, and one that kills them at random, as long as there are any.

    python -m tests.adapters.redis.killed_consumers URL PREFIX FOLDER TIMEOUT_S SEED

Each consumer notes two things in a file of its own in FOLDER: the events it got (`got ID BEFORE AFTER ATTEMPTS`: the
call was made and answered at these times) and those it has acknowledged (`done ID`). Prints how many were killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

from headrace.adapters.redis import RedisOptions, RedisQueue, TakenEvent

CONSUMERS = 8
BATCH = 25


async def consume(url: str, prefix: str, notes: int, timeout_s: float, rng: random.Random) -> None:
    async with RedisQueue.open("q", RedisOptions(url=url, prefix=prefix)) as queue:
        while True:
            before = time.time()
            taken = await queue.pop(rng.randint(1, BATCH), timeout_s=timeout_s, wait_s=0.2)
            after = time.time()
            note(notes, [f"got {one.body.decode()} {before!r} {after!r} {one.claim.attempts}" for one in taken])
            await asyncio.sleep(rng.uniform(0, 0.01))
            part = rng.sample(taken, len(taken)) if rng.random() < 0.9 else rng.sample(taken, len(taken) // 2)
            await acknowledge(queue, notes, part)
            if not taken and not any(await queue.size()):
                return


async def acknowledge(queue: RedisQueue, notes: int, taken: list[TakenEvent]) -> None:
    for one in taken[:5]:
        if await queue.acknowledge(one):
            note(notes, [f"done {one.body.decode()}"])
    if rest := taken[5:]:
        shards = await queue.shards[0].acknowledge([(one.id, one.claim.token) for one in rest])
        note(notes, [f"done {one.body.decode()}" for one, done in zip(rest, shards, strict=True) if done])


def note(notes: int, lines: list[str]) -> None:
    """In one write, which kill -9 does not undo."""
    if lines:
        os.write(notes, "".join(f"{line}\n" for line in lines).encode())


def start(url: str, prefix: str, file: Path, timeout_s: float, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        notes = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        asyncio.run(consume(url, prefix, notes, timeout_s, random.Random(seed)))
        os._exit(0)
    finally:
        os._exit(1)


def main(url: str, prefix: str, folder: Path, timeout_s: float, seed: int) -> None:
    rng, numbers, killed = random.Random(seed), itertools.count(), 0
    running: set[int] = set()
    ended = 0
    while ended < CONSUMERS:
        while len(running) + ended < CONSUMERS:
            number = next(numbers)
            running.add(start(url, prefix, folder / str(number), timeout_s, seed + number))
        time.sleep(rng.uniform(0, 0.2))
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                assert status == 0, f"a consumer ended with {status}"
                ended += 1
        if running and not ended:
            victim = rng.choice(sorted(running))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            running.discard(victim)
            killed += 1
    print(killed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
