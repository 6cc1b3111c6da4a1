// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// stateless is a controller without fences, events and data, as in the package's
// first example.
func stateless(w *world, opts ...ControllerOption) *MoveController {
	return NewMoveController(w, opts...)
}

func mustMove(t *testing.T, c *MoveController, to CellID) MoveResult {
	t.Helper()
	res, err := c.Run(t.Context(), MovePlan{TenantID: "t", ToCell: to})
	if err != nil {
		t.Fatalf("move to %s: %v", to, err)
	}
	return res
}

func TestStatelessMove(t *testing.T) {
	w := newWorld(t)
	c := stateless(w, WithBudgetMeter(NewBudgetMeter()))
	if err := c.Assign(t.Context(), "t", "a", "alice"); err != nil {
		t.Fatal(err)
	}
	res, err := c.Run(t.Context(), MovePlan{TenantID: "t", FromCell: "a", ToCell: "b", Actor: "bob"})
	if err != nil {
		t.Fatal(err)
	}
	r := res.Route
	if r.CellID != "b" || r.Epoch != 3 || r.State != StateActive || r.MoveID != "" || len(r.Residue) != 0 || r.Actor != "bob" {
		t.Errorf("after the move: %s", showRoute(r))
	}
	if res.Move.Base != 1 || res.Move.Source != "a" || res.Move.Target != "b" || res.RolledBack {
		t.Errorf("result: %+v", res)
	}
	var rows []Step
	for _, s := range res.Steps {
		if s.Step.Wrote() {
			rows = append(rows, s.Step)
		}
	}
	if want := "[begin quiesce gates copy commit activate]"; fmt.Sprint(rows) != want {
		t.Errorf("rows written: %v, want %s", rows, want)
	}
	// The same plan again is done already; from a cell that it is not in, refused.
	if res, err := c.Run(t.Context(), MovePlan{TenantID: "t", FromCell: "a", ToCell: "b"}); err != nil || res.Move.ID != "" {
		t.Errorf("again: %+v, %v", res, err)
	}
	if err := c.Move(t.Context(), MovePlan{TenantID: "t", FromCell: "a", ToCell: "c"}); !errors.Is(err, ErrNotApplicable) {
		t.Errorf("from the wrong cell: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	c := NewMoveController(w, w.options()...)
	ctx := t.Context()
	for _, tc := range []struct {
		name string
		err  error
		want error
	}{
		{"no tenant", c.Assign(ctx, "", "a", ""), ErrInvalid},
		{"bad cell", c.Assign(ctx, "t", "A", ""), ErrInvalid},
		{"bad plan", c.Move(ctx, MovePlan{TenantID: "t", FromCell: "a", ToCell: "a"}), ErrInvalid},
		{"bad move id", c.Move(ctx, MovePlan{TenantID: "t", ToCell: "a", MoveID: "a b"}), ErrInvalid},
		{"bad target", c.Move(ctx, MovePlan{TenantID: "t"}), ErrInvalid},
		{"bad source", c.Move(ctx, MovePlan{TenantID: "t", FromCell: "A", ToCell: "a"}), ErrInvalid},
		{"move without a row", c.Move(ctx, MovePlan{TenantID: "t", ToCell: "a"}), ErrNotFound},
		{"delete without a row", c.Delete(ctx, "t", ""), ErrNotFound},
		{"reclaim without a row", c.Reclaim(ctx, "t"), ErrNotFound},
		{"rollback without a row", c.Rollback(ctx, "t", ""), ErrNotFound},
	} {
		if !errors.Is(tc.err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, tc.err, tc.want)
		}
	}
	if _, err := c.Resume(ctx, "t"); !errors.Is(err, ErrNotFound) {
		t.Errorf("resume without a row: %v", err)
	}
	if err := c.Assign(ctx, "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	if err := c.Rollback(ctx, "t", ""); !errors.Is(err, ErrNotApplicable) {
		t.Errorf("rollback without a move: %v", err)
	}
	var where *ElsewhereError
	if err := c.Assign(ctx, "t", "b", ""); !errors.As(err, &where) || where.Route.CellID != "a" || !errors.Is(err, ErrElsewhere) {
		t.Errorf("assign elsewhere: %v", err)
	}
}

// A conflict, or a write of unknown outcome, is this driver's own only by its
// stamp: another move may be in the very state that this one wanted to write.
func TestAnotherMovesStateIsNotOurs(t *testing.T) {
	for _, mode := range []faultMode{"", failBefore} {
		t.Run("mode "+string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				c := NewMoveController(w, w.options()...)
				ctx := t.Context()
				if err := c.Assign(ctx, "t", "a", ""); err != nil {
					t.Fatal(err)
				}
				w.write()
				// As this driver writes QUIESCING, another one rolls its move back, begins one
				// of its own to the third cell and stops in QUIESCING, the state wanted here.
				w.once("cas/QUIESCING", func() {
					stop := NewMoveController(w, append(w.options(), WithStepHook(func(_ context.Context, ev StepEvent) error {
						if ev.Step == StepQuiesce {
							return errStopped
						}
						return nil
					}))...)
					if err := stop.Rollback(ctx, "t", "operator"); err != nil {
						t.Error(err)
					}
					if err := stop.Move(ctx, MovePlan{TenantID: "t", ToCell: "c", MoveID: "theirs"}); !errors.Is(err, errStopped) {
						t.Errorf("other: %v", err)
					}
				})
				if mode != "" {
					w.fail("cas/QUIESCING", mode, 1)
				}
				err := c.Move(ctx, MovePlan{TenantID: "t", ToCell: "b", MoveID: "mine"})
				if !errors.Is(err, ErrRolledBack) { // epoch 3 was given back to the source
					t.Errorf("move: %v, want %v", err, ErrRolledBack)
				}
				r := w.row("t")
				if r.MoveID != "theirs" || r.State != StateQuiescing || r.TargetCell != "c" {
					t.Errorf("the other move is at %s", showRoute(r))
				}
				if _, err := c.Resume(ctx, "t"); err != nil {
					t.Error(err)
				}
				if r := w.row("t"); r.CellID != "c" || r.State != StateActive {
					t.Errorf("in the end: %s", showRoute(r))
				}
			})
		})
	}
}

