// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// GormFencer is a [cells.Fencer] for a [cells.MoveController] that runs beside the
// service's databases: Keeper returns the guard of a cell, which the fence's orders
// for that cell are given to. Where members carry the orders out (package member),
// it is not needed.
type GormFencer struct {
	// Keeper returns the guard of the cell's database. Its error is returned as it is.
	Keeper func(cell cells.CellID) (guard.Keeper, error)
}

// Close implements [cells.Fencer].
func (f GormFencer) Close(ctx context.Context, o cells.FenceOrder) error {
	k, err := f.Keeper(o.Cell)
	if err != nil {
		return err
	}
	return k.CloseFence(ctx, o)
}

// Open implements [cells.Fencer].
func (f GormFencer) Open(ctx context.Context, o cells.FenceOrder) error {
	k, err := f.Keeper(o.Cell)
	if err != nil {
		return err
	}
	return k.OpenFence(ctx, o)
}

// OutboxEventBarrier is a [cells.EventBarrier] over the outboxes of the same guards.
type OutboxEventBarrier struct {
	// Keeper is as in [GormFencer].
	Keeper func(cell cells.CellID) (guard.Keeper, error)
}

// Pause implements [cells.EventBarrier].
func (b OutboxEventBarrier) Pause(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	k, err := b.Keeper(o.Cell)
	if err != nil {
		return 0, err
	}
	return k.PauseEvents(ctx, o)
}

// Start implements [cells.EventBarrier].
func (b OutboxEventBarrier) Start(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	k, err := b.Keeper(o.Cell)
	if err != nil {
		return err
	}
	return k.StartEvents(ctx, o, mark)
}

var (
	_ cells.Fencer       = GormFencer{}
	_ cells.EventBarrier = OutboxEventBarrier{}
)
