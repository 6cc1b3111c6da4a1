// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func drawCell(t *rapid.T) CellID {
	return rapid.SampledFrom([]CellID{"a", "b", "c", "", "A"}).Draw(t, "cell")
}

func drawEvent(t *rapid.T) Event {
	ev := Event{
		Kind: EventKind(rapid.IntRange(0, len(eventNames)).Draw(t, "kind")), Tenant: "t",
		Move: rapid.SampledFrom([]MoveID{"m1", "m2", "m3", ""}).Draw(t, "move"), Cell: drawCell(t),
		Epoch: Epoch(rapid.IntRange(0, 8).Draw(t, "epoch")), EventMark: EventSeq(rapid.IntRange(0, 2).Draw(t, "mark")),
		OwnsData:    rapid.Bool().Draw(t, "owns data"),
		OperationID: rapid.SampledFrom([]string{"", "o1", "o2"}).Draw(t, "operation"),
		UndoWindow:  time.Duration(rapid.IntRange(0, 1).Draw(t, "window")) * time.Hour,
		Actor:       "actor", At: time.Unix(1, 0), Stamp: "stamp", Reason: "reason",
	}
	if rapid.Bool().Draw(t, "deadline") {
		ev.Deadline = time.Unix(10, 0)
	}
	if rapid.IntRange(0, 3).Draw(t, "from") == 0 {
		ev.From = drawCell(t)
	}
	if rapid.IntRange(0, 3).Draw(t, "fallback") == 0 {
		ev.Fallback = "a"
	}
	return ev
}

// TestNextProperty walks through the protocol with random events and checks what
// Next promises about every one.
func TestNextProperty(t *testing.T) {
	changes := map[EventKind]int{}
	undone := 0
	rapid.Check(t, func(rt *rapid.T) {
		var row TenantRoute
		for range 60 {
			ev := drawEvent(rt)
			if rapid.Bool().Draw(rt, "fitting") {
				ev = fitting(rt, row, ev)
			}
			given := row.Clone()
			next, effects, err := Next(row, ev)
			if !reflect.DeepEqual(given, row) {
				rt.Fatalf("%s changed its argument", ev.Kind)
			}
			if err != nil {
				if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrNotApplicable) && !errors.Is(err, ErrOtherMove) && !errors.Is(err, ErrElsewhere) {
					rt.Fatalf("%s at %s: %v wraps no refusal", ev.Kind, describe(row), err)
				}
				if !reflect.DeepEqual(next, row) || effects != nil {
					rt.Fatalf("%s was refused and gave %s, %v", ev.Kind, describe(next), effects)
				}
				continue
			}
			if !reflect.DeepEqual(effects, Effects(next)) {
				rt.Fatalf("%s: effects %v, the row's are %v", ev.Kind, effects, Effects(next))
			}
			if next.Stamp != ev.Stamp { // known already
				if !reflect.DeepEqual(next, row) {
					rt.Fatalf("%s is known and changes %s to %s", ev.Kind, showRoute(row), showRoute(next))
				}
				continue
			}
			changes[ev.Kind]++
			if next.Undoes != "" {
				undone++
			}
			if err := errors.Join(CheckRoute(next), ValidateChange(row, next)); err != nil {
				rt.Fatalf("%s makes %s of %s: %v", ev.Kind, showRoute(next), showRoute(row), err)
			}
			if action, err := ActionOf(row, next); err != nil || action != rowActions[ev.Kind] {
				rt.Fatalf("%s is seen as %s, %v", ev.Kind, action, err)
			}
			// The same event again, as after a crash, changes nothing more.
			again := ev
			again.Stamp = "again"
			if twice, _, err := Next(next, again); err == nil && twice.Stamp == again.Stamp {
				rt.Fatalf("%s takes effect twice: %s, then %s", ev.Kind, showRoute(next), showRoute(twice))
			}
			row = next
			row.Stamp = fmt.Sprint(rapid.Uint32().Draw(rt, "stamp"))
		}
	})
	if undone == 0 {
		t.Error("nothing was undone")
	}
	for k := EventClaim; int(k) < len(eventNames); k++ {
		if changes[k] == 0 {
			t.Errorf("%s never changed a row", k)
		}
	}
}

