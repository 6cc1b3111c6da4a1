// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member"
)

// farDeployments are cells that are whole deployments: they have tenancy rows, and never
// open a fence for a tenant that they do not hold, or that is placed elsewhere.
type farDeployments struct {
	*farBack
	store deploy.Store
	held  map[place]bool // guarded by far.mu
	bare  bool           // no rows are kept; guarded by far.mu
}

func (f *farDeployments) Tenancy(ctx context.Context, o member.TenancyOrder) error {
	if err := f.enter(ctx, "Tenancy "+string(o.Do), o.Cell); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x, at := f.at(o.Cell, o.Tenant), place{o.Cell, o.Tenant}
	switch {
	case f.bare:
		return fmt.Errorf("%w: no rows are kept", cells.ErrInvalid)
	case o.Do == member.TenancyHold && x.epoch > o.Epoch:
		return cells.ErrStaleOrder
	case o.Do == member.TenancyHold:
		f.held[at] = true
	case o.Do == member.TenancyUnhold && (x.open || o.Epoch == 0 || x.epoch > o.Epoch):
		return cells.ErrConflict
	case o.Do == member.TenancyUnhold:
		delete(f.held, at)
	}
	return nil
}

func (f *farDeployments) Open(ctx context.Context, o cells.FenceOrder) error {
	p, err := f.store.Placement(ctx, o.Tenant)
	f.mu.Lock()
	if o.Move != "" && (err != nil || p.Cell != o.Cell || !f.held[place{o.Cell, o.Tenant}]) {
		f.broken = append(f.broken, fmt.Sprintf("%s opens at %d in %s, held: %t, placed in %s, %v", o.Tenant, o.Epoch, o.Cell, f.held[place{o.Cell, o.Tenant}], p.Cell, err))
	}
	f.mu.Unlock()
	return f.farBack.Open(ctx, o)
}

// deployments is a fleet whose cells a, b and c are deployments; t is in a.
type deployments struct {
	*state
	far   *farDeployments
	store deploy.Store
}

