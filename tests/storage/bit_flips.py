"""Bit flips: flip one bit of a data directory, open it, and check the events.

    python -m tests.storage.bit_flips --flips 200      # of each kind of byte; `make chaos`; --bugs plants each bug
    python -m tests.storage.bit_flips --flips 1 --seed SEED --kind KIND --details    # one of them again

Promised: payloads and positions of subscriptions are never wrong, and nothing is missing without a message: of the
provider, or where pages without a checksum are damaged, of `headrace check`. As after a power failure, a dead letter of
the last transaction in the write-ahead log may be missing: then its event is delivered again.
"""

import argparse
import asyncio
import logging
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace import Event, Provider, StreamId
from headrace.silo.checking import DirectoryCheck
from headrace.store.control_store import ControlStore
from headrace.streams.errors import CorruptRecord, HeadraceError
from headrace.streams.subscriptions import Checkpoint
from tests.storage.checks import check_nothing
from tests.storage.events import Journal, Named, event_of
from tests.storage.isolated import PROCESSES, Killed, in_processes, isolated, temporary, warm_up
from tests.storage.pages import Spans, control_spans, log_spans, wal_spans
from tests.storage.planted import WHILE_READING
from tests.storage.workload import CONSUMED, HANDLED, SELECTOR, options_of

LOG = "providers/default/log/data.mdb"
CONTROL, WAL = "control.db", "control.db-wal"
PATIENCE_S = 6.0
OUTCOMES = (
    "unnoticed and harmless", "reported", "found by check", "killed",
    "unforeseen", "missing in silence", "wrong payload",
)  # fmt: skip
BAD = OUTCOMES[4:]


class Flip(NamedTuple):
    """One bit of a file, in a data directory that was closed in order, or whose process was killed."""

    kind: str
    seed: int
    closed: bool
    path: str
    byte: int
    bit: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.seed}: bit {self.bit} of byte {self.byte:,} of {self.path}"


class Outcome(NamedTuple):
    flip: Flip
    what: str
    detail: str = ""


class Scene(NamedTuple):
    """The two data directories, and the published events."""

    path: Path

    def data(self, closed: bool) -> Path:
        return self.path / ("closed" if closed else "killed")

    def make(self, seed: int, calls: int) -> "Scene":
        for part, closed in enumerate((False, True)):
            arguments = ("commit", 0, part, seed, calls)
            command = (sys.executable, "-m", "tests.storage.workload", self.path / "data", self.path / "journal")
            subprocess.run([*map(str, (*command, *arguments))], check=False)
            shutil.copytree(self.path / "data", self.data(closed), ignore=shutil.ignore_patterns("wake"))
            shutil.copyfile(self.path / "journal", self.data(closed).with_suffix(".journal"))
        return self

    def checkpoints(self) -> Mapping[str, Mapping[int, Checkpoint]]:
        """Of the directory that was closed in order, by subscription."""

        async def read(copy: Path) -> Mapping[str, Mapping[int, Checkpoint]]:
            async with aclosing(await ControlStore.open(copy)) as store:
                return {name: await store.checkpoints("default", name) for name in (HANDLED, CONSUMED)}

        with temporary() as folder:
            shutil.copyfile(self.data(closed=True) / CONTROL, folder / CONTROL)
            return asyncio.run(read(folder / CONTROL))

    def _payloads(self) -> list[bytes]:
        """Of the dead letters in the directory that was closed in order."""
        with temporary() as folder:
            shutil.copyfile(self.data(closed=True) / CONTROL, folder / CONTROL)
            with closing(sqlite3.connect(folder / CONTROL)) as database:
                return [payload for (payload,) in database.execute("SELECT payload FROM dead_letters")]

    def journal(self, *, closed: bool) -> Journal:
        journal = Journal()
        journal.read(self.data(closed).with_suffix(".journal").read_bytes())
        return journal

    def spans(self) -> Mapping[str, tuple[bool, str, list[tuple[int, int]]]]:
        """By kind: which directory, which file, and where in it."""
        found: dict[str, tuple[bool, str, list[tuple[int, int]]]] = {}
        files: Sequence[tuple[bool, str, Spans]] = (
            (True, LOG, log_spans((self.data(closed=True) / LOG).read_bytes())),
            (True, CONTROL, control_spans((self.data(closed=True) / CONTROL).read_bytes(), self._payloads())),
            (False, WAL, wal_spans((self.data(closed=False) / WAL).read_bytes())),
            (True, "headrace.json", {"marker": [(0, (self.data(closed=True) / "headrace.json").stat().st_size)]}),
        )
        for closed, path, spans in files:
            found |= {kind: (closed, path, where) for kind, where in spans.items()}
        return found

    def flips(self, each: int, seed: int) -> list[Flip]:
        """So many flips of each kind of byte."""
        flips: list[Flip] = []
        for kind, (closed, path, where) in self.spans().items():
            for number in range(seed, seed + each):
                rng = random.Random(f"{kind}/{number}")
                start, end = rng.choice(where)
                flips.append(Flip(kind, number, closed, path, rng.randrange(start, end), rng.randrange(8)))
        return flips


