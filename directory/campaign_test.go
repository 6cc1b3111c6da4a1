// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// crowd places tenants t00, t01, ... with rows in a cell.
func (d *dir) crowd(cell cells.CellID, from, n int) {
	d.t.Helper()
	for i := from; i < from+n; i++ {
		t := cells.TenantID(fmt.Sprintf("t%02d", i))
		d.place(t, cell)
		d.state.far.set(func() { d.state.far.rows[place{cell, t}] = 1000 })
	}
}

func (d *dir) planned(r api.CampaignRequest) api.Campaign {
	d.t.Helper()
	if r.Actor == "" {
		r.Actor = "alice"
	}
	p, err := d.cl.PlanCampaign(ctxOf(d.t), r)
	if err != nil {
		d.t.Fatalf("plan: %v", err)
	}
	return p.Campaign
}

func (d *dir) run(id api.CampaignID) {
	d.t.Helper()
	if _, err := d.cl.RunCampaign(ctxOf(d.t), id, api.CampaignOrder{Actor: "bob"}); err != nil {
		d.t.Fatalf("run: %v", err)
	}
}

// untilCampaign waits until the campaign's record satisfies ok.
func (d *dir) untilCampaign(id api.CampaignID, what string, ok func(*api.Campaign) bool) api.Campaign {
	d.t.Helper()
	var c api.Campaign
	eventually(d.t, what, func() bool {
		var err error
		c, err = d.cl.Campaign(ctxOf(d.t), id)
		return err == nil && ok(&c)
	})
	return c
}

func (d *dir) items(id api.CampaignID) []api.CampaignItem {
	d.t.Helper()
	list, err := d.cl.CampaignItems(ctxOf(d.t), id, client.ItemQuery{Limit: 1000})
	if err != nil {
		d.t.Fatal(err)
	}
	return list.Items
}

// whole says what must hold of a campaign at rest: every moved tenant is where it
// was planned, every item's move was made once, the counts are right.
func (d *dir) whole(id api.CampaignID) {
	d.t.Helper()
	c, err := d.cl.Campaign(ctxOf(d.t), id)
	if err != nil {
		d.t.Fatal(err)
	}
	var n api.CampaignCounts
	for _, it := range d.items(id) {
		n.Total++
		*n.Of(it.State)++
		r := d.route(it.Tenant)
		want := it.From
		if it.State == api.ItemMoved {
			want = it.To
		}
		if r.CellID != want || r.State != cells.StateActive {
			d.t.Errorf("%s is %s in %s, its item %+v", it.Tenant, r.State, r.CellID, it)
		}
		list, err := d.cl.Moves(ctxOf(d.t), client.MoveQuery{Tenant: it.Tenant})
		if err != nil {
			d.t.Fatal(err)
		}
		if len(list.Moves) > it.Attempt {
			d.t.Errorf("%s was moved %d times in %d attempts", it.Tenant, len(list.Moves), it.Attempt)
		}
		// One move costs two epochs, however often it was asked for.
		if it.State == api.ItemMoved && it.Attempt == 1 && r.Epoch != 3 {
			d.t.Errorf("%s is at epoch %d", it.Tenant, r.Epoch)
		}
	}
	if n != c.Counts {
		d.t.Errorf("counts %+v, the items say %+v", c.Counts, n)
	}
	d.state.far.mu.Lock()
	defer d.state.far.mu.Unlock()
	for _, b := range d.state.far.broken {
		d.t.Error(b)
	}
}

func even(s api.CampaignSettings) api.CampaignRequest {
	return api.CampaignRequest{Name: "spread", Policy: &api.PolicySpec{Kind: api.PolicyEven}, Settings: s}
}

