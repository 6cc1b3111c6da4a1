// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/hold"
	"github.com/cloister-dev/cloister/edge/rules"
)

// Outcomes that are no codes.
const (
	outcomeForwarded = "forwarded" // the service answered
	outcomeGone      = "client_gone"
	outcomeOwn       = "own" // answered by this process
	outcomeCut       = "cut" // the answer broke off
)

// exchange is one request on its way. It belongs to the request's goroutine.
type exchange struct {
	s       *Server
	in      *http.Request
	rec     recorder
	start   time.Time
	client  forward.Client
	found   extract.Found
	to      *rules.Decision // where it goes, when whole deployments are the cells
	tenant  cells.TenantID
	grpc    bool
	http2   bool
	upgrade bool
	stream  bool // the answer is one
	ask     bool // the body waits until the cell wants it
	body    *forward.Body
	rp      httputil.ReverseProxy

	// What happened so far.
	cell      cells.CellID
	epoch     cells.Epoch
	rule      string
	outcome   string
	cause     *cells.Answer
	sent      int // attempts that reached a process
	refusals  int
	refreshed bool // the table was asked about a tenant without a route
	tried     []string
	failures  int       // waits for a process
	connectBy time.Time // when to give the cell up
	lastError error     // of the last attempt to connect

	// The move that the request has waited for, and whether it still does.
	cutBase cells.Epoch
	cutMove cells.MoveID
	inCut   bool

	ticket   *hold.Ticket
	holdBy   time.Time     // when all waiting must end; set by the first wait
	heldFor  time.Duration // so far
	headAt   time.Time     // when the head of a gRPC answer came
	informed *informer
}

// RoundTrip implements [http.RoundTripper] for the one request: it returns the
// answer of a service, or an error, an [*cells.Answer] for what the client gets.
// Refusals by gates are dealt with here as long as that is possible.
func (x *exchange) RoundTrip(out *http.Request) (*http.Response, error) {
	x.informed = &informer{w: &x.rec}
	defer x.informed.stop()
	defer x.leave()
	for {
		d, err := x.route()
		if err != nil {
			return nil, err
		}
		resp, err := x.attempt(out, d)
		var unsent *forward.NotSentError
		switch {
		case errors.As(err, &unsent):
			if err := x.awaitProcess(d, unsent); err != nil {
				return nil, err
			}
		case err != nil:
			return nil, x.broken(d, err)
		default:
			x.s.down(d.Cell).Store(0)
			if x.to != nil {
				return x.accept(resp, nil), nil // whatever a deployment says is for the client
			}
			a, given := refusal(resp)
			if !given || a.Code != cells.CodeBackendUnavailable {
				x.s.storeDown(d.Cell).Store(0)
			}
			if !given || !x.repeatable(a) {
				return x.accept(resp, a), nil
			}
			discard(resp)
			if err := x.repair(d, a); err != nil {
				return nil, err
			}
		}
	}
}

// route waits until the tenant's route is one that can be tried.
func (x *exchange) route() (cells.Decision, error) {
	if x.to != nil {
		x.leave()
		return cells.Decision{Cell: x.to.Cell, Age: x.s.deploy.Table.Age()}, nil
	}
	for {
		d := x.s.routes.Lookup(x.tenant)
		a := d.Refusal()
		if a == nil {
			x.leave()
			if x.cell != d.Cell {
				x.tried = x.tried[:0]
			}
			x.cell, x.epoch, x.rule, x.inCut = d.Cell, d.Epoch, d.Rule, false
			return d, nil
		}
		switch a.Code {
		case cells.CodeMoving:
			x.waitsForCut(d)
			if err := x.enter(); err != nil {
				return d, err
			}
			ctx, cancel := context.WithDeadlineCause(x.in.Context(), x.holdBy, errHeld)
			_, err := x.s.routes.Wait(ctx, x.tenant, d.Route.Revision)
			cancel()
			if err != nil {
				return d, x.waitEnded(err, a)
			}
		case cells.CodeUnknownTenant:
			if x.refreshed {
				return d, a
			}
			if !x.s.unknown.Allow() {
				if x.s.routes.Status().Stale {
					return d, x.cannotAsk(d, nil)
				}
				return d, a
			}
			// It may have been placed a moment ago.
			x.refreshed = true
			ctx, cancel := context.WithTimeout(x.in.Context(), askFor)
			_, err := x.s.routes.Refresh(ctx, x.tenant)
			cancel()
			if err != nil {
				if errors.Is(err, cells.ErrNotFound) {
					return d, a
				}
				if x.in.Context().Err() != nil {
					return d, err
				}
				return d, x.cannotAsk(d, err)
			}
		default:
			return d, a
		}
	}
}

