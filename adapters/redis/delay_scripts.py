"""Lua scripts for delayed batches in Redis. Each script is one atomic step and gets the keys of `DelayKeys`, in order.

| key | type | |
|---|---|---|
| `meta` | hash | `owner`, and `seq`, the number of the last batch |
| `next` | sorted set | queue → when the first of `due:QUEUE` is due, in µs; only queues without a release |
| `held` | sorted set | queue → when its holder's claim on the release ends, in µs |
| `releases` | hash | `QUEUE:producer`, `QUEUE:number` of the last release, `QUEUE:holder` |
| `body` | hash | id → the batch, as Python encodes it |
| `caller` | hash | id → producer and number of the call, if it has a sequence; until it is in a release |
| `calls`, `called` | hash, sorted set | producer → number of its last call; time of that call, in µs |
| `events` | hash | queue → number of its delayed events |
| `due:QUEUE`, `taken:QUEUE` | sorted set | id → due time, in µs: batches in no release; in the queue's release |
| `by:PRODUCER` | sorted set | `NUMBER QUEUE id` of each batch of the producer that is in no release |

An id is `SEQ EVENTS BYTES`, with zeros before SEQ: ids with one due time sort in the order in which they were stored.
Numbers of calls are texts of one length, so they compare as texts: they may be larger than Lua's exact integers.
"""

from __future__ import annotations

from typing import NamedTuple

from .scripts import MANY, SERVER_CLOCK, Script

AGAIN_PER_CLAIM = 1000
"""One claim returns at most this many batches of earlier releases, or one release. The next claim returns more."""

_PROLOGUE = """
local meta, first_due, held, releases, body, caller, calls, called, counts = unpack(KEYS, 1, 9)
local tag = string.sub(meta, 1, -5)
local MAX_AGAIN = %(again)d
%(clock)s
%(many)s

local function text(number)
  return string.format('%%.0f', number)
end

-- Whether the delays belong to this owner. The owner '' matches every other.
local function mine(owner)
  local of = redis.call('HGET', meta, 'owner')
  if not of and owner ~= '' then redis.call('HSET', meta, 'owner', owner) end
  return not of or owner == '' or of == owner
end

-- Events and bytes of a batch, and the beginning of its id.
local function parsed(id)
  local seq, events, bytes = string.match(id, '^(%%d+) (%%d+) (%%d+)$')
  return tonumber(events), tonumber(bytes), seq
end

local function count(queue, events)
  if redis.call('HINCRBY', counts, queue, text(events)) == 0 then redis.call('HDEL', counts, queue) end
end

-- Call this after the first entry of `due:QUEUE` may have changed, and after a release of the queue began or ended.
local function look_at(queue)
  local first = redis.call('ZRANGE', tag .. 'due:' .. queue, 0, 0, 'WITHSCORES')
  if first[1] and not redis.call('ZSCORE', held, queue) then
    redis.call('ZADD', first_due, first[2], queue)
  else
    redis.call('ZREM', first_due, queue)
  end
end

-- Removes the producer's batches of calls after `previous` that are in no release: those calls failed.
local function take_back(producer, previous)
  local by = tag .. 'by:' .. producer
  local failed = redis.call('ZRANGEBYLEX', by, '(' .. previous .. '~', '+')
  local ids, queues = {}, {}
  for i, each in ipairs(failed) do
    local queue, id = string.match(each, '^%%d+ (%%d+) (.*)$')
    ids[i], queues[queue] = id, true
    redis.call('ZREM', tag .. 'due:' .. queue, id)
    count(queue, -parsed(id))
  end
  many('ZREM', by, failed)
  many('HDEL', body, ids)
  many('HDEL', caller, ids)
  for queue in pairs(queues) do look_at(queue) end
end

-- The producers of these batches of one queue cannot take them back any more.
local function keep(queue, ids)
  local callers = many_of('HMGET', caller, ids)
  local known, by = {}, {}
  for i, id in ipairs(ids) do
    if callers[i] then
      local producer, number = string.match(callers[i], '^(%%S+) (%%d+)$')
      known[#known + 1] = id
      by[producer] = by[producer] or {}
      table.insert(by[producer], number .. ' ' .. queue .. ' ' .. id)
    end
  end
  many('HDEL', caller, known)
  for producer, theirs in pairs(by) do many('ZREM', tag .. 'by:' .. producer, theirs) end
end

-- No later call of the producer takes back its stored batches.
local function keep_for_good(producer)
  local by, ids = tag .. 'by:' .. producer, {}
  for i, each in ipairs(redis.call('ZRANGE', by, 0, -1)) do
    ids[i] = string.match(each, '^%%d+ %%d+ (.*)$')
  end
  many('HDEL', caller, ids)
  redis.call('DEL', by)
end

-- A server whose memory is full refuses a script that begins with a write that may need more; one that frees may go on.
local function may_take_memory()
  redis.call('HDEL', meta, '')
end
"""

