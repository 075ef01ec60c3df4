-- The roll-ups of minutes and hours are sorted by tenant; "who used most in the last hour" asks for a time. Their parts hold
-- a second order for that, which merges make anew.
ALTER TABLE usage_1m MODIFY SETTING deduplicate_merge_projection_mode = 'rebuild';
ALTER TABLE usage_1m ADD PROJECTION IF NOT EXISTS by_time (SELECT ts, tenant, route, rule, allowed, rejected, cost ORDER BY ts, tenant);
ALTER TABLE usage_1m MATERIALIZE PROJECTION by_time;
ALTER TABLE usage_1h MODIFY SETTING deduplicate_merge_projection_mode = 'rebuild';
ALTER TABLE usage_1h ADD PROJECTION IF NOT EXISTS by_time (SELECT ts, tenant, route, rule, allowed, rejected, cost ORDER BY ts, tenant);
ALTER TABLE usage_1h MATERIALIZE PROJECTION by_time;
