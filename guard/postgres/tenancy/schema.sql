-- SPDX-License-Identifier: Apache-2.0
-- A cell's own rows, version 1. "@s" stands for the schema's name. Every statement may run
-- again; the file runs in one transaction. Changes are additive: an older build runs
-- on the newer schema.

CREATE SCHEMA IF NOT EXISTS @s;

CREATE TABLE IF NOT EXISTS @s.tenancy_meta (
	one     boolean PRIMARY KEY DEFAULT true CHECK (one),
	version integer NOT NULL
);

-- Whether this is the first cell, and the cell's name. Never changed.
CREATE TABLE IF NOT EXISTS @s.own_first (
	one   boolean PRIMARY KEY DEFAULT true CHECK (one),
	first boolean NOT NULL,
	cell  text COLLATE "C" NOT NULL CHECK (cell ~ '^[a-z0-9-]{1,32}$')
);

CREATE TABLE IF NOT EXISTS @s.own_mode (
	one        boolean PRIMARY KEY DEFAULT true CHECK (one),
	mode       text NOT NULL CHECK (mode IN ('recording', 'enforced')),
	changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The accepted fingerprints, in their stable encoding.
CREATE TABLE IF NOT EXISTS @s.own_self (
	one        boolean PRIMARY KEY DEFAULT true CHECK (one),
	current    text NOT NULL,
	next       text,
	changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The tenants that the cell holds.
CREATE TABLE IF NOT EXISTS @s.tenancy (
	tenant text COLLATE "C" PRIMARY KEY CHECK (tenant NOT IN ('', '-', '*')),
	since  timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE IF NOT EXISTS @s.heartbeats (
	instance    text COLLATE "C" PRIMARY KEY,
	cell        text NOT NULL DEFAULT '',
	mode        text NOT NULL DEFAULT '',
	fingerprint text,
	build       text NOT NULL DEFAULT '',
	gated       text NOT NULL DEFAULT '',
	workers     boolean NOT NULL,
	lease       text NOT NULL DEFAULT '',
	at          timestamptz NOT NULL
);

-- The rule of the first row, as guard/tenancy has it. Its own search path: it runs
-- with its owner's rights in whoever's session.
CREATE OR REPLACE FUNCTION @s.tenancy_state() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT CASE
		WHEN m.mode IS NULL AND f.first IS NULL AND NOT r.self AND NOT r.tenancy THEN 'open'
		WHEN m.mode IS NULL OR f.first IS NULL OR NOT r.self THEN 'partial'
		WHEN f.first AND m.mode = 'recording' THEN 'recording'
		ELSE 'enforced' END
	FROM (SELECT EXISTS (SELECT FROM @s.own_self) AS self, EXISTS (SELECT FROM @s.tenancy) AS tenancy) r
	LEFT JOIN @s.own_mode m ON true LEFT JOIN @s.own_first f ON true
$$;

-- tenancy_refuse is what the tenant triggers call for a row of an unmarked session.
-- A column that is not there any more refuses: the trigger's argument is then stale.
CREATE OR REPLACE FUNCTION @s.tenancy_refuse() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_state  text := @s.tenancy_state();
	v_row    jsonb;
	v_tenant text;
BEGIN
	IF v_state IN ('open', 'recording') THEN
		RETURN NULL;
	END IF;
	v_row := to_jsonb(NEW);
	v_tenant := v_row ->> TG_ARGV[0];
	IF v_row ? TG_ARGV[0] AND (v_tenant IS NULL OR v_tenant IN ('', '-', '*')
		OR EXISTS (SELECT FROM @s.tenancy t WHERE t.tenant = v_tenant)) THEN
		RETURN NULL;
	END IF;
	RAISE EXCEPTION USING ERRCODE = 'LT010',
		MESSAGE = format('%s on %I.%I of a row of tenant %s, which this cell does not hold', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, coalesce(v_tenant, '(no such column)')),
		DETAIL = format('The state of the cell''s own rows is %s.', v_state),
		HINT = 'Place the tenant with cell place, and write with a build that runs the tenancy check.';
END
$$;

CREATE OR REPLACE FUNCTION @s.own_first_keep() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = 'LT011', MESSAGE = 'the first row of a cell is never changed';
END
$$;

CREATE OR REPLACE TRIGGER own_first_row BEFORE UPDATE OR DELETE ON @s.own_first
	FOR EACH ROW EXECUTE FUNCTION @s.own_first_keep();
CREATE OR REPLACE TRIGGER own_first_truncate BEFORE TRUNCATE ON @s.own_first
	FOR EACH STATEMENT EXECUTE FUNCTION @s.own_first_keep();
ALTER TABLE @s.own_first ENABLE ALWAYS TRIGGER own_first_row;
ALTER TABLE @s.own_first ENABLE ALWAYS TRIGGER own_first_truncate;
