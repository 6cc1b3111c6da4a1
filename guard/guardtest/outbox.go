// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// emit commits n events of the tenant.
func (e *env) emit(p Process, tenant cells.TenantID, epoch cells.Epoch, n int) {
	e.Helper()
	for range n {
		e.must(p.InTx(e.as(tenant, epoch), e.h.Isolations[0], func(ctx context.Context, tx Tx) error {
			_, err := tx.Emit(ctx, "put", "x")
			return err
		}), "emit")
	}
}

func testEvents(e *env) {
	tenant := newTenant()
	e.open(tenant, 1)
	e.emit(e.a, tenant, 1, 25)
	ids := map[string]bool{}
	var after cells.EventSeq
	for {
		page, err := e.b.Events(e.ctx, tenant, after, 10)
		e.must(err, "events")
		if len(page) == 0 {
			break
		}
		if len(page) > 10 {
			e.Fatalf("asked for 10 events, got %d", len(page))
		}
		for _, ev := range page {
			if after++; ev.Seq != after {
				e.Fatalf("event %d where %d should be", ev.Seq, after)
			}
			ids[ev.ID] = true
		}
	}
	if after != 25 || len(ids) != 25 {
		e.Errorf("read up to event %d with %d ids, want 25", after, len(ids))
	}
	none, err := e.a.Events(e.ctx, newTenant(), 0, 10)
	if err != nil || len(none) > 0 {
		e.Errorf("events of an unknown tenant: %v, %v", none, err)
	}
}

// testWait: many streams wait, in both processes; each gets what is written in
// either of them.
func testWait(e *env) {
	const streams, events = 40, 5
	tenants := []cells.TenantID{newTenant(), newTenant()}
	for _, t := range tenants {
		e.open(t, 1)
	}
	var waiting atomic.Int64
	all := async(func() error {
		return group(streams, func(i int) error {
			p := []Process{e.a, e.b}[i%2]
			for seq := range cells.EventSeq(events) {
				waiting.Add(1)
				if err := waitFor(e.ctx, p, tenants[i/2%2], seq); err != nil {
					return err
				}
			}
			return nil
		})
	})
	e.eventually("all streams wait", func() bool { return waiting.Load() >= streams })
	for n := range events {
		for i, t := range tenants {
			e.emit([]Process{e.a, e.b}[(n+i)%2], t, 1, 1)
		}
	}
	e.must(all.wait(e, "the streams"), "streams")

	ctx, cancel := context.WithCancelCause(e.ctx)
	over := errors.New("over")
	wait := async(func() error { return waitFor(ctx, e.a, tenants[0], events) })
	if wait.ended(blocked) {
		e.Errorf("a wait for an event that does not exist returned %v", wait.err)
	}
	cancel(over)
	e.wantErr(wait.wait(e, "wait"), over, "a wait whose context ended")

	p, err := e.db.Process(e.ctx)
	e.must(err, "open a guard")
	wait = async(func() error { return waitFor(e.ctx, p, tenants[0], events) })
	_ = wait.ended(blocked)
	p.Close()
	if err := wait.wait(e, "wait"); err == nil {
		e.Errorf("a wait on a closed guard returned nil")
	}
}

// waitFor waits until the tenant has more than after events, as a stream does.
func waitFor(ctx context.Context, p Process, tenant cells.TenantID, after cells.EventSeq) error {
	for {
		events, err := p.Events(ctx, tenant, after, 1)
		if err != nil || len(events) > 0 {
			return err
		}
		if err := p.Wait(ctx, tenant, after); err != nil {
			return err
		}
	}
}

