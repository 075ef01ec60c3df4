-- corrections are signed differences to what gateways reported of one hour: usage itself is never changed. A row is never
-- changed either; what was wrong about it is put right by another one. ref names it: the same ref again is the same row.
CREATE TABLE IF NOT EXISTS corrections
(
    ts       DateTime64(3, 'UTC') COMMENT 'the hour that is corrected',
    ref      String,
    gateway  LowCardinality(String),
    tenant   String,
    route    LowCardinality(String),
    rule     LowCardinality(String) COMMENT 'the refusing rule, empty for what was allowed',
    allowed  Int64,
    rejected Int64,
    cost     Int64,
    reason   String,
    author   String,
    made     DateTime64(3, 'UTC') COMMENT 'when the correction was made'
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (ts, ref)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

-- corrected_1h is usage_1h with the corrections: what to invoice. Its rows are parts of sums.
CREATE VIEW IF NOT EXISTS corrected_1h AS
SELECT ts, tenant, route, rule, toInt64(allowed) AS allowed, toInt64(rejected) AS rejected, toInt64(cost) AS cost FROM usage_1h
UNION ALL
SELECT ts, tenant, route, rule, allowed, rejected, cost FROM corrections FINAL;
