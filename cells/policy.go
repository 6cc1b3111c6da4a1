// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// TenantView is what a policy knows of a tenant.
type TenantView struct {
	Tenant TenantID
	// Cell is where the tenant is, or "" when the plan's maker does not know.
	Cell CellID
	// Group names the customer (or any other unit of blast radius) that the tenant
	// belongs to; "" is none.
	Group string
	// Jurisdiction, if set, is the only one in whose cells the tenant may be put.
	Jurisdiction string
	// Rows and Bytes are the tenant's size, Load its requests a second; 0 when they
	// are not known. Never negative.
	Rows, Bytes int64
	Load        float64
	// Pinned says why the tenant is not to be moved; "" when it may be. Pinned tenants
	// count where they are.
	Pinned string
}

// Limits bounds what a cell may hold; nil is no bound.
type Limits struct {
	Tenants, Rows, Bytes *int64
	Load                 *float64
}

// CellView is what a policy knows of a cell. A cell that is not described has no
// jurisdiction and no limits.
type CellView struct {
	Cell         CellID
	Jurisdiction string
	// Closed cells keep their tenants and take no new ones.
	Closed bool
	Limits Limits
}

// FleetView is what a [Policy] decides by.
type FleetView struct {
	// Tenants are sorted by id, each of them once.
	Tenants []TenantView
	// Cells are sorted by id, each of them once.
	Cells []CellView
	// GroupMax, if positive, is how many tenants of one group a cell may be given.
	GroupMax int
	// Seed varies what a policy chooses by hashing.
	Seed uint64
}

// Target is where a policy wants a tenant.
type Target struct {
	// Cell; "" leaves the tenant where it is.
	Cell CellID
	// Why says, when Cell is "" although the policy wanted the tenant elsewhere, what
	// stands in the way.
	Why string
}

// Policy decides which cell each tenant belongs in.
type Policy interface {
	// Targets returns one target for each tenant of the view, in its order. It is
	// pure: the same view gives the same answer. It need not keep to jurisdictions and
	// limits ([PlanFromPolicy] does), but a policy that does leaves fewer tenants
	// behind. The view is the policy's to change. Errors wrap [ErrInvalid].
	Targets(ctx context.Context, fleet *FleetView) ([]Target, error)
}

// PolicyFunc is a Policy made of a function.
type PolicyFunc func(ctx context.Context, fleet *FleetView) ([]Target, error)

// Targets calls f.
func (f PolicyFunc) Targets(ctx context.Context, fleet *FleetView) ([]Target, error) {
	return f(ctx, fleet)
}

// Measure is what a policy weighs tenants by.
type Measure string

// The measures. All of them but MeasureTenants are 0 for tenants that nobody has
// measured.
const (
	MeasureTenants Measure = "tenants"
	MeasureRows    Measure = "rows"
	MeasureBytes   Measure = "bytes"
	MeasureLoad    Measure = "load"
)

// Validate reports whether m is one of the measures. The error wraps [ErrInvalid].
func (m Measure) Validate() error {
	switch m {
	case MeasureTenants, MeasureRows, MeasureBytes, MeasureLoad:
		return nil
	}
	return fmt.Errorf("%w: measure %q; want tenants, rows, bytes or load", ErrInvalid, string(m))
}

// Of returns the tenant's weight.
func (m Measure) Of(t *TenantView) float64 {
	switch m {
	case MeasureRows:
		return float64(t.Rows)
	case MeasureBytes:
		return float64(t.Bytes)
	case MeasureLoad:
		return t.Load
	}
	return 1
}

// PlanOptions changes what [PlanFromPolicy] makes; nil takes the zero value.
type PlanOptions struct {
	// Actor and Force are copied into each move.
	Actor string
	Force bool
	// MaxMoves keeps only the first moves; 0 keeps all.
	MaxMoves int
	// Cells describes the cells: no move of the plan goes into a closed cell, into
	// another jurisdiction than its tenant's, or beyond a cell's limits, at any moment
	// while the moves are made in the plan's order.
	Cells []CellView
	// GroupMax, if positive, also bounds how many tenants of one group a cell is given.
	GroupMax int
	// Seed varies what policies choose by hashing.
	Seed uint64
}