# ARGV: owner, how long inactive producers are kept in us, then for each call: producer ("" for none), number, previous
# number, number of batches; and for each batch: queue, delay in us, events, bytes, body.
# Answers with 1, or with nothing if the delays belong to another owner.
_ADD = """
if not mine(ARGV[1]) then return false end
local at, bodies, callers, due, by = 3, {}, {}, {}, {}
local seq = tonumber(redis.call('HGET', meta, 'seq') or '0')
while at <= #ARGV do
  local producer, number, previous, batches = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  local last = producer ~= '' and redis.call('HGET', calls, producer) or ''
  if last ~= '' and tonumber(redis.call('ZSCORE', called, producer)) < now_us - ARGV[2] then
    keep_for_good(producer)
    last = ''
  end
  if producer == '' or last < number then
    if producer ~= '' then
      if last > previous then take_back(producer, previous) end
      redis.call('HSET', calls, producer, number)
      redis.call('ZADD', called, text(now_us), producer)
    end
    for i = at, at + 5 * batches - 1, 5 do
      local queue = ARGV[i]
      seq = seq + 1
      local id = string.format('%016.0f %s %s', seq, ARGV[i + 2], ARGV[i + 3])
      bodies[#bodies + 1], bodies[#bodies + 2] = id, ARGV[i + 4]
      local of = due[queue] or {events = 0}
      due[queue] = of
      of[#of + 1], of[#of + 2] = text(now_us + tonumber(ARGV[i + 1])), id
      of.events = of.events + tonumber(ARGV[i + 2])
      if producer ~= '' then
        callers[#callers + 1], callers[#callers + 2] = id, producer .. ' ' .. number
        by[producer] = by[producer] or {}
        table.insert(by[producer], '0')
        table.insert(by[producer], number .. ' ' .. queue .. ' ' .. id)
      end
    end
  end
  at = at + 5 * batches
end
redis.call('HSET', meta, 'seq', text(seq))
many('HSET', body, bodies)
many('HSET', caller, callers)
for producer, theirs in pairs(by) do many('ZADD', tag .. 'by:' .. producer, theirs) end
for queue, of in pairs(due) do
  many('ZADD', tag .. 'due:' .. queue, of)
  count(queue, of.events)
  look_at(queue)
end
return 1
"""

# ARGV: holder. Answers with us until there is something to claim, or -1 if there are no delayed batches.
_DUE_IN = """
local first = redis.call('ZRANGE', first_due, 0, 0, 'WITHSCORES')
local at = tonumber(first[2])
local slots = redis.call('ZRANGE', held, 0, -1, 'WITHSCORES')
for i = 1, #slots, 2 do
  local own = redis.call('HGET', releases, slots[i] .. ':holder') == ARGV[1]
  local free = own and now_us or tonumber(slots[i + 1])
  at = math.min(at or free, free)
end
return at and text(math.max(at - now_us, 0)) or '-1'
"""

