// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/hold"
	"github.com/cloister-dev/cloister/edge/topology"
	"github.com/cloister-dev/cloister/member/vitals"
)

// Routes is the view of the routes that an edge decides by; [*cells.Router] is
// one. Lookup answers from memory.
type Routes interface {
	Lookup(tenant cells.TenantID) cells.Decision
	Refresh(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error)
	Wait(ctx context.Context, tenant cells.TenantID, after cells.Revision) (cells.TenantRoute, error)
	Status() cells.RouterStatus
}

// errEnding is the cause of contexts that end because the server does.
var errEnding = fmt.Errorf("edge: the server is ending: %w", context.Canceled)

// Server is an edge. Make one with [New].
type Server struct {
	cfg     Config
	routes  Routes
	topo    topology.View
	list    *extract.List // nil for deployments
	deploy  *Deployment   // nil unless whole deployments are the cells
	room    *hold.Room
	pools   *forward.Pools
	budget  *forward.Budget
	tokens  *tokens
	metrics *metrics
	vitals  vitals.Recorder
	fast    *fast         // nil when it is off
	unknown *rate.Limiter // reads of the table for tenants without a route
	log     *slog.Logger
	debug   *log.Logger // for what net/http has to say

	// cells.CellID -> *atomic.Int64: since when no process could be reached, and since
	// when those that could cannot reach their database.
	cellsDown, storesDown sync.Map
	seq                   atomic.Uint64
	draining              atomic.Bool
	active                atomic.Int64 // requests, hijacked ones included

	streams, calls       context.Context // end when streams, and gRPC calls, must
	endStreams, endCalls context.CancelCauseFunc

	mu     sync.Mutex // guards what follows
	public []net.Listener
	secure net.Listener
	admin  net.Listener
	ran    bool
}

// New makes a server over a view of the routes and of the topology, which the
// caller keeps open for longer than the server runs. Errors wrap
// [cells.ErrInvalid], or say which file could not be read.
func New(cfg Config, routes Routes, topo topology.View) (*Server, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	list, err := extract.New(cfg.Extractors, extract.WithLog(cfg.Log))
	if err != nil {
		return nil, err
	}
	return newServer(cfg, routes, topo, list)
}

// newServer makes a server of a configuration that has its defaults.
func newServer(cfg Config, routes Routes, topo topology.View, list *extract.List) (*Server, error) {
	room, err := hold.NewRoom(cfg.Hold)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, routes: routes, topo: topo, list: list, room: room, log: cfg.Log,
		pools: forward.NewPools(cfg.Forward), budget: forward.NewBudget(cfg.ReplayTotal),
		debug:  slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
		tokens: newTokens(cfg.AdmissionKey), unknown: rate.NewLimiter(200, 400),
	}
	s.streams, s.endStreams = context.WithCancelCause(context.Background())
	s.calls, s.endCalls = context.WithCancelCause(context.Background())
	s.metrics = newMetrics(s)
	if cfg.FastPath && list != nil && len(cfg.TrustedProxies) == 0 {
		s.fast = newFast(s)
	}
	return s, nil
}

// Listen opens the listeners, so that [Server.Addr] is known before [Server.Run]
// serves. It may be left out, and may be called again.
func (s *Server) Listen(ctx context.Context) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.public != nil || s.secure != nil || s.admin != nil {
		return nil
	}
	var opened []net.Listener
	defer func() {
		if err != nil {
			for _, l := range opened {
				_ = l.Close()
			}
			s.public, s.secure, s.admin = nil, nil, nil
		}
	}()
	var lc net.ListenConfig
	open := func(addr string) (net.Listener, error) {
		l, err := lc.Listen(ctx, "tcp", addr)
		if err == nil {
			opened = append(opened, l)
		}
		return l, err
	}
	if s.cfg.Addr != "-" {
		l, err := open(s.cfg.Addr)
		if err != nil {
			return fmt.Errorf("edge: public listener: %w", err)
		}
		s.public = append(s.public, l)
	}
	if s.cfg.TLSAddr != "" {
		if s.secure, err = open(s.cfg.TLSAddr); err != nil {
			return fmt.Errorf("edge: public TLS listener: %w", err)
		}
	}
	if s.cfg.AdminAddr != "-" {
		if s.admin, err = open(s.cfg.AdminAddr); err != nil {
			return fmt.Errorf("edge: admin listener: %w", err)
		}
	}
	s.public = append(s.public, s.cfg.Listeners...)
	if len(s.public) == 0 && s.secure == nil {
		return fmt.Errorf("%w: edge: no public listener", cells.ErrInvalid)
	}
	return nil
}

// Addr returns the address of the first public listener without TLS, TLSAddr that
// of the one with it, AdminAddr the admin listener's; "" if there is none (yet).
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.public) == 0 {
		return ""
	}
	return s.public[0].Addr().String()
}

// TLSAddr: see [Server.Addr].
func (s *Server) TLSAddr() string { return s.addr(&s.secure) }

// AdminAddr: see [Server.Addr].
func (s *Server) AdminAddr() string { return s.addr(&s.admin) }

func (s *Server) addr(l *net.Listener) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if *l == nil {
		return ""
	}
	return (*l).Addr().String()
}

