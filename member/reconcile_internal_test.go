// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

func TestCompareFence(t *testing.T) {
	const a, b = cells.CellID("a"), cells.CellID("b")
	row := func(epoch cells.Epoch, open bool) *guard.Fence {
		return &guard.Fence{Tenant: "t", Epoch: epoch, Floor: epoch, Open: open}
	}
	active := func(cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
		return cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: cell, Epoch: epoch, Floor: epoch}
	}
	with := func(r cells.TenantRoute, edit func(*cells.TenantRoute)) cells.TenantRoute { edit(&r); return r }
	moving := func(state cells.RouteState, cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
		return cells.TenantRoute{TenantID: "t", State: state, CellID: cell, Epoch: epoch, Floor: epoch, MoveID: "m", SourceCell: b, TargetCell: a, Base: 3}
	}
	out := func(state cells.RouteState, cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
		r := moving(state, cell, epoch)
		r.SourceCell, r.TargetCell = a, b
		return r
	}
	open := func(e, floor cells.Epoch, m cells.MoveID) change {
		return change{true, cells.FenceOrder{Cell: a, Tenant: "t", Epoch: e, Floor: floor, Move: m}}
	}
	closed := func(e cells.Epoch, m cells.MoveID) change {
		return change{false, cells.FenceOrder{Cell: a, Tenant: "t", Epoch: e, Move: m}}
	}
	residue := func(r *cells.TenantRoute) { r.Residue = []cells.Residue{{Cell: a, Epoch: 4, Move: "old"}} }
	cases := []struct {
		name  string
		route cells.TenantRoute
		fence *guard.Fence
		want  verdict
		do    change
	}{
		{"here, no row", active(a, 1), nil, fenceBehind, open(1, 1, "")},
		{"here, brought by a move, no row", with(active(a, 5), func(r *cells.TenantRoute) { r.DataMark = "x" }), nil, fenceLost, change{}},
		{"here, brought by a move, restored", with(active(a, 5), func(r *cells.TenantRoute) { r.DataMark = "x" }), row(3, true), fenceBehind, open(5, 5, "")},
		{"here, restored", active(a, 5), row(3, true), fenceBehind, open(5, 5, "")},
		{"here, floor", with(active(a, 5), func(r *cells.TenantRoute) { r.Floor = 3 }), row(3, true), fenceBehind, open(5, 3, "")},
		{"here, good", active(a, 5), row(5, true), fenceGood, change{}},
		{"here, closed later", active(a, 5), row(6, false), fenceAhead, change{}},
		{"here, closed at it", active(a, 5), row(5, false), fenceAhead, change{}},
		{"preparing to leave", out(cells.StateActive, a, 3), row(3, true), fenceGood, change{}},
		{"preparing to leave, restored", out(cells.StateActive, a, 3), row(1, true), fenceBehind, open(3, 3, "")},
		{"quiescing", out(cells.StateQuiescing, a, 3), row(3, true), fenceGood, change{}},
		{"draining", out(cells.StateDraining, a, 3), nil, fenceGood, change{}},
		{"copying away", out(cells.StateCopying, a, 4), row(3, true), fenceBehind, closed(4, "m")},
		{"copying away, done", out(cells.StateCopying, a, 4), row(4, false), fenceGood, change{}},
		{"copying away, no row", out(cells.StateCopying, a, 4), nil, fenceBehind, closed(4, "m")},
		{"copying away, open again", out(cells.StateCopying, a, 4), row(5, true), fenceAhead, change{}},
		{"committing here", moving(cells.StateCommitting, a, 5), row(4, false), fenceBehind, open(5, 5, "m")},
		{"gone to b", out(cells.StateCommitting, b, 5), row(3, true), fenceBehind, closed(4, "m")},
		{"gone to b, residue", with(active(b, 5), residue), row(3, true), fenceBehind, closed(4, "old")},
		{"gone to b, residue, no row", with(active(b, 5), residue), nil, fenceBehind, closed(4, "old")},
		{"gone to b, residue, closed", with(active(b, 5), residue), row(4, false), fenceGood, change{}},
		{"elsewhere", active(b, 5), nil, fenceGood, change{}},
		{"elsewhere, closed", active(b, 5), row(2, false), fenceGood, change{}},
		{"elsewhere, open", active(b, 5), row(2, true), fenceBehind, closed(5, "")},
		{"elsewhere, open above", active(b, 5), row(7, true), fenceAhead, change{}},
		{"coming here, restored", moving(cells.StateActive, b, 3), row(1, true), fenceBehind, closed(4, "m")},
		{"coming here, copying, restored", moving(cells.StateCopying, b, 4), row(1, true), fenceBehind, closed(4, "m")},
		{"coming here, claimed", moving(cells.StateCopying, b, 4), row(4, false), fenceGood, change{}},
		{"deleting", with(active(a, 6), func(r *cells.TenantRoute) { r.State = cells.StateDeleting }), row(5, true), fenceBehind, closed(6, "")},
		{"deleted, restored", with(active(a, 6), func(r *cells.TenantRoute) {
			r.State = cells.StateDeleted
			r.Residue = []cells.Residue{{Cell: a, Epoch: 6, Move: "d"}}
		}), row(5, true), fenceBehind, closed(6, "d")},
		{"deleted, no row", with(active(a, 6), func(r *cells.TenantRoute) { r.State = cells.StateDeleted }), nil, fenceGood, change{}},
		{"deleted, open above", with(active(a, 6), func(r *cells.TenantRoute) { r.State = cells.StateDeleted }), row(7, true), fenceAhead, change{}},
	}
	for _, tc := range cases {
		v, do := compareFence(a, &tc.route, tc.fence)
		if v != tc.want || do != tc.do {
			t.Errorf("%s: %d %+v, want %d %+v", tc.name, v, do, tc.want, tc.do)
		}
	}
}

