// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// TableOption configures [NewMemTable] and [NewFileTable].
type TableOption func(*tableConfig)

type tableConfig struct {
	history int
	idle    time.Duration
	poll    time.Duration
}

func newTableConfig(opts []TableOption) tableConfig {
	c := tableConfig{history: 10000, idle: time.Second, poll: 20 * time.Millisecond}
	for _, o := range opts {
		o(&c)
	}
	return c
}

// WithHistory sets how many changes a [MemTable] remembers for watches that start
// in the past; 10000 by default, at least 1. A watch from before that gets
// [ErrCompacted]. A [FileTable] needs no history: its rows know their revisions.
func WithHistory(n int) TableOption { return func(c *tableConfig) { c.history = max(n, 1) } }

// WithWatchIdle sets how long a watch without changes waits before it gives a
// sign of life; 1 s by default.
func WithWatchIdle(d time.Duration) TableOption {
	return func(c *tableConfig) { c.idle = max(d, time.Millisecond) }
}

// WithPoll sets how often a watch of a [FileTable] looks for changes made by other
// processes; 20 ms by default. Changes of its own process are seen at once.
func WithPoll(d time.Duration) TableOption {
	return func(c *tableConfig) { c.poll = max(d, time.Millisecond) }
}

// MemTable is a [RoutingTable] in memory, for tests and for one process that
// needs no durability. Its change history is bounded, see [WithHistory]. The zero
// value is not usable.
type MemTable struct {
	cfg  tableConfig
	done chan struct{} // closed by Close

	mu        sync.RWMutex // guards all below
	rows      map[TenantID]TenantRoute
	ids       []TenantID // the keys of rows, sorted
	rev       Revision
	hist      []TenantRoute // the changes (compacted, rev], one a revision
	compacted Revision
	changed   chan struct{} // closed and replaced at each change
	closed    bool
}

var _ RoutingTable = (*MemTable)(nil)

// NewMemTable returns an empty table.
func NewMemTable(opts ...TableOption) *MemTable {
	return &MemTable{
		cfg: newTableConfig(opts), done: make(chan struct{}),
		rows: make(map[TenantID]TenantRoute), changed: make(chan struct{}),
	}
}

// Close ends every watch and every later call with [ErrClosed]. It always
// returns nil and may be called again.
func (t *MemTable) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		close(t.done)
	}
	return nil
}

// Get implements [RoutingTable].
func (t *MemTable) Get(ctx context.Context, tenant TenantID) (TenantRoute, error) {
	if err := beginRead(ctx, tenant); err != nil {
		return TenantRoute{}, err
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return TenantRoute{}, ErrClosed
	}
	r, ok := t.rows[tenant]
	if !ok {
		return TenantRoute{}, fmt.Errorf("%w for %s", ErrNotFound, tenant)
	}
	return r.Clone(), nil
}

func beginRead(ctx context.Context, tenant TenantID) error {
	if ctx.Err() != nil {
		return endOf(ctx)
	}
	return tenant.Validate()
}

// CompareAndSet implements [RoutingTable].
func (t *MemTable) CompareAndSet(ctx context.Context, old Revision, next TenantRoute) (TenantRoute, error) {
	if ctx.Err() != nil {
		return TenantRoute{}, endOf(ctx)
	}
	next = CanonicalRoute(next)
	if err := ValidateRoute(next); err != nil {
		return TenantRoute{}, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return TenantRoute{}, ErrClosed
	}
	cur, exists := t.rows[next.TenantID]
	if err := checkSwap(cur, old, next); err != nil {
		return TenantRoute{}, err
	}
	t.rev++
	next.Revision = t.rev
	t.rows[next.TenantID] = next
	if !exists {
		i, _ := slices.BinarySearch(t.ids, next.TenantID)
		t.ids = slices.Insert(t.ids, i, next.TenantID)
	}
	t.hist = append(t.hist, next)
	if n := len(t.hist) - t.cfg.history; n > 0 {
		t.compacted = t.hist[n-1].Revision
		t.hist = t.hist[n:]
	}
	close(t.changed)
	t.changed = make(chan struct{})
	return next.Clone(), nil
}

// checkSwap is the decision of a compare-and-set: cur is the stored row, zero if
// there is none.
func checkSwap(cur TenantRoute, old Revision, next TenantRoute) error {
	if cur.Revision != old {
		return fmt.Errorf("%w: %s is at revision %d, not %d", ErrConflict, next.TenantID, cur.Revision, old)
	}
	return ValidateChange(cur, next)
}