// askFor is how long the directory may take to say whether it knows a tenant.
const askFor = 2 * time.Second

// cannotAsk is the answer for a tenant that is not known here while the directory,
// which might know it, cannot be asked.
func (x *exchange) cannotAsk(d cells.Decision, err error) *cells.Answer {
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Tenant: x.tenant, Revision: d.Revision, Age: d.Age, RetryAfter: time.Second,
		Detail: "this tenant is not known here, and the directory cannot be asked", Err: err}
}

// errHeld is the cause of waits that took too long.
var errHeld = errors.New("edge: held for too long")

// waitEnded turns the end of a wait into what the client gets: a, unless it has
// gone or there is something better to say.
func (x *exchange) waitEnded(err error, a *cells.Answer) error {
	switch {
	case x.in.Context().Err() != nil:
		return context.Cause(x.in.Context())
	case errors.Is(err, errHeld), errors.Is(err, context.DeadlineExceeded), errors.Is(err, cells.ErrClosed):
		a.Err = err
		if a.RetryAfter == 0 {
			a.RetryAfter = time.Second
		}
		return a
	}
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Tenant: x.tenant, Cell: x.cell, RetryAfter: time.Second, Err: err}
}

// enter takes a place in the room, unless the request has one.
func (x *exchange) enter() error {
	if x.ticket != nil {
		return nil
	}
	var bytes int64
	if x.body != nil {
		bytes = x.body.Recorded()
	}
	t, err := x.s.room.Enter(x.holder(), bytes)
	if err != nil {
		return &cells.Answer{Code: cells.CodeOverloaded, Tenant: x.tenant, Cell: x.cell, RetryAfter: time.Second, Err: err}
	}
	x.ticket = t
	if x.holdBy.IsZero() {
		x.holdBy = t.Deadline()
	}
	return nil
}

// holder is whose share of the room the request takes: its tenant's, or its cell's.
func (x *exchange) holder() cells.TenantID {
	if x.to != nil {
		return cells.TenantID(x.to.Cell)
	}
	return x.tenant
}

// upstreams are the processes that the request can be sent to.
func (x *exchange) upstreams(cell cells.CellID) []string {
	if x.to != nil {
		return []string{x.to.Upstream}
	}
	return x.s.topo.Upstreams(cell)
}

// leave gives the place back.
func (x *exchange) leave() {
	if x.ticket != nil {
		x.heldFor += x.ticket.Leave()
		x.ticket = nil
	}
}

// errNoProcess: the topology names no process of the cell, or none that was not
// tried just now.
var errNoProcess = errors.New("no process of the cell is ready")

