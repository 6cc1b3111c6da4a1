// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/member"
)

// tenancyRows is what agents offer beside [Agents] in cells that are deployments.
type tenancyRows interface {
	Tenancy(ctx context.Context, o member.TenancyOrder) error
}

// deployed says why a move that is asked for is not made between deployments that are
// cells: in a pinned directory none is. is is false for a move that is about none.
func (s *Server) deployed(ctx context.Context, tenant cells.TenantID, from, to cells.CellID, undo bool) (is bool, err error) {
	if s.cfg.Deployments == nil {
		return false, nil
	}
	v, err := s.cfg.Deployments.Read(ctx)
	if err != nil {
		return false, err
	}
	if len(v.Cells) == 0 {
		return false, nil
	}
	p, err := s.cfg.Deployments.Placement(ctx, tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return false, err
	}
	refuse := func(code cells.Code, format string, args ...any) error {
		return &cells.Answer{Code: code, Tenant: tenant, Cell: to, Detail: fmt.Sprintf(format, args...)}
	}
	target := v.Cell(to)
	switch {
	case p.Cell == "" && target == nil && v.Cell(from) == nil:
		return false, nil
	case v.Kind != deploy.Movable:
		return true, pinned()
	case p.Cell == "":
		return true, refuse(cells.CodeConflict, "the tenant is placed in no deployment; place it first (cell place)")
	case target == nil:
		return true, refuse(cells.CodeConflict, "cell %s is no deployment of this directory (cell prepare)", to)
	case from != "" && p.Cell != from:
		return true, refuse(cells.CodeConflict, "the tenant's route is in cell %s, and it is placed in deployment %s; nothing is moved until they agree", from, p.Cell)
	case p.MovingTo == to || p.Cell == to:
		return true, nil // it has its place
	case target.State != deploy.Serving:
		return true, refuse(cells.CodeCellClosed, "cell %s is %s", to, target.State)
	}
	if err := deploy.Room(target, 1); err != nil && !undo {
		return true, refuse(cells.CodeCellClosed, "%v", err)
	}
	return true, nil
}

// reserve keeps the tenant's place in the target of a move between deployments, before
// anything of the move is begun: once its route is decided nothing may refuse it.
func (e *executor) reserve(ctx context.Context, m *api.Move) error {
	is, err := e.s.deployed(ctx, m.Tenant, m.From, m.To, m.Undoes != "")
	if err != nil || !is {
		return err
	}
	rows, ok := e.agents.(tenancyRows)
	if !ok {
		return &cells.Answer{Code: cells.CodeConflict, Tenant: m.Tenant, Detail: "the cells' agents keep no tenancy rows"}
	}
	for _, cell := range []cells.CellID{m.From, m.To} {
		if err := rows.Tenancy(ctx, member.TenancyOrder{Cell: cell, Tenant: m.Tenant, Do: member.TenancyCheck}); err != nil {
			return fmt.Errorf("the tenancy rows of cell %s: %w", cell, err)
		}
	}
	now := time.Now().UTC()
	err = e.s.cfg.Deployments.Reserve(ctx, deploy.Repoint{Tenant: m.Tenant, From: m.From, To: m.To, Move: m.ID, At: now, Undo: m.Undoes != ""}, e.placing("placement.reserve", m.Actor, now))
	if errors.Is(err, deploy.ErrClosed) {
		return &cells.Answer{Code: cells.CodeCellClosed, Tenant: m.Tenant, Cell: m.To, Detail: err.Error(), Err: err}
	}
	return err
}

func (e *executor) placing(action, actor string, at time.Time) api.AuditEntry {
	return api.AuditEntry{At: at, Peer: "directory/" + e.s.cfg.Name, Actor: actor, Action: action}
}

// release gives the place up of a move that was not made.
func (e *executor) release(ctx context.Context, tenant cells.TenantID, id cells.MoveID) error {
	if e.s.cfg.Deployments == nil {
		return nil
	}
	now := time.Now().UTC()
	return e.s.cfg.Deployments.Release(ctx, tenant, id, e.placing("placement.release", "", now))
}

// placedFences wraps what opens fences: the placement follows what the route has decided, and
// the cell holds the tenant, before it serves it. All of it is repeated with the order.
type placedFences struct {
	cells.Fencer
	e *executor
}

// Open implements [cells.Fencer].
func (p placedFences) Open(ctx context.Context, o cells.FenceOrder) error {
	if err := p.e.follow(ctx, o); err != nil {
		return err
	}
	return p.Fencer.Open(ctx, o)
}

