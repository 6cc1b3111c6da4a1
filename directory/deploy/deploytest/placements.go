// SPDX-License-Identifier: Apache-2.0

package deploytest

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func placeOneWinner(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one")
	e.later("two", "b")
	stores := []deploy.Store{e.s, e.open().Deployments(), e.open().Deployments()}
	const claimers, tenants = 12, 10
	var created atomic.Int64
	var mu sync.Mutex
	winners := map[cells.TenantID]map[cells.CellID]bool{} // guarded by mu
	var wg sync.WaitGroup
	for i := range claimers {
		wg.Go(func() {
			c := call("one", "a", "")
			if i%2 == 1 {
				c = call("two", "b", "")
			}
			for n := range tenants {
				c.Tenant = tenant((n + i) % tenants)
				p, first, err := stores[i%3].Place(e.ctx, c, audit("placement"))
				if err != nil {
					e.Errorf("place: %v", err)
					continue
				}
				if first {
					created.Add(1)
				}
				if p.DeploymentID != "dep-"+string(p.Cell) || p.Tenant != c.Tenant {
					e.Errorf("answered %+v", p)
				}
				mu.Lock()
				if winners[c.Tenant] == nil {
					winners[c.Tenant] = map[cells.CellID]bool{}
				}
				winners[c.Tenant][p.Cell] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for tenant, w := range winners {
		if len(w) != 1 {
			e.Errorf("tenant %s has the winners %v", tenant, w)
		}
	}
	if n := created.Load(); n != tenants || e.count("one")+e.count("two") != tenants || e.audits("placement") != tenants {
		e.Errorf("%d were created, %d and %d are counted, %d audited; want %d", n, e.count("one"), e.count("two"), e.audits("placement"), tenants)
	}
}

func placeReadsBack(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one")
	e.later("two", "b")
	if _, created, err := e.place(call("one", "a", "t")); err != nil || !created {
		e.Fatalf("place: %v, %v", created, err)
	}
	yes, none := true, int64(0)
	e.mustChange("one", deploy.Limit(&yes, &none))
	// Whatever the cell's state, configuration, quota or credential.
	for what, c := range map[string]deploy.Call{
		"retry on a closed, full cell": call("one", "a", "t"),
		"the other cell":               call("two", "b", "t"),
		"no such credential":           call("two", "f", "t"),
		"no configuration":             {Tenant: "t", Cell: "two", By: deploy.ByOperator, At: At},
		"no such cell":                 call("three", "b", "t"),
	} {
		if p, created, err := e.place(c); err != nil || created || p.Cell != "one" || p.DeploymentID != "dep-one" || p.By != deploy.ByCell {
			e.Errorf("%s: %+v, %v, %v", what, p, created, err)
		}
	}
	p, err := e.s.Placement(e.ctx, "t")
	if e.must(err); p.Cell != "one" {
		e.Errorf("placement %+v", p)
	}
	_, err = e.s.Placement(e.ctx, "nobody")
	e.refused(err, cells.ErrNotFound, "placement of nobody")
}

func placeGate(t directorytest.TB, h Harness) {
	e := start(t, h)
	first := e.mustChange("one", deploy.Register(First("one")))
	refuse := func(what string, c deploy.Call, want error) {
		e.Helper()
		if _, created, err := e.place(c); !errors.Is(err, want) || created {
			e.Errorf("%s: %v, %v; want %v", what, created, err, want)
		}
		if _, err := e.s.Placement(e.ctx, c.Tenant); err == nil {
			e.Errorf("%s: the tenant is placed", what)
		}
	}
	refuse("a first cell that is not attached", call("one", "a", "t"), deploy.ErrClosed)
	e.mustChange("one", deploy.Attach(deploy.Attachment{Current: Fingerprint("one", "app.example.com")}))
	refuse("a first cell in recording", call("one", "a", "t"), deploy.ErrClosed)
	e.mustChange("one", deploy.RaiseMode(tenancy.Enforced))
	if _, created, err := e.place(call("one", "a", "early")); err != nil || !created {
		e.Errorf("a first cell that is attaching, once enforced is recorded: %v, %v", created, err)
	}
	e.mustChange("one", deploy.Serve())
	e.mustChange("two", deploy.Register(Later("two", "b")))
	refuse("a cell that is registered only", call("two", "b", "t"), deploy.ErrClosed)
	e.mustChange("two", deploy.Attach(attachment("two")))
	refuse("a later cell that is attaching", call("two", "b", "t"), deploy.ErrClosed)
	e.mustChange("two", deploy.Serve())
	refuse("another's credential", call("two", "a", "t"), deploy.ErrCredential)
	refuse("no credential", call("two", "", "t"), deploy.ErrCredential)
	refuse("a cell that there is not", call("three", "b", "t"), deploy.ErrNoCell)
	for _, everybody := range []cells.TenantID{"", "-", "*", "a b"} {
		refuse("tenant "+string(everybody), call("two", "b", everybody), cells.ErrInvalid)
	}
	other := call("two", "b", "t")
	f := Fingerprint("two", "two.example.com", "another")
	other.Fingerprint = &f
	refuse("another configuration", other, deploy.ErrClosed)
	other.Fingerprint = nil
	refuse("no configuration", other, deploy.ErrClosed)
	yes, no, one := true, false, int64(1)
	e.mustChange("two", deploy.Limit(&yes, nil))
	refuse("a closed cell", call("two", "b", "t"), deploy.ErrClosed)
	e.mustChange("two", deploy.Limit(&no, &one))
	op := call("two", "", "op")
	op.By = deploy.ByOperator
	if p, created, err := e.place(op); err != nil || !created || p.By != deploy.ByOperator {
		e.Errorf("an operator's placement: %+v, %v, %v", p, created, err)
	}
	refuse("a full cell", call("two", "b", "t"), deploy.ErrClosed)
	op.Tenant = "op2"
	refuse("a full cell, by an operator", op, deploy.ErrClosed)
	// Both credentials and both configurations while they change.
	none := int64(-1)
	e.mustChange("two", deploy.Limit(nil, &none), deploy.NextCredential(Hash("c")), deploy.NextConfig(f))
	other = call("two", "c", "by-next")
	other.Fingerprint = &f
	for _, c := range []deploy.Call{other, call("two", "b", "by-current")} {
		if _, created, err := e.place(c); err != nil || !created {
			e.Errorf("%s: %v, %v", c.Tenant, created, err)
		}
	}
	e.mustChange("two", deploy.EndCredential(true), deploy.EndConfig(f, true))
	refuse("the credential before", call("two", "b", "t"), deploy.ErrCredential)
	refuse("the configuration before", call("two", "c", "t"), deploy.ErrClosed)
	if first.Placements != 0 || e.count("two") != 4 { // op, by-next, by-current, and the configured one
		e.Errorf("%d placements are counted", e.count("two"))
	}
}

func quotaUnderConcurrency(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one")
	limit := int64(7)
	e.mustChange("one", deploy.Limit(nil, &limit))
	stores := []deploy.Store{e.s, e.open().Deployments(), e.open().Deployments()}
	var placed, refused atomic.Int64
	var wg sync.WaitGroup
	for i := range 15 {
		wg.Go(func() {
			for n := range 3 {
				_, created, err := stores[i%3].Place(e.ctx, call("one", "a", tenant(i*3+n)), audit("placement"))
				switch {
				case err == nil && created:
					placed.Add(1)
				case errors.Is(err, deploy.ErrClosed):
					refused.Add(1)
				default:
					e.Errorf("place: %v, %v", created, err)
				}
			}
		})
	}
	wg.Wait()
	if placed.Load() != limit || refused.Load() != 45-limit || e.count("one") != limit {
		e.Errorf("%d placed, %d refused, %d counted; the quota is %d", placed.Load(), refused.Load(), e.count("one"), limit)
	}
}

// placeTogether: of calls that come at once each is judged alone, whatever becomes of
// those beside it, and a tenant that two of them place has one who did.
func placeTogether(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one")
	limit := int64(10)
	e.mustChange("one", deploy.Limit(nil, &limit))
	var created, full, refused, unknown atomic.Int64
	var wg sync.WaitGroup
	for i := range 48 {
		wg.Go(func() {
			c, want := call("one", "a", tenant(i/4)), error(nil)
			switch i % 4 {
			case 1:
				c.CredentialHash, want = Hash("f"), deploy.ErrCredential
			case 2:
				c.Cell, want = "nobody", deploy.ErrNoCell
			}
			p, first, err := e.s.Place(e.ctx, c, audit("placement"))
			switch {
			case err == nil && p.Tenant == c.Tenant && p.Cell == "one": // also whom another has placed
				if first {
					created.Add(1)
				}
			case errors.Is(err, deploy.ErrClosed) && want == nil:
				full.Add(1)
			case want == deploy.ErrCredential && errors.Is(err, want):
				refused.Add(1)
			case want == deploy.ErrNoCell && errors.Is(err, want):
				unknown.Add(1)
			default:
				e.Errorf("call %d: %+v, %t, %v", i, p, first, err)
			}
		})
	}
	wg.Wait()
	if created.Load() != limit || e.count("one") != limit || int64(e.audits("placement")) != limit {
		e.Errorf("%d were created, %d are counted, %d audited; the quota is %d", created.Load(), e.count("one"), e.audits("placement"), limit)
	}
	if full.Load() < 2 { // two tenants of twelve, asked for by at least one good call each
		e.Errorf("%d were told that the cell is full", full.Load())
	}
}

func attachPlacesBeyondTheQuota(t directorytest.TB, h Harness) {
	e := start(t, h)
	yes, one := true, int64(1)
	held := make([]cells.TenantID, 300)
	for i := range held {
		held[i] = tenant(i)
	}
	a := deploy.Attachment{Current: Fingerprint("one", "app.example.com", "configured"), Tenants: append(held, held[0])}
	e.mustChange("one", deploy.Register(First("one")), deploy.Limit(&yes, &one), deploy.Attach(a), deploy.Attach(a),
		deploy.PlaceHeld([]cells.TenantID{"late", held[3]}))
	if n := e.count("one"); n != 302 {
		e.Errorf("%d tenants are placed, want 302", n)
	}
	_, err := e.change("one", deploy.PlaceHeld([]cells.TenantID{"*"}))
	e.refused(err, cells.ErrInvalid, "tenant *")
	e.mustChange("one", deploy.RaiseMode(tenancy.Enforced), deploy.Serve())
	_, err = e.change("one", deploy.PlaceHeld([]cells.TenantID{"after"}))
	e.refused(err, cells.ErrConflict, "a first cell that serves")
}

func attachRefusesTenantsOfOthers(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one", "mine")
	e.mustChange("two", deploy.Register(Later("two", "b")))
	_, err := e.change("two", deploy.Attach(attachment("two", "aa", "mine", "zz")))
	e.refused(err, deploy.ErrPlacedElsewhere, "a configured tenant of another cell")
	v := e.view()
	if c := v.Cell("two"); !c.AttachStartedAt.IsZero() || c.Current != nil || c.Placements != 0 {
		e.Errorf("a refused attach left %+v", c)
	}
	if _, err := e.s.Placement(e.ctx, "aa"); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("a refused attach placed a tenant: %v", err)
	}
	one := int64(1)
	e.mustChange("two", deploy.Limit(nil, &one))
	_, err = e.change("two", deploy.Attach(attachment("two", "aa", "zz")))
	e.refused(err, deploy.ErrClosed, "more configured tenants than the quota")
	if e.count("two") != 0 {
		e.Errorf("a refused attach placed %d tenants", e.count("two"))
	}
	e.mustChange("two", deploy.Attach(attachment("two", "aa")), deploy.Attach(attachment("two", "aa")), deploy.Serve())
	if e.count("two") != 1 {
		e.Errorf("an attach placed %d tenants", e.count("two"))
	}
}

func pinnedNeverChanges(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one", "t")
	e.later("two", "b")
	_, err := e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "t", From: "one", To: "two", Epoch: 3, Move: "m", At: At}, audit("repoint"))
	e.refused(err, deploy.ErrPinned, "a pinned directory")
	e.must(e.s.Settle(e.ctx, deploy.Pinned, audit("settle")))
	_, err = e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "t", From: "one", To: "two", Epoch: 3, Move: "m", At: At}, audit("repoint"))
	e.refused(err, deploy.ErrPinned, "a directory settled as pinned")
	e.refused(e.s.Reserve(e.ctx, deploy.Repoint{Tenant: "t", From: "one", To: "two", Move: "m", At: At}, audit("reserve")), deploy.ErrPinned, "a place in a pinned directory")
	e.must(e.s.Release(e.ctx, "t", "m", audit("release")))
	if p, err := e.s.Placement(e.ctx, "t"); err != nil || p.Cell != "one" || p.Epoch != 0 || p.MovingTo != "" {
		e.Errorf("%+v, %v", p, err)
	}
}

