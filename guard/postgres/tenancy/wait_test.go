// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cloister-dev/cloister/guard/postgres/tenancy"
	nouns "github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// blockers are what is open before the snapshot, in a line each.
func blockers(t *testing.T, s nouns.Store, snapshot string) []nouns.Blocker {
	t.Helper()
	b, err := s.OpenBefore(t.Context(), snapshot)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func snapshot(t *testing.T, s nouns.Store) string {
	t.Helper()
	v, err := s.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestOpenTransactions: each kind of transaction that began before the snapshot
// counts, and no other.
func TestOpenTransactions(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true, Settings: []string{"max_prepared_transactions=5"}})
	dsn := pgtest.NewDB(t, c)
	d := cell(t, dsn, nouns.Enforced)
	s, admin, elsewhere := d.Store(), connect(t, dsn), connect(t, pgtest.NewDB(t, c))
	exec(t, admin, `CREATE TABLE t (k int)`)
	exec(t, elsewhere, `CREATE TABLE t (k int)`)
	// advance assigns a transaction id, as the write of the mode does.
	advance := func() { exec(t, admin, `SELECT pg_current_xact_id()`) }
	for _, k := range []struct {
		name  string
		conn  *pgx.Conn
		begin []string
		end   string
		want  func(nouns.Blocker) bool // nil: it does not count
	}{
		{"an idle one that has done nothing", connect(t, dsn), []string{`BEGIN`}, `COMMIT`, func(b nouns.Blocker) bool { return b.Kind == "client backend" && b.Database == "" }},
		{"a reader with a snapshot", connect(t, dsn), []string{`BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY`, `SELECT 1`}, `COMMIT`, func(b nouns.Blocker) bool { return b.Kind == "client backend" }},
		{"a writer", connect(t, dsn), []string{`BEGIN`, `INSERT INTO t VALUES (1)`}, `ROLLBACK`, func(b nouns.Blocker) bool { return b.PID > 0 && !b.Prepared }},
		{"a prepared one", connect(t, dsn), []string{`BEGIN`, `INSERT INTO t VALUES (1)`, `PREPARE TRANSACTION 'p1'`}, `ROLLBACK PREPARED 'p1'`, func(b nouns.Blocker) bool { return b.Prepared && b.Name == "p1" }},
		{"a writer elsewhere", elsewhere, []string{`BEGIN`, `INSERT INTO t VALUES (1)`}, `ROLLBACK`, func(b nouns.Blocker) bool { return b.Database == elsewhere.Config().Database }},
		{"a reader elsewhere", elsewhere, []string{`BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT 1`}, `COMMIT`, nil},
		{"a logical replication connection", connect(t, dsn, func(c *pgx.ConnConfig) { c.RuntimeParams["replication"] = "database" }),
			[]string{`BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT 1`}, `COMMIT`, func(b nouns.Blocker) bool { return b.Kind == "walsender" }},
	} {
		t.Run(k.name, func(t *testing.T) {
			exec(t, k.conn, k.begin...)
			advance()
			at := snapshot(t, s)
			got := blockers(t, s, at)
			if k.want == nil && len(got) > 0 || k.want != nil && (len(got) != 1 || !k.want(got[0])) {
				t.Errorf("%v", got)
			}
			if len(got) == 1 && got[0].String() == "" {
				t.Error("it has no name")
			}
			advance()
			if k.want != nil && len(blockers(t, s, at)) != 1 {
				t.Error("it is forgotten while it is open")
			}
			exec(t, k.conn, k.end)
			until(t, "it has ended", func() bool { return len(blockers(t, s, at)) == 0 })
			// The same, begun afterwards, does not count.
			exec(t, k.conn, k.begin...)
			if got := blockers(t, s, at); len(got) > 0 {
				t.Errorf("one from after the snapshot: %v", got)
			}
			exec(t, k.conn, k.end)
		})
	}
	// A later transaction with an earlier one's snapshot reads what was true before.
	first, second := connect(t, dsn), connect(t, dsn)
	exec(t, first, `BEGIN ISOLATION LEVEL REPEATABLE READ`)
	var exported string
	if err := first.QueryRow(t.Context(), `SELECT pg_export_snapshot()`).Scan(&exported); err != nil {
		t.Fatal(err)
	}
	advance()
	at := snapshot(t, s)
	exec(t, second, `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SET TRANSACTION SNAPSHOT '`+exported+`'`, `SELECT 1`)
	exec(t, first, `COMMIT`)
	if got := blockers(t, s, at); len(got) != 1 {
		t.Errorf("an imported snapshot: %v", got)
	}
	exec(t, second, `COMMIT`)
	if err := s.WaitAbility(t.Context()); err == nil || !strings.Contains(err.Error(), "max_prepared_transactions") {
		t.Errorf("prepared transactions are allowed: %v", err)
	}
}

