// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

func reserveRefusals(t TB, h Harness) {
	e := start(t, h)
	if _, _, err := e.reserve(reservation("t", "", "o1", 0)); !errors.Is(err, directory.ErrNoCell) {
		e.Errorf("no cells: %v, want ErrNoCell", err)
	}
	e.cell("closed", api.CellSpec{Closed: true})
	e.cell("new", api.CellSpec{State: api.CellAttaching})
	e.cell("full", api.CellSpec{PlacementsMax: limit(0)})
	if _, _, err := e.reserve(reservation("t", "absent", "o2", 0)); !errors.Is(err, directory.ErrNoCell) {
		e.Errorf("unknown cell: %v, want ErrNoCell", err)
	}
	for _, c := range []cells.CellID{"closed", "new", "full", ""} {
		if _, _, err := e.reserve(reservation("t", c, "o-"+string(c), 0)); !errors.Is(err, directory.ErrCellClosed) {
			e.Errorf("cell %q: %v, want ErrCellClosed", c, err)
		}
	}
	e.cell("open", api.CellSpec{})
	e.mustReserve(reservation("t", "open", "o3", 0))
	if _, _, err := e.reserve(reservation("u", "open", "o3", 0)); !errors.Is(err, directory.ErrOperationReused) {
		e.Errorf("operation of another tenant: %v, want ErrOperationReused", err)
	}
	if _, _, err := e.reserve(reservation("t", "full", "o3", 0)); !errors.Is(err, directory.ErrOperationReused) {
		e.Errorf("operation with another cell: %v, want ErrOperationReused", err)
	}
	e.wantTenants("open", 1)
}

func reserveJoins(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	first := e.mustReserve(reservation("t", "a", "o1", 0))
	if first.Cell != "a" || first.State != directory.PlacementReserved || first.OperationID != "o1" {
		e.Fatalf("reserved %+v", first)
	}
	// A closed or full cell does not stand in the way of a claim that was admitted.
	e.cell("a", api.CellSpec{Closed: true, PlacementsMax: limit(0)})
	e.cell("b", api.CellSpec{})
	for _, r := range []directory.Reservation{reservation("t", "a", "o1", 0), reservation("t", "b", "o2", 0), reservation("t", "", "o3", 0)} {
		row, joined, err := e.reserve(r)
		e.must(err)
		if !joined || row.Cell != "a" || row.OperationID != "o1" {
			e.Errorf("%s got %+v joined %v, want the first reservation", r.Operation.ID, row, joined)
		}
	}
	e.settle("t", "a", 5)
	row, joined, err := e.reserve(reservation("t", "b", "o4", 0))
	e.must(err)
	if !joined || row.State != directory.PlacementPlaced || row.Cell != "a" || row.Revision != 5 {
		e.Errorf("placed tenant: %+v joined %v", row, joined)
	}
	e.wantTenants("a", 1)
	e.wantTenants("b", 0)
}

func reserveChoosesEmptiest(t TB, h Harness) {
	e := start(t, h)
	for _, c := range []cells.CellID{"a", "b", "c"} {
		e.cell(c, api.CellSpec{})
	}
	e.cell("closed", api.CellSpec{Closed: true})
	for i := range 9 {
		e.mustReserve(reservation(cells.TenantID(fmt.Sprintf("t%d", i)), "", fmt.Sprintf("o%d", i), 0))
	}
	for _, c := range []cells.CellID{"a", "b", "c"} {
		e.wantTenants(c, 3)
	}
	e.settle("t0", "", 5)
	row := e.mustReserve(reservation("t9", "", "o9", 0))
	if row.Cell != "a" {
		e.Errorf("chose %s, want the emptiest, a", row.Cell)
	}
	r := reservation("t10", "", "o10", 0)
	r.Live = []cells.CellID{"c", "closed"}
	if row := e.mustReserve(r); row.Cell != "c" {
		e.Errorf("chose %s, want c, the only open one that lives", row.Cell)
	}
	r = reservation("t11", "", "o11", 0)
	r.Live = []cells.CellID{"closed"}
	if _, _, err := e.reserve(r); !errors.Is(err, directory.ErrCellClosed) {
		e.Errorf("no live cell is open: %v", err)
	}
	r = reservation("t12", "b", "o12", 0)
	r.Live = []cells.CellID{"c"}
	if row := e.mustReserve(r); row.Cell != "b" {
		e.Errorf("chose %s, want b, which was named", row.Cell)
	}
}

func reserveQuotaUnderConcurrency(t TB, h Harness) {
	e := start(t, h)
	const quota, claimers = 5, 24
	e.cell("a", api.CellSpec{PlacementsMax: limit(quota)})
	stores := []directory.Store{e.s, e.open(), e.open()}
	var mu sync.Mutex
	won, refused := 0, 0
	var wg sync.WaitGroup
	for i := range claimers {
		wg.Go(func() {
			tenant := cells.TenantID(fmt.Sprintf("t%02d", i))
			_, _, err := stores[i%len(stores)].Reserve(e.ctx, reservation(tenant, "a", "o"+string(tenant), 0), audit("placement.reserve", tenant))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won++
			case errors.Is(err, directory.ErrCellClosed):
				refused++
			default:
				e.Errorf("claim: %v", err)
			}
		})
	}
	wg.Wait()
	if won != quota || refused != claimers-quota {
		e.Errorf("%d claims won and %d refused, want %d and %d", won, refused, quota, claimers-quota)
	}
	e.wantTenants("a", quota)
}

