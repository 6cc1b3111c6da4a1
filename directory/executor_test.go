// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/transfer"
)

// fleetOf starts a directory with cells a and b, and tenant t with rows in a.
func fleetOf(t *testing.T, mod func(*directory.Config)) (*state, *dir) {
	t.Helper()
	s := newState(t)
	d := s.start(t, mod)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.place("t", "a")
	s.far.set(func() { s.far.rows[place{"a", "t"}] = 1000 })
	return s, d
}

// check says what must hold when everything is over: one owner, its fence open,
// the other's closed and empty, the ledger right, and no rule broken on the way.
func (d *dir) check(tenant cells.TenantID, owner cells.CellID) {
	d.t.Helper()
	r := d.route(tenant)
	if r.State != cells.StateActive || r.CellID != owner || r.MoveID != "" || len(r.Residue) != 0 {
		d.t.Errorf("route %+v, want ACTIVE in %s", r, owner)
	}
	f := d.state.far
	f.mu.Lock()
	for p, x := range f.fences {
		if p.tenant != tenant {
			continue
		}
		if x.open != (p.cell == owner) || x.open && x.epoch != r.Epoch {
			d.t.Errorf("fence of %s is %+v; the owner is %s at %d", p.cell, *x, owner, r.Epoch)
		}
	}
	for p, n := range f.rows {
		if p.tenant == tenant && (p.cell != owner || n != 1000) {
			d.t.Errorf("%s has %d rows of %s", p.cell, n, tenant)
		}
	}
	if f.rows[place{owner, tenant}] != 1000 {
		d.t.Errorf("%s has %d rows, want 1000", owner, f.rows[place{owner, tenant}])
	}
	for _, b := range f.broken {
		d.t.Error(b)
	}
	f.mu.Unlock()
	eventually(d.t, "ledger is right", func() bool {
		list, err := d.cl.Cells(ctxOf(d.t))
		if err != nil {
			return false
		}
		for _, c := range list {
			want := int64(0)
			if c.ID == owner {
				want = 1
			}
			if c.Tenants != want {
				return false
			}
		}
		return true
	})
}

func TestMove(t *testing.T) {
	var trace bytes.Buffer
	_, d := fleetOf(t, func(c *directory.Config) {
		c.Trace = &trace
		c.Budget = cells.NewBudgetMeter(cells.WithBudgetStore(c.Store.Budgets()))
	})
	m := d.move("t", "b")
	if m.State != api.MovePreparing || m.From != "a" || m.Actor != "alice" || m.Seq == 0 {
		t.Errorf("accepted %+v", m)
	}
	var lines []api.Move
	if err := d.cl.WatchMove(ctxOf(t), m.ID, func(now api.Move) error { lines = append(lines, now); return nil }); err != nil {
		t.Fatal(err)
	}
	last := lines[len(lines)-1]
	if last.State != api.MoveDone || last.Rows != 1000 || last.Bytes != 100000 || last.Predicted <= 0 || last.Pause <= 0 ||
		last.Epoch != 3 || last.Base != 1 || last.Error != "" || last.FinishedAt.IsZero() || last.ServedAt.Before(last.StartedAt) {
		t.Errorf("record %+v", last)
	}
	var steps []string
	for _, x := range last.Steps {
		steps = append(steps, x.Step)
		if x.Driver != d.Instance() || x.Took < 0 || x.At.IsZero() {
			t.Errorf("step %+v", x)
		}
	}
	want := "preflight begin prepare quiesce gates drain copy fence events finish commit start open activate discard removed"
	if got := strings.Join(steps, " "); got != want {
		t.Errorf("steps %s\nwant  %s", got, want)
	}
	for i := 1; i < len(lines); i++ {
		if lines[i].State != lines[i-1].State && !lines[i-1].State.Before(lines[i].State) {
			t.Errorf("the record went from %s to %s", lines[i-1].State, lines[i].State)
		}
	}
	d.check("t", "b")
	stored, err := d.store.Move(ctxOf(t), m.ID)
	if err != nil || stored.State != api.MoveDone || len(stored.Steps) != len(last.Steps) {
		t.Errorf("stored %+v, %v", stored, err)
	}
	left, err := cells.NewBudgetMeter(cells.WithBudgetStore(d.store.Budgets())).Remaining(ctxOf(t), "t")
	if err != nil || left >= cells.DefaultBudget || left < cells.DefaultBudget-5*time.Second {
		t.Errorf("budget left %v, %v", left, err)
	}
	d.close()
	report, err := cells.CheckTrace(&trace)
	if err != nil || report.Gaps != 0 || report.Actions[cells.ActionCloseFence] == 0 || report.Actions[cells.ActionOpenFence] == 0 {
		t.Errorf("trace %+v, %v", report, err)
	}
}

