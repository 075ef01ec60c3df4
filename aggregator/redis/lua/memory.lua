-- memory: says since when Redis remembers.
--
-- KEYS   the note of it.
-- ARGV   the time at which the note was made that the caller has seen, '' if it has seen none.
-- RESULT {since, made, now}, all µs by Redis' clock; since is 0 for ever.
-- ATOMIC the whole call.
-- REPEAT harmless.
--
-- The note goes with everything else when Redis is emptied. Who has seen it then knows, also if somebody who has not made another
-- one meanwhile: since that time Redis remembers.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local since, made = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%d+)$')
local old = since
if not made then since, made = '0', string.format('%d', now) end
if since == '0' and ARGV[1] ~= '' and ARGV[1] ~= made then since = made end
if since ~= old then redis.call('SET', KEYS[1], since .. ' ' .. made) end
return {tonumber(since), tonumber(made), now}
