// SPDX-License-Identifier: Apache-2.0

package hub_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/internal/hub"
)

func never(context.Context) (bool, error) { return false, nil }

func TestWaitAndWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := 0
		h := hub.New(func(ctx context.Context) { started++; <-ctx.Done() })
		woken := make(chan cells.TenantID, 10)
		for _, tenant := range []cells.TenantID{"a", "a", "b"} {
			go func() {
				if h.Wait(t.Context(), tenant, 3, never) == nil {
					woken <- tenant
				}
			}()
		}
		synctest.Wait()
		if w := h.Waiting(); len(w) != 2 || w["a"] != 3 {
			t.Errorf("waiting: %v", w)
		}
		h.Wake("a")
		h.Wake("a")
		synctest.Wait()
		if len(woken) != 2 || len(h.Waiting()) != 1 {
			t.Errorf("%d were woken, waiting: %v", len(woken), h.Waiting())
		}
		h.WakeAll()
		synctest.Wait()
		if len(woken) != 3 || len(h.Waiting()) != 0 {
			t.Errorf("%d were woken, waiting: %v", len(woken), h.Waiting())
		}
		failed := errors.New("failed")
		if err := h.Wait(t.Context(), "a", 0, func(context.Context) (bool, error) { return true, nil }); err != nil {
			t.Error(err)
		}
		if err := h.Wait(t.Context(), "a", 0, func(context.Context) (bool, error) { return false, failed }); !errors.Is(err, failed) {
			t.Error(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- h.Wait(t.Context(), "a", 0, never) }()
		synctest.Wait()
		h.Close()
		h.Close()
		if err := <-ended; !errors.Is(err, hub.ErrClosed) {
			t.Errorf("a wait when the hub is closed: %v", err)
		}
		if err := h.Wait(t.Context(), "a", 0, never); !errors.Is(err, hub.ErrClosed) {
			t.Errorf("a wait on a closed hub: %v", err)
		}
		if _, err := h.NewFeed(); !errors.Is(err, hub.ErrClosed) {
			t.Errorf("a feed of a closed hub: %v", err)
		}
		if h.Go(func(context.Context) {}) || started != 1 {
			t.Errorf("work on a closed hub, or the background was started %d times", started)
		}
	})
}

func TestFeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hub.New()
		defer h.Close()
		f, err := h.NewFeed()
		if err != nil {
			t.Fatal(err)
		}
		for _, tenant := range []cells.TenantID{"b", "a", "b"} {
			h.Wake(tenant)
		}
		h.WakeAll()
		got, err := f.Next(t.Context())
		slices.Sort(got)
		if err != nil || !slices.Equal(got, []cells.TenantID{"", "a", "b"}) {
			t.Errorf("heard of %q, %v", got, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() { synctest.Wait(); cancel() }()
		if got, err := f.Next(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("heard of %q, %v", got, err)
		}
		f.Close()
		h.Wake("a")
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if got, err := f.Next(ctx); err == nil {
			t.Errorf("a closed feed heard of %q", got)
		}
	})
}

func TestPause(t *testing.T) {
	h := hub.New()
	defer h.Close()
	a, doneA := h.Publishing(t.Context(), "a")
	b, doneB := h.Publishing(t.Context(), "b")
	if got := h.InPublication(); len(got) != 2 {
		t.Errorf("in publication: %v", got)
	}
	h.Pause("a")
	if !errors.Is(context.Cause(a), hub.ErrPaused) || b.Err() != nil {
		t.Errorf("after a pause of a: %v, %v", context.Cause(a), b.Err())
	}
	doneA()
	doneB()
	h.Pause("b")
	if errors.Is(context.Cause(b), hub.ErrPaused) || len(h.InPublication()) != 0 {
		t.Errorf("after the end: %v, %v", context.Cause(b), h.InPublication())
	}
}