// A standby's feedback and a base backup run no SQL here and do not count.
func TestStandbysDoNotCount(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true})
	dsn := pgtest.NewDB(t, c)
	d := cell(t, dsn, nouns.Enforced)
	s := d.Store()
	// The folder is the server's to write in.
	standby, err := c.Standby(t.Context(), pgtestDir(t)+"/standby")
	if err != nil {
		t.Fatal(err)
	}
	defer standby.Stop()
	name := dsn[strings.LastIndex(dsn, "/")+1:]
	name, _, _ = strings.Cut(name, "?")
	far := connect(t, standby.URL(name))
	exec(t, far, `ALTER SYSTEM SET hot_standby_feedback = on`, `ALTER SYSTEM SET wal_receiver_status_interval = '1s'`, `SELECT pg_reload_conf()`)
	reader := connect(t, standby.URL(name))
	exec(t, reader, `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT 1`)
	admin := connect(t, dsn)
	until(t, "the standby's feedback arrives", func() bool {
		exec(t, admin, `SELECT pg_current_xact_id()`)
		var n int
		return admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender' AND backend_xmin IS NOT NULL`).Scan(&n) == nil && n == 1
	})
	exec(t, admin, `SELECT pg_current_xact_id()`)
	if got := blockers(t, s, snapshot(t, s)); len(got) > 0 {
		t.Errorf("%v", got)
	}
	if err := s.WaitAbility(t.Context()); err != nil {
		t.Error(err)
	}
}

// A role that may not see other sessions cannot judge, and says so: what it cannot
// read counts as open.
func TestRoleThatCannotSee(t *testing.T) {
	dsn := pgtest.DB(t)
	d := cell(t, dsn, nouns.Enforced)
	admin := connect(t, dsn)
	exec(t, admin, `CREATE ROLE narrow LOGIN PASSWORD 'narrow'`, `GRANT USAGE ON SCHEMA `+d.schema+` TO narrow`)
	defer exec(t, admin, `DROP OWNED BY narrow`, `DROP ROLE narrow`)
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	s, err := tenancy.Open(fmt.Sprintf("user=narrow password=narrow host=127.0.0.1 dbname=%s port=%d", cfg.Database, cfg.Port), tenancy.WithSchema(d.schema))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.WaitAbility(t.Context()); err == nil || !strings.Contains(err.Error(), "pg_read_all_stats") {
		t.Errorf("%v", err)
	}
	got := blockers(t, s, snapshot(t, s))
	if len(got) == 0 || !got[0].Unreadable {
		t.Errorf("%v", got)
	}
	exec(t, admin, `GRANT pg_read_all_stats TO narrow`)
	if err := s.WaitAbility(t.Context()); err != nil {
		t.Error(err)
	}
}

// pgtestDir is a folder that the server's user can reach; t.TempDir's parents are
// closed to it.
func pgtestDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cell-standby-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// TestWorkersOfTheServer: a vacuum that the server has begun by itself does not count,
// with whatever snapshot it holds; a background worker that runs somebody's SQL does.
func TestWorkersOfTheServer(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true, Settings: []string{"autovacuum=on", "autovacuum_naptime=1s", "autovacuum_vacuum_threshold=0",
		"autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_cost_delay=100ms", "autovacuum_vacuum_cost_limit=1"}})
	dsn := pgtest.NewDB(t, c)
	d := cell(t, dsn, nouns.Enforced)
	s, admin := d.Store(), connect(t, dsn)
	exec(t, admin, `CREATE TABLE dead AS SELECT n FROM generate_series(1, 100000) n`, `DELETE FROM dead`)
	running := func(kind string) func() bool {
		return func() bool {
			var n int
			err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity a WHERE backend_type = $1 AND datname = current_database() AND (backend_xmin IS NOT NULL OR EXISTS (
				SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'virtualxid' AND l.granted))`, kind).Scan(&n)
			return err == nil && n > 0
		}
	}
	until(t, "an autovacuum worker is in a transaction", running("autovacuum worker"))
	at := snapshot(t, s)
	exec(t, admin, `SELECT pg_current_xact_id()`)
	if got := blockers(t, s, at); len(got) > 0 {
		t.Errorf("beside an autovacuum worker: %v", got)
	}
	if !running("autovacuum worker")() {
		t.Error("the autovacuum worker has gone meanwhile")
	}

	// A worker of a parallel query is a background worker of the server.
	leader := connect(t, dsn)
	exec(t, leader, `SET parallel_setup_cost = 0`, `SET parallel_tuple_cost = 0`, `SET min_parallel_table_scan_size = 0`, `SET max_parallel_workers_per_gather = 2`,
		`SET parallel_leader_participation = off`)
	exec(t, admin, `CREATE TABLE few AS SELECT n FROM generate_series(1, 10) n`)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := leader.Exec(ctx, `SELECT count(pg_sleep(600)) FROM few`)
		ended <- err
	}()
	until(t, "a background worker is in a transaction", running("parallel worker"))
	at = snapshot(t, s)
	exec(t, admin, `SELECT pg_current_xact_id()`)
	kinds := map[string]bool{}
	for _, b := range blockers(t, s, at) {
		kinds[b.Kind] = true
	}
	if !kinds["parallel worker"] || !kinds["client backend"] || len(kinds) != 2 {
		t.Errorf("beside a background worker: %v", kinds)
	}
	stop()
	if err := <-ended; err == nil {
		t.Error("the query has ended by itself")
	}
	until(t, "nothing is open", func() bool { return len(blockers(t, s, at)) == 0 })
}
