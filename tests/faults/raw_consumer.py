"""A consumer as a program of its own, that knows no more than the protocol: it can be killed and stopped.

    python -m tests.faults.raw_consumer HOST:PORT SUBSCRIPTION CONSUMER DIARY [--hold] [--timeout-ms N] [--seed N]

It writes a line for each thing that happens, with the time of the system's monotonic clock. It connects again when it
loses its connection or the silo asks for it. It works a random moment on each event, and acknowledges in any order.
With --hold it acknowledges nothing until SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import grpc.aio

from tests.silo.services.calling import Refused, connecting
from tests.silo.services.sessions import Got, Session, begin

GOT, SENT, SAVED, REFUSED, OPENED, CLOSING, ENDED = "got", "sent", "saved", "refused", "opened", "closing", "ended"
CREDIT = 200


class Entry(NamedTuple):
    """A line of a diary. Lines about an event have its stream, its number (payload) and its position."""

    at_ns: int
    what: str
    stream: str = ""
    number: int = 0
    attempt: int = 0
    text: str = ""


def read_diary(path: Path) -> list[Entry]:
    """All entries; the last one may have been cut off by a kill."""
    if not path.exists():
        return []
    entries: list[Entry] = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at, what, stream, number, attempt, text = line.rstrip("\n").split("\t")
            entries.append(Entry(int(at), what, stream, int(number), int(attempt), text))
    return entries


class Diary:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def note(self, what: str, events: Iterable[Got] = (), text: str = "") -> None:
        now = time.monotonic_ns()
        lines = [f"{now}\t{what}\t{e.stream}\t{int(e.payload)}\t{e.attempt}\t{text}\n" for e in events]
        os.write(self._file, "".join(lines or [f"{now}\t{what}\t\t0\t0\t{text}\n"]).encode())


class Consumer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._address: str = arguments.address
        self._subscription: str = arguments.subscription
        self._consumer: str = arguments.consumer
        self._timeout_ms: int = arguments.timeout_ms
        self._random = random.Random(arguments.seed)
        self._diary = Diary(arguments.diary)
        self._may_acknowledge = asyncio.Event()
        if not arguments.hold:
            self._may_acknowledge.set()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._may_acknowledge.set)

    async def run(self) -> None:
        while True:
            async with connecting(self._address) as caller:
                try:
                    fields = {"consumer": self._consumer, "session_timeout_ms": self._timeout_ms}
                    await self._consume(await begin(caller, self._subscription, **fields))
                except Refused as refused:
                    self._diary.note(ENDED, text=refused.status)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it could not even write
                    self._diary.note(ENDED)
            await asyncio.sleep(0.05)

    async def _consume(self, session: Session) -> None:
        self._diary.note(OPENED)
        await session.grant(CREDIT, 1 << 20)
        work = _Work(session, self._diary, self._random, self._may_acknowledge)
        working = asyncio.create_task(work.run())
        try:
            await self._hear(session)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)  # it cannot write any more
            work.note_what_was_said()

    async def _hear(self, session: Session) -> None:
        while await session.read() is not None:
            if session.closing:
                self._diary.note(CLOSING)
                session.closing = ""


class _Work:
    """The work on the events of one session."""

    def __init__(self, session: Session, diary: Diary, rng: random.Random, may_acknowledge: asyncio.Event) -> None:
        self._session = session
        self._diary = diary
        self._random = rng
        self._may_acknowledge = may_acknowledge
        self._held: list[Got] = []
        self._sent: dict[int, list[Got]] = {}
        self._refused: set[tuple[int, int, int]] = set()

    async def run(self) -> None:
        while True:
            self._take()
            if self._held and self._may_acknowledge.is_set():
                await self._acknowledge_some()
            else:
                await self._session.say()
            self.note_what_was_said()
            await asyncio.sleep(self._random.choice((0, 0.001, 0.01, 0.02)) if self._held else 0.01)

    def _take(self) -> None:
        events, self._session.events = self._session.events, []
        if events:
            self._diary.note(GOT, events)
            self._held += events

    async def _acknowledge_some(self) -> None:
        self._random.shuffle(self._held)
        count = self._random.randint(1, min(len(self._held), 20))
        done, self._held = self._held[:count], self._held[count:]
        self._diary.note(SENT, done)
        number = await self._session.acknowledge(done)
        self._sent[number] = done
        await self._session.grant(count, 1 << 16)

    def note_what_was_said(self) -> None:
        self._refused.update((each.queue, each.offset, each.index) for each in self._session.refused)
        self._session.refused.clear()
        for number in [number for number in self._sent if number <= self._session.saved]:
            events = self._sent.pop(number)
            without = [event for event in events if (event.queue, event.offset, event.index) in self._refused]
            if without:
                self._diary.note(REFUSED, without)
            if saved := [event for event in events if event not in without]:
                self._diary.note(SAVED, saved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("subscription")
    parser.add_argument("consumer")
    parser.add_argument("diary", type=Path)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--timeout-ms", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    await Consumer(arguments).run()


if __name__ == "__main__":
    main()
