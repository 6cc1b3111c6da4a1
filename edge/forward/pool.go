// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Options configure [NewPools]. A zero field takes its default.
type Options struct {
	// DialTimeout bounds a connection's making, TLS included; default 2 s.
	DialTimeout time.Duration
	// ExpectTimeout is how long a body waits for the process to ask for it when the
	// request says Expect: 100-continue; default 1 s.
	ExpectTimeout time.Duration
	// AnswerTimeout bounds the wait for an answer's headers once the request was
	// sent, gRPC excepted; default 5 min.
	AnswerTimeout time.Duration
	// IdleTimeout closes connections that were not used; default 90 s.
	IdleTimeout time.Duration
	// MaxIdle is the number of idle connections kept for each process; default 256.
	MaxIdle int
	// MaxAnswerHeader bounds an answer's headers, in bytes; default 1 MiB.
	MaxAnswerHeader int64
	// TLS returns what to reach an https process of the cell with; it is asked for
	// each connection. nil refuses https.
	TLS func(cell cells.CellID) *tls.Config
}

// NotSentError says that nothing of the request reached any process: it may be
// sent to another one.
type NotSentError struct {
	Upstream string
	Err      error
}

// Error implements error.
func (e *NotSentError) Error() string {
	return "forward: " + e.Upstream + ": not sent: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *NotSentError) Unwrap() error { return e.Err }

// IsTimeout reports whether the error is the end of a time bound.
func IsTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// Pools keeps the connections to all cells. Safe for concurrent use.
type Pools struct {
	opts Options
	mu   sync.Mutex // guards the writing of cells
	// cells is replaced, never changed in place.
	cells atomic.Pointer[map[cells.CellID]*pool]
}

// NewPools returns empty pools. Close them.
func NewPools(o Options) *Pools {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.DialTimeout, 2*time.Second)
	def(&o.ExpectTimeout, time.Second)
	def(&o.AnswerTimeout, 5*time.Minute)
	def(&o.IdleTimeout, 90*time.Second)
	if o.MaxIdle <= 0 {
		o.MaxIdle = 256
	}
	if o.MaxAnswerHeader <= 0 {
		o.MaxAnswerHeader = 1 << 20
	}
	p := &Pools{opts: o}
	p.cells.Store(&map[cells.CellID]*pool{})
	return p
}

// Close closes idle connections; those in use close when they end.
func (p *Pools) Close() {
	for _, c := range *p.cells.Load() {
		c.close()
	}
}

// Retain drops the pools of cells that keep does not name.
func (p *Pools) Retain(keep func(cells.CellID) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := map[cells.CellID]*pool{}
	for id, c := range *p.cells.Load() {
		if keep(id) {
			next[id] = c
		} else {
			c.close()
		}
	}
	p.cells.Store(&next)
}

func (p *Pools) pool(id cells.CellID) *pool {
	if c := (*p.cells.Load())[id]; c != nil {
		return c
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	cur := *p.cells.Load()
	if c := cur[id]; c != nil {
		return c
	}
	next := make(map[cells.CellID]*pool, len(cur)+1)
	for k, v := range cur {
		next[k] = v
	}
	c := newPool(id, p.opts)
	next[id] = c
	p.cells.Store(&next)
	return c
}

// pool keeps the connections to one cell.
type pool struct {
	cell cells.CellID
	h1   *http.Transport
	h2   *http.Transport
	next atomic.Uint64
	ups  sync.Map // base URL -> *upstream
}

// upstream is one process, by its address.
type upstream struct {
	base    string
	scheme  string
	host    string
	out     atomic.Int64 // requests that have not ended
	refused atomic.Int64 // when it last refused a connection, in Unix nanoseconds
}

func newPool(cell cells.CellID, o Options) *pool {
	dialer := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 15 * time.Second}
	dialPlain := func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialer.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	dialTLS := func(ctx context.Context, network, addr string, alpn []string) (*tls.Conn, error) {
		var conf *tls.Config
		if o.TLS != nil {
			conf = o.TLS(cell)
		}
		if conf == nil {
			return nil, errors.New("the cell is reached by https, and no TLS is configured")
		}
		conf = conf.Clone()
		conf.NextProtos = alpn
		if conf.ServerName == "" {
			conf.ServerName, _, _ = net.SplitHostPort(addr)
		}
		ctx, cancel := context.WithTimeout(ctx, o.DialTimeout)
		defer cancel()
		raw, err := dialPlain(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c := tls.Client(raw, conf)
		if err := c.HandshakeContext(ctx); err != nil {
			raw.Close()
			return nil, err
		}
		return c, nil
	}
	base := func() *http.Transport {
		return &http.Transport{
			MaxIdleConns: 0, MaxIdleConnsPerHost: o.MaxIdle, IdleConnTimeout: o.IdleTimeout,
			DisableCompression: true, ExpectContinueTimeout: o.ExpectTimeout,
			MaxResponseHeaderBytes: o.MaxAnswerHeader, WriteBufferSize: 8 << 10, ReadBufferSize: 8 << 10,
			Protocols: new(http.Protocols),
		}
	}
	h1 := base()
	h1.Protocols.SetHTTP1(true)
	h1.ResponseHeaderTimeout = o.AnswerTimeout
	h1.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialPlain(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &countConn{Conn: c}, nil
	}
	h1.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialTLS(ctx, network, addr, []string{"http/1.1"})
		if err != nil {
			return nil, err
		}
		return &countConn{Conn: c}, nil
	}
	h2 := base()
	h2.Protocols.SetHTTP2(true)
	h2.Protocols.SetUnencryptedHTTP2(true)
	h2.HTTP2 = &http.HTTP2Config{
		SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second,
		MaxReceiveBufferPerStream: 1 << 20, MaxReceiveBufferPerConnection: 3 << 20,
	}
	h2.DialContext = dialPlain
	h2.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialTLS(ctx, network, addr, []string{"h2"})
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	return &pool{cell: cell, h1: h1, h2: h2}
}

