-- tokens has one row for each bucket touched in a flush: the curve of its level, and what a shadow rule would have refused.
-- A level is not money: kept for 90 days.
CREATE TABLE IF NOT EXISTS tokens
(
    ts               DateTime64(3, 'UTC') COMMENT 'of the flush, by the gateway''s clock' CODEC(DoubleDelta, ZSTD(1)),
    gateway          LowCardinality(String),
    boot             String CODEC(ZSTD(1)),
    seq              UInt64 CODEC(T64, ZSTD(1)),
    entry            UInt32 CODEC(T64, ZSTD(1)),
    rule             LowCardinality(String),
    layer            LowCardinality(String),
    key              String CODEC(ZSTD(1)),
    tenant           String COMMENT 'empty where the key has no tenant' CODEC(ZSTD(1)),
    mode             LowCardinality(String) COMMENT 'enforce or shadow',
    rate_nanos       Int64 COMMENT 'enforced at this gateway, in billionths of a token per second; -1 is unlimited' CODEC(T64, ZSTD(1)),
    rate             Float64 ALIAS if(rate_nanos < 0, -1, rate_nanos / 1e9) COMMENT 'tokens per second; -1 is unlimited',
    capacity         Int64 COMMENT 'enforced at this gateway, in tokens' CODEC(T64, ZSTD(1)),
    limit_rate_nanos Int64 COMMENT 'the whole limit that all gateways share' CODEC(T64, ZSTD(1)),
    limit_burst      Int64 CODEC(T64, ZSTD(1)),
    taken            UInt64 CODEC(T64, ZSTD(1)),
    refused          UInt64 COMMENT 'tokens asked for and refused, or that shadow mode would have refused' CODEC(T64, ZSTD(1)),
    cum              UInt64 COMMENT 'all tokens taken in this incarnation' CODEC(T64, ZSTD(1)),
    incarnation      UInt32 CODEC(T64, ZSTD(1)),
    tokens_min       Int64 CODEC(T64, ZSTD(1)),
    tokens_last      Int64 CODEC(T64, ZSTD(1)),
    window_ms        UInt64 COMMENT 'time since this bucket''s last report' CODEC(T64, ZSTD(1)),
    received         DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    INDEX by_tenant tenant TYPE bloom_filter(0.01) GRANULARITY 1
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (rule, key, ts, gateway, boot, seq, entry)
TTL toDateTime(received) + INTERVAL 90 DAY
SETTINGS non_replicated_deduplication_window = 10000;

-- rejections are sampled refusals, redacted at the gateway.
CREATE TABLE IF NOT EXISTS rejections
(
    ts             DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    gateway        LowCardinality(String),
    boot           String CODEC(ZSTD(1)),
    seq            UInt64 CODEC(T64, ZSTD(1)),
    entry          UInt32 CODEC(T64, ZSTD(1)),
    tenant         String CODEC(ZSTD(1)),
    route          LowCardinality(String),
    rule           LowCardinality(String),
    layer          LowCardinality(String),
    method         LowCardinality(String),
    path           String CODEC(ZSTD(1)),
    client         String COMMENT 'IPv4 /24 or IPv6 /48' CODEC(ZSTD(1)),
    retry_after_ms Int64 CODEC(T64, ZSTD(1)),
    instance       String COMMENT 'the id that the caller was given' CODEC(ZSTD(1)),
    received       DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    INDEX by_instance instance TYPE bloom_filter(0.01) GRANULARITY 1
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (tenant, ts, gateway, boot, seq, entry)
TTL toDateTime(received) + INTERVAL 90 DAY
SETTINGS non_replicated_deduplication_window = 10000;
