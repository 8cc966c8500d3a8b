"""Counts the unfinished batches of a shard in bounded time: those that are due, and those that are not due yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..seam import Backlog
from .scripts import SERVER_CLOCK, RedisScript
from .shard import RedisShard

COUNTED = 100
"""Events are counted in at most this many batches of a shard: once for batches that are due, once for the others."""
COUNTED_BYTES = 1 << 20
"""Counting ends after this many bytes of batches."""

# ARGV: an offset, the maximum of batches to count, the maximum of bytes to count.
# Answers with the number of batches that are due and not taken, claimed, and held at or above the offset; one behind
# the last held offset; of all these, when the first is due (-1: not known), how many were counted, and their events.
# Then of the batches that are not due: their number, when the first is due, how many were counted, and their events.
_BACKLOG = """
local function tally()
  return {batches = 0, first = nil, counted = 0, events = 0, bytes = 0}
end

local function first_at(of, due)
  of.first = math.min(of.first or due, due)
end

-- A damaged batch counts as one event. Its reader reports the damage.
local function count(of, ids)
  for _, id in ipairs(ids) do
    if of.bytes >= tonumber(ARGV[3]) then return end
    local bytes = redis.call('HGET', body, id) or ''
    of.counted, of.bytes = of.counted + 1, of.bytes + #bytes
    of.events = of.events + (#bytes < 4 and 1 or struct.unpack('<I4', bytes))
  end
end

local function left_to_count(of)
  return math.max(tonumber(ARGV[2]) - of.counted, 0)
end

-- A part of a band of `waiting`.
local function add(of, from, to, base)
  local first = redis.call('ZRANGEBYSCORE', waiting, from, to, 'WITHSCORES', 'LIMIT', 0, 1)
  if not first[1] then return end
  first_at(of, tonumber(first[2]) - base)
  of.batches = of.batches + redis.call('ZCOUNT', waiting, from, to)
  count(of, redis.call('ZRANGEBYSCORE', waiting, from, to, 'LIMIT', 0, left_to_count(of)))
end

local due, later = tally(), tally()
local taken = redis.call('ZRANGEBYSCORE', held, ARGV[1], '+inf', 'LIMIT', 0, left_to_count(due))
for _, id in ipairs(taken) do
  local _, _, score = leased(id)
  if score then first_at(due, score % BAND) end
end
count(due, taken)
local from = 0
while true do
  local score = first_from(from)
  if not score then break end
  local base = math.floor(score / BAND) * BAND
  local until_now = string.format('%.0f', base + now)
  add(due, string.format('%.0f', base), until_now, base)
  add(later, '(' .. until_now, string.format('(%.0f', base + BAND), base)
  from = base + BAND
end
local last = redis.call('ZRANGE', held, -1, -1, 'WITHSCORES')
return {due.batches, redis.call('ZCARD', claimed), redis.call('ZCOUNT', held, ARGV[1], '+inf'),
        last[1] and tonumber(last[2]) + 1 or 0, due.first or -1, due.counted, due.events,
        later.batches, later.first or -1, later.counted, later.events}
"""
SCRIPT = RedisScript.of(_BACKLOG, SERVER_CLOCK)


class BatchCount(NamedTuple):
    """The batches of a shard that are due, or those that are not."""

    batches: int
    first_ms: int
    """When the first is due, in ms since 1970 by the server's clock; -1 if that is not known."""
    counted: int
    events: int
    """The events of the counted batches."""


class UnfinishedBatches(NamedTuple):
    """The unfinished batches of a shard."""

    untaken: int
    """Batches that are due and that the queue's reader has not taken yet."""
    end: int
    """One behind the last offset that was assigned to a batch."""
    due: BatchCount
    """All batches that are due, taken or not."""
    later: BatchCount


async def unfinished(shard: RedisShard, offset: int, counted: int = COUNTED) -> UnfinishedBatches:
    """Count the unfinished batches. Batches that the reader has taken count from `offset` on. Raises ServerAway."""
    reply = await shard.server.run(SCRIPT, shard.keys, offset, counted, COUNTED_BYTES)
    ready, claimed, held, end = reply[:4]
    return UnfinishedBatches(
        ready + claimed, end, BatchCount(ready + claimed + held, *reply[4:7]), BatchCount(*reply[7:])
    )


def backlog_of(shards: Sequence[UnfinishedBatches]) -> Backlog:
    """Return the backlog of a queue from the counts of its shards."""
    due, later = _sum([shard.due for shard in shards]), _sum([shard.later for shard in shards])
    return Backlog(
        due.batches,
        due.events,
        estimated=due.counted < due.batches,
        since_us=_us(due),
        later=later.batches,
        later_events=later.events,
        later_us=_us(later),
    )


def due_end_of(shards: Sequence[UnfinishedBatches]) -> int | None:
    """See the seam's `due_end`."""
    return None if any(shard.untaken for shard in shards) else max(shard.end for shard in shards)


def _sum(tallies: Sequence[BatchCount]) -> BatchCount:
    known = [tally.first_ms for tally in tallies if tally.first_ms >= 0]
    return BatchCount(
        sum(tally.batches for tally in tallies),
        min(known, default=-1),
        sum(tally.counted for tally in tallies),
        sum(map(_estimated, tallies)),
    )


def _estimated(tally: BatchCount) -> int:
    """Estimate the events of all batches from the mean of the counted ones."""
    return round(tally.events * tally.batches / tally.counted) if tally.counted else tally.batches


def _us(tally: BatchCount) -> int | None:
    return None if tally.first_ms < 0 else tally.first_ms * 1000
