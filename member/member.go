// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/member/vitals"
	"github.com/cloister-dev/cloister/table/remote"
)

// errLeaving is the cause of everything that ends because the member is closed.
var errLeaving = fmt.Errorf("%w: this process is leaving its cell", cells.ErrUnavailable)

// Member is one process's membership of its cell. Safe for concurrent use.
type Member struct {
	cfg  Config
	opts options
	log  *slog.Logger

	channel   *channel.Channel
	directory *http.Client
	table     cells.RoutingTable
	remote    *remote.Client // table, when it is this member's own
	router    *cells.Router
	gates     *cells.Gates
	metrics   *metrics

	listener net.Listener
	agentURL string
	server   *http.Server
	views    io.Closer // what other cells have open of this one's rows; may be nil

	life context.Context // ends at Close, with errLeaving as its cause
	end  context.CancelCauseFunc
	wg   sync.WaitGroup
	// beating is the beat loop alone: the farewell comes after the last heartbeat.
	beating sync.WaitGroup

	reconciled chan struct{} // closed when the fences were reconciled once
	told       chan struct{} // closed when the directory knows that the process leaves
	dirty      dirtySet
	arriving   chan cells.TenantID // tenants that moves bring, for warmUp
	keysSeen   string              // content of the admission key file; beat loop only
	poke       chan struct{}       // wakes the beat loop
	load       busiest             // beat loop only
	vitals     vitals.Recorder
	sources    cellClients // of the cells that moves come from; a step of a small move would mostly open connections

	leaving  atomic.Bool
	distrust atomic.Bool // the database is older than the snapshot: wait for the table
	// storeDown: the store could not be reached for a while; see probe.go.
	storeDown atomic.Bool
	lastBeat  atomic.Int64 // when the directory last took a heartbeat; unix nanoseconds

	mu      sync.Mutex // guards ready, reason, changed, closed
	ready   bool
	reason  string
	changed chan struct{} // closed and replaced when ready changes
	closed  bool
}

// Join makes the process a member of its cell: it opens the channel, has the
// store's guard installed, serves the agent and beats. It returns before the
// routes are read and the fences reconciled, which goes on in the background, with
// retries; until then the member is not ready and admits nothing (see
// [Member.WaitReady]). ctx bounds Join itself.
//
// It fails with an error that wraps [cells.ErrInvalid] when the configuration is
// incomplete or the files are malformed, and with the file system's, the network's
// or the guard's own errors.
func Join(ctx context.Context, cfg Config, opts ...Option) (_ *Member, err error) {
	if err := cfg.normalize(); err != nil {
		return nil, fmt.Errorf("member: %w", err)
	}
	o, err := buildOptions(opts)
	if err != nil {
		return nil, err
	}
	m := &Member{
		cfg: cfg, opts: o, log: o.log.With("cell", cfg.Cell, "instance", cfg.Instance),
		reconciled: make(chan struct{}), told: make(chan struct{}), poke: make(chan struct{}, 1), arriving: make(chan cells.TenantID, 1),
		changed: make(chan struct{}), reason: "starting",
	}
	m.life, m.end = context.WithCancelCause(context.Background())
	defer func() {
		if err != nil {
			_ = m.Close(context.WithoutCancel(ctx))
		}
	}()
	m.channel, err = channel.Open(channel.Config{
		CAFile: cfg.ChannelCA, CertFile: cfg.ChannelCert, KeyFile: cfg.ChannelKey, RevokedFile: cfg.ChannelRevoked,
		Self: cfg.self(), Log: o.log,
	})
	if err != nil {
		return nil, fmt.Errorf("member: CELL_CHANNEL_*: %w", err)
	}
	m.sources.channel = m.channel
	m.directory = m.channel.Client(channel.Identity{Role: channel.RoleDirectory})
	if m.table = o.table; m.table == nil {
		m.remote = remote.NewClient(m.directory, cfg.DirectoryURL)
		m.table = m.remote
	}
	keys, err := m.admissionKeys()
	if err != nil {
		return nil, fmt.Errorf("member: %w", err)
	}
	if err := m.route(keys); err != nil {
		return nil, fmt.Errorf("member: CELL_STATE_DIR: %w", err)
	}
	if s := o.store; s != nil {
		if err := s.Keeper.Install(ctx, s.Tables); err != nil {
			return nil, fmt.Errorf("member: install the guard: %w", err)
		}
	}
	m.metrics = newMetrics(m)
	if err := m.metrics.register(o.metrics, m.channel); err != nil {
		return nil, fmt.Errorf("member: metrics: %w", err)
	}
	if err := m.listen(ctx); err != nil {
		return nil, fmt.Errorf("member: CELL_AGENT_ADDR: %w", err)
	}
	m.wg.Go(m.start)
	m.wg.Go(m.warmUp)
	m.beating.Go(m.beat)
	return m, nil
}

