// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

var checks = []check{
	{name: "values", f: testValues},
	{name: "empty tenant", f: testEmpty},
	{name: "under writes", f: testUnderWrites},
	{name: "every kind of change", f: testChanges},
	{name: "changes in order", f: testOrder},
	{name: "changes in one commit", f: testTogether},
	{name: "changes between copies", f: testResumedChanges},
	{name: "cut off at every point", f: testCutOff},
	{name: "two drivers", f: testTwoDrivers},
	{name: "late import", f: testLateImport},
	{name: "late removal", f: testLateRemoval},
	{name: "removal", f: testRemoval},
	{name: "rolled back", f: testRolledBack},
	{name: "left before the sweep", f: testLeftBeforeSweep},
	{name: "difference found before the cut", f: testDifferenceBefore},
	{name: "difference found in the cut", f: testDifferenceInCut},
	{name: "keys settled before the cut", f: testSettled},
	{name: "target not empty", f: testNotEmpty},
	{name: "refused", f: testRefused},
	{name: "throttled", f: testThrottled},
	{name: "schema changes", f: testSchemaChanges},
	{name: "retention", f: testRetention},
	{name: "remote", f: testRemote},
	{name: "remote process lost", f: testRemoteLost},
	{name: "moved back", f: testBack},
	{name: "way back", f: testWayBack},
	{name: "way back cut off at every point", f: testWayBackCutOff},
	{name: "way back, late", f: testWayBackLate},
	{name: "way back lost", f: testWayBackLost},
	{name: "way back closed", f: testWayBackClosed},
	{name: "undo rolled back", f: testUndoRolledBack},
	{name: "undo undone", f: testUndoUndone},
	{name: "group", f: testGroup},
	{name: "group, read anew", f: testGroupAnew},
	{name: "group, one rolled back", f: testGroupRolledBack},
	{name: "group, one stalls", f: testGroupStalled},
	{name: "group, ways back", f: testGroupWindows},
	{name: "group, reader killed", f: testGroupKilled, long: true},
	{name: "killed undo", f: testKilledUndo, long: true},
	{name: "killed target", f: testKilledTarget, long: true},
	{name: "killed source", f: testKilledSource, long: true},
	{name: "big", f: testBig, long: true},
}

// cut prepares nothing: it closes the source and finishes the move at the target.
func (w *world) cut(v *transfer.Mover, m cells.MoveRef, src transfer.Source) (string, error) {
	w.tb.Helper()
	w.close(m)
	return v.Finish(w.tb.Context(), m, src, nil)
}

// moveAll runs a whole move with an agent at each side.
func (w *world) moveAll(m cells.MoveRef, src transfer.Source) map[string]string {
	w.tb.Helper()
	v := w.h.agent(w.tb, w.b)
	_, err := v.Prepare(w.tb.Context(), m, src, nil)
	w.must(err)
	mark, err := w.cut(v, m, src)
	w.must(err)
	if mark == "" {
		w.tb.Fatalf("no mark")
	}
	w.proved(v, m, mark)
	rows := w.same()
	w.commit(m)
	w.gone(w.a)
	return rows
}

func (w *world) discard(c Cell, r cells.Residue, opts ...transfer.Option) {
	w.tb.Helper()
	w.must(w.h.agent(w.tb, c, opts...).Discard(w.tb.Context(), w.tenant, r, nil))
	if d := w.dump(c); len(d) > 0 {
		w.tb.Fatalf("%d rows left in %s", len(d), c.ID())
	}
}

// holds checks what the cell says of the tenants that it has rows of.
func (w *world) holds(c Cell, want bool) {
	w.tb.Helper()
	list, err := w.h.agent(w.tb, c).Holdings(w.tb.Context(), 50)
	w.must(err)
	got := false
	for _, h := range list {
		got = got || h.Tenant == w.tenant
		if h.Table == "" {
			w.tb.Errorf("%s names no table for %s", c.ID(), h.Tenant)
		}
	}
	if got != want {
		w.tb.Errorf("%s says that it holds %+v; holding rows of %s is %v", c.ID(), list, w.tenant, want)
	}
	if few, err := w.h.agent(w.tb, c).Holdings(w.tb.Context(), 1); err != nil || len(few) > len(list) || len(list) > 0 && len(few) == 0 {
		w.tb.Errorf("%s, one of each table: %+v, %v", c.ID(), few, err)
	}
}

