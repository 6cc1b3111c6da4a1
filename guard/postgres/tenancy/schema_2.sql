-- SPDX-License-Identifier: Apache-2.0
-- A cell's own rows, version 2.

-- How long the process uses what it has read of the rows; 0: an older build, which does
-- not say.
ALTER TABLE @s.heartbeats ADD COLUMN IF NOT EXISTS cache_ms bigint NOT NULL DEFAULT 0;
