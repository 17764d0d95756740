"""The Lua scripts and the key names of the shared state. All times are seconds of the server's clock.

Scripts run on the server one after the other, so each of them is atomic.
"""

from __future__ import annotations

PREFIX = "headgate:"
CHANNEL = PREFIX + "events:"
"""Published messages: JSON lists [gateway, kind, ...]. The number of the database follows: all databases of a server
have the same channels."""

GATEWAYS = PREFIX + "gateways"
"""Sorted set: the time of the last heartbeat by gateway."""
BREAKERS = PREFIX + "breakers"
"""Hash: the last change of each breaker as JSON, by JSON [provider, model]."""
VERSION = PREFIX + "breakers:version"
"""Number of changes of BREAKERS."""

USAGE = PREFIX + "usage:"
ACTIVE = PREFIX + "active"
"""Sorted set: the last request of each key with limits."""

RESPONSES = PREFIX + "responses"
"""Stored responses: RESPONSES:value:OWNER:ID and others, see PUT_RESPONSE."""

DEAD_SECONDS = 6.0
"""A gateway without a heartbeat for this long has ended."""
FORGET_SECONDS = 600.0
"""A closed breaker, or an open period that is over, is removed after this time."""


def probe_key(name: str) -> str:
    """The claim of the one probe of a breaker: the token of its holder, which expires."""
    return f"{PREFIX}probe:{name}"


def lease_key(name: str) -> str:
    """The token of the holder of a lease, which expires."""
    return f"{PREFIX}lease:{name}"


def fence_key(name: str) -> str:
    """The last fencing token of a lease."""
    return f"{PREFIX}fence:{name}"


def usage_key(name: str) -> str:
    """Hash: requests and tokens of a key's limits, the time of that (`at`), and when the hash was created (`since`)."""
    return USAGE + name


def running_key(name: str) -> str:
    """Sorted set: when each running request of a key began, by GATEWAY:NUMBER."""
    return f"{PREFIX}running:{name}"


def spent_key(month: str, name: str) -> str:
    """Hash: what each gateway used of a key's budget in a month, as DOLLARS TOKENS."""
    return f"{PREFIX}spent:{month}:{name}"