// admissionKeys reads the keys, and remembers what the file said.
func (m *Member) admissionKeys() ([][]byte, error) {
	if m.cfg.AdmissionKeyFile == "" {
		return nil, nil
	}
	b, err := os.ReadFile(m.cfg.AdmissionKeyFile)
	if err != nil {
		return nil, fmt.Errorf("CELL_ADMISSION_KEY_FILE: %w", err)
	}
	m.keysSeen = string(b)
	return readKeys(m.cfg.AdmissionKeyFile)
}

// reloadKeys takes over a changed key file; a malformed one leaves the keys as
// they are.
func (m *Member) reloadKeys() {
	if m.cfg.AdmissionKeyFile == "" {
		return
	}
	before := m.keysSeen
	b, err := os.ReadFile(m.cfg.AdmissionKeyFile)
	if err != nil || string(b) == before {
		return
	}
	keys, err := m.admissionKeys()
	if err == nil {
		err = m.gates.SetAdmissionKeys(keys...)
	}
	if err != nil {
		m.log.Error("member: the changed admission keys are not used", "err", err)
		return
	}
	m.log.Info("member: admission keys reloaded", "keys", len(keys))
}

// route makes the router and the gates.
func (m *Member) route(keys [][]byte) error {
	ropts := []cells.RouterOption{cells.WithRouterLogger(m.log), cells.WithOnChange(m.routeChanged)}
	if m.cfg.DefaultCell != "" {
		ropts = append(ropts, cells.WithDefaultCell(m.cfg.DefaultCell))
	}
	if m.cfg.StateDir != "" {
		key, err := stateKey(m.cfg.StateDir)
		if err != nil {
			return err
		}
		ropts = append(ropts, cells.WithSnapshot(filepath.Join(m.cfg.StateDir, "routes.snapshot"), key))
	}
	m.router = cells.NewRouter(m.table, ropts...)
	gopts := []cells.GateOption{cells.WithGateLogger(m.log), cells.WithAdmissionKey(keys...), cells.WithServed(m.served)}
	if m.opts.store != nil {
		gopts = append(gopts, cells.WithOpener(m.openForAdmission))
	}
	m.gates = cells.NewGates(m.cfg.Cell, m.router, gopts...)
	return nil
}

// stateKey returns the key that signs the snapshot: the folder's own, so that
// neither a damaged file nor another process's is taken for it. Who can write to
// the folder can do what the process can.
func stateKey(dir string) ([]byte, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "routes.key")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		key := make([]byte, 32)
		_, _ = rand.Read(key)
		_, err = f.Write(key)
		return key, errors.Join(err, f.Sync(), f.Close())
	}
	if !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	key, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(key) == 32 {
		return key, nil
	}
	// A crash while it was written. What it signed, if anything, is not to be read.
	if err := os.Remove(path); err != nil {
		return nil, err
	}
	return stateKey(dir)
}

