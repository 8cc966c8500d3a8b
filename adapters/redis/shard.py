"""One shard of a queue: the part of the queue that is on one Redis, and its operations.

Every method is one atomic step on the server, and raises ServerAway if the server does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ...streams.errors import InvalidArgument
from .keys import ShardKeys, check_id, check_priority, delay_ms, due_of, priority_of
from .scripts import SCRIPTS, RedisScript, RedisScripts
from .server import RedisConnection

MAX_POP = 1000
"""The maximum of events in one pop: while a script runs, the server does nothing else."""
MAX_POP_BYTES = 8 << 20
REMEMBERED_S = 3600
"""How long a push may be repeated without being stored twice, in seconds, unless more is asked for: longer than a
command lies in front of a frozen server."""


class PushedEvent(NamedTuple):
    """An event to be stored."""

    body: bytes
    id: str = ""
    """Empty: the shard assigns one, which sorts behind those assigned before."""
    delay_s: float = 0.0
    priority: int = 0

    def arguments(self) -> tuple[str, int, int, bytes]:
        """Return the arguments of the script `push` for this event. Raises InvalidArgument."""
        if not isinstance(self.body, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] (callers need not have types)
            raise InvalidArgument(f"an event in Redis is bytes, not {type(self.body).__name__}: encode it")
        return check_id(self.id), delay_ms(self.delay_s), check_priority(self.priority), self.body


class ClaimedEvent(NamedTuple):
    """An event that a consumer has taken, until a timeout."""

    id: str
    body: bytes
    token: int
    """Proves the claim; each claim has another token."""
    attempts: int
    """How often the event was taken so far, including this time."""
    priority: int


class PopResult(NamedTuple):
    claims: Sequence[ClaimedEvent]
    idle_s: float
    """If there are no claims: seconds after which to try again, unless the bell rings before."""


class QueuedEvent(NamedTuple):
    """An event that is stored, in any state."""

    id: str
    body: bytes
    state: Literal["waiting", "claimed", "held"]
    priority: int
    due_ms: int
    """When it can be taken, or could be, in ms since 1970 by the server's clock."""
    attempts: int


class ShardSize(NamedTuple):
    """Events of a shard."""

    ready: int
    delayed: int
    claimed: int
    """By consumers, until a timeout."""
    held: int
    """By the queue's reader."""

    @property
    def waiting(self) -> int:
        return self.ready + self.delayed


class HeldEvents(NamedTuple):
    """Events held for the queue's reader: offsets and bytes, in order."""

    events: Sequence[tuple[int, bytes]]
    idle_s: float = 0.0


