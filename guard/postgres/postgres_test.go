// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os/exec"
	"strings"
	"sync"
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
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// installed returns a new database with the suite's table and its guard.
func installed(t *testing.T, dbURL string, opts ...postgres.Option) (*pgxpool.Pool, *postgres.Guard) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), dbURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	g, err := postgres.New(pool, append([]postgres.Option{postgres.WithLogger(quiet)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	exec1(t, pool, guardtest.TableSQL)
	if err := g.Install(t.Context(), []guard.Table{guardtest.Table}); err != nil {
		t.Fatal(err)
	}
	return pool, g
}

func exec1(t *testing.T, pool *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func refused(t *testing.T, err error, what string) {
	t.Helper()
	var s interface{ SQLState() string }
	if !errors.As(err, &s) || s.SQLState() != guard.SQLState {
		t.Errorf("%s: %v, want SQLSTATE %s", what, err, guard.SQLState)
	}
}

func put(key string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO guardtest_rows VALUES ('a', $1, 'v')`, key)
		return err
	}
}

func as(ctx context.Context, epoch cells.Epoch) context.Context {
	return guard.ContextWith(ctx, guard.Admission{Tenant: "a", Epoch: epoch})
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]postgres.Option{
		"schema": postgres.WithSchema(`a"; DROP`), "empty schema": postgres.WithSchema(""), "cell": postgres.WithCell("No Cell"),
		"lock wait": postgres.WithLockWait(0), "retries": postgres.WithRetries(-1), "poll": postgres.WithPoll(-1), "commit wait": postgres.WithCommitWait(0),
	} {
		if _, err := postgres.New(nil, o); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// psql, migrations and services in other languages use the functions.
func TestFunctions(t *testing.T) {
	dbURL := pgtest.DB(t)
	pool, g := installed(t, dbURL)
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 4, Floor: 4}); err != nil {
		t.Fatal(err)
	}
	psql := func(script string) (string, error) {
		bin, err := exec.LookPath("psql")
		if err != nil {
			t.Skip("no psql")
		}
		cmd := exec.CommandContext(t.Context(), bin, "-X", "-At", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", dbURL)
		cmd.Stdin = strings.NewReader(script)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		err = cmd.Run()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, errs.String())
		}
		return out.String(), err
	}
	if _, err := psql(`INSERT INTO guardtest_rows VALUES ('a', 'k', 'v')`); err == nil || !strings.Contains(err.Error(), guard.SQLState) {
		t.Errorf("psql without an admission: %v", err)
	}
	out, err := psql(`BEGIN; SELECT cell.admit('a', 4); INSERT INTO guardtest_rows VALUES ('a', 'k', 'v'); SELECT 'seq', cell.emit('put', '{"by": "psql"}'); COMMIT;`)
	if err != nil || !strings.Contains(out, "seq|1") {
		t.Errorf("psql with an admission: %v, %s", err, out)
	}
	// A migration that rewrites all tenants' rows, in one transaction.
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "b", Epoch: 2, Floor: 2}); err != nil {
		t.Fatal(err)
	}
	if _, err := psql(`BEGIN; SELECT cell.admit_current('b'); INSERT INTO guardtest_rows VALUES ('b', 'k', 'v'); COMMIT;`); err != nil {
		t.Error(err)
	}
	out, err = psql(`DO $$ DECLARE t text; BEGIN
		FOR t IN SELECT DISTINCT tenant FROM guardtest_rows LOOP
			PERFORM cell.admit_current(t);
			UPDATE guardtest_rows SET value = 'migrated' WHERE tenant = t;
		END LOOP; END $$;
		SELECT string_agg(tenant || value, ',' ORDER BY tenant) FROM guardtest_rows`)
	if err != nil || !strings.Contains(out, "amigrated,bmigrated") {
		t.Errorf("migration: %v, %s", err, out)
	}
	// The setting of another transaction, or one made by hand, admits nothing.
	for _, q := range []string{
		`SET cell.admitted = 'a'`, `SELECT set_config('cell.admitted', '1 a', false)`, `SELECT set_config('cell.admitted', pg_current_xact_id()::text || ' a', false)`,
	} {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), q); err != nil {
			t.Error(err)
		}
		_, err = conn.Exec(t.Context(), `INSERT INTO guardtest_rows VALUES ('a', 'x', 'v')`)
		refused(t, err, q)
		_, err = conn.Exec(t.Context(), `RESET cell.admitted`)
		if err != nil {
			t.Error(err)
		}
		conn.Release()
	}
	_, err = pool.Exec(t.Context(), `SELECT cell.admit('a', NULL)`)
	refused(t, err, "admission at NULL")
	_, err = pool.Exec(t.Context(), `SELECT cell.admit('a', 3)`)
	refused(t, err, "admission at a lower epoch")
}

