// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// sink is a publisher that records, and checks what every publisher may rely on.
type sink struct {
	mu   sync.Mutex // guards everything below
	got  map[cells.TenantID][]cells.EventSeq
	busy map[cells.TenantID]bool
	off  map[cells.TenantID]bool // paused: nothing may come
	bad  []string
	// before, if set, is called for each batch, outside of mu; its error is the
	// publication's.
	before func(ctx context.Context, tenant cells.TenantID, events []guard.Event) error
}

func newSink() *sink {
	return &sink{got: map[cells.TenantID][]cells.EventSeq{}, busy: map[cells.TenantID]bool{}, off: map[cells.TenantID]bool{}}
}

func (s *sink) Publish(ctx context.Context, events []guard.Event) error {
	tenant := events[0].Tenant
	s.mu.Lock()
	if s.busy[tenant] {
		s.bad = append(s.bad, fmt.Sprintf("two publications of %s at the same time", tenant))
	}
	if s.off[tenant] {
		s.bad = append(s.bad, fmt.Sprintf("a publication of %s began while it was paused", tenant))
	}
	for i, ev := range events {
		if ev.Tenant != tenant || i > 0 && ev.Seq != events[i-1].Seq+1 {
			s.bad = append(s.bad, fmt.Sprintf("a batch of %s has %s %d after %d", tenant, ev.Tenant, ev.Seq, events[max(0, i-1)].Seq))
		}
	}
	if got := s.got[tenant]; len(got) > 0 && events[0].Seq > got[len(got)-1]+1 {
		s.bad = append(s.bad, fmt.Sprintf("event %d of %s came after %d", events[0].Seq, tenant, got[len(got)-1]))
	}
	s.busy[tenant] = true
	before := s.before
	s.mu.Unlock()
	var err error
	if before != nil {
		err = before(ctx, tenant, events)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy[tenant] = false
	if s.off[tenant] {
		s.bad = append(s.bad, fmt.Sprintf("a publication of %s ended while it was paused", tenant))
	}
	for _, ev := range events[:guard.Accepted(err, len(events))] {
		s.got[tenant] = append(s.got[tenant], ev.Seq)
	}
	return err
}

// last is the highest event_seq that came.
func (s *sink) last(tenant cells.TenantID) (last cells.EventSeq) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seq := range s.got[tenant] {
		last = max(last, seq)
	}
	return last
}

func (s *sink) count(tenant cells.TenantID) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got[tenant])
}

func (s *sink) setOff(tenant cells.TenantID, off bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off[tenant] = off
}

func (s *sink) check(e *env) {
	e.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.bad {
		e.Errorf("%s", b)
	}
}

