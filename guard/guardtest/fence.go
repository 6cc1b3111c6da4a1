// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// begin begins a transaction; the test ends it.
func (e *env) begin(p Process, isolation string) Tx {
	e.Helper()
	tx, err := p.Begin(e.ctx, isolation)
	e.must(err, "begin %s", isolation)
	return tx
}

// write does all that a request does before its commit.
func write(ctx context.Context, tx Tx, tenant cells.TenantID, epoch cells.Epoch, key string) error {
	if err := tx.Admit(ctx, tenant, epoch); err != nil {
		return err
	}
	if err := put(ctx, tx, tenant, key, "v"); err != nil {
		return err
	}
	_, err := tx.Emit(ctx, "put", key)
	return err
}

func testAdmit(e *env, iso string) {
	tenant := newTenant()
	try := func(epoch cells.Epoch) error {
		tx := e.begin(e.a, iso)
		defer tx.Rollback()
		if err := write(e.ctx, tx, tenant, epoch, fmt.Sprint("k", epoch)); err != nil {
			return err
		}
		return tx.Commit(e.ctx)
	}
	e.wantErr(try(1), cells.ErrFenced, "admission at 1 without a fence")
	e.open(tenant, 3)
	e.must(e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 5, Floor: 3}), "raise")
	for epoch, good := range []bool{false, false, false, true, true, true, false} {
		if err := try(cells.Epoch(epoch)); good {
			e.must(err, "admission at %d, open from 3 to 5", epoch)
		} else {
			e.wantErr(err, cells.ErrFenced, "admission at %d, open from 3 to 5", epoch)
			if !guard.RetryElsewhere(err) {
				e.Errorf("the error %v does not say that another cell may be asked", err)
			}
		}
	}
	e.close(tenant, 6)
	for epoch := range cells.Epoch(8) {
		e.wantErr(try(epoch), cells.ErrFenced, "admission at %d, closed at 6", epoch)
	}
	if got, want := e.state(tenant), fmt.Sprint(map[string]string{"k3": "v", "k4": "v", "k5": "v"}, []int{1, 2, 3}); got != want {
		e.Errorf("the database has %s, want %s", got, want)
	}
}

// testOldSnapshot: a transaction that read before the fence was closed is
// admitted, or writes, after it.
func testOldSnapshot(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	tx := e.begin(e.a, iso)
	defer tx.Rollback()
	e.must(tx.Read(e.ctx), "read")
	closing := async(func() error {
		return e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"})
	})
	if closing.ended(5 * blocked) {
		e.must(closing.err, "close")
		before := e.state(tenant)
		err := write(e.ctx, tx, tenant, 1, "late")
		if err == nil {
			err = tx.Commit(e.ctx)
		}
		e.refused(err, "a write admitted with a snapshot from before the close")
		tx.Rollback()
		if after := e.state(tenant); after != before {
			e.Errorf("it left %s, before it was %s", after, before)
		}
		return
	}
	// A transaction of a kind that keeps orders out from its beginning.
	err := write(e.ctx, tx, tenant, 1, "early")
	if err == nil {
		e.must(tx.Commit(e.ctx), "commit")
	} else {
		e.wantErr(err, guard.ErrContended, "a write that close waits for")
		tx.Rollback()
	}
	e.must(closing.wait(e, "close"), "close")
}

// testInFlight: a close waits for an admitted transaction, with a bound, and a
// close that was given up changes nothing.
func testInFlight(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	tx := e.begin(e.a, iso)
	defer tx.Rollback()
	tryClose := func(what string) {
		short, cancel := context.WithTimeout(e.ctx, blocked)
		defer cancel()
		start := time.Now()
		if err := e.b.CloseFence(short, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"}); err == nil {
			e.Errorf("a close returned while %s", what)
		} else if d := time.Since(start); d > 3*time.Second {
			e.Errorf("a close with a context of %s took %s", blocked, d)
		}
	}
	e.must(tx.Admit(e.ctx, tenant, 1), "admit")
	tryClose("a transaction was admitted that has not written yet")
	e.must(write(e.ctx, tx, tenant, 1, "k"), "write")
	tryClose("an admitted transaction was open")
	if f := e.fence(tenant); !f.Open || f.Epoch != 1 {
		e.Errorf("a close that was given up left %+v", f)
	}
	e.must(tx.Commit(e.ctx), "commit of the admitted transaction")
	e.must(e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, "k2", "v") }), "write after a close that was given up")
	e.close(tenant, 2)
	if got, want := e.state(tenant), fmt.Sprint(map[string]string{"k": "v", "k2": "v"}, []int{1}); got != want {
		e.Errorf("the database has %s, want %s", got, want)
	}
}