// Once the commit may have been written, no error rolls back, even if every
// answer is lost and the driver dies; with a rollback, the source and the target
// would be opened at the same epoch.
func TestNothingRollsBackAfterTheDecision(t *testing.T) {
	points := []string{"cas/COMMITTING", "start", "open", "cas/ACTIVE", "get"}
	for _, point := range points {
		for _, mode := range []faultMode{failBefore, failAfter, failHang, failStale} {
			t.Run(point+" "+string(mode), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t)
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					armed := false
					hook := WithStepHook(func(_ context.Context, ev StepEvent) error {
						if ev.Step == StepFinish && !armed {
							armed = true
							w.fail(point, mode, -1)
							if point != "cas/COMMITTING" {
								w.fail("cas/COMMITTING", failAfter, 1)
							}
						}
						if ev.Step == StepRollback || ev.Step == StepReopen {
							t.Errorf("%s after the decision", ev.Step)
						}
						return nil
					})
					c := NewMoveController(w, append(w.options(), hook)...)
					if err := c.Assign(ctx, "t", "a", ""); err != nil {
						t.Fatal(err)
					}
					w.write()
					err := c.Move(ctx, MovePlan{TenantID: "t", ToCell: "b", MoveID: "m1"})
					if errors.Is(err, ErrRolledBack) {
						t.Errorf("rolled back: %v", err)
					}
					w.mu.Lock()
					clear(w.faults)
					w.mu.Unlock()
					r := w.row("t")
					if r.State != StateCommitting && r.State != StateActive && r.State != StateCopying {
						t.Errorf("left at %s", showRoute(r))
					}
					if r.State == StateCopying && (point != "cas/COMMITTING" && point != "get" || mode == failAfter) {
						t.Errorf("the decision is not written: %s", showRoute(r))
					}
					if r.State == StateCopying {
						return // not decided: past its deadline it may go back
					}
					if r.CellID != "b" {
						t.Errorf("decided for %s", r.CellID)
					}
					if _, err := NewMoveController(w, append(w.options(), hook)...).Resume(t.Context(), "t"); err != nil {
						t.Error(err)
					}
					if r := w.row("t"); r.CellID != "b" || r.State != StateActive || r.Epoch != 3 {
						t.Errorf("in the end: %s", showRoute(r))
					}
					w.write()
				})
			})
		}
	}
}

// The loser of a race of claims gets the winner, and nobody is moved, whatever
// the table answers.
func TestAssignNeverMoves(t *testing.T) {
	for _, mode := range []faultMode{"", failBefore, failAfter} {
		t.Run("mode "+string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				c := NewMoveController(w, w.options()...)
				if mode != "" {
					w.fail("cas/ACTIVE", mode, 3)
				}
				var wg sync.WaitGroup
				errs := make([]error, 8)
				for i := range errs {
					wg.Go(func() { errs[i] = c.Assign(t.Context(), "t", xcellNames[i%maxXCells], "") })
				}
				wg.Wait()
				r := w.row("t")
				if r.Epoch != 1 || r.State != StateActive || r.Revision != 1 {
					t.Fatalf("somebody was moved: %s at revision %d", showRoute(r), r.Revision)
				}
				for i, err := range errs {
					var where *ElsewhereError
					switch {
					case xcellNames[i%maxXCells] == r.CellID:
						if err != nil {
							t.Errorf("claim of the winner's cell: %v", err)
						}
					case !errors.As(err, &where) || where.Route.CellID != r.CellID:
						t.Errorf("loser got %v, the winner is %s", err, r.CellID)
					}
				}
			})
		})
	}
}

