// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/sqlite"
	"github.com/cloister-dev/cloister/transfer/transfertest"
)

var harness = transfertest.Harness{Engine: "sqlite", New: newCell, Reopen: reopen}

func TestMain(m *testing.M) {
	if code, child := transfertest.Child(harness); child {
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

func TestSuite(t *testing.T)   { transfertest.Run(t, harness) }
func TestMutants(t *testing.T) { transfertest.Mutants(t, harness) }

func BenchmarkCopy(b *testing.B) { transfertest.BenchmarkCopy(b, harness) }
func BenchmarkCut(b *testing.B)  { transfertest.BenchmarkCut(b, harness) }

// cell is one file with the suite's tables.
type cell struct {
	id    cells.CellID
	path  string
	db    *sql.DB
	guard *guardsqlite.Guard
	store *sqlite.Store
}

func newCell(tb transfertest.TB, id cells.CellID, o transfertest.Options) transfertest.Cell {
	tb.Helper()
	c, err := open(tb.Context(), id, filepath.Join(tb.TempDir(), "cell.db"), true, o)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(c.close)
	return c
}

func reopen(ctx context.Context, id cells.CellID, spec string) (transfertest.Cell, error) {
	return open(ctx, id, spec, false, transfertest.Options{})
}

func open(ctx context.Context, id cells.CellID, path string, fresh bool, o transfertest.Options) (*cell, error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_txlock=immediate&_pragma=synchronous(FULL)&_pragma=foreign_keys(1)")
	if err != nil {
		return nil, err
	}
	c := &cell{id: id, path: path, db: db}
	if fresh {
		for _, q := range transfertest.Schema("sqlite") {
			if _, err := db.ExecContext(ctx, q); err != nil {
				return nil, err
			}
		}
	}
	if c.guard, err = guardsqlite.New(db, guardsqlite.WithCell(id)); err != nil {
		return nil, err
	}
	if err := c.guard.Install(ctx, transfertest.Tables); err != nil {
		return nil, err
	}
	admit := c.guard.AdmitClosed
	if o.IgnoreFence {
		admit = func(context.Context, *sql.Tx, cells.TenantID, cells.Epoch, cells.MoveID) error { return nil }
	}
	c.store, err = sqlite.Open(ctx, sqlite.Config{Path: path, Keeper: c.guard, Admit: admit, Tables: transfertest.Tables})
	return c, err
}

func (c *cell) close() {
	_ = c.store.Close()
	c.guard.Close()
	_ = c.db.Close()
}

// LoseCapture drops the triggers of a table, as making it anew does.
func (c *cell) LoseCapture(ctx context.Context, _ cells.MoveID) error {
	rows, err := c.db.QueryContext(ctx, "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'cell_transfer_%' AND tbl_name = 'item'")
	if err != nil {
		return err
	}
	var names []string
	for rows.Next() {
		var n string
		if err := rows.Scan(&n); err != nil {
			return err
		}
		names = append(names, n)
	}
	rows.Close()
	for _, n := range names {
		if _, err := c.db.ExecContext(ctx, "DROP TRIGGER "+n); err != nil {
			return err
		}
	}
	if len(names) != 3 {
		return fmt.Errorf("%d triggers", len(names))
	}
	return rows.Err()
}

func (c *cell) ID() cells.CellID        { return c.id }
func (c *cell) Source() transfer.Source { return c.store }
func (c *cell) Sink() transfer.Sink     { return c.store }
func (c *cell) Keeper() guard.Keeper    { return c.guard }
func (c *cell) Spec() string            { return c.path }

func (c *cell) Write(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, event string, f func(transfertest.Exec) error) error {
	ctx = guard.ContextWith(ctx, guard.Admission{Tenant: tenant, Epoch: epoch, Cell: c.id})
	return c.guard.InTx(ctx, nil, func(ctx context.Context, tx *sql.Tx) error {
		if err := f(exec(ctx, tx)); err != nil {
			return err
		}
		if event == "" {
			return nil
		}
		_, err := c.guard.Emit(ctx, tx, event, map[string]int{"n": 1})
		return err
	})
}

func (c *cell) Raw(ctx context.Context, _ cells.TenantID, f func(transfertest.Exec) error) error {
	tx, err := c.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(exec(ctx, tx)); err != nil {
		return err
	}
	return tx.Commit()
}

func exec(ctx context.Context, tx *sql.Tx) transfertest.Exec {
	return func(q string, args ...any) error {
		_, err := tx.ExecContext(ctx, q, args...)
		return err
	}
}

func (c *cell) Dump(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	out := map[string]string{}
	tx, err := c.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	for _, q := range []string{
		`SELECT 'item/' || id, '|n=' || coalesce(n, '') || '|' || typeof(n) || ',' || quote(body) || ',' || quote(slot) || ',' || quote(data) || ',' || quote(doc) || ',' || quote(amount)
			|| typeof(amount) || ',' || quote(at) || typeof(at) || ',' || quote(ratio) || ',' || quote(big) || ',' || quote(twice) FROM item WHERE tenant = ?`,
		`SELECT 'part/' || item || '/' || no, quote(note) FROM part WHERE org = ?`,
		`SELECT 'outbox/' || event_seq, id || epoch || cell || type || payload || at FROM cell_outbox WHERE tenant = ?`,
		`SELECT 'published', seq FROM cell_outbox_published WHERE tenant = ?`,
	} {
		rows, err := tx.QueryContext(ctx, q, tenant)
		if err != nil {
			return nil, err
		}
		for rows.Next() {
			var k, v string
			if err := rows.Scan(&k, &v); err != nil {
				return nil, err
			}
			out[k] = v
		}
		rows.Close()
		if err := rows.Err(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (c *cell) Leftovers(ctx context.Context) ([]string, error) {
	var out []string
	for what, q := range map[string]string{
		"triggers": "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'cell_transfer_%'",
		"log":      "SELECT count(*) FROM cell_transfer_log",
		"captures": "SELECT count(*) FROM cell_transfer_capture WHERE released = 0 OR NOT EXISTS (SELECT 1 FROM item)",
		"touched":  "SELECT count(*) FROM cell_transfer_touched",
		"imports":  "SELECT count(*) FROM cell_transfer_import",
	} {
		var n int
		if err := c.db.QueryRowContext(ctx, q).Scan(&n); err != nil {
			return nil, err
		}
		if n > 0 {
			out = append(out, fmt.Sprintf("%d %s", n, what))
		}
	}
	files, err := filepath.Glob(c.path + ".import-*")
	return append(out, files...), err
}