// CampaignPlan is a list of moves, to be made in order.
type CampaignPlan struct {
	Moves []MovePlan `json:"moves"`
	// Stays are the tenants that the policy wanted elsewhere and that have to stay.
	Stays []Stay `json:"stays,omitempty"`
	// Rows and Bytes sum up what the moves carry, as far as it was measured.
	Rows  int64 `json:"rows,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`
}

// Stay is a tenant that a plan leaves where it is against the policy's wish.
type Stay struct {
	Tenant TenantID `json:"tenant"`
	Cell   CellID   `json:"cell,omitempty"`
	// To is where the policy wanted it; "" when it found no place.
	To  CellID `json:"to,omitempty"`
	Why string `json:"why"`
}

// PlanFromPolicy makes a plan of the moves that bring every tenant to where the
// policy wants it, in the order of the tenants' ids as far as there is room.
// Tenants are given by id, by their rows, or by views. By rows and views a tenant
// that is in its place already makes no move and each move names the cell that it
// expects its tenant in; tombstones are left out, and tenants that are being moved
// stay. opts may be nil. The same input gives the same plan, in whatever order the
// tenants and cells are listed. Errors wrap [ErrInvalid], or are the policy's.
//
// Closed cells, jurisdictions and limits hold for every policy: a tenant that
// would have to break one is in Stays, with the reason. Limits count the tenants
// that are listed, so all tenants of the cells have to be.
func PlanFromPolicy[T TenantID | TenantRoute | TenantView](ctx context.Context, tenants []T, policy Policy, opts *PlanOptions) (CampaignPlan, error) {
	if policy == nil {
		return CampaignPlan{}, fmt.Errorf("%w: no policy", ErrInvalid)
	}
	if opts == nil {
		opts = &PlanOptions{}
	}
	fleet := &FleetView{Tenants: make([]TenantView, 0, len(tenants)), Cells: slices.Clone(opts.Cells), GroupMax: opts.GroupMax, Seed: opts.Seed}
	for _, t := range tenants {
		switch t := any(t).(type) {
		case TenantID:
			fleet.Tenants = append(fleet.Tenants, TenantView{Tenant: t})
		case TenantRoute:
			if t.Exists() {
				fleet.Tenants = append(fleet.Tenants, ViewOf(&t))
			}
		case TenantView:
			fleet.Tenants = append(fleet.Tenants, t)
		}
	}
	if err := fleet.normalize(); err != nil {
		return CampaignPlan{}, err
	}
	asked := &FleetView{Tenants: slices.Clone(fleet.Tenants), Cells: slices.Clone(fleet.Cells), GroupMax: fleet.GroupMax, Seed: fleet.Seed}
	targets, err := policy.Targets(ctx, asked)
	if err != nil {
		return CampaignPlan{}, err
	}
	if len(targets) != len(fleet.Tenants) {
		return CampaignPlan{}, fmt.Errorf("%w: the policy answered %d targets for %d tenants", ErrInvalid, len(targets), len(fleet.Tenants))
	}
	checked := map[CellID]bool{"": true}
	for i := range targets {
		c := targets[i].Cell
		if checked[c] {
			continue
		}
		if err := c.Validate(); err != nil {
			return CampaignPlan{}, fmt.Errorf("policy: tenant %s: %w", fleet.Tenants[i].Tenant, err)
		}
		checked[c] = true
	}
	if err := ctx.Err(); err != nil {
		return CampaignPlan{}, context.Cause(ctx)
	}
	return sequence(fleet, targets, opts), nil
}

// ViewOf returns what a route says of its tenant to a policy.
func ViewOf(r *TenantRoute) TenantView {
	v := TenantView{Tenant: r.TenantID, Cell: r.CellID}
	switch {
	case r.MoveID != "":
		v.Pinned = "it is being moved"
	case !r.Serving():
		v.Pinned = "it is " + r.State.String()
	}
	return v
}

