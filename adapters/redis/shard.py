"""One shard of a queue: what one Redis holds of it, and everything that can be done to it.

Every method is one step on the server: it has happened, or not. Raises ServerAway where the server does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .keys import ShardKeys, check_id, check_priority, delay_ms, due_of, priority_of
from .scripts import SCRIPTS, Script, Scripts
from .server import BLOCK_S, Server

MAX_POP = 1000
"""One pop takes no more: a script holds up everybody else on the server."""
MAX_POP_BYTES = 8 << 20
REMEMBERED_S = 3600
"""How long a push may be repeated without being stored twice, in seconds, unless more is asked for: longer than a
command lies in front of a frozen server."""


class Pushed(NamedTuple):
    """An event to be stored."""

    body: bytes
    id: str = ""
    """Empty: it gets one, which sorts behind those given before."""
    delay_s: float = 0.0
    priority: int = 0

    def arguments(self) -> tuple[str, int, int, bytes]:
        """Raises InvalidArgument."""
        return check_id(self.id), delay_ms(self.delay_s), check_priority(self.priority), self.body


class Claim(NamedTuple):
    """An event that was taken, until its timeout."""

    id: str
    body: bytes
    token: int
    """What proves the claim: it differs from claim to claim."""
    attempts: int
    """How often it was taken so far, with this time."""
    priority: int


class Popped(NamedTuple):
    claims: Sequence[Claim]
    idle_s: float
    """Where there are none: when to look again, unless the bell rings before."""


class Entry(NamedTuple):
    """An event, wherever it is."""

    id: str
    body: bytes
    state: Literal["waiting", "claimed", "held"]
    priority: int
    due_ms: int
    """When it can be taken, or could be, in ms since 1970 by the server's clock."""
    attempts: int


class Size(NamedTuple):
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


class Held(NamedTuple):
    """What a reader was given: offsets and bytes, in order."""

    events: Sequence[tuple[int, bytes]]
    idle_s: float = 0.0