func (c *pool) close() {
	c.h1.CloseIdleConnections()
	c.h2.CloseIdleConnections()
}

func (c *pool) upstream(base string) (*upstream, error) {
	if u, ok := c.ups.Load(base); ok {
		return u.(*upstream), nil
	}
	p, err := url.Parse(base)
	if err != nil || (p.Scheme != "http" && p.Scheme != "https") || p.Host == "" || p.User != nil || strings.Trim(p.Path, "/") != "" {
		return nil, fmt.Errorf("%w: upstream of cell %s is not http(s)://host:port", cells.ErrInvalid, c.cell)
	}
	u, _ := c.ups.LoadOrStore(base, &upstream{base: base, scheme: p.Scheme, host: p.Host})
	return u.(*upstream), nil
}

// shun is how long a process that refused a connection is asked only after others.
const shun = 500 * time.Millisecond

// Pick chooses the process with the fewest open requests of those that tried does
// not hold; ones that have just refused a connection come last. ok is false when
// none is left.
func (p *Pools) Pick(cell cells.CellID, bases, tried []string) (base string, ok bool) {
	switch {
	case len(bases) == 0:
		return "", false
	case len(bases) == 1:
		return bases[0], len(tried) == 0 || !contains(tried, bases[0])
	}
	c := p.pool(cell)
	now := time.Now().UnixNano()
	start := int(c.next.Add(1) % uint64(len(bases)))
	var best *upstream
	var bestCost int64
	for i := range bases {
		b := bases[(start+i)%len(bases)]
		if contains(tried, b) {
			continue
		}
		u, err := c.upstream(b)
		if err != nil {
			continue
		}
		cost := u.out.Load()
		if now-u.refused.Load() < int64(shun) {
			cost += 1 << 40
		}
		if best == nil || cost < bestCost {
			best, bestCost = u, cost
		}
	}
	if best == nil {
		return "", false
	}
	return best.base, true
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// Call is one request to send.
type Call struct {
	// Request has the method, the headers, the host and the path to send; URL's
	// scheme and host are set here. It is not changed. Its Body is not used.
	Request *http.Request
	// Body is the present attempt's, or nil for a request without one.
	Body io.ReadCloser
	// Again returns the body from its start for the rare case that a process
	// refuses a stream before it has looked at it (HTTP/2 only).
	Again func() io.ReadCloser
	// HTTP2 sends it over HTTP/2.
	HTTP2 bool
	// Informational, if set, is called with each 1xx answer but 100 and 101.
	Informational func(code int, h http.Header)
}

// Send sends the call to the process at base and returns its answer. The answer's
// body must be closed. The error is a [*NotSentError] when nothing of the request
// reached the process.
func (p *Pools) Send(ctx context.Context, cell cells.CellID, base string, call Call) (*http.Response, error) {
	c := p.pool(cell)
	up, err := c.upstream(base)
	if err != nil {
		return nil, &NotSentError{base, err}
	}
	// got and start are written by hooks that run before RoundTrip returns.
	var got net.Conn
	var start int64
	var dead *func()
	if call.Body != nil {
		// net/http waits for a body that it is writing, even to a connection that broke.
		f := func() { _ = call.Body.Close() }
		dead = &f
	}
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		got = info.Conn
		if cc, ok := got.(*countConn); ok {
			start = cc.written.Load()
			cc.dead.Store(dead)
		}
	}}
	if f := call.Informational; f != nil {
		trace.Got1xxResponse = func(code int, h textproto.MIMEHeader) error {
			if code != http.StatusContinue && code != http.StatusSwitchingProtocols {
				f(code, http.Header(h))
			}
			return nil
		}
	}
	r := call.Request.WithContext(httptrace.WithClientTrace(ctx, trace))
	u := *call.Request.URL
	u.Scheme, u.Host = up.scheme, up.host
	r.URL, r.Body, r.GetBody, r.TransferEncoding = &u, call.Body, nil, nil
	rt := c.h1
	switch {
	case call.HTTP2:
		rt = c.h2
		if call.Again != nil && call.Body != nil {
			r.GetBody = func() (io.ReadCloser, error) {
				if b := call.Again(); b != nil {
					return b, nil
				}
				return nil, errors.New("forward: the body cannot be sent again")
			}
		}
	case call.Body == nil && repeats(r):
		r.Body, r.ContentLength = empty{}, 0
		if r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions || r.Method == http.MethodTrace {
			r.TransferEncoding = []string{"identity"} // no body: neither length nor chunks
		}
	}
	up.out.Add(1)
	end := func() {
		up.out.Add(-1)
		if cc, ok := got.(*countConn); ok && dead != nil {
			cc.dead.CompareAndSwap(dead, nil)
		}
	}
	resp, err := rt.RoundTrip(r)
	if err != nil {
		end()
		if notSent(ctx, err, got, start) {
			up.refused.Store(time.Now().UnixNano())
			return nil, &NotSentError{base, err}
		}
		return nil, err
	}
	resp.Body = watch(resp.Body, end)
	return resp, nil
}

