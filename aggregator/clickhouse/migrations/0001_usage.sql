-- usage is the ledger: what one gateway saw for one tenant, route and outcome in one flush. Every request is in exactly
-- one row, so sum(allowed + rejected) over usage FINAL is the number of requests.
--
-- (gateway, boot, seq) names a report for ever and entry its place in it; the content of a report never changes, so rows
-- of equal key are equal and FINAL collapses them, whatever was inserted twice. ts is the partition and in the key: equal
-- rows share a partition. A tenant is a caller's word: many and long, hence not LowCardinality.
--
-- The order is by minute, the finest that roll-ups know: what they cannot answer, the cut minutes at the ends of a time, is
-- together; what comes in is near the end, so that merges and FINAL have little to sort. ts itself is not in the key: by the
-- minute alone the server sees which rows a condition on ts wants.
CREATE TABLE IF NOT EXISTS usage
(
    ts             DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    gateway        LowCardinality(String),
    boot           String CODEC(ZSTD(1)),
    seq            UInt64 CODEC(T64, ZSTD(1)),
    entry          UInt32 CODEC(T64, ZSTD(1)),
    tenant         String CODEC(ZSTD(1)),
    route          LowCardinality(String),
    rule           LowCardinality(String) COMMENT 'the refusing rule, empty when allowed',
    layer          LowCardinality(String) COMMENT 'its layer',
    allowed        UInt64 CODEC(T64, ZSTD(1)),
    rejected       UInt64 CODEC(T64, ZSTD(1)),
    cost           UInt64 COMMENT 'tokens asked for by these requests' CODEC(T64, ZSTD(1)),
    policy_version UInt64 CODEC(T64, ZSTD(1)),
    received       DateTime64(3, 'UTC') COMMENT 'arrival in the stream, by its clock: ts far from it means a wrong clock at the gateway' CODEC(DoubleDelta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(ts)
ORDER BY (toStartOfMinute(ts), tenant, gateway, boot, seq, entry)
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;

-- reports has a row for each report that is stored whole: it is written last. It answers "is it there already?" also
-- outside every deduplication window, and a missing seq of a boot is a report that was lost.
CREATE TABLE IF NOT EXISTS reports
(
    gateway  LowCardinality(String),
    boot     String CODEC(ZSTD(1)),
    seq      UInt64 CODEC(Delta, ZSTD(1)),
    batch    String COMMENT 'the deduplication token of the inserts that stored it' CODEC(ZSTD(1)),
    position UInt64 COMMENT 'sequence number in the stream' CODEC(Delta, ZSTD(1)),
    received DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    sealed   DateTime64(3, 'UTC') COMMENT 'by the gateway''s clock, 1970 when not said' CODEC(DoubleDelta, ZSTD(1)),
    requests UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(received)
ORDER BY (gateway, boot, seq)
SETTINGS index_granularity = 1024, non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;
