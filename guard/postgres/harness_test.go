// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

const childEnv = "GUARD_POSTGRES_CHILD"

func TestMain(m *testing.M) {
	if u := os.Getenv(childEnv); u != "" {
		fmt.Fprintln(os.Stderr, child(u, os.Getenv(childEnv+"_SCHEMA"), os.Getenv(childEnv+"_HOOK")))
		os.Exit(1)
	}
	os.Exit(pgtest.Main(m))
}

// child relays until it is killed.
func child(dbURL, schema, hook string) error {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, dbURL)
	if err != nil {
		return err
	}
	g, err := postgres.New(pool, postgres.WithSchema(schema))
	if err != nil {
		return err
	}
	pub, err := webhook.New(webhook.Config{URL: hook, Keys: []webhook.Key{guardtest.ChildKey()}})
	if err != nil {
		return err
	}
	r, err := guard.NewRelay(guard.RelayConfig{Store: g, Publisher: pub})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func relayChild(db guardtest.Database, hook string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+db.(*database).url, childEnv+"_SCHEMA="+db.(*database).schema, childEnv+"_HOOK="+hook)
	return cmd
}

var isolations = map[string]pgx.TxIsoLevel{
	"read-committed": pgx.ReadCommitted, "repeatable-read": pgx.RepeatableRead, "serializable": pgx.Serializable,
}

var sqlIsolations = map[string]sql.IsolationLevel{
	"read-committed": sql.LevelReadCommitted, "repeatable-read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable,
}

// harness is the suite's view of this package; useSQL chooses the driver. change
// runs on a database after it was installed. A new "database" is two schemas of
// its own in one database, for the guard and for the service: that is quicker.
func harness(t testing.TB, useSQL bool, change func(ctx context.Context, pool *pgxpool.Pool, schema string) error) guardtest.Harness {
	shared := pgtest.DB(t)
	return guardtest.Harness{
		Isolations: []string{"read-committed", "repeatable-read", "serializable"},
		Child:      relayChild,
		Open: func(ctx context.Context) (guardtest.Database, error) {
			n := schemas.Add(1)
			d := &database{schema: fmt.Sprint("g", n), useSQL: useSQL, lockWait: 15 * time.Second}
			if change != nil {
				d.lockWait = 2 * time.Second // a broken one may wait in vain
			}
			service := fmt.Sprint("s", n)
			d.url = shared + "&search_path=" + service
			pool, err := pgxpool.New(ctx, d.url)
			if err != nil {
				return nil, err
			}
			defer pool.Close()
			if _, err := pool.Exec(ctx, "CREATE SCHEMA "+service); err != nil {
				return nil, err
			}
			if _, err := pool.Exec(ctx, guardtest.TableSQL); err != nil {
				return nil, err
			}
			g, err := postgres.New(pool, postgres.WithSchema(d.schema))
			if err != nil {
				return nil, err
			}
			defer g.Close()
			if err := g.Install(ctx, []guard.Table{guardtest.Table}); err != nil {
				return nil, err
			}
			if change != nil {
				return d, change(ctx, pool, d.schema)
			}
			return d, nil
		},
	}
}

var schemas atomic.Int64

type database struct {
	url, schema string
	useSQL      bool
	lockWait    time.Duration
}

func (d *database) Close() {}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func (d *database) Process(ctx context.Context) (guardtest.Process, error) {
	opts := []postgres.Option{postgres.WithSchema(d.schema), postgres.WithPoll(100 * time.Millisecond), postgres.WithLockWait(d.lockWait), postgres.WithLogger(quiet)}
	cfg, err := pgxpool.ParseConfig(d.url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 40
	if d.useSQL {
		db := stdlib.OpenDB(*cfg.ConnConfig)
		db.SetMaxOpenConns(40)
		db.SetMaxIdleConns(6)
		g, err := postgres.NewSQL(db, opts...)
		return &sqlProcess{SQL: g, db: db}, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	g, err := postgres.New(pool, opts...)
	return &pgxProcess{Guard: g, pool: pool}, err
}

const rowsSQL = `SELECT key, value FROM guardtest_rows WHERE tenant = $1`

// translate is what InTx does to a service's errors; here for transactions that
// the suite begins by itself.
func translate(err error) error {
	if s, ok := err.(interface{ SQLState() string }); ok {
		switch s.SQLState() {
		case guard.SQLState:
			return fmt.Errorf("%w: %w", cells.ErrFenced, err)
		case "40001", "40P01":
			return fmt.Errorf("%w: %w", guard.ErrContended, err)
		}
	}
	return err
}

// --- pgx

type pgxProcess struct {
	*postgres.Guard
	pool *pgxpool.Pool
}

func (p *pgxProcess) Close() {
	p.Guard.Close()
	p.pool.Close()
}

func (p *pgxProcess) Begin(ctx context.Context, iso string) (guardtest.Tx, error) {
	tx, err := p.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: isolations[iso]})
	return &pgxTx{g: p.Guard, tx: tx}, err
}