func TestCampaign(t *testing.T) {
	d := newState(t).start(t, nil)
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d.cell(c, api.CellSpec{})
	}
	d.crowd("a", 0, 9)
	dry, err := d.cl.PlanCampaign(ctxOf(t), api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven}, DryRun: true})
	if err != nil || len(dry.Moves) != 6 || dry.Campaign.ID != "" {
		t.Fatalf("dry run %+v %v", dry, err)
	}
	c := d.planned(api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven}, Settings: api.CampaignSettings{Concurrency: 3, PerPair: 2}, OperationID: "op-1"})
	if c.State != api.CampaignPlanned || c.Counts.Pending != 6 || c.Driver != "" {
		t.Errorf("planned %+v", c)
	}
	again := d.planned(api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven}, OperationID: "op-1"})
	if again.ID != c.ID {
		t.Errorf("a repeated operation made %s beside %s", again.ID, c.ID)
	}
	d.run(c.ID)
	d.run(c.ID)
	c = d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	if c.Counts.Moved != 6 || c.RunBy != "bob" || c.FinishedAt.IsZero() || c.Pause <= 0 || c.Driver != "" {
		t.Errorf("done %+v", c)
	}
	d.whole(c.ID)
	// Its moves are one group to the cells.
	for _, it := range d.items(c.ID) {
		m, err := d.cl.MoveByID(ctxOf(t), it.Move)
		if err != nil || m.Group != string(c.ID)+".g0" {
			t.Errorf("move %s is of group %q, %v", it.Move, m.Group, err)
		}
		d.state.far.set(func() {
			if got := d.state.far.groups[it.Move]; string(got) != m.Group {
				t.Errorf("the cells of move %s were told group %q", it.Move, got)
			}
		})
	}
	eventually(t, "the ledger is right", func() bool { return d.tenants("a") == 3 && d.tenants("b") == 3 && d.tenants("c") == 3 })
	// The moves are those of whoever ran it; every step has its entry.
	audit, err := d.cl.Audit(ctxOf(t), client.AuditQuery{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]int{}
	for _, e := range audit.Entries {
		n[e.Action+" "+e.Actor]++
	}
	for what, want := range map[string]int{"campaign.plan alice": 1, "campaign.run bob": 1, "move.create bob": 6, "campaign.item directory/d1": 6, "campaign.done directory/d1": 1} {
		if n[what] != want {
			t.Errorf("%d entries %q, want %d: %v", n[what], what, want, n)
		}
	}
	// A plan of what is even is empty, and done at once.
	c = d.planned(even(api.CampaignSettings{}))
	d.run(c.ID)
	d.untilCampaign(c.ID, "an empty one is done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
}

func TestCampaignBounds(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Moves = 16 })
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d.cell(c, api.CellSpec{})
	}
	d.crowd("a", 0, 12)
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	c := d.planned(even(api.CampaignSettings{Concurrency: 5, PerPair: 2}))
	d.run(c.ID)
	d.untilCampaign(c.ID, "two for each pair run", func(c *api.Campaign) bool { return c.Counts.Running == 4 })
	per := map[cells.CellID]int{}
	for _, it := range d.items(c.ID) {
		if it.State == api.ItemRunning {
			per[it.To]++
		}
	}
	if per["b"] != 2 || per["c"] != 2 {
		t.Errorf("running %v", per)
	}
	// Paused: what runs ends, nothing begins.
	if _, err := d.cl.PauseCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "carol"}); err != nil {
		t.Fatal(err)
	}
	_, err := d.cl.EditCampaign(ctxOf(t), api.CampaignFile{Campaign: c.ID})
	wantCode(t, err, cells.CodeConflict)
	close(gate)
	s.far.set(func() { delete(s.far.block, "Prepare") })
	c = d.untilCampaign(c.ID, "at rest", func(c *api.Campaign) bool { return c.Counts.Running == 0 && c.Driver == "" })
	if c.State != api.CampaignPaused || c.Counts.Moved != 4 || c.Counts.Pending != 4 || !strings.Contains(c.Reason, "carol") {
		t.Errorf("paused %+v", c)
	}
	if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{}); err != nil {
		t.Fatal(err)
	}
	d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	d.whole(c.ID)
}

func TestCampaignStopsAndRetries(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.crowd("a", 0, 8)
	s.far.set(func() { s.far.fail["Drain"] = 1 })
	c := d.planned(even(api.CampaignSettings{Concurrency: 1}))
	d.run(c.ID)
	c = d.untilCampaign(c.ID, "stopped", func(c *api.Campaign) bool { return c.State == api.CampaignPaused && c.Counts.Running == 0 })
	if c.Counts.Failed != 1 || c.Counts.Pending != 3 || !strings.Contains(c.Reason, "1 of 4") {
		t.Errorf("stopped %+v", c)
	}
	d.whole(c.ID)
	// Resumed: that failure is accepted.
	if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{}); err != nil {
		t.Fatal(err)
	}
	c = d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	if c.Counts.Moved != 3 || c.Counts.Failed != 1 {
		t.Errorf("done %+v", c.Counts)
	}
	// And tried again.
	if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{Retry: true}); err != nil {
		t.Fatal(err)
	}
	c = d.untilCampaign(c.ID, "done again", func(c *api.Campaign) bool { return c.State == api.CampaignDone && c.Counts.Moved == 4 })
	d.whole(c.ID)
	for _, it := range d.items(c.ID) {
		if it.Attempt == 2 && it.Move != api.ItemMove(c.ID, it.Pos, 2) {
			t.Errorf("attempt %+v", it)
		}
	}
}

