// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/channeltest"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member"
	tablesqlite "github.com/cloister-dev/cloister/table/sqlite"
)

// servers runs the tests, and ends the database servers that they have started.
type servers struct{ *testing.M }

func (s servers) Run() int { return pgtest.Main(s.M) }

func TestMain(m *testing.M) { goleak.VerifyTestMain(servers{m}) }

var credential, credentialHash = directory.NewOperatorCredential()

// state is what outlives a directory process: the folder with the two databases,
// the fleet's certificates and the cells.
type state struct {
	dir   string
	fleet *channeltest.Fleet
	far   *far
	// trace has what all processes on the state did; it is checked in the end.
	trace *logBuffer
}

// dir is one running directory process.
type dir struct {
	*directory.Server
	t      testing.TB
	state  *state
	cl     *client.Client
	store  *sqlite.Store
	table  *tablesqlite.Table
	url    string // operator
	chURL  string // channel
	stop   sync.Once
	logged *logBuffer
}

func newState(t testing.TB) *state {
	t.Helper()
	s := &state{dir: t.TempDir(), fleet: channeltest.New(t, "test"), far: newFar(), trace: &logBuffer{}}
	t.Cleanup(func() {
		if _, err := s.traced(); err != nil && !t.Failed() {
			t.Errorf("the trace is no behaviour of the protocol: %v", err)
		}
	})
	return s
}

// traced checks what the processes have done so far.
func (s *state) traced() (directory.TraceReport, error) {
	return directory.CheckTrace(strings.NewReader(s.trace.String()))
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// start runs a directory on the state. mod may change its configuration.
func (s *state) start(t testing.TB, mod func(*directory.Config)) *dir {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	store, err := sqlite.Open(ctx, filepath.Join(s.dir, "directory.db"))
	if err != nil {
		t.Fatal(err)
	}
	table, err := tablesqlite.Open(ctx, filepath.Join(s.dir, "routes.db"), tablesqlite.WithPoll(5*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	cfg := directory.Config{
		Name: "d1", Store: store, Table: table, Agents: s.far, OperatorSHA256: []string{credentialHash},
		Channel: s.fleet.Open(t, channel.RoleDirectory, "d1"), ChannelListener: listen(t), OperatorListener: listen(t),
		HeartbeatEvery: 50 * time.Millisecond, Lapse: 400 * time.Millisecond, SyncEvery: 50 * time.Millisecond,
		AliveEvery: 50 * time.Millisecond, SweepEvery: 50 * time.Millisecond, TakeOver: 400 * time.Millisecond,
		DrainDeadline: 30 * time.Second, Trace: s.trace,
	}
	if mod != nil {
		mod(&cfg)
	}
	logs := &logBuffer{}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	srv, err := directory.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Start(ctx); err != nil {
		t.Fatal(err)
	}
	d := &dir{Server: srv, t: t, state: s, store: store, table: table, url: "http://" + cfg.OperatorListener.Addr().String(), logged: logs}
	if cfg.ChannelListener != nil {
		d.chURL = "https://" + cfg.ChannelListener.Addr().String()
	}
	if d.cl, err = client.New(d.url, credential); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.close()
		if t.Failed() {
			t.Logf("log of %s:\n%s", srv.Instance(), tail(logs.String(), 8000))
		}
	})
	return d
}

func tail(s string, n int) string {
	if len(s) > n {
		return s[len(s)-n:]
	}
	return s
}

// close ends the process: what it was doing stays where it is.
func (d *dir) close() {
	d.stop.Do(func() {
		d.t.Helper()
		if err := d.Close(); err != nil {
			d.t.Errorf("close: %v", err)
		}
		d.cl.CloseIdleConnections()
		if err := d.table.Close(); err != nil {
			d.t.Errorf("close table: %v", err)
		}
		if err := d.store.Close(); err != nil {
			d.t.Errorf("close store: %v", err)
		}
	})
}

func (d *dir) cell(id cells.CellID, spec api.CellSpec) api.Cell {
	d.t.Helper()
	c, err := d.cl.PutCell(ctxOf(d.t), id, spec)
	if err != nil {
		d.t.Fatalf("put cell %s: %v", id, err)
	}
	return c
}

func (d *dir) place(tenant cells.TenantID, cell cells.CellID) api.Placement {
	d.t.Helper()
	p, err := d.cl.Place(ctxOf(d.t), api.PlacementRequest{Tenant: tenant, Cell: cell, Actor: "alice"})
	if err != nil {
		d.t.Fatalf("place %s: %v", tenant, err)
	}
	return p
}

func (d *dir) move(tenant cells.TenantID, to cells.CellID) api.Move {
	d.t.Helper()
	m, err := d.cl.Move(ctxOf(d.t), api.MoveRequest{Tenant: tenant, To: to, Actor: "alice"})
	if err != nil {
		d.t.Fatalf("move %s: %v", tenant, err)
	}
	return m
}

func (d *dir) route(tenant cells.TenantID) cells.TenantRoute {
	d.t.Helper()
	r, err := d.table.Get(ctxOf(d.t), tenant)
	if err != nil {
		d.t.Fatalf("route of %s: %v", tenant, err)
	}
	return r
}

func (d *dir) tenants(id cells.CellID) int64 {
	d.t.Helper()
	c, err := d.cl.Cell(ctxOf(d.t), id)
	if err != nil {
		d.t.Fatalf("cell %s: %v", id, err)
	}
	return c.Tenants
}

// settled waits until the move's record satisfies ok and returns it.
func (d *dir) until(id cells.MoveID, what string, ok func(*api.Move) bool) api.Move {
	d.t.Helper()
	var m api.Move
	eventually(d.t, what, func() bool {
		var err error
		if m, err = d.cl.MoveByID(ctxOf(d.t), id); err != nil {
			d.t.Logf("move %s: %v", id, err)
			return false
		}
		return ok(&m)
	})
	return m
}

func (d *dir) untilState(id cells.MoveID, s api.MoveState) api.Move {
	d.t.Helper()
	return d.until(id, "move is "+string(s), func(m *api.Move) bool { return m.State == s && (!s.Final() || len(m.Residue) == 0) })
}

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok() {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("still not: %s", what)
		}
	}
}

