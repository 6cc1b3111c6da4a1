// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/fastpath"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/member/vitals"
)

// fast is what the fast path asks of a server: the same decisions and counts that an
// [exchange] makes, for requests that need no wait.
type fast struct {
	s      *Server
	server *fastpath.Server
	over   *handOver

	tenants [64]fastShard
	mu      sync.Mutex // guards the writing of ups
	// ups is replaced, never changed in place.
	ups atomic.Pointer[map[fastKey]*fastpath.Upstream]
}

// fastShard has a part of the tenants.
type fastShard struct {
	mu    sync.RWMutex // guards known
	known map[string]*fastTenant
}

// fastKey names a process of a cell.
type fastKey struct {
	cell cells.CellID
	base string
}

// fastTenant is what a tenant's cell is told, for as long as its route stands.
type fastTenant struct {
	tenant    cells.TenantID
	cell      cells.CellID
	epoch     cells.Epoch
	rule      string
	headers   []byte
	forwarded prometheus.Counter
	// Since when no process of the cell was reached, and since when their database was not.
	down, storeDown *atomic.Int64
}

// maxFastTenants bounds the tenants that each shard remembers.
const maxFastTenants = maxTokens / 64

func newFast(s *Server) *fast {
	f := &fast{s: s, over: newHandOver()}
	f.ups.Store(&map[fastKey]*fastpath.Upstream{})
	for i := range f.tenants {
		f.tenants[i].known = map[string]*fastTenant{}
	}
	f.server = fastpath.NewServer(fastpath.Config{Backend: f, ReadTimeout: s.cfg.ReadHeaderTimeout, IdleTimeout: s.cfg.IdleTimeout,
		AnswerTimeout: s.pools.Options().AnswerTimeout})
	return f
}

// Route implements [fastpath.Backend].
func (f *fast) Route(r *fastpath.Request, t *fastpath.Target) bool {
	s := f.s
	q, ok := s.list.Quick(r)
	if !ok || s.cfg.MaxBody > 0 && int64(r.Length) > s.cfg.MaxBody {
		return false
	}
	e := f.tenant(q.Tenant)
	if e == nil {
		return false
	}
	d := s.routes.Lookup(e.tenant)
	if d.Refusal() != nil {
		return false
	}
	if e.headers == nil || e.cell != d.Cell || e.epoch != d.Epoch || e.rule != d.Rule {
		e = f.learn(e.tenant, d)
	}
	bases := s.topo.Upstreams(d.Cell)
	base, ok := s.pools.Pick(d.Cell, bases, nil)
	if !ok {
		return false
	}
	if t.Upstream = f.upstream(fastKey{d.Cell, base}); t.Upstream == nil {
		return false
	}
	t.Headers, t.Drop, t.Note = e.headers, q.StripHeader, e
	return true
}

// shardOf is where a tenant, whose name is not empty, is remembered.
func shardOf[S cells.TenantID | []byte](f *fast, name S) *fastShard {
	return &f.tenants[(int(name[len(name)-1])*31+int(name[len(name)/2])*7+len(name))%len(f.tenants)]
}

// tenant returns what is known of a tenant; nil for what cannot be one.
func (f *fast) tenant(name []byte) *fastTenant {
	if len(name) == 0 {
		return nil
	}
	shard := shardOf(f, name)
	shard.mu.RLock()
	e := shard.known[string(name)]
	shard.mu.RUnlock()
	if e != nil {
		return e
	}
	tenant := cells.TenantID(name)
	if tenant.Validate() != nil {
		return nil
	}
	return &fastTenant{tenant: tenant}
}