func TestCampaignAborts(t *testing.T) {
	for _, back := range []bool{false, true} {
		t.Run(fmt.Sprintf("rollback=%v", back), func(t *testing.T) {
			s := newState(t)
			d := s.start(t, nil)
			d.cell("a", api.CellSpec{})
			d.cell("b", api.CellSpec{})
			d.crowd("a", 0, 8)
			gate := make(chan struct{})
			s.far.set(func() { s.far.block["Prepare"] = gate })
			c := d.planned(even(api.CampaignSettings{Concurrency: 2, StopAfter: "none"}))
			d.run(c.ID)
			d.untilCampaign(c.ID, "two run", func(c *api.Campaign) bool { return c.Counts.Running == 2 })
			eventually(t, "both prepare", func() bool { return s.far.get(func() int { return s.far.calls["Prepare"] }) == 2 })
			if _, err := d.cl.AbortCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "carol", Rollback: back}); err != nil {
				t.Fatal(err)
			}
			if !back {
				close(gate)
			}
			c = d.untilCampaign(c.ID, "aborted", func(c *api.Campaign) bool { return c.State == api.CampaignAborted })
			if back && (c.Counts.Failed != 2 || c.Counts.Moved != 0) || !back && c.Counts.Moved != 2 || c.Counts.Skipped != 2 {
				t.Errorf("aborted %+v", c.Counts)
			}
			if back {
				close(gate)
			}
			d.whole(c.ID)
			_, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{Retry: true})
			wantCode(t, err, cells.CodeConflict)
		})
	}
}

// The directory is killed at each persisted step, once; what starts on its store
// goes on, and every tenant is moved once.
func TestCampaignSurvivesKills(t *testing.T) {
	kill := errors.New("killed")
	steps := []string{directory.CampaignStepTaken, directory.CampaignStepBegin, directory.CampaignStepCreated, directory.CampaignStepResult, directory.CampaignStepDone}
	for _, step := range []cells.Step{cells.StepBegin, cells.StepQuiesce, cells.StepCopy, cells.StepCommit, cells.StepActivate} {
		steps = append(steps, "move "+string(step))
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s := newState(t)
			reached := make(chan struct{})
			var once sync.Once
			stop := func(ctx context.Context) error {
				once.Do(func() { close(reached) })
				<-ctx.Done() // it stands there until the process is gone
				return kill
			}
			d := s.start(t, func(c *directory.Config) {
				c.CampaignHook = func(ctx context.Context, at string, _ api.CampaignID, _ int64) error {
					if at == step {
						return stop(ctx)
					}
					return nil
				}
				c.StepHook = func(ctx context.Context, ev cells.StepEvent) error {
					if "move "+string(ev.Step) == step {
						return stop(ctx)
					}
					return nil
				}
			})
			for _, c := range []cells.CellID{"a", "b", "c"} {
				d.cell(c, api.CellSpec{})
			}
			d.crowd("a", 0, 6)
			c := d.planned(even(api.CampaignSettings{Concurrency: 2}))
			d.run(c.ID)
			select {
			case <-reached:
			case <-time.After(time.Minute):
				t.Fatal("the step was not reached")
			}
			d.close()
			d = s.start(t, nil)
			c = d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
			if c.Counts.Moved != 4 {
				t.Errorf("moved %+v", c.Counts)
			}
			d.whole(c.ID)
		})
	}
}

