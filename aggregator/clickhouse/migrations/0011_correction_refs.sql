-- correction_refs binds a ref to the month of its correction: tokens are known within a partition, and a ref is one over all of them.
-- A row is never changed; one whose correction was not stored in the end keeps its ref for that month.
CREATE TABLE IF NOT EXISTS correction_refs
(
    ref   String,
    month UInt32 COMMENT 'the partition of corrections that it may be stored in'
)
ENGINE = MergeTree
ORDER BY ref
SETTINGS non_replicated_deduplication_window = 10000, fsync_after_insert = 1, fsync_part_directory = 1;
