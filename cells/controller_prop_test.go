// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// propOps are the operations that a driver may attempt at any time, also in the
// middle of another driver's.
var propOps = []string{"move", "move", "move", "move", "move", "move", "resume", "resume", "rollback", "delete", "assign", "reclaim", "undo", "undo", "tend", "tend", "close window", "write", "write", "write"}

// property runs random operations of several controllers over a table and cells
// that fail at random. Other controllers' operations run inside the calls of the
// first, so that a failing run can be repeated and shrunk.
type property struct {
	w     *world
	rt    *rapid.T
	depth int
	moves int
	log   []string
}

func (p *property) op(name string, cell CellID) {
	p.depth++
	defer func() { p.depth-- }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stopAt := p.roll("dies after", 60)
	step := 0
	c := NewMoveController(p.w, append(p.w.options(), WithStepHook(func(context.Context, StepEvent) error {
		if step++; step == stopAt {
			return errStopped
		}
		return nil
	}))...)
	var err error
	switch name {
	case "move":
		p.moves++
		err = c.Move(ctx, MovePlan{TenantID: "t", ToCell: cell, MoveID: MoveID(fmt.Sprintf("m%d", p.moves)),
			UndoWindow: time.Duration(p.roll("window", 3)) * time.Minute})
	case "undo":
		p.moves++
		_, err = c.Undo(ctx, MovePlan{TenantID: "t", MoveID: MoveID(fmt.Sprintf("m%d", p.moves)), UndoWindow: time.Duration(p.roll("window", 2)) * time.Minute})
	case "tend":
		_, err = c.Tend(ctx, "t")
	case "close window":
		_, err = c.CloseWindow(ctx, "t", "", "")
	case "resume":
		_, err = c.Resume(ctx, "t")
	case "rollback":
		err = c.Rollback(ctx, "t", "property")
	case "delete":
		err = c.Delete(ctx, "t", "")
	case "assign":
		err = c.Assign(ctx, "t", cell, "")
	case "reclaim":
		err = c.Reclaim(ctx, "t")
	case "write":
		p.w.write()
	}
	p.log = append(p.log, fmt.Sprintf("%*s%s %s: %v -> %s", 2*p.depth, "", name, cell, err, showRoute(p.w.row("t"))))
	if errors.Is(err, ErrInvalid) {
		p.rt.Errorf("%s: %v", name, err)
	}
}

// roll draws a number below n. rapid prefers small numbers; they are spread here,
// and 0 stays 0, so that shrinking takes faults away.
func (p *property) roll(label string, n int) int {
	v := uint64(rapid.Uint32().Draw(p.rt, label))
	return int(v * 0x9E3779B97F4A7C15 >> 32 * uint64(n) >> 32)
}

func (p *property) draw() (string, CellID) {
	op, cell := propOps[p.roll("op", len(propOps))], xcellNames[p.roll("cell", maxXCells)]
	if r := p.w.row("t"); !r.Exists() && op != "resume" {
		op = "assign"
	}
	return op, cell
}

// noDeadline hides Deadline, which must not be asked in a bubble.
type noDeadline struct{ testing.TB }

// TestControllerProperty: whatever fails and whoever interferes, the cells never
// contradict each other, and in the end one driver finds the tenant one home.
func TestControllerProperty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(noDeadline{t}, func(rt *rapid.T) {
			p := &property{w: newWorld(rt), rt: rt}
			budget := 60 // epochs of the model are small
			p.w.chaos = func(string) faultMode {
				switch n := p.roll("luck", 100); {
				case n >= 97 && p.depth < 3 && budget > 0:
					budget--
					p.op(p.draw())
				case n >= 95:
					return failBefore
				case n >= 93:
					return failAfter
				case n == 92:
					return failHang
				}
				return ""
			}
			for range 6 + p.roll("operations", 12) {
				p.op(p.draw())
			}
			p.w.chaos = nil
			settle(rt, p.w)
			if rt.Failed() {
				for _, l := range p.log {
					rt.Log(l)
				}
			}
		})
	})
}