// Two directories on one store: one drives; when it dies the other goes on; both
// at once move nobody twice.
func TestCampaignHasOneDriver(t *testing.T) {
	s := newState(t)
	d1 := s.start(t, nil)
	d2 := s.start(t, func(c *directory.Config) { c.Name = "d2" })
	for _, c := range []cells.CellID{"a", "b"} {
		d1.cell(c, api.CellSpec{})
	}
	d1.crowd("a", 0, 10)
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	c := d1.planned(even(api.CampaignSettings{Concurrency: 2}))
	d1.run(c.ID)
	c = d2.untilCampaign(c.ID, "two run", func(c *api.Campaign) bool { return c.Counts.Running == 2 })
	first, other := d1, d2
	if strings.HasPrefix(c.Driver, "d2/") {
		first, other = d2, d1
	}
	close(gate)
	s.far.set(func() { delete(s.far.block, "Prepare") })
	first.close()
	c = other.untilCampaign(c.ID, "done by the other", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	if c.Counts.Moved != 5 {
		t.Errorf("moved %+v", c.Counts)
	}
	other.whole(c.ID)
}

// Two directories that take each other for dead all the time: every campaign and
// every move changes hands at each look, and still nobody is moved twice.
func TestCampaignDriversFight(t *testing.T) {
	s := newState(t)
	hasty := func(name string) func(*directory.Config) {
		return func(c *directory.Config) {
			c.Name, c.TakeOver, c.SweepEvery = name, time.Nanosecond, 3*time.Millisecond
		}
	}
	d1, d2 := s.start(t, hasty("d1")), s.start(t, hasty("d2"))
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d1.cell(c, api.CellSpec{})
	}
	d1.crowd("a", 0, 15)
	drivers := map[string]bool{}
	c := d1.planned(even(api.CampaignSettings{Concurrency: 3, StopAfter: "none"}))
	d1.run(c.ID)
	c = d2.untilCampaign(c.ID, "done", func(c *api.Campaign) bool {
		drivers[c.Driver] = true
		return c.State == api.CampaignDone
	})
	if c.Counts.Finished() != 10 || c.Counts.Moved == 0 {
		t.Errorf("finished %+v", c.Counts)
	}
	eventually(t, "every move is over", func() bool {
		for _, it := range d1.items(c.ID) {
			if r := d1.route(it.Tenant); r.MoveID != "" || r.State != cells.StateActive {
				return false
			}
		}
		return true
	})
	d2.whole(c.ID)
	t.Logf("%d drivers, %+v", len(drivers), c.Counts)
}

