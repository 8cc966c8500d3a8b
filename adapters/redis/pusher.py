"""Pushes to one shard: calls made at the same time are sent together, in order, and are stored once.

One push is under way at a time. While the server is away it is sent again under its number, so that the shard knows it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ...streams.background import BackgroundTasks
from ...streams.backoff import Backoff
from ...streams.errors import HeadraceError, QueueFull, StorageError
from .server import ServerAway
from .shard import PushedEvent
from .watch import ShardWatch

MAX_EVENTS = 1000
MAX_BYTES = 1 << 20
"""One push takes no further calls once it has this many events or bytes."""
MAX_PENDING_BYTES = 64 << 20
"""Largest number of bytes that wait for a server that is away; further calls raise QueueFull."""
COST_BYTES = 1024
"""Overhead of a waiting batch. It is added to the bytes of its events."""
OnOutcome = Callable[[Sequence[int] | HeadraceError], None]


def away_backoff() -> Backoff:
    """Return the pauses between two pushes to a server that is away."""
    return Backoff(0.05, 1.0)


class _WaitingPush(NamedTuple):
    events: Sequence[PushedEvent]
    on_outcome: OnOutcome
    deadline: float
    nbytes: int

    @property
    def cost(self) -> int:
        return self.nbytes + COST_BYTES * len(self.events)


class ShardPusher:
    """Pushes to one shard, on one event loop. Call `aclose` when done.

    The pushers of the queue's other shards take over while the server is away. Events that it stored without an answer
    are then stored twice.
    """

    def __init__(self, watch: ShardWatch, *, wait: bool, timeout_s: float) -> None:
        self.shard = watch.shard
        self._watch = watch
        self._others: Sequence[ShardPusher] = ()
        self._id = uuid.uuid4().hex
        self._number = 0
        self._wait = wait
        self._timeout_s = timeout_s
        self._waiting: deque[_WaitingPush] = deque()
        self._pending = 0
        self._pushing = BackgroundTasks()
        self._away_until = 0.0

    def share_with(self, pushers: Sequence[ShardPusher]) -> None:
        """Hand events to these pushers of the queue's shards while the server is away. This one may be among them."""
        self._others = [other for other in pushers if other is not self]

    @property
    def away(self) -> bool:
        """Whether the server did not answer a moment ago."""
        return self._watch.silent or asyncio.get_running_loop().time() < self._away_until

    def push(self, events: Sequence[PushedEvent], on_outcome: OnOutcome) -> None:
        """Store all events or none, behind those pushed before. `on_outcome` is called with their positions or with the
        error.

        Raises QueueFull.
        """
        deadline = asyncio.get_running_loop().time() + (self._timeout_s if self._wait else 0.0)
        one = _WaitingPush(events, on_outcome, deadline, sum(len(event.body) for event in events))
        if self._pending and self._pending + one.cost > MAX_PENDING_BYTES:
            raise QueueFull(
                f"{self._pending:,} bytes wait to be stored in Redis at {self.shard.server.address}: publish later"
            )
        self._append(one)

    def _append(self, one: _WaitingPush) -> None:
        self._waiting.append(one)
        self._pending += one.cost
        if not self._pushing:
            self._pushing.start(self._run(), f"headrace push {self.shard.name}")

    async def aclose(self) -> None:
        """Return when everything is stored, or has failed."""
        await self._pushing.join()

    async def _run(self) -> None:
        while self._waiting:
            await self._send(self._chunk())

    def _chunk(self) -> Sequence[_WaitingPush]:
        chunk: list[_WaitingPush] = []
        events = nbytes = 0
        while self._waiting and events < MAX_EVENTS and nbytes < MAX_BYTES:
            chunk.append(one := self._waiting.popleft())
            events += len(one.events)
            nbytes += one.nbytes
        return chunk

    async def _send(self, chunk: Sequence[_WaitingPush]) -> None:
        """Send a chunk until it is stored. Under one number, the contents must stay the same."""
        self._number += 1
        events = [event for one in chunk for event in one.events]
        push = partial(self.shard.push, events, pusher=self._id, number=self._number)
        left, backoff = list(chunk), away_backoff()
        while True:
            try:
                positions = await self._watch.ask(push)
            except ServerAway as error:
                pause_s = backoff.next_s()
                self._away_until = asyncio.get_running_loop().time() + 2 * pause_s
                left = self._expire([one for one in left if not self._hand_over(one)], error)
                self._waiting = deque(one for one in self._waiting if not self._hand_over(one))
                self._expire_waiting(error)
                if not left:
                    return
                await asyncio.sleep(pause_s)
            except HeadraceError as error:
                self._fail(left, error)
                return
            else:
                self._away_until = 0.0
                self._answer(chunk, left, positions)
                return

    def _hand_over(self, one: _WaitingPush) -> bool:
        """Let another shard store the call, if the server of one is not away. Return whether it does."""
        for other in self._others:
            if not other.away:
                self._pending -= one.cost
                other._append(one)  # noqa: SLF001 (of its own kind)
                return True
        return False

    def _answer(
        self, chunk: Sequence[_WaitingPush], left: Sequence[_WaitingPush], positions: Sequence[int | None]
    ) -> None:
        at = 0
        waiting = set(map(id, left))
        for one in chunk:
            mine = [position for position in positions[at : at + len(one.events)] if position is not None]
            at += len(one.events)
            if id(one) in waiting:
                self._pending -= one.cost
                one.on_outcome(mine)

    def _expire(self, waiting: Sequence[_WaitingPush], error: ServerAway) -> list[_WaitingPush]:
        """Fail the calls whose time is up. Return the others."""
        now = asyncio.get_running_loop().time()
        over = [one for one in waiting if one.deadline <= now]
        self._fail(over, StorageError(f"{error}; these events may or may not be stored, publish them again"))
        return [one for one in waiting if one.deadline > now]

    def _expire_waiting(self, error: ServerAway) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0].deadline <= now:
            late = StorageError(f"{error}; nothing of these events is stored, publish them again")
            self._fail([self._waiting.popleft()], late)

    def _fail(self, waiting: Sequence[_WaitingPush], error: HeadraceError) -> None:
        for one in waiting:
            self._pending -= one.cost
            one.on_outcome(error)
