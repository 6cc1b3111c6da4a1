// SPDX-License-Identifier: Apache-2.0

package httpapi_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/client"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

func TestMain(m *testing.M) {
	code := pgtest.Main(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const (
	shared      = "app.example.com"
	upstream    = "http://10.0.0.1:8000"
	firstProbe  = "http://10.0.0.1:9000"
	secondProbe = "http://10.0.1.1:9000"
)

// deployments are what the probes answer: the real listeners and their client have
// tests of their own.
type deployments struct {
	mu        sync.Mutex // guards all below
	listeners map[string]probe.Answer
	ports     map[string]stores.DeploymentID
	err       error
	asked     int
}

func (d *deployments) Check(_ context.Context, address string, want probe.Want) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked++
	if d.err != nil {
		return d.err
	}
	a, ok := d.listeners[address]
	if !ok {
		return &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: "nobody listens at " + address}
	}
	return want.Check(a)
}

func (d *deployments) DeploymentID(_ context.Context, address string) (stores.DeploymentID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	id, ok := d.ports[address]
	if !ok {
		return "", &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: "nobody serves at " + address}
	}
	return id, nil
}

func (d *deployments) set(f func(*deployments)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

// outage is a store that can be away.
type outage struct {
	deploy.Store
	away  atomic.Bool
	reads atomic.Int64
}

func (o *outage) err() error {
	if o.away.Load() {
		return fmt.Errorf("%w: the database is away", cells.ErrUnavailable)
	}
	return nil
}

func (o *outage) Read(ctx context.Context) (deploy.View, error) {
	o.reads.Add(1)
	if err := o.err(); err != nil {
		return deploy.View{}, err
	}
	return o.Store.Read(ctx)
}

func (o *outage) Placement(ctx context.Context, t cells.TenantID) (deploy.Placement, error) {
	if err := o.err(); err != nil {
		return deploy.Placement{}, err
	}
	return o.Store.Placement(ctx, t)
}

func (o *outage) Place(ctx context.Context, c deploy.Call, a api.AuditEntry) (deploy.Placement, bool, error) {
	if err := o.err(); err != nil {
		return deploy.Placement{}, false, err
	}
	return o.Store.Place(ctx, c, a)
}

func (o *outage) Change(ctx context.Context, cell cells.CellID, r deploy.Rule, a api.AuditEntry) (deploy.Cell, error) {
	if err := o.err(); err != nil {
		return deploy.Cell{}, err
	}
	return o.Store.Change(ctx, cell, r, a)
}

// router is a router's own paths with their directory.
type router struct {
	*testing.T
	store     *outage
	cells     *deployments
	url       string
	op        *client.Operator
	ids       map[cells.CellID]stores.DeploymentID
	tokens    map[cells.CellID]string
	nonces    map[stores.Kind]stores.Nonce
	operators string
}

func newRouter(t *testing.T, adjust ...func(*httpapi.Config)) *router {
	t.Helper()
	dir, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "directory.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	r := &router{T: t, store: &outage{Store: dir.Deployments()}, ids: map[cells.CellID]stores.DeploymentID{}, tokens: map[cells.CellID]string{},
		nonces: map[stores.Kind]stores.Nonce{"postgres": stores.NewNonce()},
		cells:  &deployments{listeners: map[string]probe.Answer{}, ports: map[string]stores.DeploymentID{}}}
	cred, sum := credential.Operator.New()
	cfg := httpapi.Config{Store: r.store, Audit: dir, OperatorSHA256: []string{sum.String()}, SharedHost: "APP.example.com.", Aliases: []string{"www.example.com"},
		Upstream: upstream, UpstreamProbe: firstProbe, Prober: r.cells}
	for _, a := range adjust {
		a(&cfg)
	}
	r.operators = cred
	r.url = r.serve(cfg)
	if r.op, err = client.New(r.url, cred); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.op.CloseIdleConnections)
	return r
}

