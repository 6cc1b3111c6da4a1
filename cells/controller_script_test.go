// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestControllerScripts replays testdata/scripts/ctrl_*.txt: operations of
// controllers against cells and a table with injected faults, in virtual time.
func TestControllerScripts(t *testing.T) {
	runScripts(t, "ctrl_*.txt", func(t *testing.T, content string) (out string) {
		synctest.Test(t, func(t *testing.T) {
			e := &scriptEnv{world: newWorld(t)}
			out = runScript(t, content, func(c command) string { return e.do(t, c) })
		})
		return out
	})
}

type scriptEnv struct {
	world  *world
	budget *BudgetMeter
	mu     sync.Mutex // guards out
	out    strings.Builder
	said   map[string]bool // since the last row: retries say the same again
	stop   Step
	opts   []ControllerOption
}

func (e *scriptEnv) printf(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	fmt.Fprintf(&e.out, format, args...)
}

// step prints a step, but not again while the same is retried.
func (e *scriptEnv) step(wrote bool, format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	e.mu.Lock()
	defer e.mu.Unlock()
	if wrote || e.said == nil {
		e.said = map[string]bool{}
	}
	if !e.said[line] {
		e.out.WriteString(line)
	}
	e.said[line] = true
}

var errStopped = errors.New("driver stopped")

func (e *scriptEnv) controller(name string) *MoveController {
	opts := append(e.world.options(),
		WithObserver(func(ev StepEvent) {
			switch {
			case ev.Progress != nil:
			case ev.Err != nil:
				e.step(false, "  %s%s failed: %s\n", name, ev.Step, maskRandom(ev.Err.Error()))
			case ev.Step.Wrote():
				e.step(true, "  %s%s: %s\n", name, ev.Step, showRoute(ev.Route))
			default:
				e.step(false, "  %s%s\n", name, ev.Step)
			}
		}),
		WithStepHook(func(_ context.Context, ev StepEvent) error {
			if e.stop != "" && ev.Step == e.stop {
				e.stop = ""
				return errStopped
			}
			return nil
		}))
	if e.budget != nil {
		opts = append(opts, WithBudgetMeter(e.budget))
	}
	return NewMoveController(e.world, append(opts, e.opts...)...)
}

func (e *scriptEnv) do(t *testing.T, c command) string {
	e.out.Reset()
	e.said = nil
	ctx := t.Context()
	if s := c.kv["within"]; s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d)
		defer cancel()
	}
	ctrl := e.controller("")
	var err error
	switch c.name {
	case "assign":
		err = ctrl.Assign(ctx, "t", CellID(c.arg(0)), "alice")
	case "place":
		var r TenantRoute
		r, err = ctrl.Place(ctx, Claim{Tenant: "t", Cell: CellID(c.arg(0)), OperationID: c.kv["operation"], New: c.kv["new"] == "yes"})
		e.printf("%s\n", showRoute(r))
	case "move":
		var res MoveResult
		var window time.Duration
		if s := c.kv["window"]; s != "" {
			if window, err = time.ParseDuration(s); err != nil {
				t.Fatal(err)
			}
		}
		res, err = ctrl.Run(ctx, MovePlan{TenantID: "t", FromCell: CellID(c.kv["from"]), ToCell: CellID(c.arg(0)), MoveID: MoveID(c.kv["id"]), Force: c.kv["force"] == "yes", Actor: "alice", UndoWindow: window})
		e.result(res)
	case "undo":
		var res MoveResult
		res, err = ctrl.Undo(ctx, MovePlan{TenantID: "t", MoveID: MoveID(c.kv["id"]), Undoes: MoveID(c.kv["of"])})
		e.result(res)
	case "close-window":
		_, err = ctrl.CloseWindow(ctx, "t", c.kv["reason"], "alice")
	case "tend":
		var win Window
		if win, err = ctrl.Tend(ctx, "t"); win.Entry.Cell != "" {
			e.printf("window of %s: open=%t, %d changes\n", win.Entry.Move, win.Open, win.Changes)
		}
	case "resume":
		var res MoveResult
		res, err = ctrl.Resume(ctx, "t")
		e.result(res)
	case "rollback":
		err = ctrl.Rollback(ctx, "t", c.kv["reason"])
	case "delete":
		err = ctrl.Delete(ctx, "t", "alice")
	case "reclaim":
		err = ctrl.Reclaim(ctx, "t")
	default:
		e.setup(t, c)
		return e.out.String()
	}
	if err != nil {
		e.printf("error: %s\n", maskRandom(err.Error()))
	} else {
		e.printf("ok\n")
	}
	return e.out.String()
}

