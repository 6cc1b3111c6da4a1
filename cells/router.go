// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// RouterOption configures [NewRouter].
type RouterOption func(*routerConfig)

type routerConfig struct {
	defaultCell   CellID
	defaultMaxAge time.Duration
	log           *slog.Logger
	snapshotPath  string
	snapshotKey   []byte
	onChange      func(old, new TenantRoute)
	staleAfter    time.Duration
	placements    bool
}

// WithDefaultCell names the cell that serves tenants without a row, at epoch 0.
// Without it they are unknown. Deleted tenants have a row and never fall to it.
func WithDefaultCell(cell CellID) RouterOption {
	return func(c *routerConfig) { c.defaultCell = cell }
}

// WithDefaultMaxAge stops giving tenants without a row to the default cell once
// the view is older than d: somebody may have placed them since. They get
// BACKEND_UNAVAILABLE then. 0, the default, means no limit: a directory that is
// down must not take away from the default cell what it has always served.
func WithDefaultMaxAge(d time.Duration) RouterOption {
	return func(c *routerConfig) { c.defaultMaxAge = d }
}

// WithRouterLogger sets where the router reports breaks; [slog.Default] without it.
func WithRouterLogger(l *slog.Logger) RouterOption {
	return func(c *routerConfig) { c.log = l }
}

// WithSnapshot keeps the last known good routes in the file path, signed with a
// key that is derived from key, and starts from them when the table cannot be
// read. key has at least 16 bytes; routers that share a file share the key. A file
// that is torn, signed with another key or of a newer version is refused: Start
// fails rather than trust it.
func WithSnapshot(path string, key []byte) RouterOption {
	return func(c *routerConfig) { c.snapshotPath, c.snapshotKey = path, key }
}

// WithOnChange calls f after each change of the view with the row that was there
// (the zero route if none was) and the row that is. Calls come one at a time, in
// the order of each tenant's revisions, from a goroutine of the router: f may take
// its time and may call the router, except Close. Revisions that the view jumped
// over are not reported.
func WithOnChange(f func(old, new TenantRoute)) RouterOption {
	return func(c *routerConfig) { c.onChange = f }
}

// WithStaleAfter sets how old the view may be before [Router.Status] calls it
// stale; 15 s by default. A table that gives no sign of life for a third of it is
// asked whether there is news.
func WithStaleAfter(d time.Duration) RouterOption {
	return func(c *routerConfig) { c.staleAfter = d }
}

// WithPlacementsOnly is for routers that only route: the view does not keep the marks
// (EventMark, DataMark) that tenants who have moved carry for ever, so that they take
// no more memory than others. Routers that share a snapshot file share the option.
func WithPlacementsOnly() RouterOption {
	return func(c *routerConfig) { c.placements = true }
}

// Router is one process's view of the routes, kept up to date by a watch on the
// table. Lookups read memory only, take no lock and do not allocate. It is safe
// for concurrent use.
//
// Of a row that is plainly ACTIVE or a tombstone the view keeps what decides: State,
// CellID, Epoch, Floor and Revision. OperationID, Actor, Reason, Stamp and UpdatedAt
// are empty in what a router says of such a row; [Router.Refresh] returns them. Rows
// with a move, residue or marks are kept whole.
type Router struct {
	table RoutingTable
	cfg   routerConfig
	view  view
	born  time.Time // ages are measured from it, by the monotonic clock

	loaded atomic.Bool  // the view was complete once, from the table or the snapshot
	fresh  atomic.Int64 // when the view was last known to be complete; nanoseconds after born
	status routerStatus
	// hooks are called with a shard of the view locked, before waiters wake.
	hooks atomic.Pointer[[]func(next *TenantRoute)]

	life context.Context // ends at Close, with ErrClosed as its cause
	end  context.CancelCauseFunc
	wg   sync.WaitGroup // background goroutines; added to under mu while not closed

	mu      sync.Mutex // guards started, closed, flights
	started bool
	closed  bool
	flights map[TenantID]*flight

	starting sync.Mutex // held by the one Start that loads

	changes changeQueue
	dirty   chan struct{} // has an element when the snapshot must be written
	// snapshotFile is the file as this router has last written it; used by the
	// goroutine that keeps the snapshot.
	snapshotFile os.FileInfo
}

// NewRouter returns a router over the table. It knows nothing until [Router.Start].
func NewRouter(table RoutingTable, opts ...RouterOption) *Router {
	r := &Router{
		table: table, born: time.Now(), flights: make(map[TenantID]*flight), dirty: make(chan struct{}, 1),
		cfg: routerConfig{log: slog.Default(), staleAfter: 15 * time.Second},
	}
	for _, o := range opts {
		o(&r.cfg)
	}
	if r.cfg.staleAfter <= 0 {
		r.cfg.staleAfter = 15 * time.Second
	}
	if r.cfg.log == nil {
		r.cfg.log = slog.Default()
	}
	r.view.init()
	r.view.bare = r.cfg.placements
	r.life, r.end = context.WithCancelCause(context.Background())
	return r
}

