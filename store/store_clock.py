"""The store's clock, which is the same for all silos.

In PostgreSQL it is the server's clock. In SQLite all processes are on one machine: the clock counts from the start of
that machine and goes on while it sleeps, so that setting the wall clock changes nothing. It starts again with the
machine, so the store keeps the id of the start that its times belong to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import BigInteger, Connection, cast, extract, func, select

from ..streams import clock

Clock = Callable[[Connection], int]
"""Returns microseconds. Called within a transaction."""
BootId = Callable[[Connection], str]
"""Returns the id of the machine's start. Called within a transaction."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # without Linux: it stops while the machine sleeps


def now_us(connection: Connection) -> int:
    """Return microseconds by the store's clock. Call it before the transaction locks rows: a wait for locks would make
    the time too late."""
    if connection.dialect.name != "postgresql":
        return time.clock_gettime_ns(_SINCE_BOOT) // 1000
    seconds = extract("epoch", func.clock_timestamp())
    return connection.execute(select(cast(seconds * 1_000_000, BigInteger))).scalar_one()


def wall_us(connection: Connection) -> int:
    """Return microseconds since 1970 UTC, for times that must stay valid after a restart of the machine: by the
    server's clock in PostgreSQL, by the machine's clock in SQLite."""
    if connection.dialect.name == "postgresql":
        return now_us(connection)
    return clock.now_us()


def boot_id(connection: Connection) -> str:
    """Return the id of the machine's start that the clock counts from; "" for a clock that never starts again."""
    if connection.dialect.name == "postgresql":
        return ""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
