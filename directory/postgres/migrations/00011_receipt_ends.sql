-- +goose Up
-- When the receipts that lack their end are to get it. Those of older builds are looked at once.
CREATE TABLE receipt_ends (
    move TEXT PRIMARY KEY,
    at   BIGINT NOT NULL
);
CREATE INDEX receipt_ends_at ON receipt_ends (at);
INSERT INTO receipt_ends (move, at) SELECT DISTINCT move, 0 FROM receipts;

-- +goose Down
DROP TABLE receipt_ends;
