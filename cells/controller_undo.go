// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
)

// reasonPassed is why a window closes by itself.
const reasonPassed = "its time has passed"

// Undo takes the tenant's last move back while its window is open: it moves the
// tenant to the cell that it came from, which still has its rows and has received
// the changes since. It is a move like any other, with its own id, guarantees and
// steps; only the copy is missing. plan.Undoes, if set, must be that move; ToCell is
// filled in. Without an open window it is refused with [ErrNotApplicable].
//
// An undo that is rolled back ends the offer: the rows of its target are removed,
// and nothing is lost.
func (c *MoveController) Undo(ctx context.Context, plan MovePlan) (MoveResult, error) {
	if err := plan.TenantID.Validate(); err != nil {
		return MoveResult{}, err
	}
	row, err := c.read(ctx, plan.TenantID, briefly)
	if err != nil {
		return MoveResult{Route: row}, err
	}
	if row.Undoes != "" && (plan.Undoes == "" || plan.Undoes == row.Undoes) && (plan.MoveID == "" || plan.MoveID == row.MoveID) {
		// It is on its way already: join it.
		plan.MoveID, plan.Undoes, plan.ToCell = row.MoveID, row.Undoes, row.TargetCell
		return c.Run(ctx, plan)
	}
	e, ok := row.Held()
	switch {
	case row.MoveID != "":
		return MoveResult{Route: row}, fmt.Errorf("%w: %s", ErrOtherMove, row.MoveID)
	case !ok || plan.Undoes != "" && plan.Undoes != e.Move:
		return MoveResult{Route: row}, notApplicable("tenant %s has no move that can be undone", plan.TenantID)
	case plan.ToCell != "" && plan.ToCell != e.Cell:
		return MoveResult{Route: row}, notApplicable("undoing move %s goes to cell %s, not %s", e.Move, e.Cell, plan.ToCell)
	}
	plan.Undoes, plan.ToCell = e.Move, e.Cell
	return c.Run(ctx, plan)
}

// CloseWindow ends the time in which the tenant's last move can be undone; what the
// other cell kept may then be removed. reason is kept in the row. No open window is
// no error.
func (c *MoveController) CloseWindow(ctx context.Context, tenant TenantID, reason, actor string) (TenantRoute, error) {
	for range maxRounds {
		row, err := c.read(ctx, tenant, briefly)
		if err != nil {
			return row, err
		}
		e, ok := row.Held()
		if !ok {
			return row, nil
		}
		next, err := c.closeWindow(ctx, row, e, reason, actor)
		if !errors.Is(err, errChanged) {
			return next, err
		}
	}
	return TenantRoute{}, fmt.Errorf("%w: tenant %s", ErrConflict, tenant)
}

func (c *MoveController) closeWindow(ctx context.Context, row TenantRoute, e Residue, reason, actor string) (TenantRoute, error) {
	if reason == "" {
		reason = "asked for"
	}
	next, wrote, err := c.write(ctx, row, Event{Kind: EventWindowClosed, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move, Actor: actor,
		Reason: fmt.Sprintf("move %s can no longer be undone: %s", e.Move, reason)}, briefly)
	if err != nil || !wrote {
		return next, err
	}
	return next, c.done(ctx, StepEvent{Tenant: row.TenantID, Step: StepWindow, Route: next.Clone(), Move: MoveRef{ID: e.Move, Tenant: row.TenantID}})
}

// Window is what one round of [MoveController.Tend] found.
type Window struct {
	// Entry is the held one; zero when there was none.
	Entry Residue `json:"entry"`
	// Open: the move can still be undone. Otherwise Reason says why no more.
	Open   bool   `json:"open"`
	Reason string `json:"reason,omitempty"`
	Returned
}

// Tend does what an open undo window asks for, once: the changes of the tenant's
// cell are applied at the cell that keeps its rows; a window whose time has passed
// is closed, and so is one whose way back is lost. Call it again and again, from
// any number of processes. An error says that the round failed and that the window
// is as it was.
func (c *MoveController) Tend(ctx context.Context, tenant TenantID) (Window, error) {
	row, err := c.read(ctx, tenant, briefly)
	if err != nil {
		return Window{}, err
	}
	e, ok := row.Held()
	if !ok {
		return Window{}, nil
	}
	w := Window{Entry: e, Open: true}
	if !c.now().Before(e.Until) {
		return c.endWindow(ctx, row, w, reasonPassed)
	}
	mover, ok := c.mover.(Returner)
	if !ok {
		return w, fmt.Errorf("%w: no DataMover that keeps a way back", ErrInvalid)
	}
	w.Returned, err = mover.Return(ctx, tenant, e)
	switch {
	case err == nil:
		if c.observe != nil && w.Changes > 0 {
			c.observe(StepEvent{Tenant: tenant, Step: StepReturn, Route: row.Clone(), Move: MoveRef{ID: e.Move, Tenant: tenant}, At: c.now()})
		}
		return w, nil
	case errors.Is(err, ErrReturnLost), errors.Is(err, ErrStaleOrder):
		// A fence that has passed says the same, unless it is the row that is old.
		return c.endWindow(ctx, row, w, err.Error())
	}
	return w, fmt.Errorf("way back of move %s from cell %s to cell %s: %w", e.Move, e.Back, e.Cell, err)
}

func (c *MoveController) endWindow(ctx context.Context, row TenantRoute, w Window, reason string) (Window, error) {
	next, err := c.closeWindow(ctx, row, w.Entry, reason, "")
	if errors.Is(err, errChanged) {
		// Somebody was faster: an undo, another move, or the same. The next round sees it.
		return w, nil
	}
	if err != nil {
		return w, err
	}
	w.Open, w.Reason = false, next.Reason
	if reason != reasonPassed {
		c.log.Error("an undo window is closed early", "tenant", row.TenantID, "move", w.Entry.Move, "cell", w.Entry.Cell, "reason", reason)
	}
	return w, nil
}
