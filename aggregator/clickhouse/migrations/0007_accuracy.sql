-- accuracy is weir's own promise, measured: for each key that was pressed and each second, what all gateways together
-- admitted, and what one bucket with the same limit would have. Written once for each second by the centre, from tokens.
CREATE TABLE IF NOT EXISTS accuracy
(
    ts               DateTime64(3, 'UTC') COMMENT 'beginning of the second, by the clock of the stream' CODEC(DoubleDelta, ZSTD(1)),
    rule             LowCardinality(String),
    key              String CODEC(ZSTD(1)),
    limit_rate_nanos Int64 CODEC(T64, ZSTD(1)),
    limit_burst      Int64 CODEC(T64, ZSTD(1)),
    admitted         Float64 COMMENT 'tokens taken in the second; a report that covers several is spread over them',
    allowed          Float64 COMMENT 'of these, what one bucket would have admitted',
    over             Float64 COMMENT 'of these, what it would not have'
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (rule, key, ts)
TTL toDateTime(ts) + INTERVAL 90 DAY
SETTINGS non_replicated_deduplication_window = 10000;
