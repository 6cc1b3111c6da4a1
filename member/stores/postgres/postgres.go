// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/internal/names"
)

const (
	nameDeployment = "deployment"
	nameNonce      = "cell-probe"
	nameMark       = "mark/"
	maxValue       = 256
)

// Config says where a cell's Postgres is and what belongs to tenants in it.
type Config struct {
	// URL of the database, as libpq takes it. When it names several hosts, the primary is
	// looked for.
	URL string
	// Schema of the reserved table; default "cell_stores".
	Schema string
	// TenantColumns are the names that say that a table's rows belong to tenants; default
	// [stores.TenantColumns].
	TenantColumns []string
	// Own are schemas whose tables are the platform's and not a tenant's, for Empty and
	// Tenants, beside Schema: those of fences, outboxes, tenancy rows.
	Own []string
}

// Store is a cell's Postgres. It is safe for concurrent use.
type Store struct {
	common
	pool    *pgxpool.Pool
	table   string // quoted, with its schema
	columns []string
	own     []string
}

// common are the methods that are the same for every store with reserved names.
type common = names.Names

var _ interface {
	stores.Store
	stores.TenantLister
} = (*Store)(nil)

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// Open connects to the primary and makes the reserved table when it is missing. The
// caller closes the store.
//
// [cells.ErrInvalid] for a malformed configuration; [cells.ErrUnavailable] when the
// primary cannot be reached.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Schema == "" {
		cfg.Schema = "cell_stores"
	}
	if !schemaName.MatchString(cfg.Schema) {
		return nil, fmt.Errorf("%w: schema %q; want [a-z_][a-z0-9_]{0,39}", cells.ErrInvalid, cfg.Schema)
	}
	if cfg.TenantColumns == nil {
		cfg.TenantColumns = stores.TenantColumns
	}
	pc, err := pgxpool.ParseConfig(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("%w: the URL of the cell's Postgres cannot be read", cells.ErrInvalid) // the cause may have the password in it
	}
	pc.MinConns, pc.MaxConns = 0, 2
	pc.MaxConnIdleTime = time.Minute
	pc.ConnConfig.RuntimeParams["application_name"] = "cell-stores"
	// Also of one host: a connection that was the primary's may be a standby's after a
	// failover, and one that is opened to a standby is of no use.
	pc.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("%w: the cell's Postgres: %w", cells.ErrInvalid, err)
	}
	s := &Store{pool: pool, table: pgx.Identifier{cfg.Schema, "reserved"}.Sanitize(), columns: slices.Clone(cfg.TenantColumns),
		own: append([]string{cfg.Schema}, cfg.Own...)}
	s.common = common{Nonce: nameNonce, Mark: nameMark, Get: s.find, Put: s.put, Drop: s.drop}
	if err := s.install(ctx, cfg.Schema); err != nil {
		pool.Close()
		return nil, fmt.Errorf("member/stores/postgres: %w", err)
	}
	return s, nil
}

// Close closes the store's connections.
func (s *Store) Close() { s.pool.Close() }

func (s *Store) install(ctx context.Context, schema string) error {
	var there bool
	if err := s.pool.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, schema+".reserved").Scan(&there); err != nil {
		return translate(ctx, err)
	}
	if there {
		return nil
	}
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		for _, q := range []string{
			`SELECT pg_advisory_xact_lock(hashtextextended('` + schema + `.reserved', 0))`,
			`CREATE SCHEMA IF NOT EXISTS ` + pgx.Identifier{schema}.Sanitize(),
			`CREATE TABLE IF NOT EXISTS ` + s.table + ` (
				name  text COLLATE "C" PRIMARY KEY,
				value text NOT NULL CHECK (octet_length(value) <= 256),
				at    timestamptz NOT NULL DEFAULT clock_timestamp()
			)`,
		} {
			if _, err := tx.Exec(ctx, q); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("making table %s: %w", s.table, translate(ctx, err))
	}
	return nil
}

// Kind implements [stores.Store].
func (s *Store) Kind() stores.Kind { return stores.Postgres }

// Location implements [stores.Store]: none.
func (s *Store) Location() stores.Location { return stores.Location{} }

// Identity implements [stores.Store].
func (s *Store) Identity(ctx context.Context) (stores.Identity, error) {
	v, err := s.get(ctx, nameDeployment)
	id := stores.DeploymentID(v)
	if err == nil && v != "" {
		err = id.Validate()
	}
	if err != nil {
		return stores.Identity{}, err
	}
	return stores.Identity{Kind: stores.Postgres, Deployment: id}, nil
}

// Establish implements [stores.Store].
func (s *Store) Establish(ctx context.Context, id stores.DeploymentID) (stores.DeploymentID, error) {
	if err := id.Validate(); err != nil {
		return "", err
	}
	if _, err := s.pool.Exec(ctx, `INSERT INTO `+s.table+` (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING`, nameDeployment, string(id)); err != nil {
		return "", translate(ctx, err)
	}
	got, err := s.Identity(ctx)
	if err == nil && got.Deployment == "" {
		err = fmt.Errorf("%w: the deployment id was written and is gone", cells.ErrUnavailable)
	}
	return got.Deployment, err
}

// find is get for [names.Names].
func (s *Store) find(ctx context.Context, name string) (string, bool, error) {
	v, err := s.get(ctx, name)
	return v, v != "", err
}

// get returns a reserved value, "" when there is none.
func (s *Store) get(ctx context.Context, name string) (string, error) {
	var v *string
	var standby bool
	err := s.pool.QueryRow(ctx, `SELECT (SELECT left(value, `+fmt.Sprint(maxValue)+`) FROM `+s.table+` WHERE name = $1), pg_is_in_recovery()`, name).Scan(&v, &standby)
	switch {
	case err != nil:
		return "", translate(ctx, err)
	case standby:
		return "", errStandby
	case v == nil:
		return "", nil
	case *v == "":
		return "", fmt.Errorf("%w: the reserved value %s is empty", cells.ErrInvalid, name)
	}
	return *v, nil
}

func (s *Store) put(ctx context.Context, name, value string) error {
	_, err := s.pool.Exec(ctx, `INSERT INTO `+s.table+` AS r (name, value) VALUES ($1, $2)
		ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value, at = clock_timestamp()`, name, value)
	return translate(ctx, err)
}

func (s *Store) drop(ctx context.Context, name string) error {
	_, err := s.pool.Exec(ctx, `DELETE FROM `+s.table+` WHERE name = $1`, name)
	return translate(ctx, err)
}

// errStandby: what was read may be old.
var errStandby = fmt.Errorf("%w: the server is a standby", cells.ErrUnavailable)

// translate turns a driver's error into one of package cells.
func translate(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, cells.ErrUnavailable) {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, context.Cause(ctx))
	}
	var ce *pgconn.ConnectError
	var pe *pgconn.PgError
	if !errors.As(err, &ce) && errors.As(err, &pe) {
		switch {
		case len(pe.Code) == 5 && slices.Contains([]string{"08", "53", "57"}, pe.Code[:2]), pe.Code == "25006":
			return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
		case pe.Code == "42501", pe.Code == "3D000", pe.Code == "42P01", pe.Code[:min(2, len(pe.Code))] == "28":
			return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		return err
	}
	return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
}
