-- +goose Up
-- The catalogue: how the processes of a version are run.
CREATE TABLE versions (
    name TEXT PRIMARY KEY,
    doc  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Cells that are provisioned: what they should be, and what was last said of them.
-- A retired one keeps its row, so that generations never fall.
CREATE TABLE provisioned (
    cell       TEXT PRIMARY KEY,
    version    TEXT NOT NULL,
    desired    TEXT NOT NULL,
    generation INTEGER NOT NULL,
    doc        TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX provisioned_version ON provisioned (version);
INSERT INTO meta (name, value) VALUES ('specs_revision', 0);

-- +goose Down
DELETE FROM meta WHERE name = 'specs_revision';
DROP TABLE provisioned;
DROP TABLE versions;
