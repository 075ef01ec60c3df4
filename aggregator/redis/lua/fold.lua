-- fold: lets time pass in the global bucket of each key and charges what gateways used of it.
--
-- KEYS   one hash per key. In a cluster one key a call; elsewhere many, so that one call costs one TIME and one dispatch.
-- ARGV   for each key: rate (billionths of a token per second, '' leaves the limit and does not make the key), burst (tokens),
--        number of uses; for each use: cum field, demand field, boot, incarnation, seq (0 leaves the demand), cum, from, settled,
--        demand (millionths of a token per second), window (µs). Meaning: aggregator.Use.
-- RESULT {now µs, state of each key}; a state is false for a key that is not there, else
--        {level µtokens, version, 1 if state was lost, rate, burst, demand field, its value, …}.
--        Numbers are whole and below 2^53, so none is cut on its way through a double. The total is not among them: HGET n.
-- ATOMIC the whole call: of each key, limit, level, clock, marks and total change together and expire together, so a failover
--        that loses one loses all, and a replay of the reports repairs exactly.
-- REPEAT harmless: cum only grows, a use is charged by how much it grew, a demand counts once per seq, the total is the sum of
--        the cums. Only the version moves.
--
-- Fields: r b limit · l level, may be negative (debt) · f billionths of a µtoken earned and not yet credited, so that slow rates
-- lose nothing · t µs of the last refill · v version · n total (HINCRBY: it may pass 2^53) · p when to prune next
-- c:GATEWAY:BOOT:INCARNATION "cum seen" · d:GATEWAY "demand until since seq boot incarnation"
-- A damaged field is made good: level anew from a full bucket, time from now. Debt is at most the burst and five seconds of the rate.
local HOUR, DAY = 3600000000, 86400000000
local floor, max, min, format = math.floor, math.max, math.min, string.format

-- whole returns s as a whole number that a double holds exactly, or nil.
local function whole(s)
  local n = tonumber(s)
  if n and n > -9e15 and n < 9e15 and n == floor(n) then return n end
end