func (e *scriptEnv) result(res MoveResult) {
	if res.Pause > 0 && res.Pause%time.Second == 0 { // a backoff is random
		e.printf("pause %v\n", res.Pause)
	}
	if res.RolledBack {
		e.printf("rolled back: %s\n", maskRandom(res.Reason))
	}
}

// setup does the commands that are not operations of a controller.
func (e *scriptEnv) setup(t *testing.T, c command) {
	w := e.world
	switch c.name {
	case "fault": // fault <point> <mode> [times]
		times := 1
		if s := c.arg(2); s != "" {
			n, err := strconv.Atoi(s)
			if err != nil {
				t.Fatal(err)
			}
			times = n
		}
		w.fail(c.arg(0), faultMode(c.arg(1)), times)
	case "lose":
		w.lost = true
	case "heal":
		w.lost = false
		w.faults = map[string][]fault{}
	case "stop-at":
		e.stop = Step(c.arg(0))
	case "race": // race <point> <command...>: another controller gets in between
		line := strings.Join(c.args[1:], " ")
		for k, v := range c.kv {
			line += " " + k + "=" + v
		}
		w.once(c.arg(0), func() { e.other(t, parseCommand(line)) })
	case "write":
		cell, ok := w.write()
		if !ok {
			e.printf("nobody is open\n")
			return
		}
		e.printf("write %d at %s\n", w.s.wid, cell)
	case "wait":
		d, err := time.ParseDuration(c.arg(0))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(d)
	case "predict":
		d, err := time.ParseDuration(c.arg(0))
		if err != nil {
			t.Fatal(err)
		}
		w.pred = d
	case "finding":
		w.find = []Finding{{Code: c.arg(0), Message: "no tenant key", Blocking: true}}
	case "budget":
		d, err := time.ParseDuration(c.arg(0))
		if err != nil {
			t.Fatal(err)
		}
		e.budget = NewBudgetMeter(WithBudget(d, 0))
	case "remaining":
		left, err := e.budget.Remaining(t.Context(), "t")
		if err != nil {
			t.Fatal(err)
		}
		e.printf("%v left\n", left)
	case "account":
		e.printf("%s", showAccount(t, e.budget))
	case "headroom":
		d, err := time.ParseDuration(c.arg(0))
		if err != nil {
			t.Fatal(err)
		}
		e.opts = append(e.opts, WithPauseHeadroom(d))
	case "fallback":
		e.opts = append(e.opts, WithFallbackCell(CellID(c.arg(0))))
		w.s.cells[xcellIndex(CellID(c.arg(0)))] = xcell{exists: true, open: true}
	case "max-pause":
		d, err := time.ParseDuration(c.arg(0))
		if err != nil {
			t.Fatal(err)
		}
		e.opts = append(e.opts, WithMaxPause(d))
	case "show":
		e.printf("%s\n%s", showRoute(w.row("t")), w.showCells())
	default:
		t.Fatalf("unknown command %q", c.line)
	}
}

// other runs an operation of a second controller in the middle of the first's.
func (e *scriptEnv) other(t *testing.T, c command) {
	ctrl := e.controller("other: ")
	ctx := context.Background()
	var err error
	switch c.name {
	case "rollback":
		err = ctrl.Rollback(ctx, "t", c.kv["reason"])
	case "resume":
		_, err = ctrl.Resume(ctx, "t")
	case "undo":
		_, err = ctrl.Undo(ctx, MovePlan{TenantID: "t", MoveID: MoveID(c.kv["id"])})
	case "close-window":
		_, err = ctrl.CloseWindow(ctx, "t", "bob", "bob")
	case "assign":
		err = ctrl.Assign(ctx, "t", CellID(c.arg(0)), "bob")
	case "move":
		err = ctrl.Move(ctx, MovePlan{TenantID: "t", ToCell: CellID(c.arg(0)), MoveID: MoveID(c.kv["id"])})
	case "delete":
		err = ctrl.Delete(ctx, "t", "bob")
	case "recreate":
		err = errors.Join(ctrl.Delete(ctx, "t", "bob"), ctrl.Assign(ctx, "t", CellID(c.arg(0)), "bob"))
	case "sequel": // the move that is going on is rolled back and another one made
		err = errors.Join(ctrl.Rollback(ctx, "t", "operator"),
			ctrl.Move(ctx, MovePlan{TenantID: "t", ToCell: CellID(c.arg(0)), MoveID: MoveID(c.kv["id"])}))
	default:
		t.Fatalf("unknown race %q", c.line)
	}
	if err != nil {
		e.printf("  other: error: %s\n", maskRandom(err.Error()))
	} else {
		e.printf("  other: ok\n")
	}
}
