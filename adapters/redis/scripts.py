"""Lua scripts that change a shard. Each script is one atomic step, so a crash never leaves two keys that disagree.

Every script gets the keys of `ShardKeys`, in order, and its arguments. The time is the server's (`TIME`).
Scripts convert numbers from Redis before they compare them, because Lua would compare texts letter by letter.
The numbers of producers stay texts, because they have up to 64 bits, more than Lua's numbers: `above` compares them.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

SERVER_CLOCK = "local time = redis.call('TIME') local now_us = time[1] * 1000000 + time[2]"
"""The clock of every shard."""

RETURNS_PER_STEP = 200
"""The maximum of expired claims that one pop returns to the queue."""

_PROLOGUE = """
local meta, waiting, body, claimed, held, lease, bell = unpack(KEYS, 1, 7)
local BAND = 70368744177664
local MAX_RETURNS = %(returns)d
%(clock)s
local now = math.floor(now_us / 1000)

-- The time `ms` from now, never earlier: a part of a millisecond counts as a whole one.
local function after(ms)
  return ms == 0 and now or math.ceil(now_us / 1000) + ms
end

-- A new position: above all earlier ones, and at least the time in microseconds, so that positions rise after a loss.
-- `positions_given` stores the last one.
local counter
local function position(floor)
  counter = counter or tonumber(redis.call('HGET', meta, 'counter') or '-1')
  counter = math.max(counter + 1, now_us, floor or 0)
  return counter
end

local function positions_given()
  if counter then redis.call('HSET', meta, 'counter', string.format('%%.0f', counter)) end
end

-- Whether a whole number is greater than another. Both are decimals without leading zeros, of any length.
local function above(one, other)
  if #one ~= #other then return #one > #other end
  return one > other
end

-- One command for many arguments, in pieces that fit Lua's stack.
local function many(command, key, args)
  for i = 1, #args, 2000 do redis.call(command, key, unpack(args, i, math.min(i + 1999, #args))) end
end

