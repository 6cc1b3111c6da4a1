// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func TestPlacementIsOnce(t *testing.T) {
	d := newState(t).start(t, nil)
	ctx := ctxOf(t)
	_, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "t"})
	wantCode(t, err, cells.CodeNoCell)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})

	req := api.PlacementRequest{Tenant: "t", Cell: "b", OperationID: "op-1", Actor: "alice"}
	first, err := d.cl.Place(ctx, req)
	if err != nil || !first.Created || first.Cell != "b" || first.Route.Epoch != 1 || first.OperationID != "op-1" {
		t.Fatalf("placed %+v, %v", first, err)
	}
	// The loser gets the winner.
	other, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "t", Cell: "a", OperationID: "op-2"})
	if err != nil || other.Created || other.Cell != "b" {
		t.Errorf("loser got %+v, %v", other, err)
	}
	// A closed cell does not stand in the way of a retry.
	d.cell("b", api.CellSpec{Closed: true})
	again, err := d.cl.Place(ctx, req)
	if err != nil || !again.Created || again.Cell != "b" {
		t.Errorf("retry got %+v, %v", again, err)
	}
	// The id is of that request only.
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "u", Cell: "b", OperationID: "op-1"})
	wantCode(t, err, cells.CodeConflict)
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "t", Cell: "a", OperationID: "op-1"})
	wantCode(t, err, cells.CodeConflict)
	_, err = d.cl.Move(ctx, api.MoveRequest{Tenant: "t", To: "b", OperationID: "op-1"})
	wantCode(t, err, cells.CodeConflict)
	// The first answer stands, also after the tenant has moved and is gone.
	m := d.move("t", "a")
	d.untilState(m.ID, api.MoveDone)
	again, err = d.cl.Place(ctx, req)
	if err != nil || !again.Created || again.Cell != "b" || again.Route.Epoch != 1 {
		t.Errorf("retry after a move got %+v, %v", again, err)
	}
}

func TestPlacementRefusals(t *testing.T) {
	d := newState(t).start(t, nil)
	ctx := ctxOf(t)
	zero, one := int64(0), int64(1)
	d.cell("closed", api.CellSpec{Closed: true})
	d.cell("new", api.CellSpec{State: api.CellAttaching})
	d.cell("full", api.CellSpec{PlacementsMax: &zero})
	for _, c := range []cells.CellID{"closed", "new", "full", ""} {
		_, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "t", Cell: c})
		if a := wantCode(t, err, cells.CodeCellClosed); a.RetryAfter <= 0 {
			t.Errorf("cell %q: no Retry-After", c)
		}
	}
	d.cell("one", api.CellSpec{PlacementsMax: &one})
	d.place("t", "")
	_, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "u"})
	wantCode(t, err, cells.CodeCellClosed)
	// A deleted tenant makes room.
	del, err := d.cl.DeleteTenant(ctx, "t", "alice")
	if err != nil || !del.Done || del.Route.State != cells.StateDeleted {
		t.Fatalf("deleted %+v, %v", del, err)
	}
	if p := d.place("u", ""); p.Cell != "one" {
		t.Errorf("placed in %s", p.Cell)
	}
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "t", Cell: "one"})
	wantCode(t, err, cells.CodeCellClosed)
	// And comes back at a higher epoch.
	d.cell("one", api.CellSpec{})
	if p := d.place("t", "one"); !p.Created || p.Route.Epoch != 3 {
		t.Errorf("placed again %+v", p)
	}
}

func TestPlacementSpreads(t *testing.T) {
	d := newState(t).start(t, nil)
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d.cell(c, api.CellSpec{})
	}
	for i := range 9 {
		d.place(cells.TenantID(fmt.Sprintf("t%d", i)), "")
	}
	for _, c := range []cells.CellID{"a", "b", "c"} {
		if n := d.tenants(c); n != 3 {
			t.Errorf("cell %s has %d tenants", c, n)
		}
	}
}