// TestThrottle: a move is bounded as it asks for, and otherwise as the directory is.
func TestThrottle(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.Limits = transfer.Limits{MaxRetained: 5, MaxReplicaLag: time.Second} })
	if _, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Throttle: &api.Throttle{RowsPerSecond: -1}}); err == nil {
		t.Error("a negative rate was accepted")
	}
	m, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Throttle: &api.Throttle{RowsPerSecond: 70, MaxRetained: -1}})
	if err != nil {
		t.Fatal(err)
	}
	d.untilState(m.ID, api.MoveDone)
	m = d.move("t", "a")
	d.untilState(m.ID, api.MoveDone)
	want := []string{"prepare 70 -1 1s", "discard 70 -1 1s", "prepare 0 0 0s", "discard 0 0 0s"}
	s.far.set(func() {
		if !slices.Equal(s.far.throttles, want) {
			t.Errorf("asked for %q, want %q", s.far.throttles, want)
		}
	})
}

func TestMoveBackAndForth(t *testing.T) {
	_, d := fleetOf(t, nil)
	to := []cells.CellID{"b", "a"}
	for i := range 6 {
		m := d.move("t", to[i%2])
		d.until(m.ID, "move is served", func(m *api.Move) bool { return m.Served() })
		if m := d.until(m.ID, "move is served", func(m *api.Move) bool { return m.Served() }); m.State == api.MoveRolledBack || m.State == api.MoveRefused {
			t.Fatalf("move %d: %+v", i, m)
		}
	}
	list, err := d.cl.Moves(ctxOf(t), client.MoveQuery{Tenant: "t"})
	if err != nil || len(list.Moves) != 6 {
		t.Fatalf("%d moves, %v", len(list.Moves), err)
	}
	d.untilState(list.Moves[0].ID, api.MoveDone)
	for _, m := range list.Moves {
		d.untilState(m.ID, api.MoveDone)
	}
	d.check("t", "a")
	if e := d.route("t").Epoch; e != 13 {
		t.Errorf("epoch %d after six moves, want 13", e)
	}
}