// repeats reports whether net/http would send a request without a body again after
// a connection broke that had carried it.
func repeats(r *http.Request) bool {
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	_, a := r.Header["Idempotency-Key"]
	_, b := r.Header["X-Idempotency-Key"]
	return a || b
}

func notSent(ctx context.Context, err error, got net.Conn, start int64) bool {
	if ctx.Err() != nil {
		return false
	}
	if got == nil {
		return true // no connection was made
	}
	cc, ok := got.(*countConn)
	return ok && cc.written.Load() == start && !errors.Is(err, context.Canceled)
}

// countConn counts what is written, to know whether a request was.
type countConn struct {
	net.Conn
	written atomic.Int64
	dead    atomic.Pointer[func()] // called when reading fails
}

func (c *countConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		if f := c.dead.Load(); f != nil {
			(*f)()
		}
	}
	return n, err
}

// Write counts before it writes: what fails half way may have arrived.
func (c *countConn) Write(p []byte) (int, error) {
	c.written.Add(int64(len(p)))
	return c.Conn.Write(p)
}

var writeBuffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// ReadFrom is what copies bodies: without it each would get a new buffer.
func (c *countConn) ReadFrom(r io.Reader) (int64, error) {
	buf := writeBuffers.Get().(*[32 << 10]byte)
	defer writeBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{c}, r, buf[:])
}

// CloseWrite half-closes the connection if it can be.
func (c *countConn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return http.ErrNotSupported
}

// watch calls end once when the body is closed or has ended.
func watch(body io.ReadCloser, end func()) io.ReadCloser {
	w := &watched{ReadCloser: body, end: sync.OnceFunc(end)}
	if rw, ok := body.(io.ReadWriteCloser); ok {
		return &watchedDuplex{watched: w, w: rw}
	}
	return w
}

type watched struct {
	io.ReadCloser
	end func()
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if err != nil {
		w.end()
	}
	return n, err
}

func (w *watched) Close() error {
	w.end()
	return w.ReadCloser.Close()
}

// watchedDuplex is the connection after 101.
type watchedDuplex struct {
	*watched
	w io.ReadWriteCloser
}

func (w *watchedDuplex) Write(p []byte) (int, error) { return w.w.Write(p) }

// CloseWrite half-closes the connection if it can be.
func (w *watchedDuplex) CloseWrite() error {
	if h, ok := w.w.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return http.ErrNotSupported
}
