-- +goose Up
CREATE TABLE routes_meta (
    one      integer NOT NULL PRIMARY KEY CHECK (one = 1),
    revision bigint  NOT NULL
);
INSERT INTO routes_meta (one, revision) VALUES (1, 0);

-- "row" is the whole row as JSON; the columns before it repeat what is searched.
CREATE TABLE routes (
    tenant   text COLLATE "C" NOT NULL PRIMARY KEY,
    revision bigint NOT NULL UNIQUE,
    state    text   NOT NULL,
    cell     text   NOT NULL,
    source   text   NOT NULL,
    target   text   NOT NULL,
    epoch    bigint NOT NULL,
    row      json   NOT NULL
);