func TestWithoutCells(t *testing.T) {
	_, g := installed(t, pgtest.DB(t), postgres.WithoutCells())
	ctx := guard.WithTenant(t.Context(), "a")
	for _, k := range []string{"1", "2"} {
		if err := g.InTx(ctx, pgx.TxOptions{}, put(k)); err != nil {
			t.Fatal(err)
		}
	}
	if f, err := g.Fence(ctx, "a"); err != nil || !f.Open || f.Epoch != 0 {
		t.Errorf("the fence is %+v, %v", f, err)
	}
	if err := g.InTx(t.Context(), pgx.TxOptions{}, put("3")); !errors.Is(err, guard.ErrNoAdmission) {
		t.Errorf("no tenant: %v", err)
	}
	if err := g.InTx(guard.WithTenant(ctx, "not a tenant"), pgx.TxOptions{}, put("3")); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("malformed tenant: %v", err)
	}
}

func TestReadOnly(t *testing.T) {
	_, g := installed(t, pgtest.DB(t))
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 1, Floor: 1}); err != nil {
		t.Fatal(err)
	}
	for _, iso := range isolations {
		read := func(epoch cells.Epoch) error {
			return g.InTx(as(t.Context(), epoch), pgx.TxOptions{IsoLevel: iso, AccessMode: pgx.ReadOnly}, func(ctx context.Context, tx pgx.Tx) error {
				var n int
				return tx.QueryRow(ctx, `SELECT count(*) FROM guardtest_rows`).Scan(&n)
			})
		}
		if err := read(1); err != nil {
			t.Errorf("%s: %v", iso, err)
		}
		if err := read(2); !errors.Is(err, cells.ErrFenced) {
			t.Errorf("%s at another epoch: %v", iso, err)
		}
	}
}

func TestWrongCell(t *testing.T) {
	_, g := installed(t, pgtest.DB(t), postgres.WithCell("here"))
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Cell: "there", Tenant: "a", Epoch: 1}); !errors.Is(err, cells.ErrInvalid) {
		t.Error(err)
	}
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Cell: "here", Tenant: "a", Epoch: 1}); err != nil {
		t.Error(err)
	}
}

