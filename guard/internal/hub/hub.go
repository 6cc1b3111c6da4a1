// SPDX-License-Identifier: Apache-2.0

// Package hub wakes, inside one process, whoever waits for a tenant's events,
// and ends publications when a tenant is paused. It knows no store: what it is
// told about other processes comes from the stores' listeners and polls. A lost
// wake-up costs a poll interval, never an event.
package hub

import (
	"context"
	"errors"
	"sync"

	"github.com/cloister-dev/cloister/cells"
)

// ErrPaused is the cause with which a publication's context ends when the
// tenant's events are paused.
var ErrPaused = errors.New("guard: the tenant's events are paused")

// ErrClosed is returned to whoever waits when the hub is closed.
var ErrClosed = errors.New("guard: closed")

// Hub is safe for concurrent use. Its background work is done by the functions
// given to New, one goroutine each, from the first use until Close.
type Hub struct {
	background []func(context.Context)

	mu      sync.Mutex // guards everything below
	started bool
	closed  bool
	ctx     context.Context // ends at Close
	cancel  context.CancelCauseFunc
	wg      sync.WaitGroup
	waiters map[cells.TenantID]map[*waiter]struct{}
	feeds   map[*Feed]struct{}
	pubs    map[cells.TenantID]map[*publication]struct{}
}

type waiter struct {
	after cells.EventSeq
	ch    chan struct{} // closed by the first wake
	once  sync.Once
}

type publication struct{ cancel context.CancelCauseFunc }

// New returns a hub with its background functions, which return when their
// context ends.
func New(background ...func(context.Context)) *Hub {
	h := &Hub{
		background: background,
		waiters:    map[cells.TenantID]map[*waiter]struct{}{},
		feeds:      map[*Feed]struct{}{},
		pubs:       map[cells.TenantID]map[*publication]struct{}{},
	}
	h.ctx, h.cancel = context.WithCancelCause(context.Background())
	return h
}

// start is called with mu held.
func (h *Hub) start() error {
	if h.closed {
		return ErrClosed
	}
	if !h.started {
		h.started = true
		for _, f := range h.background {
			h.wg.Go(func() { f(h.ctx) })
		}
	}
	return nil
}

// Go runs f in the background until it returns; its context ends at Close,
// which waits for it. It reports false once the hub is closed.
func (h *Hub) Go(f func(context.Context)) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.wg.Go(func() { f(h.ctx) })
	return true
}

// Close ends the background work and every wait, and waits for the former.
// Calling it again is harmless.
func (h *Hub) Close() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.cancel(ErrClosed)
	h.wg.Wait()
}

// Wait blocks until the tenant is woken, check reports true, or ctx or the hub
// ends. check runs once the caller is sure to be woken by what it may miss.
func (h *Hub) Wait(ctx context.Context, tenant cells.TenantID, after cells.EventSeq, check func(context.Context) (bool, error)) error {
	w := &waiter{after: after, ch: make(chan struct{})}
	h.mu.Lock()
	if err := h.start(); err != nil {
		h.mu.Unlock()
		return err
	}
	set := h.waiters[tenant]
	if set == nil {
		set = map[*waiter]struct{}{}
		h.waiters[tenant] = set
	}
	set[w] = struct{}{}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(set, w)
		if len(set) == 0 && len(h.waiters[tenant]) == 0 {
			delete(h.waiters, tenant)
		}
	}()
	if ready, err := check(ctx); ready || err != nil {
		return err
	}
	select {
	case <-w.ch:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.ctx.Done():
		return ErrClosed
	}
}

// Waiting returns the tenants that somebody waits for, with the lowest event_seq
// behind which anybody does.
func (h *Hub) Waiting() map[cells.TenantID]cells.EventSeq {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make(map[cells.TenantID]cells.EventSeq, len(h.waiters))
	for t, set := range h.waiters {
		first := true
		for w := range set {
			if first || w.after < out[t] {
				out[t], first = w.after, false
			}
		}
	}
	return out
}

// Wake wakes everybody who waits for the tenant, and tells the feeds.
func (h *Hub) Wake(tenant cells.TenantID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wake(tenant)
	for f := range h.feeds {
		f.add(tenant)
	}
}

func (h *Hub) wake(tenant cells.TenantID) {
	for w := range h.waiters[tenant] {
		w.once.Do(func() { close(w.ch) })
	}
}

// WakeAll wakes everybody: notifications may have been lost. Feeds learn that
// they have to look for themselves.
func (h *Hub) WakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for t := range h.waiters {
		h.wake(t)
	}
	for f := range h.feeds {
		f.add("")
	}
}

// Feed collects the tenants that may have new events. It is used by one
// goroutine.
type Feed struct {
	h       *Hub
	pending map[cells.TenantID]struct{} // guarded by h.mu
	signal  chan struct{}
}

// NewFeed registers a feed; Close releases it.
func (h *Hub) NewFeed() (*Feed, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.start(); err != nil {
		return nil, err
	}
	f := &Feed{h: h, pending: map[cells.TenantID]struct{}{}, signal: make(chan struct{}, 1)}
	h.feeds[f] = struct{}{}
	return f, nil
}

// add is called with h.mu held.
func (f *Feed) add(tenant cells.TenantID) {
	f.pending[tenant] = struct{}{}
	select {
	case f.signal <- struct{}{}:
	default:
	}
}

// Next blocks until there are tenants and returns them, each once. "" stands for
// all: something may have been missed.
func (f *Feed) Next(ctx context.Context) ([]cells.TenantID, error) {
	for {
		f.h.mu.Lock()
		out := make([]cells.TenantID, 0, len(f.pending))
		for t := range f.pending {
			out = append(out, t)
		}
		clear(f.pending)
		f.h.mu.Unlock()
		if len(out) > 0 {
			return out, nil
		}
		select {
		case <-f.signal:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-f.h.ctx.Done():
			return nil, ErrClosed
		}
	}
}

// Close releases the feed.
func (f *Feed) Close() {
	f.h.mu.Lock()
	defer f.h.mu.Unlock()
	delete(f.h.feeds, f)
}

// Publishing returns a context that ends with [ErrPaused] when the tenant is
// paused. done must be called at the end of the publication.
func (h *Hub) Publishing(ctx context.Context, tenant cells.TenantID) (_ context.Context, done func()) {
	pctx, cancel := context.WithCancelCause(ctx)
	p := &publication{cancel}
	h.mu.Lock()
	defer h.mu.Unlock()
	set := h.pubs[tenant]
	if set == nil {
		set = map[*publication]struct{}{}
		h.pubs[tenant] = set
	}
	set[p] = struct{}{}
	return pctx, func() {
		h.mu.Lock()
		delete(set, p)
		if len(set) == 0 && len(h.pubs[tenant]) == 0 {
			delete(h.pubs, tenant)
		}
		h.mu.Unlock()
		cancel(nil)
	}
}

// Pause ends the tenant's publications in this process.
func (h *Hub) Pause(tenant cells.TenantID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.pubs[tenant] {
		p.cancel(ErrPaused)
	}
}

// InPublication lists the tenants that this process is publishing for.
func (h *Hub) InPublication() []cells.TenantID {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]cells.TenantID, 0, len(h.pubs))
	for t := range h.pubs {
		out = append(out, t)
	}
	return out
}
