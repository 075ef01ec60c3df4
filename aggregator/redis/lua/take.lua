-- take: takes tokens of one key at once, or refuses and takes nothing: for limits that are kept strictly.
--
-- KEYS   the key's hash, the same as fold's.
-- ARGV   rate (billionths of a token per second), burst and cost (tokens). A cost below 0 gives tokens back.
-- RESULT {1 if taken, level µtokens afterwards, wait µs until the same would be taken (-1: never)}
-- ATOMIC the whole call.
-- REPEAT takes again: whoever asks and does not know the answer counts the tokens as taken.
--
-- Refilling is what fold does, in the same exact arithmetic; only what is there is taken, so that a bucket in debt earns first.
local floor, max, min, format, sub, call = math.floor, math.max, math.min, string.format, string.sub, redis.call
local function num(s)
  local n = tonumber(s or nil)
  if n and n > -9e15 and n < 9e15 then return n end
end

local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local key, rate, full, cost = KEYS[1], ARGV[1], tonumber(ARGV[2]) * 1000000, tonumber(ARGV[3]) * 1000000
local tokens, nanos = tonumber('0' .. sub(rate, 1, -10)), tonumber(sub(rate, -9))
local speed = tokens + nanos / 1e9

local got = redis.pcall('HMGET', key, 'l', 'f', 't', 'v')
if got.err then
  call('DEL', key)
  got = {}
end
local level, frac, at = num(got[1]), got[2] and num(got[2]) or 0, num(got[3])
local before = max(got[4] and num(got[4]) or 0, at or 0)
if not (level and frac and at) then level, frac, at = level or full, 0, at or now end
if frac < 0 or frac >= 1e9 then frac = 0 end
local dt = now - at
if dt > 0 and level < full then
  if dt * speed > full - level + 2 then
    level = full
  else
    local s = floor(dt / 1e6)
    local part = s * nanos
    local q = floor(part / 1000)
    local rest = (part - q * 1000) * 1e6 + (dt - s * 1e6) * nanos + frac
    local carry = floor(rest / 1e9)
    level, frac = level + dt * tokens + q + carry, rest - carry * 1e9
  end
end
if level >= full then level, frac = full, 0 end

local taken, wait = 0, 0
if cost <= level or cost < 0 then
  taken, level = 1, min(level - cost, full)
elseif cost > full then
  wait = -1
else
  wait = math.ceil((cost - level) / speed)
end
local version = max(before + 1, now)
call('HSET', key, 'r', rate, 'b', ARGV[2], 'l', format('%d', level), 'f', format('%d', frac), 't', format('%d', now), 'v', format('%d', version))
if taken == 1 then call('HINCRBY', key, 'n', ARGV[3]) end
call('PEXPIRE', key, format('%d', min(max(full - level, 0) / speed / 1000 + 60000, 4e10)))
return {taken, level, wait}