func reserveOneWinner(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{})
	stores := []directory.Store{e.s, e.open()}
	var mu sync.Mutex
	created := 0
	rows := map[string]int{}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			cell := cells.CellID([]string{"a", "b"}[i%2])
			row, joined, err := stores[i%2].Reserve(e.ctx, reservation("t", cell, fmt.Sprintf("o%d", i), 0), audit("placement.reserve", "t"))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				e.Errorf("claim: %v", err)
				return
			}
			if !joined {
				created++
			}
			rows[string(row.Cell)+"/"+row.OperationID]++
		})
	}
	wg.Wait()
	if created != 1 || len(rows) != 1 {
		e.Errorf("%d reservations were created, answers %v, want one", created, rows)
	}
	if n := e.tenants("a") + e.tenants("b"); n != 1 {
		e.Errorf("the cells count %d tenants, want 1", n)
	}
	if n := e.auditCount("t"); n != 1 {
		e.Errorf("%d audit entries, want 1: who joins changes nothing", n)
	}
}

func settleOnlyForward(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{})
	e.settle("t", "a", 10)
	e.settle("t", "b", 9)
	e.wantTenants("a", 1)
	e.settle("t", "b", 10)
	e.wantTenants("a", 1)
	e.settle("t", "b", 12)
	e.wantTenants("a", 0)
	e.wantTenants("b", 1)
	e.settle("t", "b", 12)
	e.wantTenants("b", 1)
	e.settle("t", "", 11)
	e.wantTenants("b", 1)
	e.settle("t", "", 13)
	e.wantTenants("b", 0)
	// A process that lags must not bring the tenant back.
	e.settle("t", "b", 12)
	e.wantTenants("b", 0)
	// Routes of a cell that is registered later count from then on.
	e.settle("u", "later", 20)
	e.cell("later", api.CellSpec{})
	e.wantTenants("later", 1)
	e.settle("u", "", 21)
	e.wantTenants("later", 0)
}

func settleFreesAndOvertakes(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{PlacementsMax: limit(1)})
	e.settle("t", "a", 4)
	if _, _, err := e.reserve(reservation("u", "a", "o1", 0)); !errors.Is(err, directory.ErrCellClosed) {
		e.Errorf("full cell: %v, want ErrCellClosed", err)
	}
	// The claim saw the tombstone before the ledger did: it may take the row over.
	row := e.mustReserve(reservation("t", "a", "o2", 6))
	if row.Revision != 6 {
		e.Errorf("reserved at revision %d, want 6", row.Revision)
	}
	// The tombstone that it saw is not news.
	e.settle("t", "", 6)
	e.wantTenants("a", 1)
	// A newer one is: the reservation cannot be used any more.
	e.settle("t", "", 8)
	e.wantTenants("a", 0)
	if _, _, err := e.reserve(reservation("t", "a", "o3", 6)); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("claim from an old view: %v, want ErrConflict", err)
	}
	e.mustReserve(reservation("t", "a", "o4", 8))
	list, err := e.s.Reserved(e.ctx, "", 10)
	e.must(err)
	if len(list) != 1 || list[0].Tenant != "t" || list[0].Revision != 8 || list[0].OperationID != "o4" {
		e.Errorf("reserved %+v, want t at 8", list)
	}
}

func releaseOnlyItsOwn(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.mustReserve(reservation("t", "a", "o1", 3))
	e.must(e.s.Release(e.ctx, "t", 2))
	e.wantTenants("a", 1)
	e.must(e.s.Release(e.ctx, "t", 3))
	e.wantTenants("a", 0)
	e.mustReserve(reservation("t", "a", "o2", 3))
	e.settle("t", "a", 4)
	e.must(e.s.Release(e.ctx, "t", 3))
	e.must(e.s.Release(e.ctx, "t", 4))
	e.wantTenants("a", 1)
	e.must(e.s.Release(e.ctx, "nobody", 0))
}

func answersAreFirst(t TB, h Harness) {
	e := start(t, h)
	op := directory.Operation{ID: "o1", Kind: directory.OperationPlacement, Tenant: "t", Cell: "a"}
	got, err := e.s.Answer(e.ctx, op)
	e.must(err)
	if got != nil {
		e.Fatalf("an unknown operation has answer %q", got)
	}
	first, err := e.s.SaveAnswer(e.ctx, op, []byte(`{"n":1}`), epoch)
	e.must(err)
	second, err := e.s.SaveAnswer(e.ctx, op, []byte(`{"n":2}`), epoch)
	e.must(err)
	got, err = e.s.Answer(e.ctx, op)
	e.must(err)
	for _, b := range [][]byte{first, second, got} {
		if string(b) != `{"n":1}` {
			e.Errorf("answer %s, want the first", b)
		}
	}
	for _, other := range []directory.Operation{
		{ID: "o1", Kind: directory.OperationMove, Tenant: "t", Cell: "a"},
		{ID: "o1", Kind: directory.OperationPlacement, Tenant: "u", Cell: "a"},
		{ID: "o1", Kind: directory.OperationPlacement, Tenant: "t", Cell: ""},
	} {
		if _, err := e.s.Answer(e.ctx, other); !errors.Is(err, directory.ErrOperationReused) {
			e.Errorf("Answer(%+v): %v, want ErrOperationReused", other, err)
		}
		if _, err := e.s.SaveAnswer(e.ctx, other, []byte(`{}`), epoch); !errors.Is(err, directory.ErrOperationReused) {
			e.Errorf("SaveAnswer(%+v): %v, want ErrOperationReused", other, err)
		}
	}
}
