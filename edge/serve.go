// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"io"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/rules"
)

// buffers lends what bodies are copied through.
type buffers struct{ pool sync.Pool }

var copyBuffers = &buffers{pool: sync.Pool{New: func() any { return make([]byte, 32<<10) }}}

func (b *buffers) Get() []byte  { return b.pool.Get().([]byte) }
func (b *buffers) Put(p []byte) { b.pool.Put(p) } //nolint:staticcheck // the slice header is small

// serve is the public handler.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.active.Add(1)
	x := &exchange{s: s, in: r, start: time.Now(), client: forward.Proxies(s.cfg.TrustedProxies).See(r)}
	x.rec = recorder{w: w, http1: r.ProtoMajor == 1}
	defer func() {
		s.active.Add(-1)
		x.finish(recover())
	}()
	if r.ProtoMajor == 1 && r.ContentLength != 0 {
		// The answer may come while the client is still sending.
		_ = http.NewResponseController(w).EnableFullDuplex()
	}
	switch r.URL.Path {
	case "/livez", "/readyz":
		x.outcome, x.rule = outcomeOwn, string(rules.RuleOwn)
		s.health(&x.rec, r, false)
		return
	}
	if x.own() {
		x.linger()
		return
	}
	if a := x.prepare(); a != nil {
		x.refuse(a)
	} else {
		x.proxy()
	}
	x.linger()
}

// prepare finds the tenant and checks what can be checked before anything is sent.
func (x *exchange) prepare() *cells.Answer {
	r := x.in
	raw := r.URL.EscapedPath()
	switch {
	case forward.Reserved(raw):
		return &cells.Answer{Code: cells.CodeNotServed, Detail: "paths under /cells/ are the platform's"}
	case r.Method == http.MethodConnect:
		return &cells.Answer{Code: cells.CodeNotServed, Detail: "CONNECT is not served"}
	}
	if x.s.deploy != nil {
		if a := x.decide(); a != nil {
			return a
		}
		return x.classify()
	}
	found, err := x.s.list.Resolve(r)
	if err != nil {
		a := *cells.AnswerOf(err) // extractors share theirs
		return &a
	}
	x.found, x.tenant = found, found.Tenant
	if found.StripPath != "" && forward.Reserved(strings.TrimPrefix(raw, found.StripPath)) {
		return &cells.Answer{Code: cells.CodeNotServed, Tenant: x.tenant, Detail: "paths under /cells/ are the platform's"}
	}
	if found.Kind == "path" && forward.Climbs(raw) {
		return &cells.Answer{Code: cells.CodeBadRequest, Tenant: x.tenant, Detail: "the path has dot segments, which would leave its tenant's prefix"}
	}
	return x.classify()
}

// classify looks at how the request is to be sent.
func (x *exchange) classify() *cells.Answer {
	r := x.in
	if limit := x.s.cfg.MaxBody; limit > 0 && r.ContentLength > limit {
		return &cells.Answer{Code: cells.CodeTooLarge, Tenant: x.tenant}
	}
	x.grpc = isGRPC(r)
	x.http2 = x.grpc || x.s.cfg.HTTP2ToCells && r.ProtoMajor == 2
	x.upgrade = isWebSocket(r)
	return nil
}

// isWebSocket reports whether the request asks for a WebSocket and nothing else.
func isWebSocket(r *http.Request) bool {
	up := r.Header["Upgrade"]
	return r.ProtoMajor == 1 && r.Method == http.MethodGet && len(up) == 1 && strings.EqualFold(strings.Trim(up[0], " \t"), "websocket")
}

