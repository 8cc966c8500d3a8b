"""Runs queries on a few connections, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from ...streams.background import BackgroundTasks
from .connecting import LOST_CONNECTION, DatabasePlace

_END_S = 1.0
"""How long queries may take to end when the connections are closed, in seconds."""
_T = TypeVar("_T")
Work = Callable[[AsyncConnection[TupleRow]], Awaitable[_T]]


class QueryConnections:
    """Connections that are opened when they are needed, and replaced when they are broken."""

    def __init__(self, place: DatabasePlace) -> None:
        self._place = place
        self._idle: list[AsyncConnection[TupleRow]] = []
        self._free = asyncio.Semaphore(place.limits.connections)
        self._limit_s = place.limits.request_s + 1
        """The server ends statements after `request_s`, so it is not answering if this is over."""
        self._ended_well = 0
        """Number of calls of `work` that have returned a result."""
        self._tasks = BackgroundTasks()
        self._closed = False

    async def run(self, work: Work[_T]) -> _T:
        """Run `work` with a connection, in a task that goes on if the caller is cancelled.

        `work` runs again if a connection that was idle turns out to be broken, so it must be idempotent. Raises
        StorageError if it takes longer than `request_s`. The time for which it waits for a free connection does not
        count, as long as the work of others ends.
        """
        with self._place.translated():
            await self._acquire()
            task = self._tasks.hold(self._run(work), "headrace postgres query")
            task.add_done_callback(self._release)
            await asyncio.wait({task}, timeout=self._limit_s)
            if not task.done():
                task.cancel()
                raise TimeoutError
            if task.cancelled():
                raise psycopg.OperationalError("the query was ended, because the adapter is closed")
            return task.result()

    async def _acquire(self) -> None:
        """Wait for a free connection. Raise TimeoutError if no other work has ended well for too long."""
        while True:
            before = self._ended_well
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._free.acquire()
            except TimeoutError:
                if self._ended_well == before:
                    raise
            else:
                return

    def _release(self, task: asyncio.Task[object]) -> None:
        self._free.release()
        if not task.cancelled() and task.exception() is None:
            self._ended_well += 1

    async def _run(self, work: Work[_T]) -> _T:
        if self._closed:
            raise asyncio.CancelledError
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await self._place.connect_async()
            try:
                return await work(connection)
            except LOST_CONNECTION:
                if not used or not connection.closed:
                    raise
            finally:
                self._put_back(connection)

    def _put_back(self, connection: AsyncConnection[TupleRow]) -> None:
        idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if idle and not self._closed:
            self._idle.append(connection)
        else:
            connection.pgconn.finish()  # at once, also if this task is cancelled

    async def aclose(self) -> None:
        self._closed = True
        await self._tasks.join(_END_S)
        await self._tasks.aclose()
        while self._idle:
            await self._idle.pop().close()


async def rows(connection: AsyncConnection[TupleRow], query: str, *values: object) -> list[Any]:
    """Run one query. Return its rows."""
    cursor = await connection.execute(query.encode(), values or None)
    return await cursor.fetchall()
