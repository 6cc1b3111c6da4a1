// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// AdmitClosed checks, inside tx, that the tenant's fence is closed at exactly
// epoch by move, holds it so until the transaction ends, and lets the transaction
// write the tenant's rows. It fails with [cells.ErrStaleOrder] or
// [cells.ErrFenced] otherwise.
type AdmitClosed func(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error

// Config describes a cell's database to its agent. Pool, Keeper and Admit are required.
type Config struct {
	// Pool says how to connect; the store opens connections of its own, with settings
	// that make values travel as text that both sides read alike. Its role needs
	// REPLICATION, the tables' ownership (a publication is made) and CREATE on the
	// database.
	Pool *pgxpool.Pool
	// Keeper is the guard of that database.
	Keeper guard.Keeper
	// Admit is the guard's check for imports and removals.
	Admit AdmitClosed
	// Tables hold tenants' rows; the guard's own MovedTables are added to them.
	Tables []guard.Table
	// Stay are tables that are not in Tables although they have a tenant column, and
	// whose rows are meant to stay behind: caches, audits. Preflights leave them out.
	Stay []string
	// Schema holds the store's own tables; default "cell".
	Schema string
}

// Store is one Postgres database as the source and the target of moves. It is
// safe for concurrent use, by several processes.
type Store struct {
	cfg    Config
	tables []guard.Table
	schema string // quoted
	pool   *pgxpool.Pool

	// patience is blockerAge, but in tests; faults are only there.
	patience time.Duration
	faults   func(point string) error

	// Bounds of what a member may hold up of its group; see hub.
	stall stallBounds

	wg sync.WaitGroup // of what runs in the background

	mu      sync.Mutex // guards what follows
	streams map[cells.MoveID]*stream
	hubs    map[string]*hub
	joins   map[string]*queue
	shared  map[cells.MoveID]*exported
	closed  bool
}

var (
	_ transfer.Source = (*Store)(nil)
	_ transfer.Sink   = (*Store)(nil)
)

// settings make text output exact and the same everywhere, and undo what a
// service may have set for itself.
var settings = map[string]string{
	"datestyle": "ISO, YMD", "intervalstyle": "postgres", "extra_float_digits": "3", "bytea_output": "hex", "timezone": "UTC", "client_encoding": "UTF8",
	"lc_monetary": "C", "xmlbinary": "base64", "standard_conforming_strings": "on", "synchronous_commit": "on", "row_security": "off",
	"statement_timeout": "0", "lock_timeout": "0", "idle_in_transaction_session_timeout": "0", "application_name": "cell transfer",
	// Queries are made for one tenant's share of a table; plans for the mean tenant do harm.
	"plan_cache_mode": "force_custom_plan",
	// Joins are of a bounded number of keys with their rows: by the primary key, also
	// where a table was never analysed and a hash of all of it looks cheap.
	"enable_hashjoin": "off", "enable_mergejoin": "off",
}

// Open opens the store and creates its own tables if they are missing. Close it
// before the pool.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Pool == nil || cfg.Keeper == nil || cfg.Admit == nil {
		return nil, fmt.Errorf("%w: transfer/postgres: Pool, Keeper and Admit are required", cells.ErrInvalid)
	}
	if cfg.Schema == "" {
		cfg.Schema = "cell"
	}
	pc := cfg.Pool.Config()
	own, err := pgxpool.ParseConfig(pc.ConnString())
	if err != nil {
		return nil, err
	}
	own.ConnConfig = pc.ConnConfig.Copy()
	own.ConnConfig.Tracer = nil
	own.BeforeConnect = pc.BeforeConnect
	own.MaxConns, own.MinConns, own.MinIdleConns = 24, 0, 0
	for k, v := range settings {
		own.ConnConfig.RuntimeParams[k] = v
	}
	s := &Store{cfg: cfg, tables: append(append([]guard.Table(nil), cfg.Tables...), cfg.Keeper.MovedTables()...),
		schema: pgx.Identifier{cfg.Schema}.Sanitize(), streams: map[cells.MoveID]*stream{}, patience: blockerAge, stall: defaultStall,
		hubs: map[string]*hub{}, joins: map[string]*queue{}, shared: map[cells.MoveID]*exported{}}
	if s.pool, err = pgxpool.NewWithConfig(ctx, own); err != nil {
		return nil, translate(err)
	}
	if err := s.install(ctx); err != nil {
		s.pool.Close()
		return nil, err
	}
	return s, nil
}

