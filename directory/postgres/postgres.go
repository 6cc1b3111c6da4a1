// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/sqlstore"
	"github.com/cloister-dev/cloister/internal/pgschema"
)

//go:embed migrations/*.sql
var migrations embed.FS

// DefaultSchema is where the records are unless [Options] say otherwise.
const DefaultSchema = "directory"

// DefaultConnections bounds the connections of a store unless [Options] say otherwise.
const DefaultConnections = 16

// Options of [Open]. The zero value is good.
type Options struct {
	// Schema, [a-z_][a-z0-9_]{0,39}; default [DefaultSchema].
	Schema string
	// AllowAsynchronous opens a database without a synchronous standby too: what was
	// answered can then be lost with the server. It is an error in the log each time it
	// is seen.
	AllowAsynchronous bool
	// Connections bounds the store's connections; default [DefaultConnections].
	Connections int
	// Logger; default discards.
	Logger *slog.Logger
}

// Store is a [directory.Store] in a Postgres database.
type Store struct {
	*sqlstore.Store

	db    *sql.DB
	async bool
	log   *slog.Logger
}

var _ directory.Store = (*Store)(nil)

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// Open connects to the database at url (a URL or a keyword string, as pgx takes it),
// migrates it, and looks for a synchronous standby. The caller closes the store.
// Errors wrap [cells.ErrInvalid] (no address, a schema that this build does not run
// on, no synchronous standby configured) or [cells.ErrUnavailable]; they do not hold the
// password.
func Open(ctx context.Context, url string, o Options) (*Store, error) {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, fmt.Errorf("%w: migrations: %w", cells.ErrInvalid, err)
	}
	return open(ctx, url, o, sub)
}

// open is Open with the migrations that the build knows.
func open(ctx context.Context, url string, o Options, known fs.FS) (*Store, error) {
	if o.Schema == "" {
		o.Schema = DefaultSchema
	}
	if o.Connections <= 0 {
		o.Connections = DefaultConnections
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if !schemaName.MatchString(o.Schema) || strings.HasPrefix(o.Schema, "pg_") {
		return nil, fmt.Errorf("%w: schema name %q", cells.ErrInvalid, o.Schema)
	}
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("%w: database url: %w", cells.ErrInvalid, err)
	}
	if cfg.ValidateConnect == nil {
		cfg.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	d := dialect(pgschema.Key("cloister directory changes", o.Schema), o.Schema)
	if err := migrate(ctx, cfg, o.Schema, known, &d); err != nil {
		return nil, err
	}
	run := cfg.Copy()
	for k, v := range map[string]string{
		"search_path": o.Schema, "lock_timeout": "5s", "statement_timeout": "10s", "idle_in_transaction_session_timeout": "15s",
		"default_transaction_isolation": "read committed",
	} {
		run.RuntimeParams[k] = v
	}
	db := stdlib.OpenDB(*run)
	db.SetMaxOpenConns(o.Connections)
	db.SetMaxIdleConns(o.Connections)
	db.SetConnMaxIdleTime(5 * time.Minute)
	s := &Store{Store: sqlstore.New(db, db, d), db: db, async: o.AllowAsynchronous, log: o.Logger}
	if err := s.required(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Ping implements [directory.Store]. It also fails with [cells.ErrUnavailable] while
// no synchronous standby streams, unless that is allowed.
func (s *Store) Ping(ctx context.Context) error {
	if err := s.Store.Ping(ctx); err != nil {
		return err
	}
	return s.ready(ctx)
}

// migrate brings the schema to this build's, or finds that this build runs on it.
func migrate(ctx context.Context, conn *pgx.ConnConfig, schema string, known fs.FS, d *sqlstore.Dialect) error {
	err := pgschema.Migrate(ctx, conn, pgschema.Config{Schema: schema, Lock: "cloister directory", Versions: "directory_version", Files: known,
		RunsOn: func(ctx context.Context, db *sql.DB, n *pgschema.Newer) error {
			return sqlstore.RunsOn(ctx, db, n.Have, n.Known)
		}})
	switch {
	case errors.Is(err, pgschema.ErrBroken):
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	case err != nil && !errors.Is(err, cells.ErrInvalid):
		return d.Translate("migrate", err)
	}
	return err
}

// durable switches synchronous_commit on in a transaction where it is not.
const durable = `CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN set_config('synchronous_commit', 'on', true) END`

func dialect(key int64, schema string) sqlstore.Dialect {
	return sqlstore.Dialect{
		Numbered: true,
		Begin: func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1), `+durable, key)
			return err
		},
		Share: func(ctx context.Context, tx *sql.Tx, names ...string) error {
			keys := make([]int64, len(names))
			for i, n := range names {
				keys[i] = pgschema.Key("cloister directory of "+schema, n)
			}
			slices.Sort(keys) // one order for all, since two names may have one key
			_, err := tx.ExecContext(ctx, `SELECT `+durable+`, (SELECT count(pg_advisory_xact_lock(k)) FROM unnest(CAST($1 AS BIGINT[])) k)`, keys)
			return err
		},
		ForUpdate: " FOR UPDATE",
		Snapshot:  sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true},
		SetText: func(column, key, placeholder string) string {
			return fmt.Sprintf("jsonb_set(%s::jsonb, '{%s}', to_jsonb(CAST(%s AS TEXT)))::json", column, key, placeholder)
		},
		Failure: failure,
		Timeout: 20 * time.Second,
	}
}

// failure says what an error of the driver means.
func failure(err error) error {
	var pg *pgconn.PgError
	var connect *pgconn.ConnectError
	switch {
	case errors.As(err, &pg):
		switch {
		case strings.HasPrefix(pg.Code, "23"):
			return cells.ErrConflict
		case strings.HasPrefix(pg.Code, "22"), strings.HasPrefix(pg.Code, "42"):
			return cells.ErrInvalid
		}
		return cells.ErrUnavailable
	case errors.As(err, &connect), pgconn.Timeout(err), pgconn.SafeToRetry(err):
		return cells.ErrUnavailable
	}
	return nil
}
