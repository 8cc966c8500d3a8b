"""Plain redis-py: queues written by hand.

The recipe is a sorted set by due time, a hash of bodies, and a sorted set of claims that are not acknowledged, by
when it returns. A claim is one Lua script; a push and an acknowledgement are one transaction. It delivers at least
once, like `RedisQueue`, but has no priorities, accepts the acknowledgement of a claim that is over, stores a push that
is sent again twice, and asks every 10 ms whether something is due.

The list is `LMOVE` into a list of taken bodies, and `LREM`: no delays, nothing returns by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from .kinds import DelayKind, Handle, Place, Push, running

WAITING, BODIES, TAKEN, READY = "waiting", "bodies", "taken", "ready"
POLL_S = 0.01
TIMEOUT_S = 30.0

CLAIM = """
local over = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, 100)
for _, id in ipairs(over) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZADD', KEYS[1], ARGV[1], id)
end
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
if #ids == 0 then return {{}, {}} end
redis.call('ZREM', KEYS[1], unpack(ids))
local ends = {}
for _, id in ipairs(ids) do
  ends[#ends + 1] = ARGV[2]
  ends[#ends + 1] = id
end
redis.call('ZADD', KEYS[2], unpack(ends))
return {ids, redis.call('HMGET', KEYS[3], unpack(ids))}
"""


class _Plain(DelayKind):
    requires = ("redis", "hiredis")
    blocking: ClassVar[bool] = False

    @asynccontextmanager
    async def connected(self, place: Place) -> AsyncGenerator[Any]:
        from redis import Redis  # noqa: PLC0415 (only in the process that uses it)
        from redis.asyncio import Redis as AsyncRedis  # noqa: PLC0415

        client: Any = Redis if self.blocking else AsyncRedis
        redis = client.from_url(place.url, protocol=2)
        try:
            await _answer(redis.ping())
            yield redis
        finally:
            await _answer(redis.close() if self.blocking else redis.aclose())


class Recipe(_Plain):
    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        async with self.connected(place) as redis:

            async def push(payloads: Sequence[bytes], delays_s: Sequence[float]) -> None:
                now = time.time()
                ids = [uuid.uuid4().hex for _ in payloads]
                pipeline = redis.pipeline(transaction=True)
                pipeline.hset(BODIES, mapping=dict(zip(ids, payloads, strict=True)))
                pipeline.zadd(
                    WAITING,
                    {id: now + s for id, s in zip(ids, delays_s or [0.0] * len(ids), strict=True)},  # noqa: A001
                )
                await _answer(pipeline.execute())

            yield push

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        async with self.connected(place) as redis, running(_take_due(redis, batch, handle)):
            yield


class BlockingRecipe(Recipe):
    """One connection is enough: nothing else runs while it waits for the answer."""

    blocking = True
    connections = 1


async def _take_due(redis: Any, batch: int, handle: Handle) -> None:
    claim = redis.register_script(CLAIM)
    while True:
        now = time.time()
        ids, bodies = await _answer(claim(keys=[WAITING, TAKEN, BODIES], args=[now, now + TIMEOUT_S, batch]))
        if not ids:
            await asyncio.sleep(POLL_S)
            continue
        handle(bodies)
        pipeline = redis.pipeline(transaction=True)
        pipeline.zrem(TAKEN, *ids)
        pipeline.hdel(BODIES, *ids)
        await _answer(pipeline.execute())
        await asyncio.sleep(0)  # the blocking client blocks the loop


class Lists(_Plain):
    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        async with self.connected(place) as redis:
            yield lambda payloads, _: redis.lpush(READY, *payloads)

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        async with self.connected(place) as redis, running(_take_first(redis, batch, handle)):
            yield


async def _take_first(redis: Any, batch: int, handle: Handle) -> None:
    while True:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(batch):
            pipeline.lmove(READY, TAKEN, "RIGHT", "LEFT")
        bodies = [body for body in await pipeline.execute() if body is not None]
        if not bodies:
            await asyncio.sleep(POLL_S)
            continue
        handle(bodies)
        pipeline = redis.pipeline(transaction=False)
        for body in bodies:
            pipeline.lrem(TAKEN, -1, body)
        await pipeline.execute()


async def _answer(reply: Any) -> Any:
    """The asyncio client's reply is to be waited for, the blocking one's is here."""
    return await reply if inspect.isawaitable(reply) else reply
