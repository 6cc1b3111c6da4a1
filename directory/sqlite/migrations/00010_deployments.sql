-- +goose Up
-- Whole deployments that are cells. What is not in columns is in the document, whose
-- members older builds leave alone.
CREATE TABLE deployment_cells (
    name          TEXT PRIMARY KEY,
    first         INTEGER NOT NULL,
    deployment_id TEXT NOT NULL UNIQUE,
    placements    INTEGER NOT NULL, -- kept by the triggers below
    revision      INTEGER NOT NULL,
    doc           TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX deployment_cells_first ON deployment_cells (first) WHERE first = 1;
-- +goose StatementBegin
CREATE TRIGGER deployment_cells_never BEFORE DELETE ON deployment_cells BEGIN
    SELECT RAISE(ABORT, 'deployment_cells are never removed');
END;
-- +goose StatementEnd

-- Every cell's host, and the shared host's aliases.
CREATE TABLE deployment_hosts (
    host TEXT PRIMARY KEY,
    cell TEXT NOT NULL REFERENCES deployment_cells (name)
) STRICT;

-- The SHA-256 of the credentials that cells call the router with.
CREATE TABLE deployment_credentials (
    sha256 TEXT PRIMARY KEY,
    cell   TEXT NOT NULL REFERENCES deployment_cells (name)
) STRICT;

CREATE TABLE deployment_placements (
    tenant    TEXT PRIMARY KEY,
    cell      TEXT NOT NULL REFERENCES deployment_cells (name),
    placed_by TEXT NOT NULL,
    actor     TEXT NOT NULL,
    at        INTEGER NOT NULL,
    epoch     INTEGER NOT NULL,
    move      TEXT NOT NULL
) STRICT;
CREATE INDEX deployment_placements_cell ON deployment_placements (cell, tenant);

-- +goose StatementBegin
CREATE TRIGGER deployment_placements_insert AFTER INSERT ON deployment_placements BEGIN
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.cell;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER deployment_placements_pinned BEFORE UPDATE ON deployment_placements
WHEN NOT EXISTS (SELECT 1 FROM meta WHERE name = 'deployments_movable' AND value = 1) BEGIN
    SELECT RAISE(ABORT, 'placements of a pinned directory never change');
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER deployment_placements_update AFTER UPDATE OF cell ON deployment_placements BEGIN
    UPDATE deployment_cells SET placements = placements - 1 WHERE name = OLD.cell;
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.cell;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER deployment_placements_never BEFORE DELETE ON deployment_placements BEGIN
    SELECT RAISE(ABORT, 'deployment_placements are never removed');
END;
-- +goose StatementEnd

-- Builds that know schema 7 run beside this one: it only adds.
INSERT INTO meta (name, value) VALUES ('needs_schema', 7);

-- +goose Down
DELETE FROM meta WHERE name IN ('needs_schema', 'deployments_movable', 'deployments_revision');
DROP TABLE deployment_placements;
DROP TABLE deployment_credentials;
DROP TABLE deployment_hosts;
DROP TABLE deployment_cells;
