// SPDX-License-Identifier: Apache-2.0

// Package rules decides what an order does to a fence row and whether a row
// admits a transaction. It is pure: stores read the row, under their lock, call
// it, and write what it returns. A tenant without a row is [Absent].
package rules

import (
	"fmt"
	"math"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Absent is what a missing row stands for: open at epoch 0, which is the epoch
// of tenants that the default cell serves without a route.
func Absent(t cells.TenantID) guard.Fence { return guard.Fence{Tenant: t, Open: true} }

// Check validates an order's fields. The error wraps [cells.ErrInvalid].
func Check(own cells.CellID, cell cells.CellID, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	if move != "" {
		if err := move.Validate(); err != nil {
			return err
		}
	}
	if epoch > math.MaxInt64 {
		return fmt.Errorf("%w: epoch %d is too large to be stored", cells.ErrInvalid, epoch)
	}
	if own != "" && cell != "" && own != cell {
		return fmt.Errorf("%w: order for cell %s came to cell %s", cells.ErrInvalid, cell, own)
	}
	return nil
}

// Open returns the row after an order to open. change is false when the order
// was carried out before. The error wraps [cells.ErrStaleOrder] or [cells.ErrInvalid].
func Open(row guard.Fence, o cells.FenceOrder) (next guard.Fence, change bool, err error) {
	if o.Floor > o.Epoch {
		return row, false, fmt.Errorf("%w: floor %d above epoch %d", cells.ErrInvalid, o.Floor, o.Epoch)
	}
	switch {
	case o.Epoch == row.Epoch && row.Open:
		return row, false, nil
	case o.Epoch <= row.Epoch:
		return row, false, stale("open", o, row)
	}
	next = row
	next.Epoch, next.Floor, next.Open, next.Move = o.Epoch, o.Epoch, true, o.Move
	if row.Open && row.Epoch >= o.Floor {
		next.Floor = max(row.Floor, o.Floor)
	}
	return next, true, nil
}

// Close returns the row after an order to close. change is false when the order
// was carried out before. The error wraps [cells.ErrStaleOrder].
func Close(row guard.Fence, o cells.FenceOrder) (next guard.Fence, change bool, err error) {
	switch {
	case o.Epoch == row.Epoch && !row.Open && row.Move == o.Move:
		return row, false, nil
	case o.Epoch <= row.Epoch:
		return row, false, stale("close", o, row)
	}
	next = row
	next.Epoch, next.Floor, next.Open, next.Move = o.Epoch, o.Epoch, false, o.Move
	return next, true, nil
}

// Admit reports whether the row admits a write at epoch. The error wraps
// [cells.ErrFenced].
func Admit(row guard.Fence, epoch cells.Epoch) error {
	if row.Open && row.Floor <= epoch && epoch <= row.Epoch {
		return nil
	}
	return fmt.Errorf("%w: tenant %s at epoch %d; the fence is %s", cells.ErrFenced, row.Tenant, epoch, describe(row))
}

// AdmitClosed reports whether rows may be imported or removed: the fence is
// closed at exactly epoch by move (any move if anyMove). The error wraps
// [cells.ErrStaleOrder].
func AdmitClosed(row guard.Fence, epoch cells.Epoch, move cells.MoveID, anyMove bool) error {
	if !row.Open && row.Epoch == epoch && (anyMove || row.Move == move) {
		return nil
	}
	return fmt.Errorf("%w: tenant %s, wanted closed at %d by move %q; the fence is %s", cells.ErrStaleOrder, row.Tenant, epoch, move, describe(row))
}

// Barrier is a tenant's relay row: whether publication is paused, and the last
// order that said so.
type Barrier struct {
	Paused bool
	Epoch  cells.Epoch
	Move   cells.MoveID
}

// Pause returns the relay row after an order to pause, given the fence. The
// error wraps [cells.ErrStaleOrder] when a newer order was carried out: the
// fence has passed the epoch, or events were started again at it.
func Pause(b Barrier, row guard.Fence, o cells.BarrierOrder) (Barrier, error) {
	switch {
	case o.Epoch < row.Epoch, o.Epoch < b.Epoch,
		row.Open && row.Epoch > 0 && o.Epoch == row.Epoch,
		!b.Paused && b.Epoch > 0 && o.Epoch == b.Epoch:
		return b, staleBarrier("pause", b, row, o)
	}
	return Barrier{Paused: true, Epoch: o.Epoch, Move: o.Move}, nil
}

// Start returns the relay row after an order to start. The error wraps
// [cells.ErrStaleOrder] when a newer order was carried out.
func Start(b Barrier, row guard.Fence, o cells.BarrierOrder) (Barrier, error) {
	if o.Epoch < row.Epoch || o.Epoch < b.Epoch {
		return b, staleBarrier("start", b, row, o)
	}
	return Barrier{Epoch: o.Epoch, Move: o.Move}, nil
}

func stale(verb string, o cells.FenceOrder, row guard.Fence) error {
	return fmt.Errorf("%w: %s tenant %s at %d (move %q); the fence is %s", cells.ErrStaleOrder, verb, row.Tenant, o.Epoch, o.Move, describe(row))
}

func staleBarrier(verb string, b Barrier, row guard.Fence, o cells.BarrierOrder) error {
	return fmt.Errorf("%w: %s events of tenant %s at %d; the last order was at %d (paused %t), the fence is %s",
		cells.ErrStaleOrder, verb, row.Tenant, o.Epoch, b.Epoch, b.Paused, describe(row))
}

func describe(row guard.Fence) string {
	if row.Open {
		return fmt.Sprintf("open from %d to %d", row.Floor, row.Epoch)
	}
	return fmt.Sprintf("closed at %d by move %q", row.Epoch, row.Move)
}

// Contiguous checks that events go on behind published without a gap. The error
// wraps [cells.ErrInvalid].
func Contiguous(published cells.EventSeq, events []guard.Event) error {
	for i, e := range events {
		if want := published + 1 + cells.EventSeq(i); e.Seq != want {
			return fmt.Errorf("%w: the outbox of tenant %s has event %d where %d should be", cells.ErrInvalid, e.Tenant, e.Seq, want)
		}
	}
	return nil
}
