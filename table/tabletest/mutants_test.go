// SPDX-License-Identifier: Apache-2.0

package tabletest_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/tabletest"
)

// mutant is a MemTable with a defect: each function that is set replaces a method
// and gets the real one's table.
type mutant struct {
	*cells.MemTable
	get   func(context.Context, *cells.MemTable, cells.TenantID) (cells.TenantRoute, error)
	cas   func(context.Context, *cells.MemTable, cells.Revision, cells.TenantRoute) (cells.TenantRoute, error)
	list  func(context.Context, *cells.MemTable, cells.ListOptions) (cells.RoutePage, error)
	watch func(context.Context, *cells.MemTable, cells.Revision) (cells.RouteWatcher, error)
}

func (m *mutant) Get(ctx context.Context, id cells.TenantID) (cells.TenantRoute, error) {
	if m.get != nil {
		return m.get(ctx, m.MemTable, id)
	}
	return m.MemTable.Get(ctx, id)
}

func (m *mutant) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if m.cas != nil {
		return m.cas(ctx, m.MemTable, old, next)
	}
	return m.MemTable.CompareAndSet(ctx, old, next)
}

func (m *mutant) List(ctx context.Context, o cells.ListOptions) (cells.RoutePage, error) {
	if m.list != nil {
		return m.list(ctx, m.MemTable, o)
	}
	return m.MemTable.List(ctx, o)
}

func (m *mutant) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if m.watch != nil {
		return m.watch(ctx, m.MemTable, from)
	}
	return m.MemTable.Watch(ctx, from)
}

// warped is a watch whose updates pass through a function.
type warped struct {
	cells.RouteWatcher
	next func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error)
}

func (w *warped) Next(ctx context.Context) (cells.RouteUpdate, error) {
	return w.next(ctx, w.RouteWatcher)
}

// warp makes a mutant whose watches change their updates.
func warp(change func(n int, up *cells.RouteUpdate)) func() *mutant {
	return warpNext(func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error) {
		n := 0
		return func(ctx context.Context, w cells.RouteWatcher) (cells.RouteUpdate, error) {
			up, err := w.Next(ctx)
			if err == nil {
				change(n, &up)
				n++
			}
			return up, err
		}
	})
}

func warpNext(next func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error)) func() *mutant {
	return func() *mutant {
		return &mutant{watch: func(ctx context.Context, t *cells.MemTable, from cells.Revision) (cells.RouteWatcher, error) {
			w, err := t.Watch(ctx, from)
			if err != nil {
				return nil, err
			}
			return &warped{w, next()}, nil
		}}
	}
}

// swapWith makes a mutant with another compare-and-set.
func swapWith(cas func(context.Context, *cells.MemTable, cells.Revision, cells.TenantRoute) (cells.TenantRoute, error)) func() *mutant {
	return func() *mutant { return &mutant{cas: cas} }
}

// swapEdited makes a mutant that changes the row before it is stored.
func swapEdited(edit func(*cells.TenantRoute)) func() *mutant {
	return swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		edit(&next)
		return t.CompareAndSet(ctx, old, next)
	})
}

// unchecked writes next over whatever is there by way of an acceptable row: the
// stored row is next except for what the table's own check insists on.
func unchecked(accept func(cur, next cells.TenantRoute) bool) func() *mutant {
	return func() *mutant {
		var mu sync.Mutex
		over := make(map[cells.TenantID]cells.TenantRoute) // rows that the real table refuses
		m := &mutant{}
		m.cas = func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
			got, err := t.CompareAndSet(ctx, old, next)
			cur, getErr := t.Get(ctx, next.TenantID)
			if errors.Is(err, cells.ErrInvalid) && getErr == nil && cur.Revision == old && accept(cur, next) {
				mu.Lock()
				defer mu.Unlock()
				next.Revision = old + 1
				over[next.TenantID] = next
				return next, nil
			}
			return got, err
		}
		m.get = func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			mu.Lock()
			defer mu.Unlock()
			if r, ok := over[id]; ok {
				return r, nil
			}
			return t.Get(ctx, id)
		}
		return m
	}
}