// List implements [RoutingTable].
func (t *MemTable) List(ctx context.Context, opts ListOptions) (RoutePage, error) {
	if ctx.Err() != nil {
		return RoutePage{}, endOf(ctx)
	}
	if err := opts.Validate(); err != nil {
		return RoutePage{}, err
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return RoutePage{}, ErrClosed
	}
	page := RoutePage{Revision: t.rev}
	i, found := slices.BinarySearch(t.ids, opts.After)
	if found {
		i++
	}
	for ; i < len(t.ids); i++ {
		r := t.rows[t.ids[i]]
		if !opts.Matches(&r) {
			continue
		}
		if len(page.Routes) == opts.PageSize() {
			page.Next = page.Routes[len(page.Routes)-1].TenantID
			break
		}
		page.Routes = append(page.Routes, r.Clone())
	}
	return page, nil
}

// Compact forgets the changes up to and including rev, so that a watch from an
// earlier revision gets [ErrCompacted]. Rows are untouched.
func (t *MemTable) Compact(rev Revision) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev = min(rev, t.rev)
	if rev <= t.compacted {
		return
	}
	t.hist = t.hist[rev-t.compacted:]
	t.compacted = rev
}

// Watch implements [RoutingTable].
func (t *MemTable) Watch(ctx context.Context, from Revision) (RouteWatcher, error) {
	if ctx.Err() != nil {
		return nil, endOf(ctx)
	}
	if _, _, err := t.since(from); err != nil {
		return nil, err
	}
	return &pullWatcher{from: from, idle: t.cfg.idle, since: t.since, tableDone: t.done, done: make(chan struct{})}, nil
}

// since returns the changes after from, bounded, and a channel that is closed
// when there is more.
func (t *MemTable) since(from Revision) (RouteUpdate, <-chan struct{}, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	switch {
	case t.closed:
		return RouteUpdate{}, nil, ErrClosed
	case from < t.compacted:
		return RouteUpdate{}, nil, fmt.Errorf("%w: changes are known from %d on, not from %d", ErrCompacted, t.compacted, from)
	case from > t.rev:
		return RouteUpdate{}, nil, fmt.Errorf("%w: revision %d is ahead of the table's %d", ErrCompacted, from, t.rev)
	}
	part := t.hist[from-t.compacted:]
	up := RouteUpdate{Revision: t.rev}
	if len(part) > watchBatchRows {
		part = part[:watchBatchRows]
		up.Revision = part[len(part)-1].Revision
	}
	for _, r := range part {
		up.Routes = append(up.Routes, r.Clone())
	}
	return up, t.changed, nil
}

// pullWatcher makes a watch out of a function that reads the changes since a
// revision. It owns no goroutine.
type pullWatcher struct {
	from Revision // used by Next's goroutine only
	idle time.Duration
	// poll, if positive, bounds how long Next trusts the change channel alone.
	poll      time.Duration
	since     func(Revision) (RouteUpdate, <-chan struct{}, error)
	tableDone <-chan struct{}
	done      chan struct{} // closed by Close
	once      sync.Once
}

func (w *pullWatcher) Next(ctx context.Context) (RouteUpdate, error) {
	idle := time.NewTimer(w.idle)
	defer idle.Stop()
	var poll <-chan time.Time
	if w.poll > 0 {
		tick := time.NewTicker(w.poll)
		defer tick.Stop()
		poll = tick.C
	}
	for alive := false; ; {
		if ctx.Err() != nil {
			return RouteUpdate{}, endOf(ctx)
		}
		select {
		case <-w.done:
			return RouteUpdate{}, fmt.Errorf("%w: watch", ErrClosed)
		default:
		}
		up, changed, err := w.since(w.from)
		if err != nil {
			return RouteUpdate{}, err
		}
		if len(up.Routes) > 0 || alive {
			w.from = up.Revision
			return up, nil
		}
		select {
		case <-changed:
		case <-poll:
		case <-idle.C:
			alive = true
		case <-ctx.Done():
		case <-w.done:
		case <-w.tableDone:
		}
	}
}

func (w *pullWatcher) Close() error {
	w.once.Do(func() { close(w.done) })
	return nil
}
