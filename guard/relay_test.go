// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// store is an outbox in memory.
type store struct {
	guard.RelayStore
	mu        sync.Mutex // guards everything below
	seq, done map[cells.TenantID]cells.EventSeq
	busy      bool
	backlog   error
	feeds     chan []cells.TenantID
	closed    chan struct{}
	searches  int
}

func newStore() *store {
	return &store{seq: map[cells.TenantID]cells.EventSeq{}, done: map[cells.TenantID]cells.EventSeq{}, feeds: make(chan []cells.TenantID, 100), closed: make(chan struct{})}
}

func (s *store) emit(t cells.TenantID, n int, announce bool) {
	s.mu.Lock()
	s.seq[t] += cells.EventSeq(n)
	s.mu.Unlock()
	if announce {
		s.feeds <- []cells.TenantID{t}
	}
}

func (s *store) published(t cells.TenantID) cells.EventSeq {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done[t]
}

func (s *store) Backlog(_ context.Context, after cells.TenantID, _ int) (out []cells.TenantID, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.searches++
	if s.backlog != nil {
		return nil, s.backlog
	}
	for t := range s.seq {
		if t > after && s.seq[t] > s.done[t] {
			out = append(out, t)
		}
	}
	return out, nil
}

func (s *store) PublishNext(ctx context.Context, t cells.TenantID, limit int, publish func(context.Context, []guard.Event) error) (int, error) {
	s.mu.Lock()
	from, to, busy := s.done[t], min(s.seq[t], s.done[t]+cells.EventSeq(limit)), s.busy
	s.mu.Unlock()
	if busy {
		return 0, guard.ErrBusy
	}
	if from == to {
		return 0, nil
	}
	err := publish(ctx, events(t, from+1, to))
	n := guard.Accepted(err, int(to-from))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done[t] += cells.EventSeq(n)
	return n, err
}

func (s *store) NewFeed() (guard.Feed, error) { return memFeed{s}, nil }

type memFeed struct{ s *store }

func (f memFeed) Next(ctx context.Context) ([]cells.TenantID, error) {
	select {
	case t := <-f.s.feeds:
		return t, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-f.s.closed:
		return nil, guard.ErrClosed
	}
}
func (memFeed) Close() {}

func run(t *testing.T, cfg guard.RelayConfig) (stop func() error) {
	t.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	r, err := guard.NewRelay(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return func() error { cancel(); return <-done }
}

func TestRelayConfig(t *testing.T) {
	ok := guard.RelayConfig{Store: newStore(), Publisher: &guard.Local{}}
	if _, err := guard.NewRelay(ok); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*guard.RelayConfig){
		"store": func(c *guard.RelayConfig) { c.Store = nil }, "publisher": func(c *guard.RelayConfig) { c.Publisher = nil },
		"workers": func(c *guard.RelayConfig) { c.Workers = -1 }, "poll": func(c *guard.RelayConfig) { c.Poll = -1 },
	} {
		c := ok
		change(&c)
		if _, err := guard.NewRelay(c); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A tenant whose publisher fails waits longer and longer; the others flow.
func TestRelayBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var mu sync.Mutex
		var tries []time.Time
		refused := errors.New("refused")
		var observed int
		stop := run(t, guard.RelayConfig{Store: s, Workers: 1, Poll: time.Minute, MinBackoff: time.Second, MaxBackoff: 8 * time.Second,
			Publisher: guard.PublisherFunc(func(_ context.Context, ev []guard.Event) error {
				if ev[0].Tenant == "bad" {
					mu.Lock()
					defer mu.Unlock()
					tries = append(tries, time.Now())
					return refused
				}
				return nil
			}),
			Observe: func(tenant cells.TenantID, n int, err error) {
				mu.Lock()
				defer mu.Unlock()
				if tenant == "bad" && n == 0 && errors.Is(err, refused) {
					observed++
				}
			}})
		s.emit("bad", 1, true)
		for range 60 {
			<-time.After(time.Second)
			s.emit("good", 1, true)
			s.emit("bad", 1, true)
		}
		synctest.Wait()
		if n := s.published("good"); n != 60 {
			t.Errorf("%d events of the good tenant were published", n)
		}
		mu.Lock()
		if len(tries) < 8 || len(tries) > 20 || observed != len(tries) {
			t.Errorf("the bad tenant was tried %d times in a minute, observed %d", len(tries), observed)
		}
		for i := 1; i < len(tries); i++ {
			want := min(time.Second<<(i-1), 8*time.Second)
			if d := tries[i].Sub(tries[i-1]); d < want/2 || d > want {
				t.Errorf("try %d came after %s, want %s to %s", i, d, want/2, want)
			}
		}
		mu.Unlock()
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// What nobody announced is found by searching; "" makes it search at once.
func TestRelaySearches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		s.backlog = errors.New("the store is away")
		stop := run(t, guard.RelayConfig{Store: s, Publisher: &guard.Local{}, Poll: time.Minute, Batch: 2})
		s.emit("a", 5, false)
		synctest.Wait()
		s.mu.Lock()
		if s.searches != 1 {
			t.Errorf("searched %d times", s.searches)
		}
		s.backlog = nil
		s.mu.Unlock()
		<-time.After(59 * time.Second)
		s.emit("b", 5, false)
		<-time.After(2 * time.Second)
		synctest.Wait()
		if s.published("a") != 5 || s.published("b") != 5 {
			t.Errorf("published %d and %d after a search", s.published("a"), s.published("b"))
		}
		s.emit("a", 1, false)
		s.feeds <- []cells.TenantID{""}
		synctest.Wait()
		if s.published("a") != 6 {
			t.Errorf("published %d after announcements were lost", s.published("a"))
		}
		_ = stop()
	})
}