func TestMoveRefusals(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.MaxPause = time.Second })
	ctx := ctxOf(t)
	zero := int64(0)
	d.cell("closed", api.CellSpec{Closed: true})
	d.cell("full", api.CellSpec{PlacementsMax: &zero})
	for _, c := range []struct {
		tenant cells.TenantID
		to     cells.CellID
		force  bool
		code   cells.Code
	}{
		{"t", "closed", true, cells.CodeCellClosed}, {"t", "full", true, cells.CodeCellClosed}, {"t", "z", false, cells.CodeNotFound},
		{"t", "a", false, cells.CodeConflict}, {"nobody", "b", false, cells.CodeUnknownTenant},
	} {
		_, err := d.cl.Move(ctx, api.MoveRequest{Tenant: c.tenant, To: c.to, Force: c.force})
		wantCode(t, err, c.code)
	}
	// The target cannot be asked: refused, nothing begun.
	s.far.set(func() { s.far.down["b"] = true })
	m := d.untilState(d.move("t", "b").ID, api.MoveRefused)
	if m.Reason == "" || m.Code != cells.CodeCellUnreachable || m.FinishedAt.IsZero() || d.route("t").MoveID != "" {
		t.Errorf("refused %+v", m)
	}
	_, err := d.cl.DryRun(ctx, api.MoveRequest{Tenant: "t", To: "b"})
	wantCode(t, err, cells.CodeCellUnreachable)
	s.far.set(func() { s.far.down["b"] = false })

	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	m, err = d.cl.Move(ctx, api.MoveRequest{Tenant: "t", To: "b", OperationID: "op"})
	if err != nil {
		t.Fatal(err)
	}
	again, err := d.cl.Move(ctx, api.MoveRequest{Tenant: "t", To: "b", OperationID: "op"})
	if err != nil || again.ID != m.ID {
		t.Errorf("retry made %s, want %s (%v)", again.ID, m.ID, err)
	}
	_, err = d.cl.Move(ctx, api.MoveRequest{Tenant: "t", To: "b", OperationID: "op2"})
	if a := wantCode(t, err, cells.CodeConflict); !strings.Contains(a.Detail, string(m.ID)) {
		t.Errorf("the answer does not name the other move: %s", a.Detail)
	}
	dry, err := d.cl.DryRun(ctx, api.MoveRequest{Tenant: "t", To: "b"})
	if err != nil || dry.Allowed || len(dry.Refusals) != 1 || dry.Code != cells.CodeConflict {
		t.Errorf("dry run beside a move: %+v, %v", dry, err)
	}
	_, err = d.cl.DeleteTenant(ctx, "t", "")
	if d.route("t").MoveID == "" {
		eventually(t, "begun", func() bool { return d.route("t").MoveID != "" })
		_, err = d.cl.DeleteTenant(ctx, "t", "")
	}
	wantCode(t, err, cells.CodeConflict)
	// An operation id that was used for something else refuses a dry run as it does the move.
	_, err = d.cl.DryRun(ctx, api.MoveRequest{Tenant: "nobody", To: "b", OperationID: "op"})
	wantCode(t, err, cells.CodeConflict)
	close(gate)
	d.untilState(m.ID, api.MoveDone)
	again, err = d.cl.Move(ctx, api.MoveRequest{Tenant: "t", To: "b", OperationID: "op"})
	if err != nil || again.ID != m.ID || again.State != api.MoveDone {
		t.Errorf("retry after the end: %+v, %v", again, err)
	}
	d.check("t", "b")
}

func TestDryRun(t *testing.T) {
	_, d := fleetOf(t, nil)
	dry, err := d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b"})
	if err != nil || !dry.Allowed || dry.From != "a" || dry.Preflight.Rows != 1000 {
		t.Errorf("dry run %+v, %v", dry, err)
	}
	d.cell("b", api.CellSpec{Closed: true})
	dry, err = d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b"})
	if err != nil || dry.Allowed || len(dry.Refusals) != 1 || dry.Code != cells.CodeCellClosed {
		t.Errorf("dry run to a closed cell %+v, %v", dry, err)
	}
	if list, err := d.cl.Moves(ctxOf(t), client.MoveQuery{}); err != nil || len(list.Moves) != 0 {
		t.Errorf("a dry run left %+v, %v", list, err)
	}
}

func TestBudgetRefuses(t *testing.T) {
	_, d := fleetOf(t, func(c *directory.Config) {
		c.Budget = cells.NewBudgetMeter(cells.WithBudgetStore(c.Store.Budgets()), cells.WithBudget(time.Microsecond, time.Hour))
	})
	m := d.untilState(d.move("t", "b").ID, api.MoveRefused)
	if !strings.Contains(m.Reason, "budget") || m.Code != cells.CodeBudgetExceeded {
		t.Errorf("refused because %q, %s", m.Reason, m.Code)
	}
	dry, err := d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b"})
	if err != nil || dry.Allowed || dry.Code != cells.CodeBudgetExceeded {
		t.Errorf("dry run %+v, %v", dry, err)
	}
	if dry, err = d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Force: true}); err != nil || !dry.Allowed || dry.Code != "" {
		t.Errorf("forced dry run %+v, %v", dry, err)
	}
	f, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Force: true})
	if err != nil {
		t.Fatal(err)
	}
	d.untilState(f.ID, api.MoveDone)
	d.check("t", "b")
}

func TestDrainDeadlineRollsBack(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.DrainDeadline = 2 * time.Second })
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Drain"] = gate })
	m := d.untilState(d.move("t", "b").ID, api.MoveRolledBack)
	if m.Reason == "" || m.Epoch != 3 || len(m.Residue) != 0 {
		t.Errorf("record %+v", m)
	}
	close(gate)
	d.check("t", "a")
	s.far.set(func() { delete(s.far.block, "Drain") })
	d.untilState(d.move("t", "b").ID, api.MoveDone)
	d.check("t", "b")
}

