// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the peer's driver, as the store's

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// benchStore is a directory with one cell that serves, on a server that syncs to the
// disk, and a bare table beside it.
type benchStore struct {
	s    *postgres.Store
	db   *sql.DB
	next atomic.Int64
	call deploy.Call
}

func newBenchStore(b *testing.B, tenants int) *benchStore {
	b.Helper()
	ctx := context.Background()
	url := pgtest.NewDB(b, pgtest.NewCluster(b, pgcluster.Options{}))
	s, err := postgres.Open(ctx, url, postgres.Options{AllowAsynchronous: true, Connections: 64})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Close() })
	at := time.Now()
	f := deploytest.Fingerprint("one", "app.example.com")
	for _, r := range []deploy.Rule{deploy.Register(deploytest.First("one")), deploy.Attach(deploy.Attachment{Current: f, KeysFP: "k"}),
		deploy.RaiseMode("enforced"), deploy.Serve()} {
		if _, err := s.Deployments().Change(ctx, "one", r, api.AuditEntry{At: at, Peer: "operator", Actor: "bench", RequestID: "r", Action: "bench"}); err != nil {
			b.Fatal(err)
		}
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(64)
	db.SetMaxIdleConns(64)
	for _, q := range []string{
		`CREATE TABLE public.bare (tenant text COLLATE "C" PRIMARY KEY, cell text NOT NULL, at bigint NOT NULL)`,
		fmt.Sprintf(`INSERT INTO public.bare SELECT 'before-' || n, 'one', 0 FROM generate_series(1, %d) n`, tenants),
		`ALTER TABLE deployment_placements DISABLE TRIGGER deployment_placements_made`,
		fmt.Sprintf(`INSERT INTO deployment_placements (tenant, cell, placed_by, actor, at, epoch, move)
			SELECT 'before-' || n, 'one', 'cell', 'bench', 0, 0, '' FROM generate_series(1, %d) n`, tenants),
		`ALTER TABLE deployment_placements ENABLE TRIGGER deployment_placements_made`,
		`UPDATE deployment_cells SET placements = (SELECT count(*) FROM deployment_placements)`, `ANALYZE`, `CHECKPOINT`,
	} {
		if _, err := db.ExecContext(ctx, `SET search_path TO directory, public; `+q); err != nil {
			b.Fatalf("%s: %v", q, err)
		}
	}
	return &benchStore{s: s, db: db, call: deploy.Call{Cell: "one", By: deploy.ByCell, CredentialHash: deploytest.Hash("a"), Fingerprint: &f, At: at}}
}

// claim places a tenant that is new; bare is what it is compared with.
func (x *benchStore) claim(ctx context.Context) error {
	c := x.call
	c.Tenant = cells.TenantID(fmt.Sprintf("t-%09d", x.next.Add(1)))
	_, created, err := x.s.Deployments().Place(ctx, c, api.AuditEntry{At: c.At, Peer: "cell", Actor: "one", RequestID: "r", Action: "placement"})
	if err == nil && !created {
		err = fmt.Errorf("%s was there", c.Tenant)
	}
	return err
}

func (x *benchStore) bare(ctx context.Context) error {
	_, err := x.db.ExecContext(ctx, `INSERT INTO public.bare (tenant, cell, at) VALUES ($1, 'one', 0) ON CONFLICT (tenant) DO NOTHING`,
		fmt.Sprintf("t-%09d", x.next.Add(1)))
	return err
}

// placed asks for a tenant that is there.
func (x *benchStore) placed(ctx context.Context) error {
	_, err := x.s.Deployments().Placement(ctx, cells.TenantID(fmt.Sprint("before-", 1+x.next.Add(1)%1000)))
	return err
}

func (x *benchStore) bareRead(ctx context.Context) error {
	var cell string
	return x.db.QueryRowContext(ctx, `SELECT cell FROM public.bare WHERE tenant = $1`, fmt.Sprint("before-", 1+x.next.Add(1)%1000)).Scan(&cell)
}

// measure runs n operations of the clients; it returns how long they took, and this
// process's time on processors.
func measure(b *testing.B, clients, n int, op func(context.Context) error) (took, cpu time.Duration) {
	b.Helper()
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	before, start := ownCPU(b), time.Now()
	for range clients {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := op(context.Background()); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start), ownCPU(b) - before
}

func ownCPU(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

// beside runs the sides in turn, seven rounds (ROUNDS), and reports medians.
func beside(b *testing.B, clients, n int, ours, peer func(context.Context) error) {
	rounds := 7
	if v, err := strconv.Atoi(os.Getenv("ROUNDS")); err == nil && v > 0 {
		rounds = v
	}
	var mine, theirs, ratio, cpu []float64
	measure(b, clients, n/4, ours) // connections and plans
	measure(b, clients, n/4, peer)
	for b.Loop() {
		for range rounds {
			took, used := measure(b, clients, n, ours)
			bare, _ := measure(b, clients, n, peer)
			m, t := float64(n)/took.Seconds(), float64(n)/bare.Seconds()
			mine, theirs, ratio, cpu = append(mine, m), append(theirs, t), append(ratio, m/t), append(cpu, float64(used.Microseconds())/float64(n))
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(mine), "ops/s")
	b.ReportMetric(median(theirs), "peer-ops/s")
	b.ReportMetric(median(ratio), "ratio")
	b.ReportMetric(median(cpu), "cpu-us/op")
}

// BenchmarkDirectory is what `make bench-directory` runs: claims of new tenants beside
// bare inserts, and reads of placements beside bare reads, by clients and by the
// tenants that are there (SIZES).
func BenchmarkDirectory(b *testing.B) {
	sizes := []int{1_000, 100_000, 1_000_000}
	if os.Getenv("SIZES") == "all" {
		sizes = append(sizes, 10_000_000)
	}
	for _, size := range sizes {
		b.Run(fmt.Sprintf("tenants=%d", size), func(b *testing.B) {
			x := newBenchStore(b, size)
			for _, clients := range []int{1, 16, 64} {
				b.Run(fmt.Sprintf("claim/clients=%d", clients), func(b *testing.B) { beside(b, clients, 200*min(clients, 16), x.claim, x.bare) })
			}
			b.Run("read/clients=16", func(b *testing.B) { beside(b, 16, 20_000, x.placed, x.bareRead) })
		})
	}
}