func newDeployments(t *testing.T, engine string, kind deploy.Kind) *deployments {
	t.Helper()
	ds := &deployments{state: newState(t)}
	switch engine {
	case "sqlite":
		s, err := sqlite.Open(t.Context(), filepath.Join(ds.dir, "deployments.db"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		ds.store = s.Deployments()
	case "postgres":
		s, err := postgres.Open(t.Context(), pgtest.DB(t), postgres.Options{AllowAsynchronous: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		ds.store = s.Deployments()
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	audit := api.AuditEntry{At: deploytest.At, Action: "test"}
	must(ds.store.Settle(t.Context(), kind, audit))
	change := func(cell cells.CellID, rules ...deploy.Rule) {
		t.Helper()
		for _, r := range rules {
			_, err := ds.store.Change(t.Context(), cell, r, audit)
			must(err)
		}
	}
	change("a", deploy.Register(deploytest.First("a")), deploy.Attach(deploy.Attachment{Current: deploytest.Fingerprint("a", "app.example.com"), KeysFP: "k-a", Tenants: []cells.TenantID{"t", "u"}}),
		deploy.RaiseMode(tenancy.Enforced), deploy.Serve())
	for name, hash := range map[string]string{"b": "b", "c": "c"} {
		change(cells.CellID(name), deploy.Register(deploytest.Later(name, hash)),
			deploy.Attach(deploy.Attachment{Current: deploytest.Fingerprint(name, name+".example.com"), KeysFP: "k-" + name, Upstream: "http://10.0.1.1:80"}), deploy.Serve())
	}
	ds.far = &farDeployments{farBack: &farBack{far: ds.state.far}, store: ds.store, held: map[place]bool{{"a", "t"}: true, {"a", "u"}: true}}
	return ds
}

func (ds *deployments) start(t *testing.T, mod func(*directory.Config)) *dir {
	t.Helper()
	return ds.state.start(t, func(c *directory.Config) {
		c.Agents, c.Deployments, c.UndoWindow, c.ReturnEvery, c.SweepEvery = ds.far, ds.store, -1, 10*time.Millisecond, 20*time.Millisecond
		if mod != nil {
			mod(c)
		}
	})
}

// fleet registers the cells with the fleet's directory and places t.
func (ds *deployments) fleet(d *dir) {
	for _, c := range []cells.CellID{"a", "b", "c"} {
		d.cell(c, api.CellSpec{})
	}
	d.place("t", "a")
	ds.far.set(func() { ds.far.rows[place{"a", "t"}] = 1000 })
}

// agree says what must hold when everything is over: the route, the placement and the
// tenancy rows say the same, and nobody has a place for a move.
func (ds *deployments) agree(t *testing.T, d *dir, owner cells.CellID, epoch cells.Epoch, move cells.MoveID) {
	t.Helper()
	d.check("t", owner)
	p, err := ds.store.Placement(t.Context(), "t")
	if err != nil || p.Cell != owner || p.Epoch != epoch || p.Move != move || p.MovingTo != "" || p.MovingBy != "" {
		t.Errorf("placed %+v, %v; want %s at %d by %s", p, err, owner, epoch, move)
	}
	ds.far.set(func() {
		for _, c := range []cells.CellID{"a", "b", "c"} {
			if ds.far.held[place{c, "t"}] != (c == owner) {
				t.Errorf("cell %s holds the tenant: %t; it is in %s", c, ds.far.held[place{c, "t"}], owner)
			}
		}
	})
	v, err := ds.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := map[cells.CellID]int64{"a": 1}
	want[owner]++
	for _, c := range v.Cells {
		if c.Placements != want[c.Name] {
			t.Errorf("cell %s counts %d tenants, want %d", c.Name, c.Placements, want[c.Name])
		}
	}
}

// Every step at which the driver of a move between deployments can die.
func TestDeploymentsAgreeAfterEachStep(t *testing.T) {
	steps := []cells.Step{cells.StepPreflight, cells.StepBegin, cells.StepPrepare, cells.StepQuiesce, cells.StepGates, cells.StepDrain, cells.StepCopy, cells.StepFence,
		cells.StepEvents, cells.StepFinish, cells.StepCommit, cells.StepStart, cells.StepOpen, cells.StepActivate, cells.StepDiscard, cells.StepRemoved}
	for engine, steps := range map[string][]cells.Step{"sqlite": steps, "postgres": {cells.StepPreflight, cells.StepFinish, cells.StepCommit, cells.StepOpen, cells.StepActivate, cells.StepDiscard}} {
		for _, step := range steps {
			t.Run(engine+" "+string(step), func(t *testing.T) {
				t.Parallel()
				ds := newDeployments(t, engine, deploy.Movable)
				d := ds.start(t, func(c *directory.Config) { c.HaltAt = string(step); c.DrainDeadline = time.Minute })
				ds.fleet(d)
				m := d.move("t", "b")
				eventually(t, "the step is in the stored record", func() bool {
					stored, err := d.store.Move(ctxOf(t), m.ID)
					return err == nil && stored.Step == string(step)
				})
				// Until the decision nothing has changed but the place that is kept.
				p, err := ds.store.Placement(t.Context(), "t")
				if decided := d.route("t").Epoch >= 3; err != nil || !decided && (p.Cell != "a" || p.MovingTo != "b" || p.MovingBy != m.ID) {
					t.Errorf("at %s: %+v, %v", step, p, err)
				}
				d.close()
				again := ds.start(t, nil)
				again.untilState(m.ID, api.MoveDone)
				ds.agree(t, again, "b", 3, m.ID)
				// And back.
				back := again.untilState(again.move("t", "a").ID, api.MoveDone)
				ds.agree(t, again, "a", 5, back.ID)
			})
		}
	}
}

// What fails on the way is done again; between the placement, the row and the fence
// there is no moment at which another order helps.
func TestDeploymentsAgreeAfterFailures(t *testing.T) {
	for _, engine := range []string{"sqlite", "postgres"} {
		for name, fail := range map[string]string{"the row is not written": "Tenancy hold", "the fence is not opened": "Open", "the source does not let go": "Tenancy unhold", "rows are not removed": "Discard"} {
			t.Run(engine+" "+name, func(t *testing.T) {
				t.Parallel()
				ds := newDeployments(t, engine, deploy.Movable)
				d := ds.start(t, nil)
				ds.fleet(d)
				ds.far.set(func() { ds.far.fail[fail] = 2 })
				m := d.untilState(d.move("t", "b").ID, api.MoveDone)
				ds.agree(t, d, "b", 3, m.ID)
				if n := ds.far.get(func() int { return ds.far.calls[fail] }); n < 3 {
					t.Errorf("%s was called %d times", fail, n)
				}
			})
		}
	}
}

// A move that is not made gives its place up, wherever it ends.
func TestDeploymentsRollBack(t *testing.T) {
	for _, at := range []string{"Preflight", "Prepare", "Drain", "Finish"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			ds := newDeployments(t, "sqlite", deploy.Movable)
			d := ds.start(t, nil)
			ds.fleet(d)
			gate := make(chan struct{})
			ds.far.set(func() { ds.far.block[at] = gate })
			m := d.move("t", "b")
			eventually(t, "it is at "+at, func() bool { return ds.far.get(func() int { return ds.far.calls[at] }) > 0 })
			if p, err := ds.store.Placement(t.Context(), "t"); err != nil || p.MovingTo != "b" {
				t.Errorf("%+v, %v", p, err)
			}
			_, err := d.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{Reason: "second thoughts"})
			close(gate)
			if err != nil {
				t.Fatal(err)
			}
			d.untilState(m.ID, api.MoveRolledBack)
			ds.agree(t, d, "a", 0, "")
		})
	}
}

// While a move can be undone the cell that it left does not hold the tenant, also when it
// was away at the move's end; the undo brings everything back.
func TestDeploymentsUndo(t *testing.T) {
	ds := newDeployments(t, "sqlite", deploy.Movable)
	d := ds.start(t, func(c *directory.Config) { c.UndoWindow = time.Hour })
	ds.fleet(d)
	ds.far.set(func() { ds.far.fail["Tenancy unhold"] = 1 })
	m := d.move("t", "b")
	d.until(m.ID, "done", func(m *api.Move) bool { return m.State == api.MoveDone })
	held := func(c cells.CellID) (is bool) { ds.far.set(func() { is = ds.far.held[place{c, "t"}] }); return is }
	eventually(t, "a lets the tenant go", func() bool { return !held("a") && held("b") })
	if p, err := ds.store.Placement(t.Context(), "t"); err != nil || p.Cell != "b" || p.Epoch != 3 {
		t.Errorf("%+v, %v", p, err)
	}
	// It goes back to where it came from, closed as that is now; nobody else gets in.
	closed := true
	if _, err := ds.store.Change(t.Context(), "a", deploy.Limit(&closed, nil), api.AuditEntry{At: time.Now(), Action: "test"}); err != nil {
		t.Fatal(err)
	}
	_, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "a"})
	wantCode(t, err, cells.CodeCellClosed)
	undo, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", Undo: true})
	if err != nil {
		t.Fatal(err)
	}
	d.untilState(undo.ID, api.MoveDone)
	ds.agree(t, d, "a", 5, undo.ID)
}

