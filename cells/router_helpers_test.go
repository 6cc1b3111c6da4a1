// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
)

// quiet is for routers and gates whose complaints are expected.
var quiet = slog.New(slog.DiscardHandler)

// noLeaks checks at the end of the test that it has left no goroutine behind.
func noLeaks(t *testing.T) {
	t.Helper()
	opt := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, opt) })
}

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after 20 s still not: %s", what)
		}
	}
}

// active is a row that serves.
func active(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
	return cells.TenantRoute{TenantID: tenant, State: cells.StateActive, CellID: cell, Epoch: epoch, Floor: epoch}
}

// inMove is the row of a move from a to b that began at base.
func inMove(tenant cells.TenantID, state cells.RouteState, cell cells.CellID, base, epoch cells.Epoch) cells.TenantRoute {
	r := active(tenant, cell, epoch)
	r.State, r.MoveID, r.SourceCell, r.TargetCell, r.Base = state, "m1", "cell-a", "cell-b", base
	return r
}

// set writes a row over whatever the table has.
func set(t *testing.T, table cells.RoutingTable, next cells.TenantRoute) cells.TenantRoute {
	t.Helper()
	cur, err := table.Get(t.Context(), next.TenantID)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		t.Fatal(err)
	}
	got, err := table.CompareAndSet(t.Context(), cur.Revision, next)
	if err != nil {
		t.Fatalf("writing %s %s(%s,%d): %v", next.TenantID, next.State, next.CellID, next.Epoch, err)
	}
	return got
}

// startRouter returns a router that has loaded the table and is closed with the test.
func startRouter(t *testing.T, table cells.RoutingTable, opts ...cells.RouterOption) *cells.Router {
	t.Helper()
	r := cells.NewRouter(table, append([]cells.RouterOption{cells.WithRouterLogger(quiet)}, opts...)...)
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// seen waits until the router knows the row.
func seen(t *testing.T, r *cells.Router, route cells.TenantRoute) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := r.Wait(ctx, route.TenantID, route.Revision-1); err != nil {
		t.Fatalf("the router did not see %s at revision %d: %v", route.TenantID, route.Revision, err)
	}
}

// faultTable is a table that fails on demand.
type faultTable struct {
	cells.RoutingTable

	mu       sync.Mutex // guards below
	down     error      // every call fails
	noWatch  error      // Watch fails
	mute     bool       // watches deliver nothing
	older    cells.Revision
	hide     map[cells.TenantID]bool // left out of lists
	watchers []*faultWatcher
	gets     int
	lists    int
	watches  int
	onGet    func()
}

func newFaultTable(t *testing.T) *faultTable {
	mem := cells.NewMemTable()
	t.Cleanup(func() { _ = mem.Close() })
	return &faultTable{RoutingTable: mem, hide: map[cells.TenantID]bool{}}
}

func (f *faultTable) with(change func(*faultTable)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *faultTable) Get(ctx context.Context, t cells.TenantID) (cells.TenantRoute, error) {
	f.mu.Lock()
	f.gets++
	down, onGet := f.down, f.onGet
	f.mu.Unlock()
	row, err := f.RoutingTable.Get(ctx, t)
	if onGet != nil {
		onGet() // the row was read and is on its way
	}
	if down != nil {
		return cells.TenantRoute{}, down
	}
	return row, err
}

func (f *faultTable) List(ctx context.Context, o cells.ListOptions) (cells.RoutePage, error) {
	f.mu.Lock()
	f.lists++
	down, older := f.down, f.older
	f.mu.Unlock()
	if down != nil {
		return cells.RoutePage{}, down
	}
	p, err := f.RoutingTable.List(ctx, o)
	kept := p.Routes[:0]
	for _, r := range p.Routes {
		if !f.hide[r.TenantID] {
			kept = append(kept, r)
		}
	}
	p.Routes = kept
	p.Revision -= min(older, p.Revision)
	return p, err
}

func (f *faultTable) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watches++
	if err := errors.Join(f.down, f.noWatch); err != nil {
		return nil, err
	}
	in, err := f.RoutingTable.Watch(ctx, from)
	if err != nil {
		return nil, err
	}
	w := &faultWatcher{RouteWatcher: in, broken: make(chan struct{}), mute: f.mute}
	f.watchers = append(f.watchers, w)
	return w, nil
}

// breakWatches ends every open watch with the error.
func (f *faultTable) breakWatches(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.watchers {
		w.err = err
		close(w.broken)
	}
	f.watchers = nil
}

type faultWatcher struct {
	cells.RouteWatcher
	broken chan struct{} // closed after err is set
	err    error
	mute   bool
}

func (w *faultWatcher) Next(ctx context.Context) (cells.RouteUpdate, error) {
	if w.mute {
		select {
		case <-ctx.Done():
			return cells.RouteUpdate{}, ctx.Err()
		case <-w.broken:
			return cells.RouteUpdate{}, w.err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over, watching := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watching)
		select {
		case <-w.broken:
			cancel()
		case <-over:
		}
	}()
	u, err := w.RouteWatcher.Next(ctx)
	close(over)
	<-watching
	select {
	case <-w.broken:
		return cells.RouteUpdate{}, w.err
	default:
	}
	return u, err
}

// pass lets time pass; in a bubble of testing/synctest only.
func pass(d time.Duration) { <-time.After(d) }
