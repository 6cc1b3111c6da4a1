// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// Thirty tenants of one cell are spread over three while they are used, and the
// directory is killed in the middle, twice. All of them end where they were planned,
// each was moved once, and nothing is lost.
func TestRebalanceSurvivesKills(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StoreSQLite, Cells: []fleet.Cell{{Name: "cell-a"}, {Name: "cell-b"}, {Name: "cell-c"}}})
	const tenants = 30
	var stops []func() load.Tally
	for i := range tenants {
		c := e.tenant(fmt.Sprintf("t%02d", i), "cell-a")
		if err := c.Fill(t.Context(), "bulk", 20, 100, func(int) {}); err != nil {
			t.Fatal(err)
		}
		stops = append(stops, e.hammer(&load.Hammer{Client: c, Clients: 1, Keys: 3, Pause: 100 * time.Millisecond}))
	}
	list := make([]cells.TenantID, tenants)
	for i := range list {
		list[i] = cells.TenantID(fmt.Sprintf("t%02d", i))
	}
	m, err := e.cl.Measure(t.Context(), list)
	if err != nil || len(m.Tenants) != tenants || m.Tenants[0].Rows < 20 {
		t.Fatalf("measured %+v, %v", m, err)
	}
	p, err := e.cl.PlanCampaign(t.Context(), api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven}, Actor: "test",
		Settings: api.CampaignSettings{Concurrency: 4, StopAfter: "none", UndoWindow: "0s"}})
	if err != nil || p.Campaign.Counts.Total != 20 || p.Campaign.Rows < 20*20 {
		t.Fatalf("plan %+v, %v", p, err)
	}
	id := p.Campaign.ID
	if _, err := e.cl.RunCampaign(t.Context(), id, api.CampaignOrder{Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	moved := func(n int64) func() bool {
		return func() bool {
			c, err := e.cl.Campaign(t.Context(), id)
			return err == nil && c.Counts.Moved >= n
		}
	}
	for _, n := range []int64{3, 10} {
		e.eventually(fmt.Sprintf("%d are moved", n), 90*time.Second, moved(n))
		e.kill("directory")
	}
	var last api.Campaign
	if err := e.cl.WatchCampaign(t.Context(), id, func(c api.Campaign) error { last = c; return nil }); err != nil {
		t.Fatal(err)
	}
	if last.State != api.CampaignDone || last.Counts.Finished() != 20 {
		t.Fatalf("campaign %s: %+v", last.State, last.Counts)
	}
	items, err := e.cl.CampaignItems(t.Context(), id, client.ItemQuery{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, it := range items.Items {
		if it.State != api.ItemMoved {
			t.Errorf("%s: %s %s", it.Tenant, it.State, it.Reason)
			continue
		}
		e.settle(it.Move)
		if at := e.cellOf(string(it.Tenant)); at != it.To {
			t.Errorf("%s is in %s, planned was %s", it.Tenant, at, it.To)
		}
		moves, err := e.cl.Moves(t.Context(), client.MoveQuery{Tenant: it.Tenant})
		if err != nil || len(moves.Moves) != 1 {
			t.Errorf("%s was moved %d times, %v", it.Tenant, len(moves.Moves), err)
		}
	}
	for i, stop := range stops {
		mustBeClean(t, fmt.Sprintf("t%02d", i), stop(), false)
	}
	e.eventually("every cell has ten", 20*time.Second, func() bool {
		list, err := e.cl.Cells(t.Context())
		if err != nil {
			return false
		}
		for _, c := range list {
			if c.Tenants != 10 {
				return false
			}
		}
		return true
	})
	drainByHand(t, e)
}

// drainByHand does what an operator does: plan, look, edit, run, look again.
func drainByHand(t *testing.T, e *env) {
	cell := func(in string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "cell"), append([]string{"--fleet", e.Layout.Dir}, args...)...)
		cmd.Stdin, cmd.Stderr = strings.NewReader(in), new(strings.Builder)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("cell %s: %v\n%s%s", strings.Join(args, " "), err, out, cmd.Stderr)
		}
		return string(out)
	}
	var rec api.Campaign
	read := func(text string) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), &rec); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	cell("", "cells", "set", "cell-c", "--closed")
	read(cell("", "--json", "campaign", "plan", "--policy", "drain", "--drain", "cell-c", "--cells", "cell-b", "--name", "by hand", "--per-pair", "2"))
	id := string(rec.ID)
	if rec.Counts.Pending != 10 || rec.Estimate == nil || rec.Estimate.Pause <= 0 {
		t.Fatalf("planned %+v", rec)
	}
	plan := cell("", "campaign", "show", id, "--plan")
	lines := strings.SplitAfter(plan, "\n")
	kept := strings.Join(lines[:len(lines)-9], "") // two of ten moves: the last line is empty
	read(cell(kept, "--json", "campaign", "edit", id, "--file", "-"))
	if rec.Counts.Pending != 2 {
		t.Fatalf("edited %+v from\n%s", rec.Counts, kept)
	}
	if out := cell("", "campaign", "run", id, "--follow"); !strings.Contains(out, id+" DONE by hand, policy drain") || !strings.Contains(out, "moves      2, 2 moved") {
		t.Errorf("run says\n%s", out)
	}
	if out := cell("", "campaign", "list"); !strings.Contains(out, id) {
		t.Errorf("list says\n%s", out)
	}
	if out := cell("", "campaign", "show", id, "--items"); strings.Count(out, "MOVED") != 2 {
		t.Errorf("show says\n%s", out)
	}
	if out := cell("", "tenants", "set", "t00", "--group", "g", "--jurisdiction", "eu"); !strings.Contains(out, "t00: group g, jurisdiction eu") {
		t.Errorf("set says\n%s", out)
	}
	if out := cell("", "campaign", "plan", "--policy", "drain", "--drain", "cell-a", "--dry-run"); !strings.Contains(out, "t00 in cell-a: no cell is in its jurisdiction") {
		t.Errorf("dry run says\n%s", out)
	}
}