// Two directories on one store, 64 claimers, one quota; and one tenant that many
// want for different cells.
func TestPlacementConcurrency(t *testing.T) {
	s := newState(t)
	ds := []*dir{s.start(t, nil), s.start(t, func(c *directory.Config) { c.Name = "d2" })}
	const claimers, quota = 64, 10
	n := int64(quota)
	ds[0].cell("a", api.CellSpec{PlacementsMax: &n})
	ds[0].cell("b", api.CellSpec{})
	var mu sync.Mutex
	won, full := 0, 0
	winners := map[cells.CellID]int{}
	created := 0
	var wg sync.WaitGroup
	for i := range claimers {
		wg.Go(func() {
			cl := ds[i%2].cl
			_, err := cl.Place(ctxOf(t), api.PlacementRequest{Tenant: cells.TenantID(fmt.Sprintf("t%02d", i)), Cell: "a"})
			shared, serr := cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "shared", Cell: []cells.CellID{"b", ""}[i/2%2]})
			mu.Lock()
			defer mu.Unlock()
			switch a := cells.AnswerOf(err); {
			case err == nil:
				won++
			case a != nil && a.Code == cells.CodeCellClosed:
				full++
			default:
				t.Errorf("claim: %v", err)
			}
			if serr != nil {
				t.Errorf("shared claim: %v", serr)
				return
			}
			winners[shared.Cell]++
			if shared.Created {
				created++
			}
		})
	}
	wg.Wait()
	inA := 0
	for i := range claimers {
		r, err := ds[0].table.Get(ctxOf(t), cells.TenantID(fmt.Sprintf("t%02d", i)))
		if err == nil && r.CellID == "a" {
			inA++
		} else if !errors.Is(err, cells.ErrNotFound) {
			t.Errorf("t%02d: %+v %v", i, r, err)
		}
	}
	if len(winners) != 1 || created != 1 {
		t.Errorf("the shared tenant went to %v, created %d times", winners, created)
	}
	shared := ds[0].route("shared")
	if shared.CellID == "a" {
		inA++
		won++
	}
	if inA != quota || won != quota || won+full < claimers {
		t.Errorf("%d tenants in a, %d claims won, %d refused; want %d", inA, won, full, quota)
	}
	for _, d := range ds {
		eventually(t, "ledger is settled", func() bool {
			list, err := d.store.Reserved(ctxOf(t), "", 10)
			return err == nil && len(list) == 0 && d.tenants("a") == quota
		})
	}
}

// failing is a table whose writes fail while it is told to, before or after they
// are made.
type failing struct {
	cells.RoutingTable
	mu     sync.Mutex
	before int
	after  int
}

func (f *failing) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	f.mu.Lock()
	before, after := f.before, f.after
	f.before, f.after = max(before-1, 0), max(after-1, 0)
	f.mu.Unlock()
	if before > 0 {
		return cells.TenantRoute{}, fmt.Errorf("%w: refused by the test", cells.ErrUnavailable)
	}
	out, err := f.RoutingTable.CompareAndSet(ctx, old, next)
	if after > 0 && err == nil {
		return cells.TenantRoute{}, fmt.Errorf("%w: answer lost by the test", cells.ErrUnavailable)
	}
	return out, err
}

func (f *failing) set(before, after int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before, f.after = before, after
}

func TestPlacementWhenTheTableFails(t *testing.T) {
	s := newState(t)
	var tab *failing
	d := s.start(t, func(c *directory.Config) {
		tab = &failing{RoutingTable: c.Table}
		c.Table = tab
	})
	ctx := ctxOf(t)
	n := int64(2)
	d.cell("a", api.CellSpec{PlacementsMax: &n})

	// The answer of the write is lost: the claim finds its own row.
	tab.set(0, 1)
	if p := d.place("t", "a"); !p.Created {
		t.Errorf("placed %+v", p)
	}
	// The table is down: the outcome is unknown, the place stays reserved.
	tab.set(1000, 0)
	_, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "u", Cell: "a", OperationID: "op-u"})
	var unknown *client.UnknownOutcomeError
	if !errors.As(err, &unknown) || unknown.Operation != "op-u" {
		t.Fatalf("table down: %v", err)
	}
	wantCode(t, err, cells.CodeBackendUnavailable)
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "v", Cell: "a"})
	wantCode(t, err, cells.CodeCellClosed)
	// The directory dies with the table still down. The next one finishes the claim.
	d.close()
	d = s.start(t, nil)
	eventually(t, "the reservation is finished", func() bool {
		r, err := d.table.Get(ctx, "u")
		return err == nil && r.CellID == "a" && r.OperationID == "op-u"
	})
	p, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "u", Cell: "a", OperationID: "op-u"})
	if err != nil || !p.Created {
		t.Errorf("retry got %+v, %v", p, err)
	}
	if n := d.tenants("a"); n != 2 {
		t.Errorf("cell a counts %d tenants", n)
	}
}

func TestPlacementAndTheDefaultCell(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	ctx := ctxOf(t)
	d.cell("old", api.CellSpec{Default: true})
	d.cell("b", api.CellSpec{})
	s.far.set(func() { s.far.rows[place{"old", "held"}] = 5 })

	got, err := d.cl.Tenant(ctx, "held")
	if err != nil || got.Route != nil || got.DefaultCell != "old" {
		t.Errorf("tenant of the default cell: %+v, %v", got, err)
	}
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "held", Cell: "b"})
	wantCode(t, err, cells.CodeConflict)
	if p := d.place("held", ""); p.Cell != "old" || p.Route.Floor != 0 || p.Route.Epoch != 1 {
		t.Errorf("held by the default cell, placed %+v", p)
	}
	if p := d.place("fresh", "b"); p.Cell != "b" || !p.Created {
		t.Errorf("nobody's tenant: %+v", p)
	}
	s.far.set(func() { s.far.down["old"] = true })
	_, err = d.cl.Place(ctx, api.PlacementRequest{Tenant: "perhaps", Cell: "b"})
	wantCode(t, err, cells.CodeCellUnreachable)
	p, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "perhaps", Cell: "b", New: true})
	if err != nil || p.Cell != "b" {
		t.Errorf("said to be new: %+v, %v", p, err)
	}
	s.far.set(func() { s.far.down["old"] = false; s.far.rows[place{"old", "rowless"}] = 3 })
	// Moving a tenant that only the default cell serves places it there first.
	m := d.move("rowless", "b")
	m = d.untilState(m.ID, api.MoveDone)
	if m.From != "old" || d.route("rowless").CellID != "b" {
		t.Errorf("move %s, route %+v", m.String(), d.route("rowless"))
	}
}