func TestCampaignPlansAreEdited(t *testing.T) {
	d := newState(t).start(t, nil)
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d.cell(c, api.CellSpec{})
	}
	d.cell("eu", api.CellSpec{Jurisdiction: "eu"})
	d.crowd("a", 0, 6)
	if _, err := d.cl.SetAttributes(ctxOf(t), "t05", api.AttributesRequest{Jurisdiction: "eu", Actor: "alice"}); err != nil {
		t.Fatal(err)
	}
	c := d.planned(api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven, Cells: []cells.CellID{"a", "b"}}})
	f, err := d.cl.CampaignFile(ctxOf(t), c.ID)
	if err != nil || len(f.Moves) != 3 || c.StaysTotal != 1 || c.Stays[0].Tenant != "t05" {
		t.Fatalf("file %+v of %+v %v", f, c, err)
	}
	edit := func(moves ...api.PlannedMove) error {
		g := f
		g.Moves, g.Actor = moves, "carol"
		_, err := d.cl.EditCampaign(ctxOf(t), g)
		return err
	}
	a := wantCode(t, edit(api.PlannedMove{Tenant: "t00", From: "b", To: "c"}, api.PlannedMove{Tenant: "t01", From: "a", To: "a"},
		api.PlannedMove{Tenant: "t02", From: "a", To: "z"}, api.PlannedMove{Tenant: "t03", From: "a", To: "b"}, api.PlannedMove{Tenant: "t03", From: "a", To: "b"},
		api.PlannedMove{Tenant: "gone", From: "a", To: "b"}, api.PlannedMove{Tenant: "t05", From: "a", To: "b"}), cells.CodeBadRequest)
	for _, want := range []string{"6 moves", `t00: it is in a, not in "b"`, "t01: from a to itself", `t02: cell "z"`, "t03: listed twice", "gone: the tenant has no route", "t05: cell b is not in jurisdiction eu"} {
		if !strings.Contains(a.Detail, want) {
			t.Errorf("the answer lacks %q: %s", want, a.Detail)
		}
	}
	if err := edit(api.PlannedMove{Tenant: "t04", From: "a", To: "c"}, api.PlannedMove{Tenant: "t05", From: "a", To: "eu"}); err != nil {
		t.Fatal(err)
	}
	wantCode(t, edit(), cells.CodeConflict) // of an old version
	for _, body := range []string{`{"campaign":"` + string(c.ID) + `","version":1,"colour":"red"}`, `{"campaign":"cp-x","version":1,"moves":[]}`} {
		if a := d.raw(http.MethodPut, api.PathCampaigns+"/"+string(c.ID)+"/plan", "", "application/json", body); a.status != 400 {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	// A tenant that somebody else moves meanwhile is left alone.
	d.untilState(d.move("t04", "b").ID, api.MoveDone)
	d.run(c.ID)
	c = d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	items := d.items(c.ID)
	if c.Counts.Moved != 1 || c.Counts.Skipped != 1 || len(items) != 2 || items[0].Pos != 4 || !strings.Contains(items[0].Reason, "in cell b, not in a") {
		t.Errorf("done %+v %+v", c.Counts, items)
	}
}

func TestCampaignWindowsAndPace(t *testing.T) {
	s := newState(t)
	var mu sync.Mutex
	now := time.Date(2026, 6, 3, 12, 0, 0, 0, time.UTC) // a Wednesday
	set := func(to time.Time) {
		mu.Lock()
		defer mu.Unlock()
		now = to
	}
	d := s.start(t, func(c *directory.Config) {
		c.Now = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return now
		}
	})
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.crowd("a", 0, 6)
	c := d.planned(even(api.CampaignSettings{PerHour: 1, TimeZone: "Europe/Berlin", Windows: []api.Window{{Days: []string{"wed"}, From: "22:00", To: "04:00"}}}))
	d.run(c.ID)
	c = d.untilCampaign(c.ID, "driven", func(c *api.Campaign) bool { return c.Driver != "" })
	if c.Waiting != "until 2026-06-03T20:00:00Z" || c.Counts.Running+c.Counts.Moved != 0 {
		t.Errorf("before the window %+v", c)
	}
	moved := func(n int64) {
		t.Helper()
		d.poke(c.ID)
		d.untilCampaign(c.ID, fmt.Sprintf("%d moved", n), func(c *api.Campaign) bool { return c.Counts.Moved == n && c.Counts.Running == 0 })
	}
	set(time.Date(2026, 6, 3, 20, 0, 0, 0, time.UTC))
	moved(1)
	set(time.Date(2026, 6, 3, 20, 59, 0, 0, time.UTC))
	d.poke(c.ID)
	if c := d.untilCampaign(c.ID, "it waits", func(c *api.Campaign) bool { return c.Waiting != "" }); c.Counts.Moved != 1 || c.Waiting != "until 2026-06-03T21:00:00Z" {
		t.Errorf("paced %+v", c)
	}
	set(time.Date(2026, 6, 3, 21, 0, 0, 0, time.UTC))
	moved(2)
	set(time.Date(2026, 6, 4, 2, 0, 0, 0, time.UTC)) // 04:00 in Berlin
	d.poke(c.ID)
	if c := d.untilCampaign(c.ID, "it is over", func(c *api.Campaign) bool { return c.Waiting != "" }); c.Waiting != "until 2026-06-10T20:00:00Z" {
		t.Errorf("after the window %+v", c)
	}
	set(time.Date(2026, 6, 10, 20, 0, 0, 0, time.UTC))
	moved(3)
	d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
}

// poke makes the driver look now: an order that changes nothing does.
func (d *dir) poke(id api.CampaignID) {
	d.t.Helper()
	d.run(id)
}

func TestFullCellsWait(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	one := int64(1)
	d.cell("a", api.CellSpec{PlacementsMax: &one})
	d.cell("b", api.CellSpec{PlacementsMax: &one})
	d.cell("c", api.CellSpec{})
	d.crowd("a", 0, 1)
	d.crowd("b", 1, 1)
	c := d.planned(api.CampaignRequest{Moves: []api.PlannedMove{{Tenant: "t00", From: "a", To: "b"}, {Tenant: "t01", From: "b", To: "c"}}})
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	if _, err := d.cl.EditCampaign(ctxOf(t), api.CampaignFile{Campaign: c.ID, Version: c.Version, Settings: c.Settings,
		Moves: []api.PlannedMove{{Tenant: "t01", From: "b", To: "c"}, {Tenant: "t00", From: "a", To: "b"}}}); err != nil {
		t.Fatal(err)
	}
	d.run(c.ID)
	d.untilCampaign(c.ID, "one runs, the other waits for its room", func(c *api.Campaign) bool { return c.Counts.Running == 1 && c.Counts.Pending == 1 })
	close(gate)
	c = d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone })
	if c.Counts.Moved != 2 {
		t.Errorf("%+v %+v", c.Counts, d.items(c.ID))
	}
}

