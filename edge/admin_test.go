// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/topology"
	"github.com/cloister-dev/cloister/table/remote"
)

func (f *fleet) explain(query string) (int, edge.Explanation) {
	f.t.Helper()
	resp, err := f.http.Get(f.admin + edge.PathExplain + "?" + query)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	var e edge.Explanation
	if resp.StatusCode == 200 {
		if err := json.NewDecoder(resp.Body).Decode(&e); err != nil {
			f.t.Fatal(err)
		}
	}
	return resp.StatusCode, e
}

func TestExplain(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: edge.Config{Name: "edge-7"}, fallbck: "b"})
	f.place("acme", "a")
	q := func(kv ...string) string {
		v := url.Values{}
		for i := 0; i < len(kv); i += 2 {
			v.Add(kv[i], kv[i+1])
		}
		return v.Encode()
	}
	for name, c := range map[string]struct {
		query     string
		status    int
		cell      cells.CellID
		rule      string
		extractor string
		answer    cells.Code
	}{
		"tenant":      {q("tenant", "acme"), 200, "a", "route", "given", ""},
		"default":     {q("tenant", "anyone"), 200, "b", "default", "given", ""},
		"header":      {q("header", "X-Tenant: acme"), 200, "a", "route", "header", ""},
		"host":        {q("host", "acme.localhost:99"), 200, "a", "route", "host", ""},
		"path":        {q("path", "/t/acme/x?y"), 200, "a", "route", "path", ""},
		"precedence":  {q("path", "/t/other/x", "header", "X-Tenant:acme", "host", "z.localhost"), 200, "a", "route", "header", ""},
		"two headers": {q("header", "X-Tenant:acme", "header", "x-tenant:b"), 200, "", "", "", cells.CodeBadRequest},
		"none":        {q("path", "/"), 200, "", "", "", cells.CodeBadRequest},
		"reserved":    {q("path", "/t/acme/cells/v1"), 200, "", "", "path", cells.CodeNotServed},
		"invalid":     {q("header", "X-Tenant:a b"), 200, "", "", "header", cells.CodeInvalidTenant},
		"bad tenant":  {q("tenant", "a b"), 400, "", "", "", ""},
		"both":        {q("tenant", "a", "path", "/"), 400, "", "", "", ""},
		"unknown key": {q("x", "y"), 400, "", "", "", ""},
		"twice":       {q("host", "y", "host", "z"), 400, "", "", "", ""},
		"relative":    {q("path", "x"), 400, "", "", "", ""},
		"no colon":    {q("header", "x"), 400, "", "", "", ""},
	} {
		status, e := f.explain(c.query)
		if status != c.status || e.Cell != c.cell || e.Rule != c.rule || e.Extractor != c.extractor || e.Answer != c.answer {
			t.Errorf("%s: %d %+v", name, status, e)
		}
		if status == 200 && (e.Router != "edge-7" || e.Revision == 0 || len(e.Extractors) != 3 || e.Source != "table") {
			t.Errorf("%s: %+v", name, e)
		}
	}
	if _, e := f.explain(q("path", "/t/acme/a%2Fb")); e.ForwardPath != "/a%2Fb" || e.ExtractorIndex != 2 || e.Epoch != 1 || e.RouteRevision == 0 || len(e.Upstreams) != 1 || e.State != "ACTIVE" {
		t.Errorf("%+v", e)
	}
	f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	if _, e := f.explain(q("tenant", "acme")); e.Answer != cells.CodeMoving || e.Move == nil || e.Move.Target != "b" || e.State != "COPYING" {
		t.Errorf("%+v", e)
	}
	resp, err := f.http.Get(f.admin + "/cells/v1/routes")
	if err != nil || resp.StatusCode != 404 {
		t.Errorf("%v %v", resp, err)
	}
	resp.Body.Close()
}

