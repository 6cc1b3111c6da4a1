// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// ErrGateClosed is in the cause of a stream's or job's context when the tenant's
// gate has closed: the tenant is moving, or has moved, or was deleted.
var ErrGateClosed = errors.New("cells: gate closed")

// GateOption configures [NewGates].
type GateOption func(*gatesConfig)

type gatesConfig struct {
	opener func(context.Context, FenceOrder) error
	keys   [][]byte
	log    *slog.Logger
	grace  time.Duration
	served func(Served)
}

// WithOpener sets what is called before the first admission of a tenant at an
// epoch in this process: it raises the tenant's fence in the cell's database, so
// that the guard there admits the epoch. It is called once for each epoch of a
// tenant (again after an error), never for epoch 0, with a context that ends
// after ten seconds. The requests that need it wait for it.
func WithOpener(open func(context.Context, FenceOrder) error) GateOption {
	return func(c *gatesConfig) { c.opener = open }
}

// WithAdmissionKey makes admissions need a token of [MintToken], unless they are
// Internal. Several keys are all good, for a rotation; each has at least 16 bytes.
func WithAdmissionKey(keys ...[]byte) GateOption {
	return func(c *gatesConfig) { c.keys = keys }
}

// WithGateLogger sets where refusals by openers are reported; [slog.Default]
// without it.
func WithGateLogger(l *slog.Logger) GateOption {
	return func(c *gatesConfig) { c.log = l }
}

// WithStreamGrace sets how long after its context was cancelled a stream may take
// to end by itself, before reads of its request fail and a hijacked connection is
// closed under it; 1 s by default.
func WithStreamGrace(d time.Duration) GateOption {
	return func(c *gatesConfig) { c.grace = d }
}

// Gates admits one cell's requests, streams and jobs in one process, by the view
// of its router. Tenants do not contend with each other. It is safe for concurrent
// use and implements [Drainer] for this process.
type Gates struct {
	cell   CellID
	router *Router
	cfg    gatesConfig
	keys   atomic.Pointer[keyring]
	born   time.Time

	gates sync.Map // TenantID -> *gate
	count atomic.Int64
	sweep atomic.Int64 // the count at which idle gates are dropped
	slabs sync.Pool    // *slab
}

// keyring is compared by its address: a token that was verified with it stays
// verified while it is in use.
type keyring struct{ keys [][]byte }

const sweepMin = 1 << 16

var _ Drainer = (*Gates)(nil)

// NewGates returns the gates of a process of the cell. It panics if the cell's
// name is malformed, the router is nil, or a key is shorter than 16 bytes: these
// are mistakes of the program.
func NewGates(cell CellID, router *Router, opts ...GateOption) *Gates {
	if err := cell.Validate(); err != nil {
		panic(err)
	}
	if router == nil {
		panic("cells: NewGates needs a router")
	}
	g := &Gates{cell: cell, router: router, born: time.Now(), cfg: gatesConfig{grace: time.Second}}
	for _, o := range opts {
		o(&g.cfg)
	}
	if g.cfg.log == nil {
		g.cfg.log = slog.Default()
	}
	if err := g.SetAdmissionKeys(g.cfg.keys...); err != nil {
		panic(err)
	}
	g.sweep.Store(sweepMin)
	router.hook(g.routeChanged)
	return g
}

// Cell returns the cell that the gates belong to.
func (g *Gates) Cell() CellID { return g.cell }

// Router returns the router that the gates decide by.
func (g *Gates) Router() *Router { return g.router }

// SetAdmissionKeys replaces the keys of [WithAdmissionKey]. Without keys no token
// is needed. The error wraps [ErrInvalid] and changes nothing.
func (g *Gates) SetAdmissionKeys(keys ...[]byte) error {
	ring := &keyring{}
	for _, k := range keys {
		if len(k) < minKeyLen {
			return fmt.Errorf("%w: an admission key has %d bytes, want at least %d", ErrInvalid, len(k), minKeyLen)
		}
		ring.keys = append(ring.keys, append([]byte(nil), k...))
	}
	if len(keys) == 0 {
		ring = nil
	}
	g.keys.Store(ring)
	return nil
}

