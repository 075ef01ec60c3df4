-- take: takes tokens of one key at once, or refuses and takes nothing: for limits that are kept strictly.
--
-- KEYS   the key's hash, the same as fold's.
-- ARGV   rate (billionths of a token per second), burst and cost (tokens), level of a key that is not there (µtokens, '' if it is not
--        known yet). A cost below 0 gives tokens back.
-- RESULT {1 if taken, level µtokens afterwards, wait µs until the same would be taken (-1: never)}, or {} for a key that is not there
--        and whose level is not known.
-- ATOMIC the whole call.
-- REPEAT takes again: whoever asks and does not know the answer counts the tokens as taken.
--
-- Only what is there is taken, so that a bucket in debt earns first.
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local key, rate, full, cost = KEYS[1], ARGV[1], tonumber(ARGV[2]) * 1000000, tonumber(ARGV[3]) * 1000000
local tokens, nanos, speed = parts(rate)

local got = redis.pcall('HMGET', key, 'l', 'f', 't', 'v', 'x')
if got.err then
  call('DEL', key)
  got = {}
end
local level, frac, at, before, well = read(got[1], got[2], got[3], got[4], tonumber(ARGV[4]), now, now)
if not (well or level) then return {} end
level, frac = refill(level, frac, now - at, tokens, nanos, speed, full)

local taken, wait = 0, 0
if cost <= level or cost < 0 then
  taken, level = 1, min(level - cost, full)
elseif cost > full then
  wait = -1
else
  wait = math.ceil((cost - level) / speed)
end
call('HSET', key, 'r', rate, 'b', ARGV[2], 'l', format('%d', level), 'f', format('%d', frac), 't', format('%d', now), 'v', format('%d', max(before + 1, now)))
if taken == 1 then redis.pcall('HINCRBY', key, 'n', ARGV[3]) end -- where that is no number the next fold makes it good
local x = outlives(got[5], level, full, speed, now)
if x then
  call('HSET', key, 'x', x)
  call('PEXPIREAT', key, sub(x, 1, -4))
end
return {taken, level, wait}