type defect struct {
	name string
	// caught names the case that must fail.
	caught string
	make   func() *mutant
}

func listEdited(edit func(o *cells.ListOptions), change func(p *cells.RoutePage)) func() *mutant {
	return func() *mutant {
		return &mutant{list: func(ctx context.Context, t *cells.MemTable, o cells.ListOptions) (cells.RoutePage, error) {
			if err := o.Validate(); err != nil {
				return cells.RoutePage{}, err
			}
			edit(&o)
			p, err := t.List(ctx, o)
			change(&p)
			return p, err
		}}
	}
}

func keepOptions(*cells.ListOptions) {}

var defects = []defect{
	{"CAS ignores the revision", "Swap", swapWith(func(ctx context.Context, t *cells.MemTable, _ cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		cur, _ := t.Get(ctx, next.TenantID)
		return t.CompareAndSet(ctx, cur.Revision, next)
	})},
	{"CAS takes 0 for any revision", "CreateOnce", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		if cur, err := t.Get(ctx, next.TenantID); old == 0 && err == nil {
			old = cur.Revision
		}
		return t.CompareAndSet(ctx, old, next)
	})},
	{"CAS creates from any revision", "CreateOnce", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		if _, err := t.Get(ctx, next.TenantID); err != nil {
			old = 0
		}
		return t.CompareAndSet(ctx, old, next)
	})},
	{"CAS compares and sets in two steps", "Claimers", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		if cur, _ := t.Get(ctx, next.TenantID); cur.Revision != old {
			return cells.TenantRoute{}, cells.ErrConflict
		}
		runtime.Gosched()
		for {
			cur, _ := t.Get(ctx, next.TenantID)
			next.Epoch, next.Floor = max(next.Epoch, cur.Epoch+1), max(next.Epoch, cur.Epoch+1)
			if got, err := t.CompareAndSet(ctx, cur.Revision, next); !errors.Is(err, cells.ErrConflict) {
				return got, err
			}
		}
	})},
	{"CAS in two steps, counting", "Counter", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		if cur, _ := t.Get(ctx, next.TenantID); cur.Revision != old {
			return cells.TenantRoute{}, cells.ErrConflict
		}
		runtime.Gosched()
		for {
			cur, _ := t.Get(ctx, next.TenantID)
			if got, err := t.CompareAndSet(ctx, cur.Revision, next); !errors.Is(err, cells.ErrConflict) {
				return got, err
			}
		}
	})},
	{"CAS is lost", "Swap", swapWith(func(_ context.Context, _ *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		next.Revision = old + 1
		return next, nil
	})},
	{"CAS returns the caller's revision", "Swap", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		got, err := t.CompareAndSet(ctx, old, next)
		got.Revision = next.Revision
		return got, err
	})},
	{"CAS reports a conflict after writing", "Linearizable", func() *mutant {
		var n atomic.Int64
		return &mutant{cas: func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
			got, err := t.CompareAndSet(ctx, old, next)
			if err == nil && n.Add(1)%4 == 0 {
				return cells.TenantRoute{}, cells.ErrConflict
			}
			return got, err
		}}
	}},
	{"CAS accepts a lower epoch", "Invariants", unchecked(func(cur, next cells.TenantRoute) bool { return next.Epoch < cur.Epoch && next.State != 0 })},
	{"CAS accepts an epoch for two cells", "Invariants", unchecked(func(cur, next cells.TenantRoute) bool {
		return next.Epoch == cur.Epoch && next.CellID != cur.CellID
	})},
	{"CAS accepts that COMMITTING is undone", "Invariants", unchecked(func(cur, _ cells.TenantRoute) bool { return cur.State == cells.StateCommitting })},
	{"CAS revives a tombstone at its epoch", "Invariants", unchecked(func(cur, next cells.TenantRoute) bool {
		return cur.State == cells.StateDeleted && next.Epoch == cur.Epoch
	})},
	{"CAS accepts a malformed row", "MalformedRows", swapEdited(func(r *cells.TenantRoute) { r.DataMark = "" })},
	{"CAS drops the residue", "AllFields", swapEdited(func(r *cells.TenantRoute) { r.Residue = nil })},
	{"CAS cuts times to microseconds", "AllFields", swapEdited(func(r *cells.TenantRoute) { r.Deadline = r.Deadline.Truncate(time.Microsecond) })},
	{"CAS trims texts", "AllFields", swapEdited(func(r *cells.TenantRoute) { r.DataMark = "0" })},
	{"CAS refuses a long reason", "LongReason", swapWith(func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		if len(next.Reason) > 4096 {
			return cells.TenantRoute{}, cells.ErrInvalid
		}
		return t.CompareAndSet(ctx, old, next)
	})},
	{"CAS runs without its context", "EndedContext", swapWith(func(_ context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
		return t.CompareAndSet(context.Background(), old, next)
	})},
	{"revisions count per tenant", "Revisions", func() *mutant {
		var mu sync.Mutex
		counts := make(map[cells.TenantID]cells.Revision)
		return &mutant{cas: func(ctx context.Context, t *cells.MemTable, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
			mu.Lock()
			defer mu.Unlock()
			cur, _ := t.Get(ctx, next.TenantID)
			if counts[next.TenantID] != old {
				return cells.TenantRoute{}, cells.ErrConflict
			}
			got, err := t.CompareAndSet(ctx, cur.Revision, next)
			if err == nil {
				counts[next.TenantID]++
				got.Revision = counts[next.TenantID]
			}
			return got, err
		}, get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			mu.Lock()
			defer mu.Unlock()
			r, err := t.Get(ctx, id)
			r.Revision = counts[id]
			return r, err
		}}
	}},
	{"Get invents a row", "GetUnknown", func() *mutant {
		return &mutant{get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			r, err := t.Get(ctx, id)
			if errors.Is(err, cells.ErrNotFound) {
				err = nil
			}
			return r, err
		}}
	}},
	{"Get hides tombstones", "Tombstone", func() *mutant {
		return &mutant{get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			r, err := t.Get(ctx, id)
			if r.State == cells.StateDeleted {
				return cells.TenantRoute{}, cells.ErrNotFound
			}
			return r, err
		}}
	}},
	{"Get is cached", "Linearizable", func() *mutant {
		var mu sync.Mutex
		var last cells.TenantRoute
		n := 0
		return &mutant{get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			mu.Lock()
			defer mu.Unlock()
			if n++; last.TenantID == id && n%4 != 0 {
				return last.Clone(), nil
			}
			r, err := t.Get(ctx, id)
			if err == nil {
				last = r
			}
			return r, err
		}}
	}},
	{"Get returns an alias", "NoAliases", func() *mutant {
		rows := make(map[cells.TenantID]cells.TenantRoute)
		return &mutant{get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			r, err := t.Get(ctx, id)
			if err == nil && rows[id].Revision == r.Revision {
				return rows[id], nil
			}
			rows[id] = r
			return r, err
		}}
	}},
	{"the list's revision is too new", "ListRevision", listEdited(keepOptions, func(p *cells.RoutePage) { p.Revision++ })},
	{"the list's revision is too old", "ListRevision", listEdited(keepOptions, func(p *cells.RoutePage) { p.Revision = max(p.Revision, 1) - 1 })},
	{"the list of an empty table is ahead", "ListEmpty", listEdited(keepOptions, func(p *cells.RoutePage) { p.Revision = max(p.Revision, 1) })},
	{"a page loses its last row", "ListPages", listEdited(keepOptions, func(p *cells.RoutePage) {
		if p.Next != "" && len(p.Routes) > 1 {
			p.Routes = p.Routes[:len(p.Routes)-1]
		}
	})},
	{"the next page repeats a row", "ListPages", listEdited(keepOptions, func(p *cells.RoutePage) {
		if len(p.Routes) > 1 && p.Next != "" {
			p.Next = p.Routes[len(p.Routes)-2].TenantID
		}
	})},
	{"a list has one page", "ListPages", listEdited(keepOptions, func(p *cells.RoutePage) { p.Next = "" })},
	{"a list is not in order", "ListPages", listEdited(keepOptions, func(p *cells.RoutePage) { slices.Reverse(p.Routes) })},
	{"a list ignores its limit", "ListPages", listEdited(func(o *cells.ListOptions) { o.Limit = 0 }, func(*cells.RoutePage) {})},
	{"a list ignores its cell", "ListCell", listEdited(func(o *cells.ListOptions) { o.Cell = "" }, func(*cells.RoutePage) {})},
	{"a list filters after it cut the page", "ListCell", func() *mutant {
		return &mutant{list: func(ctx context.Context, t *cells.MemTable, o cells.ListOptions) (cells.RoutePage, error) {
			all := o
			all.Cell = ""
			p, err := t.List(ctx, all)
			p.Routes = slices.DeleteFunc(p.Routes, func(r cells.TenantRoute) bool { return !o.Matches(&r) })
			if len(p.Routes) == 0 {
				p.Next = ""
			}
			return p, err
		}}
	}},
	{"a list hides tombstones", "Tombstone", listEdited(keepOptions, func(p *cells.RoutePage) {
		p.Routes = slices.DeleteFunc(p.Routes, func(r cells.TenantRoute) bool { return r.State == cells.StateDeleted })
	})},
	{"a watch drops an update", "WatchMany", warp(func(n int, up *cells.RouteUpdate) { up.Routes = up.Routes[min(1, len(up.Routes)):] })},
	{"a watch drops a late update", "WatchInterleaved", warp(func(_ int, up *cells.RouteUpdate) {
		if len(up.Routes) > 1 {
			up.Routes = up.Routes[:len(up.Routes)-1]
		}
	})},
	{"a watch turns its order round", "WatchInterleaved", warp(func(_ int, up *cells.RouteUpdate) { slices.Reverse(up.Routes) })},
	{"a watch says too high a revision", "WatchResume", warp(func(_ int, up *cells.RouteUpdate) { up.Revision++ })},
	{"a watch says too low a revision", "WatchFromStart", warp(func(_ int, up *cells.RouteUpdate) { up.Revision = 1 })},
	{"a watch cuts a backlog short", "WatchBacklog", warp(func(_ int, up *cells.RouteUpdate) { up.Routes = up.Routes[:min(len(up.Routes), 500)] })},
	{"a watch starts now", "WatchFromStart", func() *mutant {
		return &mutant{watch: func(ctx context.Context, t *cells.MemTable, from cells.Revision) (cells.RouteWatcher, error) {
			p, err := t.List(ctx, cells.ListOptions{Limit: 1})
			if err != nil {
				return nil, err
			}
			return t.Watch(ctx, max(from, p.Revision))
		}}
	}},
	{"a watch starts at the first", "WatchFromRevision", func() *mutant {
		return &mutant{watch: func(ctx context.Context, t *cells.MemTable, _ cells.Revision) (cells.RouteWatcher, error) {
			return t.Watch(ctx, 0)
		}}
	}},
	{"a watch hides tombstones", "Tombstone", warp(func(_ int, up *cells.RouteUpdate) {
		up.Routes = slices.DeleteFunc(up.Routes, func(r cells.TenantRoute) bool { return r.State == cells.StateDeleted })
	})},
	{"a watch gives no sign of life", "WatchSignOfLife", warpNext(func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error) {
		return func(ctx context.Context, w cells.RouteWatcher) (cells.RouteUpdate, error) {
			for {
				if up, err := w.Next(ctx); err != nil || len(up.Routes) > 0 {
					return up, err
				}
			}
		}
	})},
	{"a watch ends silently", "WatchClose", warpNext(func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error) {
		return func(ctx context.Context, w cells.RouteWatcher) (cells.RouteUpdate, error) {
			up, err := w.Next(ctx)
			if errors.Is(err, cells.ErrClosed) {
				<-ctx.Done()
				return up, ctx.Err()
			}
			return up, err
		}
	})},
	{"a watch outlives its table", "Close", warpNext(func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error) {
		var last cells.RouteUpdate
		return func(ctx context.Context, w cells.RouteWatcher) (cells.RouteUpdate, error) {
			up, err := w.Next(ctx)
			if errors.Is(err, cells.ErrClosed) {
				<-ctx.Done()
				return last, ctx.Err()
			}
			last.Revision = up.Revision
			return up, err
		}
	})},
	{"a watch ignores its context", "WatchContext", warpNext(func() func(context.Context, cells.RouteWatcher) (cells.RouteUpdate, error) {
		return func(ctx context.Context, w cells.RouteWatcher) (cells.RouteUpdate, error) {
			return w.Next(context.WithoutCancel(ctx))
		}
	})},
	{"a watch from the future waits", "WatchAhead", func() *mutant {
		return &mutant{watch: func(ctx context.Context, t *cells.MemTable, from cells.Revision) (cells.RouteWatcher, error) {
			w, err := t.Watch(ctx, from)
			if errors.Is(err, cells.ErrCompacted) {
				return t.Watch(ctx, 0)
			}
			return w, err
		}}
	}},
	{"compaction goes unnoticed", "WatchCompacted", func() *mutant {
		return &mutant{watch: func(ctx context.Context, t *cells.MemTable, from cells.Revision) (cells.RouteWatcher, error) {
			w, err := t.Watch(ctx, from)
			if errors.Is(err, cells.ErrCompacted) {
				p, _ := t.List(ctx, cells.ListOptions{Limit: 1})
				return t.Watch(ctx, p.Revision)
			}
			return w, err
		}}
	}},
	{"nothing ends with the table", "Close", func() *mutant {
		return &mutant{get: func(_ context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			return cells.TenantRoute{TenantID: id}, nil
		}}
	}},
	{"identifiers are not checked", "MalformedIDs", func() *mutant {
		return &mutant{get: func(ctx context.Context, t *cells.MemTable, id cells.TenantID) (cells.TenantRoute, error) {
			if id.Validate() != nil {
				return cells.TenantRoute{}, cells.ErrNotFound
			}
			return t.Get(ctx, id)
		}}
	}},
}