// Start loads the routes and keeps them up to date until [Router.Close]. ctx
// bounds the loading only. When the table cannot be read, Start goes on from the
// signed snapshot if there is one, and keeps trying in the background; without
// one it returns the table's error (wrapping [ErrUnavailable]) and may be called
// again. A started router's Start does nothing.
func (r *Router) Start(ctx context.Context) error {
	r.starting.Lock()
	defer r.starting.Unlock()
	if err := r.checkConfig(); err != nil {
		return err
	}
	r.mu.Lock()
	started, closed := r.started, r.closed
	r.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if started {
		return nil
	}
	if err := r.firstLoad(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	r.started = true
	r.wg.Go(r.follow)
	if r.cfg.snapshotPath != "" {
		r.wg.Go(r.keepSnapshot)
	}
	return nil
}

func (r *Router) checkConfig() error {
	if r.cfg.defaultCell != "" {
		if err := r.cfg.defaultCell.Validate(); err != nil {
			return fmt.Errorf("default cell: %w", err)
		}
	}
	if r.cfg.snapshotPath != "" && len(r.cfg.snapshotKey) < minKeyLen {
		return fmt.Errorf("%w: the snapshot key has %d bytes, want at least %d", ErrInvalid, len(r.cfg.snapshotKey), minKeyLen)
	}
	return nil
}

// Close ends the background work, writes the snapshot a last time and wakes
// every Wait with [ErrClosed]. Lookups keep answering from what is known. It may
// be called again.
func (r *Router) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.end(ErrClosed)
	r.wg.Wait()
	return nil
}

// Decision says where a tenant's requests go, by what the router knows.
type Decision struct {
	Tenant TenantID
	// Route is the tenant's row as the router keeps it (see [Router]), tombstones
	// included; its State is 0 when there is none.
	Route TenantRoute
	// Cell and Epoch are where requests go; empty unless Known. While Route.Moving
	// nobody serves: hold the request ([Router.Wait]) and look again.
	Cell  CellID
	Epoch Epoch
	// Rule is "route", "default" (no row; the default cell at epoch 0) or "".
	Rule string
	// Known reports whether a cell has the tenant.
	Known bool
	// Loaded reports whether the router knew the routes at all. If not, a tenant
	// that is not Known may well exist.
	Loaded bool
	// Revision is the newer of the view's and the row's; Age is how long ago the
	// view was last known to be complete.
	Revision Revision
	Age      time.Duration
}

// Rules of a [Decision].
const (
	RuleRoute   = "route"
	RuleDefault = "default"
)

// Refusal returns the answer for a request of the tenant that cannot be sent to
// Cell now, or nil if it can: BACKEND_UNAVAILABLE when the routes are not known,
// INVALID_TENANT, UNKNOWN_TENANT, or MOVING.
func (d Decision) Refusal() *Answer {
	a := &Answer{Tenant: d.Tenant, Cell: d.Cell, Revision: d.Revision, Age: d.Age}
	switch {
	case d.Known && d.Route.Moving():
		a.Code, a.RetryAfter = CodeMoving, time.Second
	case d.Known:
		return nil
	case d.Tenant.Validate() != nil:
		a.Code, a.Tenant, a.Err = CodeInvalidTenant, "", d.Tenant.Validate()
	case !d.Loaded:
		a.Code, a.RetryAfter = CodeBackendUnavailable, time.Second
		a.Detail = "the routes are not known yet, or not well enough to say who serves this tenant"
	default:
		a.Code = CodeUnknownTenant
	}
	return a
}

// decision is what Lookup finds, without copies.
type decision struct {
	row    placement
	cell   CellID
	epoch  Epoch
	rule   string
	loaded bool
}

func (d *decision) known() bool { return d.rule != "" }

func (r *Router) decide(tenant TenantID) decision {
	// loaded is read first: a row that is absent after it was absent when the view
	// was complete.
	loaded := r.loaded.Load()
	return r.decideBy(tenant, r.view.find(tenant), loaded)
}

func (r *Router) decideBy(tenant TenantID, row placement, loaded bool) decision {
	d := decision{row: row, loaded: loaded}
	if row.state != 0 {
		d.loaded = true
		if row.exists() {
			d.cell, d.epoch, d.rule = row.cell, row.epoch, RuleRoute
		}
		return d
	}
	if d.loaded && r.cfg.defaultCell != "" && tenant.Validate() == nil {
		if r.cfg.defaultMaxAge > 0 && r.age() > r.cfg.defaultMaxAge {
			d.loaded = false
			return d
		}
		d.cell, d.rule = r.cfg.defaultCell, RuleDefault
	}
	return d
}