func TestReadyAndMetrics(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.must(f.http, "GET", "/", nil, tenant("acme"))
	f.must(f.http, "GET", "/", nil, tenant("nobody"))
	resp, err := f.http.Get(f.admin + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	var r edge.Readiness
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil || !r.Ready || r.Routes.Source != "table" || !r.Topology.Known {
		t.Fatalf("%+v %v", r, err)
	}
	resp.Body.Close()
	f.wait(func() bool { return f.metric(`cell_edge_requests_total{cell="a",outcome="forwarded"}`) == "1" }, "the count")
	for name, want := range map[string]string{
		`cell_edge_requests_total{cell="",outcome="UNKNOWN_TENANT"}`: "1", "cell_edge_held": "0", "cell_edge_routes_stale": "0", "cell_edge_topology_cells": "2",
		"cell_edge_draining": "0", "cell_edge_replay_bytes": "0",
	} {
		if got := f.metric(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// syncBuffer is written to by handlers and read by the test.
type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestAccessLogKeepsSecrets(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	var log syncBuffer
	cfg := f.config(edge.Config{AccessLog: 1})
	cfg.Log = slog.New(slog.NewJSONHandler(&log, nil))
	s, err := edge.New(cfg, f.view, f.topo)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.url = "http://" + s.Addr()
	f.run(s)
	f.must(f.http, "POST", "/path?token=secret1", strings.NewReader("secret2"), tenant("acme"), header("Authorization", "Bearer secret3"), header("Cookie", "secret4"))
	f.wait(func() bool { return strings.Contains(log.String(), `"path":"/path"`) }, "the record")
	got := log.String()
	for _, bad := range []string{"secret", string(masterKey), cells.MintToken(cells.DeriveCellKey(masterKey, "a"), "acme", "a", 1)} {
		if strings.Contains(got, bad) {
			t.Fatalf("%q is in the log: %s", bad, got)
		}
	}
	for _, want := range []string{`"tenant":"acme"`, `"cell":"a"`, `"status":200`, `"outcome":"forwarded"`} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in %s", want, got)
		}
	}
}

func TestTLS(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	cert := httptest.NewUnstartedServer(nil)
	cert.StartTLS()
	defer cert.Close()
	cfg := f.config(edge.Config{TLSAddr: "127.0.0.1:0", TLS: &tls.Config{Certificates: cert.TLS.Certificates}})
	cfg.Addr = "-"
	s, err := edge.New(cfg, f.view, f.topo)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.Addr() != "" {
		t.Fatal("there is a listener without TLS")
	}
	f.url = "https://" + s.TLSAddr()
	f.run(s)
	pool := x509.NewCertPool()
	pool.AddCert(cert.Certificate())
	for proto, major := range map[string]int{"h1": 1, "h2": 2} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "example.com"}, Protocols: new(http.Protocols)}
		tr.Protocols.SetHTTP1(major == 1)
		tr.Protocols.SetHTTP2(major == 2)
		a := f.must(&http.Client{Transport: tr}, "GET", "/x", nil, tenant("acme"))
		tr.CloseIdleConnections()
		var e echoed
		if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.ProtoMajor != major || e.Header.Get("X-Forwarded-Proto") != "https" {
			t.Errorf("%s: %s %s %v", proto, a.Proto, a.body, err)
		}
	}
}

// A process that is reached by TLS: only with a configuration, and only if it is
// who it should be.
func TestTLSToTheCell(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: time.Millisecond}})
	f.place("acme", "a")
	p := f.process("a")
	up := httptest.NewUnstartedServer(cells.HTTPMiddleware(p.router, p.gates)(http.HandlerFunc(f.service)))
	up.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	up.StartTLS()
	defer up.Close()
	pool := x509.NewCertPool()
	pool.AddCert(up.Certificate())
	f.topo.Set("a", up.URL)
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 502 {
		t.Fatal(a.Status)
	}
	for name, want := range map[string]int{"example.com": 200, "other.example": 502} {
		cfg := f.config(edge.Config{ConnectWait: time.Millisecond})
		cfg.Forward.TLS = func(cells.CellID) *tls.Config { return &tls.Config{RootCAs: pool, ServerName: name} }
		s, err := edge.New(cfg, f.view, f.topo)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.url = "http://" + s.Addr()
		f.run(s)
		if a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme")); a.StatusCode != want {
			t.Errorf("%s: %s %s", name, a.Status, a.body)
		}
	}
}

