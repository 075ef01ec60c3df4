-- place: notes how far reports were folded, and tells whether Redis went back since somebody noted it.
--
-- KEYS   the note: "count seq stream".
-- ARGV   the count of the note that the caller made last, 0 for none; seq and stream, '' and '' to leave them.
-- RESULT {count of the note now, 1 if Redis went back, seq and stream of the note before}; of no note seq is 0 and stream ''.
-- ATOMIC the whole call.
-- REPEAT only the count moves.
--
-- Whoever folds has the count grow afterwards. A Redis that went back, and lacks what was folded, lacks that too: its count is below the
-- caller's. It has the caller's then, so that the next time shows as well, and seq stays as it is until what it lacks was folded again.
local count, seq, stream = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%d+) (%S*)$')
if not count then count, seq, stream = '0', '0', '' end
local was, seen, before = tonumber(count), tonumber(ARGV[1]), seq .. ' ' .. stream
local back, now = was < seen, math.max(was, seen) + 1
if ARGV[3] ~= '' and not back then before = ARGV[2] .. ' ' .. ARGV[3] end
redis.call('SET', KEYS[1], string.format('%d ', now) .. before)
return {now, back and 1 or 0, seq, stream}
