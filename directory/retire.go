// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/member"
)

// lister is what agents may offer beside [Agents]: which tenants a cell's own store
// knows of.
type lister interface {
	Holdings(ctx context.Context, cell cells.CellID, limit int) (member.Holdings, error)
}

// askTime bounds how long a cell may take to say what it has.
const askTime = 20 * time.Second

// postRetire retires a drained cell in which nobody is left. What is left is looked
// for while the cell is closed; the decision is made only if neither the cell nor its
// spec has changed since.
func (s *Server) postRetire(w http.ResponseWriter, r *http.Request) (int, any, error) {
	cell, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.RetireRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	rec, err := s.provisioned(ctx, cell)
	if err != nil {
		return 0, nil, err
	}
	if rec.Spec.Desired == provision.DesiredRetired {
		return s.show(ctx, rec)
	}
	seen, err := s.retirable(ctx, &rec)
	if err != nil {
		return 0, nil, err
	}
	left, err := s.left(ctx, cell)
	if err != nil {
		return 0, nil, err
	}
	if left.Total > 0 {
		return 0, nil, &cells.Answer{Code: cells.CodeConflict, Cell: cell, Detail: fmt.Sprintf("cell %s is not retired: %s", cell, left.Tell())}
	}
	forced := left.Unasked != ""
	if forced && !req.Force {
		return 0, nil, &cells.Answer{Code: cells.CodeCellUnreachable, Cell: cell,
			Detail: fmt.Sprintf("cell %s is not retired: nobody could say whether its store is empty: %s; start a process of it, or retire it with force", cell, left.Unasked)}
	}
	e := callerOf(ctx).as(req.Actor).audit("cell.retire")
	e.Cell, e.Detail = cell, detail(map[string]any{"order": req, "forced": forced, "unasked": left.Unasked})
	rec, err = s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error {
		switch {
		case !ch.Exists || ch.Cell == nil || ch.Record.Spec.Generation != rec.Spec.Generation || ch.Cell.Revision != seen.Revision:
			return conflict("cell %s was changed meanwhile; look and ask again", cell)
		case ch.Cell.Tenants > 0:
			return conflict("cell %s counts %d tenants", cell, ch.Cell.Tenants)
		case ch.Moves > 0:
			return conflict("cell %s has a part in %d moves that are not over", cell, ch.Moves)
		}
		ch.Record.Spec.Desired, ch.Record.Spec.KeepStore = provision.DesiredRetired, forced
		ch.Record.Actor, ch.Record.Reason, ch.Record.UpdatedAt = req.Actor, req.Reason, e.At
		if forced {
			ch.Record.ForcedBy = req.Actor
		}
		ch.Cell.State = api.CellRetiring
		return nil
	}, &e)
	if err != nil {
		return 0, nil, err
	}
	s.log.Info("cell is being retired", "cell", cell, "actor", req.Actor, "forced", forced)
	s.provisionChanged(ctx)
	return s.show(ctx, rec)
}

// retirable returns the cell as it is registered if it is one that may be retired,
// tenants apart.
func (s *Server) retirable(ctx context.Context, rec *provision.Record) (api.Cell, error) {
	cell := rec.Spec.Cell
	if rec.Spec.Desired != provision.DesiredDrained {
		return api.Cell{}, conflict("cell %s is to be %s; drain it first", cell, rec.Spec.Desired)
	}
	list, _, err := s.store.Cells(ctx)
	if err != nil {
		return api.Cell{}, err
	}
	for i := range list {
		switch c := &list[i]; {
		case c.ID != cell:
		case c.Default:
			return api.Cell{}, conflict("cell %s is the default cell: tenants without a route are served there", cell)
		case c.Open():
			return api.Cell{}, conflict("cell %s takes tenants; drain it again", cell)
		default:
			return *c, nil
		}
	}
	return api.Cell{}, unknownCell(cell)
}

