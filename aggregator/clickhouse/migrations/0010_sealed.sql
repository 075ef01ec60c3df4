-- The gateway's own word on what the history should have: also of the last reports of a boot, which no later one shows to be missing.
ALTER TABLE gateways ADD COLUMN IF NOT EXISTS sealed UInt64 DEFAULT 0 COMMENT 'number of the newest report with requests that this boot has sealed; 0 is not told';