func (r *router) serve(cfg httpapi.Config) string {
	r.Helper()
	h, err := httpapi.New(cfg)
	if err != nil {
		r.Fatal(err)
	}
	srv := httptest.NewServer(h)
	r.Cleanup(srv.Close)
	return srv.URL
}

// deploy makes a deployment that answers at a probe address, and its registration.
func (r *router) deploy(name cells.CellID, address string) wire.Register {
	id := stores.NewDeploymentID()
	token, sum := credential.Router.New()
	r.ids[name], r.tokens[name] = id, token
	r.cells.set(func(d *deployments) {
		d.listeners[address] = probe.Answer{Deployment: id, Bucket: "bucket", Prefix: string(name), Stores: []stores.Kind{"postgres"}, Nonces: r.nonces}
		if address == firstProbe {
			d.ports[upstream] = id
		}
	})
	reg := wire.Register{Host: string(name) + ".example.com", Stores: deploy.Stores{DeploymentID: string(id), Bucket: "bucket", Prefix: string(name)},
		CredentialSHA256: sum.String(), ProbeURL: address, Nonces: r.nonces}
	if address == firstProbe {
		reg.Host, reg.ProbeURL = shared, ""
	}
	return reg
}

func (r *router) fingerprint(name cells.CellID, host string, tenants ...cells.TenantID) *tenancy.Fingerprint {
	r.Helper()
	f, err := tenancy.Config{PublicBaseURL: "https://" + host, BearerIssuers: []string{"iss-" + string(name)}, Tenants: tenants,
		DeploymentID: string(r.ids[name]), Bucket: "bucket", Prefix: string(name)}.Fingerprint()
	if err != nil {
		r.Fatal(err)
	}
	return &f
}

func (r *router) must(_ deploy.Cell, err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// two makes a first cell that holds tenants and a second one, both serving.
func (r *router) two(held ...cells.TenantID) {
	r.Helper()
	ctx := r.Context()
	r.must(r.op.Register(ctx, "one", r.deploy("one", firstProbe)))
	r.must(r.op.Attach(ctx, "one", wire.Attach{Current: r.fingerprint("one", shared), KeysFP: "k1", Tenants: held}))
	r.must(r.op.RaiseMode(ctx, "one", wire.Mode{Mode: tenancy.Enforced}))
	r.must(r.op.Serve(ctx, "one", wire.Serve{}))
	r.must(r.op.Register(ctx, "two", r.deploy("two", secondProbe)))
	r.must(r.op.Attach(ctx, "two", wire.Attach{Current: r.fingerprint("two", "two.example.com"), KeysFP: "k2", Upstream: "http://10.0.1.1:8000"}))
	r.must(r.op.Serve(ctx, "two", wire.Serve{}))
}

func (r *router) cell(name cells.CellID, url string) *client.Cell {
	r.Helper()
	c, err := client.NewCell(name, url, r.tokens[name])
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(c.CloseIdleConnections)
	return c
}

// code returns the code of a refusal; "" for none.
func code(err error) cells.Code {
	if a := cells.AnswerOf(err); a != nil {
		return a.Code
	}
	if err != nil {
		return cells.Code(err.Error())
	}
	return ""
}

func (r *router) want(err error, want cells.Code, what string) {
	r.Helper()
	if code(err) != want {
		r.Errorf("%s: %v, want %s", what, err, want)
	}
}

// raw makes a request without a body.
func (r *router) raw(method, path, auth string) *http.Response {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), method, r.url+path, http.NoBody)
	if err != nil {
		r.Fatal(err)
	}
	if auth != "" {
		req.Header.Set("Authorization", auth)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = resp.Body.Close(); http.DefaultTransport.(*http.Transport).CloseIdleConnections() })
	return resp
}

// entry is the audit entry of a change that goes past the handlers.
func entry() api.AuditEntry {
	return api.AuditEntry{At: time.Now(), Peer: "operator", Actor: "test", RequestID: "r", Action: "test"}
}
