// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"testing"
)

func TestControllerSmoke(t *testing.T) {
	ctx := t.Context()
	c := NewMoveController(NewMemTable(), WithBudgetMeter(NewBudgetMeter()))
	if err := c.Assign(ctx, "tenant-7", "cell-a", "alice"); err != nil {
		t.Fatal(err)
	}
	res, err := c.Run(ctx, MovePlan{TenantID: "tenant-7", FromCell: "cell-a", ToCell: "cell-b"})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", res)
	ids := []TenantID{"tenant-7"}
	plan, err := PlanFromPolicy(ctx, ids, RoundRobinPolicy([]CellID{"cell-a"}), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewCampaign(c).Run(ctx, plan); err != nil {
		t.Fatal(err)
	}
}
