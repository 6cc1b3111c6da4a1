// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// holdings says which tenants the cell's store knows of. A store whose rows nobody
// can list is an error: it is not empty for that.
func (m *Member) holdings(ctx context.Context, q HoldingsRequest) (Holdings, error) {
	out := Holdings{Open: []cells.TenantID{}, Rows: []transfer.Holding{}}
	s, err := m.store()
	if err != nil {
		return out, err
	}
	if q.Cell != m.cfg.Cell {
		return out, fmt.Errorf("%w: a question to cell %s reached cell %s", cells.ErrInvalid, q.Cell, m.cfg.Cell)
	}
	if q.Limit < 1 || q.Limit > MaxHoldings {
		return out, fmt.Errorf("%w: limit is %d; want 1 to %d", cells.ErrInvalid, q.Limit, MaxHoldings)
	}
	const page = 1000
	for after := cells.TenantID(""); len(out.Open) < q.Limit; {
		list, err := s.Keeper.Fences(ctx, after, page)
		if err != nil {
			return out, err
		}
		for _, f := range list {
			if f.Open && len(out.Open) < q.Limit {
				out.Open = append(out.Open, f.Tenant)
			}
		}
		if len(list) < page {
			break
		}
		after = list[len(list)-1].Tenant
	}
	if s.Agent == nil {
		// Cells share one database: its rows are in no cell, and stay when one goes.
		return out, nil
	}
	l, ok := s.Agent.(transfer.Lister)
	if !ok {
		return out, fmt.Errorf("%w: the transfer agent of cell %s cannot list whose rows it has", cells.ErrInvalid, m.cfg.Cell)
	}
	rows, err := l.Holdings(ctx, q.Limit)
	out.Rows = append(out.Rows, rows...)
	return out, err
}

// Holdings asks a live process of the cell which tenants its store knows of, at most
// limit in each list. A stateless cell holds nothing. [cells.ErrUnavailable] when no
// process of the cell answers.
func (c *AgentClient) Holdings(ctx context.Context, cell cells.CellID, limit int) (Holdings, error) {
	var out Holdings
	_, err := c.any(ctx, cell, "", func(ctx context.Context, h Heartbeat) error {
		out = Holdings{}
		return c.call(ctx, h, PathHoldings, HoldingsRequest{Cell: cell, Limit: limit}, &out)
	})
	return out, err
}
