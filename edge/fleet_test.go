// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var masterKey = []byte("0123456789abcdef0123456789abcdef")

// fleet is cells with real gates and sockets behind a real edge, on one table.
type fleet struct {
	t     testing.TB
	table cells.RoutingTable
	ctrl  *cells.MoveController
	topo  *topology.Static
	view  *cells.Router
	edge  *edge.Server
	url   string
	admin string
	http  *http.Client // HTTP/1.1
	h2    *http.Client // HTTP/2 without TLS

	mu    sync.Mutex // guards what follows
	cells map[cells.CellID]*process
	runs  map[string]int // executions by operation id
}

// process is one process of a cell.
type process struct {
	id     cells.CellID
	router *cells.Router
	gates  *cells.Gates
	addr   string
	server *http.Server
	conns  sync.Map // net.Conn -> struct{}
	done   chan struct{}
	grpc   *grpc.Server
}

type fleetOptions struct {
	cfg     edge.Config
	routes  edge.Routes // instead of a router over the table
	table   cells.RoutingTable
	handler http.Handler
	grpc    func(p *process) *grpc.Server // serves gRPC instead of HTTP
	cells   []cells.CellID
	fallbck cells.CellID
	mw      []cells.MiddlewareOption
	version string // what the topology says of all cells
}

// versioned is a topology that knows versions.
type versioned struct {
	topology.View
	version string
}

func (v versioned) Version(cells.CellID) string { return v.version }

func quiet() *slog.Logger {
	if os.Getenv("EDGE_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}

func newFleet(t testing.TB, o fleetOptions) *fleet {
	t.Helper()
	f := &fleet{t: t, table: o.table, cells: map[cells.CellID]*process{}, runs: map[string]int{}, topo: topology.NewStatic(nil)}
	if f.table == nil {
		mem := cells.NewMemTable()
		t.Cleanup(func() { mem.Close() })
		f.table = mem
	}
	f.ctrl = cells.NewMoveController(f.table, cells.WithDrainer(f), cells.WithDrainDeadline(5*time.Second), cells.WithControllerLogger(quiet()))
	if o.handler == nil {
		o.handler = http.HandlerFunc(f.service)
	}
	if o.cells == nil {
		o.cells = []cells.CellID{"a", "b"}
	}
	for _, id := range o.cells {
		f.start(id, o)
	}
	cfg := f.config(o.cfg)
	routes := o.routes
	if routes == nil {
		opts := []cells.RouterOption{cells.WithRouterLogger(quiet())}
		if o.fallbck != "" {
			opts = append(opts, cells.WithDefaultCell(o.fallbck))
		}
		if o.cfg.Witness != nil {
			opts = append(opts, cells.WithOnChange(o.cfg.Witness.Route))
		}
		f.view = f.router(opts...)
		routes = f.view
	}
	s, err := edge.New(cfg, routes, versioned{f.topo, o.version})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.edge, f.url, f.admin = s, "http://"+s.Addr(), "http://"+s.AdminAddr()
	f.run(s)
	h1 := &http.Transport{MaxIdleConnsPerHost: 100, DisableCompression: true}
	h2 := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	h2.Protocols.SetUnencryptedHTTP2(true)
	f.http, f.h2 = &http.Client{Transport: h1}, &http.Client{Transport: h2}
	t.Cleanup(func() {
		h1.CloseIdleConnections()
		h2.CloseIdleConnections()
	})
	return f
}

// config fills in what tests do not care about.
func (f *fleet) config(cfg edge.Config) edge.Config {
	cfg.FastPath = cfg.FastPath || os.Getenv("EDGE_FAST_PATH") == "on"
	if cfg.Extractors == nil {
		cfg.Extractors = []extract.Spec{{Header: "X-Tenant"}, {Path: "/t/{tenant}/", Strip: true}, {Host: "{tenant}.localhost"}}
	}
	if cfg.AdmissionKey == nil {
		cfg.AdmissionKey = masterKey
	}
	if cfg.Addr == "" {
		cfg.Addr = "127.0.0.1:0"
	}
	cfg.AdminAddr = "127.0.0.1:0"
	cfg.Log = quiet()
	return cfg
}

// run serves until the test ends.
func (f *fleet) run(s *edge.Server) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Errorf("edge: %v", err)
		}
	})
	f.t.Cleanup(stop)
	return stop
}

func (f *fleet) router(opts ...cells.RouterOption) *cells.Router {
	f.t.Helper()
	r := cells.NewRouter(f.table, opts...)
	if err := r.Start(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { r.Close() })
	return r
}

func (f *fleet) start(id cells.CellID, o fleetOptions) *process {
	f.t.Helper()
	opts := []cells.RouterOption{cells.WithRouterLogger(quiet())}
	if o.fallbck != "" {
		opts = append(opts, cells.WithDefaultCell(o.fallbck))
	}
	p := &process{id: id, router: f.router(opts...), done: make(chan struct{})}
	p.gates = cells.NewGates(id, p.router, cells.WithAdmissionKey(cells.DeriveCellKey(masterKey, id)), cells.WithGateLogger(quiet()))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	p.addr = l.Addr().String()
	if o.grpc != nil {
		p.grpc = o.grpc(p)
		go func() {
			defer close(p.done)
			_ = p.grpc.Serve(l)
		}()
	} else {
		p.server = &http.Server{
			Handler: cells.HTTPMiddleware(p.router, p.gates, o.mw...)(o.handler), Protocols: new(http.Protocols), DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
			ConnState: func(c net.Conn, s http.ConnState) {
				if s == http.StateNew {
					p.conns.Store(c, struct{}{})
				}
			},
		}
		p.server.Protocols.SetHTTP1(true)
		p.server.Protocols.SetUnencryptedHTTP2(true)
		go func() {
			defer close(p.done)
			_ = p.server.Serve(l)
		}()
	}
	f.mu.Lock()
	f.cells[id] = p
	f.mu.Unlock()
	f.topo.Set(id, "http://"+p.addr)
	f.t.Cleanup(p.kill)
	return p
}

