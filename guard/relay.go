// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// RelayConfig configures a [Relay]. Durations and counts of 0 take the default.
type RelayConfig struct {
	// Store is the cell's outbox; required.
	Store RelayStore
	// Publisher takes the events; required.
	Publisher Publisher
	// Workers is how many tenants are published for at the same time; 4. Each takes
	// a connection to the store while its publisher is called.
	Workers int
	// Batch is the most events that a publisher is given at once; 100.
	Batch int
	// Poll is how often the store is searched for events that no notification
	// announced; 2 s.
	Poll time.Duration
	// Timeout bounds one call of the publisher; 10 s.
	Timeout time.Duration
	// MinBackoff and MaxBackoff bound the wait after a failure of one tenant, which
	// doubles with each; 100 ms and 30 s.
	MinBackoff, MaxBackoff time.Duration
	// Logger takes failures; slog.Default().
	Logger *slog.Logger
	// Observe, if set, is told of every publication: how many events were accepted,
	// and the error. It is called by several goroutines and must not block.
	Observe func(tenant cells.TenantID, accepted int, err error)
}

// Relay publishes a cell's outbox: each tenant's events in order, at least once,
// tenants independently of each other. Every process of a cell may run one; the
// store lets one of them publish for a tenant at a time.
type Relay struct {
	cfg RelayConfig

	mu      sync.Mutex // guards everything below
	ready   *sync.Cond // signalled when queue grows or ended is set
	queue   []cells.TenantID
	tenants map[cells.TenantID]*relayTenant
	ended   bool
	scan    chan struct{} // cap 1: look for a backlog now
}

// relayTenant is what a relay knows of a tenant that has or had something to
// publish; it is dropped when there is nothing.
type relayTenant struct {
	queued, running bool
	dirty           bool // heard of while running
	failures        int
	hold            *time.Timer // set while waiting after a failure
}

// NewRelay checks the configuration. The error wraps [cells.ErrInvalid].
func NewRelay(cfg RelayConfig) (*Relay, error) {
	if cfg.Store == nil || cfg.Publisher == nil {
		return nil, fmt.Errorf("%w: a relay needs a store and a publisher", cells.ErrInvalid)
	}
	if cfg.Workers < 0 || cfg.Batch < 0 || cfg.Poll < 0 || cfg.Timeout < 0 || cfg.MinBackoff < 0 || cfg.MaxBackoff < 0 {
		return nil, fmt.Errorf("%w: a count or duration of the relay is negative", cells.ErrInvalid)
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&cfg.Poll, 2*time.Second)
	def(&cfg.Timeout, 10*time.Second)
	def(&cfg.MinBackoff, 100*time.Millisecond)
	def(&cfg.MaxBackoff, 30*time.Second)
	if cfg.Workers == 0 {
		cfg.Workers = 4
	}
	if cfg.Batch == 0 {
		cfg.Batch = 100
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Relay{cfg: cfg}, nil
}

// Run publishes until ctx ends, then waits for what is in flight (whose contexts
// end with ctx) and returns the cause. It returns early only when the store is
// closed. A relay can be run again, but not twice at the same time.
func (r *Relay) Run(ctx context.Context) error {
	feed, err := r.cfg.Store.NewFeed()
	if err != nil {
		return err
	}
	defer feed.Close()
	r.mu.Lock()
	r.ready = sync.NewCond(&r.mu)
	r.queue, r.tenants, r.ended = nil, map[cells.TenantID]*relayTenant{}, false
	r.scan = make(chan struct{}, 1)
	r.mu.Unlock()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	wg.Go(func() { cancel(r.follow(ctx, feed)) })
	wg.Go(func() { r.search(ctx) })
	for range r.cfg.Workers {
		wg.Go(func() { r.work(ctx) })
	}
	<-ctx.Done()
	r.mu.Lock()
	r.ended = true
	for _, t := range r.tenants {
		if t.hold != nil {
			t.hold.Stop()
		}
	}
	r.ready.Broadcast()
	r.mu.Unlock()
	wg.Wait()
	return context.Cause(ctx)
}

// follow queues the tenants that are announced.
func (r *Relay) follow(ctx context.Context, feed Feed) error {
	for {
		tenants, err := feed.Next(ctx)
		if err != nil {
			return err
		}
		for _, t := range tenants {
			if t == "" {
				select {
				case r.scan <- struct{}{}:
				default:
				}
				continue
			}
			r.push(t)
		}
	}
}

// search queues what the store finds, at the start and in every interval.
func (r *Relay) search(ctx context.Context) {
	tick := time.NewTicker(r.cfg.Poll)
	defer tick.Stop()
	const page = 1000
	for {
		for after := cells.TenantID(""); ctx.Err() == nil; {
			tenants, err := r.cfg.Store.Backlog(ctx, after, page)
			if err != nil {
				if ctx.Err() == nil {
					r.cfg.Logger.Warn("relay: searching for events failed", "error", err)
				}
				break
			}
			for _, t := range tenants {
				r.push(t)
			}
			if len(tenants) < page {
				break
			}
			after = tenants[len(tenants)-1]
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.scan:
		}
	}
}

// push queues a tenant unless it is queued, or waits after a failure.
func (r *Relay) push(tenant cells.TenantID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tenants[tenant]
	if t == nil {
		t = &relayTenant{}
		r.tenants[tenant] = t
	}
	switch {
	case t.running:
		t.dirty = true
	case !t.queued && t.hold == nil:
		r.enqueue(tenant, t)
	}
}

// enqueue is called with mu held.
func (r *Relay) enqueue(tenant cells.TenantID, t *relayTenant) {
	t.queued = true
	r.queue = append(r.queue, tenant)
	r.ready.Signal()
}

// pop returns the next tenant, false at the end.
func (r *Relay) pop() (cells.TenantID, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) == 0 && !r.ended {
		r.ready.Wait()
	}
	if r.ended {
		return "", false
	}
	tenant := r.queue[0]
	r.queue = r.queue[1:]
	t := r.tenants[tenant]
	t.queued, t.running, t.dirty = false, true, false
	return tenant, true
}

