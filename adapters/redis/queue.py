"""A queue for consumers that compete for its events, over one shard or several. It offers claims, timeouts and
acknowledgements of single events. The adapter does not use it."""

from __future__ import annotations

import asyncio
import itertools
import uuid
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from ...streams.errors import InvalidArgument, StorageError
from .bell import ShardBell, wait_for_bell
from .keys import ShardKeys, check_id, check_queue
from .limits import REDIS_LIMITS, RedisLimits
from .options import RedisOptions
from .receiver import TURNS
from .scripts import SCRIPTS, RedisScripts
from .server import RedisConnection, ServerAway
from .shard import ClaimedEvent, PushedEvent, QueuedEvent, RedisShard, ShardSize
from .watch import watched


class TakenEvent(NamedTuple):
    """A claimed event and its shard."""

    claim: ClaimedEvent
    shard: RedisShard

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def body(self) -> bytes:
        return self.claim.body


class RedisQueue:
    """A queue that gives each event to one consumer, at least once. Any number of processes may use one queue.

    The id of an event, if it has one, decides its shard, so that an id is stored once; other events go to the shards in
    turn. `pop` looks into the shards in their order, so the shard of its own zone comes first, and into each at least
    every ninth time.
    """

    def __init__(self, shards: Sequence[RedisShard]) -> None:
        self.shards = list(shards)
        self._homes = sorted(range(len(self.shards)), key=lambda index: self.shards[index].name)
        self._turn = itertools.count()
        self._pusher = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._watches = watched(shards)
        self._passed_over = [0] * len(self.shards)
        self._bells = [ShardBell(shard) for shard in self.shards]
        self._locks = [asyncio.Lock() for _ in self.shards]

    @classmethod
    @asynccontextmanager
    async def open(
        cls, name: str, options: RedisOptions, *, scripts: RedisScripts = SCRIPTS, limits: RedisLimits = REDIS_LIMITS
    ) -> AsyncGenerator[RedisQueue]:
        """Open the queue `name` for the length of an `async with`."""
        chosen = options.servers()
        order = sorted(chosen, key=lambda shard: shard.zone != options.zone)
        servers = [RedisConnection(shard.url, cluster=shard.cluster, limits=limits) for shard in order]
        keys = [ShardKeys.of(options.prefix, check_queue(name), shard.name) for shard in order]
        shards = [
            RedisShard(server, key, name=shard.name, scripts=scripts)
            for server, key, shard in zip(servers, keys, order, strict=True)
        ]
        queue = cls(shards)
        try:
            yield queue
        finally:
            await queue.aclose()
            await asyncio.gather(*(server.aclose() for server in servers))

    async def aclose(self) -> None:
        """Stop waiting. The connections to the servers stay open."""
        await asyncio.gather(*(each.aclose() for each in (*self._bells, *self._watches)))

    # ---- into the queue --------------------------------------------------------------------------------------------

    async def push(
        self,
        body: bytes,
        *,
        id: str = "",  # noqa: A002 (the word of the field)
        delay_s: float = 0.0,
        priority: int = 0,
    ) -> None:
        """Store an event, due after `delay_s`. With an `id`, it replaces the event with that id."""
        await self.push_many([PushedEvent(body, id, delay_s, priority)])

    async def push_many(self, events: Sequence[PushedEvent]) -> None:
        """Store events. For each shard, all of its events are stored or none."""
        by_shard: dict[int, list[PushedEvent]] = {}
        for event in events:
            home = self._home(event.id) if event.id else next(self._turn) % len(self.shards)
            by_shard.setdefault(home, []).append(event)
        for home, part in by_shard.items():
            await self._push(home, part)

    async def ensure(self, body: bytes, *, id: str, delay_s: float = 0.0, priority: int = 0) -> bool:  # noqa: A002
        """Store an event unless one with its id is waiting or claimed. Return False if there is one."""
        if not id:
            raise InvalidArgument("ensure needs the id of the event: give one that is not empty")
        event = PushedEvent(body, id, delay_s, priority)
        return await self._push_to(self._home(id), [event], keep=True) != [None]

    async def _push(self, home: int, events: Sequence[PushedEvent]) -> None:
        """Push to that shard. If its server is away, events without an id go to another shard."""
        others = [*range(home + 1, len(self.shards)), *range(home)] if not any(event.id for event in events) else []
        for index in (home, *others):
            try:
                push = partial(self._push_to, index, events)
                await (self._watches[index].ask(push) if others else push())
            except ServerAway:
                if index == (others or [home])[-1]:
                    raise
            else:
                return

    async def _push_to(self, index: int, events: Sequence[PushedEvent], *, keep: bool = False) -> Sequence[int | None]:
        async with self._locks[index]:  # a shard takes the numbers of a pusher only in order
            return await self.shards[index].push(events, pusher=self._pusher, number=next(self._numbers), keep=keep)

    def _home(self, id: str) -> int:  # noqa: A002
        """Return the shard of an id: the same for all processes, in whatever order they list the shards."""
        return self._homes[zlib.crc32(check_id(id).encode()) % len(self.shards)]

    # ---- out of the queue ------------------------------------------------------------------------------------------

    async def pop(self, limit: int, *, timeout_s: float = 30.0, wait_s: float = 0.0) -> Sequence[TakenEvent]:
        """Claim up to `limit` of the due events for `timeout_s`. Wait for the first event, up to `wait_s`.

        Events that are not acknowledged within `timeout_s` return to the queue. Raises StorageError if no server
        answers.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            taken, idle_s = await self._pop(limit, timeout_s)
            if taken or (left := deadline - loop.time()) <= 0:
                return taken
            await wait_for_bell(self._bells, min(left, idle_s))

    async def _pop(self, limit: int, timeout_s: float) -> tuple[Sequence[TakenEvent], float]:
        """Claim events of the first shard that has some. Also return for how many seconds there will be none."""
        idle_s, errors = self.shards[0].server.limits.block_s, list[ServerAway]()
        for index in self._order():
            shard = self.shards[index]
            try:
                popped = await self._watches[index].ask(partial(shard.pop, limit, timeout_s))
            except ServerAway as error:
                errors.append(error)
                continue
            if popped.claims:
                self._passed_over = [0 if other == index else n + 1 for other, n in enumerate(self._passed_over)]
                return [TakenEvent(claim, shard) for claim in popped.claims], 0.0
            idle_s = min(idle_s, popped.idle_s)
        if len(errors) == len(self.shards):
            raise StorageError(str(errors[0]))
        return [], idle_s

    def _order(self) -> Sequence[int]:
        """Return the shards in their order, but first those that were passed over too often."""
        return sorted(range(len(self.shards)), key=lambda index: self._passed_over[index] < TURNS)

    async def acknowledge(self, *taken: TakenEvent) -> int:
        """Remove claimed events. Return how many of the claims still held; the events of the others may come again.
        If a server is away, raise its ServerAway after the other servers have answered."""
        by_shard: dict[int, list[tuple[str, int]]] = {}
        for one in taken:
            by_shard.setdefault(self._index_of(one), []).append((one.id, one.claim.token))
        calls = [self.shards[index].acknowledge(part) for index, part in by_shard.items()]
        held = 0
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            held += sum(answer)
        return held

    def _index_of(self, taken: TakenEvent) -> int:
        """Return the shard of an event, also if another object of this queue took it. Raises InvalidArgument for an
        event of another queue."""
        for index, shard in enumerate(self.shards):
            if shard.keys == taken.shard.keys:
                return index
        raise InvalidArgument(f"the event {taken.id!r} was taken from another queue: call this method of that queue")

    async def release(self, taken: TakenEvent, delay_s: float = 0.0) -> bool:
        """Give an event back, after `delay_s` or at once. Return False if the claim was over."""
        return await self.shards[self._index_of(taken)].release(taken.id, taken.claim.token, delay_s)

    async def extend(self, taken: TakenEvent, timeout_s: float) -> bool:
        """Let a claim end `timeout_s` from now. Return False if it was over."""
        return await self.shards[self._index_of(taken)].extend(taken.id, taken.claim.token, timeout_s)

    # ---- single events, and all of them ----------------------------------------------------------------------------

    async def change_delay(self, id: str, delay_s: float) -> bool:  # noqa: A002
        """Make an event due `delay_s` from now. Return False if it is not waiting."""
        return any([await shard.change_delay(id, delay_s) for shard in self.shards])

    async def get(self, id: str) -> QueuedEvent | None:  # noqa: A002
        found = [await shard.get(id) for shard in self.shards]
        return next(filter(None, found), None)

    async def remove(self, id: str) -> bool:  # noqa: A002
        """Remove an event, claimed or not. Return False if there is none."""
        return any([await shard.remove(id) for shard in self.shards])

    async def size(self) -> ShardSize:
        return ShardSize(*map(sum, zip(*[await shard.size() for shard in self.shards], strict=True)))

    async def peek(self, limit: int) -> Sequence[QueuedEvent]:
        """Return the events that the next pop would take, in order, from the first shard that has some."""
        for index in self._order():
            if entries := await self.shards[index].peek(limit):
                return entries
        return []

    async def clear(self) -> None:
        """Remove everything. Claims are over."""
        for shard in self.shards:
            await shard.clear()