// Handler is what the public listeners serve. It must run under an [http.Server].
func (s *Server) Handler() http.Handler { return http.HandlerFunc(s.serve) }

// Run serves until ctx ends, then drains and returns nil; an error says what kept
// it from serving. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Listen(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	if s.ran {
		s.mu.Unlock()
		return errors.New("edge: Run was called before")
	}
	s.ran = true
	public, secure, admin := s.public, s.secure, s.admin
	s.mu.Unlock()

	// Requests outlive ctx: they are drained.
	base, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(errEnding)
	front := s.httpServer(s.Handler(), base)
	if secure != nil {
		front.TLSConfig = s.cfg.TLS.Clone()
	}
	back := s.httpServer(s.AdminHandler(), base)
	failed := make(chan error, len(public)+2)
	var serving sync.WaitGroup
	serve := func(what string, f func() error) {
		serving.Go(func() {
			if err := f(); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("edge: %s: %w", what, err)
			}
		})
	}
	if s.fast != nil {
		serve("fast path", func() error { return front.Serve(s.fast.over) })
	}
	for _, l := range public {
		serve("public listener "+l.Addr().String(), func() error {
			if s.fast == nil {
				return front.Serve(l)
			}
			err := s.fast.accept(l)
			if s.draining.Load() {
				return http.ErrServerClosed
			}
			return err
		})
	}
	if secure != nil {
		serve("public TLS listener "+secure.Addr().String(), func() error { return front.ServeTLS(secure, "", "") })
	}
	if admin != nil {
		serve("admin listener "+admin.Addr().String(), func() error { return back.Serve(admin) })
	}
	tidy := make(chan struct{})
	go func() {
		defer close(tidy)
		s.tidy(ctx)
	}()
	reported := make(chan struct{})
	reporting, lastReport := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(reported)
		if s.cfg.Vitals != nil {
			s.reportVitals(reporting)
		}
	}()
	s.log.Info("edge: serving", "name", s.cfg.Name, "addr", s.Addr(), "tls_addr", s.TLSAddr(), "admin_addr", s.AdminAddr())
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	s.drain(front, public, cut)
	_ = back.Close()
	serving.Wait()
	lastReport()
	<-reported
	if err != nil {
		return err
	}
	<-tidy
	return nil
}

func (s *Server) httpServer(h http.Handler, base context.Context) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: h, Protocols: protocols, DisableGeneralOptionsHandler: true,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: 1000, MaxReceiveBufferPerStream: 1 << 20, MaxReceiveBufferPerConnection: 2 << 20,
			SendPingTimeout: time.Minute, PingTimeout: 15 * time.Second, WriteByteTimeout: time.Minute,
		},
		MaxHeaderBytes: s.cfg.MaxHeader, ReadHeaderTimeout: s.cfg.ReadHeaderTimeout, IdleTimeout: s.cfg.IdleTimeout,
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    s.debug,
	}
}

// drain ends what runs: streams first, then everything.
func (s *Server) drain(front *http.Server, public []net.Listener, cut context.CancelCauseFunc) {
	s.draining.Store(true)
	s.log.Info("edge: draining", "name", s.cfg.Name)
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.DrainTimeout)
	defer cancel()
	streams := time.AfterFunc(s.cfg.StreamGrace, func() {
		s.endStreams(errEnding)
		if s.fast != nil {
			s.fast.server.EndStreams()
		}
	})
	defer streams.Stop()
	var early error
	if s.fast != nil {
		for _, l := range public {
			_ = l.Close()
		}
		early = s.fast.server.Drain(ctx)
	}
	err := errors.Join(early, front.Shutdown(ctx))
	if err == nil {
		// Shutdown does not know upgraded connections.
		err = s.idle(ctx)
	}
	s.endStreams(errEnding)
	if err != nil {
		s.endCalls(errEnding)
		soon, cancelSoon := context.WithTimeout(context.Background(), time.Second)
		err = s.idle(soon)
		cancelSoon()
	}
	cut(errEnding)
	if s.fast != nil {
		s.fast.close()
	}
	_ = front.Close()
	last, cancelLast := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancelLast()
	_ = s.idle(last)
	s.pools.Close()
	if err != nil {
		s.log.Warn("edge: requests were cut: they did not end in time", "name", s.cfg.Name, "drain_timeout", s.cfg.DrainTimeout)
	}
}

// idle waits until no request is active.
func (s *Server) idle(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for s.active.Load() > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// tidy closes the connections to cells that are gone.
func (s *Server) tidy(ctx context.Context) {
	for {
		changed := s.topo.Changed()
		s.pools.Retain(s.topo.Knows)
		if s.fast != nil {
			s.fast.retain()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// down returns since when no process of the cell could be reached; 0 is never.
func (s *Server) down(cell cells.CellID) *atomic.Int64 { return since(&s.cellsDown, cell) }

// storeDown returns since when the cell's processes cannot reach their database.
func (s *Server) storeDown(cell cells.CellID) *atomic.Int64 { return since(&s.storesDown, cell) }

func since(m *sync.Map, cell cells.CellID) *atomic.Int64 {
	if v, ok := m.Load(cell); ok {
		return v.(*atomic.Int64)
	}
	v, _ := m.LoadOrStore(cell, new(atomic.Int64))
	return v.(*atomic.Int64)
}
