-- +goose Up
CREATE TABLE rollouts (
    seq       BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id        TEXT COLLATE "C" NOT NULL UNIQUE,
    state     TEXT NOT NULL,
    driven    BIGINT NOT NULL, -- there is something to do for a directory
    driver    TEXT NOT NULL,    -- '' when no directory does it
    beat      BIGINT NOT NULL DEFAULT 0,
    version   BIGINT NOT NULL,
    operation TEXT NOT NULL,
    doc       JSON NOT NULL
);
CREATE UNIQUE INDEX rollouts_operation ON rollouts (operation) WHERE operation <> '';
CREATE INDEX rollouts_driven ON rollouts (seq) WHERE driven = 1;

-- The cells of rollouts that are not over: each is of one at most.
CREATE TABLE rollout_cells (
    cell    TEXT COLLATE "C" PRIMARY KEY,
    rollout TEXT COLLATE "C" NOT NULL REFERENCES rollouts (id)
);

CREATE TABLE rollout_units (
    rollout TEXT COLLATE "C" NOT NULL REFERENCES rollouts (id),
    pos     BIGINT NOT NULL,
    unit    TEXT COLLATE "C" NOT NULL,
    wave    BIGINT NOT NULL,
    home    TEXT COLLATE "C" NOT NULL,
    state   TEXT NOT NULL,
    reason  TEXT NOT NULL DEFAULT '',
    at      BIGINT NOT NULL DEFAULT 0, -- microseconds
    PRIMARY KEY (rollout, pos)
);
CREATE UNIQUE INDEX rollout_units_unit ON rollout_units (rollout, unit);
CREATE INDEX rollout_units_state ON rollout_units (rollout, state, wave, pos);

-- How requests went, by who measured: edges or cells. Counts of a process only grow;
-- those of processes that are long gone are kept under the source ''.
CREATE TABLE vitals (
    measured TEXT COLLATE "C" NOT NULL,
    source   TEXT COLLATE "C" NOT NULL,
    cell     TEXT COLLATE "C" NOT NULL,
    version  TEXT COLLATE "C" NOT NULL,
    requests BIGINT NOT NULL,
    at       BIGINT NOT NULL, -- microseconds
    doc      JSON NOT NULL,
    PRIMARY KEY (measured, source, cell, version)
);

-- +goose Down
DROP TABLE vitals;
DROP TABLE rollout_units;
DROP TABLE rollout_cells;
DROP TABLE rollouts;
