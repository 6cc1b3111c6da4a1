// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// testUndoUndone: an undo that can be undone is undone, and that again, with rounds of
// the way back before each and with none. Nothing is copied, nothing is lost.
func testUndoUndone(tb TB, h Harness) {
	for _, rounds := range []int{2, 0} {
		w := newWorld(tb, h)
		w.moved()
		ctx := tb.Context()
		m, owner, other := kept, w.b, w.a // of the last move, and where its tenant is
		for turn := range 3 {
			write := func(f func(Exec) error) {
				w.must(owner.Write(ctx, w.tenant, m.OpenEpoch(), "happened", f))
			}
			change := func(tag string) {
				write(func(x Exec) error { return changeEverything(x, w.tenant, tag) })
				w.restoreWith(write, tag)
			}
			w.sweep()
			for n := range rounds {
				change(fmt.Sprintf("t%d-%d", turn, n))
				r, err := h.agent(tb, other).Return(ctx, m.Back(), owner.Source())
				w.must(err)
				if r.Changes == 0 {
					tb.Errorf("turn %d: round %d brought nothing", turn, n)
				}
				w.same()
				w.sweep()
			}
			change(fmt.Sprintf("t%d", turn))
			next := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("u%d", turn)), Tenant: w.tenant, Source: owner.ID(), Target: other.ID(), Base: m.OpenEpoch(), Undoes: m.ID, Keep: turn < 2}
			copied := false
			v := h.agent(tb, other, transfer.WithFault(func(p string) error {
				copied = copied || p == "batch"
				return nil
			}))
			_, err := v.Prepare(ctx, next, owner.Source(), nil)
			w.must(err)
			write(func(x Exec) error { return putItem(x, w.tenant, fmt.Sprintf("while undoing %d", turn), 1) })
			w.must(owner.Keeper().CloseFence(ctx, cells.FenceOrder{Cell: next.Source, Tenant: next.Tenant, Epoch: next.CloseEpoch(), Move: next.ID}))
			mark, err := owner.Keeper().PauseEvents(ctx, cells.BarrierOrder{Cell: next.Source, Tenant: next.Tenant, Epoch: next.CloseEpoch(), Move: next.ID})
			w.must(err)
			_, err = v.Finish(ctx, next, owner.Source(), nil)
			w.must(err)
			if copied {
				tb.Errorf("turn %d: the undo has copied rows that were there", turn)
			}
			w.same()
			w.must(other.Keeper().StartEvents(ctx, cells.BarrierOrder{Cell: next.Target, Tenant: next.Tenant, Epoch: next.OpenEpoch(), Move: next.ID}, mark))
			w.must(other.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: next.Target, Tenant: next.Tenant, Epoch: next.OpenEpoch(), Floor: next.OpenEpoch(), Move: next.ID}))
			m, owner, other = next, other, owner
		}
		w.discard(other, cells.Residue{Cell: other.ID(), Epoch: m.CloseEpoch(), Move: m.ID})
		w.sweep()
		w.clean(w.a)
		w.clean(w.b)
		w.bystandersUntouched()
	}
}
