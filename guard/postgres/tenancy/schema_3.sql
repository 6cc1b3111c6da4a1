-- SPDX-License-Identifier: Apache-2.0
-- A cell's own rows, version 3.

-- The process's run-time settings, a JSON object of texts; null: an older build, which
-- does not say.
ALTER TABLE @s.heartbeats ADD COLUMN IF NOT EXISTS settings jsonb;
