// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"testing"
)

func TestViewPut(t *testing.T) {
	var v view
	v.init()
	at := func(rev Revision, cell CellID, epoch Epoch) *TenantRoute {
		return &TenantRoute{TenantID: "acme", State: StateActive, CellID: cell, Epoch: epoch, Floor: epoch, Revision: rev}
	}
	changes := 0
	changed := func(placement, *TenantRoute, *TenantRoute) { changes++ }
	if ok, err := v.put(at(5, "cell-a", 3), false, changed); !ok || err != nil {
		t.Fatalf("the first row: %v %v", ok, err)
	}
	for name, c := range map[string]struct {
		row  *TenantRoute
		same bool
		bad  bool
	}{
		"older":           {at(4, "cell-a", 4), false, false},
		"older, same":     {at(4, "cell-a", 4), true, false},
		"equal":           {at(5, "cell-a", 4), false, false},
		"lower epoch":     {at(6, "cell-a", 2), false, true},
		"epoch elsewhere": {at(6, "cell-b", 3), false, true},
	} {
		ok, err := v.put(c.row, c.same, changed)
		if ok || (err != nil) != c.bad || c.bad && !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v %v", name, ok, err)
		}
		if got := v.get("acme"); got.Revision != 5 || got.Epoch != 3 {
			t.Fatalf("%s was taken: %+v", name, got)
		}
	}
	if ok, err := v.put(at(5, "cell-a", 4), true, changed); !ok || err != nil {
		t.Errorf("the same revision, asked for: %v %v", ok, err)
	}
	if changes != 2 || v.size() != 1 {
		t.Errorf("%d changes, %d rows", changes, v.size())
	}
}

// Waiters that have left or were woken leave nothing behind.
func TestViewWaitersGo(t *testing.T) {
	var v view
	v.init()
	_, leave1 := v.await("acme")
	woken, leave2 := v.await("acme")
	leave1()
	if n := len(v.shard("acme").waiters); n != 1 {
		t.Errorf("%d entries while one waits", n)
	}
	if _, err := v.put(&TenantRoute{TenantID: "acme", Revision: 1}, false, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-woken:
	default:
		t.Error("not woken")
	}
	_, leave3 := v.await("acme")
	leave2() // does not take away what waits by now
	if n := len(v.shard("acme").waiters); n != 1 {
		t.Errorf("%d entries while another waits", n)
	}
	leave3()
	if n := len(v.shard("acme").waiters); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}
