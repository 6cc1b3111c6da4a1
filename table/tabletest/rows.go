// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

var rowCases = []Case{
	{"GetUnknown", getUnknown},
	{"MalformedIDs", malformedIDs},
	{"MalformedRows", malformedRows},
	{"CreateOnce", createOnce},
	{"Swap", swap},
	{"AllFields", allFields},
	{"LongReason", longReason},
	{"Invariants", invariants},
	{"Tombstone", tombstone},
	{"NoAliases", noAliases},
	{"Revisions", revisions},
	{"EndedContext", endedContext},
	{"Close", closed},
	{"Reentry", reentry},
}

func getUnknown(tb TB, h Harness) {
	f := start(tb, h)
	f.absent("nobody")
	f.cas(0, active("tenant", "a", 1))
	for _, id := range []cells.TenantID{"tenan", "tenant2", "Tenant", "TENANT", "tenan%", "."} {
		if id.Validate() == nil {
			f.absent(id)
		}
	}
}

var badTenants = []cells.TenantID{"", " ", "a b", "a/b", "a\x00", "a%", "tenant\n", "ü", "a'b", `a"b`, cells.TenantID(strings.Repeat("x", 129))}

func malformedIDs(tb TB, h Harness) {
	f := start(tb, h)
	for _, id := range badTenants {
		if _, err := f.table.Get(f.ctx, id); !errors.Is(err, cells.ErrInvalid) {
			f.Fatalf("Get(%q): %v, want ErrInvalid", id, err)
		}
		f.refuse(cells.ErrInvalid, 0, active(id, "a", 1), "malformed tenant")
		if id != "" {
			if _, err := f.table.List(f.ctx, cells.ListOptions{After: id}); !errors.Is(err, cells.ErrInvalid) {
				f.Fatalf("List(After %q): %v, want ErrInvalid", id, err)
			}
		}
	}
	for _, id := range []cells.CellID{"", "A", "a_b", "a b", "a\x00", cells.CellID(strings.Repeat("c", 33))} {
		f.refuse(cells.ErrInvalid, 0, active("t", id, 1), "malformed cell")
		if id != "" {
			if _, err := f.table.List(f.ctx, cells.ListOptions{Cell: id}); !errors.Is(err, cells.ErrInvalid) {
				f.Fatalf("List(Cell %q): %v, want ErrInvalid", id, err)
			}
		}
	}
	// The longest and the oddest that are allowed.
	for _, id := range []cells.TenantID{cells.TenantID(strings.Repeat("x", 128)), "..", "-", "a:b@c.d_e-f", "0", "null", "2e"} {
		f.cas(0, active(id, cells.CellID(strings.Repeat("c", 32)), 1))
		if got := f.get(id); got.TenantID != id {
			f.Fatalf("Get(%q) gave the row of %q", id, got.TenantID)
		}
	}
}