# ARGV: owner, holder, duration of the claim in us, max batches, max bytes, prefix for the names of new producers.
# Answers with queue, producer, number and the list of bodies of each release, or with nothing if the delays belong to
# another owner.
_CLAIM = """
may_take_memory()
if not mine(ARGV[1]) then return false end
local holder, until_us, max_batches, max_bytes = ARGV[2], now_us + ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local answer = {}

local function hold(queue)
  local ids = redis.call('ZRANGE', tag .. 'taken:' .. queue, 0, -1)
  redis.call('ZADD', held, text(until_us), queue)
  redis.call('HSET', releases, queue .. ':holder', holder)
  local of = redis.call('HMGET', releases, queue .. ':producer', queue .. ':number')
  answer[#answer + 1] = {queue, of[1], of[2], many_of('HMGET', body, ids)}
end

-- Numbers are times, so they go on rising on a server that has lost its last releases. Under a repeated number the
-- queue would take new batches for the earlier ones, and would not store them.
local function release(queue)
  redis.call('HSETNX', releases, queue .. ':producer', ARGV[6] .. ' ' .. queue)
  local last = tonumber(redis.call('HGET', releases, queue .. ':number') or '0')
  redis.call('HSET', releases, queue .. ':number', text(math.max(last + 1, now_us)))
  keep(queue, redis.call('ZRANGE', tag .. 'taken:' .. queue, 0, -1))
  hold(queue)
  look_at(queue)
end

-- The release whose claim ends first comes first: releases that were tried recently come later.
local slots, batches = redis.call('ZRANGE', held, 0, -1, 'WITHSCORES'), 0
for i = 1, #slots, 2 do
  if redis.call('HGET', releases, slots[i] .. ':holder') == holder or tonumber(slots[i + 1]) <= now_us then
    batches = batches + redis.call('ZCARD', tag .. 'taken:' .. slots[i])
    if #answer > 0 and batches > MAX_AGAIN then break end
    hold(slots[i])
  end
end

-- New releases: begin with the queue whose first batch is due first, up to the due time of the next queue's first.
local total, left, queues, full = 0, max_batches, {}, false
while left > 0 and not full do
  local heads = redis.call('ZRANGEBYSCORE', first_due, '-inf', text(now_us), 'WITHSCORES', 'LIMIT', 0, 2)
  local queue = heads[1]
  if not queue then break end
  local due = tag .. 'due:' .. queue
  local found = redis.call('ZRANGEBYSCORE', due, '-inf', heads[4] or text(now_us), 'WITHSCORES', 'LIMIT', 0, left)
  local taken, ids = {}, {}
  for j = 1, #found, 2 do
    local _, bytes = parsed(found[j])
    full = total > 0 and total + bytes > max_bytes
    if full then break end
    total, left = total + bytes, left - 1
    taken[#taken + 1], taken[#taken + 2] = found[j + 1], found[j]
    ids[#ids + 1] = found[j]
  end
  many('ZREM', due, ids)
  many('ZADD', tag .. 'taken:' .. queue, taken)
  if #ids > 0 and not queues[queue] then
    queues[queue] = true
    queues[#queues + 1] = queue
  end
  look_at(queue)
end
for _, queue in ipairs(queues) do release(queue) end
return answer
"""

# ARGV: queue, number, queue, number ...
_RELEASED = """
may_take_memory()
for i = 1, #ARGV, 2 do
  local queue = ARGV[i]
  if redis.call('ZSCORE', held, queue) and redis.call('HGET', releases, queue .. ':number') == ARGV[i + 1] then
    local ids, events = redis.call('ZRANGE', tag .. 'taken:' .. queue, 0, -1), 0
    for _, id in ipairs(ids) do events = events + parsed(id) end
    many('HDEL', body, ids)
    redis.call('DEL', tag .. 'taken:' .. queue)
    redis.call('ZREM', held, queue)
    redis.call('HDEL', releases, queue .. ':holder')
    count(queue, -events)
    look_at(queue)
  end
end
return 1
"""

# Answers with queue, batches, events and us until the first is due, for each queue with delayed batches.
_WAITING = """
local answer, all = {}, redis.call('HGETALL', counts)
for i = 1, #all, 2 do
  local batches, at = 0, nil
  for _, where in ipairs({'due:', 'taken:'}) do
    local key = tag .. where .. all[i]
    batches = batches + redis.call('ZCARD', key)
    local first = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    if first then at = math.min(at or first, first) end
  end
  if at then answer[#answer + 1] = {all[i], batches, all[i + 1], text(at - now_us)} end
end
return answer
"""

# ARGV: how long inactive producers are kept in us, limit. Answers with the number of forgotten producers.
_FORGET = """
may_take_memory()
local old = redis.call('ZRANGEBYSCORE', called, '-inf', '(' .. text(now_us - ARGV[1]), 'LIMIT', 0, tonumber(ARGV[2]))
for _, producer in ipairs(old) do keep_for_good(producer) end
many('HDEL', calls, old)
many('ZREM', called, old)
return #old
"""

# ARGV: owner. Answers with 1, or with nothing if the delays belong to another owner.
_OWN = "return mine(ARGV[1]) and 1"


class DelayScripts(NamedTuple):
    own: Script
    add: Script
    due_in: Script
    claim: Script
    released: Script
    waiting: Script
    forget: Script

    @classmethod
    def with_clock(cls, clock: str = SERVER_CLOCK) -> DelayScripts:
        prologue = _PROLOGUE % {"clock": clock, "many": MANY, "again": AGAIN_PER_CLAIM}
        bodies = (_OWN, _ADD, _DUE_IN, _CLAIM, _RELEASED, _WAITING, _FORGET)
        return cls(*(Script.plain(prologue + body) for body in bodies))


DELAY_SCRIPTS = DelayScripts.with_clock()