// Close closes the store's connections. Views and imports must be closed before.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	for _, h := range s.hubs {
		h.cancel(cells.ErrClosed)
	}
	shared := s.shared
	s.shared = map[cells.MoveID]*exported{}
	s.mu.Unlock()
	for _, e := range shared {
		e.end()
	}
	s.wg.Wait()
	s.pool.Close()
	return nil
}

// q writes the schema's name into a statement.
func (s *Store) q(query string) string { return strings.ReplaceAll(query, "@s", s.schema) }

// schema is written so that an older and a newer build can run on it.
const schema = `
CREATE SCHEMA IF NOT EXISTS @s;
CREATE TABLE IF NOT EXISTS @s.transfer_capture (
	move text PRIMARY KEY, tenant text NOT NULL, base bigint NOT NULL, start pg_lsn NOT NULL, released boolean NOT NULL DEFAULT false,
	at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE @s.transfer_capture ADD COLUMN IF NOT EXISTS shape text NOT NULL DEFAULT '', ADD COLUMN IF NOT EXISTS lost integer NOT NULL DEFAULT 0,
	ADD COLUMN IF NOT EXISTS max_retained bigint NOT NULL DEFAULT 0, ADD COLUMN IF NOT EXISTS ended text NOT NULL DEFAULT '',
	ADD COLUMN IF NOT EXISTS role integer NOT NULL DEFAULT 0, ADD COLUMN IF NOT EXISTS objects text NOT NULL DEFAULT '',
	ADD COLUMN IF NOT EXISTS grp text NOT NULL DEFAULT '', ADD COLUMN IF NOT EXISTS alone boolean NOT NULL DEFAULT false, ADD COLUMN IF NOT EXISTS applied pg_lsn NOT NULL DEFAULT '0/0';
CREATE INDEX IF NOT EXISTS transfer_capture_tenant ON @s.transfer_capture (tenant);
CREATE TABLE IF NOT EXISTS @s.transfer_group (id text PRIMARY KEY, name text NOT NULL, at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS @s.transfer_import (
	move text PRIMARY KEY, tenant text NOT NULL, base bigint NOT NULL, gen bigint NOT NULL, state jsonb NOT NULL,
	at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS @s.transfer_key (
	move text NOT NULL, kind "char" NOT NULL, tbl text NOT NULL, key bytea NOT NULL, PRIMARY KEY (move, kind, tbl, key)
);
CREATE INDEX IF NOT EXISTS transfer_import_tenant ON @s.transfer_import (tenant);`

func (s *Store) install(ctx context.Context) error {
	var there bool
	if err := s.pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL AND EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass($2) AND attname = 'applied')",
		s.schema+".transfer_key", s.schema+".transfer_capture").Scan(&there); err != nil || there {
		return translate(err)
	}
	return s.tx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", "cell transfer install"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, s.q(schema))
		return err
	})
}

// fault is where a test ends a step as a crash would.
func (s *Store) fault(point string) error {
	if s.faults == nil {
		return nil
	}
	return s.faults(point)
}

// tx runs f in one transaction.
func (s *Store) tx(ctx context.Context, f func(pgx.Tx) error) error {
	return translate(pgx.BeginFunc(ctx, s.pool, f))
}

// admitted runs f in one transaction that the closed fence admits.
func (s *Store) admitted(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID, f func(pgx.Tx) error) error {
	return s.tx(ctx, func(tx pgx.Tx) error {
		if err := s.cfg.Admit(ctx, tx, tenant, epoch, move); err != nil {
			return err
		}
		return f(tx)
	})
}

func sqlState(err error) string {
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// Codes that are acted on.
const (
	stateUnique    = "23505"
	stateForeign   = "23503"
	stateInUse     = "55006"
	stateUndefined = "42704"
	stateExists    = "42710"
	stateNotReady  = "55000"
	stateTimeout   = "57014"
	statePrivilege = "42501"
)

// translate gives the driver's errors the meaning of package cells.
func translate(err error) error {
	if err == nil || errors.Is(err, cells.ErrUnavailable) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	code := sqlState(err)
	switch {
	case code == "40001", code == "40P01", code == "55P03", code == stateInUse,
		strings.HasPrefix(code, "08"), strings.HasPrefix(code, "53"), strings.HasPrefix(code, "57P"):
	case code == "" && lost(err):
	default:
		return err
	}
	return fmt.Errorf("%w: transfer/postgres: %w", cells.ErrUnavailable, err)
}

// lost reports whether err comes from a connection that is gone.
func lost(err error) bool {
	var n net.Error
	var c *pgconn.ConnectError
	return errors.As(err, &n) || errors.As(err, &c) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		pgconn.SafeToRetry(err) || strings.Contains(err.Error(), "conn closed")
}
