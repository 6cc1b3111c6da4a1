// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// TestCrashesLeaveNothing ends the making and the ending of a capture at each point
// where a crash would leave a slot or a publication: the same step, made again, finds
// it, and so does a sweep after the rollback, if nobody makes the step again.
func TestCrashesLeaveNothing(t *testing.T) {
	ctx := t.Context()
	errCrash := errors.New("crashed")
	left := func(r *rig) (n int) {
		t.Helper()
		if err := r.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = current_database()) + (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM cell.transfer_capture)").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	r := newRig(t, "cell-a", toasted, toastedTables)
	e := cells.Epoch(5)
	open := func(at cells.Epoch) {
		t.Helper()
		if err := r.guard.OpenFence(ctx, cells.FenceOrder{Cell: "cell-a", Tenant: "t", Epoch: at, Floor: at}); err != nil {
			t.Fatal(err)
		}
	}
	open(e)
	for _, point := range []string{"row", "publication", "slot", "released", "dropped"} {
		for _, again := range []bool{true, false} {
			m := cells.MoveRef{ID: cells.MoveID("m-" + point), Tenant: "t", Source: "cell-a", Target: "cell-b", Base: e}
			if again {
				m.ID += "-again"
			}
			crashed := false
			r.store.Faults(func(at string) error {
				if at == point && !crashed {
					crashed = true
					return errCrash
				}
				return nil
			})
			_, err := r.store.Begin(ctx, m)
			if crashed != errors.Is(err, errCrash) {
				t.Fatalf("%s: begin: %v", point, err)
			}
			if crashed && again {
				pos, err := r.store.Begin(ctx, m)
				if err != nil || pos == "0000000000000000" {
					t.Fatalf("%s: begin again: %v, %v", point, pos, err)
				}
				if same, err := r.store.Begin(ctx, m); err != nil || same != pos {
					t.Fatalf("%s: begin once more: %v, %v, want %v", point, same, err, pos)
				}
				v, err := r.store.View(ctx, m)
				if err != nil {
					t.Fatal(err)
				}
				if err := v.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if !crashed {
				if err := r.store.Release(ctx, m); !errors.Is(err, errCrash) {
					t.Fatalf("%s: release: %v", point, err)
				}
				if again {
					if err := r.store.Release(ctx, m); err != nil {
						t.Fatal(err)
					}
				}
			}
			if n := left(r); n == 0 {
				t.Fatalf("%s: the crash has left nothing to sweep", point)
			}
			if err := r.store.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			if n := left(r); n == 0 {
				t.Fatalf("%s: a sweep has ended a move that is not over", point)
			}
			e = m.OpenEpoch()
			open(e)
			// A slot whose reader has not ended yet is left to the next sweep.
			waitFor(t, fmt.Sprintf("nothing to be left (%s, again %v)", point, again), func() bool {
				if err := r.store.Sweep(ctx); err != nil {
					t.Fatal(err)
				}
				return left(r) == 0
			})
			// A source that slept begins once more: the next sweep sees that it is over.
			r.store.Faults(nil)
			if _, err := r.store.Begin(ctx, m); err != nil {
				t.Fatal(err)
			}
			if err := r.store.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			if n := left(r); n != 0 {
				t.Errorf("%s, late: %d things are left", point, n)
			}
		}
	}
}

// TestSlotLostTwice: a capture whose slot the server has dropped is begun anew once; then
// the move is given up, with what to do.
func TestSlotLostTwice(t *testing.T) {
	ctx := t.Context()
	a, b := pairOf(t, toasted, toastedTables)
	a.write("INSERT INTO doc SELECT 't', g, g, 'x' FROM generate_series(1, 100) g")
	v := agentOf(t, b)
	prepare(t, v, a.store)
	drop := func() {
		t.Helper()
		// As an invalidation by max_slot_wal_keep_size: the row stays, the slot does not.
		a.exec("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database() AND active_pid IS NOT NULL")
		waitFor(t, "the slot's reader to end", func() bool {
			_, err := a.pool.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database() AND NOT temporary")
			return err == nil
		})
	}
	first, err := a.store.Begin(ctx, shapeMove)
	if err != nil {
		t.Fatal(err)
	}
	drop()
	second, err := a.store.Begin(ctx, shapeMove)
	if err != nil || second <= first {
		t.Fatalf("begun anew: %v, %v after %v", second, err, first)
	}
	prepare(t, v, a.store)
	drop()
	if err := a.guard.CloseFence(ctx, cells.FenceOrder{Cell: "cell-a", Tenant: "t", Epoch: 6, Move: "m1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Finish(ctx, shapeMove, a.store, nil); !errors.Is(err, cells.ErrNotApplicable) || errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("finish of a move whose slot is gone: %v", err)
	}
	if _, err := v.Prepare(ctx, shapeMove, a.store, nil); !errors.Is(err, transfer.ErrRetention) {
		t.Errorf("prepare after the slot was lost twice: %v", err)
	}
}

// waitFor waits until f is true.
func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited too long for %s", what)
		}
	}
}