// gate is one tenant's gate. Whether it is open follows from the router's view:
// admissions are made under mu after looking at the view once more, and the view
// never goes back.
type gate struct {
	gates *Gates
	mu    sync.Mutex // guards all below, except for reads of inflight
	// closed is the highest revision at which the gate was closed by an order to
	// drain: only a newer route opens it again.
	closed Revision
	// opened is the highest epoch whose fence was raised by this process.
	opened  Epoch
	opening *opening
	// inflight counts the list that first begins.
	inflight atomic.Int64
	admitted atomic.Uint64 // ever
	first    *Admission
	drains   []*drain
	// token is the one that was last verified with ring for epoch tokenEpoch.
	token      string
	tokenEpoch Epoch
	ring       *keyring
	// dropped: the gate is no longer in Gates.gates; look it up again.
	dropped bool
}

// opening is a call of the opener that admissions wait for.
type opening struct {
	epoch Epoch
	done  chan struct{} // closed when err is set
	err   error
}

// drain waits for the admissions up to an epoch.
type drain struct {
	epoch Epoch
	left  int
	empty chan struct{} // closed when left is 0
}

// gate returns the tenant's gate, or nil.
func (g *Gates) peek(tenant TenantID) *gate {
	if v, ok := g.gates.Load(tenant); ok {
		return v.(*gate)
	}
	return nil
}

// gate returns the tenant's gate, and makes it if there is none.
func (g *Gates) gate(tenant TenantID) *gate {
	if t := g.peek(tenant); t != nil {
		return t
	}
	v, loaded := g.gates.LoadOrStore(tenant, &gate{gates: g})
	if !loaded {
		if n := g.count.Add(1); n >= g.sweep.Load() {
			g.dropIdle()
		}
	}
	return v.(*gate)
}

// dropIdle forgets gates that hold nothing. It runs when their number has doubled
// since the last time, so that tenants that are asked for once (every name, in the
// default cell) do not stay for ever.
func (g *Gates) dropIdle() {
	limit := g.sweep.Load()
	if g.count.Load() < limit || !g.sweep.CompareAndSwap(limit, 1<<62) {
		return // another one is at it
	}
	g.gates.Range(func(k, v any) bool {
		t := v.(*gate)
		t.mu.Lock()
		if t.first == nil && t.closed == 0 && t.opening == nil && len(t.drains) == 0 {
			t.dropped = true
			if g.gates.CompareAndDelete(k, v) {
				g.count.Add(-1)
			}
		}
		t.mu.Unlock()
		return true
	})
	g.sweep.Store(max(sweepMin, 2*g.count.Load()))
}

// routeChanged ends what must not go on under the new row. It is called with the
// tenant's shard of the view locked.
func (g *Gates) routeChanged(next *TenantRoute) {
	t := g.peek(next.TenantID)
	if t == nil {
		return
	}
	below := next.Epoch + 1
	if next.State == StateActive && next.CellID == g.cell {
		below = next.Floor
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	g.endStreams(t, below, next)
}

// endStreams cancels the streams and jobs that were admitted at an epoch below
// the bound. The caller holds t.mu.
func (g *Gates) endStreams(t *gate, below Epoch, route *TenantRoute) {
	var cause *Answer
	for a := t.first; a != nil; a = a.next {
		if a.long == nil || a.Epoch >= below || a.long.ended != nil {
			continue
		}
		if cause == nil {
			cause = g.gateClosed(route)
		}
		a.endLocked(cause)
	}
}

// gateClosed is the cause that streams are cancelled with.
func (g *Gates) gateClosed(route *TenantRoute) *Answer {
	a := &Answer{
		Code: CodeMoving, Tenant: route.TenantID, Cell: route.CellID, Revision: route.Revision, Age: g.router.age(),
		RetryAfter: time.Second, Detail: "the stream was ended because the tenant leaves this epoch; connect again", Err: ErrGateClosed,
	}
	if !route.Exists() {
		a.Code, a.RetryAfter, a.Detail = CodeUnknownTenant, 0, "the stream was ended because the tenant was deleted"
	}
	return a
}

// InFlight returns how many admissions of the tenant are not done.
func (g *Gates) InFlight(tenant TenantID) int64 {
	if t := g.peek(tenant); t != nil {
		return t.inflight.Load()
	}
	return 0
}

// Total returns how many admissions are not done.
func (g *Gates) Total() int64 {
	var n int64
	g.gates.Range(func(_, v any) bool { n += v.(*gate).inflight.Load(); return true })
	return n
}

// Admitted calls f with each tenant that this process has admitted something for,
// and how much so far, in any order. A tenant that was idle for long may be left out,
// and begins at 0 again.
func (g *Gates) Admitted(f func(tenant TenantID, n uint64)) {
	g.gates.Range(func(k, v any) bool {
		if n := v.(*gate).admitted.Load(); n > 0 {
			f(k.(TenantID), n)
		}
		return true
	})
}