// start reads the routes, reconciles the fences and keeps them so.
func (m *Member) start() {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := m.router.Start(m.life)
		if err == nil {
			break
		}
		if m.life.Err() != nil {
			return
		}
		m.log.Warn("member: the routes cannot be read yet; trying again", "in", wait, "err", err)
		m.setReason("the routes cannot be read: " + err.Error())
		if !m.sleep(wait) {
			return
		}
	}
	m.reconcile()
}

// sleep reports whether d passed before Close.
func (m *Member) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-m.life.Done():
		return false
	}
}

// Config returns the configuration with its defaults filled in.
func (m *Member) Config() Config { return m.cfg }

// Router is the member's view of the routes.
func (m *Member) Router() *cells.Router { return m.router }

// Gates are the gates of this process, for gRPC interceptors, jobs and timers:
// cells.UnaryServerInterceptor(m.Router(), m.Gates()).
func (m *Member) Gates() *cells.Gates { return m.gates }

// AgentURL is where the agent is reached.
func (m *Member) AgentURL() string { return m.agentURL }

// Ready reports whether the process may be sent requests, and if not, why.
func (m *Member) Ready() (ready bool, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ready, m.reason
}

// WaitReady blocks until the member is ready. When ctx ends first the error says
// why it is not; after Close it wraps [cells.ErrUnavailable].
func (m *Member) WaitReady(ctx context.Context) error {
	for {
		m.mu.Lock()
		ready, reason, changed := m.ready, m.reason, m.changed
		m.mu.Unlock()
		if ready {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("member: not ready: %s: %w", reason, context.Cause(ctx))
		case <-m.life.Done():
			return errLeaving
		}
	}
}

// setReady records the readiness; it reports whether that changed it.
func (m *Member) setReady(ready bool, reason string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ready == ready {
		m.reason = reason
		return false
	}
	m.ready, m.reason = ready, reason
	close(m.changed)
	m.changed = make(chan struct{})
	return true
}

func (m *Member) setReason(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.ready {
		m.reason = reason
	}
}

// judge says whether the member is ready now.
func (m *Member) judge(ctx context.Context) (bool, string) {
	if m.leaving.Load() {
		return false, "leaving"
	}
	select {
	case <-m.reconciled:
	default:
		_, reason := m.Ready()
		return false, reason
	}
	if m.distrust.Load() {
		return false, "the database is older than the last known good routes, and the directory cannot be read; was it restored from a backup?"
	}
	if m.storeDown.Load() {
		return false, "the cell's database cannot be reached"
	}
	if m.opts.check != nil {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := m.opts.check(ctx); err != nil {
			return false, "the service: " + err.Error()
		}
	}
	return true, ""
}

// Handler wraps the service's handler: it answers probes of /livez and /readyz
// itself (see [Member.HealthHandler]; a request that names a tenant is no probe)
// and admits everything else through the gates. The handler's context carries the
// admission.
func (m *Member) Handler(next http.Handler) http.Handler {
	unguarded := func(path string) bool { return m.opts.unguarded != nil && m.opts.unguarded(path) }
	admitted := cells.HTTPMiddleware(m.router, m.gates, cells.WithUnguarded(unguarded))(next)
	health := m.HealthHandler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A request that an edge sent for a tenant is no probe, whatever its path.
		_, routed := r.Header[http.CanonicalHeaderKey(cells.HeaderTenant)]
		switch {
		case !routed && (r.URL.Path == PathLive || r.URL.Path == PathReady):
			health.ServeHTTP(w, r)
		case unguarded(r.URL.Path):
			admitted.ServeHTTP(w, r)
		case !m.isReconciled():
			d := m.router.Lookup("")
			a := &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the process is starting", Revision: d.Revision, Age: d.Age, RetryAfter: time.Second}
			w.Header().Set(cells.HeaderCell, string(m.cfg.Cell))
			cells.WriteProblem(w, r, a)
			m.metrics.admitted(string(a.Code))
			m.served(cells.Served{Answer: a.Code})
		default:
			admitted.ServeHTTP(w, r)
			// The middleware strips a service's own, so this is the platform's.
			m.metrics.admitted(w.Header().Get(cells.HeaderAnswer))
		}
	})
}

