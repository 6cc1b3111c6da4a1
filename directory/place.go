// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// placeRounds bounds how often a claim starts over because others changed the
// tenant. Each round means that somebody else got something done.
const placeRounds = 20

// errOvertaken: the route is not at the revision that the reservation was made for.
var errOvertaken = errors.New("the tenant has changed since its place was reserved")

// conditional is the table as a claim sees it: a tenant is created only while its
// route is at the revision that its reservation is for.
type conditional struct {
	cells.RoutingTable
	want cells.Revision
}

func (c conditional) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if next.State == cells.StateActive && old != c.want {
		// ErrClosed makes the controller stop without trying again.
		return cells.TenantRoute{}, fmt.Errorf("%w: %w", cells.ErrClosed, errOvertaken)
	}
	return c.RoutingTable.CompareAndSet(ctx, old, next)
}

// place gives the tenant a cell, or says which one it has.
func (s *Server) place(ctx context.Context, req api.PlacementRequest, who caller) (api.Placement, error) {
	named := req.OperationID != ""
	if !named {
		req.OperationID = "op-" + rand.Text()
	}
	op := Operation{ID: req.OperationID, Kind: OperationPlacement, Tenant: req.Tenant, Cell: req.Cell}
	if named {
		b, err := s.store.Answer(ctx, op)
		if err != nil {
			return api.Placement{}, err
		}
		if b != nil {
			var p api.Placement
			if err := json.Unmarshal(b, &p); err != nil {
				return p, fmt.Errorf("%w: recorded answer of operation %s: %w", cells.ErrInvalid, op.ID, err)
			}
			return p, nil
		}
	}
	for range placeRounds {
		p, again, err := s.placeOnce(ctx, req, op, who)
		if err != nil {
			s.metrics.placements.WithLabelValues("refused").Inc()
			return api.Placement{}, err
		}
		if again {
			if !sleep(ctx, time.Millisecond) {
				return api.Placement{}, fmt.Errorf("%w: %w", cells.ErrUnavailable, context.Cause(ctx))
			}
			continue
		}
		return s.answer(ctx, op, p, named)
	}
	return api.Placement{}, fmt.Errorf("%w: tenant %s changes all the time", cells.ErrConflict, req.Tenant)
}

// answer records the operation's first answer, if the caller can ask for it
// again, and gives the recorded one.
func (s *Server) answer(ctx context.Context, op Operation, p api.Placement, record bool) (api.Placement, error) {
	result := "existing"
	if p.Created {
		result = "created"
	}
	s.metrics.placements.WithLabelValues(result).Inc()
	if !record {
		return p, nil
	}
	b, err := s.store.SaveAnswer(ctx, op, detail(p), time.Now())
	if err != nil {
		// The tenant is placed; only the memory of this answer is missing, and the
		// route itself answers a retry.
		s.log.Warn("answer not recorded", "tenant", p.Tenant, "operation", op.ID, "err", err)
		return p, nil
	}
	return p, json.Unmarshal(b, &p)
}

// placeOnce is one round: it answers, or asks for another round.
func (s *Server) placeOnce(ctx context.Context, req api.PlacementRequest, op Operation, who caller) (p api.Placement, again bool, _ error) {
	row, err := s.table.Get(ctx, req.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return p, false, err
	}
	switch {
	case row.Exists():
		return placement(op, row), false, nil
	case row.State == cells.StateDeleting:
		if _, err := s.exec.controller().Resume(ctx, req.Tenant); err != nil {
			return p, false, &cells.Answer{Code: cells.CodeBackendUnavailable, Tenant: req.Tenant, Err: err,
				Detail: "the tenant is being deleted", RetryAfter: time.Second}
		}
		return p, true, nil
	case row.State == cells.StateDeleted && row.OperationID == op.ID:
		return p, false, &cells.Answer{Code: cells.CodeConflict, Tenant: req.Tenant,
			Detail: "this operation placed the tenant before it was deleted; use another operation id"}
	}
	cell, isNew, err := s.claimCell(ctx, req, row)
	if err != nil {
		return p, false, err
	}
	if c, ok := s.fleet.cell(cell); ok {
		if err := s.overloaded(&c, req.Tenant); err != nil {
			return p, false, err
		}
	}
	e := who.audit("placement.reserve")
	e.Tenant, e.Detail = req.Tenant, detail(map[string]string{"operation": op.ID})
	ledger, joined, err := s.store.Reserve(ctx, Reservation{
		Tenant: req.Tenant, Cell: cell, Operation: op, Actor: who.actor, Live: s.takers(req.Tenant), Seen: row.Revision, At: time.Now()}, e)
	switch {
	case errors.Is(err, cells.ErrConflict):
		return p, true, nil
	case err != nil && cell != "":
		return p, false, unknownOr(cell, err)
	case err != nil:
		return p, false, err
	case joined && ledger.State == PlacementPlaced:
		return p, true, nil // placed since the route was read
	}
	row, err = s.claim(ctx, ledger, isNew)
	switch {
	case err == nil:
		return placement(op, row), false, nil
	case errors.Is(err, errOvertaken):
		return p, true, nil
	}
	return p, false, err
}

