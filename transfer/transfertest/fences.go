// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"slices"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// testLateImport: a driver that slept through the cut repeats its import. Once it is
// the last to have opened the import, which nobody has finished: only the fence stands
// in its way.
func testLateImport(tb TB, h Harness) {
	for _, finished := range []bool{false, true} {
		w := newWorld(tb, h)
		w.fill(50)
		m := w.move("m1")
		ctx := tb.Context()
		v := h.agent(tb, w.b, transfer.WithFollow(0))
		_, err := v.Prepare(ctx, m, w.a.Source(), nil)
		w.must(err)
		view, err := w.a.Source().View(ctx, m)
		w.must(err)
		tb.Cleanup(func() { _ = view.Close() })
		var old []transfer.Batch
		w.must(view.Rows(ctx, "item", nil, func(b transfer.Batch) error { old = append(old, b); return nil }))
		w.must(view.Close())
		sleeper, err := w.b.Sink().Import(ctx, m)
		w.must(err)
		tb.Cleanup(func() { _ = sleeper.Close() })
		w.must(sleeper.Unlock(ctx))
		if finished {
			_, err = w.cut(v, m, w.a.Source())
			w.must(err)
		}
		w.commit(m)
		w.must(w.b.Write(ctx, w.tenant, m.OpenEpoch(), "", func(x Exec) error {
			if err := putItem(x, w.tenant, "k00001", 4242); err != nil {
				return err
			}
			return deleteItem(x, w.tenant, "k00002")
		}))
		want := w.dump(w.b)
		for _, b := range old {
			if err := sleeper.Copy(ctx, b); err == nil {
				tb.Errorf("an import was accepted after the fence had passed its epoch")
			} else {
				w.wantErr("late copy", err, cells.ErrStaleOrder)
			}
		}
		w.wantErr("late restart", sleeper.Restart(ctx, "0000000000000001", transfer.RemoveOptions{BatchRows: 10}), cells.ErrStaleOrder)
		w.must(sleeper.Close())
		_, err = v.Prepare(ctx, m, w.a.Source(), nil)
		w.wantErr("late prepare", err, cells.ErrStaleOrder)
		_, err = v.Finish(ctx, m, w.a.Source(), nil)
		w.wantErr("late finish", err, cells.ErrStaleOrder)
		w.must(w.b.Sink().Sweep(ctx))
		_, err = v.Prepare(ctx, m, w.a.Source(), nil)
		w.wantErr("prepare after the sweep", err, cells.ErrStaleOrder)
		w.equal("rows after late imports", want, w.dump(w.b))
	}
}

// testLateRemoval: a driver that slept repeats a removal in a cell that the tenant has come back to.
func testLateRemoval(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(50)
	m := w.move("m1")
	w.moveAll(m, w.a.Source())
	r := cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID}
	v := h.agent(tb, w.a)
	// While the rows are removed, in the middle, the tenant returns with a higher epoch.
	back := cells.FenceOrder{Cell: w.a.ID(), Tenant: w.tenant, Epoch: m.OpenEpoch() + 2, Floor: m.OpenEpoch() + 2}
	reopened := false
	err := h.agent(tb, w.a, transfer.WithRemoveBatch(7)).Discard(tb.Context(), w.tenant, r, func(p cells.Progress) {
		if !reopened && p.Done > 20 {
			reopened = true
			w.must(w.a.Keeper().OpenFence(tb.Context(), back))
		}
	})
	if !reopened {
		tb.Fatalf("the removal ended before the tenant returned: %v", err)
	}
	w.wantErr("removal overtaken in the middle", err, cells.ErrStaleOrder)
	want := w.dump(w.a)
	if len(want) == 0 {
		tb.Fatalf("everything was removed")
	}
	w.wantErr("late removal", v.Discard(tb.Context(), w.tenant, r, nil), cells.ErrStaleOrder)
	w.equal("rows after a late removal", want, w.dump(w.a))
}

func testRemoval(tb TB, h Harness) {
	w := newWorld(tb, h)
	rows := 3000 / Scale
	batch := rows / 6
	w.fill(rows)
	m := w.move("m1")
	w.moveAll(m, w.a.Source())
	r := cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID}
	var last int64
	steps := 0
	err := h.agent(tb, w.a, transfer.WithRemoveBatch(batch)).Discard(tb.Context(), w.tenant, r, func(p cells.Progress) {
		if p.Phase != "remove" || p.Done < last || p.Done-last > int64(batch) {
			tb.Errorf("progress %+v after %d", p, last)
		}
		last = p.Done
		steps++
	})
	w.must(err)
	if steps < 6 || last < int64(rows) {
		tb.Errorf("%d rows in %d steps", last, steps)
	}
	if d := w.dump(w.a); len(d) > 0 {
		tb.Fatalf("%d rows left", len(d))
	}
	w.holds(w.a, false)
	w.holds(w.b, true)
	w.discard(w.a, r)
	w.clean(w.a)
	if d := w.dump(w.b); len(d) < rows {
		tb.Errorf("%d rows at the target", len(d))
	}
	w.bystandersUntouched()
}