// world plays the protocol for one tenant among three cells, with drivers that
// perform effects late, twice or not at all, members that reconcile by routes they
// read long ago, and databases that are restored to what they were.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	route   cells.TenantRoute
	history []cells.TenantRoute
	keepers map[cells.CellID]*memKeeper
	backups map[cells.CellID][]*guard.Fence // every state that the fence was in
	given   map[cells.Epoch]cells.CellID    // who the table gave an epoch to
	moves   int
	rev     cells.Revision
	trail   []string
}

var worldCells = []cells.CellID{"a", "b", "c"}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), keepers: map[cells.CellID]*memKeeper{},
		backups: map[cells.CellID][]*guard.Fence{}, given: map[cells.Epoch]cells.CellID{}}
	for _, c := range worldCells {
		w.keepers[c] = newMemKeeper()
		w.backups[c] = []*guard.Fence{nil}
	}
	return w
}

func (w *world) note(format string, args ...any) {
	w.trail = append(w.trail, fmt.Sprintf(format, args...))
}

func (w *world) fence(c cells.CellID) *guard.Fence {
	if f, ok := w.keepers[c].get("t"); ok {
		return &f
	}
	return nil
}

// saved remembers the cell's fence for a later restore.
func (w *world) saved(c cells.CellID) { w.backups[c] = append(w.backups[c], w.fence(c)) }

func (w *world) event(ev cells.Event) bool {
	w.rev++
	ev.Tenant, ev.At, ev.Stamp = "t", time.Unix(int64(w.rev), 0), fmt.Sprint(w.rev)
	next, _, err := cells.Next(w.route, ev)
	if err != nil {
		return false
	}
	next.Revision = w.rev
	w.note("%s -> %s(%s,%d) move=%q residue=%v", ev.Kind, next.State, next.CellID, next.Epoch, next.MoveID, next.Residue)
	w.route = next
	w.history = append(w.history, next)
	if other, ok := w.given[next.Epoch]; ok && other != next.CellID {
		w.fail("epoch %d given to %s and %s", next.Epoch, other, next.CellID)
	}
	w.given[next.Epoch] = next.CellID
	return true
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	for _, s := range w.trail {
		w.t.Log(s)
	}
	w.t.Fatalf(format, args...)
}

// claim is what Prepare does first at the target.
func (w *world) claim(r cells.TenantRoute) error {
	m, ok := r.Move()
	if !ok {
		return nil
	}
	err := w.keepers[m.Target].CloseFence(context.Background(), cells.FenceOrder{Cell: m.Target, Tenant: "t", Epoch: m.CloseEpoch(), Move: m.ID})
	w.saved(m.Target)
	return err
}

