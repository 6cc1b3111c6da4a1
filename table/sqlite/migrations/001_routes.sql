-- +goose Up
CREATE TABLE cells_routes_meta (
    one      INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    revision INTEGER NOT NULL
) STRICT;
INSERT INTO cells_routes_meta (one, revision) VALUES (1, 0);

-- "row" is the whole row as JSON; the columns before it repeat what is searched.
CREATE TABLE cells_routes (
    tenant   TEXT    NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL UNIQUE,
    state    TEXT    NOT NULL,
    cell     TEXT    NOT NULL,
    source   TEXT    NOT NULL,
    target   TEXT    NOT NULL,
    epoch    INTEGER NOT NULL,
    row      TEXT    NOT NULL
) STRICT;
