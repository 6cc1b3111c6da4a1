// SPDX-License-Identifier: Apache-2.0

package httpapi_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy/client"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// size is a number from the environment: make claimers sets them.
func size(name string, def int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return def
}

// Claimers of two cells, at three router replicas on one Postgres, all claim the same
// new tenants, in orders of their own. Each tenant gets one winner, whom every answer
// names; the quotas are used up and never passed, at any replica.
func TestClaimers(t *testing.T) {
	claimers, tenants := size("CELL_CLAIMERS", 12), size("CELL_CLAIM_TENANTS", 120)
	quota := map[cells.CellID]int64{"one": int64(tenants * 2 / 5), "two": int64(tenants * 2 / 5)}
	url := pgtest.DB(t)
	r := newRouter(t)
	var replicas []string
	cred, sum := credential.Operator.New()
	for range 3 {
		s, err := postgres.Open(t.Context(), url, postgres.Options{AllowAsynchronous: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		r.store.Store = s.Deployments()
		replicas = append(replicas, r.serve(httpapi.Config{Store: s.Deployments(), Audit: s, OperatorSHA256: []string{sum.String()}, SharedHost: shared,
			Upstream: upstream, UpstreamProbe: firstProbe, Prober: r.cells, PlacementsPerMinute: 1 << 30, Timeout: 30 * time.Second}))
	}
	var err error
	if r.op, err = client.New(replicas[0], cred); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.op.CloseIdleConnections)
	r.two()
	for cell, n := range quota {
		r.must(r.op.Limit(t.Context(), cell, wire.Limit{PlacementsMax: &n}))
	}
	type result struct {
		won, lost, closed int
		took              []time.Duration
		winners           map[cells.TenantID]cells.CellID
	}
	results := make([]result, claimers)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range claimers {
		cell := []cells.CellID{"one", "two"}[i%2]
		host := map[cells.CellID]string{"one": shared, "two": "two.example.com"}[cell]
		c, f := r.cell(cell, replicas[i%3]), *r.fingerprint(cell, host)
		wg.Go(func() {
			out := &results[i]
			out.winners = map[cells.TenantID]cells.CellID{}
			for n := range tenants {
				// Neighbours are close behind each other, so that most calls meet others.
				tenant := cells.TenantID(fmt.Sprintf("t-%05d", (n+i)%tenants))
				start := time.Now()
				w, err := c.Place(t.Context(), tenant, f)
				out.took = append(out.took, time.Since(start))
				switch {
				case code(err) == cells.CodeCellClosed:
					out.closed++
				case err != nil:
					t.Errorf("%s at %s: %v", cell, tenant, err)
				case w.Created && w.Cell == cell:
					out.won++
					out.winners[tenant] = w.Cell
				case w.Created || w.DeploymentID != string(r.ids[w.Cell]):
					t.Errorf("%s at %s was answered %+v", cell, tenant, w)
				default:
					out.lost++
					out.winners[tenant] = w.Cell
				}
			}
		})
	}
	wg.Wait()
	whole := time.Since(began)
	winners := map[cells.TenantID]cells.CellID{}
	var won, lost, closed int
	var took []time.Duration
	for _, out := range results {
		won, lost, closed, took = won+out.won, lost+out.lost, closed+out.closed, append(took, out.took...)
		for tenant, cell := range out.winners {
			if other, ok := winners[tenant]; ok && other != cell {
				t.Errorf("tenant %s was won by %s and by %s", tenant, other, cell)
			}
			winners[tenant] = cell
		}
	}
	v, err := r.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var sumOf int64
	for _, c := range v.Cells {
		if c.Placements > quota[c.Name] {
			t.Errorf("cell %s holds %d tenants, its quota is %d", c.Name, c.Placements, quota[c.Name])
		}
		sumOf += c.Placements
	}
	if want := quota["one"] + quota["two"]; sumOf != want || int64(won) != want || len(winners) != int(want) {
		t.Errorf("%d tenants are counted, %d were won, %d have winners; the quotas are %d together", sumOf, won, len(winners), want)
	}
	for tenant, cell := range winners {
		if p, err := r.store.Placement(t.Context(), tenant); err != nil || p.Cell != cell {
			t.Fatalf("tenant %s: answered %s, recorded %s, %v", tenant, cell, p.Cell, err)
		}
	}
	refused := cells.TenantID("")
	for n := range tenants {
		tenant := cells.TenantID(fmt.Sprintf("t-%05d", n))
		if _, ok := winners[tenant]; !ok {
			refused = tenant
			if _, err := r.store.Placement(t.Context(), tenant); !errors.Is(err, cells.ErrNotFound) {
				t.Fatalf("tenant %s was refused everywhere and is placed: %v", tenant, err)
			}
		}
	}
	if refused == "" {
		t.Error("no tenant was refused: the quotas were not in the way")
	}
	slices.Sort(took)
	at := func(q float64) time.Duration { return took[int(q*float64(len(took)-1))].Round(10 * time.Microsecond) }
	t.Logf("%d claimers, 3 replicas, %d new tenants, quotas %v", claimers, tenants, quota)
	t.Logf("%d placed, %d answered another's winner, %d refused as full; %d calls in %v: %.0f calls/s, %.0f placements/s",
		won, lost, closed, len(took), whole.Round(time.Millisecond), float64(len(took))/whole.Seconds(), float64(won)/whole.Seconds())
	t.Logf("a call: p50 %v, p90 %v, p99 %v, longest %v", at(.5), at(.9), at(.99), at(1))
}
