// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy/tenancytest"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func connect(t *testing.T, dsn string, change ...func(*pgx.ConnConfig)) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	for _, f := range change {
		f(cfg)
	}
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func exec(t *testing.T, c *pgx.Conn, queries ...string) {
	t.Helper()
	for _, q := range queries {
		if _, err := c.Exec(t.Context(), q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
}

// cell is a prepared first cell in a new database.
func cell(t *testing.T, dsn string, mode tenancy.Mode) *database {
	t.Helper()
	d, err := open(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	f := tenancytest.Print("a")
	if _, err := d.Store().Prepare(t.Context(), tenancy.Preparation{First: tenancy.First{First: true, Cell: "a"}, Mode: mode, Self: &tenancy.Self{Current: &f}}); err != nil {
		t.Fatal(err)
	}
	return d
}

// A writer of the mode that stalls with the lock in its hands loses it within
// seconds; the new tenant that waited is recorded, and the next try writes the mode.
func TestStalledWriterLosesTheLock(t *testing.T) {
	d := cell(t, pgtest.DB(t), tenancy.Recording)
	s, other := d.store(), d.Store()
	tries := 0
	s.Stall(func(ctx context.Context, try int) {
		if tries = try; try > 1 {
			return
		}
		begun := time.Now()
		if m, held, err := other.Record(ctx, "waiting"); err != nil || !held || m != tenancy.Recording {
			t.Errorf("the tenant that waited: %q, %t, %v after %s", m, held, err, time.Since(begun))
		}
	})
	m, err := s.SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{})
	if err != nil || m != tenancy.Enforced || tries != 2 {
		t.Fatalf("%q after %d tries, %v", m, tries, err)
	}
	if ok, err := other.Held(t.Context(), "waiting"); err != nil || !ok {
		t.Error("it is not recorded")
	}
}

// A commit that is cut off while it waits for a standby, by its timeout or with its
// connection, is on the primary alone: it is not reported, and written again.
func TestCommitWithoutItsStandby(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true})
	for _, how := range []string{"timeout", "connection"} {
		t.Run(how, func(t *testing.T) {
			d := cell(t, pgtest.NewDB(t, c), tenancy.Recording)
			admin := connect(t, d.dsn)
			exec(t, admin, `ALTER SYSTEM SET synchronous_standby_names = 'nobody'`, `SELECT pg_reload_conf()`)
			defer exec(t, admin, `ALTER SYSTEM RESET synchronous_standby_names`, `SELECT pg_reload_conf()`)
			until(t, "the setting", func() bool {
				var v string
				return admin.QueryRow(t.Context(), `SHOW synchronous_standby_names`).Scan(&v) == nil && v == "nobody"
			})
			watch, stop := context.WithCancel(t.Context())
			defer stop()
			if how == "connection" {
				killer := connect(t, d.dsn)
				go func() {
					for watch.Err() == nil {
						tag, err := killer.Exec(watch, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
						if err != nil || tag.RowsAffected() > 0 {
							return
						}
					}
				}()
			}
			s := d.store()
			tries := 0
			m, err := s.SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{Deadline: time.Now().Add(2 * time.Minute), Tried: func(n int) error {
				if tries = n; n == 2 {
					if rows, err := s.Read(t.Context()); err != nil || rows.Mode != tenancy.Enforced {
						t.Errorf("after the first try the primary has %q, %v", rows.Mode, err)
					}
					exec(t, admin, `ALTER SYSTEM RESET synchronous_standby_names`, `SELECT pg_reload_conf()`)
				}
				return nil
			}})
			if err != nil || m != tenancy.Enforced || tries < 2 {
				t.Errorf("%q after %d tries, %v", m, tries, err)
			}
		})
	}
}

