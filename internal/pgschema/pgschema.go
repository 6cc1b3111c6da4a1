// SPDX-License-Identifier: Apache-2.0

// Package pgschema creates a schema in a Postgres database and migrates what is in
// it, one process at a time: the session holds an advisory lock meanwhile. Whoever
// is second finds the work done. A schema that is up to date is only read, so a
// role that may not create anything can use it.
package pgschema

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

// ErrBroken: the migrations of the build cannot be read.
var ErrBroken = errors.New("pgschema: migrations")

// Newer says that a schema was migrated by a newer build.
type Newer struct{ Have, Known int64 }

// Error implements error.
func (e *Newer) Error() string {
	return fmt.Sprintf("made by a newer version (schema %d, this one knows up to %d); upgrade this program", e.Have, e.Known)
}

// Config is what [Migrate] works with; all fields but RunsOn are required.
type Config struct {
	// Schema is the name of the schema.
	Schema string
	// Lock is what migrations of this kind exclude each other by, together with Schema.
	Lock string
	// Versions is the name of the table in the schema with the migrations that were made.
	Versions string
	// Files are the migrations.
	Files fs.FS
	// RunsOn, unless nil, is asked about a schema that a newer build has migrated: nil
	// says that this build runs on it.
	RunsOn func(ctx context.Context, db *sql.DB, newer *Newer) error
}

// Migrate creates the schema and brings it up to date. The error is a [*Newer],
// wraps [ErrBroken], or is one of the database with what was being done.
func Migrate(ctx context.Context, conn *pgx.ConnConfig, c Config) error {
	lock, err := pgx.ConnectConfig(ctx, conn.Copy())
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	defer func() { _ = lock.Close(context.WithoutCancel(ctx)) }() // releases the lock
	if _, err := lock.Exec(ctx, "SELECT pg_advisory_lock($1)", Key(c.Lock, c.Schema)); err != nil {
		return fmt.Errorf("waiting to migrate: %w", err)
	}
	var exists bool
	if err := lock.QueryRow(ctx, "SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)", c.Schema).Scan(&exists); err != nil {
		return fmt.Errorf("looking for the schema: %w", err)
	}
	if !exists {
		if _, err := lock.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{c.Schema}.Sanitize()); err != nil {
			return fmt.Errorf("creating the schema: %w", err)
		}
	}
	cfg := conn.Copy()
	cfg.RuntimeParams["search_path"] = c.Schema
	db := stdlib.OpenDB(*cfg)
	defer func() { _ = db.Close() }()
	return c.migrateIn(ctx, db)
}

// Key is an advisory lock's key for a name of some kind.
func Key(kind, name string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(kind + " " + name))
	return int64(h.Sum64())
}

// migrateIn runs the migrations in the schema that db's connections search.
func (c *Config) migrateIn(ctx context.Context, db *sql.DB) error {
	p, err := goose.NewProvider(goose.DialectPostgres, db, c.Files,
		goose.WithTableName(c.Versions), goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("reading the version: %w", err)
	}
	switch newer := (&Newer{Have: have, Known: want}); {
	case have > want && c.RunsOn != nil:
		return c.RunsOn(ctx, db, newer)
	case have > want:
		return newer
	case have == want:
		return nil
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrating: %w", err)
	}
	return nil
}
