"""Processes that fight for the same queues: one owner per epoch, and no write by another process."""

import asyncio
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from headrace import Selector, SubscriptionDefinition
from headrace.store.control_store import ControlStore
from headrace.streams.subscriptions import Checkpoint
from tests.random_examples import examples

QUEUES = 6
ROUNDS = examples(30, quick=8)
DEFINITION = SubscriptionDefinition(name="stats", selector=Selector("n/*"))

# Every other time a process takes the leases that were not renewed since it looked.
FIGHTS = """
import asyncio, random, sys
from headrace import Fenced
from headrace.streams.subscriptions import Checkpoint
from headrace.store.control_store import ControlStore
LEASE_S = 0.03

async def main(where, name, rounds):
    control = await ControlStore.open(where)
    store = control.cluster()
    wanted = [("p", queue) for queue in range(6)]
    epoch = (await control.attach("p", "stats", exclusive=False)).epoch
    me, held = await store.join(name, "x", ["p"]), {}
    for _ in range(int(rounds)):
        try:
            over = (await store.beat(me, LEASE_S)).leases if random.random() < 0.5 else ()
            granted = await store.acquire(me, random.sample(wanted, 4), LEASE_S, over=over)
        except Fenced:
            me, granted = await store.join(name, "x", ["p"]), []
        at = await control.checkpoints("p", "stats")
        for lease in granted:
            print("granted", lease.queue, lease.epoch, flush=True)
            held[lease.queue] = lease, at[lease.queue].next_offset
        for _ in range(2):
            await save(control, epoch, held)
        if held and random.random() < 0.5:
            queue = random.choice(sorted(held))
            await store.release(me, [held.pop(queue)[0]])
    await store.leave(me)
    await control.aclose()

async def save(control, epoch, held):
    moved = {queue: Checkpoint(offset + 1) for queue, (_, offset) in held.items()}
    leases = {queue: lease.epoch for queue, (lease, _) in held.items()}
    refused = await control.save_checkpoints("p", [("stats", epoch, moved)], leases)
    for queue in list(held):
        lease, offset = held.pop(queue)
        if queue not in refused.queues:
            print("saved", queue, lease.epoch, offset + 1, flush=True)
            held[queue] = lease, offset + 1

asyncio.run(main(*sys.argv[1:]))
"""


# `test_leases_model.py` has the leases on PostgreSQL, too.
@pytest.fixture(params=["file", pytest.param("postgres", marks=[pytest.mark.second_way, pytest.mark.slow])])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "control.db")


def lines(where: str, name: str) -> list[list[str]]:
    """Return the output of a process, which must succeed."""
    command = [sys.executable, "-c", FIGHTS, where, name, str(ROUNDS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.hypothesis  # so that `make slow` runs all rounds
async def test_processes_that_compete_for_queues_share_neither_epochs_nor_writes(where: str):
    store = await ControlStore.open(where)
    await store.create_subscription("p", DEFINITION, {queue: Checkpoint(0) for queue in range(QUEUES)})
    printed = await asyncio.gather(*(asyncio.to_thread(lines, where, name) for name in "abc"))
    grants: defaultdict[int, list[int]] = defaultdict(list)
    saved: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for of_one in printed:
        latest: dict[int, int] = {}
        for what, queue, epoch, *offset in of_one:
            if what == "granted":
                assert int(epoch) > latest.get(int(queue), 0)
                latest[int(queue)] = int(epoch)
                grants[int(queue)].append(int(epoch))
            else:
                saved[int(queue)].append((int(offset[0]), int(epoch)))
    for queue in range(QUEUES):
        assert sorted(grants[queue]) == list(range(1, len(grants[queue]) + 1))  # each granted once
        in_order = sorted(saved[queue])
        assert [offset for offset, _ in in_order] == list(range(1, len(in_order) + 1))  # each written once
        assert [epoch for _, epoch in in_order] == sorted(epoch for _, epoch in in_order)
    kept = await store.checkpoints("p", "stats")
    assert {queue: kept[queue].next_offset for queue in kept} == {queue: len(saved[queue]) for queue in range(QUEUES)}
    assert sum(map(len, grants.values())) > ROUNDS * 4 // 3
    await store.aclose()
