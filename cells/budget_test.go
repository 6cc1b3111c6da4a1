// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// testClock is a clock that only goes when it is told to.
type testClock struct {
	mu sync.Mutex // guards t
	t  time.Time
}

func newClock() *testClock { return &testClock{t: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)} }

func (c *testClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *testClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

func remaining(t *testing.T, m *BudgetMeter, tenant TenantID) time.Duration {
	t.Helper()
	left, err := m.Remaining(t.Context(), tenant)
	if err != nil {
		t.Fatal(err)
	}
	return left
}

func TestBudgetDefault(t *testing.T) {
	m := NewBudgetMeter()
	if left := remaining(t, m, "t"); left != 129600*time.Millisecond {
		t.Errorf("99.995%% of 30 days leaves %v", left)
	}
}

func TestBudget(t *testing.T) {
	for name, opt := range map[string]func(t *testing.T) BudgetOption{
		"memory": func(*testing.T) BudgetOption { return func(*BudgetMeter) {} },
		"file": func(t *testing.T) BudgetOption {
			return WithBudgetFile(filepath.Join(t.TempDir(), "budget.json"))
		},
		"store": func(*testing.T) BudgetOption { return WithBudgetStore(&budgetMem{}) },
	} {
		t.Run(name, func(t *testing.T) {
			clock := newClock()
			ctx := t.Context()
			m := NewBudgetMeter(opt(t), WithBudget(10*time.Second, time.Hour), WithBudgetNow(clock.now))
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			must(m.Allow(ctx, "t", 10*time.Second))
			must(m.Reserve(ctx, "t", "m1", 6*time.Second))
			if left := remaining(t, m, "t"); left != 4*time.Second {
				t.Errorf("after the reservation: %v", left)
			}
			var refused *BudgetError
			if err := m.Reserve(ctx, "t", "m2", 5*time.Second); !errors.As(err, &refused) || !errors.Is(err, ErrBudget) || refused.Remaining != 4*time.Second {
				t.Errorf("too much: %v", err)
			}
			if left := remaining(t, m, "t"); left != 4*time.Second {
				t.Errorf("a refusal reserved something: %v", left)
			}
			must(m.Reserve(ctx, "u", "m2", 5*time.Second)) // another tenant has a budget of its own
			must(m.Reserve(ctx, "t", "m1", 8*time.Second)) // the same move changes its mind
			must(m.Charge(ctx, "t", "m1", time.Second))
			must(m.Charge(ctx, "t", "m1", 500*time.Millisecond)) // a second driver measured less
			must(m.Release(ctx, "t", "m1"))                      // a charge stays
			if left := remaining(t, m, "t"); left != 9*time.Second {
				t.Errorf("after the charge: %v", left)
			}
			clock.add(30 * time.Minute)
			must(m.Reserve(ctx, "t", "m3", 2*time.Second))
			must(m.Release(ctx, "t", "m3"))
			must(m.Release(ctx, "t", "m3"))
			must(m.Charge(ctx, "t", "m4", 20*time.Second)) // what happened is charged, however long
			if err := m.Allow(ctx, "t", 0); !errors.Is(err, ErrBudget) {
				t.Errorf("used up: %v", err)
			}
			clock.add(31 * time.Minute) // m1 leaves the window, m4 does not
			if left := remaining(t, m, "t"); left != 0 {
				t.Errorf("half an hour later: %v", left)
			}
			clock.add(time.Hour)
			if left := remaining(t, m, "t"); left != 10*time.Second {
				t.Errorf("after the window: %v", left)
			}
			if err := m.Charge(ctx, "", "m1", 0); !errors.Is(err, ErrInvalid) {
				t.Errorf("no tenant: %v", err)
			}
			if err := m.Reserve(ctx, "t", "m 1", 0); !errors.Is(err, ErrInvalid) {
				t.Errorf("bad move: %v", err)
			}
		})
	}
}

// A restart forgets nothing.
func TestBudgetSurvivesRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "budget.json")
	w := newWorld(t)
	clock := newClock()
	controller := func() *MoveController {
		meter := NewBudgetMeter(WithBudgetFile(path), WithBudget(3*time.Second, 0), WithBudgetNow(clock.now))
		return NewMoveController(w, append(w.options(), WithBudgetMeter(meter), WithNow(clock.now),
			WithObserver(func(ev StepEvent) {
				if ev.Step == StepDrain {
					clock.add(2 * time.Second)
				}
			}))...)
	}
	if err := controller().Assign(t.Context(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	if res := mustMove(t, controller(), "b"); res.Pause != 2*time.Second {
		t.Fatalf("pause %v", res.Pause)
	}
	w.pred = 2 * time.Second
	err := controller().Move(t.Context(), MovePlan{TenantID: "t", ToCell: "a"})
	var refused *BudgetError
	if !errors.As(err, &refused) || refused.Remaining != time.Second {
		t.Errorf("after a restart: %v", err)
	}
	if r := w.row("t"); r.CellID != "b" || r.Epoch != 3 {
		t.Errorf("it was touched all the same: %s", showRoute(r))
	}
}

func TestBudgetFileDamage(t *testing.T) {
	write := func(t *testing.T) (string, string) {
		path := filepath.Join(t.TempDir(), "budget.json")
		if err := NewBudgetMeter(WithBudgetFile(path)).Charge(t.Context(), "t", "m1", time.Second); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return path, string(b)
	}
	for _, tc := range []struct {
		name string
		f    func(string) string
		want string
	}{
		{"torn", func(s string) string { return s[:len(s)/2] }, "torn"},
		{"empty", func(string) string { return "" }, "torn"},
		{"edited", func(s string) string { return strings.Replace(s, `"pause":1000000000`, `"pause":1000000001`, 1) }, "checksum"},
		{"newer", func(s string) string { return strings.Replace(s, `"version":1`, `"version":2`, 1) }, "upgrade"},
		{"another format", func(s string) string { return strings.Replace(s, budgetFormat, "cloister-routes", 1) }, "format"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path, content := write(t)
			bad := tc.f(content)
			if bad == content {
				t.Fatal("nothing was changed")
			}
			if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
			m := NewBudgetMeter(WithBudgetFile(path))
			for _, err := range []error{m.Allow(t.Context(), "t", 0), m.Charge(t.Context(), "t", "m2", time.Second)} {
				if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%v, want %q", err, tc.want)
				}
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != bad {
				t.Error("the damaged file was changed")
			}
			// No cut begins on an unknown budget; a forced one does.
			w := newWorld(t)
			c := NewMoveController(w, append(w.options(), WithBudgetMeter(m))...)
			if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
				t.Fatal(err)
			}
			if err := c.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b"}); !errors.Is(err, ErrInvalid) || w.row("t").CellID != "a" {
				t.Errorf("moved on an unknown budget: %v", err)
			}
			if err := c.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b", Force: true}); err != nil {
				t.Errorf("forced: %v", err)
			}
		})
	}
	t.Run("missing", func(t *testing.T) {
		path, _ := write(t)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		m := NewBudgetMeter(WithBudgetFile(path))
		if _, err := m.Remaining(t.Context(), "t"); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "missing") {
			t.Errorf("%v", err)
		}
	})
	t.Run("no folder", func(t *testing.T) {
		m := NewBudgetMeter(WithBudgetFile(filepath.Join(t.TempDir(), "none", "budget.json")))
		if err := m.Charge(t.Context(), "t", "m1", time.Second); !errors.Is(err, ErrUnavailable) {
			t.Errorf("%v", err)
		}
	})
	t.Run("held lock", func(t *testing.T) {
		path, _ := write(t)
		lock, err := newBudgetFile(path).lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		if err := NewBudgetMeter(WithBudgetFile(path)).Charge(ctx, "t", "m2", 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}

const budgetChild = "CLOISTER_TEST_BUDGET_FILE"

// Several processes on one file lose nothing of each other's.
func TestBudgetProcesses(t *testing.T) {
	const each = 20
	if path := os.Getenv(budgetChild); path != "" {
		for i := range each {
			err := NewBudgetMeter(WithBudgetFile(path)).Charge(t.Context(), "t", MoveID(fmt.Sprintf("p%d-%d", os.Getpid(), i)), time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	path := filepath.Join(t.TempDir(), "budget.json")
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			cmd := exec.Command(os.Args[0], "-test.run=^TestBudgetProcesses$")
			cmd.Env = append(os.Environ(), budgetChild+"="+path)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	m := NewBudgetMeter(WithBudgetFile(path))
	for i := range each {
		if err := m.Charge(t.Context(), "t", MoveID(fmt.Sprintf("own-%d", i)), time.Millisecond); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	if left := remaining(t, m, "t"); left != DefaultBudget-4*each*time.Millisecond {
		t.Errorf("%v used, want %v", DefaultBudget-left, 4*each*time.Millisecond)
	}
}

func FuzzBudgetFile(f *testing.F) {
	good, err := encodeBudgets([]BudgetEntry{{Tenant: "t", Move: "m1", At: time.Unix(0, 0).UTC(), Pause: 5, Reserved: true}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-4])
	f.Fuzz(func(t *testing.T, b []byte) {
		es, err := decodeBudgets(b)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("%v", err)
			}
			return
		}
		again, err := encodeBudgets(es)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeBudgets(again); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
	})
}
