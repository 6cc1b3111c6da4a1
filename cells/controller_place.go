// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	"github.com/cenkalti/backoff/v5"
)

// maxRounds bounds how often an operation decides anew because others changed
// the row. Each round means that somebody else got something done.
const maxRounds = 100

// Assign places a tenant for the first time. It never moves one: when the tenant
// is in another cell already, also because another Assign was faster, it returns
// an [ElsewhereError] (which wraps [ErrElsewhere]) with the winner. Assigning the
// cell that holds the tenant succeeds.
func (c *MoveController) Assign(ctx context.Context, tenant TenantID, cell CellID, actor string) error {
	_, err := c.Place(ctx, Claim{Tenant: tenant, Cell: cell, Actor: actor})
	return err
}

// Place is [MoveController.Assign] with an operation id: the same claim again
// returns the tenant's row as it is, whatever the first answer's outcome was for
// the caller. After a deletion the same operation is refused with
// [ErrNotApplicable]: it has had its answer.
//
// The tenant is placed once its row is written. An error of the cell's fence
// after that comes with the row; the cell's members open the fence when they see
// the row, and so does the same claim again.
func (c *MoveController) Place(ctx context.Context, cl Claim) (TenantRoute, error) {
	ev := Event{Kind: EventClaim, Tenant: cl.Tenant, Cell: cl.Cell, OperationID: cl.OperationID, Actor: cl.Actor}
	if !cl.New || cl.Cell == c.fallback {
		ev.Fallback = c.fallback
	}
	for range maxRounds {
		row, err := c.read(ctx, cl.Tenant, briefly)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return row, err
		}
		if row.State == StateDeleting {
			if err := c.finishDelete(ctx, row); err != nil && !errors.Is(err, errChanged) {
				return row, err
			}
			continue
		}
		if i := residueOf(row, cl.Cell); row.State == StateDeleted && i >= 0 {
			if err := c.discard(ctx, row, row.Residue[i]); err != nil && !errors.Is(err, errChanged) {
				return row, err
			}
			continue
		}
		next, wrote, err := c.write(ctx, row, ev, briefly)
		switch {
		case errors.Is(err, errChanged):
			// Decide again from the row. If the lost write was ours and the tenant is
			// elsewhere by now, the answer is where it is.
			continue
		case err != nil:
			return row, err
		}
		if wrote {
			if err := c.done(ctx, StepEvent{Tenant: cl.Tenant, Step: StepClaim, Route: next.Clone()}); err != nil {
				return next, err
			}
		}
		return next, c.openActive(ctx, next)
	}
	return TenantRoute{}, fmt.Errorf("%w: tenant %s", ErrConflict, cl.Tenant)
}

