-- alerts has one row for each change of an alert. The same change told twice is one row under FINAL.
CREATE TABLE IF NOT EXISTS alerts
(
    ts        DateTime64(3, 'UTC') COMMENT 'arrival in the stream',
    type      LowCardinality(String) COMMENT 'weir.alert.firing or weir.alert.resolved',
    alert     LowCardinality(String),
    severity  LowCardinality(String),
    dedup_key String,
    tenant    String,
    rule      LowCardinality(String),
    gateway   LowCardinality(String),
    summary   String,
    value     Float64,
    threshold Float64,
    starts_at DateTime64(3, 'UTC'),
    ends_at   Nullable(DateTime64(3, 'UTC')) COMMENT 'NULL while firing'
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(starts_at)
ORDER BY (dedup_key, starts_at, type)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

-- policy_changes says who changed which limit, and why.
CREATE TABLE IF NOT EXISTS policy_changes
(
    ts             DateTime64(3, 'UTC'),
    policy_version UInt64,
    author         String,
    approver       String,
    reason         String,
    impact         String COMMENT 'what the author expected',
    tenant         String,
    rule           LowCardinality(String),
    before         String,
    after          String
)
ENGINE = ReplacingMergeTree
ORDER BY (ts, policy_version, tenant, rule)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

-- throttle_updates is what was pushed to gateways, one row per share. Best effort, kept for 30 days.
CREATE TABLE IF NOT EXISTS throttle_updates
(
    ts               DateTime64(3, 'UTC') COMMENT 'when it was pushed, by the aggregator''s clock' CODEC(DoubleDelta, ZSTD(1)),
    gateway          LowCardinality(String) COMMENT 'the receiver',
    rule             LowCardinality(String),
    key              String CODEC(ZSTD(1)),
    version          UInt64,
    rate_nanos       Int64 COMMENT 'the share, in billionths of a token per second',
    burst            Int64,
    limit_rate_nanos Int64 COMMENT 'the whole limit',
    limit_burst      Int64,
    reason           LowCardinality(String) COMMENT 'demand, debt or newcomer',
    level            Int64 COMMENT 'tokens in the central bucket, negative in debt',
    gateways         UInt32 COMMENT 'gateways alive',
    ttl_ms           UInt64,
    snapshot         Bool
)
ENGINE = MergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (rule, key, ts)
TTL toDateTime(ts) + INTERVAL 30 DAY;

-- gateways are heartbeats. Best effort, kept for 30 days.
CREATE TABLE IF NOT EXISTS gateways
(
    ts              DateTime64(3, 'UTC') COMMENT 'arrival, by the aggregator''s clock' CODEC(DoubleDelta, ZSTD(1)),
    gateway         LowCardinality(String),
    boot            String CODEC(ZSTD(1)),
    sent            DateTime64(3, 'UTC') COMMENT 'by the gateway''s clock' CODEC(DoubleDelta, ZSTD(1)),
    policy_version  UInt64,
    mode            LowCardinality(String) COMMENT 'synced, stale, isolated or local',
    clock_offset_ns Nullable(Int64) COMMENT 'the centre''s clock less the gateway''s; NULL before it was measured',
    clock_error_ns  Int64 COMMENT 'the offset is within this',
    pending_reports UInt64 COMMENT 'sealed and not yet acknowledged',
    version         LowCardinality(String) COMMENT 'of weir'
)
ENGINE = MergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (gateway, ts)
TTL toDateTime(ts) + INTERVAL 30 DAY;
