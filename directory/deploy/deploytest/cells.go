// SPDX-License-Identifier: Apache-2.0

package deploytest

import (
	"reflect"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func cellsRoundTrip(t directorytest.TB, h Harness) {
	e := start(t, h)
	if v := e.view(); v.Kind != deploy.Pinned || len(v.Cells) != 0 || v.First() != nil {
		e.Errorf("an empty directory is %+v", v)
	}
	e.first("one", "held")
	e.later("two", "b", "two-conf")
	max := int64(7)
	yes := true
	next := Fingerprint("two", "two.example.com", "two-conf", "two-more")
	e.mustChange("two", deploy.Limit(&yes, &max), deploy.NextCredential(Hash("c")))
	if _, err := e.change("two", deploy.NextConfig(next)); err == nil {
		e.Errorf("a configured tenant went into a closed cell")
	}
	no := false
	got := e.mustChange("two", deploy.Limit(&no, nil), deploy.NextConfig(next), deploy.Addresses("https://probe.two:9443", ""))
	e.dir = e.open()
	e.s = e.dir.Deployments()
	v := e.view()
	if len(v.Cells) != 2 || v.First() == nil || v.First().Name != "one" || v.Cell("two") == nil {
		e.Fatalf("reopened: %+v", v)
	}
	two := *v.Cell("two")
	if !reflect.DeepEqual(two, got) {
		e.Errorf("reopened, the cell is\n%+v, want\n%+v", two, got)
	}
	one := v.First()
	if one.State != deploy.Serving || one.Mode != tenancy.Enforced || len(one.Modes) != 2 || one.Modes[0].Mode != tenancy.Recording ||
		!one.AttachStartedAt.Equal(At) || one.Placements != 1 || one.Upstream != "http://10.0.0.1" {
		e.Errorf("the first cell is %+v", one)
	}
	if two.NextHash != Hash("c") || two.PlacementsMax == nil || *two.PlacementsMax != 7 || two.Closed || two.Placements != 2 ||
		two.Next == nil || !two.Next.Equal(next) || two.ProbeURL != "https://probe.two:9443" || two.Revision != v.Revision || two.First {
		e.Errorf("the second cell is %+v", two)
	}
}

func kindIsSettledOnce(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.refused(e.s.Settle(e.ctx, "both", audit("settle")), cells.ErrInvalid, "another kind")
	e.must(e.s.Settle(e.ctx, deploy.Movable, audit("settle")))
	e.must(e.open().Deployments().Settle(e.ctx, deploy.Movable, audit("settle")))
	e.refused(e.s.Settle(e.ctx, deploy.Pinned, audit("settle")), cells.ErrConflict, "the other kind")
	if v := e.view(); v.Kind != deploy.Movable {
		e.Errorf("the directory is %s", v.Kind)
	}
	if n := e.audits("settle"); n != 1 {
		e.Errorf("%d audit entries of settling", n)
	}
}

func refusedChangesWriteNothing(t directorytest.TB, h Harness) {
	e := start(t, h)
	_, err := e.change("two", deploy.Register(Later("two", "b")))
	e.refused(err, deploy.ErrNoCell, "a later cell before the first")
	e.first("one")
	before, audits := e.view(), e.audits("cell.change")
	same := Later("two", "b")
	for what, r := range map[string]func(*deploy.Registration){
		"host":     func(r *deploy.Registration) { r.Host = "APP.example.com." },
		"alias":    func(r *deploy.Registration) { r.Host = "www.example.com" },
		"stores":   func(r *deploy.Registration) { r.DeploymentID = "dep-one" },
		"nested":   func(r *deploy.Registration) { r.Prefix = "one/in" },
		"hash":     func(r *deploy.Registration) { r.CredentialHash = Hash("a") },
		"tenancy":  func(r *deploy.Registration) { r.Found.Tenancy = 1 },
		"objects":  func(r *deploy.Registration) { r.Found.Objects = 1 },
		"unnamed":  func(r *deploy.Registration) { r.Found.Unnamed = 1 },
		"is first": func(r *deploy.Registration) { r.First, r.Upstream = true, "http://10.0.0.2" },
	} {
		reg := same
		r(&reg)
		_, err := e.change("two", deploy.Register(reg))
		e.refused(err, cells.ErrConflict, what)
	}
	_, err = e.change("three", deploy.Serve())
	e.refused(err, deploy.ErrNoCell, "a cell that there is not")
	// What a rule does to what it may not change, the store puts back; names that the
	// rule let pass, the store's own keys refuse.
	e.mustChange("two", deploy.Register(same))
	_, err = e.change("two", func(ch *deploy.Change) error { ch.Cell.Host = "app.example.com"; return nil })
	e.refused(err, cells.ErrConflict, "a host of another, by the table's key")
	_, err = e.change("two", func(ch *deploy.Change) error { ch.Cell.NextHash = Hash("a"); return nil })
	e.refused(err, cells.ErrConflict, "a hash of another, by the table's key")
	c := e.mustChange("two", func(ch *deploy.Change) error {
		ch.Cell.First, ch.Cell.DeploymentID, ch.Cell.Name, ch.Cell.Closed = true, "x", "y", true
		return nil
	})
	if c.First || c.DeploymentID != "dep-two" || c.Name != "two" || !c.Closed {
		e.Errorf("a rule changed %+v", c)
	}
	after := e.view()
	if !reflect.DeepEqual(*before.First(), *after.First()) || len(after.Cells) != 2 {
		e.Errorf("refused changes left %+v", after)
	}
	if n := e.audits("cell.change"); n != audits+2 {
		e.Errorf("%d audit entries, want %d", n, audits+2)
	}
}

// changesAreAlone: a change sees every change before it, so no two cells are given what
// only one may have, and no increment is lost.
func changesAreAlone(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one")
	second := e.open().Deployments()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s := e.s
			if i%2 == 1 {
				s = second
			}
			for range 4 {
				_, err := s.Change(e.ctx, "one", func(ch *deploy.Change) error {
					n := int64(1)
					if ch.Cell.PlacementsMax != nil {
						n += *ch.Cell.PlacementsMax
					}
					ch.Cell.PlacementsMax = &n
					return nil
				}, audit("cell.change"))
				if err != nil {
					e.Errorf("change: %v", err)
				}
			}
		})
	}
	// Two registrations with one host: one is refused.
	errs := make([]error, 2)
	for i, s := range []deploy.Store{e.s, second} {
		wg.Go(func() {
			r := Later([]string{"two", "three"}[i], []string{"b", "c"}[i])
			r.Host = "same.example.com"
			_, errs[i] = s.Change(e.ctx, cells.CellID(r.Prefix), deploy.Register(r), audit("cell.register"))
		})
	}
	wg.Wait()
	if c := e.view().Cells[0]; c.PlacementsMax == nil || *c.PlacementsMax != 32 {
		e.Errorf("after 32 increments the value is %v", c.PlacementsMax)
	}
	if (errs[0] == nil) == (errs[1] == nil) {
		e.Errorf("two cells with one host: %v, %v", errs[0], errs[1])
	}
}

func auditFollowsChanges(t directorytest.TB, h Harness) {
	e := start(t, h)
	e.first("one", "held", "held2") // 4 changes, 2 placements
	e.mustChange("one", deploy.Serve(), deploy.RaiseMode(tenancy.Recording), deploy.Register(First("one")))
	if n := e.audits("cell.change"); n != 4 {
		e.Errorf("%d changes are in the audit, want 4: what changes nothing writes none", n)
	}
	if n := e.audits("placement"); n != 2 {
		e.Errorf("%d placements are in the audit, want 2", n)
	}
	for range 2 {
		_, _, err := e.place(call("one", "a", "new"))
		e.must(err)
	}
	if n := e.audits("placement"); n != 3 {
		e.Errorf("%d placements are in the audit, want 3", n)
	}
}
