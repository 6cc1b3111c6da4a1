// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
)

const (
	maxTraceLine       = 1 << 20
	maxTraceViolations = 20
)

// TraceReport says what a trace contained.
type TraceReport struct {
	Lines   int `json:"lines"`
	Tenants int `json:"tenants"`
	// Actions counts the actions of the protocol, rows and orders.
	Actions map[string]int `json:"actions"`
	// Undos counts the moves among them that take another back.
	Undos int `json:"undos,omitempty"`
	// Others counts the lines of campaigns and rollouts, which are not looked at here.
	Others int `json:"others,omitempty"`
	// Gaps is the number of rows whose predecessor is not in the trace, because who
	// wrote it was not traced or died before the line was. What lies between is
	// checked for the invariants of rows only.
	Gaps int `json:"gaps"`
}

// CheckTrace reads a trace and checks that it is a behaviour of the protocol:
// every row follows from the one before by an action, no epoch goes to two cells,
// and every order is one that a row asked for: fences opened only where a row has
// given the epoch, closed only for a cut, a claimed target, a removal or a
// deletion; changes brought back only while a window is open; commits only after
// the source's fence was closed; ACTIVE only after the winner's was opened. The last two are
// checked for tenants whose fence orders are in the trace. Lines may come in any
// order and more than once.
//
// The error wraps [ErrInvalid]; it joins the first 20 violations.
func CheckTrace(r io.Reader) (TraceReport, error) {
	rep := TraceReport{Actions: map[string]int{}}
	tenants := map[TenantID]*tenantTrace{}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxTraceLine)
	for sc.Scan() {
		if len(sc.Bytes()) == 0 {
			continue
		}
		rep.Lines++
		var ev TraceEvent
		if err := json.Unmarshal(sc.Bytes(), &ev); err != nil {
			return rep, fmt.Errorf("%w: trace line %d: %w", ErrInvalid, rep.Lines, err)
		}
		if ev.Campaign != "" || ev.Rollout != "" {
			rep.Others++
			continue
		}
		if err := ev.Tenant.Validate(); err != nil {
			return rep, fmt.Errorf("trace line %d: %w", rep.Lines, err)
		}
		tt := tenants[ev.Tenant]
		if tt == nil {
			tt = &tenantTrace{rows: map[Revision]TenantRoute{}, olds: map[Revision]Revision{}, orders: map[traceOrder]bool{}}
			tenants[ev.Tenant] = tt
		}
		if err := tt.add(ev); err != nil {
			return rep, fmt.Errorf("trace line %d: %w", rep.Lines, err)
		}
	}
	if err := sc.Err(); err != nil {
		return rep, fmt.Errorf("%w: trace: %w", ErrInvalid, err)
	}
	rep.Tenants = len(tenants)
	var bad []error
	for _, name := range slices.Sorted(maps.Keys(tenants)) {
		tt := tenants[name]
		tt.check(&rep)
		for _, err := range tt.bad {
			if len(bad) < maxTraceViolations {
				bad = append(bad, fmt.Errorf("%w: tenant %s: %w", ErrInvalid, name, err))
			}
		}
	}
	return rep, errors.Join(bad...)
}

type traceOrder struct {
	action string
	cell   CellID
	epoch  Epoch
	floor  Epoch
	move   MoveID
}

func (o traceOrder) String() string {
	return fmt.Sprintf("%s(%s,%d)", o.action, o.cell, o.epoch)
}

// tenantTrace is what a trace says of one tenant.
type tenantTrace struct {
	rows   map[Revision]TenantRoute
	olds   map[Revision]Revision // of rows whose writer was traced
	orders map[traceOrder]bool
	// asked: what the rows ask for, with the order's floor and move left out.
	asked map[traceOrder]bool
	gaps  int
	bad   []error
}

func (t *tenantTrace) add(ev TraceEvent) error {
	switch ev.Action {
	case ActionRead, "CompareAndSet":
		if ev.Row == nil || ev.Row.TenantID != ev.Tenant || ev.Row.Revision == 0 {
			return fmt.Errorf("%w: %s without its row", ErrInvalid, ev.Action)
		}
		row := *ev.Row
		if had, ok := t.rows[row.Revision]; ok && !sameRow(had, row) {
			t.bad = append(t.bad, fmt.Errorf("revision %d is both %s and %s", row.Revision, describe(had), describe(row)))
		}
		t.rows[row.Revision] = row
		if ev.Old != nil {
			t.olds[row.Revision] = *ev.Old
		}
		return nil
	case ActionCloseFence, ActionOpenFence, ActionPauseEvents, ActionStartEvents, ActionDiscard, ActionReturn:
		if err := ev.Cell.Validate(); err != nil {
			return err
		}
		o := traceOrder{action: ev.Action, cell: ev.Cell, epoch: ev.Epoch}
		if ev.Action == ActionOpenFence {
			o.floor = ev.Floor
		} else {
			o.move = ev.Move
		}
		t.orders[o] = true
		return nil
	}
	return fmt.Errorf("%w: unknown action %q", ErrInvalid, ev.Action)
}

func (t *tenantTrace) failf(format string, args ...any) {
	t.bad = append(t.bad, fmt.Errorf(format, args...))
}

