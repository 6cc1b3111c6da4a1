// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"
)

// MiddlewareOption configures [HTTPMiddleware], [UnaryServerInterceptor] and
// [StreamServerInterceptor] alike.
type MiddlewareOption func(*middlewareConfig)

type middlewareConfig struct {
	unguarded func(path string) bool
	streams   func(*http.Request) bool
}

func middlewareOf(opts []MiddlewareOption) middlewareConfig {
	c := middlewareConfig{streams: IsStream}
	for _, o := range opts {
		o(&c)
	}
	return c
}

// WithUnguarded lets through, without an admission, what has no tenant: health
// probes, metrics. f gets the path of an HTTP request or the full method of a gRPC
// call, both of the form "/a/b". Nothing is let through without it.
func WithUnguarded(f func(path string) bool) MiddlewareOption {
	return func(c *middlewareConfig) { c.unguarded = f }
}

// WithStreams says which HTTP requests are streams from the start; [IsStream]
// without it. A handler can say so later with [MarkStream]. Over gRPC the method's
// descriptor says it.
func WithStreams(f func(*http.Request) bool) MiddlewareOption {
	return func(c *middlewareConfig) { c.streams = f }
}

// IsStream reports whether a request asks for something that goes on: server-sent
// events, or another protocol (a WebSocket).
func IsStream(r *http.Request) bool {
	if r.Header.Get("Upgrade") != "" || r.Method == http.MethodConnect {
		return true
	}
	for _, v := range r.Header.Values("Accept") {
		if strings.Contains(strings.ToLower(v), "text/event-stream") {
			return true
		}
	}
	return false
}

// HTTPMiddleware returns the middleware that admits each request before its
// handler runs, counts it as in flight while it does, and answers refusals with
// [WriteProblem]. The handler's context carries the [Admission]. Answers carry
// Cell-Cell and Cell-Epoch, and never the service's own Cell-Answer.
//
// A hijacked connection is in flight until it is closed. A stream whose gate has
// closed has the grace of [WithStreamGrace] to end; then a hijacked connection is
// closed, a WebSocket with status 1012 (service restart), and reading the request's
// body fails. A response that the gate has ended has the trailer Cell-Stream-End, so
// that a client can tell it from a whole one.
//
// router is where gates decides from; a nil one stands for it. Without gates, in a
// process that runs without cells, requests pass as they are.
func HTTPMiddleware(router *Router, gates *Gates, opts ...MiddlewareOption) func(http.Handler) http.Handler {
	if gates == nil {
		return func(next http.Handler) http.Handler { return next }
	}
	gates.checkRouter(router)
	cfg := middlewareOf(opts)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if cfg.unguarded != nil && cfg.unguarded(r.URL.Path) {
				next.ServeHTTP(&unguardedWriter{responseWriter: responseWriter{w: w}}, r)
				return
			}
			gates.serveHTTP(w, r, next, cfg.streams(r))
		})
	}
}

func (g *Gates) checkRouter(router *Router) {
	if router != nil && router != g.router {
		g.cfg.log.Error("cells: a middleware was given another router than its gates decide by; the gates' is used")
	}
}

func (g *Gates) serveHTTP(w http.ResponseWriter, r *http.Request, next http.Handler, stream bool) {
	begun := time.Now()
	req, bad := admitRequestOf(func(name string) []string { return r.Header[name] })
	if bad != nil {
		g.refuseHTTP(w, r, bad, begun)
		return
	}
	req.Stream, req.Label = stream, r.URL.Path
	a, err := g.Admit(r.Context(), req)
	if err != nil {
		g.refuseHTTP(w, r, AnswerOf(err), begun)
		return
	}
	rw := &admittedWriter{responseWriter: responseWriter{w: w}, admission: a, cell: string(g.cell), epoch: strconv.FormatUint(uint64(a.Epoch), 10),
		websocket: stream && strings.EqualFold(r.Header.Get("Upgrade"), "websocket")}
	rw.prepare = rw.stamp
	ended := false
	defer func() {
		rw.finish()
		g.servedHTTP(r, rw, stream, begun, !ended)
	}()
	ctx := &requestContext{Context: r.Context(), writer: rw}
	if stream {
		a.onForce(rw.forceEnd)
		ctx.Context = a.Context()
	}
	next.ServeHTTP(rw.forHandler(), r.WithContext(ctx))
	ended = true
}

// requestContext carries a request's admission, and what ends the request by force.
type requestContext struct {
	context.Context
	writer *admittedWriter
}

func (c *requestContext) Value(key any) any {
	switch key.(type) {
	case admissionKey:
		return c.writer.admission
	case forceKey:
		return c.writer.forceEnd
	}
	return c.Context.Value(key)
}

func (g *Gates) refuseHTTP(w http.ResponseWriter, r *http.Request, a *Answer, begun time.Time) {
	w.Header().Set(HeaderCell, string(g.cell))
	WriteProblem(w, r, a)
	if g.cfg.served != nil {
		g.cfg.served(Served{Answer: a.Code, Gone: r.Context().Err() != nil, Took: time.Since(begun)})
	}
}

// admitRequestOf reads what HTTP headers and gRPC metadata have in common. get
// takes the canonical name of a header.
func admitRequestOf(get func(name string) []string) (AdmitRequest, *Answer) {
	var req AdmitRequest
	bad := func(detail string) (AdmitRequest, *Answer) {
		return req, &Answer{Code: CodeBadRequest, Detail: detail}
	}
	for _, name := range [...]string{HeaderTenant, HeaderEpoch, HeaderAdmission, HeaderCell, HeaderAnswer, HeaderRevision, HeaderAge} {
		v := get(textproto.CanonicalMIMEHeaderKey(name))
		if len(v) == 0 {
			continue
		}
		if len(v) > 1 {
			return bad("the header " + name + " is there more than once")
		}
		switch name {
		case HeaderTenant:
			req.Tenant = TenantID(v[0])
		case HeaderAdmission:
			req.Token = v[0]
		case HeaderEpoch:
			n, err := strconv.ParseUint(v[0], 10, 64)
			if err != nil || strconv.FormatUint(n, 10) != v[0] {
				return bad("the header " + name + " is not a number")
			}
			req.Epoch, req.HasEpoch = Epoch(n), true
		}
	}
	return req, nil
}