func TestDeleteGoesOnAfterACrash(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	d.cell("a", api.CellSpec{})
	d.place("t", "a")
	s.far.set(func() { s.far.down["a"] = true })
	del, err := d.cl.DeleteTenant(ctxOf(t), "t", "alice")
	if err != nil || del.Done || del.Error == "" || del.Route.State != cells.StateDeleting {
		t.Fatalf("deleted %+v, %v", del, err)
	}
	d.close()
	d = s.start(t, nil)
	s.far.set(func() { s.far.down["a"] = false })
	eventually(t, "tenant is deleted and its rows are gone", func() bool {
		r := d.route("t")
		return r.State == cells.StateDeleted && len(r.Residue) == 0
	})
	eventually(t, "the place is free", func() bool { return d.tenants("a") == 0 })
	del, err = d.cl.DeleteTenant(ctxOf(t), "t", "alice")
	if err != nil || !del.Done {
		t.Errorf("deleted again: %+v, %v", del, err)
	}
}

func TestPinnedDirectory(t *testing.T) {
	d := newState(t).start(t, func(c *directory.Config) { c.Pinned = true })
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.place("t", "a")
	_, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b"})
	wantCode(t, err, cells.CodeForbidden)
	_, err = d.cl.DeleteTenant(ctxOf(t), "t", "")
	wantCode(t, err, cells.CodeForbidden)
}

func TestTenantPages(t *testing.T) {
	d := newState(t).start(t, nil)
	ctx := ctxOf(t)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	for i := range 7 {
		d.place(cells.TenantID(fmt.Sprintf("t%d", i)), []cells.CellID{"a", "b"}[i%2])
	}
	if _, err := d.cl.DeleteTenant(ctx, "t2", ""); err != nil {
		t.Fatal(err)
	}
	var got []cells.TenantID
	q := client.TenantQuery{Cell: "a", Limit: 2}
	for {
		page, err := d.cl.Tenants(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range page.Routes {
			got = append(got, r.TenantID)
		}
		if page.Next == "" {
			break
		}
		q.After = page.Next
	}
	if fmt.Sprint(got) != "[t0 t4 t6]" {
		t.Errorf("pages gave %v", got)
	}
	all, err := d.cl.Tenants(ctx, client.TenantQuery{Deleted: true})
	if err != nil || len(all.Routes) != 7 {
		t.Errorf("%d routes with tombstones, %v", len(all.Routes), err)
	}
}

// A slow claimer whose reservation was overtaken must not bring the tenant back.
func TestPlacementIsConditional(t *testing.T) {
	s := newState(t)
	gate := make(chan struct{})
	reached := make(chan struct{}, 1)
	slow := s.start(t, func(c *directory.Config) {
		c.Table = &gated{RoutingTable: c.Table, gate: gate, reached: reached}
		c.TakeOver = time.Minute
	})
	quick := s.start(t, func(c *directory.Config) { c.Name = "d2"; c.TakeOver = time.Minute })
	one := int64(1)
	quick.cell("a", api.CellSpec{PlacementsMax: &one})
	result := make(chan error, 1)
	go func() {
		_, err := slow.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "t", Cell: "a", OperationID: "slow"})
		result <- err
	}()
	<-reached // the place is reserved, the route is not written
	if p := quick.place("t", "a"); p.Created {
		t.Errorf("the reservation's operation is not its maker's: %+v", p)
	}
	for range 2 { // the second time it is another operation's tenant
		if _, err := quick.cl.DeleteTenant(ctxOf(t), "t", ""); err != nil {
			t.Fatal(err)
		}
		if quick.route("t").Epoch < 3 {
			quick.place("t", "a")
		}
	}
	quick.place("u", "a") // the quota is used up again
	close(gate)
	wantCode(t, <-result, cells.CodeCellClosed)
	if r := quick.route("t"); r.State != cells.StateDeleted {
		t.Errorf("the late claim brought the tenant back: %+v", r)
	}
	if n := quick.tenants("a"); n != 1 {
		t.Errorf("cell a counts %d tenants", n)
	}
}

// gated holds back the first write.
type gated struct {
	cells.RoutingTable
	once    sync.Once
	gate    chan struct{}
	reached chan struct{}
}

func (g *gated) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	g.once.Do(func() {
		g.reached <- struct{}{}
		<-g.gate
	})
	return g.RoutingTable.CompareAndSet(ctx, old, next)
}
