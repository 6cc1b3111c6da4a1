// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Move is [MoveController.Run] without its result.
func (c *MoveController) Move(ctx context.Context, plan MovePlan) error {
	_, err := c.Run(ctx, plan)
	return err
}

// Run moves a tenant and returns when it is served again, by the target or, with
// an error that wraps [ErrRolledBack], by the source. A tenant that is in the
// target already has been moved.
//
// Errors before anything was begun: [ErrNotFound], [ErrOtherMove],
// [ErrNotApplicable] (the tenant is not in FromCell), [ErrBudget],
// [PreflightError]. When ctx ends the move stays where it is and
// [MoveController.Resume] drives it on.
//
// With a [DataMover] the source's rows are removed at the end. If that fails the
// move has succeeded all the same and the row's Residue says what is left.
func (c *MoveController) Run(ctx context.Context, plan MovePlan) (MoveResult, error) {
	if err := plan.validate(); err != nil {
		return MoveResult{}, err
	}
	if plan.MoveID == "" {
		plan.MoveID = newMoveID("mv")
	}
	for range maxRounds {
		row, err := c.current(ctx, plan)
		if err != nil {
			return MoveResult{Route: row}, err
		}
		if row.MoveID == "" && row.State == StateActive && row.CellID == plan.ToCell {
			return MoveResult{Route: row}, nil
		}
		d := c.newDrive(MoveRef{}, row)
		d.force, d.actor = plan.Force, plan.Actor
		err = d.begin(ctx, plan)
		if errors.Is(err, errChanged) && !errors.Is(err, errUnknown) {
			continue
		}
		if err != nil {
			return d.result(), err
		}
		return c.complete(ctx, d)
	}
	return MoveResult{}, fmt.Errorf("%w: tenant %s", ErrConflict, plan.TenantID)
}

// current returns the row to move; a tenant that only the fallback cell serves is
// placed there first.
func (c *MoveController) current(ctx context.Context, plan MovePlan) (TenantRoute, error) {
	row, err := c.read(ctx, plan.TenantID, briefly)
	if !errors.Is(err, ErrNotFound) || c.fallback == "" || plan.FromCell != "" && plan.FromCell != c.fallback {
		return row, err
	}
	row, err = c.Place(ctx, Claim{Tenant: plan.TenantID, Cell: c.fallback, Actor: plan.Actor})
	if errors.Is(err, ErrElsewhere) {
		return c.read(ctx, plan.TenantID, briefly)
	}
	return row, err
}

// begin does what comes before the move exists, and writes it.
func (d *drive) begin(ctx context.Context, plan MovePlan) error {
	c := d.c
	ev := Event{Kind: EventBegin, Move: plan.MoveID, Cell: plan.ToCell, From: plan.FromCell, OwnsData: c.mover != nil,
		UndoWindow: plan.UndoWindow, Undoes: plan.Undoes}
	if err := c.keeps(plan); err != nil {
		return err
	}
	if i := residueOf(d.row, plan.ToCell); i >= 0 && d.row.MoveID == "" && d.row.State == StateActive {
		if plan.FromCell != "" && plan.FromCell != d.row.CellID {
			return notApplicable("the tenant is in cell %s, not %s", d.row.CellID, plan.FromCell)
		}
		switch e := d.row.Residue[i]; {
		case plan.Undoes != "": // whether it can be taken back is for Next to say
		case e.Held():
			if _, err := c.closeWindow(ctx, d.row, e, fmt.Sprintf("move %s to cell %s", plan.MoveID, plan.ToCell), plan.Actor); err != nil {
				return err
			}
			return errChanged
		default:
			if err := c.discard(ctx, d.row, e); err != nil {
				return err
			}
			return errChanged
		}
	}
	after, _, err := Next(d.row, ev)
	if err != nil {
		return err
	}
	m, _ := after.Move()
	if d.row.MoveID == "" {
		if err := c.preflight(ctx, m, plan.Force); err != nil {
			return err
		}
		d.ref = m
		if err := d.effect(ctx, StepPreflight); err != nil {
			return err
		}
	}
	d.ref = m
	if plan.Force {
		c.authorize(ctx, m, plan.Actor)
	}
	_, err = d.write(ctx, StepBegin, ev, briefly)
	if err != nil && !isStop(err) && !errors.Is(err, errUnknown) {
		if plan.Force && d.row.MoveID == "" {
			c.release(ctx, m)
		}
		d.ref = MoveRef{}
	}
	return err
}

// keeps refuses an undo window that nobody can keep open.
func (c *MoveController) keeps(plan MovePlan) error {
	if _, ok := c.mover.(Returner); !ok && plan.UndoWindow > 0 {
		return fmt.Errorf("%w: an undo window of %v takes a DataMover that keeps a way back", ErrInvalid, plan.UndoWindow)
	}
	return nil
}

func (c *MoveController) preflight(ctx context.Context, m MoveRef, force bool) error {
	var p Preflight
	if c.mover != nil {
		var err error
		if p, err = c.mover.Preflight(ctx, m); err != nil {
			return fmt.Errorf("%s: %w", StepPreflight, err)
		}
	}
	if p.Blocked() {
		return &PreflightError{Preflight: p}
	}
	if force {
		return nil
	}
	return c.affordable(ctx, m.Tenant, p.Pause)
}

// complete drives a begun move to its end and reclaims.
func (c *MoveController) complete(ctx context.Context, d *drive) (MoveResult, error) {
	err := d.run(ctx)
	if isStop(err) || d.row.MoveID != "" || ctx.Err() != nil || c.noSweep || c.mover == nil {
		return d.result(), err
	}
	row, rerr := c.reclaim(ctx, d.row)
	if rerr != nil {
		if isStop(rerr) {
			return d.result(), rerr
		}
		c.log.Warn("rows left behind", "tenant", d.ref.Tenant, "move", d.ref.ID, "err", rerr)
	}
	res := d.result()
	res.Route = row
	return res, err
}

