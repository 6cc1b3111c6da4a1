// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// listing is an agent that says whose rows it has.
type listing struct {
	*fakeAgent
	rows []transfer.Holding
	err  error
}

func (l *listing) Holdings(_ context.Context, limit int) ([]transfer.Holding, error) {
	return l.rows[:min(limit, len(l.rows))], l.err
}

func TestHoldings(t *testing.T) {
	p := newPlane(t)
	agent, keeper := &listing{fakeAgent: &fakeAgent{}}, newMemKeeper()
	s := store(keeper, nil)
	s.Agent = agent
	p.ready(t, p.join(t, p.config(t, "a"), WithStore(s)))
	p.ready(t, p.join(t, p.config(t, "b"), WithStore(store(newMemKeeper(), &fakeAgent{}))))
	p.ready(t, p.join(t, p.config(t, "c")))
	c, ctx := p.client(t), t.Context()

	if h, err := c.Holdings(ctx, "a", 10); err != nil || len(h.Open)+len(h.Rows) > 0 {
		t.Errorf("an empty cell: %+v, %v", h, err)
	}
	for i := range 3 {
		tenant := cells.TenantID(fmt.Sprintf("t%d", i))
		if err := keeper.OpenFence(ctx, cells.FenceOrder{Cell: "a", Tenant: tenant, Epoch: 1}); err != nil {
			t.Fatal(err)
		}
		agent.rows = append(agent.rows, transfer.Holding{Table: "items", Tenant: tenant})
	}
	if err := keeper.CloseFence(ctx, cells.FenceOrder{Cell: "a", Tenant: "t1", Epoch: 2, Move: "m"}); err != nil {
		t.Fatal(err)
	}
	h, err := c.Holdings(ctx, "a", 10)
	if err != nil || len(h.Open) != 2 || h.Open[0] != "t0" || h.Open[1] != "t2" || len(h.Rows) != 3 || h.Rows[1] != agent.rows[1] {
		t.Errorf("%+v, %v", h, err)
	}
	if h, err := c.Holdings(ctx, "a", 1); err != nil || len(h.Open) != 1 || len(h.Rows) != 1 {
		t.Errorf("one of each: %+v, %v", h, err)
	}
	agent.err = cells.ErrUnavailable
	if h, err := c.Holdings(ctx, "a", 10); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a store that does not answer: %+v, %v", h, err)
	}
	if h, err := c.Holdings(ctx, "b", 10); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("an agent that cannot list: %+v, %v", h, err)
	}
	if h, err := c.Holdings(ctx, "c", 10); err != nil || len(h.Open)+len(h.Rows) > 0 {
		t.Errorf("a cell that keeps no state: %+v, %v", h, err)
	}
	if _, err := c.Holdings(ctx, "d", 10); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a cell without processes: %v", err)
	}
	for _, n := range []int{0, MaxHoldings + 1} {
		if _, err := c.Holdings(ctx, "a", n); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("limit %d: %v", n, err)
		}
	}
}