// answer is a raw answer of the operator interface.
type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) code() string {
	var p struct{ Code string }
	_ = json.Unmarshal([]byte(a.body), &p)
	return p.Code
}

// raw sends a request as it is; auth "" sends the good credential, "none" none.
func (d *dir) raw(method, path, auth, contentType string, body string) answer {
	d.t.Helper()
	req, err := http.NewRequestWithContext(ctxOf(d.t), method, d.url+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	switch auth {
	case "":
		req.Header.Set("Authorization", "Bearer "+credential)
	case "none":
	default:
		req.Header.Set("Authorization", auth)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: string(b)}
}

// peer is an end of the channel that calls a directory.
func (d *dir) peer(role channel.Role, name string) *http.Client {
	d.t.Helper()
	h := d.state.fleet.Open(d.t, role, name).Client(channel.Identity{Role: channel.RoleDirectory})
	d.t.Cleanup(h.CloseIdleConnections)
	return h
}

func (d *dir) post(h *http.Client, path string, body any) answer {
	d.t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		d.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctxOf(d.t), http.MethodPost, d.chURL+path, bytes.NewReader(b))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	return d.do(h, req)
}

func (d *dir) do(h *http.Client, req *http.Request) answer {
	d.t.Helper()
	resp, err := h.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: string(b)}
}

func heartbeat(cell cells.CellID, instance string, ready bool) member.Heartbeat {
	return member.Heartbeat{Cell: cell, Instance: instance, Version: "v1", PID: 1, Ready: ready,
		ServiceURL: fmt.Sprintf("http://10.0.0.1:80%d", len(instance)), AgentURL: "https://10.0.0.1:9000"}
}

func wantCode(t testing.TB, err error, code cells.Code) *cells.Answer {
	t.Helper()
	a := cells.AnswerOf(err)
	if a == nil || a.Code != code {
		t.Fatalf("got %v, want %s", err, code)
	}
	return a
}
