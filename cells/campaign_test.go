// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func planText(p CampaignPlan) string {
	var s []string
	for _, m := range p.Moves {
		s = append(s, fmt.Sprintf("%s:%s->%s", m.TenantID, m.FromCell, m.ToCell))
	}
	return strings.Join(s, " ")
}

func TestPlanFromPolicy(t *testing.T) {
	ctx := t.Context()
	abc := []CellID{"a", "b", "c"}
	rows := []TenantRoute{
		{TenantID: "t4", State: StateActive, CellID: "a", Epoch: 1},
		{TenantID: "t1", State: StateActive, CellID: "a", Epoch: 1},
		{TenantID: "t3", State: StateActive, CellID: "a", Epoch: 1},
		{TenantID: "t2", State: StateActive, CellID: "x", Epoch: 1},
		{TenantID: "t0", State: StateDeleted, CellID: "a", Epoch: 1},
		{TenantID: "t5", State: StateActive, CellID: "a", Epoch: 1},
	}
	text := func(p CampaignPlan, err error) string {
		if err != nil {
			return err.Error()
		}
		return planText(p)
	}
	for _, tc := range []struct{ name, got, want string }{
		{"round robin by id", text(PlanFromPolicy(ctx, []TenantID{"t2", "t1", "t3", "t4"}, RoundRobinPolicy(abc), nil)),
			"t1:->a t2:->b t3:->c t4:->a"},
		{"round robin by row", text(PlanFromPolicy(ctx, rows, RoundRobinPolicy(abc), nil)), "t2:x->b t3:a->c t5:a->b"},
		{"even spread", text(PlanFromPolicy(ctx, rows, EvenSpreadPolicy(abc), nil)), "t2:x->b t4:a->b t5:a->c"},
		{"bounded", text(PlanFromPolicy(ctx, rows, RoundRobinPolicy(abc), &PlanOptions{MaxMoves: 1})), "t2:x->b"},
		{"nobody", text(PlanFromPolicy(ctx, []TenantID(nil), RoundRobinPolicy(abc), nil)), ""},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, tc.got, tc.want)
		}
	}
	ids := []TenantID{"t1"}
	for name, err := range map[string]error{
		"no cells":    second(PlanFromPolicy(ctx, ids, RoundRobinPolicy(nil), nil)),
		"twice":       second(PlanFromPolicy(ctx, ids, EvenSpreadPolicy([]CellID{"a", "a"}), nil)),
		"bad cell":    second(PlanFromPolicy(ctx, ids, RoundRobinPolicy([]CellID{"A"}), nil)),
		"no policy":   second(PlanFromPolicy(ctx, ids, nil, nil)),
		"same tenant": second(PlanFromPolicy(ctx, []TenantID{"t1", "t1"}, RoundRobinPolicy(abc), nil)),
		"bad tenant":  second(PlanFromPolicy(ctx, []TenantID{""}, RoundRobinPolicy(abc), nil)),
		"short answer": second(PlanFromPolicy(ctx, ids, PolicyFunc(func(context.Context, *FleetView) ([]Target, error) {
			return nil, nil
		}), nil)),
		"bad answer": second(PlanFromPolicy(ctx, ids, PolicyFunc(func(context.Context, *FleetView) ([]Target, error) {
			return []Target{{Cell: "A"}}, nil
		}), nil)),
	} {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestCampaign(t *testing.T) {
	setup := func(t *testing.T) (*world, *MoveController, CampaignPlan) {
		w := newWorld(t)
		meter := NewBudgetMeter()
		if err := meter.Charge(t.Context(), "t3", "earlier", DefaultBudget); err != nil {
			t.Fatal(err)
		}
		c := NewMoveController(w, WithDrainer(w), WithBudgetMeter(meter))
		var plan CampaignPlan
		for i := range 5 {
			tenant := TenantID(fmt.Sprintf("t%d", i+1))
			at := CellID("a")
			if i == 0 {
				at = "b"
			}
			if err := c.Assign(t.Context(), tenant, at, ""); err != nil {
				t.Fatal(err)
			}
			plan.Moves = append(plan.Moves, MovePlan{TenantID: tenant, ToCell: "b"})
		}
		return w, c, plan
	}
	outcomes := func(r CampaignResult) string {
		var s []string
		for _, t := range r.Tenants {
			s = append(s, string(t.Outcome))
		}
		return strings.Join(s, " ")
	}

	t.Run("all", func(t *testing.T) {
		w, c, plan := setup(t)
		seen := 0
		res, err := NewCampaign(c, WithOutcome(func(TenantOutcome) { seen++ })).Run(t.Context(), plan)
		if outcomes(res) != "already moved deferred moved moved" || seen != 5 {
			t.Errorf("%s (%d told)", outcomes(res), seen)
		}
		if !errors.Is(err, ErrBudget) {
			t.Errorf("a deferred tenant is not told: %v", err)
		}
		if w.row("t3").CellID != "a" || w.row("t5").CellID != "b" {
			t.Error("not where the result says")
		}
		// Running it again goes on where it stopped.
		if res, _ = NewCampaign(c).Run(t.Context(), plan); outcomes(res) != "already already deferred already already" {
			t.Errorf("again: %s", outcomes(res))
		}
	})
	t.Run("stops", func(t *testing.T) {
		w, c, plan := setup(t)
		w.fail("drain", failBefore, 1)
		res, err := NewCampaign(c).Run(t.Context(), plan)
		if outcomes(res) != "already failed skipped skipped skipped" || !errors.Is(err, ErrRolledBack) {
			t.Errorf("%s, %v", outcomes(res), err)
		}
		if !strings.Contains(err.Error(), "tenant t2") || res.Tenants[1].Error == "" {
			t.Errorf("not told who: %v", err)
		}
	})
	t.Run("goes on", func(t *testing.T) {
		w, c, plan := setup(t)
		w.fail("drain", failBefore, 1)
		res, err := NewCampaign(c, WithContinueOnFailure()).Run(t.Context(), plan)
		if outcomes(res) != "already failed deferred moved moved" || !errors.Is(err, ErrRolledBack) || !errors.Is(err, ErrBudget) {
			t.Errorf("%s, %v", outcomes(res), err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		_, c, plan := setup(t)
		ctx, cancel := context.WithCancel(t.Context())
		res, err := NewCampaign(c, WithOutcome(func(o TenantOutcome) {
			if o.Plan.TenantID == "t2" {
				cancel()
			}
		})).Run(ctx, plan)
		if outcomes(res) != "already moved skipped skipped skipped" || !errors.Is(err, context.Canceled) {
			t.Errorf("%s, %v", outcomes(res), err)
		}
	})
}
