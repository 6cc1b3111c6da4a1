-- +goose Up
-- The catalogue: how the processes of a version are run.
CREATE TABLE versions (
    name TEXT COLLATE "C" PRIMARY KEY,
    doc  JSON NOT NULL
);

-- Cells that are provisioned: what they should be, and what was last said of them.
-- A retired one keeps its row, so that generations never fall.
CREATE TABLE provisioned (
    cell       TEXT COLLATE "C" PRIMARY KEY,
    version    TEXT COLLATE "C" NOT NULL,
    desired    TEXT NOT NULL,
    generation BIGINT NOT NULL,
    doc        JSON NOT NULL
);
CREATE INDEX provisioned_version ON provisioned (version);
INSERT INTO meta (name, value) VALUES ('specs_revision', 0);

-- +goose Down
DELETE FROM meta WHERE name = 'specs_revision';
DROP TABLE provisioned;
DROP TABLE versions;