func (e *executor) follow(ctx context.Context, o cells.FenceOrder) error {
	if o.Move == "" {
		return nil // a claim: nothing has moved
	}
	store := e.s.cfg.Deployments
	p, err := store.Placement(ctx, o.Tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the placement of tenant %s: %w", o.Tenant, err)
	}
	switch {
	case p.Cell == o.Cell && p.Move != o.Move:
		return e.release(ctx, o.Tenant, o.Move) // it was not made
	case p.Cell != o.Cell && p.Epoch >= o.Epoch:
		return fmt.Errorf("%w: tenant %s is placed in cell %s at epoch %d", cells.ErrStaleOrder, o.Tenant, p.Cell, p.Epoch)
	case p.Cell != o.Cell:
		now := time.Now().UTC()
		r := deploy.Repoint{Tenant: o.Tenant, From: p.Cell, To: o.Cell, Epoch: o.Epoch, Move: o.Move, At: now}
		if _, err := store.Repoint(ctx, r, e.placing("placement.repoint", "", now)); err != nil {
			return fmt.Errorf("the placement of tenant %s: %w", o.Tenant, err)
		}
	}
	return e.tenancy(ctx, member.TenancyOrder{Cell: o.Cell, Tenant: o.Tenant, Do: member.TenancyHold, Epoch: o.Epoch})
}

func (e *executor) tenancy(ctx context.Context, o member.TenancyOrder) error {
	rows, ok := e.agents.(tenancyRows)
	if !ok {
		return fmt.Errorf("%w: the cells' agents keep no tenancy rows", cells.ErrInvalid)
	}
	if err := rows.Tenancy(ctx, o); err != nil {
		return fmt.Errorf("%s of tenant %s in cell %s: %w", o.Do, o.Tenant, o.Cell, err)
	}
	return nil
}

// unhold has a cell let a tenant go that is placed elsewhere. Tenants of no deployment
// have no row.
func (e *executor) unhold(ctx context.Context, tenant cells.TenantID, cell cells.CellID) error {
	if e.s.cfg.Deployments == nil {
		return nil
	}
	// Before the placement: what is ordered by an old one must not meet a newer fence.
	row, err := e.s.table.Get(ctx, tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return err
	}
	p, err := e.s.cfg.Deployments.Placement(ctx, tenant)
	if errors.Is(err, cells.ErrNotFound) || err == nil && p.Cell == cell {
		return nil
	}
	if err != nil {
		return err
	}
	err = e.tenancy(ctx, member.TenancyOrder{Cell: cell, Tenant: tenant, Do: member.TenancyUnhold, Epoch: row.Epoch})
	if errors.Is(err, cells.ErrConflict) {
		// Its fence is not closed: what this cell has lost to is older than it knows.
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return err
}

// unholdFor bounds the first try, which a move's end waits for.
const unholdFor = 2 * time.Second

// settlePlacement ends a move's part in the placements: the source lets the tenant go,
// or the place in the target is given up. A source that cannot be reached is asked again
// when its rows are removed, and while the move can be undone.
func (e *executor) settlePlacement(ctx context.Context, m *api.Move, state api.MoveState) error {
	if e.s.cfg.Deployments == nil {
		return nil
	}
	if state != api.MoveDone {
		return e.release(ctx, m.Tenant, m.ID)
	}
	first, cancel := context.WithTimeout(ctx, unholdFor)
	defer cancel()
	if err := e.unhold(first, m.Tenant, m.From); err != nil && ctx.Err() == nil {
		e.s.log.Warn("the cell that a tenant has left holds it still; it is asked again", "move", m.ID, "tenant", m.Tenant, "cell", m.From, "err", err)
	}
	return nil
}

// emptied wraps what removes rows: whoever has lost a tenant does not hold it either.
type emptied struct {
	Agents
	e *executor
}

// Discard implements [cells.DataMover].
func (d emptied) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	if err := d.Agents.Discard(ctx, tenant, r, progress); err != nil {
		return err
	}
	return d.e.unhold(ctx, tenant, r.Cell)
}

// mover is what carries out moves of rows, with what the agents offer beside it.
func (e *executor) mover() cells.DataMover {
	if e.s.cfg.Deployments == nil {
		return e.agents
	}
	m := emptied{e.agents, e}
	back, returns := e.agents.(cells.Returner)
	prover, proves := e.agents.(cells.Prover)
	switch {
	case returns && proves:
		return struct {
			emptied
			cells.Returner
			cells.Prover
		}{m, back, prover}
	case returns:
		return struct {
			emptied
			cells.Returner
		}{m, back}
	case proves:
		return struct {
			emptied
			cells.Prover
		}{m, prover}
	}
	return m
}
