"""The demo's three subscriptions, and the job of each.

A job writes every delivery into its ledger before its handler returns. After an interruption it rebuilds its state from
the ledger. The state counts each event once, as with exactly-once delivery.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct

import msgspec

from ...streams.events import EventBatch
from .flights import UNKNOWN, CarrierDelays, Flights
from .ledger import DemoLedger

CANCELLED = -(1 << 15)
"""The delay of a flight that did not depart."""
PAUSE_S = 0.02
"""How far ahead of its pace the slow consumer runs before it pauses, in seconds."""


class Departure(msgspec.Struct, gc=False):
    """The fields of a flight that the jobs read."""

    row: int
    carrier: str
    dep_delay: int | None
    tailnum: str | None


_decode = msgspec.json.Decoder(Departure).decode


class DemoJob(ABC):
    """A consumer per batch, with its ledger `<name>.ledger` in `directory`."""

    name: str
    concurrency = 100
    record = Struct("<I")

    def __init__(self, directory: Path, flights: Flights) -> None:
        self.flights = flights
        self.ledger = DemoLedger(directory / f"{self.name}.ledger", self.record.size)
        self.delivered = 0
        self.duplicates = 0
        self._seen = bytearray(len(flights) + 1)
        for entry in self.record.iter_unpack(self.ledger.read()):
            if self._first(entry[0]):
                self.restore(*entry)

    async def on_next_batch(self, batch: EventBatch) -> None:
        departures = [_decode(payload) for payload in batch.payloads()]
        self.ledger.append(b"".join(map(self.entry, departures)))
        for departure in departures:
            if self._first(departure.row):
                self.work(batch.stream.key, departure)

    def _first(self, row: int) -> bool:
        self.delivered += 1
        if row < len(self._seen) and not self._seen[row]:
            self._seen[row] = 1
            return True
        self.duplicates += 1
        return False

    def entry(self, departure: Departure) -> bytes:
        """The ledger's record: the row number, and the data that `restore` needs."""
        return self.record.pack(departure.row)

    @abstractmethod
    def work(self, aircraft: str, departure: Departure) -> None:
        """Process the first delivery of a departure."""

    @abstractmethod
    def restore(self, row: int, *rest: int | bytes) -> None:
        """Process a departure from the ledger."""

    def rows(self) -> Iterator[int]:
        """The row numbers delivered, in order, repeated ones included."""
        return (entry[0] for entry in self.record.iter_unpack(self.ledger.read()))

    def problems(self) -> Iterable[str]:
        """Faults that this job found, in addition to those that the row numbers show."""
        return ()


class FlightDelays(DemoJob):
    """Adds up the delays of each carrier."""

    name = "delays"
    record = Struct("<Ih2s")

    def __init__(self, directory: Path, flights: Flights) -> None:
        self.delays: dict[str, CarrierDelays] = {}
        super().__init__(directory, flights)

    def entry(self, departure: Departure) -> bytes:
        delay = CANCELLED if departure.dep_delay is None else departure.dep_delay
        return self.record.pack(departure.row, delay, departure.carrier.encode())

    def work(self, aircraft: str, departure: Departure) -> None:
        self._add(departure.carrier, departure.dep_delay)

    def restore(self, row: int, *rest: int | bytes) -> None:
        delay, carrier = rest
        assert isinstance(delay, int)
        assert isinstance(carrier, bytes)
        self._add(carrier.decode(), None if delay == CANCELLED else delay)

    def _add(self, carrier: str, delay: int | None) -> None:
        self.delays[carrier] = self.delays.get(carrier, CarrierDelays()).plus(delay)


class OrderCheck(DemoJob):
    """Checks that the departures of each aircraft come on its own stream. The verdict checks their order."""

    name = "order"

    def __init__(self, directory: Path, flights: Flights) -> None:
        self.strays = 0
        super().__init__(directory, flights)

    def work(self, aircraft: str, departure: Departure) -> None:
        self.strays += aircraft != (departure.tailnum or UNKNOWN)

    def restore(self, row: int, *_: int | bytes) -> None: ...

    def problems(self) -> Iterable[str]:
        if self.strays:
            yield f"{self.strays:,} flights came on the stream of another aircraft"


class SlowJob(DemoJob):
    """Handles at most `per_second` events by pausing from time to time, like a handler with a slow database."""

    name = "slow"
    concurrency = 1

    def __init__(self, directory: Path, flights: Flights, per_second: int) -> None:
        self._per_second = per_second
        self._due = 0.0
        super().__init__(directory, flights)

    async def on_next_batch(self, batch: EventBatch) -> None:
        now = time.monotonic()
        self._due = max(self._due, now) + batch.count / self._per_second
        if self._due - now > PAUSE_S:
            await asyncio.sleep(self._due - now)
        await super().on_next_batch(batch)

    def work(self, aircraft: str, departure: Departure) -> None: ...

    def restore(self, row: int, *_: int | bytes) -> None: ...


def open_jobs(directory: Path, flights: Flights, slow_per_second: int) -> Sequence[DemoJob]:
    return [
        FlightDelays(directory, flights),
        OrderCheck(directory, flights),
        SlowJob(directory, flights, slow_per_second),
    ]
