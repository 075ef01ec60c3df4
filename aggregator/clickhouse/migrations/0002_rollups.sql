-- Roll-ups of usage for the panel, in whole minutes, hours and days of UTC. Their rows are sums of parts: read them with
-- sum() and GROUP BY. To rebuild one, TRUNCATE it and INSERT INTO … SELECT what its view selects, FROM usage FINAL.
CREATE TABLE IF NOT EXISTS usage_1m
(
    ts       DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    tenant   String CODEC(ZSTD(1)),
    route    LowCardinality(String),
    rule     LowCardinality(String),
    allowed  UInt64 CODEC(T64, ZSTD(1)),
    rejected UInt64 CODEC(T64, ZSTD(1)),
    cost     UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = SummingMergeTree((allowed, rejected, cost))
PARTITION BY toYYYYMM(ts)
ORDER BY (tenant, ts, route, rule)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS usage_1h
(
    ts       DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    tenant   String CODEC(ZSTD(1)),
    route    LowCardinality(String),
    rule     LowCardinality(String),
    allowed  UInt64 CODEC(T64, ZSTD(1)),
    rejected UInt64 CODEC(T64, ZSTD(1)),
    cost     UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = SummingMergeTree((allowed, rejected, cost))
PARTITION BY toYYYYMM(ts)
ORDER BY (tenant, ts, route, rule)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS usage_1d
(
    ts       DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    tenant   String CODEC(ZSTD(1)),
    route    LowCardinality(String),
    rule     LowCardinality(String),
    allowed  UInt64 CODEC(T64, ZSTD(1)),
    rejected UInt64 CODEC(T64, ZSTD(1)),
    cost     UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = SummingMergeTree((allowed, rejected, cost))
PARTITION BY toYYYYMM(ts)
ORDER BY (tenant, ts, route, rule)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS usage_1m_mv TO usage_1m AS
SELECT toDateTime64(toStartOfMinute(u.ts, 'UTC'), 3, 'UTC') AS ts, u.tenant AS tenant, u.route AS route, u.rule AS rule,
       sum(u.allowed) AS allowed, sum(u.rejected) AS rejected, sum(u.cost) AS cost
FROM usage AS u GROUP BY ts, tenant, route, rule;

CREATE MATERIALIZED VIEW IF NOT EXISTS usage_1h_mv TO usage_1h AS
SELECT toDateTime64(toStartOfHour(u.ts, 'UTC'), 3, 'UTC') AS ts, u.tenant AS tenant, u.route AS route, u.rule AS rule,
       sum(u.allowed) AS allowed, sum(u.rejected) AS rejected, sum(u.cost) AS cost
FROM usage AS u GROUP BY ts, tenant, route, rule;

CREATE MATERIALIZED VIEW IF NOT EXISTS usage_1d_mv TO usage_1d AS
SELECT toDateTime64(toStartOfDay(u.ts, 'UTC'), 3, 'UTC') AS ts, u.tenant AS tenant, u.route AS route, u.rule AS rule,
       sum(u.allowed) AS allowed, sum(u.rejected) AS rejected, sum(u.cost) AS cost
FROM usage AS u GROUP BY ts, tenant, route, rule;
