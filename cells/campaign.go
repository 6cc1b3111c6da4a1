// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
)

// Outcome is what came of one tenant in a campaign.
type Outcome string

// The outcomes.
const (
	// OutcomeMoved: the target serves the tenant.
	OutcomeMoved Outcome = "moved"
	// OutcomeAlready: the tenant was in the target already.
	OutcomeAlready Outcome = "already"
	// OutcomeDeferred: the tenant's budget does not allow a move now. Nothing of it
	// was cut.
	OutcomeDeferred Outcome = "deferred"
	// OutcomeFailed: the move was refused, rolled back or left to be resumed.
	OutcomeFailed Outcome = "failed"
	// OutcomeSkipped: the campaign stopped before it came to this tenant.
	OutcomeSkipped Outcome = "skipped"
)

// TenantOutcome is one line of a campaign's result.
type TenantOutcome struct {
	Plan    MovePlan   `json:"plan"`
	Outcome Outcome    `json:"outcome"`
	Result  MoveResult `json:"result"`
	Err     error      `json:"-"`
	// Error is Err's text.
	Error string `json:"error,omitempty"`
}

// CampaignResult has one outcome for each move of the plan, in its order.
type CampaignResult struct {
	Tenants []TenantOutcome `json:"tenants"`
}

// Count returns how many tenants have the outcome.
func (r CampaignResult) Count(o Outcome) int {
	n := 0
	for _, t := range r.Tenants {
		if t.Outcome == o {
			n++
		}
	}
	return n
}

// Campaign moves many tenants, one after the other. It keeps no state: running
// the same plan again after a crash goes on where it stopped, because a tenant
// that is in its target already needs no move.
type Campaign struct {
	ctrl      *MoveController
	goOn      bool
	onOutcome func(TenantOutcome)
}

// CampaignOption configures a Campaign.
type CampaignOption func(*Campaign)

// WithContinueOnFailure goes on with the other tenants after a failure.
func WithContinueOnFailure() CampaignOption { return func(c *Campaign) { c.goOn = true } }

// WithOutcome is told of each outcome as it comes; not of those skipped.
func WithOutcome(f func(TenantOutcome)) CampaignOption {
	return func(c *Campaign) { c.onOutcome = f }
}

// NewCampaign returns a campaign that moves tenants through ctrl.
func NewCampaign(ctrl *MoveController, opts ...CampaignOption) *Campaign {
	c := &Campaign{ctrl: ctrl}
	for _, o := range opts {
		o(c)
	}
	return c
}

// Run makes the plan's moves in order. It stops at the first failure, unless
// [WithContinueOnFailure] was given, and when ctx ends; a tenant whose budget does
// not allow a move is no failure. The result is complete in every case. The error
// joins those of the tenants that failed and, when some were deferred, wraps
// [ErrBudget].
func (c *Campaign) Run(ctx context.Context, plan CampaignPlan) (CampaignResult, error) {
	res := CampaignResult{Tenants: make([]TenantOutcome, 0, len(plan.Moves))}
	var errs []error
	stopped := false
	for _, p := range plan.Moves {
		if !stopped && ctx.Err() != nil {
			stopped = true
			errs = append(errs, endOf(ctx))
		}
		if stopped {
			res.Tenants = append(res.Tenants, TenantOutcome{Plan: p, Outcome: OutcomeSkipped})
			continue
		}
		t := c.one(ctx, p)
		res.Tenants = append(res.Tenants, t)
		if c.onOutcome != nil {
			c.onOutcome(t)
		}
		if t.Outcome == OutcomeFailed {
			errs = append(errs, fmt.Errorf("tenant %s: %w", p.TenantID, t.Err))
			stopped = !c.goOn
		}
	}
	if n := res.Count(OutcomeDeferred); n > 0 {
		errs = append(errs, fmt.Errorf("%w: %d tenants deferred", ErrBudget, n))
	}
	return res, errors.Join(errs...)
}

func (c *Campaign) one(ctx context.Context, p MovePlan) TenantOutcome {
	t := TenantOutcome{Plan: p}
	t.Result, t.Err = c.ctrl.Run(ctx, p)
	switch {
	case t.Err == nil && t.Result.Move.ID == "":
		t.Outcome = OutcomeAlready
	case t.Err == nil:
		t.Outcome = OutcomeMoved
	case errors.Is(t.Err, ErrBudget):
		t.Outcome, t.Error = OutcomeDeferred, t.Err.Error()
	default:
		t.Outcome, t.Error = OutcomeFailed, t.Err.Error()
	}
	return t
}
