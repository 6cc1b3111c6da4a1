// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/sqlite"
	"github.com/cloister-dev/cloister/transfer/transfertest"
)

// rig is a file with tables of a test's own.
type rig struct {
	t     *testing.T
	db    *sql.DB
	guard *guardsqlite.Guard
	store *sqlite.Store
}

func newRig(t *testing.T, id cells.CellID, ddl string, tables []guard.Table, stay ...string) *rig {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a file?.db")
	db, err := sql.Open("sqlite", "file:"+strings.ReplaceAll(path, "?", "%3f")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	r := &rig{t: t, db: db}
	r.exec(ddl)
	if r.guard, err = guardsqlite.New(db, guardsqlite.WithCell(id)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.guard.Close)
	if err := r.guard.Install(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if r.store, err = sqlite.Open(t.Context(), sqlite.Config{Path: path, Keeper: r.guard, Admit: r.guard.AdmitClosed, Tables: tables, Stay: stay}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.store.Close() })
	return r
}

func (r *rig) exec(q string, args ...any) {
	r.t.Helper()
	if _, err := r.db.ExecContext(r.t.Context(), q, args...); err != nil {
		r.t.Fatalf("%v, in: %.200s", err, q)
	}
}

func (r *rig) rows(q string) []string {
	r.t.Helper()
	rows, err := r.db.QueryContext(r.t.Context(), q)
	if err != nil {
		r.t.Fatal(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			r.t.Fatal(err)
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

var shapeMove = cells.MoveRef{ID: "m1", Tenant: "t", Source: "cell-a", Target: "cell-b", Base: 5}

func pairOf(t *testing.T, ddl string, tables []guard.Table) (a, b *rig) {
	t.Helper()
	a, b = newRig(t, "cell-a", ddl, tables), newRig(t, "cell-b", ddl, tables)
	if err := a.guard.OpenFence(t.Context(), cells.FenceOrder{Cell: "cell-a", Tenant: "t", Epoch: 5, Floor: 5}); err != nil {
		t.Fatal(err)
	}
	return a, b
}

func agentOf(t *testing.T, r *rig, opts ...transfer.Option) *transfer.Mover {
	v := transfer.New(r.store, r.store, opts...)
	t.Cleanup(func() { _ = v.Close() })
	return v
}

func (r *rig) close() {
	r.t.Helper()
	if err := r.guard.CloseFence(r.t.Context(), cells.FenceOrder{Cell: "cell-a", Tenant: "t", Epoch: 6, Move: "m1"}); err != nil {
		r.t.Fatal(err)
	}
}

const shapes = `
CREATE TABLE "odd ""name" ("Ten ant" TEXT NOT NULL, "select" BLOB NOT NULL, r REAL NOT NULL, v, PRIMARY KEY (r, "Ten ant", "select")) WITHOUT ROWID;
CREATE TABLE nocase (tenant TEXT NOT NULL, id TEXT NOT NULL COLLATE NOCASE, v, PRIMARY KEY (tenant, id));
CREATE TABLE typed (tenant TEXT NOT NULL, id INTEGER NOT NULL, d DATE, dt DATETIME, b BOOLEAN, ts TIMESTAMP, num NUMERIC, anything, PRIMARY KEY (tenant, id));
CREATE TABLE tree (tenant TEXT NOT NULL, id INTEGER NOT NULL, parent INTEGER, PRIMARY KEY (tenant, id), FOREIGN KEY (tenant, parent) REFERENCES tree (tenant, id));
CREATE TABLE ranked (tenant TEXT NOT NULL, id INTEGER NOT NULL, pos INTEGER, live INTEGER NOT NULL DEFAULT 1, PRIMARY KEY (tenant, id), UNIQUE (tenant, pos));
CREATE UNIQUE INDEX ranked_live ON ranked (tenant, live, id % 3) WHERE live > 1;
`

var shapeTables = []guard.Table{{Name: `odd "name`, TenantColumn: "Ten ant"}, {Name: "nocase", TenantColumn: "tenant"}, {Name: "typed", TenantColumn: "tenant"},
	{Name: "tree", TenantColumn: "tenant"}, {Name: "ranked", TenantColumn: "tenant"}}

var shapeDumps = []string{`SELECT quote("select") || quote(r) || typeof(r) || quote(v) || typeof(v) FROM "odd ""name" WHERE "Ten ant" = 't'`,
	`SELECT quote(id) || quote(v) FROM nocase WHERE tenant = 't'`,
	`SELECT id || quote(d) || typeof(d) || quote(dt) || typeof(dt) || quote(b) || typeof(b) || quote(ts) || typeof(ts) || quote(num) || typeof(num) || hex(anything) || typeof(anything) FROM typed WHERE tenant = 't'`,
	`SELECT id || '<' || coalesce(parent, '') FROM tree WHERE tenant = 't'`, `SELECT id || '@' || coalesce(pos, '') || '/' || live FROM ranked WHERE tenant = 't'`}

func TestShapes(t *testing.T) {
	a, b := pairOf(t, shapes, shapeTables)
	a.exec(`WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < 3000) INSERT INTO "odd ""name" SELECT 't', CAST('k' || n || char(0) AS BLOB), n / 7.0, CASE n % 4 WHEN 0 THEN n WHEN 1 THEN n * 0.1 WHEN 2 THEN NULL ELSE x'00ff' END FROM g`)
	a.exec(`INSERT INTO nocase VALUES ('t', 'Alpha', 1), ('t', 'beta', 2), ('u', 'ALPHA', 3)`)
	a.exec(`INSERT INTO typed VALUES ('t', 1, '2026-01-01', '2026-01-01 10:00:00+02:00', 1, 1234567890, 1.0, 'text' || char(0) || 'behind'), ('t', 2, 5, 1.5, 'yes', '', '12e3', CAST(x'80c3' AS TEXT)),
		('t', 3, NULL, NULL, NULL, NULL, NULL, x''), ('t', 4, '', 'not a date', 0, '2026-02-30', 9223372036854775807, ''), ('t', -9223372036854775808, 0, 0, 0, 0, 0, -0.0)`)
	a.exec(`INSERT INTO tree VALUES ('t', 1, 9), ('t', 9, NULL), ('t', 5, 1)`)
	a.exec(`WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < 40) INSERT INTO ranked SELECT 't', n, n, 1 FROM g`)
	n := 0
	v := agentOf(t, b, transfer.WithViewAge(0), transfer.WithFault(func(point string) error {
		if point == "final" || point == "applied" || point == "compared" || point == "finished" {
			return nil
		}
		n++
		a.exec(`UPDATE nocase SET id = CASE id WHEN 'Alpha' THEN 'aLPHA' ELSE 'Alpha' END WHERE tenant = 't' AND id = 'alpha'`)
		a.exec(`UPDATE "odd ""name" SET r = r + 0.5, v = r WHERE r BETWEEN ? AND ? + 2`, 3*n, 3*n)
		a.exec(`DELETE FROM "odd ""name" WHERE r BETWEEN ? AND ? + 0.3`, 3*n, 3*n)
		// Neighbours exchange a unique value, through a third.
		for _, pos := range []any{[2]any{nil, n}, [2]any{n, n + 1}, [2]any{n + 1, nil}} {
			p := pos.([2]any)
			a.exec(`UPDATE ranked SET pos = ? WHERE tenant = 't' AND pos IS ?`, p[0], p[1])
		}
		a.exec(`UPDATE ranked SET live = CASE live WHEN 1 THEN 2 ELSE 1 END WHERE tenant = 't' AND id = ?`, n%3+1)
		a.exec(`INSERT INTO tree VALUES ('t', ?, 1)`, 100+n)
		a.exec(`INSERT OR REPLACE INTO typed (tenant, id, num) VALUES ('t', 3, ?)`, n)
		return nil
	}))
	if _, err := v.Prepare(t.Context(), shapeMove, a.store, nil); err != nil {
		t.Fatal(err)
	}
	a.close()
	if _, err := v.Finish(t.Context(), shapeMove, a.store, nil); err != nil {
		t.Fatal(err)
	}
	for _, q := range shapeDumps {
		x, y := a.rows(q), b.rows(q)
		if !slices.Equal(x, y) || len(x) == 0 {
			t.Errorf("%d rows at the source, %d at the target: %s\n%.500q\n%.500q", len(x), len(y), q, x, y)
		}
	}
	if n < 5 {
		t.Errorf("%d points were passed", n)
	}
}

// TestUniqueAcrossTenants: a value that another tenant of the target has fails the
// move, and takes nothing from the other.
func TestUniqueAcrossTenants(t *testing.T) {
	ddl := "CREATE TABLE host (tenant TEXT NOT NULL, id INTEGER NOT NULL, name TEXT UNIQUE, PRIMARY KEY (tenant, id))"
	tables := []guard.Table{{Name: "host", TenantColumn: "tenant"}}
	for _, before := range []bool{true, false} {
		a, b := pairOf(t, ddl, tables)
		b.exec("INSERT INTO host VALUES ('u', 1, 'taken')")
		name := "free"
		if before {
			name = "taken"
		}
		a.exec("INSERT INTO host VALUES ('t', 1, ?)", name)
		v := agentOf(t, b)
		_, err := v.Prepare(t.Context(), shapeMove, a.store, nil)
		if !before && err == nil {
			a.exec("UPDATE host SET name = 'taken'")
			a.close()
			_, err = v.Finish(t.Context(), shapeMove, a.store, nil)
		}
		if !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "unique") {
			t.Fatalf("move: %v", err)
		}
		if got := b.rows("SELECT tenant || name FROM host"); !slices.Contains(got, "utaken") {
			t.Fatalf("the target has %q", got)
		}
	}
}

// TestManyChangesAtOnce: a difference of more rows than are written at once, with
// unique values that wander between its parts.
func TestManyChangesAtOnce(t *testing.T) {
	ddl := "CREATE TABLE ranked (tenant TEXT NOT NULL, id INTEGER NOT NULL, pos INTEGER, body TEXT, PRIMARY KEY (tenant, id), UNIQUE (tenant, pos))"
	a, b := pairOf(t, ddl, []guard.Table{{Name: "ranked", TenantColumn: "tenant"}})
	const rows = 6000 / transfertest.Scale
	a.exec(`WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < ?) INSERT INTO ranked SELECT 't', n, n, 'some text' FROM g`, rows)
	v := agentOf(t, b, transfer.WithFollow(0))
	if _, err := v.Prepare(t.Context(), shapeMove, a.store, nil); err != nil {
		t.Fatal(err)
	}
	a.exec(`UPDATE ranked SET pos = -pos`)
	a.exec(`UPDATE ranked SET pos = ? + pos`, rows+1) // everything the other way round
	a.exec(`DELETE FROM ranked WHERE id % 10 = 7`)
	a.close()
	if _, err := v.Finish(t.Context(), shapeMove, a.store, nil); err != nil {
		t.Fatal(err)
	}
	q := "SELECT id || '@' || pos FROM ranked"
	if x, y := a.rows(q), b.rows(q); !slices.Equal(x, y) || len(x) != rows/10*9 {
		t.Fatalf("%d and %d rows", len(x), len(y))
	}
}

// TestWritersAreNotHeldUp: while a view is read and a copy is imported, others write.
func TestWritersAreNotHeldUp(t *testing.T) {
	ddl := "CREATE TABLE item (tenant TEXT NOT NULL, id INTEGER NOT NULL, body TEXT, PRIMARY KEY (tenant, id))"
	a, b := pairOf(t, ddl, []guard.Table{{Name: "item", TenantColumn: "tenant"}})
	const all = int64(20000 / transfertest.Scale)
	a.exec(`WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < ?) INSERT INTO item SELECT 't', n, 'some text' FROM g`, all)
	view, err := func() (transfer.View, error) {
		if _, err := a.store.Begin(t.Context(), shapeMove); err != nil {
			return nil, err
		}
		return a.store.View(t.Context(), shapeMove)
	}()
	if err != nil {
		t.Fatal(err)
	}
	var rows int64
	err = view.Rows(t.Context(), "item", nil, func(batch transfer.Batch) error {
		rows += batch.Count
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := a.db.ExecContext(ctx, "INSERT INTO item VALUES ('u', ?, 'written while it is read'), ('t', ?, 'not in the view')", rows, 1_000_000+rows)
		return err
	})
	if err != nil || rows != all {
		t.Fatalf("%d rows, %v", rows, err)
	}
	if err := view.Close(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	v := agentOf(t, b)
	go func() {
		_, err := v.Prepare(t.Context(), shapeMove, a.store, nil)
		done <- err
	}()
	var worst time.Duration
	for n := 0; ; n++ {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d writes at the target while it imported, the slowest took %v", n, worst)
			if n == 0 || worst > 3*time.Second {
				t.Errorf("writers were held up")
			}
			return
		default:
			start := time.Now()
			b.exec("INSERT INTO item VALUES ('u', ?, 'written while it is imported')", n)
			worst = max(worst, time.Since(start))
		}
	}
}
