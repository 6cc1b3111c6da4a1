// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
)

func TestDecisions(t *testing.T) {
	noLeaks(t)
	table := cells.NewMemTable()
	set(t, table, active("acme", "cell-a", 4))
	set(t, table, inMove("moving", cells.StateCopying, "cell-a", 4, 5))
	gone := active("gone", "cell-a", 2)
	gone.State = cells.StateDeleted
	set(t, table, gone)
	leaving := active("leaving", "cell-a", 2)
	leaving.State = cells.StateDeleting
	set(t, table, leaving)

	for _, c := range []struct {
		tenant      cells.TenantID
		defaultCell cells.CellID
		rule        string
		cell        cells.CellID
		epoch       cells.Epoch
		refusal     cells.Code
	}{
		{"acme", "", "route", "cell-a", 4, ""},
		{"acme", "cell-z", "route", "cell-a", 4, ""},
		{"moving", "", "route", "cell-a", 5, cells.CodeMoving},
		{"nobody", "", "", "", 0, cells.CodeUnknownTenant},
		{"nobody", "cell-z", "default", "cell-z", 0, ""},
		{"gone", "cell-z", "", "", 0, cells.CodeUnknownTenant},
		{"leaving", "cell-z", "", "", 0, cells.CodeUnknownTenant},
		{"", "cell-z", "", "", 0, cells.CodeInvalidTenant},
		{"a b", "cell-z", "", "", 0, cells.CodeInvalidTenant},
	} {
		t.Run(fmt.Sprintf("%s/%s", c.tenant, c.defaultCell), func(t *testing.T) {
			r := startRouter(t, table, cells.WithDefaultCell(c.defaultCell))
			d := r.Lookup(c.tenant)
			if d.Rule != c.rule || d.Cell != c.cell || d.Epoch != c.epoch || d.Known != (c.rule != "") || !d.Loaded {
				t.Errorf("got rule %q cell %q epoch %d known %v loaded %v", d.Rule, d.Cell, d.Epoch, d.Known, d.Loaded)
			}
			if d.Revision != 4 {
				t.Errorf("decided at revision %d, want 4", d.Revision)
			}
			got := d.Refusal()
			if (got == nil) != (c.refusal == "") || got != nil && got.Code != c.refusal {
				t.Errorf("refusal %v, want %q", got, c.refusal)
			}
		})
	}
}

// A router that knows nothing says so; it does not say that a tenant is unknown,
// nor that the default cell has it.
func TestNotLoaded(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	table.down = cells.ErrUnavailable
	r := cells.NewRouter(table, cells.WithDefaultCell("cell-z"), cells.WithRouterLogger(quiet))
	defer r.Close()
	if err := r.Start(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
		t.Fatalf("Start on a table that is down: %v", err)
	}
	d := r.Lookup("acme")
	if d.Known || d.Loaded || d.Refusal().Code != cells.CodeBackendUnavailable {
		t.Errorf("before the first load: %+v", d)
	}
	if s := r.Status(); !s.Stale || s.Source != "" {
		t.Errorf("status %+v", s)
	}
	table.with(func(f *faultTable) { f.down = nil })
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := r.Lookup("acme"); d.Rule != "default" {
		t.Errorf("after the load: %+v", d)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Errorf("Start of a started router: %v", err)
	}
	r.Close()
	r.Close()
	if err := r.Start(t.Context()); !errors.Is(err, cells.ErrClosed) {
		t.Errorf("Start of a closed router: %v", err)
	}
}

// A fault of an earlier library: when the table closed a watch, its router stayed
// as it was for good and did not say so.
func TestClosedWatchDoesNotStayStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		set(t, table, active("acme", "cell-a", 1))
		r := startRouter(t, table)
		for i := range 20 {
			synctest.Wait()
			table.breakWatches(fmt.Errorf("%w: connection reset", cells.ErrUnavailable))
			row := set(t, table, active("acme", "cell-a", cells.Epoch(i+2)))
			pass(time.Second)
			synctest.Wait()
			if d := r.Lookup("acme"); d.Route.Revision != row.Revision {
				t.Fatalf("break %d: the view has revision %d a second later, the table %d", i, d.Route.Revision, row.Revision)
			}
		}
		s := r.Status()
		if s.Breaks != 20 || s.Stale || !s.Watching || !strings.Contains(s.LastError, "connection reset") {
			t.Errorf("status after 20 breaks: %+v", s)
		}

		// While no watch can be opened the age grows, and the status says stale.
		table.with(func(f *faultTable) { f.noWatch = cells.ErrUnavailable; f.watches = 0 })
		table.breakWatches(cells.ErrUnavailable)
		row := set(t, table, active("acme", "cell-a", 100))
		pass(time.Minute)
		s = r.Status()
		if !s.Stale || s.Watching || s.Age < 59*time.Second || s.Age > 61*time.Second {
			t.Errorf("status after a minute without a watch: %+v", s)
		}
		table.with(func(f *faultTable) {
			if f.watches < 12 || f.watches > 40 {
				t.Errorf("%d attempts in a minute; the pauses should grow to 5 s", f.watches)
			}
			f.noWatch = nil
		})
		pass(5 * time.Second)
		synctest.Wait()
		if d := r.Lookup("acme"); d.Route.Revision != row.Revision {
			t.Errorf("the watch is back and the view has revision %d, the table %d", d.Route.Revision, row.Revision)
		}
		if s := r.Status(); s.Stale {
			t.Errorf("status after the watch is back: %+v", s)
		}
		r.Close()
	})
}