func (r *Relay) work(ctx context.Context) {
	for {
		tenant, ok := r.pop()
		if !ok {
			return
		}
		n, err := r.cfg.Store.PublishNext(ctx, tenant, r.cfg.Batch, r.publish)
		if r.cfg.Observe != nil && (n > 0 || err != nil && !errors.Is(err, ErrBusy)) {
			r.cfg.Observe(tenant, n, err)
		}
		r.done(ctx, tenant, n, err)
	}
}

func (r *Relay) publish(ctx context.Context, events []Event) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.cfg.Timeout, errPublishTimeout)
	defer cancel()
	return r.cfg.Publisher.Publish(ctx, events)
}

// maxDelay bounds what a publisher may ask for.
const maxDelay = time.Hour

var errPublishTimeout = errors.New("guard: the publisher took too long")

// done decides when a tenant comes next: behind the others while it has events,
// later after a failure, when it is heard of otherwise.
func (r *Relay) done(ctx context.Context, tenant cells.TenantID, n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tenants[tenant]
	t.running = false
	wait, least := time.Duration(0), time.Duration(0)
	switch {
	case r.ended:
		return
	case errors.Is(err, ErrBusy):
		wait = r.cfg.MinBackoff
	case errors.Is(err, ErrPaused):
		// StartEvents announces the tenant.
	case err != nil:
		if n > 0 {
			t.failures = 0
		}
		wait = min(r.cfg.MinBackoff<<min(t.failures, 16), r.cfg.MaxBackoff)
		t.failures++
		var delay *DelayError
		if errors.As(err, &delay) {
			least = min(delay.After, maxDelay)
		}
		if ctx.Err() == nil {
			r.cfg.Logger.Warn("relay: publishing failed", "tenant", tenant, "accepted", n, "error", err, "again_in", max(wait, least))
		}
	case n > 0 || t.dirty:
		t.failures = 0
		r.enqueue(tenant, t)
		return
	}
	if wait == 0 {
		delete(r.tenants, tenant)
		return
	}
	wait = max(wait/2+rand.N(wait/2+1), least)
	t.hold = time.AfterFunc(wait, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		t.hold = nil
		if !r.ended && r.tenants[tenant] == t {
			r.enqueue(tenant, t)
		}
	})
}
