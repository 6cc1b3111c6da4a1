// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member"
)

// holder is what agents may offer beside [Agents]: whether a cell has rows of a
// tenant.
type holder interface {
	Holds(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (bool, error)
}

// newAgents returns what carries out moves; nil when there is nothing.
func newAgents(s *Server) Agents {
	switch {
	case s.cfg.Agents != nil:
		return s.cfg.Agents
	case s.cfg.Channel == nil:
		return nil
	}
	locate := func(_ context.Context, cell cells.CellID) ([]member.Heartbeat, error) {
		return s.members.locate(cell), nil
	}
	return member.NewAgentClient(s.cfg.Channel, locate,
		member.WithRowsPerSecond(s.cfg.RowsPerSecond), member.WithLimits(s.cfg.Limits), member.WithClientLogger(s.log))
}

// holds asks the cell, or looks at what a move out of it would carry.
func holds(ctx context.Context, a Agents, cell cells.CellID, tenant cells.TenantID) (bool, error) {
	if h, ok := a.(holder); ok {
		return h.Holds(ctx, cell, tenant)
	}
	p, err := a.Preflight(ctx, cells.MoveRef{ID: "probe", Tenant: tenant, Source: cell, Target: cell})
	return p.Rows > 0, err
}
