-- +goose Up
CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value BIGINT NOT NULL
);
INSERT INTO meta (name, value) VALUES ('cells_revision', 0);

CREATE TABLE cells (
    id             TEXT COLLATE "C" PRIMARY KEY,
    spec           TEXT NOT NULL,
    state          TEXT NOT NULL,
    closed         BIGINT NOT NULL,
    placements_max BIGINT,
    is_default     BIGINT NOT NULL,
    placed         BIGINT NOT NULL DEFAULT 0, -- ledger rows of the cell; kept by the trigger below
    revision       BIGINT NOT NULL,
    created_at     BIGINT NOT NULL,
    updated_at     BIGINT NOT NULL
);
CREATE UNIQUE INDEX cells_one_default ON cells (is_default) WHERE is_default = 1;

-- Hosts, aliases and issuers: each belongs to one cell.
CREATE TABLE cell_names (
    kind TEXT COLLATE "C" NOT NULL, -- host, issuer
    name TEXT COLLATE "C" NOT NULL,
    cell TEXT COLLATE "C" NOT NULL REFERENCES cells (id),
    PRIMARY KEY (kind, name)
);
CREATE INDEX cell_names_cell ON cell_names (cell);

-- The ledger: RESERVED and PLACED rows count, GONE rows (cell '') keep the
-- revision of a tombstone so that late settlements are recognised.
CREATE TABLE placements (
    tenant     TEXT COLLATE "C" PRIMARY KEY,
    cell       TEXT COLLATE "C" NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('RESERVED', 'PLACED', 'GONE')),
    operation  TEXT NOT NULL,
    actor      TEXT NOT NULL,
    revision   BIGINT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE INDEX placements_cell ON placements (cell);
CREATE INDEX placements_reserved ON placements (tenant) WHERE state = 'RESERVED';

-- +goose StatementBegin
CREATE FUNCTION placements_count() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE cells SET placed = placed - 1 WHERE id = OLD.cell;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE cells SET placed = placed + 1 WHERE id = NEW.cell;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER placements_added AFTER INSERT OR DELETE ON placements FOR EACH ROW EXECUTE FUNCTION placements_count();
CREATE TRIGGER placements_update AFTER UPDATE OF cell ON placements FOR EACH ROW WHEN (OLD.cell <> NEW.cell) EXECUTE FUNCTION placements_count();

CREATE TABLE operations (
    id         TEXT COLLATE "C" PRIMARY KEY,
    kind       TEXT NOT NULL,
    tenant     TEXT NOT NULL,
    cell       TEXT NOT NULL,
    answer     TEXT,
    created_at BIGINT NOT NULL
);

CREATE TABLE moves (
    seq        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id         TEXT COLLATE "C" NOT NULL UNIQUE,
    tenant     TEXT COLLATE "C" NOT NULL,
    to_cell    TEXT COLLATE "C" NOT NULL,
    state      TEXT NOT NULL,
    active     BIGINT NOT NULL,
    unfinished BIGINT NOT NULL,
    driver     TEXT NOT NULL,
    beat       BIGINT NOT NULL DEFAULT 0,
    version    BIGINT NOT NULL,
    doc        JSON NOT NULL
);
CREATE UNIQUE INDEX moves_one_active ON moves (tenant) WHERE active = 1;
CREATE INDEX moves_incoming ON moves (to_cell) WHERE active = 1;
CREATE INDEX moves_unfinished ON moves (seq) WHERE unfinished = 1;
CREATE INDEX moves_tenant ON moves (tenant, seq);

CREATE TABLE members (
    cell      TEXT COLLATE "C" NOT NULL,
    instance  TEXT COLLATE "C" NOT NULL,
    heartbeat JSON NOT NULL,
    beat      BIGINT NOT NULL,
    seen_at   BIGINT NOT NULL,
    PRIMARY KEY (cell, instance)
);

CREATE TABLE budgets (
    tenant   TEXT COLLATE "C" NOT NULL,
    move     TEXT COLLATE "C" NOT NULL,
    at       BIGINT NOT NULL,
    pause    BIGINT NOT NULL, -- nanoseconds
    reserved BIGINT NOT NULL,
    driver   BIGINT NOT NULL DEFAULT 0, -- nanoseconds
    seen     BIGINT, -- nanoseconds; NULL: no edge has reported
    forced   BIGINT NOT NULL DEFAULT 0,
    actor    TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (tenant, move)
);