// A publisher is cut off after the timeout, and at the end of the relay; another
// process that has the turn is asked again.
func TestRelayBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var mu sync.Mutex
		var took []time.Duration
		hang := guard.PublisherFunc(func(ctx context.Context, _ []guard.Event) error {
			start := time.Now()
			<-ctx.Done()
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(start))
			return context.Cause(ctx)
		})
		stop := run(t, guard.RelayConfig{Store: s, Publisher: hang, Timeout: 3 * time.Second, MinBackoff: time.Second, Poll: time.Hour})
		s.emit("a", 1, true)
		<-time.After(3*time.Second + time.Millisecond)
		synctest.Wait()
		if len(took) != 1 || took[0] != 3*time.Second {
			t.Errorf("the publisher was cut off after %v", took)
		}
		<-time.After(1500 * time.Millisecond)
		synctest.Wait()
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if len(took) != 2 || took[1] >= 3*time.Second {
			t.Errorf("at the end of the relay the publisher took %v", took)
		}

		s = newStore()
		s.busy = true
		stop = run(t, guard.RelayConfig{Store: s, Publisher: &guard.Local{}, MinBackoff: time.Second, Poll: time.Hour})
		s.emit("a", 1, true)
		synctest.Wait()
		s.mu.Lock()
		s.busy = false
		s.mu.Unlock()
		<-time.After(time.Second + time.Millisecond)
		synctest.Wait()
		if s.published("a") != 1 {
			t.Error("a turn that became free was not taken")
		}
		_ = stop()
	})
}

// A relay ends when its store is closed, and can be run again.
func TestRelayEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		r, err := guard.NewRelay(guard.RelayConfig{Store: s, Publisher: &guard.Local{}})
		if err != nil {
			t.Fatal(err)
		}
		close(s.closed)
		if err := r.Run(t.Context()); !errors.Is(err, guard.ErrClosed) {
			t.Errorf("a closed store: %v", err)
		}
		s.closed = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		s.emit("a", 3, true)
		synctest.Wait()
		if s.published("a") != 3 {
			t.Errorf("published %d when run again", s.published("a"))
		}
		cancel()
		<-done
	})
}

// A publisher that says when to come again is not called before.
func TestRelayDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var mu sync.Mutex
		var tries []time.Duration
		start := time.Now()
		delays := []time.Duration{10 * time.Minute, 1000 * time.Hour, time.Nanosecond}
		stop := run(t, guard.RelayConfig{Store: s, Poll: time.Minute, MinBackoff: time.Second, MaxBackoff: 8 * time.Second,
			Publisher: guard.PublisherFunc(func(context.Context, []guard.Event) error {
				mu.Lock()
				defer mu.Unlock()
				tries = append(tries, time.Since(start))
				if len(tries) > len(delays) {
					return nil
				}
				return &guard.PartialError{Err: &guard.DelayError{After: delays[len(tries)-1], Err: errors.New("later")}}
			})})
		s.emit("a", 1, true)
		for range 90 {
			<-time.After(time.Minute)
			s.feeds <- []cells.TenantID{"a"}
		}
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		want := []time.Duration{0, 10 * time.Minute, 70 * time.Minute, 70*time.Minute + 4*time.Second}
		if len(tries) != len(want) {
			t.Fatalf("called after %v, want %v", tries, want)
		}
		for i := range want {
			if d := tries[i] - want[i]; d < -2*time.Second || d > 2*time.Second {
				t.Errorf("called after %v, want %v", tries, want)
			}
		}
		if s.published("a") != 1 {
			t.Error("not published in the end")
		}
		_ = stop()
	})
}
