// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/table/postgres"
	"github.com/cloister-dev/cloister/table/tabletest"
)

func TestMain(m *testing.M) {
	code := pgtest.Main(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func TestConformance(t *testing.T) {
	url := pgtest.DB(t)
	var n atomic.Int64
	schemas := sync.Map{} // table -> schema
	open := func(tb tabletest.TB, schema string) cells.RoutingTable {
		p, err := postgres.Open(tb.Context(), url, postgres.WithSchema(schema),
			postgres.WithWatchIdle(20*time.Millisecond), postgres.WithPoll(10*time.Millisecond))
		if err != nil {
			tb.Fatalf("%v", err)
		}
		schemas.Store(p, schema)
		tb.Cleanup(func() { _ = p.Close() })
		return p
	}
	same := func(tb tabletest.TB, p cells.RoutingTable) cells.RoutingTable {
		schema, _ := schemas.Load(p)
		return open(tb, schema.(string))
	}
	tabletest.Run(t, tabletest.Harness{
		Open:    func(tb tabletest.TB) cells.RoutingTable { return open(tb, fmt.Sprintf("s%d", n.Add(1))) },
		Another: same,
		Reopen: func(tb tabletest.TB, p cells.RoutingTable) cells.RoutingTable {
			if err := p.(*postgres.Table).Close(); err != nil {
				tb.Fatalf("%v", err)
			}
			return same(tb, p)
		},
	})
}

func row(id cells.TenantID) cells.TenantRoute {
	return cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
}

func mustOpen(t testing.TB, url string, opts ...postgres.Option) *postgres.Table {
	t.Helper()
	p, err := postgres.Open(t.Context(), url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// next follows a watch until it reports a change.
func next(t *testing.T, w cells.RouteWatcher) cells.RouteUpdate {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		up, err := w.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(up.Routes) > 0 {
			return up
		}
	}
}

// A transaction that has taken a revision and commits late is not passed by: no
// other change can commit, and no watch can move on, before it has ended.
func TestLateCommitIsNotMissed(t *testing.T) {
	url := pgtest.DB(t)
	a, b := mustOpen(t, url, postgres.WithPoll(5*time.Millisecond), postgres.WithWatchIdle(10*time.Millisecond)), mustOpen(t, url)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	late, err := a.CompareAndSetTx(t.Context(), tx, 0, row("late"))
	if err != nil {
		t.Fatal(err)
	}
	type outcome struct {
		r   cells.TenantRoute
		err error
	}
	other := make(chan outcome, 1)
	go func() {
		r, err := b.CompareAndSet(t.Context(), 0, row("other"))
		other <- outcome{r, err}
	}()
	w, err := a.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for range 10 { // signs of life while both changes are under way
		up, err := w.Next(t.Context())
		if err != nil || len(up.Routes) > 0 || up.Revision >= late.Revision {
			t.Fatalf("before the commit the watch says %+v, %v", up, err)
		}
	}
	select {
	case o := <-other:
		t.Fatalf("another change got past the one that is not committed: %+v, %v", o.r, o.err)
	default:
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	o := <-other
	if o.err != nil || o.r.Revision <= late.Revision {
		t.Fatalf("the other change: revision %d, %v; want above %d", o.r.Revision, o.err, late.Revision)
	}
	var seen []cells.TenantID
	for len(seen) < 2 {
		for _, r := range next(t, w).Routes {
			seen = append(seen, r.TenantID)
		}
	}
	if seen[0] != "late" || seen[1] != "other" {
		t.Fatalf("the watch reported %v", seen)
	}
}

// A change that is rolled back leaves no trace, and no gap that a watch waits for.
func TestRollback(t *testing.T) {
	url := pgtest.DB(t)
	a := mustOpen(t, url)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.CompareAndSetTx(t.Context(), tx, 0, row("t")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
		t.Fatalf("Get: %v", err)
	}
	if r, err := a.CompareAndSet(t.Context(), 0, row("t")); err != nil || r.Revision != 1 {
		t.Fatalf("revision %d, %v; want 1", r.Revision, err)
	}
}

// Notices work alone: with polling out of the way a change of another handle is seen.
func TestNotify(t *testing.T) {
	url := pgtest.DB(t)
	slow := []postgres.Option{postgres.WithPoll(time.Hour), postgres.WithWatchIdle(time.Hour)}
	a, b := mustOpen(t, url, slow...), mustOpen(t, url, slow...)
	w, err := a.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r, err := b.CompareAndSet(t.Context(), 0, row("t"))
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if up := next(t, w); up.Revision != r.Revision {
			t.Fatalf("revision %d, want %d", up.Revision, r.Revision)
		}
		if r, err = b.CompareAndSet(t.Context(), r.Revision, r); err != nil {
			t.Fatal(err)
		}
	}
}

// Every connection is cut, the listener's too: calls fail as unavailable or work,
// and watches begun again see everything.
func TestConnectionsAreCut(t *testing.T) {
	url := pgtest.DB(t)
	a := mustOpen(t, url, postgres.WithPoll(20*time.Millisecond), postgres.WithWatchIdle(50*time.Millisecond))
	admin, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	rows := map[cells.TenantID]cells.TenantRoute{}
	var at cells.Revision
	var w cells.RouteWatcher
	defer func() { _ = w.Close() }()
	follow := func(rev cells.Revision) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for at < rev {
			if w == nil {
				if w, err = a.Watch(ctx, at); err != nil {
					if w = nil; !errors.Is(err, cells.ErrUnavailable) {
						t.Fatal(err)
					}
					continue
				}
			}
			up, err := w.Next(ctx)
			if err != nil {
				if !errors.Is(err, cells.ErrUnavailable) {
					t.Fatal(err)
				}
				_ = w.Close()
				w = nil
				continue
			}
			for _, r := range up.Routes {
				rows[r.TenantID] = r
			}
			at = up.Revision
		}
	}
	for i := range 5 {
		id := cells.TenantID(fmt.Sprintf("t%d", i))
		var r cells.TenantRoute
		for {
			if r, err = a.CompareAndSet(t.Context(), 0, row(id)); err == nil {
				break
			}
			if !errors.Is(err, cells.ErrUnavailable) {
				t.Fatal(err)
			}
			if r, err = a.Get(t.Context(), id); err == nil {
				break
			}
		}
		follow(r.Revision)
		if _, err := admin.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"); err != nil {
			t.Fatal(err)
		}
	}
	if len(rows) != 5 {
		t.Fatalf("the watch saw %d tenants, want 5", len(rows))
	}
}

func TestOpenRefuses(t *testing.T) {
	url := pgtest.DB(t)
	for _, schema := range []string{"", "Cells", "a b", `a"b`, "pg_cells", strings.Repeat("x", 60)} {
		if _, err := postgres.Open(t.Context(), url, postgres.WithSchema(schema)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("schema %q: %v, want ErrInvalid", schema, err)
		}
	}
	if _, err := postgres.Open(t.Context(), "postgres://u:secret@127.0.0.1:1/x?connect_timeout=2"); !errors.Is(err, cells.ErrUnavailable) || strings.Contains(err.Error(), "secret") {
		t.Errorf("no server: %v, want ErrUnavailable without the password", err)
	}
	if _, err := postgres.Open(t.Context(), "postgres://u:secret@host:notaport/"); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "secret") {
		t.Errorf("a bad url: %v, want ErrInvalid without the password", err)
	}
	mustOpen(t, url)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), "INSERT INTO cells.routes_version (version_id, is_applied) VALUES (99, true)"); err != nil {
		t.Fatal(err)
	}
	if _, err := postgres.Open(t.Context(), url); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "newer version") {
		t.Errorf("a newer schema: %v, want ErrInvalid", err)
	}
}

