// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// candidates are the ways to let a transaction in. docs/decisions/0002-fence-locking.md
// says what came of them. Run them with
//
//	go test ./guard/postgres -run '^$' -bench Fence -benchtime 0.5s
//
// several times, and take medians: the order of a run's lines is fixed, so load
// from elsewhere does not hit the same candidate each time.
var candidates = []struct {
	name  string
	edits []edit
	// unsafe ones are for comparison only.
	unsafe bool
}{
	{name: "none", unsafe: true, edits: []edit{markOnly}},
	{name: "advisory+row", edits: nil}, // what is installed
	{name: "row-share", edits: []edit{
		{function: "locked_fence", from: advisory},
		{function: "locked_fence", from: onlyAbove, to: "IF true THEN"},
	}},
	{name: "row-key-share", edits: []edit{
		{function: "locked_fence", from: advisory},
		{function: "locked_fence", from: onlyAbove, to: "IF true THEN"},
		{function: "locked_fence", from: "FOR SHARE", to: "FOR KEY SHARE"},
	}},
	{name: "commit-check", edits: checkAtCommit("FOR SHARE")},
	{name: "head-update", edits: []edit{markOnly,
		{function: "emit", from: "UPDATE @s.outbox_head SET seq = seq + 1 WHERE tenant = v_tenant RETURNING seq INTO v_seq;",
			to: `UPDATE @s.outbox_head h SET seq = seq + 1 FROM @s.fence f
				WHERE h.tenant = v_tenant AND f.tenant = v_tenant AND f.is_open AND split_part(v_admission, ' ', 1)::bigint BETWEEN f.floor AND f.epoch RETURNING seq INTO v_seq;`},
	}},
}

// markOnly admits without a look at the fence; where a check comes later.
var markOnly = edit{function: "admit", from: `f := @s.locked_fence(p_tenant);
	IF`, to: `PERFORM set_config('@s.admitted', pg_current_xact_id()::text || ' ' || p_tenant, true),
			set_config('@s.admission', p_epoch::text || ' ' || coalesce(p_cell, ''), true);
		RETURN;
	IF`}

// bench is a candidate's schema on a server that syncs to the disk, as a real one.
type bench struct {
	pool *pgxpool.Pool
	g    *postgres.Guard
}

var benchCluster = sync.OnceValue(func() *pgcluster.Cluster { return pgtest.NewCluster(benchTB, pgcluster.Options{}) })

var benchTB testing.TB

func newBench(b *testing.B, edits []edit) *bench {
	b.Helper()
	benchTB = b
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(pgtest.NewDB(b, benchCluster()))
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns = 20
	cfg.MinConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	g, err := postgres.New(pool, postgres.WithLogger(quiet), postgres.WithLockWait(3*time.Second))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(g.Close)
	if _, err := pool.Exec(ctx, guardtest.TableSQL); err != nil {
		b.Fatal(err)
	}
	if err := g.Install(ctx, []guard.Table{guardtest.Table}); err != nil {
		b.Fatal(err)
	}
	if err := apply(b, edits)(ctx, pool, "cell"); err != nil {
		b.Fatal(err)
	}
	return &bench{pool, g}
}

// write is a request's transaction.
func (x *bench) write(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, key string, emit bool) error {
	return x.g.InTx(guard.ContextWith(ctx, guard.Admission{Tenant: tenant, Epoch: epoch}), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO guardtest_rows VALUES ($1, $2, 'v') ON CONFLICT (tenant, key) DO UPDATE SET value = 'w'`, string(tenant), key); err != nil || !emit {
			return err
		}
		_, err := x.g.Emit(ctx, tx, "put", key)
		return err
	})
}

// BenchmarkFence measures a write of one row, with an event and without, by
// candidate, number of clients, and number of tenants that they write for.
func BenchmarkFence(b *testing.B) {
	const many = 64
	for _, c := range candidates {
		b.Run(c.name, func(b *testing.B) {
			x := newBench(b, c.edits)
			for i := range many {
				o := cells.FenceOrder{Tenant: cells.TenantID(fmt.Sprint("t", i)), Epoch: 1, Floor: 1}
				if err := x.g.OpenFence(context.Background(), o); err != nil {
					b.Fatal(err)
				}
				if err := x.write(context.Background(), o.Tenant, 1, "warm", true); err != nil {
					b.Fatal(err)
				}
			}
			for _, emit := range []bool{true, false} {
				if !emit && c.name == "head-update" {
					continue // without an event it checks nothing
				}
				for _, clients := range []int{1, 16} {
					for _, tenants := range []int{1, many} {
						b.Run(fmt.Sprintf("%s/%d-clients/%d-tenants", map[bool]string{true: "event", false: "plain"}[emit], clients, tenants), func(b *testing.B) {
							var n atomic.Int64
							var wg sync.WaitGroup
							b.ResetTimer()
							for client := range clients {
								wg.Go(func() {
									for i := n.Add(1); i <= int64(b.N); i = n.Add(1) {
										tenant := cells.TenantID(fmt.Sprint("t", i%int64(tenants)))
										if err := x.write(context.Background(), tenant, 1, fmt.Sprint("k", client), emit); err != nil {
											b.Error(err)
											return
										}
									}
								})
							}
							wg.Wait()
							b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tx/s")
						})
					}
				}
			}
		})
	}
}

// BenchmarkFenceClose measures how long a close takes while 16 clients keep
// writing for the tenant, none of which has heard of the move: the worst case,
// since gates are closed before. Given up after 3 s.
func BenchmarkFenceClose(b *testing.B) {
	for _, c := range candidates {
		if c.unsafe || c.name == "head-update" || c.name == "row-key-share" || c.name == "commit-check" {
			continue // a close does not wait for these
		}
		b.Run(c.name, func(b *testing.B) {
			x := newBench(b, c.edits)
			if err := x.g.OpenFence(context.Background(), cells.FenceOrder{Tenant: "t", Epoch: 1, Floor: 1}); err != nil {
				b.Fatal(err)
			}
			var epoch atomic.Uint64
			epoch.Store(1)
			ctx, stop := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			var written atomic.Int64
			for client := range 16 {
				wg.Go(func() {
					for ctx.Err() == nil {
						if x.write(ctx, "t", cells.Epoch(epoch.Load()), fmt.Sprint("k", client), false) == nil {
							written.Add(1)
						}
					}
				})
			}
			var took []time.Duration
			late := 0
			b.ResetTimer()
			for range b.N {
				for seen := written.Load(); written.Load() < seen+64; {
					select {
					case <-ctx.Done():
					case <-time.After(time.Millisecond):
					}
				}
				e := cells.Epoch(epoch.Load())
				start := time.Now()
				err := x.g.CloseFence(ctx, cells.FenceOrder{Tenant: "t", Epoch: e + 1, Move: "m"})
				took = append(took, time.Since(start))
				if err == nil {
					if err := x.g.OpenFence(ctx, cells.FenceOrder{Tenant: "t", Epoch: e + 2, Floor: e + 2}); err != nil {
						b.Fatal(err)
					}
					epoch.Store(uint64(e + 2))
				} else if errors.Is(err, cells.ErrUnavailable) {
					late++
				} else {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			stop()
			wg.Wait()
			slices.Sort(took)
			ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
			b.ReportMetric(ms(took[len(took)/2]), "p50-ms")
			b.ReportMetric(ms(took[len(took)-1]), "max-ms")
			b.ReportMetric(float64(late), "given-up")
		})
	}
}
