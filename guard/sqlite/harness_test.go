// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

const childEnv = "GUARD_SQLITE_CHILD"

func TestMain(m *testing.M) {
	if dsn := os.Getenv(childEnv); dsn != "" {
		fmt.Fprintln(os.Stderr, child(dsn, os.Getenv(childEnv+"_HOOK")))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// child relays until it is killed.
func child(dsn, hook string) error {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return err
	}
	g, err := sqlite.New(db)
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
	return r.Run(context.Background())
}

func relayChild(db guardtest.Database, hook string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+db.(*database).dsn("immediate"), childEnv+"_HOOK="+hook)
	return cmd
}

// harness is the suite's view of this package: SQLite has no isolation levels but
// three kinds of transactions.
func harness(journal string, opts ...sqlite.Option) guardtest.Harness {
	return guardtest.Harness{
		Isolations:  []string{"immediate", "deferred", "exclusive"},
		Unprotected: true,
		Child:       relayChild,
		Open: func(ctx context.Context) (guardtest.Database, error) {
			dir, err := os.MkdirTemp("", "guard-sqlite-")
			if err != nil {
				return nil, err
			}
			d := &database{dir, journal, opts}
			db, err := sql.Open("sqlite", d.dsn("immediate"))
			if err != nil {
				return nil, err
			}
			defer db.Close()
			if _, err := db.ExecContext(ctx, guardtest.TableSQL); err != nil {
				return nil, err
			}
			g, err := sqlite.New(db)
			if err != nil {
				return nil, err
			}
			defer g.Close()
			return d, g.Install(ctx, []guard.Table{guardtest.Table})
		},
	}
}

type database struct {
	dir, journal string
	opts         []sqlite.Option
}

// dsn's path has a space and a percent sign, which a service's folder may have.
func (d *database) dsn(txlock string) string {
	return "file:" + filepath.Join(d.dir, "a%20b%25.db") + "?_pragma=journal_mode(" + d.journal + ")&_pragma=busy_timeout(5000)&_pragma=synchronous(NORMAL)&_txlock=" + txlock
}

func (d *database) Close() { _ = os.RemoveAll(d.dir) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// process has a handle for each kind of transaction.
type process struct {
	guards map[string]*sqlite.Guard
	dbs    map[string]*sql.DB
	*sqlite.Guard
}

func (d *database) Process(context.Context) (guardtest.Process, error) {
	p := &process{guards: map[string]*sqlite.Guard{}, dbs: map[string]*sql.DB{}}
	for _, kind := range []string{"immediate", "deferred", "exclusive"} {
		db, err := sql.Open("sqlite", d.dsn(kind))
		if err != nil {
			return nil, err
		}
		p.dbs[kind] = db
		if p.guards[kind], err = sqlite.New(db, append([]sqlite.Option{sqlite.WithPoll(50 * time.Millisecond), sqlite.WithLogger(quiet), sqlite.WithLockWait(15 * time.Second)}, d.opts...)...); err != nil {
			return nil, err
		}
	}
	p.Guard = p.guards["immediate"]
	return p, nil
}

func (p *process) Close() {
	for kind, g := range p.guards {
		g.Close()
		_ = p.dbs[kind].Close()
	}
}

func (p *process) Begin(ctx context.Context, iso string) (guardtest.Tx, error) {
	tx, err := p.dbs[iso].BeginTx(ctx, nil)
	return &tx1{g: p.guards[iso], tx: tx}, translate(err)
}

func (p *process) InTx(ctx context.Context, iso string, fn func(context.Context, guardtest.Tx) error) error {
	return p.guards[iso].InTx(ctx, nil, func(ctx context.Context, tx *sql.Tx) error {
		return fn(ctx, &tx1{g: p.guards[iso], tx: tx})
	})
}

func (p *process) Rows(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	out := map[string]string{}
	rows, err := p.dbs["immediate"].QueryContext(ctx, `SELECT key, value FROM guardtest_rows WHERE tenant = ?`, string(tenant))
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

// translate is what InTx does to a service's errors; here for transactions that
// the suite begins by itself.
func translate(err error) error {
	var c interface{ Code() int }
	if errors.As(err, &c) && (c.Code()&0xff == 5 || c.Code()&0xff == 6) {
		return fmt.Errorf("%w: %w", guard.ErrContended, err)
	}
	return err
}

type tx1 struct {
	g  *sqlite.Guard
	tx *sql.Tx
}

func (t *tx1) Read(ctx context.Context) error {
	var n int
	return t.tx.QueryRowContext(ctx, `SELECT count(*) FROM guardtest_rows`).Scan(&n)
}
func (t *tx1) Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error {
	return t.g.Admit(ctx, t.tx, tenant, epoch)
}
func (t *tx1) AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return t.g.AdmitClosed(ctx, t.tx, tenant, epoch, move)
}
func (t *tx1) Exec(ctx context.Context, query string, args ...any) error {
	_, err := t.tx.ExecContext(ctx, query, args...)
	return translate(err)
}
func (t *tx1) Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error) {
	return t.g.Emit(ctx, t.tx, typ, payload)
}
func (t *tx1) Commit(context.Context) error { return translate(t.tx.Commit()) }
func (t *tx1) Rollback()                    { _ = t.tx.Rollback() }