func testValues(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(200)
	w.write(func(x Exec) error {
		for k := range 10 {
			if err := setBig(x, w.tenant, fmt.Sprintf("k%05d", k), uint64(k)); err != nil {
				return err
			}
		}
		return x(`INSERT INTO item (tenant, id) VALUES (?1, ?2)`, string(w.tenant), odd[2])
	})
	if rows := w.moveAll(w.move("m1"), w.a.Source()); len(rows) < 251 {
		tb.Fatalf("%d rows moved", len(rows))
	}
	w.bystandersUntouched()
}

func testEmpty(tb TB, h Harness) {
	w := newWorld(tb, h)
	m := w.move("m1")
	if rows := w.moveAll(m, w.a.Source()); len(rows) != 0 {
		tb.Fatalf("%d rows moved", len(rows))
	}
	w.discard(w.a, cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID})
	w.must(w.b.Sink().Sweep(tb.Context()))
	w.clean(w.a)
	w.clean(w.b)
	w.bystandersUntouched()
}

func testUnderWrites(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(300)
	l := w.hammer(2, 40)
	l.reach(50)
	v := h.agent(tb, w.b, transfer.WithTouchedLimit(20))
	m := w.move("m1")
	var seen []cells.Progress
	p, err := v.Prepare(tb.Context(), m, w.a.Source(), func(p cells.Progress) { seen = append(seen, p) })
	w.must(err)
	if p.Pause <= 0 || p.Pause > time.Minute || p.LagChanges < 0 || p.WriteRate <= 0 {
		tb.Errorf("prediction %+v", p)
	}
	phases := map[string]bool{}
	for _, s := range seen {
		phases[s.Phase] = true
		if s.Total > 0 && s.Done > s.Total {
			tb.Errorf("progress %+v", s)
		}
	}
	if !phases["snapshot"] || !phases["catchup"] || !phases["verify"] {
		tb.Errorf("progress had phases %v", phases)
	}
	l.reach(100)
	mark, err := w.cut(v, m, w.a.Source())
	w.must(err)
	w.proved(v, m, mark)
	l.end()
	rows := w.same()
	l.kept(rows)
	if err := w.a.Write(tb.Context(), w.tenant, base, "", func(x Exec) error { return putItem(x, w.tenant, "late", 1) }); err == nil {
		tb.Errorf("the source still takes writes")
	}
	w.commit(m)
	w.must(w.b.Write(tb.Context(), w.tenant, m.OpenEpoch(), "", func(x Exec) error { return putItem(x, w.tenant, "after", 1) }))
	w.discard(w.a, cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID})
	w.must(w.b.Sink().Sweep(tb.Context()))
	w.clean(w.a)
	w.clean(w.b)
	w.bystandersUntouched()
}