func TestRollback(t *testing.T) {
	for _, at := range []string{"Preflight", "Prepare", "Drain", "Close", "Finish"} {
		t.Run(at, func(t *testing.T) {
			s, d := fleetOf(t, nil)
			gate := make(chan struct{})
			s.far.set(func() { s.far.block[at] = gate })
			m := d.move("t", "b")
			eventually(t, "it is at "+at, func() bool { return s.far.get(func() int { return s.far.calls[at] }) > 0 })
			got, err := d.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{Reason: "second thoughts", Actor: "bob"})
			close(gate)
			if err != nil || got.State != api.MoveRolledBack || got.Reason != "second thoughts" {
				t.Fatalf("rolled back %+v, %v", got, err)
			}
			got = d.untilState(m.ID, api.MoveRolledBack)
			d.check("t", "a")
			// Asking again is no harm.
			if again, err := d.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{}); err != nil || again.State != api.MoveRolledBack {
				t.Errorf("again: %+v, %v", again, err)
			}
			list, err := d.cl.Audit(ctxOf(t), client.AuditQuery{Tenant: "t", Limit: 1})
			if err != nil || list.Entries[0].Action != "move.rollback" || list.Entries[0].Actor != "bob" {
				t.Errorf("audit %+v, %v", list, err)
			}
		})
	}
}

func TestRollbackIsTooLate(t *testing.T) {
	s, d := fleetOf(t, nil)
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Open"] = gate })
	m := d.move("t", "b")
	eventually(t, "it is decided", func() bool { return d.route("t").State == cells.StateCommitting })
	_, err := d.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{})
	wantCode(t, err, cells.CodeConflict)
	close(gate)
	d.untilState(m.ID, api.MoveDone)
	_, err = d.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{})
	wantCode(t, err, cells.CodeConflict)
	d.check("t", "b")
}

func TestMovesQueueAndAreCancelled(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.Moves = 1 })
	d.place("u", "a")
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	first := d.move("t", "b")
	d.until(first.ID, "the first has begun", func(m *api.Move) bool { return m.Step == "begin" })
	second := d.move("u", "b")
	got, err := d.cl.Rollback(ctxOf(t), second.ID, api.RollbackRequest{Reason: "no"})
	if err != nil || got.State != api.MoveRolledBack || len(got.Steps) != 0 {
		t.Errorf("queued move: %+v, %v", got, err)
	}
	third := d.move("u", "b")
	close(gate)
	d.untilState(first.ID, api.MoveDone)
	d.untilState(third.ID, api.MoveDone)
	if r := d.route("u"); r.CellID != "b" || r.Epoch != 3 {
		t.Errorf("route of u %+v", r)
	}
}

func TestCommittedGoesForward(t *testing.T) {
	s, d := fleetOf(t, nil)
	s.far.set(func() { s.far.fail["Open"] = 6; s.far.fail["Start"] = 3 })
	m := d.untilState(d.move("t", "b").ID, api.MoveDone)
	if m.Attempts < 9 {
		t.Errorf("%d failed attempts are recorded, want 9", m.Attempts)
	}
	d.check("t", "b")
}

func TestResidueIsReclaimedLater(t *testing.T) {
	s, d := fleetOf(t, nil)
	s.far.set(func() { s.far.fail["Discard"] = 2 })
	m := d.move("t", "b")
	m = d.until(m.ID, "cleaning fails", func(m *api.Move) bool { return m.State == api.MoveCleaning && m.Error != "" })
	if len(m.Residue) != 1 || m.Residue[0].Cell != "a" || !m.FinishedAt.IsZero() || m.ServedAt.IsZero() {
		t.Errorf("record %+v", m)
	}
	m = d.untilState(m.ID, api.MoveDone)
	if m.Error != "" || m.Attempts < 2 {
		t.Errorf("record %+v", m)
	}
	d.check("t", "b")
}