func movableFollowsMoves(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.must(e.s.Settle(e.ctx, deploy.Movable, audit("settle")))
	e.first("one", "t", "u")
	e.later("two", "b")
	move := func(from, to cells.CellID, epoch cells.Epoch, id cells.MoveID) error {
		_, err := e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "t", From: from, To: to, Epoch: epoch, Move: id, At: At}, audit("repoint"))
		return err
	}
	e.refused(move("two", "one", 3, "m"), cells.ErrConflict, "a move from where the tenant is not")
	e.refused(move("one", "three", 3, "m"), deploy.ErrNoCell, "a move to nowhere")
	e.must(move("one", "two", 3, "m"))
	e.must(move("one", "two", 3, "m")) // again
	e.refused(move("two", "one", 3, "n"), cells.ErrConflict, "a move at no higher epoch")
	if e.count("one") != 1 || e.count("two") != 1 || e.audits("repoint") != 1 {
		e.Errorf("%d and %d are counted, %d audited", e.count("one"), e.count("two"), e.audits("repoint"))
	}
	if p, created, err := e.place(call("one", "a", "t")); err != nil || created || p.Cell != "two" || p.DeploymentID != "dep-two" || p.Epoch != 3 || p.Move != "m" {
		e.Errorf("%+v, %v, %v", p, created, err)
	}
	limit := int64(1)
	e.mustChange("one", deploy.Limit(nil, &limit))
	e.must(move("two", "one", 5, "n")) // the route has decided, whatever the quota says
	if e.count("one") != 2 || e.count("two") != 0 {
		e.Errorf("decided beyond the quota: %d and %d are counted", e.count("one"), e.count("two"))
	}
	_, err := e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "v", From: "one", To: "two", Epoch: 3, Move: "m", At: At}, audit("repoint"))
	e.refused(err, cells.ErrNotFound, "a move of nobody")
}

