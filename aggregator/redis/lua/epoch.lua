-- epoch: begins the next epoch of the centre.
--
-- KEYS   the counter of epochs.
-- ARGV   none.
-- RESULT the epoch: above all before, also over a loss of the counter, for it is never behind the time in µs.
-- ATOMIC the whole call.
-- REPEAT begins another one, which does no harm.
local clock = redis.call('TIME')
local epoch = math.max((tonumber(redis.call('GET', KEYS[1]) or nil) or 0) + 1, clock[1] * 1000000 + clock[2])
redis.call('SET', KEYS[1], string.format('%d', epoch), 'EX', 2592000)
return epoch