// testPausedWriter: a writer stops in the middle of its transaction, a close is
// asked for, the writer goes on.
func testPausedWriter(e *env, iso string) {
	for _, commit := range []bool{true, false} {
		tenant := newTenant()
		e.open(tenant, 1)
		tx := e.begin(e.a, iso)
		e.must(tx.Admit(e.ctx, tenant, 1), "admit")
		e.must(put(e.ctx, tx, tenant, "k", "1"), "put")
		var atClose string
		closing := async(func() error {
			err := e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"})
			if err == nil {
				atClose = e.state(tenant)
			}
			return err
		})
		if closing.ended(blocked) {
			e.Errorf("close did not wait for a paused writer: %v", closing.err)
		}
		e.must(put(e.ctx, tx, tenant, "k", "2"), "put after close was asked for")
		_, err := tx.Emit(e.ctx, "put", "k")
		e.must(err, "emit after close was asked for")
		if commit {
			err = tx.Commit(e.ctx)
		} else {
			tx.Rollback()
		}
		cerr := closing.wait(e, "close")
		if commit && err != nil && cerr == nil {
			e.Errorf("an admitted transaction that close waited for could not commit: %v", err)
		}
		e.must(cerr, "close")
		if now := e.state(tenant); now != atClose {
			e.Errorf("when close returned there was %s, now there is %s", atClose, now)
		}
	}
}

// testLateWriter: writers that come while a close waits are not let in behind it.
func testLateWriter(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	first := e.begin(e.a, iso)
	e.must(write(e.ctx, first, tenant, 1, "first"), "write")
	var atClose string
	closing := async(func() error {
		err := e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"})
		if err == nil {
			atClose = e.state(tenant)
		}
		return err
	})
	_ = closing.ended(blocked)
	late := async(func() error {
		return e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, "late", "v") })
	})
	_ = late.ended(blocked)
	e.must(first.Commit(e.ctx), "commit")
	e.must(closing.wait(e, "close"), "close")
	lateErr := late.wait(e, "the late writer")
	if lateErr != nil {
		e.wantErr(lateErr, cells.ErrFenced, "the late writer")
	}
	if now := e.state(tenant); now != atClose {
		e.Errorf("when close returned there was %s, now there is %s", atClose, now)
	}
}

// testSavepoint: what was admitted in a savepoint goes with it.
func testSavepoint(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	tx := e.begin(e.a, iso)
	e.must(tx.Exec(e.ctx, "SAVEPOINT s"), "savepoint")
	e.must(write(e.ctx, tx, tenant, 1, "in"), "write in the savepoint")
	e.must(tx.Exec(e.ctx, "ROLLBACK TO SAVEPOINT s"), "roll back to the savepoint")
	var atClose string
	closing := async(func() error {
		err := e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"})
		if err == nil {
			atClose = e.state(tenant)
		}
		return err
	})
	closed := closing.ended(5 * blocked)
	err := put(e.ctx, tx, tenant, "after", "v")
	if err == nil {
		err = tx.Commit(e.ctx)
	}
	tx.Rollback()
	if closed {
		e.refused(err, "a write behind a savepoint that took the admission with it")
	}
	e.must(closing.wait(e, "close"), "close")
	if now := e.state(tenant); now != atClose {
		e.Errorf("when close returned there was %s, now there is %s", atClose, now)
	}

	// An admission from before the savepoint stays.
	tenant = newTenant()
	e.open(tenant, 1)
	tx = e.begin(e.a, iso)
	defer tx.Rollback()
	e.must(write(e.ctx, tx, tenant, 1, "before"), "write")
	e.must(tx.Exec(e.ctx, "SAVEPOINT s"), "savepoint")
	e.must(write(e.ctx, tx, tenant, 1, "in"), "write in the savepoint")
	e.must(tx.Exec(e.ctx, "ROLLBACK TO SAVEPOINT s"), "roll back to the savepoint")
	short, cancel := context.WithTimeout(e.ctx, blocked)
	defer cancel()
	if err := e.b.CloseFence(short, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"}); err == nil {
		e.Errorf("close returned while a transaction admitted before a savepoint was open")
	}
	seq, err := tx.Emit(e.ctx, "put", "again")
	e.must(err, "emit after the savepoint")
	if seq != 2 {
		e.Errorf("an event after one that was rolled back has %d, want 2", seq)
	}
	e.must(tx.Commit(e.ctx), "commit")
}

// testPooled: connections that have carried admissions come back without.
func testPooled(e *env, iso string) {
	if e.h.Unprotected {
		return
	}
	tenant := newTenant()
	e.open(tenant, 1)
	for range 8 { // more than the pool has connections
		e.must(e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, "k", "v") }), "write")
	}
	errGiveUp := errors.New("give up")
	for range 8 {
		err := e.a.InTx(e.as(tenant, 1), iso, func(context.Context, Tx) error { return errGiveUp })
		e.wantErr(err, errGiveUp, "a transaction that gives up")
	}
	var txs []Tx
	for range 4 {
		txs = append(txs, e.begin(e.a, iso))
	}
	for _, tx := range txs {
		e.refused(put(e.ctx, tx, tenant, "k", "stale"), "a write without an admission on a used connection")
		tx.Rollback()
	}
}

