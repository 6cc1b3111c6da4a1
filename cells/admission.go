// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// openTimeout bounds one call of the opener.
	openTimeout = 10 * time.Second
	// maxAdmitTries bounds how often an admission looks again because the route
	// changed under it.
	maxAdmitTries = 8
)

// AdmitRequest is what a gate is asked: may this begin?
type AdmitRequest struct {
	Tenant TenantID
	// Epoch is the one that the request was routed by, if HasEpoch. A job of the
	// process itself has none: it is admitted at what the view says.
	Epoch    Epoch
	HasEpoch bool
	// Token is the admission token, where the gates have a key.
	Token string
	// Internal: asked by this process itself, for a job or a timer. It needs no
	// token. Never set it from a request.
	Internal bool
	// Stream: it may go on for long. Its context is cancelled when the gate closes,
	// and so is an Internal one's.
	Stream bool
	// Label names it to whoever waits for it: a path, a method, a job's name.
	Label string
}

// Admission is the permission to work for one tenant. It counts as in flight
// until Done. The exported fields must not be changed.
type Admission struct {
	Tenant TenantID
	Cell   CellID
	// Epoch is the epoch of the route that admitted, to be written by: it may be
	// higher than the one that was asked for (see TenantRoute.Floor).
	Epoch Epoch

	gate  *gate
	begun time.Duration // since gates.born
	// Guarded by gate.mu:
	next, prev *Admission
	ctx        context.Context
	label      string
	long       *longAdmission // nil for a request
	done       bool
}

// longAdmission is what a stream or a job has more than a request. It is guarded
// by gate.mu.
type longAdmission struct {
	cancel  context.CancelCauseFunc
	ended   *Answer // why the gate has cancelled it, or nil
	force   func()  // called a while after that, if it is still not done
	forcing *time.Timer
}

// Admit decides whether a request, a stream or a job of the tenant may begin in
// this process, and counts it as in flight if so. The caller calls Done when it
// has ended. An error is an [*Answer]:
//
//   - INVALID_TENANT: the tenant id is malformed.
//   - BAD_REQUEST: the token is missing or not good.
//   - UNKNOWN_TENANT: no cell has the tenant.
//   - WRONG_CELL: another cell has it.
//   - STALE_ROUTE: the request was routed by an epoch that is over.
//   - MOVING: the tenant is between two epochs.
//   - BACKEND_UNAVAILABLE: the routes are not known, or the fence could not be
//     raised.
//
// When the epoch asked for is newer than the view, the row is read from the table
// before the answer is given. Without a context that ends, Admit may take as long
// as that read and the opener take: they are bounded.
func (g *Gates) Admit(ctx context.Context, req AdmitRequest) (*Admission, error) {
	if !req.Internal && !g.tokenGood(&req) {
		if req.Tenant.Validate() != nil {
			return nil, g.refuse(&req, CodeInvalidTenant, "", nil)
		}
		detail := "the admission token is not good for this tenant, cell and epoch"
		if req.Token == "" {
			detail = "the request carries no admission token"
		}
		return nil, &Answer{Code: CodeBadRequest, Detail: detail}
	}
	refreshed := false
	for range maxAdmitTries {
		d := g.router.decide(req.Tenant)
		v := g.judge(&req, &d, refreshed)
		switch v {
		case verdictAdmit:
		case verdictRefresh:
			refreshed = true
			if _, err := g.router.Refresh(ctx, req.Tenant); err != nil && !errors.Is(err, ErrNotFound) {
				return nil, g.refuse(&req, CodeBackendUnavailable, "the request was routed by a newer route than is known here, and the table cannot be read", err)
			}
			continue
		default:
			return nil, g.refuse(&req, v.code(), v.detail(), nil)
		}
		a, open, err := g.enter(ctx, &req, &d)
		switch {
		case err != nil:
			return nil, err
		case a != nil:
			return a, nil
		case open == nil:
			continue // the route changed just now
		}
		if err := g.await(ctx, open); errors.Is(err, ErrStaleOrder) && !refreshed {
			// The fence is further than the view.
			refreshed = true
			if _, rerr := g.router.Refresh(ctx, req.Tenant); rerr != nil {
				return nil, g.refuse(&req, CodeBackendUnavailable, "the fence is newer than the route that is known here, and the table cannot be read", errors.Join(err, rerr))
			}
		} else if errors.Is(err, ErrStaleOrder) {
			return nil, g.refuse(&req, CodeStaleRoute, "the tenant's fence is newer than its route", err)
		} else if err != nil {
			return nil, g.refuse(&req, CodeBackendUnavailable, "the tenant's fence could not be opened here", err)
		}
	}
	return nil, g.refuse(&req, CodeMoving, "the route keeps changing", nil)
}

