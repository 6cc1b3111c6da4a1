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

// measured records how large a tenant is, and where it has to be.
func (e *env) measured(t cells.TenantID, rows, bytes int64, jurisdiction string) {
	e.Helper()
	e.must(e.s.SaveMeasures(e.ctx, []directory.Measurement{{Tenant: t, Rows: rows, Bytes: bytes, At: epoch}}))
	_, err := e.s.SetAttributes(e.ctx, t, "", jurisdiction, audit("tenant.attributes", t))
	e.must(err)
}

// wantRefused: a claim and a move of the tenant into the cell are refused alike.
func (e *env) wantRefused(t cells.TenantID, to string, kind error) {
	e.Helper()
	if _, _, err := e.createMove(move("m-"+string(t)+to, string(t), "home", to, "")); !errors.Is(err, kind) {
		e.Errorf("move of %s to %s: %v, want %v", t, to, err, kind)
	}
	claim := cells.TenantID("new-" + string(t))
	f, err := e.s.TenantFacts(e.ctx, t)
	e.must(err)
	e.measured(claim, f.Rows, f.Bytes, f.Jurisdiction)
	if _, _, err := e.reserve(reservation(claim, cells.CellID(to), fmt.Sprintf("o-%s-%s", t, to), 0)); !errors.Is(err, kind) {
		e.Errorf("claim like %s in %s: %v, want %v", t, to, err, kind)
	}
}

func roomIsKept(t TB, h Harness) {
	e := start(t, h)
	e.cell("home", api.CellSpec{})
	e.cell("eu", api.CellSpec{Jurisdiction: "eu"})
	e.cell("rows", api.CellSpec{RowsMax: limit(100)})
	e.cell("bytes", api.CellSpec{BytesMax: limit(100)})
	// What is there, what comes in, and what only passes through elsewhere.
	e.settle("there", "rows", 1)
	e.settle("there2", "bytes", 2)
	e.settle("comes", "home", 3)
	e.measured("there", 60, 0, "")
	e.measured("there2", 0, 60, "")
	e.measured("comes", 20, 0, "")
	e.measured("unplaced", 1000, 1000, "")
	e.mustCreate(move("m1", "comes", "home", "rows", ""))
	r, err := e.s.Room(e.ctx, "rows", "big")
	e.must(err)
	if r.Holds != (cells.Occupancy{Tenants: 2, Rows: 80}) || r.Cell.Cell != "rows" || r.Tenant.Tenant != "big" {
		e.Errorf("room %+v", r)
	}
	if r, err := e.s.Room(e.ctx, "rows", "there"); err != nil || r.Holds != (cells.Occupancy{Tenants: 1, Rows: 20}) || r.Tenant.Rows != 60 {
		e.Errorf("room for a tenant that is there: %+v, %v", r, err)
	}
	if _, err := e.s.Room(e.ctx, "absent", "big"); !errors.Is(err, directory.ErrNoCell) {
		e.Errorf("room of an unknown cell: %v", err)
	}
	for i, tenant := range []struct {
		id           cells.TenantID
		rows, bytes  int64
		jurisdiction string
	}{{"big", 21, 41, ""}, {"fits", 20, 40, ""}, {"us", 1, 1, "us"}, {"eu", 1, 1, "eu"}} {
		e.settle(tenant.id, "home", cells.Revision(10+i))
		e.measured(tenant.id, tenant.rows, tenant.bytes, tenant.jurisdiction)
	}
	for _, to := range []string{"rows", "bytes"} {
		e.wantRefused("big", to, directory.ErrCellClosed)
		e.wantRefused("big", to, cells.ErrNoRoom)
	}
	for _, to := range []string{"rows", "eu", "home"} {
		e.wantRefused("us", to, cells.ErrJurisdiction)
	}
	e.wantRefused("eu", "rows", cells.ErrJurisdiction)
	e.mustCreate(move("m2", "eu", "home", "eu", ""))
	e.mustCreate(move("m3", "fits", "home", "rows", ""))
	// Now it is full: of nobody it is known that they are nothing.
	e.settle("unknown", "home", 20)
	e.wantRefused("unknown", "rows", cells.ErrNoRoom)
	// Whoever is not told a cell gets one that takes the tenant, not the emptiest.
	e.measured("claims", 1, 1, "eu")
	if row := e.mustReserve(reservation("claims", "", "oc", 0)); row.Cell != "eu" {
		e.Errorf("%s was chosen for a tenant of the jurisdiction eu", row.Cell)
	}
	e.measured("nowhere", 1, 1, "us")
	if _, _, err := e.reserve(reservation("nowhere", "", "on", 0)); !errors.Is(err, cells.ErrJurisdiction) {
		e.Errorf("no cell is in the jurisdiction: %v", err)
	}
}

// An undo goes back to a cell that is closed or full, but not out of its jurisdiction.
func roomOfUndos(t TB, h Harness) {
	e := start(t, h)
	e.cell("home", api.CellSpec{})
	e.cell("rows", api.CellSpec{RowsMax: limit(0), Closed: true})
	for i, id := range []cells.TenantID{"t", "eu"} {
		e.settle(id, "home", cells.Revision(1+i))
		e.measured(id, 5, 5, map[cells.TenantID]string{"eu": "eu"}[id])
		m := move("m-"+string(id), string(id), "home", "rows", "")
		m.Undoes = "earlier"
		if _, _, err := e.createMove(m); (id == "t") != (err == nil) || id == "eu" && !errors.Is(err, cells.ErrJurisdiction) {
			e.Errorf("undo of %s: %v", id, err)
		}
	}
}

// However many claims and moves come at once, the cell's rows stay within its limit.
func roomUnderConcurrency(t TB, h Harness) {
	e := start(t, h)
	e.cell("home", api.CellSpec{})
	e.cell("rows", api.CellSpec{RowsMax: limit(45)})
	stores := []directory.Store{e.s, e.open(), e.open()}
	const many = 12
	for i := range many {
		id := cells.TenantID(fmt.Sprintf("t%d", i))
		e.settle(id, "home", cells.Revision(i+1))
		e.measured(id, 10, 1, "")
	}
	var mu sync.Mutex
	won := 0
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() {
			m := move(fmt.Sprintf("m%d", i), fmt.Sprintf("t%d", i), "home", "rows", "")
			_, _, err := stores[i%len(stores)].CreateMove(e.ctx, m, audit("move.create", m.Tenant))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won++
			case !errors.Is(err, cells.ErrNoRoom):
				e.Errorf("move %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if won != 4 {
		e.Errorf("%d moves of 10 rows each into a cell of 45 rows, want 4", won)
	}
}
