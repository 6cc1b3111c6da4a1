// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// rolloutTenants moves the tenants of rollouts by campaigns.
type rolloutTenants struct{ s *Server }

// Place implements [rollout.Tenants].
func (t rolloutTenants) Place(ctx context.Context, r *api.Rollout, units []api.RolloutUnit, back bool) ([]rollout.Placement, error) {
	v, err := t.s.view(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]rollout.Placement, len(units))
	wanted := map[cells.TenantID]*rollout.Placement{}
	for i := range units {
		u, p := &units[i], &out[i]
		*p = rollout.Placement{Unit: u.Unit}
		at, ok := v.at[cells.TenantID(u.Unit)]
		if !ok {
			p.Fate, p.Reason = rollout.FateGone, "the tenant was deleted"
			continue
		}
		tenant := &v.tenants[at]
		switch home := cells.CellID(u.Home); {
		case back && tenant.Cell == home, !back && slices.Contains(r.New, tenant.Cell):
			p.Fate = rollout.FateThere
			if tenant.Pinned != "" { // on its way elsewhere, or back
				p.Fate, p.Reason = rollout.FateStuck, tenant.Pinned
			}
		case back && !slices.Contains(r.New, tenant.Cell), !back && !slices.Contains(r.Old, tenant.Cell):
			p.Fate, p.Reason = rollout.FateGone, fmt.Sprintf("somebody moved it to cell %s", tenant.Cell)
		case tenant.Pinned != "":
			p.Fate, p.Reason = rollout.FateStuck, tenant.Pinned
		case back:
			p.Move = api.PlannedItem{PlannedMove: api.PlannedMove{Tenant: tenant.Tenant, From: tenant.Cell, To: home}, Rows: tenant.Rows, Bytes: tenant.Bytes}
		default:
			wanted[tenant.Tenant] = p
		}
	}
	if len(wanted) == 0 {
		return out, nil
	}
	return out, v.target(ctx, r, wanted)
}

// target finds a place in the new cells for each tenant that is wanted there.
func (v *fleetView) target(ctx context.Context, r *api.Rollout, wanted map[cells.TenantID]*rollout.Placement) error {
	tenants := slices.Clone(v.tenants)
	for i := range tenants {
		t := &tenants[i]
		if p := wanted[t.Tenant]; p == nil {
			t.Pinned = orDefault(t.Pinned, "it is not of this wave")
		} else {
			p.Fate, p.Reason = rollout.FateStuck, "no cell of the new version takes it"
		}
	}
	plan, err := cells.PlanFromPolicy(ctx, tenants, cells.DrainPolicy(r.Old, r.New), &cells.PlanOptions{Cells: v.cells, Seed: r.Settings.Seed})
	if err != nil {
		return err
	}
	for _, st := range plan.Stays {
		if p := wanted[st.Tenant]; p != nil {
			p.Reason = st.Why
		}
	}
	for _, m := range plan.Moves {
		p := wanted[m.TenantID]
		if p == nil {
			continue
		}
		t := &v.tenants[v.at[m.TenantID]]
		*p = rollout.Placement{Unit: p.Unit, Move: api.PlannedItem{PlannedMove: api.PlannedMove{Tenant: m.TenantID, From: m.FromCell, To: m.ToCell},
			Rows: t.Rows, Bytes: t.Bytes}}
	}
	return nil
}

// Newcomers implements [rollout.Tenants].
func (t rolloutTenants) Newcomers(ctx context.Context, r *api.Rollout) ([]api.RolloutUnit, error) {
	return t.s.tenantsOf(ctx, r.Old)
}

// tenantsOf lists the tenants of some cells as units.
func (s *Server) tenantsOf(ctx context.Context, group []cells.CellID) ([]api.RolloutUnit, error) {
	var out []api.RolloutUnit
	opts := cells.ListOptions{Limit: 10000}
	for {
		page, err := s.table.List(ctx, opts)
		if err != nil {
			return nil, err
		}
		for i := range page.Routes {
			if r := &page.Routes[i]; r.Exists() && slices.Contains(group, r.CellID) {
				out = append(out, api.RolloutUnit{Unit: string(r.TenantID), Home: string(r.CellID)})
			}
		}
		if page.Next == "" {
			return out, nil
		}
		opts.After = page.Next
	}
}