// A watch that stays open and says nothing is found out, too.
func TestMuteWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		table.mute = true
		set(t, table, active("acme", "cell-a", 1))
		r := startRouter(t, table)
		pass(time.Hour)
		if s := r.Status(); s.Stale || s.Breaks != 0 || s.Age > 6*time.Second {
			t.Errorf("a table without news, behind a watch without a sign of life: %+v", s)
		}
		row := set(t, table, active("acme", "cell-a", 2))
		table.with(func(f *faultTable) { f.mute = false })
		pass(7 * time.Second)
		synctest.Wait()
		if d := r.Lookup("acme"); d.Route.Revision != row.Revision {
			t.Errorf("the view has revision %d, the table %d", d.Route.Revision, row.Revision)
		}
		if s := r.Status(); s.Breaks != 1 {
			t.Errorf("%d breaks, want 1", s.Breaks)
		}
		r.Close()
	})
}

// When the table no longer knows what changed, the router lists it anew, and finds
// what is gone. A row that is gone does not fall to the default cell.
func TestCompacted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		set(t, table, active("acme", "cell-a", 7))
		set(t, table, active("bolt", "cell-a", 1))
		r := startRouter(t, table, cells.WithDefaultCell("cell-z"))
		table.with(func(f *faultTable) { f.noWatch = cells.ErrUnavailable })
		table.breakWatches(cells.ErrUnavailable)
		row := set(t, table, active("bolt", "cell-b", 3))
		set(t, table, active("core", "cell-a", 1))
		table.RoutingTable.(*cells.MemTable).Compact(row.Revision + 1)
		table.with(func(f *faultTable) { f.noWatch = nil; f.hide["acme"] = true })
		pass(6 * time.Second)
		synctest.Wait()
		if s := r.Status(); s.Relists != 1 || s.Stale {
			t.Errorf("status: %+v", s)
		}
		if d := r.Lookup("bolt"); d.Cell != "cell-b" {
			t.Errorf("bolt: %+v", d)
		}
		if d := r.Lookup("core"); d.Cell != "cell-a" {
			t.Errorf("core: %+v", d)
		}
		if d := r.Lookup("acme"); d.Known || d.Route.State != cells.StateDeleted || d.Route.Epoch != 7 {
			t.Errorf("acme, whose row is gone: %+v", d)
		}
		// It comes back only above the epoch that it had.
		table.with(func(f *faultTable) { delete(f.hide, "acme") })
		set(t, table, active("acme", "cell-b", 9))
		synctest.Wait()
		if d := r.Lookup("acme"); d.Cell != "cell-b" || d.Epoch != 9 {
			t.Errorf("acme, placed again: %+v", d)
		}
		r.Close()
	})
}

// A table that was set back is not followed back, and not silently ignored either.
func TestTableSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		set(t, table, active("acme", "cell-a", 1))
		set(t, table, active("acme", "cell-a", 2))
		r := startRouter(t, table)
		table.with(func(f *faultTable) { f.older = 1; f.mute = true })
		table.breakWatches(cells.ErrCompacted)
		pass(time.Minute)
		s := r.Status()
		if !s.Stale || !strings.Contains(s.LastError, "restored from a backup") {
			t.Errorf("status: %+v", s)
		}
		if d := r.Lookup("acme"); d.Epoch != 2 {
			t.Errorf("the view went back: %+v", d)
		}
		r.Close()
	})
}

