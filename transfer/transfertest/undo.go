// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// kept is the move that can be undone, undo the move that does it.
var (
	kept = cells.MoveRef{ID: "m1", Tenant: tenant, Source: "cell-a", Target: "cell-b", Base: base, Keep: true}
	undo = cells.MoveRef{ID: "u1", Tenant: tenant, Source: "cell-b", Target: "cell-a", Base: base + 2, Undoes: "m1"}
)

// src is the cell as a source, broken if the test wants it to be.
func (w *world) src(c Cell) transfer.Source {
	if w.h.source != nil {
		return w.h.source(c.Source())
	}
	return c.Source()
}

// moved has the tenant moved from a to b, undoably, and b take writes.
func (w *world) moved() {
	w.tb.Helper()
	w.fillForChanges()
	v := w.h.agent(w.tb, w.b)
	_, err := v.Prepare(w.tb.Context(), kept, w.a.Source(), nil)
	w.must(err)
	w.write(func(x Exec) error { return putItem(x, w.tenant, "while prepared", 1) })
	_, err = w.cut(v, kept, w.a.Source())
	w.must(err)
	w.same()
	w.commit(kept)
}

// writeB is a write of the owner, with an event.
func (w *world) writeB(f func(Exec) error) {
	w.tb.Helper()
	w.must(w.b.Write(w.tb.Context(), w.tenant, kept.OpenEpoch(), "happened", f))
}

// changeB changes everything at the owner, and leaves it so that it can be done again.
func (w *world) changeB(tag string) {
	w.tb.Helper()
	w.writeB(func(x Exec) error { return changeEverything(x, w.tenant, tag) })
	w.restoreWith(w.writeB, tag)
}

func (w *world) bring(opts ...transfer.Option) (cells.Returned, error) {
	w.tb.Helper()
	return w.h.agent(w.tb, w.a, opts...).Return(w.tb.Context(), kept.Back(), w.src(w.b))
}

// sweep is what every process does all the time.
func (w *world) sweep() {
	w.tb.Helper()
	for _, c := range []Cell{w.a, w.b} {
		w.must(w.h.agent(w.tb, c).Sweep(w.tb.Context()))
	}
}

// closeB closes the owner's fence for the undo and pauses its events.
func (w *world) closeB() {
	w.tb.Helper()
	ctx := w.tb.Context()
	w.must(w.b.Keeper().CloseFence(ctx, cells.FenceOrder{Cell: undo.Source, Tenant: undo.Tenant, Epoch: undo.CloseEpoch(), Move: undo.ID}))
	_, err := w.b.Keeper().PauseEvents(ctx, cells.BarrierOrder{Cell: undo.Source, Tenant: undo.Tenant, Epoch: undo.CloseEpoch(), Move: undo.ID})
	w.must(err)
}

// undone opens a again and removes what b has.
func (w *world) undone() {
	w.tb.Helper()
	w.must(w.a.Keeper().OpenFence(w.tb.Context(), cells.FenceOrder{Cell: undo.Target, Tenant: undo.Tenant, Epoch: undo.OpenEpoch(), Floor: undo.OpenEpoch(), Move: undo.ID}))
	w.must(w.a.Write(w.tb.Context(), w.tenant, undo.OpenEpoch(), "again", func(x Exec) error { return putItem(x, w.tenant, "after the undo", 1) }))
	w.discard(w.b, cells.Residue{Cell: w.b.ID(), Epoch: undo.CloseEpoch(), Move: undo.ID})
	w.sweep()
	w.gone(w.a)
	w.gone(w.b)
	w.bystandersUntouched()
}

// undo takes the move back.
func (w *world) undo(opts ...transfer.Option) {
	w.tb.Helper()
	v := w.h.agent(w.tb, w.a, opts...)
	_, err := v.Prepare(w.tb.Context(), undo, w.src(w.b), nil)
	w.must(err)
	w.writeB(func(x Exec) error { return putItem(x, w.tenant, "while undoing", 1) })
	w.closeB()
	_, err = v.Finish(w.tb.Context(), undo, w.src(w.b), nil)
	w.must(err)
	w.same()
}