// Processes that start at once on a new database all get the one table.
func TestOpenTogether(t *testing.T) {
	url := pgtest.DB(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			p, err := postgres.Open(t.Context(), url)
			if err != nil {
				t.Error(err)
				return
			}
			_ = p.Close()
		}()
	}
	wg.Wait()
}

// A pool of one connection serves calls and watches.
func TestPoolOfOne(t *testing.T) {
	url := pgtest.DB(t)
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	p, err := postgres.New(t.Context(), pool, postgres.WithSchema("own"))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	w, err := p.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r, err := p.CompareAndSet(t.Context(), 0, row("t"))
	if err != nil {
		t.Fatal(err)
	}
	if up := next(t, w); up.Revision != r.Revision {
		t.Fatalf("revision %d, want %d", up.Revision, r.Revision)
	}
}

// An acknowledged change is flushed even where the server does not by default.
func TestDurableWhereServerIsNot(t *testing.T) {
	url := pgtest.DB(t)
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	p, err := postgres.New(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := p.CompareAndSetTx(t.Context(), tx, 0, row("t")); err != nil {
		t.Fatal(err)
	}
	var setting string
	if err := tx.QueryRow(t.Context(), "SHOW synchronous_commit").Scan(&setting); err != nil || setting != "on" {
		t.Fatalf("synchronous_commit is %q, %v", setting, err)
	}
}

func BenchmarkTable(b *testing.B) {
	url := pgtest.DB(b)
	n := 0
	tabletest.Benchmark(b, func(tb testing.TB) cells.RoutingTable {
		n++
		return mustOpen(tb, url, postgres.WithSchema(fmt.Sprintf("bench%d", n)))
	})
}
