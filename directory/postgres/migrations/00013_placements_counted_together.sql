-- +goose Up
-- The placements that one statement makes are counted by one change of the cell's row, not by
-- one each: every version of that row is one that those after it have to pass.

-- +goose StatementBegin
CREATE FUNCTION deployment_placements_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE deployment_cells c SET placements = c.placements + m.n
    FROM (SELECT name, count(*) AS n FROM (SELECT cell AS name FROM made UNION ALL SELECT moving_to FROM made WHERE moving_to <> '') x GROUP BY name) m
    WHERE c.name = m.name;
    RETURN NULL;
END $$;
-- +goose StatementEnd
DROP TRIGGER deployment_placements_counted ON deployment_placements;
CREATE TRIGGER deployment_placements_counted AFTER UPDATE ON deployment_placements FOR EACH ROW EXECUTE FUNCTION deployment_placements_count();
CREATE TRIGGER deployment_placements_made AFTER INSERT ON deployment_placements REFERENCING NEW TABLE AS made
    FOR EACH STATEMENT EXECUTE FUNCTION deployment_placements_made();

-- +goose Down
DROP TRIGGER deployment_placements_made ON deployment_placements;
DROP FUNCTION deployment_placements_made;
DROP TRIGGER deployment_placements_counted ON deployment_placements;
CREATE TRIGGER deployment_placements_counted AFTER INSERT OR UPDATE ON deployment_placements FOR EACH ROW EXECUTE FUNCTION deployment_placements_count();
