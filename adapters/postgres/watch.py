"""Learns that queues have grown: by notifications, and by asking from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from ...streams.backoff import Backoff
from ...streams.errors import HeadraceError, StorageError
from .committer import PostgresCommitter
from .connecting import DatabasePlace
from .queries import rows
from .schema import ProviderRow
from .transaction import parse_ends

log = logging.getLogger("headrace.adapters.postgres")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
_ENDS = "SELECT queue, next FROM headrace_queue WHERE provider = %s"
_EXISTS = "SELECT identity FROM headrace_provider WHERE provider = %s"


class QueueWatch:
    """The ends of all queues, as far as this process knows them, and why the server cannot be used at present.

    `changed` is called with the queues that may have grown, or None if all receivers must look.
    """

    def __init__(
        self,
        place: DatabasePlace,
        provider: ProviderRow,
        poll_s: float,
        changed: Callable[[int | None], None],
        committer: PostgresCommitter,
    ) -> None:
        """`committer` is that of the adapter. Notifications about its commits are ignored, because the adapter notes
        these commits itself. The watch tells the committer when the server answers."""
        self.fault: HeadraceError | None = None
        self._place = place
        self._provider = provider
        self._poll_s = poll_s
        self._changed = changed
        self._committer = committer
        self._ends: dict[int, int] = {}

    def end(self, queue: int) -> int:
        """Return the offset after the last batch that is known to be stored."""
        return self._ends.get(queue, 0)

    def note(self, queue: int, end: int) -> None:
        """Note that a queue ends at `end`, or later."""
        if end > self._ends.get(queue, 0):
            self._ends[queue] = end
            self._changed(queue)

    async def run(self) -> None:
        """Watch for ever."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                await self._watch(backoff)
            except (psycopg.Error, StorageError, TimeoutError) as error:
                self._note_failure(error)
            except Exception:
                log.exception("watching the queues failed, trying again")
            await asyncio.sleep(backoff.next_s())

    async def _watch(self, backoff: Backoff) -> None:
        connection = await self._place.connect_async()
        try:
            if not self._place.pooler:
                async with self._time_limit():
                    await connection.execute(f"LISTEN {self._provider.channel}".encode())
            while True:
                async with self._time_limit():
                    await self._poll(connection)
                self._committer.note_server_answered()
                backoff.reset()
                self._note_recovery()
                if self._place.pooler:
                    await asyncio.sleep(self._poll_s)
                else:
                    await self._listen(connection)
        finally:
            connection.pgconn.finish()  # at once: a server that does not answer cannot be asked to end a query

    def _time_limit(self) -> asyncio.Timeout:
        return asyncio.timeout(self._place.limits.request_s)

    async def _listen(self, connection: AsyncConnection[TupleRow]) -> None:
        async for notification in connection.notifies(timeout=self._poll_s):
            if notification.pid == self._committer.backend_pid():
                continue
            ends = _ends(notification.payload)
            for queue, end in ends.items():
                self.note(queue, end)
            if not ends:
                return  # ask now

    async def _poll(self, connection: AsyncConnection[TupleRow]) -> None:
        before = dict(self._ends)
        found = dict(await rows(connection, _ENDS, self._provider.provider))
        if len(found) < self._provider.queues or not await self._is_same_provider(connection):
            raise StorageError(f"{self._place.shown} does not have the queues of this provider any more")
        for queue, end in found.items():
            if end < before.get(queue, 0):  # the queue has lost its end: its receivers tell
                self._ends[queue] = end
                self._changed(queue)
            self.note(queue, end)

    async def _is_same_provider(self, connection: AsyncConnection[TupleRow]) -> bool:
        return await rows(connection, _EXISTS, self._provider.provider) == [(self._provider.identity,)]

    def _note_failure(self, error: BaseException) -> None:
        first = self.fault is None
        self.fault = self._place.failure(error)
        if first:
            log.warning("queues cannot be read, trying again: %s", self.fault)
            self._changed(None)

    def _note_recovery(self) -> None:
        if self.fault is not None:
            log.info("%s answers again", self._place.shown)
            self.fault = None
            self._changed(None)


def _ends(payload: str) -> Mapping[int, int]:
    try:
        return parse_ends(payload)
    except ValueError:
        return {}  # another program has notified