// relay runs one on the process until stop is called.
func (e *env) relay(p Process, pub guard.Publisher) (stop func()) {
	e.Helper()
	r, err := guard.NewRelay(guard.RelayConfig{
		Store: p, Publisher: pub, Batch: 3, Poll: 50 * time.Millisecond, MinBackoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	e.must(err, "relay")
	ctx, cancel := context.WithCancel(e.ctx)
	run := async(func() error { return r.Run(ctx) })
	return func() {
		e.Helper()
		cancel()
		if err := run.wait(e, "the relay"); !errors.Is(err, context.Canceled) {
			e.Errorf("the relay returned %v", err)
		}
	}
}

// testRelayOrder: several tenants, a publisher that refuses now and then.
func testRelayOrder(e *env) {
	s := newSink()
	var calls atomic.Int64
	s.before = func(_ context.Context, _ cells.TenantID, events []guard.Event) error {
		switch calls.Add(1) % 4 {
		case 1:
			return errRefused
		case 2:
			return &guard.PartialError{Accepted: len(events) / 2, Err: errRefused}
		}
		return nil
	}
	list := []cells.TenantID{newTenant(), newTenant(), newTenant()}
	for i, t := range list {
		e.open(t, 1)
		e.emit(e.a, t, 1, 2*i) // before the relay runs
	}
	stop := e.relay(e.a, s)
	for range 6 {
		for i, t := range list {
			e.emit([]Process{e.a, e.b}[i%2], t, 1, 2) // here, and in another process
		}
	}
	for i, t := range list {
		want := cells.EventSeq(12 + 2*i)
		e.eventually(fmt.Sprintf("all events of %s are published", t), func() bool { return s.last(t) == want })
		e.eventually("the position is recorded", func() bool { return e.fence(t).Published == want })
	}
	stop()
	s.check(e)
	// Nothing was accepted twice: nothing crashed.
	for i, t := range list {
		if n := s.count(t); n != 12+2*i {
			e.Errorf("%d events of %s were accepted, want %d", n, t, 12+2*i)
		}
	}
}

// testRelayPause: a pause ends the publication in flight and holds, in every
// process, while others flow.
func testRelayPause(e *env) {
	s := newSink()
	paused, other := newTenant(), newTenant()
	entered := make(chan struct{}, 100)
	var hang atomic.Bool
	hang.Store(true)
	s.before = func(ctx context.Context, tenant cells.TenantID, _ []guard.Event) error {
		if tenant == paused && hang.Load() {
			entered <- struct{}{}
			<-ctx.Done()
			return context.Cause(ctx)
		}
		return nil
	}
	e.open(paused, 1)
	e.open(other, 1)
	stopA := e.relay(e.a, s)
	e.emit(e.a, paused, 1, 4)
	select {
	case <-entered:
	case <-time.After(e.patience()):
		e.Fatalf("nothing was published")
	}
	stopB := e.relay(e.b, s)
	e.close(paused, 2)
	start := time.Now()
	mark, err := e.b.PauseEvents(e.ctx, cells.BarrierOrder{Tenant: paused, Epoch: 2, Move: "m"}) // from another process
	e.must(err, "pause")
	s.setOff(paused, true)
	if mark != 4 {
		e.Errorf("the mark is %d, want 4", mark)
	}
	if d := time.Since(start); d > 10*time.Second {
		e.Errorf("a pause of a publication that can be cancelled took %s", d)
	}
	s.mu.Lock()
	if s.busy[paused] {
		e.Errorf("a publication was in flight when pause returned")
	}
	s.mu.Unlock()
	hang.Store(false)
	for i := range 6 {
		e.emit([]Process{e.a, e.b}[i%2], other, 1, 1)
	}
	e.eventually("the other tenant's events are published", func() bool { return s.last(other) == 6 })
	// A process that starts later knows it too.
	p, err := e.db.Process(e.ctx)
	e.must(err, "open a guard")
	defer p.Close()
	if n, err := p.PublishNext(e.ctx, paused, 10, s.Publish); n != 0 || err != nil && !errors.Is(err, guard.ErrBusy) {
		e.Errorf("a new process published %d, %v", n, err)
	}
	backlog, err := p.Backlog(e.ctx, "", 100)
	e.must(err, "backlog")
	for _, t := range backlog {
		if t == paused {
			e.Errorf("a paused tenant is in the backlog")
		}
	}
	if n := s.count(paused); n != 0 {
		e.Errorf("%d events of a paused tenant were published", n)
	}
	// It goes on where it was.
	s.setOff(paused, false)
	e.must(e.b.StartEvents(e.ctx, cells.BarrierOrder{Tenant: paused, Epoch: 3, Move: "m"}, mark), "start")
	e.open(paused, 3)
	e.emit(e.a, paused, 3, 1)
	e.eventually("publication goes on", func() bool { return s.last(paused) == 5 })
	stopA()
	stopB()
	s.check(e)
	if n := s.count(paused); n != 5 {
		e.Errorf("%d events were accepted, want 5", n)
	}
}

// testRelayStuck: a publisher that does not heed its context. The pause fails,
// with a bound, and succeeds when the publication has ended.
func testRelayStuck(e *env) {
	tenant := newTenant()
	e.open(tenant, 1)
	e.emit(e.a, tenant, 1, 2)
	release, entered := make(chan struct{}), make(chan struct{})
	stuck := async(func() error {
		_, err := e.a.PublishNext(e.ctx, tenant, 10, func(context.Context, []guard.Event) error {
			close(entered)
			<-release
			return nil
		})
		return err
	})
	select {
	case <-entered:
	case <-time.After(e.patience()):
		e.Fatalf("nothing was published: %v", stuck.err)
	}
	e.close(tenant, 2)
	short, cancel := context.WithTimeout(e.ctx, 2*blocked)
	defer cancel()
	order := cells.BarrierOrder{Tenant: tenant, Epoch: 2, Move: "m"}
	if _, err := e.b.PauseEvents(short, order); err == nil {
		e.Errorf("pause returned while a publication was in flight")
	}
	pausing := async(func() error { _, err := e.b.PauseEvents(e.ctx, order); return err })
	if pausing.ended(2 * blocked) {
		e.Errorf("pause returned while a publication was in flight: %v", pausing.err)
	}
	close(release)
	e.must(pausing.wait(e, "pause"), "pause")
	e.must(stuck.wait(e, "the publication"), "what was accepted before the pause is recorded")
	if f := e.fence(tenant); f.Published != 2 {
		e.Errorf("published up to %d, want 2", f.Published)
	}
}

// testRelayTwo: relays of two processes never publish for one tenant at the same
// time, and one takes over from the other.
func testRelayTwo(e *env) {
	s := newSink()
	tenant := newTenant()
	e.open(tenant, 1)
	s.before = func(ctx context.Context, _ cells.TenantID, _ []guard.Event) error {
		slow := time.NewTimer(5 * time.Millisecond) // so that the other one comes along
		defer slow.Stop()
		select {
		case <-slow.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	stopA, stopB := e.relay(e.a, s), e.relay(e.b, s)
	e.emit(e.a, tenant, 1, 10)
	e.emit(e.b, tenant, 1, 10)
	e.eventually("all events are published", func() bool { return s.last(tenant) == 20 })
	stopA()
	e.a.Close()
	var err error
	e.a, err = e.db.Process(e.ctx)
	e.must(err, "open a guard")
	e.emit(e.a, tenant, 1, 5)
	e.eventually("the other relay goes on", func() bool { return s.last(tenant) == 25 })
	stopB()
	s.check(e)
	if n := s.count(tenant); n != 25 {
		e.Errorf("%d events were accepted, want 25", n)
	}
	e.emit(e.a, tenant, 1, 2)
	// The source of a move never publishes for a fenced tenant.
	e.close(tenant, 2)
	for _, p := range []Process{e.a, e.b} {
		if n, err := p.PublishNext(e.ctx, tenant, 10, s.Publish); n != 0 || err != nil && !errors.Is(err, guard.ErrBusy) {
			e.Errorf("%d events were published behind a closed fence, %v", n, err)
		}
	}
}

// testRelayRandom pauses and starts at random while events are written and
// published, by two processes.
func testRelayRandom(e *env) {
	s := newSink()
	rnd := rand.New(rand.NewPCG(3, 4))
	list := []cells.TenantID{newTenant(), newTenant(), newTenant()}
	epoch := map[cells.TenantID]cells.Epoch{}
	total := map[cells.TenantID]cells.EventSeq{}
	for _, t := range list {
		e.open(t, 1)
		epoch[t] = 1
	}
	stopA, stopB := e.relay(e.a, s), e.relay(e.b, s)
	for range 25 {
		t := list[rnd.IntN(len(list))]
		p, q := e.a, e.b
		if rnd.IntN(2) == 0 {
			p, q = q, p
		}
		n := rnd.IntN(6)
		e.emit(p, t, epoch[t], n)
		total[t] += cells.EventSeq(n)
		e.close(t, epoch[t]+1)
		mark, err := q.PauseEvents(e.ctx, cells.BarrierOrder{Tenant: t, Epoch: epoch[t] + 1, Move: "m"})
		e.must(err, "pause")
		s.setOff(t, true)
		if mark != total[t] {
			e.Errorf("the mark is %d, want %d", mark, total[t])
		}
		for _, o := range list { // others flow meanwhile
			if o != t {
				e.emit(p, o, epoch[o], 1)
				total[o]++
			}
		}
		s.setOff(t, false)
		epoch[t] += 2
		e.must(p.StartEvents(e.ctx, cells.BarrierOrder{Tenant: t, Epoch: epoch[t], Move: "m"}, mark), "start")
		e.open(t, epoch[t])
	}
	for _, t := range list {
		e.eventually(fmt.Sprintf("all events of %s are published", t), func() bool { return s.last(t) == total[t] })
	}
	stopA()
	stopB()
	s.check(e)
	for _, t := range list {
		if n := s.count(t); n != int(total[t]) {
			e.Errorf("%d events of %s were accepted, want %d", n, t, total[t])
		}
	}
}
