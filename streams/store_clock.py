"""The clock that decides when a heartbeat is old and a lease is over: the store's, not that of any silo.

In PostgreSQL it is the server's. In SQLite, where all processes are on one machine, it counts from the start of that
machine and goes on while it sleeps: setting the wall clock changes nothing. It starts again with the machine, so the
store keeps which start its times belong to.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import BigInteger, Connection, cast, extract, func, select

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # where there is no Linux, without sleep


def now_us(connection: Connection) -> int:
    """Microseconds by the store's clock. Taken before whatever the transaction locks later, so never too late."""
    if connection.dialect.name != "postgresql":
        return time.clock_gettime_ns(_SINCE_BOOT) // 1000
    seconds = extract("epoch", func.clock_timestamp())
    return connection.execute(select(cast(seconds * 1_000_000, BigInteger))).scalar_one()


def wall_us(connection: Connection) -> int:
    """Microseconds since 1970 UTC, for times that outlast a start of the machine: by the server's clock in PostgreSQL,
    by that of the machine in SQLite."""
    if connection.dialect.name == "postgresql":
        return now_us(connection)
    return time.time_ns() // 1000


def boot_id(connection: Connection) -> str:
    """Names the start of the machine that the clock counts from; "" for a clock that never starts again."""
    if connection.dialect.name == "postgresql":
        return ""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
