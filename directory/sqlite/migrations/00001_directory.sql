-- +goose Up
CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT;
INSERT INTO meta (name, value) VALUES ('cells_revision', 0);

CREATE TABLE cells (
    id             TEXT PRIMARY KEY,
    spec           TEXT NOT NULL,
    state          TEXT NOT NULL,
    closed         INTEGER NOT NULL,
    placements_max INTEGER,
    is_default     INTEGER NOT NULL,
    placed         INTEGER NOT NULL DEFAULT 0, -- ledger rows of the cell; kept by the triggers below
    revision       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX cells_one_default ON cells (is_default) WHERE is_default = 1;

-- Hosts, aliases and issuers: each belongs to one cell.
CREATE TABLE cell_names (
    kind TEXT NOT NULL, -- host, issuer
    name TEXT NOT NULL,
    cell TEXT NOT NULL REFERENCES cells (id),
    PRIMARY KEY (kind, name)
) STRICT;
CREATE INDEX cell_names_cell ON cell_names (cell);

-- The ledger: RESERVED and PLACED rows count, GONE rows (cell '') keep the
-- revision of a tombstone so that late settlements are recognised.
CREATE TABLE placements (
    tenant     TEXT PRIMARY KEY,
    cell       TEXT NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('RESERVED', 'PLACED', 'GONE')),
    operation  TEXT NOT NULL,
    actor      TEXT NOT NULL,
    revision   INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX placements_cell ON placements (cell);
CREATE INDEX placements_reserved ON placements (tenant) WHERE state = 'RESERVED';

-- +goose StatementBegin
CREATE TRIGGER placements_insert AFTER INSERT ON placements BEGIN
    UPDATE cells SET placed = placed + 1 WHERE id = NEW.cell;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER placements_delete AFTER DELETE ON placements BEGIN
    UPDATE cells SET placed = placed - 1 WHERE id = OLD.cell;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER placements_update AFTER UPDATE OF cell ON placements WHEN OLD.cell <> NEW.cell BEGIN
    UPDATE cells SET placed = placed - 1 WHERE id = OLD.cell;
    UPDATE cells SET placed = placed + 1 WHERE id = NEW.cell;
END;
-- +goose StatementEnd

CREATE TABLE operations (
    id         TEXT PRIMARY KEY,
    kind       TEXT NOT NULL,
    tenant     TEXT NOT NULL,
    cell       TEXT NOT NULL,
    answer     TEXT,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE moves (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    tenant     TEXT NOT NULL,
    to_cell    TEXT NOT NULL,
    state      TEXT NOT NULL,
    active     INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,
    driver     TEXT NOT NULL,
    beat       INTEGER NOT NULL DEFAULT 0,
    version    INTEGER NOT NULL,
    doc        TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX moves_one_active ON moves (tenant) WHERE active = 1;
CREATE INDEX moves_incoming ON moves (to_cell) WHERE active = 1;
CREATE INDEX moves_unfinished ON moves (seq) WHERE unfinished = 1;
CREATE INDEX moves_tenant ON moves (tenant, seq);

CREATE TABLE members (
    cell      TEXT NOT NULL,
    instance  TEXT NOT NULL,
    heartbeat TEXT NOT NULL,
    beat      INTEGER NOT NULL,
    seen_at   INTEGER NOT NULL,
    PRIMARY KEY (cell, instance)
) STRICT;

CREATE TABLE budgets (
    tenant   TEXT NOT NULL,
    move     TEXT NOT NULL,
    at       INTEGER NOT NULL,
    pause    INTEGER NOT NULL, -- nanoseconds
    reserved INTEGER NOT NULL,
    PRIMARY KEY (tenant, move)
) STRICT;

CREATE TABLE audit (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    at         INTEGER NOT NULL,
    peer       TEXT NOT NULL,
    actor      TEXT NOT NULL,
    request_id TEXT NOT NULL,
    action     TEXT NOT NULL,
    tenant     TEXT NOT NULL,
    cell       TEXT NOT NULL,
    move       TEXT NOT NULL,
    detail     TEXT NOT NULL
) STRICT;
CREATE INDEX audit_tenant ON audit (tenant, seq) WHERE tenant <> '';

-- +goose Down
DROP TABLE audit;
DROP TABLE budgets;
DROP TABLE members;
DROP TABLE moves;
DROP TABLE operations;
DROP TABLE placements;
DROP TABLE cell_names;
DROP TABLE cells;
DROP TABLE meta;
