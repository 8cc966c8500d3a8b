"""A consumer as a program of its own, that knows no more than the protocol: it can be killed and stopped.

    python -m tests.faults.raw_consumer HOST:PORT SUBSCRIPTION CONSUMER DIARY [--hold] [--timeout-ms N] [--seed N]

It writes a line for each incident, with the time of the system's monotonic clock. It connects again when it loses its
connection or the silo asks for it. It works a random moment on each event, and acknowledges in any order. When a queue
ends or begins again, it forgets the queue's events: they come again. With --hold it acknowledges nothing until SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import grpc.aio

from headrace.proto.v1 import consumer_pb2 as pb
from tests.silo.services.calling import Refused, connecting
from tests.silo.services.sessions import SUBSCRIBE, Got, Session, events_of, one_by_one

GOT, SENT, SAVED, REFUSED, OPENED, CLOSING, ENDED = "got", "sent", "saved", "refused", "opened", "closing", "ended"
SERVED = "served"
"""A queue begins, or begins again with another epoch or generation: its events may come again."""
CREDIT = 200


class Entry(NamedTuple):
    """A line of a diary. Lines about an event have its stream, its number (payload) and, as text, its queue; lines
    about a queue have the queue as text."""

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

    def note(self, what: str, text: str = "") -> None:
        self._write(f"{time.monotonic_ns()}\t{what}\t\t0\t0\t{text}\n")

    def note_events(self, what: str, events: Iterable[Got]) -> None:
        now = time.monotonic_ns()
        lines = [f"{now}\t{what}\t{e.stream}\t{int(e.payload)}\t{e.attempt}\t{e.queue}\n" for e in events]
        self._write("".join(lines))

    def _write(self, lines: str) -> None:
        os.write(self._file, lines.encode())


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
                    session = Session(caller.stream(SUBSCRIBE))
                    opening = pb.Open(
                        subscription=self._subscription, consumer=self._consumer, session_timeout_ms=self._timeout_ms
                    )
                    await session.say(open=opening)
                    if (opened := await session.read()) is not None:
                        await self._consume(session, opened)
                except Refused as refused:
                    self._diary.note(ENDED, text=refused.status)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it could not even write
                    self._diary.note(ENDED)
            await asyncio.sleep(0.05)

    async def _consume(self, session: Session, opening: pb.SubscribeResponse) -> None:
        self._diary.note(OPENED)
        work = _Work(session, self._diary, self._random, self._may_acknowledge)
        work.hear(opening)
        await session.say(credit=pb.Credit(events=CREDIT, bytes=1 << 20))
        working = asyncio.create_task(work.run())
        try:
            while (response := await session.read()) is not None:
                work.hear(response)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)  # it cannot write any more


class _Report(NamedTuple):
    """Acknowledgements that are not confirmed."""

    number: int
    events: list[Got]


class _Queue:
    """A queue that the session serves, under one epoch and generation."""

    def __init__(self, status: pb.QueueStatus) -> None:
        self.status = status
        self.sent: list[_Report] = []
        self.refused: set[tuple[int, int]] = set()
        """Offset and index of acknowledgements that were without effect."""

    def is_same(self, status: pb.QueueStatus) -> bool:
        return (self.status.epoch, self.status.generation) == (status.epoch, status.generation)


class _Work:
    """The work on the events of one session."""

    def __init__(self, session: Session, diary: Diary, rng: random.Random, may_acknowledge: asyncio.Event) -> None:
        self._session = session
        self._diary = diary
        self._random = rng
        self._may_acknowledge = may_acknowledge
        self._queues: dict[int, _Queue] = {}
        self._held: list[Got] = []
        self._room = 0
        """Events whose credit is not granted again yet."""
        self._number = 0

    async def run(self) -> None:
        while True:
            reports = self._acknowledge_some() if self._held and self._may_acknowledge.is_set() else []
            events, self._room = self._room, 0
            await self._session.say(reports=reports, credit=pb.Credit(events=events, bytes=events << 12))
            await asyncio.sleep(self._random.choice((0, 0.001, 0.01, 0.02)) if self._held else 0.01)

    def _acknowledge_some(self) -> list[pb.QueueReport]:
        self._random.shuffle(self._held)
        count = self._random.randint(1, min(len(self._held), 20))
        done, self._held = self._held[:count], self._held[count:]
        self._room += count
        self._diary.note_events(SENT, done)
        self._number += 1
        by_queue = defaultdict[int, list[Got]](list)
        for event in done:
            by_queue[event.queue].append(event)
        return [self._report(queue, events) for queue, events in by_queue.items()]

    def _report(self, number: int, events: list[Got]) -> pb.QueueReport:
        queue = self._queues[number]
        queue.sent.append(_Report(self._number, events))
        return pb.QueueReport(
            queue=number,
            epoch=queue.status.epoch,
            generation=queue.status.generation,
            number=self._number,
            acknowledgements=one_by_one(events),
        )

    # ---- the silo's messages ---------------------------------------------------------------------------------------

    def hear(self, response: pb.SubscribeResponse) -> None:
        for refusal in response.refused:
            if (queue := self._queues.get(refusal.queue)) is not None:
                queue.refused.add((refusal.offset, refusal.index))
        for saved in response.saved:
            self._confirm(saved)
        for status in response.queues:
            self._follow(status)
        if response.HasField("closing"):
            self._diary.note(CLOSING)
        events = events_of(response.batches)
        if events:
            self._diary.note_events(GOT, events)
            self._held += events

    def _confirm(self, saved: pb.Saved) -> None:
        queue = self._queues.get(saved.queue)
        if queue is None or queue.status.epoch != saved.epoch:
            return
        confirmed = [event for report in queue.sent if report.number <= saved.number for event in report.events]
        queue.sent = [report for report in queue.sent if report.number > saved.number]
        without = [event for event in confirmed if (event.offset, event.index) in queue.refused]
        self._diary.note_events(REFUSED, without)
        self._diary.note_events(SAVED, [event for event in confirmed if event not in without])

    def _follow(self, status: pb.QueueStatus) -> None:
        queue = self._queues.get(status.queue)
        if status.state == pb.QueueStatus.STATE_ENDED:
            self._forget(status.queue)
        elif queue is None or not queue.is_same(status):
            self._forget(status.queue)
            self._queues[status.queue] = _Queue(status)
            self._diary.note(SERVED, str(status.queue))
        else:
            queue.status = status

    def _forget(self, number: int) -> None:
        """The queue's events come again: those that it holds are void."""
        self._queues.pop(number, None)
        held = [event for event in self._held if event.queue != number]
        self._room += len(self._held) - len(held)
        self._held = held


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
