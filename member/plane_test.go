// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/channeltest"
	"github.com/cloister-dev/cloister/table/remote"
)

var quiet = slog.New(slog.DiscardHandler)

// plane is a control plane with nothing in it but a table and heartbeats.
type plane struct {
	t     testing.TB
	table cells.RoutingTable
	fleet *channeltest.Fleet
	ch    *channel.Channel
	lapse time.Duration
	every time.Duration

	addr   string
	server *http.Server
	routes *remote.Server
	done   chan struct{}

	mu      sync.Mutex
	members map[string]Heartbeat
	seen    map[string]time.Time
	beats   []Heartbeat
	left    []string
	changed chan struct{}
}

func newPlane(t testing.TB) *plane {
	t.Helper()
	p := &plane{t: t, table: cells.NewMemTable(), fleet: channeltest.New(t, "test"), lapse: 10 * time.Second, every: 50 * time.Millisecond,
		members: map[string]Heartbeat{}, seen: map[string]time.Time{}, changed: make(chan struct{})}
	p.ch = p.fleet.Open(t, channel.RoleDirectory, "main")
	p.up()
	t.Cleanup(p.down)
	return p
}

// up starts to listen, at the same address as before.
func (p *plane) up() {
	p.t.Helper()
	addr := p.addr
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.addr = l.Addr().String()
	p.routes = remote.Handler(p.table, remote.ReadOnly(), remote.WithHandlerLogger(quiet))
	mux := http.NewServeMux()
	mux.Handle(PathHeartbeat, p.ch.Require(http.HandlerFunc(p.heartbeat), channel.RoleCell))
	mux.Handle(PathLeave, p.ch.Require(http.HandlerFunc(p.leave), channel.RoleCell))
	mux.Handle(PathRoutes, p.ch.Require(p.routes, channel.RoleCell))
	mux.Handle(PathRoutes+"/", p.ch.Require(p.routes, channel.RoleCell))
	p.server = &http.Server{Handler: mux, TLSConfig: p.ch.Server(), ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: 5 * time.Second}
	done := make(chan struct{})
	p.done = done
	srv := p.server
	go func() { defer close(done); _ = srv.ServeTLS(l, "", "") }()
}

func (p *plane) down() {
	if p.server == nil {
		return
	}
	_ = p.routes.Close()
	_ = p.server.Close()
	<-p.done
	p.server = nil
}

func (p *plane) url() string { return "https://" + p.addr }

func (p *plane) heartbeat(w http.ResponseWriter, r *http.Request) {
	var h Heartbeat
	peer, _ := channel.PeerFrom(r)
	if err := decodeOrder(r.Body, maxOrder, &h); err != nil || string(h.Cell) != peer.Name {
		http.Error(w, "bad heartbeat", http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	p.members[h.Instance], p.seen[h.Instance] = h, time.Now()
	p.beats = append(p.beats, h)
	close(p.changed)
	p.changed = make(chan struct{})
	reply := HeartbeatReply{Every: p.every, Lapse: p.lapse}
	p.mu.Unlock()
	_ = json.NewEncoder(w).Encode(reply)
}

func (p *plane) leave(w http.ResponseWriter, r *http.Request) {
	var h Heartbeat
	if err := decodeOrder(r.Body, maxOrder, &h); err != nil {
		http.Error(w, "bad leave", http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.members, h.Instance)
	p.left = append(p.left, h.Instance)
}

func (p *plane) locate(_ context.Context, cell cells.CellID) ([]Heartbeat, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Heartbeat
	for i, h := range p.members {
		if h.Cell == cell && time.Since(p.seen[i]) < p.lapse {
			out = append(out, h)
		}
	}
	slices.SortFunc(out, func(a, b Heartbeat) int {
		if a.Instance < b.Instance {
			return -1
		}
		return 1
	})
	return out, nil
}

func (p *plane) setLapse(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lapse = d
}

// forget drops a process as if its heartbeats had lapsed.
func (p *plane) forget(instance string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.members, instance)
}

// waitBeat waits for a heartbeat that satisfies ok.
func (p *plane) waitBeat(t testing.TB, what string, ok func(Heartbeat) bool) Heartbeat {
	t.Helper()
	deadline := time.After(time.Minute)
	for from := 0; ; {
		p.mu.Lock()
		for ; from < len(p.beats); from++ {
			if ok(p.beats[from]) {
				h := p.beats[from]
				p.mu.Unlock()
				return h
			}
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("no heartbeat: %s", what)
		}
	}
}

func (p *plane) client(t testing.TB) *AgentClient {
	c := NewAgentClient(p.ch, p.locate)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// put writes a route, whatever was there.
func (p *plane) put(t testing.TB, r cells.TenantRoute) cells.TenantRoute {
	t.Helper()
	var old cells.Revision
	if cur, err := p.table.Get(t.Context(), r.TenantID); err == nil {
		old = cur.Revision
	}
	out, err := p.table.CompareAndSet(t.Context(), old, r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func active(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
	return cells.TenantRoute{TenantID: tenant, State: cells.StateActive, CellID: cell, Epoch: epoch, Floor: epoch}
}

var masterKey = []byte("0123456789abcdef0123456789abcdef")

func writeKey(t testing.TB, cell cells.CellID) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "admission.key")
	if err := os.WriteFile(path, []byte(hex.EncodeToString(cells.DeriveCellKey(masterKey, cell))+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// config is that of a process of the cell.
func (p *plane) config(t testing.TB, cell cells.CellID) Config {
	t.Helper()
	c := p.fleet.Config(t, channel.RoleCell, string(cell))
	return Config{
		Cell: cell, Fleet: "test", DirectoryURL: p.url(), ServiceURL: "http://127.0.0.1:1",
		ChannelCA: c.CAFile, ChannelCert: c.CertFile, ChannelKey: c.KeyFile, ChannelRevoked: c.RevokedFile,
	}
}

// join joins a process to the cell; it leaves at the end of the test.
func (p *plane) join(t testing.TB, cfg Config, opts ...Option) *Member {
	t.Helper()
	opts = append([]Option{WithLogger(quiet), WithHeartbeatEvery(20 * time.Millisecond), WithReconcile(10*time.Millisecond, time.Minute)}, opts...)
	m, err := Join(t.Context(), cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return m
}

func waitReady(t testing.TB, m *Member) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := m.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
}

// ready waits until the member is ready and the control plane knows it.
func (p *plane) ready(t testing.TB, m *Member) {
	t.Helper()
	waitReady(t, m)
	p.waitBeat(t, "ready", func(h Heartbeat) bool { return h.Instance == m.cfg.Instance && h.Ready })
}

// eventually polls ok until it holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("never: %s", what)
		}
	}
}
