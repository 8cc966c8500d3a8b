"""Open the files that a fault left with the product's own code, and list the broken promises."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import headrace.silo.local  # noqa: F401 # pyright: ignore[reportUnusedImport] (not once for each forked process)
from headrace import Event, EventBatch, Provider, StreamId
from headrace.streams.errors import DataDirectoryError, HeadraceError, StorageError
from tests.storage.events import NAMESPACE, Journal, Named, event_of, payload_of
from tests.storage.isolated import temporary
from tests.storage.workload import CONSUMED, HANDLED, PUBLISHERS, SELECTOR, STREAMS_EACH, declared, options_of

PATIENCE_S = 40.0
LAST = 900_000_000
"""Number of the events that the check itself publishes."""


class Found(NamedTuple):
    """What a check found."""

    problems: Sequence[str] = ()
    """Promises that do not hold."""
    faults: Sequence[str] = ()
    """Faults that the product reported."""
    lost: int = 0
    """Acknowledged events that are missing."""
    wrong: int = 0
    """Payloads that were not published."""


class _Check:
    def __init__(self, journal: Journal, *, all_stored: bool, may_lose: bool) -> None:
        self._journal = journal
        self._all_stored = all_stored
        self._may_lose = may_lose
        self.problems: list[str] = []
        self.faults: list[str] = []
        self.lost: set[Named] = set()
        self.wrong = 0

    def expect(self, holds: bool, problem: str, events: Collection[Named] = ()) -> None:
        if not holds:
            shown = " ".join(f"{event.stream}:{event.number}" for event in sorted(events)[:5])
            self.problems.append(f"{problem}: {len(events)} events, such as {shown}" if events else problem)

    def read(self, payloads: Iterable[bytes], where: str) -> list[Named]:
        events: list[Named] = []
        for payload in payloads:
            try:
                events.append(event_of(payload))
            except ValueError:
                self.wrong += 1
                self.problems.append(f"{where}: a wrong payload")
        return events

    async def queues(self, provider: Provider) -> None:
        """Everything that is stored was asked for, and nothing is missing or out of order."""
        events: list[Named] = []
        for queue in range(provider.queues):
            async for batch in batches_of(provider, queue):
                found = self.read(batch.payloads(), f"queue {queue}")
                events += found
                self.expect(all(event.stream == batch.stream.key for event in found), "an event in another stream")
        by_stream: dict[str, list[int]] = defaultdict(list)
        for event in events:
            by_stream[event.stream].append(event.number)
        for stream, numbers in by_stream.items():
            in_order = all(one < next_one for one, next_one in pairwise(numbers))
            self.expect(in_order, f"stream {stream} is out of order or has events twice")
        stored = set(events)
        appeared = stored - self._journal.of("asked").keys()
        self.expect(not appeared, "events that were refused, or nobody published, have appeared", appeared)
        missing = self._journal.of("acknowledged").keys() - stored
        if self._may_lose:
            if missing & self._journal.synced:
                self.faults.append("silent: the log is older than its last sync")
            holes = {event for event in missing if any(number > event.number for number in by_stream[event.stream])}
            self.expect(not holes, "events are missing before others", holes)
        elif self._all_stored:
            self.lost |= missing
            self.expect(not missing, "acknowledged events are not in the queues", missing)

    async def dead_letters(self, provider: Provider) -> set[Named]:
        letters = await provider.store.dead_letters(provider.name, HANDLED, limit=100_000)
        stored = set(self.read((letter.payload for letter in letters), "dead letters"))
        missing = self._journal.of("dead").keys() - stored
        self.expect(not missing, "dead letters that were shown are missing", missing)
        return stored

    async def subscriptions(self, provider: Provider) -> None:
        """Both subscriptions go on at their positions, and get new events."""
        dead = await self.dead_letters(provider)
        handled: list[Named] = []
        consumed: list[Named] = []

        async def handler(event: Event) -> None:
            handled.extend(self.read([event.payload], HANDLED))

        last = {Named(f"s{one}-{each}", LAST) for one in range(PUBLISHERS) for each in range(STREAMS_EACH)}
        for event in sorted(last):
            await provider.publish(StreamId(NAMESPACE, event.stream), payload_of(event, 100))
        subscription = await provider.attach(declared(handler))
        await subscription.caught_up()
        async with provider.subscribe(CONSUMED, SELECTOR, start="earliest") as consumer:
            async for batch in consumer:
                consumed += self.read(batch.payloads(), CONSUMED)
                await batch.ack()
                if last <= set(consumed):
                    break
            await consumer.saved()
        self.delivered(HANDLED, handled, dead, last)
        self.delivered(CONSUMED, consumed, set(), last)
        gaps = await provider.store.gaps(provider.name)
        self.expect(self._may_lose or not gaps, f"there are gaps: {gaps[:1]}")

    def delivered(self, name: str, events: Sequence[Named], dead: set[Named], last: set[Named]) -> None:
        got = set(events)
        self.expect(last <= got, f"{name}: events that were published afterwards were not delivered")
        by_stream: dict[str, list[int]] = defaultdict(list)
        for event in events:
            by_stream[event.stream].append(event.number)
        in_order = all(numbers == sorted(numbers) for numbers in by_stream.values())
        self.expect(in_order, f"{name}: a stream was delivered out of order")
        if not self._may_lose:
            done = self._journal.of(f"done/{name}").keys()
            missing = self._journal.of("acknowledged").keys() - got - done - dead
            self.lost |= missing
            self.expect(not missing, f"{name}: acknowledged events were not delivered", missing)
        # If the end of a queue is lost, its position goes back with it, and a gap says so.
        again = got & self._journal.of(f"saved/{name}").keys()
        self.expect(not again, f"{name}: events whose checkpoint was saved were delivered again", again)


async def batches_of(provider: Provider, queue: int) -> AsyncIterator[EventBatch]:
    """Everything that a queue retains. Raises CorruptRecord."""
    position, end = await provider.adapter.bounds(queue)
    async with aclosing(await provider.adapter.open_receiver(queue, position)) as receiver:
        while position < end:
            received = await receiver.receive(10_000, 1 << 22)
            position = received.next_offset
            for batch in received.batches:
                yield batch


def check_nothing() -> None:
    """Check a new directory, which has no faults."""
    with temporary() as folder:
        found = asyncio.run(check(folder / "data", Journal(), options_of("commit", 0)))
    assert found == Found([], [])


async def check(
    data: Path, journal: Journal, options: dict[str, Any], *, all_stored: bool = True, may_lose: bool = False
) -> Found:
    """Open a provider, and check it. `all_stored`: nothing is deleted. `may_lose`: the end of the log may be lost, and
    the log may be refused as damaged; then only check that it returns nothing wrong."""
    found = _Check(journal, all_stored=all_stored, may_lose=may_lose)
    faults = found.faults
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with Provider.open(data, **options) as provider:
                await found.queues(provider)
                await found.subscriptions(provider)
    except TimeoutError:
        found.problems.append(f"it does not go on within {PATIENCE_S} s")
    except HeadraceError as error:
        faults.append(f"{type(error).__name__}: {error}")
        # A power cut while a log is made may leave one that LMDB refuses: nothing was acknowledged yet.
        unused = not journal.of("acknowledged") and isinstance(error, DataDirectoryError)
        if not unused and (not may_lose or not isinstance(error, StorageError)):
            found.problems.append(f"refused: {type(error).__name__}: {error}")
    return Found(found.problems, faults, len(found.lost), found.wrong)