// testBusy: moves to and fro under writers at every epoch; what close saw stays.
func testBusy(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	var epoch atomic.Uint64
	epoch.Store(1)
	ctx, stop := context.WithCancel(e.ctx)
	defer stop()
	var written atomic.Int64
	writers := async(func() error {
		return group(6, func(i int) error {
			for n := 0; ctx.Err() == nil; n++ {
				at := cells.Epoch(epoch.Load())
				err := []Process{e.a, e.b}[i%2].InTx(e.as(tenant, at), iso, func(c context.Context, tx Tx) error {
					if err := put(c, tx, tenant, fmt.Sprintf("%d-%d", i, n), "v"); err != nil {
						return err
					}
					if n%3 != 0 {
						return nil
					}
					_, err := tx.Emit(c, "put", n)
					return err
				})
				switch {
				case err == nil:
					written.Add(1)
				case !guard.NothingWritten(err) || !errors.Is(err, cells.ErrFenced) && !errors.Is(err, guard.ErrContended):
					return err
				}
			}
			return nil
		})
	})
	for n := cells.Epoch(2); n <= 10; n += 2 {
		seen := written.Load()
		e.eventually("writers write", func() bool { return written.Load() > seen || writers.ended(0) })
		e.close(tenant, n)
		atClose := e.state(tenant)
		_ = writers.ended(5 * time.Millisecond)
		if now := e.state(tenant); now != atClose {
			e.Fatalf("writes at epoch %d committed after the close at %d", n-1, n)
		}
		e.open(tenant, n+1)
		epoch.Store(uint64(n + 1))
	}
	stop()
	e.must(writers.wait(e, "writers"), "writers")
	rows, err := e.a.Rows(e.ctx, tenant)
	e.must(err, "rows")
	if int64(len(rows)) != written.Load() {
		e.Errorf("%d writes were acknowledged, %d are there", written.Load(), len(rows))
	}
}

func testCancelled(e *env) {
	tenant := newTenant()
	e.open(tenant, 1)
	ctx, cancel := context.WithCancelCause(e.ctx)
	cause := errors.New("given up")
	cancel(cause)
	e.wantErr(e.a.CloseFence(ctx, cells.FenceOrder{Tenant: tenant, Epoch: 2, Move: "m"}), cause, "close with a context that has ended")
	if f := e.fence(tenant); !f.Open || f.Epoch != 1 {
		e.Errorf("it left %+v", f)
	}
	err := e.a.InTx(guard.ContextWith(ctx, admission(tenant, 1)), e.h.Isolations[0], func(context.Context, Tx) error { return nil })
	if err == nil {
		e.Errorf("a transaction with a context that has ended committed")
	}
	// A context that ends within the transaction, before the commit.
	ctx, cancel = context.WithCancelCause(e.as(tenant, 1))
	err = e.a.InTx(ctx, e.h.Isolations[0], func(ctx context.Context, tx Tx) error {
		err := put(ctx, tx, tenant, "k", "v")
		cancel(cause)
		return err
	})
	if err == nil || !guard.NothingWritten(err) {
		e.Errorf("a transaction whose context ended: %v", err)
	}
	if rows, _ := e.a.Rows(e.ctx, tenant); len(rows) > 0 {
		e.Errorf("it wrote %v", rows)
	}
}

// testEpochZero: tenants that are served without a route.
func testEpochZero(e *env, iso string) {
	tenant := newTenant()
	err := group(4, func(i int) error {
		return e.a.InTx(e.as(tenant, 0), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, fmt.Sprint("k", i), "v") })
	})
	e.must(err, "first writes at epoch 0")
	if f := e.fence(tenant); !f.Open || f.Epoch != 0 || f.Floor != 0 {
		e.Errorf("the fence of a tenant at epoch 0 is %+v", f)
	}
	e.must(e.b.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 1, Floor: 0}), "claim")
	e.must(e.a.InTx(e.as(tenant, 0), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, "k9", "v") }), "a write admitted before the claim")
	e.close(tenant, 2)
	e.wantErr(e.a.InTx(e.as(tenant, 0), iso, func(context.Context, Tx) error { return nil }), cells.ErrFenced, "epoch 0 after a close")

	// A first write and the close that creates the row.
	for range 5 {
		tenant := newTenant()
		var atClose string
		writing := async(func() error {
			return e.a.InTx(e.as(tenant, 0), iso, func(ctx context.Context, tx Tx) error { return put(ctx, tx, tenant, "k", "v") })
		})
		e.close(tenant, 1)
		atClose = e.state(tenant)
		if err := writing.wait(e, "a first write"); err != nil {
			e.refused(err, "a first write")
		}
		if now := e.state(tenant); now != atClose {
			e.Errorf("when close returned there was %s, now there is %s", atClose, now)
		}
	}
}
