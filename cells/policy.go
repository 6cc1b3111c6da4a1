// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// TenantView is what a policy knows of a tenant.
type TenantView struct {
	Tenant TenantID
	// Cell is where the tenant is, or "" when the plan's maker does not know.
	Cell CellID
}

// Policy decides which cell each tenant belongs in.
type Policy interface {
	// Targets returns one cell for each of the views, in their order; "" leaves the
	// tenant where it is. The views are sorted by tenant. The same views give the
	// same answer. The caller owns both slices.
	Targets(ctx context.Context, tenants []TenantView) ([]CellID, error)
}

// PolicyFunc is a Policy made of a function.
type PolicyFunc func(ctx context.Context, tenants []TenantView) ([]CellID, error)

// Targets calls f.
func (f PolicyFunc) Targets(ctx context.Context, tenants []TenantView) ([]CellID, error) {
	return f(ctx, tenants)
}

// RoundRobinPolicy gives the tenants, in the order of their ids, to the cells in
// turn, wherever they are now.
func RoundRobinPolicy(cells []CellID) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, tenants []TenantView) ([]CellID, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		out := make([]CellID, len(tenants))
		for i := range tenants {
			out[i] = cells[i%len(cells)]
		}
		return out, nil
	})
}

// EvenSpreadPolicy spreads the tenants over the cells so that no cell has more
// than one tenant more than another, with as few moves as possible. Tenants in
// other cells, or in no known cell, are given to the emptiest cells.
func EvenSpreadPolicy(cells []CellID) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, tenants []TenantView) ([]CellID, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		return evenSpread(cells, tenants), nil
	})
}

func evenSpread(cells []CellID, tenants []TenantView) []CellID {
	has := map[CellID]int{}
	for _, t := range tenants {
		has[t.Cell]++
	}
	// The fullest cells get the odd ones, so that fewer tenants have to leave.
	order := slices.Clone(cells)
	slices.SortStableFunc(order, func(a, b CellID) int { return has[b] - has[a] })
	quota := map[CellID]int{}
	for i, c := range order {
		quota[c] = len(tenants) / len(cells)
		if i < len(tenants)%len(cells) {
			quota[c]++
		}
	}
	out := make([]CellID, len(tenants))
	for i, t := range tenants {
		if quota[t.Cell] > 0 {
			quota[t.Cell]--
			out[i] = t.Cell
		}
	}
	next := 0
	for i := range tenants {
		if out[i] != "" {
			continue
		}
		for quota[cells[next]] == 0 {
			next++
		}
		quota[cells[next]]--
		out[i] = cells[next]
	}
	return out
}

func checkCells(cells []CellID) error {
	if len(cells) == 0 {
		return fmt.Errorf("%w: a policy needs at least one cell", ErrInvalid)
	}
	for i, c := range cells {
		if err := c.Validate(); err != nil {
			return err
		}
		if slices.Contains(cells[:i], c) {
			return fmt.Errorf("%w: cell %s is named twice", ErrInvalid, c)
		}
	}
	return nil
}

// PlanOptions changes what [PlanFromPolicy] makes; nil takes the zero value.
type PlanOptions struct {
	// Actor and Force are copied into each move.
	Actor string
	Force bool
	// MaxMoves keeps only the first moves; 0 keeps all.
	MaxMoves int
}

// CampaignPlan is a list of moves, to be made in order.
type CampaignPlan struct {
	Moves []MovePlan `json:"moves"`
}

// PlanFromPolicy makes a plan of the moves that bring every tenant to where the
// policy wants it, in the order of the tenants' ids. Tenants are given by id, or
// by their rows: then a tenant that is in its place already makes no move, each
// move names the cell that it expects its tenant in, and tombstones are left out.
// opts may be nil. The same input gives the same plan.
func PlanFromPolicy[T TenantID | TenantRoute](ctx context.Context, tenants []T, policy Policy, opts *PlanOptions) (CampaignPlan, error) {
	if policy == nil {
		return CampaignPlan{}, fmt.Errorf("%w: no policy", ErrInvalid)
	}
	if opts == nil {
		opts = &PlanOptions{}
	}
	views := make([]TenantView, 0, len(tenants))
	for _, t := range tenants {
		var v TenantView
		switch t := any(t).(type) {
		case TenantID:
			v.Tenant = t
		case TenantRoute:
			if !t.Exists() {
				continue
			}
			v = TenantView{Tenant: t.TenantID, Cell: t.CellID}
		}
		if err := v.Tenant.Validate(); err != nil {
			return CampaignPlan{}, err
		}
		views = append(views, v)
	}
	slices.SortFunc(views, func(a, b TenantView) int { return strings.Compare(string(a.Tenant), string(b.Tenant)) })
	for i := 1; i < len(views); i++ {
		if views[i].Tenant == views[i-1].Tenant {
			return CampaignPlan{}, fmt.Errorf("%w: tenant %s is listed twice", ErrInvalid, views[i].Tenant)
		}
	}
	targets, err := policy.Targets(ctx, slices.Clone(views))
	if err != nil {
		return CampaignPlan{}, err
	}
	if len(targets) != len(views) {
		return CampaignPlan{}, fmt.Errorf("%w: the policy answered %d cells for %d tenants", ErrInvalid, len(targets), len(views))
	}
	var plan CampaignPlan
	for i, v := range views {
		to := targets[i]
		if to == "" || to == v.Cell {
			continue
		}
		if err := to.Validate(); err != nil {
			return CampaignPlan{}, errors.Join(fmt.Errorf("policy: tenant %s", v.Tenant), err)
		}
		if opts.MaxMoves > 0 && len(plan.Moves) == opts.MaxMoves {
			break
		}
		plan.Moves = append(plan.Moves, MovePlan{TenantID: v.Tenant, FromCell: v.Cell, ToCell: to, Actor: opts.Actor, Force: opts.Force})
	}
	return plan, nil
}