// testWayBack writes at the target after the cut, and finds it all at the source, round
// by round; then the move is taken back, with and without a round before.
func testWayBack(tb TB, h Harness) {
	for _, rounds := range []int{3, 0} {
		w := newWorld(tb, h)
		w.moved()
		w.sweep()
		w.changeB("first")
		for n := range rounds {
			r, err := w.bring()
			w.must(err)
			if r.Changes == 0 {
				tb.Errorf("round %d brought nothing", n)
			}
			w.same()
			w.sweep()
			if r, err = w.bring(); err != nil || r.Changes > 0 {
				tb.Errorf("a round with nothing to bring: %+v, %v", r, err)
			}
			w.changeB(fmt.Sprintf("n%d", n))
		}
		copied := false
		w.undo(transfer.WithUndoCompare(int64(rounds)*1000), transfer.WithFault(func(p string) error {
			copied = copied || p == "batch"
			return nil
		}))
		if copied {
			tb.Errorf("the undo has copied rows that were there")
		}
		w.undone()
	}
}

// testWayBackCutOff cuts rounds and the undo off at each point that they pass.
func testWayBackCutOff(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.moved()
	cut := func(what string, step func(o transfer.Option) error) {
		for n := 1; ; n++ {
			if n > 30 {
				tb.Fatalf("%s: not done after %d cuts", what, n)
			}
			at := 0
			err := step(transfer.WithFault(func(string) error {
				if at++; at == n {
					return fmt.Errorf("%w: cut off at point %d", cells.ErrInvalid, n)
				}
				return nil
			}))
			if err == nil {
				if n < 3 {
					tb.Errorf("%s passed %d points", what, n-1)
				}
				return
			}
			w.wantErr(what, err, cells.ErrInvalid)
		}
	}
	w.changeB("x")
	cut("return", func(o transfer.Option) error {
		_, err := w.bring(o)
		return err
	})
	w.same()
	w.changeB("y")
	cut("prepare", func(o transfer.Option) error {
		_, err := h.agent(tb, w.a, o).Prepare(tb.Context(), undo, w.b.Source(), nil)
		return err
	})
	w.changeB("z")
	w.closeB()
	cut("finish", func(o transfer.Option) error {
		_, err := h.agent(tb, w.a, o).Finish(tb.Context(), undo, w.b.Source(), nil)
		return err
	})
	w.same()
	w.undone()
}

// testWayBackLate: a round that slept goes on after the undo, or after the removal.
func testWayBackLate(tb TB, h Harness) {
	for _, removed := range []bool{false, true} {
		w := newWorld(tb, h)
		w.moved()
		w.changeB("x")
		_, err := w.bring()
		w.must(err)
		ctx := tb.Context()
		start, err := w.b.Source().Kept(ctx, kept.Back())
		w.must(err)
		sleeper, err := w.a.Sink().ImportBack(ctx, kept.Back(), start)
		w.must(err)
		tb.Cleanup(func() { _ = sleeper.Close() })
		w.must(sleeper.Unlock(ctx))
		w.changeB("late")
		view, err := w.b.Source().View(ctx, kept.Back())
		w.must(err)
		tb.Cleanup(func() { _ = view.Close() })
		var late []transfer.Batch
		w.must(view.Changes(ctx, sleeper.State().Applied, func(b transfer.Batch) error { late = append(late, b); return nil }))
		w.must(view.Close())
		if removed {
			w.must(w.h.agent(tb, w.b).Free(ctx, w.tenant, kept.ID))
			w.discard(w.a, cells.Residue{Cell: w.a.ID(), Epoch: kept.CloseEpoch(), Move: kept.ID, Back: w.b.ID()})
		} else {
			w.undo()
			w.must(w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: undo.Target, Tenant: undo.Tenant, Epoch: undo.OpenEpoch(), Floor: undo.OpenEpoch(), Move: undo.ID}))
			w.must(w.a.Write(ctx, w.tenant, undo.OpenEpoch(), "", func(x Exec) error { return setN(x, w.tenant, "k00020", 4242) }))
		}
		want := w.dump(w.a)
		var applied error
		for _, b := range late {
			applied = errors.Join(applied, sleeper.Apply(ctx, b))
		}
		if applied = errors.Join(applied, sleeper.Commit(ctx)); !errors.Is(applied, cells.ErrStaleOrder) {
			tb.Errorf("a late round (after a removal: %t) was accepted: %v", removed, applied)
		}
		w.must(sleeper.Close())
		if _, err := w.bring(); !errors.Is(err, cells.ErrStaleOrder) && !errors.Is(err, cells.ErrReturnLost) {
			tb.Errorf("a new round (after a removal: %t): %v", removed, err)
		}
		again, err := w.a.Sink().ImportBack(ctx, kept.Back(), start)
		if !errors.Is(err, cells.ErrStaleOrder) {
			tb.Errorf("an import of the way back (after a removal: %t): %v", removed, err)
		}
		if err == nil {
			w.must(again.Close())
		}
		w.equal("rows after a late round", want, w.dump(w.a))
	}
}

