// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/client"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	"github.com/cloister-dev/cloister/directory/sqlite"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/open"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

const shared = "app.example.com"

// world is a router's own paths over a real directory, and deployments on Postgres.
type world struct {
	*testing.T
	store deploy.Store
	cfg   httpapi.Config
	op    *client.Operator
	url   string
}

// deployment is one, with its probe listener and its main port.
type deployment struct {
	*world
	name       cells.CellID
	dsn        string
	rows       *tenancypg.Store
	stores     *open.Stores
	id         stores.DeploymentID
	probe      string
	main       string
	token, sum string
	config     tenancy.Config
	host       string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return &world{T: t}
}

// prepared is a world with a first cell that is prepared, and one process of it.
func prepared(t *testing.T) (*world, *deployment) {
	t.Helper()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	_, err := one.prepare()
	w.must(err, "prepare")
	one.process("one-1")
	return w, one
}

// router starts the router in front of the first deployment.
func (w *world) router(first *deployment) {
	w.Helper()
	dir, err := sqlite.Open(w.Context(), filepath.Join(w.TempDir(), "directory.db"))
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = dir.Close() })
	cred, sum := credential.Operator.New()
	w.store = dir.Deployments()
	w.cfg = httpapi.Config{Store: w.store, Audit: dir, OperatorSHA256: []string{sum.String()}, SharedHost: shared, Upstream: first.main, UpstreamProbe: first.probe,
		Prober: probe.NewClient(probe.ClientConfig{}), Cache: 20 * time.Millisecond, Timeout: 10 * time.Second}
	h, err := httpapi.New(w.cfg)
	if err != nil {
		w.Fatal(err)
	}
	srv := httptest.NewServer(h)
	w.Cleanup(srv.Close)
	w.url = srv.URL
	if w.op, err = client.New(srv.URL, cred); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(w.op.CloseIdleConnections)
}

// deployment makes one on a new database with a table of tenants' items.
func (w *world) deployment(name cells.CellID, host string) *deployment {
	w.Helper()
	return w.deploymentAt(name, host, pgtest.DB(w))
}

func (w *world) deploymentAt(name cells.CellID, host, dsn string) *deployment {
	w.Helper()
	d := &deployment{world: w, name: name, host: host, dsn: dsn}
	d.sql(`CREATE TABLE IF NOT EXISTS items (tenant text NOT NULL, v int)`)
	var err error
	if d.rows, err = tenancypg.Open(d.dsn, tenancypg.WithLogger(slog.New(slog.DiscardHandler))); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(d.rows.Close)
	if err := d.rows.Install(w.Context()); err != nil {
		w.Fatal(err)
	}
	var cfg open.Config
	cfg.Postgres.URL, cfg.Postgres.Own = d.dsn, []string{"cell"}
	if d.stores, err = open.Open(w.Context(), cfg); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(d.stores.Close)
	if d.id, err = d.stores.Pair(w.Context()); err != nil {
		w.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.Fatal(err)
	}
	l, err := probe.Start(probe.Config{Listener: ln, Stores: d.stores.Set, Deployment: d.id, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = l.Close() })
	d.probe = "http://" + ln.Addr().String()
	srv := httptest.NewServer(probe.IDHandler(d.id, http.NotFoundHandler()))
	w.Cleanup(srv.Close)
	d.main = srv.URL
	tok, sum := credential.Router.New()
	d.token, d.sum = tok, sum.String()
	d.config = tenancy.Config{PublicBaseURL: "https://" + host, BearerIssuers: []string{"iss-" + string(name)}}
	return d
}

// sql runs a statement as a script does: without the marker.
func (d *deployment) sql(q string, args ...any) {
	d.Helper()
	if err := d.try(q, args...); err != nil {
		d.Fatal(err)
	}
}

func (d *deployment) try(q string, args ...any) error {
	conn, err := pgx.Connect(d.Context(), d.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(d.Context()))
	_, err = conn.Exec(d.Context(), q, args...)
	return err
}

// cell is what a command on the deployment is made of, with short times.
func (d *deployment) cell(adjust ...func(*attach.Cell)) *attach.Cell {
	c := &attach.Cell{Name: d.name, Directory: d.op, Rows: d.rows, Stores: d.stores.Set, Prober: probe.NewClient(probe.ClientConfig{}), Config: d.config,
		Wait: 30 * time.Second, ModeCache: 60 * time.Millisecond, RequestDeadline: 60 * time.Millisecond, Alive: 3 * time.Second, Poll: 20 * time.Millisecond, Actor: "test"}
	for _, a := range adjust {
		a(c)
	}
	return c
}

