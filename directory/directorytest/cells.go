// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"errors"
	"reflect"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func cellsRoundTrip(t TB, h Harness) {
	e := start(t, h)
	list, rev0, err := e.s.Cells(e.ctx)
	e.must(err)
	if len(list) != 0 {
		e.Fatalf("a new store lists %d cells", len(list))
	}
	spec := api.CellSpec{Host: "B.example", Aliases: []string{"old-b.example"}, Issuers: []string{"https://id.b"},
		Jurisdiction: "eu", Geography: "de", Version: "v2", Upstream: "http://10.0.0.2:80/", Closed: true,
		PlacementsMax: limit(7), State: api.CellAttaching}
	e.must(spec.Normalize())
	got, err := e.s.PutCell(e.ctx, "b", spec, audit("cell.put", ""))
	e.must(err)
	e.cell("a", api.CellSpec{Default: true})

	list, rev1, err := e.s.Cells(e.ctx)
	e.must(err)
	if rev1 <= rev0 {
		e.Errorf("the cells' revision went from %d to %d", rev0, rev1)
	}
	if len(list) != 2 || list[0].ID != "a" || list[1].ID != "b" {
		e.Fatalf("cells %+v, want a and b", list)
	}
	if !reflect.DeepEqual(list[1], got) {
		e.Errorf("PutCell answered %+v, the list has %+v", got, list[1])
	}
	spec.Revision = got.Revision
	if !reflect.DeepEqual(got.CellSpec, spec) {
		e.Errorf("spec %+v came back as %+v", spec, got.CellSpec)
	}
	if got.Host != "b.example" || got.Upstream != "http://10.0.0.2:80" {
		e.Errorf("host %q and upstream %q are not normalised", got.Host, got.Upstream)
	}

	later := audit("cell.put", "")
	later.At = epoch.Add(3600e9)
	again, err := e.s.PutCell(e.ctx, "b", api.CellSpec{State: api.CellServing}, later)
	e.must(err)
	if again.Host != "" || again.PlacementsMax != nil || again.Closed || len(again.Issuers) != 0 {
		e.Errorf("a PUT keeps old fields: %+v", again)
	}
	if !again.CreatedAt.Equal(got.CreatedAt) || !again.UpdatedAt.After(got.UpdatedAt) {
		e.Errorf("created %v then %v, updated %v then %v", got.CreatedAt, again.CreatedAt, got.UpdatedAt, again.UpdatedAt)
	}
	// What the first spec held is free again.
	e.cell("c", api.CellSpec{Host: "b.example", Issuers: []string{"https://id.b"}})
}

func cellNamesAreUnique(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{Host: "a.example", Aliases: []string{"www.example"}, Issuers: []string{"https://id"}})
	for name, spec := range map[string]api.CellSpec{
		"host":           {Host: "a.example", State: api.CellServing},
		"alias as host":  {Host: "www.example", State: api.CellServing},
		"host as alias":  {Aliases: []string{"a.example"}, State: api.CellServing},
		"issuer":         {Issuers: []string{"https://id"}, State: api.CellServing},
		"second of many": {Host: "b.example", Issuers: []string{"https://other", "https://id"}, State: api.CellServing},
	} {
		if _, err := e.s.PutCell(e.ctx, "b", spec, audit("cell.put", "")); !errors.Is(err, cells.ErrConflict) {
			e.Errorf("%s of another cell: %v, want ErrConflict", name, err)
		}
	}
	list, _, err := e.s.Cells(e.ctx)
	e.must(err)
	if len(list) != 1 {
		e.Errorf("a refused PUT left a cell behind: %+v", list)
	}
	// A cell may repeat its own.
	e.cell("a", api.CellSpec{Host: "a.example", Aliases: []string{"www.example"}, Issuers: []string{"https://id"}})
	// And the refused ones have taken nothing.
	e.cell("c", api.CellSpec{Host: "b.example", Issuers: []string{"https://other"}})
}

func cellDefaultIsOne(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{Default: true})
	if _, err := e.s.PutCell(e.ctx, "b", api.CellSpec{Default: true, State: api.CellServing}, audit("cell.put", "")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a second default cell: %v, want ErrConflict", err)
	}
	e.cell("a", api.CellSpec{Default: true, Version: "v2"})
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{Default: true})
}

func cellRevisionGuards(t TB, h Harness) {
	e := start(t, h)
	c := e.cell("a", api.CellSpec{})
	if c.Revision == 0 {
		e.Fatalf("the cell has no revision")
	}
	next, err := e.s.PutCell(e.ctx, "a", api.CellSpec{Closed: true, State: api.CellServing, Revision: c.Revision}, audit("cell.put", ""))
	e.must(err)
	if next.Revision <= c.Revision {
		e.Errorf("revision went from %d to %d", c.Revision, next.Revision)
	}
	if _, err := e.s.PutCell(e.ctx, "a", api.CellSpec{State: api.CellServing, Revision: c.Revision}, audit("cell.put", "")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("PUT at an old revision: %v, want ErrConflict", err)
	}
	if _, err := e.s.PutCell(e.ctx, "new", api.CellSpec{State: api.CellServing, Revision: 3}, audit("cell.put", "")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("PUT of an absent cell at a revision: %v, want ErrConflict", err)
	}
}