// Deleting and creating again goes on with the epochs.
func TestRecreationKeepsEpochs(t *testing.T) {
	w := newWorld(t)
	c := NewMoveController(w, w.options()...)
	last := Epoch(0)
	for i := range 3 {
		if err := c.Assign(t.Context(), "t", xcellNames[i], ""); err != nil {
			t.Fatal(err)
		}
		mustMove(t, c, xcellNames[(i+1)%maxXCells])
		w.write()
		if err := c.Delete(t.Context(), "t", ""); err != nil {
			t.Fatal(err)
		}
		if _, ok := w.write(); ok {
			t.Error("a deleted tenant takes writes")
		}
		r := w.row("t")
		if r.State != StateDeleted || r.Epoch <= last {
			t.Fatalf("tombstone: %s after epoch %d", showRoute(r), last)
		}
		last = r.Epoch
	}
	if last < 9 {
		t.Errorf("last epoch %d", last)
	}
	if err := c.Reclaim(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	if r := w.row("t"); len(r.Residue) != 0 {
		t.Errorf("left behind: %s", showRoute(r))
	}
}

// A step that hangs is cut off by the deadline, and the tenant is served again.
func TestDeadlineBoundsTheCut(t *testing.T) {
	for _, point := range []string{"drain", "close", "pause", "finish"} {
		t.Run(point, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				c := NewMoveController(w, append(w.options(), WithDrainDeadline(3*time.Second))...)
				if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
					t.Fatal(err)
				}
				w.fail(point, failHang, 1)
				res, err := c.Run(t.Context(), MovePlan{TenantID: "t", ToCell: "b"})
				if !errors.Is(err, ErrRolledBack) || !res.RolledBack || res.Reason == "" {
					t.Errorf("%+v, %v", res, err)
				}
				if res.Pause != 3*time.Second {
					t.Errorf("pause %v, want 3s", res.Pause)
				}
				if cell, ok := w.write(); !ok || cell != "a" {
					t.Errorf("served by %q", cell)
				}
			})
		})
	}
}

// A residue is not forgotten by a controller that cannot remove it.
func TestResidueNeedsAMover(t *testing.T) {
	w := newWorld(t)
	c := NewMoveController(w, append(w.options(), WithoutReclaim())...)
	if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	mustMove(t, c, "b")
	if r := w.row("t"); len(r.Residue) != 1 || r.Residue[0].Cell != "a" {
		t.Fatalf("after the move: %s", showRoute(r))
	}
	bare := stateless(w)
	if err := bare.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "a"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("move over the residue: %v", err)
	}
	if err := bare.Reclaim(t.Context(), "t"); !errors.Is(err, ErrInvalid) {
		t.Errorf("reclaim: %v", err)
	}
	if r := w.row("t"); len(r.Residue) != 1 {
		t.Errorf("forgotten: %s", showRoute(r))
	}
	mustMove(t, c, "a")
}

func TestPreflight(t *testing.T) {
	w := newWorld(t)
	c := NewMoveController(w, append(w.options(), WithMaxPause(time.Second), WithoutReclaim())...)
	if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	mustMove(t, c, "b")
	before := w.row("t").Revision
	w.pred = 2 * time.Second
	w.find = []Finding{{Code: "sequence", Message: "a sequence"}}
	p, err := c.Preflight(t.Context(), MovePlan{TenantID: "t", ToCell: "a"})
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	for _, f := range p.Findings {
		codes = append(codes, f.Code)
	}
	if fmt.Sprint(codes) != "[residue budget sequence]" || !p.Blocked() || p.Pause != 2*time.Second {
		t.Errorf("%v, %+v", codes, p)
	}
	if p, err = c.Preflight(t.Context(), MovePlan{TenantID: "t", ToCell: "a", Force: true}); err != nil || p.Blocked() {
		t.Errorf("forced: %+v, %v", p, err)
	}
	if _, err := c.Preflight(t.Context(), MovePlan{TenantID: "t", FromCell: "c", ToCell: "a"}); !errors.Is(err, ErrNotApplicable) {
		t.Errorf("from the wrong cell: %v", err)
	}
	if w.row("t").Revision != before {
		t.Error("a dry run changed the row")
	}
	if err := c.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "a"}); !errors.Is(err, ErrBudget) {
		t.Errorf("too long a pause: %v", err)
	}
}