// What is refused is refused with its code, before anything has changed.
func TestDeploymentsRefuse(t *testing.T) {
	for _, engine := range []string{"sqlite", "postgres"} {
		t.Run("pinned "+engine, func(t *testing.T) {
			t.Parallel()
			ds := newDeployments(t, engine, deploy.Pinned)
			d := ds.start(t, nil)
			ds.fleet(d)
			for _, r := range []api.MoveRequest{{Tenant: "t", To: "b"}, {Tenant: "t", To: "b", Force: true}, {Tenant: "t", To: "b", DryRun: true}} {
				_, err := d.cl.Move(ctxOf(t), r)
				if r.DryRun {
					_, err = d.cl.DryRun(ctxOf(t), r)
				}
				if a := wantCode(t, err, cells.CodeForbidden); !strings.Contains(a.Detail, "pinned") {
					t.Errorf("%+v: %s", r, a.Detail)
				}
			}
			for what, call := range map[string]func() error{
				"a campaign": func() error {
					_, err := d.cl.PlanCampaign(ctxOf(t), api.CampaignRequest{Moves: []api.PlannedMove{{Tenant: "t", To: "b"}}})
					return err
				},
				"a deletion": func() error { _, err := d.cl.DeleteTenant(ctxOf(t), "t", "test"); return err },
			} {
				if a := wantCode(t, call(), cells.CodeForbidden); !strings.Contains(a.Detail, "pinned") {
					t.Errorf("%s: %s", what, a.Detail)
				}
			}
			ds.agree(t, d, "a", 0, "")
			if list, err := d.cl.Moves(ctxOf(t), client.MoveQuery{}); err != nil || len(list.Moves) != 0 {
				t.Errorf("%+v, %v", list.Moves, err)
			}
		})
	}
	ds := newDeployments(t, "sqlite", deploy.Movable)
	d := ds.start(t, nil)
	ds.fleet(d)
	d.cell("d", api.CellSpec{}) // no deployment
	d.place("w", "a")           // placed nowhere
	d.place("u", "b")           // placed in a
	change := func(cell cells.CellID, r deploy.Rule) {
		t.Helper()
		if _, err := ds.store.Change(t.Context(), cell, r, api.AuditEntry{At: deploytest.At, Action: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	none, shut, open := int64(0), true, false
	change("c", deploy.Limit(nil, &none))
	for _, c := range []struct {
		tenant cells.TenantID
		to     cells.CellID
		code   cells.Code
		part   string
	}{
		{"t", "d", cells.CodeConflict, "no deployment"}, {"w", "b", cells.CodeConflict, "placed in no deployment"},
		{"u", "c", cells.CodeConflict, "until they agree"}, {"t", "c", cells.CodeCellClosed, "cell c"},
	} {
		_, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: c.tenant, To: c.to, Force: true})
		if a := wantCode(t, err, c.code); !strings.Contains(a.Detail, c.part) {
			t.Errorf("%+v: %s", c, a.Detail)
		}
	}
	// What is found out only when the move begins.
	gate := make(chan struct{})
	ds.far.set(func() { ds.far.block["Tenancy check"] = gate })
	m := d.move("t", "b")
	eventually(t, "the cells are asked", func() bool { return ds.far.get(func() int { return ds.far.calls["Tenancy check"] }) > 0 })
	change("b", deploy.Limit(&shut, nil))
	close(gate)
	if m = d.untilState(m.ID, api.MoveRefused); m.Code != cells.CodeCellClosed {
		t.Errorf("%+v", m)
	}
	change("b", deploy.Limit(&open, nil))
	ds.far.set(func() { ds.far.bare = true })
	if m = d.untilState(d.move("t", "b").ID, api.MoveRefused); !strings.Contains(m.Reason, "tenancy rows") {
		t.Errorf("%+v", m)
	}
	if p, err := ds.store.Placement(t.Context(), "t"); err != nil || p.Cell != "a" || p.MovingTo != "" || p.Epoch != 0 {
		t.Errorf("%+v, %v", p, err)
	}
	if r := d.route("t"); r.CellID != "a" || r.Epoch != 1 || r.MoveID != "" {
		t.Errorf("%+v", r)
	}
}