func TestInstall(t *testing.T) {
	dbURL := pgtest.DB(t)
	pool, err := pgxpool.New(t.Context(), dbURL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	exec1(t, pool, `CREATE SCHEMA app`)
	exec1(t, pool, `CREATE TABLE app."Odd Name" ("Tenant Id" varchar(64), n int, PRIMARY KEY ("Tenant Id", n))`)
	exec1(t, pool, `CREATE TABLE parted (tenant text, n int, PRIMARY KEY (tenant, n)) PARTITION BY RANGE (n)`)
	exec1(t, pool, `CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)`)
	tables := []guard.Table{{Name: `app."Odd Name"`, TenantColumn: "Tenant Id"}, {Name: "parted", TenantColumn: "tenant"}}
	// Several processes start at the same time.
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			g, err := postgres.New(pool, postgres.WithLogger(quiet))
			if err == nil {
				defer g.Close()
				err = g.Install(t.Context(), tables)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	exec1(t, pool, `CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)`)
	// A partition that comes later is protected when it comes, against TRUNCATE
	// from the next Install on.
	g, err := postgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	// Somebody has switched a trigger to its default.
	exec1(t, pool, `ALTER TABLE parted_1 ENABLE TRIGGER zz_cell_guard_insert`)
	if err := g.Install(t.Context(), tables); err != nil {
		t.Fatal(err)
	}
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, role := range []string{"origin", "replica"} {
		if _, err := conn.Exec(t.Context(), `SELECT set_config('session_replication_role', $1, false)`, role); err != nil {
			t.Fatal(err)
		}
		for _, q := range []string{
			`INSERT INTO app."Odd Name" VALUES ('a', 1)`, `INSERT INTO parted VALUES ('a', 1)`, `INSERT INTO parted_1 VALUES ('a', 1)`,
			`INSERT INTO parted VALUES ('a', 11)`, `INSERT INTO parted_2 VALUES ('a', 11)`, `TRUNCATE parted`, `TRUNCATE parted_1`, `TRUNCATE parted_2`, `TRUNCATE app."Odd Name"`,
			`COPY parted FROM PROGRAM 'printf "a\t3\n"'`,
		} {
			_, err := conn.Exec(t.Context(), q)
			refused(t, err, role+": "+q)
		}
	}
	if _, err := conn.Exec(t.Context(), `RESET session_replication_role`); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 11} {
		err := g.InTx(as(t.Context(), 0), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO app."Odd Name" VALUES ('a', $1)`, n); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO parted VALUES ('a', $1)`, n)
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	// A key that moves between partitions, in and out of the tenant's rows.
	err = g.InTx(as(t.Context(), 0), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE parted SET n = 12 WHERE n = 1`)
		return err
	})
	if err != nil {
		t.Errorf("a row that changes its partition: %v", err)
	}
	err = g.InTx(as(t.Context(), 0), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE parted SET n = 2, tenant = 'b' WHERE n = 12`)
		return err
	})
	if !errors.Is(err, cells.ErrFenced) {
		t.Errorf("a row that changes its partition and its tenant: %v", err)
	}
	// What a newer build has installed stays.
	exec1(t, pool, `UPDATE cell.meta SET version = 1000`)
	exec1(t, pool, `DROP FUNCTION cell.admit_current`)
	if err := g.Install(t.Context(), tables); err != nil {
		t.Fatal(err)
	}
	var there bool
	if err := pool.QueryRow(t.Context(), `SELECT to_regproc('cell.admit_current') IS NOT NULL`).Scan(&there); err != nil || there {
		t.Errorf("an older build replaced a newer one's functions (%v)", err)
	}
}

// A table that is being written to is protected in short tries.
func TestInstallWaitsForWriters(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	exec1(t, pool, guardtest.TableSQL)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `INSERT INTO guardtest_rows VALUES ('a', 'k', 'v')`); err != nil {
		t.Fatal(err)
	}
	g, err := postgres.New(pool, postgres.WithLockWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(t.Context(), []guard.Table{guardtest.Table}); err == nil {
		t.Error("installed under a writer")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Install(t.Context(), []guard.Table{guardtest.Table}); err != nil {
		t.Error(err)
	}
}

// A close that gives up says who held it up.
func TestCloseNamesTheHolder(t *testing.T) {
	pool, g := installed(t, pgtest.DB(t), postgres.WithLockWait(50*time.Millisecond))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if err := g.Admit(t.Context(), tx, "a", 0); err != nil {
		t.Fatal(err)
	}
	err = g.CloseFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 1, Move: "m"})
	if !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprintf("pid %d idle in transaction", tx.Conn().PgConn().PID())) {
		t.Errorf("close says: %v", err)
	}
}

// A transaction that was prepared for two-phase commit counts as in flight, also
// across a restart of the server.
func TestPreparedTransaction(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{Settings: []string{"max_prepared_transactions=4"}})
	pool, g := installed(t, pgtest.NewDB(t, c), postgres.WithLockWait(100*time.Millisecond))
	ctx := t.Context()
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		epoch := cells.Epoch(0)
		if f, err := g.Fence(ctx, "a"); err == nil {
			epoch = f.Epoch
		}
		conn, err := pool.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Admit(ctx, tx, "a", epoch); err != nil {
			t.Fatal(err)
		}
		if err := put(string(iso))(ctx, tx); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(ctx, `PREPARE TRANSACTION 'p'`); err != nil {
			t.Fatal(err)
		}
		conn.Release()
		closeIt := func() error {
			return g.CloseFence(ctx, cells.FenceOrder{Tenant: "a", Epoch: epoch + 1, Move: "m"})
		}
		if err := closeIt(); err == nil {
			t.Error("close did not wait for a prepared transaction")
		}
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := c.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		pool.Reset()
		if err := closeIt(); err == nil {
			t.Error("close did not wait for a prepared transaction after a restart")
		}
		exec1(t, pool, `COMMIT PREPARED 'p'`)
		if err := closeIt(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := g.OpenFence(ctx, cells.FenceOrder{Tenant: "a", Epoch: epoch + 2, Floor: epoch + 2}); err != nil {
			t.Error(err)
		}
	}
}