// normalize sorts and checks a view.
func (f *FleetView) normalize() error {
	slices.SortFunc(f.Tenants, func(a, b TenantView) int { return strings.Compare(string(a.Tenant), string(b.Tenant)) })
	slices.SortFunc(f.Cells, func(a, b CellView) int { return strings.Compare(string(a.Cell), string(b.Cell)) })
	for i := range f.Tenants {
		t := &f.Tenants[i]
		if err := t.Tenant.Validate(); err != nil {
			return err
		}
		if i > 0 && t.Tenant == f.Tenants[i-1].Tenant {
			return fmt.Errorf("%w: tenant %s is listed twice", ErrInvalid, t.Tenant)
		}
		if t.Rows < 0 || t.Bytes < 0 || !(t.Load >= 0) {
			return fmt.Errorf("%w: tenant %s has a negative size or load", ErrInvalid, t.Tenant)
		}
	}
	for i := range f.Cells {
		c := &f.Cells[i]
		if err := c.Cell.Validate(); err != nil {
			return err
		}
		if i > 0 && c.Cell == f.Cells[i-1].Cell {
			return fmt.Errorf("%w: cell %s is listed twice", ErrInvalid, c.Cell)
		}
	}
	return nil
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

// RoundRobinPolicy gives the tenants, in the order of their ids, to the cells in
// turn, wherever they are now. A cell that may not take its tenant is passed over.
func RoundRobinPolicy(cells []CellID) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		r := newRoom(f)
		at := r.indexes(cells)
		for i := range f.Tenants {
			if t := &f.Tenants[i]; t.Pinned == "" {
				r.remove(t, r.index(t.Cell))
			}
		}
		out := make([]Target, len(f.Tenants))
		for i := range f.Tenants {
			t := &f.Tenants[i]
			if t.Pinned != "" {
				continue
			}
			home, why := r.index(t.Cell), obstacle(0)
			chosen := -1
			for k := range at {
				c := at[(i+k)%len(at)]
				o := r.fits(t, c, c == home)
				if o == 0 {
					chosen = c
					break
				}
				why = max(why, o)
			}
			if chosen < 0 {
				out[i].Why = why.nowhere()
				chosen = home
			} else {
				out[i].Cell = r.cells[chosen].view.Cell
			}
			r.add(t, chosen)
		}
		return out, nil
	})
}

// DrainPolicy empties the cells of drained into the others, the emptiest first.
// into nil means every described cell that is open and not drained. Tenants of
// other cells stay where they are.
func DrainPolicy(drained, into []CellID) Policy {
	drained, into = slices.Clone(drained), slices.Clone(into)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(drained); err != nil {
			return nil, err
		}
		to := into
		if to == nil {
			for _, c := range f.Cells {
				if !c.Closed && !slices.Contains(drained, c.Cell) {
					to = append(to, c.Cell)
				}
			}
		}
		if err := checkCells(to); err != nil {
			return nil, fmt.Errorf("nowhere to drain to: %w", err)
		}
		for _, c := range to {
			if slices.Contains(drained, c) {
				return nil, fmt.Errorf("%w: cell %s is drained into itself", ErrInvalid, c)
			}
		}
		r := newRoom(f)
		at := r.indexes(to)
		out := make([]Target, len(f.Tenants))
		for i := range f.Tenants {
			t := &f.Tenants[i]
			if t.Pinned == "" && slices.Contains(drained, t.Cell) {
				out[i] = r.place(t, at, MeasureTenants)
			} else if slices.Contains(drained, t.Cell) {
				out[i].Why = t.Pinned
			}
		}
		return out, nil
	})
}

// mix hashes strings with a seed, the same on every machine.
func mix(seed uint64, parts ...string) uint64 {
	h := uint64(14695981039346656037) ^ seed*0x9e3779b97f4a7c15
	for _, p := range parts {
		for i := range len(p) {
			h = (h ^ uint64(p[i])) * 1099511628211
		}
		h = (h ^ 0xff) * 1099511628211
	}
	return scatter(h)
}

// scatter makes every bit depend on every other.
func scatter(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