// changeEverything makes one change of every kind, with ids of its own.
func changeEverything(x Exec, t cells.TenantID, tag string) error {
	id := func(s string) string { return tag + s }
	steps := []func() error{
		func() error { return putItem(x, t, id("new"), 7) },
		func() error { return putPart(x, t, id("new"), 1, "child of new") },
		func() error { return rekeyItem(x, t, "k00001", id("rekeyed")) },
		func() error { return rekeyItem(x, t, id("rekeyed"), id("again")) },
		func() error { return setN(x, t, "big1", int64(len(tag))) },        // its big value is not in the change
		func() error { return rekeyItem(x, t, "big2", "big2"+tag) },        // nor here, and the key changes
		func() error { return rekeyItem(x, t, "big2"+tag, "big2") },        // and back
		func() error { return deleteItem(x, t, "k00004") },                 // a part goes with it
		func() error { return putItem(x, t, "k00004", 99) },                // and it comes back
		func() error { return deleteItem(x, t, "k00008") },                 // for good
		func() error { return setSlot(x, t, "k00010", nil) },               // two items exchange
		func() error { return setSlot(x, t, "k00011", 10) },                // their slots, which
		func() error { return setSlot(x, t, "k00010", 11) },                // are unique
		func() error { return deleteItem(x, t, "k00012") },                 // a slot is given up
		func() error { return setSlot(x, t, "k00002", int64(12)) },         // and taken by another
		func() error { return putItem(x, t, "k00012", 12) },                // whose owner returns
		func() error { return putItem(x, t, id(odd[2]), 2) },               // an odd key
		func() error { return rekeyItem(x, t, id(odd[2]), id("\\")) },      // becomes another
		func() error { return setBig(x, t, "k00020", uint64(len(tag)+1)) }, // a value grows
		func() error {
			return x(`UPDATE item SET body = NULL, data = NULL, n = NULL WHERE tenant = ?1 AND id = 'k00030'`, string(t))
		},
	}
	for i, s := range steps {
		if err := s(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

func (w *world) fillForChanges() {
	w.tb.Helper()
	w.fill(60)
	w.write(func(x Exec) error {
		for _, id := range []string{"big1", "big2"} {
			if err := putItem(x, w.tenant, id, 1); err != nil {
				return err
			}
			if err := setBig(x, w.tenant, id, 5); err != nil {
				return err
			}
		}
		for _, n := range []int{10, 11, 12} {
			if err := setSlot(x, w.tenant, fmt.Sprintf("k%05d", n), n); err != nil {
				return err
			}
		}
		return nil
	})
}

// restore brings back what changeEverything needs, so that it can run again.
func (w *world) restore(tag string) {
	w.tb.Helper()
	w.restoreWith(w.write, tag)
}

func (w *world) restoreWith(write func(func(Exec) error), tag string) {
	w.tb.Helper()
	write(func(x Exec) error {
		for _, f := range []func() error{
			func() error { return rekeyItem(x, w.tenant, tag+"again", "k00001") },
			func() error { return setSlot(x, w.tenant, "k00002", nil) },
			func() error { return setSlot(x, w.tenant, "k00010", nil) },
			func() error { return setSlot(x, w.tenant, "k00011", 11) },
			func() error { return setSlot(x, w.tenant, "k00010", 10) },
			func() error { return setSlot(x, w.tenant, "k00012", 12) },
		} {
			if err := f(); err != nil {
				return err
			}
		}
		return nil
	})
}

// testChanges changes everything at each stage of one move: between the steps
// before the copy, inside it, and while the move waits for its cut.
func testChanges(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fillForChanges()
	m := w.move("m1")
	points := 0
	change := func() {
		tag := fmt.Sprintf("t%d", points)
		points++
		w.write(func(x Exec) error { return changeEverything(x, w.tenant, tag) })
		w.restore(tag)
	}
	seen := map[string]bool{}
	v := h.agent(tb, w.b, transfer.WithFault(func(point string) error {
		if !seen[point] && point != "final" && point != "applied" && point != "compared" && point != "finished" {
			seen[point] = true
			change()
		}
		return nil
	}))
	_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
	w.must(err)
	for _, p := range []string{"claimed", "captured", "aligned", "batch", "verified", "prepared"} {
		if !seen[p] {
			tb.Errorf("point %s was not passed", p)
		}
	}
	for range 5 {
		change()
	}
	_, err = w.cut(v, m, w.a.Source())
	w.must(err)
	w.same()
	w.bystandersUntouched()
}

// testOrder applies two changes of the same rows, each read by itself.
func testOrder(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(10)
	m := w.move("m1")
	ctx := tb.Context()
	v := h.agent(tb, w.b, transfer.WithFollow(0))
	_, err := v.Prepare(ctx, m, w.a.Source(), nil)
	w.must(err)
	sink := w.b.Sink()
	if h.sink != nil {
		sink = h.sink(sink)
	}
	i, err := sink.Import(ctx, m)
	w.must(err)
	tb.Cleanup(func() { _ = i.Close() })
	for n := range 3 {
		w.write(func(x Exec) error {
			if err := setN(x, w.tenant, "k00001", int64(100+n)); err != nil {
				return err
			}
			if err := putItem(x, w.tenant, fmt.Sprintf("new%d", n), int64(n)); err != nil {
				return err
			}
			return deleteItem(x, w.tenant, fmt.Sprintf("new%d", n-1))
		})
		view, err := w.a.Source().View(ctx, m)
		w.must(err)
		err = view.Changes(ctx, i.State().Applied, func(b transfer.Batch) error { return i.Apply(ctx, b) })
		w.must(view.Close())
		w.must(err)
		w.must(i.Commit(ctx))
		if got := i.State().Applied; got != view.Position() {
			tb.Fatalf("applied up to %s, want %s", got, view.Position())
		}
		w.same()
	}
	w.must(i.Close())
	_, err = w.cut(v, m, w.a.Source())
	w.must(err)
	w.same()
}

// testTogether applies several changes of the same rows in one commit; the unique
// values that two rows exchange in the first are not the last that happens to them.
func testTogether(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fillForChanges()
	m := w.move("m1")
	ctx := tb.Context()
	v := h.agent(tb, w.b, transfer.WithFollow(0))
	_, err := v.Prepare(ctx, m, w.a.Source(), nil)
	w.must(err)
	i, err := w.b.Sink().Import(ctx, m)
	w.must(err)
	tb.Cleanup(func() { _ = i.Close() })
	from := i.State().Applied
	for n := range 6 {
		w.write(func(x Exec) error {
			if n%2 == 1 {
				// The rows change, their slots do not, and one goes.
				if err := setN(x, w.tenant, "k00010", int64(1000+n)); err != nil {
					return err
				}
				if err := setN(x, w.tenant, "k00011", int64(2000+n)); err != nil {
					return err
				}
				return deleteItem(x, w.tenant, fmt.Sprintf("swap%d", n-1))
			}
			slots := []any{nil, 10 + n/2%2, 11 - n/2%2}
			slots[1], slots[2] = slots[2], slots[1]
			for k, id := range []string{"k00010", "k00011", "k00010"} {
				if err := setSlot(x, w.tenant, id, slots[k]); err != nil {
					return err
				}
			}
			return putItem(x, w.tenant, fmt.Sprintf("swap%d", n), int64(n))
		})
		view, err := w.a.Source().View(ctx, m)
		w.must(err)
		err = view.Changes(ctx, from, func(b transfer.Batch) error { return i.Apply(ctx, b) })
		from = view.Position()
		w.must(view.Close())
		w.must(err)
	}
	w.must(i.Commit(ctx))
	w.same()
	w.must(i.Close())
	_, err = w.cut(v, m, w.a.Source())
	w.must(err)
	w.same()
}

// testResumedChanges changes everything between two pieces of a copy that was cut off
// in between: what follows is read at a later view.
func testResumedChanges(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fillForChanges()
	w.fill(max(3000/Scale, 1200))
	m := w.move("m1")
	errCut := fmt.Errorf("%w: cut off", cells.ErrInvalid)
	for n := range 4 {
		batches := 0
		v := h.agent(tb, w.b, transfer.WithFault(func(point string) error {
			if point == "batch" {
				if batches++; batches > n%2 {
					return errCut
				}
			}
			return nil
		}))
		_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
		if n == 0 {
			w.wantErr("cut off", err, errCut)
		}
		tag := fmt.Sprintf("r%d", n)
		w.write(func(x Exec) error { return changeEverything(x, w.tenant, tag) })
		w.restore(tag)
		// A row that is not copied yet moves to a key that is, with a value that is not in
		// the change.
		w.write(func(x Exec) error {
			if err := putItem(x, w.tenant, "z"+tag, int64(n)); err != nil {
				return err
			}
			return setBig(x, w.tenant, "z"+tag, uint64(n))
		})
		w.write(func(x Exec) error { return rekeyItem(x, w.tenant, "z"+tag, "a"+tag) })
	}
	v := h.agent(tb, w.b, transfer.WithViewAge(0))
	_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
	w.must(err)
	w.write(func(x Exec) error { return rekeyItem(x, w.tenant, "ar0", "zr0") })
	_, err = w.cut(v, m, w.a.Source())
	w.must(err)
	w.same()
}

// testCutOff cuts a move off at each point that it passes, one after the other,
// and goes on with a new agent each time, under writes.
func testCutOff(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(1500)
	l := w.hammer(2, 20)
	m := w.move("m1")
	cutAt := func(n int) (transfer.Option, *int) {
		at := 0
		return transfer.WithFault(func(string) error {
			if at++; at == n {
				return fmt.Errorf("%w: cut off at point %d", cells.ErrInvalid, n)
			}
			return nil
		}), &at
	}
	for n := 1; ; n++ {
		if n > 60 {
			tb.Fatalf("still not prepared after %d cuts", n)
		}
		o, _ := cutAt(min(n, 4+n%3))
		_, err := h.agent(tb, w.b, o).Prepare(tb.Context(), m, w.a.Source(), nil)
		if err == nil {
			break
		}
		w.wantErr("prepare", err, cells.ErrInvalid)
	}
	l.reach(20)
	w.close(m)
	l.end()
	for n := 1; ; n++ {
		o, _ := cutAt(n)
		_, err := h.agent(tb, w.b, o).Finish(tb.Context(), m, w.a.Source(), nil)
		if err == nil {
			break
		}
		w.wantErr("finish", err, cells.ErrInvalid)
	}
	l.kept(w.same())
	w.commit(m)
	r := cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID}
	for range 5 {
		ctx, cancel := context.WithCancel(tb.Context())
		err := h.agent(tb, w.a, transfer.WithRemoveBatch(200)).Discard(ctx, w.tenant, r, func(cells.Progress) { cancel() })
		if err == nil {
			tb.Errorf("a removal that was cut off succeeded")
		}
		cancel()
	}
	w.discard(w.a, r)
	w.discard(w.a, r)
	w.clean(w.a)
	w.bystandersUntouched()
}

// testTwoDrivers lets two processes of the target carry out each step at once.
func testTwoDrivers(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(2000 / Scale)
	l := w.hammer(2, 20)
	m := w.move("m1")
	both := func(step func(v *transfer.Mover) error) {
		var wg sync.WaitGroup
		errs := make([]error, 3)
		for i := range errs {
			v := h.agent(tb, w.b)
			wg.Go(func() { errs[i] = step(v) })
		}
		wg.Wait()
		for _, err := range errs {
			w.must(err)
		}
	}
	both(func(v *transfer.Mover) error {
		_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
		return err
	})
	l.reach(20)
	w.close(m)
	l.end()
	both(func(v *transfer.Mover) error {
		_, err := v.Finish(tb.Context(), m, w.a.Source(), nil)
		return err
	})
	l.kept(w.same())
	w.commit(m)
	r := cells.Residue{Cell: w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID}
	var wg sync.WaitGroup
	errs := make([]error, 2)
	for i := range errs {
		v := h.agent(tb, w.a, transfer.WithRemoveBatch(100))
		wg.Go(func() { errs[i] = v.Discard(tb.Context(), w.tenant, r, nil) })
	}
	wg.Wait()
	for _, err := range errs {
		w.must(err)
	}
	w.clean(w.a)
	w.bystandersUntouched()
}

func testThrottled(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(1200)
	v := h.agent(tb, w.b)
	start := time.Now()
	_, err := v.Prepare(transfer.ContextWithRate(tb.Context(), 3000), w.move("m1"), w.a.Source(), nil)
	w.must(err)
	if d := time.Since(start); d < 300*time.Millisecond {
		tb.Errorf("1500 rows at 3000 a second took %v", d)
	}
}

// testBack moves a tenant away and back, several times, with all cleaned up.
func testBack(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(300)
	from, to := w.a, w.b
	e := base
	for n := range 4 {
		m := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", n)), Tenant: w.tenant, Source: from.ID(), Target: to.ID(), Base: e}
		w.a, w.b = from, to
		rows := w.moveAll(m, from.Source())
		if len(rows) < 300+n {
			tb.Fatalf("%d rows after move %d", len(rows), n)
		}
		e = m.OpenEpoch()
		w.must(to.Write(tb.Context(), w.tenant, e, "", func(x Exec) error { return putItem(x, w.tenant, fmt.Sprintf("move%d", n), 1) }))
		w.discard(from, cells.Residue{Cell: from.ID(), Epoch: m.CloseEpoch(), Move: m.ID})
		w.must(to.Sink().Sweep(tb.Context()))
		w.clean(from)
		w.clean(to)
		from, to = to, from
	}
	w.bystandersUntouched()
}

func testBig(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(50_000 / Scale)
	l := w.hammer(2, 30)
	m := w.move("m1")
	v := h.agent(tb, w.b)
	_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
	w.must(err)
	l.reach(50)
	start := time.Now()
	_, err = w.cut(v, m, w.a.Source())
	w.must(err)
	tb.Logf("the cut of %d rows took %v", 62_500/Scale, time.Since(start))
	l.end()
	l.kept(w.same())
	w.bystandersUntouched()
}