// Lookup decides where the tenant's requests go, from memory. It takes no lock
// and does not allocate.
func (r *Router) Lookup(tenant TenantID) Decision {
	loaded := r.loaded.Load()
	row, whole := r.view.look(tenant)
	in := r.decideBy(tenant, row, loaded)
	d := Decision{
		Tenant: tenant, Cell: in.cell, Epoch: in.epoch, Rule: in.rule, Known: in.known(), Loaded: in.loaded,
		Revision: max(r.view.revision(), row.revision), Age: r.age(),
	}
	switch {
	case whole != nil:
		d.Route = *whole
	case row.state != 0:
		d.Route.TenantID, d.Route.State, d.Route.CellID = tenant, row.state, row.cell
		d.Route.Epoch, d.Route.Floor, d.Route.Revision = row.epoch, row.floor, row.revision
	}
	return d
}

// age is how long ago the view was last known to be complete; 0 before it ever was.
func (r *Router) age() time.Duration {
	if !r.loaded.Load() {
		return 0
	}
	return max(0, time.Since(r.born)-time.Duration(r.fresh.Load()))
}

// refreshed notes that the view was complete at t.
func (r *Router) refreshed(t time.Time) {
	n := int64(t.Sub(r.born))
	for {
		cur := r.fresh.Load()
		if r.loaded.Load() && n <= cur || r.fresh.CompareAndSwap(cur, n) {
			return
		}
	}
}

// Observe tells the router a row that its owner has read from the table, or was
// sent by who has. Older rows than the view's are ignored, and so are rows that
// are malformed or break an invariant with what is known: those are reported.
func (r *Router) Observe(route TenantRoute) {
	_ = r.observe(CanonicalRoute(route))
}

// observe takes ownership of route.
func (r *Router) observe(route TenantRoute) error {
	if cur := r.view.find(route.TenantID); cur.state != 0 && route.Revision <= cur.revision {
		return nil
	}
	err := ValidateRoute(route)
	if err == nil && route.Revision == 0 {
		err = fmt.Errorf("%w: route of %s has no revision", ErrInvalid, route.TenantID)
	}
	if err == nil {
		_, err = r.view.put(&route, false, r.changed)
	}
	if err != nil {
		r.status.refuse(err)
		r.cfg.log.Error("cells: a route was refused; the view keeps what it had", "tenant", route.TenantID, "err", err)
	}
	return err
}

// changed runs with the tenant's shard locked.
func (r *Router) changed(was placement, old, next *TenantRoute) {
	if hooks := r.hooks.Load(); hooks != nil {
		for _, h := range *hooks {
			h(next)
		}
	}
	if r.cfg.onChange != nil {
		if old == nil && was.state != 0 {
			row := was.route(next.TenantID)
			old = &row
		}
		r.notify(old, next)
	}
	r.markDirty()
}

// hook adds a function that is called with the tenant's shard of the view locked:
// it must be quick and must not write to the view.
func (r *Router) hook(f func(next *TenantRoute)) {
	for {
		cur := r.hooks.Load()
		var next []func(next *TenantRoute)
		if cur != nil {
			next = append(next, *cur...)
		}
		next = append(next, f)
		if r.hooks.CompareAndSwap(cur, &next) {
			return
		}
	}
}

// waitPoll is how often a Wait reads the table itself: a watch that is broken
// then costs a held request some time, not its answer.
const waitPoll = time.Second

// Wait blocks until the view's row of the tenant is newer than after, and returns
// it, tombstones included. It returns the cause of ctx when that ends first, and
// [ErrClosed] when the router is closed.
func (r *Router) Wait(ctx context.Context, tenant TenantID, after Revision) (TenantRoute, error) {
	if err := tenant.Validate(); err != nil {
		return TenantRoute{}, err
	}
	var poll *time.Timer
	for {
		changed, leave := r.view.await(tenant)
		if cur := r.view.get(tenant); cur != nil && cur.Revision > after {
			leave()
			return cur.Clone(), nil
		}
		if poll == nil {
			poll = time.NewTimer(jittered(waitPoll))
			defer poll.Stop()
		}
		select {
		case <-changed:
			leave()
		case <-poll.C:
			leave()
			if _, err := r.Refresh(ctx, tenant); err != nil && ctx.Err() == nil && !errors.Is(err, ErrNotFound) {
				r.status.broke(err)
			}
			poll.Reset(jittered(waitPoll))
		case <-ctx.Done():
			leave()
			return TenantRoute{}, context.Cause(ctx)
		case <-r.life.Done():
			leave()
			return TenantRoute{}, ErrClosed
		}
	}
}