func TestObserveRefusesWhatCannotBe(t *testing.T) {
	noLeaks(t)
	r := startRouter(t, cells.NewMemTable())
	at := func(r cells.TenantRoute, rev cells.Revision) cells.TenantRoute { r.Revision = rev; return r }
	r.Observe(at(active("acme", "cell-a", 5), 10))
	for name, row := range map[string]cells.TenantRoute{
		"older revision":     at(active("acme", "cell-b", 9), 9),
		"same revision":      at(active("acme", "cell-b", 9), 10),
		"lower epoch":        at(active("acme", "cell-a", 4), 11),
		"one epoch, 2 cells": at(active("acme", "cell-b", 5), 11),
		"no revision":        at(active("new", "cell-b", 5), 0),
		"no state":           {TenantID: "new", CellID: "cell-a", Epoch: 1, Revision: 20},
		"unknown state":      at(cells.TenantRoute{TenantID: "new", State: 99, CellID: "cell-a", Epoch: 1}, 20),
		"bad tenant":         at(active("a/b", "cell-a", 5), 20),
		"bad cell":           at(active("new", "Cell A", 5), 20),
	} {
		r.Observe(row)
		if d := r.Lookup("acme"); d.Cell != "cell-a" || d.Epoch != 5 || d.Route.Revision != 10 {
			t.Fatalf("%s was believed: %+v", name, d)
		}
		if d := r.Lookup("new"); d.Known {
			t.Fatalf("%s was believed: %+v", name, d)
		}
	}
	if s := r.Status(); s.Refused != 7 {
		t.Errorf("%d rows refused and counted, want 7 (the older ones are no fault)", s.Refused)
	}
}

// Whatever order rows arrive in, from however many goroutines, the newest stays,
// and no reader ever sees the view go back.
func TestViewNeverGoesBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 30).Draw(rt, "rows")
		order := rapid.Permutation(seq(n)).Draw(rt, "order")
		workers := rapid.IntRange(1, 4).Draw(rt, "workers")
		r := cells.NewRouter(cells.NewMemTable(), cells.WithRouterLogger(quiet))
		defer r.Close()
		stop := make(chan struct{})
		var readers, writers sync.WaitGroup
		readers.Go(func() {
			var last cells.Revision
			for {
				d := r.Lookup("acme")
				if d.Route.Revision < last {
					rt.Errorf("went from revision %d to %d", last, d.Route.Revision)
					return
				}
				last = d.Route.Revision
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		for w := range workers {
			writers.Go(func() {
				for i := w; i < n; i += workers {
					row := active("acme", "cell-a", cells.Epoch(order[i]))
					row.Revision = cells.Revision(order[i])
					r.Observe(row)
				}
			})
		}
		writers.Wait()
		close(stop)
		readers.Wait()
		if d := r.Lookup("acme"); d.Route.Revision != cells.Revision(n) {
			rt.Errorf("ends at revision %d of %d", d.Route.Revision, n)
		}
	})
}

func seq(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i + 1
	}
	return s
}

func TestDefaultMaxAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		r := startRouter(t, table, cells.WithDefaultCell("cell-z"), cells.WithDefaultMaxAge(time.Minute))
		table.with(func(f *faultTable) { f.down = cells.ErrUnavailable })
		table.breakWatches(cells.ErrUnavailable)
		pass(50 * time.Second)
		if d := r.Lookup("nobody"); d.Rule != "default" {
			t.Errorf("within the bound: %+v", d)
		}
		pass(20 * time.Second)
		if d := r.Lookup("nobody"); d.Known || d.Refusal().Code != cells.CodeBackendUnavailable {
			t.Errorf("past the bound: %+v", d)
		}
		r.Close()
	})
}

func TestOnChange(t *testing.T) {
	noLeaks(t)
	table := cells.NewMemTable()
	type change struct{ old, new cells.Revision }
	got := make(chan change, 100)
	var r *cells.Router
	r = startRouter(t, table, cells.WithOnChange(func(old, new cells.TenantRoute) {
		if d := r.Lookup(new.TenantID); d.Route.Revision < new.Revision {
			t.Errorf("told of revision %d while the view has %d", new.Revision, d.Route.Revision)
		}
		got <- change{old.Revision, new.Revision}
	}))
	for i := range 20 {
		row := set(t, table, active("acme", "cell-a", cells.Epoch(i+1)))
		seen(t, r, row)
		c := <-got
		if c.new != row.Revision || c.old != row.Revision-1 {
			t.Fatalf("change %d: told of %d -> %d, want %d -> %d", i, c.old, c.new, row.Revision-1, row.Revision)
		}
	}
}

func TestCloseEndsEverything(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	r := cells.NewRouter(table, cells.WithRouterLogger(quiet))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := r.Wait(context.Background(), "acme", 0)
		done <- err
	}()
	r.Close()
	if err := <-done; !errors.Is(err, cells.ErrClosed) {
		t.Errorf("Wait: %v", err)
	}
	if _, err := r.Refresh(t.Context(), "acme"); !errors.Is(err, cells.ErrClosed) {
		t.Errorf("Refresh: %v", err)
	}
}