// Each defect makes the case that is about it fail, and the same case passes on
// the table without the defect.
func TestSuiteFailsBrokenTables(t *testing.T) {
	compact := func(_ tabletest.TB, t cells.RoutingTable) {
		if m, ok := t.(*mutant); ok {
			m.Compact(1 << 62)
			return
		}
		t.(*cells.MemTable).Compact(1 << 62)
	}
	for _, d := range defects {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			broken := memHarness(func(m *cells.MemTable) cells.RoutingTable {
				x := d.make()
				x.MemTable = m
				return x
			})
			broken.Patience, broken.Compact = 150*time.Millisecond, compact
			cases := tabletest.Cases(broken)
			i := slices.IndexFunc(cases, func(c tabletest.Case) bool { return c.Name == d.caught })
			if i < 0 {
				t.Fatalf("there is no case %s", d.caught)
			}
			// A race may go well now and then; it must not stay hidden.
			var failures []string
			for range 20 {
				if failures = record(t.Context(), cases[i], broken); len(failures) > 0 {
					break
				}
			}
			if len(failures) == 0 {
				t.Fatalf("case %s does not notice", d.caught)
			}
			t.Logf("%s: %s", d.caught, failures[0])
			sound := memHarness(nil)
			sound.Compact = compact
			if failures := record(t.Context(), cases[i], sound); len(failures) > 0 {
				t.Fatalf("case %s fails a sound table: %v", d.caught, failures)
			}
		})
	}
}

// Several handles that do not see each other's changes are noticed.
func TestSuiteFailsSeparateHandles(t *testing.T) {
	h := memHarness(nil)
	h.Patience = 150 * time.Millisecond
	h.Another = func(tb tabletest.TB, _ cells.RoutingTable) cells.RoutingTable { return h.Open(tb) }
	h.Reopen = func(tb tabletest.TB, _ cells.RoutingTable) cells.RoutingTable { return h.Open(tb) }
	for _, c := range tabletest.Cases(h) {
		switch c.Name {
		case "AnotherSees", "AnotherClaimers", "AnotherCounter", "AnotherConverge", "Reopen":
			if failures := record(t.Context(), c, h); len(failures) == 0 {
				t.Errorf("case %s does not notice", c.Name)
			}
		}
	}
}
