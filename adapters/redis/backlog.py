"""How much of a shard is not done, in bounded time: what is due, and what is not due yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..seam import Backlog
from .scripts import SERVER_CLOCK, Script
from .shard import RedisShard

COUNTED = 100
"""Of so many batches of a shard the events are counted, those that are due and the others apart."""
COUNTED_BYTES = 1 << 20
"""No more are counted once so much was looked at."""

# ARGV: an offset, how many batches are counted, after how many bytes that ends. Answers with the batches that are due
# and not taken, those claimed, those held at or above the offset, one behind the last held, when the first of these is
# due (-1: none is known), how many were counted, and their events; then of what is not due: batches, when the first is
# due, counted, events.
_BACKLOG = """
local function tally()
  return {batches = 0, first = nil, counted = 0, events = 0, bytes = 0}
end

local function first_at(of, due)
  of.first = math.min(of.first or due, due)
end

-- One that is damaged counts as one event: whoever reads it says so.
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
SCRIPT = Script.of(_BACKLOG, SERVER_CLOCK)


class Tally(NamedTuple):
    """What a shard has of one kind."""

    batches: int
    first_ms: int
    """When the first is due, in ms since 1970 by the server's clock; -1 where that is not known."""
    counted: int
    events: int
    """Of the batches that were counted."""


class Unfinished(NamedTuple):
    """What a shard has that is not done."""

    untaken: int
    """Batches that are due, and that the queue's reader has not taken yet."""
    end: int
    """One behind the last offset that was given to a batch."""
    due: Tally
    """All that is due, the untaken ones as well."""
    later: Tally


async def unfinished(shard: RedisShard, offset: int, counted: int = COUNTED) -> Unfinished:
    """Of what the reader has taken, that at or above an offset. Raises ServerAway."""
    reply = await shard.server.run(SCRIPT, shard.keys, offset, counted, COUNTED_BYTES)
    ready, claimed, held, end = reply[:4]
    return Unfinished(ready + claimed, end, Tally(ready + claimed + held, *reply[4:7]), Tally(*reply[7:]))


def backlog_of(shards: Sequence[Unfinished]) -> Backlog:
    """Of a queue, from what its shards have."""
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


def due_end_of(shards: Sequence[Unfinished]) -> int | None:
    """As the seam's `due_end` says."""
    return None if any(shard.untaken for shard in shards) else max(shard.end for shard in shards)


def _sum(tallies: Sequence[Tally]) -> Tally:
    known = [tally.first_ms for tally in tallies if tally.first_ms >= 0]
    return Tally(
        sum(tally.batches for tally in tallies),
        min(known, default=-1),
        sum(tally.counted for tally in tallies),
        sum(map(_estimated, tallies)),
    )


def _estimated(tally: Tally) -> int:
    """The events of all batches, as many in each as in those that were counted."""
    return round(tally.events * tally.batches / tally.counted) if tally.counted else tally.batches


def _us(tally: Tally) -> int | None:
    return None if tally.first_ms < 0 else tally.first_ms * 1000
