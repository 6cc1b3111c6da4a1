// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// slots counts what a cell's server holds for moves, again and again.
type slots struct {
	// group and other are the most slots of groups and of single moves at once, of those
	// that outlive a connection.
	group, other int
	looks        int
	err          error
}

// watchSlots counts slots until ctx ends.
func (s *slots) watch(ctx context.Context, db *sql.DB) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var group, other int
		err := db.QueryRowContext(ctx, `SELECT count(*) FILTER (WHERE slot_name LIKE 'cell\_group\_%'), count(*) FILTER (WHERE slot_name NOT LIKE 'cell\_group\_%')
			FROM pg_replication_slots WHERE NOT temporary`).Scan(&group, &other)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.err = err
			return
		}
		s.group, s.other, s.looks = max(s.group, group), max(s.other, other), s.looks+1
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Fifty small tenants are moved by a campaign while they are used. All of them are
// carried by one slot, which is gone in the end; each was moved, and nothing is lost.
func TestCampaignSharesASlot(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StorePostgres, Cells: []fleet.Cell{{Name: "cell-a"}, {Name: "cell-b"}}})
	const tenants = 50
	name := func(i int) string { return fmt.Sprintf("t%02d", i) }
	stops := make([]func() load.Tally, tenants)
	owners := map[string]cells.CellID{}
	for i := range tenants {
		c := e.tenant(name(i), "cell-a")
		if err := c.Fill(t.Context(), "bulk", 5, 100, func(int) {}); err != nil {
			t.Fatal(err)
		}
		stops[i] = e.hammer(&load.Hammer{Client: c, Clients: 1, Keys: 2, Pause: 500 * time.Millisecond})
		owners[name(i)] = "cell-b"
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	seen := map[string]*slots{}
	for _, cell := range []string{"cell-a", "cell-b"} {
		db, err := sql.Open("pgx", e.Cluster(cell).URL("cell"))
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		s := &slots{}
		seen[cell] = s
		wg.Go(func() { s.watch(ctx, db) })
	}
	p, err := e.cl.PlanCampaign(t.Context(), api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyDrain, Drain: []cells.CellID{"cell-a"}}, Actor: "test",
		Settings: api.CampaignSettings{Concurrency: 8, StopAfter: "none", UndoWindow: "0s", Force: true}})
	if err != nil || p.Campaign.Counts.Total != tenants {
		t.Fatalf("plan %+v, %v", p.Campaign.Counts, err)
	}
	began := time.Now()
	if _, err := e.cl.RunCampaign(t.Context(), p.Campaign.ID, api.CampaignOrder{Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	var last api.Campaign
	if err := e.cl.WatchCampaign(t.Context(), p.Campaign.ID, func(c api.Campaign) error { last = c; return nil }); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if last.State != api.CampaignDone || last.Counts.Moved != tenants {
		t.Fatalf("campaign %s: %+v", last.State, last.Counts)
	}
	t.Logf("%d moves in %v, %.1f per second", tenants, took.Round(time.Millisecond), tenants/took.Seconds())
	items, err := e.cl.CampaignItems(t.Context(), p.Campaign.ID, client.ItemQuery{Limit: 2 * tenants})
	if err != nil || len(items.Items) != tenants {
		t.Fatalf("%d items, %v", len(items.Items), err)
	}
	for _, it := range items.Items {
		if mv := e.settle(it.Move); mv.State != api.MoveDone || mv.Group != api.ItemGroup(p.Campaign.ID, it.Pos) {
			t.Errorf("%s: %s, group %q", it.Tenant, mv.State, mv.Group)
		}
	}
	e.nothingLeft(owners)
	cancel()
	wg.Wait()
	for cell, s := range seen {
		if s.err != nil || s.looks < 20 {
			t.Errorf("%s: looked %d times: %v", cell, s.looks, s.err)
		}
	}
	// Nothing is captured at the target: no move can be undone.
	if a, b := seen["cell-a"], seen["cell-b"]; a.group != 1 || a.other != 0 || b.group+b.other != 0 {
		t.Errorf("at most %d slots of groups and %d of single moves in cell-a, %d and %d in cell-b", a.group, a.other, b.group, b.other)
	}
	for i, stop := range stops {
		mustBeClean(t, name(i), stop(), false)
		if at := e.cellOf(name(i)); at != "cell-b" {
			t.Errorf("%s is in %s", name(i), at)
		}
	}
}
