// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

// tracedRun moves a tenant there and back, rolls a move back, deletes the tenant
// and creates it again, and returns the lines of the trace.
func tracedRun(t *testing.T, opts func(*Tracer, *world) []ControllerOption) []TraceEvent {
	t.Helper()
	w := newWorld(t)
	var out bytes.Buffer
	tr := NewTracer(&out, "driver")
	c := NewMoveController(w, append(w.options(), opts(tr, w)...)...)
	ctx := t.Context()
	if err := c.Assign(ctx, "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	w.write()
	mustMove(t, c, "b")
	w.fail("finish", failBefore, 1)
	if err := c.Move(ctx, MovePlan{TenantID: "t", ToCell: "a"}); !errors.Is(err, ErrRolledBack) {
		t.Fatal(err)
	}
	mustMove(t, c, "c")
	if err := errors.Join(c.Delete(ctx, "t", ""), c.Reclaim(ctx, "t"), c.Assign(ctx, "t", "c", ""), tr.Err()); err != nil {
		t.Fatal(err)
	}
	var evs []TraceEvent
	dec := json.NewDecoder(&out)
	for dec.More() {
		var ev TraceEvent
		if err := dec.Decode(&ev); err != nil {
			t.Fatal(err)
		}
		evs = append(evs, ev)
	}
	return evs
}

func observed(tr *Tracer, _ *world) []ControllerOption {
	return []ControllerOption{WithObserver(tr.Observe)}
}

func wrapped(tr *Tracer, w *world) []ControllerOption {
	w.inner = tr.Table(w.inner)
	return []ControllerOption{WithFencer(tr.Fencer(w)), WithObserver(tr.Observe)}
}

func checkEvents(t *testing.T, evs []TraceEvent) (TraceReport, error) {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, ev := range evs {
		if err := enc.Encode(ev); err != nil {
			t.Fatal(err)
		}
	}
	return CheckTrace(&b)
}

func TestTraceOfRealRuns(t *testing.T) {
	for name, opts := range map[string]func(*Tracer, *world) []ControllerOption{"observed": observed, "wrapped": wrapped} {
		t.Run(name, func(t *testing.T) {
			rep, err := checkEvents(t, tracedRun(t, opts))
			if err != nil {
				t.Fatal(err)
			}
			for action, want := range map[string]int{ActionClaim: 2, ActionBegin: 3, ActionQuiesce: 3, ActionGatesClosed: 3, ActionDrained: 3,
				ActionCommit: 2, ActionRollback: 1, ActionOpened: 3, ActionRemoved: 4, ActionDelete: 1, ActionDeleted: 1} {
				if rep.Actions[action] != want {
					t.Errorf("%d of %s, want %d", rep.Actions[action], action, want)
				}
			}
			if rep.Gaps != 0 || rep.Tenants != 1 || rep.Actions[ActionOpenFence] == 0 || rep.Actions[ActionDiscard] == 0 {
				t.Errorf("%+v", rep)
			}
		})
	}
}

// TestTraceMutations changes a good trace; the checker must notice.
func TestTraceMutations(t *testing.T) {
	rowIn := func(evs []TraceEvent, s RouteState, n int) int {
		for i, ev := range evs {
			if ev.Old != nil && ev.Row.State == s {
				if n--; n == 0 {
					return i
				}
			}
		}
		t.Fatalf("no row %s", s)
		return 0
	}
	without := func(evs []TraceEvent, action string, epoch Epoch) []TraceEvent {
		var out []TraceEvent
		for _, ev := range evs {
			if ev.Action != action || ev.Epoch != epoch {
				out = append(out, ev)
			}
		}
		if len(out) == len(evs) {
			t.Fatalf("no %s at %d", action, epoch)
		}
		return out
	}
	alter := func(evs []TraceEvent, i int, f func(*TenantRoute)) []TraceEvent {
		rev := evs[i].Row.Revision
		for j := range evs {
			if evs[j].Row != nil && evs[j].Row.Revision == rev {
				f(evs[j].Row)
			}
		}
		return evs
	}
	for _, tc := range []struct {
		name string
		want string
		f    func([]TraceEvent) []TraceEvent
	}{
		{"rolled back after the commit", "came between", func(evs []TraceEvent) []TraceEvent {
			i := rowIn(evs, StateCommitting, 1)
			row, old := *evs[i].Row, evs[i].Row.Revision
			row.CellID, row.Revision = row.SourceCell, 1000
			return append(evs, TraceEvent{Tenant: "t", Action: "CompareAndSet", Old: &old, Row: &row})
		}},
		{"a cell opened that the row did not name", "no row asked", func(evs []TraceEvent) []TraceEvent {
			return append(evs, TraceEvent{Tenant: "t", Action: ActionOpenFence, Cell: "a", Epoch: 3, Floor: 3})
		}},
		{"two cells opened at one epoch", "both opened", func(evs []TraceEvent) []TraceEvent {
			return append(evs, TraceEvent{Tenant: "t", Action: ActionOpenFence, Cell: "a", Epoch: 3, Floor: 3})
		}},
		{"opened with another floor", "no row asked", func(evs []TraceEvent) []TraceEvent {
			return append(evs, TraceEvent{Tenant: "t", Action: ActionOpenFence, Cell: "b", Epoch: 5, Floor: 1})
		}},
		{"a commit that is rolled back at once", "nothing makes", func(evs []TraceEvent) []TraceEvent {
			return alter(evs, rowIn(evs, StateActive, 3), func(r *TenantRoute) { r.CellID = "a" })
		}},
		{"committed without the fence", "was not closed", func(evs []TraceEvent) []TraceEvent { return without(evs, ActionCloseFence, 2) }},
		{"active without the fence", "was not opened", func(evs []TraceEvent) []TraceEvent { return without(evs, ActionOpenFence, 3) }},
		{"dropped without a removal", "not removed", func(evs []TraceEvent) []TraceEvent { return without(evs, ActionDiscard, 2) }},
		{"a fence closed for nothing", "no row asked", func(evs []TraceEvent) []TraceEvent {
			return append(evs, TraceEvent{Tenant: "t", Action: ActionCloseFence, Cell: "b", Epoch: 9, Move: "other"})
		}},
		{"a skipped state", "nothing makes", func(evs []TraceEvent) []TraceEvent {
			return alter(evs, rowIn(evs, StateDraining, 1), func(r *TenantRoute) { r.State = StateQuiescing })
		}},
		{"an epoch given twice", "epoch 3 was given", func(evs []TraceEvent) []TraceEvent {
			i := rowIn(evs, StateCommitting, 1)
			row := *evs[i].Row
			row.CellID, row.Revision = row.SourceCell, 1000
			return append(evs, TraceEvent{Tenant: "t", Action: ActionRead, Row: &row})
		}},
		{"an epoch that falls", "fell", func(evs []TraceEvent) []TraceEvent {
			row := *evs[rowIn(evs, StateActive, 1)].Row
			row.Revision = 1000
			return append(evs, TraceEvent{Tenant: "t", Action: ActionRead, Row: &row})
		}},
		{"a lower epoch after deletion", "nothing makes", func(evs []TraceEvent) []TraceEvent {
			i := rowIn(evs, StateDeleted, 1)
			row, old := TenantRoute{TenantID: "t", State: StateActive, CellID: "a", Epoch: 1, Floor: 1, Revision: 1000}, Revision(0)
			for _, ev := range evs[i:] {
				if ev.Old != nil {
					old = ev.Row.Revision
				}
			}
			return append(evs, TraceEvent{Tenant: "t", Action: "CompareAndSet", Old: &old, Row: &row})
		}},
		{"one revision, two rows", "is both", func(evs []TraceEvent) []TraceEvent {
			row := *evs[rowIn(evs, StateActive, 2)].Row
			row.OperationID = "other"
			return append(evs, TraceEvent{Tenant: "t", Action: ActionRead, Row: &row})
		}},
		{"a row that cannot be", "route of", func(evs []TraceEvent) []TraceEvent {
			return alter(evs, rowIn(evs, StateCopying, 1), func(r *TenantRoute) { r.Floor = r.Epoch + 1 })
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			evs := tracedRun(t, wrapped)
			if _, err := checkEvents(t, evs); err != nil {
				t.Fatalf("before the change: %v", err)
			}
			_, err := checkEvents(t, tc.f(evs))
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// Rounds of a way back and undos are in a trace, and a round that nothing asked for
// is noticed.
func TestTraceOfUndos(t *testing.T) {
	w := newWorld(t)
	var out bytes.Buffer
	tr := NewTracer(&out, "driver")
	c := NewMoveController(w, append(w.options(), wrapped(tr, w)...)...)
	if err := c.Assign(t.Context(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	if err := c.Move(t.Context(), MovePlan{TenantID: "t", ToCell: "b", MoveID: "m", UndoWindow: time.Hour}); err != nil {
		t.Fatal(err)
	}
	w.write()
	win, err := c.Tend(t.Context(), "t")
	if err != nil || win.Changes != 1 {
		t.Fatalf("%+v, %v", win, err)
	}
	if _, err := c.Undo(t.Context(), MovePlan{TenantID: "t"}); err != nil {
		t.Fatal(err)
	}
	rep, err := CheckTrace(bytes.NewReader(out.Bytes()))
	if err != nil || rep.Undos != 1 || rep.Actions[ActionReturn] != 1 || rep.Actions[ActionBegin] != 2 || rep.Gaps != 0 {
		t.Errorf("%+v, %v", rep, err)
	}
	for was, is := range map[string]string{`"cell":"a","epoch":2,"move":"m"`: `"cell":"b","epoch":2,"move":"m"`, `"epoch":2,"move":"m"`: `"epoch":2,"move":"x"`} {
		i := bytes.Index(out.Bytes(), []byte(`"action":"Return"`))
		changed := append(bytes.Clone(out.Bytes()[:i]), bytes.Replace(out.Bytes()[i:], []byte(was), []byte(is), 1)...)
		if _, err := CheckTrace(bytes.NewReader(changed)); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "Return") {
			t.Errorf("%s: %v", is, err)
		}
	}
	lines, err := CheckTrace(strings.NewReader(`{"campaign":"c","action":"Run"}` + "\n" + out.String()))
	if err != nil || lines.Others != 1 {
		t.Errorf("with a line of a campaign: %+v, %v", lines, err)
	}
}

// A gap is counted; what can still be checked is.
func TestTraceGap(t *testing.T) {
	evs := tracedRun(t, wrapped)
	var out []TraceEvent
	for _, ev := range evs {
		if ev.Row == nil || ev.Row.State != StateDraining {
			out = append(out, ev)
		}
	}
	rep, err := checkEvents(t, out)
	if err != nil || rep.Gaps != 3 {
		t.Errorf("%+v, %v", rep, err)
	}
}

func TestTraceBadInput(t *testing.T) {
	for _, in := range []string{"{", "[]", `{"tenant":""}`, `{"tenant":"t","action":"Dance"}`, `{"tenant":"t","action":"Read"}`,
		`{"tenant":"t","action":"OpenFence"}`, strings.Repeat("x", maxTraceLine+2),
		`{"tenant":"t","action":"Read","row":{"tenant":"u","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":1}}`} {
		if _, err := CheckTrace(strings.NewReader(in)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.60q: %v", in, err)
		}
	}
	if rep, err := CheckTrace(strings.NewReader("\n")); err != nil || rep.Lines != 0 {
		t.Errorf("empty: %+v, %v", rep, err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errInjected }

func TestTracerKeepsTheError(t *testing.T) {
	tr := NewTracer(brokenWriter{}, "")
	table := tr.Table(NewMemTable())
	if err := NewMoveController(table).Assign(context.Background(), "t", "a", ""); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(tr.Err(), errInjected) {
		t.Errorf("%v", tr.Err())
	}
}
