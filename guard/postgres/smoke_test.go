// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func TestSmoke(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE notes (tenant text, key text, value text, PRIMARY KEY (tenant, key))`); err != nil {
		t.Fatal(err)
	}
	g, err := postgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for range 2 {
		if err := g.Install(ctx, []guard.Table{{Name: "notes", TenantColumn: "tenant"}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pool.Exec(ctx, `INSERT INTO notes VALUES ('a','k','v')`); err == nil {
		t.Fatal("unadmitted insert")
	} else {
		t.Log(err)
	}
	actx := guard.ContextWith(ctx, guard.Admission{Tenant: "a", Epoch: 0, Cell: "c1"})
	write := func() error {
		return g.InTx(actx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO notes VALUES ('a','k','v') ON CONFLICT (tenant,key) DO UPDATE SET value='w'`); err != nil {
				return err
			}
			seq, err := g.Emit(ctx, tx, "set", map[string]int{"a": 1})
			t.Log(seq)
			return err
		})
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	if err := g.CloseFence(ctx, cells.FenceOrder{Tenant: "a", Epoch: 1, Move: "m"}); err != nil {
		t.Fatal(err)
	}
	if err := write(); !errors.Is(err, cells.ErrFenced) {
		t.Fatal(err)
	}
	mark, err := g.PauseEvents(ctx, cells.BarrierOrder{Tenant: "a", Epoch: 1, Move: "m"})
	if err != nil || mark != 2 {
		t.Fatal(mark, err)
	}
	if err := g.StartEvents(ctx, cells.BarrierOrder{Tenant: "a", Epoch: 2, Move: "m"}, mark); err != nil {
		t.Fatal(err)
	}
	if err := g.OpenFence(ctx, cells.FenceOrder{Tenant: "a", Epoch: 2, Move: "m"}); err != nil {
		t.Fatal(err)
	}
	f, err := g.Fence(ctx, "a")
	t.Logf("%+v %v", f, err)
	ev, err := g.Events(ctx, "a", 0, 10)
	t.Logf("%+v %v", ev, err)
	n, err := g.PublishNext(ctx, "a", 10, func(ctx context.Context, e []guard.Event) error { return nil })
	t.Log(n, err)
	f, err = g.Fence(ctx, "a")
	t.Logf("%+v %v", f, err)
}