func malformedRows(tb TB, h Harness) {
	f := start(tb, h)
	bad := map[string]func(*cells.TenantRoute){
		"no state":           func(r *cells.TenantRoute) { r.State = 0 },
		"unknown state":      func(r *cells.TenantRoute) { r.State = 99 },
		"no epoch":           func(r *cells.TenantRoute) { r.Epoch, r.Floor = 0, 0 },
		"huge epoch":         func(r *cells.TenantRoute) { r.Epoch = 1 << 63 },
		"floor above epoch":  func(r *cells.TenantRoute) { r.Floor = r.Epoch + 1 },
		"half a move":        func(r *cells.TenantRoute) { r.MoveID = "m" },
		"ends without move":  func(r *cells.TenantRoute) { r.SourceCell = "a" },
		"move to itself":     func(r *cells.TenantRoute) { r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", "a", "a", 1 },
		"move of others":     func(r *cells.TenantRoute) { r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", "b", "c", 1 },
		"moving, no move":    func(r *cells.TenantRoute) { r.State = cells.StateDraining },
		"bad move id":        func(r *cells.TenantRoute) { r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m m", "a", "b", 1 },
		"bad residue":        func(r *cells.TenantRoute) { r.Residue = []cells.Residue{{Cell: "B", Epoch: 1, Move: "m"}} },
		"future residue":     func(r *cells.TenantRoute) { r.Residue = []cells.Residue{{Cell: "b", Epoch: 9, Move: "m"}} },
		"long operation":     func(r *cells.TenantRoute) { r.OperationID = strings.Repeat("x", 300) },
		"operation no text":  func(r *cells.TenantRoute) { r.OperationID = "\xff" },
		"mark with zero":     func(r *cells.TenantRoute) { r.DataMark = "a\x00b" },
		"long mark":          func(r *cells.TenantRoute) { r.DataMark = strings.Repeat("x", 5000) },
		"long stamp":         func(r *cells.TenantRoute) { r.Stamp = strings.Repeat("x", 200) },
		"many residues":      func(r *cells.TenantRoute) { r.Residue = make([]cells.Residue, 1000) },
		"year out of bounds": func(r *cells.TenantRoute) { r.Deadline = time.Date(12000, 1, 1, 0, 0, 0, 0, time.UTC) },
	}
	for why, spoil := range bad {
		r := active("t", "a", 1)
		spoil(&r)
		f.refuse(cells.ErrInvalid, 0, r, why)
		f.absent("t")
	}
	if p := f.list(cells.ListOptions{}); len(p.Routes) != 0 {
		f.Fatalf("refused rows are listed: %+v", p.Routes)
	}
}

func createOnce(tb TB, h Harness) {
	f := start(tb, h)
	f.refuse(cells.ErrConflict, 1, active("t", "a", 1), "no row yet")
	f.absent("t")
	first := f.cas(0, active("t", "a", 1))
	f.refuse(cells.ErrConflict, 0, active("t", "b", 9), "the row exists")
	f.refuse(cells.ErrConflict, 0, active("t", "a", 1), "the row exists, unchanged")
	f.same("after refused claims", f.get("t"), first)
}

func swap(tb TB, h Harness) {
	f := start(tb, h)
	next := active("t", "a", 1)
	next.Revision = 777 // the table sets it
	r1 := f.cas(0, next)
	f.cas(0, active("other", "a", 1))
	next = r1
	next.Stamp = "second"
	r2 := f.cas(r1.Revision, next)
	want := next
	want.Revision = r2.Revision
	f.same("CompareAndSet returns the row", r2, want)
	f.same("Get returns the row", f.get("t"), want)
	next.Stamp = "third"
	f.refuse(cells.ErrConflict, r1.Revision, next, "an old revision")
	f.refuse(cells.ErrConflict, r2.Revision+1, next, "a revision of the future")
	f.refuse(cells.ErrConflict, 1<<63, next, "a huge revision")
	f.refuse(cells.ErrConflict, f.get("other").Revision, next, "another row's revision")
	f.same("after refused swaps", f.get("t"), want)
	// Writing the same content again is a change.
	if r3 := f.cas(r2.Revision, want); r3.Revision <= r2.Revision {
		f.Fatalf("revision %d after %d", r3.Revision, r2.Revision)
	}
}

func allFields(tb TB, h Harness) {
	f := start(tb, h)
	want := full("t")
	got := f.cas(0, want)
	want.Revision = got.Revision
	f.same("CompareAndSet", got, want)
	f.same("Get", f.get("t"), want)
	page := f.list(cells.ListOptions{})
	if len(page.Routes) != 1 {
		f.Fatalf("List gave %d rows", len(page.Routes))
	}
	f.same("List", page.Routes[0], want)
	s := f.watch(0)
	s.reach(got.Revision)
	f.same("Watch", s.rows["t"], want)
}

// A rollback must not fail because an error message is long or not text.
func longReason(tb TB, h Harness) {
	f := start(tb, h)
	r := active("t", "a", 1)
	r.Reason = strings.Repeat("ü\x00\xff", 4000)
	got := f.cas(0, r)
	if len(got.Reason) < 1000 || len(got.Reason) > 4096 || !strings.HasPrefix(got.Reason, "ü") {
		f.Fatalf("a reason of %d bytes was stored as %d bytes", len(r.Reason), len(got.Reason))
	}
	f.same("Get", f.get("t"), got)
}

func invariants(tb TB, h Harness) {
	f := start(tb, h)
	type edit func(*cells.TenantRoute)
	moving := func(r *cells.TenantRoute) {
		r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", "a", "b", 5
	}
	state := func(s cells.RouteState, cell cells.CellID, epoch cells.Epoch) edit {
		return func(r *cells.TenantRoute) {
			r.State, r.CellID, r.Epoch, r.Floor = s, cell, epoch, epoch
			if s >= cells.StateQuiescing && s <= cells.StateCommitting {
				moving(r)
			}
		}
	}
	for i, c := range []struct {
		why      string
		old, bad edit
	}{
		{"a lower epoch", state(cells.StateActive, "a", 5), state(cells.StateActive, "a", 4)},
		{"one epoch, two cells", state(cells.StateActive, "a", 5), state(cells.StateActive, "b", 5)},
		{"one epoch, two cells, committing", state(cells.StateCommitting, "a", 7), state(cells.StateCommitting, "b", 7)},
		{"a lower floor", state(cells.StateActive, "a", 5), func(r *cells.TenantRoute) { r.Floor = 4 }},
		{"a new cell with an old floor", state(cells.StateActive, "a", 5), func(r *cells.TenantRoute) { r.CellID, r.Epoch = "b", 6 }},
		{"COMMITTING rolled back", state(cells.StateCommitting, "b", 7), state(cells.StateCommitting, "a", 8)},
		{"COMMITTING undone", state(cells.StateCommitting, "b", 7), state(cells.StateCopying, "b", 7)},
		{"a closed epoch served", state(cells.StateCopying, "a", 6), state(cells.StateActive, "a", 6)},
		{"a deleted epoch served", state(cells.StateDeleted, "a", 5), state(cells.StateActive, "a", 5)},
		{"a deleting epoch served", state(cells.StateDeleting, "a", 5), state(cells.StateActive, "a", 5)},
		{"a tombstone at a lower epoch", state(cells.StateActive, "a", 5), state(cells.StateDeleted, "a", 4)},
		{"a row made absent", state(cells.StateActive, "a", 5), func(r *cells.TenantRoute) { r.State = 0 }},
	} {
		row := cells.TenantRoute{TenantID: cells.TenantID(fmt.Sprintf("t%d", i))}
		c.old(&row)
		old := f.cas(0, row)
		bad := old
		c.bad(&bad)
		f.refuse(cells.ErrInvalid, old.Revision, bad, c.why)
		f.same(c.why, f.get(row.TenantID), old)
	}
	// What a move does is accepted.
	r := f.cas(0, active("mover", "a", 5))
	for _, step := range []edit{
		moving, state(cells.StateQuiescing, "a", 5), state(cells.StateDraining, "a", 5), state(cells.StateCopying, "a", 6),
		state(cells.StateCommitting, "b", 7),
		func(r *cells.TenantRoute) {
			*r = cells.TenantRoute{TenantID: r.TenantID, State: cells.StateActive, CellID: "b", Epoch: 7, Floor: 7,
				Residue: []cells.Residue{{Cell: "a", Epoch: 6, Move: "m"}}, Revision: r.Revision}
		},
		state(cells.StateDeleting, "b", 8), state(cells.StateDeleted, "b", 8), state(cells.StateActive, "a", 9),
	} {
		next := r.Clone()
		step(&next)
		r = f.cas(r.Revision, next)
	}
}

func tombstone(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	r.State, r.Epoch, r.Floor = cells.StateDeleting, 2, 2
	r = f.cas(r.Revision, r)
	r.State = cells.StateDeleted
	r = f.cas(r.Revision, r)
	f.same("Get of a deleted tenant", f.get("t"), r)
	if p := f.list(cells.ListOptions{}); len(p.Routes) != 1 || p.Routes[0].State != cells.StateDeleted {
		f.Fatalf("List gave %+v, want the tombstone", p.Routes)
	}
	s := f.watch(0)
	s.reach(r.Revision)
	f.same("Watch of a deleted tenant", s.rows["t"], r)
	f.refuse(cells.ErrConflict, 0, active("t", "b", 1), "a tombstone is a row")
	f.refuse(cells.ErrInvalid, r.Revision, active("t", "b", 1), "a tombstone keeps its epoch")
	f.cas(r.Revision, active("t", "b", 3))
}

func noAliases(tb TB, h Harness) {
	f := start(tb, h)
	given := full("t")
	want := given.Clone()
	got := f.cas(0, given)
	want.Revision = got.Revision
	spoil := func(r cells.TenantRoute) {
		for i := range r.Residue {
			r.Residue[i].Cell = "spoiled"
		}
	}
	check := func(what string) {
		f.Helper()
		f.same("after the caller changed "+what, f.get("t"), want)
		p := f.list(cells.ListOptions{})
		f.same("list after the caller changed "+what, p.Routes[0], want)
		s := f.watch(0)
		s.reach(want.Revision)
		f.same("watch after the caller changed "+what, s.rows["t"], want)
	}
	spoil(given)
	check("the row that it gave")
	spoil(got)
	check("the row that CompareAndSet returned")
	spoil(f.get("t"))
	check("the row that Get returned")
	spoil(f.list(cells.ListOptions{}).Routes[0])
	check("the row that List returned")
	s := f.watch(0)
	s.reach(want.Revision)
	spoil(s.rows["t"])
	check("the row that a watch returned")
}

func revisions(tb TB, h Harness) {
	f := start(tb, h)
	var last cells.Revision
	for i := range 12 {
		id := cells.TenantID(fmt.Sprintf("t%d", i%3))
		var old cells.Revision
		if i >= 3 {
			old = f.get(id).Revision
		}
		got := f.cas(old, active(id, "a", 1))
		if got.Revision <= last {
			f.Fatalf("change %d of the table has revision %d, the one before %d", i, got.Revision, last)
		}
		last = got.Revision
	}
}

func endedContext(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	_, getErr := f.table.Get(ctx, "t")
	next := r
	next.Stamp = "ended"
	_, casErr := f.table.CompareAndSet(ctx, r.Revision, next)
	_, listErr := f.table.List(ctx, cells.ListOptions{})
	w, watchErr := f.table.Watch(ctx, 0)
	if watchErr == nil {
		_, watchErr = w.Next(ctx)
		_ = w.Close()
	}
	for what, err := range map[string]error{"Get": getErr, "CompareAndSet": casErr, "List": listErr, "Watch": watchErr} {
		if !errors.Is(err, context.Canceled) {
			f.Errorf("%s with an ended context: %v, want context.Canceled", what, err)
		}
	}
	f.same("after an ended context", f.get("t"), r)
}

func closed(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	s := f.watch(r.Revision)
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := s.next(); err != nil {
				done <- err
				return
			}
		}
	}()
	if err := closeTable(f.table); err != nil {
		f.Fatalf("Close: %v", err)
	}
	if err := closeTable(f.table); err != nil {
		f.Fatalf("Close again: %v", err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, cells.ErrClosed) {
			f.Errorf("a watch of a closed table ended with %v, want ErrClosed", err)
		}
	case <-time.After(f.h.Patience):
		f.Fatalf("a watch goes on after its table was closed")
	}
	_, getErr := f.table.Get(f.ctx, "t")
	_, casErr := f.table.CompareAndSet(f.ctx, r.Revision, r)
	_, listErr := f.table.List(f.ctx, cells.ListOptions{})
	_, watchErr := f.table.Watch(f.ctx, 0)
	for what, err := range map[string]error{"Get": getErr, "CompareAndSet": casErr, "List": listErr, "Watch": watchErr} {
		if !errors.Is(err, cells.ErrClosed) {
			f.Errorf("%s of a closed table: %v, want ErrClosed", what, err)
		}
	}
}

// A tenant that was deleted and created again, many times, only climbs.
func reentry(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	for range 5 {
		r.State, r.Epoch, r.Floor = cells.StateDeleted, r.Epoch+1, r.Epoch+1
		r = f.cas(r.Revision, r)
		r = f.cas(r.Revision, active("t", "b", r.Epoch+1))
	}
	if got := f.get("t"); got.Epoch != 11 {
		f.Fatalf("epoch %d after five deletions, want 11", got.Epoch)
	}
}
