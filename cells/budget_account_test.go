// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// showAccount prints a budget for scripts.
func showAccount(t *testing.T, m *BudgetMeter) string {
	a, err := m.Account(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%v left of %v\n", a.Left, a.Limit.Pause)
	for _, e := range a.Entries {
		fmt.Fprintf(&b, "  %s counts %v", e.Move, e.Pause)
		if e.Reserved {
			b.WriteString(", reserved")
		}
		if e.Driver > 0 {
			fmt.Fprintf(&b, ", driver %v", e.Driver)
		}
		if e.Reported {
			fmt.Fprintf(&b, ", clients %v", e.Seen)
		}
		if e.Forced {
			fmt.Fprintf(&b, ", forced by %q", e.Actor)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func TestParseAvailability(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"99.995": 129600 * time.Millisecond, "99.995%": DefaultBudget, "100": 0, "100.0%": 0, "0": DefaultBudgetWindow,
		"99.9": 2592 * time.Second, "99.99": 259200 * time.Millisecond, "99.999999999": 25920 * time.Nanosecond,
		"50": 15 * 24 * time.Hour, "050": 15 * 24 * time.Hour,
	} {
		if got, err := ParseAvailability(s, DefaultBudgetWindow); err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "%", "100.1", "101", "-1", "99.", ".5", "9e1", "99,9", "99.9999999999", "0x10", "1/2", " 99", "99 %", "1000"} {
		if got, err := ParseAvailability(s, DefaultBudgetWindow); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		millionths := rapid.Int64Range(0, 100_000_000).Draw(t, "millionths of a percent")
		window := time.Duration(rapid.Int64Range(0, int64(366*24*time.Hour)).Draw(t, "window"))
		s := fmt.Sprintf("%d.%06d", millionths/1_000_000, millionths%1_000_000)
		got, err := ParseAvailability(s, window)
		if err != nil {
			t.Fatal(err)
		}
		want := new(big.Int).Mul(big.NewInt(100_000_000-millionths), big.NewInt(int64(window)))
		want.Quo(want, big.NewInt(100_000_000))
		if want.Int64() != int64(got) {
			t.Fatalf("%s of %v: %v, want %v", s, window, got, want)
		}
	})
}

// Refusals say what is left, when it grows, when the pause fits, and how to go ahead.
func TestBudgetRefusalSaysWhen(t *testing.T) {
	clock := newClock()
	start := clock.now()
	ctx := t.Context()
	m := NewBudgetMeter(WithBudget(10*time.Second, time.Hour), WithBudgetNow(clock.now))
	charge := func(move MoveID, pause time.Duration) {
		t.Helper()
		if err := m.Charge(ctx, "t", move, pause); err != nil {
			t.Fatal(err)
		}
	}
	charge("m1", 2*time.Second)
	clock.add(10 * time.Minute)
	charge("m2", 6*time.Second)
	clock.add(10 * time.Minute)
	refusal := func(pause time.Duration) *BudgetError {
		t.Helper()
		var e *BudgetError
		if err := m.Allow(ctx, "t", pause); !errors.As(err, &e) {
			t.Fatalf("%v", err)
		}
		return e
	}
	e := refusal(5 * time.Second)
	if e.Remaining != 2*time.Second || !e.GrowsAt.Equal(start.Add(time.Hour)) || e.GrowsTo != 4*time.Second || !e.FitsAt.Equal(start.Add(70*time.Minute)) {
		t.Errorf("%+v", e)
	}
	for _, want := range []string{"2s left of 10s in 1h0m0s", "4s are left at 2026-01-01T01:00:00Z", "fits at 2026-01-01T01:10:00Z", "--force"} {
		if !strings.Contains(e.Error(), want) {
			t.Errorf("%q lacks %q", e, want)
		}
	}
	if e := refusal(3 * time.Second); !e.FitsAt.Equal(e.GrowsAt) || !e.FitsAt.Equal(start.Add(time.Hour)) {
		t.Errorf("%+v", e)
	}
	if e := refusal(11 * time.Second); !e.FitsAt.IsZero() || e.GrowsAt.IsZero() || !strings.Contains(e.Error(), "never fits") {
		t.Errorf("%+v", e)
	}
	// What the refusal promises comes true.
	clock.add(e.FitsAt.Sub(clock.now()))
	if err := m.Allow(ctx, "t", 5*time.Second); err != nil {
		t.Errorf("at the promised time: %v", err)
	}
}

func TestBudgetTwoNumbers(t *testing.T) {
	ctx := t.Context()
	m := NewBudgetMeter(WithBudget(10*time.Second, time.Hour))
	step := func(err error, left time.Duration) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if got := remaining(t, m, "t"); got != left {
			t.Errorf("%v left, want %v", got, left)
		}
	}
	seen := func(move MoveID, d time.Duration) error {
		_, err := m.ChargeSeen(ctx, "t", move, d)
		return err
	}
	step(m.Reserve(ctx, "t", "m1", 4*time.Second), 6*time.Second)
	step(seen("m1", time.Second), 6*time.Second) // the cut may still be under way
	step(m.Charge(ctx, "t", "m1", 3*time.Second), 9*time.Second)
	step(seen("m1", 0), 10*time.Second)              // all requests were held and answered
	step(seen("m1", 5*time.Second), 5*time.Second)   // a late report
	step(m.Settle(ctx, "t", "m1", 0), 5*time.Second) // it is settled
	step(m.Release(ctx, "t", "m1"), 5*time.Second)   // and stays
	a, err := m.Account(ctx, "t")
	if err != nil {
		t.Fatal(err)
	}
	if e, ok := a.Entry("m1"); !ok || e.Driver != 3*time.Second || e.Seen != 5*time.Second || !e.Reported || e.Pause != 5*time.Second || a.Without("m1") != 10*time.Second {
		t.Errorf("%+v", a)
	}
	// A driver that died: what it measured is unknown, what was reserved counts.
	step(m.Reserve(ctx, "t", "m2", 2*time.Second), 3*time.Second)
	step(m.Settle(ctx, "t", "m2", -1), 3*time.Second)
	step(m.Charge(ctx, "t", "m2", time.Second), 4*time.Second) // it had not died after all
	step(m.Reserve(ctx, "t", "m3", 2*time.Second), 2*time.Second)
	step(m.Settle(ctx, "t", "m3", time.Second), 3*time.Second)
	step(m.Authorize(ctx, "t", "m4", "alice"), 3*time.Second)
	step(m.Release(ctx, "t", "m4"), 3*time.Second)
	step(m.Settle(ctx, "t", "m5", time.Second), 3*time.Second) // no reservation, no charge
}

// limits is a store with limits of its own.
type limits struct {
	budgetMem
	own map[TenantID]time.Duration
}

func (l *limits) BudgetLimit(_ context.Context, t TenantID) (BudgetLimit, bool, error) {
	d, own := l.own[t]
	if !own {
		d, own = l.own[""]
		return BudgetLimit{Pause: d}, own, nil
	}
	return BudgetLimit{Pause: d, Own: true}, true, nil
}

func TestBudgetLimits(t *testing.T) {
	l := &limits{own: map[TenantID]time.Duration{}}
	m := NewBudgetMeter(WithBudgetStore(l))
	if left := remaining(t, m, "t"); left != DefaultBudget {
		t.Errorf("%v", left)
	}
	l.own[""] = time.Second
	l.own["gold"] = 0
	if left := remaining(t, m, "t"); left != time.Second {
		t.Errorf("%v", left)
	}
	if err := m.Reserve(t.Context(), "gold", "m", 0); !errors.Is(err, ErrBudget) {
		t.Errorf("a budget of nothing: %v", err)
	}
	if a, err := m.Account(t.Context(), "gold"); err != nil || !a.Limit.Own || a.Left != 0 {
		t.Errorf("%+v %v", a, err)
	}
}

// The meter against a naive model: random operations on random moves.
func TestBudgetModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit, window = 20 * time.Second, time.Hour
		clock := newClock()
		m := NewBudgetMeter(WithBudget(limit, window), WithBudgetNow(clock.now))
		type entry struct {
			at                      time.Time
			reserved, driver, seen  time.Duration
			open, reported, charged bool
		}
		model := map[MoveID]*entry{}
		counts := func(e *entry) time.Duration {
			switch {
			case e.open || !e.reported && !e.charged:
				return e.reserved
			case e.reported:
				return e.seen
			}
			return e.driver
		}
		leftOf := func(except MoveID) time.Duration {
			d := limit
			for id, e := range model {
				if id != except {
					d -= counts(e)
				}
			}
			return max(d, 0)
		}
		ctx := context.Background()
		moves := []MoveID{"m1", "m2", "m3", "m4"}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			clock.add(time.Duration(rapid.IntRange(0, 20).Draw(t, "minutes")) * time.Minute)
			maps.DeleteFunc(model, func(_ MoveID, e *entry) bool { return !e.at.After(clock.now().Add(-window)) })
			id := rapid.SampledFrom(moves).Draw(t, "move")
			pause := time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second
			e, known := model[id]
			if !known {
				e = &entry{at: clock.now()}
			}
			switch op := rapid.SampledFrom([]string{"reserve", "charge", "seen", "settle", "release"}).Draw(t, "op"); op {
			case "reserve":
				fits := leftOf(id) > 0 && pause <= leftOf(id)
				err := m.Reserve(ctx, "t", id, pause)
				if fits != (err == nil) {
					t.Fatalf("reserve %v of %v: %v", pause, leftOf(id), err)
				}
				if fits {
					e.at, e.reserved, e.open = clock.now(), pause, true
					model[id] = e
				}
			case "charge":
				if err := m.Charge(ctx, "t", id, pause); err != nil {
					t.Fatal(err)
				}
				e.driver, e.charged, e.open = max(e.driver, pause), true, false
				model[id] = e
			case "seen":
				if _, err := m.ChargeSeen(ctx, "t", id, pause); err != nil {
					t.Fatal(err)
				}
				e.seen, e.reported = pause, true
				model[id] = e
			case "settle":
				if err := m.Settle(ctx, "t", id, pause); err != nil {
					t.Fatal(err)
				}
				if e.open {
					e.driver, e.charged, e.open = pause, true, false
				}
			case "release":
				if err := m.Release(ctx, "t", id); err != nil {
					t.Fatal(err)
				}
				if e.open {
					if e.open = false; !e.reported {
						delete(model, id)
					}
				}
			}
			a, err := m.Account(ctx, "t")
			if err != nil {
				t.Fatal(err)
			}
			if a.Left != leftOf("") || len(a.Entries) != len(model) {
				t.Fatalf("%v left in %d entries, want %v in %d: %+v", a.Left, len(a.Entries), leftOf(""), len(model), a)
			}
			if !slices.IsSortedFunc(a.Entries, func(x, y BudgetEntry) int { return x.At.Compare(y.At) }) {
				t.Fatalf("not in order: %+v", a.Entries)
			}
		}
	})
}

