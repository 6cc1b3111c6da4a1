// SPDX-License-Identifier: Apache-2.0

// Package postgres keeps what a cell knows of its people in the cell's Postgres, in a
// schema of its own. The database is authoritative; a session that waits for a lock or
// a statement longer than 5 s is refused, and whoever asked is told that sign-in cannot
// be checked. Who opens it first makes the schema.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/internal/pgschema"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/sqlstore"
)

// Schema is where the tables are.
const Schema = "cell_signin"

// Options of [Open].
type Options struct {
	// Checked marks the sessions as those of a process that checks tenants (its CELL is
	// set): the groups of a tenant are its data, and their table is guarded.
	Checked bool
	// Connections bounds the store's; 8 by default.
	Connections int
}

// Open connects to the database and makes or migrates the schema. The caller closes
// the store. Errors wrap [cells.ErrInvalid] or [cells.ErrUnavailable] and do not hold the
// password.
func Open(ctx context.Context, url string, o Options) (signin.Store, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("%w: signin: the address of the database is malformed", cells.ErrInvalid)
	}
	var newer *pgschema.Newer
	switch err := pgschema.Migrate(ctx, cfg, pgschema.Config{Schema: Schema, Lock: "cloister signin", Versions: sqlstore.MigrationsTable, Files: sqlstore.Migrations()}); {
	case errors.As(err, &newer), errors.Is(err, pgschema.ErrBroken):
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrInvalid, err)
	case err != nil:
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrUnavailable, err)
	}
	run := cfg.Copy()
	for k, v := range map[string]string{"search_path": Schema, "lock_timeout": "5s", "statement_timeout": "5s", "idle_in_transaction_session_timeout": "10s", "default_transaction_isolation": "read committed"} {
		run.RuntimeParams[k] = v
	}
	if run.ValidateConnect == nil {
		run.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	if o.Checked {
		tenancypg.Mark(run, "")
	}
	if o.Connections <= 0 {
		o.Connections = 8
	}
	db := stdlib.OpenDB(*run)
	db.SetMaxOpenConns(o.Connections)
	db.SetMaxIdleConns(o.Connections)
	db.SetConnMaxIdleTime(5 * time.Minute)
	return sqlstore.New(db, sqlstore.Dialect{Numbered: true, Taken: func(err error) bool {
		var pg *pgconn.PgError
		return errors.As(err, &pg) && pg.Code == "23505"
	}}), nil
}