// attempt sends the request to one process of the cell.
func (x *exchange) attempt(out *http.Request, d cells.Decision) (*http.Response, error) {
	base, ok := x.s.pools.Pick(d.Cell, x.upstreams(d.Cell), x.tried)
	if !ok {
		err := x.lastError
		if err == nil {
			err = errNoProcess
		}
		return nil, &forward.NotSentError{Upstream: string(d.Cell), Err: err}
	}
	if x.sent+x.failures+x.refusals+len(x.tried) > 0 {
		// An attempt that was given up may still be reading the old one.
		out = out.Clone(out.Context())
		out.Trailer = x.in.Trailer
	}
	if x.to == nil {
		said := x.s.tokens.get(x.tenant, d.Cell, d.Epoch)
		out.Header[cells.HeaderTenant], out.Header[cells.HeaderEpoch] = said.tenant, said.number
		if said.mint != nil {
			out.Header[cells.HeaderAdmission] = said.mint
		}
	}
	call := forward.Call{Request: out, HTTP2: x.http2, Informational: x.informed.inform}
	if x.body != nil {
		call.Body = x.body.Attempt()
		if call.Body == nil {
			return nil, errBodyLost
		}
		call.Again = x.body.Attempt
	}
	resp, err := x.s.pools.Send(x.in.Context(), d.Cell, base, call)
	var unsent *forward.NotSentError
	if errors.As(err, &unsent) {
		x.tried, x.lastError = append(x.tried, base), unsent.Err
		return nil, err
	}
	x.sent++
	return resp, err
}

// errBodyLost cannot happen while attempts follow refusals only.
var errBodyLost = errors.New("edge: the body cannot be sent again")

// refusal returns the answer of a gate.
func refusal(resp *http.Response) (*cells.Answer, bool) {
	if len(resp.Header[cells.HeaderAnswer]) == 0 {
		return nil, false
	}
	return cells.ReadProblem(resp)
}

// repeatable reports whether the request can be sent again after the gate's
// answer: it is one of those that a newer route or some time repairs, and the
// body is still whole.
func (x *exchange) repeatable(a *cells.Answer) bool {
	switch a.Code {
	case cells.CodeMoving, cells.CodeStaleRoute, cells.CodeWrongCell, cells.CodeBackendUnavailable, cells.CodeBadRequest:
	default:
		return false
	}
	if x.body != nil && !x.body.Replayable() {
		x.s.metrics.unrepeatable.Inc()
		return false
	}
	return true
}

// discard reads the rest of a refusal, so that its connection can be used again.
func discard(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10)
	_ = resp.Body.Close()
}

// repair brings the view up to date after a refusal by a gate, and waits if that
// brings nothing new. It returns nil when the request may be tried again.
func (x *exchange) repair(d cells.Decision, a *cells.Answer) error {
	x.refusals++
	x.s.metrics.retries.WithLabelValues(string(a.Code)).Inc()
	final := &cells.Answer{
		Code: cells.CodeMoving, Tenant: x.tenant, Cell: d.Cell, Revision: max(a.Revision, d.Revision), Age: a.Age, RetryAfter: time.Second,
		Detail: "the cell and the route did not agree in time", Err: a,
	}
	switch a.Code {
	case cells.CodeBadRequest:
		// What a gate calls malformed is what this edge has sent: the token is not of this
		// cell. Its address may have passed to another one, or the keys differ.
		x.s.log.Error("edge: a process refused the admission token: another cell's address, or another key",
			"cell", d.Cell, "tenant", x.tenant, "epoch", d.Epoch, "detail", a.Detail)
		final = x.unreachable(d, "the cell's process does not take this edge's admissions", a)
	case cells.CodeBackendUnavailable:
		a.RetryAfter = max(a.RetryAfter, time.Second)
		final = a
		// As with a cell that takes no connections: once it has lasted, it is told at once.
		now, down := time.Now(), x.s.storeDown(d.Cell)
		down.CompareAndSwap(0, now.UnixNano())
		since := time.Unix(0, down.Load())
		if x.start.Before(since) {
			since = x.start
		}
		if now.Sub(since) >= x.s.cfg.ConnectWait {
			return final
		}
	}
	if a.Code == cells.CodeMoving {
		x.waitsForCut(d)
	}
	if x.refusals > x.s.cfg.MaxRefusals {
		return final
	}
	if err := x.enter(); err != nil {
		return err
	}
	ctx, cancel := context.WithDeadlineCause(x.in.Context(), x.holdBy, errHeld)
	defer cancel()
	if a.Code != cells.CodeBadRequest {
		if _, err := x.s.routes.Refresh(ctx, x.tenant); err != nil && !errors.Is(err, cells.ErrNotFound) {
			if ctx.Err() != nil {
				return x.waitEnded(context.Cause(ctx), final)
			}
			x.s.log.Debug("edge: the route could not be read again", "tenant", x.tenant, "err", err)
		}
		now := x.s.routes.Lookup(x.tenant)
		if now.Cell != d.Cell || now.Epoch != d.Epoch || now.Route.State != d.Route.State {
			return nil
		}
		d = now
	}
	// Nothing new: the gate is ahead of the table or behind it. Either ends soon.
	pause := min(5*time.Millisecond<<min(x.refusals-1, 10), 500*time.Millisecond)
	wait, stop := context.WithTimeoutCause(ctx, pause, errPause)
	defer stop()
	if _, err := x.s.routes.Wait(wait, x.tenant, d.Route.Revision); err != nil && ctx.Err() != nil {
		return x.waitEnded(context.Cause(ctx), final)
	} else if err != nil && !errors.Is(err, errPause) {
		return x.waitEnded(err, final)
	}
	return nil
}