class RedisShard:
    """A shard, by its server and keys. Keeps nothing itself: any number of these may be used for one shard."""

    def __init__(self, server: Server, keys: ShardKeys, *, name: str = "", scripts: Scripts = SCRIPTS) -> None:
        self.server = server
        self.keys = keys
        self.name = name
        self._scripts = scripts

    # ---- events ----------------------------------------------------------------------------------------------------

    async def push(
        self,
        events: Sequence[Pushed],
        *,
        pusher: str,
        number: int,
        keep: bool = False,
        remembered_s: int = REMEMBERED_S,
    ) -> Sequence[int | None]:
        """Store events, all of them or none. Returns the position of each.

        One with the id of another takes its place; with `keep`, the other stays, and the position is None.
        `pusher` numbers its calls upwards: the same number again changes nothing and has the same answer, until it was
        not sent for `remembered_s` seconds.
        """
        arguments = [argument for event in events for argument in event.arguments()]
        keys = (*self.keys, self.keys.sent(pusher))
        reply = await self.server.run(self._scripts.push, keys, number, remembered_s, int(keep), *arguments)
        return [None if position < 0 else position for position in reply]

    async def settle(self, pusher: str, number: int) -> None:
        """That push is written down elsewhere: it need not be remembered longer than any."""
        await self.server.run(self._scripts.settle, (*self.keys, self.keys.sent(pusher)), number, REMEMBERED_S)

    async def pop(self, limit: int, timeout_s: float, *, max_bytes: int = MAX_POP_BYTES) -> Popped:
        """Claim what is due, highest priority first, for `timeout_s` seconds: what is there at once, maybe none."""
        reply = await self._run(
            self._scripts.pop, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES), delay_ms(timeout_s)
        )
        fields = iter(reply[1:])
        claims = [
            Claim(id.decode(), body, token, attempts, priority)
            for id, body, token, attempts, priority in zip(*[fields] * 5, strict=True)  # noqa: A001 (its name)
        ]
        return Popped(claims, _seconds(reply[0]))

    async def acknowledge(self, claims: Sequence[tuple[str, int]]) -> Sequence[bool]:
        """Remove claimed events, by id and token. False for a claim that is over: the event may be another's by now."""
        reply = await self._run(self._scripts.acknowledge, *(part for claim in claims for part in claim))
        return [bool(done) for done in reply]

    async def release(self, id: str, token: int, delay_s: float = 0.0) -> bool:  # noqa: A002
        """Give a claimed event back: it is due again after `delay_s`, or at once where it stood."""
        return bool(await self._run(self._scripts.release, id, token, delay_ms(delay_s)))

    async def extend(self, id: str, token: int, timeout_s: float) -> bool:  # noqa: A002
        """Let a claim end `timeout_s` from now."""
        return bool(await self._run(self._scripts.extend, id, token, delay_ms(timeout_s)))

    async def change_delay(self, id: str, delay_s: float) -> bool:  # noqa: A002
        """Let an event be due `delay_s` from now. False where it does not wait."""
        return bool(await self._run(self._scripts.change_delay, id, delay_ms(delay_s)))

    async def get(self, id: str) -> Entry | None:  # noqa: A002
        reply = await self._run(self._scripts.get, id)
        if not reply:
            return None
        body, state, score, attempts = reply[:4]
        at = float(score)
        return Entry(id, body, state.decode(), priority_of(at), due_of(at), attempts)

    async def remove(self, id: str) -> bool:  # noqa: A002
        """Remove an event, whatever its state. False where there is none."""
        return bool(await self._run(self._scripts.remove, id))

    async def size(self, held_from: int = 0) -> Size:
        """Of what is held, only that at or above an offset counts."""
        return Size(*await self._run(self._scripts.size, held_from))

    async def peek(self, limit: int) -> Sequence[Entry]:
        """What the next pop would take, in order."""
        fields = iter(await self._run(self._scripts.peek, min(limit, MAX_POP)))
        entries: list[Entry] = []
        for id, body, score in zip(*[fields] * 3, strict=True):  # noqa: A001
            at = float(score)
            entries.append(Entry(id.decode(), body, "waiting", priority_of(at), due_of(at), 0))
        return entries

    async def clear(self) -> None:
        """Remove everything. Claims are over."""
        await self._run(self._scripts.clear)

    async def bell(self, timeout_s: float) -> bool:
        """Whether something is pushed, or left by another, within `timeout_s`. Of those who wait, one is told."""
        return await self.server.bell(self.keys.bell, timeout_s)

    async def ring(self) -> None:
        """Tell one of those who wait."""
        await self._run(self._scripts.ring)

    # ---- the reader of the queue -----------------------------------------------------------------------------------

    async def open_reader(self) -> int:
        """Become the reader: the one before is refused from now on. Returns the reader's number."""
        return await self._run(self._scripts.open)

    async def bounds(self, floor: int = 0) -> tuple[int, int]:
        """Below the first everything is done; the second is above every position given out, and no position given out
        from now on is below it, nor below `floor`."""
        done, following = await self._run(self._scripts.bounds, floor)
        return done, following

    async def held(self, reader: int, start: int, limit: int, max_bytes: int) -> Held | None:
        """What is held at `start` and above, for a new reader: its predecessors took it. None: superseded."""
        reply = await self._run(self._scripts.held, reader, start, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES))
        return None if reply is None else Held(_pairs(reply))

    async def hold(self, reader: int, start: int, floor: int, limit: int, max_bytes: int) -> Held | None:
        """Take what is due, at offsets of at least `floor`, until it is finished. None: superseded.

        What is held at `start` and above was taken by a call whose answer got lost: it goes back before.
        """
        reply = await self._run(
            self._scripts.hold, reader, start, floor, min(limit, MAX_POP), min(max_bytes, MAX_POP_BYTES)
        )
        return None if reply is None else Held(_pairs(reply[1:]), _seconds(reply[0]))

    async def finish(self, reader: int, below: int, done: int) -> bool:
        """Remove what is held below `below`; everything in the queue below `done` is finished. False: superseded."""
        left: int | None = 1
        while left:
            left = await self._run(self._scripts.finish, reader, below, done, MAX_POP)
        return left is not None

    async def _run(self, script: Script, *args: str | bytes | float) -> Any:
        return await self.server.run(script, self.keys, *args)


def _seconds(ms: int) -> float:
    return BLOCK_S if ms < 0 else ms / 1000


def _pairs(reply: Sequence[Any]) -> Sequence[tuple[int, bytes]]:
    fields = iter(reply)
    return list(zip(fields, fields, strict=True))
