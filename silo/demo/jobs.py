"""The demo's three subscriptions and what each does with a departure.

A job writes every delivery into its ledger before its handler returns, and builds its state from the ledger when the
demo goes on after an interruption. Its state leaves out what came before: it is that of exactly-once.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct

import msgspec

from ...streams import EventBatch
from .flights import UNKNOWN, CarrierDelays, Flights
from .ledger import Ledger

CANCELLED = -(1 << 15)
"""Stands for the delay of a flight that did not depart."""
PAUSE_S = 0.02
"""How far ahead of its pace the slow consumer runs before it pauses, in seconds."""


class Departure(msgspec.Struct, gc=False):
    """What the jobs read of a flight."""

    row: int
    carrier: str
    dep_delay: int | None
    tailnum: str | None


_decode = msgspec.json.Decoder(Departure).decode


class Job(ABC):
    """A consumer per batch, with its ledger `<name>.ledger` in `directory`."""

    name: str
    concurrency = 100
    record = Struct("<I")

    def __init__(self, directory: Path, flights: Flights) -> None:
        self.flights = flights
        self.ledger = Ledger(directory / f"{self.name}.ledger", self.record.size)
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
        """The ledger's record: the row number, and after it whatever `restore` needs."""
        return self.record.pack(departure.row)

    @abstractmethod
    def work(self, aircraft: str, departure: Departure) -> None:
        """Take in a departure that had not been delivered before."""

    @abstractmethod
    def restore(self, row: int, *rest: int | bytes) -> None:
        """Take in a departure that the ledger has."""

    def rows(self) -> Iterator[int]:
        """The row numbers delivered, in order, repeated ones included."""
        return (entry[0] for entry in self.record.iter_unpack(self.ledger.read()))

    def problems(self) -> Iterable[str]:
        """What this job found wrong, beyond what the rows tell."""
        return ()


class DelayStatistics(Job):
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


class OrderCheck(Job):
    """Follows each aircraft: its departures come on its own stream, and in order."""

    name = "order"

    def __init__(self, directory: Path, flights: Flights) -> None:
        self.strays = 0
        self.disorder = 0
        self._newest: dict[str, int] = {}
        super().__init__(directory, flights)

    def work(self, aircraft: str, departure: Departure) -> None:
        self.strays += aircraft != (departure.tailnum or UNKNOWN)
        self._follow(aircraft, departure.row)

    def restore(self, row: int, *_: int | bytes) -> None:
        self._follow(self.flights.keys[row - 1], row)

    def _follow(self, aircraft: str, row: int) -> None:
        self.disorder += row < self._newest.get(aircraft, 0)
        self._newest[aircraft] = row

    def problems(self) -> Iterable[str]:
        if self.strays:
            yield f"{self.strays:,} flights came on the stream of another aircraft"


class SlowConsumer(Job):
    """Handles `per_second` events and not more, by a pause now and then: what a slow database behind it would do."""

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


def open_jobs(directory: Path, flights: Flights, slow_per_second: int) -> Sequence[Job]:
    return [
        DelayStatistics(directory, flights),
        OrderCheck(directory, flights),
        SlowConsumer(directory, flights, slow_per_second),
    ]
