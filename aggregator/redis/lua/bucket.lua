-- bucket: the arithmetic that fold and take share. It goes before the text of each.
local floor, max, min, format, match, find, sub, call = math.floor, math.max, math.min, string.format, string.match, string.find, string.sub, redis.call
local abs = math.abs

-- num returns s as a number whose whole part a double holds exactly, or nil.
local function num(s)
  local n = tonumber(s or nil)
  if n and n > -9e15 and n < 9e15 then return n end
end

-- parts returns a rate (billionths of a token per second) in two exact parts, whole tokens and billionths, and in µtokens per µs for
-- what need not be exact.
local function parts(rate)
  local tokens, nanos = num('0' .. sub(rate, 1, -10)), num(sub(rate, -9))
  return tokens, nanos, tokens and nanos and tokens + nanos / 1e9 or 0
end

-- read returns what the fields l, f, t and v say: level, fraction, time, the last version, and whether all was well. What is not there
-- or damaged is made good: the level is what it was at begun, and the time now.
local function read(l, f, t, v, begin, begun, now)
  local level, frac, at = num(l), f and num(f) or 0, num(t)
  local before = max(v and num(v) or 0, at or 0)
  local well = level and frac and at
  if not level then level, at = begin, begun end
  if not well then frac, at = 0, at or now end
  if frac < 0 or frac >= 1e9 then frac = 0 end
  return level, frac, at, before, well
end

-- refill returns level and fraction dt µs later, not above lid. It is exact: every product and sum is below 2^53.
local function refill(level, frac, dt, tokens, nanos, speed, lid)
  if level < lid and dt > 0 and dt * speed <= lid - level + 2 then
    local s = floor(dt / 1e6)
    local part = s * nanos
    local q = floor(part / 1000)
    local rest = (part - q * 1000) * 1e6 + (dt - s * 1e6) * nanos + frac
    local carry = floor(rest / 1e9)
    level, frac = level + dt * tokens + q + carry, rest - carry * 1e9
  elseif dt > 0 then
    level = lid
  end
  if level >= lid then return lid, 0 end
  return level, frac
end

-- outlives returns when, in µs, the bucket shall expire, or nil if it lives long enough: until it is full again, and a minute for gateways
-- that report seldom, of which ten seconds may be gone: that saves most calls. What expires is the same as what is not there.
local function outlives(x, level, full, speed, now)
  local need = now + min(max(full - level, 0) / speed + 5e7, 4e13)
  local has = num(x)
  if not has or has < need or has > need + 4e13 then return format('%d', need + 1e7) end
end

