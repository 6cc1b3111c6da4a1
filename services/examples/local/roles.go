// SPDX-License-Identifier: Apache-2.0

package local

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// roles carries out the steps of moves by asking the cell that an order names. In a
// fleet of processes it is member.AgentClient.
type roles struct{ f *Fleet }

var (
	_ cells.Fencer       = roles{}
	_ cells.EventBarrier = roles{}
	_ cells.Drainer      = roles{}
	_ cells.DataMover    = roles{}
)

func (r roles) at(id cells.CellID) (*Cell, error) {
	if c := r.f.cells[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("%w: there is no cell %s", cells.ErrInvalid, id)
}

// sides returns the source and the target of a move.
func (r roles) sides(m cells.MoveRef) (source, target *Cell, err error) {
	source, serr := r.at(m.Source)
	target, terr := r.at(m.Target)
	return source, target, errors.Join(serr, terr)
}

// Close implements [cells.Fencer].
func (r roles) Close(ctx context.Context, o cells.FenceOrder) error {
	c, err := r.at(o.Cell)
	if err != nil {
		return err
	}
	return c.Guard.CloseFence(ctx, o)
}

// Open implements [cells.Fencer].
func (r roles) Open(ctx context.Context, o cells.FenceOrder) error {
	c, err := r.at(o.Cell)
	if err != nil {
		return err
	}
	return c.Guard.OpenFence(ctx, o)
}

// Pause implements [cells.EventBarrier].
func (r roles) Pause(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	c, err := r.at(o.Cell)
	if err != nil {
		return 0, err
	}
	return c.Guard.PauseEvents(ctx, o)
}

// Start implements [cells.EventBarrier].
func (r roles) Start(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	c, err := r.at(o.Cell)
	if err != nil {
		return err
	}
	return c.Guard.StartEvents(ctx, o, mark)
}

// Drain implements [cells.Drainer].
func (r roles) Drain(ctx context.Context, route cells.TenantRoute) error {
	c, err := r.at(route.CellID)
	if err != nil {
		return err
	}
	return c.Gates.Drain(ctx, route)
}

// Preflight implements [cells.DataMover].
func (r roles) Preflight(ctx context.Context, m cells.MoveRef) (cells.Preflight, error) {
	source, target, err := r.sides(m)
	if err != nil {
		return cells.Preflight{}, err
	}
	src, serr := source.mover.Survey(ctx, m.Tenant)
	dst, derr := target.mover.Survey(ctx, m.Tenant)
	if err := errors.Join(serr, derr); err != nil {
		return cells.Preflight{}, err
	}
	return transfer.Compare(m, src, dst), nil
}

// Prepare implements [cells.DataMover].
func (r roles) Prepare(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (cells.Prediction, error) {
	source, target, err := r.sides(m)
	if err != nil {
		return cells.Prediction{}, err
	}
	return target.mover.Prepare(ctx, m, source.mover.Source(), progress)
}

// Finish implements [cells.DataMover].
func (r roles) Finish(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (string, error) {
	source, target, err := r.sides(m)
	if err != nil {
		return "", err
	}
	return target.mover.Finish(ctx, m, source.mover.Source(), progress)
}

// Discard implements [cells.DataMover].
func (r roles) Discard(ctx context.Context, tenant cells.TenantID, res cells.Residue, progress func(cells.Progress)) error {
	c, err := r.at(res.Cell)
	if err != nil {
		return err
	}
	return c.mover.Discard(ctx, tenant, res, progress)
}