func (t *tenantTrace) check(rep *TraceReport) {
	t.asked = map[traceOrder]bool{}
	revs := slices.Sorted(maps.Keys(t.rows))
	given := map[Epoch]CellID{}
	var prev TenantRoute
	for _, rev := range revs {
		row := t.rows[rev]
		if err := CheckRoute(row); err != nil {
			t.bad = append(t.bad, err)
			continue
		}
		t.follows(prev, row, rep)
		if cell, ok := given[row.Epoch]; ok && cell != row.CellID {
			t.failf("epoch %d was given to %s and to %s", row.Epoch, cell, row.CellID)
		}
		given[row.Epoch] = row.CellID
		t.ask(row)
		prev = row
	}
	t.checkOrders(rep)
	rep.Gaps += t.gaps
}

// follows checks one row against the one before.
func (t *tenantTrace) follows(prev, row TenantRoute, rep *TraceReport) {
	old, traced := t.olds[row.Revision]
	action, err := ActionOf(prev, row)
	switch {
	case err == nil && (!traced || old == prev.Revision):
		rep.Actions[action]++
		if action == ActionBegin && row.Undoes != "" {
			rep.Undos++
		}
		t.checkAction(action, prev, row)
	case traced && old == prev.Revision:
		t.bad = append(t.bad, err)
	case traced && old < prev.Revision:
		t.failf("revision %d replaced revision %d, and %d came between", row.Revision, old, prev.Revision)
	default:
		// Rows are missing in between.
		t.gaps++
		if row.Epoch < prev.Epoch {
			t.failf("the epoch fell from %d to %d", prev.Epoch, row.Epoch)
		}
	}
}

// checkAction checks what must have been done before a row could be written.
func (t *tenantTrace) checkAction(action string, prev, row TenantRoute) {
	switch action {
	case ActionCommit:
		if t.has(ActionCloseFence) && !t.orders[traceOrder{action: ActionCloseFence, cell: prev.CellID, epoch: prev.Epoch, move: prev.MoveID}] {
			t.failf("move %s was committed, the fence of %s was not closed at %d", prev.MoveID, prev.CellID, prev.Epoch)
		}
	case ActionOpened:
		if t.has(ActionOpenFence) && !t.orders[traceOrder{action: ActionOpenFence, cell: row.CellID, epoch: row.Epoch, floor: row.Floor}] {
			t.failf("%s, but its fence was not opened", describe(row))
		}
	case ActionRemoved:
		for _, e := range prev.Residue {
			if !slices.Contains(row.Residue, e) && t.has(ActionDiscard) &&
				!t.orders[traceOrder{action: ActionDiscard, cell: e.Cell, epoch: e.Epoch, move: e.Move}] {
				t.failf("the rows in %s were dropped from the residue, but not removed", e.Cell)
			}
		}
	case ActionDeleted:
		if !t.has(ActionCloseFence) {
			return
		}
		for _, e := range Effects(prev) {
			if e.Kind == EffectCloseFence && !t.orders[traceOrder{action: ActionCloseFence, cell: e.Cell, epoch: e.Fence.Epoch, move: e.Fence.Move}] {
				t.failf("%s, but the fence of %s was not closed", describe(row), e.Cell)
			}
		}
	}
}

func (t *tenantTrace) has(action string) bool {
	for o := range t.orders {
		if o.action == action {
			return true
		}
	}
	return false
}

// ask collects the orders that a row allows.
func (t *tenantTrace) ask(row TenantRoute) {
	add := func(action string, cell CellID, epoch, floor Epoch, move MoveID) {
		t.asked[traceOrder{action, cell, epoch, floor, move}] = true
	}
	if row.State == StateActive || row.State == StateCommitting {
		add(ActionOpenFence, row.CellID, row.Epoch, row.Floor, "")
	}
	for _, e := range Effects(row) {
		switch e.Kind {
		case EffectCloseFence:
			add(ActionCloseFence, e.Cell, e.Fence.Epoch, 0, e.Fence.Move)
		case EffectPauseEvents:
			add(ActionPauseEvents, e.Cell, e.Barrier.Epoch, 0, e.Barrier.Move)
		case EffectStartEvents:
			add(ActionStartEvents, e.Cell, e.Barrier.Epoch, 0, e.Barrier.Move)
		}
	}
	if m, ok := row.Move(); ok {
		add(ActionCloseFence, m.Target, m.CloseEpoch(), 0, m.ID)
	}
	if e, ok := row.Held(); ok {
		add(ActionReturn, e.Cell, e.Epoch, 0, e.Move)
	}
	for _, e := range row.Reclaimable() {
		add(ActionCloseFence, e.Cell, e.Epoch, 0, e.Move)
		add(ActionDiscard, e.Cell, e.Epoch, 0, e.Move)
	}
}

func (t *tenantTrace) checkOrders(rep *TraceReport) {
	opened := map[Epoch]CellID{}
	orders := slices.SortedFunc(maps.Keys(t.orders), func(a, b traceOrder) int {
		return cmp.Or(cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.action, b.action), cmp.Compare(a.cell, b.cell), cmp.Compare(a.move, b.move))
	})
	for _, o := range orders {
		rep.Actions[o.action]++
		if o.action == ActionOpenFence {
			if cell, ok := opened[o.epoch]; ok && cell != o.cell {
				t.failf("the fences of %s and of %s were both opened at epoch %d", cell, o.cell, o.epoch)
			}
			opened[o.epoch] = o.cell
		}
		// A row in a gap may have asked for it.
		if !t.asked[o] && t.gaps == 0 {
			t.failf("%s: no row asked for it", o)
		}
	}
}