// Every step at which a driver can die, with the directory that comes back, and
// with another one that takes over.
func TestDriverDiesAtEachStep(t *testing.T) {
	steps := []cells.Step{cells.StepPreflight, cells.StepBegin, cells.StepPrepare, cells.StepQuiesce, cells.StepGates, cells.StepDrain,
		cells.StepCopy, cells.StepFence, cells.StepEvents, cells.StepFinish, cells.StepCommit, cells.StepStart, cells.StepOpen,
		cells.StepActivate, cells.StepDiscard, cells.StepRemoved}
	for i, step := range steps {
		t.Run(string(step), func(t *testing.T) {
			t.Parallel()
			var one, two bytes.Buffer
			s, d := fleetOf(t, func(c *directory.Config) { c.HaltAt = string(step); c.Trace = &one; c.DrainDeadline = time.Minute })
			m := d.move("t", "b")
			m = d.until(m.ID, "halted", func(m *api.Move) bool { return m.Step == string(step) })
			eventually(t, "the step is in the stored record", func() bool {
				stored, err := d.store.Move(ctxOf(t), m.ID)
				return err == nil && stored.Step == string(step)
			})
			name := "d1"
			if i%2 == 1 {
				name = "d2"
			}
			var d2 *dir
			if name == "d2" { // it is there already, and waits for its turn
				d2 = s.start(t, func(c *directory.Config) { c.Name = name; c.Trace = &two })
				d.close()
			} else {
				d.close()
				d2 = s.start(t, func(c *directory.Config) { c.Trace = &two })
			}
			m = d2.untilState(m.ID, api.MoveDone)
			if m.Epoch != 3 || m.Base != 1 || m.Error != "" {
				t.Errorf("record %+v", m)
			}
			d2.check("t", "b")
			d2.close()
			if report, err := cells.CheckTrace(io.MultiReader(&one, &two)); err != nil || report.Tenants != 1 {
				t.Errorf("trace %+v, %v", report, err)
			}
		})
	}
}

// A driver that dies in its cut and is not replaced before the deadline.
func TestLateTakeoverRollsBack(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.HaltAt = "copy"; c.DrainDeadline = 2 * time.Second })
	m := d.move("t", "b")
	m = d.until(m.ID, "halted", func(m *api.Move) bool { return m.Step == "copy" })
	late := d.route("t").Deadline
	d.close()
	eventually(t, "the deadline is past", func() bool { return time.Now().After(late) })
	d = s.start(t, nil)
	m = d.untilState(m.ID, api.MoveRolledBack)
	d.check("t", "a")
	if m.Epoch != 3 || m.Reason == "" {
		t.Errorf("record %+v", m)
	}
}

// Two live directories drive the same moves at the same time.
func TestTwoDriversAtOnce(t *testing.T) {
	s := newState(t)
	hook := func(name string) func(*directory.Config) {
		return func(c *directory.Config) {
			c.Name = name
			c.TakeOver = 30 * time.Millisecond // far too eager: a pause of the process is a takeover
			c.SweepEvery = 10 * time.Millisecond
			var mu sync.Mutex
			n := 0
			c.StepHook = func(context.Context, cells.StepEvent) error {
				mu.Lock()
				defer mu.Unlock()
				if n++; n%4 == 0 {
					return errors.New("stopped by the test")
				}
				return nil
			}
		}
	}
	d1, d2 := s.start(t, hook("d1")), s.start(t, hook("d2"))
	d1.cell("a", api.CellSpec{})
	d1.cell("b", api.CellSpec{})
	var ids []cells.MoveID
	for i := range 3 {
		tenant := cells.TenantID(fmt.Sprintf("t%d", i))
		d1.place(tenant, "a")
		s.far.set(func() { s.far.rows[place{"a", tenant}] = 1000 })
		ids = append(ids, []*dir{d1, d2}[i%2].move(tenant, "b").ID)
	}
	for _, id := range ids {
		m := d1.until(id, "it is over", func(m *api.Move) bool { return m.State.Final() && len(m.Residue) == 0 })
		r := d1.route(m.Tenant)
		want := cells.CellID("b")
		if m.State == api.MoveRolledBack {
			want = "a"
		}
		if r.CellID != want || r.State != cells.StateActive || r.Epoch != 3 || m.State == api.MoveRefused {
			t.Errorf("%s, route %+v", m.String(), r)
		}
	}
	s.far.set(func() {
		for _, b := range s.far.broken {
			t.Error(b)
		}
	})
}