// testWayBackLost: changes were missed. That is found, and an undo that has begun all
// the same brings everything by a copy.
func testWayBackLost(tb TB, h Harness) {
	for _, rounds := range []int{1, 0} {
		w := newWorld(tb, h)
		l, ok := w.b.(Loser)
		if !ok {
			tb.Fatalf("the harness cannot lose a capture")
		}
		w.moved()
		if w.changeB("x"); rounds > 0 {
			_, err := w.bring()
			w.must(err)
		}
		w.must(l.LoseCapture(tb.Context(), kept.ID))
		w.changeB("unseen")
		_, err := w.bring()
		w.wantErr("a round after changes were missed", err, cells.ErrReturnLost)
		w.undo()
		w.undone()
	}
}

// testWayBackClosed: the window is over; both cells are cleaned up, the owner stays as it is.
func testWayBackClosed(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.moved()
	w.changeB("x")
	_, err := w.bring()
	w.must(err)
	want := w.dump(w.b)
	ctx := tb.Context()
	for range 2 {
		w.must(h.agent(tb, w.b).Free(ctx, w.tenant, kept.ID))
		w.discard(w.a, cells.Residue{Cell: w.a.ID(), Epoch: kept.CloseEpoch(), Move: kept.ID, Back: w.b.ID()}, transfer.WithRemoveBatch(13))
	}
	w.sweep()
	w.clean(w.a)
	w.clean(w.b)
	w.equal("rows of the owner", want, w.dump(w.b))
	// A free that comes late, or is not meant for a way back, ends nothing.
	next := cells.MoveRef{ID: "m2", Tenant: w.tenant, Source: w.b.ID(), Target: w.a.ID(), Base: kept.OpenEpoch()}
	_, err = h.agent(tb, w.a).Prepare(ctx, next, w.b.Source(), nil)
	w.must(err)
	w.must(h.agent(tb, w.b).Free(ctx, w.tenant, next.ID))
	w.writeB(func(x Exec) error { return putItem(x, w.tenant, "late", 1) })
	_, err = h.agent(tb, w.a).Prepare(ctx, next, w.b.Source(), nil)
	w.must(err)
	w.bystandersUntouched()
}

// testUndoRolledBack: the owner serves on, at a higher epoch, and the offer is over.
func testUndoRolledBack(tb TB, h Harness) {
	for _, prepared := range []bool{true, false} {
		w := newWorld(tb, h)
		w.moved()
		w.changeB("x")
		ctx := tb.Context()
		if prepared {
			_, err := h.agent(tb, w.a).Prepare(ctx, undo, w.b.Source(), nil)
			w.must(err)
		}
		w.closeB()
		want := w.dump(w.b)
		w.must(w.b.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: undo.Source, Tenant: undo.Tenant, Epoch: undo.OpenEpoch(), Floor: undo.OpenEpoch(), Move: undo.ID}))
		r := cells.Residue{Cell: w.a.ID(), Epoch: undo.OpenEpoch(), Move: undo.ID, Back: w.b.ID(), Undoes: kept.ID}
		w.must(h.agent(tb, w.b).Free(ctx, w.tenant, undo.ID))
		w.must(h.agent(tb, w.b).Free(ctx, w.tenant, kept.ID))
		w.discard(w.a, r)
		w.sweep()
		w.clean(w.a)
		w.clean(w.b)
		w.equal("rows of the owner", want, w.dump(w.b))
		w.bystandersUntouched()
	}
}

// testKilledUndo kills the process that carries out a round, or a step of the undo,
// at each point that it passes.
func testKilledUndo(tb TB, h Harness) {
	if h.Reopen == nil {
		tb.Logf("databases of this harness cannot be opened by another process")
		return
	}
	w := newWorld(tb, h)
	w.moved()
	for i, step := range []string{"return", "return", "undo", "undone"} {
		if step == "undone" {
			w.closeB()
		} else {
			w.changeB(fmt.Sprintf("k%d", i))
		}
		for n := 1; !w.runChild(step, n); n++ {
			if n > 30 {
				tb.Fatalf("%s: not done after %d kills", step, n)
			}
		}
	}
	w.same()
	w.undone()
}