// settle heals everything, lets one driver finish, and checks what is left.
func settle(t rapid.TB, w *world, opts ...ControllerOption) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := NewMoveController(w, append(w.options(), opts...)...)
	if _, err := c.Resume(ctx, "t"); err != nil && !errors.Is(err, ErrRolledBack) && !errors.Is(err, ErrNotFound) {
		t.Errorf("resume in the end: %v", err)
	}
	if row := w.row("t"); len(row.Residue) > 0 && row.Residue[0].Held() {
		// What is offered is kept: nothing fails now.
		if _, err := c.Undo(ctx, MovePlan{TenantID: "t", MoveID: "last"}); err != nil {
			t.Errorf("undo in the end: %v", err)
		}
	}
	if _, err := c.Resume(ctx, "t"); err != nil && !errors.Is(err, ErrNotFound) {
		t.Errorf("resume again: %v", err)
	}
	r := w.row("t")
	if err := CheckRoute(r); err != nil {
		t.Errorf("%v", err)
	}
	if r.MoveID != "" || len(r.Residue) != 0 {
		t.Errorf("unfinished: %s", showRoute(r))
	}
	cell, ok := w.write()
	if ok != r.Serving() || ok && cell != r.CellID {
		t.Errorf("the row is %s, %q takes writes (%t)", showRoute(r), cell, ok)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, x := range w.s.cells {
		if x.rows && xcellNames[i] != r.CellID {
			t.Errorf("cell %s still holds rows", xcellNames[i])
		}
	}
}

// TestControllersAtOnce lets real goroutines drive one tenant.
func TestControllersAtOnce(t *testing.T) {
	actions := map[string]int{}
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				var trace bytes.Buffer
				tracer := NewTracer(&trace, "test")
				w.inner = tracer.Table(w.inner)
				traced := []ControllerOption{WithFencer(tracer.Fencer(w)), WithObserver(tracer.Observe)}
				var mu sync.Mutex
				luck := rand.New(rand.NewPCG(seed, 1))
				roll := func(n int) int {
					mu.Lock()
					defer mu.Unlock()
					return luck.IntN(n)
				}
				w.chaos = func(string) faultMode {
					<-time.After(time.Duration(roll(1000)) * time.Microsecond) // others get in between
					switch n := roll(100); {
					case n >= 96:
						return failBefore
					case n >= 92:
						return failAfter
					}
					return ""
				}
				if err := NewMoveController(w, w.options()...).Assign(t.Context(), "t", "a", ""); err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				for d := range 4 {
					wg.Go(func() {
						c := NewMoveController(w, append(w.options(), traced...)...)
						for i := range 6 {
							ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
							switch roll(6) {
							case 0:
								_, _ = c.Resume(ctx, "t")
							case 1:
								_ = c.Rollback(ctx, "t", "test")
							case 2:
								_, _ = c.Undo(ctx, MovePlan{TenantID: "t", MoveID: MoveID(fmt.Sprintf("u%d-%d", d, i))})
							case 3:
								_, _ = c.Tend(ctx, "t")
								if roll(2) == 0 {
									_, _ = c.CloseWindow(ctx, "t", "test", "")
								}
							default:
								_ = c.Move(ctx, MovePlan{TenantID: "t", ToCell: xcellNames[roll(maxXCells)], MoveID: MoveID(fmt.Sprintf("d%d-%d", d, i)),
									UndoWindow: time.Duration(roll(2)) * time.Hour})
							}
							w.write()
							cancel()
						}
					})
				}
				wg.Wait()
				w.chaos = nil
				settle(t, w, traced...)
				rep, err := CheckTrace(&trace)
				if err != nil || tracer.Err() != nil || rep.Gaps != 0 {
					t.Errorf("trace: %+v, %v, %v", rep, err, tracer.Err())
				}
				for a, n := range rep.Actions {
					actions[a] += n
				}
			})
		})
	}
	if actions[ActionWindowClosed] == 0 {
		t.Error("no window was closed")
	}
	for _, a := range []string{ActionCommit, ActionRollback, ActionOpened, ActionRemoved, ActionCloseFence, ActionOpenFence} {
		if actions[a] < 10 {
			t.Errorf("%d of %s in all runs", actions[a], a)
		}
	}
}