// perform does the fence effects of a route, which may be an old one.
func (w *world) perform(r cells.TenantRoute) error {
	for _, e := range cells.Effects(r) {
		var err error
		switch e.Kind {
		case cells.EffectOpenFence:
			err = w.keepers[e.Cell].OpenFence(context.Background(), e.Fence)
		case cells.EffectCloseFence:
			err = w.keepers[e.Cell].CloseFence(context.Background(), e.Fence)
		case cells.EffectPrepare:
			err = w.claim(r)
		case cells.EffectDiscard:
			err = w.discard(e.Residue)
		}
		w.saved(e.Cell)
		if err != nil {
			return fmt.Errorf("%s: %w", e, err)
		}
	}
	return nil
}

// discard is the fence's part of a removal.
func (w *world) discard(r cells.Residue) error {
	f := w.fence(r.Cell)
	if f != nil && (f.Epoch > r.Epoch || f.Epoch == r.Epoch && (f.Open || f.Move != r.Move)) {
		return fmt.Errorf("%w: fence %+v, residue %+v", cells.ErrStaleOrder, *f, r)
	}
	return w.keepers[r.Cell].CloseFence(context.Background(), cells.FenceOrder{Cell: r.Cell, Tenant: "t", Epoch: r.Epoch, Move: r.Move})
}

// reconcile is one member of the cell that has read r at some time.
func (w *world) reconcile(c cells.CellID, r cells.TenantRoute) {
	v, do := compareFence(c, &r, w.fence(c))
	if v != fenceBehind {
		return
	}
	w.note("  %s reconciles by revision %d: %+v", c, r.Revision, do)
	var err error
	if do.open {
		if w.given[do.order.Epoch] != c {
			w.fail("cell %s would open epoch %d, which is %s's", c, do.order.Epoch, w.given[do.order.Epoch])
		}
		err = w.keepers[c].OpenFence(context.Background(), do.order)
	} else {
		err = w.keepers[c].CloseFence(context.Background(), do.order)
	}
	w.saved(c)
	if err != nil {
		w.fail("the change did not fit the fence it was made for: %v", err)
	}
}

// step takes the protocol one event further, or tries to.
func (w *world) step(owns bool) {
	r := w.route
	other := func() cells.CellID {
		for {
			if c := worldCells[w.rng.IntN(len(worldCells))]; c != r.CellID {
				return c
			}
		}
	}
	must := func(err error) {
		if err != nil {
			w.fail("the protocol's own order was refused: %v", err)
		}
	}
	switch r.State {
	case 0, cells.StateDeleted:
		if w.event(cells.Event{Kind: cells.EventClaim, Cell: worldCells[w.rng.IntN(len(worldCells))]}) && w.rng.IntN(2) == 0 {
			must(w.perform(w.route))
		}
	case cells.StateActive:
		switch {
		case r.MoveID != "" && w.rng.IntN(4) == 0:
			w.event(cells.Event{Kind: cells.EventRollback, Move: r.MoveID, Reason: "x"})
		case r.MoveID != "":
			must(w.claim(r))
			w.event(cells.Event{Kind: cells.EventQuiesce, Move: r.MoveID, Deadline: time.Unix(1, 0)})
		case len(r.Residue) > 0 && w.rng.IntN(2) == 0:
			for _, e := range r.Reclaimable() {
				must(w.discard(e))
				w.event(cells.Event{Kind: cells.EventRemoved, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move})
				break
			}
		case w.rng.IntN(8) == 0:
			w.moves++
			w.event(cells.Event{Kind: cells.EventDelete, Epoch: r.Epoch, OwnsData: owns, Move: cells.MoveID(fmt.Sprintf("d%d", w.moves))})
		default:
			w.moves++
			w.event(cells.Event{Kind: cells.EventBegin, Move: cells.MoveID(fmt.Sprintf("m%d", w.moves)), Cell: other(), OwnsData: owns})
		}
	case cells.StateQuiescing:
		w.event(cells.Event{Kind: cells.EventGatesClosed, Move: r.MoveID})
	case cells.StateDraining:
		if w.rng.IntN(4) == 0 {
			w.event(cells.Event{Kind: cells.EventRollback, Move: r.MoveID, Reason: "x"})
			return
		}
		w.event(cells.Event{Kind: cells.EventDrained, Move: r.MoveID})
	case cells.StateCopying:
		must(w.perform(r))
		if m, _ := r.Move(); true {
			if f := w.fence(m.Target); owns && (f == nil || f.Open || f.Epoch != m.CloseEpoch() || f.Move != m.ID) {
				// The target's claim is lost to a restore: nothing may be committed.
				w.event(cells.Event{Kind: cells.EventRollback, Move: r.MoveID, Reason: "claim"})
				return
			}
		}
		if w.rng.IntN(4) == 0 {
			w.event(cells.Event{Kind: cells.EventRollback, Move: r.MoveID, Reason: "x"})
			return
		}
		w.event(cells.Event{Kind: cells.EventCommit, Move: r.MoveID, DataMark: "1"})
	case cells.StateCommitting:
		must(w.perform(r))
		w.event(cells.Event{Kind: cells.EventOpened, Move: r.MoveID, Epoch: r.Epoch})
	case cells.StateDeleting:
		must(w.perform(r))
		w.event(cells.Event{Kind: cells.EventDeleted, Epoch: r.Epoch})
	}
}