// learn remembers what the tenant's cell is told.
func (f *fast) learn(tenant cells.TenantID, d cells.Decision) *fastTenant {
	said := f.s.tokens.get(tenant, d.Cell, d.Epoch)
	e := &fastTenant{tenant: tenant, cell: d.Cell, epoch: d.Epoch, rule: d.Rule,
		forwarded: f.s.metrics.requests.WithLabelValues(string(d.Cell), outcomeForwarded),
		down:      f.s.down(d.Cell), storeDown: f.s.storeDown(d.Cell)}
	add := func(name string, values []string) {
		for _, v := range values {
			e.headers = append(append(append(append(e.headers, name...), ": "...), v...), "\r\n"...)
		}
	}
	add(cells.HeaderTenant, said.tenant)
	add(cells.HeaderEpoch, said.number)
	add(cells.HeaderAdmission, said.mint)
	shard := shardOf(f, tenant)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if len(shard.known) >= maxFastTenants {
		clear(shard.known) // whoever is active is back at once
	}
	shard.known[string(tenant)] = e
	return e
}

// upstream returns a process; nil for one that is not reached by http.
func (f *fast) upstream(key fastKey) *fastpath.Upstream {
	if u, ok := (*f.ups.Load())[key]; ok {
		return u
	}
	addr, open, ok := f.s.pools.Process(key.cell, key.base)
	if !ok {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	cur := *f.ups.Load()
	if u, ok := cur[key]; ok {
		return u
	}
	o := f.s.pools.Options()
	u := fastpath.NewUpstream(addr, open, fastpath.Options{DialTimeout: o.DialTimeout, IdleTimeout: o.IdleTimeout, MaxIdle: o.MaxIdle})
	next := maps.Clone(cur)
	next[key] = u
	f.ups.Store(&next)
	return u
}

// retain closes the connections to processes that are not in the topology any more.
func (f *fast) retain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := map[fastKey]*fastpath.Upstream{}
	for k, u := range *f.ups.Load() {
		if slices.Contains(f.s.topo.Upstreams(k.cell), k.base) {
			next[k] = u
		} else {
			u.Close()
		}
	}
	f.ups.Store(&next)
}

func (f *fast) close() {
	f.server.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, u := range *f.ups.Load() {
		u.Close()
	}
}

// Passes implements [fastpath.Backend].
func (f *fast) Passes(name []byte) bool { return forward.Passes(name) }

// Forwarded implements [fastpath.Backend].
func (f *fast) Forwarded(b []byte, client net.Addr, r *fastpath.Request) []byte {
	if a, ok := client.(*net.TCPAddr); ok {
		b = append(b, "X-Forwarded-For: "...)
		b = a.AddrPort().Addr().Unmap().AppendTo(b)
		b = append(b, "\r\n"...)
	}
	b = append(b, "X-Forwarded-Host: "...)
	b = append(b, r.Host...)
	return append(b, "\r\nX-Forwarded-Proto: http\r\n"...)
}

// Began implements [fastpath.Backend].
func (f *fast) Began() { f.s.active.Add(1) }

// Over implements [fastpath.Backend].
func (f *fast) Over() { f.s.active.Add(-1) }

// HandOver implements [fastpath.Backend].
func (f *fast) HandOver(c net.Conn) {
	f.s.metrics.handed.Inc()
	f.over.give(c)
}

