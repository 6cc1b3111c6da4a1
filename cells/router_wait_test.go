// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func TestWait(t *testing.T) {
	noLeaks(t)
	table := cells.NewMemTable()
	r := startRouter(t, table)
	const waiters = 50
	got := make(chan cells.TenantRoute, waiters)
	for range waiters {
		go func() {
			row, err := r.Wait(t.Context(), "acme", 0)
			if err != nil {
				t.Error(err)
			}
			got <- row
		}()
	}
	set(t, table, active("bolt", "cell-a", 1)) // somebody else's change wakes nobody
	row := set(t, table, active("acme", "cell-a", 1))
	for range waiters {
		if w := <-got; w.Revision != row.Revision {
			t.Fatalf("woke with revision %d, want %d", w.Revision, row.Revision)
		}
	}
	// What is already newer returns at once.
	if w, err := r.Wait(t.Context(), "acme", row.Revision-1); err != nil || w.Revision != row.Revision {
		t.Errorf("Wait for a change that was: %v %v", w.Revision, err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the client left")
	cancel(cause)
	if _, err := r.Wait(ctx, "acme", row.Revision); !errors.Is(err, cause) {
		t.Errorf("Wait with an ended context: %v", err)
	}
	if _, err := r.Wait(t.Context(), "a b", 0); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("Wait for a malformed tenant: %v", err)
	}
}

// A request that is held does not depend on the watch: Wait reads the row itself.
func TestWaitWithoutWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		r := startRouter(t, table)
		table.with(func(f *faultTable) { f.noWatch = cells.ErrUnavailable })
		table.breakWatches(cells.ErrUnavailable)
		synctest.Wait()
		row := set(t, table, active("acme", "cell-a", 1))
		begun := time.Now()
		w, err := r.Wait(t.Context(), "acme", 0)
		if err != nil || w.Revision != row.Revision {
			t.Fatalf("Wait: %v %v", w, err)
		}
		if d := time.Since(begun); d > time.Second {
			t.Errorf("it took %v", d)
		}
		r.Close()
	})
}

// Many callers share a read, and each gets one that began after it asked.
func TestRefreshShares(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	r := startRouter(t, table)
	set(t, table, active("acme", "cell-a", 1))
	entered, release := make(chan struct{}, 10), make(chan struct{})
	table.with(func(f *faultTable) {
		f.gets = 0
		f.onGet = func() { entered <- struct{}{}; <-release }
	})
	var wg sync.WaitGroup
	var wrong atomic.Int32
	wg.Go(func() { _, _ = r.Refresh(t.Context(), "acme") })
	<-entered
	// The row changes while the first read runs; whoever asks from now on must see it.
	row, err := table.RoutingTable.CompareAndSet(t.Context(), 1, active("acme", "cell-a", 2))
	if err != nil {
		t.Fatal(err)
	}
	const callers = 100
	var asked sync.WaitGroup
	asked.Add(callers)
	for range callers {
		wg.Go(func() {
			asked.Done()
			got, err := r.Refresh(t.Context(), "acme")
			if err != nil || got.Revision != row.Revision {
				wrong.Add(1)
			}
		})
	}
	asked.Wait()
	close(release)
	wg.Wait()
	if wrong.Load() > 0 {
		t.Errorf("%d callers got a row older than their question", wrong.Load())
	}
	table.with(func(f *faultTable) {
		if f.gets > 10 {
			t.Errorf("%d reads for %d callers", f.gets, callers)
		}
	})
	if d := r.Lookup("acme"); d.Epoch != 2 {
		t.Errorf("the view has %+v", d)
	}
}

func TestRefreshErrors(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	r := startRouter(t, table)
	if _, err := r.Refresh(t.Context(), "nobody"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("no row: %v", err)
	}
	if _, err := r.Refresh(t.Context(), "a b"); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("malformed: %v", err)
	}
	release := make(chan struct{})
	table.with(func(f *faultTable) { f.onGet = func() { <-release } })
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := r.Refresh(ctx, "acme"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a table that hangs: %v", err)
	}
	close(release)
}