func (p *pgxProcess) InTx(ctx context.Context, iso string, fn func(context.Context, guardtest.Tx) error) error {
	return p.Guard.InTx(ctx, pgx.TxOptions{IsoLevel: isolations[iso]}, func(ctx context.Context, tx pgx.Tx) error {
		return fn(ctx, &pgxTx{g: p.Guard, tx: tx})
	})
}

func (p *pgxProcess) Rows(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	out := map[string]string{}
	rows, err := p.pool.Query(ctx, rowsSQL, string(tenant))
	if err != nil {
		return nil, err
	}
	var k, v string
	_, err = pgx.ForEachRow(rows, []any{&k, &v}, func() error { out[k] = v; return nil })
	return out, err
}

type pgxTx struct {
	g  *postgres.Guard
	tx pgx.Tx
}

func (t *pgxTx) Read(ctx context.Context) error {
	return t.Exec(ctx, `SELECT count(*) FROM guardtest_rows`)
}
func (t *pgxTx) Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error {
	return t.g.Admit(ctx, t.tx, tenant, epoch)
}
func (t *pgxTx) AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return t.g.AdmitClosed(ctx, t.tx, tenant, epoch, move)
}
func (t *pgxTx) Exec(ctx context.Context, query string, args ...any) error {
	_, err := t.tx.Exec(ctx, query, args...)
	return translate(err)
}
func (t *pgxTx) Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error) {
	return t.g.Emit(ctx, t.tx, typ, payload)
}
func (t *pgxTx) Commit(ctx context.Context) error { return translate(t.tx.Commit(ctx)) }
func (t *pgxTx) Rollback()                        { _ = t.tx.Rollback(context.Background()) }

// --- database/sql

type sqlProcess struct {
	*postgres.SQL
	db *sql.DB
}

func (p *sqlProcess) Close() {
	p.SQL.Close()
	_ = p.db.Close()
}

func (p *sqlProcess) Begin(ctx context.Context, iso string) (guardtest.Tx, error) {
	tx, err := p.db.BeginTx(ctx, &sql.TxOptions{Isolation: sqlIsolations[iso]})
	return &sqlTx{g: p.SQL, tx: tx}, err
}

func (p *sqlProcess) InTx(ctx context.Context, iso string, fn func(context.Context, guardtest.Tx) error) error {
	return p.SQL.InTx(ctx, &sql.TxOptions{Isolation: sqlIsolations[iso]}, func(ctx context.Context, tx *sql.Tx) error {
		return fn(ctx, &sqlTx{g: p.SQL, tx: tx})
	})
}

func (p *sqlProcess) Rows(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	out := map[string]string{}
	rows, err := p.db.QueryContext(ctx, rowsSQL, string(tenant))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var k, v string
		if err := rows.Scan(&k, &v); err != nil {
			return nil, err
		}
		out[k] = v
	}
	return out, rows.Err()
}

type sqlTx struct {
	g  *postgres.SQL
	tx *sql.Tx
}

func (t *sqlTx) Read(ctx context.Context) error {
	var n int
	return t.tx.QueryRowContext(ctx, `SELECT count(*) FROM guardtest_rows`).Scan(&n)
}
func (t *sqlTx) Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error {
	return t.g.Admit(ctx, t.tx, tenant, epoch)
}
func (t *sqlTx) AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return t.g.AdmitClosed(ctx, t.tx, tenant, epoch, move)
}
func (t *sqlTx) Exec(ctx context.Context, query string, args ...any) error {
	_, err := t.tx.ExecContext(ctx, query, args...)
	return translate(err)
}
func (t *sqlTx) Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error) {
	return t.g.Emit(ctx, t.tx, typ, payload)
}
func (t *sqlTx) Commit(context.Context) error { return translate(t.tx.Commit()) }
func (t *sqlTx) Rollback()                    { _ = t.tx.Rollback() }
