-- +goose Up
CREATE TABLE rollouts (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT NOT NULL UNIQUE,
    state     TEXT NOT NULL,
    driven    INTEGER NOT NULL, -- there is something to do for a directory
    driver    TEXT NOT NULL,    -- '' when no directory does it
    beat      INTEGER NOT NULL DEFAULT 0,
    version   INTEGER NOT NULL,
    operation TEXT NOT NULL,
    doc       TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX rollouts_operation ON rollouts (operation) WHERE operation <> '';
CREATE INDEX rollouts_driven ON rollouts (seq) WHERE driven = 1;

-- The cells of rollouts that are not over: each is of one at most.
CREATE TABLE rollout_cells (
    cell    TEXT PRIMARY KEY,
    rollout TEXT NOT NULL REFERENCES rollouts (id)
) STRICT, WITHOUT ROWID;

CREATE TABLE rollout_units (
    rollout TEXT NOT NULL REFERENCES rollouts (id),
    pos     INTEGER NOT NULL,
    unit    TEXT NOT NULL,
    wave    INTEGER NOT NULL,
    home    TEXT NOT NULL,
    state   TEXT NOT NULL,
    reason  TEXT NOT NULL DEFAULT '',
    at      INTEGER NOT NULL DEFAULT 0, -- microseconds
    PRIMARY KEY (rollout, pos)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX rollout_units_unit ON rollout_units (rollout, unit);
CREATE INDEX rollout_units_state ON rollout_units (rollout, state, wave, pos);

-- How requests went, by who measured: edges or cells. Counts of a process only grow;
-- those of processes that are long gone are kept under the source ''.
CREATE TABLE vitals (
    measured TEXT NOT NULL,
    source   TEXT NOT NULL,
    cell     TEXT NOT NULL,
    version  TEXT NOT NULL,
    requests INTEGER NOT NULL,
    at       INTEGER NOT NULL, -- microseconds
    doc      TEXT NOT NULL,
    PRIMARY KEY (measured, source, cell, version)
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE vitals;
DROP TABLE rollout_units;
DROP TABLE rollout_cells;
DROP TABLE rollouts;