// fitting bends an event so that it is likely to apply.
func fitting(t *rapid.T, row TenantRoute, ev Event) Event {
	forward, ok := forward(row, xdriver{})
	e, held := row.Held()
	switch {
	case row.State == 0 || row.State == StateDeleted && len(row.Residue) == 0:
		ev.Kind = EventClaim
	case held && rapid.Bool().Draw(t, "window"):
		ev.Cell, ev.Epoch, ev.Kind = e.Cell, e.Epoch, EventWindowClosed
		if rapid.Bool().Draw(t, "undo") {
			ev.Kind, ev.From, ev.OwnsData, ev.Undoes = EventBegin, "", true, e.Move
			break
		}
		ev.Move = e.Move
	case len(row.Reclaimable()) > 0 && rapid.Bool().Draw(t, "reclaim"):
		e := row.Reclaimable()[0]
		ev.Kind, ev.Cell, ev.Epoch, ev.Move = EventRemoved, e.Cell, e.Epoch, e.Move
	case ok:
		ev.Kind, ev.Move, ev.Epoch, ev.Deadline = forward.Kind, forward.Move, forward.Epoch, forward.Deadline
		if row.MoveID != "" && row.State != StateCommitting && rapid.IntRange(0, 4).Draw(t, "rollback") == 0 {
			ev.Kind = EventRollback
		}
	case rapid.IntRange(0, 3).Draw(t, "delete") == 0:
		ev.Kind, ev.Epoch = EventDelete, row.Epoch
	default:
		ev.Kind, ev.From = EventBegin, ""
	}
	return ev
}

// Next is total: rows that nobody could have written are refused, not believed.
func TestNextRefusesNonsense(t *testing.T) {
	good := TenantRoute{TenantID: "t", State: StateCopying, CellID: "a", Epoch: 4, Floor: 4, MoveID: "m1", SourceCell: "a", TargetCell: "b", Base: 3}
	if err := CheckRoute(good); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(*TenantRoute){
		"state":         func(r *TenantRoute) { r.State = 99 },
		"no state":      func(r *TenantRoute) { r.State = 0 },
		"tenant":        func(r *TenantRoute) { r.TenantID = "a b" },
		"cell":          func(r *TenantRoute) { r.CellID = "" },
		"epoch 0":       func(r *TenantRoute) { r.Epoch, r.Floor = 0, 0 },
		"floor":         func(r *TenantRoute) { r.Floor = 5 },
		"no move":       func(r *TenantRoute) { r.MoveID = "" },
		"no source":     func(r *TenantRoute) { r.SourceCell = "" },
		"to itself":     func(r *TenantRoute) { r.TargetCell = "a" },
		"base":          func(r *TenantRoute) { r.Base = 4 },
		"wrong cell":    func(r *TenantRoute) { r.CellID = "b" },
		"deleted":       func(r *TenantRoute) { r.State = StateDeleted },
		"commits early": func(r *TenantRoute) { r.State = StateCommitting },
		"drains late":   func(r *TenantRoute) { r.State = StateDraining },
		"residue twice": func(r *TenantRoute) {
			r.Residue = []Residue{{Cell: "c", Epoch: 1, Move: "x"}, {Cell: "c", Epoch: 2, Move: "y"}}
		},
		"residue ahead":  func(r *TenantRoute) { r.Residue = []Residue{{Cell: "c", Epoch: 5, Move: "x"}} },
		"residue's move": func(r *TenantRoute) { r.Residue = []Residue{{Cell: "c", Epoch: 1}} },
		"worn out":       func(r *TenantRoute) { r.Base = maxNumber - 1; r.Epoch, r.Floor = maxNumber, maxNumber },
	} {
		r := good.Clone()
		f(&r)
		for k := EventKind(0); int(k) <= len(eventNames); k++ {
			ev := Event{Kind: k, Tenant: "t", Move: "m1", Cell: "b", Epoch: r.Epoch, Deadline: time.Unix(1, 0), Stamp: "s"}
			if next, _, err := Next(r, ev); !errors.Is(err, ErrInvalid) || !reflect.DeepEqual(next, r) {
				t.Errorf("%s: %s gave %s, %v", name, k, describe(next), err)
			}
		}
	}
}

// Each event must be refused by name when it lacks what it needs.
func TestEventCheck(t *testing.T) {
	row, _, err := Next(TenantRoute{}, Event{Kind: EventClaim, Tenant: "t", Cell: "a"})
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range []Event{
		{}, {Kind: 99}, {Kind: EventBegin, Cell: "b"}, {Kind: EventBegin, Move: "m1"}, {Kind: EventBegin, Move: "m1", Cell: "b", From: "B"},
		{Kind: EventQuiesce}, {Kind: EventCommit}, {Kind: EventOpened, Move: "m 1"}, {Kind: EventRemoved, Cell: "a"},
		{Kind: EventDelete, Epoch: 1, OwnsData: true}, {Kind: EventClaim, Tenant: "t", Cell: "a", Fallback: "-A-"},
	} {
		if _, _, err := Next(row, ev); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", ev, err)
		}
	}
	if _, _, err := Next(row, Event{Kind: EventClaim, Tenant: "u", Cell: "a"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("another tenant's row: %v", err)
	}
	names := []string{EventKind(0).String(), EventKind(99).String(), EffectKind(0).String(), EffectKind(99).String()}
	if !slices.Equal(names, []string{"EventKind(0)", "EventKind(99)", "EffectKind(0)", "EffectKind(99)"}) {
		t.Errorf("%v", names)
	}
}
