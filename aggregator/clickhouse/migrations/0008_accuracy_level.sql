-- A bucket goes on from where the last judged second of its key left it, and judging goes on from where it was. Seconds judged
-- before there was a level left their bucket full. What rules of consistency local take is nobody else's, and is not judged.
ALTER TABLE tokens ADD COLUMN IF NOT EXISTS consistency LowCardinality(String) COMMENT 'lease, strict or local; empty is shared';
ALTER TABLE accuracy ADD COLUMN IF NOT EXISTS level Float64 DEFAULT limit_burst COMMENT 'of that bucket after the second; below 0 is what gateways may be ahead of it' CODEC(Gorilla, ZSTD(1));
ALTER TABLE accuracy ADD COLUMN IF NOT EXISTS seen DateTime64(3, 'UTC') DEFAULT ts COMMENT 'all that had arrived by then was judged when this row was written' CODEC(DoubleDelta, ZSTD(1));