// leftBook collects what is left.
type leftBook struct{ api.CellLeft }

func (b *leftBook) note(list *[]api.LeftTenant, t cells.TenantID, format string, args ...any) {
	b.Total++
	if len(*list) < api.MaxLeft {
		*list = append(*list, api.LeftTenant{Tenant: t, Why: fmt.Sprintf(format, args...)})
	}
}

// left looks for everything that keeps the cell: routes, residues and undo windows,
// moves, claims, and what the cell's own store says.
func (s *Server) left(ctx context.Context, cell cells.CellID) (api.CellLeft, error) {
	b := &leftBook{api.CellLeft{Directory: []api.LeftTenant{}, Store: []api.LeftTenant{}}}
	if err := s.leftRoutes(ctx, cell, b); err != nil {
		return b.CellLeft, err
	}
	if err := s.leftRecords(ctx, cell, b); err != nil {
		return b.CellLeft, err
	}
	s.leftStore(ctx, cell, b)
	return b.CellLeft, nil
}

func (s *Server) leftRoutes(ctx context.Context, cell cells.CellID, b *leftBook) error {
	opts := cells.ListOptions{Limit: 10000}
	for {
		page, err := s.table.List(ctx, opts)
		if err != nil {
			return err
		}
		for i := range page.Routes {
			switch r := &page.Routes[i]; {
			case r.CellID == cell && r.State != cells.StateDeleted:
				b.note(&b.Directory, r.TenantID, "is there (%s)", r.State)
			case r.MoveID != "" && (r.SourceCell == cell || r.TargetCell == cell):
				b.note(&b.Directory, r.TenantID, "is moving from %s to %s", r.SourceCell, r.TargetCell)
			default:
				for _, e := range r.Residue {
					if e.Cell == cell && e.Held() {
						b.note(&b.Directory, r.TenantID, "can go back there until %s", e.Until.UTC().Format(time.RFC3339))
					} else if e.Cell == cell {
						b.note(&b.Directory, r.TenantID, "has rows there that are not removed yet")
					}
				}
			}
		}
		if page.Next == "" {
			return nil
		}
		opts.After = page.Next
	}
}

func (s *Server) leftRecords(ctx context.Context, cell cells.CellID, b *leftBook) error {
	const page = 500
	for after := int64(0); ; {
		list, err := s.store.Moves(ctx, MoveFilter{Unfinished: true, After: after, Limit: page})
		if err != nil {
			return err
		}
		for i := range list {
			if m := &list[i]; (m.From == cell || m.To == cell) && m.State.Active() {
				b.note(&b.Directory, m.Tenant, "has move %s from %s to %s (%s)", m.ID, m.From, m.To, m.State)
			}
		}
		if len(list) < page {
			break
		}
		after = list[len(list)-1].Seq
	}
	for after := cells.TenantID(""); ; {
		list, err := s.store.Reserved(ctx, after, page)
		if err != nil {
			return err
		}
		for _, row := range list {
			if row.Cell == cell {
				b.note(&b.Directory, row.Tenant, "is being placed there")
			}
		}
		if len(list) < page {
			return nil
		}
		after = list[len(list)-1].Tenant
	}
}

// leftStore asks the cell's own processes.
func (s *Server) leftStore(ctx context.Context, cell cells.CellID, b *leftBook) {
	if s.exec.agents == nil || s.cfg.Stateless {
		return // cells keep nothing
	}
	l, ok := s.exec.agents.(lister)
	if !ok {
		b.Unasked = "this directory's agents cannot tell"
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	h, err := l.Holdings(ctx, cell, member.MaxHoldings)
	if err != nil {
		b.Unasked = clip(err.Error(), 1024)
		return
	}
	for _, t := range h.Open {
		b.note(&b.Store, t, "has an open fence in its store")
	}
	for _, r := range h.Rows {
		b.note(&b.Store, r.Tenant, "has rows in its table %s", r.Table)
	}
}
