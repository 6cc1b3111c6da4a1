-- +goose Up
-- Whole deployments that are cells. What is not in columns is in the document, whose
-- members older builds leave alone.
CREATE TABLE deployment_cells (
    name          TEXT COLLATE "C" PRIMARY KEY,
    first         BIGINT NOT NULL,
    deployment_id TEXT COLLATE "C" NOT NULL UNIQUE,
    placements    BIGINT NOT NULL, -- kept by the trigger below
    revision      BIGINT NOT NULL,
    doc           JSON NOT NULL
);
CREATE UNIQUE INDEX deployment_cells_first ON deployment_cells (first) WHERE first = 1;
CREATE TRIGGER deployment_cells_never BEFORE DELETE ON deployment_cells FOR EACH ROW EXECUTE FUNCTION never();

-- Every cell's host, and the shared host's aliases.
CREATE TABLE deployment_hosts (
    host TEXT COLLATE "C" PRIMARY KEY,
    cell TEXT COLLATE "C" NOT NULL REFERENCES deployment_cells (name)
);

-- The SHA-256 of the credentials that cells call the router with.
CREATE TABLE deployment_credentials (
    sha256 TEXT COLLATE "C" PRIMARY KEY,
    cell   TEXT COLLATE "C" NOT NULL REFERENCES deployment_cells (name)
);

CREATE TABLE deployment_placements (
    tenant    TEXT COLLATE "C" PRIMARY KEY,
    cell      TEXT COLLATE "C" NOT NULL REFERENCES deployment_cells (name),
    placed_by TEXT NOT NULL,
    actor     TEXT NOT NULL,
    at        BIGINT NOT NULL,
    epoch     BIGINT NOT NULL,
    move      TEXT NOT NULL
);
CREATE INDEX deployment_placements_cell ON deployment_placements (cell, tenant);

-- +goose StatementBegin
CREATE FUNCTION deployment_placements_count() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF NOT EXISTS (SELECT 1 FROM meta WHERE name = 'deployments_movable' AND value = 1) THEN
            RAISE EXCEPTION 'placements of a pinned directory never change' USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        UPDATE deployment_cells SET placements = placements - 1 WHERE name = OLD.cell;
    END IF;
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.cell;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER deployment_placements_counted AFTER INSERT OR UPDATE ON deployment_placements FOR EACH ROW EXECUTE FUNCTION deployment_placements_count();
CREATE TRIGGER deployment_placements_never BEFORE DELETE ON deployment_placements FOR EACH ROW EXECUTE FUNCTION never();
CREATE TRIGGER deployment_placements_never_all BEFORE TRUNCATE ON deployment_placements FOR EACH STATEMENT EXECUTE FUNCTION never();

-- Builds that know schema 7 run beside this one: it only adds.
INSERT INTO meta (name, value) VALUES ('needs_schema', 7);

-- +goose Down
DELETE FROM meta WHERE name IN ('needs_schema', 'deployments_movable', 'deployments_revision');
DROP TABLE deployment_placements, deployment_credentials, deployment_hosts, deployment_cells;
DROP FUNCTION deployment_placements_count;
