// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// The rows of tenants that move: they follow the fence, also when a placement call's
// answer comes late.
func TestMovedTenants(t *testing.T) {
	ctx, dsn := t.Context(), pgtest.DB(t)
	s, err := tenancypg.Open(dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Install(ctx); err != nil {
		t.Fatal(err)
	}
	held := func(tenant cells.TenantID) bool {
		t.Helper()
		is, err := s.Held(ctx, tenant)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	// A service without fences: nothing moves away from it.
	if err := s.HoldPlaced(ctx, "acme"); err != nil || !held("acme") {
		t.Fatalf("without fences: %v", err)
	}
	if err := s.Unhold(ctx, "acme", 3); !errors.Is(err, tenancy.ErrNotMoved) || !held("acme") {
		t.Fatalf("without fences: %v", err)
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := postgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Install(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Unhold(ctx, "acme", 3); !errors.Is(err, tenancy.ErrNotMoved) || !held("acme") {
		t.Fatalf("without a fence: %v", err)
	}
	order := func(epoch cells.Epoch, move cells.MoveID) cells.FenceOrder {
		return cells.FenceOrder{Cell: "a", Tenant: "acme", Epoch: epoch, Floor: epoch, Move: move}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(g.OpenFence(ctx, order(1, "")))
	if err := s.Unhold(ctx, "acme", 3); !errors.Is(err, tenancy.ErrNotMoved) || !held("acme") {
		t.Fatalf("with an open fence: %v", err)
	}
	must(g.CloseFence(ctx, order(2, "m-1")))
	if err := s.HoldPlaced(ctx, "acme"); !errors.Is(err, tenancy.ErrMoved) || !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("an answer that came late: %v", err)
	}
	if err := s.Unhold(ctx, "acme", 1); !errors.Is(err, tenancy.ErrNotMoved) || !held("acme") {
		t.Fatalf("an order from before the fence was closed: %v", err)
	}
	must(s.Unhold(ctx, "acme", 3))
	must(s.Unhold(ctx, "acme", 3)) // again
	if held("acme") {
		t.Error("it is held still")
	}
	if err := s.HoldPlaced(ctx, "acme"); !errors.Is(err, tenancy.ErrMoved) || held("acme") {
		t.Errorf("an answer from before the move: %v", err)
	}
	// Its way back: held before the fence opens.
	must(s.Hold(ctx, "acme"))
	must(g.OpenFence(ctx, order(5, "m-2")))
	if err := s.HoldPlaced(ctx, "acme"); err != nil || !held("acme") {
		t.Errorf("back: %v", err)
	}
	for _, bad := range []cells.TenantID{"", "*", "-"} {
		if s.HoldPlaced(ctx, bad) == nil || s.Unhold(ctx, bad, 0) == nil {
			t.Errorf("%q was taken", bad)
		}
	}

	// Answers beside a move's orders: whatever comes first, nothing is held in the end.
	for i := range 20 {
		tenant := cells.TenantID(fmt.Sprintf("t-%d", i))
		var both sync.WaitGroup
		both.Go(func() {
			if err := s.HoldPlaced(context.WithoutCancel(ctx), tenant); err != nil && !errors.Is(err, tenancy.ErrMoved) {
				t.Errorf("an answer: %v", err)
			}
		})
		both.Go(func() {
			o := cells.FenceOrder{Cell: "a", Tenant: tenant, Epoch: 2, Move: "m"}
			if err := g.CloseFence(ctx, o); err != nil {
				t.Errorf("an order: %v", err)
			}
			if err := s.Unhold(ctx, tenant, 0); err != nil {
				t.Errorf("letting it go: %v", err)
			}
		})
		both.Wait()
		if held(tenant) {
			t.Errorf("%s is held and was moved away", tenant)
		}
	}
}