// movesHaveTheirPlace: between its beginning and its end a move counts in both cells,
// and nobody else gets its place.
func movesHaveTheirPlace(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.must(e.s.Settle(e.ctx, deploy.Movable, audit("settle")))
	e.first("one", "t", "u")
	e.later("two", "b")
	limit := int64(1)
	e.mustChange("two", deploy.Limit(nil, &limit))
	move := deploy.Repoint{Tenant: "t", From: "one", To: "two", Move: "m", At: At}
	reserve := func(change func(*deploy.Repoint)) error {
		r := move
		change(&r)
		return e.s.Reserve(e.ctx, r, audit("reserve"))
	}
	e.refused(reserve(func(r *deploy.Repoint) { r.From, r.To = "two", "one" }), cells.ErrConflict, "a place from where the tenant is not")
	e.refused(reserve(func(r *deploy.Repoint) { r.To = "one" }), cells.ErrConflict, "a place where it is")
	e.refused(reserve(func(r *deploy.Repoint) { r.To = "three" }), deploy.ErrNoCell, "a place nowhere")
	e.refused(reserve(func(r *deploy.Repoint) { r.Tenant = "v" }), cells.ErrNotFound, "a place for nobody")
	shut, open := true, false
	e.mustChange("two", deploy.Limit(&shut, nil))
	e.refused(reserve(func(*deploy.Repoint) {}), deploy.ErrClosed, "a place in a closed cell")
	e.must(reserve(func(r *deploy.Repoint) { r.Undo = true })) // an undo gets its place back
	e.must(e.s.Release(e.ctx, "t", "m", audit("undone")))
	e.mustChange("two", deploy.Limit(&open, nil))
	e.must(reserve(func(*deploy.Repoint) {}))
	e.must(reserve(func(*deploy.Repoint) {})) // again
	if e.count("one") != 2 || e.count("two") != 1 || e.audits("reserve") != 2 {
		e.Errorf("%d and %d are counted, %d audited", e.count("one"), e.count("two"), e.audits("reserve"))
	}
	if p, err := e.s.Placement(e.ctx, "t"); err != nil || p.Cell != "one" || p.MovingTo != "two" || p.MovingBy != "m" || p.Epoch != 0 {
		e.Errorf("with a place: %+v, %v", p, err)
	}
	_, _, err := e.place(call("two", "b", "x"))
	e.refused(err, deploy.ErrClosed, "a tenant in a place that a move has")
	e.refused(reserve(func(r *deploy.Repoint) { r.Tenant, r.Move = "u", "n" }), deploy.ErrClosed, "a second move into the last place")
	e.refused(reserve(func(r *deploy.Repoint) { r.Move = "n" }), cells.ErrConflict, "a second move of the tenant")
	_, err = e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "t", From: "one", To: "two", Epoch: 3, Move: "n", At: At}, audit("repoint"))
	e.refused(err, cells.ErrConflict, "another move's place")
	e.must(e.s.Release(e.ctx, "t", "n", audit("release")))
	if e.count("two") != 1 || e.audits("release") != 0 {
		e.Errorf("another move has given the place up: %d", e.count("two"))
	}
	e.must(e.s.Release(e.ctx, "t", "m", audit("release")))
	e.must(e.s.Release(e.ctx, "t", "m", audit("release"))) // again
	e.must(e.s.Release(e.ctx, "v", "m", audit("release")))
	if e.count("one") != 2 || e.count("two") != 0 || e.audits("release") != 1 {
		e.Errorf("given up: %d and %d are counted, %d audited", e.count("one"), e.count("two"), e.audits("release"))
	}
	// What has a place gets in, whatever has happened to the cell.
	e.must(reserve(func(*deploy.Repoint) {}))
	e.mustChange("two", deploy.Limit(&shut, nil))
	p, err := e.s.Repoint(e.ctx, deploy.Repoint{Tenant: "t", From: "one", To: "two", Epoch: 3, Move: "m", At: At}, audit("repoint"))
	if err != nil || p.Cell != "two" || p.MovingTo != "" || p.MovingBy != "" || e.count("one") != 1 || e.count("two") != 1 {
		e.Errorf("%+v, %v; %d and %d", p, err, e.count("one"), e.count("two"))
	}
	e.must(e.s.Release(e.ctx, "t", "m", audit("release")))
	if e.count("two") != 1 {
		e.Errorf("the end of a move that was made took its place: %d", e.count("two"))
	}
}

func placementPages(t directorytest.TB, h Harness) {
	e := start(t, h)
	held := make([]cells.TenantID, 25)
	for i := range held {
		held[i] = tenant(i)
	}
	e.first("one", append([]cells.TenantID{"A", "a-z", "a_z"}, held...)...)
	e.later("two", "b", "b-two")
	var got []cells.TenantID
	for after := cells.TenantID(""); ; {
		list, err := e.s.Placements(e.ctx, deploy.PlacementFilter{Cell: "one", After: after, Limit: 10})
		e.must(err)
		for _, p := range list {
			if p.Cell != "one" || p.By != deploy.ByAttach {
				e.Errorf("listed %+v", p)
			}
			got, after = append(got, p.Tenant), p.Tenant
		}
		if len(list) < 10 {
			break
		}
	}
	if want := append([]cells.TenantID{"A", "a-z", "a_z"}, held...); !slices.Equal(got, want) {
		e.Errorf("listed %v, want %v", got, want)
	}
	if list, err := e.s.Placements(e.ctx, deploy.PlacementFilter{Limit: 1000}); err != nil || len(list) != 29 {
		e.Errorf("%d are listed, %v", len(list), err)
	}
}
