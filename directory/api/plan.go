// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Policies that a plan can be made by.
const (
	PolicyEven       = "even"
	PolicyRoundRobin = "round-robin"
	PolicyHot        = "hot"
	PolicyGroups     = "groups"
	PolicyShuffle    = "shuffle"
	PolicyDrain      = "drain"
)

// Policies lists them.
var Policies = []string{PolicyEven, PolicyRoundRobin, PolicyHot, PolicyGroups, PolicyShuffle, PolicyDrain}

// PolicySpec names a policy of package cells and its settings.
type PolicySpec struct {
	Kind string `json:"kind"`
	// By is what is weighed, by even and hot; "" means tenants, and for hot load.
	By cells.Measure `json:"by,omitempty"`
	// Cells are those to spread over; none means all that serve and are not closed.
	// With drain they are those to drain into.
	Cells []cells.CellID `json:"cells,omitempty"`
	// Tolerance of even, by anything but tenants; 0 means 0.1.
	Tolerance float64 `json:"tolerance,omitempty"`
	// Above, Dedicated, PerCell and Others are those of [cells.HotOptions].
	Above     float64        `json:"above,omitempty"`
	Dedicated []cells.CellID `json:"dedicated,omitempty"`
	PerCell   int            `json:"per_cell,omitempty"`
	Others    []cells.CellID `json:"others,omitempty"`
	// Drain are the cells to empty.
	Drain []cells.CellID `json:"drain,omitempty"`
	// Shards is how many cells a group has, with shuffle; 0 means 2.
	Shards int `json:"shards,omitempty"`
	// GroupMax, if positive, bounds the tenants of one group in a cell, by whatever
	// policy.
	GroupMax int `json:"group_max,omitempty"`
	// MaxMoves keeps only the first moves; 0 keeps all.
	MaxMoves int `json:"max_moves,omitempty"`
	// Seed varies what is chosen by hashing.
	Seed uint64 `json:"seed,omitempty"`
}

// Measure is what the policy weighs tenants by.
func (p *PolicySpec) Measure() cells.Measure {
	switch {
	case p.By != "":
		return p.By
	case p.Kind == PolicyHot:
		return cells.MeasureLoad
	}
	return cells.MeasureTenants
}

// Policy makes the policy; all are the cells that [PolicySpec.Cells] stands for
// when it is empty. Settings are checked by the policy when it decides. The error
// wraps [cells.ErrInvalid].
func (p *PolicySpec) Policy(all []cells.CellID) (cells.Policy, error) {
	if len(p.Cells) > 0 {
		all = p.Cells
	}
	if p.GroupMax < 0 || p.MaxMoves < 0 {
		return nil, fmt.Errorf("%w: group_max and max_moves are not negative", cells.ErrInvalid)
	}
	switch p.Kind {
	case PolicyEven:
		return cells.EvenSpreadBy(all, p.Measure(), p.Tolerance), nil
	case PolicyRoundRobin:
		return cells.RoundRobinPolicy(all), nil
	case PolicyHot:
		return cells.IsolateHotPolicy(cells.HotOptions{By: p.Measure(), Above: p.Above, Dedicated: p.Dedicated, PerCell: p.PerCell, Others: p.Others}), nil
	case PolicyGroups:
		return cells.BlastRadiusPolicy(all), nil
	case PolicyShuffle:
		n := p.Shards
		if n == 0 {
			n = 2
		}
		return cells.ShuffleShardPolicy(all, n), nil
	case PolicyDrain:
		return cells.DrainPolicy(p.Drain, p.Cells), nil
	}
	return nil, fmt.Errorf("%w: policy %q; want one of %s", cells.ErrInvalid, p.Kind, strings.Join(Policies, ", "))
}

// PlannedMove is one move of a plan that is given or edited.
type PlannedMove struct {
	Tenant cells.TenantID `json:"tenant"`
	From   cells.CellID   `json:"from"`
	To     cells.CellID   `json:"to"`
}

