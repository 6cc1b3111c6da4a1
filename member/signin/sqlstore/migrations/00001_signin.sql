-- What a cell knows of its people. Times are microseconds since 1970, flags 0 or 1.

-- +goose Up
CREATE TABLE users (
    id         TEXT PRIMARY KEY,
    name       TEXT NOT NULL,
    name_key   TEXT NOT NULL UNIQUE,
    email      TEXT NOT NULL,
    email_key  TEXT NOT NULL UNIQUE,
    external   TEXT NOT NULL,
    active     BIGINT NOT NULL,
    attributes TEXT NOT NULL,
    version    BIGINT NOT NULL,
    created    BIGINT NOT NULL,
    changed    BIGINT NOT NULL
);
CREATE TABLE user_work (
    user_id   TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
    email_key TEXT NOT NULL,
    PRIMARY KEY (user_id, email_key)
);
CREATE INDEX user_work_email ON user_work (email_key);
CREATE TABLE tombstones (
    email_key TEXT PRIMARY KEY,
    at        BIGINT NOT NULL
);
CREATE TABLE principal_groups (
    tenant     TEXT NOT NULL,
    id         TEXT NOT NULL,
    name       TEXT NOT NULL,
    name_key   TEXT NOT NULL,
    external   TEXT NOT NULL,
    attributes TEXT NOT NULL,
    version    BIGINT NOT NULL,
    created    BIGINT NOT NULL,
    changed    BIGINT NOT NULL,
    PRIMARY KEY (tenant, id),
    UNIQUE (tenant, name_key)
);
CREATE TABLE accounts (
    issuer      TEXT NOT NULL,
    subject     TEXT NOT NULL,
    closed      BIGINT NOT NULL,
    last_issued BIGINT NOT NULL,
    revoked     BIGINT NOT NULL,
    PRIMARY KEY (issuer, subject)
);
CREATE INDEX accounts_subject ON accounts (subject);
CREATE TABLE account_emails (
    issuer  TEXT NOT NULL,
    subject TEXT NOT NULL,
    email   TEXT NOT NULL,
    PRIMARY KEY (issuer, subject, email)
);
CREATE TABLE service_accounts (
    name    TEXT PRIMARY KEY,
    creator TEXT NOT NULL,
    lineage TEXT NOT NULL,
    created BIGINT NOT NULL,
    revoked BIGINT NOT NULL
);
CREATE TABLE bots (
    name       TEXT PRIMARY KEY,
    key        TEXT NOT NULL,
    thumbprint TEXT NOT NULL UNIQUE,
    admin      BIGINT NOT NULL,
    disabled   BIGINT NOT NULL,
    created    BIGINT NOT NULL
);
CREATE TABLE challenges (
    hash    TEXT PRIMARY KEY,
    bot     TEXT NOT NULL,
    expires BIGINT NOT NULL
);
CREATE TABLE bot_tokens (
    hash    TEXT PRIMARY KEY,
    bot     TEXT NOT NULL,
    expires BIGINT NOT NULL
);
CREATE TABLE audit (
    id     TEXT PRIMARY KEY,
    at     BIGINT NOT NULL,
    actor  TEXT NOT NULL,
    action TEXT NOT NULL,
    detail TEXT NOT NULL
);

-- +goose Down
DROP TABLE audit;
DROP TABLE bot_tokens;
DROP TABLE challenges;
DROP TABLE bots;
DROP TABLE service_accounts;
DROP TABLE account_emails;
DROP TABLE accounts;
DROP TABLE principal_groups;
DROP TABLE tombstones;
DROP TABLE user_work;
DROP TABLE users;
