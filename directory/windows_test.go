// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

// farBack are cells that keep ways back.
type farBack struct {
	*far
	lost bool // guarded by far.mu
}

// Return implements cells.Returner.
func (f *farBack) Return(ctx context.Context, t cells.TenantID, r cells.Residue) (cells.Returned, error) {
	if err := f.enter(ctx, "Return", r.Cell, r.Back); err != nil {
		return cells.Returned{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	back, ok := r.Return(t)
	x := f.at(r.Cell, t)
	switch {
	case f.lost:
		return cells.Returned{}, fmt.Errorf("%w: the slot is gone", cells.ErrReturnLost)
	case !ok || !r.Held():
		f.broken = append(f.broken, fmt.Sprintf("return of %+v", r))
	case x.open || x.epoch != back.CloseEpoch() || x.move != back.ID:
		return cells.Returned{}, cells.ErrStaleOrder
	}
	n := f.rows[place{back.Source, t}] - f.rows[place{back.Target, t}]
	f.rows[place{back.Target, t}] += n
	return cells.Returned{Changes: n}, nil
}

func (s *state) startBack(t *testing.T) (*dir, *farBack) {
	t.Helper()
	f := &farBack{far: s.far}
	d := s.start(t, func(c *directory.Config) {
		withReceipts(c)
		c.Agents, c.ReturnEvery, c.SweepEvery = f, 10*time.Millisecond, 20*time.Millisecond
	})
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.cell("c", api.CellSpec{})
	d.place("t", "a")
	f.set(func() { f.rows[place{"a", "t"}] = 10 })
	return d, f
}

// moved moves the tenant and waits until the record is final.
func (d *dir) moved(req api.MoveRequest) api.Move {
	d.t.Helper()
	m, err := d.cl.Move(ctxOf(d.t), req)
	if err != nil {
		d.t.Fatal(err)
	}
	d.wait("the move is over", func() bool {
		m, err = d.cl.MoveByID(ctxOf(d.t), m.ID)
		return err == nil && m.State.Final() && !m.Removable()
	})
	return m
}

func (d *dir) wait(what string, ok func() bool) {
	d.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			d.t.Fatalf("not in time: %s; the route is %+v", what, d.route("t"))
		}
	}
}

// A move is undone by default for a day: changes are brought back all the time, the
// tenant goes back without a copy, and both records say what has become of them.
func TestUndo(t *testing.T) {
	d, f := newState(t).startBack(t)
	m := d.moved(api.MoveRequest{Tenant: "t", To: "b"})
	if m.State != api.MoveDone || m.UndoWindow != directory.DefaultUndoWindow || len(m.Residue) != 1 || !m.Residue[0].Held() {
		t.Fatalf("the record is %+v", m)
	}
	f.set(func() { f.rows[place{"b", "t"}] = 25 })
	d.wait("changes are brought back", func() bool { return f.get(func() int { return int(f.rows[place{"a", "t"}]) }) == 25 })
	d.wait("the window is shown", func() bool {
		got, err := d.cl.Tenant(ctxOf(t), "t")
		return err == nil && got.Window != nil && got.Window.Changes >= 15 && !got.Window.At.IsZero() && got.Window.Move == m.ID
	})
	f.set(func() { f.fail["Return"] = 3 })
	d.wait("failures are over", func() bool { return f.get(func() int { return f.fail["Return"] }) == 0 })

	dry, err := d.cl.DryRun(ctxOf(t), api.MoveRequest{Tenant: "t", Undo: true})
	if err != nil || !dry.Allowed || dry.To != "a" {
		t.Errorf("dry run: %+v, %v", dry, err)
	}
	full := int64(0)
	d.cell("a", api.CellSpec{Closed: true, PlacementsMax: &full}) // it goes back all the same
	u := d.moved(api.MoveRequest{Tenant: "t", Undo: true, OperationID: "undo-1"})
	if u.State != api.MoveDone || u.Undoes != m.ID || u.To != "a" || u.UndoWindow != 0 || len(u.Residue) != 0 {
		t.Fatalf("the undo's record is %+v", u)
	}
	again, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", Undo: true, OperationID: "undo-1"})
	if err != nil || again.ID != u.ID {
		t.Errorf("the same operation again: %s, %v", again.ID, err)
	}
	if m, err = d.cl.MoveByID(ctxOf(t), m.ID); err != nil || m.UndoneBy != u.ID || len(m.Residue) != 0 || m.State != api.MoveDone {
		t.Errorf("the record of the move that was undone: %+v, %v", m, err)
	}
	if list := d.receipt(m.ID); len(list) != 2 || list[1].Removal == nil || list[1].Removal.Gone || list[1].Removal.Cell != "a" {
		t.Errorf("the receipt of the move that was undone: %+v", list)
	}
	if r := d.route("t"); r.CellID != "a" || len(r.Residue) != 0 {
		t.Errorf("the route is %+v", r)
	}
	_, err = d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", Undo: true})
	if a := cells.AnswerOf(err); a == nil || a.Code != cells.CodeConflict {
		t.Errorf("a second undo: %v", err)
	}
	f.set(func() {
		if len(f.broken) > 0 {
			t.Errorf("%v", f.broken)
		}
	})
}

// Windows close: by their time, by an operator, because the way back is lost, and
// because of another move. What was kept is removed each time.
func TestUndoWindowCloses(t *testing.T) {
	for name, c := range map[string]struct {
		window time.Duration
		end    func(d *dir, f *farBack)
		at     cells.CellID
	}{
		"by its time":    {50 * time.Millisecond, func(*dir, *farBack) {}, "b"},
		"by an operator": {time.Hour, func(d *dir, _ *farBack) { d.closeWindow() }, "b"},
		"lost":           {time.Hour, func(_ *dir, f *farBack) { f.set(func() { f.lost = true }) }, "b"},
		"by another move": {time.Hour, func(d *dir, _ *farBack) {
			none := time.Duration(0)
			d.moved(api.MoveRequest{Tenant: "t", To: "c", UndoWindow: &none})
		}, "c"},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := newState(t).startBack(t)
			m, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", UndoWindow: &c.window})
			if err != nil {
				t.Fatal(err)
			}
			d.wait("the move is done", func() bool {
				m, err = d.cl.MoveByID(ctxOf(t), m.ID)
				return err == nil && m.State.Final()
			})
			c.end(d, f)
			d.wait("nothing is kept", func() bool {
				m, err = d.cl.MoveByID(ctxOf(t), m.ID)
				r := d.route("t")
				return err == nil && len(r.Residue) == 0 && r.CellID == c.at && len(m.Residue) == 0
			})
			if n := f.get(func() int { return int(f.rows[place{"a", "t"}]) }); n != 0 || m.State != api.MoveDone {
				t.Errorf("%d rows are left, the record is %+v", n, m)
			}
			if list := d.receipt(m.ID); len(list) != 2 || list[1].Removal == nil || !list[1].Removal.Gone || list[1].Removal.Cell != "a" {
				t.Errorf("the receipt: %+v", list)
			}
			d.wait("the window is not shown", func() bool {
				got, err := d.cl.Tenant(ctxOf(t), "t")
				return err == nil && got.Window == nil
			})
		})
	}
}

func (d *dir) closeWindow() {
	d.t.Helper()
	for range 2 {
		if _, err := d.cl.CloseWindow(ctxOf(d.t), "t", api.CloseWindowRequest{Reason: "sure", Actor: "alice"}); err != nil {
			d.t.Fatal(err)
		}
	}
}
