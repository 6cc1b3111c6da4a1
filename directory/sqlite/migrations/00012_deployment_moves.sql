-- +goose Up
-- A move between deployments has its place in the target before it begins: the tenant
-- counts in both cells until the move is over.
ALTER TABLE deployment_placements ADD COLUMN moving_to TEXT NOT NULL DEFAULT '';
ALTER TABLE deployment_placements ADD COLUMN moving_by TEXT NOT NULL DEFAULT '';

-- +goose StatementBegin
CREATE TRIGGER deployment_placements_moving AFTER UPDATE OF moving_to ON deployment_placements BEGIN
    UPDATE deployment_cells SET placements = placements - 1 WHERE name = OLD.moving_to;
    UPDATE deployment_cells SET placements = placements + 1 WHERE name = NEW.moving_to;
END;
-- +goose StatementEnd

-- +goose Down
DROP TRIGGER deployment_placements_moving;
ALTER TABLE deployment_placements DROP COLUMN moving_by;
ALTER TABLE deployment_placements DROP COLUMN moving_to;
