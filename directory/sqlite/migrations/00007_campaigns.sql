-- +goose Up
CREATE TABLE campaigns (
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
CREATE UNIQUE INDEX campaigns_operation ON campaigns (operation) WHERE operation <> '';
CREATE INDEX campaigns_driven ON campaigns (seq) WHERE driven = 1;

CREATE TABLE campaign_items (
    campaign TEXT NOT NULL REFERENCES campaigns (id),
    pos      INTEGER NOT NULL,
    state    TEXT NOT NULL,
    doc      TEXT NOT NULL,
    PRIMARY KEY (campaign, pos)
) STRICT, WITHOUT ROWID;
CREATE INDEX campaign_items_state ON campaign_items (campaign, state, pos);

CREATE TABLE tenant_facts (
    tenant       TEXT PRIMARY KEY,
    grp          TEXT NOT NULL DEFAULT '',
    jurisdiction TEXT NOT NULL DEFAULT '',
    rows_n       INTEGER NOT NULL DEFAULT 0,
    bytes_n      INTEGER NOT NULL DEFAULT 0,
    measured_at  INTEGER NOT NULL DEFAULT 0 -- microseconds; 0 is never
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE tenant_facts;
DROP TABLE campaign_items;
DROP TABLE campaigns;
