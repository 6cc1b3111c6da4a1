-- SPDX-License-Identifier: Apache-2.0
-- The guard's tables and functions. "@s" stands for the schema's name. Every
-- statement may run again; package postgres runs the file in one transaction.

CREATE SCHEMA IF NOT EXISTS @s;

CREATE TABLE IF NOT EXISTS @s.meta (
	one     boolean PRIMARY KEY DEFAULT true CHECK (one),
	version integer NOT NULL
);

-- One row for each tenant. No row stands for: open at epoch 0.
CREATE TABLE IF NOT EXISTS @s.fence (
	tenant     text COLLATE "C" PRIMARY KEY,
	epoch      bigint NOT NULL CHECK (epoch >= 0),
	floor      bigint NOT NULL CHECK (floor >= 0 AND floor <= epoch),
	is_open    boolean NOT NULL,
	move       text NOT NULL DEFAULT '',
	changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The last event_seq given out here. Its row lock orders the tenant's commits.
CREATE TABLE IF NOT EXISTS @s.outbox_head (
	tenant text COLLATE "C" PRIMARY KEY,
	seq    bigint NOT NULL CHECK (seq >= 0)
) WITH (fillfactor = 50);

-- Travels with the tenant.
CREATE TABLE IF NOT EXISTS @s.outbox (
	tenant    text COLLATE "C" NOT NULL,
	event_seq bigint NOT NULL CHECK (event_seq > 0),
	epoch     bigint NOT NULL,
	cell      text NOT NULL DEFAULT '',
	id        text NOT NULL DEFAULT gen_random_uuid()::text,
	type      text NOT NULL,
	payload   json NOT NULL,
	at        timestamptz NOT NULL DEFAULT clock_timestamp(),
	PRIMARY KEY (tenant, event_seq)
);

-- Travels with the tenant.
CREATE TABLE IF NOT EXISTS @s.outbox_published (
	tenant text COLLATE "C" PRIMARY KEY,
	seq    bigint NOT NULL CHECK (seq >= 0)
) WITH (fillfactor = 50);

-- The relay's orders; they stay in the cell.
CREATE TABLE IF NOT EXISTS @s.outbox_barrier (
	tenant text COLLATE "C" PRIMARY KEY,
	paused boolean NOT NULL,
	epoch  bigint NOT NULL,
	move   text NOT NULL DEFAULT ''
);

CREATE OR REPLACE FUNCTION @s.fence_key(p_tenant text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT hashtextextended('@s.fence ' || p_tenant, 0)
$$;

CREATE OR REPLACE FUNCTION @s.relay_key(p_tenant text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT hashtextextended('@s.relay ' || p_tenant, 0)
$$;

-- locked_fence returns the tenant's fence and holds it until the transaction
-- ends (or the savepoint in which it was called is rolled back).
--
-- The advisory lock is what orders have to wait for; its queue is fair, so that
-- a stream of writers cannot starve an order. After it, READ COMMITTED reads
-- with a new snapshot. The other levels would read with the transaction's old
-- one: there the row is locked too, which fails (40001) if it has changed since.
CREATE OR REPLACE FUNCTION @s.locked_fence(p_tenant text) RETURNS @s.fence
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
	f @s.fence;
BEGIN
	PERFORM pg_advisory_xact_lock_shared(@s.fence_key(p_tenant));
	IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
	   AND current_setting('transaction_read_only') = 'off' THEN
		SELECT * INTO f FROM @s.fence WHERE tenant = p_tenant FOR SHARE;
	ELSE
		SELECT * INTO f FROM @s.fence WHERE tenant = p_tenant;
	END IF;
	RETURN f;
END
$$;

-- admit lets the transaction write rows of one tenant if its fence is open and
-- admits the epoch; otherwise it fails with SQLSTATE LT001.
CREATE OR REPLACE FUNCTION @s.admit(p_tenant text, p_epoch bigint, p_cell text DEFAULT '') RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
	f @s.fence;
BEGIN
	f := @s.locked_fence(p_tenant);
	IF f.tenant IS NULL AND p_epoch = 0 AND current_setting('transaction_read_only') = 'off' THEN
		INSERT INTO @s.fence (tenant, epoch, floor, is_open) VALUES (p_tenant, 0, 0, true) ON CONFLICT (tenant) DO NOTHING;
		f := @s.locked_fence(p_tenant);
	END IF;
	IF f.tenant IS NULL AND p_epoch = 0 THEN
		RETURN;
	END IF;
	IF f.tenant IS NULL OR NOT f.is_open OR p_epoch IS NULL OR p_epoch < f.floor OR p_epoch > f.epoch THEN
		RAISE EXCEPTION USING ERRCODE = 'LT001',
			MESSAGE = format('tenant %s is not written here at epoch %s', p_tenant, coalesce(p_epoch::text, 'NULL')),
			DETAIL = CASE WHEN f.tenant IS NULL THEN 'There is no fence of this tenant here.'
				WHEN f.is_open THEN format('The fence is open from %s to %s.', f.floor, f.epoch)
				ELSE format('The fence is closed at %s.', f.epoch) END;
	END IF;
	IF current_setting('transaction_read_only') = 'off' THEN
		PERFORM set_config('@s.admitted', pg_current_xact_id()::text || ' ' || p_tenant, true),
			set_config('@s.admission', p_epoch::text || ' ' || coalesce(p_cell, ''), true);
	END IF;
END
$$;

-- admit_current admits at the epoch that the tenant's fence is open at, and
-- returns it; for people at psql and for migrations that rewrite rows.
CREATE OR REPLACE FUNCTION @s.admit_current(p_tenant text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
	e bigint := coalesce((@s.locked_fence(p_tenant)).epoch, 0);
BEGIN
	PERFORM @s.admit(p_tenant, e);
	RETURN e;
END
$$;

-- admit_closed lets the transaction import or remove rows of one tenant while
-- its fence is closed at exactly this epoch, by this move (NULL: by any).
CREATE OR REPLACE FUNCTION @s.admit_closed(p_tenant text, p_epoch bigint, p_move text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
	f @s.fence := @s.locked_fence(p_tenant);
BEGIN
	IF f.tenant IS NULL OR f.is_open OR f.epoch IS DISTINCT FROM p_epoch OR f.move <> coalesce(p_move, f.move) THEN
		RAISE EXCEPTION USING ERRCODE = 'LT002',
			MESSAGE = format('the fence of tenant %s is not closed at epoch %s by move %s', p_tenant, p_epoch, coalesce(p_move, '(any)')),
			DETAIL = CASE WHEN f.tenant IS NULL THEN 'There is no fence of this tenant here.'
				WHEN f.is_open THEN format('The fence is open from %s to %s.', f.floor, f.epoch)
				ELSE format('The fence is closed at %s by move %s.', f.epoch, f.move) END;
	END IF;
	PERFORM set_config('@s.admitted', pg_current_xact_id()::text || ' ' || p_tenant, true),
		set_config('@s.admission', '', true);
END
$$;

-- last_seq is the highest event_seq that this database knows of a tenant.
CREATE OR REPLACE FUNCTION @s.last_seq(p_tenant text) RETURNS bigint
LANGUAGE sql STABLE AS $$
	SELECT greatest(
		(SELECT h.seq FROM @s.outbox_head h WHERE h.tenant = p_tenant),
		(SELECT max(o.event_seq) FROM @s.outbox o WHERE o.tenant = p_tenant),
		(SELECT p.seq FROM @s.outbox_published p WHERE p.tenant = p_tenant), 0)
$$;

-- emit writes an event of the admitted tenant and returns its event_seq. From
-- here to its end the transaction is the only one that can emit for the tenant.
CREATE OR REPLACE FUNCTION @s.emit(p_type text, p_payload json) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
	v_prefix    text := pg_current_xact_id()::text || ' ';
	v_marker    text := coalesce(current_setting('@s.admitted', true), '');
	v_admission text := coalesce(current_setting('@s.admission', true), '');
	v_tenant    text;
	v_seq       bigint;
BEGIN
	IF NOT starts_with(v_marker, v_prefix) OR v_admission = '' THEN
		RAISE EXCEPTION USING ERRCODE = 'LT001', MESSAGE = 'the transaction has no admission',
			HINT = 'Call @s.admit(tenant, epoch) first, in the same transaction.';
	END IF;
	v_tenant := substr(v_marker, length(v_prefix) + 1);
	UPDATE @s.outbox_head SET seq = seq + 1 WHERE tenant = v_tenant RETURNING seq INTO v_seq;
	IF NOT FOUND THEN
		INSERT INTO @s.outbox_head AS h (tenant, seq) VALUES (v_tenant, @s.last_seq(v_tenant) + 1)
			ON CONFLICT (tenant) DO UPDATE SET seq = h.seq + 1 RETURNING h.seq INTO v_seq;
	END IF;
	INSERT INTO @s.outbox (tenant, event_seq, epoch, cell, type, payload)
		VALUES (v_tenant, v_seq, split_part(v_admission, ' ', 1)::bigint, split_part(v_admission, ' ', 2), p_type, coalesce(p_payload, 'null'));
	RETURN v_seq;
END
$$;

-- refuse is called by the row triggers, whose WHEN lets admitted rows pass.
CREATE OR REPLACE FUNCTION @s.refuse() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
	v_tenant text;
BEGIN
	IF TG_LEVEL = 'STATEMENT' THEN
		RAISE EXCEPTION USING ERRCODE = 'LT001', MESSAGE = format('%I.%I holds rows of many tenants and is never truncated', TG_TABLE_SCHEMA, TG_TABLE_NAME),
			HINT = 'Delete one tenant''s rows under its admission.';
	END IF;
	v_tenant := CASE WHEN TG_OP = 'DELETE' THEN to_jsonb(OLD) ELSE to_jsonb(NEW) END ->> TG_ARGV[0];
	RAISE EXCEPTION USING ERRCODE = 'LT001',
		MESSAGE = format('%s on %I.%I of a row of tenant %s, which the transaction is not admitted for', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, v_tenant),
		HINT = 'Call @s.admit(tenant, epoch) first, in the same transaction.';
END
$$;
