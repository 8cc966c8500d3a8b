"""Dead letters that are delivered once more to the members of a group, outside of the order of their streams."""

from __future__ import annotations

import asyncio

from ...streams.errors import Closed, HeadraceError
from ...streams.events import Event, EventBatch
from ...streams.frames import frame
from ...streams.identity import StreamId
from .credit_line import CreditLine
from .edge import Edge
from .member import Member


class GroupRedrives:
    """Delivers dead letters of one queue."""

    def __init__(self, name: str, queue: int, edge: Edge, line: CreditLine) -> None:
        self._name = name
        self._queue = queue
        self._edge = edge
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._redriving: set[asyncio.Future[HeadraceError | None]] = set()
        self._closed = False

    async def deliver(self, event: Event) -> BaseException | None:
        """Deliver one event out of order, to the first member that can take it. Raises Closed if the delivery ends."""
        assert event.token is not None
        key = self._queue, event.token.offset, event.token.index
        batch = EventBatch.of(event.stream or StreamId("", ""), [event])
        encoded = frame(batch.encoded, self._queue, event.token.offset, indexes=[event.token.index], redriven=True)
        holder: Member | None = None
        while True:
            holder = await self._next_member(key, len(encoded), holder)
            error = await self._redrive_to(holder, key, encoded)
            if not isinstance(error, Closed):
                return error

    async def _redrive_to(self, member: Member, key: tuple[int, int, int], encoded: bytes) -> HeadraceError | None:
        """Return the member's answer; Closed if the member goes before it answers."""
        outcome = member.redriven[key] = self._loop.create_future()
        self._redriving.add(outcome)
        member.charge(1, len(encoded))
        self._edge.put(member, encoded)
        try:
            return await outcome
        finally:
            self._redriving.discard(outcome)
            del member.redriven[key]
            self._line.add(member)
            self._line.waiters.notify()

    async def _next_member(self, key: tuple[int, int, int], size: int, holder: Member | None) -> Member:
        """Wait for a member that has credit, and holds no event for which the dead letter could be mistaken. `holder`
        had the dead letter when its connection was lost: within its session timeout, only it may get the letter."""
        while not self._closed:
            candidates = self._line.candidates(self._queue)
            if holder is not None and self._line.is_member(holder, self._queue):
                candidates = [member for member in candidates if member is holder]
            if not candidates:
                self._line.ask_for_credit(self._queue)
            for member in candidates:
                if key in member.redriven or key[:2] in member.in_flight:
                    continue
                if size > member.credit_bytes:
                    self._line.need(member, size)
                elif member.account.fits(size):
                    return member
            await self._line.waiters.wait()
        raise Closed(f"subscription {self._name!r} stopped before dead letters were delivered once more")

    def halt(self) -> None:
        """Deliver no more."""
        self._closed = True
        self._line.waiters.notify()

    def close(self) -> None:
        """Give up the dead letters that members hold."""
        for outcome in self._redriving:
            if not outcome.done():
                outcome.set_result(Closed(f"subscription {self._name!r} stopped"))


class RedriveRejected(HeadraceError):
    """A consumer rejected an event that was delivered to it out of order."""

    code = "rejected"

    def __init__(self, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(reason)
        self.unavailable = unavailable
        """The consumer says that the event is not to blame."""
