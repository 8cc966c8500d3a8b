"""A silo process under attack serves its other clients throughout, and takes no harm.

`make fuzz` attacks for a minute, or for FUZZ_SECONDS. FUZZ_SEED repeats the attacks of a run.
"""

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.proto.v1 import subscriptions_pb2
from tests.faults.silo_process import SiloProcess, silo_process
from tests.silo.services.calling import SUBSCRIPTIONS, Caller, batch, connecting
from tests.silo.services.sessions import Session, begin, defined

FUZZ_S = float(os.environ.get("FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("FUZZ_SEED", str(random.randrange(1 << 32))))
ROOT = Path(__file__).parents[2]
PATIENCE_S = 30
STREAMS = ("good/0", "good/1", "good/2")
GROWTH_BYTES = 96 << 20
"""How much memory may grow in the second half: much less than the attackers sent meanwhile."""
DESCRIPTORS = 10
"""Open files at the end, besides those after the first attacks."""
CONFIG = """
[providers.default]
queues = 2
[providers.spare]
adapter = "memory"
queues = 1
"""


class Bystander:
    """An honest publisher and an honest consumer, at work all the time."""

    def __init__(self, caller: Caller, session: Session) -> None:
        self._caller = caller
        self._session = session
        self._next: Counter[str] = Counter()
        self._last = False
        self.published = 0

    async def publish(self, until: asyncio.Event) -> None:
        while not self._last:
            self._last = until.is_set()
            payloads = [b"%d" % number for number in (self.published, self.published + 1)]
            async with asyncio.timeout(PATIENCE_S):
                self.published += 2
                await self._caller.publish(*(batch(stream, *payloads) for stream in STREAMS))
            await asyncio.sleep(0.005)

    async def consume(self) -> None:
        """Until everything is here that was published."""
        while not self._last or any(self._next[stream] < self.published for stream in STREAMS):
            await self._session.until(lambda: bool(self._session.events))
            events, self._session.events = self._session.events, []
            for event in events:
                assert (event.payload, event.attempt) == (b"%d" % self._next[event.stream], 1), event
                self._next[event.stream] += 1
            await self._session.acknowledge(events)
            assert not self._session.refused


@asynccontextmanager
async def served_throughout(silo: SiloProcess) -> AsyncGenerator[Bystander]:
    """Meanwhile, others are served, in order and without an error."""
    over = asyncio.Event()
    async with connecting(silo.address) as caller:
        session = await begin(caller, definition=defined("good", "good/*"), consumer="honest")
        await session.grant((1 << 62), (1 << 62))
        bystander = Bystander(caller, session)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bystander.publish(over))
            tasks.create_task(bystander.consume())
            yield bystander
            over.set()
        await session.close()


class Attacks(NamedTuple):
    """How their calls ended."""

    statuses: dict[str, int]
    suspicious: list[str]


async def attacked(silo: SiloProcess, seed: int, seconds: float) -> Attacks:
    """By another process."""
    arguments = ("-m", "tests.faults.attacks", silo.address, str(seed), str(seconds))
    attacker = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, stdout=PIPE)
    out, _ = await attacker.communicate()
    assert attacker.returncode == 0
    return Attacks(**json.loads(out))


async def settle(silo: SiloProcess, caller: Caller) -> None:
    """Return when what attackers left is gone. Their subscriptions are deleted."""
    request = subscriptions_pb2.ListSubscriptionsRequest()
    listed = await caller.ask(
        f"{SUBSCRIPTIONS}/ListSubscriptions", request, subscriptions_pb2.ListSubscriptionsResponse
    )
    for name in [definition.name for definition in listed.definitions if definition.name != "good"]:
        deletion = subscriptions_pb2.DeleteSubscriptionRequest(name=name)
        kind = subscriptions_pb2.DeleteSubscriptionResponse
        await caller.ask(f"{SUBSCRIPTIONS}/DeleteSubscription", deletion, kind)
    found = [silo.descriptors]
    while len(found) < 5 or found[-1] < found[-2]:
        await asyncio.sleep(0.1)
        found.append(silo.descriptors)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 120)
async def test_others_are_served_while_a_silo_is_under_attack(tmp_path: Path) -> None:
    attacks: list[Attacks] = []
    memory: list[int] = []
    descriptors: list[int] = []
    async with silo_process(tmp_path, config=CONFIG) as silo:
        async with connecting(silo.address) as caller, served_throughout(silo) as bystander:
            for seconds in (0, FUZZ_S / 2, FUZZ_S / 2):
                attacks.append(await attacked(silo, SEED + len(attacks), seconds))
                await settle(silo, caller)
                memory.append(silo.memory)
                descriptors.append(silo.descriptors)
        print(f"FUZZ_SEED={SEED}: {report(attacks)}{bystander.published:,} honest events of each stream")
        print(f"memory in MiB: {[size >> 20 for size in memory]}; open files: {descriptors}")
        assert [call for each in attacks for call in each.suspicious] == []
        assert [line for line in silo.log.splitlines() if "Traceback" in line or " asyncio: " in line] == []
        assert memory[-1] < max(memory[:-1]) + GROWTH_BYTES
        assert descriptors[-1] <= descriptors[0] + DESCRIPTORS
        await silo.stop()


def report(attacks: list[Attacks]) -> str:
    statuses = sum((Counter(each.statuses) for each in attacks), Counter[str]())
    lines = [f"{count:8,} {status}\n" for status, count in sorted(statuses.items())]
    return f"{statuses.total():,} calls\n{''.join(lines)}"