// kill ends the process as abruptly as can be done from within.
func (p *process) kill() {
	if p.grpc != nil {
		p.grpc.Stop()
	} else {
		_ = p.server.Close()
		p.conns.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
	}
	<-p.done
}

func (f *fleet) process(id cells.CellID) *process {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cells[id]
}

// Drain implements cells.Drainer for the fleet.
func (f *fleet) Drain(ctx context.Context, route cells.TenantRoute) error {
	return f.process(route.CellID).gates.Drain(ctx, route)
}

// service counts what it executes by the operation's id and answers with where it
// ran and what it got.
func (f *fleet) service(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusTeapot)
		return
	}
	f.ran(r.Header.Get("X-Op"))
	a, _ := cells.AdmissionFromContext(r.Context())
	w.Header().Set("X-Cell", string(a.Cell))
	w.Header().Set("X-Body", strconv.Itoa(len(body)))
	fmt.Fprintf(w, "%s %d %s", a.Cell, a.Epoch, a.Tenant)
}

func (f *fleet) ran(op string) {
	f.mu.Lock()
	f.runs[op]++
	f.mu.Unlock()
}

func (f *fleet) executions(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.runs[op]
}

func (f *fleet) place(tenant cells.TenantID, cell cells.CellID) {
	f.t.Helper()
	if err := f.ctrl.Assign(f.t.Context(), tenant, cell, "test"); err != nil {
		f.t.Fatal(err)
	}
	f.wait(func() bool { return f.view == nil || f.view.Lookup(tenant).Cell == cell }, "the edge sees %s", tenant)
}

func (f *fleet) move(tenant cells.TenantID, from, to cells.CellID) cells.MoveResult {
	f.t.Helper()
	res, err := f.ctrl.Run(f.t.Context(), cells.MovePlan{TenantID: tenant, FromCell: from, ToCell: to, Force: true})
	if err != nil {
		f.t.Errorf("move of %s to %s: %v", tenant, to, err)
	}
	return res
}

// wait waits for a condition.
func (f *fleet) wait(ok func() bool, format string, args ...any) {
	f.t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			f.t.Fatalf("waited in vain: %s\n%s", fmt.Sprintf(format, args...), f.state())
		}
	}
}

// state is what everybody thinks of the tenants, for a test that has failed.
func (f *fleet) state() string {
	var b strings.Builder
	page, err := f.table.List(context.Background(), cells.ListOptions{})
	fmt.Fprintf(&b, "table: %+v %v\n", page, err)
	for _, r := range page.Routes {
		fmt.Fprintf(&b, "edge: %+v\n", f.edge.Explain(r.TenantID))
		f.mu.Lock()
		for id, p := range f.cells {
			fmt.Fprintf(&b, "%s: %+v, %d in flight, %+v\n", id, p.router.Lookup(r.TenantID), p.gates.InFlight(r.TenantID), p.router.Status())
		}
		f.mu.Unlock()
	}
	return b.String()
}

// answer is a response that was read.
type answer struct {
	*http.Response
	body string
}

func (f *fleet) do(c *http.Client, method, path string, body io.Reader, change ...func(*http.Request)) (answer, error) {
	r, err := http.NewRequestWithContext(f.t.Context(), method, f.url+path, body)
	if err != nil {
		return answer{}, err
	}
	for _, ch := range change {
		ch(r)
	}
	resp, err := c.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp, string(b)}, err
}

func (f *fleet) must(c *http.Client, method, path string, body io.Reader, change ...func(*http.Request)) answer {
	f.t.Helper()
	a, err := f.do(c, method, path, body, change...)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func tenant(id string) func(*http.Request) { return header("X-Tenant", id) }

func header(k, v string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Add(k, v) }
}

func (a answer) code() cells.Code { return cells.Code(a.Header.Get(cells.HeaderAnswer)) }

// held returns how many requests wait at the edge.
func (f *fleet) held(tenant cells.TenantID) int { return f.edge.Explain(tenant).Held }

// paused starts a move that stops in the middle of its cut until release is called.
func (f *fleet) paused(id cells.TenantID, from, to cells.CellID) (release func()) {
	f.t.Helper()
	reached, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	ctrl := cells.NewMoveController(f.table, cells.WithDrainer(f), cells.WithDrainDeadline(30*time.Second), cells.WithControllerLogger(quiet()),
		cells.WithStepHook(func(_ context.Context, ev cells.StepEvent) error {
			if ev.Route.State == cells.StateCopying {
				once.Do(func() {
					close(reached)
					<-goOn
				})
			}
			return nil
		}))
	done := make(chan error, 1)
	go func() {
		done <- ctrl.Move(context.WithoutCancel(f.t.Context()), cells.MovePlan{TenantID: id, FromCell: from, ToCell: to, Force: true})
	}()
	select {
	case <-reached:
	case err := <-done:
		f.t.Fatalf("the move ended early: %v", err)
	}
	release = sync.OnceFunc(func() {
		close(goOn)
		if err := <-done; err != nil && !errors.Is(err, cells.ErrRolledBack) {
			f.t.Errorf("move: %v", err)
		}
	})
	f.t.Cleanup(release)
	return release
}

// moving reports whether the edge sees the tenant in a cut.
func (f *fleet) moving(id cells.TenantID) bool {
	r := f.view.Lookup(id).Route
	return r.Moving()
}