// verdict is what a gate thinks of a request: to be admitted, to be looked at
// again after a read of the table, or one of the refusals.
type verdict uint8

const (
	verdictAdmit verdict = iota
	verdictRefresh
	verdictInvalid
	verdictNotKnown // the routes are not known
	verdictUnknown
	verdictBehind // the table is older than the request
	verdictWrongCell
	verdictStale
	verdictMoving
)

func (v verdict) code() Code {
	return [...]Code{
		verdictInvalid: CodeInvalidTenant, verdictNotKnown: CodeBackendUnavailable, verdictUnknown: CodeUnknownTenant,
		verdictBehind: CodeBackendUnavailable, verdictWrongCell: CodeWrongCell, verdictStale: CodeStaleRoute, verdictMoving: CodeMoving,
	}[v]
}

func (v verdict) detail() string {
	return [...]string{
		verdictInvalid:   "",
		verdictNotKnown:  "the routes are not known here yet",
		verdictUnknown:   "",
		verdictBehind:    "the request was routed by a newer route than the table has",
		verdictWrongCell: "look the tenant up again",
		verdictStale:     "look the tenant up again",
		verdictMoving:    "",
	}[v]
}

// judge decides by the view alone. It is the one place where HTTP requests, gRPC
// calls, streams and jobs are told apart from what may begin, and does not know
// which of them it has.
func (g *Gates) judge(req *AdmitRequest, d *decision, refreshed bool) verdict {
	var epoch, floor Epoch
	if d.row.state != 0 {
		epoch, floor = d.row.epoch, d.row.floor
	} else if req.Tenant.Validate() != nil {
		return verdictInvalid
	}
	if !d.loaded {
		// Nothing is known of the tenant; only its row can tell.
		if refreshed || !req.HasEpoch {
			return verdictNotKnown
		}
		return verdictRefresh
	}
	if req.HasEpoch && req.Epoch > epoch {
		switch {
		case !refreshed:
			return verdictRefresh
		case d.row.state == 0:
			return verdictStale // there is no route: whoever sent it must look again
		default:
			return verdictBehind
		}
	}
	switch {
	case !d.known():
		return verdictUnknown
	case d.cell != g.cell:
		return verdictWrongCell
	case d.row.state == 0:
		return verdictAdmit // the default cell's, at epoch 0
	case d.row.state != StateActive:
		return verdictMoving
	case req.HasEpoch && req.Epoch < floor:
		return verdictStale
	}
	return verdictAdmit
}

// refuse makes an answer with the revision and age of the view.
func (g *Gates) refuse(req *AdmitRequest, code Code, detail string, err error) *Answer {
	d := g.router.Lookup(req.Tenant)
	a := &Answer{Code: code, Tenant: req.Tenant, Cell: d.Cell, Detail: detail, Revision: d.Revision, Age: d.Age, Err: err}
	switch code {
	case CodeInvalidTenant:
		a.Err = req.Tenant.Validate()
		a.Tenant = ""
		if req.Tenant == "" {
			a.Detail = "the request names no tenant"
		}
	case CodeMoving, CodeBackendUnavailable:
		a.RetryAfter = time.Second
	}
	return a
}

// tokenGood reports whether the request carries what the keys ask for. The token
// that a tenant's requests carry is the same while its route stands, so the last
// one that was found good is remembered and only compared.
func (g *Gates) tokenGood(req *AdmitRequest) bool {
	ring := g.keys.Load()
	if ring == nil {
		return true
	}
	if !req.HasEpoch || len(req.Token) != tokenLen {
		return false
	}
	t := g.peek(req.Tenant)
	if t != nil {
		t.mu.Lock()
		known, epoch, with := t.token, t.tokenEpoch, t.ring
		t.mu.Unlock()
		if with == ring && epoch == req.Epoch && sameToken(known, req.Token) {
			return true
		}
	}
	good := false
	for _, k := range ring.keys {
		good = VerifyToken(k, req.Token, req.Tenant, g.cell, req.Epoch) || good
	}
	if good && t != nil {
		t.mu.Lock()
		if t.ring != ring || req.Epoch >= t.tokenEpoch {
			t.token, t.tokenEpoch, t.ring = req.Token, req.Epoch, ring
		}
		t.mu.Unlock()
	}
	return good
}

