"""Retention: begins new segments, and drops old ones as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import TupleRow

from ...streams.errors import StorageError
from .limits import PostgresLimits
from .options import PostgresOptions
from .queries import rows
from .schema import BEGIN_SEGMENT, ProviderRow, segment_statements, segment_table

_SEGMENTS_PER_AGE = 8
"""`retain_age_s` is divided into so many segments. So a segment is kept longer than allowed by one part at most."""
_FORGET_INTERVAL_US = 60_000_000
"""Interval of looking for producers to forget, in microseconds."""
_LOCK = "SELECT segment FROM headrace_queue WHERE provider = %s ORDER BY queue FOR UPDATE"
_TOTAL = "SELECT sum(bytes)::bigint FROM headrace_queue WHERE provider = %s"
_SEGMENTS = """
    SELECT segment, queue, first, bytes, time_us FROM headrace_segment WHERE provider = %s ORDER BY segment, queue
"""


class Segment(NamedTuple):
    """A segment, and the first offset of each queue in it."""

    number: int
    begun_us: int
    nbytes: int
    """Bytes that all queues had stored before."""
    firsts: Mapping[int, int]


class RetentionPlan(NamedTuple):
    """The segments to drop, and whether to begin a new one. Times are microseconds since 1970 UTC."""

    drop: Sequence[int]
    begin: bool


def plan(
    segments: Sequence[Segment], nbytes: int, options: PostgresOptions, watermarks: Mapping[int, int], now_us: int
) -> RetentionPlan:
    """Decide by the segments, oldest first, and by the bytes that all queues have ever stored.

    The newest segment is never dropped. A segment is dropped only after all older ones.
    """
    newest = segments[-1]
    age_us = None if options.retain_age_s is None else round(options.retain_age_s * 1_000_000)
    stored = nbytes - newest.nbytes
    old = age_us is not None and now_us - newest.begun_us >= age_us // _SEGMENTS_PER_AGE
    begin = stored >= options.segment_bytes or (stored > 0 and old)
    drop: list[int] = []
    for segment, following in pairwise(segments):
        if options.retain_unfinished and any(
            first > watermarks.get(queue, first) for queue, first in following.firsts.items()
        ):
            break
        aged = age_us is not None and following.begun_us < now_us - age_us
        large = options.retain_bytes is not None and nbytes - segment.nbytes > options.retain_bytes
        if not aged and not large:
            break
        drop.append(segment.number)
    return RetentionPlan(drop, begin)


class PostgresRetention:
    """Applies the retention of one provider. Its work may be repeated."""

    def __init__(self, provider: ProviderRow, options: PostgresOptions, limits: PostgresLimits) -> None:
        self._provider = provider
        self._options = options
        self._limits = limits
        self._last_forget_us = 0

    async def apply(self, connection: AsyncConnection[TupleRow], watermarks: Mapping[int, int]) -> None:
        """Begin and drop segments, and forget producers. Raises psycopg.Error, StorageError."""
        segments = await self._segments(connection)
        if not segments:
            raise StorageError("the database does not have the queues of this provider any more")
        ((nbytes,),) = await rows(connection, _TOTAL, self._provider.provider)
        ((now_us,),) = await rows(connection, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        chosen = plan(segments, nbytes, self._options, watermarks, now_us)
        for number in chosen.drop:
            if not await self._drop(connection, number):
                break
        if chosen.begin:
            await self._begin(connection, segments[-1].number)
        await self._forget_producers(connection, now_us)

    async def _forget_producers(self, connection: AsyncConnection[TupleRow], now_us: int) -> None:
        """Delete producers that have stored nothing for a long time. This reads all of them, so it is done rarely."""
        age_us = round(self._limits.producer_age_s * 1_000_000)
        if now_us - self._last_forget_us >= min(age_us, _FORGET_INTERVAL_US):
            self._last_forget_us = now_us
            query = "DELETE FROM headrace_producer WHERE provider = %s AND time_us < %s"
            await connection.execute(query, [self._provider.provider, now_us - age_us])

    async def _segments(self, connection: AsyncConnection[TupleRow]) -> Sequence[Segment]:
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for number, *row in await rows(connection, _SEGMENTS, self._provider.provider):
            found.setdefault(number, []).append((row[0], row[1], row[2], row[3]))
        return [
            Segment(
                number,
                max(each[3] for each in starts),
                sum(each[2] for each in starts),
                {queue: first for queue, first, _, _ in starts},
            )
            for number, starts in found.items()
        ]

    async def _begin(self, connection: AsyncConnection[TupleRow], current: int) -> None:
        """Begin the segment after `current`, unless another process has done so."""
        provider = self._provider.provider
        async with connection.transaction():
            locked = await rows(connection, _LOCK, provider)
            if {row[0] for row in locked} != {current}:
                return
            for statement in segment_statements(provider, current + 1):
                await connection.execute(statement)
            await connection.execute(BEGIN_SEGMENT, {"provider": provider, "segment": current + 1})
            await connection.execute(
                "UPDATE headrace_queue SET segment = %s WHERE provider = %s", [current + 1, provider]
            )

    async def _drop(self, connection: AsyncConnection[TupleRow], number: int) -> bool:
        """Drop a segment. Return False if its lock is not free within `drop_wait_s`, because of readers."""
        provider = self._provider.provider
        wait = sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(round(self._limits.drop_wait_s * 1000)))
        table = sql.Identifier(segment_table(provider, number))
        try:
            async with connection.transaction():
                await connection.execute(wait)
                await connection.execute(
                    "DELETE FROM headrace_segment WHERE provider = %s AND segment = %s", [provider, number]
                )
                await connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))
        except psycopg.errors.LockNotAvailable:
            return False
        return True