local function many_of(command, key, args)
  local answer = {}
  for i = 1, #args, 2000 do
    for _, each in ipairs({redis.call(command, key, unpack(args, i, math.min(i + 1999, #args)))}) do
      for j = 1, #each do answer[i + j - 1] = each[j] end
    end
  end
  return answer
end

-- A new number of `meta`, above all earlier ones, also above lost ones: no two claims or readers have the same number.
local function next_number(name)
  local last = tonumber(redis.call('HGET', meta, name) or '0')
  local text = string.format('%%.0f', math.max(last + 1, now_us))
  redis.call('HSET', meta, name, text)
  return text
end

local function silent()
  return redis.call('LLEN', bell) == 0
end

local function ring()
  if silent() then redis.call('RPUSH', bell, '1') end
end

local function parsed(record)
  if not record then return nil end
  local token, attempts, score = string.match(record, '(%%d+) (%%d+) (%%d+)')
  return tonumber(token), tonumber(attempts), tonumber(score)
end

local function leased(id)
  return parsed(redis.call('HGET', lease, id))
end

local function forget(id)
  local found = redis.call('HDEL', body, id) + redis.call('ZREM', waiting, id)
  redis.call('ZREM', claimed, id)
  redis.call('ZREM', held, id)
  redis.call('HDEL', lease, id)
  return math.min(found, 1)
end

-- Ends the script before it has changed anything that matters. `RedisConnection` makes a message of the error.
local function damaged(id, what)
  local hex = string.gsub(id, '.', function(each) return string.format('%%02x', string.byte(each)) end)
  error('DAMAGED <' .. hex .. '> <' .. what .. '>', 0)
end

local function bytes_of(id)
  return redis.call('HGET', body, id) or damaged(id, 'has no bytes')
end

-- Removes these events, which are in the sorted set `from`.
local function forget_all(from, ids)
  many('HDEL', body, ids)
  many('HDEL', lease, ids)
  many('ZREM', from, ids)
end

-- Returns a taken event to its former place: priority, place and attempts stay.
local function give_back(from, id)
  local _, _, score = leased(id)
  if not score then damaged(id, 'has no lease') end
  redis.call('ZREM', from, id)
  redis.call('ZADD', waiting, score, id)
end

local function return_due()
  local over = redis.call('ZRANGEBYSCORE', claimed, '-inf', now, 'LIMIT', 0, MAX_RETURNS)
  for _, id in ipairs(over) do give_back(claimed, id) end
end

-- The first entry at or above a score, whatever its band.
local function first_from(score)
  local found = redis.call('ZRANGEBYSCORE', waiting, string.format('%%.0f', score), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return found[1] and tonumber(found[2])
end

-- Calls visit(id, score) for the due events, highest priority first, until it returns true or `limit` were visited.
-- Returns whether all due events were visited, and when the next one is due.
-- Skips bands without entries, so this costs two searches for each priority in use.
local function each_due(limit, visit)
  local count, next_due, from = 0, nil, 0
  while true do
    local score = first_from(from)
    if not score then return true, next_due end
    local base = math.floor(score / BAND) * BAND
    local due = score - base
    if due > now then
      next_due = math.min(next_due or due, due)
    else
      local until_now = string.format('%%.0f', base + now)
      local found = redis.call('ZRANGEBYSCORE', waiting, string.format('%%.0f', base), until_now,
                               'WITHSCORES', 'LIMIT', 0, limit - count)
      for i = 1, #found, 2 do
        if count >= limit then return false end
        count = count + 1
        if visit(found[i], tonumber(found[i + 1])) then return false end
      end
      if count >= limit then return false end
      local later = redis.call('ZRANGEBYSCORE', waiting, '(' .. until_now,
                               string.format('(%%.0f', base + BAND), 'WITHSCORES', 'LIMIT', 0, 1)
      if later[1] then
        local at = tonumber(later[2]) - base
        next_due = math.min(next_due or at, at)
      end
    end
    from = base + BAND
  end
end

-- Takes due entries, at least one, into the sorted set `into` until a limit is reached. `answer` returns the number of
-- events in an entry.
local function take(into, limit, max_bytes, answer, score_in)
  local removed, added, leases, size, events = {}, {}, {}, 0, 0
  local token = next_number('token')
  local ended, next_due = each_due(limit, function(id, score)
    local bytes = bytes_of(id)
    local _, attempts = leased(id)
    attempts = (attempts or 0) + 1
    local at = score_in()
    removed[#removed + 1] = id
    added[#added + 1] = string.format('%%.0f', at)
    added[#added + 1] = id
    leases[#leases + 1] = id
    leases[#leases + 1] = string.format('%%s %%d %%.0f', token, attempts, score)
    events = events + answer(id, bytes, at, token, attempts, score)
    size = size + #bytes
    return size >= max_bytes or events >= limit
  end)
  many('ZREM', waiting, removed)
  many('ZADD', into, added)
  many('HSET', lease, leases)
  positions_given()
  return #removed, ended, next_due
end

-- For how many ms there will be no due event; -1: not known. The bell wakes a waiting process before that.
local function idle_for(next_due)
  local first = redis.call('ZRANGE', claimed, 0, 0, 'WITHSCORES')
  if first[1] then
    local ends = tonumber(first[2])
    next_due = math.min(next_due or ends, ends)
  end
  redis.call('DEL', bell)
  if not next_due then return -1 end
  return math.max(next_due - now, 0)
end

-- The former score of a claimed event, or nil if its claim under this token is over.
local function claim_of(id, token)
  local current, attempts, score = leased(id)
  if current ~= tonumber(token) or not redis.call('ZSCORE', claimed, id) then return nil end
  return score, attempts
end

-- Whether another reader has opened the queue since. If the server has lost this reader's number, stores it again.
local function superseded(reader)
  local current = tonumber(redis.call('HGET', meta, 'reader') or '0')
  if current < tonumber(reader) then
    redis.call('HDEL', meta, '')
    redis.call('HSET', meta, 'reader', reader)
  end
  return current > tonumber(reader)
end

-- A server whose memory is full refuses a script that begins with a write that may need more; one that frees may go on,
-- so that a full queue can be emptied.
local function may_take_memory()
  redis.call('HDEL', meta, '')
end

-- The number of events that the adapter has put into these bytes.
local function events_in(bytes, id)
  if #bytes < 4 then damaged(id or '', 'is no batch of events') end
  return struct.unpack('<I4', bytes)
end
"""

# ARGV: number of this push, how long it is remembered in s, 1 to keep stored events, then for each event: id ("" to
# assign one), delay in ms, priority, bytes. KEYS[8]: the key with this pusher's last number. Answers with a position
# for each event, -1 if a stored one is kept; a repeated push has the same answer. A full server refuses the first
# write. Only assigned ids are "@" and a number.
_PUSH = """
local number, keep = ARGV[1], ARGV[3] == '1'
local last = redis.call('HGETALL', KEYS[8])
if last[1] == number then
  redis.call('EXPIRE', KEYS[8], ARGV[2])
  return cjson.decode(last[2])
end
if last[1] and above(last[1], number) then return {} end
redis.call('ZCARD', waiting)  -- a key of another type fails here, and below in reads, before anything is changed
local quiet = silent()
local answer, texts, bodies, scores, replaced, seen = {}, {}, {}, {}, {}, {}
for i = 4, #ARGV, 4 do
  local id, delay, priority = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local at = -1
  if id == '' or not keep or not (seen[id] or redis.call('HEXISTS', body, id) == 1) then
    at = position()
    if id == '' then id = string.format('@%016.0f', at) else replaced[#replaced + 1] = id end
    seen[id] = true
    bodies[#bodies + 1], bodies[#bodies + 2] = id, ARGV[i + 3]
    scores[#scores + 1], scores[#scores + 2] = string.format('%.0f', (99 - priority) * BAND + after(delay)), id
  end
  answer[#answer + 1] = at
  texts[#texts + 1] = string.format('%.0f', at)
end
many('HSET', body, bodies)
many('ZADD', waiting, scores)
many('ZREM', claimed, replaced)
many('ZREM', held, replaced)
many('HDEL', lease, replaced)
positions_given()
redis.call('DEL', KEYS[8])
redis.call('HSET', KEYS[8], number, '[' .. table.concat(texts, ',') .. ']')
redis.call('EXPIRE', KEYS[8], ARGV[2])
if quiet then redis.call('RPUSH', bell, '1') end
return answer
"""

# ARGV: number of a push, how long it is remembered from now on in s. KEYS[8] as above.
_SETTLE = "if redis.call('HEXISTS', KEYS[8], ARGV[1]) == 1 then redis.call('EXPIRE', KEYS[8], ARGV[2]) end"

# ARGV: limit, max bytes, duration of the claims in ms. Answers with ms until the next try is useful, then for each
# event: id, bytes, token, attempts, priority.
_POP = """
may_take_memory()
return_due()
local answer, ends = {0}, after(tonumber(ARGV[3]))
local function add(id, bytes, _, token, attempts, score)
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3], answer[n + 4] = id, bytes, tonumber(token), attempts
  answer[n + 5] = 99 - math.floor(score / BAND)
  return 1
end
local limit, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local taken, ended, next_due = take(claimed, limit, max_bytes, add, function() return ends end)
if not ended then ring() end
if taken == 0 then answer[1] = idle_for(next_due) end
return answer
"""

# ARGV: id, token, id, token ... Answers with 1 for each claim that still held.
_ACKNOWLEDGE = """
local ids = {}
for i = 1, #ARGV, 2 do ids[#ids + 1] = ARGV[i] end
local leases, ends = many_of('HMGET', lease, ids), many_of('ZMSCORE', claimed, ids)
local answer, done = {}, {}
for i, id in ipairs(ids) do
  local token = parsed(leases[i])
  local holds = ends[i] and token == tonumber(ARGV[2 * i])
  answer[i] = holds and 1 or 0
  if holds then done[#done + 1] = id end
end
forget_all(claimed, done)
return answer
"""

# ARGV: id, token, delay in ms. Answers with 1 if the claim still held.
_RELEASE = """
may_take_memory()
local score = claim_of(ARGV[1], ARGV[2])
if not score then return 0 end
local delay = tonumber(ARGV[3])
if delay > 0 then score = math.floor(score / BAND) * BAND + after(delay) end
redis.call('ZREM', claimed, ARGV[1])
redis.call('ZADD', waiting, string.format('%.0f', score), ARGV[1])
ring()
return 1
"""

# ARGV: id, token, ms from now. Answers with 1 if the claim still held.
_EXTEND = """
may_take_memory()
if not claim_of(ARGV[1], ARGV[2]) then return 0 end
redis.call('ZADD', claimed, string.format('%.0f', after(tonumber(ARGV[3]))), ARGV[1])
return 1
"""

# ARGV: id, delay in ms from now. Answers with 1 if the event was waiting.
_CHANGE_DELAY = """
may_take_memory()
local score = tonumber(redis.call('ZSCORE', waiting, ARGV[1]) or 'nan')
if score ~= score then return 0 end
local due = after(tonumber(ARGV[2]))
redis.call('ZADD', waiting, string.format('%.0f', math.floor(score / BAND) * BAND + due), ARGV[1])
ring()
return 1
"""

# ARGV: id. Answers with nothing, or with bytes, state, score, attempts, and the end of its claim or its offset.
_GET = """
local bytes = redis.call('HGET', body, ARGV[1])
if not bytes then return {} end
local _, attempts, score = leased(ARGV[1])
for _, each in ipairs({{'waiting', waiting}, {'claimed', claimed}, {'held', held}}) do
  local at = redis.call('ZSCORE', each[2], ARGV[1])
  if at then
    if each[1] == 'waiting' then score = tonumber(at) end
    return {bytes, each[1], string.format('%.0f', score), attempts or 0, at}
  end
end
return {}
"""

# ARGV: id. Answers with 1 if there was an event, in any state.
_REMOVE = "return forget(ARGV[1])"

# ARGV: an offset. Answers with the number of ready, delayed and claimed entries, and of those held at or above it.
_SIZE = """
local ready, from = 0, 0
while true do
  local score = first_from(from)
  if not score then break end
  local base = math.floor(score / BAND) * BAND
  ready = ready + redis.call('ZCOUNT', waiting, string.format('%.0f', base), string.format('%.0f', base + now))
  from = base + BAND
end
local delayed = redis.call('ZCARD', waiting) - ready
return {ready, delayed, redis.call('ZCARD', claimed), redis.call('ZCOUNT', held, ARGV[1], '+inf')}
"""

# ARGV: limit. Answers with id, bytes, score of each event that the next pop would take.
_PEEK = """
local answer = {}
each_due(tonumber(ARGV[1]), function(id, score)
  answer[#answer + 1] = id
  answer[#answer + 1] = bytes_of(id)
  answer[#answer + 1] = string.format('%.0f', score)
end)
return answer
"""

# The counters stay, so that no position or token is assigned twice.
_CLEAR = "return redis.call('UNLINK', waiting, body, claimed, held, lease, bell)"

# Wakes one waiting process.
_RING = "ring()"

# Opens a new reader. Answers with its number.
_OPEN = "may_take_memory() return tonumber(next_number('reader'))"

# ARGV: a lower bound for later positions. Answers with the offset below which everything is finished, and with the
# lowest possible next position.
_BOUNDS = """
may_take_memory()
local following = tonumber(redis.call('HGET', meta, 'counter') or '-1') + 1
if following < tonumber(ARGV[1]) then
  following = tonumber(ARGV[1])
  redis.call('HSET', meta, 'counter', string.format('%.0f', following - 1))
end
return {tonumber(redis.call('HGET', meta, 'done') or '0'), following}
"""

# ARGV: reader, from, limit, max bytes. Answers with offset and bytes of each event that earlier readers left, in order.
_HELD = """
if superseded(ARGV[1]) then return false end
local found = redis.call('ZRANGEBYSCORE', held, ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[3]))
local answer, size, events = {}, 0, 0
for i = 1, #found, 2 do
  local bytes = bytes_of(found[i])
  answer[#answer + 1] = tonumber(found[i + 1])
  answer[#answer + 1] = bytes
  size, events = size + #bytes, events + events_in(bytes, found[i])
  if size >= tonumber(ARGV[4]) or events >= tonumber(ARGV[3]) then break end
end
return answer
"""

# ARGV: reader, from, floor, limit, max bytes. Gives back the events held at or above `from`: they were taken by a call
# whose answer was lost. Then takes due events, at offsets of at least `floor`. Answers with ms until the next try is
# useful, then offset and bytes of each event.
_HOLD = """
if superseded(ARGV[1]) then return false end
may_take_memory()
return_due()
local unseen = redis.call('ZRANGEBYSCORE', held, ARGV[2], '+inf', 'LIMIT', 0, MAX_RETURNS)
for _, id in ipairs(unseen) do give_back(held, id) end
if #unseen == MAX_RETURNS then return {0} end
local answer, floor = {0}, tonumber(ARGV[3])
local taken, ended, next_due = take(held, tonumber(ARGV[4]), tonumber(ARGV[5]), function(id, bytes, at)
  answer[#answer + 1] = at
  answer[#answer + 1] = bytes
  return events_in(bytes, id)
end, function() return position(floor) end)
if not ended then ring() end
if taken == 0 then answer[1] = idle_for(next_due) end
return answer
"""

# ARGV: reader, below, the offset below which everything is finished, limit. Answers with how many are left to remove.
_FINISH = """
if superseded(ARGV[1]) then return false end
may_take_memory()
local below = '(' .. ARGV[2]
forget_all(held, redis.call('ZRANGEBYSCORE', held, '-inf', below, 'LIMIT', 0, tonumber(ARGV[4])))
local left = redis.call('ZCOUNT', held, '-inf', below)
if left == 0 and tonumber(ARGV[3]) > tonumber(redis.call('HGET', meta, 'done') or '0') then
  redis.call('HSET', meta, 'done', ARGV[3])
end
return left
"""

# ARGV: an offset. Answers with the id of the event held at it, if there is one.
_HELD_AT = "return redis.call('ZRANGEBYSCORE', held, ARGV[1], ARGV[1], 'LIMIT', 0, 1)"


# KEYS[1]: a producer's ledger. ARGV: how long it is kept in s. Answers with number and positions of the last call.
_LEDGER = "redis.call('EXPIRE', KEYS[1], ARGV[1]) return redis.call('HMGET', KEYS[1], 'number', 'positions')"

# ARGV: number, positions, how long it is kept in s.
_RECORD = """
if above(ARGV[1], redis.call('HGET', KEYS[1], 'number') or '0') then
  redis.call('HSET', KEYS[1], 'number', ARGV[1], 'positions', ARGV[2])
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class RedisScript(NamedTuple):
    text: str
    sha: str

    @classmethod
    def of(cls, body: str, clock: str) -> RedisScript:
        return cls.plain(_PROLOGUE % {"clock": clock, "returns": RETURNS_PER_STEP} + body)

    @classmethod
    def plain(cls, text: str) -> RedisScript:
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def __repr__(self) -> str:
        return f"Script({self.sha})"


class RedisScripts(NamedTuple):
    push: RedisScript
    settle: RedisScript
    pop: RedisScript
    acknowledge: RedisScript
    release: RedisScript
    extend: RedisScript
    change_delay: RedisScript
    get: RedisScript
    remove: RedisScript
    size: RedisScript
    peek: RedisScript
    clear: RedisScript
    ring: RedisScript
    open: RedisScript
    bounds: RedisScript
    held: RedisScript
    hold: RedisScript
    finish: RedisScript
    held_at: RedisScript
    ledger: RedisScript
    record: RedisScript

    def __repr__(self) -> str:
        """Short, because help texts show it as the default of an argument."""
        return f"<{len(self)} scripts>"

    @classmethod
    def with_clock(cls, clock: str = SERVER_CLOCK) -> RedisScripts:
        bodies = (
            _PUSH, _SETTLE, _POP, _ACKNOWLEDGE, _RELEASE, _EXTEND, _CHANGE_DELAY, _GET, _REMOVE, _SIZE, _PEEK, _CLEAR,
            _RING, _OPEN, _BOUNDS, _HELD, _HOLD, _FINISH, _HELD_AT, _LEDGER, _RECORD,
        )  # fmt: skip
        return cls(*(RedisScript.of(body, clock) for body in bodies))


SCRIPTS = RedisScripts.with_clock()

# ARGV: owner ("" matches every owner), number of queues. Answers with the stored owner and number if they differ, else
# with nothing.
OWN = RedisScript.plain("""
local noted = redis.call('HMGET', KEYS[1], 'owner', 'queues')
local owner, queues = noted[1] or '', noted[2]
if (owner ~= '' and ARGV[1] ~= '' and owner ~= ARGV[1]) or (queues and queues ~= ARGV[2]) then
  return {owner, queues}
end
if not queues then redis.call('HSET', KEYS[1], 'queues', ARGV[2]) end
if owner == '' and ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'owner', ARGV[1]) end
return {}
""")