func placement(op Operation, row cells.TenantRoute) api.Placement {
	return api.Placement{Tenant: row.TenantID, Cell: row.CellID, Created: row.OperationID == op.ID, OperationID: op.ID, Route: row}
}

// claim makes the route of a reservation, and returns whoever holds the tenant.
func (s *Server) claim(ctx context.Context, l LedgerRow, isNew bool) (cells.TenantRoute, error) {
	ctrl := s.exec.controllerOn(conditional{s.table, l.Revision})
	row, err := ctrl.Place(ctx, cells.Claim{Tenant: l.Tenant, Cell: l.Cell, OperationID: l.OperationID, Actor: l.Actor, New: isNew})
	var elsewhere *cells.ElsewhereError
	switch {
	case err == nil:
		return row, nil
	case errors.As(err, &elsewhere) && elsewhere.Route.State != 0:
		return elsewhere.Route, nil
	case errors.As(err, &elsewhere):
		// The default cell was named meanwhile, and it may hold the tenant.
		return row, errors.Join(s.store.Release(ctx, l.Tenant, l.Revision), fmt.Errorf("%w: %w", errOvertaken, err))
	case row.Exists() && row.Revision > l.Revision:
		s.log.Warn("placed; the fence is opened later", "tenant", l.Tenant, "cell", row.CellID, "err", err)
		return row, nil
	case errors.Is(err, errOvertaken):
		return row, err
	case errors.Is(err, cells.ErrInvalid), errors.Is(err, cells.ErrNotApplicable):
		// Refused for good: nothing was written and nothing will be.
		return row, errors.Join(err, s.store.Release(ctx, l.Tenant, l.Revision))
	}
	return row, err
}

// claimCell says which cell to reserve ("" for any), and whether the tenant is
// known to be nobody's. A tenant without a row may be served by the default cell.
func (s *Server) claimCell(ctx context.Context, req api.PlacementRequest, row cells.TenantRoute) (cell cells.CellID, isNew bool, _ error) {
	def := s.fleet.defaultCell()
	if row.State != 0 || def == "" || req.Cell == def || req.New {
		return req.Cell, true, nil
	}
	held, err := s.exec.holds(ctx, def, req.Tenant)
	switch {
	case err != nil:
		return "", false, &cells.Answer{Code: cells.CodeCellUnreachable, Tenant: req.Tenant, Cell: def, Err: err,
			Detail: fmt.Sprintf("cannot ask default cell %s whether it holds the tenant: %v; if the tenant is new, say so", def, err)}
	case !held:
		return req.Cell, true, nil
	case req.Cell == "":
		return def, false, nil
	}
	return "", false, &cells.Answer{Code: cells.CodeConflict, Tenant: req.Tenant, Cell: def,
		Detail: fmt.Sprintf("default cell %s holds rows of the tenant: place it there and move it", def)}
}

// settle brings the ledger up to a route.
func (s *Server) settle(ctx context.Context, rows ...cells.TenantRoute) error {
	list := make([]Settlement, 0, len(rows))
	for i := range rows {
		r := &rows[i]
		// A tenant that is being deleted keeps its place until it is.
		list = append(list, Settlement{Tenant: r.TenantID, Revision: r.Revision, Exists: r.State != cells.StateDeleted,
			Cell: r.CellID, At: time.Now()})
	}
	return s.store.Settle(ctx, list)
}

// finishReserved makes the routes of reservations whose maker has died. A maker
// that only sleeps loses nothing: the claim is the same.
func (s *Server) finishReserved(ctx context.Context, list []LedgerRow) {
	for _, l := range list {
		if def := s.fleet.defaultCell(); def != "" && def != l.Cell && l.Revision == 0 {
			// Since the reservation was made the default cell may have served the tenant.
			held, err := s.exec.holds(ctx, def, l.Tenant)
			if err == nil && held {
				err = s.store.Release(ctx, l.Tenant, l.Revision)
			}
			if err != nil {
				s.log.Warn("reservation not finished", "tenant", l.Tenant, "cell", l.Cell, "err", err)
			}
			if err != nil || held {
				continue
			}
		}
		row, err := s.claim(ctx, l, true)
		switch {
		case err == nil:
			s.log.Info("reservation finished", "tenant", l.Tenant, "cell", row.CellID)
			if err := s.settle(ctx, row); err != nil {
				s.log.Warn("ledger not settled", "tenant", l.Tenant, "err", err)
			}
		case errors.Is(err, errOvertaken):
			if row, err := s.table.Get(ctx, l.Tenant); err == nil {
				if err := s.settle(ctx, row); err != nil {
					s.log.Warn("ledger not settled", "tenant", l.Tenant, "err", err)
				}
			}
		default:
			s.log.Warn("reservation not finished", "tenant", l.Tenant, "cell", l.Cell, "err", err)
		}
	}
}

// serving returns the cells with a process that serves; nil when there is none
// anywhere, or processes do not report here: then none is better than another.
func (s *Server) serving() []cells.CellID {
	if s.cfg.Channel == nil {
		return nil
	}
	if live := s.members.serving(); len(live) > 0 {
		return live
	}
	return nil
}