// testRolledBack: the source reopens at a higher epoch, the target's rows go.
func testRolledBack(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(500)
	m := w.move("m1")
	v := h.agent(tb, w.b)
	_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
	w.must(err)
	w.must(w.a.Sink().Sweep(tb.Context()))
	if left, err := w.a.Leftovers(tb.Context()); err != nil || len(left) == 0 {
		tb.Fatalf("a sweep ended a live capture: %v, %v", left, err)
	}
	w.close(m)
	before := w.dump(w.a)
	w.must(w.a.Keeper().OpenFence(tb.Context(), cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
	if _, err := v.Finish(tb.Context(), m, w.a.Source(), nil); err == nil {
		tb.Errorf("a move was finished after its rollback")
	}
	r := cells.Residue{Cell: w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}
	w.must(v.Discard(tb.Context(), w.tenant, r, nil))
	if d := w.dump(w.b); len(d) > 0 {
		tb.Fatalf("%d rows left at the target", len(d))
	}
	w.clean(w.b)
	w.must(h.agent(tb, w.a).Sweep(tb.Context()))
	w.clean(w.a)
	w.equal("rows at the source", before, w.dump(w.a))
	_, err = v.Prepare(tb.Context(), m, w.a.Source(), nil)
	w.wantErr("prepare of the move that was rolled back", err, cells.ErrStaleOrder)
	// The next attempt is another move.
	next := m
	next.ID, next.Base = "m2", m.OpenEpoch()
	_, err = v.Prepare(tb.Context(), next, w.a.Source(), nil)
	w.must(err)
	_, err = w.cut(v, next, w.a.Source())
	w.must(err)
	w.same()
	w.bystandersUntouched()
}

// testLeftBeforeSweep: a tenant whose move was rolled back leaves by another one before
// anybody has swept. The first move's capture must not stay.
func testLeftBeforeSweep(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(300)
	first := w.move("m1")
	v := h.agent(tb, w.b)
	_, err := v.Prepare(tb.Context(), first, w.a.Source(), nil)
	w.must(err)
	open := cells.FenceOrder{Cell: first.Source, Tenant: first.Tenant, Epoch: first.OpenEpoch(), Floor: first.OpenEpoch(), Move: first.ID}
	w.must(w.a.Keeper().OpenFence(tb.Context(), open))
	w.must(v.Discard(tb.Context(), w.tenant, cells.Residue{Cell: w.b.ID(), Epoch: first.OpenEpoch(), Move: first.ID}, nil))
	second := first
	second.ID, second.Base = "m2", first.OpenEpoch()
	_, err = v.Prepare(tb.Context(), second, w.a.Source(), nil)
	w.must(err)
	_, err = w.cut(v, second, w.a.Source())
	w.must(err)
	w.must(w.b.Keeper().OpenFence(tb.Context(), cells.FenceOrder{Cell: second.Target, Tenant: second.Tenant, Epoch: second.OpenEpoch(), Floor: second.OpenEpoch(), Move: second.ID}))
	a := h.agent(tb, w.a)
	w.must(a.Discard(tb.Context(), w.tenant, cells.Residue{Cell: w.a.ID(), Epoch: second.CloseEpoch(), Move: second.ID}, nil))
	w.must(a.Sweep(tb.Context()))
	w.clean(w.a)
}

func testNotEmpty(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(20)
	w.open(w.b, w.tenant, 1)
	w.must(w.b.Write(tb.Context(), w.tenant, 1, "", func(x Exec) error { return putItem(x, w.tenant, "foreign", 1) }))
	want := w.dump(w.b)
	m := w.move("m1")
	ctx := tb.Context()
	v := h.agent(tb, w.b)
	_, err := v.Prepare(ctx, m, w.a.Source(), nil)
	w.wantErr("prepare", err, cells.ErrInvalid)
	_, err = w.b.Sink().Import(ctx, m)
	w.wantErr("import", err, cells.ErrInvalid)
	src, err := w.a.Source().Survey(ctx, w.tenant)
	w.must(err)
	dst, err := v.Survey(ctx, w.tenant)
	w.must(err)
	p := transfer.Compare(m, src, dst)
	if !p.Blocked() || !slices.ContainsFunc(p.Findings, func(f cells.Finding) bool { return f.Code == transfer.FindNotEmpty && f.Table == "item" && f.Fix != "" }) {
		tb.Errorf("preflight %+v", p)
	}
	// The driver rolls back; the removal must not take rows that the move has not brought.
	err = v.Discard(ctx, w.tenant, cells.Residue{Cell: w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}, nil)
	w.wantErr("discard", err, cells.ErrInvalid)
	w.equal("foreign rows", want, w.dump(w.b))
}

func testRefused(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(20)
	m := w.move("m1")
	ctx := tb.Context()
	v := h.agent(tb, w.b)
	_, err := v.Finish(ctx, m, w.a.Source(), nil)
	w.wantErr("finish of a move that is not prepared", err, cells.ErrNotApplicable)
	_, err = v.Prepare(ctx, m, w.a.Source(), nil)
	w.must(err)
	_, err = v.Finish(ctx, m, w.a.Source(), nil)
	w.wantErr("finish while the source is open", err, cells.ErrNotApplicable)
	other := m
	other.ID = "m9"
	w.close(other)
	_, err = v.Finish(ctx, m, w.a.Source(), nil)
	w.wantErr("finish while another move has closed the source", err, cells.ErrNotApplicable)
	bad := m
	bad.Target = bad.Source
	_, err = v.Prepare(ctx, bad, w.a.Source(), nil)
	w.wantErr("move to itself", err, cells.ErrInvalid)
	_, err = v.Prepare(ctx, cells.MoveRef{}, w.a.Source(), nil)
	w.wantErr("empty move", err, cells.ErrInvalid)
}