-- prune drops the marks of boots and incarnations that a gateway has left behind for an hour, and of gateways silent for a day.
local function prune(key, h, now)
  local gone = {}
  for field, value in pairs(h) do
    local gateway, boot, inc = string.match(field, '^c:([^:]+):([^:]+):(%d+)$')
    if gateway then
      local seen = whole(string.match(value, ' (%d+)$')) or 0
      local current = string.match(h['d:' .. gateway] or '', ' (%S+ %d+)$') == boot .. ' ' .. inc
      if now - seen > (current and DAY or HOUR) then gone[#gone + 1] = field end
    elseif string.sub(field, 1, 2) == 'd:' and now - (whole(string.match(value, '^%d+ (%d+) ')) or 0) > DAY then
      gone[#gone + 1] = field
    end
  end
  for i = 1, #gone, 100 do redis.call('HDEL', key, unpack(gone, i, min(i + 99, #gone))) end
end

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local stamp = format('%.0f', now)
local out = {now}
local a = 1
for k = 1, #KEYS do
  local key, rate, burst, uses = KEYS[k], ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2])
  a = a + 3

  local h, demands, lost = {}, {}, 0
  local flat = redis.pcall('HGETALL', key)
  if flat.err then -- not a hash: whatever it is, it is not ours
    redis.call('DEL', key)
    flat, lost = {}, 1
  end
  for i = 1, #flat, 2 do
    local field = flat[i]
    h[field] = flat[i + 1]
    if string.sub(field, 1, 2) == 'd:' then demands[#demands + 1] = field end
  end
  if rate == '' then rate, burst = h.r, h.b end
  local full, tokens, nanos = whole(burst), whole('0' .. string.sub(rate or '', 1, -10)), whole(string.sub(rate or '', -9))
  if not (full and tokens and nanos and tokens + nanos > 0) then
    out[k + 1] = false
  else
    full = full * 1000000
    local speed = tokens + nanos / 1e9 -- µtokens per µs, for what need not be exact

    local level, frac, at = whole(h.l), whole(h.f), whole(h.t)
    if not (level and frac and at) then
      if #flat > 0 then lost = 1 end
      level, frac, at = level or full, 0, at or now
    end
    if frac < 0 or frac >= 1e9 then frac = 0 end
    local dt = now - at
    if dt > 0 and level < full then
      local missing = full - level
      if dt * speed > missing + 2 then
        level = full
      else -- exact: every product and sum is below 2^53
        local s = floor(dt / 1e6)
        local part = s * nanos
        local q = floor(part / 1000)
        local rest = (part - q * 1000) * 1e6 + (dt - s * 1e6) * nanos + frac
        local carry = floor(rest / 1e9)
        level, frac = level + dt * tokens + q + carry, rest - carry * 1e9
      end
    end
    if level >= full then level, frac = full, 0 end

    local set, n = {'b', burst, 'r', rate, 't', stamp}, 6
    local grown = 0
    for _ = 1, uses do
      local cfield, dfield, boot, inc, seq = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
      local cum, from, settled = tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]), tonumber(ARGV[a + 7])
      local asked, window = tonumber(ARGV[a + 8]), tonumber(ARGV[a + 9])
      a = a + 10

      local mark = h[cfield]
      local old = mark and whole(string.match(mark, '^(%d+) '))
      if cum > (old or 0) then grown = grown + cum - (old or 0) end
      local charge = cum - (old and max(old, settled) or from)
      if charge > 0 then level = level - charge * 1000000 end
      mark = (old and old >= cum and format('%.0f', old) or format('%.0f', cum)) .. ' ' .. stamp
      h[cfield] = mark
      set[n + 1], set[n + 2] = cfield, mark
      n = n + 2

      if seq ~= '0' then
        local d = h[dfield]
        local q, u, since, last, b = string.match(d or '', '^(%d+) (%d+) (%d+) (%d+) (%S+) %d+$')
        q, u, since, last = whole(q), whole(u), whole(since), whole(last)
        if not (q and u and since and last and u < now + 60000000) then
          q, u, since, last, b = 0, 0, 0, 0, ''
        end
        if b ~= boot or tonumber(seq) > last then
          if now - u > 10000000 then q, since = 0, 0 elseif now > u then q, u = floor(q * 0.5 ^ ((now - u) / 1e6)), now end
          if asked >= q and asked > 0 then q, u = asked, now + window end
          if q > 0 and since == 0 then since = now end
          local value = format('%.0f %.0f %.0f %s %s %s', q, u, since, seq, boot, inc)
          if not d then demands[#demands + 1] = dfield end
          h[dfield] = value
          set[n + 1], set[n + 2] = dfield, value
          n = n + 2
        end
      end
      if n > 1000 then -- unpack has its limit
        redis.call('HSET', key, unpack(set))
        set, n = {}, 0
      end
    end
    level = max(level, -min(full + 5e6 * speed, 4e15))
    local version = max((whole(h.v) or 0) + 1, now)
    set[n + 1], set[n + 2], set[n + 3], set[n + 4], set[n + 5], set[n + 6] = 'l', level, 'f', frac, 'v', version
    n = n + 6
    local due = whole(h.p)
    if not due or due <= now or due > now + HOUR then
      if due then prune(key, h, now) end
      set[n + 1], set[n + 2] = 'p', now + HOUR / 4
    end
    redis.call('HSET', key, unpack(set))
    if grown > 0 and type(redis.pcall('HINCRBY', key, 'n', grown)) == 'table' then
      redis.call('HSET', key, 'n', grown) -- it was no number
      lost = 1
    end
    -- full again, and a minute for gateways that report seldom: what expires is the same as what is not there
    redis.call('PEXPIRE', key, format('%.0f', min(math.ceil((full - level) / speed / 1000) + 60000, 4e10)))

    local state, m = {level, version, lost, rate, burst}, 5
    for i = 1, #demands do
      state[m + 1], state[m + 2] = demands[i], h[demands[i]]
      m = m + 2
    end
    out[k + 1] = state
  end
end
return out