// testMovedEvents: a cell that takes a tenant over numbers on and publishes on
// from where the other one was.
func testMovedEvents(e *env) {
	// Without rows: everything up to the mark was published elsewhere.
	tenant := newTenant()
	e.close(tenant, 2)
	e.must(e.a.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 3, Move: "m"}, 40), "start after 40")
	e.open(tenant, 3)
	e.emit(e.a, tenant, 3, 2)
	e.must(e.a.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 3, Move: "m"}, 40), "the same order again")
	e.emit(e.a, tenant, 3, 1)
	if got := e.published(tenant); fmt.Sprint(got) != "[41 42 43]" {
		e.Errorf("published %v, want 41 to 43", got)
	}

	// With rows that are not published yet, as an import brings them.
	tenant = newTenant()
	e.close(tenant, 2)
	outbox, published := e.a.MovedTables()[0].Name, e.a.MovedTables()[1].Name
	tx := e.begin(e.a, e.h.Isolations[0])
	defer tx.Rollback()
	e.must(tx.AdmitClosed(e.ctx, tenant, 2, "m"), "import")
	for seq := 38; seq <= 40; seq++ {
		e.must(tx.Exec(e.ctx, `INSERT INTO `+outbox+` (tenant, event_seq, epoch, cell, id, type, payload, at) VALUES ($1, $2, 1, 'there', $3, 'put', '1', '2026-01-02T03:04:05.000000Z')`,
			string(tenant), seq, fmt.Sprint("id", seq)), "import an event")
	}
	e.must(tx.Exec(e.ctx, `INSERT INTO `+published+` (tenant, seq) VALUES ($1, 38)`, string(tenant)), "import the position")
	e.must(tx.Commit(e.ctx), "commit of the import")
	if n := e.publish(tenant, nil); n != 0 {
		e.Errorf("%d events were published while the fence was closed", n)
	}
	e.must(e.a.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 3, Move: "m"}, 40), "start after 40")
	if n := e.publish(tenant, nil); n != 0 {
		e.Errorf("%d events were published before the fence was opened", n)
	}
	e.open(tenant, 3)
	e.emit(e.a, tenant, 3, 1)
	if got := e.published(tenant); fmt.Sprint(got) != "[39 40 41]" {
		e.Errorf("published %v, want 39 to 41", got)
	}

	// A hole is not published over.
	tenant = newTenant()
	e.close(tenant, 2)
	tx = e.begin(e.a, e.h.Isolations[0])
	defer tx.Rollback()
	e.must(tx.AdmitClosed(e.ctx, tenant, 2, "m"), "import")
	e.must(tx.Exec(e.ctx, `INSERT INTO `+outbox+` (tenant, event_seq, epoch, cell, id, type, payload, at) VALUES ($1, 2, 1, 'there', 'id', 'put', '1', '2026-01-02T03:04:05.000000Z')`, string(tenant)), "import the second event only")
	e.must(tx.Commit(e.ctx), "commit of the import")
	e.must(e.a.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 3, Move: "m"}, 2), "start after 2")
	e.open(tenant, 3)
	_, err := e.a.PublishNext(e.ctx, tenant, 10, func(context.Context, []guard.Event) error { return nil })
	e.wantErr(err, cells.ErrInvalid, "publishing over a hole")

	// The source comes back: it never numbers below what it gave out.
	tenant = newTenant()
	e.open(tenant, 1)
	e.emit(e.a, tenant, 1, 5)
	e.close(tenant, 2)
	mark, err := e.a.PauseEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 2, Move: "m"})
	if err != nil || mark != 5 {
		e.Errorf("pause: %d, %v, want 5", mark, err)
	}
	e.must(e.b.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: 3, Move: "m"}, 2), "start with a mark from an older move")
	e.open(tenant, 3)
	e.emit(e.a, tenant, 3, 1)
	if got := e.published(tenant); fmt.Sprint(got) != "[1 2 3 4 5 6]" {
		e.Errorf("published %v, want 1 to 6", got)
	}
}

// publish gives the next events to f once; it returns how many were accepted.
func (e *env) publish(tenant cells.TenantID, f func(context.Context, []guard.Event) error) int {
	e.Helper()
	if f == nil {
		f = func(context.Context, []guard.Event) error { return nil }
	}
	n, err := e.a.PublishNext(e.ctx, tenant, 100, f)
	e.must(err, "publish")
	return n
}

