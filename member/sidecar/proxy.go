// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/headername"
)

// streamAfter is how long a gRPC call may go on behind the first message of its
// answer and still be taken for one that has only one.
const streamAfter = time.Second

// HeaderFenced is how a service says that its database refused the write of a
// request by the fence, and that nothing was written: a header of an answer with a
// status of 400 or more, or a trailer of a gRPC answer that is an error and nothing else.
const HeaderFenced = "Cell-Fenced"

// proxy passes admitted requests on to the service.
type proxy struct {
	cfg    *Config
	target *url.URL
	h1, h2 *http.Transport
	rp     *httputil.ReverseProxy
	log    *slog.Logger
}

func newProxy(cfg *Config, target *url.URL) *proxy {
	transport := func(set func(*http.Protocols)) *http.Transport {
		t := &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 256, IdleConnTimeout: cfg.IdleTimeout,
			DisableCompression: true, ExpectContinueTimeout: time.Second, MaxResponseHeaderBytes: 1 << 20,
			Protocols: new(http.Protocols),
		}
		set(t.Protocols)
		return t
	}
	p := &proxy{cfg: cfg, target: target, log: cfg.Log,
		h1: transport(func(p *http.Protocols) { p.SetHTTP1(true) }),
		h2: transport(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }),
	}
	p.rp = &httputil.ReverseProxy{
		Rewrite: p.rewrite, Transport: p, BufferPool: buffers, ModifyResponse: p.answered, ErrorHandler: p.failed,
		ErrorLog: log.New(io.Discard, "", 0), // broken copies; the request's end says the same
	}
	return p
}

func (p *proxy) close() {
	p.h1.CloseIdleConnections()
	p.h2.CloseIdleConnections()
}

type bufferPool struct{ pool sync.Pool }

var buffers = &bufferPool{pool: sync.Pool{New: func() any { return make([]byte, 32<<10) }}}

func (b *bufferPool) Get() []byte  { return b.pool.Get().([]byte) }
func (b *bufferPool) Put(x []byte) { b.pool.Put(x) } //nolint:staticcheck // the slice header is small

// call is what is known of one request on its way.
type call struct {
	in     *http.Request
	grpc   bool
	cancel context.CancelCauseFunc // ends the request to the service
	mark   sync.Once
	mu     sync.Mutex // guards ended and body
	ended  bool       // the gate has closed on it
	body   io.Closer  // the service's answer
}

type callKey struct{}

func callOf(ctx context.Context) *call { c, _ := ctx.Value(callKey{}).(*call); return c }

// ServeHTTP implements [http.Handler], behind the gate.
func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	c := &call{in: r, grpc: isGRPC(r), cancel: cancel}
	if cells.IsStream(r) || p.cfg.isStream(r.URL.Path) {
		c.stream()
	}
	if isWebSocket(r) {
		w = &upgradeWriter{w, c}
	}
	clean(r.Trailer)
	if r.Body != nil && r.Body != http.NoBody {
		body := io.ReadCloser(&requestBody{ReadCloser: r.Body, trailer: func() http.Header { return r.Trailer }})
		if c.grpc {
			body = &frames{ReadCloser: body, second: c.stream}
		}
		r2 := r.WithContext(context.WithValue(ctx, callKey{}, c))
		r2.Body = body
		p.rp.ServeHTTP(w, r2)
		return
	}
	p.rp.ServeHTTP(w, r.WithContext(context.WithValue(ctx, callKey{}, c)))
}

// stream says that the request goes on for long: the gate's closing ends it.
func (c *call) stream() {
	c.mark.Do(func() {
		ctx := cells.MarkStream(c.in.Context())
		context.AfterFunc(ctx, func() {
			cause := context.Cause(ctx)
			if !errors.Is(cause, cells.ErrGateClosed) {
				return // the client has gone, or the request has ended
			}
			c.mu.Lock()
			c.ended = true
			body := c.body
			c.mu.Unlock()
			c.cancel(cause)
			if body != nil {
				_ = body.Close()
			}
		})
	})
}