// Resume finishes whatever the tenant's row says is unfinished: a move that is
// being prepared goes on under its id, a cut goes on or, past its deadline, is
// rolled back, a decided one is finished, a deletion is finished, left-behind rows
// are removed. Nothing to do is no error. A preparation that does not fit the
// budget is given up, unless the move was forced: that is kept in the budget. A move
// that ends with the source serving gives an error that wraps [ErrRolledBack]. Several
// processes may resume the same tenant at the same time.
func (c *MoveController) Resume(ctx context.Context, tenant TenantID) (MoveResult, error) {
	for range maxRounds {
		row, err := c.read(ctx, tenant, briefly)
		if err != nil {
			return MoveResult{}, err
		}
		if m, ok := row.Move(); ok {
			return c.complete(ctx, c.newDrive(m, row))
		}
		if row.State == StateDeleting {
			if err := c.finishDelete(ctx, row); !errors.Is(err, errChanged) && err != nil {
				return MoveResult{Route: row}, err
			}
			continue
		}
		if err := c.openActive(ctx, row); err != nil {
			return MoveResult{Route: row}, err
		}
		if e, ok := row.Held(); ok && !c.now().Before(e.Until) {
			if _, err := c.closeWindow(ctx, row, e, reasonPassed, ""); err != nil && !errors.Is(err, errChanged) {
				return MoveResult{Route: row}, err
			}
			continue
		}
		row, err = c.reclaim(ctx, row)
		if errors.Is(err, ErrOtherMove) {
			continue
		}
		return MoveResult{Route: row}, err
	}
	return MoveResult{}, fmt.Errorf("%w: tenant %s", ErrConflict, tenant)
}

// Rollback ends the tenant's move with the source serving, and returns when it
// does. It is refused with [ErrNotApplicable] when there is no move or when the move
// is committed: then it only goes forward.
func (c *MoveController) Rollback(ctx context.Context, tenant TenantID, reason string) error {
	if reason == "" {
		reason = "asked for"
	}
	for range maxRounds {
		row, err := c.read(ctx, tenant, briefly)
		if err != nil {
			return err
		}
		m, ok := row.Move()
		if !ok {
			return notApplicable("tenant %s is not moving", tenant)
		}
		d := c.newDrive(m, row)
		err = d.rollback(ctx, reason)
		if errors.Is(err, errChanged) {
			continue
		}
		if err != nil {
			return err
		}
		if _, err = c.complete(ctx, d); errors.Is(err, ErrRolledBack) {
			return nil
		}
		return err
	}
	return fmt.Errorf("%w: tenant %s", ErrConflict, tenant)
}

// Preflight is the dry run of a move: what stands in its way and what it would
// cost, without changing anything. Findings of the controller itself are added to
// those of the [DataMover].
func (c *MoveController) Preflight(ctx context.Context, plan MovePlan) (Preflight, error) {
	if err := plan.validate(); err != nil {
		return Preflight{}, err
	}
	if plan.MoveID == "" {
		plan.MoveID = newMoveID("dry")
	}
	if err := c.keeps(plan); err != nil {
		return Preflight{}, err
	}
	row, err := c.read(ctx, plan.TenantID, briefly)
	if errors.Is(err, ErrNotFound) && c.fallback != "" {
		row, _, err = Next(TenantRoute{}, Event{Kind: EventClaim, Tenant: plan.TenantID, Cell: c.fallback, Fallback: c.fallback})
	}
	if err != nil {
		return Preflight{}, err
	}
	var own []Finding
	if e, ok := row.Held(); ok && plan.Undoes == "" {
		own = append(own, Finding{Code: "undo_window", Cell: e.Cell,
			Message: fmt.Sprintf("move %s can be undone until %s; this move closes that window", e.Move, e.Until.Format(time.RFC3339)),
			Fix:     fmt.Sprintf("nothing, or undo it: that brings the tenant to cell %s without a copy", e.Cell)})
	}
	if i := residueOf(row, plan.ToCell); i >= 0 && row.MoveID == "" && plan.Undoes == "" {
		own = append(own, Finding{Code: "residue", Cell: plan.ToCell,
			Message: fmt.Sprintf("cell %s still holds rows of move %s", plan.ToCell, row.Residue[i].Move),
			Fix:     "nothing: the move removes them first"})
		row.Residue = append(row.Residue[:i:i], row.Residue[i+1:]...)
	}
	after, _, err := Next(row, Event{Kind: EventBegin, Move: plan.MoveID, Cell: plan.ToCell, From: plan.FromCell, OwnsData: c.mover != nil,
		UndoWindow: plan.UndoWindow, Undoes: plan.Undoes})
	if err != nil {
		return Preflight{}, err
	}
	var p Preflight
	if m, _ := after.Move(); c.mover != nil {
		if p, err = c.mover.Preflight(ctx, m); err != nil {
			return Preflight{}, fmt.Errorf("%s: %w", StepPreflight, err)
		}
	}
	if err := c.affordable(ctx, plan.TenantID, p.Pause); err != nil {
		if !errors.Is(err, ErrBudget) {
			return p, err
		}
		own = append(own, Finding{Code: FindingBudget, Message: err.Error(), Fix: "wait, or force the move", Blocking: !plan.Force})
	}
	p.Findings = append(own, p.Findings...)
	return p, nil
}
