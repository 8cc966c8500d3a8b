"""Consumers in processes of their own, killed at random. `make chaos` does it with many events."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from redis import Redis

from headrace.adapters.redis import PushedEvent, RedisOptions, RedisQueue
from tests.adapters.redis.killed_consumers import BATCH
from tests.adapters.redis.looking import check_agreement

EVENTS = int(os.environ.get("CHAOS_EVENTS", "3000"))
TIMEOUT_S = 1.0


class Got(NamedTuple):
    before: float
    after: float
    attempts: int


def noted(folder: Path) -> tuple[dict[str, list[Got]], dict[str, int]]:
    """What consumers got of each event, and how often it was acknowledged."""
    got: defaultdict[str, list[Got]] = defaultdict(list)
    done: defaultdict[str, int] = defaultdict(int)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            what, event, *rest = line.split()
            if what == "got":
                got[event].append(Got(float(rest[0]), float(rest[1]), int(rest[2])))
            else:
                done[event] += 1
    return got, done


@pytest.mark.timeout(120 + EVENTS / 100)
async def test_consumers_killed_at_random_lose_nothing_and_repeat_nothing_early(
    queue: RedisQueue, options: RedisOptions, direct: Redis, tmp_path: Path
) -> None:
    for start in range(0, EVENTS, 1000):
        numbers = range(start, min(start + 1000, EVENTS))
        await queue.push_many([PushedEvent(b"%d" % n, delay_s=n % 7 / 10, priority=n % 3) for n in numbers])
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    arguments = (str(options.url), options.prefix, str(tmp_path), str(TIMEOUT_S), str(seed))
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.adapters.redis.killed_consumers", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await running.communicate()
    assert running.returncode == 0
    killed = int(output)
    got, done = await asyncio.to_thread(noted, tmp_path)
    assert set(got) == {str(number) for number in range(EVENTS)}, "an event was lost"
    assert set(done.values()) == {1}, "an event was acknowledged twice"
    assert EVENTS - len(done) <= killed * BATCH, "only who was killed may not have noted what it acknowledged"
    assert not any(check_agreement(direct, queue.shards[0].keys).values())
    for claims in got.values():
        claims.sort(key=lambda claim: claim.attempts)
        for earlier, later in pairwise(claims):
            assert later.attempts > earlier.attempts, "two consumers had one claim"
            assert later.after - earlier.before >= TIMEOUT_S * (later.attempts - earlier.attempts), "it came early"
    assert killed
