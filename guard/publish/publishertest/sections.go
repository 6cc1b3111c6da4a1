// SPDX-License-Identifier: Apache-2.0

package publishertest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// testOrder: several tenants at the same time, in batches of several sizes.
func testOrder(e *env) {
	p := e.publisher()
	list := []cells.TenantID{newTenant(), newTenant(), newTenant()}
	const n = 60
	var wg sync.WaitGroup
	for i, t := range list {
		wg.Go(func() {
			size := cells.EventSeq([]int{1, 7, n}[i])
			for from := cells.EventSeq(1); from <= n; from += size {
				if err := p.Publish(e.ctx, events(t, from, min(n, from+size-1))); err != nil {
					e.Errorf("publish from %d: %v", from, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := p.Publish(e.ctx, nil); err != nil {
		e.Errorf("publish nothing: %v", err)
	}
	for _, t := range list {
		log := e.log(t)
		e.check(log, n, func(s cells.EventSeq) guard.Event { return event(t, s) }, false)
		if len(log) != n {
			e.Errorf("nothing failed, but the broker has %d events of %d", len(log), n)
		}
	}
}

// testRepeated: batches come again because their end was not recorded, to the same
// process and to another one.
func testRepeated(e *env) {
	t := newTenant()
	p := e.publisher()
	for _, b := range [][2]cells.EventSeq{{1, 5}, {1, 5}, {4, 9}, {9, 9}, {10, 10}, {10, 12}} {
		e.publish(p, events(t, b[0], b[1]))
	}
	q := e.publisher()
	for _, b := range [][2]cells.EventSeq{{8, 12}, {12, 12}, {12, 15}, {13, 20}} {
		e.publish(q, events(t, b[0], b[1]))
	}
	e.publish(p, events(t, 20, 22))
	e.checkTenant(t, 22, false)
}

// testBehind: a process that was stopped in the middle goes on when another one is
// far ahead, in other batches, with other tenants' events between, and longer after
// than a broker keeps ids for.
func testBehind(e *env) {
	t := newTenant()
	p, q := e.publisher(), e.publisher()
	e.publish(p, events(t, 1, 4))
	for from := cells.EventSeq(1); from <= 30; from += 3 {
		e.publish(q, events(t, from, from+2))
		e.publish(q, events(newTenant(), 1, 3))
	}
	forgotten := time.NewTimer(shortWindow + shortWindow/2)
	<-forgotten.C
	for _, b := range [][2]cells.EventSeq{{5, 5}, {6, 8}, {29, 29}, {1, 1}, {2, 30}, {17, 20}} {
		e.publish(p, events(t, b[0], b[1]))
	}
	e.publish(p, events(t, 28, 33))
	log := e.log(t)
	e.check(log, 33, func(s cells.EventSeq) guard.Event { return event(t, s) }, true)
	if e.h.Once {
		return
	}
	if high := seqs(log)[len(log)-1]; high != 33 {
		e.Errorf("the last event is %d, want 33", high)
	}
}

// shortWindow is a duplicate window that is over soon.
const shortWindow = 100 * time.Millisecond

// testTwo: two processes publish the same events at the same time, as they must
// not; consumers that drop what they have seen still see each once, in order.
func testTwo(e *env) {
	t := newTenant()
	const n = 40
	var wg sync.WaitGroup
	for _, p := range []Publisher{e.publisher(), e.publisher()} {
		wg.Go(func() {
			for from := cells.EventSeq(1); from <= n; from += 4 {
				e.publish(p, events(t, from, from+3))
			}
		})
	}
	wg.Wait()
	e.checkTenant(t, n, true)
}

// testRecreated: a tenant that was deleted and is made again counts from 1; its
// events are new ones.
func testRecreated(e *env) {
	t := newTenant()
	p := e.publisher()
	e.publish(p, events(t, 1, 5))
	again := events(t, 1, 7)
	for i := range again {
		again[i].ID, again[i].Epoch = "again-"+again[i].ID, 9
	}
	e.publish(p, again[:3])
	e.publish(e.publisher(), again[2:])
	log := e.log(t)
	i := slices.IndexFunc(log, func(ev guard.Event) bool { return ev.Epoch == 9 })
	if i < 0 {
		e.Fatalf("no event of the new tenant: %v", seqs(log))
	}
	e.check(log[:i], 5, func(s cells.EventSeq) guard.Event { return event(t, s) }, false)
	e.check(log[i:], 7, func(s cells.EventSeq) guard.Event { return again[s-1] }, false)
}

// testAnswersLost: the broker stores, but nobody hears of it.
func testAnswersLost(e *env) {
	t := newTenant()
	p := e.publisher()
	e.publish(p, events(t, 1, 3))
	e.b.Link().LoseAnswers()
	ctx, cancel := context.WithTimeout(e.ctx, 300*time.Millisecond)
	err := p.Publish(ctx, events(t, 4, 8))
	cancel()
	if guard.Accepted(err, 5) > 0 {
		e.Errorf("%d events are accepted although no answer came: %v", guard.Accepted(err, 5), err)
	}
	if n := len(e.log(t)); n <= 3 {
		e.Errorf("the broker has stored %d events: no answer was lost", n)
	}
	e.b.Link().Release()
	e.b.Link().Cut()
	e.publish(p, events(t, 4, 8))
	e.publish(p, events(t, 9, 10))
	e.checkTenant(t, 10, true)
}

// testCut: connections break while events are on their way.
func testCut(e *env) {
	t := newTenant()
	p := e.publisher()
	const n, size = 120, 3
	var wg sync.WaitGroup
	defer wg.Wait()
	for from := cells.EventSeq(1); from <= n; from += size {
		if from%(5*size) == 1 {
			pause := time.NewTimer(time.Duration(from) * 30 * time.Microsecond) // another moment each time
			wg.Go(func() {
				<-pause.C
				e.b.Link().Cut()
			})
		}
		e.publish(p, events(t, from, from+size-1))
	}
	e.checkTenant(t, n, true)
}

// testRestart: the broker restarts while events are published; what it had accepted
// is there.
func testRestart(e *env) {
	t := newTenant()
	p := e.publisher()
	const n = 60
	for from := cells.EventSeq(1); from <= n; from += 5 {
		if from == 21 {
			if err := e.b.Stop(); err != nil {
				e.Fatalf("stop: %v", err)
			}
			ctx, cancel := context.WithTimeout(e.ctx, 200*time.Millisecond)
			err := p.Publish(ctx, events(t, from, from+4))
			cancel()
			if guard.Accepted(err, 5) > 0 {
				e.Errorf("%d events are accepted by a broker that is not there", guard.Accepted(err, 5))
			}
			if err := e.b.Start(); err != nil {
				e.Fatalf("start: %v", err)
			}
		}
		e.publish(p, events(t, from, from+4))
	}
	e.checkTenant(t, n, true)
}

// testAway: a publisher that starts before its broker fails, with a bound, and
// works when the broker is there.
func testAway(e *env) {
	t := newTenant()
	if err := e.b.Stop(); err != nil {
		e.Fatalf("stop: %v", err)
	}
	p := e.publisher()
	start := time.Now()
	ctx, cancel := context.WithTimeout(e.ctx, 300*time.Millisecond)
	err := p.Publish(ctx, events(t, 1, 2))
	cancel()
	if err == nil || guard.Accepted(err, 2) != 0 {
		e.Errorf("published to nobody: %v", err)
	}
	if d := time.Since(start); d > e.settled() {
		e.Errorf("publishing to nobody took %s", d)
	}
	if err := e.b.Start(); err != nil {
		e.Fatalf("start: %v", err)
	}
	e.publish(p, events(t, 1, 3))
	e.checkTenant(t, 3, true)
}

// testPause: the context ends while the broker is slow. Publish waits for what is
// in flight; an answer that comes in time counts.
func testPause(e *env) {
	t, other := newTenant(), newTenant()
	p := e.publisher()
	e.publish(p, events(t, 1, 2))
	e.publish(p, events(other, 1, 2))
	e.b.Link().HoldAnswers()
	ctx, cancel := context.WithCancelCause(e.ctx)
	defer cancel(nil)
	type result struct{ err error }
	done := make(chan result, 1)
	go func() { done <- result{p.Publish(ctx, events(t, 3, 4))} }()
	e.eventually("the broker has an event in flight", func() bool { return len(e.log(t)) > 2 })
	cancel(guard.ErrPaused)
	select {
	case r := <-done:
		e.Errorf("publish returned while an event was in flight: %v", r.err)
		return
	case <-time.After(100 * time.Millisecond):
	}
	e.b.Link().Release()
	select {
	case r := <-done:
		accepted := guard.Accepted(r.err, 2)
		if accepted == 0 {
			e.Errorf("the answer came in time, but nothing was accepted: %v", r.err)
		}
		if stored := len(e.log(t)) - 2; stored != accepted {
			e.Errorf("%d events are stored, %d accepted", stored, accepted)
		}
		if r.err != nil && !errors.Is(r.err, guard.ErrPaused) {
			e.Errorf("the error does not say that it was paused: %v", r.err)
		}
	case <-time.After(e.patience()):
		e.Fatalf("publish does not return")
	}
	// A context that has ended publishes nothing.
	before := len(e.log(t))
	if err := p.Publish(ctx, events(t, 3, 4)[before-2:]); before < 4 && err == nil {
		e.Errorf("published for a tenant that is paused")
	}
	if after := len(e.log(t)); after != before {
		e.Errorf("%d events were stored for a tenant that is paused", after-before)
	}
	e.publish(p, events(t, 3, 6))
	e.publish(p, events(other, 3, 6))
	e.checkTenant(t, 6, false)
	e.checkTenant(other, 6, false)
}

// testLate: what a publisher has sent arrives long after it has given up, and after
// another cell's publisher went on.
func testLate(e *env) {
	t := newTenant()
	p, q := e.publisher(), e.publisher()
	e.publish(p, events(t, 1, 3))
	e.publish(q, events(newTenant(), 1, 1)) // connected
	e.b.Link().Hold()
	ctx, cancel := context.WithTimeoutCause(e.ctx, 100*time.Millisecond, guard.ErrPaused)
	defer cancel()
	start := time.Now()
	err := p.Publish(ctx, events(t, 4, 6))
	if guard.Accepted(err, 3) != 0 || !errors.Is(err, guard.ErrPaused) {
		e.Errorf("nothing came through, but %d are accepted: %v", guard.Accepted(err, 3), err)
	}
	if d := time.Since(start); d > e.settled() {
		e.Errorf("publish went on for %s after its context had ended", d)
	}
	e.b.Link().Release() // now it arrives
	e.publish(q, events(t, 4, 9))
	e.publish(p, events(t, 10, 12))
	e.checkTenant(t, 12, true)
}