class _Reading:
    """What came out of a damaged directory."""

    def __init__(self) -> None:
        self.events: set[Named] = set()
        self.places: dict[Named, tuple[int, int, int]] = {}
        """Of each event: its queue, the offset of its batch, and its index in that."""
        self.delivered: set[Named] = set()
        self.faults: list[str] = []
        self.wrong: list[str] = []

    def take(self, payload: bytes, into: set[Named], stream: str) -> None:
        try:
            event = event_of(payload)
        except ValueError:
            self.wrong.append("a payload that nobody published")
            return
        if event.stream != stream:
            self.wrong.append(f"{event} in stream {stream}")
        into.add(event)


async def _read_queue(provider: Provider, queue: int, reading: _Reading) -> None:
    """Read a queue to its end, and skip damaged records."""
    try:
        position, end = await provider.adapter.bounds(queue)
        last: dict[str, int] = {}
        while position < end:
            async with aclosing(await provider.adapter.open_receiver(queue, position)) as receiver:
                try:
                    while position < end:
                        received = await receiver.receive(10_000, 1 << 22)
                        for batch in received.batches:
                            for payload in batch.payloads():
                                reading.take(payload, reading.events, batch.stream.key)
                            if reading.wrong:
                                return
                            for index, payload in enumerate(batch.payloads()):
                                reading.places[event_of(payload)] = queue, batch.offset, index
                            numbers = [event_of(payload).number for payload in batch.payloads()]
                            if numbers[0] <= last.get(batch.stream.key, -1):
                                reading.wrong.append(f"stream {batch.stream.key} is out of order")
                            last[batch.stream.key] = numbers[-1]
                        position = received.next_offset
                except CorruptRecord as damage:
                    reading.faults.append(f"CorruptRecord: {damage}")
                    if damage.next_offset is None or damage.next_offset <= position:
                        return
                    position = damage.next_offset
    except HeadraceError as error:
        reading.faults.append(f"{type(error).__name__}: {error}")


async def _deliver(provider: Provider, reading: _Reading) -> None:
    """Deliver all to a new subscription, until that is done or a queue is faulted."""

    async def handler(event: Event) -> None:
        assert event.stream is not None
        reading.take(event.payload, reading.delivered, event.stream.key)

    subscription = await provider.subscribe("reader", SELECTOR, handler, start="earliest")
    caught_up = asyncio.ensure_future(subscription.caught_up())
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not caught_up.done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.wait([caught_up], timeout=0.05)
        faulted = [agent for agent in provider.manager.agents if agent.statistics().state == "faulted"]
        healthy = [agent.queue for agent in provider.manager.agents if agent.statistics().state != "faulted"]
        if faulted:
            reading.faults.append(f"faulted: queues {[agent.queue for agent in faulted]}")
            await asyncio.wait([caught_up], timeout=0.3)
            for queue in healthy:  # they go on
                delivery = provider.manager.subscriptions.serving("reader").deliveries[queue]
                async with asyncio.timeout(PATIENCE_S):
                    await delivery.waiters.wait_until((await provider.adapter.bounds(queue)).next)
            break
    else:
        if not caught_up.done():
            reading.wrong.append("delivery stands still and no fault is shown")
    caught_up.cancel()


class _Expected(NamedTuple):
    """The contents of a directory without the flip."""

    journal: Journal
    checkpoints: Mapping[str, Mapping[int, Checkpoint]]


async def _look(data: Path, expected: _Expected) -> tuple[str, str]:
    """What came of a flip, and a detail."""
    reading = _Reading()
    letters: set[Named] = set()
    progress: Mapping[int, Checkpoint] = {}
    absent: set[str] = set()
    try:
        async with Provider.open(data, **options_of("commit", 0)) as provider:
            for queue in range(provider.queues):
                await _read_queue(provider, queue, reading)
            await _deliver(provider, reading)
            for letter in await provider.store.dead_letters(provider.name, HANDLED, limit=100_000):
                reading.take(letter.payload, letters, letter.stream.key)
            progress = await provider.store.checkpoints(provider.name, HANDLED)
            reading.faults += map(str, await provider.store.damaged_rows())
            gaps = await provider.store.gaps(provider.name)  # a queue that lost its end moves subscriptions back
            reading.faults += [f"a gap in queue {gap.queue}: {gap.reason}" for gap in gaps]
            for name, positions in expected.checkpoints.items():
                found = await provider.store.checkpoints(provider.name, name)
                absent.update(f"the position of {name} in queue {queue}" for queue in positions.keys() - found.keys())
                if not gaps and any(at != positions.get(queue) for queue, at in found.items()):
                    reading.wrong.append(f"{name} is at another position: {found}, not {positions}")
    except HeadraceError as error:
        reading.faults.append(f"{type(error).__name__}: {error}")
    if reading.wrong:
        return "wrong payload", reading.wrong[0]
    if reading.faults:
        return "reported", reading.faults[0]
    journal = expected.journal
    missing = journal.of("acknowledged").keys() - (reading.events & reading.delivered)
    if missing:
        return "missing in silence", f"{len(missing)} events, such as {min(missing)}"
    missing = {event for event in journal.of("dead").keys() - letters if not _comes_again(event, reading, progress)}
    if missing:
        return "missing in silence", f"{len(missing)} dead letters, such as {min(missing)}"
    if absent:
        return "missing in silence", min(absent)
    return "unnoticed and harmless", ""


