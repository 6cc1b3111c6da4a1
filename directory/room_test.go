// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/member"
)

func (d *dir) jurisdiction(t cells.TenantID, j string) {
	d.t.Helper()
	if _, err := d.cl.SetAttributes(ctxOf(d.t), t, api.AttributesRequest{Jurisdiction: j, Actor: "alice"}); err != nil {
		d.t.Fatal(err)
	}
}

// busy lets a process of a cell report its tenants' requests a second.
func (d *dir) busy(cell cells.CellID, loads ...member.TenantLoad) {
	d.t.Helper()
	h := heartbeat(cell, "i-"+string(cell), true)
	h.Busiest = loads
	if a := d.post(d.peer(channel.RoleCell, string(cell)), "/cells/v1/members/heartbeat", h); a.status != 200 {
		d.t.Fatalf("heartbeat: %d %s", a.status, a.body)
	}
}

// Operators' moves and placements are refused by what refuses the moves of plans, and
// force changes nothing of that.
func TestMovesAndPlacementsKeepToRoom(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Lapse = time.Minute }) // reports stay
	small, slow := int64(1500), 50.0
	d.cell("a", api.CellSpec{})
	d.cell("eu", api.CellSpec{Jurisdiction: "eu"})
	d.cell("rows", api.CellSpec{RowsMax: &small})
	d.cell("load", api.CellSpec{LoadMax: &slow})
	d.crowd("a", 0, 2)
	d.crowd("rows", 2, 1)
	d.crowd("load", 3, 1)
	if _, err := d.cl.Measure(ctxOf(t), []cells.TenantID{"t00", "t01", "t02"}); err != nil {
		t.Fatal(err)
	}
	d.jurisdiction("t00", "eu")
	d.busy("load", member.TenantLoad{Tenant: "t03", PerSecond: 45})
	d.busy("a", member.TenantLoad{Tenant: "t01", PerSecond: 6})

	for _, c := range []struct {
		tenant cells.TenantID
		to     cells.CellID
		code   cells.Code
		why    string
	}{
		{"t00", "rows", cells.CodeConflict, "cell rows is not in jurisdiction eu"},
		{"t01", "rows", cells.CodeCellClosed, "cell rows has no room for its rows"},
		{"t01", "load", cells.CodeCellClosed, "cell load has no room for its load"},
	} {
		for _, force := range []bool{false, true} {
			_, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: c.tenant, To: c.to, Actor: "alice", Force: force})
			if a := wantCode(t, err, c.code); a != nil && !strings.Contains(a.Detail, c.why) {
				t.Errorf("%s to %s: %s", c.tenant, c.to, a.Detail)
			}
			dry, err := d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: c.tenant, To: c.to, Actor: "alice", Force: force})
			if err != nil || dry.Allowed || len(dry.Refusals) != 1 || !strings.Contains(dry.Refusals[0], c.why) {
				t.Errorf("dry run of %s to %s: %+v, %v", c.tenant, c.to, dry, err)
			}
		}
		if list, err := d.cl.Moves(ctxOf(t), client.MoveQuery{Tenant: c.tenant}); err != nil || len(list.Moves) != 0 {
			t.Errorf("refused moves of %s are recorded: %+v, %v", c.tenant, list.Moves, err)
		}
	}
	// The same of placements; a cell that is not named is one that takes the tenant.
	d.busy("eu", member.TenantLoad{Tenant: "other", PerSecond: 1})
	d.busy("rows", member.TenantLoad{Tenant: "t02", PerSecond: 1})
	d.jurisdiction("new-eu", "eu")
	d.jurisdiction("new-us", "us")
	_, err := d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "new-eu", Cell: "a"})
	wantCode(t, err, cells.CodeConflict)
	if p, err := d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "new-eu"}); err != nil || p.Cell != "eu" {
		t.Errorf("placed %+v, %v", p, err)
	}
	_, err = d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "new-us"})
	wantCode(t, err, cells.CodeConflict)
	d.busy("load", member.TenantLoad{Tenant: "t03", PerSecond: 50})
	_, err = d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "busy", Cell: "load"})
	wantCode(t, err, cells.CodeCellClosed)
	small = 1000
	d.cell("rows", api.CellSpec{RowsMax: &small})
	_, err = d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "many", Cell: "rows"})
	wantCode(t, err, cells.CodeCellClosed)
	for _, tenant := range []cells.TenantID{"n1", "n2", "n3", "n4"} {
		p, err := d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: tenant})
		if err != nil || p.Cell == "rows" || p.Cell == "load" {
			t.Errorf("%s was placed in %s, %v", tenant, p.Cell, err)
		}
	}
	// And a move that fits is made.
	d.untilState(d.move("t00", "eu").ID, api.MoveDone)
}

// What a plan has kept to is looked at again when each of its moves begins: what has
// changed stops the campaign with the reason, and the move can be tried again.
func TestCampaignsLookAtRoomAgain(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Lapse = time.Minute }) // reports stay
	rows, load := int64(10_000), 100.0
	d.cell("a", api.CellSpec{Jurisdiction: "eu"})
	d.cell("b", api.CellSpec{Jurisdiction: "eu", RowsMax: &rows, LoadMax: &load})
	d.crowd("a", 0, 1)
	if _, err := d.cl.Measure(ctxOf(t), []cells.TenantID{"t00"}); err != nil {
		t.Fatal(err)
	}
	set := func(rows int64, load float64, jurisdiction string) func() {
		return func() {
			d.cell("b", api.CellSpec{Jurisdiction: "eu", RowsMax: &rows, LoadMax: &load})
			d.jurisdiction("t00", jurisdiction)
			d.busy("a", member.TenantLoad{Tenant: "t00", PerSecond: 30})
		}
	}
	c := d.planned(api.CampaignRequest{Moves: []api.PlannedMove{{Tenant: "t00", From: "a", To: "b"}}})
	failed := 0
	for why, change := range map[string]func(){
		"no room for its rows":   set(999, 100, ""),
		"no room for its load":   set(10_000, 29, ""),
		"not in jurisdiction us": set(10_000, 100, "us"),
	} {
		change()
		if failed == 0 {
			d.run(c.ID)
		} else if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "bob", Retry: true}); err != nil {
			t.Fatal(err)
		}
		failed++
		// It stops at the failure, or had nothing left to do.
		d.untilCampaign(c.ID, "at rest again", func(c *api.Campaign) bool {
			it := d.items(c.ID)[0]
			return (c.State == api.CampaignPaused || c.State == api.CampaignDone) && it.State == api.ItemFailed && it.Attempt == failed
		})
		if it := d.items(c.ID)[0]; !strings.Contains(it.Reason, why) {
			t.Errorf("the item says %q, want %q", it.Reason, why)
		}
		if r := d.route("t00"); r.CellID != "a" || r.Epoch != 1 {
			t.Errorf("the tenant is in %s at epoch %d", r.CellID, r.Epoch)
		}
	}
	set(1000, 30, "eu")()
	if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "bob", Retry: true}); err != nil {
		t.Fatal(err)
	}
	d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone && c.Counts.Moved == 1 })
}