// isGRPC reports whether the request is a gRPC call.
func isGRPC(r *http.Request) bool {
	if r.ProtoMajor != 2 {
		return false
	}
	ct := r.Header.Get("Content-Type")
	rest, ok := strings.CutPrefix(ct, "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// proxy forwards the request and copies the answer.
func (x *exchange) proxy() {
	r := x.in
	if x.upgrade {
		// Nothing else ends an upgraded connection when the server does.
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(x.s.streams, func() { cancel(errEnding) })()
		r = r.WithContext(ctx)
		x.in = r
	}
	if r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		src := r.Body
		if limit := x.s.cfg.MaxBody; limit > 0 {
			src = http.MaxBytesReader(x.rec.w, src, limit)
		}
		limit := x.s.cfg.ReplayBytes
		if x.grpc {
			limit = x.s.cfg.ReplayGRPCBytes
		}
		x.ask = x.to == nil && !x.grpc && (r.ContentLength < 0 || r.ContentLength > int64(limit)) && r.Header.Get("Expect") == ""
		forward.CleanRequest(r.Trailer)
		x.body = forward.NewBody(src, r.ContentLength, limit, x.s.budget, func() { forward.CleanRequest(r.Trailer) })
		x.rec.body = x.body
		defer x.endBody()
		// The proxy closes the body of its request; linger still reads the client's.
		r = r.WithContext(r.Context())
		r.Body = io.NopCloser(src)
	}
	x.rp = httputil.ReverseProxy{
		Rewrite: x.rewrite, Transport: x, ErrorHandler: x.failed, BufferPool: copyBuffers, FlushInterval: -1, ErrorLog: x.s.debug,
	}
	x.rp.ServeHTTP(&x.rec, r)
}

// lastBytes is how long a client may go on sending a body that nobody reads, so
// that it sees the answer before the connection is closed.
const lastBytes = 2 * time.Second

// endBody ends the reading of the request's body.
func (x *exchange) endBody() {
	if x.body.Close() && x.in.ProtoMajor == 1 {
		// net/http waits for the read that is under way before it closes the connection.
		_ = http.NewResponseController(x.rec.w).SetReadDeadline(time.Now().Add(lastBytes))
	}
}

// rewrite makes the request that goes to the cell, apart from what depends on the
// route.
func (x *exchange) rewrite(pr *httputil.ProxyRequest) {
	out, in := pr.Out, pr.In
	forward.CleanRequest(out.Header)
	if !x.upgrade {
		// The proxy has put it back. What follows on an upgraded connection is not looked
		// at: by h2c a client would send requests with whatever headers and paths.
		for _, name := range []string{"Connection", "Upgrade", "Http2-Settings"} {
			delete(out.Header, name)
		}
	}
	if h := x.found.StripHeader; h != "" {
		delete(out.Header, h)
	}
	forward.SetForwarded(out.Header, in, x.client, x.found.StripPath)
	forward.SetPath(out.URL, in.URL, in.RequestURI, x.found.StripPath)
	if x.ask {
		out.Header.Set("Expect", "100-continue")
	}
	// The same map: the values arrive in it with the end of the body.
	out.Trailer = in.Trailer
}

// failed writes the answer to a request that could not be carried out.
func (x *exchange) failed(_ http.ResponseWriter, _ *http.Request, err error) {
	a := cells.AnswerOf(err)
	switch {
	case a != nil:
		x.refuse(a)
	case x.in.Context().Err() != nil:
		x.outcome = outcomeGone
		if x.rec.status == 0 {
			// Nobody reads it, unless the server itself is ending.
			x.refuse(&cells.Answer{Code: cells.CodeCellUnreachable, Tenant: x.tenant, Cell: x.cell, Detail: "the request was given up", Err: err})
			x.outcome = outcomeGone
		}
	case x.sent > 0:
		x.refuse(&cells.Answer{Code: cells.CodeCellUnreachable, Tenant: x.tenant, Cell: x.cell, Detail: "the answer could not be passed on; the request may have run", Err: err})
	default:
		x.refuse(&cells.Answer{Code: cells.CodeBadRequest, Tenant: x.tenant, Detail: "the request could not be forwarded", Err: err})
	}
}

// refuse answers in the edge's own name.
func (x *exchange) refuse(a *cells.Answer) {
	if a.Revision == 0 {
		d := x.s.routes.Lookup(x.tenant)
		a.Revision, a.Age = d.Revision, d.Age
	}
	x.outcome, x.cause = string(a.Code), a
	if a.Code == cells.CodeUnknownIssuer && !x.grpc {
		x.rec.Header().Set("WWW-Authenticate", `Bearer error="invalid_token"`)
	}
	cells.WriteProblem(&x.rec, x.in, a)
}

// lingerBytes bounds what is read behind an answer.
const lingerBytes = 64 << 20

// linger reads on for a moment when the client has its answer and is still sending,
// whoever has refused it: a connection that is closed on it would take the answer
// along. net/http does so by itself, but not for clients that want no other request on
// the connection.
func (x *exchange) linger() {
	r := x.in
	if r.ProtoMajor != 1 || r.ContentLength == 0 || r.Body == nil || x.body != nil && x.body.Finished() {
		return
	}
	rc := http.NewResponseController(x.rec.w)
	if rc.Flush() != nil || rc.SetReadDeadline(time.Now().Add(lastBytes)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, r.Body, lingerBytes)
}

// recorder notes what is answered.
type recorder struct {
	w      http.ResponseWriter
	http1  bool
	body   *forward.Body
	status int
	bytes  int64
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.w }
func (r *recorder) Header() http.Header         { return r.w.Header() }

func (r *recorder) WriteHeader(status int) {
	if r.status < 200 {
		r.status = status
	}
	if status >= 200 && r.http1 && r.body != nil && !r.body.Finished() {
		// What is left of the request must never be taken for the next one.
		r.w.Header().Set("Connection", "close")
	}
	r.w.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	n, err := r.w.Write(p)
	r.bytes += int64(n)
	return n, err
}
