-- A report whose name is stored already is the same one again, or another that must not be passed over.
ALTER TABLE reports ADD COLUMN IF NOT EXISTS content UInt64 DEFAULT 0 COMMENT 'digest of its usage; 0 when it was stored before there was one';
