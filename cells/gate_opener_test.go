// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// The fence is raised once for each epoch, and those who need it wait for it.
func TestOpenerIsCalledOnce(t *testing.T) {
	noLeaks(t)
	var orders []cells.FenceOrder
	entered, release := make(chan struct{}, 1), make(chan error)
	g, table := gatesOf(t, cells.WithOpener(func(_ context.Context, o cells.FenceOrder) error {
		orders = append(orders, o) // one at a time, or the race detector complains
		entered <- struct{}{}
		return <-release
	}))
	const n = 50
	results := make(chan error, n)
	for range n {
		go func() {
			a, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"})
			if err == nil {
				a.Done()
			}
			results <- err
		}()
	}
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.Admit(ctx, cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeBackendUnavailable || !errors.Is(err, context.Canceled) {
		t.Errorf("whose client left while the fence was raised: %v", err)
	}
	release <- errors.New("the first attempt fails")
	// Everybody who waited for that gets its error; others begin another attempt.
	failed := 0
	for i := 0; i < n; {
		select {
		case err := <-results:
			if err != nil {
				failed++
				if codeOf(err) != cells.CodeBackendUnavailable {
					t.Errorf("%v", err)
				}
			}
			i++
		case <-entered:
			release <- nil
		}
	}
	if failed == 0 {
		t.Error("nobody saw the error")
	}
	if failed == n {
		a, err := make(chan *cells.Admission, 1), error(nil)
		go func() {
			got, aerr := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"})
			err = aerr
			a <- got
		}()
		<-entered
		release <- nil
		if got := <-a; err != nil {
			t.Fatal(err)
		} else {
			got.Done()
		}
	}
	if len(orders) != 2 || orders[0] != (cells.FenceOrder{Cell: "cell-a", Tenant: "acme", Epoch: 4, Floor: 4}) {
		t.Errorf("orders: %+v", orders)
	}
	admit(t, g, cells.AdmitRequest{Tenant: "acme"}).Done()
	back := active("acme", "cell-a", 6)
	back.Floor = 4
	seen(t, g.Router(), set(t, table, back))
	go func() { <-entered; release <- nil }()
	admit(t, g, cells.AdmitRequest{Tenant: "acme"}).Done()
	if last := orders[len(orders)-1]; len(orders) != 3 || last.Epoch != 6 || last.Floor != 4 {
		t.Errorf("orders: %+v", orders)
	}
}

func TestOpenerThatDoesNotReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := gatesOf(t, cells.WithOpener(func(ctx context.Context, _ cells.FenceOrder) error {
			<-ctx.Done()
			return ctx.Err()
		}))
		begun := time.Now()
		_, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"})
		if codeOf(err) != cells.CodeBackendUnavailable || time.Since(begun) != 10*time.Second {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
		g.Router().Close()
	})
}

func TestOpenerThatPanics(t *testing.T) {
	noLeaks(t)
	g, _ := gatesOf(t, cells.WithOpener(func(context.Context, cells.FenceOrder) error { panic("oh") }))
	for range 2 {
		if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeBackendUnavailable || !strings.Contains(err.Error(), "panicked: oh") {
			t.Errorf("%v", err)
		}
	}
}

// The fence refuses because the tenant has moved on: the row is read and says so.
func TestOpenerIsFurtherThanTheView(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	table.mute = true
	set(t, table, active("acme", "cell-a", 4))
	r := startRouter(t, table)
	g := cells.NewGates("cell-a", r, cells.WithGateLogger(quiet), cells.WithOpener(func(context.Context, cells.FenceOrder) error {
		return fmt.Errorf("fence: %w", cells.ErrStaleOrder)
	}))
	set(t, table, inMove("acme", cells.StateCopying, "cell-a", 4, 5))
	if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeMoving {
		t.Errorf("%v", err)
	}
}