// CampaignRequest is the body of POST PathCampaigns: a plan by a policy, or the
// moves themselves.
type CampaignRequest struct {
	Name     string           `json:"name,omitempty"`
	Policy   *PolicySpec      `json:"policy,omitempty"`
	Moves    []PlannedMove    `json:"moves,omitempty"`
	Settings CampaignSettings `json:"settings"`
	// DryRun answers the plan and stores nothing.
	DryRun bool   `json:"dry_run,omitempty"`
	Actor  string `json:"actor,omitempty"`
	// OperationID makes a retry safe: the same id answers the same campaign.
	OperationID string `json:"operation_id,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *CampaignRequest) Normalize() error {
	if (r.Policy == nil) == (len(r.Moves) == 0) {
		return fmt.Errorf("%w: a plan is made by a policy, or of moves", cells.ErrInvalid)
	}
	if err := checkText("name", r.Name, MaxText); err != nil {
		return err
	}
	if err := r.Settings.Normalize(); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, r.OperationID)
}

// CampaignPlan answers a CampaignRequest: the campaign, and with DryRun its first
// MaxPage moves.
type CampaignPlan struct {
	Campaign Campaign      `json:"campaign"`
	Moves    []PlannedMove `json:"moves,omitempty"`
}

// CampaignFile is a plan as people edit it: GET and PUT PathCampaigns/{id}/plan.
// Moves are those that are not begun.
type CampaignFile struct {
	Campaign CampaignID `json:"campaign"`
	// Version is the campaign's when it was read; a PUT is refused if it has changed
	// since.
	Version  int64            `json:"version"`
	Settings CampaignSettings `json:"settings"`
	Moves    []PlannedMove    `json:"moves"`
	// Actor of a PUT.
	Actor string `json:"actor,omitempty"`
}

// CampaignOrder is the body of POST PathCampaigns/{id}/run, pause, resume and
// abort.
type CampaignOrder struct {
	Actor  string `json:"actor,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Retry, with resume: try the failed and deferred moves again.
	Retry bool `json:"retry,omitempty"`
	// Rollback, with abort: roll back what runs and is not decided. Without it what
	// runs ends as it would have.
	Rollback bool `json:"rollback,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (o *CampaignOrder) Normalize() error {
	if err := checkText("reason", o.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&o.Actor, "")
}

// TenantFacts is what policies know of a tenant beside its route.
type TenantFacts struct {
	Tenant cells.TenantID `json:"tenant"`
	// Group and Jurisdiction are set by operators; "" is none.
	Group        string `json:"group,omitempty"`
	Jurisdiction string `json:"jurisdiction,omitempty"`
	// Rows and Bytes are the last measure, taken at MeasuredAt; zero: never.
	Rows       int64     `json:"rows,omitempty"`
	Bytes      int64     `json:"bytes,omitempty"`
	MeasuredAt time.Time `json:"measured_at,omitzero"`
	// Load is the tenant's requests a second in all live processes that report it
	// among their busiest. Not stored.
	Load float64 `json:"load,omitempty"`
}

// AttributesRequest is the body of PUT PathTenants/{tenant}/attributes: both are
// replaced.
type AttributesRequest struct {
	Group        string `json:"group"`
	Jurisdiction string `json:"jurisdiction"`
	Actor        string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *AttributesRequest) Normalize() error {
	if err := checkText("group", r.Group, 128); err != nil {
		return err
	}
	if err := checkText("jurisdiction", r.Jurisdiction, 128); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// MeasureRequest is the body of POST PathMeasures: at most MaxMeasure tenants.
type MeasureRequest struct {
	Tenants []cells.TenantID `json:"tenants"`
}

// MaxMeasure bounds a MeasureRequest.
const MaxMeasure = 50

// Measured answers a MeasureRequest. Tenants that could not be measured are in
// Failed, with the reason.
type Measured struct {
	Tenants []TenantFacts             `json:"tenants"`
	Failed  map[cells.TenantID]string `json:"failed,omitempty"`
}

// PlannedItem is a move of a plan with what was measured of its tenant.
type PlannedItem struct {
	PlannedMove
	Rows, Bytes int64
}

// Named lists the cells that the policy names, in any order.
func (p *PolicySpec) Named() []cells.CellID {
	var out []cells.CellID
	for _, list := range [][]cells.CellID{p.Cells, p.Dedicated, p.Others, p.Drain} {
		out = append(out, list...)
	}
	return out
}