// With a standby that never answers, the mode that was reached is said, with an error.
func TestCommitNeverWaited(t *testing.T) {
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true})
	d := cell(t, pgtest.NewDB(t, c), tenancy.Recording)
	admin := connect(t, d.dsn)
	exec(t, admin, `ALTER SYSTEM SET synchronous_standby_names = 'nobody'`, `SELECT pg_reload_conf()`)
	until(t, "the setting", func() bool {
		var v string
		return admin.QueryRow(t.Context(), `SHOW synchronous_standby_names`).Scan(&v) == nil && v == "nobody"
	})
	enough := errors.New("enough")
	m, err := d.store().SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{Tried: func(n int) error {
		if n == 2 {
			return enough
		}
		return nil
	}})
	if m != tenancy.Enforced || !errors.Is(err, enough) || !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("%q, %v", m, err)
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// The fence's triggers and the tenancy's stand on one table and are independent: a
// row is written only if both are content, whichever is asked first.
func TestFenceAndTenancyOnOneTable(t *testing.T) {
	d := cell(t, pgtest.DB(t), tenancy.Enforced)
	raw := connect(t, d.dsn)
	exec(t, raw, `CREATE TABLE notes (tenant text, k int, PRIMARY KEY (tenant, k))`)
	pool, err := pgxpool.New(t.Context(), d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := postgres.New(pool, postgres.WithSchema(d.schema), postgres.WithCell("a"))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(t.Context(), []guard.Table{{Name: "notes", TenantColumn: "tenant"}}); err != nil {
		t.Fatal(err)
	}
	s := d.Store()
	if err := s.Hold(t.Context(), "held"); err != nil {
		t.Fatal(err)
	}
	r, err := s.EnsureTriggers(t.Context())
	if err != nil || len(r.Skipped) > 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	// The guard's own tables with a tenant's data are guarded, its control rows not.
	var names []string
	for _, c := range r.Created {
		names = append(names, c.Table)
	}
	if got := fmt.Sprint(names); !strings.Contains(got, d.schema+".outbox ") || strings.Contains(got, ".fence") || strings.Contains(got, ".outbox_barrier") || strings.Contains(got, ".tenancy") {
		t.Errorf("guarded: %s", got)
	}
	// Installing the guard again leaves the tenancy's alone.
	if err := g.Install(t.Context(), []guard.Table{{Name: "notes", TenantColumn: "tenant"}}); err != nil {
		t.Fatal(err)
	}
	if defects, err := s.TriggerDefects(t.Context()); err != nil || len(defects) > 0 {
		t.Errorf("%+v, %v", defects, err)
	}
	marked := connect(t, d.dsn, func(c *pgx.ConnConfig) { tenancypg.Mark(c, d.schema) })
	k := 0
	for _, c := range []struct {
		conn     *pgx.Conn
		admitted bool
		tenant   string
		state    string
	}{
		{raw, true, "held", ""}, {raw, false, "held", guard.SQLState}, {raw, true, "unheld", tenancy.SQLState}, {raw, false, "unheld", "LT0"},
		{marked, true, "held", ""}, {marked, false, "held", guard.SQLState}, {marked, true, "unheld", ""}, {marked, false, "unheld", guard.SQLState},
	} {
		k++
		tx, err := c.conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if c.admitted {
			if _, err := tx.Exec(t.Context(), `SELECT `+d.schema+`.admit($1, 0)`, c.tenant); err != nil {
				t.Fatal(err)
			}
		}
		_, err = tx.Exec(t.Context(), `INSERT INTO notes VALUES ($1, $2)`, c.tenant, k)
		_ = tx.Rollback(t.Context())
		var pg *pgconn.PgError
		if c.state == "" && err != nil || c.state != "" && (!errors.As(err, &pg) || !strings.HasPrefix(pg.Code, c.state)) {
			t.Errorf("marked %t, admitted %t, %s: %v", c.conn == marked, c.admitted, c.tenant, err)
		}
	}
	// Through the guard, the refusal is the tenancy's own, and nothing was written.
	ctx := guard.ContextWith(t.Context(), guard.Admission{Tenant: "unheld", Cell: "a"})
	err = g.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO notes VALUES ('unheld', 1)`)
		return err
	})
	if !errors.Is(err, tenancy.ErrRefused) || !guard.NothingWritten(err) || guard.RetryElsewhere(err) {
		t.Errorf("through the guard: %v", err)
	}
}