// A move that was forced stays forced for whoever resumes it, in another process.
func TestForceOutlivesItsDriver(t *testing.T) {
	for _, force := range []bool{true, false} {
		t.Run(fmt.Sprint(force), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "budget.json")
			w := newWorld(t)
			stop := errors.New("died")
			at := Step("")
			controller := func() *MoveController {
				meter := NewBudgetMeter(WithBudgetFile(path), WithBudget(time.Second, 0))
				return NewMoveController(w, append(w.options(), WithBudgetMeter(meter), WithStepHook(func(_ context.Context, ev StepEvent) error {
					if ev.Step == at {
						return stop
					}
					return nil
				}))...)
			}
			if err := controller().Assign(t.Context(), "t", "a", ""); err != nil {
				t.Fatal(err)
			}
			at = StepBegin
			if err := controller().Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b", MoveID: "m1", Force: force, Actor: "alice"}); !errors.Is(err, stop) {
				t.Fatal(err)
			}
			at, w.pred = "", time.Minute // more than there is
			res, err := controller().Resume(t.Context(), "t")
			if force && (err != nil || res.Route.CellID != "b") || !force && (!errors.Is(err, ErrRolledBack) || !errors.Is(err, ErrBudget)) {
				t.Errorf("resumed: %v", err)
			}
			a, err := NewBudgetMeter(WithBudgetFile(path)).Account(t.Context(), "t")
			if err != nil {
				t.Fatal(err)
			}
			if e, ok := a.Entry("m1"); !ok || e.Forced != force || force && e.Actor != "alice" || e.Reserved {
				t.Errorf("entry %+v", e)
			}
		})
	}
	// One that was refused before it began leaves nothing.
	w := newWorld(t)
	meter := NewBudgetMeter()
	c := NewMoveController(w, append(w.options(), WithBudgetMeter(meter))...)
	if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	stop := errors.New("died")
	w.once("cas/ACTIVE", func() {
		other := NewMoveController(w, append(w.options(), WithStepHook(func(_ context.Context, ev StepEvent) error {
			if ev.Step == StepBegin {
				return stop
			}
			return nil
		}))...)
		if err := other.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b", MoveID: "m2"}); !errors.Is(err, stop) {
			t.Errorf("other: %v", err)
		}
	})
	if err := c.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b", MoveID: "m1", Force: true}); !errors.Is(err, ErrOtherMove) {
		t.Fatal(err)
	}
	if a, err := meter.Account(t.Context(), "t"); err != nil || len(a.Entries) != 0 {
		t.Errorf("%+v %v", a, err)
	}
}
