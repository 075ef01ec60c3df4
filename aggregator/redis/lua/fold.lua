-- fold: lets time pass in the global bucket of each key and charges what gateways used of it.
--
-- KEYS   one hash per key. In a cluster one key a call; elsewhere many, so that one call costs one TIME and one dispatch.
-- ARGV   for each key: rate (billionths of a token per second, '' leaves the limit and does not make the key), burst (tokens),
--        lag (µs), what is seldom said ('' or six numbers, or '-', and a space after each: outstanding and offered (tokens), least and most (µtokens),
--        what a key that is not there had (µtokens, '-' for a full one) and when (µs, '-' for now)), number of uses; for each use: mark field, gateway, seq, cum, from, settled, demand (0 leaves it) and what is sure
--        of it (millionths of a token per second), span and window (µs).
--        Meaning: aggregator.Fold and aggregator.Use.
-- RESULT {now µs, state of each key}; a state is false for a key that is not there, else
--        {level µtokens, version, 1 if state was lost or 2 if there was none, demands, and of a look the limit's rate and burst}.
--        Numbers are whole and below 2^53, so none is cut on its way through a double. The total is not among them: HGET n.
-- ATOMIC the whole call. Limit, level, clock, marks and total of a key are in one hash: they change, expire and are lost in a
--        failover together, and a replay of the reports then repairs exactly.
-- REPEAT harmless: a use counts if its seq is above its mark's, and is charged by how much the mark grew, or given back by how much
--        it fell; the total is the sum of the marks. Only the version moves.
--
-- Fields: r b limit · l level, may be negative (debt) · f billionths of a µtoken earned and not yet credited, so that slow rates lose
-- nothing (absent: 0) · t µs of the last refill; of a full bucket of which nothing seldom is said, since when it is full, but at most LAG (aggregator.LagMax) ago:
-- what it would have earned pays for use that one gateway tells after others have told of none · v version, where it is ahead of t · n total (HINCRBY: it may pass 2^53)
-- x µs when it expires
-- d demands ";GATEWAY demand until since;…" · c:GATEWAY:BOOT:INCARNATION mark "cum seq", and since when unused if pruning saw it.
-- A damaged field is made good: level as if the key were not there, time from now. Debt is at most the burst, what is outstanding or offered, and five seconds of the rate.
-- A number becomes text once, and text is passed on as it came: that is much of what this script costs.
local HOUR, DAY, HALF, BLEND, LAG = 3600000000, 86400000000, 100000, 200000, 150000 -- µs; a demand halves in HALF and is none after twenty
-- prune drops marks that were not used for an hour, but the newest of a gateway only after a day.
local function prune(key, now)
  local newest, marks, gone, kept = {}, {}, {}, {}
  local flat = call('HGETALL', key)
  for i = 1, #flat, 2 do
    local gateway = match(flat[i], '^c:([^:]+):')
    if gateway then
      local since = num(match(flat[i + 1], '^%d+ %d+ (%d+)$')) or now
      marks[#marks + 1] = {flat[i], gateway, since, flat[i + 1]}
      newest[gateway] = max(newest[gateway] or 0, since)
    end
  end
  for i = 1, #marks do
    local field, gateway, since, value = unpack(marks[i])
    if now - since > (since == newest[gateway] and DAY or HOUR) then
      gone[#gone + 1] = field
    elseif since == now then
      kept[#kept + 1] = field
      kept[#kept + 1] = (match(value, '^%d+ %d+') or '0 0') .. format(' %d', now)
    end
  end
  for i = 1, #gone, 100 do call('HDEL', key, unpack(gone, i, min(i + 99, #gone))) end
  for i = 1, #kept, 100 do call('HSET', key, unpack(kept, i, min(i + 99, #kept))) end
end

-- forget drops the demands that have faded.
local function forget(d, now)
  return ';' .. string.gsub(d, '[^;]*;', function(one)
    local til = num(match(one, ' (%d+) %d+;$'))
    if not til or now - til > 20 * HALF then return '' end
  end)
end

-- ask returns what is asked from now on, "demand until since": the mean over a span has as much weight as the span is long; what is
-- sure counts at once.
local function ask(old, asked, sure, span, til, now, stamp)
  local q, ends, since
  if old then
    q, ends, since = match(old, '^(%d+) (%d+) (%d+)$')
    q, ends = num(q), num(ends)
  end
  if not (q and ends) or ends > now + 60000000 or now - ends > 20 * HALF then
    since = stamp
  else
    if now > ends then q = floor(q * 0.5 ^ ((now - ends) / HALF)) end
    asked = max(floor(q + (asked - q) * (1 - 0.5 ^ (span / BLEND))), sure, 1)
  end
  return format('%d %d ', asked, til) .. since
end

local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local stamp = format('%d', now)
local quarter = floor(now / (HOUR / 4))
local out = {now}
local a = 1
local rate0, burst0, full, tokens, nanos, speed -- the limit that was read last: neighbours often share one
for k = 1, #KEYS do
  local key, rate, burst, lag, uses = KEYS[k], ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 4])
  local outstanding, offered, least, most, begin, begun = 0, 0
  local plain = ARGV[a + 3] == ''
  if not plain then
    outstanding, offered, least, most, begin, begun = match(ARGV[a + 3], '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) $')
    outstanding, offered, least, most, begin, begun = outstanding * 1000000, offered * 1000000, tonumber(least), tonumber(most), tonumber(begin), tonumber(begun)
  end
  a = a + 5

  local want = {key, 'r', 'b', 'l', 'f', 't', 'v', 'd', 'n', 'x'}
  for j = 1, min(uses, 500) do want[j + 10] = ARGV[a + (j - 1) * 10] end
  local got = redis.pcall('HMGET', unpack(want))
  local lost = 0
  if got.err then -- not a hash: whatever it is, it is not ours
    call('DEL', key)
    got, lost = {}, 1
  end
  local r, b, d, marks = got[1], got[2], got[7] or '', {}
  local look = rate == ''
  if look then rate, burst = r or '', b end
  if rate ~= rate0 or burst ~= burst0 then
    rate0, burst0 = rate, burst
    full, tokens, nanos, speed = num(burst), parts(rate)
    full = speed > 0 and full and full * 1000000
  end
  if not full then
    out[k + 1] = false
    a = a + 10 * uses
  else
    local level, frac, at, before, well = read(got[3], got[4], got[5], got[6], begin or full, begun or now, now)
    if not well then lost = (lost == 1 or r or b or got[3] or got[4] or got[5]) and 1 or 2 end
    -- what a report tells of was used while the bucket was refilled: for so long it is refilled beyond its brim before it is charged
    local dt, brim, was = now - at, full + outstanding, level
    lag = max(min(dt, lag), 0)
    local lid = brim + lag * tokens + floor(lag * nanos / 1e9)
    level, frac = refill(level, frac, dt, tokens, nanos, speed, lid)

    local set, n, grown, demands, crowd = {key}, 1, 0, d, nil
    for j = 1, uses do
      local field, seq = ARGV[a], ARGV[a + 2]
      local cum, asked = tonumber(ARGV[a + 3]), tonumber(ARGV[a + 6])
      local mark = marks[field] or got[j + 9] or j > 500 and call('HGET', key, field)
      local old, last
      if mark then
        old, last = match(mark, '^(%d+) (%d+)')
        old, last = num(old), num(last)
      end
      local news = not last or tonumber(seq) > last
      if news then
        -- what is new, and not too old to charge; of an unknown incarnation what these reports tell, for its cum may be of days
        local base = old and max(old, tonumber(ARGV[a + 5])) or tonumber(ARGV[a + 4])
        if cum > base then
          level = level - (cum - base) * 1000000
        elseif old and cum < old then -- given back
          level = level + (old - cum) * 1000000
        end
        grown = grown + cum - (old or 0)
        mark = ARGV[a + 3] .. ' ' .. seq
        marks[field] = mark
        set[n + 1], set[n + 2] = field, mark
        n = n + 2
      end
      if news and asked > 0 then
        local gateway, sure, span, til = ARGV[a + 1], tonumber(ARGV[a + 7]), tonumber(ARGV[a + 8]), now + tonumber(ARGV[a + 9])
        if uses < 8 then -- in place
          local _, head = find(demands, ';' .. gateway .. ' ', 1, true)
          if head then
            local tail = find(demands, ';', head, true) or #demands + 1
            demands = sub(demands, 1, head) .. ask(sub(demands, head + 1, tail - 1), asked, sure, span, til, now, stamp) .. sub(demands, tail)
          else
            if sub(demands, -1) ~= ';' then demands = ';' end -- empty, or damaged
            demands = demands .. gateway .. ' ' .. ask(nil, asked, sure, span, til, now, stamp) .. ';'
          end
        else -- apart, and put together once
          if not crowd then
            crowd = {}
            for g, v in string.gmatch(demands, ';?([^; ]+) ([^;]*)') do crowd[g] = v end
          end
          crowd[gateway] = ask(crowd[gateway], asked, sure, span, til, now, stamp)
        end
      end
      a = a + 10
      if n > 1000 then -- unpack has its limit
        call('HSET', unpack(set))
        set, n = {key}, 1
      end
    end
    if crowd then
      local parts = {}
      for g, v in pairs(crowd) do parts[#parts + 1] = g .. ' ' .. v end
      demands = ';' .. table.concat(parts, ';') .. ';'
    end
    local aside = floor(at / (HOUR / 4)) ~= quarter -- four times an hour, for what need not be done each time
    if aside then demands = forget(demands, now) end
    local idle = level >= brim and grown == 0
    if level >= brim then level, frac = brim, 0 end
    if most then level = min(level, most) end
    if least then level = max(level, min(least, brim)) end
    level = max(level, -min(brim + offered + floor(5e6 * speed), 4e15))
    local since, version = now, max(before + 1, now)
    if plain and idle and level >= brim then since = min(max(at + floor(max(brim - was, 0) / speed), now - LAG), now) end
    if look then -- it knows nothing of what is outstanding: time passes with the next fold
      call('HSET', key, 'v', format('%d', version))
      out[k + 1] = {level, version, lost, demands, rate, burst}
    else
      set[n + 1], set[n + 2], set[n + 3], set[n + 4] = 'l', format('%d', level), 't', since == now and stamp or format('%d', since)
      n = n + 4
      if demands ~= d then
        set[n + 1], set[n + 2] = 'd', demands
        n = n + 2
      end
      if r ~= rate or b ~= burst then
        set[n + 1], set[n + 2], set[n + 3], set[n + 4] = 'r', rate, 'b', burst
        n = n + 4
      end
      if frac > 0 or got[4] then
        set[n + 1], set[n + 2] = 'f', format('%d', frac)
        n = n + 2
      end
      if version > since then
        set[n + 1], set[n + 2] = 'v', format('%d', version)
        n = n + 2
      end
      local total, apart = num(got[8] or '0'), grown
      if grown ~= 0 and total and total % 1 == 0 and abs(total + grown) < 9e15 then
        set[n + 1], set[n + 2] = 'n', format('%d', total + grown)
        n, apart = n + 2, 0
      end
      local x = outlives(got[9], level, full, speed, now)
      if x then set[n + 1], set[n + 2] = 'x', x end
      call('HSET', unpack(set))
      if x then call('PEXPIREAT', key, sub(x, 1, -4)) end
      apart = max(min(apart, 9e15), -9e15) -- more than a report can tell would become another number on its way into text
      if apart ~= 0 and type(redis.pcall('HINCRBY', key, 'n', format('%d', apart))) == 'table' then
        call('HSET', key, 'n', format('%d', apart)) -- it was no number, or as large as one gets
        lost = 1
      end
      if aside then prune(key, now) end
      out[k + 1] = {level, version, lost, demands}
    end
  end
end
return out