func (d *deployment) prepare(adjust ...func(*attach.Preparation)) (attach.Prepared, error) {
	p := attach.Preparation{Host: d.host, CredentialSHA256: d.sum}
	if d.host != shared {
		p.ProbeURL = d.probe
	}
	for _, a := range adjust {
		a(&p)
	}
	return d.cell().Prepare(d.Context(), p)
}

// attached runs an attach; the options of all tests allow a database without a standby.
func (d *deployment) attach(adjust ...func(*attach.Cell)) (deploy.Cell, error) {
	return d.cell(adjust...).Attach(d.Context(), attach.Attachment{Upstream: d.main, KeysFP: "keys-" + string(d.name), AllowAsynchronous: true})
}

func (d *deployment) fingerprint() tenancy.Fingerprint {
	d.Helper()
	c := d.config
	c.DeploymentID = string(d.id)
	f, err := c.Fingerprint()
	if err != nil {
		d.Fatal(err)
	}
	return f
}

// process starts a process of the deployment, with its configuration of now.
func (d *deployment) process(instance string, adjust ...func(*checks.Config)) (*checks.Process, func()) {
	d.Helper()
	cfg := checks.Config{Cell: d.name, Store: d.rows, Fingerprint: d.fingerprint(), CacheFor: 50 * time.Millisecond, BeatEvery: 50 * time.Millisecond, Instance: instance,
		Log: slog.New(slog.DiscardHandler), Router: d.client()}
	for _, a := range adjust {
		a(&cfg)
	}
	p, err := checks.New(cfg)
	if err != nil {
		d.Fatal(err)
	}
	if err := p.Start(d.Context()); err != nil {
		d.Fatal(err)
	}
	var once sync.Once
	stop := func() {
		once.Do(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			_ = p.Close(ctx)
		})
	}
	d.Cleanup(stop)
	d.eventually("a heartbeat of "+instance, func() bool {
		live, err := d.rows.Heartbeats(d.Context(), time.Minute)
		for _, h := range live {
			if h.Instance == instance {
				return true
			}
		}
		return err != nil
	})
	return p, stop
}

// client asks the router as the cell's processes do.
func (d *deployment) client() checks.Router {
	d.Helper()
	c, err := client.NewCell(d.name, d.url, d.token)
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(c.CloseIdleConnections)
	return c.Router()
}

func (w *world) eventually(what string, ok func() bool) {
	w.Helper()
	end := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-end:
			w.Fatal("waited in vain: " + what)
		case <-tick.C:
		}
	}
}

func (w *world) must(err error, what string) {
	w.Helper()
	if err != nil {
		w.Fatalf("%s: %v", what, err)
	}
}

// refused wants a refusal whose text has every part.
func (w *world) refused(err error, parts ...string) {
	w.Helper()
	if err == nil {
		w.Errorf("not refused; want %q", parts)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			w.Errorf("refused with %q, which does not say %q", err, p)
		}
	}
}

func (w *world) row(name cells.CellID) deploy.Cell {
	w.Helper()
	v, err := w.store.Read(w.Context())
	w.must(err, "the directory")
	if c := v.Cell(name); c != nil {
		return *c
	}
	return deploy.Cell{}
}

func (w *world) where(tenant cells.TenantID) cells.CellID {
	p, err := w.store.Placement(w.Context(), tenant)
	if err != nil {
		return ""
	}
	return p.Cell
}

func (d *deployment) held() string {
	d.Helper()
	list, err := d.rows.Tenants(d.Context())
	d.must(err, "the tenancy rows")
	return fmt.Sprint(list)
}

func (d *deployment) state() tenancy.Rows {
	d.Helper()
	r, err := d.rows.Read(d.Context())
	d.must(err, "the rows")
	return r
}

// change changes the directory past the router.
func (w *world) change(cell cells.CellID, rule deploy.Rule) {
	w.Helper()
	_, err := w.store.Change(w.Context(), cell, rule, api.AuditEntry{At: time.Now(), Action: "test"})
	w.must(err, "a change of the directory")
}

// first makes a first cell that serves, with the rows of the given tenants.
func (w *world) first(tenants ...string) *deployment {
	w.Helper()
	d := w.deployment("one", shared)
	w.router(d)
	for _, t := range tenants {
		d.sql(`INSERT INTO items VALUES ($1, 1)`, t)
	}
	_, err := d.prepare()
	w.must(err, "prepare")
	d.process("one-1")
	_, err = d.attach()
	w.must(err, "attach")
	return d
}