var errPause = errors.New("edge: pause")

// awaitProcess is called when nothing was sent. It returns nil when another
// process, or the same after a while, may be tried.
func (x *exchange) awaitProcess(d cells.Decision, unsent *forward.NotSentError) error {
	ctx := x.in.Context()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	changed := x.s.topo.Changed()
	if _, ok := x.s.pools.Pick(d.Cell, x.upstreams(d.Cell), x.tried); ok {
		x.s.metrics.retries.WithLabelValues("connect").Inc()
		return nil
	}
	now := time.Now()
	down := x.s.down(d.Cell)
	down.CompareAndSwap(0, now.UnixNano())
	if x.connectBy.IsZero() {
		x.connectBy = time.Unix(0, down.Load()).Add(x.s.cfg.ConnectWait)
	}
	if !now.Before(x.connectBy) {
		return x.unreachable(d, "no process of the cell takes connections", unsent)
	}
	if err := x.enter(); err != nil {
		return err
	}
	by := x.connectBy
	if by.After(x.holdBy) {
		by = x.holdBy
	}
	x.failures++
	x.s.metrics.retries.WithLabelValues("connect").Inc()
	pause := time.NewTimer(min(10*time.Millisecond<<min(x.failures-1, 6), 250*time.Millisecond, max(0, by.Sub(now))))
	defer pause.Stop()
	select {
	case <-changed:
	case <-pause.C:
		if !time.Now().Before(by) && by.Equal(x.holdBy) {
			return x.unreachable(d, "no process of the cell takes connections", unsent)
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	x.tried = x.tried[:0]
	return nil
}

func (x *exchange) unreachable(d cells.Decision, detail string, err error) *cells.Answer {
	return &cells.Answer{Code: cells.CodeCellUnreachable, Tenant: x.tenant, Cell: d.Cell, Detail: detail, Revision: d.Revision, Age: d.Age, RetryAfter: time.Second, Err: err}
}

// broken turns the failure of a request that was sent, in part at least, into what
// the client gets. It may have run: it is never sent again.
func (x *exchange) broken(d cells.Decision, err error) error {
	var tooLarge *http.MaxBytesError
	var bodyErr error
	if x.body != nil {
		bodyErr = x.body.Err()
	}
	switch {
	case errors.As(bodyErr, &tooLarge):
		return &cells.Answer{Code: cells.CodeTooLarge, Tenant: x.tenant, Revision: d.Revision, Age: d.Age, Err: bodyErr}
	case x.in.Context().Err() != nil:
		return context.Cause(x.in.Context())
	case bodyErr != nil && !errors.Is(bodyErr, io.EOF):
		return &cells.Answer{Code: cells.CodeBadRequest, Tenant: x.tenant, Revision: d.Revision, Age: d.Age, Detail: "the body could not be read", Err: bodyErr}
	case forward.IsTimeout(err):
		return &cells.Answer{Code: cells.CodeBackendTimeout, Tenant: x.tenant, Cell: d.Cell, Revision: d.Revision, Age: d.Age, Detail: "the request may have run", Err: err}
	}
	return &cells.Answer{Code: cells.CodeCellUnreachable, Tenant: x.tenant, Cell: d.Cell, Revision: d.Revision, Age: d.Age,
		Detail: "the connection broke before there was an answer; the request may have run", Err: err}
}

// accept makes the answer the one that the client gets.
func (x *exchange) accept(resp *http.Response, gate *cells.Answer) *http.Response {
	if x.body != nil {
		x.body.Commit()
	}
	forward.CleanAnswer(resp.Header)
	if resp.ContentLength == 0 {
		// A flush before the end would part the end from the headers: over gRPC that is no
		// longer an answer that is only trailers.
		x.rp.FlushInterval = 0
	}
	x.outcome = outcomeForwarded
	if gate != nil {
		x.outcome, x.cause = string(gate.Code), gate
	}
	switch {
	case resp.StatusCode == http.StatusSwitchingProtocols:
		x.rec.status = resp.StatusCode // written past the recorder
	case isEventStream(resp.Header):
		x.stream = true
		resp.Body = endable(x.s.streams, resp, nil)
	case x.grpc:
		x.headAt = time.Now()
		resp.Body = endable(x.s.calls, resp, http.Header{"Grpc-Status": {"14"}, "Grpc-Message": {"the edge is shutting down"}})
	}
	return resp
}

// finish is called when the request has ended, with what was recovered.
func (x *exchange) finish(panicked any) {
	if panicked != nil && x.outcome == outcomeForwarded {
		x.outcome = outcomeCut
		if x.in.Context().Err() != nil {
			x.outcome = outcomeGone
		}
	}
	x.s.metrics.observe(x)
	x.count()
	x.witness()
	n := x.s.cfg.AccessLog
	if n > 0 && (x.s.seq.Add(1)%uint64(n) == 0 || x.cause != nil || panicked != nil) {
		x.log()
	}
	if panicked != nil {
		panic(panicked)
	}
}

func (x *exchange) log() {
	level, attrs := slog.LevelInfo, []slog.Attr{
		slog.String("method", x.in.Method), slog.String("host", x.in.Host), slog.String("path", x.in.URL.EscapedPath()),
		slog.String("proto", x.in.Proto), slog.String("client", x.in.RemoteAddr), slog.String("for", x.client.Addr), slog.String("tenant", string(x.tenant)),
		slog.String("cell", string(x.cell)), slog.Uint64("epoch", uint64(x.epoch)), slog.Int("status", x.rec.status),
		slog.String("outcome", x.outcome), slog.Int64("bytes", x.rec.bytes), slog.Duration("took", time.Since(x.start)),
	}
	if x.heldFor > 0 {
		attrs = append(attrs, slog.Duration("held", x.heldFor))
	}
	if x.sent > 1 || x.refusals > 0 || x.failures > 0 {
		attrs = append(attrs, slog.Int("sent", x.sent), slog.Int("refusals", x.refusals), slog.Int("connect_waits", x.failures))
	}
	if x.cause != nil && x.cause.Err != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.String("err", x.cause.Err.Error()))
	}
	x.s.log.LogAttrs(context.WithoutCancel(x.in.Context()), level, "edge: request", attrs...)
}

// informer passes 1xx answers on until the final one comes.
type informer struct {
	mu sync.Mutex // guards w
	w  http.ResponseWriter
}

func (i *informer) inform(code int, h http.Header) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.w == nil {
		return
	}
	to := i.w.Header()
	for k, v := range h {
		to[k] = append([]string(nil), v...)
	}
	forward.CleanAnswer(to)
	i.w.WriteHeader(code)
	clear(to)
}

func (i *informer) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.w = nil
}
