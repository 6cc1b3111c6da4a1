// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// heldRows are tenancy rows that note what is asked for.
type heldRows struct {
	mu  sync.Mutex
	got []string
}

func (h *heldRows) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.got = append(h.got, fmt.Sprintf(format, args...))
}

func (h *heldRows) Hold(_ context.Context, tenants ...cells.TenantID) error {
	h.note("hold %v", tenants)
	return nil
}

func (h *heldRows) Unhold(_ context.Context, tenant cells.TenantID, _ cells.Epoch) error {
	h.note("unhold %s", tenant)
	if tenant == "open" {
		return fmt.Errorf("%w: its fence is open", cells.ErrConflict)
	}
	return nil
}

// The rows of a cell that is a deployment, by order of the directory.
func TestTenancyRows(t *testing.T) {
	p := newPlane(t)
	k, rows := newMemKeeper(), &heldRows{}
	s := store(k, nil)
	s.Tenancy = rows
	a := p.join(t, p.config(t, "a"), WithStore(s))
	b := p.join(t, p.config(t, "b"), WithStore(store(newMemKeeper(), nil)))
	p.ready(t, a)
	p.ready(t, b)
	k.set(guard.Fence{Tenant: "t", Epoch: 4})
	c := p.client(t)
	for _, o := range []struct {
		TenancyOrder
		want error
	}{
		{TenancyOrder{Cell: "a", Tenant: "t", Do: TenancyCheck}, nil},
		{TenancyOrder{Cell: "a", Tenant: "t", Do: TenancyHold, Epoch: 5}, nil},
		{TenancyOrder{Cell: "a", Tenant: "t", Do: TenancyHold, Epoch: 4}, nil},
		{TenancyOrder{Cell: "a", Tenant: "t", Do: TenancyHold, Epoch: 3}, cells.ErrStaleOrder}, // the order of a move that is over
		{TenancyOrder{Cell: "a", Tenant: "t", Do: TenancyUnhold}, nil},
		{TenancyOrder{Cell: "a", Tenant: "open", Do: TenancyUnhold}, cells.ErrConflict},
		{TenancyOrder{Cell: "a", Tenant: "t", Do: "both"}, cells.ErrInvalid},
		{TenancyOrder{Cell: "a", Tenant: "", Do: TenancyHold}, cells.ErrInvalid},
		{TenancyOrder{Cell: "b", Tenant: "t", Do: TenancyCheck}, cells.ErrInvalid}, // it is no deployment
	} {
		if err := c.Tenancy(t.Context(), o.TenancyOrder); !errors.Is(err, o.want) {
			t.Errorf("%+v: %v, want %v", o.TenancyOrder, err, o.want)
		}
	}
	rows.mu.Lock()
	defer rows.mu.Unlock()
	if got := strings.Join(rows.got, ", "); got != "hold [t], hold [t], unhold t, unhold open" {
		t.Errorf("the rows got: %s", got)
	}
}
