"""The Lua scripts and the key names of the shared state. All times are seconds of the server's clock.

Scripts run on the server one after the other, so each of them is atomic.
"""

from __future__ import annotations

PREFIX = "headgate:"
CHANNEL = PREFIX + "events"
"""Published messages: JSON lists [gateway, kind, ...]."""

GATEWAYS = PREFIX + "gateways"
"""Sorted set: the time of the last heartbeat by gateway."""
BREAKERS = PREFIX + "breakers"
"""Hash: the last change of each breaker as JSON, by JSON [provider, model]."""
VERSION = PREFIX + "breakers:version"
"""Number of changes of BREAKERS."""

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
    """Hash: requests and tokens of a key's limits, and when they were computed (`at`)."""
    return f"{PREFIX}usage:{name}"


def running_key(name: str) -> str:
    """Sorted set: when each running request of a key began, by GATEWAY:NUMBER."""
    return f"{PREFIX}running:{name}"


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
-- KEYS: keys...; ARGV: milliseconds, then a token for each. Returns how many are still held; a lost one is taken again.
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
local fence = math.max(last + 1, math.floor(now * 1000)) -- it grows also after the server lost its data
redis.call('SET', KEYS[2], string.format('%.0f', fence))
return string.format('%.0f', fence)
"""

_RENEW_LEASE = """
-- KEYS: lease; ARGV: token, milliseconds. Returns whether it is still held.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
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
}
"""By name."""
