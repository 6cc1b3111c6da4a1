// SPDX-License-Identifier: Apache-2.0

package cells

import "testing"

// What changes between looking at the view and taking the gate's lock is noticed.
func TestEnterLooksAgain(t *testing.T) {
	table := NewMemTable()
	r := NewRouter(table, WithDefaultCell("cell-a"))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	g := NewGates("cell-a", r)
	row := func(rev Revision, state RouteState) TenantRoute {
		return TenantRoute{TenantID: "acme", State: state, CellID: "cell-a", Epoch: 4, Floor: 4, Revision: rev}
	}
	enter := func(d decision) bool {
		t.Helper()
		a, o, err := g.enter(t.Context(), &AdmitRequest{Tenant: "acme"}, &d)
		if o != nil || err != nil {
			t.Fatal(o, err)
		}
		if a != nil {
			a.Done()
		}
		return a != nil
	}
	absent := r.decide("acme")
	if !enter(absent) {
		t.Error("the default cell's tenant did not enter")
	}
	r.Observe(row(1, StateActive))
	if enter(absent) {
		t.Error("entered without a row although there is one by now")
	}
	before := r.decide("acme")
	if !enter(before) {
		t.Error("did not enter by the row that stands")
	}
	r.Observe(row(2, StateDeleted))
	if enter(before) {
		t.Error("entered by a row that is over")
	}
	r.Observe(row(3, StateActive))
	now := r.decide("acme")
	lost := g.gate("acme")
	lost.mu.Lock()
	lost.dropped = true
	lost.mu.Unlock()
	if enter(now) {
		t.Error("entered through a gate that was dropped: nobody would wait for it")
	}
	g.gates.Delete(TenantID("acme"))
	if !enter(now) {
		t.Error("did not enter through the gate that took its place")
	}
}
