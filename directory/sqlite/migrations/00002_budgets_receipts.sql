-- +goose Up
ALTER TABLE budgets ADD COLUMN driver INTEGER NOT NULL DEFAULT 0; -- nanoseconds
ALTER TABLE budgets ADD COLUMN seen INTEGER; -- nanoseconds; NULL: no edge has reported
ALTER TABLE budgets ADD COLUMN forced INTEGER NOT NULL DEFAULT 0;
ALTER TABLE budgets ADD COLUMN actor TEXT NOT NULL DEFAULT '';
UPDATE budgets SET driver = pause WHERE reserved = 0;

-- Limits: tenant '' is everybody's.
CREATE TABLE budget_limits (
    tenant TEXT PRIMARY KEY,
    pause  INTEGER NOT NULL, -- nanoseconds within the window
    actor  TEXT NOT NULL,
    at     INTEGER NOT NULL
) STRICT;

-- What the clients of each edge process saw of each move.
CREATE TABLE seen (
    move     TEXT NOT NULL,
    edge     TEXT NOT NULL,
    instance TEXT NOT NULL,
    seq      INTEGER NOT NULL,
    refused  INTEGER NOT NULL,
    first_at INTEGER NOT NULL, -- microseconds, by the directory's clock; 0: nothing was refused
    last_at  INTEGER NOT NULL,
    PRIMARY KEY (move, edge, instance)
) STRICT;

-- The receipts of moves: entries are added, and never changed.
CREATE TABLE receipts (
    move  TEXT NOT NULL,
    n     INTEGER NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (move, n)
) STRICT;
-- +goose StatementBegin
CREATE TRIGGER receipts_update BEFORE UPDATE ON receipts BEGIN
    SELECT RAISE(ABORT, 'receipts are never changed');
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER receipts_delete BEFORE DELETE ON receipts BEGIN
    SELECT RAISE(ABORT, 'receipts are never removed');
END;
-- +goose StatementEnd

-- +goose Down
DROP TABLE receipts;
DROP TABLE seen;
DROP TABLE budget_limits;
ALTER TABLE budgets DROP COLUMN actor;
ALTER TABLE budgets DROP COLUMN forced;
ALTER TABLE budgets DROP COLUMN seen;
ALTER TABLE budgets DROP COLUMN driver;
