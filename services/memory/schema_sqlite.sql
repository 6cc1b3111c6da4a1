-- SPDX-License-Identifier: Apache-2.0
CREATE TABLE IF NOT EXISTS memory_items (
	tenant     TEXT    NOT NULL,
	namespace  TEXT    NOT NULL,
	key        TEXT    NOT NULL,
	value      TEXT,
	version    INTEGER NOT NULL,
	event_seq  INTEGER NOT NULL,
	epoch      INTEGER NOT NULL,
	cell       TEXT    NOT NULL,
	deleted    INTEGER NOT NULL,
	updated_at INTEGER NOT NULL,
	PRIMARY KEY (tenant, namespace, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS memory_history (
	tenant     TEXT    NOT NULL,
	namespace  TEXT    NOT NULL,
	key        TEXT    NOT NULL,
	value      TEXT,
	version    INTEGER NOT NULL,
	event_seq  INTEGER NOT NULL,
	epoch      INTEGER NOT NULL,
	cell       TEXT    NOT NULL,
	deleted    INTEGER NOT NULL,
	updated_at INTEGER NOT NULL,
	PRIMARY KEY (tenant, namespace, key, version)
) WITHOUT ROWID;