// enter counts the request in if the view is still what d was decided by. It
// returns nothing at all if not, and what to wait for if the fence must be raised
// first.
func (g *Gates) enter(ctx context.Context, req *AdmitRequest, d *decision) (*Admission, *opening, error) {
	t := g.gate(req.Tenant)
	t.mu.Lock()
	if t.dropped {
		t.mu.Unlock()
		return nil, nil, nil
	}
	// The view is read again under the lock: whoever changes it and then looks at
	// this gate finds what was admitted by the old one.
	if g.router.view.find(req.Tenant) != d.row {
		t.mu.Unlock()
		return nil, nil, nil
	}
	if t.closed > 0 && d.row.revision <= t.closed {
		t.mu.Unlock()
		return nil, nil, g.refuse(req, CodeMoving, "", nil)
	}
	if d.epoch > t.opened && g.cfg.opener != nil {
		o := t.opening
		if o == nil || o.epoch != d.epoch {
			o = &opening{epoch: d.epoch, done: make(chan struct{})}
			t.opening = o
			go g.open(context.WithoutCancel(ctx), t, o, FenceOrder{Cell: g.cell, Tenant: req.Tenant, Epoch: d.epoch, Floor: d.row.floor})
		}
		t.mu.Unlock()
		return nil, o, nil
	}
	var a *Admission
	if req.Stream || req.Internal {
		a = &Admission{long: &longAdmission{}}
		a.ctx, a.long.cancel = context.WithCancelCause(ctx)
	} else {
		a = g.slot()
		a.ctx = ctx
	}
	a.Tenant, a.Cell, a.Epoch = req.Tenant, g.cell, d.epoch
	a.gate, a.label = t, req.Label
	a.begun = time.Since(g.born)
	a.next = t.first
	if t.first != nil {
		t.first.prev = a
	}
	t.first = a
	t.inflight.Add(1)
	t.admitted.Add(1)
	t.mu.Unlock()
	return a, nil, nil
}

// open raises the fence for all who wait.
func (g *Gates) open(ctx context.Context, t *gate, o *opening, order FenceOrder) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	err := errors.New("cells: the opener did not return") // if it panics or ends its goroutine
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("cells: the opener panicked: %v", p)
		}
		if err != nil {
			g.cfg.log.Error("cells: a fence could not be opened before an admission",
				"tenant", order.Tenant, "cell", order.Cell, "epoch", order.Epoch, "err", err)
		}
		t.mu.Lock()
		o.err = err
		if err == nil {
			t.opened = max(t.opened, o.epoch)
		}
		if t.opening == o {
			t.opening = nil
		}
		t.mu.Unlock()
		close(o.done)
	}()
	err = g.cfg.opener(ctx, order)
}

// await returns the result of the opener's call, or the cause of ctx.
func (g *Gates) await(ctx context.Context, o *opening) error {
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// slab is memory for admissions that were not given out yet. A slot is used once:
// a second Done must never meet somebody else's admission.
type slab struct {
	slots [34]Admission // fills a size class of the allocator
	used  int
}

func (g *Gates) slot() *Admission {
	s, _ := g.slabs.Get().(*slab)
	if s == nil {
		s = &slab{}
	}
	a := &s.slots[s.used]
	s.used++
	if s.used < len(s.slots) {
		g.slabs.Put(s)
	}
	return a
}

// Done counts the admission out. It may be called again; only the first call
// counts. A stream's context ends.
func (a *Admission) Done() {
	t := a.gate
	t.mu.Lock()
	if a.done {
		t.mu.Unlock()
		return
	}
	a.done = true
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		t.first = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	}
	a.next, a.prev = nil, nil
	t.inflight.Add(-1)
	for i := 0; i < len(t.drains); i++ {
		d := t.drains[i]
		if a.Epoch > d.epoch {
			continue
		}
		if d.left--; d.left == 0 {
			t.drains = append(t.drains[:i:i], t.drains[i+1:]...)
			i--
			close(d.empty)
		}
	}
	long := a.long
	if long == nil {
		// Its neighbours in the slab must not keep the request alive.
		a.ctx, a.label = nil, ""
		t.mu.Unlock()
		return
	}
	if long.forcing != nil {
		long.forcing.Stop()
	}
	t.mu.Unlock()
	long.cancel(context.Canceled)
}

