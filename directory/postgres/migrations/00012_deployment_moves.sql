-- +goose Up
-- A move between deployments has its place in the target before it begins: the tenant
-- counts in both cells until the move is over.
ALTER TABLE deployment_placements ADD COLUMN moving_to TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE deployment_placements ADD COLUMN moving_by TEXT NOT NULL DEFAULT '';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION deployment_placements_count() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF NOT EXISTS (SELECT 1 FROM meta WHERE name = 'deployments_movable' AND value = 1) THEN
            RAISE EXCEPTION 'placements of a pinned directory never change' USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        UPDATE deployment_cells SET placements = placements - 1 WHERE name = OLD.cell;
        UPDATE deployment_cells SET placements = placements - 1 WHERE name = OLD.moving_to;
    END IF;
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.cell;
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.moving_to;
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION deployment_placements_count() RETURNS trigger LANGUAGE plpgsql AS $$
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
ALTER TABLE deployment_placements DROP COLUMN moving_by;
ALTER TABLE deployment_placements DROP COLUMN moving_to;
