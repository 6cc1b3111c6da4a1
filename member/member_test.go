// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/guard"
)

func store(k *memKeeper, a *fakeAgent) Store {
	s := Store{Keeper: k, Engine: "mem"}
	if a != nil {
		s.Agent = a
	}
	return s
}

// request is one that an edge has routed.
func request(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/x", nil)
	r.Header.Set(cells.HeaderTenant, string(tenant))
	r.Header.Set(cells.HeaderEpoch, strconv.FormatUint(uint64(epoch), 10))
	r.Header.Set(cells.HeaderAdmission, cells.MintToken(cells.DeriveCellKey(masterKey, cell), tenant, cell, epoch))
	return r
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	a, _ := cells.AdmissionFromContext(r.Context())
	fmt.Fprintf(w, "%s %d", a.Tenant, a.Epoch)
})

func do(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestJoinServesAndLeaves(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t1", "a", 1))
	p.put(t, active("t2", "b", 1))
	k := newMemKeeper()
	cfg := p.config(t, "a")
	cfg.AdmissionKeyFile = writeKey(t, "a")
	cfg.Version = "v7"
	reg := prometheus.NewPedanticRegistry()
	s := store(k, nil)
	s.Tables = []guard.Table{{Name: "items", TenantColumn: "tenant"}}
	m := p.join(t, cfg, WithStore(s), WithMetrics(reg))
	waitReady(t, m)
	h := p.waitBeat(t, "ready", func(h Heartbeat) bool { return h.Ready })
	if h.Cell != "a" || h.Engine != "mem" || h.Version != "v7" || h.PID != os.Getpid() || h.AgentURL != m.AgentURL() || h.Reason != "" || h.Revision == 0 || h.Instance == "" {
		t.Fatalf("%+v", h)
	}
	if len(k.installed) != 1 {
		t.Fatal("the guard was not installed")
	}
	if f, ok := k.get("t1"); !ok || !f.Open || f.Epoch != 1 {
		t.Fatalf("fence of a tenant that is here: %+v", f)
	}
	if _, ok := k.get("t2"); ok {
		t.Fatal("a fence for a tenant that was never here")
	}

	srv := m.Handler(hello)
	if w := do(srv, request("t1", "a", 1)); w.Code != 200 || w.Body.String() != "t1 1" {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if w := do(srv, request("t2", "a", 1)); w.Code != http.StatusConflict || w.Header().Get(cells.HeaderAnswer) != string(cells.CodeWrongCell) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	r := request("t1", "a", 1)
	r.Header.Del(cells.HeaderAdmission)
	if w := do(srv, r); w.Code != http.StatusBadRequest {
		t.Fatalf("without a token: %d", w.Code)
	}
	for _, path := range []string{PathLive, PathReady} {
		if w := do(srv, httptest.NewRequest(http.MethodGet, path, nil)); w.Code != 200 {
			t.Fatalf("%s: %d", path, w.Code)
		}
	}
	// Through an edge these paths are the service's.
	r = request("t1", "a", 1)
	r.URL.Path = PathReady
	if w := do(srv, r); w.Body.String() != "t1 1" {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	got := gather(t, reg)
	for name, want := range map[string]float64{
		"cell_member_requests_total admitted": 2, "cell_member_requests_total WRONG_CELL": 1, "cell_member_requests_total BAD_REQUEST": 1,
		"cell_member_ready": 1, "cell_member_in_flight": 0, "cell_member_fence_orders_total reconcile open ok": 1,
	} {
		if got[name] != want {
			t.Errorf("metric %s is %v, want %v", name, got[name], want)
		}
	}
	if age := got["cell_member_heartbeat_age_seconds"]; age < 0 || age > 10 {
		t.Errorf("heartbeat age %v", age)
	}

	if err := m.Retire(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Whoever shuts down behind it breaks no connection that an edge still uses.
	p.mu.Lock()
	told := slices.ContainsFunc(p.beats, func(h Heartbeat) bool { return !h.Ready && h.Reason == "leaving" })
	p.mu.Unlock()
	if !told {
		t.Error("retired before the directory knew")
	}
	if w := do(srv, httptest.NewRequest(http.MethodGet, PathReady, nil)); w.Code != 503 || !strings.Contains(w.Body.String(), "leaving") {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Equal(p.left, []string{h.Instance}) {
		t.Fatalf("left: %v", p.left)
	}
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(gather(t, reg)) != 0 {
		t.Fatal("metrics are still registered")
	}
}

func gather(t testing.TB, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range fams {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			switch {
			case m.Counter != nil:
				out[name] = m.Counter.GetValue()
			case m.Gauge != nil:
				out[name] = m.Gauge.GetValue()
			}
		}
	}
	return out
}

func TestStatelessHasGatesOnly(t *testing.T) {
	p := newPlane(t)
	route := p.put(t, active("t1", "a", 1))
	cfg := p.config(t, "a")
	m := p.join(t, cfg)
	p.ready(t, m)
	if w := do(m.Handler(hello), request("t1", "a", 1)); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	c := p.client(t)
	ctx := t.Context()
	ref := cells.MoveRef{ID: "m", Tenant: "t1", Source: "a", Target: "a", Base: 1}
	if err := c.Close(ctx, cells.FenceOrder{Cell: "a", Tenant: "t1", Epoch: 2}); err != nil {
		t.Error(err)
	}
	if _, err := c.Pause(ctx, cells.BarrierOrder{Cell: "a", Tenant: "t1"}); err != nil {
		t.Error(err)
	}
	if pf, err := c.Preflight(ctx, ref); err != nil || pf.Blocked() {
		t.Error(pf, err)
	}
	if _, err := c.Prepare(ctx, ref, nil); err != nil {
		t.Error(err)
	}
	if has, err := c.Holds(ctx, "a", "t1"); err != nil || has {
		t.Error(has, err)
	}
	if err := c.Drain(ctx, route); err != nil {
		t.Error(err)
	}
	if w := do(m.Handler(hello), request("t1", "a", 1)); w.Header().Get(cells.HeaderAnswer) != string(cells.CodeMoving) {
		t.Errorf("after the drain: %d %s", w.Code, w.Body)
	}
}

// Nothing is admitted, and the process is not ready, before the routes were read
// and the fences raised by them.
func TestFencesAreReconciledBeforeReady(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("here", "a", 5))
	p.put(t, active("gone", "b", 7))
	residue := active("left", "b", 5)
	residue.Residue = []cells.Residue{{Cell: "a", Epoch: 4, Move: "m"}}
	p.put(t, residue)
	p.down()

	k := newMemKeeper()
	for _, f := range []guard.Fence{
		{Tenant: "here", Epoch: 3, Floor: 3, Open: true}, // a backup
		{Tenant: "gone", Epoch: 3, Floor: 3, Open: true},
		{Tenant: "left", Epoch: 3, Floor: 3, Open: true},
		{Tenant: "nobody", Epoch: 2, Floor: 2, Open: true},
	} {
		k.set(f)
	}
	cfg := p.config(t, "a")
	cfg.DefaultCell = "a"
	m := p.join(t, cfg, WithStore(store(k, nil)))
	eventually(t, "a reason", func() bool { _, why := m.Ready(); return strings.Contains(why, "routes") })
	srv := m.Handler(hello)
	if w := do(srv, request("here", "a", 5)); w.Code != 503 || w.Header().Get(cells.HeaderAnswer) != string(cells.CodeBackendUnavailable) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if w := do(srv, httptest.NewRequest(http.MethodGet, PathReady, nil)); w.Code != 503 {
		t.Fatalf("ready without routes: %s", w.Body)
	}
	if len(k.ordersSoFar()) != 0 {
		t.Fatal("orders without routes")
	}
	k.setFail(fmt.Errorf("%w: the database is down", cells.ErrUnavailable))
	p.up()
	eventually(t, "a reason", func() bool { _, why := m.Ready(); return strings.Contains(why, "the database is down") })
	// The routes are known now. One of the default cell's guests needs no fence to be
	// opened, and waits all the same.
	if w := do(srv, request("guest", "a", 0)); w.Header().Get(cells.HeaderAnswer) != string(cells.CodeBackendUnavailable) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	k.setFail(nil)
	waitReady(t, m)
	for tenant, want := range map[cells.TenantID]guard.Fence{
		"here": {Epoch: 5, Floor: 5, Open: true}, "gone": {Epoch: 7}, "left": {Epoch: 4, Move: "m"}, "nobody": {Epoch: 2, Floor: 2, Open: true},
	} {
		if f, _ := k.get(tenant); f.Epoch != want.Epoch || f.Open != want.Open || f.Move != want.Move {
			t.Errorf("%s: %+v, want %+v", tenant, f, want)
		}
	}
	if w := do(srv, request("here", "a", 5)); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
}

func TestFencesFollowTheRoutes(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t", "b", 1))
	k := newMemKeeper()
	m := p.join(t, p.config(t, "a"), WithStore(store(k, nil)))
	waitReady(t, m)
	p.put(t, active("t", "a", 3))
	eventually(t, "open at 3", func() bool { f, _ := k.get("t"); return f.Open && f.Epoch == 3 })
	r := active("t", "b", 5)
	r.Residue = []cells.Residue{{Cell: "a", Epoch: 4, Move: "m"}}
	p.put(t, r)
	eventually(t, "closed at 4", func() bool { f, _ := k.get("t"); return !f.Open && f.Epoch == 4 && f.Move == "m" })
	// The store fails for a while.
	k.setFail(cells.ErrUnavailable)
	p.put(t, active("t", "a", 7))
	eventually(t, "a failure", func() bool { k.mu.Lock(); defer k.mu.Unlock(); return k.failed > 0 })
	k.setFail(nil)
	eventually(t, "open at 7", func() bool { f, _ := k.get("t"); return f.Open && f.Epoch == 7 })
}

// With the directory down a process starts from what it last knew, unless its
// database is older than that.
func TestColdStart(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t", "a", 5))
	k := newMemKeeper()
	cfg := p.config(t, "a")
	cfg.StateDir = t.TempDir()
	first := p.join(t, cfg, WithStore(store(k, nil)))
	waitReady(t, first)
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.down()

	second := p.join(t, cfg, WithStore(store(k, nil)))
	waitReady(t, second)
	if st := second.Router().Status(); st.Source != cells.SourceSnapshot {
		t.Fatalf("%+v", st)
	}
	if w := do(second.Handler(hello), request("t", "a", 5)); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if err := second.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	k.set(guard.Fence{Tenant: "t", Epoch: 3, Floor: 3, Open: true}) // a backup
	third := p.join(t, cfg, WithStore(store(k, nil)))
	eventually(t, "a reason", func() bool { _, why := third.Ready(); return strings.Contains(why, "restored") })
	if f, _ := k.get("t"); f.Epoch != 5 {
		t.Fatalf("%+v", f)
	}
	p.up()
	waitReady(t, third)
}

func TestOutagesOfTheDirectoryAreSurvived(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t", "a", 1))
	m := p.join(t, p.config(t, "a"), WithStore(store(newMemKeeper(), nil)))
	waitReady(t, m)
	p.down()
	if w := do(m.Handler(hello), request("t", "a", 1)); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	p.mu.Lock()
	p.beats = nil
	p.mu.Unlock()
	p.up()
	p.put(t, active("t", "b", 3))
	p.waitBeat(t, "after the outage", func(h Heartbeat) bool { return h.Ready })
	eventually(t, "the change", func() bool { return m.Router().Lookup("t").Cell == "b" })
}

func TestTheServicesCheckCounts(t *testing.T) {
	p := newPlane(t)
	var sick atomic.Bool
	sick.Store(true)
	m := p.join(t, p.config(t, "a"), WithCheck(func(context.Context) error {
		if sick.Load() {
			return errors.New("the disk is full")
		}
		return nil
	}))
	p.waitBeat(t, "sick", func(h Heartbeat) bool { return !h.Ready && strings.Contains(h.Reason, "the disk is full") })
	sick.Store(false)
	waitReady(t, m)
	sick.Store(true)
	eventually(t, "not ready", func() bool { ready, _ := m.Ready(); return !ready })
}

func TestAdmissionKeysAreReloaded(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t", "a", 1))
	cfg := p.config(t, "a")
	cfg.AdmissionKeyFile = writeKey(t, "a")
	m := p.join(t, cfg)
	waitReady(t, m)
	srv := m.Handler(hello)
	next := []byte("another key of thirty-two bytes!")
	r := func() *http.Request {
		r := request("t", "a", 1)
		r.Header.Set(cells.HeaderAdmission, cells.MintToken(next, "t", "a", 1))
		return r
	}
	if w := do(srv, r()); w.Code != http.StatusBadRequest {
		t.Fatalf("%d", w.Code)
	}
	if err := os.WriteFile(cfg.AdmissionKeyFile, []byte("damage\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	both := hex.EncodeToString(cells.DeriveCellKey(masterKey, "a")) + "\n" + hex.EncodeToString(next) + "\n"
	if err := os.WriteFile(cfg.AdmissionKeyFile+".new", []byte(both), 0o600); err != nil {
		t.Fatal(err)
	}
	if w := do(srv, request("t", "a", 1)); w.Code != 200 {
		t.Fatalf("a damaged file took the keys away: %d", w.Code)
	}
	if err := os.Rename(cfg.AdmissionKeyFile+".new", cfg.AdmissionKeyFile); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new key", func() bool { return do(srv, r()).Code == 200 })
	if w := do(srv, request("t", "a", 1)); w.Code != 200 {
		t.Fatalf("the old key: %d", w.Code)
	}
}

type runner func(context.Context) error

func (f runner) Run(ctx context.Context) error { return f(ctx) }

func TestTheRelayIsKeptRunning(t *testing.T) {
	p := newPlane(t)
	var runs, running atomic.Int64
	s := store(newMemKeeper(), nil)
	s.Relay = runner(func(ctx context.Context) error {
		if runs.Add(1) == 1 {
			return errors.New("a hiccup")
		}
		running.Add(1)
		defer running.Add(-1)
		<-ctx.Done()
		return ctx.Err()
	})
	p.down()
	m := p.join(t, p.config(t, "a"), WithStore(s))
	eventually(t, "a reason", func() bool { _, why := m.Ready(); return strings.Contains(why, "routes") })
	if runs.Load() != 0 {
		t.Fatal("the relay runs before the fences are reconciled")
	}
	p.up()
	eventually(t, "running", func() bool { return running.Load() == 1 })
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if running.Load() != 0 {
		t.Fatal("the relay outlives Close")
	}
}

func TestJoinRefuses(t *testing.T) {
	p := newPlane(t)
	good := p.config(t, "a")
	other := p.config(t, "b")
	for name, tc := range map[string]struct {
		edit func(*Config)
		opts []Option
		says string
	}{
		"no cell":            {func(c *Config) { c.Cell = "" }, nil, "CELL_ID"},
		"another's identity": {func(c *Config) { c.ChannelCert, c.ChannelKey = other.ChannelCert, other.ChannelKey }, nil, "CELL_CHANNEL"},
		"missing key file":   {func(c *Config) { c.AdmissionKeyFile = "/nowhere/key" }, nil, "CELL_ADMISSION_KEY_FILE"},
		"bad state folder":   {func(c *Config) { c.StateDir = "/dev/null/x" }, nil, "CELL_STATE_DIR"},
		"taken address":      {func(c *Config) { c.AgentAddr = p.addr }, nil, "CELL_AGENT_ADDR"},
		"no keeper":          {func(*Config) {}, []Option{WithStore(Store{Engine: "x"})}, "Keeper"},
		"no engine":          {func(*Config) {}, []Option{WithStore(Store{Keeper: newMemKeeper()})}, "engine"},
		"broken guard":       {func(*Config) {}, []Option{WithStore(store(&memKeeper{fail: cells.ErrUnavailable}, nil))}, "guard"},
	} {
		cfg := good
		tc.edit(&cfg)
		m, err := Join(t.Context(), cfg, append(tc.opts, WithLogger(quiet))...)
		if err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
		if m != nil {
			_ = m.Close(t.Context())
		}
	}
}

func TestRetireWaitsForRequests(t *testing.T) {
	p := newPlane(t)
	p.put(t, active("t", "a", 1))
	m := p.join(t, p.config(t, "a"))
	waitReady(t, m)
	in, out := make(chan struct{}), make(chan struct{})
	srv := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { close(in); <-out; io.WriteString(w, "done") }))
	release := sync.OnceFunc(func() { close(out) })
	defer release()
	answered := make(chan int, 1)
	go func() { answered <- do(srv, request("t", "a", 1)).Code }()
	<-in
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := m.Retire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	release()
	if code := <-answered; code != 200 {
		t.Fatal(code)
	}
	if err := m.Retire(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestCertificatesThatCannotServe(t *testing.T) {
	p := newPlane(t)
	// An operator's certificate is not a cell's.
	c := p.fleet.Config(t, channel.RoleOperator, "a")
	cfg := p.config(t, "a")
	cfg.ChannelCert, cfg.ChannelKey = c.CertFile, c.KeyFile
	if _, err := Join(t.Context(), cfg, WithLogger(quiet)); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
}