func TestReconcileInAnyOrder(t *testing.T) {
	worlds := 3000
	if testing.Short() {
		worlds = 300
	}
	restored, moved := 0, 0
	for seed := range uint64(worlds) {
		w := newWorld(t, seed)
		owns := seed%2 == 0
		for range 60 {
			cell := worldCells[w.rng.IntN(len(worldCells))]
			switch n := w.rng.IntN(10); {
			case n < 5 || len(w.history) == 0:
				w.step(owns)
			case n < 7: // a member that is up to date or not
				i := len(w.history) - 1
				if w.rng.IntN(2) == 0 {
					i = w.rng.IntN(len(w.history))
				}
				w.reconcile(cell, w.history[i])
			case n < 8: // a late driver
				if err := w.perform(w.history[w.rng.IntN(len(w.history))]); err != nil && !errors.Is(err, cells.ErrStaleOrder) {
					w.fail("%v", err)
				}
			default: // a restore, and a start of the cell's members by the routes of now
				b := w.backups[cell][w.rng.IntN(len(w.backups[cell]))]
				restored++
				w.keepers[cell].mu.Lock()
				delete(w.keepers[cell].rows, "t")
				if b != nil {
					w.keepers[cell].rows["t"] = *b
				}
				w.keepers[cell].mu.Unlock()
				w.note("  %s is restored to %+v", cell, b)
				w.reconcile(cell, w.route)
			}
			w.check()
		}
		moved += w.moves
	}
	if restored < worlds || moved < worlds {
		t.Fatalf("only %d restores and %d moves: the test does not test", restored, moved)
	}
}

// check: at most one cell admits, and only at an epoch that it was given; after a
// look at the route of now, nobody but its cell does.
func (w *world) check() {
	for _, c := range worldCells {
		if f := w.fence(c); f != nil && f.Open {
			if w.given[f.Epoch] != c {
				w.fail("cell %s is open at epoch %d, which is %s's", c, f.Epoch, w.given[f.Epoch])
			}
			if c != w.route.CellID {
				v, do := compareFence(c, &w.route, f)
				if v != fenceBehind || do.open {
					w.fail("cell %s is open at %d by route %+v and its members leave it so (%d %+v)", c, f.Epoch, w.route, v, do)
				}
			}
		}
	}
}

func TestDirtySet(t *testing.T) {
	var d dirtySet
	at := time.Now()
	d.add("x", at)
	d.add("y", at.Add(time.Second))
	d.add("x", at.Add(2*time.Second)) // put off
	if got := d.take(at); len(got) != 0 {
		t.Fatalf("taken %v", got)
	}
	if got := d.take(at.Add(time.Second)); len(got) != 1 || got[0] != "y" {
		t.Fatalf("taken %v", got)
	}
	if got := d.take(at.Add(2 * time.Second)); len(got) != 1 || got[0] != "x" {
		t.Fatalf("taken %v", got)
	}
	if len(d.due) != 0 || len(d.queue) != 0 {
		t.Fatalf("left %v %v", d.due, d.queue)
	}
}