// Paths of [Member.HealthHandler].
const (
	PathLive  = "/livez"
	PathReady = "/readyz"
)

// HealthHandler answers /livez (200 while the process can answer) and /readyz (200
// or 503 with the reason), for the service's own listener or another one. They
// need no tenant and name none.
func (m *Member) HealthHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		switch r.URL.Path {
		case PathLive:
			io.WriteString(w, "ok\n")
		case PathReady:
			if ready, reason := m.Ready(); !ready {
				w.WriteHeader(http.StatusServiceUnavailable)
				io.WriteString(w, reason+"\n")
				return
			}
			io.WriteString(w, "ok\n")
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})
}

const (
	// farewell bounds for how long Retire waits for the directory to take the news.
	farewell = time.Second
	// edgesHear is how long it takes, as a rule, until edges have it from the directory.
	edgesHear = 150 * time.Millisecond
)

// Retire stops being ready, tells the directory so that edges send nothing more, gives
// them the time to hear it, and waits until nothing is in flight or ctx ends, whose
// cause it returns then. Call it before the service's own shutdown, which breaks the
// connections on which requests still come; Close afterwards.
func (m *Member) Retire(ctx context.Context) error {
	m.leaving.Store(true)
	m.wake()
	if err := m.edgesTold(ctx); err != nil {
		return err
	}
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for {
		if ready, _ := m.Ready(); !ready && m.gates.Total() == 0 {
			return nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("member: %d requests are still in flight: %w", m.gates.Total(), context.Cause(ctx))
		case <-m.life.Done():
			return errLeaving
		}
	}
}

// edgesTold waits until edges know that the process leaves, or cannot be told.
func (m *Member) edgesTold(ctx context.Context) error {
	t := time.NewTimer(farewell)
	defer t.Stop()
	told := m.told
	for {
		select {
		case <-told:
			told = nil
			t.Reset(edgesHear)
		case <-t.C:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("member: %d requests are still in flight: %w", m.gates.Total(), context.Cause(ctx))
		case <-m.life.Done():
			return errLeaving
		}
	}
}

// Close leaves the cell: it tells the directory, ends the steps that the agent is
// carrying out (their drivers go on elsewhere), stops the relay and the router,
// and writes the snapshot. It does not wait for requests (see [Member.Retire]). ctx
// bounds the farewell; everything is stopped when Close returns. It may be called
// again.
func (m *Member) Close(ctx context.Context) error {
	m.mu.Lock()
	already := m.closed
	m.closed = true
	m.mu.Unlock()
	if already {
		return nil
	}
	m.leaving.Store(true)
	m.setReady(false, "leaving")
	m.end(errLeaving)
	var errs []error
	if m.server == nil && m.listener != nil {
		errs = append(errs, m.listener.Close())
	}
	if m.server != nil {
		stopped := make(chan error, 1)
		go func() {
			sctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			err := m.server.Shutdown(sctx)
			if err != nil {
				err = m.server.Close()
			}
			stopped <- err
		}()
		m.beating.Wait()
		m.setReady(false, "leaving")
		lctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		if err := m.post(lctx, PathLeave, m.heartbeat(), nil); err != nil {
			m.log.Warn("member: the directory was not told that this process leaves; it will lapse", "err", err)
		}
		cancel()
		errs = append(errs, <-stopped)
	}
	m.wg.Wait()
	if m.views != nil {
		errs = append(errs, m.views.Close())
	}
	if m.router != nil {
		errs = append(errs, m.router.Close())
	}
	if m.remote != nil {
		errs = append(errs, m.remote.Close())
	}
	if m.directory != nil {
		m.directory.CloseIdleConnections()
	}
	m.sources.closeIdle()
	if m.metrics != nil {
		m.metrics.unregister()
	}
	return errors.Join(errs...)
}