// published publishes everything there is and returns the numbers.
func (e *env) published(tenant cells.TenantID) []cells.EventSeq {
	e.Helper()
	var got []cells.EventSeq
	for e.publish(tenant, func(_ context.Context, events []guard.Event) error {
		for _, ev := range events {
			got = append(got, ev.Seq)
		}
		return nil
	}) > 0 {
	}
	return got
}

// testBarrierOrders: orders to the relay that come late or again.
func testBarrierOrders(e *env) {
	tenant := newTenant()
	pause := func(epoch cells.Epoch) error {
		_, err := e.a.PauseEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: epoch, Move: "m"})
		return err
	}
	start := func(epoch cells.Epoch) error {
		return e.b.StartEvents(e.ctx, cells.BarrierOrder{Tenant: tenant, Epoch: epoch, Move: "m"}, 0)
	}
	e.open(tenant, 1)
	e.close(tenant, 2)
	e.must(pause(2), "pause at 2")
	e.must(pause(2), "pause at 2 again")
	if !e.fence(tenant).Paused {
		e.Errorf("the fence does not say that the events are paused")
	}
	e.wantErr(start(1), cells.ErrStaleOrder, "start at 1 after a pause at 2")
	e.must(start(3), "start at 3")
	e.must(start(3), "start at 3 again")
	if e.fence(tenant).Paused {
		e.Errorf("the fence says that the events are paused")
	}
	e.wantErr(pause(2), cells.ErrStaleOrder, "the pause at 2, late")
	e.open(tenant, 3)
	e.wantErr(pause(2), cells.ErrStaleOrder, "the pause at 2, later")
	e.wantErr(pause(3), cells.ErrStaleOrder, "a pause at the epoch that is open")
	e.close(tenant, 4)
	e.must(pause(4), "pause at 4")
	e.wantErr(start(3), cells.ErrStaleOrder, "the start at 3, late")
	if !e.fence(tenant).Paused {
		e.Errorf("a late start ended a pause")
	}
	e.wantErr(pause(1<<63), cells.ErrInvalid, "an epoch that is too large")
}

func testPrune(e *env) {
	tenant := newTenant()
	e.open(tenant, 1)
	e.emit(e.a, tenant, 1, 10)
	n, err := e.a.PublishNext(e.ctx, tenant, 6, func(context.Context, []guard.Event) error { return nil })
	if err != nil || n != 6 {
		e.Fatalf("published %d, %v", n, err)
	}
	for _, c := range []struct {
		upto cells.EventSeq
		want int64
		left string
	}{{3, 3, "[4 5 6 7 8 9 10]"}, {100, 3, "[7 8 9 10]"}, {100, 0, "[7 8 9 10]"}} {
		gone, err := e.a.Prune(e.ctx, tenant, c.upto)
		if err != nil || gone != c.want {
			e.Errorf("prune up to %d removed %d, %v, want %d", c.upto, gone, err, c.want)
		}
		events, err := e.a.Events(e.ctx, tenant, 0, 100)
		e.must(err, "events")
		var left []cells.EventSeq
		for _, ev := range events {
			left = append(left, ev.Seq)
		}
		if fmt.Sprint(left) != c.left {
			e.Errorf("after prune up to %d there is %v, want %s", c.upto, left, c.left)
		}
	}
	e.emit(e.a, tenant, 1, 1)
	if got := e.published(tenant); fmt.Sprint(got) != "[7 8 9 10 11]" {
		e.Errorf("published %v, want 7 to 11", got)
	}
	if gone, err := e.a.Prune(e.ctx, tenant, 100); err != nil || gone != 5 {
		e.Errorf("prune of everything removed %d, %v", gone, err)
	}
	e.emit(e.a, tenant, 1, 1)
	if got := e.published(tenant); fmt.Sprint(got) != "[12]" {
		e.Errorf("published %v, want 12", got)
	}
	e.close(tenant, 2)
	if gone, err := e.a.Prune(e.ctx, tenant, 100); err != nil || gone != 0 {
		e.Errorf("prune behind a closed fence removed %d, %v", gone, err)
	}
}

var errRefused = errors.New("refused by the publisher")
