-- SPDX-License-Identifier: Apache-2.0
-- The guard's tables. Every statement may run again; package sqlite runs the
-- file in one transaction.

CREATE TABLE IF NOT EXISTS cell_meta (
	one     INTEGER PRIMARY KEY CHECK (one = 1),
	version INTEGER NOT NULL
) STRICT;

-- One row for each tenant. No row stands for: open at epoch 0.
CREATE TABLE IF NOT EXISTS cell_fence (
	tenant  TEXT PRIMARY KEY,
	epoch   INTEGER NOT NULL CHECK (epoch >= 0),
	floor   INTEGER NOT NULL CHECK (floor >= 0 AND floor <= epoch),
	is_open INTEGER NOT NULL CHECK (is_open IN (0, 1)),
	move    TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;

-- The last event_seq given out here.
CREATE TABLE IF NOT EXISTS cell_outbox_head (
	tenant TEXT PRIMARY KEY,
	seq    INTEGER NOT NULL CHECK (seq >= 0)
) STRICT, WITHOUT ROWID;

-- Travels with the tenant.
CREATE TABLE IF NOT EXISTS cell_outbox (
	tenant    TEXT NOT NULL,
	event_seq INTEGER NOT NULL CHECK (event_seq > 0),
	epoch     INTEGER NOT NULL,
	cell      TEXT NOT NULL DEFAULT '',
	id        TEXT NOT NULL,
	type      TEXT NOT NULL,
	payload   TEXT NOT NULL,
	at        TEXT NOT NULL,
	PRIMARY KEY (tenant, event_seq)
) STRICT, WITHOUT ROWID;

-- Travels with the tenant.
CREATE TABLE IF NOT EXISTS cell_outbox_published (
	tenant TEXT PRIMARY KEY,
	seq    INTEGER NOT NULL CHECK (seq >= 0)
) STRICT, WITHOUT ROWID;

-- The relay's orders; they stay in the cell.
CREATE TABLE IF NOT EXISTS cell_outbox_barrier (
	tenant TEXT PRIMARY KEY,
	paused INTEGER NOT NULL CHECK (paused IN (0, 1)),
	epoch  INTEGER NOT NULL,
	move   TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;

-- A row while the tenant's events are being published. Rows belong to the
-- process that holds the relay's lock file; those of a dead one mean nothing.
CREATE TABLE IF NOT EXISTS cell_outbox_turn (
	tenant TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;
