"""A silo, consumers and a publisher that tests kill, and checks of their notes."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio

from headrace.proto.v1 import publisher_pb2, subscriptions_pb2
from tests.faults.raw_consumer import GOT, OPENED, REFUSED, SAVED, SENT, SERVED, Entry, read_diary
from tests.faults.silo_process import SiloProcess, silo_process
from tests.silo.services.calling import SUBSCRIPTIONS, Refused, batch, connecting

ROOT = Path(__file__).parents[2]
STREAMS = tuple(f"n/{number}" for number in range(6))
AT_ONCE = 5
"""Events of each stream in one request."""
PATIENCE_S = 30
Event = tuple[str, int]
"""Stream and number."""


class ConsumerProcess:
    """`tests.faults.raw_consumer`, with a diary that it keeps over restarts."""

    def __init__(self, silo: SiloProcess, name: str, *flags: str, subscription: str = "s", seed: int = 0) -> None:
        self.name = name
        self.diary = silo.directory / f"{name}.diary"
        arguments = [silo.address, subscription, name, str(self.diary), "--seed", str(seed), *flags]
        self._command = [sys.executable, "-m", "tests.faults.raw_consumer", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "the consumer has ended by itself"
        self._process.send_signal(number)

    async def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        await asyncio.to_thread(self._process.wait, PATIENCE_S)

    def entries(self, *kinds: str) -> list[Entry]:
        return [entry for entry in read_diary(self.diary) if not kinds or entry.what in kinds]

    def clean_up(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Scene:
    """Made by `playing`."""

    def __init__(self, silo: SiloProcess, rng: random.Random) -> None:
        self.silo = silo
        self.rng = rng
        self.consumers: list[ConsumerProcess] = []
        self.published = 0
        """Events of each stream that are stored."""
        self._over = asyncio.Event()

    def consumer(self, name: str, *flags: str, subscription: str = "s") -> ConsumerProcess:
        """One more consumer, started."""
        made = ConsumerProcess(self.silo, name, *flags, subscription=subscription, seed=self.rng.getrandbits(30))
        self.consumers.append(made)
        made.start()
        return made

    # ---- publishing ------------------------------------------------------------------------------------------------

    async def publish(self, requests: int | None = None) -> None:
        """So many requests, or until `enough`: each stored exactly once, whatever happens to the silo."""
        while not self._over.is_set() and requests != 0:
            await self._store(self.published)
            self.published += AT_ONCE
            requests = None if requests is None else requests - 1
            await asyncio.sleep(0.01)

    def enough(self) -> None:
        self._over.set()

    async def _store(self, first: int) -> None:
        payloads = [b"%d" % number for number in range(first, first + AT_ONCE)]
        sequence = publisher_pb2.ProducerSequence(producer="p", number=first + 1, previous=max(first - AT_ONCE + 1, 0))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(Refused, grpc.aio.AioRpcError):
                    async with connecting(self.silo.address) as caller:
                        await caller.publish(*(batch(stream, *payloads) for stream in STREAMS), sequence=sequence)
                        return
                await asyncio.sleep(0.05)

    # ---- notes -----------------------------------------------------------------------------------------------------

    def entries(self, *kinds: str) -> list[Entry]:
        """Of all consumers, in the order in which it happened."""
        return sorted(entry for consumer in self.consumers for entry in consumer.entries(*kinds))

    def events(self, *kinds: str) -> set[Event]:
        return {(entry.stream, entry.number) for entry in self.entries(*kinds)}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await asyncio.to_thread(condition):
                    return
                await asyncio.sleep(0.1)

    async def until_all_is_done(self) -> None:
        """Return when the silo has everything as done. A consumer may have been killed before it heard that its
        acknowledgement is saved."""
        request = subscriptions_pb2.AwaitCaughtUpRequest(name="s")
        kind = subscriptions_pb2.AwaitCaughtUpResponse
        try:
            async with connecting(self.silo.address) as caller:
                await caller.ask(f"{SUBSCRIPTIONS}/AwaitCaughtUp", request, kind, timeout=PATIENCE_S)
        except Refused as refused:
            missing = sorted(self._expected() - self.events(SAVED))
            raise AssertionError(f"{refused}: not known to be done: {missing[:20]}") from None
        assert sorted(self._expected() - self.events(SENT)) == []

    async def until_all_is_saved(self) -> None:
        await self.until(lambda: self.events(SAVED) >= self._expected())

    def _expected(self) -> set[Event]:
        return {(stream, number) for stream in STREAMS for number in range(self.published)}


@asynccontextmanager
async def playing(directory: Path, rng: random.Random, *, config: str = "") -> AsyncGenerator[Scene]:
    """A silo with the subscription s; nothing of it survives the end."""
    async with silo_process(directory, config=config) as silo:
        async with connecting(silo.address) as caller:
            await caller.create("s", "n/*")
        scene = Scene(silo, rng)
        try:
            yield scene
        finally:
            for consumer in scene.consumers:
                consumer.clean_up()


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_history(consumers: Iterable[Sequence[Entry]]) -> None:
    """Check that no event of a stream came before an earlier one, and none after it was saved; and that the events of
    one session came in order and once, as long as the session served their queue under the same epoch and generation.
    """
    diaries = list(consumers)
    _check_order(sorted(entry for diary in diaries for entry in diary))
    for diary in diaries:
        _check_sessions(diary)


def _check_order(entries: Sequence[Entry]) -> None:
    highest: dict[str, int] = defaultdict(lambda: -1)
    saved: dict[Event, Entry] = {}
    for entry in entries:
        event = (entry.stream, entry.number)
        if entry.what == GOT:
            assert entry.number <= highest[entry.stream] + 1, f"{entry} overtook {highest[entry.stream] + 1}"
            assert event not in saved, f"{entry} came again after {saved[event]}"
            highest[entry.stream] = max(highest[entry.stream], entry.number)
        elif entry.what == SAVED:
            assert event not in saved, f"{entry} was accepted twice: {saved[event]}"
            saved[event] = entry


def _check_sessions(diary: Sequence[Entry]) -> None:
    last: dict[str, Entry] = {}
    for entry in diary:
        if entry.what == OPENED:
            last.clear()
        elif entry.what == SERVED:  # the events of this queue may come again
            last = {stream: got for stream, got in last.items() if got.text != entry.text}
        elif entry.what == GOT:
            before = last.get(entry.stream)
            assert before is None or entry.number > before.number, f"{entry} came after {before}"
            last[entry.stream] = entry
        assert entry.what != REFUSED, entry
