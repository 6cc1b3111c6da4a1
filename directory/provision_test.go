// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/transfer"
)

// telling is a far side whose cells say what their stores hold.
type telling struct {
	*far
	mu   sync.Mutex
	says member.Holdings
	err  error
}

func (f *telling) Holdings(context.Context, cells.CellID, int) (member.Holdings, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.says, f.err
}

func (f *telling) set(h member.Holdings, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.says, f.err = h, err
}

// provisioner is this test's end of a provisioner's channel.
func (d *dir) provisioner() *client.ProvisionerClient {
	d.t.Helper()
	ch := d.state.fleet.Open(d.t, channel.RoleProvisioner, "main")
	p, err := client.Provisioner(ch.Client(channel.Identity{Role: channel.RoleDirectory}), d.chURL)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(p.CloseIdleConnections)
	return p
}

func code(err error) cells.Code {
	if a := cells.AnswerOf(err); a != nil {
		return a.Code
	}
	return ""
}

// is reports a status of the cell's present generation.
func (d *dir) is(p *client.ProvisionerClient, cell cells.CellID, phase provision.Phase, ready int) {
	d.t.Helper()
	rec, err := d.cl.ProvisionedCell(ctxOf(d.t), cell, false)
	if err == nil {
		err = p.Report(ctxOf(d.t), provision.Status{Cell: cell, ObservedGeneration: rec.Spec.Generation, Phase: phase, Version: rec.Spec.Version,
			Replicas: ready, Ready: ready, Updated: ready})
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

func TestProvisionedCellsLife(t *testing.T) {
	s := newState(t)
	f := &telling{far: s.far}
	d := s.start(t, func(c *directory.Config) { c.Agents, c.UndoWindow = f, -1 })
	ctx, p := ctxOf(t), d.provisioner()

	// The catalogue.
	if _, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1"}); code(err) != cells.CodeNotFound {
		t.Errorf("a version that is not there: %v", err)
	}
	for _, v := range []string{"v1", "v2"} {
		if _, err := d.cl.PutVersion(ctx, v, api.VersionRequest{Command: []string{"memory", v}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.cl.PutVersion(ctx, "v1", api.VersionRequest{Command: []string{"other"}}); code(err) != cells.CodeConflict {
		t.Errorf("a version is changed: %v", err)
	}

	// A cell serves from its first process on.
	d.cell("b", api.CellSpec{})
	rec, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1", Jurisdiction: "eu", Actor: "alice"})
	if err != nil || rec.Spec.Generation != 1 || rec.Cell.State != api.CellAttaching || rec.Cell.Jurisdiction != "eu" || rec.Spec.Command[1] != "v1" {
		t.Fatalf("%+v, %v", rec, err)
	}
	if again, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1", Jurisdiction: "eu", Actor: "bob"}); err != nil || again.Spec.Generation != 1 || again.Actor != "alice" {
		t.Errorf("the same again: %+v, %v", again, err)
	}
	if _, err := d.cl.Place(ctx, api.PlacementRequest{Tenant: "t", Cell: "c"}); code(err) != cells.CodeCellClosed {
		t.Errorf("placed in a cell that does not run: %v", err)
	}
	d.is(p, "c", provision.PhaseProvisioning, 0)
	d.is(p, "c", provision.PhaseRunning, 1)
	d.place("t", "c")
	if err := d.cl.RemoveVersion(ctx, "v1", "alice"); code(err) != cells.CodeConflict {
		t.Errorf("a version in use is removed: %v", err)
	}

	// An upgrade is a new generation; what is said of the old one is overtaken.
	if _, err := d.cl.UpgradeCell(ctx, "c", api.UpgradeRequest{Version: "v2"}); err != nil {
		t.Fatal(err)
	}
	if err := p.Report(ctx, provision.Status{Cell: "c", ObservedGeneration: 1, Phase: provision.PhaseRunning, Version: "v1", Ready: 1, Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	if rec, err := d.cl.ProvisionedCell(ctx, "c", false); err != nil || rec.Progress.Reached || rec.Spec.Generation != 2 || rec.Spec.Command[1] != "v2" || rec.Cell.Version != "v2" {
		t.Errorf("%+v, %v", rec, err)
	}
	d.is(p, "c", provision.PhaseRunning, 1)

	// Retiring: not while it serves, not while somebody is there.
	if _, err := d.cl.RetireCell(ctx, "c", api.RetireRequest{}); code(err) != cells.CodeConflict || !strings.Contains(err.Error(), "drain") {
		t.Errorf("a serving cell is retired: %v", err)
	}
	if _, err := d.cl.DrainCell(ctx, "c", api.DrainRequest{Actor: "alice", Settings: api.CampaignSettings{UndoWindow: "0s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.cl.UpgradeCell(ctx, "c", api.UpgradeRequest{Version: "v1"}); code(err) != cells.CodeConflict {
		t.Errorf("a drained cell is upgraded: %v", err)
	}
	d.is(p, "c", provision.PhaseDraining, 1)
	if err := d.cl.WatchProvisioned(ctx, "c", func(api.Provisioned) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if r := d.route("t"); r.CellID != "b" {
		t.Errorf("t is in %s", r.CellID)
	}
	rec, err = d.cl.ProvisionedCell(ctx, "c", false)
	if err != nil || rec.Drain == nil || rec.Drain.Counts.Moved != 1 {
		t.Errorf("%+v, %v", rec.Drain, err)
	}
	waitNothingLeft(t, d)
	f.set(member.Holdings{Open: []cells.TenantID{"ghost"}, Rows: []transfer.Holding{{Table: "items", Tenant: "ghost"}}}, nil)
	for _, force := range []bool{false, true} {
		if _, err := d.cl.RetireCell(ctx, "c", api.RetireRequest{Force: force}); code(err) != cells.CodeConflict || !strings.Contains(err.Error(), "ghost has an open fence") {
			t.Errorf("rows in the cell's own store, force %v: %v", force, err)
		}
	}
	f.set(member.Holdings{}, errors.New("nobody answers"))
	if _, err := d.cl.RetireCell(ctx, "c", api.RetireRequest{}); code(err) != cells.CodeCellUnreachable || !strings.Contains(err.Error(), "nobody answers") {
		t.Errorf("a cell that does not answer: %v", err)
	}
	rec, err = d.cl.RetireCell(ctx, "c", api.RetireRequest{Force: true, Actor: "carol"})
	if err != nil || rec.ForcedBy != "carol" || !rec.Spec.KeepStore || rec.Cell.State != api.CellRetiring {
		t.Fatalf("%+v, %v", rec, err)
	}
	if _, err := d.cl.PutCell(ctx, "c", api.CellSpec{}); code(err) != cells.CodeConflict {
		t.Errorf("a cell that is being retired is opened: %v", err)
	}
	if _, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1"}); code(err) != cells.CodeConflict {
		t.Errorf("a cell that is being retired is made again: %v", err)
	}
	d.is(p, "c", provision.PhaseRetired, 0)
	if _, err := d.cl.Cell(ctx, "c"); code(err) != cells.CodeNotFound {
		t.Errorf("a retired cell is registered: %v", err)
	}
	list, err := d.cl.Audit(ctx, client.AuditQuery{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for _, e := range list.Entries {
		said[e.Action] = e.Actor
	}
	if said["cell.retire"] != "carol" || said["cell.drain"] != "alice" || said["cell.retired"] == "" {
		t.Errorf("the audit has %v", said)
	}
	// A new cell of the name goes on with the generations.
	rec, err = d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1"})
	if err != nil || rec.Spec.Generation != 5 || rec.ForcedBy != "" || rec.Cell.State != api.CellAttaching {
		t.Errorf("%+v, %v", rec, err)
	}
}

func waitNothingLeft(t *testing.T, d *dir) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		rec, err := d.cl.ProvisionedCell(ctxOf(t), "c", true)
		if err == nil && rec.Left != nil && len(rec.Left.Directory) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%+v, %v", rec.Left, err)
		}
	}
}

// The default cell, and cells that other roles ask about.
func TestProvisionRefusals(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	ctx := ctxOf(t)
	if _, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1", Command: []string{"memory"}}); err != nil {
		t.Fatal(err)
	}
	d.cell("c", api.CellSpec{Default: true})
	if _, err := d.cl.DrainCell(ctx, "c", api.DrainRequest{}); code(err) != cells.CodeConflict || !strings.Contains(err.Error(), "default") {
		t.Errorf("the default cell is drained: %v", err)
	}
	for name, call := range map[string]func() error{
		"upgrade": func() error { _, err := d.cl.UpgradeCell(ctx, "x", api.UpgradeRequest{Replicas: 2}); return err },
		"drain":   func() error { _, err := d.cl.DrainCell(ctx, "x", api.DrainRequest{}); return err },
		"retire":  func() error { _, err := d.cl.RetireCell(ctx, "x", api.RetireRequest{}); return err },
		"status":  func() error { _, err := d.cl.ProvisionedCell(ctx, "x", false); return err },
	} {
		if err := call(); code(err) != cells.CodeNotFound {
			t.Errorf("%s of a cell that nobody provisioned: %v", name, err)
		}
	}
	if _, err := d.cl.ProvisionCell(ctx, "c", api.ProvisionRequest{Version: "v1", Command: []string{"memory"}, Store: provision.StoreSpec{Engine: "postgres"}}); code(err) != cells.CodeConflict {
		t.Errorf("another store: %v", err)
	}
	for _, role := range []channel.Role{channel.RoleCell, channel.RoleEdge} {
		ch := s.fleet.Open(t, role, "c")
		p, err := client.Provisioner(ch.Client(channel.Identity{Role: channel.RoleDirectory}), d.chURL)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Report(ctx, provision.Status{Cell: "c", Phase: provision.PhaseRunning, Ready: 1, ObservedGeneration: 1}); err == nil {
			t.Errorf("role %s reports a status", role)
		}
		p.CloseIdleConnections()
	}
}

// Every step of a drain may be the last of a directory: the next one makes the same
// campaign.
func TestDrainSurvivesKills(t *testing.T) {
	for _, step := range []string{directory.DrainStepPlanned, directory.DrainStepRunning} {
		t.Run(step, func(t *testing.T) {
			s := newState(t)
			reached := make(chan struct{})
			var once sync.Once
			d := s.start(t, func(c *directory.Config) {
				c.CampaignHook = func(ctx context.Context, at string, _ api.CampaignID, _ int64) error {
					if at != step {
						return nil
					}
					once.Do(func() { close(reached) })
					return errors.New("killed")
				}
			})
			d.cell("b", api.CellSpec{})
			if _, err := d.cl.ProvisionCell(ctxOf(t), "c", api.ProvisionRequest{Version: "v1", Command: []string{"memory"}}); err != nil {
				t.Fatal(err)
			}
			d.is(d.provisioner(), "c", provision.PhaseRunning, 1)
			for _, tenant := range []cells.TenantID{"t1", "t2"} {
				d.place(tenant, "c")
			}
			if _, err := d.cl.DrainCell(ctxOf(t), "c", api.DrainRequest{Settings: api.CampaignSettings{UndoWindow: "0s"}}); err != nil {
				t.Fatal(err)
			}
			select {
			case <-reached:
			case <-time.After(time.Minute):
				t.Fatal("the drain does not get there")
			}
			d.close()
			d = s.start(t, nil)
			d.is(d.provisioner(), "c", provision.PhaseDraining, 1)
			if err := d.cl.WatchProvisioned(ctxOf(t), "c", func(api.Provisioned) error { return nil }); err != nil {
				t.Fatal(err)
			}
			list, err := d.cl.Campaigns(ctxOf(t), client.CampaignQuery{})
			if err != nil || len(list.Campaigns) != 1 || list.Campaigns[0].Counts.Moved != 2 {
				t.Errorf("campaigns %+v, %v", list.Campaigns, err)
			}
		})
	}
}