func TestMeasures(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.crowd("a", 0, 3)
	s.far.set(func() { s.far.rows[place{"a", "t02"}] = 5000 })
	m, err := d.cl.Measure(ctxOf(t), []cells.TenantID{"t00", "t01", "t02", "nobody"})
	if err != nil || len(m.Tenants) != 3 || m.Failed["nobody"] == "" {
		t.Fatalf("measured %+v %v", m, err)
	}
	c := d.planned(api.CampaignRequest{Policy: &api.PolicySpec{Kind: api.PolicyEven, By: cells.MeasureRows, Tolerance: 0.5}})
	f, err := d.cl.CampaignFile(ctxOf(t), c.ID)
	if err != nil || c.Unmeasured != 0 || len(f.Moves) != 1 || f.Moves[0].Tenant != "t02" || c.Rows != 5000 {
		t.Errorf("plan %+v %+v %v", c, f, err)
	}
	h := heartbeat("a", "i1", true)
	h.Busiest = append(h.Busiest, struct {
		Tenant    cells.TenantID `json:"tenant"`
		PerSecond float64        `json:"per_second"`
	}{"t01", 40})
	if a := d.post(d.peer("cell", "a"), "/cells/v1/members/heartbeat", h); a.status != 200 {
		t.Fatalf("heartbeat: %d %s", a.status, a.body)
	}
	got, err := d.cl.Tenant(ctxOf(t), "t01")
	if err != nil || got.Facts == nil || got.Facts.Load != 40 || got.Facts.Rows != 1000 {
		t.Errorf("facts %+v %v", got.Facts, err)
	}
	dry, err := d.cl.PlanCampaign(ctxOf(t), api.CampaignRequest{DryRun: true, Policy: &api.PolicySpec{Kind: api.PolicyHot, Above: 30, Dedicated: []cells.CellID{"b"}}})
	if err != nil || len(dry.Moves) != 1 || dry.Moves[0].Tenant != "t01" {
		t.Errorf("hot %+v %v", dry, err)
	}
}

func TestBadCampaigns(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	for body, status := range map[string]int{
		`{}`: 400, `{"policy":{"kind":"even"},"moves":[{"tenant":"t","from":"a","to":"b"}]}`: 400, `{"policy":{"kind":"magic"}}`: 400,
		`{"policy":{"kind":"even","cells":["z"]}}`: 404, `{"policy":{"kind":"drain","drain":["a"]}}`: 400,
		`{"policy":{"kind":"even"},"settings":{"concurrency":-1}}`: 400, `{"policy":{"kind":"even"},"settings":{"stop_after":"0"}}`: 400,
		`{"policy":{"kind":"even"},"settings":{"stop_after":"200%"}}`: 400, `{"policy":{"kind":"even"},"settings":{"time_zone":"Nowhere"}}`: 400,
		`{"policy":{"kind":"even"},"settings":{"windows":[{"from":"22:00","to":"22:00"}]}}`: 400, `{"policy":{"kind":"even"},"colour":1}`: 400,
		`{"policy":{"kind":"even"},"settings":{"undo_window":"soon"}}`: 400, `{"policy":{"kind":"even"},"settings":{"undo_window":"-1s"}}`: 400,
	} {
		if a := d.raw(http.MethodPost, api.PathCampaigns, "", "application/json", body); a.status != status {
			t.Errorf("%s: %d %s, want %d", body, a.status, a.body, status)
		}
	}
	for _, path := range []string{"/cp-1", "/cp-1/items", "/cp-1/plan"} {
		if a := d.raw(http.MethodGet, api.PathCampaigns+path, "", "", ""); a.status != 404 {
			t.Errorf("%s: %d", path, a.status)
		}
	}
	for _, verb := range []string{"run", "pause", "resume", "abort"} {
		if a := d.raw(http.MethodPost, api.PathCampaigns+"/cp-1/"+verb, "", "application/json", `{}`); a.status != 404 {
			t.Errorf("%s: %d", verb, a.status)
		}
	}
	if a := d.raw(http.MethodGet, api.PathCampaigns+"/a.b", "", "", ""); a.status != 400 {
		t.Errorf("a bad id: %d", a.status)
	}
}
