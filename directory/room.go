// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Room is what decides whether a tenant may be put into a cell. Holds is what is in
// the cell without the tenant, moves that are coming in included; what a [Store] gives
// has no loads in it, which only heartbeats tell.
type Room struct {
	Cell   cells.CellView
	State  api.CellState
	Tenant cells.TenantView
	Holds  cells.Occupancy
}

// Refuse says why the tenant may not be put into the cell; nil if it may. It is the
// rule of plans ([cells.CellView.Refuse]). The error wraps [ErrCellClosed], with
// [cells.ErrNoRoom] when a limit is reached, or [cells.ErrJurisdiction].
func (r *Room) Refuse() error {
	err := r.Cell.Refuse(&r.Tenant, r.Holds)
	switch {
	case err == nil || errors.Is(err, cells.ErrJurisdiction):
		return err
	case r.State != api.CellServing:
		return fmt.Errorf("%w: cell %s is %s", ErrCellClosed, r.Cell.Cell, r.State)
	case r.Cell.Closed:
		return fmt.Errorf("%w: cell %s is closed", ErrCellClosed, r.Cell.Cell)
	}
	return fmt.Errorf("%w: %w", ErrCellClosed, err)
}

// Waived reports whether a refusal does not hold for a move: an undo goes back to where
// its tenant came from, closed or full as that may be. Nothing waives a jurisdiction.
func Waived(m *api.Move, refusal error) bool {
	return m.Undoes != "" && errors.Is(refusal, ErrCellClosed)
}

// takes says why the tenant may not be put into the cell, by everything that is known
// here; nil if it may. What the store knows is asked again in the transaction that puts
// it there.
func (s *Server) takes(ctx context.Context, cell cells.CellID, tenant cells.TenantID) error {
	r, err := s.store.Room(ctx, cell, tenant)
	if err != nil {
		return err
	}
	r.Tenant.Load, r.Holds.Load = s.members.load(cell, tenant)
	return r.Refuse()
}

// takers are the cells that a tenant may be given to whose cell is not named; nil is
// every one. They have a process that serves and are not at the limit of their load;
// the store looks at the rest.
func (s *Server) takers(tenant cells.TenantID) []cells.CellID {
	out := s.serving()
	for _, c := range s.fleet.list() {
		if c.LoadMax == nil {
			continue
		}
		if out == nil {
			return nil // nobody reports loads here
		}
		if s.overloaded(&c, tenant) != nil {
			out = slices.DeleteFunc(slices.Clone(out), func(id cells.CellID) bool { return id == c.ID })
		}
	}
	return out
}

// overloaded says that the cell's load does not take the tenant; nil if it does.
func (s *Server) overloaded(c *api.Cell, tenant cells.TenantID) error {
	r := Room{Cell: cells.CellView{Cell: c.ID, Limits: cells.Limits{Load: c.LoadMax}}, State: api.CellServing}
	r.Tenant.Load, r.Holds.Load = s.members.load(c.ID, tenant)
	return r.Refuse()
}

// load sums up the requests a second that live processes report: of the tenant, and of
// all others in the cell.
func (m *members) load(cell cells.CellID, tenant cells.TenantID) (its, others float64) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, st := range m.live {
		if st.lapsed(now, m) {
			continue
		}
		for _, l := range st.hb.Busiest {
			switch {
			case !(l.PerSecond > 0): // NaN neither
			case l.Tenant == tenant:
				its += l.PerSecond
			case st.hb.Cell == cell:
				others += l.PerSecond
			}
		}
	}
	return its, others
}