// openActive orders the events and the fence of a serving cell open. A fence that
// is newer than the row is right: the row has changed since.
func (c *MoveController) openActive(ctx context.Context, row TenantRoute) error {
	if row.State != StateActive || row.MoveID != "" {
		return nil
	}
	_, err := retry(ctx, briefly, func() (struct{}, error) {
		for _, e := range Effects(row) {
			var err error
			switch {
			case e.Kind == EffectStartEvents && c.barrier != nil:
				err = c.barrier.Start(ctx, e.Barrier, e.Mark)
			case e.Kind == EffectOpenFence && c.fencer != nil:
				err = c.fencer.Open(ctx, e.Fence)
			}
			if errors.Is(err, ErrStaleOrder) {
				return struct{}{}, backoff.Permanent(err)
			}
			if err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	if errors.Is(err, ErrStaleOrder) {
		if now, rerr := c.read(ctx, row.TenantID, briefly); rerr == nil && now.Revision != row.Revision {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("tenant %s is placed in cell %s, its fence is not open yet: %w", row.TenantID, row.CellID, err)
	}
	return nil
}

// Delete removes a tenant and leaves a tombstone that keeps its epoch. The fence
// of its cell is closed; with a [DataMover] the rows that the cell still holds
// are noted as residue, which [MoveController.Reclaim] removes. It is refused with
// [ErrOtherMove] while a move is in progress and with [ErrNotFound] without a row;
// deleting a deleted tenant succeeds.
func (c *MoveController) Delete(ctx context.Context, tenant TenantID, actor string) error {
	first := true
	var epoch Epoch
	for range maxRounds {
		row, err := c.read(ctx, tenant, briefly)
		if err != nil {
			return err
		}
		switch {
		case row.State == StateDeleted && (first || row.Epoch == epoch+1):
			return nil
		case row.State == StateDeleting && (first || row.Epoch == epoch+1):
			err := c.finishDelete(ctx, row)
			if errors.Is(err, errChanged) {
				continue
			}
			return err
		case first:
			epoch, first = row.Epoch, false
		case row.Epoch != epoch:
			// Whoever moved or re-created it meanwhile did not know; the caller decides.
			return fmt.Errorf("%w: tenant %s went from epoch %d to %d", ErrConflict, tenant, epoch, row.Epoch)
		}
		next, wrote, err := c.write(ctx, row, Event{Kind: EventDelete, Epoch: epoch, Move: newMoveID(strings.TrimSuffix(deletionPrefix, "-")),
			OwnsData: c.mover != nil, Actor: actor}, briefly)
		if errors.Is(err, errChanged) {
			continue
		}
		if err != nil {
			return err
		}
		if wrote {
			if err := c.done(ctx, StepEvent{Tenant: tenant, Step: StepDelete, Route: next.Clone()}); err != nil {
				return err
			}
		}
		if err := c.finishDelete(ctx, next); !errors.Is(err, errChanged) {
			return err
		}
	}
	return fmt.Errorf("%w: tenant %s", ErrConflict, tenant)
}

// finishDelete performs the effects of DELETING and writes the tombstone.
func (c *MoveController) finishDelete(ctx context.Context, row TenantRoute) error {
	for _, e := range Effects(row) {
		ev := StepEvent{Tenant: row.TenantID, Step: StepFence, Route: row.Clone()}
		order := func() error { return nil }
		switch {
		case e.Kind == EffectCloseFence && c.fencer != nil:
			order = func() error { return c.fencer.Close(ctx, e.Fence) }
		case e.Kind == EffectPauseEvents:
			ev.Step = StepEvents
			if c.barrier != nil {
				// A publication at work must not outlive the tombstone.
				order = func() error { _, err := c.barrier.Pause(ctx, e.Barrier); return err }
			}
		}
		if _, err := retry(ctx, briefly, func() (struct{}, error) { return struct{}{}, order() }); err != nil {
			if now, rerr := c.read(ctx, row.TenantID, briefly); rerr == nil && now.Revision != row.Revision {
				return errChanged
			}
			ev.Err = err
			c.emit(ev)
			return fmt.Errorf("tenant %s is being deleted, to be resumed: %w", row.TenantID, err)
		}
		if err := c.done(ctx, ev); err != nil {
			return err
		}
	}
	next, wrote, err := c.write(ctx, row, Event{Kind: EventDeleted, Epoch: row.Epoch}, briefly)
	if err != nil || !wrote {
		return err
	}
	return c.done(ctx, StepEvent{Tenant: row.TenantID, Step: StepDeleted, Route: next.Clone()})
}

// Reclaim removes the rows that the losers of earlier moves, and a deletion, have
// left behind. It is refused with [ErrOtherMove] during a cut. Entries whose
// removal failed stay; the errors are joined.
func (c *MoveController) Reclaim(ctx context.Context, tenant TenantID) error {
	row, err := c.read(ctx, tenant, briefly)
	if err != nil {
		return err
	}
	_, err = c.reclaim(ctx, row)
	return err
}

func (c *MoveController) reclaim(ctx context.Context, row TenantRoute) (TenantRoute, error) {
	failed := map[Residue]error{}
	for range maxRounds {
		if row.Moving() {
			return row, fmt.Errorf("%w: %s", ErrOtherMove, row.MoveID)
		}
		var errs []error
		var next *Residue
		for _, e := range row.Reclaimable() {
			if err := failed[e]; err != nil {
				errs = append(errs, err)
			} else if next == nil {
				next = &e
			}
		}
		if next == nil {
			return row, errors.Join(errs...)
		}
		switch err := c.discard(ctx, row, *next); {
		case isStop(err):
			return row, err
		case err != nil && !errors.Is(err, errChanged):
			failed[*next] = err
		}
		fresh, err := c.read(ctx, row.TenantID, briefly)
		if err != nil {
			return row, err
		}
		row = fresh
	}
	return row, fmt.Errorf("%w: tenant %s", ErrConflict, row.TenantID)
}

// discard removes one entry's rows and then the entry.
func (c *MoveController) discard(ctx context.Context, row TenantRoute, e Residue) error {
	if c.mover == nil {
		return fmt.Errorf("%w: cell %s may hold rows of tenant %s from move %s; removing them takes a DataMover",
			ErrInvalid, e.Cell, row.TenantID, e.Move)
	}
	ev := StepEvent{Tenant: row.TenantID, Step: StepDiscard, Route: row.Clone(),
		Move: MoveRef{ID: e.Move, Tenant: row.TenantID}}
	err := c.mover.Discard(ctx, row.TenantID, e, func(p Progress) {
		ev := ev
		ev.Progress = &p
		c.emit(ev)
	})
	if err != nil {
		ev.Err = err
		c.emit(ev)
		return fmt.Errorf("%s: cell %s: %w", StepDiscard, e.Cell, err)
	}
	if err := c.done(ctx, ev); err != nil {
		return err
	}
	next, wrote, err := c.write(ctx, row, Event{Kind: EventRemoved, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move}, briefly)
	if err != nil || !wrote {
		return err
	}
	ev.Step, ev.Route = StepRemoved, next.Clone()
	return c.done(ctx, ev)
}

func newMoveID(prefix string) MoveID { return MoveID(prefix + "-" + rand.Text()) }