// oneTopology is a directory that says one thing.
type oneTopology struct{ top *api.Topology }

func (o oneTopology) WatchTopology(ctx context.Context, f func(*api.Topology) error) error {
	if o.top == nil {
		return cells.ErrUnavailable
	}
	if err := f(o.top); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// The directory is gone when the edge starts: it serves from what it was told last.
func TestColdStartWithoutDirectory(t *testing.T) {
	mem := cells.NewMemTable()
	t.Cleanup(func() { mem.Close() })
	directory := httptest.NewServer(remote.Handler(mem))
	hc := &http.Client{Transport: &http.Transport{}}
	defer hc.CloseIdleConnections()
	table := remote.NewClient(hc, directory.URL)
	f := newFleet(t, fleetOptions{table: mem})
	f.place("acme", "b")
	state := t.TempDir()
	known := &api.Topology{Directory: "d", Cells: []api.TopologyCell{{ID: "a", Upstreams: f.topo.Upstreams("a")}, {ID: "b", Upstreams: f.topo.Upstreams("b")}}}
	start := func(top *api.Topology) (*edge.Server, func()) {
		r := cells.NewRouter(table, cells.WithRouterLogger(quiet()), cells.WithSnapshot(filepath.Join(state, "routes"), masterKey))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := r.Start(ctx); err != nil {
			t.Fatal(err)
		}
		w, err := topology.Watch(ctx, topology.Config{Source: oneTopology{top}, Snapshot: filepath.Join(state, "topology"), Key: masterKey, Log: quiet()})
		if err != nil {
			t.Fatal(err)
		}
		s, err := edge.New(f.config(holdTime(200*time.Millisecond)), r, w)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.url, f.admin = "http://"+s.Addr(), "http://"+s.AdminAddr()
		stop := f.run(s)
		return s, func() {
			stop()
			w.Close()
			r.Close()
		}
	}
	_, stop := start(known)
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 || a.Header.Get("X-Cell") != "b" {
		t.Fatal(a.Status, a.body)
	}
	stop()
	directory.CloseClientConnections()
	directory.Close()
	_, stop = start(nil)
	defer stop()
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 || a.Header.Get("X-Cell") != "b" {
		t.Fatal(a.Status, a.body)
	}
	resp, err := f.http.Get(f.admin + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 200 || !strings.Contains(string(b), `"source": "snapshot"`) {
		t.Fatalf("%s %s", resp.Status, b)
	}
	// Whether there is such a tenant only the directory knows.
	if a := f.must(f.http, "GET", "/", nil, tenant("nobody")); a.StatusCode != 503 || a.code() != cells.CodeBackendUnavailable {
		t.Fatal(a.Status, a.body)
	}
	// The tenant moves, and the edge cannot learn of it: the gate refuses, and the
	// client is told in time.
	f.move("acme", "b", "a")
	f.wait(func() bool { return f.process("b").router.Lookup("acme").Cell == "a" }, "the old cell knows")
	a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("X-Op", "late"))
	if a.StatusCode != 503 || a.code() != cells.CodeMoving || f.executions("late") != 0 {
		t.Fatal(a.Status, a.body)
	}
}

func TestConfigRefused(t *testing.T) {
	ok := edge.Config{Extractors: []extract.Spec{{Fixed: "a"}}}
	for name, change := range map[string]func(*edge.Config){
		"no extractors": func(c *edge.Config) { c.Extractors = nil },
		"short key":     func(c *edge.Config) { c.AdmissionKey = []byte("short") },
		"no cert":       func(c *edge.Config) { c.TLSAddr = ":0" },
		"negative":      func(c *edge.Config) { c.MaxBody = -1 },
		"negative hold": func(c *edge.Config) { c.Hold.Requests = -1 },
	} {
		cfg := ok
		change(&cfg)
		if _, err := edge.New(cfg, nil, topology.NewStatic(nil)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	f := &fleet{t: t}
	cfg := f.config(edge.Config{})
	cfg.Addr, cfg.AdminAddr = "256.0.0.1:1", "-"
	s, err := edge.New(cfg, nil, topology.NewStatic(nil))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil {
		t.Error("it serves on an address that does not exist")
	}
}