// Context returns the context to work with: the one that was given to Admit, with
// the admission in it. A stream's or a job's is cancelled when the gate closes, with
// an [*Answer] as its cause that wraps [ErrGateClosed]; a request's is not, it is
// waited for. After Done it is a cancelled context.
func (a *Admission) Context() context.Context {
	a.gate.mu.Lock()
	ctx := a.ctx
	a.gate.mu.Unlock()
	if ctx == nil {
		return doneContext
	}
	return ContextWithAdmission(ctx, a)
}

var doneContext = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// endLocked cancels a stream or a job because the gate closes. The caller holds
// gate.mu.
func (a *Admission) endLocked(cause *Answer) {
	a.long.ended = cause
	a.long.cancel(cause)
	a.forceLater()
}

// endedBy returns why the gate has cancelled the stream, or nil.
func (a *Admission) endedBy() *Answer {
	a.gate.mu.Lock()
	defer a.gate.mu.Unlock()
	if a.long == nil {
		return nil
	}
	return a.long.ended
}

// forceLater starts the grace. The caller holds gate.mu.
func (a *Admission) forceLater() {
	if l := a.long; l.force != nil && l.ended != nil && l.forcing == nil && !a.done {
		l.forcing = time.AfterFunc(a.gate.gates.cfg.grace, l.force)
	}
}

// onForce sets what is called when the stream has not ended a while after it was
// cancelled.
func (a *Admission) onForce(f func()) {
	a.gate.mu.Lock()
	defer a.gate.mu.Unlock()
	a.long.force = f
	a.forceLater()
}

// stream makes the admission a stream from now on: the context returned is
// cancelled when the gate closes, at once if it has. If it has not ended a while
// after that, force is called, unless it is nil.
func (a *Admission) stream(ctx context.Context, force func()) context.Context {
	t := a.gate
	t.mu.Lock()
	defer t.mu.Unlock()
	sctx, cancel := context.WithCancelCause(ctx)
	if a.done {
		cancel(context.Canceled)
		return sctx
	}
	if a.long == nil {
		a.long = &longAdmission{cancel: func(error) {}}
	}
	l := a.long
	if force != nil {
		l.force = force
	}
	if l.ended != nil {
		cancel(l.ended)
		a.forceLater()
		return sctx
	}
	before := l.cancel
	l.cancel = func(cause error) {
		cancel(cause)
		before(cause)
	}
	if cur := t.gates.router.view.find(a.Tenant); cur.state != 0 && (cur.revision <= t.closed || !cur.admits(a.Cell, a.Epoch)) {
		row := cur.route(a.Tenant)
		a.endLocked(t.gates.gateClosed(&row))
	}
	return sctx
}

// Refusal returns the answer for work that failed because the tenant's fence did
// not admit it: err wraps [ErrFenced], and nothing of it was written. It is MOVING or
// STALE_ROUTE, by what is known by now. For any other error it returns nil.
func (a *Admission) Refusal(err error) *Answer {
	if !errors.Is(err, ErrFenced) {
		return nil
	}
	g := a.gate.gates
	code := CodeStaleRoute
	if cur := g.router.view.find(a.Tenant); cur.moving() && cur.cell == g.cell {
		code = CodeMoving
	}
	return g.refuse(&AdmitRequest{Tenant: a.Tenant}, code, "the tenant left this epoch while the request ran; nothing was written", err)
}

type admissionKey struct{}

// forceKey is for what ends a request by force, a func().
type forceKey struct{}

// ContextWithAdmission returns a context that carries the admission.
func ContextWithAdmission(ctx context.Context, a *Admission) context.Context {
	return context.WithValue(ctx, admissionKey{}, a)
}

// AdmissionFromContext returns the admission that the work under ctx was begun by.
func AdmissionFromContext(ctx context.Context) (*Admission, bool) {
	a, ok := ctx.Value(admissionKey{}).(*Admission)
	return a, ok
}

// MarkStream says that the request under ctx goes on for long from now on. The
// context that it returns is cancelled, with a cause that wraps [ErrGateClosed],
// when the tenant's gate closes; the handler ends then. Without an admission it
// returns ctx. It may be called again.
func MarkStream(ctx context.Context) context.Context {
	a, ok := AdmissionFromContext(ctx)
	if !ok {
		return ctx
	}
	force, _ := ctx.Value(forceKey{}).(func())
	return a.stream(ctx, force)
}