// cutter is a proxy that, once armed, cuts the connection when a COMMIT passes:
// before the server has it, or after.
type cutter struct {
	l     net.Listener
	to    string
	armed atomic.Int32 // 1: before, 2: after
	wg    sync.WaitGroup
}

func newCutter(t *testing.T, dbURL string) (*cutter, string) {
	u, err := url.Parse(dbURL)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{l: l, to: u.Host}
	u.Host = l.Addr().String()
	c.wg.Go(func() {
		for {
			down, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", c.to)
			if err != nil {
				down.Close()
				continue
			}
			c.wg.Go(func() { _, _ = io.Copy(down, up); down.Close(); up.Close() })
			c.wg.Go(func() { c.pump(down, up) })
		}
	})
	t.Cleanup(func() { l.Close(); c.wg.Wait() })
	return c, u.String()
}

func (c *cutter) pump(down, up net.Conn) {
	defer down.Close()
	defer up.(*net.TCPConn).CloseWrite() // what the server has got it still does
	buf := make([]byte, 32<<10)
	for {
		n, err := down.Read(buf)
		if err != nil {
			return
		}
		how := int32(0)
		if bytes.Contains(bytes.ToLower(buf[:n]), []byte("commit\x00")) {
			how = c.armed.Swap(0)
		}
		if how == 1 {
			return
		}
		if how == 2 {
			down.Close() // no answer gets through
		}
		if _, err := up.Write(buf[:n]); err != nil {
			return
		}
		if how == 2 {
			return
		}
	}
}

func TestCommitThatIsCutOff(t *testing.T) {
	dbURL := pgtest.DB(t)
	direct, g := installed(t, dbURL)
	c, through := newCutter(t, dbURL)
	pool, err := pgxpool.New(t.Context(), through)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	pg, err := postgres.New(pool, postgres.WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pg.Close)
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	_ = g
	for how := int32(1); how <= 2; how++ {
		key := fmt.Sprint("k", how)
		err := pg.InTx(as(t.Context(), 0), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			c.armed.Store(how)
			return put(key)(ctx, tx)
		})
		if !errors.Is(err, guard.ErrCommitUnknown) || guard.NothingWritten(err) || guard.RetryElsewhere(err) || guard.RetryHere(err) {
			t.Errorf("cut %d: %v", how, err)
		}
		if how == 1 {
			var n int
			if err := direct.QueryRow(t.Context(), `SELECT count(*) FROM guardtest_rows WHERE key = $1`, key).Scan(&n); err != nil || n != 0 {
				t.Errorf("a commit that never arrived left %d rows, %v", n, err)
			}
		}
	}
	// The pool recovers.
	if err := pg.InTx(as(t.Context(), 0), pgx.TxOptions{}, put("again")); err != nil {
		t.Error(err)
	}
}

// The server is not there, or goes away.
func TestUnavailable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	pool, err := pgxpool.New(t.Context(), "postgres://x@"+addr+"/x?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := postgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	ran := false
	err = g.InTx(as(t.Context(), 0), pgx.TxOptions{}, func(context.Context, pgx.Tx) error { ran = true; return nil })
	if !errors.Is(err, cells.ErrUnavailable) || !guard.NothingWritten(err) || ran {
		t.Errorf("in tx: %v", err)
	}
	if err := g.CloseFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 1}); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("close: %v", err)
	}
	if _, err := g.Fence(t.Context(), "a"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("fence: %v", err)
	}
}
