-- SPDX-License-Identifier: Apache-2.0
-- Byte order ("C") makes pages and cursors the same in every cell, whatever the
-- database's collation.
CREATE TABLE IF NOT EXISTS memory_items (
	tenant     text   NOT NULL,
	namespace  text   COLLATE "C" NOT NULL,
	key        text   COLLATE "C" NOT NULL,
	value      text,
	version    bigint NOT NULL,
	event_seq  bigint NOT NULL,
	epoch      bigint NOT NULL,
	cell       text   NOT NULL,
	deleted    boolean NOT NULL,
	updated_at bigint NOT NULL,
	PRIMARY KEY (tenant, namespace, key)
);
CREATE TABLE IF NOT EXISTS memory_history (
	tenant     text   NOT NULL,
	namespace  text   COLLATE "C" NOT NULL,
	key        text   COLLATE "C" NOT NULL,
	value      text,
	version    bigint NOT NULL,
	event_seq  bigint NOT NULL,
	epoch      bigint NOT NULL,
	cell       text   NOT NULL,
	deleted    boolean NOT NULL,
	updated_at bigint NOT NULL,
	PRIMARY KEY (tenant, namespace, key, version)
);