class RedisShard:
    """A shard, identified by its server and keys. It has no state, so several objects may be used for one shard."""

    def __init__(
        self, server: RedisConnection, keys: ShardKeys, *, name: str = "", scripts: RedisScripts = SCRIPTS
    ) -> None:
        self.server = server
        self.keys = keys
        self.name = name
        self._scripts = scripts

    # ---- events ----------------------------------------------------------------------------------------------------

    async def push(
        self,
        events: Sequence[PushedEvent],
        *,
        pusher: str,
        number: int,
        keep: bool = False,
        remembered_s: int = REMEMBERED_S,
    ) -> Sequence[int | None]:
        """Store all events, or none. Return the position of each.

        An event replaces the stored one with the same id. With `keep`, the stored one stays, and the position is None.
        `pusher` gives its calls increasing numbers. A repeated number changes nothing and has the same result, for
        `remembered_s` seconds after it was last sent.
        """
        arguments = [argument for event in events for argument in event.arguments()]
        keys = (*self.keys, self.keys.sent(pusher))
        reply = await self.server.run(self._scripts.push, keys, number, remembered_s, int(keep), *arguments)
        return [None if position < 0 else position for position in reply]

    async def settle(self, pusher: str, number: int) -> None:
        """Remember a push only for the usual time, because its producer's ledger has recorded it."""
        await self.server.run(self._scripts.settle, (*self.keys, self.keys.sent(pusher)), number, REMEMBERED_S)

    async def pop(self, limit: int, timeout_s: float, *, max_bytes: int = MAX_POP_BYTES) -> PopResult:
        """Claim due events for `timeout_s` seconds, highest priority first. Does not wait; there may be none."""
        reply = await self._run(
            self._scripts.pop, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES), delay_ms(timeout_s)
        )
        fields = iter(reply[1:])
        claims = [
            ClaimedEvent(id.decode(), body, token, attempts, priority)
            for id, body, token, attempts, priority in zip(*[fields] * 5, strict=True)  # noqa: A001 (its name)
        ]
        return PopResult(claims, _seconds(reply[0], self.server.limits.block_s))

    async def acknowledge(self, claims: Sequence[tuple[str, int]]) -> Sequence[bool]:
        """Remove claimed events, by id and token. Return False for a claim that is over: another consumer may have the
        event."""
        reply = await self._run(self._scripts.acknowledge, *(part for claim in claims for part in claim))
        return [bool(done) for done in reply]

    async def release(self, id: str, token: int, delay_s: float = 0.0) -> bool:  # noqa: A002
        """Give a claimed event back. It is due after `delay_s`; without delay it returns to its former place."""
        return bool(await self._run(self._scripts.release, id, token, delay_ms(delay_s)))

    async def extend(self, id: str, token: int, timeout_s: float) -> bool:  # noqa: A002
        """Let a claim end `timeout_s` from now."""
        return bool(await self._run(self._scripts.extend, id, token, delay_ms(timeout_s)))

    async def change_delay(self, id: str, delay_s: float) -> bool:  # noqa: A002
        """Make an event due `delay_s` from now. Return False if it is not waiting."""
        return bool(await self._run(self._scripts.change_delay, id, delay_ms(delay_s)))

    async def get(self, id: str) -> QueuedEvent | None:  # noqa: A002
        reply = await self._run(self._scripts.get, id)
        if not reply:
            return None
        body, state, score, attempts = reply[:4]
        at = float(score)
        return QueuedEvent(id, body, state.decode(), priority_of(at), due_of(at), attempts)

    async def remove(self, id: str) -> bool:  # noqa: A002
        """Remove an event in any state. Return False if there is none."""
        return bool(await self._run(self._scripts.remove, id))

    async def size(self, held_from: int = 0) -> ShardSize:
        """Count the events. Held events below offset `held_from` are not counted."""
        return ShardSize(*await self._run(self._scripts.size, held_from))

    async def peek(self, limit: int) -> Sequence[QueuedEvent]:
        """Return the events that the next pop would take, in order."""
        fields = iter(await self._run(self._scripts.peek, min(limit, MAX_POP)))
        entries: list[QueuedEvent] = []
        for id, body, score in zip(*[fields] * 3, strict=True):  # noqa: A001
            at = float(score)
            entries.append(QueuedEvent(id.decode(), body, "waiting", priority_of(at), due_of(at), 0))
        return entries

    async def clear(self) -> None:
        """Remove everything. Claims are over."""
        await self._run(self._scripts.clear)

    async def bell(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the bell. Return whether it rang. Each ring wakes up one waiting process."""
        return await self.server.bell(self.keys.bell, timeout_s)

    async def ring(self) -> None:
        """Wake up one waiting process."""
        await self._run(self._scripts.ring)

    # ---- the reader of the queue -----------------------------------------------------------------------------------

    async def open_reader(self) -> int:
        """Become the reader: calls of the former reader fail from now on. Return the reader's number."""
        return await self._run(self._scripts.open)

    async def bounds(self, floor: int = 0) -> tuple[int, int]:
        """Return two offsets. All events below the first are finished. The second is above every position assigned so
        far; no later position is below it, or below `floor`."""
        done, following = await self._run(self._scripts.bounds, floor)
        return done, following

    async def held(self, reader: int, start: int, limit: int, max_bytes: int) -> HeldEvents | None:
        """Return events that earlier readers took, at offset `start` and above. None: this reader is superseded."""
        reply = await self._run(self._scripts.held, reader, start, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES))
        return None if reply is None else HeldEvents(_pairs(reply))

    async def hold(self, reader: int, start: int, floor: int, limit: int, max_bytes: int) -> HeldEvents | None:
        """Take due events at offsets of at least `floor`; they are held until they are finished. None: superseded.

        Events held at `start` and above were taken by a call whose answer was lost: they are given back first.
        """
        reply = await self._run(
            self._scripts.hold, reader, start, floor, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES)
        )
        return None if reply is None else HeldEvents(_pairs(reply[1:]), _seconds(reply[0], self.server.limits.block_s))

    async def held_at(self, offset: int) -> bytes | None:
        """Return the id of the event held at an offset."""
        found = await self._run(self._scripts.held_at, offset)
        return found[0] if found else None

    async def finish(self, reader: int, below: int, done: int) -> bool:
        """Remove events held below `below`. Everything in the queue below `done` is finished. Return False if this
        reader is superseded."""
        left: int | None = 1
        while left:
            left = await self._run(self._scripts.finish, reader, below, done, MAX_POP)
        return left is not None

    async def _run(self, script: RedisScript, *args: str | bytes | float) -> Any:
        return await self.server.run(script, self.keys, *args)


def _seconds(ms: int, block_s: float) -> float:
    return block_s if ms < 0 else ms / 1000


def _pairs(reply: Sequence[Any]) -> Sequence[tuple[int, bytes]]:
    fields = iter(reply)
    return list(zip(fields, fields, strict=True))
