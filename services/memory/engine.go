// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // the database/sql driver "sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
)

//go:embed schema_postgres.sql
var schemaPostgres string

//go:embed schema_sqlite.sql
var schemaSQLite string

// Guard is what the service needs of a database/sql guard; both stores' have it.
type Guard interface {
	guard.Keeper
	guard.Outbox
	guard.RelayStore
	InTx(ctx context.Context, opts *sql.TxOptions, fn func(ctx context.Context, tx *sql.Tx) error) error
	Emit(ctx context.Context, tx *sql.Tx, typ string, payload any) (cells.EventSeq, error)
	// Translate adds the sentinel that a caller can act on to a driver's error.
	Translate(err error) error
	Close()
}

// engine is a Store's database with its guard.
type engine struct {
	db    *sql.DB
	guard Guard
	// call is the guard's EmitCall, where it has one.
	call func(ctx context.Context, typ string, payload any, first int) (string, []any, error)
	// alone: no cell around; transactions are admitted at epoch 0.
	alone bool
	// question: the driver takes ?1 in place of $1.
	question bool
	suffix   string
	checked  bool // sessions are marked
}

// OpenOptions say how a store is opened.
type OpenOptions struct {
	// Cell is the cell's name; "" runs the service alone.
	Cell cells.CellID
	// Checked says that the process runs the tenancy check of a deployment that is one
	// cell: its sessions tell the database so. Only for Postgres.
	Checked bool
}

// OpenSQLite opens (or makes) a store in one file. Close it.
func OpenSQLite(ctx context.Context, path string, o OpenOptions) (*Store, error) {
	q := url.Values{"_pragma": {"journal_mode(WAL)", "busy_timeout(10000)", "synchronous(FULL)"}, "_txlock": {"immediate"}}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+q.Encode())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(16)
	opts := []guardsqlite.Option{}
	if o.Cell == "" {
		opts = append(opts, guardsqlite.WithoutCells())
	} else {
		opts = append(opts, guardsqlite.WithCell(o.Cell))
	}
	g, err := guardsqlite.New(db, opts...)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return open(ctx, path, &engine{db: db, guard: g, alone: o.Cell == "", question: true}, schemaSQLite)
}

// maxConns is how many connections a process has to its Postgres.
const maxConns = 32

// OpenPostgres opens a store in a Postgres database. Close it.
func OpenPostgres(ctx context.Context, dsn string, o OpenOptions) (*Store, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	if !strings.Contains(dsn, "connect_timeout") && os.Getenv("PGCONNECT_TIMEOUT") == "" {
		cfg.ConnectTimeout = 5 * time.Second
	}
	if o.Checked {
		tenancypg.Mark(cfg, "")
	}
	db := stdlib.OpenDB(*cfg)
	db.SetMaxOpenConns(maxConns)
	db.SetMaxIdleConns(maxConns)
	opts := []guardpg.Option{}
	if o.Cell == "" {
		opts = append(opts, guardpg.WithoutCells())
	} else {
		opts = append(opts, guardpg.WithCell(o.Cell))
	}
	g, err := guardpg.NewSQL(db, opts...)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return open(ctx, dsn, &engine{db: db, guard: g, call: g.EmitCall, alone: o.Cell == "", suffix: " FOR UPDATE", checked: o.Checked}, schemaPostgres)
}

func open(ctx context.Context, dsn string, e *engine, schema string) (*Store, error) {
	s := &Store{dsn: dsn, checked: e.checked, db: e.db, d: e, outbox: e.guard, guard: e.guard}
	if err := s.migrate(ctx, schema, !e.question); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// migrate creates what is missing. It is idempotent; several processes of a cell
// may run it at once.
func (s *Store) migrate(ctx context.Context, schema string, shared bool) (err error) {
	if shared {
		// IF NOT EXISTS is no protection against another process that creates the same.
		conn, err := s.db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("memory: schema: %w", err)
		}
		defer conn.Close()
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(hashtextextended('memory schema', 0))"); err != nil {
			return fmt.Errorf("memory: schema: %w", err)
		}
		defer func() {
			_, uerr := conn.ExecContext(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock(hashtextextended('memory schema', 0))")
			err = errors.Join(err, uerr)
		}()
	}
	for _, stmt := range strings.Split(schema, ";\n") {
		if strings.TrimSpace(stmt) == "" {
			continue
		}
		if _, err := s.db.ExecContext(ctx, stmt); err != nil {
			return fmt.Errorf("memory: schema: %w", err)
		}
	}
	return s.guard.Install(ctx, Tables)
}