// Campaign implements [rollout.Tenants].
func (t rolloutTenants) Campaign(ctx context.Context, id api.CampaignID) (api.Campaign, error) {
	return t.s.store.Campaign(ctx, id)
}

// Items implements [rollout.Tenants].
func (t rolloutTenants) Items(ctx context.Context, id api.CampaignID, after int64, limit int) ([]api.CampaignItem, error) {
	return t.s.store.CampaignItems(ctx, ItemFilter{Campaign: id, After: after, Limit: limit})
}

func (t rolloutTenants) audit(r *api.Rollout, verb string, c api.CampaignID) api.AuditEntry {
	return api.AuditEntry{At: time.Now().UTC(), Peer: "directory/" + t.s.cfg.Name, Actor: actorOf(r), RequestID: string(r.ID), Action: "campaign." + verb,
		Detail: detail(map[string]any{"campaign": c, "rollout": r.ID, "wave": r.Wave, "back": r.Back})}
}

// actorOf is who a rollout's moves are made for.
func actorOf(r *api.Rollout) string { return orDefault(r.RunBy, r.Actor) }

// Create implements [rollout.Tenants].
func (t rolloutTenants) Create(ctx context.Context, r *api.Rollout, moves []api.PlannedItem) error {
	c := api.Campaign{ID: r.Campaign, Name: fmt.Sprintf("rollout %s, wave %d", r.ID, r.Wave), Settings: r.Settings.Campaign(), Actor: actorOf(r),
		OperationID: "rollout/" + string(r.Campaign), RequestID: string(r.ID), CreatedAt: time.Now().UTC()}
	if r.Back {
		c.Name = fmt.Sprintf("rollout %s, return", r.ID)
		c.Settings.Force, c.Settings.PreferUndo, c.Settings.UndoWindow = true, true, "0s"
	}
	if err := c.Settings.Normalize(); err != nil {
		return err
	}
	c.UpdatedAt = c.CreatedAt
	_, _, err := t.s.store.CreateCampaign(ctx, c, moves, t.audit(r, "plan", r.Campaign))
	return err
}

func (t rolloutTenants) order(ctx context.Context, r *api.Rollout, id api.CampaignID, verb string, do func(*api.Campaign, *api.CampaignOrder) error, o api.CampaignOrder) error {
	e := t.audit(r, verb, id)
	o.Actor = actorOf(r)
	_, err := t.s.store.UpdateCampaign(ctx, id, func(c *api.Campaign) error {
		if err := do(c, &o); err != nil {
			return err
		}
		c.UpdatedAt = e.At
		return nil
	}, &e)
	if a := cells.AnswerOf(err); errors.Is(err, errNoChange) || a != nil && a.Code == cells.CodeConflict {
		return nil // it has gone on meanwhile
	}
	if err == nil {
		t.s.camps.kick()
	}
	return err
}

// Run implements [rollout.Tenants].
func (t rolloutTenants) Run(ctx context.Context, r *api.Rollout, id api.CampaignID) error {
	return t.order(ctx, r, id, "run", runCampaign, api.CampaignOrder{})
}

// Hold implements [rollout.Tenants].
func (t rolloutTenants) Hold(ctx context.Context, r *api.Rollout, id api.CampaignID) error {
	return t.order(ctx, r, id, "pause", pauseCampaign, api.CampaignOrder{Reason: "its rollout is paused"})
}

// End implements [rollout.Tenants].
func (t rolloutTenants) End(ctx context.Context, r *api.Rollout, id api.CampaignID, rollback bool) error {
	return t.order(ctx, r, id, "abort", abortCampaign, api.CampaignOrder{Reason: "its rollout goes on without it", Rollback: rollback})
}