func TestRollbackFromAnotherDirectory(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.TakeOver = time.Minute })
	other := s.start(t, func(c *directory.Config) { c.Name = "d2"; c.TakeOver = time.Minute })
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Drain"] = gate })
	m := d.move("t", "b")
	eventually(t, "it drains", func() bool { return s.far.get(func() int { return s.far.calls["Drain"] }) > 0 })
	done := make(chan error, 1)
	go func() {
		_, err := other.cl.Rollback(ctxOf(t), m.ID, api.RollbackRequest{Reason: "from afar"})
		done <- err
	}()
	eventually(t, "the source is served again", func() bool { r := d.route("t"); return r.State == cells.StateActive && r.Epoch == 3 })
	close(gate)
	if err := <-done; err != nil {
		t.Errorf("rollback: %v", err)
	}
	got := d.untilState(m.ID, api.MoveRolledBack)
	if got.Reason != "from afar" {
		t.Errorf("reason %q", got.Reason)
	}
	d.check("t", "a")
}

// A move and a residue that the directory has no record of.
func TestForeignWorkIsFinished(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.DrainDeadline = time.Second })
	stop := errors.New("stop")
	ctrl := cells.NewMoveController(d.table, cells.WithFencer(s.far), cells.WithEventBarrier(s.far), cells.WithDataMover(s.far),
		cells.WithDrainDeadline(time.Minute), cells.WithStepHook(func(_ context.Context, ev cells.StepEvent) error {
			if ev.Step == cells.StepCommit {
				return stop
			}
			return nil
		}))
	if err := ctrl.Move(ctxOf(t), cells.MovePlan{TenantID: "t", ToCell: "b"}); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	// Its driver's deadline is a minute away, but it is decided: nothing to wait for.
	d.close()
	d = s.start(t, func(c *directory.Config) { c.TakeOver = 50 * time.Millisecond })
	eventually(t, "it is finished", func() bool {
		r := d.route("t")
		return r.State == cells.StateActive && r.CellID == "b" && len(r.Residue) == 0
	})
	d.check("t", "b")
}

// TestLateBeginIsRolledBack: a move whose record is closed before it began, and whose
// first write reaches the table after all, is given up and not carried out.
func TestLateBeginIsRolledBack(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) { c.Moves = 1 })
	d.place("u", "a")
	gate := make(chan struct{})
	s.far.set(func() { s.far.block["Prepare"] = gate })
	first := d.move("u", "b")
	d.until(first.ID, "the first has begun", func(m *api.Move) bool { return m.Step == "begin" })
	late := d.move("t", "b")
	if got, err := d.cl.Rollback(ctxOf(t), late.ID, api.RollbackRequest{}); err != nil || got.State != api.MoveRolledBack {
		t.Fatalf("%+v, %v", got, err)
	}
	close(gate)
	d.untilState(first.ID, api.MoveDone)
	stop := errors.New("stop")
	ctrl := cells.NewMoveController(d.table, cells.WithFencer(s.far), cells.WithEventBarrier(s.far), cells.WithDataMover(s.far),
		cells.WithStepHook(func(_ context.Context, ev cells.StepEvent) error {
			if ev.Step == cells.StepBegin {
				return stop
			}
			return nil
		}))
	if err := ctrl.Move(ctxOf(t), cells.MovePlan{TenantID: "t", ToCell: "b", MoveID: late.ID}); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	d.close()
	d = s.start(t, func(c *directory.Config) { c.TakeOver = 20 * time.Millisecond })
	eventually(t, "it is given up", func() bool {
		r := d.route("t")
		return r.State == cells.StateActive && r.MoveID == "" && len(r.Residue) == 0
	})
	if r := d.route("t"); r.CellID != "a" || r.Epoch != 3 {
		t.Errorf("route %+v, want a at 3", r)
	}
	s.far.mu.Lock()
	defer s.far.mu.Unlock()
	if a, b := s.far.rows[place{"a", "t"}], s.far.rows[place{"b", "t"}]; a != 1000 || b != 0 || len(s.far.broken) > 0 {
		t.Errorf("rows %d and %d, want 1000 and 0; %v", a, b, s.far.broken)
	}
}