// gateClosed reports whether the gate has ended the request. What was a stream from
// the start is told by its own context, maybe sooner.
func (c *call) gateClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended || errors.Is(context.Cause(c.in.Context()), cells.ErrGateClosed)
}

func isGRPC(r *http.Request) bool {
	rest, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return r.ProtoMajor == 2 && ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// clean drops what only the platform may say.
func clean(h http.Header) {
	for name := range h {
		if headername.Platform(name) {
			delete(h, name)
		}
	}
}

// rewrite makes the request that the service sees.
func (p *proxy) rewrite(pr *httputil.ProxyRequest) {
	out, in := pr.Out, pr.In
	out.URL.Scheme, out.URL.Host = p.target.Scheme, p.target.Host
	out.URL.RawQuery, out.URL.ForceQuery = in.URL.RawQuery, in.URL.ForceQuery
	out.Host = in.Host
	clean(out.Header)
	for name, v := range in.Header { // the edge's own; Rewrite leaves them out
		if strings.HasPrefix(name, "X-Forwarded-") || name == "Forwarded" {
			out.Header[name] = v
		}
	}
	if a, ok := cells.AdmissionFromContext(in.Context()); ok {
		out.Header.Set(cells.HeaderTenant, string(a.Tenant))
		out.Header.Set(cells.HeaderEpoch, strconv.FormatUint(uint64(a.Epoch), 10))
		out.Header.Set(cells.HeaderCell, string(a.Cell))
	}
	out.Trailer = in.Trailer // filled in when the body has ended
}

// RoundTrip implements [http.RoundTripper].
func (p *proxy) RoundTrip(r *http.Request) (*http.Response, error) {
	if c := callOf(r.Context()); p.cfg.HTTP2 && r.Header.Get("Upgrade") == "" || c != nil && c.grpc {
		return p.h2.RoundTrip(r)
	}
	return p.h1.RoundTrip(r)
}

// errFenced: the service says that its database refused.
var errFenced = errors.New("sidecar: the service was refused by the fence")

// answered looks at the service's answer.
func (p *proxy) answered(resp *http.Response) error {
	c := callOf(resp.Request.Context())
	failed := resp.StatusCode >= 400
	if c != nil && c.grpc { // an answer that is only trailers
		s := resp.Header.Get("Grpc-Status")
		failed = s != "" && s != "0"
	}
	fenced := failed && resp.Header.Get(HeaderFenced) == "true"
	clean(resp.Header)
	clean(resp.Trailer)
	if fenced {
		return errFenced
	}
	if c == nil || resp.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	body := resp.Body
	if c.grpc {
		body = &frames{ReadCloser: body, second: c.stream, after: streamAfter}
	}
	resp.Body = &endable{ReadCloser: body, c: c, resp: resp}
	c.mu.Lock()
	c.body = resp.Body
	c.mu.Unlock()
	if isEventStream(resp.Header.Get("Content-Type")) {
		c.stream()
	}
	return nil
}

func isEventStream(ct string) bool {
	media, _, _ := strings.Cut(ct, ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// failed answers a request that could not be carried out.
func (p *proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	c := callOf(r.Context())
	var cause *cells.Answer
	var dial *net.OpError
	switch {
	case errors.Is(err, errFenced):
		a, ok := cells.AdmissionFromContext(r.Context())
		if !ok {
			break
		}
		cells.WriteProblem(w, r, a.Refusal(cells.ErrFenced))
		return
	case c != nil && c.gateClosed():
		if errors.As(context.Cause(r.Context()), &cause) && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
			cells.WriteProblem(w, r, cause) // it is asked for again where the tenant is
			return
		}
	case r.Context().Err() != nil:
		return // nobody is there to read
	case errors.As(err, &dial) && dial.Op == "dial":
		p.log.Warn("sidecar: the service cannot be reached", "upstream", p.target.Host, "err", err)
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the service does not take connections", RetryAfter: time.Second, Err: err})
		return
	}
	p.log.Warn("sidecar: no answer of the service", "path", r.URL.Path, "err", err)
	cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeCellUnreachable, Detail: "the service gave no answer; the request may have run", Err: err})
}
