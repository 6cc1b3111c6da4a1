// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// Warm opens as many connections as were asked for, at most half of the pool, once; and
// leaves nothing behind.
func TestWarm(t *testing.T) {
	ctx := t.Context()
	cfg, err := pgxpool.ParseConfig(pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := postgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(ctx, nil); err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*cfg.ConnConfig)
	defer db.Close()
	db.SetMaxOpenConns(12)
	db.SetMaxIdleConns(12)
	s, err := postgres.NewSQL(db)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, n := range []int{3, 100, 4} {
		if err := errors.Join(g.Warm(ctx, n), s.Warm(ctx, n)); err != nil {
			t.Fatal(err)
		}
		want := map[int]int{3: 3, 100: 6, 4: 6}[n]
		if st := pool.Stat(); int(st.TotalConns()) != want || st.AcquiredConns() != 0 {
			t.Errorf("pool, after %d: %d connections, %d of them held", n, st.TotalConns(), st.AcquiredConns())
		}
		if st := db.Stats(); st.OpenConnections != want || st.InUse != 0 {
			t.Errorf("database/sql, after %d: %+v", n, st)
		}
	}
	var rows int
	if err := pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM cell.fence) + (SELECT count(*) FROM cell.outbox) + (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory')").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows or locks are left, %v", rows, err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	db.SetMaxIdleConns(0)
	if err := s.Warm(ended, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
}

// A statement that contains EmitCall takes the number, writes the event, and has what it
// writes carry the number; without an admission it is refused.
func TestEmitCall(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "CREATE TABLE note (tenant text, id text, seq bigint, PRIMARY KEY (tenant, id))"); err != nil {
		t.Fatal(err)
	}
	g, err := postgres.New(pool, postgres.WithoutCells())
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(ctx, []guard.Table{{Name: "note", TenantColumn: "tenant"}}); err != nil {
		t.Fatal(err)
	}
	write := func(ctx context.Context, tx pgx.Tx, id string) (seq cells.EventSeq, err error) {
		call, args, err := g.EmitCall(ctx, "noted", map[string]string{"id": id}, 3)
		if err != nil {
			return 0, err
		}
		err = tx.QueryRow(ctx, "WITH event AS MATERIALIZED (SELECT "+call+" AS seq) INSERT INTO note VALUES ($1, $2, (SELECT seq FROM event)), ($1, $2 || '2', (SELECT seq FROM event)) RETURNING seq",
			append([]any{"acme", id}, args...)...).Scan(&seq)
		return seq, err
	}
	for i, id := range []string{"a", "b"} {
		err := g.InTx(guard.WithTenant(ctx, "acme"), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			seq, err := write(ctx, tx, id)
			if want := cells.EventSeq(i + 1); err == nil && seq != want {
				t.Errorf("number %d, want %d", seq, want)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	events, err := g.Events(ctx, "acme", 0, 0)
	if err != nil || len(events) != 2 || string(events[1].Payload) != `{"id":"b"}` || events[1].Type != "noted" {
		t.Errorf("%+v, %v", events, err)
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx)
	if _, err := write(ctx, tx, "c"); !errors.Is(g.Translate(err), cells.ErrFenced) {
		t.Errorf("without an admission: %v", err)
	}
	if _, _, err := g.EmitCall(ctx, "", nil, 1); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("without a type: %v", err)
	}
	if _, _, err := g.EmitCall(ctx, "x", func() {}, 1); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("what is no JSON: %v", err)
	}
}
