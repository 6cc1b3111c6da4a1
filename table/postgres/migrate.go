// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"hash/fnv"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/cloister-dev/cloister/cells"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate creates the schema and brings it up to date, one process at a time: the
// session holds an advisory lock meanwhile. A schema that is up to date is only
// read, so a role that may not create anything can use it.
func migrate(ctx context.Context, conn *pgx.ConnConfig, schema string) error {
	lock, err := pgx.ConnectConfig(ctx, conn.Copy())
	if err != nil {
		return translate(ctx, "connecting", err)
	}
	defer func() { _ = lock.Close(context.WithoutCancel(ctx)) }() // releases the lock
	h := fnv.New64a()
	_, _ = h.Write([]byte("cloister routes " + schema))
	if _, err := lock.Exec(ctx, "SELECT pg_advisory_lock($1)", int64(h.Sum64())); err != nil {
		return translate(ctx, "waiting to migrate", err)
	}
	var exists bool
	if err := lock.QueryRow(ctx, "SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)", schema).Scan(&exists); err != nil {
		return translate(ctx, "looking for the schema", err)
	}
	if !exists {
		if _, err := lock.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize()); err != nil {
			return translate(ctx, "creating the schema", err)
		}
	}
	cfg := conn.Copy()
	cfg.RuntimeParams["search_path"] = schema
	db := stdlib.OpenDB(*cfg)
	defer func() { _ = db.Close() }()
	return migrateIn(ctx, db)
}

// migrateIn runs the migrations in the schema that db's connections search.
func migrateIn(ctx context.Context, db *sql.DB) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, sub,
		goose.WithTableName("routes_version"), goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("%w: migrations: %v", cells.ErrInvalid, err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return translate(ctx, "reading the version", err)
	}
	if have > want {
		return fmt.Errorf("%w: the table was made by a newer version (schema %d, this one knows up to %d); upgrade this program", cells.ErrInvalid, have, want)
	}
	if have == want {
		return nil
	}
	if _, err := p.Up(ctx); err != nil {
		return translate(ctx, "migrating", err)
	}
	return nil
}