-- Limits: tenant '' is everybody's.
CREATE TABLE budget_limits (
    tenant TEXT COLLATE "C" PRIMARY KEY,
    pause  BIGINT NOT NULL, -- nanoseconds within the window
    actor  TEXT NOT NULL,
    at     BIGINT NOT NULL
);

-- What the clients of each edge process saw of each move.
CREATE TABLE seen (
    move     TEXT COLLATE "C" NOT NULL,
    edge     TEXT COLLATE "C" NOT NULL,
    instance TEXT COLLATE "C" NOT NULL,
    seq      BIGINT NOT NULL,
    refused  BIGINT NOT NULL,
    first_at BIGINT NOT NULL, -- microseconds, by the directory's clock; 0: nothing was refused
    last_at  BIGINT NOT NULL,
    PRIMARY KEY (move, edge, instance)
);

-- The receipts of moves: entries are added, and never changed.
CREATE TABLE receipts (
    move  TEXT COLLATE "C" NOT NULL,
    n     BIGINT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (move, n)
);
-- +goose StatementBegin
CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% are never changed or removed', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
END $$;
-- +goose StatementEnd
CREATE TRIGGER receipts_never BEFORE UPDATE OR DELETE ON receipts FOR EACH ROW EXECUTE FUNCTION never();
CREATE TRIGGER receipts_never_all BEFORE TRUNCATE ON receipts FOR EACH STATEMENT EXECUTE FUNCTION never();

CREATE TABLE campaigns (
    seq       BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id        TEXT COLLATE "C" NOT NULL UNIQUE,
    state     TEXT NOT NULL,
    driven    BIGINT NOT NULL, -- there is something to do for a directory
    driver    TEXT NOT NULL,   -- '' when no directory does it
    beat      BIGINT NOT NULL DEFAULT 0,
    version   BIGINT NOT NULL,
    operation TEXT NOT NULL,
    doc       JSON NOT NULL
);
CREATE UNIQUE INDEX campaigns_operation ON campaigns (operation) WHERE operation <> '';
CREATE INDEX campaigns_driven ON campaigns (seq) WHERE driven = 1;

CREATE TABLE campaign_items (
    campaign TEXT COLLATE "C" NOT NULL REFERENCES campaigns (id),
    pos      BIGINT NOT NULL,
    state    TEXT NOT NULL,
    doc      JSON NOT NULL,
    PRIMARY KEY (campaign, pos)
);
CREATE INDEX campaign_items_state ON campaign_items (campaign, state, pos);

CREATE TABLE tenant_facts (
    tenant       TEXT COLLATE "C" PRIMARY KEY,
    grp          TEXT NOT NULL DEFAULT '',
    jurisdiction TEXT NOT NULL DEFAULT '',
    rows_n       BIGINT NOT NULL DEFAULT 0,
    bytes_n      BIGINT NOT NULL DEFAULT 0,
    measured_at  BIGINT NOT NULL DEFAULT 0 -- microseconds; 0 is never
);

CREATE TABLE audit (
    seq        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         BIGINT NOT NULL,
    peer       TEXT NOT NULL,
    actor      TEXT NOT NULL,
    request_id TEXT NOT NULL,
    action     TEXT NOT NULL,
    tenant     TEXT COLLATE "C" NOT NULL,
    cell       TEXT NOT NULL,
    move       TEXT NOT NULL,
    detail     TEXT NOT NULL
);
CREATE INDEX audit_tenant ON audit (tenant, seq) WHERE tenant <> '';
CREATE TRIGGER audit_never BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION never();
CREATE TRIGGER audit_never_all BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION never();

-- +goose Down
DROP TABLE audit, tenant_facts, campaign_items, campaigns, receipts, seen, budget_limits, budgets, members, moves, operations, placements, cell_names, cells, meta;
DROP FUNCTION never;
DROP FUNCTION placements_count;