// Guard returns the store's guard, for a member's agent and a relay.
func (s *Store) Guard() Guard { return s.guard }

// Warm opens the connections that the clients of a tenant which arrives will want at
// once. A file has none to wait for.
func (s *Store) Warm(ctx context.Context, _ cells.TenantID) error {
	if g, ok := s.guard.(interface {
		Warm(ctx context.Context, n int) error
	}); ok {
		return g.Warm(ctx, maxConns/2)
	}
	return nil
}

// Close ends the guard's work and closes the database.
func (s *Store) Close() error {
	s.guard.Close()
	return s.db.Close()
}

type emitTx struct {
	*sql.Tx
	g Guard
}

// Emit implements Tx.
func (t emitTx) Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error) {
	return t.g.Emit(ctx, t.Tx, typ, payload)
}

func (e *engine) write(ctx context.Context, tenant cells.TenantID, fn func(context.Context, Tx) error) error {
	if e.alone {
		ctx = guard.WithTenant(ctx, tenant)
	}
	return e.bounded(ctx, func(ctx context.Context) error {
		return e.guard.InTx(ctx, nil, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, emitTx{tx, e.guard}) })
	})
}

// storeWait bounds one request's work in the database: one that does not answer is
// an error, not a request that waits for ever.
const storeWait = 8 * time.Second

// bounded runs fn for at most storeWait. Errors that say that the database cannot be
// reached, or has not answered by then, wrap [cells.ErrUnavailable].
func (e *engine) bounded(ctx context.Context, fn func(context.Context) error) error {
	bctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	err := e.guard.Translate(fn(bctx))
	if err != nil && bctx.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("%w: the database did not answer within %s: %w", cells.ErrUnavailable, storeWait, err)
	}
	return err
}

// read runs fn, then looks at the fence: since epochs only grow, a fence that
// admits the request now has admitted it when the rows were read, and no other
// cell can have written in between.
func (e *engine) read(ctx context.Context, tenant cells.TenantID, fn func(context.Context, Querier) error) error {
	return e.bounded(ctx, func(ctx context.Context) error { return e.readFenced(ctx, tenant, fn) })
}

func (e *engine) readFenced(ctx context.Context, tenant cells.TenantID, fn func(context.Context, Querier) error) error {
	if err := fn(ctx, e.db); err != nil || e.alone {
		return err
	}
	adm, ok := cells.AdmissionFromContext(ctx)
	if !ok || adm.Tenant != tenant {
		return guard.ErrNoAdmission
	}
	f, err := e.guard.Fence(ctx, tenant)
	if errors.Is(err, cells.ErrNotFound) && adm.Epoch == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if !f.Open || adm.Epoch < f.Floor || adm.Epoch > f.Epoch {
		return fmt.Errorf("%w: read of tenant %s at epoch %d; the fence is at %d", cells.ErrFenced, tenant, adm.Epoch, f.Epoch)
	}
	return nil
}

func (e *engine) emitCall(ctx context.Context, typ string, payload any) (call string, args []any, err error) {
	if e.call == nil {
		return "", nil, nil
	}
	return e.call(ctx, typ, payload, 1)
}

func (e *engine) rebind(q string) string {
	if e.question {
		return strings.ReplaceAll(q, "$", "?")
	}
	return q
}

func (e *engine) lock() string { return e.suffix }
