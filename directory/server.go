// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/table/remote"
)

var errClosing = errors.New("directory: closing")

// shutdownTime is for how long Close waits for calls that are being answered.
const shutdownTime = 3 * time.Second

// Server is one directory process. Make it with [New]; [Server.Start] and
// [Server.Close] may be called once each, Close also more often.
type Server struct {
	cfg      Config
	log      *slog.Logger
	store    Store
	table    cells.RoutingTable
	instance string // Name/random: this incarnation, as a driver of moves
	verify   []credential.Hash

	members  *members
	fleet    *fleet
	follow   *follower
	exec     *executor
	camps    *campaigns
	rolls    *rollouts
	vitals   vitalsBook
	specs    *specs
	rates    *rates
	routes   *remote.Server // the table to read; nobody writes it over the channel
	metrics  *metrics
	registry *prometheus.Registry

	ctx    context.Context // ends when the server closes
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	failed chan error // the first listener's failure
	closed atomic.Bool
	// servers and started, when that was, are set by Start.
	servers []*http.Server
	started time.Time
}

// New checks the configuration and prepares a server; nothing runs yet. The error
// wraps [cells.ErrInvalid].
func New(cfg Config) (*Server, error) {
	if err := cfg.normalize(); err != nil {
		return nil, err
	}
	v, err := parseHashes(cfg.OperatorSHA256)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, store: cfg.Store, table: cfg.Table, verify: v,
		instance: cfg.Name + "/" + rand.Text()[:13], failed: make(chan error, 2),
		rates: newRates(cfg.PlacementsPerMinute),
	}
	if cfg.Trace != nil {
		s.cfg.Trace = &lockedWriter{w: cfg.Trace}
		s.store = traced(cfg.Store, s.cfg.Trace, s.instance)
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.fleet = &fleet{store: s.store, directory: s.instance}
	s.members = newMembers(s.store, &s.cfg, s.fleet.rebuild)
	s.fleet.locate = s.members.locate
	s.follow = newFollower(s)
	s.exec = newExecutor(s)
	s.camps = newCampaigns(s)
	s.rolls = newRollouts(s)
	s.specs = newSpecs(s)
	s.routes = remote.Handler(s.table, remote.ReadOnly(), remote.WithHandlerLogger(s.log))
	s.metrics, s.registry = newMetrics(s)
	return s, nil
}

// Start reads the store, starts the listeners and the background work, and
// returns. It fails, and leaves nothing running, when the store cannot be read.
// The context bounds the start only.
func (s *Server) Start(ctx context.Context) error {
	if err := s.fleet.refresh(ctx); err != nil {
		return fmt.Errorf("directory: reading cells: %w", err)
	}
	if err := s.members.sync(ctx); err != nil {
		return fmt.Errorf("directory: reading members: %w", err)
	}
	s.fleet.rebuild()
	s.started = time.Now()
	s.background("members", s.runMembers)
	s.background("follower", s.follow.run)
	s.background("sweeper", s.exec.sweep)
	s.background("campaigns", s.camps.loop)
	s.background("rollouts", s.rolls.loop)
	s.background("vitals", s.keepVitals)
	s.background("specs", s.specs.loop)
	s.background("windows", s.exec.tendWindows)
	if l := s.cfg.ChannelListener; l != nil {
		s.listen("channel", l, &http.Server{Handler: s.channelHandler(), TLSConfig: s.cfg.Channel.Server()})
	}
	if l := s.cfg.OperatorListener; l != nil {
		s.listen("operator", l, &http.Server{Handler: s.OperatorHandler()})
	}
	return nil
}

// Run starts the server, serves until ctx ends or a listener fails, and closes.
// The end of ctx is no error.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Start(ctx); err != nil {
		return errors.Join(err, s.Close())
	}
	select {
	case <-ctx.Done():
		return s.Close()
	case err := <-s.failed:
		return errors.Join(err, s.Close())
	}
}

// Close ends the background work and the listeners; moves stay where they are
// and are resumed by the next start or by another directory. It returns once
// everything has ended.
func (s *Server) Close() error {
	if s.closed.Swap(true) {
		s.wg.Wait()
		return nil
	}
	s.cancel(errClosing)
	errs := []error{s.routes.Close()}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	for _, h := range s.servers {
		err := h.Shutdown(ctx)
		if errors.Is(err, context.DeadlineExceeded) { // connections that were opened for nothing, or calls that take too long
			s.log.Warn("connections cut off")
			err = h.Close()
		}
		errs = append(errs, err)
	}
	for _, l := range []net.Listener{s.cfg.ChannelListener, s.cfg.OperatorListener} {
		if l != nil {
			_ = l.Close() // closed already, unless the start failed
		}
	}
	s.wg.Wait()
	if c, ok := s.exec.agents.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
	return errors.Join(errs...)
}

// Instance names this incarnation, as it appears as the driver of moves.
func (s *Server) Instance() string { return s.instance }

func (s *Server) background(name string, run func(context.Context)) {
	s.wg.Go(func() {
		run(s.ctx)
		s.log.Debug("ended", "loop", name)
	})
}

func (s *Server) listen(name string, l net.Listener, h *http.Server) {
	h.ReadHeaderTimeout, h.WriteTimeout, h.IdleTimeout, h.MaxHeaderBytes = 10*time.Second, writeTimeout, 2*time.Minute, 16<<10
	h.ErrorLog = slog.NewLogLogger(s.log.With("listener", name).Handler(), slog.LevelDebug)
	s.servers = append(s.servers, h)
	s.wg.Go(func() {
		var err error
		if h.TLSConfig != nil {
			err = h.ServeTLS(l, "", "")
		} else {
			err = h.Serve(l)
		}
		if !errors.Is(err, http.ErrServerClosed) {
			s.failed <- fmt.Errorf("directory: %s listener: %w", name, err)
		}
	})
	s.log.Info("listening", "listener", name, "addr", l.Addr().String())
}

// runMembers drops lapsed members and exchanges news with the other directories.
func (s *Server) runMembers(ctx context.Context) {
	expire := time.NewTicker(max(s.cfg.Lapse/8, 10*time.Millisecond))
	defer expire.Stop()
	every := time.NewTicker(s.cfg.SyncEvery)
	defer every.Stop()
	for {
		refresh := false
		select {
		case <-ctx.Done():
			return
		case <-expire.C:
			if s.members.expire() {
				s.fleet.rebuild()
			}
			continue
		case <-s.members.syncSignal:
		case <-every.C:
			refresh = true
		}
		err := s.members.sync(ctx)
		if err == nil && refresh {
			err = s.fleet.refresh(ctx)
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("store not synchronised", "err", err)
			s.metrics.storeErrors.Inc()
		}
	}
}

// sleep waits, and reports whether the context is still going on.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