def _comes_again(event: Named, reading: _Reading, progress: Mapping[int, Checkpoint]) -> bool:
    """Whether the subscription whose progress this is gets the event again."""
    queue, offset, index = reading.places[event]
    checkpoint, stream = progress.get(queue), StreamId.parse(SELECTOR.replace("*", event.stream))
    if checkpoint is None:
        return False
    behind = checkpoint.behind.get(stream)
    done = () if behind is None else behind.done
    finished = any(at == offset and first <= index < last for at, first, last in done)
    return checkpoint.wants(stream, offset) and not finished


def _try(scene: Scene, expected: Mapping[bool, _Expected], bug: str, flip: Flip) -> tuple[str, str]:
    with temporary() as folder, ExitStack() as stack:
        if bug:
            WHILE_READING[bug](stack)
        outcome = asyncio.run(_look(_flipped(scene, flip, folder / "data"), expected[flip.closed]))
        if outcome[0] == "missing in silence":
            findings = asyncio.run(_checked(_flipped(scene, flip, folder / "checked")))
            return ("found by check", findings[0]) if findings else outcome
        return outcome


def _flipped(scene: Scene, flip: Flip, data: Path) -> Path:
    """Copy the data directory to `data`, and flip the bit there."""
    shutil.copytree(scene.data(flip.closed), data)
    data.chmod(0o700)
    with (data / flip.path).open("r+b") as file:
        file.seek(flip.byte)
        byte = file.read(1)[0]
        file.seek(flip.byte)
        file.write(bytes([byte ^ 1 << flip.bit]))
    return data


async def _checked(data: Path) -> list[str]:
    """What `headrace check` finds."""
    check = DirectoryCheck(data, None, lambda _: None)
    await check.run()
    return [f"{finding.where}: {finding.what}" for finding in check.findings]


def try_flips(
    scene: Scene, checkpoints: Mapping[str, Mapping[int, Checkpoint]], bug: str, flips: Sequence[Flip]
) -> Iterator[Outcome]:
    logging.disable(logging.CRITICAL)
    expected = {
        False: _Expected(scene.journal(closed=False), {}),  # which checkpoint was saved last is not known there
        True: _Expected(scene.journal(closed=True), checkpoints),
    }
    for flip in flips:
        try:
            yield Outcome(flip, *isolated(partial(_try, scene, expected, bug), flip))
        except Killed as killed:
            yield Outcome(flip, "killed", str(killed))
        except RuntimeError as error:
            yield Outcome(flip, "unforeseen", str(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=30, help="how many, of each kind of byte")
    parser.add_argument("--calls", type=int, default=40, help="calls of each publisher in each part")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kind", default="", help="only kinds whose name contains this")
    parser.add_argument("--bugs", action="store_true", help="plant each bug: by how many flips it is found")
    parser.add_argument("--details", action="store_true", help="show what was found by each flip")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-bit-flips-") as folder:
        scene = Scene(Path(folder)).make(seed, options.calls)
        flips = [flip for flip in scene.flips(options.flips, seed) if options.kind in flip.kind]
        checkpoints = isolated(lambda _: scene.checkpoints(), None)  # it has threads, and forks come later
        warm_up(check_nothing)
        failed = False
        for bug in WHILE_READING if options.bugs else ("",):
            failed |= _run(scene, checkpoints, flips, bug, details=options.details) == (not options.bugs)
    return failed


def _run(
    scene: Scene,
    checkpoints: Mapping[str, Mapping[int, Checkpoint]],
    flips: Sequence[Flip],
    bug: str,
    *,
    details: bool,
) -> bool:
    """Try them, and print the outcomes in Markdown. Return whether a promise was broken."""
    began = time.monotonic()
    table: dict[str, Counter[str]] = defaultdict(Counter)
    bad: list[Outcome] = []
    for outcome in in_processes(partial(try_flips, scene, checkpoints, bug), flips, PROCESSES):
        table[outcome.flip.kind][outcome.what] += 1
        if outcome.what in BAD:
            bad.append(outcome)
        if details:
            print(f"{outcome.flip}: {outcome.what}: {outcome.detail[-300:]}", flush=True)
    print(f"| {bug or 'flipped bit in'} | flips | {' | '.join(OUTCOMES)} |")
    print(f"| --- | ---: | {' | '.join('---:' for _ in OUTCOMES)} |")
    for kind, found in table.items():
        print(f"| {kind} | {found.total()} | {' | '.join(str(found[what]) for what in OUTCOMES)} |")
    total = sum(table.values(), Counter[str]())
    print(f"| all | {total.total()} | {' | '.join(str(total[what]) for what in OUTCOMES)} |")
    for outcome in bad[:20]:
        print(f"{outcome.flip}: {outcome.what}: {outcome.detail[-600:]}")
    print(f"in {time.monotonic() - began:.0f} s", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