_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local function exact(number) return string.format('%.17g', number) end
"""

_HEARTBEAT = """
-- KEYS: gateways; ARGV: gateway, dead seconds. Returns now and the number of live gateways.
redis.call('ZADD', KEYS[1], exact(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', exact(now - ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], exact(now + ARGV[2]), '+inf') -- the clock was set back
return {exact(now), redis.call('ZCARD', KEYS[1])}
"""

_LEAVE_FLEET = "redis.call('ZREM', KEYS[1], ARGV[1])"

_NOW_ONLY = "return exact(now)"

_WRITE_BREAKER = """
-- KEYS: breakers, version, channel; ARGV: field, entry, time of the change, message.
-- Returns the stored entry if it is newer, else nothing.
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored then
  local at = cjson.decode(stored).at
  if at > tonumber(ARGV[3]) and at <= now + 1 then return stored end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('INCR', KEYS[2])
redis.call('PUBLISH', KEYS[3], ARGV[4])
return false
"""

_READ_BREAKERS = """
-- KEYS: breakers, version; ARGV: known version, forget seconds. Returns the version, then fields and entries.
local version = redis.call('GET', KEYS[2]) or '0'
if version == ARGV[1] then return {version} end
local found = redis.call('HGETALL', KEYS[1])
local result = {version}
for i = 1, #found, 2 do
  local entry = cjson.decode(found[i + 1])
  local last = entry.at
  if type(entry.open_until) == 'number' and entry.open_until > last then last = entry.open_until end
  if last < now - ARGV[2] then
    redis.call('HDEL', KEYS[1], found[i])
  else
    result[#result + 1] = found[i]
    result[#result + 1] = found[i + 1]
  end
end
return result
"""

_CLAIM_PROBE = """
-- KEYS: breakers, probe keys...; ARGV: token, milliseconds, then field and known time of change for each probe key.
for i = 2, #KEYS do
  local field, known = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local stored = redis.call('HGET', KEYS[1], field)
  if stored then
    local at = cjson.decode(stored).at
    if at > known and at <= now + 1 then return {'changed', field, stored} end
  end
  local holder = redis.call('GET', KEYS[i])
  if holder and holder ~= ARGV[1] then return {'held', field} end
end
for i = 2, #KEYS do redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2]) end
return {'claimed'}
"""

_RENEW = """
-- KEYS: keys...; ARGV: milliseconds, then a token for each. Returns how many are held; an expired one is taken again.
local held = 0
for i, key in ipairs(KEYS) do
  local holder = redis.call('GET', key)
  if not holder or holder == ARGV[i + 1] then
    redis.call('SET', key, ARGV[i + 1], 'PX', ARGV[1])
    held = held + 1
  end
end
return held
"""

_RELEASE = """
-- KEYS: keys...; ARGV: a token for each. Returns how many were released.
local released = 0
for i, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[i] then released = released + redis.call('DEL', key) end
end
return released
"""

_ACQUIRE_LEASE = """
-- KEYS: lease, fence; ARGV: token, milliseconds. Returns the fencing token, or nothing if the lease is held.
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return false end
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
local fence = math.max(last + 1, time[1] * 1e6 + time[2]) -- by the clock: larger also after the data was lost
redis.call('SET', KEYS[2], string.format('%.0f', fence))
return string.format('%.0f', fence)
"""

_RENEW_LEASE = """
-- KEYS: lease; ARGV: token, milliseconds. Returns whether it is still held.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

_ACCOUNT = """
-- The account of a key at the present time; see gateway/access/rate_limits.py. Bounds are nil where there is no limit.
local function account(key, per_minute_requests, per_minute_tokens)
  local stored = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local at = tonumber(stored[3]) or now
  if at > now + 1 then at = now end -- the server's clock was set back
  local passed = math.max(0, now - at)
  local function drained(used, bound)
    return bound and math.max(0, (tonumber(used) or 0) - passed * bound / 60) or 0
  end
  return drained(stored[1], per_minute_requests), drained(stored[2], per_minute_tokens), math.max(now, at)
end
local function keep(key, requests, tokens, at)
  redis.call('HSET', key, 'requests', exact(requests), 'tokens', exact(tokens), 'at', exact(at))
  redis.call('HSETNX', key, 'since', exact(now))
  redis.call('EXPIRE', key, 3600)
end
local ROUNDING = 1e-6
"""

_ENTER = """
-- KEYS: account, running, gateways, active; ARGV: limits on requests, tokens and concurrent requests (empty: none),
-- member of the request, dead seconds, name of the key.
-- Returns whether it may start, requests, tokens, running requests, and when the first of them began.
local bound, token_bound, concurrent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local requests, tokens, at = account(KEYS[1], bound, token_bound)
local running = 0
if concurrent then
  running = redis.call('ZCARD', KEYS[2])
  if running >= concurrent then
    for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
      local beat = tonumber(redis.call('ZSCORE', KEYS[3], string.match(member, '^[^:]*')))
      if not beat or beat < now - ARGV[5] then redis.call('ZREM', KEYS[2], member) end
    end
    running = redis.call('ZCARD', KEYS[2])
  end
end
local accepted = not (bound and requests + 1 - bound > ROUNDING) and not (concurrent and running >= concurrent)
if accepted then
  if bound then requests = requests + 1 end
  if concurrent then
    redis.call('ZADD', KEYS[2], exact(now), ARGV[4])
    redis.call('EXPIRE', KEYS[2], 86400)
  end
  keep(KEYS[1], requests, tokens, at)
  redis.call('ZADD', KEYS[4], exact(now), ARGV[6])
end
local first = running > 0 and redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or ''
return {accepted and 1 or 0, exact(requests), exact(tokens), running, first}
"""

_RESERVE = """
-- KEYS: account; ARGV: limits on requests and tokens, wanted tokens.
-- Returns whether they are reserved, requests, tokens.
local bound, token_bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local requests, tokens, at = account(KEYS[1], bound, token_bound)
local held = math.min(tonumber(ARGV[3]), token_bound)
local accepted = tokens + held - token_bound <= ROUNDING
if accepted then
  tokens = tokens + held
  keep(KEYS[1], requests, tokens, at)
end
return {accepted and 1 or 0, exact(requests), exact(tokens)}
"""

_LEAVE = """
-- KEYS: account, running; ARGV: limits on requests and tokens, member of the request, tokens, reserved tokens.
local bound, token_bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local requests, tokens, at = account(KEYS[1], bound, token_bound)
if token_bound then tokens = math.max(0, tokens + ARGV[4] - ARGV[5]) end
keep(KEYS[1], requests, tokens, at)
redis.call('ZREM', KEYS[2], ARGV[3])
"""

_MERGE_USAGE = """
-- KEYS: account, running; ARGV: limits on requests and tokens, gateway, requests and tokens of an outage, its start,
-- what still counts of the requests and tokens before it, then the running requests of this gateway: when each began,
-- and its member.
local bound, token_bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local requests, tokens, at = account(KEYS[1], bound, token_bound)
local since = tonumber(redis.call('HGET', KEYS[1], 'since')) or now
if since > tonumber(ARGV[6]) then -- the server has lost the account of that time
  requests, tokens = math.max(requests, tonumber(ARGV[7])), math.max(tokens, tonumber(ARGV[8]))
end
if bound then requests = requests + ARGV[4] end
if token_bound then tokens = tokens + ARGV[5] end
keep(KEYS[1], requests, tokens, at)
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if string.match(member, '^[^:]*') == ARGV[3] then redis.call('ZREM', KEYS[2], member) end
end
for i = 9, #ARGV, 2 do redis.call('ZADD', KEYS[2], ARGV[i], ARGV[i + 1]) end
if #ARGV > 8 then redis.call('EXPIRE', KEYS[2], 86400) end
"""

_ACTIVE_USAGE = """
-- KEYS: active; ARGV: prefix of accounts, most keys. Returns the name, requests, tokens and age of recent accounts.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', exact(now - 60))
local result = {}
for _, name in ipairs(redis.call('ZREVRANGE', KEYS[1], 0, ARGV[2] - 1)) do
  local stored = redis.call('HMGET', ARGV[1] .. name, 'requests', 'tokens', 'at')
  if stored[3] then
    result[#result + 1] = name
    result[#result + 1] = stored[1]
    result[#result + 1] = stored[2]
    result[#result + 1] = exact(math.max(0, now - stored[3]))
  end
end
return result
"""

_EXCHANGE_SPENT = """
-- KEYS: spent of each key; ARGV: gateway, then dollars and tokens of this gateway for each key.
-- Returns dollars and tokens of the other gateways for each key.
local result = {}
for i, key in ipairs(KEYS) do
  local dollars, tokens = ARGV[2 * i], ARGV[2 * i + 1]
  if tonumber(tokens) > 0 or tonumber(dollars) > 0 then
    redis.call('HSET', key, ARGV[1], dollars .. ' ' .. tokens)
    redis.call('EXPIRE', key, 40 * 86400)
  end
  local other_dollars, other_tokens = 0, 0
  local stored = redis.call('HGETALL', key)
  for j = 1, #stored, 2 do
    if stored[j] ~= ARGV[1] then
      local one_dollars, one_tokens = string.match(stored[j + 1], '^(%S+) (%S+)$')
      other_dollars, other_tokens = other_dollars + one_dollars, other_tokens + one_tokens
    end
  end
  result[#result + 1] = exact(other_dollars)
  result[#result + 1] = exact(other_tokens)
end
return result
"""

SCRIPTS = {
    "now": _NOW + _NOW_ONLY,
    "heartbeat": _NOW + _HEARTBEAT,
    "leave_fleet": _LEAVE_FLEET,
    "write_breaker": _NOW + _WRITE_BREAKER,
    "read_breakers": _NOW + _READ_BREAKERS,
    "claim_probe": _NOW + _CLAIM_PROBE,
    "renew": _RENEW,
    "release": _RELEASE,
    "acquire_lease": _NOW + _ACQUIRE_LEASE,
    "renew_lease": _RENEW_LEASE,
    "enter": _NOW + _ACCOUNT + _ENTER,
    "reserve": _NOW + _ACCOUNT + _RESERVE,
    "leave": _NOW + _ACCOUNT + _LEAVE,
    "merge_usage": _NOW + _ACCOUNT + _MERGE_USAGE,
    "exchange_spent": _NOW + _EXCHANGE_SPENT,
    "active_usage": _NOW + _ACTIVE_USAGE,
}
"""By name."""


_FORGET_RESPONSE = """
-- Sorted set KEY:expiry: the expiry of OWNER:ID; :of:OWNER the same of one owner; hash :sizes: bytes of OWNER:ID;
-- hash :owners: bytes of each owner.
local function forget(base, owner, id)
  local member = owner .. ':' .. id
  local size = tonumber(redis.call('HGET', base .. ':sizes', member) or 0)
  redis.call('HDEL', base .. ':sizes', member)
  redis.call('ZREM', base .. ':expiry', member)
  redis.call('ZREM', base .. ':of:' .. owner, id)
  if size > 0 and redis.call('HINCRBY', base .. ':owners', owner, -size) <= 0 then
    redis.call('HDEL', base .. ':owners', owner)
  end
  return redis.call('DEL', base .. ':value:' .. member)
end
"""

PUT_RESPONSE = (
    _NOW
    + _FORGET_RESPONSE
    + """
-- KEYS: value, responses, keys of items...; ARGV: value, owner, id, milliseconds, most bytes in all.
-- Above the limit the owner with the most bytes loses its oldest response.
local base, owner, id, milliseconds, most = KEYS[2], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', base .. ':expiry', '-inf', exact(now), 'LIMIT', 0, 100)) do
  forget(base, string.match(member, '^([^:]*):(.*)$'))
end
forget(base, owner, id)
local size, expiry = #ARGV[1] + 256 * (#KEYS - 2), exact(now + milliseconds / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', milliseconds)
for i = 3, #KEYS do redis.call('SET', KEYS[i], id, 'PX', milliseconds) end
redis.call('ZADD', base .. ':expiry', expiry, owner .. ':' .. id)
redis.call('ZADD', base .. ':of:' .. owner, expiry, id)
redis.call('HSET', base .. ':sizes', owner .. ':' .. id, size)
redis.call('HINCRBY', base .. ':owners', owner, size)
while true do
  local total, largest, largest_bytes = 0, nil, 0
  local owners = redis.call('HGETALL', base .. ':owners')
  for i = 1, #owners, 2 do
    local bytes = tonumber(owners[i + 1])
    total = total + bytes
    if bytes > largest_bytes then largest, largest_bytes = owners[i], bytes end
  end
  if total <= most then break end
  local oldest = redis.call('ZRANGE', base .. ':of:' .. largest, 0, 0)[1]
  if not oldest then
    redis.call('HDEL', base .. ':owners', largest)
  else
    forget(base, largest, oldest)
  end
end
"""
)

DELETE_RESPONSE = (
    _NOW
    + _FORGET_RESPONSE
    + """
-- KEYS: value, mark of the deletion, responses, channel; ARGV: owner, id, milliseconds, message.
-- Returns how many were deleted.
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
redis.call('PUBLISH', KEYS[4], ARGV[4])
return forget(KEYS[3], ARGV[1], ARGV[2])
"""
)