// Ended implements [fastpath.Backend].
func (f *fast) Ended(r *fastpath.Request, t *fastpath.Target, e fastpath.Ending) {
	s, x := f.s, t.Note.(*fastTenant)
	s.metrics.fast.Inc()
	took := time.Since(e.Start)
	outcome, o := outcomeForwarded, vitals.OfStatus(e.Status)
	if e.Status > 0 && x.down.Load()|x.storeDown.Load() != 0 {
		x.down.Store(0)
		x.storeDown.Store(0)
	}
	switch {
	case e.Gone:
		outcome, o = outcomeGone, vitals.NotCounted
	case e.Cut:
		outcome, o = outcomeCut, vitals.Failed
	}
	if outcome == outcomeForwarded {
		x.forwarded.Inc()
	} else {
		s.metrics.requests.WithLabelValues(string(x.cell), outcome).Inc()
	}
	s.metrics.duration.Observe(took.Seconds())
	if x.rule == cells.RuleDefault {
		s.metrics.byDefault.Inc()
	}
	counted := took
	if e.Stream {
		counted = -1
	}
	s.vitals.Observe(x.cell, s.version(x.cell), o, counted)
	if n := s.cfg.AccessLog; n > 0 && (s.seq.Add(1)%uint64(n) == 0 || e.Cut) {
		s.log.LogAttrs(context.Background(), slog.LevelInfo, "edge: request", slog.String("method", string(r.Method)), slog.String("host", string(r.Host)),
			slog.String("path", string(r.Path)), slog.String("proto", "HTTP/1.1"), slog.String("tenant", string(x.tenant)), slog.String("cell", string(x.cell)),
			slog.Uint64("epoch", uint64(x.epoch)), slog.Int("status", e.Status), slog.String("outcome", outcome), slog.Int64("bytes", e.Bytes), slog.Duration("took", took))
	}
}

// Refuse implements [fastpath.Backend]: what an exchange says of a request that was
// sent and not answered.
func (f *fast) Refuse(r *fastpath.Request, t *fastpath.Target, start time.Time, client net.Addr, err error) []byte {
	e := t.Note.(*fastTenant)
	in := &http.Request{Method: string(r.Method), URL: &url.URL{Path: string(r.Path)}, Host: string(r.Host), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, RemoteAddr: client.String(), RequestURI: string(r.Target)}
	for i := range r.Fields {
		in.Header.Add(string(r.Fields[i].Name), string(r.Fields[i].Value))
	}
	w := &answerBuffer{header: http.Header{}}
	x := &exchange{s: f.s, in: in, start: start, tenant: e.tenant, cell: e.cell, epoch: e.epoch, rule: e.rule, sent: 1, rec: recorder{w: w, http1: true}}
	x.client = forward.Proxies(nil).See(in)
	x.refuse(cells.AnswerOf(x.broken(f.s.routes.Lookup(e.tenant), err)))
	x.finish(nil)
	return w.bytes(in)
}

// answerBuffer is an answer in memory.
type answerBuffer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (w *answerBuffer) Header() http.Header         { return w.header }
func (w *answerBuffer) WriteHeader(status int)      { w.status = status }
func (w *answerBuffer) Write(p []byte) (int, error) { return w.body.Write(p) }

// bytes is the answer as it is sent to the request, on a connection that is then closed.
func (w *answerBuffer) bytes(to *http.Request) []byte {
	var b bytes.Buffer
	resp := &http.Response{StatusCode: w.status, ProtoMajor: 1, ProtoMinor: 1, Request: to, Header: w.header,
		ContentLength: int64(w.body.Len()), Body: io.NopCloser(&w.body), Close: true}
	_ = resp.Write(&b)
	return b.Bytes()
}

// handOver is a listener of connections that were accepted elsewhere.
type handOver struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHandOver() *handOver { return &handOver{conns: make(chan net.Conn), done: make(chan struct{})} }

func (h *handOver) give(c net.Conn) {
	select {
	case h.conns <- c:
	case <-h.done:
		_ = c.Close()
	}
}

// Accept implements [net.Listener].
func (h *handOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (h *handOver) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr implements [net.Listener].
func (h *handOver) Addr() net.Addr { return &net.TCPAddr{} }

// accept takes a listener's connections until it is closed.
func (f *fast) accept(l net.Listener) error {
	var wait time.Duration
	for {
		c, err := l.Accept()
		if err == nil {
			wait = 0
			f.server.Serve(c)
			continue
		}
		if te, ok := err.(interface{ Temporary() bool }); !ok || !te.Temporary() { //nolint:staticcheck // as net/http does
			return err
		}
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		f.s.log.Warn("edge: a connection could not be accepted", "err", err)
		t := time.NewTimer(wait)
		<-t.C
	}
}
