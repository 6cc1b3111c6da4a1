// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"time"
)

// DefaultPauseHeadroom is what a cut gets on top of twice its predicted pause,
// unless [WithPauseHeadroom] says otherwise.
const DefaultPauseHeadroom = 5 * time.Second

// WithPauseHeadroom sets by how much a cut may miss its prediction. With a budget or
// a longest pause, a cut is rolled back when it is not decided within twice its
// predicted pause and d, which is what it reserves of the budget; never more than is
// left of that, than the longest pause and than the drain deadline. Requests that are
// in flight when the cut begins have that long to end. Negative is 0.
func WithPauseHeadroom(d time.Duration) ControllerOption {
	return func(c *MoveController) { c.headroom = max(d, 0) }
}

// admit checks the predicted pause against the longest one and the budget, reserves
// what the cut may take, and returns that: past it the cut is given up. A move that
// is forced has the whole drain deadline.
func (c *MoveController) admit(ctx context.Context, tenant TenantID, move MoveID, predicted time.Duration, force bool) (bound time.Duration, _ error) {
	if !force && c.budget != nil {
		e, err := c.budget.entry(ctx, tenant, move)
		if err != nil {
			return 0, err
		}
		force = e.Forced
	}
	bound = c.deadline
	if !force {
		if err := c.tooLong(predicted); err != nil {
			return 0, err
		}
		if c.maxPause > 0 {
			bound = min(bound, c.maxPause)
		}
		if c.maxPause > 0 || c.budget != nil {
			bound = min(bound, 2*predicted+c.headroom)
		}
	}
	if c.budget == nil {
		return bound, nil
	}
	granted, err := c.budget.reserve(ctx, tenant, move, predicted, bound, true)
	switch {
	case err == nil:
		return granted, nil
	case force:
		c.log.Warn("budget not reserved", "tenant", tenant, "move", move, "err", err)
		return bound, nil
	}
	return 0, err
}

func (c *MoveController) tooLong(predicted time.Duration) error {
	if c.maxPause > 0 && predicted > c.maxPause {
		return fmt.Errorf("%w: the predicted pause of %v is longer than %v", ErrBudget, predicted, c.maxPause)
	}
	return nil
}

// affordable checks an estimate without reserving anything.
func (c *MoveController) affordable(ctx context.Context, tenant TenantID, pause time.Duration) error {
	if err := c.tooLong(pause); err != nil || c.budget == nil {
		return err
	}
	return c.budget.Allow(ctx, tenant, pause)
}

// authorize records a forced move before it is begun, so that whoever resumes it
// knows. A budget that cannot be written does not stop a forced move, but one that
// resumes it will ask for the budget again.
func (c *MoveController) authorize(ctx context.Context, m MoveRef, actor string) {
	if c.budget == nil {
		return
	}
	if err := c.budget.Authorize(ctx, m.Tenant, m.ID, actor); err != nil {
		c.log.Warn("a forced move is not recorded in the budget", "tenant", m.Tenant, "move", m.ID, "actor", actor, "err", err)
	}
}

// release takes back what was recorded for a move that was not begun.
func (c *MoveController) release(ctx context.Context, m MoveRef) {
	if c.budget == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := c.budget.Release(ctx, m.Tenant, m.ID); err != nil {
		c.log.Warn("budget not released", "tenant", m.Tenant, "move", m.ID, "err", err)
	}
}

// cutBegan is when a cut that another driver began took the tenant out of service:
// when it was reserved, else as early as it can have been.
func (c *MoveController) cutBegan(ctx context.Context, m MoveRef, deadline time.Time) time.Time {
	if c.budget != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if e, err := c.budget.entry(ctx, m.Tenant, m.ID); err == nil && e.Reserved && e.Pause > 0 {
			return e.At
		}
	}
	return deadline.Add(-c.deadline)
}
